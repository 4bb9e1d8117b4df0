"""One operation of a mod's graph as the compiler's operations, on a scalar or a short vector alike.

A value is an MLIR value of type bool (i1), int32 or float32: a scalar (``lanes`` None), or a vector
whose ``lanes`` are a thread's columns. A vector operation costs as much tracing as a scalar one and
lowers to the same PTX: on a fragment of 64 scores, 43 operations each traced in 16 ms as vectors
and in 400 ms as scalars (0.5 s and 1.8 s with compilation; two cores, version 4.8.1).

Approximate where the hardware is (tanh, exp, exp2, log, sin, cos, rsqrt, sqrt, reciprocal), unless
``exact`` is asked for: see ``lower``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm, math, nvvm, scf, vector

from fa_cute.mods.graph import Node

Value = Any  # an ir.Value

_FAST = arith.FastMathFlags.fast
_UNSIGNED_ZERO = arith.FastMathFlags.nsz  # 0 - x is then -x, which costs nothing
_TWO_PI = (6.2831854820251465, -1.7484556000744883e-07)  # 2 pi as two floats: their sum has 48 bits
FLOATS = {
    "float64": ir.F64Type,
    "float32": ir.F32Type,
    "float16": ir.F16Type,
    "bfloat16": ir.BF16Type,
}


class Operand(NamedTuple):
    """A value, its number where the graph has a constant, and whether it is known to be >= 0."""

    value: Value
    constant: float | int | bool | None = None
    natural: bool = False


def integer(bits: int) -> ir.Type:
    """The type of integers of ``bits`` bits; bool is the one of 1."""
    return ir.IntegerType.get_signless(bits)


def _shaped(element: ir.Type, lanes: int | None) -> ir.Type:
    return element if lanes is None else ir.VectorType.get([lanes], element)


def element_of(value: Value) -> ir.Type:
    """The type of a scalar, or of a vector's elements."""
    kind = value.type
    return kind.element_type if isinstance(kind, ir.VectorType) else kind


def lanes_of(value: Value) -> int | None:
    """The lanes of a vector, None of a scalar."""
    return value.type.shape[0] if isinstance(value.type, ir.VectorType) else None


def as_type(element: ir.Type, value: Value) -> ir.Type:
    """The type with elements ``element`` and the lanes of ``value``."""
    return _shaped(element, lanes_of(value))


def like(value: Value, number: float | int) -> Value:
    """``number`` in the type of ``value``."""
    return constant_of(number, element_of(value), lanes_of(value))


def _attribute(number: float | int, element: ir.Type) -> ir.Attribute:
    if isinstance(element, ir.IntegerType):
        return ir.IntegerAttr.get(element, int(number))
    return ir.FloatAttr.get(element, float(number))


def constant_of(number: float | int, element: ir.Type, lanes: int | None) -> Value:
    """``number`` as a scalar, or in every lane of a vector, of ``element``."""
    kind, attribute = _shaped(element, lanes), _attribute(number, element)
    if lanes is not None:
        attribute = ir.DenseElementsAttr.get_splat(kind, attribute)
    return arith.constant(kind, attribute)


def constant(number: float | int | bool, kind: str) -> Value:
    """A scalar constant of type ``kind``; an int32 outside its range wraps, as torch's does."""
    if kind == "float32":
        return constant_of(number, ir.F32Type.get(), None)
    if kind == "bool":
        return constant_of(-1 if number else 0, integer(1), None)
    return constant_of((int(number) + 2**31) % 2**32 - 2**31, integer(32), None)


def constant_lanes(numbers: Sequence[int]) -> Value:
    """A vector of int32 constants."""
    kind = ir.VectorType.get([len(numbers)], integer(32))
    attributes = [_attribute(number, integer(32)) for number in numbers]
    return arith.constant(kind, ir.DenseElementsAttr.get(attributes, kind))


