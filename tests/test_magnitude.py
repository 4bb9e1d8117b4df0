"""How large a score_mod's results can be, and which kernels rest on it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from fa_cute.variants.softcap import softcap

from fa_cute.configuration import Configuration
from fa_cute.device import softmax
from fa_cute.mods.magnitude import largest
from fa_cute.mods.trace import trace_score_mod

BOUNDS: dict[str, tuple[Callable, float]] = {
    "softcap": (softcap(30.0), 30.0),
    "softcap, then half": (lambda s, b, h, q, kv: -softcap(30.0)(s, b, h, q, kv) * 0.5, 15.0),
    "sum": (lambda s, b, h, q, kv: 2 * torch.tanh(s) + torch.sin(s) - 1.5, 4.5),
    "hidden": (lambda s, b, h, q, kv: torch.where(q >= kv, torch.tanh(s), -math.inf), 1.0),
    "raised": (lambda s, b, h, q, kv: torch.where(q >= kv, torch.tanh(s), math.inf), math.inf),
    "nothing of it": (lambda s, b, h, q, kv: 0.0 * s, math.inf),
    "alibi": (lambda s, b, h, q, kv: s + 0.5 * (kv - q), math.inf),
    "position": (lambda s, b, h, q, kv: torch.tanh(s) + kv, math.inf),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds(name: str) -> None:
    score_mod, bound = BOUNDS[name]
    assert largest(trace_score_mod(score_mod).graph) == bound


@pytest.mark.parametrize(
    ("cap", "dtype", "return_lse", "served"),
    [
        (30.0, "bfloat16", False, True),
        (30.0, "bfloat16", True, False),
        (30.0, "float16", False, False),
        (50.0, "bfloat16", False, False),
    ],
)
def test_kernels(cap: float, dtype: str, return_lse: bool, served: bool) -> None:
    """2^44 is what P may be; gradients need maxima, and fp16 has not the range."""
    options = {"dtype": dtype, "return_lse": return_lse, "target": "sm_90a"}
    plan, _ = Configuration(head_dim=128, score_mod=softcap(cap), **options).plan()
    assert softmax.is_bounded(plan) == served
