"""ALiBi: a penalty that grows linearly with distance, steeper for earlier heads.

Source: Press, Smith and Lewis, "Train Short, Test Long: Attention with Linear Biases Enables Input
Length Extrapolation", 2021, section 3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def alibi(heads: int) -> Callable:
    """The score_mod for ``heads`` query heads: head h has slope 2 ** (-8 (h + 1) / heads)."""

    def score_mod(score, b, h, q, kv):
        slope = torch.exp2(-8.0 * (h + 1) / heads)
        return score - slope * (q - kv).abs()

    return score_mod
