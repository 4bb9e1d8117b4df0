"""Soft capping: scores are squashed smoothly into (-cap, cap), so that none dominates.

Source: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024, section 2
(cap 50 for attention). Kernels use the hardware's tanh, with a relative error of 2 ** -11.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def softcap(cap: float = 50.0) -> Callable:
    """The score_mod cap * tanh(score / cap)."""

    def score_mod(score, b, h, q, kv):
        return cap * torch.tanh(score / cap)

    return score_mod