def ramp(start: Value, offsets: Sequence[int], *, by_lane: bool = False) -> Value:
    """The vector ``start + offsets[i]`` of a scalar int32 or float32.

    ``by_lane``: an addition each, with its constant in the instruction. Pairs of constants, as the
    packed additions of sm_100 take them, stay in registers: 336 bytes of a row spilled with ALiBi.
    """
    element, lanes = start.type, len(offsets)
    kind = ir.VectorType.get([lanes], element)
    numbers = [_attribute(offset, element) for offset in offsets]
    steps = arith.constant(kind, ir.DenseElementsAttr.get(numbers, kind))
    if isinstance(element, ir.IntegerType):
        # Indices do not overflow; told so, the compiler compares the start with a constant.
        flags = arith.IntegerOverflowFlags.nsw
        return arith.addi(splat(start, lanes), steps, overflow_flags=flags)
    if by_lane:
        sums = [_add_float(start, arith.constant(element, number)) for number in numbers]
        return gathered(sums, lanes)
    return _add_float(splat(start, lanes), steps)


def nought() -> Any:
    """0, which the compiler does not know: no grid here has a second dimension."""
    return Int32(cute.arch.block_idx()[1])


def nought_after(value: Value) -> Any:
    """``nought``, which is there only when the float32 ``value`` is."""
    return Int32(arith.bitcast(integer(32), value)) & nought()


def line(start: Value, step: Value, offsets: Sequence[int], *, by_lane: bool = False) -> Value:
    """The vector ``start + step * offsets[i]`` of scalars float32, an fma each; as ``ramp``."""
    if by_lane:
        lanes = [math.fma(step, like(step, offset), start) for offset in offsets]
        return gathered(lanes, len(offsets))
    kind = ir.VectorType.get([len(offsets)], start.type)
    numbers = [_attribute(offset, start.type) for offset in offsets]
    steps = arith.constant(kind, ir.DenseElementsAttr.get(numbers, kind))
    return math.fma(splat(step, len(offsets)), steps, splat(start, len(offsets)))


def splat(value: Value, lanes: int) -> Value:
    """A scalar in every lane."""
    return vector.broadcast(ir.VectorType.get([lanes], value.type), value)


def part(value: Value, first: int, lanes: int) -> Value:
    """Lanes ``[first, first + lanes)`` of a vector."""
    if lanes == lanes_of(value):
        return value
    kind = ir.VectorType.get([lanes], value.type.element_type)
    return vector.extract_strided_slice(kind, value, [first], [lanes], [1])


def joined(parts: Sequence[Value]) -> Value:
    """The vectors ``parts`` one after another."""
    if len(parts) == 1:
        return parts[0]
    lanes = [lanes_of(x) for x in parts]
    whole = constant_of(0, element_of(parts[0]), sum(lanes))
    for i, x in enumerate(parts):
        whole = vector.insert_strided_slice(x, whole, [sum(lanes[:i])], [1])
    return whole


def structure(kind: ir.Type, count: int) -> ir.Type:
    """``count`` registers of type ``kind``."""
    return llvm.StructType.get_literal([kind] * count)


def registers(fragment: cute.Tensor, kind: ir.Type, count: int) -> list[Value]:
    """The first ``count`` registers of a fragment as values of type ``kind``, in its order."""
    whole = llvm.load(structure(kind, count), fragment.iterator.llvm_ptr)
    return [llvm.extractvalue(kind, whole, [i]) for i in range(count)]


def lanes_in(value: Value) -> list[Value]:
    """The scalars of a vector (of a scalar: itself)."""
    if lanes_of(value) is None:
        return [value]
    return [vector.extract(value, [], [i]) for i in range(lanes_of(value))]


def gathered(scalars: Sequence[Value], lanes: int | None) -> Value:
    """The inverse of ``lanes_in``."""
    return (
        scalars[0]
        if lanes is None
        else vector.from_elements(_shaped(scalars[0].type, lanes), scalars)
    )


def fma(a: Value, b: Value, c: Value) -> Value:
    """a b + c of float32, rounded once."""
    return math.fma(a, b, c)


_add_float = functools.partial(arith.addf, fastmath=_UNSIGNED_ZERO)


def add(a: Value, b: Value) -> Value:
    """a + b of one type; integers wrap."""
    return arith.addi(a, b) if isinstance(element_of(a), ir.IntegerType) else _add_float(a, b)


def total(values: Sequence[Value]) -> Value:
    """The sum of ``values``, in pairs."""
    values = list(values)
    while len(values) > 1:
        pairs = [add(a, b) for a, b in zip(values[::2], values[1::2])]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def accumulated(
    first: int, last: int, total: Sequence[Value], step: Callable[[Value], Sequence[Value]]
) -> tuple[Value, ...]:
    """``total`` plus ``step(j)``, part by part, for j in ``[first, last)``: a kernel's loop."""
    bounds = [constant_of(x, integer(32), None) for x in (first, last, 1)]
    loop = scf.ForOp(*bounds, list(total))
    with ir.InsertionPoint(loop.body):
        parts = step(loop.induction_variable)
        scf.YieldOp([add(a, b) for a, b in zip(loop.inner_iter_args, parts, strict=True)])
    return tuple(loop.results)


