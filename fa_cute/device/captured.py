"""Captured tensors read in place: addresses of any rank and strides, and their elements' types.

An address is a 64-bit number of bytes, a sum of one offset a dimension, so that each part is
computed at the level of its own index. An index is clamped into its dimension: no load leaves its
tensor, not in the last tiles either, whose rows and columns go on past the ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm

from fa_cute.device import emit
from fa_cute.device.emit import Value

_GLOBAL = 1  # the address space of global memory
_BITS = {
    **{"bool": 8, "uint8": 8, "int8": 8, "uint16": 16, "int16": 16, "uint32": 32, "int32": 32},
    **{"uint64": 64, "int64": 64, "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16},
    **{"float8_e4m3fn": 8, "float8_e5m2": 8},
}


@dataclass(frozen=True)
class Source:
    """A captured tensor: its address, and per dimension the last index and the stride in bytes.

    All are scalars that every thread has alike, so they live in uniform registers.
    """

    dtype: str
    address: Value
    last: tuple[Value, ...]
    strides: tuple[Value, ...]

    @staticmethod
    def of(tensor: cute.Tensor, dtype: str) -> Source:
        """``tensor`` holds ``dtype`` (torch's name); bool as bytes."""
        if dtype not in _BITS:
            raise NotImplementedError(
                f"captured tensors of {dtype} have no loads: use one of {list(_BITS)}"
            )
        size = _BITS[dtype] // 8
        shape = tensor.shape if isinstance(tensor.shape, tuple) else (tensor.shape,)
        strides = tensor.stride if isinstance(tensor.stride, tuple) else (tensor.stride,)
        return Source(
            dtype,
            tensor.iterator.toint().ir_value(),
            tuple((Int32(extent) - 1).ir_value() for extent in shape),
            tuple((Int64(stride) * size).ir_value() for stride in strides),
        )

    def offset(self, dimension: int, index: emit.Operand) -> Value:
        """The bytes that ``index`` adds: wrapped once if negative, then clamped."""
        value = index.value
        last = _across(self.last[dimension], value)
        stride = _across(self.strides[dimension], value)
        if not index.natural:
            wrapped = arith.addi(value, arith.addi(last, emit.like(value, 1)))
            value = arith.select(emit.compare("lt", value, emit.like(value, 0)), wrapped, value)
            value = arith.maxsi(value, emit.like(value, 0))
        value = arith.minsi(value, last)
        return arith.muli(arith.extsi(emit.as_type(emit.integer(64), value), value), stride)

    def step(self, address: Value, component: int | Value) -> Value:
        """``address`` moved on by ``component`` (int or scalar) places of the last dimension."""
        wide, known = emit.integer(64), isinstance(component, int)
        places = emit.constant_of(component, wide, None) if known else arith.extui(wide, component)
        return arith.addi(address, _across(arith.muli(self.strides[-1], places), address))

    def load(self, address: Value) -> Value:
        """The elements at ``address`` (a scalar, or one a lane) as bool, int32 or float32."""
        bits = _BITS[self.dtype]
        raw = emit.FLOATS[self.dtype].get() if self.dtype in emit.FLOATS else emit.integer(bits)
        kind = llvm.PointerType.get(_GLOBAL)
        pointers = [llvm.inttoptr(kind, place) for place in emit.lanes_in(address)]
        # Nobody writes a captured tensor while a kernel runs: the load may be non-coherent.
        found = [llvm.load(raw, p, alignment=bits // 8, invariant=True) for p in pointers]
        return _widened(emit.gathered(found, emit.lanes_of(address)), self.dtype)


def _across(scalar: Value, value: Value) -> Value:
    """``scalar`` in as many lanes as ``value`` has."""
    lanes = emit.lanes_of(value)
    return scalar if lanes is None else emit.splat(scalar, lanes)


def _widened(x: Value, dtype: str) -> Value:
    single, word = emit.as_type(ir.F32Type.get(), x), emit.as_type(emit.integer(32), x)
    if dtype == "float64":
        return arith.truncf(single, x)
    if dtype in emit.FLOATS:
        return x if dtype == "float32" else arith.extf(single, x)
    if dtype.startswith("float8"):
        return _from_fp8(arith.extui(emit.as_type(emit.integer(16), x), x), dtype)
    if dtype == "bool":
        return emit.compare("ne", x, emit.like(x, 0))
    if _BITS[dtype] >= 32:
        return x if _BITS[dtype] == 32 else arith.trunci(word, x)
    return (arith.extui if dtype.startswith("u") else arith.extsi)(word, x)


def _from_fp8(byte: Value, dtype: str) -> Value:
    """fp8 is fp16 with fewer bits: e5m2 its upper byte; e4m3fn, one bit lower, 2**8 too small."""
    half, single = emit.as_type(ir.F16Type.get(), byte), emit.as_type(ir.F32Type.get(), byte)
    if dtype == "float8_e5m2":
        return arith.extf(single, arith.bitcast(half, arith.shli(byte, emit.like(byte, 8))))
    sign = arith.shli(arith.andi(byte, emit.like(byte, 0x80)), emit.like(byte, 8))
    rest = arith.andi(byte, emit.like(byte, 0x7F))
    bits = arith.ori(sign, arith.shli(rest, emit.like(byte, 7)))
    value = arith.extf(single, arith.bitcast(half, bits))
    value = arith.mulf(value, emit.like(value, 256.0))
    is_nan = emit.compare("eq", rest, emit.like(rest, 0x7F))
    return arith.select(is_nan, emit.like(value, float("nan")), value)
