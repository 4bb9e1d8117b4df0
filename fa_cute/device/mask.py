"""Bounds, causal and windows on a fragment of S: -inf where a row does not see a column.

A row sees columns ``[low, high)`` of the whole sequence. Relative to the block and to the thread's
own ``2 (t % 4)`` both are one register a row, and each element compares a constant with it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import arith

from fa_cute.device import emit
from fa_cute.device.mma_sm90 import FRAGMENT_ROWS, PIECE_COLUMNS, Pieces, by_row, column_of
from fa_cute.spans import Bounds


class Limits(NamedTuple):
    """Columns ``[low, high)`` that each of a thread's two rows sees; no left bound: ``low`` None.

    Both are less the thread's ``2 (t % 4)``, so that ``column_of`` compares with them directly.
    """

    low: tuple[Int32, Int32] | None
    high: tuple[Int32, Int32]


def limits(bounds: Bounds, row: Int32, quad_column: Int32, group: int = 1) -> Limits:
    """The limits of ``row`` and ``row + 8`` under ``bounds``, for the thread at ``quad_column``.

    ``group``: consecutive rows that are heads of one query.
    """
    offset = bounds.seqlen_k - bounds.seqlen_q
    low, high = [], []
    for r in range(FRAGMENT_ROWS):
        diagonal = (row + 8 * r) // group + offset
        end = bounds.seqlen_k
        if bounds.right is not None:
            bound = diagonal + bounds.right + 1
            end = cutlass.select_(bound < end, bound, end)
        high.append(end - quad_column)
        if bounds.left is not None:
            low.append(diagonal - bounds.left - quad_column)
    return Limits(tuple(low) if low else None, tuple(high))


def limits_of_keys(bounds: Bounds, key: Int32, quad_column: Int32) -> Limits:
    """The limits where rows are keys, ``key`` and ``key + 8``, and columns are queries."""
    offset = bounds.seqlen_k - bounds.seqlen_q
    low, high = [], []
    for r in range(FRAGMENT_ROWS):
        diagonal = key + 8 * r - offset
        end = bounds.seqlen_q
        if bounds.left is not None:
            bound = diagonal + bounds.left + 1
            end = cutlass.select_(bound < end, bound, end)
        end = cutlass.select_(key + 8 * r < bounds.seqlen_k, end, Int32(0))
        high.append(end - quad_column)
        if bounds.right is not None:
            low.append(diagonal - bounds.right - quad_column)
    return Limits(tuple(low) if low else None, tuple(high))


def apply(s: cute.Tensor, limit: Limits, kv_first: Int32) -> None:
    """Write -inf into ``s`` (2, columns) at columns ``kv_first + ...`` outside the rows' limits."""
    high = by_row([bound - kv_first for bound in limit.high])
    low = None if limit.low is None else by_row([bound - kv_first for bound in limit.low])
    pieces = Pieces(s)
    for at, scores in enumerate(pieces.all()):
        columns = emit.constant_lanes([column_of(4 * at + c) for c in PIECE_COLUMNS])
        seen = emit.compare("lt", columns, high)
        if low is not None:
            seen = arith.andi(seen, emit.compare("le", low, columns))
        pieces.store(at, arith.select(seen, scores, emit.like(scores, -math.inf)))
