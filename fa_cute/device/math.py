"""2^x on the FMA pipes, for a share of the exponentials where MUFU would bound a kernel.

MUFU gives 16 results a clock and SM, so a 128 x 128 tile of exponentials is 1,024 cycles: as long
as its matrix products at head dim 64, and a mod with a tanh doubles it.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import arith
from cutlass._mlir.extras import types

ROUNDER = 12582912.0  # 1.5 * 2^23: added, it leaves the nearest integer in the low mantissa bits
SMALLEST = -127.0  # 2^-127 comes out as exactly 0: what a mask hides has no weight
MANTISSA = 23
# 2^f = 1 + f p(f) on [-1/2, 1/2], relative error 1.1e-4: a twentieth of bf16's half ulp.
CUBIC = (0.69328293, 0.24221096, 0.05500893)


def exp2_fma(x: Float32) -> Float32:
    """2^x for x <= 127 by Cody-Waite and a cubic (relative error 1.1e-4); 0 for x <= -127."""
    x = cute.arch.fmax(x, Float32(SMALLEST))
    shifted = x + ROUNDER
    f = x - (shifted - ROUNDER)
    p = Float32(CUBIC[2])
    for coefficient in (CUBIC[1], CUBIC[0], 1.0):
        p = cute.math.fma(p, f, Float32(coefficient))
    exponent = _bits(shifted) << MANTISSA
    word = (_bits(p) + exponent).ir_value()
    return Float32(arith.bitcast(types.f32(), word))


def _bits(x: Float32) -> Int32:
    return Int32(arith.bitcast(types.i32(), x.ir_value()))
