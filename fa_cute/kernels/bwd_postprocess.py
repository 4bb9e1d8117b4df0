"""After the backward on Hopper: the fp32 sums of dQ become dQ in its dtype, times the scale.

The sums lie in the order of the main kernel's accumulators, so that its reductions are 16 bytes a
thread and whole lines a warp: vector ``(group, j, t)`` of a block holds thread t's values of 8
columns j, two of row ``16 (t / 32) + (t % 32) / 4`` and two of the row 8 below. Four neighbours
make 8 columns of two rows: 64 contiguous bytes in, twice 16 bytes out.

    role    warps  does
    all     0..7   loads 64 bytes, rounds, stores 2 x 16 bytes

No barriers: every thread reads what earlier launches wrote.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from fa_cute.device import vectors
from fa_cute.plan import Extra, Launch, Plan, PostprocessIo

THREADS = 256
QUAD = 4
VECTOR = 8  # columns
DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


@dataclass(frozen=True)
class Sums:
    """The tensors, how the CTAs are numbered, and the factor."""

    io: PostprocessIo
    blocks: Int32
    heads: Int32
    scale: Float32


class BwdPostprocess:
    """The kernel of one plan; ``__call__`` is its host entry."""

    def __init__(self, plan: Plan):
        self.plan, self.config = plan, plan.config

    @cute.jit
    def __call__(self, io: PostprocessIo, extra: Extra, launch: Launch, stream):
        batch, seqlen_q, heads = (io.dq.shape[i] for i in range(3))
        blocks = cute.ceil_div(seqlen_q, self.config.tile_q)
        self.kernel(Sums(io, blocks, heads, launch.scale)).launch(
            grid=[blocks * heads * batch, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x: Sums):
        number, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        block, head = number % x.blocks, number // x.blocks % x.heads
        batch = number // x.blocks // x.heads
        sums, dq = x.io.sums[batch, head, 0, None], x.io.dq[batch, None, head, None]
        units = self.config.tile_q * self.plan.width // (2 * VECTOR)
        for i in cutlass.range_constexpr(-(-units // THREADS)):
            unit = i * THREADS + thread
            if const_expr((i + 1) * THREADS <= units) or unit < units:
                self.unit(x, (sums, dq), block, unit)

    @cute.jit
    def unit(self, x: Sums, tensors: tuple, block: Int32, unit: Int32):
        """8 columns of two rows."""
        sums, dq = tensors
        quads = 32  # of a warpgroup
        groups = self.config.consumers
        columns = self.plan.width if self.config.rows_parted else self.plan.width // groups
        across = columns // VECTOR
        j, quad, group = unit % across, unit // across % quads, unit // across // quads
        row = block * self.config.tile_q + quad // 8 * 16 + quad % 8
        column = j
        if const_expr(self.config.rows_parted):
            row = row + 64 * group
        else:
            column = column + group * across
        first = (group * across + j) * (quads * QUAD) + quad * QUAD
        base = cutlass.Int64(block) * (self.config.tile_q * self.plan.width // vectors.FLOATS)
        loaded = cute.make_rmem_tensor((vectors.FLOATS, QUAD), Float32)
        for k in cutlass.range_constexpr(QUAD):
            cute.autovec_copy(vectors.vector_of(sums, base + (first + k)), loaded[None, k])
        for r in cutlass.range_constexpr(2):
            if row + 8 * r < dq.shape[0]:
                self.store(x, loaded, r, (dq[row + 8 * r, None], column))

    @cute.jit
    def store(self, x: Sums, loaded: cute.Tensor, r: cutlass.Constexpr, target: tuple):
        """Row ``r`` of the two, unless its columns are padding."""
        row, column = target
        out = cute.make_rmem_tensor(VECTOR, DTYPES[self.plan.dtype])
        for c in cutlass.range_constexpr(VECTOR):
            value = loaded[2 * r + c % 2, c // 2] * x.scale
            out[c] = value.to(DTYPES[self.plan.dtype])
        if const_expr(self.plan.head_dim == self.plan.width):
            cute.autovec_copy(out, cute.local_tile(row, (VECTOR,), (column,)))
        elif column * VECTOR < self.plan.head_dim:
            cute.autovec_copy(out, cute.local_tile(row, (VECTOR,), (column,)))
