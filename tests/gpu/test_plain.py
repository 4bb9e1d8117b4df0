"""Plain attention against the oracle: lengths, masks, ratios, head dims, dtypes, kinds of input."""

from __future__ import annotations

import math

import pytest
import torch

import fa_cute

from .configurations import PLAIN, RATIOS, WINDOWS, WITHOUT_LSE
from .judging import KINDS, Inputs, arguments, call, check, inputs

pytestmark = pytest.mark.gpu
LENGTHS = (1, 63, 128, 129, 1000, 4096, 8192)
UNEQUAL = ((1, 300), (65, 1000), (129, 769), (1000, 129), (300, 100), (64, 8192), (2046, 65))


def _sized(name: str, lengths: tuple[int, int], kind: str) -> Inputs:
    configuration = PLAIN[name]
    large = max(lengths) > 2000
    heads = 1 if large else 2
    return inputs(configuration, lengths, batch=1 if large else 2, heads_k=heads, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", PLAIN)
def test_square(name: str, length: int, kind: str) -> None:
    check(PLAIN[name], _sized(name, (length, length), kind))


@pytest.mark.parametrize("lengths", UNEQUAL, ids=str)
@pytest.mark.parametrize("name", ["d128-bf16-full-3", "d128-bf16-causal-4", "d64-bf16-causal-3"])
def test_unequal_lengths(name: str, lengths: tuple[int, int]) -> None:
    """Causal with Sq > Sk among them: its first rows see nothing."""
    check(PLAIN[name], _sized(name, lengths, "outliers"))


@pytest.mark.parametrize("length", [1, 65, 512])
@pytest.mark.parametrize("ratio", RATIOS)
def test_ratios_that_divide_no_tile(ratio: str, length: int) -> None:
    check(RATIOS[ratio], inputs(RATIOS[ratio], (length, length), batch=1, heads_k=2))


@pytest.mark.parametrize("name", WITHOUT_LSE)
def test_without_lse(name: str) -> None:
    check(WITHOUT_LSE[name], inputs(WITHOUT_LSE[name], (1000, 1000), heads_k=2))


def test_lse_changes_no_more_than_roundings() -> None:
    """With lse every maximum is sought, without it most are presumed: P is rounded elsewhere.

    Each kernel rounds each P by at most 2^-9 of it, and its output by 2^-9; what is left to sums in
    fp32 is far below 2^-12.
    """
    configuration = WITHOUT_LSE["d128-causal"]
    x = inputs(configuration, (1000, 1000))
    out = fa_cute.attention(*x, causal=True).double()
    other = fa_cute.attention(*x, causal=True, return_lse=True)[0].double()
    weighed = fa_cute.reference.attention(x.q, x.k, x.v.abs(), causal=True)
    bound = (2**-8 + 2**-12) * (weighed + other.abs())
    assert ((out - other).abs() <= bound).all()


@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.5, -0.125])
def test_scale(scale: float) -> None:
    configuration = PLAIN["d128-bf16-causal-1"]
    x = inputs(configuration, (300, 300))
    if scale == 0.0:
        out, lse = call(configuration, x, causal=True, scale=0.0)
        rows = torch.arange(1, 301, device=out.device)
        mean = x.v.double().cumsum(1) / rows[:, None, None]
        assert (out.double() - mean).abs().max() <= 2**-8 * mean.abs().max()
        assert (lse - rows.log()).abs().max() < 1e-5
    else:
        check(configuration, x, scale=scale)


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("lengths", [(1000, 1000), (129, 700), (700, 129), (1, 300)], ids=str)
@pytest.mark.parametrize("window", [(0, 0), (64, 3), (127, 128), (300, 700)], ids=str)
def test_windows(name: str, lengths: tuple[int, int], window: tuple[int, int]) -> None:
    configuration = WINDOWS[name]
    left, right = configuration.window
    bounds = (window[0] if left else None, window[1] if right else None)
    check(configuration, inputs(configuration, lengths, heads_k=2), window=bounds)


def test_long_windows() -> None:
    configuration = WINDOWS["causal-left"]
    check(configuration, inputs(configuration, (8192, 8192), batch=1), window=(1024, None))


@pytest.mark.parametrize("window", [None, (-1, 0), (None, 0), (-1, -1), (None, None)], ids=str)
def test_window_sentinels_beside_causal(window: tuple | None) -> None:
    """-1 and None are unlimited: each is plain causal, bit for bit."""
    configuration = PLAIN["d128-bf16-causal-1"]
    x = inputs(configuration, (1000, 1000))
    plain = call(configuration, x, causal=True)
    same = call(configuration, x, causal=True, window=window)
    assert torch.equal(plain[0], same[0]) and torch.equal(plain[1], same[1])


def test_window_of_one_key() -> None:
    """window (0, 0) on equal lengths: each row sees its own key."""
    configuration = WINDOWS["both"]
    x = inputs(configuration, (1000, 1000), heads_k=2)
    out, _ = call(configuration, x, window=(0, 0))
    assert torch.equal(out, x.v)


@pytest.mark.parametrize("right", [300, 2**31 - 1])
def test_window_that_covers_everything(right: int) -> None:
    """A right bound past the keys, Sq > Sk: all keys, and no overflow of q + right."""
    configuration = WINDOWS["right"]
    check(configuration, inputs(configuration, (300, 100)), window=(None, right))


def test_causal_rows_without_a_key() -> None:
    """Sq 200, Sk 64: rows 0 to 135 see nothing, row 136 sees key 0, row 199 sees all."""
    configuration = PLAIN["d64-fp16-causal-1"]
    x = inputs(configuration, (200, 64), batch=1)
    out, lse = check(configuration, x)
    assert (out[:, :136] == 0).all() and (lse[..., :136] == -math.inf).all()
    assert torch.equal(out[:, 136], x.v[:, 0])


@pytest.mark.parametrize("shape", [(2, 0, 64), (0, 64, 64), (2, 64, 0), (1, 1, 0), (1, 256, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_empty(shape: tuple[int, int, int], causal: bool) -> None:
    batch, seqlen_q, seqlen_k = shape
    q = torch.randn(batch, seqlen_q, 2, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, batch, seqlen_k, 2, 128, device="cuda", dtype=torch.bfloat16)
    out, lse = fa_cute.attention(q, k, v, causal=causal, return_lse=True)
    torch.cuda.synchronize()
    assert out.shape == q.shape and (out == 0).all()
    assert lse.shape == (batch, 2, seqlen_q) and (lse == -math.inf).all()


def test_arguments_reach_the_kernel() -> None:
    """Every option of a call matters, in one process, in both orders."""
    configuration = PLAIN["d128-bf16-causal-1"]
    x = inputs(configuration, (300, 300))
    calls = [
        arguments(configuration, x),
        arguments(configuration, x, scale=0.3),
        arguments(configuration, x, window=(20, None)),
    ]
    first = [call(configuration, x, **options)[0] for options in calls]
    again = [call(configuration, x, **options)[0] for options in reversed(calls)][::-1]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])
