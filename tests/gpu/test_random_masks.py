"""Random masks: with q = 0 a row's lse is the logarithm of how many keys it sees, to the key.

So a tile that is left out, or goes without its mask, shows however a kernel learned what to visit:
from ranges, from lists, or by evaluating the mask on all that bounds leave; in the backward too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fa_cute
from tests.random_masks import BATCH, HEADS, draw, elements

pytestmark = pytest.mark.gpu

# Masks with ranges that tell them exactly, with ranges that hold more, and with none; of each some
# that have several operations and show 2 to 98 % of all.
EXACT = (138, 188, 229, 270, 272, 278, 340, 408, 421, 480, 662, 681)
LOOSE = (5, 6, 12, 20, 23, 25, 35, 36, 37, 42)
UNBOUNDED = (2, 9, 10, 14, 26, 29)
SEEDS = EXACT + LOOSE + UNBOUNDED
LENGTHS = ((333, 701), (1, 1500), (1500, 1201))
BOUNDS = ({}, {"causal": True}, {"window": (400, 100)})
HEADS_K, DIM = 2, 64


def _given(way: str, mask_mod: Callable, lengths: tuple[int, int]) -> dict[str, Any]:
    """The mask as an argument of ``attention``."""
    if way == "score_mod":
        hidden = torch.tensor(-math.inf)
        return {"score_mod": lambda s, b, h, q, kv: torch.where(mask_mod(b, h, q, kv), s, hidden)}
    if way == "planned":
        sizes = (BATCH, HEADS, *lengths)
        return {"mask_mod": fa_cute.plan_mask(mask_mod, *sizes, head_dim=DIM, device="cuda")}
    return {"mask_mod": mask_mod}


def _seen(mask_mod: Callable, lengths: tuple[int, int], bounds: dict[str, Any]) -> torch.Tensor:
    """Which scores count, by torch on every element."""
    seen = elements(mask_mod, (BATCH, HEADS, *lengths), "cuda")
    q, kv = (torch.arange(length, device="cuda") for length in lengths)
    ahead = kv - q[:, None] - (lengths[1] - lengths[0])
    left, right = bounds.get("window", (None, None))
    right = 0 if bounds.get("causal") else right
    seen = seen if left is None else seen & (ahead >= -left)
    return seen if right is None else seen & (ahead <= right)


def _tensors(seed: int, lengths: tuple[int, int]) -> list[torch.Tensor]:
    """q = 0, k and v random."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = ((lengths[0], HEADS), (lengths[1], HEADS_K), (lengths[1], HEADS_K))
    q, k, v = (
        torch.randn(BATCH, *shape, DIM, generator=generator, device="cuda") for shape in shapes
    )
    return [x.bfloat16() for x in (q * 0, k, v)]


@pytest.mark.parametrize("way", ["mask_mod", "planned", "score_mod"])
@pytest.mark.parametrize("seed", SEEDS)
def test_keys_are_counted(seed: int, way: str) -> None:
    drawn, bounds = draw(seed, "cuda"), BOUNDS[seed % 3]
    for lengths in LENGTHS:
        q, k, v = _tensors(seed, lengths)
        given = _given(way, drawn.mask_mod, lengths)
        out, lse = fa_cute.attention(q, k, v, return_lse=True, **given, **bounds)
        seen = _seen(drawn.mask_mod, lengths, bounds)
        count = seen.sum(3)
        wrong = (lse - count.log()).abs().nan_to_num(0) > 3e-5
        assert not wrong.any(), (drawn.source, lengths, wrong.nonzero()[:4])
        assert torch.equal(lse == -math.inf, count == 0), (drawn.source, lengths)
        share = (seen / count.clamp(min=1)[..., None]).float()
        right = share @ v.float().repeat_interleave(HEADS // HEADS_K, 2).transpose(1, 2)
        error = (out.transpose(1, 2).float() - right).abs().max().item()
        assert error < 0.02, (drawn.source, lengths, error)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("way", ["mask_mod", "planned", "score_mod"])
@pytest.mark.parametrize("seed", EXACT[2:8] + LOOSE[:4] + UNBOUNDED[:2])
def test_gradients(seed: int, way: str, deterministic: bool) -> None:
    """dq and dv of a sum with random weights, beside fp64; dk is 0, because q is."""
    drawn, bounds, lengths = draw(seed, "cuda"), BOUNDS[seed % 3], LENGTHS[seed % 2 * 2]
    leaves = [x.requires_grad_() for x in _tensors(seed, lengths)]
    given = _given(way, drawn.mask_mod, lengths)
    out = fa_cute.attention(*leaves, deterministic=deterministic, **given, **bounds)
    weight = torch.randn(out.shape, device="cuda").bfloat16()
    found = torch.autograd.grad(out, leaves, weight)
    q, k, v = (x.detach().double().requires_grad_() for x in leaves)
    far = [x.transpose(1, 2).repeat_interleave(HEADS // x.shape[2], 1) for x in (q, k, v)]
    seen = _seen(drawn.mask_mod, lengths, bounds)
    scores = (far[0] @ far[1].transpose(2, 3) * DIM**-0.5).masked_fill(~seen, -math.inf)
    shares = scores.softmax(3).masked_fill(~seen, 0)
    right = torch.autograd.grad((shares @ far[2]).transpose(1, 2), (q, k, v), weight.double())
    for name, got, want in zip(("dq", "dk", "dv"), found, right, strict=True):
        error = (got.double() - want).abs().max() / want.abs().max().clamp(min=1e-3)
        assert error < 0.02, (name, drawn.source, lengths, error.item())
