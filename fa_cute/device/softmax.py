"""Online softmax of one warpgroup's 64 rows, in base 2.

Per row, with c = scale x log2 e (log2 e alone after a score_mod), over the blocks j visited so far:

    p = exp2(c S - c m)        l += sum p        O += P V        m: some score of the row

* Any m serves that keeps p, l and O in their range: both l and O are relative to it. So a block
  **presumes** that the m of the blocks before it still does: no maximum is sought, O is not
  rescaled, and the exponentials begin as soon as S is there. A thread's part of sum p says
  afterwards whether that held: bf16 and fp32 bear 2^64, fp16 2^14. Where it did not, the warp
  **raises** m to the row's maximum, rescales l and O, and computes P once more; so it does for rows
  that have seen nothing (m = -inf makes their sums infinite or NaN). That costs about one more
  block, and happens where scores rise by 44 (fp16: 9.7) above those of the blocks before.
* The first block of a tile (``begin``) and those that a right bound cuts (``exponentiate``) seek
  their maximum before: at a window's left edge every row has seen something. So does every block
  of a kernel that gives lse, of which gradients are made (last point but one). A row that has seen
  nothing keeps m = -inf; the exponent then uses a finite number in its place, locally, so that its
  exp2 is 0 and the stored maximum stays -inf for the next block.
* A row's bits depend on that row alone: in a warp that raises, rows that held keep m.
* Where mods hide keys, which hidden blocks are left out must change no bit. There a row's m begins
  as its maximum of the first block in which it sees something, sought (``begin``) or raised, and
  all blocks sum in one order; after that a block that it does not see adds zeros. Asking in each
  masked block whether a row has seen nothing yet, to seek there, parts the mask from the
  exponentials that it could pass under.
* Where a score_mod bounds the scores (softcap), m is 0 for good (``is_bounded``).
* Where one takes MUFU itself, a share of the exponentials may pass on the FMA pipes (``How.of``).
* P of the largest score is 1 only if m is that score. Else it is rounded like every other, so where
  one key has nearly all the weight the output is off by up to 2^-9 more, relative (bf16). Through
  rowsum(O dO) that error would reach every gradient of the row.
* l is kept by thread (each has a quarter of a row's columns) and summed over the quad once, at the
  end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm, vector
from cutlass._mlir.dialects import math as math_dialect
from cutlass.cute.nvgpu import warpgroup

from fa_cute.device import emit, polynomial
from fa_cute.device.lower import takes_mufu
from fa_cute.device.mma_sm90 import (
    FRAGMENT_ROWS,
    PIECE,
    Pieces,
    by_row,
    by_rows,
    convert,
    rows_and_columns,
)
from fa_cute.mods.magnitude import largest
from fa_cute.plan import Plan

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
LARGEST_SHIFT = 2.0**127
# A thread's sum of P, and so each P, and what P V adds for values up to 2^63: none overflows.
LARGEST = {cutlass.BFloat16: 2.0**64, cutlass.Float16: 2.0**14}
# Words of a piece of P with columns (0, 2) or (1, 3) of a row, rows in turn; what parts them again.
CROSSED = [0, 4, 2, 6, 1, 5, 3, 7]
HALVES = (0x5410, 0x7632)
# Nats: sums of P over 2^20 keys stay below 2^64 so.
MOST_BOUND = 44.0 * LN_2


def exp2(x: Float32) -> Float32:
    """2^x by the hardware's approximation (relative error 2e-7); 2^-inf = 0."""
    return cute.math.exp2(x, fastmath=True)


