"""One thread, one row: the bounds of its scores, and the store of its part of O.

The layout of tensor memory's loads (``tmem``): a thread holds consecutive columns of one row, so
that nothing is shuffled, and column i of a fragment is column i of the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm, vector

from fa_cute.device import emit
from fa_cute.spans import Bounds

Vector = Any  # of fp32 or 32-bit words, of the compiler's intermediate form
Value = Any  # a scalar of it
WORD = 32  # columns whose visibility is a word
VECTOR = 8  # 16-bit columns in 16 bytes, what a store moves
GLOBAL = 1  # the address space of global memory


class Limit(NamedTuple):
    """Columns ``[low, high)`` of the sequence that the row sees; no left bound: ``low`` None."""

    low: Int32 | None
    high: Int32


def limit_of(bounds: Bounds, row: Int32, group: int = 1) -> Limit:
    """What ``row`` sees under ``bounds``; ``group`` consecutive rows are heads of one query."""
    diagonal = row // group + bounds.seqlen_k - bounds.seqlen_q
    high, low = bounds.seqlen_k, None
    if bounds.right is not None:
        bound = diagonal + bounds.right + 1
        high = cutlass.select_(bound < high, bound, high)
    if bounds.left is not None:
        low = diagonal - bounds.left
    return Limit(low, high)


def hide(s: Vector, limit: Limit, kv_first: Int32) -> Vector:
    """``s`` (columns,) with -inf where the row does not see key ``kv_first + i``.

    What the row sees of 32 columns is a word, and each column tests its bit: one test for both
    bounds, where two comparisons spilled 40 bytes at head dims (192, 128). Columns come in 32s.
    """
    bits = emit.constant_lanes([_signed(1 << i) for i in range(WORD)])
    none, hidden = emit.like(bits, 0), emit.constant_of(-math.inf, Float32.mlir_type, WORD)
    high, low = (None if x is None else (x - kv_first).ir_value() for x in limit[::-1])
    found = []
    for at in range(0, emit.lanes_of(s), WORD):
        seen = _below(high, at)
        if low is not None:
            seen = arith.andi(seen, arith.xori(_below(low, at), emit.like(seen, -1)))
        visible = emit.compare("ne", arith.andi(emit.splat(seen, WORD), bits), none)
        found.append(arith.select(visible, emit.part(s, at, WORD), hidden))
    return emit.joined(found)


def _below(limit: Value, first: int) -> Value:
    """A word with bit i set where ``first + i`` is below the int32 ``limit``."""
    wide = emit.integer(64)
    count = arith.subi(limit, emit.like(limit, first))
    count = arith.minsi(arith.maxsi(count, emit.like(count, 0)), emit.like(count, WORD))
    one = emit.constant_of(1, wide, None)
    power = arith.shli(one, arith.extui(wide, count))
    return arith.trunci(emit.integer(32), arith.subi(power, one))


def _signed(word: int) -> int:
    return word - (1 << WORD) if word >> (WORD - 1) else word


def rounded(s: Vector, dtype: type) -> Vector:
    """``s`` (columns,) fp32 rounded to the 16-bit ``dtype``: (columns / 2,) words."""
    narrow = arith.truncf(emit.as_type(dtype.mlir_type, s), s)
    words = ir.VectorType.get([emit.lanes_of(s) // 2], emit.integer(32))
    return vector.bitcast(words, narrow)


def modified(s: Vector, mod: Callable[[cute.Tensor], None]) -> Vector:
    """The scores ``s`` (columns,) after ``mod``, which works on a fragment in place."""
    fragment = cute.make_rmem_tensor((1, emit.lanes_of(s)), Float32)
    fragment.store(cute.TensorSSA(s, fragment.shape, Float32))
    mod(fragment)
    return vector.shape_cast(s.type, fragment.load().ir_value())


def scaled(o: Vector, factor: Float32) -> Vector:
    """A piece of a row times ``factor``: two columns an instruction."""
    return arith.mulf(o, emit.splat(factor.ir_value(), emit.lanes_of(o)))


def rewrite(memory: Any, first: Int32, columns: range, change: Callable) -> None:
    """``change(piece, at)`` of ``columns`` of this thread's row in tensor memory, which begins at
    ``first``: a step of the range at a time."""
    for at in columns:
        piece = memory.load(first + at, columns.step)
        memory.loaded()
        memory.store(first + at, change(piece, at))
    memory.stored()


class Target(NamedTuple):
    """Where a row goes: ``row`` of ``g_out`` (rows, Dv), ``g_lse`` (rows,) or None, if it is one.

    Rows from ``end`` on are padding of the tile.
    """

    g_out: cute.Tensor
    g_lse: cute.Tensor | None
    row: Int32
    end: Int32

    def store(self, words: Vector, first: int) -> None:
        """Write 32-bit ``words`` of O from column ``first`` on."""
        with emit.where(self.row < self.end):
            store(words, self.g_out[self.row, None], first)

    def store_log(self, log: Float32) -> None:
        """Write the row's log-sum-exp, where it is wanted."""
        if self.g_lse is not None:
            with emit.where(self.row < self.end):
                self.g_lse[self.row] = log


def store(words: Vector, g_row: cute.Tensor, first: int) -> None:
    """Write 32-bit ``words`` to ``g_row`` (Dv,) from column ``first`` on; none past its end.

    Dv is a multiple of 8, so a vector of 16 bytes is real or padding as a whole.
    """
    # One address and an operation a vector: a copy by the compiler's tensors traces thirty.
    begin = llvm.inttoptr(llvm.PointerType.get(GLOBAL), g_row.iterator.toint().ir_value())
    for column in range(first, min(first + 2 * emit.lanes_of(words), cute.size(g_row)), VECTOR):
        value = emit.part(words, (column - first) // 2, VECTOR // 2)
        place = llvm.getelementptr(begin.type, begin, [], [2 * column], emit.integer(8), None)
        llvm.store(value, place, alignment=2 * VECTOR)
