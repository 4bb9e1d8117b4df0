"""The emulated 2^x: its own polynomial in fp32, step by step as the kernel computes it."""

from __future__ import annotations

import pytest
import torch

from fa_cute.device.packed import COEFFICIENTS, MANTISSA, ROUNDER, SMALLEST


def emulated(x: torch.Tensor, degree: int) -> torch.Tensor:
    """``Pairs.exp2`` in torch's fp32, rounding down at ``ROUNDER`` by fp64; fma as one rounding."""
    x = torch.maximum(x, torch.tensor(SMALLEST))
    shifted = (torch.floor(x.double()) + ROUNDER).float()
    f = x - (shifted - ROUNDER)
    *lower, highest = (1.0, *COEFFICIENTS[degree])
    p = torch.full_like(x, highest)
    for coefficient in reversed(lower):
        p = (p.double() * f.double() + torch.tensor(coefficient).double()).float()
    words = p.view(torch.int32) + (shifted.view(torch.int32) << MANTISSA)
    return words.view(torch.float32)


def arguments() -> torch.Tensor:
    """Every fp32 of [1/2, 1), a fine grid of [-126, 8] and what lies round integers."""
    half = torch.arange(0x3F000000, 0x3F800000, 7, dtype=torch.int32).view(torch.float32)
    grid = torch.linspace(-126, 8, 2_000_003)
    whole = torch.arange(-126.0, 9.0)
    near = torch.nextafter(whole, torch.tensor(-1000.0))
    return torch.cat((half, half - 1, grid, whole, near[1:]))


# Largest relative error to fp64: of the polynomial in fp32, and after P is rounded to bf16.
TABLE = {3: (8.77e-5, 3.95e-3), 4: (3.06e-6, 3.91e-3), 5: (1.7e-7, 3.91e-3)}


@pytest.mark.parametrize("degree", COEFFICIENTS)
def test_relative_error(degree: int) -> None:
    x = arguments()
    right = torch.exp2(x.double())
    found = emulated(x, degree)
    in_fp32 = ((found.double() - right) / right).abs().max().item()
    in_bf16 = ((found.bfloat16().double() - right) / right).abs().max().item()
    most, most_bf16 = TABLE[degree]
    # The bound holds, and is no wider than it must be.
    assert 0.9 * most < in_fp32 < most, in_fp32
    assert 3.8e-3 < in_bf16 < most_bf16, in_bf16


@pytest.mark.parametrize("degree", COEFFICIENTS)
def test_what_is_hidden_has_no_weight(degree: int) -> None:
    x = torch.tensor([-torch.inf, -1e30, -128.0, -127.0])
    assert torch.equal(emulated(x, degree), torch.zeros(4))


@pytest.mark.parametrize("degree", COEFFICIENTS)
def test_powers_of_two_are_exact(degree: int) -> None:
    x = torch.arange(-126.0, 9.0)
    assert torch.equal(emulated(x, degree), torch.exp2(x.double()).float())
