"""How a kernel is launched: streams, CUDA graphs, repetition, order, a warm process, devices."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

import fa_cute

from .configurations import FAULTS, MODS, PLAIN, WINDOWS
from .judging import DEVICE, Inputs, arguments, call, check, inputs

pytestmark = pytest.mark.gpu
LONG = 200_000_000  # cycles, about a tenth of a second

WARM = """
import sys, torch, fa_cute
q, k, v = torch.randn(3, 1, 200, 1, 64, device="cuda", dtype=torch.float16)
out, lse = fa_cute.attention(q, k, v, causal=True, return_lse=True)
torch.cuda.synchronize()
assert out.isfinite().all() and lse.isfinite().all()
compiler = sorted(name for name in sys.modules if name.split(".")[0] == "cutlass")
assert not compiler, compiler[:5]
print(f"{float(out.double().sum()):.17g}")
"""


def test_another_stream() -> None:
    """Behind a long kernel on a side stream, inputs written on that stream just before."""
    configuration = PLAIN["d128-bf16-causal-4"]
    x = inputs(configuration, (300, 300))
    right = call(configuration, x, causal=True)
    late = Inputs(*(torch.full_like(t, torch.nan) for t in x))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        for to, t in zip(late, x, strict=True):
            to.copy_(t)
        out, lse = call(configuration, late, causal=True)
    assert not side.query(), "the side stream was idle already, so this shows nothing"
    side.synchronize()
    assert torch.equal(out, right[0]) and torch.equal(lse, right[1])


@pytest.mark.parametrize("name", ["alibi", "both"])
def test_graph_follows_its_inputs(name: str) -> None:
    """A replay reads the q, k, v and captured tensors of now, not those of the capture."""
    configuration = MODS[name]
    shape = (300, 300)
    x = inputs(configuration, shape, heads_k=2)
    options = arguments(configuration, x)
    check(configuration, x)  # loads the kernel before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call(configuration, x, **options)
    for kind in ("outliers", "normal"):
        for to, t in zip(x, inputs(configuration, shape, heads_k=2, kind=kind), strict=True):
            to.copy_(t)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        right = call(configuration, x, **options)
        assert torch.equal(out, right[0]) and torch.equal(lse, right[1])


def test_graph_with_a_scalar_on_the_device() -> None:
    """A 0-d tensor on the device is read when the graph replays."""
    configuration = MODS["scalars"]
    x = inputs(configuration, (129, 129))
    factor = torch.full((), 0.5, device=DEVICE)
    shift, period = torch.tensor(1.5), torch.tensor(3)

    def score_mod(score, b, h, q, kv):
        return score * factor + (kv % period) * shift

    right = [call(configuration, x, score_mod=score_mod)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = call(configuration, x, score_mod=score_mod)
    factor.fill_(0.25)
    right.append(call(configuration, x, score_mod=score_mod))
    for value, (wanted, _) in zip((0.5, 0.25), right, strict=True):
        factor.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted)
    assert not torch.equal(right[0][0], right[1][0])


@pytest.mark.parametrize("name", PLAIN)
def test_repeats_bit_for_bit(name: str) -> None:
    """50 calls, other work between them, give one result."""
    configuration = PLAIN[name]
    x = inputs(configuration, (1000, 1000), heads_k=2, kind="outliers")
    noise = torch.randn(2048, 2048, device=DEVICE)
    out, lse = call(configuration, x, causal=configuration.causal)
    differ = torch.zeros((), device=DEVICE, dtype=torch.bool)
    for i in range(50):
        if i % 5 == 0:
            noise = noise @ noise.T * 1e-4
        again, again_lse = call(configuration, x, causal=configuration.causal)
        differ |= (again != out).any() | (again_lse != lse).any()
    assert not differ


@pytest.mark.parametrize("name", ["alibi", "both", "document"])
def test_modified_repeats_bit_for_bit(name: str) -> None:
    configuration = MODS[name]
    x = inputs(configuration, (1000, 1000), heads_k=2)
    options = arguments(configuration, x)
    out, lse = call(configuration, x, **options)
    for _ in range(50):
        again = call(configuration, x, **options)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def test_every_pair_of_calls_in_both_orders() -> None:
    """What ran before a call changes nothing: shapes, windows, scales, mods, strides."""
    plain, window, modified = PLAIN["d64-bf16-full-4"], WINDOWS["both"], MODS["scalars"]
    small, large = inputs(plain, (64, 64)), inputs(plain, (513, 200), batch=3)
    narrow = inputs(window, (300, 300))
    expanded = Inputs(large.q, *(t[:1].expand(t.shape) for t in large[1:]))
    capped = FAULTS["softcap_10"], FAULTS["softcap_50"]
    calls = [
        lambda: call(plain, small),
        lambda: call(plain, large),
        lambda: call(plain, expanded),
        lambda: call(plain, large, scale=0.3),
        lambda: call(window, narrow, window=(20, 5)),
        lambda: call(window, narrow, window=(5, 20)),
        lambda: call(modified, narrow, **arguments(modified, narrow)),
        *(lambda c=c: call(c, narrow, **arguments(c, narrow)) for c in capped),
    ]
    alone = [one() for one in calls]
    for first, second in itertools.permutations(range(len(calls)), 2):
        calls[first]()
        out, lse = calls[second]()
        assert torch.equal(out, alone[second][0]), (first, second)
        assert torch.equal(lse, alone[second][1]), (first, second)


def test_a_warm_process_does_not_import_the_compiler() -> None:
    """Two fresh processes load the kernel from disk, without cutlass, with one result."""
    PLAIN["d64-fp16-causal-1"].compile()
    command = [sys.executable, "-c", "import torch; torch.manual_seed(1)\n" + WARM]
    runs = [subprocess.run(command, capture_output=True, text=True) for _ in range(2)]
    assert all(run.returncode == 0 for run in runs), runs[0].stderr[-2000:]
    assert runs[0].stdout == runs[1].stdout


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current() -> None:
    configuration = PLAIN["d64-bf16-full-4"]
    x = inputs(configuration, (129, 129))
    here = call(configuration, x)
    there = call(configuration, Inputs(*(t.to("cuda:1") for t in x)))
    again = call(configuration, x)
    assert torch.cuda.current_device() == 0 and there[0].device.index == 1
    assert torch.equal(here[0].cpu(), there[0].cpu()) and torch.equal(here[0], again[0])


def test_a_compiled_kernel_is_callable() -> None:
    """What ``fa_cute.compile`` returns runs with its mod fixed, and refuses another's problem."""
    configuration = PLAIN["d128-bf16-full-3"]
    # More keys than few_keys: a call takes the same row.
    x = inputs(configuration, (129, 1100))
    kernel = configuration.compile()
    out, lse = kernel(*x)
    right = call(configuration, x)
    assert torch.equal(out, right[0]) and torch.equal(lse, right[1])
    with pytest.raises(ValueError, match="another kernel"):
        kernel(x.q, *(t.repeat_interleave(3, 2) for t in x[1:]))


def test_gradients_that_are_refused() -> None:
    """Each by name: of ``out=``, of a gradient, of a tensor that is on another device."""
    x = inputs(PLAIN["d64-fp16-full-1"], (64, 64))
    x.q.requires_grad_()
    with pytest.raises(ValueError, match="out= has no gradient"):
        fa_cute.attention(*x, out=torch.empty_like(x.q))
    (dq,) = torch.autograd.grad(fa_cute.attention(*x).sum(), x.q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        dq.sum().backward()
    elsewhere = torch.tensor(3.0, requires_grad=True)
    with pytest.raises(ValueError, match="captured tensor 0 of score_mod,.* is on cpu"):
        fa_cute.attention(*x, score_mod=lambda s, b, h, q, kv: s * elsewhere)