def halves(address: Value) -> tuple[Int32, Int32]:
    """A 64-bit number as its lower and its upper word."""
    upper = arith.shrui(address, constant_of(32, integer(64), None))
    return tuple(Int32(arith.trunci(integer(32), part)) for part in (address, upper))


@contextlib.contextmanager
def where(condition: Any) -> Iterator[None]:
    """What is traced inside happens where ``condition`` (a Boolean) is true, and hands nothing on.

    The compiler's own ``if`` asks what each local name becomes: 1 ms of tracing, where this is 0.1.
    """
    branch = scf.IfOp(condition.ir_value())
    with ir.InsertionPoint(branch.then_block):
        yield
        scf.YieldOp([])


def repeated(count: int, step: Callable[[Value | int], None]) -> None:
    """``step(j)`` for j in ``[0, count)``: once as it is, else in a kernel's loop."""
    if count == 1:
        step(0)
        return
    loop = scf.ForOp(*(constant_of(x, integer(32), None) for x in (0, count, 1)))
    with ir.InsertionPoint(loop.body):
        step(loop.induction_variable)
        scf.YieldOp([])


def hidden_unless(seen: Value, value: Value) -> Value:
    """float32 ``value`` where ``seen``, else -inf: one select a lane, whatever ``seen`` is made of.

    Of a select by a & b LLVM makes two, one by each; ptxas has a & b for nothing, as the second
    comparison takes the first one's predicate. A document mask has so 64 FSEL a block, not 128.
    """
    text = "selp.f32 $0, $1, 0fFF800000, $2;"

    def one(condition: Value, x: Value) -> Value:
        return llvm.inline_asm(ir.F32Type.get(), [x, condition], text, "=f,f,b")

    pairs = zip(lanes_in(seen), lanes_in(value), strict=True)
    return gathered([one(*pair) for pair in pairs], lanes_of(value))


def to_float(value: Value) -> Value:
    """int32 or bool as float32."""
    convert = arith.uitofp if element_of(value) == integer(1) else arith.sitofp
    return convert(as_type(ir.F32Type.get(), value), value)


def to_word(value: Value) -> Value:
    """The 32 bits of a bool, int32 or float32."""
    word = as_type(integer(32), value)
    if element_of(value) == integer(1):
        return arith.extui(word, value)
    return value if element_of(value) == integer(32) else arith.bitcast(word, value)


def from_word(word: Value, kind: str) -> Value:
    """The inverse of ``to_word``."""
    if kind == "bool":
        return compare("ne", word, like(word, 0))
    return word if kind == "int32" else arith.bitcast(as_type(ir.F32Type.get(), word), word)


def _each(value: Value, function: Callable[[Value], Value]) -> Value:
    return gathered([function(x) for x in lanes_in(value)], lanes_of(value))


def _reciprocal(x: Value, exact: bool) -> Value:
    return arith.divf(like(x, 1.0), x) if exact else _each(x, nvvm.rcp_approx_ftz_f)


def _turn(x: Value) -> Value:
    """x less the nearest multiple of 2 pi: the hardware's sine and cosine are for [-pi, pi].

    Good to 1e-3 up to |x| = 1e5. An fp32 angle far beyond that is known to less than a turn anyway.
    """
    turns = math.roundeven(arith.mulf(x, like(x, 1.0 / (_TWO_PI[0] + _TWO_PI[1]))))
    for piece in _TWO_PI:
        x = math.fma(turns, like(x, -piece), x)
    return x


def _sign(x: Value) -> Value:
    one, minus, zero = (like(x, number) for number in (1, -1, 0))
    negative = arith.select(compare("lt", x, zero), minus, zero)
    return arith.select(compare("lt", zero, x), one, negative)


_PREDICATES = {
    "lt": (arith.CmpFPredicate.OLT, arith.CmpIPredicate.slt, arith.CmpIPredicate.ult),
    "le": (arith.CmpFPredicate.OLE, arith.CmpIPredicate.sle, arith.CmpIPredicate.ule),
    "eq": (arith.CmpFPredicate.OEQ, arith.CmpIPredicate.eq, arith.CmpIPredicate.eq),
    "ne": (arith.CmpFPredicate.UNE, arith.CmpIPredicate.ne, arith.CmpIPredicate.ne),
}


