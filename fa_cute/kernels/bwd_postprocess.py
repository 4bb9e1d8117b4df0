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
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import arith, vector

from fa_cute.device import emit, vectors
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
            if const_expr((i + 1) * THREADS <= units):
                self.unit(x, (sums, dq), block, unit)
            elif unit < units:
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
        loaded = [vectors.load(sums, base + (first + k)) for k in range(QUAD)]
        for r in cutlass.range_constexpr(2):
            real = row + 8 * r < dq.shape[0]
            if const_expr(self.plan.head_dim < self.plan.width):
                real = real & (column * VECTOR < self.plan.head_dim)
            with emit.where(real):
                vectors.store(dq[row + 8 * r, None], column, self.rounded(x, loaded, r))

    def rounded(self, x: Sums, loaded: list, r: int) -> Any:
        """The 8 columns of row ``r``, times the scale, in dQ's dtype."""
        halves = [2 * r, 2 * r + 1, QUAD + 2 * r, QUAD + 2 * r + 1]
        pairs = [vector.shuffle(*loaded[at : at + 2], halves) for at in (0, 2)]
        columns = vector.shuffle(*pairs, list(range(VECTOR)))
        scaled = arith.mulf(columns, emit.splat(x.scale.ir_value(), VECTOR))
        return arith.truncf(emit.as_type(DTYPES[self.plan.dtype].mlir_type, scaled), scaled)
