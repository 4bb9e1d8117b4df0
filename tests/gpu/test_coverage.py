"""Head dims of every row and between them, unequal ones, padding's edges; attention sinks."""

from __future__ import annotations

import math

import pytest
import torch

import fa_cute

from .configurations import HEAD_DIMS, SINKS, WIDE_MODS
from .judging import DEVICE, Inputs, call, check, inputs, judge

pytestmark = pytest.mark.gpu
LENGTHS = ((1, 1), (1000, 1000), (129, 700), (700, 129))
CANARY = 1234.0


@pytest.mark.parametrize("kind", ["normal", "outliers"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", HEAD_DIMS)
def test_head_dims(name: str, lengths: tuple[int, int], kind: str) -> None:
    check(HEAD_DIMS[name], inputs(HEAD_DIMS[name], lengths, heads_k=2, kind=kind))


@pytest.mark.parametrize("name", ["96-full", "192-causal", "256-full", "192-128-causal", "72"])
def test_long(name: str) -> None:
    """Many tiles a CTA and many blocks a tile: every ring wraps, with another stage each tile."""
    configuration = HEAD_DIMS[name]
    check(configuration, inputs(configuration, (4096, 4096), batch=1, heads_k=4))


@pytest.mark.parametrize("name", HEAD_DIMS)
def test_columns_past_the_head_dim(name: str) -> None:
    """q, k, v are slices with NaN beside them; out is one of canaries, which must survive."""
    configuration = HEAD_DIMS[name]
    x = inputs(configuration, (300, 300))

    def beside(t: torch.Tensor, value: float) -> torch.Tensor:
        wide = t.new_full((*t.shape[:3], t.shape[3] + 40), value)
        wide[..., : t.shape[3]] = t
        return wide

    q, k, v = (beside(t, math.nan)[..., : t.shape[3]] for t in x)
    options = {"causal": configuration.causal}
    right, right_lse = call(configuration, x, **options)
    shape = (*x.q.shape[:3], configuration.width_v)
    wide = beside(torch.full(shape, CANARY, device=DEVICE, dtype=x.q.dtype), CANARY)
    out = wide[..., : shape[3]]
    written, lse = call(configuration, Inputs(q, k, v), out=out, **options)
    assert written is out and torch.equal(out, right) and torch.equal(lse, right_lse)
    assert (wide[..., shape[3] :] == CANARY).all()


@pytest.mark.parametrize("name", HEAD_DIMS)
def test_one_key_is_its_value(name: str) -> None:
    """Every column of every row, exactly: no column is taken for another, or left out."""
    configuration = HEAD_DIMS[name]
    x = inputs(configuration, (200, 1), heads_k=2)
    out, _ = call(configuration, x, causal=configuration.causal)
    last = out[:, -1:] if configuration.causal else out
    v = x.v.repeat_interleave(configuration.ratio, 2)
    assert torch.equal(last, v.expand_as(last))


@pytest.mark.parametrize("lengths", [(1000, 1000), (129, 700)], ids=str)
@pytest.mark.parametrize("name", WIDE_MODS)
def test_mods_at_wide_heads(name: str, lengths: tuple[int, int]) -> None:
    configuration = WIDE_MODS[name]
    window = {"window": (100, 70)} if any(configuration.window) else {}
    check(configuration, inputs(configuration, lengths, heads_k=2), **window)


def _sinks(x: Inputs, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A logit a head: weak, ordinary and strong ones in turn."""
    values = torch.tensor([0.5, -3.0, 4.0, 1.0], device=DEVICE)
    return values.repeat(-(-x.q.shape[2] // 4))[: x.q.shape[2]].to(dtype)


@pytest.mark.parametrize("lengths", [(1000, 1000), (129, 700), (700, 129), (1, 1)], ids=str)
@pytest.mark.parametrize("name", SINKS)
def test_sinks(name: str, lengths: tuple[int, int]) -> None:
    """Causal with more queries than keys among them: the first rows see their sink alone."""
    configuration = SINKS[name]
    x = inputs(configuration, lengths, heads_k=2)
    window = {"window": (100, 70)} if any(configuration.window) else {}
    check(configuration, x, sinks=_sinks(x), **window)


@pytest.mark.parametrize("kind", ["outliers", "constant"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinks_of_other_dtypes(dtype: torch.dtype, kind: str) -> None:
    configuration = SINKS["128-causal"]
    x = inputs(configuration, (300, 300), heads_k=2, kind=kind)
    sinks = _sinks(x, dtype)
    out, lse = check(configuration, x, sinks=sinks)
    same = call(configuration, x, causal=True, sinks=sinks.float())
    assert torch.equal(out, same[0]) and torch.equal(lse, same[1])


def test_sinks_may_lie_apart() -> None:
    configuration = SINKS["128-causal"]
    x = inputs(configuration, (300, 300))
    sinks = _sinks(x)
    beside_nan = torch.stack([sinks, torch.full_like(sinks, math.nan)], 1)[:, 0]
    right = call(configuration, x, causal=True, sinks=sinks)
    assert torch.equal(call(configuration, x, causal=True, sinks=beside_nan)[0], right[0])


@pytest.mark.parametrize(
    ("keys", "sink", "out", "lse"),
    [
        (64, 0.0, 64 / 65, math.log(65)),
        (1, 100.0, 0.0, 100.0),
        (1, -100.0, 1.0, 0.0),
        (0, 0.5, 0.0, 0.5),
        (300, -math.inf, 1.0, math.log(300)),
        (1000, 3e4, 0.0, 3e4),
    ],
)
def test_sinks_by_hand(keys: int, sink: float, out: float, lse: float) -> None:
    """Every score is 0, every value 1."""
    q = torch.zeros(1, 130, 1, 64, device=DEVICE, dtype=torch.bfloat16)
    k = torch.zeros(1, keys, 1, 64, device=DEVICE, dtype=torch.bfloat16)
    sinks = torch.tensor([sink], device=DEVICE)
    result, logs = fa_cute.attention(q, k, torch.ones_like(k), sinks=sinks, return_lse=True)
    assert (result.double() - out).abs().max() <= 2**-9
    assert (logs - lse).abs().max() <= 1e-6 * max(1.0, abs(lse))


def test_rows_that_see_their_sink_alone() -> None:
    """Causal, Sq 700 and Sk 129: rows 0 to 570 give 0 and the sink; tiles that see nothing, and one
    of which some rows do."""
    configuration = SINKS["128-causal"]
    x = inputs(configuration, (700, 129), heads_k=2)
    sinks = _sinks(x)
    out, lse = call(configuration, x, causal=True, sinks=sinks)
    assert (out[:, :571] == 0).all()
    assert (lse[..., :571] - sinks[None, :, None]).abs().max() <= 1e-6
    assert (out[:, 571:] != 0).any(-1).all()


def test_sinks_are_read_at_each_call() -> None:
    """The same prepared call with other sinks, and without, in both orders."""
    configuration = SINKS["128-causal"]
    x = inputs(configuration, (300, 300))
    options = [{"sinks": _sinks(x)}, {"sinks": _sinks(x) + 2}, {}]
    first = [call(configuration, x, causal=True, **o) for o in options]
    again = [call(configuration, x, causal=True, **o) for o in reversed(options)][::-1]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    for options_, result in zip(options, first, strict=True):
        judge(configuration, x, {"causal": True} | options_, result)


def test_a_compiled_kernel_takes_sinks() -> None:
    configuration = SINKS["128-causal"]
    kernel = configuration.compile()
    x = inputs(configuration, (300, 300))
    sinks = _sinks(x)
    right = call(configuration, x, causal=True, sinks=sinks)
    out, lse = kernel(*x, sinks=sinks)
    assert torch.equal(out, right[0]) and torch.equal(lse, right[1])
    with pytest.raises(ValueError, match="another kernel: sinks False"):
        kernel(*x)