def compare(op: str, a: Value, b: Value) -> Value:
    """``op`` ("lt", "le", "eq", "ne") of two values of one type, as booleans."""
    real, signed, truth = _PREDICATES[op]
    element = element_of(a)
    if not isinstance(element, ir.IntegerType):
        return arith.cmpf(real, a, b)
    return arith.cmpi(truth if element.width == 1 else signed, a, b)


def _floor_division(a: Operand, b: Operand) -> tuple[Value, Value]:
    """Quotient and remainder of int32 as Python has them: the remainder has the divisor's sign."""
    x, y, divisor = a.value, b.value, b.constant
    if divisor is not None and divisor > 0 and divisor & (divisor - 1) == 0:
        shift = like(x, divisor.bit_length() - 1)
        return arith.shrsi(x, shift), arith.andi(x, like(x, divisor - 1))
    if divisor is None:
        # A quotient by 0 is undefined to LLVM, which then takes it that y is none: of
        # where(q == 0, a, kv % q != 1) a backward had lost the first row's a.
        y = arith.select(compare("eq", y, like(y, 0)), like(y, 1), y)
    if a.natural and b.natural:
        return arith.divui(x, y), arith.remui(x, y)
    quotient, remainder, zero = arith.divsi(x, y), arith.remsi(x, y), like(x, 0)
    differs = compare("lt", arith.xori(remainder, y), zero)
    wrong = arith.andi(differs, compare("ne", remainder, zero))
    floored = arith.addi(quotient, arith.extsi(x.type, wrong))
    return floored, arith.select(wrong, arith.addi(remainder, y), remainder)


def _floor_division_float(x: Value, y: Value) -> tuple[Value, Value]:
    """The same of float32, as torch.floor_divide and torch.remainder have them."""
    remainder, zero = arith.remf(x, y), like(x, 0.0)
    differs = arith.xori(compare("lt", remainder, zero), compare("lt", y, zero))
    wrong = arith.andi(differs, compare("ne", remainder, zero))
    quotient = math.roundeven(arith.divf(arith.subf(x, remainder), y))
    floored = arith.select(wrong, arith.subf(quotient, like(x, 1.0)), quotient)
    divides = compare("ne", y, zero)
    floored = arith.select(divides, floored, arith.divf(x, y))
    return floored, arith.select(wrong, arith.addf(remainder, y), remainder)


def _shift(op: str, a: Operand, b: Operand) -> Value:
    """Shifts by 32 and more (and by a negative amount) as torch: all bits gone, or all the sign."""
    x, y = a.value, b.value
    if op == "shr":
        return arith.shrsi(x, arith.minui(y, like(y, 31)))
    inside = arith.cmpi(arith.CmpIPredicate.ult, y, like(y, 32))
    return arith.select(inside, arith.shli(x, arith.andi(y, like(y, 31))), like(x, 0))


def _cast(x: Value, kind: str) -> Value:
    element = element_of(x)
    if kind == "bool":
        return x if element == integer(1) else compare("ne", x, like(x, 0))
    if kind == "float32":
        return to_float(x) if isinstance(element, ir.IntegerType) else x
    if element == integer(1):
        return arith.extui(as_type(integer(32), x), x)
    return x if element == integer(32) else arith.fptosi(as_type(integer(32), x), x)


def _round_fp8(x: Value, mantissa: int, lowest: int, largest: float, beyond: float) -> Value:
    """Round half to even to ``mantissa`` bits and exponents from ``lowest`` on.

    Sizes over ``largest`` become ``beyond``. In float32 arithmetic, because the hardware converts
    two or four values at a time, and saturates where torch gives infinity.
    """
    drop = 23 - mantissa
    size = math.absf(x)
    bits = arith.bitcast(as_type(integer(32), x), size)
    odd = arith.andi(arith.shrui(bits, like(bits, drop)), like(bits, 1))
    bits = arith.addi(bits, arith.addi(odd, like(bits, (1 << drop - 1) - 1)))
    normal = arith.bitcast(x.type, arith.andi(bits, like(bits, -(1 << drop))))
    magic = like(x, 1.5 * 2.0 ** (23 + lowest - mantissa))  # its last bit is the smallest step
    small = arith.subf(arith.addf(size, magic), magic)
    rounded = arith.select(compare("lt", size, like(x, 2.0**lowest)), small, normal)
    rounded = arith.select(compare("lt", like(x, largest), rounded), like(x, beyond), rounded)
    return math.copysign(arith.select(compare("ne", x, x), x, rounded), x)


