"""Online softmax of one warpgroup's 64 rows, in base 2.

Per row, with c = scale x log2 e (log2 e alone after a score_mod), over the blocks j visited so far:

    m_j = max(m_{j-1}, max_kv S)            p = exp2(c S - c m_j)
    l_j = l_{j-1} exp2(c (m_{j-1} - m_j)) + sum p        O likewise

* A row that has seen nothing keeps m = -inf; the exponent then uses 0 in its place, locally, so
  that exp2(-inf - 0) = 0 and the stored maximum stays -inf for the next block.
* O is rescaled in every block, without a branch. Skipping it while the maximum rises by less than
  log2 256 saves 64 FMUL a block, but the branch keeps the conversions of P, which follow it, from
  filling the gaps between the exponentials: 658 against 664 TFLOP/s (128 x 176, d128, S8k).
* l is kept by thread (each has a quarter of a row's columns) and summed over the quad once, at the
  end.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import arith, llvm
from cutlass._mlir.dialects import math as math_dialect

from fa_cute.device import emit
from fa_cute.device.mma_sm90 import FRAGMENT_ROWS, Pieces, by_row

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


def exp2(x: Float32) -> Float32:
    """2^x by the hardware's approximation (relative error 2e-7); 2^-inf = 0."""
    return cute.math.exp2(x, fastmath=True)


class RowState:
    """Maximum, sum and the last rescaling factor of a thread's rows, in registers."""

    def __init__(self) -> None:
        self.maximum = cute.make_rmem_tensor(FRAGMENT_ROWS, Float32)
        self.sum = cute.make_rmem_tensor(FRAGMENT_ROWS, Float32)
        self.scale = cute.make_rmem_tensor(FRAGMENT_ROWS, Float32)


def _reduce(values: list, combine: Any) -> list[Float32]:
    """The thread's part of each row's reduction, from pieces ``(8,)`` in the fragment's order.

    A piece holds four columns of both rows, so one vector carries four independent chains a row:
    the latency of one chain of 44 would show.
    """
    lanes = emit.lanes_in(functools.reduce(combine, values))
    return [
        functools.reduce(combine, map(combine, lanes[2 * r :: 4], lanes[2 * r + 1 :: 4]))
        for r in range(FRAGMENT_ROWS)
    ]


def _across_quad(value: Any, combine: Any) -> Float32:
    value = Float32(value)
    for distance in (1, 2):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=distance))
    return value


def _add(a: Float32, b: Float32) -> Float32:
    return a + b


def exponentiate(s: cute.Tensor, state: RowState, c: Float32, *, first: bool) -> None:
    """S becomes P in place, ``(2, columns)`` fp32; ``state`` takes this block's maximum.

    Unless it is the ``first`` block, ``state.scale`` is then what O is to be multiplied by.
    """
    pieces = Pieces(s)
    values = pieces.all()
    tops, shifts = _reduce(values, llvm.intr_maxnum), []
    for r in range(FRAGMENT_ROWS):
        top = _across_quad(tops[r], cute.arch.fmax)
        maximum = top if first else cute.arch.fmax(state.maximum[r], top)
        finite = cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum)
        shift = -finite * c
        if not first:
            # The difference first: a block that raises nothing then scales by exactly 1, so that
            # leaving out a hidden block changes no bit.
            state.scale[r] = exp2((state.maximum[r] - finite) * c)
        state.maximum[r] = maximum
        shifts.append(shift)
    shift, factor = by_row(shifts), by_row([c, c])
    for number, value in enumerate(values):
        exponent = math_dialect.fma(value, factor, shift)
        pieces.store(number, math_dialect.exp2(exponent, fastmath=arith.FastMathFlags.fast))


def add_up(s: cute.Tensor, state: RowState, *, first: bool) -> None:
    """Take P ``(2, columns)`` into the sums. Last in a block: nothing waits for it."""
    totals = _reduce(Pieces(s).all(), arith.addf)
    for r, total in enumerate(map(Float32, totals)):
        state.sum[r] = total if first else cute.math.fma(state.sum[r], state.scale[r], total)


def rescale(o: cute.Tensor, state: RowState) -> None:
    """Multiply the rows of O ``(2, Dv / 4)`` by ``state.scale``."""
    _multiply(o, [state.scale[r] for r in range(FRAGMENT_ROWS)])


def _multiply(o: cute.Tensor, factors: list[Float32]) -> None:
    by = by_row(factors)
    pieces = Pieces(o)
    for number, values in enumerate(pieces.all()):
        pieces.store(number, arith.mulf(values, by))


def finish(o: cute.Tensor, state: RowState, c: Float32, sink: Float32 | None) -> list[Float32]:
    """Divide O by its sums; return the natural log-sum-exp of each row (-inf: nothing seen).

    A ``sink`` is one more score of each row, without a value: it joins the maximum and the sum.
    """
    logs, inverses = [], []
    for r in range(FRAGMENT_ROWS):
        total, top = _across_quad(state.sum[r], _add), state.maximum[r] * (c * LN_2)
        factor = Float32(1.0)
        if sink is not None:
            top, factor, share = join(top, sink)
            total = cute.math.fma(total, factor, share)
        empty = total == 0.0
        inverse = factor * cute.arch.rcp_approx(total)
        inverses.append(cutlass.select_(empty, Float32(0.0), inverse))
        lse = top + cute.math.log2(total, fastmath=True) * LN_2
        logs.append(cutlass.select_(empty, -Float32.inf, lse))
    _multiply(o, inverses)
    return logs


def join(top: Float32, sink: Float32) -> tuple[Float32, Float32, Float32]:
    """The maximum of a row and its sink; the row's sums and the sink's own, relative to it."""
    joint = cute.arch.fmax(top, sink)
    shift = cutlass.select_(joint == -Float32.inf, Float32(0.0), joint)
    return joint, exp2((top - shift) * LOG2_E), exp2((sink - shift) * LOG2_E)
