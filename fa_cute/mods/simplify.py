"""The rewriting rules of the canonical form, one function an operation.

A rule gets the builder, the operands (commutative ones already in order, a constant last), the
numbers that the operands are (None for what is not constant) and the type of the result; it
returns the node to use instead, or None. Rules are exact for int32 and bool. For float32 they are
exact except for the sign of a zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from fa_cute.mods.errors import Untraceable

if TYPE_CHECKING:
    from fa_cute.mods.canonical import Builder

Args = tuple[int, ...]
Values = list
_LEAST, _MOST = -(2**31), 2**31 - 1
_NEGATED = {"eq": "ne", "ne": "eq"}
_WHOLE = ("floor", "ceil", "round", "trunc")


def _is(value: object, number: float) -> bool:
    return value is not None and value == number


def _known(value: object) -> bool:
    """A constant that is not NaN (which does not fold, so rules that expect it to would loop)."""
    return value is not None and value == value


def _constant_on_right(b: Builder, op: str, at: int) -> tuple[int, float] | None:
    """(x, c) when node ``at`` is ``op(x, constant c)``."""
    args = b.nodes[at].args
    if b.nodes[at].op == op and b.value(args[1]) is not None:
        return args[0], b.value(args[1])
    return None


def _add(b: Builder, args: Args, values: Values, type: str) -> int | None:
    x, y = args
    if _is(values[1], 0):
        return x
    for left, right in ((x, y), (y, x)):
        if b.nodes[right].op == "neg":
            return b.make("sub", left, b.nodes[right].args[0], type=type)
    inner = _constant_on_right(b, "add", x) if type == "int32" else None
    if inner and values[1] is not None:
        total = b.make("add", b.const(inner[1], type), y, type=type)
        return b.make("add", inner[0], total, type=type)
    return None


def _sub(b: Builder, args: Args, values: Values, type: str) -> int | None:
    x, y = args
    if x == y and type == "int32":
        return b.const(0, type)
    if _is(values[0], 0):
        return b.make("neg", y, type=type)
    if _known(values[1]):
        return b.make("add", x, b.make("neg", y, type=type), type=type)
    if b.nodes[y].op == "neg":
        return b.make("add", x, b.nodes[y].args[0], type=type)
    return None


def _mul(b: Builder, args: Args, values: Values, type: str) -> int | None:
    x, y = args
    if _is(values[1], 1):
        return x
    if _is(values[1], -1):
        return b.make("neg", x, type=type)
    if _is(values[1], 0) and type == "int32":
        return y
    if _known(values[1]) and b.nodes[x].op == "neg":
        return b.make("mul", b.nodes[x].args[0], b.make("neg", y, type=type), type=type)
    inner = _constant_on_right(b, "mul", x) if type == "int32" else None
    if inner and values[1] is not None:
        factor = b.make("mul", b.const(inner[1], type), y, type=type)
        return b.make("mul", inner[0], factor, type=type)
    return None


def _truediv(b: Builder, args: Args, values: Values, type: str) -> int | None:
    divisor = values[1]
    if divisor is None or divisor == 0 or not math.isfinite(divisor):
        return None
    # Dividing by a power of two is multiplying by its inverse, bit for bit.
    if abs(math.frexp(divisor)[0]) == 0.5 and 2.0**-100 < abs(divisor) < 2.0**100:
        return b.make("mul", args[0], b.const(1.0 / divisor, type), type=type)
    return None


def _floordiv(b: Builder, args: Args, values: Values, type: str) -> int | None:
    bits = _power_of_two(values[1], type)
    if bits is None:
        return None
    return b.make("shr", args[0], b.const(bits, type), type=type)


def _mod(b: Builder, args: Args, values: Values, type: str) -> int | None:
    bits = _power_of_two(values[1], type)
    if bits is None:
        return None
    return b.make("and", args[0], b.const(2**bits - 1, type), type=type)


def _power_of_two(value: object, type: str) -> int | None:
    if value is None or type != "int32":
        return None
    if value == 0:
        raise Untraceable("an integer is divided by the constant 0; use another divisor")
    return value.bit_length() - 1 if value > 0 and value & (value - 1) == 0 else None


def _pow(b: Builder, args: Args, values: Values, type: str) -> int | None:
    x, exponent = args[0], values[1]
    if _is(values[0], 2):
        return b.make("exp2", args[1], type=type)
    if exponent is None:
        return None
    if exponent == 0:
        return b.const(1.0, type)
    if exponent in (0.5, -0.5):
        return b.make("sqrt" if exponent > 0 else "rsqrt", x, type=type)
    if abs(exponent) in (1, 2, 3, 4):
        power = x
        if abs(exponent) > 1:
            power = b.make("mul", x, x, type=type)
        if abs(exponent) > 2:
            power = b.make("mul", power, x if abs(exponent) == 3 else power, type=type)
        return power if exponent > 0 else b.make("truediv", b.const(1.0, type), power, type=type)
    return None


def _neg(b: Builder, args: Args, values: Values, type: str) -> int | None:
    node = b.nodes[args[0]]
    if node.op == "neg":
        return node.args[0]
    if node.op == "sub" and type == "int32":
        return b.make("sub", node.args[1], node.args[0], type=type)
    product = _constant_on_right(b, "mul", args[0])
    if product:
        factor = b.make("neg", b.const(product[1], type), type=type)  # of -2**31 it is itself
        return b.make("mul", product[0], factor, type=type)
    return None


def _abs(b: Builder, args: Args, values: Values, type: str) -> int | None:
    node = b.nodes[args[0]]
    if node.op == "abs":
        return args[0]
    if node.op == "neg":
        return b.make("abs", node.args[0], type=type)
    if node.op == "sub":
        left, right = node.args
        if b.order(right) < b.order(left):
            return b.make("abs", b.make("sub", right, left, type=type), type=type)
    return None


def _extremum(b: Builder, args: Args, values: Values, type: str) -> int | None:
    return args[0] if args[0] == args[1] else None


def _and(b: Builder, args: Args, values: Values, type: str) -> int | None:
    if args[0] == args[1] or _is(values[1], -1 if type == "int32" else 1):
        return args[0]
    return args[1] if _is(values[1], 0) else None


def _or(b: Builder, args: Args, values: Values, type: str) -> int | None:
    if args[0] == args[1] or _is(values[1], 0):
        return args[0]
    return args[1] if _is(values[1], -1 if type == "int32" else 1) else None


def _xor(b: Builder, args: Args, values: Values, type: str) -> int | None:
    if args[0] == args[1]:
        return b.const(0, type)
    if _is(values[1], 0):
        return args[0]
    if _is(values[1], -1 if type == "int32" else 1):
        return b.make("not", args[0], type=type)
    return None


def _not(b: Builder, args: Args, values: Values, type: str) -> int | None:
    node = b.nodes[args[0]]
    if node.op == "not":
        return node.args[0]
    if node.op in _NEGATED:
        return b.make(_NEGATED[node.op], *node.args, type="bool")
    # not (x < y) is y <= x where nothing is NaN: for integers.
    if node.op in ("lt", "le") and b.nodes[node.args[0]].type == "int32":
        return b.make("le" if node.op == "lt" else "lt", *node.args[::-1], type="bool")
    return None


def _shift(b: Builder, args: Args, values: Values, type: str) -> int | None:
    if values[1] is not None and not 0 <= values[1] < 32:
        raise Untraceable(f"an int32 is shifted by {values[1]}; shift by 0 to 31 bits")
    return args[0] if _is(values[1], 0) else None


def _lt(b: Builder, args: Args, values: Values, type: str) -> int | None:
    """Of integers: never with itself; with a constant it is ``le``, to have one spelling."""
    x, y = args
    if b.nodes[x].type != "int32":
        return None
    if x == y or _is(values[1], _LEAST) or _is(values[0], _MOST):
        return b.const(False, "bool")
    if values[1] is not None:
        return b.make("le", x, b.const(values[1] - 1, "int32"), type="bool")
    if values[0] is not None:
        return b.make("le", b.const(values[0] + 1, "int32"), y, type="bool")
    return None


def _le(b: Builder, args: Args, values: Values, type: str) -> int | None:
    if b.nodes[args[0]].type != "int32":
        return None
    always = args[0] == args[1] or _is(values[0], _LEAST) or _is(values[1], _MOST)
    return b.const(True, "bool") if always else None


def _equality(equal: bool) -> Callable:
    """eq (``equal``) and ne: with itself, of a bool with a constant, of a bool cast to a number."""

    def rule(b: Builder, args: Args, values: Values, type: str) -> int | None:
        x, y = args
        if x == y and b.nodes[x].type != "float32":
            return b.const(equal, "bool")
        if values[1] is None:
            return None
        if b.nodes[x].type == "bool":
            return x if values[1] == equal else b.make("not", x, type="bool")
        source = b.nodes[x].args[0] if b.nodes[x].op == "cast" else None
        if source is not None and b.nodes[source].type == "bool":
            if values[1] in (0, 1):
                return rule(b, (source, y), [None, values[1] == 1], type)
            return b.const(not equal, "bool")
        return None

    return rule


def _where(b: Builder, args: Args, values: Values, type: str) -> int | None:
    condition, x, y = args
    if values[0] is not None:
        return x if values[0] else y
    if x == y:
        return x
    asked = b.nodes[condition]
    if asked.op == "not":
        return b.make("where", asked.args[0], y, x, type=type)
    # One spelling of each choice where the negation is exact: on eq, on le, on x <= constant.
    integers = bool(asked.args) and b.nodes[asked.args[0]].type == "int32"
    backward = asked.op == "le" and b.value(asked.args[0]) is not None
    if asked.op == "ne" or (integers and (asked.op == "lt" or backward)):
        return b.make("where", b.make("not", condition, type="bool"), y, x, type=type)
    if type != "bool":
        return None
    if values[1] is not None and values[2] is not None:
        return condition if values[1] else b.make("not", condition, type="bool")
    otherwise = b.make("not", condition, type=type)
    if values[1] is not None:
        op, asked = ("or", condition) if values[1] else ("and", otherwise)
        return b.make(op, asked, y, type=type)
    if values[2] is not None:
        op, asked = ("or", otherwise) if values[2] else ("and", condition)
        return b.make(op, asked, x, type=type)
    return None


def _cast(b: Builder, args: Args, values: Values, type: str) -> int | None:
    node = b.nodes[args[0]]
    if node.type == type:
        return args[0]
    if type == "bool":
        return b.make("ne", args[0], b.const(0, node.type), type="bool")
    if node.op == "cast" and b.nodes[node.args[0]].type == "bool":
        return b.make("cast", node.args[0], type=type)
    return None


def _whole(b: Builder, args: Args, values: Values, type: str) -> int | None:
    node = b.nodes[args[0]]
    return args[0] if node.op in (*_WHOLE, "cast") else None


def _sum(b: Builder, args: Args, values: Values, type: str) -> int | None:
    return args[0] if b.nodes[args[0]].width == 1 else None


RULES: dict[str, Callable] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "truediv": _truediv,
    "floordiv": _floordiv,
    "mod": _mod,
    "pow": _pow,
    "neg": _neg,
    "abs": _abs,
    "minimum": _extremum,
    "maximum": _extremum,
    "and": _and,
    "or": _or,
    "xor": _xor,
    "not": _not,
    "shl": _shift,
    "shr": _shift,
    "lt": _lt,
    "le": _le,
    "eq": _equality(True),
    "ne": _equality(False),
    "where": _where,
    "cast": _cast,
    "sum": _sum,
    **dict.fromkeys(_WHOLE, _whole),
}
