"""O from registers to global memory through a little shared memory of the warp's own.

stmatrix writes 64 columns of a warp's 16 rows there, then each lane reads vectors of 16 bytes and
stores them, eight lanes 128 contiguous bytes of a row: 200 instructions a tile of d128, where the
shuffles of ``epilogue.store_rows`` take 460. Nothing but the warp waits, and no proxy reads the
memory, so any stride of rows is allowed and a predicate a row keeps packed neighbours intact.

Within a row of 128 bytes vector ``v`` lies at ``v ^ (row % 8)``: neither side meets in a bank.
"""

from __future__ import annotations

from typing import Any, TypeVar

import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import llvm

from fa_cute.device import emit
from fa_cute.device.epilogue import VECTOR_COLUMNS
from fa_cute.device.mma_sm90 import FRAGMENT_ROWS, thread_again

COLUMNS = 64  # staged at a time
ROWS = 16  # of a warp
ROW_BYTES = 2 * COLUMNS
WARP_BYTES = ROWS * ROW_BYTES
MATRICES = 4  # of 8 x 8, that one stmatrix writes
TURNS = 4  # of a warp's lanes, to read what it staged
WORDS = COLUMNS // 8 * FRAGMENT_ROWS
Lane = TypeVar("Lane", int, Int32)


def matrix_row(lane: Lane, group: int) -> Lane:
    """Where ``lane`` tells stmatrix to write, in bytes: a row of one of the matrices.

    These are rows 0 and 8 of column group ``group`` (even), then of the next.
    """
    row = lane % 8 + 8 * (lane // 8 % 2)
    return row * ROW_BYTES + ((group ^ (lane // 16) ^ (lane % 8)) * 16)


def vector_row(lane: Lane, turn: int) -> Lane:
    """The row of which ``lane`` reads vector ``lane % 8`` at its ``turn``."""
    return TURNS * turn + lane // 8


def vector_at(lane: Lane, turn: int) -> Lane:
    """Where that vector lies, in bytes."""
    row = lane // 8 ^ TURNS * (turn % 2)  # of eight
    return (8 * (turn // 2) + row) * ROW_BYTES + ((lane % 8) ^ row) * 16


def store_rows(o: cute.Tensor, g_out: cute.Tensor, place: tuple, staging: Int32) -> None:
    """Write the accumulator ``o``, in the output's dtype, to 16 rows of ``g_out`` (Sq, Dv).

    ``place``: the warp's first row, and Sq. ``o`` keeps the accumulator's value order and is as
    wide as Dv padded to 64: columns past Dv are not written. ``staging``: the address of the warp's
    ``WARP_BYTES``, on a boundary of a KiB.
    """
    # Read again: what is made of it would be kept through the tile (d96 spilled 4 bytes).
    lane, (first, rows) = thread_again() % 32, place
    words = emit.registers(o, emit.integer(32), cute.size(o) // 2)
    columns = cute.size(g_out, mode=[1])
    for begin in range(0, len(words), WORDS):
        cute.arch.sync_warp()
        for at in range(0, WORDS, MATRICES):
            four = words[begin + at : begin + at + MATRICES]
            _put(four, staging + matrix_row(lane, at // FRAGMENT_ROWS))
        cute.arch.sync_warp()
        panel = begin // WORDS * COLUMNS
        column = panel + lane % 8 * VECTOR_COLUMNS
        for turn in range(TURNS):
            vector = _got(staging + vector_at(lane, turn))
            row = first + vector_row(lane, turn)
            real = row < rows
            if panel + COLUMNS > columns:
                real = real & (column < columns)
            with emit.where(real):
                target = (g_out[row, None].iterator + column).llvm_ptr
                llvm.store(vector, target, alignment=2 * VECTOR_COLUMNS)


def _put(words: list[Any], address: Int32) -> None:
    text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
    operands = [address.ir_value(), *words]
    llvm.inline_asm(None, operands, text, "r,r,r,r,r", has_side_effects=True)


def _got(address: Int32) -> Any:
    word, text = emit.integer(32), "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
    kind, constraints = emit.structure(word, MATRICES), "=r,=r,=r,=r,r"
    four = llvm.inline_asm(kind, [address.ir_value()], text, constraints, has_side_effects=True)
    return emit.gathered([llvm.extractvalue(word, four, [i]) for i in range(MATRICES)], MATRICES)
