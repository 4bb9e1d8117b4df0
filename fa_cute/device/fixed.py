"""Sums whose bits do not depend on the order of their terms: fixed-point numbers in global memory.

An fp32 term is an integer of 24 bits times a power of two. It is added to the two of the sum's
int64 words that its bits fall in (``plan.FIXED``): integers, so that any order gives one sum, and
with 31 bits to spare, so that none overflows before 2^31 terms. Bits below 2^LOWEST are cut off. A
term that is not finite, or past the words, is counted in the last word: the sum is then NaN.
"""

from __future__ import annotations

from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm

from fa_cute.device import emit
from fa_cute.plan import FIXED

_BITS = 32  # of a term that a word takes; its others are for carries
# 150: the exponent of a float's lowest bit is its exponent field less that. Shifts clamp.
_ADD = f"""{{
.reg .pred given, fits, far, minus;
.reg .b32 bits, mantissa, place, below;
.reg .b64 term, low, high, one, at;
setp.ne.s32 given, $2, 0;
mov.b32 bits, $1;
and.b32 mantissa, bits, 0x7fffff;
or.b32 mantissa, mantissa, 0x800000;
bfe.u32 place, bits, 23, 8;
sub.s32 place, place, {150 + FIXED.lowest};
neg.s32 below, place;
max.s32 below, below, 0;
shr.u32 mantissa, mantissa, below;
max.s32 place, place, 0;
setp.ge.and.s32 far, place, {_BITS * (FIXED.words - 2)}, given;
setp.lt.and.s32 fits, place, {_BITS * (FIXED.words - 2)}, given;
and.b32 below, place, {_BITS - 1};
cvt.u64.u32 term, mantissa;
shl.b64 term, term, below;
setp.lt.s32 minus, bits, 0;
@minus neg.s64 term, term;
add.s64 high, term, 0x80000000;
shr.s64 high, high, {_BITS};
shl.b64 low, high, {_BITS};
sub.s64 low, term, low;
shr.u32 place, place, 5;
mul.wide.u32 at, place, 8;
add.s64 at, at, $0;
setp.ne.and.s64 given, low, 0, fits;
@given red.global.add.u64 [at], low;
setp.ne.and.s64 given, high, 0, fits;
@given red.global.add.u64 [at + 8], high;
mov.u64 one, 1;
@far red.global.add.u64 [$0 + {8 * (FIXED.words - 1)}], one;
}}"""


def add(place: ir.Value, value: ir.Value, where: ir.Value | None = None) -> None:
    """Add the fp32 ``value`` to the words that begin at the address ``place``, if ``where``."""
    kind = emit.integer(32)
    given = emit.constant_of(1, kind, None) if where is None else arith.extui(kind, where)
    llvm.inline_asm(
        None,
        [place, value, given],
        _ADD,
        "l,f,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