class Registers:
    """``count`` fp32 numbers that a thread keeps; a tensor's elements trace thrice as long."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._base = cute.make_rmem_tensor(count, Float32).iterator.llvm_ptr

    def __getitem__(self, number: int) -> Float32:
        return Float32(llvm.load(Float32.mlir_type, self._place(number)))

    def __setitem__(self, number: int, value: Float32) -> None:
        llvm.store(value.ir_value(), self._place(number))

    def fill(self, value: float) -> None:
        """Each becomes ``value``."""
        for number in range(self._count):
            self[number] = Float32(value)

    def _place(self, number: int) -> Any:
        base = self._base
        return llvm.getelementptr(base.type, base, [], [number], Float32.mlir_type, None)


class RowState:
    """Maximum, sum, last rescaling factor of a thread's rows, and what a block adds to the sum."""

    def __init__(self) -> None:
        self.maximum = Registers(FRAGMENT_ROWS)
        self.sum = Registers(FRAGMENT_ROWS)
        self.scale = Registers(FRAGMENT_ROWS)
        self.added = Registers(FRAGMENT_ROWS)


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


def exponentiate(s: cute.Tensor, state: RowState, c: Float32) -> None:
    """S becomes P in place, ``(2, columns)`` fp32; ``state`` takes this block's maximum.

    ``state.scale`` is then what O is to be multiplied by.
    """
    pieces = Pieces(s)
    values = pieces.all()
    tops, shifts = _reduce(values, llvm.intr_maxnum), []
    for r in range(FRAGMENT_ROWS):
        maximum = cute.arch.fmax(state.maximum[r], _across_quad(tops[r], cute.arch.fmax))
        shifts.append(_take_maximum(state, r, maximum, c))
    shift, factor = by_row(shifts), by_row([c, c])
    for number, value in enumerate(values):
        exponent = math_dialect.fma(value, factor, shift)
        pieces.store(number, math_dialect.exp2(exponent, fastmath=arith.FastMathFlags.fast))


def shift_of(maximum: Float32, c: Float32) -> Float32:
    """-c m, to be added to c S; held below infinity, so that what is hidden comes out as 0.

    Hidden by -inf, or by fp32's lowest number, as mods written for other kernels do it: its product
    with log2 e is past fp32, and so were P, and O times 0 at the next block NaN.
    """
    return cute.arch.fmin(-maximum * c, Float32(LARGEST_SHIFT))


def is_bounded(plan: Plan) -> bool:
    """Whether the score_mod bounds the scores, whatever is given, so that m = 0 serves all rows.

    No maximum is then sought and no sum looked at: softcap full 630 -> 662 TFLOP/s, causal 585 ->
    603. Not with fp16's range, nor where maxima are sought in every block.
    """
    if plan.score_mod is None or plan.dtype != "bfloat16" or plan.seeks:
        return False
    return largest(plan.score_mod) <= MOST_BOUND


class How(NamedTuple):
    """How a kernel computes P of a block whose maximum is presumed.

    ``bounded``: under 0 (``is_bounded``). ``crossed``: its words are made for ``uncross``, and the
    P V before is not awaited yet. ``emulated``: so many pieces by polynomials.
    """

    bounded: bool = False
    crossed: bool = False
    emulated: int = 0

    @classmethod
    def of(cls, plan: Plan) -> How:
        """As the plan's mods and config have it.

        ``FwdConfig.emulated`` pieces where the score_mod takes MUFU for each score: d64 S8k softcap
        389 -> 428 TFLOP/s, causal 372 -> 401. Not where maxima are sought, as for gradients.
        """
        bounded = is_bounded(plan)  # else there is a branch to settle, and a wait behind it
        waits = plan.score_mod is not None and not plan.seeks and takes_mufu(plan.score_mod)
        return cls(bounded, plan.config.own_p and not bounded, plan.config.emulated * waits)


def begin(
    s: cute.Tensor, p: cute.Tensor, state: RowState, c: Float32, how: How, *, sought: bool
) -> None:
    """P, rounded, from the S of a tile's first block, under its own maximum; ``state`` is of it.

    ``sought``: summed as the blocks after it, whose maxima are sought: any may be the first.
    """
    state.maximum.fill(0.0 if how.bounded else -Float32.inf)
    state.sum.fill(0.0)
    if sought:
        view = rows_and_columns(s)
        exponentiate(view, state, c)
        convert(s, p)
        add_up(view, state)
    else:
        if not how.bounded:
            seek(s, state)
        presume(s, p, state, c, how._replace(crossed=False), sought=True)
        _take(state)


