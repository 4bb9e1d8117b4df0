"""2^x on Hopper's FMA pipes: the polynomial in fp32, step by step as the kernel computes it."""

from __future__ import annotations

import math

import pytest
import torch
from fa_cute.variants.softcap import softcap

import fa_cute
from fa_cute.configuration import Configuration
from fa_cute.device import softmax
from fa_cute.device.packed import MANTISSA, ROUNDER, SMALLEST
from fa_cute.device.polynomial import COEFFICIENTS, LARGEST, ONE, chosen


def emulated(x: torch.Tensor) -> torch.Tensor:
    """``polynomial.exp2`` in torch's fp32; fma as one rounding."""
    x = torch.minimum(torch.maximum(x, torch.tensor(SMALLEST)), torch.tensor(LARGEST))
    shifted = x + ROUNDER
    f = x - (shifted - ROUNDER)
    power = torch.full_like(x, COEFFICIENTS[-1])
    for coefficient in (*COEFFICIENTS[-2::-1], 1.0):
        constant = torch.tensor(coefficient).double()
        power = (power.double() * f.double() + constant).float()
    scale = (shifted.view(torch.int32) << MANTISSA) + ONE
    return power * scale.view(torch.float32)


def test_relative_error() -> None:
    """1.02e-4 at most, and no less than the polynomial's own: what P loses by rounding hides it."""
    x = torch.cat((torch.linspace(-126, 127, 2_000_003), torch.linspace(-0.5, 0.5, 500_001)))
    right = torch.exp2(x.double())
    error = ((emulated(x).double() - right) / right).abs().max().item()
    rounded = ((emulated(x).bfloat16().double() - right) / right).abs().max().item()
    assert 0.95e-4 < error < 1.02e-4
    assert 3.8e-3 < rounded < 3.95e-3


def test_the_ends() -> None:
    """What is hidden weighs nothing, what is far above is large, and a NaN stays one."""
    found = emulated(torch.tensor([-math.inf, -1e30, -127.0, 127.0, 1e30, math.inf, math.nan]))
    assert (found[:3] == 0).all() and (found[3:6] == 2.0**127).all() and found[6].isnan()


def test_pieces_are_spread() -> None:
    assert chosen(5, 1) == {2} and chosen(8, 4) == {1, 3, 5, 7} and chosen(8, 3) == {1, 4, 6}
    assert chosen(5, 0) == set() and chosen(4, 4) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("mod", "return_lse", "served"),
    [
        (softcap(30.0), False, True),
        (softcap(50.0), False, True),  # not bounded
        (softcap(30.0), True, False),
        (lambda s, b, h, q, kv: s + 0.5 * (kv - q), False, False),
        (lambda s, b, h, q, kv: s * torch.exp2(-(h + 1.0)), False, False),  # once a tile
        (lambda s, b, h, q, kv: torch.clamp(s, -9.0, 9.0), False, False),
        (lambda s, b, h, q, kv: s / 3.0, False, False),  # a product
        (lambda s, b, h, q, kv: s / (1.0 + h), False, False),
        (lambda s, b, h, q, kv: s**2, False, False),
        (lambda s, b, h, q, kv: s**-2, False, True),
        (lambda s, b, h, q, kv: s / (1.0 + s.abs()), False, True),
        (lambda s, b, h, q, kv: s.abs() ** 1.5, False, True),
        (None, False, False),
    ],
)
def test_which_kernels(mod: object, return_lse: bool, served: bool) -> None:
    options = {"dtype": "bfloat16", "return_lse": return_lse, "target": "sm_90a"}
    plan, _ = Configuration(head_dim=64, score_mod=mod, **options).plan()
    assert (softmax.How.of(plan).emulated > 0) == served


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("cap", [30.0, 50.0])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_no_spills(head_dim: int, cap: float, dtype: str) -> None:
    """Of the kernels that take them: bounded and not, with a causal bound and sinks."""
    kernel = fa_cute.compile(
        head_dim=head_dim,
        dtype=dtype,
        causal=True,
        sinks=True,
        score_mod=softcap(cap),
        target="sm_90a",
    )
    assert softmax.How.of(kernel.plan).emulated > 0
    assert kernel.resources.spill_bytes == 0 and kernel.resources.serialised == 0
