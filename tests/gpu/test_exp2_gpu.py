"""The errors of 2^x on a GPU: MUFU's, and the polynomials' as the hosted kernel computes them.

``python -m tests.gpu.test_exp2_gpu`` prints the table of docs/blackwell.md as JSON.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator

import pytest
import torch

from fa_cute.device.packed import COEFFICIENTS
from tests.exp2_kernel import build
from tests.test_exp2 import TABLE

pytestmark = pytest.mark.gpu

NAMES = ("hardware", *(f"degree {degree}" for degree in COEFFICIENTS))
BINADE = 1 << 23  # fp32 of one exponent
ONE, SMALLEST_EXPONENT = 0x3F800000, -31  # 2^x is 1 below 2^-31, to fp32's last bit and beyond


def _binades(signs: tuple[int, ...], to: int) -> Iterator[torch.Tensor]:
    """Every fp32 of magnitudes [2^-31, 2^``to``), an exponent and sign at a time."""
    offsets = torch.arange(BINADE, dtype=torch.int32, device="cuda")
    for exponent in range(SMALLEST_EXPONENT, to):
        magnitudes = (offsets + (ONE + exponent * BINADE)).view(torch.float32)
        yield from (sign * magnitudes for sign in signs)


def _worst(arguments: Iterator[torch.Tensor]) -> dict[str, dict[str, float]]:
    """By name the largest relative error to fp64, in fp32 and after rounding to 16 bits."""
    worst = torch.zeros(3, len(NAMES), dtype=torch.float64, device="cuda")
    for x in arguments:
        found = torch.full((len(NAMES), x.numel()), math.nan, device="cuda")
        build()(x, found)
        right = torch.exp2(x.double())
        for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
            error = ((found.to(dtype).double() - right) / right).abs()
            # fp16 has no such precision below 2^-14.
            normal = right >= (2.0**-14 if dtype is torch.float16 else 0)
            error = torch.where(normal, error, 0.0).amax(1)
            worst[i] = torch.maximum(worst[i], error.nan_to_num(math.inf))
    kinds = zip(("fp32", "bf16", "fp16"), worst.tolist(), strict=True)
    return {kind: dict(zip(NAMES, row, strict=True)) for kind, row in kinds}


@functools.cache
def table() -> dict[str, dict[str, dict[str, float]]]:
    """Errors over [0, 1), as FA4's paper has them, and over [-126, 8), all that a P can be."""

    def wide() -> Iterator[torch.Tensor]:
        for x in _binades((1, -1), 7):
            yield x.clamp(-126, math.nextafter(8, 0))

    return {"[0, 1)": _worst(_binades((1,), 0)), "[-126, 8)": _worst(wide())}


@pytest.mark.parametrize("degree", COEFFICIENTS)
def test_the_polynomials(degree: int) -> None:
    """The bounds of the same graph in torch's arithmetic hold on the GPU."""
    for found in table().values():
        in_fp32, in_bf16 = (found[kind][f"degree {degree}"] for kind in ("fp32", "bf16"))
        most, most_bf16 = TABLE[degree]
        assert 0.8 * most < in_fp32 < most
        assert 3.8e-3 < in_bf16 < most_bf16


def test_the_hardware() -> None:
    """ex2.approx: 1.41e-7 on [0, 1) in FA4's paper; rounding to 16 bits hides what it is."""
    found = table()["[0, 1)"]
    assert 1e-7 < found["fp32"]["hardware"] < 2e-7
    assert 3.8e-3 < found["bf16"]["hardware"] < 3.91e-3


if __name__ == "__main__":
    print(json.dumps(table(), indent=1))