def seek(s: cute.Tensor, state: RowState) -> None:
    """Rows that have seen nothing take their maximum of this block's S, a fragment."""
    for r, top in enumerate(_reduce(Pieces(s).all(), llvm.intr_maxnum)):
        before = state.maximum[r]
        top = _across_quad(top, cute.arch.fmax)
        state.maximum[r] = cutlass.select_(before == -Float32.inf, top, before)


def presume(
    s: cute.Tensor,
    p: cute.Tensor,
    state: RowState,
    c: Float32,
    how: How,
    *,
    sought: bool = False,
    line: Any = None,
) -> None:
    """P, rounded, from S under the maximum of the blocks before; its sums to ``state.added``.

    ``s``, ``p``: fragments in the accumulator's order. ``sought``: rows with nothing before have
    their maximum of this block, or see nothing in it. ``line``: what the score_mod, which S has not
    had yet, adds to it (``score.Block.line``). ``settle`` must follow, unless all were sought.
    """
    maxima = [state.maximum[r] for r in range(FRAGMENT_ROWS)]
    shifts = [shift_of(m, c) if sought else -(m * c) for m in maxima]
    _powers(s, p, state, _Exponents.of(shifts, c, line, how), None)


def settle(
    s: cute.Tensor,
    p: cute.Tensor,
    o: cute.Tensor,
    state: RowState,
    c: Float32,
    how: How,
    *,
    line: Any = None,
) -> None:
    """Take what ``presume`` added into the sums; if it is too large, after raising the maximum.

    ``how.crossed``: P V is awaited behind this branch: ptxas moves a wait up over everything but a
    branch, and exponentials would follow P V where they may pass under it.
    """
    if not how.bounded:
        with emit.where(~cute.arch.vote_all_sync(_borne(state.added[0] + state.added[1], p))):
            if how.crossed:
                warpgroup.wait_group(0)
            if line is not None:
                line.block.score(rows_and_columns(s))
            _raise(s, p, o, state, c, how)
    _take(state)


