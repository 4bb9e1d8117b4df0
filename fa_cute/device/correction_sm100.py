"""What becomes of O outside of the products: rescaled between blocks, at last divided and stored.

One warpgroup's work for all tiles of a CTA, a thread a row of each in turn. The softmax of a tile
sends a message a block, a row's factor on O, and at the end the row's sum and maximum. O is
rescaled only where some row of a warp has a factor below 1, which is where its maximum rose by more
than log2 256 = 8. The factors of a tile's first block are passed over: no O is there yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa_cute.device import emit, rows, tmem
from fa_cute.device import softmax_sm100 as softmax
from fa_cute.device.mma_sm100 import ROWS
from fa_cute.plan import Plan

PIECE = 16  # columns of O moved at a time; 32 take 56 registers, not 40


@dataclass(frozen=True)
class Work:
    """A tile of queries: where O lies and goes.

    ``stat``: fp32 (row, 2, stages, tiles), the messages. ``out`` (rows, Dv) and ``lse`` (rows,) or
    None are those of a head, in which this thread has row ``row`` of the CTA's first 128; rows from
    ``end`` on are padding. ``sink``: the head's, or None. ``gain``: what makes a score an exponent.
    """

    memory: Any
    stat: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor | None
    row: Int32
    end: Int32
    sink: Float32 | None
    gain: Float32

    def target(self, t: Int32) -> rows.Target:
        """Where this thread's row of the CTA's tile ``t`` goes."""
        return rows.Target(self.out, self.lse, self.row + t * ROWS, self.end)


class Correction:
    """The correction of one plan, whose O of 16-bit ``dtype`` lies in ``columns``."""

    def __init__(self, plan: Plan, dtype: type, columns: dict[str, tmem.Columns]):
        self.dtype, self.columns, self.tiles = dtype, columns, plan.config.q_tiles
        self.pieces = range(0, plan.width_v, PIECE)

    @cute.jit
    def tile(self, work: Work, rings, blocks: Int32):
        """A tile that sees ``blocks`` of keys."""
        for t in cutlass.range(self.tiles, unroll=1):
            self.ignore(rings, t)
        rings.stat.passed()
        for _ in cutlass.range(blocks - 1, unroll=1):
            for t in cutlass.range(self.tiles, unroll=1):
                self.rescale(work, rings, t)
            rings.stat.passed()
            rings.o.passed()
        for t in cutlass.range(self.tiles, unroll=1):
            self.finish(work, rings, t)
        rings.stat.passed()
        rings.o.passed()
        return rings

    @cute.jit
    def nothing(self, work: Work):
        """A tile whose rows see no key: zeros, and -inf or the sink."""
        for t in cutlass.range(self.tiles, unroll=1):
            self.clear(work, t)

    def ignore(self, rings: Any, t: Int32) -> None:
        """Pass over a message."""
        rings.stat.of(t).take().release()

    def rescale(self, work: Work, rings: Any, t: Int32) -> None:
        """Multiply O of tile ``t`` by a block's factors, where some row of the warp needs it."""
        with rings.stat.of(t).drain() as message:
            factor = work.stat[_thread(), 0, message.index, t]
        o = rings.o.of(t).take()
        work.memory.entered()
        self.multiply_row(work.memory, tmem.column_of(self.columns, "o", t), factor)
        o.release()

    def multiply_row(self, memory: Any, column: Int32, factor: Float32) -> None:
        """Multiply this thread's row of O by ``factor``; nothing where every one is 1."""
        with emit.where(cute.arch.vote_any_sync(factor < 1.0)):
            rows.rewrite(memory, column, self.pieces, lambda o, at: rows.scaled(o, factor))

    def finish(self, work: Work, rings: Any, t: Int32) -> None:
        """Divide O of tile ``t`` by its sums; store it and the log-sum-exp."""
        with rings.stat.of(t).drain() as message:
            total, maximum = (work.stat[_thread(), i, message.index, t] for i in range(2))
        factor, log = softmax.finish(maximum, total, work.gain, work.sink)
        o = rings.o.of(t).take()
        work.memory.entered()
        target, first = work.target(t), tmem.column_of(self.columns, "o", t)
        for at in self.pieces:
            piece = work.memory.load(first + at, PIECE)
            work.memory.loaded()
            target.store(rows.rounded(rows.scaled(piece, factor), self.dtype), at)
        o.release()
        target.store_log(log)

    def clear(self, work: Work, t: Int32) -> None:
        """Zeros for the rows of tile ``t``."""
        target = work.target(t)
        for at in self.pieces:
            target.store(emit.constant_of(0, emit.integer(32), PIECE // 2), at)
        target.store_log(-Float32.inf if work.sink is None else work.sink)


def _thread() -> Int32:
    return cute.arch.thread_idx()[0] % ROWS
