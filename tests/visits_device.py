"""A kernel of nothing but visits: each tile of keys, a CTA of one warp, writes its own down."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from fa_cute.device.visits import KeyRangeVisits
from fa_cute.mods.ranges import Ranges
from fa_cute.spans import Arithmetic, Bounds, q_spans

ARITHMETIC = Arithmetic(cutlass.min, cutlass.max)


class VisitsKernel:
    """Writes ``out (key tiles, 1 + most)``: the count, then the words in their order."""

    def __init__(self, ranges: Ranges, tile: tuple[int, int]) -> None:
        self.ranges, self.tile = ranges, tile

    @cute.jit
    def __call__(self, out, numbers, bounds: Bounds, stream):
        launched = self.kernel(out, numbers, bounds)
        launched.launch(grid=[out.shape[0], 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, out, numbers, bounds: Bounds):
        key_tile, (tile_q, tile_kv) = Int32(cute.arch.block_idx()[0]), self.tile
        first = key_tile * tile_kv
        within = q_spans(bounds, first, first + tile_kv, tile_q, ARITHMETIC)
        inputs = tuple(numbers[i] for i in range(len(self.ranges.inputs)))
        place = key_tile, (bounds.seqlen_q, bounds.seqlen_k)
        visits = KeyRangeVisits(self.ranges, inputs, place, self.tile, within)
        count = visits.count
        out[key_tile, 0] = count
        block = within.end
        for i in cutlass.range(count, unroll=1):
            visit = visits.following(i, block)
            out[key_tile, 1 + i] = visit.word()
            block = visit.block


def compiled(ranges: Ranges, tile: tuple[int, int]) -> Any:
    """The kernel for any lengths: ``(out int32, numbers int32 (inputs,), bounds)``."""
    shape, stride = (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1)
    out = make_fake_tensor(Int32, shape, stride, assumed_align=4)
    numbers = make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4)
    bounds = Bounds(*(Int32(0) for _ in range(4)))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = "--enable-tvm-ffi --gpu-arch sm_90a"
    return cute.compile(VisitsKernel(ranges, tile), out, numbers, bounds, stream, options=options)
