"""O and LSE from registers to global memory, row by row, no row beyond the last.

A quad of threads holds 8 columns of a row as four pairs. A 4 x 4 transpose of packed pairs over the
quad (two butterfly steps, four shuffles) turns 32 columns into one 16-byte vector a thread, and a
quad then writes 64 contiguous bytes of a row. That needs no shared memory, so the loads of the next
tile need not wait for the store of this one, any row stride is allowed, and a predicate a row keeps
packed neighbours intact.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass._mlir.dialects import llvm

from fa_cute.device import emit
from fa_cute.device.mma_sm90 import FRAGMENT_ROWS

QUAD = 4
VECTOR_COLUMNS = 8  # 16 bytes
BLOCK_COLUMNS = QUAD * VECTOR_COLUMNS


def transpose_quad(words: list[Uint32], lane: Int32) -> list[Uint32]:
    """Word j of lane i becomes word i of lane j, within each quad of lanes."""
    for distance in (1, 2):
        upper = (lane & distance) != 0
        out: list[Uint32] = list(words)
        for j in range(QUAD):
            if j & distance:
                continue
            keep_low, keep_high = words[j], words[j | distance]
            sent = cutlass.select_(upper, keep_low, keep_high)
            got = cute.arch.shuffle_sync_bfly(sent, offset=distance)
            out[j] = cutlass.select_(upper, got, keep_low)
            out[j | distance] = cutlass.select_(upper, keep_high, got)
        words = out
    return words


def vectors_of(
    block: int,
    lane: int | Int32,
    columns: int,
    part: tuple | None = None,
    width: int = 0,
) -> tuple[int | Int32, Any]:
    """The first column of ``lane``'s vector of a row's 32-column ``block``; whether it is real.

    Columns from ``columns`` on are padding. Their number is a multiple of 8, so a vector is real or
    padding as a whole. Blocks without padding give True: no instruction. ``part``: (number, count)
    of the parts of ``width`` columns of a row.
    """
    first = block * BLOCK_COLUMNS + lane * VECTOR_COLUMNS
    if part is not None:
        number, count = part
        first = first + number * width
        return first, True if count * width <= columns else first < columns
    whole = (block + 1) * BLOCK_COLUMNS <= columns
    return first, True if whole else first < columns


@cute.jit
def store_rows(
    o: cute.Tensor, g_out: cute.Tensor, row: Int32, rows: Int32, part: tuple | None = None
) -> None:
    """Write the accumulator ``o``, in the output's dtype, to ``row`` and ``row + 8`` of (Sq, Dv).

    ``o`` keeps the accumulator's value order (pair, row, group of 8 columns); ``rows`` is Sq. It is
    as wide as Dv padded to 32: its columns past Dv are not written. ``part``: ``o`` is a part of
    that width, (its number, how many there are).
    """
    lane = cute.arch.lane_idx() % QUAD
    pairs = cute.size(o) // (2 * FRAGMENT_ROWS)
    words_of = cute.make_layout((FRAGMENT_ROWS, pairs), stride=(1, FRAGMENT_ROWS))
    packed = cute.make_tensor(cute.recast_ptr(o.iterator, dtype=Uint32), words_of)
    for r in cutlass.range_constexpr(FRAGMENT_ROWS):
        vectors = []
        for block in cutlass.range_constexpr(pairs // QUAD):
            words = [packed[r, block * QUAD + j] for j in range(QUAD)]
            vectors.append(transpose_quad(words, lane))
        _store_row(vectors, g_out, row + 8 * r, rows, part)


@cute.jit
def store_zeros(width: int, g_out: cute.Tensor, row: Int32, rows: Int32) -> None:
    """Write zeros where ``store_rows`` writes an accumulator of ``width`` columns."""
    zeros = [[Uint32(0)] * QUAD] * (width // BLOCK_COLUMNS)
    for r in cutlass.range_constexpr(FRAGMENT_ROWS):
        _store_row(zeros, g_out, row + 8 * r, rows, None)


@cute.jit
def _store_row(vectors: list, g_out: cute.Tensor, row: Int32, rows: Int32, part: tuple | None):
    """Write this lane's vector of each 32-column block to ``row``, unless it is past the last."""
    lane = cute.arch.lane_idx() % QUAD
    if row < rows:
        g_row = g_out[row, None]
        for block in cutlass.range_constexpr(len(vectors)):
            width = BLOCK_COLUMNS * len(vectors)
            first, real = vectors_of(block, lane, cute.size(g_row), part, width)
            if const_expr(real is True):
                _store_vector(vectors[block], g_row, first)
            elif real:
                _store_vector(vectors[block], g_row, first)


def _store_vector(words: list[Uint32], g_row: cute.Tensor, first: Int32) -> None:
    """Write 8 columns of ``g_row`` (Dv,) from column ``first`` on: 16 bytes, aligned."""
    vector = emit.gathered([word.ir_value() for word in words], QUAD)
    llvm.store(vector, (g_row.iterator + first).llvm_ptr, alignment=2 * VECTOR_COLUMNS)


@cute.jit
def store_lse(logs: list[Float32], g_lse: cute.Tensor, row: Int32, rows: Int32) -> None:
    """Write the log-sum-exp of rows ``row``, ``row + 8`` to ``g_lse`` (Sq,), one thread a quad."""
    if cute.arch.lane_idx() % QUAD == 0:
        for r in cutlass.range_constexpr(FRAGMENT_ROWS):
            if row + 8 * r < rows:
                g_lse[row + 8 * r] = logs[r]
