"""Arithmetic on pairs of fp32, the maximum of three, and 2^x on the FMA pipes.

sm_100 computes two fp32 an instruction where they lie in neighbouring registers, and takes a
maximum of three. MUFU gives 16 exponentials a clock and SM, the time of a 128 x 128 tile's two
products at head dim 128, so a share of a row's exponentials is emulated:

    2^x = 2^n 2^f,   n = floor x,   0 <= f < 1      (Cody-Waite, by rounding down at 1.5 * 2^23)
    2^f = 1 + f (c1 + f (c2 + ...))                 degree 3, 4 or 5, minimax in relative error
    2^n                                             added to the exponent's bits

A pair is a vector of two lanes: an operation of the trace is one instruction of sm_100. Where
``native`` is False the same graph is computed lane by lane, for a GPU without these.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import arith, llvm, math, nvvm
from cutlass._mlir.extras import types

from fa_cute.device import emit

Value = Any  # of the compiler's intermediate form: fp32, or a vector of them
ROUNDER = 12582912.0  # 1.5 * 2^23: added, it leaves the integer in the low mantissa bits
SMALLEST = -127.0  # gives exactly 0: what a mask hides has no weight
MANTISSA = 23
# c1, c2, ... of 1 + c1 f + c2 f^2 + ..., minimax in relative error on [0, 1); fp32.
COEFFICIENTS = {
    3: (0.69511676, 0.227645, 0.07706704),  # 8.6e-5
    4: (0.69304484, 0.2412802, 0.05224247, 0.013426684),  # 2.9e-6
    5: (0.6931513, 0.24016444, 0.055799913, 0.009017031, 0.00186713),  # 1.4e-7, of fp32's rounding
}


def exp2(x: Value) -> Value:
    """2^x of every lane by the hardware's approximation (relative error 2e-7); 2^-inf = 0."""
    return math.exp2(x, fastmath=arith.FastMathFlags.fast)


class Pairs:
    """Operations on pairs; ``native``: two lanes an instruction."""

    def __init__(self, native: bool):
        self.native = native

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a b + c."""
        if self.native:
            return nvvm.fma_packed_f32x2(a, b, c, rnd=nvvm.FPRoundingMode.RN)
        return math.fma(a, b, c)

    def add_down(self, a: Value, b: Value) -> Value:
        """a + b rounded towards minus infinity."""
        if self.native:
            return nvvm.add_packed_f32x2(a, b, rnd=nvvm.FPRoundingMode.RM)
        lanes = zip(emit.lanes_in(a), emit.lanes_in(b), strict=True)
        return emit.gathered([_add_down(x, y) for x, y in lanes], 2)

    def maximum(self, a: Value, b: Value, c: Value) -> Value:
        """The largest of three scalars; a NaN loses."""
        if self.native:
            return nvvm.fmax(a, b, c=c)
        return nvvm.fmax(nvvm.fmax(a, b), c)

    def exp2(self, x: Value, degree: int) -> Value:
        """2^x of a pair, x < 128, exactly 0 for x <= -127, by the polynomial of ``degree``."""
        x = llvm.intr_maxnum(x, emit.like(x, SMALLEST))
        rounder = emit.like(x, ROUNDER)
        shifted = self.add_down(x, rounder)
        f = arith.subf(x, arith.subf(shifted, rounder))
        *lower, highest = (1.0, *COEFFICIENTS[degree])
        p = emit.like(x, highest)
        for coefficient in reversed(lower):
            p = self.fma(p, f, emit.like(x, coefficient))
        words = emit.as_type(types.i32(), x)
        p, shifted = arith.bitcast(words, p), arith.bitcast(words, shifted)
        exponent = arith.shli(shifted, emit.like(shifted, MANTISSA))
        return arith.bitcast(emit.as_type(types.f32(), x), arith.addi(p, exponent))


def _add_down(a: Value, b: Value) -> Value:
    found = cute.arch.inline_ptx(
        "add.rm.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Float32],
        read_only_args=[Float32(a), Float32(b)],
    )
    return found.ir_value()
