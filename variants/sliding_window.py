"""Sliding window: a query sees itself and the most recent keys before it.

Source: Child et al., "Generating Long Sequences with Sparse Transformers", 2019; the form is that
of Mistral 7B (Jiang et al., 2023). The option ``window=(left, 0)`` of ``fa_cute.attention`` is
aligned bottom-right, and skips the blocks outside.
"""

from __future__ import annotations

from collections.abc import Callable


def sliding_window(left: int = 100) -> Callable:
    """The mask_mod that shows each query itself and ``left`` keys before it."""

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (q - kv <= left)

    return mask_mod
