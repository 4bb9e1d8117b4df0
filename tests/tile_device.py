"""The device side of ``tile_kernel``: the only module of the tests that imports the compiler."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from fa_cute.device.mma_sm90 import column_of, fragment, row_of
from fa_cute.device.score import Modifier, Scratch, deal, scratch_words
from tests.tile_kernel import ROWS, THREADS


class TileKernel:
    """Rows of ``scores`` and ``out`` are queries, columns keys; ``transposed``, the other way."""

    def __init__(
        self, graphs: tuple, kinds: tuple[str, ...], tile_n: int, transposed: bool
    ) -> None:
        self.graphs, self.kinds, self.tile_n, self.transposed = graphs, kinds, tile_n, transposed

    @cute.jit
    def __call__(self, scores, out, captured, scalars, scale: Float32, stream):
        batch, heads, rows, _ = scores.shape
        grid = [rows // ROWS, heads, batch]
        launched = self.kernel(scores, out, captured, scalars, scale)
        launched.launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, scores, out, captured, scalars, scale: Float32):
        tile, h, b = cute.arch.block_idx()
        part = fragment(self.tile_n, transposed=self.transposed)
        words = max(scratch_words(graph, part) for graph in self.graphs)
        scratch = None
        if const_expr(words > 0):
            smem = cutlass.memory.SmemAllocator()
            scratch = Scratch(smem.allocate_array(Float32, words), 1)
        given = deal(self.graphs, captured, scalars)
        for i in cutlass.range_constexpr(len(self.graphs)):
            graph = self.graphs[i]
            mod = Modifier.of(graph, given[i], scale=scale, fragment=part, scratch=scratch)
            target = out[i, b, h, None, None]
            self.sweep(i, mod, mod.tile(b, h).rows(tile * ROWS), scores[b, h, None, None], target)

    @cute.jit
    def sweep(self, i: cutlass.Constexpr, mod, rows, source, target):
        thread = cute.arch.thread_idx()[0]
        row = cute.arch.block_idx()[0] * ROWS + row_of(thread)
        groups = self.tile_n // 8
        for j in cutlass.range(source.shape[1] // self.tile_n, unroll=1):
            s = cute.make_rmem_tensor(
                cute.make_layout((2, (2, groups)), stride=(2, (1, 4))), Float32
            )
            first = j * self.tile_n
            block = rows.block(first)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(self.tile_n // 4):
                    s[r, c] = source[row + 8 * r, first + 2 * (thread % 4) + column_of(c)]
            if const_expr(self.kinds[i] == "score"):
                block.score(s)
            else:
                block.hide(s)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(self.tile_n // 4):
                    column = first + 2 * (thread % 4) + column_of(c)
                    target[row + 8 * r, column] = s[r, c] * mod.gain
