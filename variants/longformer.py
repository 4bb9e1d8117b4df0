"""Global tokens and a window: the first tokens see all and are seen by all, others see around them.

Source: Beltagy, Peters and Cohan, "Longformer: The Long-Document Transformer", 2020, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable


def longformer(tokens: int = 8, reach: int = 32) -> Callable:
    """The mask_mod for ``tokens`` global tokens and ``reach`` keys on either side of a query."""

    def mask_mod(b, h, q, kv):
        return ((q - kv).abs() <= reach) | (kv < tokens) | (q < tokens)

    return mask_mod
