"""The device side of ``exp2_kernel``: 2^x by the hardware and by each polynomial."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from fa_cute.device import emit, packed

THREADS = 256


class Exp2Kernel:
    """``out`` (4, n): 2^x of ``x`` (n,), n in 512s, by MUFU, then by the polynomials."""

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream):
        grid = [x.shape[0] // (2 * THREADS), 1, 1]
        self.kernel(x, out).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        at = 2 * (cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0])
        pairs = packed.Pairs(native=False)
        pair = emit.gathered([x[at].ir_value(), x[at + 1].ir_value()], 2)
        found = [packed.exp2(pair)]
        found += [pairs.exp2(pair, degree) for degree in packed.COEFFICIENTS]
        for row in cutlass.range_constexpr(len(found)):
            low, high = emit.lanes_in(found[row])
            out[row, at], out[row, at + 1] = Float32(low), Float32(high)
