"""Which KV blocks a tile of queries visits, cut into spans. A leaf of plain arithmetic.

Every function here takes Python ints or the compiler's Int32 alike: the CPU path, the kernels and
the tests run the same code. ``minimum``/``maximum`` come from the caller through ``Arithmetic``,
because a traced integer has no usable ``min()``.

Visibility (bottom-right aligned, ``offset = Sk - Sq``): query ``q`` sees key ``kv`` when

    q + offset - left  <=  kv  <=  q + offset + right,      0 <= kv < Sk.

Causal is ``right = 0``. A block is ``tile_n`` keys. From high to low, a tile of queries visits

    first           one block: the highest visible one. It alone can pass the end of the keys, so it
                    alone needs the length bound; it takes every other mask too.
    right edge      blocks that the right bound crosses (causal's diagonal)
    middle          blocks that every row of the tile sees whole
    left edge       blocks that the left bound crosses

The backward turns this round: a tile of keys visits blocks of ``tile_q`` queries, from low to high
(``q_spans``). The right bound then crosses the lowest blocks and the left bound the highest; a tile
that passes the end of the keys has no middle, since every block needs that bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Bounds(NamedTuple):
    """The bounds of visibility: lengths, and ``left``/``right`` (None: no such bound)."""

    seqlen_q: Any
    seqlen_k: Any
    left: Any = None
    right: Any = None


class KvSpans(NamedTuple):
    """Block numbers, ``begin <= middle_begin <= middle_end <= last <= end``.

    ``end == begin`` when the tile sees nothing. The first block visited is ``end - 1 == last``;
    right edge ``[middle_end, last)``, middle ``[middle_begin, middle_end)``, left edge
    ``[begin, middle_begin)``.
    """

    begin: Any
    middle_begin: Any
    middle_end: Any
    last: Any
    end: Any


class QSpans(NamedTuple):
    """Block numbers, ``begin <= middle_begin <= middle_end <= end``; equal ends: nothing seen.

    Right edge ``[begin, middle_begin)``, middle ``[middle_begin, middle_end)``, left edge
    ``[middle_end, end)``.
    """

    begin: Any
    middle_begin: Any
    middle_end: Any
    end: Any


@dataclass(frozen=True)
class Arithmetic:
    """``minimum`` and ``maximum`` for the kind of integer in use (builtins for Python's ints)."""

    minimum: Callable[[Any, Any], Any] = min
    maximum: Callable[[Any, Any], Any] = max


PYTHON = Arithmetic()


def heads_together(rows: Any, room: int, arithmetic: Arithmetic = PYTHON) -> Any:
    """How many heads of so many ``rows`` fit into ``room`` rows: a power of two up to 64, or 1."""
    most = 1
    for count in (2, 4, 8, 16, 32, 64):
        fits = arithmetic.minimum(arithmetic.maximum(room // count - rows + 1, 0), 1)
        most = arithmetic.maximum(most, count * fits)
    return most


def visible(
    bounds: Bounds, q_begin: Any, q_end: Any, arithmetic: Arithmetic = PYTHON
) -> tuple[Any, Any]:
    """Keys ``[begin, end)`` that some row of ``[q_begin, q_end)`` sees; ``end <= begin`` for none.

    ``q_end`` may pass the last query: the rows beyond it are cut off here.
    """
    last_row = arithmetic.minimum(q_end, bounds.seqlen_q) - 1
    offset = bounds.seqlen_k - bounds.seqlen_q
    begin, end = 0, bounds.seqlen_k
    if bounds.right is not None:
        end = arithmetic.minimum(end, last_row + offset + bounds.right + 1)
    if bounds.left is not None:
        begin = arithmetic.maximum(begin, q_begin + offset - bounds.left)
    return begin, end


def kv_spans(
    bounds: Bounds, q_begin: Any, q_end: Any, tile_n: int, arithmetic: Arithmetic = PYTHON
) -> KvSpans:
    """The spans of KV blocks that the queries ``[q_begin, q_end)`` visit."""
    low, high = arithmetic.minimum, arithmetic.maximum
    kv_begin, kv_end = visible(bounds, q_begin, q_end, arithmetic)
    kv_end = high(kv_end, 0)
    end = (kv_end + tile_n - 1) // tile_n
    begin = low(kv_begin // tile_n, end)
    last = high(end - 1, begin)
    offset = bounds.seqlen_k - bounds.seqlen_q
    middle_begin, middle_end = begin, last
    if bounds.right is not None:
        # The first row sees the fewest keys to its right: blocks below this are whole for all rows.
        whole = high(q_begin + offset + bounds.right + 1, 0) // tile_n
        middle_end = low(high(whole, begin), last)
    if bounds.left is not None:
        last_row = low(q_end, bounds.seqlen_q) - 1
        crossed = high(last_row + offset - bounds.left, 0)
        middle_begin = low(high((crossed + tile_n - 1) // tile_n, begin), middle_end)
    return KvSpans(begin, middle_begin, middle_end, last, end)


def q_spans(
    bounds: Bounds, kv_begin: Any, kv_end: Any, tile_q: int, arithmetic: Arithmetic = PYTHON
) -> QSpans:
    """The spans of blocks of ``tile_q`` queries that see keys of ``[kv_begin, kv_end)``."""
    low, high = arithmetic.minimum, arithmetic.maximum
    offset = bounds.seqlen_k - bounds.seqlen_q
    last_key = low(kv_end, bounds.seqlen_k) - 1
    q_begin, q_end = 0, bounds.seqlen_q
    if bounds.right is not None:
        q_begin = high(kv_begin - offset - bounds.right, 0)
    if bounds.left is not None:
        q_end = high(low(q_end, last_key - offset + bounds.left + 1), 0)
    end = (q_end + tile_q - 1) // tile_q
    begin = low(q_begin // tile_q, end)
    middle_begin, middle_end = begin, end
    if bounds.right is not None:
        # The first row of a block sees the fewest keys to its right.
        crossed = high(kv_end - 1 - offset - bounds.right, 0)
        middle_begin = low(high((crossed + tile_q - 1) // tile_q, begin), end)
    if bounds.left is not None:
        whole = high(kv_begin - offset + bounds.left + 1, 0) // tile_q
        middle_end = low(high(whole, middle_begin), end)
    # In a tile that passes the end of the keys every block is an edge: 1 there, 0 elsewhere.
    partial = high(low(kv_end - bounds.seqlen_k, 1), 0)
    middle_begin = middle_begin + partial * (end - middle_begin)
    return QSpans(begin, middle_begin, high(middle_end, middle_begin), end)
