"""Dilated sliding window: a query sees every step-th key around it, a wide view at a small cost.

Source: Beltagy, Peters and Cohan, "Longformer: The Long-Document Transformer", 2020, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable


def dilated(reach: int = 64, step: int = 3) -> Callable:
    """The mask_mod that shows the query and ``reach`` keys on either side, ``step`` apart."""

    def mask_mod(b, h, q, kv):
        distance = (q - kv).abs()
        return (distance % step == 0) & (distance <= reach * step)

    return mask_mod
