"""Bounds, causal and windows on a fragment of S: -inf where a row does not see a column.

A row sees columns ``[low, high)`` of the whole sequence. Relative to the block and to the thread's
own ``2 (t % 4)`` both are one register a row, and each element compares a constant with it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import arith, llvm

from fa_cute.device import emit
from fa_cute.device.mma_sm90 import FRAGMENT_ROWS, PIECE_COLUMNS, Pieces, by_row, column_of
from fa_cute.device.visits import INT32
from fa_cute.mods.ranges import Ranges, term_bounds
from fa_cute.spans import Bounds

WORD = 32  # bits


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


def shown_by(ranges: Ranges, within: Limits, row: Int32, quad_column: Int32) -> list[Limits]:
    """What each of the exact ``ranges`` shows ``row`` and ``row + 8`` of what is ``within``."""
    bounds = [term_bounds(ranges, (), *[row + 8 * r] * 2, INT32) for r in range(FRAGMENT_ROWS)]
    found = []
    for first, last in ranges.ranges:
        low, high = [], []
        for r in range(FRAGMENT_ROWS):
            # Cut to where keys are, so that what is added stays in int32.
            least = cutlass.max(Int32(bounds[r][first][0]), 0) - quad_column
            most = cutlass.min(Int32(bounds[r][last][1]), within.high[r] + quad_column) + 1
            low.append(least if within.low is None else cutlass.max(least, within.low[r]))
            high.append(cutlass.min(most - quad_column, within.high[r]))
        found.append(Limits(tuple(low), tuple(high)))
    return found


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


def apply(s: cute.Tensor, limits: Sequence[Limits], kv_first: Int32) -> None:
    """Write -inf into ``s`` (2, columns) at columns ``kv_first + ...`` that no limits show a row.

    A bit a column of the thread: ptxas makes predicates of seven of them with one R2P, where
    comparing takes one or two instructions an element.
    """
    pieces = Pieces(s)
    seen = [
        [_word(limits, kv_first, r, first) for first in range(0, 4 * pieces.count, WORD)]
        for r in range(FRAGMENT_ROWS)
    ]
    for at, scores in enumerate(pieces.all()):
        word, bit = divmod(4 * at, WORD)
        words = by_row([row[word] for row in seen])
        bits = emit.constant_lanes([1 << (bit + c) for c in PIECE_COLUMNS])
        shown = emit.compare("ne", arith.andi(words, bits), emit.like(bits, 0))
        pieces.store(at, arith.select(shown, scores, emit.like(scores, -math.inf)))


def _word(limits: Sequence[Limits], kv_first: Int32, r: int, first: int) -> Int32:
    """Row ``r``'s bits of the fragment's columns from ``first`` on: 1 where some limits show it."""
    words = []
    for limit in limits:
        low = Int32(0)
        if limit.low is not None:
            low = _columns_below(limit.low[r] - kv_first, first)
        high = _columns_below(limit.high[r] - kv_first, first)
        words.append(_bits(low, cutlass.max(high - low, 0)))
    return functools.reduce(operator.or_, words)


def _columns_below(bound: Int32, first: int) -> Int32:
    """How many of the fragment's columns from ``first`` on lie below ``bound``."""
    bound = cutlass.max(bound - column_of(first), 0)
    return ((bound >> 2) & ~1) + cutlass.min(bound & 7, 2)


def _bits(first: Int32, count: Int32) -> Int32:
    """A word of ``count`` ones from bit ``first`` on; those past its end are left out."""
    text = "bmsk.clamp.b32 $0, $1, $2;"
    return Int32(
        llvm.inline_asm(Int32.mlir_type, [first.ir_value(), count.ir_value()], text, "=r,r,r")
    )