def uncross(crossed: cute.Tensor, p: cute.Tensor) -> None:
    """P as wgmma reads it, from words of two columns of a row that are four apart.

    An instruction a word. Words that need none would be P's own registers for ptxas, which then
    serialises the products: the P V in flight reads those.
    """
    source, target = Pieces(crossed), Pieces(p)
    words = ir.VectorType.get([PIECE // 2], emit.integer(32))
    for number, piece in enumerate(source.all()):
        pairs = emit.lanes_in(vector.bitcast(words, piece))
        found = [_permuted(*pairs[row::2], half) for half in HALVES for row in range(FRAGMENT_ROWS)]
        target.store(number, vector.bitcast(piece.type, emit.gathered(found, PIECE // 2)))


def _permuted(low: Any, high: Any, selector: int) -> Any:
    kind, text = emit.integer(32), f"prmt.b32 $0, $1, $2, {selector};"
    return llvm.inline_asm(kind, [low, high], text, "=r,r,r", has_side_effects=True)


class _Exponents(NamedTuple):
    """P of a piece by its number: 2^(factor S + shift), of ``how.emulated`` ones by a polynomial.

    It knows no overflow: where the scores are not bounded, its argument is.
    """

    factor: Any
    shift: Callable[[int], Any]
    how: How

    @classmethod
    def of(cls, shifts: list[Float32], c: Float32, line: Any, how: How) -> _Exponents:
        if line is None:
            shift = by_row(shifts)
            return cls(by_row([c, c]), lambda number: shift, how)
        factor, rest = line.times(c.ir_value(), [shift.ir_value() for shift in shifts])
        columns = PIECE // FRAGMENT_ROWS

        def shift_at(number: int) -> Any:
            return by_rows(rest(range(columns * number, columns * (number + 1))))

        return cls(emit.splat(factor, PIECE), shift_at, how)

    def powers(self, s: cute.Tensor) -> Iterator[Any]:
        """P of each piece of ``s``."""
        pieces = Pieces(s).all()
        emulated = polynomial.chosen(len(pieces), self.how.emulated)
        for number, scores in enumerate(pieces):
            exponent = math_dialect.fma(scores, self.factor, self.shift(number))
            if number in emulated:
                yield polynomial.exp2(exponent, bounded=self.how.bounded)
            else:
                yield math_dialect.exp2(exponent, fastmath=arith.FastMathFlags.fast)


def _powers(
    s: cute.Tensor,
    p: cute.Tensor,
    state: RowState,
    exponents: _Exponents,
    kept: Any,
) -> None:
    """P by ``exponents``, rounded, except in the rows of the words ``kept``; its sums by thread."""
    rounded = Pieces(p)
    kind = ir.VectorType.get([PIECE], p.element_type.mlir_type)
    total = None
    for number, power in enumerate(exponents.powers(s)):
        ordered = vector.shuffle(power, power, CROSSED) if exponents.how.crossed else power
        words = arith.truncf(kind, ordered)
        if kept is not None:
            # So that P is used on this path too: else the compiler moves its conversion behind the
            # branch, with a register for each p until there (d64: 180 bytes spilled).
            words = _mixed(kept, rounded.load(number), words)
        rounded.store(number, words)
        # Four chains, not eight: four registers less (128 x 176, d128: 12 bytes spilled).
        half = arith.addf(emit.part(power, 0, PIECE // 2), emit.part(power, PIECE // 2, PIECE // 2))
        total = half if total is None else arith.addf(total, half)
    lanes = emit.lanes_in(total)
    for r in range(FRAGMENT_ROWS):
        state.added[r] = Float32(arith.addf(lanes[2 * r], lanes[2 * r + 1]))


def _mixed(kept: Any, old: Any, new: Any) -> Any:
    """The piece ``old`` in the 32-bit words where ``kept`` is true, else ``new``."""
    words = ir.VectorType.get([PIECE // 2], emit.integer(32))
    old, kind, new = vector.bitcast(words, old), new.type, vector.bitcast(words, new)
    return vector.bitcast(kind, arith.select(kept, old, new))


def _borne(total: Float32, p: cute.Tensor) -> Any:
    return total <= LARGEST[p.element_type]


def _take_maximum(state: RowState, r: int, maximum: Float32, c: Float32) -> Float32:
    """Row ``r``'s maximum becomes this one, ``state.scale`` what O needs for it; its shift."""
    finite = cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum)
    # The difference first: a block that raises nothing then scales by exactly 1, so that leaving
    # out a hidden block changes no bit.
    state.scale[r] = exp2((state.maximum[r] - finite) * c)
    state.maximum[r] = maximum
    return shift_of(maximum, c)


def _take(state: RowState) -> None:
    for r in range(FRAGMENT_ROWS):
        state.sum[r] = state.sum[r] + state.added[r]


def _raise(
    s: cute.Tensor, p: cute.Tensor, o: cute.Tensor, state: RowState, c: Float32, how: How
) -> None:
    """The rows whose sums were too large take their maximum, and with it l, O and P."""
    tops = _reduce(Pieces(s).all(), llvm.intr_maxnum)
    shifts, kept = [], []
    for r in range(FRAGMENT_ROWS):
        held = _borne(_across_quad(state.added[r], cute.arch.fmax), p)
        top = cute.arch.fmax(state.maximum[r], _across_quad(tops[r], cute.arch.fmax))
        maximum = cutlass.select_(held, state.maximum[r], top)
        shifts.append(_take_maximum(state, r, maximum, c))
        state.sum[r] = state.sum[r] * state.scale[r]
        kept.append(held.ir_value())
    words = emit.gathered(kept * (PIECE // 4), PIECE // 2)
    _powers(s, p, state, _Exponents.of(shifts, c, None, how), words)
    rescale(o, state)


def add_up(s: cute.Tensor, state: RowState) -> None:
    """Take P ``(2, columns)`` into the sums. Last in a block: nothing waits for it."""
    totals = _reduce(Pieces(s).all(), arith.addf)
    for r, total in enumerate(map(Float32, totals)):
        state.sum[r] = cute.math.fma(state.sum[r], state.scale[r], total)


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
