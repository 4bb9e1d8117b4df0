"""The emitter on a GPU against torch: every operation, operand and level, on tiles of scores."""

from __future__ import annotations

import math

import pytest
import torch

from tests.modifier_cases import BATCH, HEADS, SHAPE, kernels
from tests.tile_kernel import ROWS, build, expected

pytestmark = pytest.mark.gpu

SCALE = 0.37
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.5, 1e30, -1e30)
PLANTED = 300  # elements of each special value


def _scores(tile: tuple[int, int]) -> torch.Tensor:
    """Random scores and special ones, (B, H, Sq, Sk) padded to tiles; NaN past Sq and Sk."""
    q, kv = SHAPE
    padded = (-(-q // tile[0]) * tile[0], -(-kv // tile[1]) * tile[1])
    generator = torch.Generator().manual_seed(7)
    scores = torch.randn((BATCH, HEADS, *padded), generator=generator) * 8
    places = torch.randperm(scores.numel(), generator=generator)
    for value in SPECIAL:
        here, places = places[:PLANTED], places[PLANTED:]
        scores.view(-1)[here] = value
    scores[..., q:, :] = torch.nan
    scores[..., kv:] = torch.nan
    return scores.cuda()


@pytest.mark.parametrize("name", kernels("cpu"))
def test_agrees_with_torch(name: str) -> None:
    chosen, tile_n, transposed = kernels("cuda")[name]
    scores = _scores((tile_n, ROWS) if transposed else (ROWS, tile_n))
    q, kv = SHAPE
    out = build(chosen, tile_n, transposed=transposed)(scores, SCALE)[..., :q, :kv]
    faults = []
    for case, found in zip(chosen, out, strict=True):
        want = expected(case, scores[..., :q, :kv], SCALE).to(torch.float32)
        close = torch.isclose(found, want, rtol=case.rtol, atol=case.atol, equal_nan=True)
        inputs = scores[..., :q, :kv] * SCALE
        beyond = inputs.isfinite() & (inputs.abs() > case.domain)
        close |= beyond & found.isfinite()
        if not close.all():
            first = tuple((~close).nonzero()[0].tolist())
            faults.append(
                f"{case.name}: {int((~close).sum())} of {close.numel()} wrong; at {first} score "
                f"{scores[first] * SCALE:.9g} gave {found[first]:.9g}, torch {want[first]:.9g}"
            )
    assert not faults, "\n".join(faults)
