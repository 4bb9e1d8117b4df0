"""dQ, dK and dV against the oracle: lengths, masks, ratios, head dims, dtypes, kinds of input."""

from __future__ import annotations

import pytest
import torch

from .backward_judging import Case, check, formula, gradients, judge, tensors

pytestmark = [pytest.mark.gpu]
LENGTHS = (1, 63, 64, 65, 128, 129, 257, 1000, 1025)


@pytest.mark.parametrize("kind", ["normal", "outliers", "constant"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_square(length: int, causal: bool, kind: str) -> None:
    check(Case(lengths=(length, length), causal=causal, kind=kind))


@pytest.mark.parametrize("kind", ["normal", "outliers"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 63, 127, 128, 129, 257, 1025])
def test_square_of_64(length: int, causal: bool, kind: str) -> None:
    """Blocks of 128 queries."""
    check(Case(dims=(64, 64), lengths=(length, length), causal=causal, kind=kind))


@pytest.mark.parametrize("window", [(64, 3), (127, 128), (100, None)], ids=str)
def test_windows_of_64(window: tuple[int | None, int | None]) -> None:
    check(Case(dims=(64, 64), lengths=(500, 700), heads=(4, 2), window=window))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "dims",
    [
        *((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)),
        *((40, 72), (72, 72), (104, 104), (128, 96), (64, 32), (200, 200)),
    ],
    ids=str,
)
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(Case(dims=dims, dtype=dtype, lengths=(257, 257), causal=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 300), (65, 700), (700, 65), (200, 64), (300, 1)], ids=str)
def test_unequal_lengths(lengths: tuple[int, int], causal: bool) -> None:
    check(Case(lengths=lengths, causal=causal))


def test_rows_without_a_key_have_no_gradient() -> None:
    case = Case(dims=(64, 64), lengths=(200, 64), causal=True)
    dq, *_ = gradients(case, tensors(case))
    assert (dq[:, :136] == 0).all()


@pytest.mark.parametrize("lengths", [(500, 500), (129, 700), (700, 129)], ids=str)
@pytest.mark.parametrize("window", [(0, 0), (64, 3), (127, 128), (100, None), (None, 50)], ids=str)
def test_windows(window: tuple[int | None, int | None], lengths: tuple[int, int]) -> None:
    check(Case(lengths=lengths, window=window))


@pytest.mark.parametrize("window", [0, 63, 200])
def test_windows_beside_causal(window: int) -> None:
    check(Case(lengths=(500, 500), causal=True, window=(window, None)))


@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (8, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_ratios(heads: tuple[int, int], causal: bool) -> None:
    check(Case(heads=heads, lengths=(257, 257), causal=causal, kind="outliers"))


@pytest.mark.parametrize("scale", [1e-3, 0.5])
def test_scale(scale: float) -> None:
    check(Case(scale=scale, causal=True))


@pytest.mark.parametrize("causal", [False, True])
def test_gradient_of_lse(causal: bool) -> None:
    check(Case(lse=True, causal=causal))


def test_gradient_of_lse_alone() -> None:
    """One key: dq = scale k, dk = scale sum of q, dv = 0 for a loss that is the sum of lse."""
    case = Case(lengths=(65, 1), lse=True)
    x = tensors(case)
    x = x._replace(dout=torch.zeros_like(x.dout), dlse=torch.ones_like(x.dlse))
    dq, dk, dv = gradients(case, x)
    right = formula(case, x, torch.float64)
    assert (dv == 0).all()
    assert torch.allclose(dq.double(), right[0], rtol=2**-7, atol=1e-6)
    assert torch.allclose(dk.double(), right[1], rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_layouts_of_dout(layout: str) -> None:
    case = Case()
    x = tensors(case)
    dout = x.dout.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    if layout == "expanded":
        dout = x.dout[:1, :1, :1, :1].expand(x.dout.shape)
    found = gradients(case, x._replace(dout=dout))
    same = gradients(case, x._replace(dout=dout.contiguous()))
    for a, b in zip(found[1:], same[1:], strict=True):
        assert torch.equal(a, b)
    assert (found[0].float() - same[0].float()).abs().max() <= 2**-7 * same[0].abs().max()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "dims", [(192, 128), (192, 192), (256, 256), (160, 160), (136, 40), (64, 256)], ids=str
)
def test_wide_heads(dims: tuple[int, int], causal: bool) -> None:
    check(Case(dims=dims, lengths=(300, 300), causal=causal, heads=(4, 2)))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("lengths", [(1000, 1000), (129, 700), (700, 129)], ids=str)
@pytest.mark.parametrize("mask", [(False, None), (True, None), (False, (64, 3))], ids=str)
def test_deterministic(
    mask: tuple[bool, tuple[int, int] | None], lengths: tuple[int, int], dims: tuple[int, int]
) -> None:
    """100 repeats, bit for bit, on memory that is dirty."""
    causal, window = mask
    case = Case(
        dims=dims, lengths=lengths, heads=(4, 2), causal=causal, window=window, deterministic=True
    )
    x = tensors(case)
    first = gradients(case, x)
    judge(case, x, first)
    for _ in range(100):
        again = gradients(case, x)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_sums_that_tiles_zero(dims: tuple[int, int], causal: bool) -> None:
    """More heads than the pass before zeroes the sums of, on memory that is dirty."""
    case = Case(dims=dims, lengths=(257, 257), heads=(70, 70), batch=3, causal=causal)
    x = tensors(case)
    for _ in range(3):
        torch.full((1 << 27,), float("nan"), device="cuda")
        judge(case, x, gradients(case, x))
