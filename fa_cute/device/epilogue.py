"""O and LSE from registers to global memory, row by row, no row beyond the last.

A quad of threads holds 8 columns of a row as four pairs. A 4 x 4 transpose of packed pairs over the
quad (two butterfly steps, four shuffles) turns 32 columns into one 16-byte vector a thread, and a
quad then writes 64 contiguous bytes of a row. That needs no shared memory, so the loads of the next
tile need not wait for the store of this one, any row stride is allowed, and a predicate a row keeps
packed neighbours intact.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import arith, llvm, nvvm

from fa_cute.device import emit
from fa_cute.device.mma_sm90 import FRAGMENT_ROWS

QUAD = 4
VECTOR_COLUMNS = 8  # 16 bytes
BLOCK_COLUMNS = QUAD * VECTOR_COLUMNS
DISTANCES = (1, 2)  # of the butterfly's two steps
Word = Any  # a 32-bit word of the compiler's intermediate form


def sides_of(lane: Int32) -> list[Any]:
    """Whether ``lane`` is the upper one of its pair, for each step of the butterfly."""
    return [(lane & distance) != 0 for distance in DISTANCES]


def transpose_quad(words: list[Word], sides: list[Any]) -> list[Word]:
    """Word j of lane i becomes word i of lane j, within each quad of lanes of ``sides``."""
    for distance, upper in zip(DISTANCES, sides, strict=True):
        out: list[Word] = list(words)
        for j in range(QUAD):
            if j & distance:
                continue
            keep_low, keep_high = words[j], words[j | distance]
            got = _exchanged(_chosen(upper, keep_low, keep_high), distance)
            out[j] = _chosen(upper, got, keep_low)
            out[j | distance] = _chosen(upper, keep_high, got)
        words = out
    return words


# The compiler's own select and shuffle are these operations and trace five times as long: 128 and
# 32 of a kernel's operations at head dim 128.
def _chosen(condition: Any, a: Word, b: Word) -> Word:
    return arith.select(condition.ir_value(), a, b)


def _exchanged(word: Word, distance: int) -> Word:
    """The ``word`` of the lane at ``distance``."""
    every, offset, clamp = (emit.like(word, x) for x in (-1, distance, 31))
    return nvvm.shfl_sync(every, word, offset, clamp, nvvm.ShflKind.bfly)


def vector_at(
    block: int, start: int | Int32, columns: int, width: int | None = None
) -> tuple[int, Any]:
    """Where a lane's vector of a row's 32-column ``block`` begins, from ``start``; if it is real.

    ``start``: the lane's first column. Columns from ``columns`` on are padding. Their number is a
    multiple of 8, so a vector is real or padding as a whole. Blocks without padding give True: no
    instruction. ``width``: of the whole row, where ``start`` is in a part of it.
    """
    first = block * BLOCK_COLUMNS
    end = first + BLOCK_COLUMNS if width is None else width
    return first, True if end <= columns else start + first < columns


def store_rows(
    o: cute.Tensor, g_out: cute.Tensor, row: Int32, rows: Int32, part: tuple | None = None
) -> None:
    """Write the accumulator ``o``, in the output's dtype, to ``row`` and ``row + 8`` of (Sq, Dv).

    ``o`` keeps the accumulator's value order (pair, row, group of 8 columns); ``rows`` is Sq. It is
    as wide as Dv padded to 32: its columns past Dv are not written. ``part``: ``o`` is a part of
    that width, (its number, how many there are).
    """
    lane = cute.arch.lane_idx() % QUAD
    sides, words = sides_of(lane), emit.registers(o, emit.integer(32), cute.size(o) // 2)
    for r in range(FRAGMENT_ROWS):
        own = words[r::FRAGMENT_ROWS]
        quads = [own[at : at + QUAD] for at in range(0, len(own), QUAD)]
        _store_row([transpose_quad(quad, sides) for quad in quads], g_out, row + 8 * r, rows, part)


def store_zeros(width: int, g_out: cute.Tensor, row: Int32, rows: Int32) -> None:
    """Write zeros where ``store_rows`` writes an accumulator of ``width`` columns."""
    zero = emit.constant_of(0, emit.integer(32), None)
    zeros = [[zero] * QUAD] * (width // BLOCK_COLUMNS)
    for r in range(FRAGMENT_ROWS):
        _store_row(zeros, g_out, row + 8 * r, rows, None)


def _store_row(
    vectors: list[list[Word]], g_out: cute.Tensor, row: Int32, rows: Int32, part: tuple | None
) -> None:
    """Write this lane's vector of each 32-column block to ``row``, unless it is past the last."""
    start, width = cute.arch.lane_idx() % QUAD * VECTOR_COLUMNS, None
    if part is not None:
        own = BLOCK_COLUMNS * len(vectors)
        start, width = start + part[0] * own, part[1] * own
    with emit.where(row < rows):
        g_row = g_out[row, None]
        # One address: the compiler's own arithmetic of pointers was 7 operations a vector.
        base = (g_row.iterator + start).llvm_ptr
        for block, words in enumerate(vectors):
            first, real = vector_at(block, start, cute.size(g_row), width)
            if real is True:
                _store_vector(words, base, first)
            else:
                with emit.where(real):
                    _store_vector(words, base, first)


def _store_vector(words: list[Word], base: Any, first: int) -> None:
    """Write 8 columns from the ``first`` behind ``base`` on: 16 bytes, aligned."""
    place = llvm.getelementptr(base.type, base, [], [first], emit.integer(16), None)
    llvm.store(emit.gathered(words, QUAD), place, alignment=2 * VECTOR_COLUMNS)


def store_lse(logs: list[Float32], g_lse: cute.Tensor, row: Int32, rows: Int32) -> None:
    """Write the log-sum-exp of rows ``row``, ``row + 8`` to ``g_lse`` (Sq,), one thread a quad."""
    with emit.where(cute.arch.lane_idx() % QUAD == 0):
        for r in range(FRAGMENT_ROWS):
            with emit.where(row + 8 * r < rows):
                g_lse[row + 8 * r] = logs[r]