def _round_to(x: Value, dtype: str) -> Value:
    if dtype == "float8_e4m3fn":  # saturates, as torch's from 2.13 on; before, torch gave NaN
        return _round_fp8(x, 3, -6, 448.0, 448.0)
    if dtype == "float8_e5m2":
        return _round_fp8(x, 2, -14, 57344.0, float("inf"))
    if dtype in ("float32", "float64"):
        return x
    narrow = as_type(FLOATS[dtype].get(), x)
    return arith.extf(x.type, arith.truncf(narrow, x))


_MATH = {
    **{"exp": math.exp, "exp2": math.exp2, "log": math.log, "sqrt": math.sqrt, "rsqrt": math.rsqrt},
    **{"tanh": math.tanh, "erf": math.erf},
}
_ROUNDING = {"floor": math.floor, "ceil": math.ceil, "round": math.roundeven, "trunc": math.trunc}
_FLOAT = {
    "add": _add_float,
    "sub": functools.partial(arith.subf, fastmath=_UNSIGNED_ZERO),
    **{"mul": arith.mulf, "truediv": arith.divf},
    **{"minimum": llvm.intr_minimum, "maximum": llvm.intr_maximum},  # a NaN wins, as in torch
}
_INTEGER = {
    **{"add": arith.addi, "sub": arith.subi, "mul": arith.muli, "and": arith.andi, "or": arith.ori},
    **{"xor": arith.xori, "minimum": arith.minsi, "maximum": arith.maxsi},
}


def on_floats(op: str, *values: Value) -> Value:
    """``op``, one of neg, add, sub and mul, of float32."""
    return arith.negf(*values) if op == "neg" else _FLOAT[op](*values)


def operation(node: Node, operands: Sequence[Operand], *, exact: bool) -> Value:
    """``node`` (no leaf, no ``sum``) of operands that have equal lanes.

    Raises NotImplementedError for an operation that this file lacks.
    """
    values = [operand.value for operand in operands]
    x, whole = values[0], isinstance(element_of(values[0]), ir.IntegerType)
    if node.op in _MATH:
        flags = arith.FastMathFlags.none if exact else _FAST
        return _MATH[node.op](x, fastmath=flags)
    if node.op in _ROUNDING:
        return _ROUNDING[node.op](x)
    if node.op in _PREDICATES:
        return compare(node.op, *values)
    if node.op in ("floordiv", "mod"):
        both = _floor_division(*operands) if whole else _floor_division_float(*values)
        return both[node.op == "mod"]
    table = _INTEGER if whole else _FLOAT
    if node.op in table:
        return table[node.op](*values)
    return _rare(node, operands, whole, exact)


def _rare(node: Node, operands: Sequence[Operand], whole: bool, exact: bool) -> Value:
    x = operands[0].value
    if node.op == "fma":
        return math.fma(*(operand.value for operand in operands))
    if node.op == "where":
        return arith.select(x, operands[1].value, operands[2].value)
    if node.op == "cast":
        return _cast(x, node.type)
    if node.op == "neg":
        return arith.subi(like(x, 0), x) if whole else arith.negf(x)
    if node.op == "abs":
        return arith.maxsi(x, arith.subi(like(x, 0), x)) if whole else math.absf(x)
    if node.op == "sign":
        return _sign(x)
    if node.op == "not":
        return arith.xori(x, like(x, -1))
    if node.op in ("shl", "shr"):
        return _shift(node.op, *operands)
    if node.op == "reciprocal":
        return _reciprocal(x, exact)
    if node.op == "sin":
        return math.sin(_turn(x), fastmath=_FAST)
    if node.op == "cos":
        return math.cos(_turn(x), fastmath=_FAST)
    if node.op == "pow":
        return math.powf(x, operands[1].value)
    if node.op == "round_to":
        return _round_to(x, str(node.attr).removeprefix("torch."))
    raise NotImplementedError(f"the kernel emitter has no operation {node.op!r}: add it to emit.py")
