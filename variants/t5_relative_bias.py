"""T5's relative bias: a learned number for each head and bucket of distances, in log steps.

Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", 2019, section 2.1. T5 does not scale its scores: pass ``scale=1.0`` beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def t5_relative_bias(table: Tensor, max_distance: int = 128) -> Callable:
    """The score_mod for ``table`` of shape (buckets, heads), as T5's encoder has it.

    Half of the buckets are for keys after the query. Of each half, half hold one distance each, and
    the others share the distances up to ``max_distance``, beyond which all fall into the last.
    """
    buckets = table.shape[0] // 2
    exact = buckets // 2
    growth = (buckets - exact) / math.log(max_distance / exact)

    def score_mod(score, b, h, q, kv):
        distance = (kv - q).abs()
        ratio = torch.clamp(distance, min=exact) / exact
        # The distances at which a bucket begins are whole; 1e-4 keeps a rounded logarithm above.
        far = exact + (torch.log(ratio) * growth + 1e-4).int()
        near = torch.where(distance < exact, distance, torch.clamp(far, max=buckets - 1))
        return score + table[torch.where(kv > q, near + buckets, near), h]

    return score_mod
