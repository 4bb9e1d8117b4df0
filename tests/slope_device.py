"""The device side of ``slope_kernel``: a mod's derivative on transposed fragments."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from fa_cute.device import gradient
from fa_cute.device.mma_sm90 import column_of, fragment, row_of
from fa_cute.device.score import Modifier, Scratch, deal, scratch_words
from fa_cute.mods.graph import Graph
from tests.tile_kernel import ROWS, THREADS


class SlopeKernel:
    """Rows of ``scores`` and of what is written are keys, columns queries."""

    def __init__(self, graph: Graph, tile_q: int) -> None:
        self.graph, self.tile_q = graph, tile_q

    @cute.jit
    def __call__(self, scores, weights, out, given, scale: Float32, stream):
        batch, heads, rows, _ = scores.shape
        launched = self.kernel(scores, weights, out, given, scale)
        launched.launch(grid=[rows // ROWS, heads, batch], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, scores, weights, out, given, scale: Float32):
        tile, h, b = cute.arch.block_idx()
        part = fragment(self.tile_q, transposed=True)
        words, diagonals = scratch_words(self.graph, part), gradient.scratch_words(self.graph, part)
        scratch, allocator = None, cutlass.memory.SmemAllocator()
        if const_expr(words > 0):
            scratch = Scratch(allocator.allocate_array(Float32, words), 1)
        captured, scalars, targets = given
        (operands,) = deal((self.graph,), captured, scalars)
        mod = Modifier.of(self.graph, operands, scale=scale, fragment=part, scratch=scratch)
        own = None
        if const_expr(diagonals > 0):
            own = allocator.allocate_array(Float32, diagonals)
        collector = gradient.Collector.of(mod, targets, own)
        collector.clear()
        rows = mod.tile(b, h).rows(tile * ROWS)
        here = (scores[b, h, None, None], weights[b, h, None, None], out[b, h, None, None])
        self.sweep(collector, rows, here)
        collector.flush(rows)

    @cute.jit
    def sweep(self, collector, rows, here):
        scores, weights, out = here
        thread = cute.arch.thread_idx()[0]
        row = cute.arch.block_idx()[0] * ROWS + row_of(thread)
        layout = cute.make_layout((2, (2, self.tile_q // 8)), stride=(2, (1, 4)))
        for j in cutlass.range(scores.shape[1] // self.tile_q, unroll=1):
            s, ds = cute.make_rmem_tensor(layout, Float32), cute.make_rmem_tensor(layout, Float32)
            first = j * self.tile_q
            block = rows.block(first)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(self.tile_q // 4):
                    column = first + 2 * (thread % 4) + column_of(c)
                    s[r, c] = scores[row + 8 * r, column]
                    ds[r, c] = weights[row + 8 * r, column]
            slopes = block.differentiate(s)
            collector.add(block, slopes, ds)
            slopes.apply(ds)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(self.tile_q // 4):
                    out[row + 8 * r, first + 2 * (thread % 4) + column_of(c)] = ds[r, c]
