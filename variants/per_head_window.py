"""A window of its own size for each head: some heads look near, some far.

Source: Sukhbaatar et al., "Adaptive Attention Span in Transformers", 2019; given sizes as in
MSWA (Xu et al., "Multi-Scale Window Attention", 2025).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def per_head_window(windows: Tensor) -> Callable:
    """The mask_mod for ``windows[h]`` keys before the query; an integer tensor of shape (Hq,)."""

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (q - kv <= windows[h])

    return mask_mod
