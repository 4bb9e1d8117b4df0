"""Before the backward on Hopper: what a row of queries gives every one of its scores.

    delta = rowsum(O * dO) - dLSE          shift = -LSE log2 e, or -inf: then P is 0

and zeroes where the main kernel adds up: the sums of dQ, if they are of the first heads (the others
are zeroed there: ``device/zeroing.py``), and the turns of a deterministic one.

One CTA of 256 threads takes a block of ``tile_q`` rows of a head; a row is read by the lanes that
its 16-byte vectors need, up to a power of two. Rows past the last query, up to whole blocks, get
delta 0 and shift -inf.

    role    warps  does
    all     0..7   loads O and dO, reduces over lanes, stores

No barriers: every thread writes what it alone knows.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, vector

from fa_cute.device import emit, vectors
from fa_cute.device.softmax import LOG2_E
from fa_cute.plan import Extra, Launch, Plan, PreprocessIo

THREADS = 256
VECTOR = 8  # elements in 16 bytes


@dataclass(frozen=True)
class Rows:
    """The tensors, and how the CTAs are numbered."""

    io: PreprocessIo
    blocks: Int32
    heads: Int32


class BwdPreprocess:
    """The kernel of one plan; ``__call__`` is its host entry."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.tile = plan.config.tile_q
        self.lanes = 1
        while self.lanes * VECTOR < plan.head_dim_v:
            self.lanes *= 2

    @cute.jit
    def __call__(self, io: PreprocessIo, extra: Extra, launch: Launch, stream):
        batch, seqlen_q, heads = (io.out.shape[i] for i in range(3))
        blocks = cute.ceil_div(seqlen_q, self.tile)
        self.kernel(Rows(io, blocks, heads)).launch(
            grid=[blocks * heads * batch, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x: Rows):
        number, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        block, head = number % x.blocks, number // x.blocks % x.heads
        batch = number // x.blocks // x.heads
        if const_expr(x.io.sums is not None):
            of_all = number // x.blocks
            if of_all < x.io.sums.shape[1]:
                self.clear(x.io.sums[0, of_all, 0, None], block, thread)
        if const_expr(x.io.zeroed is not None):
            if (thread == 0) & (head < x.io.zeroed.shape[1]):
                x.io.zeroed[batch, head, 0] = 0
        if const_expr(x.io.turns is not None):
            with emit.where(thread == 0):
                x.io.turns[batch, head, block] = 0
        lane, first = thread % self.lanes, thread // self.lanes
        step = THREADS // self.lanes
        for i in cutlass.range_constexpr(-(-self.tile // step)):
            row = block * self.tile + i * step + first
            if const_expr((i + 1) * step <= self.tile):
                self.row(x.io, (batch, head, row), lane)
            elif i * step + first < self.tile:
                self.row(x.io, (batch, head, row), lane)

    @cute.jit
    def row(self, io: PreprocessIo, at: tuple, lane: Int32):
        """One row by ``self.lanes`` lanes."""
        batch, head, row = at
        total, shift, dlse = Float32(0.0), -Float32.inf, Float32(0.0)
        if row < io.out.shape[1]:
            if const_expr(self.lanes * VECTOR == self.plan.head_dim_v):
                total = self.product(io, at, lane)
            elif lane * VECTOR < self.plan.head_dim_v:
                total = self.product(io, at, lane)
            lse = io.lse[batch, head, row]
            shift = cutlass.select_(lse == -Float32.inf, -Float32.inf, -lse * LOG2_E)
            if const_expr(io.dlse is not None):
                dlse = io.dlse[batch, head, row]
        total = self.summed(total)
        with emit.where(lane == 0):
            io.delta[batch, head, row] = total - dlse
            io.shift[batch, head, row] = shift

    def summed(self, part: Float32) -> Float32:
        """The sum over the lanes of a row."""
        distance = 1
        while distance < self.lanes:
            part = part + cute.arch.shuffle_sync_bfly(part, offset=distance)
            distance *= 2
        return part

    def product(self, io: PreprocessIo, at: tuple, lane: Int32) -> Float32:
        """The sum of O * dO over the vector of ``lane``."""
        batch, head, row = at
        kind = ir.VectorType.get([VECTOR], Float32.mlir_type)
        o, do = (
            arith.extf(kind, vectors.load(tensor[batch, row, head, None], lane))
            for tensor in (io.out, io.dout)
        )
        zero = Float32(0.0).ir_value()
        product = arith.mulf(o, do)
        return Float32(vector.reduction(zero.type, vector.CombiningKind.ADD, product, acc=zero))

    def clear(self, sums: cute.Tensor, block: Int32, thread: Int32) -> None:
        """Zero the block's part of ``sums``."""
        count = self.tile * self.plan.width // vectors.FLOATS
        zero = emit.splat(Float32(0.0).ir_value(), vectors.FLOATS)
        first = cutlass.Int64(block) * count + thread
        for i in range(count // THREADS):
            vectors.store(sums, first + i * THREADS, zero)
