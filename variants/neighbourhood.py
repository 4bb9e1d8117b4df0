"""2-D neighbourhood: tokens are the pixels of an image, row by row, and see a square around them.

Source: Hassani et al., "Neighborhood Attention Transformer", 2022 (NATTEN). There a square that
would leave the image is moved inside it; here it is cut off at the border.
"""

from __future__ import annotations

from collections.abc import Callable


def neighbourhood(width: int = 16, reach: int = 3) -> Callable:
    """The mask_mod for rows of ``width`` pixels and squares of ``2 * reach + 1``."""

    def mask_mod(b, h, q, kv):
        rows = (q // width - kv // width).abs()
        columns = (q % width - kv % width).abs()
        return (rows <= reach) & (columns <= reach)

    return mask_mod
