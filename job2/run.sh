O="--rounds 3 --batch-ms 5"
timeout 60 python3 -m bench.backward --dims=128,256,64 --lengths=8192,1024 --masks=full,causal --peers ours,deterministic $O --out $R/deterministic.json 2>&1 | tail -32
timeout 25 python3 -m bench.backward --dims=128 --lengths=8192,16384 --masks=window,causal --peers ours,deterministic,fa4 $O --out $R/window.json 2>&1 | tail -12
timeout 40 python3 -m bench.backward --dims=128 --masks=full,causal --variants=plain,alibi,softcap,t5 --peers ours $O --out $R/mods.json 2>&1 | tail -22
timeout 40 python3 -m bench.backward --dims=128,256 --lengths=4096,16384 --masks=full,causal --peers ours,deterministic $O --out $R/deterministic-more.json 2>&1 | tail -22
timeout 15 python3 -m bench.passes --dims=128 --masks=window,causal --peers ours,deterministic --out $R/passes.json 2>&1 | tail -12
