python3 -m bench.backward --dims=128,256,64 --lengths=1024,8192 --masks=full,causal --peers ours,deterministic --compile-only --prime 8 2>&1 | tail -2 &
python3 -m bench.backward --dims=128 --masks=window --peers ours,deterministic,fa4 --compile-only --prime 2 2>&1 | tail -2 &
python3 -m bench.backward --dims=128 --masks=full,causal --variants=plain,alibi,softcap,t5 --peers ours --compile-only --prime 3 2>&1 | tail -2 &
wait
