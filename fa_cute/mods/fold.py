"""Arithmetic on constants, as the graph's types have it: int32 wraps, float32 never overflows.

Floats are kept in double precision, so that an fp64 run on the CPU sees the number that the user
wrote; a result that fp32 could not hold as a normal number is left for run time.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Sequence

from fa_cute.mods.errors import Untraceable

Number = bool | int | float

_LARGEST, _SMALLEST = 3.4028234663852886e38, 1.1754943508222875e-38
_INT32 = range(-(2**31), 2**31)


def number(value: Number, type: str) -> Number:
    """``value`` as a constant of a type; an int32 that does not fit raises ``Untraceable``."""
    if type == "bool":
        return bool(value)
    if type == "float32":
        return float(value)
    if int(value) not in _INT32:
        raise Untraceable(
            f"the integer {value} does not fit in int32, which is what indices are computed in; "
            "write it as a float, or keep it below 2**31"
        )
    return int(value)


def fold(op: str, values: Sequence[Number], operand: str, type: str) -> Number | None:
    """The value of an operation on constants of type ``operand``, or None where it is not known."""
    if op == "where":
        return values[1] if values[0] else values[2]
    if op == "cast":
        return _cast(values[0], operand, type)
    table = {"float32": _FLOAT, "int32": _INT, "bool": _BOOL}[operand]
    function = table.get(op)
    if function is None or any(value != value for value in values):
        return None
    try:
        result = function(*values)
    except (ArithmeticError, ValueError):
        return None
    return _settled(result, values, type)


def _settled(result: Number, values: Sequence[Number], type: str) -> Number | None:
    if type == "int32":
        return (result + 2**31) % 2**32 - 2**31
    if type == "float32" and not isinstance(result, complex):
        infinite = any(math.isinf(value) for value in values)
        if result != result or (math.isinf(result) and not infinite):
            return None
        fits = result == 0 or math.isinf(result) or _SMALLEST <= abs(result) <= _LARGEST
        return float(result) if fits else None
    return result if type == "bool" else None


def _cast(value: Number, operand: str, type: str) -> Number | None:
    if type == "bool":
        return value != 0
    if type == "float32":
        # As an integer becomes fp32: large ones are rounded.
        return struct.unpack("f", struct.pack("f", value))[0]
    whole = int(value) if math.isfinite(value) else None
    return whole if whole is not None and whole in _INT32 else None


def _sign(value: float) -> float:
    return float((value > 0) - (value < 0))


_COMPARE: dict[str, Callable] = {
    "lt": operator.lt,
    "le": operator.le,
    "eq": operator.eq,
    "ne": operator.ne,
}
_ARITHMETIC: dict[str, Callable] = {
    **_COMPARE,
    "neg": operator.neg,
    "abs": abs,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "minimum": min,
    "maximum": max,
    "sign": _sign,
}
_BITS: dict[str, Callable] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
_BOOL = {**_BITS, "not": operator.not_, "eq": operator.eq, "ne": operator.ne}
_INT = {
    **_ARITHMETIC,
    **_BITS,
    "sign": lambda value: (value > 0) - (value < 0),
    "not": operator.invert,
    "shl": operator.lshift,
    "shr": operator.rshift,
}
_FLOAT = {
    **_ARITHMETIC,
    "truediv": operator.truediv,
    "pow": math.pow,
    "exp": math.exp,
    "exp2": lambda value: math.pow(2.0, value),
    "log": math.log,
    "sqrt": math.sqrt,
    "rsqrt": lambda value: 1.0 / math.sqrt(value),
    "tanh": math.tanh,
    "sigmoid": lambda value: 1.0 / (1.0 + math.exp(-value)),
    "sin": math.sin,
    "cos": math.cos,
    "erf": math.erf,
    "floor": math.floor,
    "ceil": math.ceil,
    "round": round,
    "trunc": math.trunc,
}
