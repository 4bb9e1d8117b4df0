"""2^x on the FMA pipes, for a share of the exponentials where MUFU is what a block waits for.

    x = n + f,   n = round x   (added to 1.5 * 2^23, whose low bits it then is),   |f| <= 1/2
    2^f = 1 + f (c1 + f (c2 + f c3))        minimax in relative error, 1.0e-4: bf16 rounds P by 2e-3
    2^n                                     a float made of the bits of n

Ten instructions a value (three FADD, three FFMA, one FMUL, two FMNMX, one LEA; two FMNMX more where
the scores are not bounded). ``device/packed.py`` has sm_100's.
"""

from __future__ import annotations

from typing import Any

from cutlass._mlir.dialects import arith, math
from cutlass._mlir.extras import types

from fa_cute.device import emit
from fa_cute.device.packed import MANTISSA, ROUNDER, SMALLEST

Value = Any  # of the compiler's intermediate form: a vector of fp32
LARGEST = 127.0
ONE = 0x3F800000
COEFFICIENTS = (0.6932829, 0.24221095, 0.05500889)


def exp2(x: Value, *, bounded: bool) -> Value:
    """2^x of every lane; exactly 0 for x <= -127, 2^127 above it, NaN for NaN.

    ``bounded``: none is above 127.

    A NaN passes the maximum, and the product: added to the exponent's bits, 2^n would make a large
    number of it.
    """
    x = arith.maximumf(x, emit.like(x, SMALLEST))
    if not bounded:
        x = arith.minimumf(x, emit.like(x, LARGEST))
    rounder = emit.like(x, ROUNDER)
    shifted = arith.addf(x, rounder)
    f = arith.subf(x, arith.subf(shifted, rounder))
    power = emit.like(x, COEFFICIENTS[-1])
    for coefficient in (*COEFFICIENTS[-2::-1], 1.0):
        power = math.fma(power, f, emit.like(x, coefficient))
    bits = arith.bitcast(emit.as_type(types.i32(), x), shifted)
    bits = arith.shli(bits, emit.like(bits, MANTISSA))
    scale = arith.addi(bits, emit.like(bits, ONE))
    return arith.mulf(power, arith.bitcast(emit.as_type(types.f32(), x), scale))


def chosen(pieces: int, count: int) -> frozenset[int]:
    """``count`` of the numbers below ``pieces``, evenly spread: between them MUFU has its own."""
    return frozenset((2 * i + 1) * pieces // (2 * count) for i in range(count))
