"""Typed terms: what torch's promotion and Python's operators mean on graph nodes.

A ``Term`` is a node of a ``Builder`` with Python's operators, so that the table of operations can
write a decomposition as plain arithmetic. Numbers are weak, as in torch: they take the type of the
term beside them unless theirs is wider (bool, then int32, then float32).
"""

from __future__ import annotations

from collections.abc import Callable

from fa_cute.mods.canonical import Builder
from fa_cute.mods.errors import Untraceable
from fa_cute.mods.fold import Number

_RANK = {"bool": 0, "int32": 1, "float32": 2}
_KIND = {bool: "bool", int: "int32", float: "float32"}


class Term:
    """A value of the graph under construction."""

    __slots__ = ("at", "builder")

    def __init__(self, builder: Builder, at: int) -> None:
        self.builder = builder
        self.at = at

    @property
    def type(self) -> str:
        return self.builder.nodes[self.at].type

    @property
    def width(self) -> int:
        return self.builder.nodes[self.at].width

    def make(self, op: str, *others: Term, type: str | None = None, attr: object = None) -> Term:
        """An operation whose first operand is this term; operand types must agree already."""
        widths = {t.width for t in (self, *others)} - {1}
        if len(widths) > 1:
            raise Untraceable(
                f"vectors of {sorted(widths)} elements meet in one operation; "
                "their last dimensions must have one size"
            )
        args = (self.at, *(other.at for other in others))
        return Term(self.builder, self.builder.make(op, *args, type=type or self.type, attr=attr))

    def like(self, value: Number, type: str | None = None) -> Term:
        """A constant in this term's graph."""
        return Term(self.builder, self.builder.const(value, type or kind(value)))

    def cast(self, type: str) -> Term:
        return self if self.type == type else self.make("cast", type=type)

    def float(self) -> Term:
        return self.cast("float32")

    def int(self) -> Term:
        return self.cast("int32")

    def bool(self) -> Term:
        return self.cast("bool")

    def __neg__(self) -> Term:
        if self.type == "bool":
            raise Untraceable("a bool is negated with -; write ~x, or x.int() first")
        return self.make("neg")

    def __abs__(self) -> Term:
        return self if self.type == "bool" else self.make("abs")

    def __invert__(self) -> Term:
        if self.type == "float32":
            raise Untraceable("~ is applied to a float; compare it first, as in ~(x > 0)")
        return self.make("not")


def kind(value: Term | Number) -> str:
    """The type of a term or of a Python number."""
    if isinstance(value, Term):
        return value.type
    if type(value) not in _KIND:
        raise Untraceable(f"{value!r} stands where a number or a traced value is expected")
    return _KIND[type(value)]


def promoted(*values: Term | Number, least: str = "bool", most: str = "float32") -> list[Term]:
    """The values as terms of their common type, from ``least`` up; above ``most`` is refused."""
    builder = next((v.builder for v in values if isinstance(v, Term)), None)
    if builder is None:
        raise Untraceable("none of the operands is a traced value")
    common = max((least, *map(kind, values)), key=_RANK.__getitem__)
    if _RANK[common] > _RANK[most]:
        raise Untraceable("an integer or bool operation meets a float; cast it with .int() first")
    return [
        v.cast(common) if isinstance(v, Term) else Term(builder, builder.const(v, common))
        for v in values
    ]


def add(x: Term | Number, y: Term | Number) -> Term:
    """Sum; of two bools their ``or``, as torch has it."""
    x, y = promoted(x, y)
    return x.make("or" if x.type == "bool" else "add", y)


def sub(x: Term | Number, y: Term | Number) -> Term:
    """Difference; two bools have none in torch."""
    x, y = promoted(x, y)
    if x.type == "bool":
        raise Untraceable("bools are subtracted; write x ^ y, or x & ~y")
    return x.make("sub", y)


def mul(x: Term | Number, y: Term | Number) -> Term:
    """Product; of two bools their ``and``, as torch has it."""
    x, y = promoted(x, y)
    return x.make("and" if x.type == "bool" else "mul", y)


def truediv(x: Term | Number, y: Term | Number) -> Term:
    """True quotient, a float also of integers."""
    x, y = promoted(x, y, least="float32")
    return x.make("truediv", y)


def integral_or_float(op: str) -> Callable[[Term | Number, Term | Number], Term]:
    """An operation on integers or floats (``floordiv``, ``mod``)."""

    def operation(x: Term | Number, y: Term | Number) -> Term:
        x, y = promoted(x, y, least="int32")
        return x.make(op, y)

    return operation


def power(x: Term | Number, y: Term | Number) -> Term:
    """``x ** y``; of integers only where it stays exact."""
    if "float32" in (kind(x), kind(y)):
        x, y = promoted(x, y)
        return x.make("pow", y)
    if isinstance(x, Term) and not isinstance(y, Term):
        return _integer_power(x.int(), int(y))
    if not isinstance(x, Term) and x == 2:
        return y.like(1).make("shl", y.int())
    raise Untraceable("an integer is raised to a traced integer; write float(base) ** x, or 2 ** x")


def _integer_power(x: Term, exponent: int) -> Term:
    if not 0 <= exponent <= 64:
        raise Untraceable(
            f"an integer is raised to the power {exponent}; write x.float() ** {exponent}"
        )
    result = x.like(1)
    for _ in range(exponent):
        result = mul(result, x)
    return result


def comparison(op: str, swapped: bool = False) -> Callable[[Term | Number, Term | Number], Term]:
    """A comparison; ``swapped`` makes gt and ge from lt and le."""
    least = "int32" if op in ("lt", "le") else "bool"

    def operation(x: Term | Number, y: Term | Number) -> Term:
        x, y = promoted(x, y, least=least)
        return y.make(op, x, type="bool") if swapped else x.make(op, y, type="bool")

    return operation


def bitwise(op: str) -> Callable[[Term | Number, Term | Number], Term]:
    """``&``, ``|`` or ``^``: logical on bools, bitwise on integers."""

    def operation(x: Term | Number, y: Term | Number) -> Term:
        if "float32" in (kind(x), kind(y)):
            raise Untraceable(
                f"a float meets a bitwise {op}; comparisons bind less tightly than & | ^, "
                "so write (a < b) & (c < d)"
            )
        x, y = promoted(x, y)
        return x.make(op, y)

    return operation


def shift(op: str) -> Callable[[Term | Number, Term | Number], Term]:
    """``<<`` or ``>>`` of integers; ``>>`` keeps the sign."""

    def operation(x: Term | Number, y: Term | Number) -> Term:
        x, y = promoted(x, y, least="int32", most="int32")
        return x.make(op, y)

    return operation


def extremum(op: str) -> Callable[[Term | Number, Term | Number], Term]:
    """``minimum`` or ``maximum``; of bools ``and`` and ``or``."""
    logical = "and" if op == "minimum" else "or"

    def operation(x: Term | Number, y: Term | Number) -> Term:
        x, y = promoted(x, y)
        return x.make(logical if x.type == "bool" else op, y)

    return operation


minimum = extremum("minimum")
maximum = extremum("maximum")


def where(condition: Term | Number, x: Term | Number, y: Term | Number) -> Term:
    """``x`` where the condition holds, ``y`` elsewhere; numbers take the other branch's type."""
    terms = [v for v in (condition, x, y) if isinstance(v, Term)]
    if kind(condition) == "float32":
        raise Untraceable("the condition of where is a float; compare it, as in where(x > 0, a, b)")
    anchor = terms[0]
    common = max((kind(x), kind(y)), key=_RANK.__getitem__)
    branches = [v.cast(common) if isinstance(v, Term) else anchor.like(v, common) for v in (x, y)]
    chosen = condition if isinstance(condition, Term) else anchor.like(bool(condition))
    return chosen.bool().make("where", *branches, type=common)


def total(x: Term) -> Term:
    """The sum of a vector's elements; bools are counted."""
    x = x.int() if x.type == "bool" else x
    return x if x.width == 1 else x.make("sum")


def element(x: Term, index: Term | Number) -> Term:
    """One element of a short vector: the index is pushed down to the loads that it came from."""
    if x.width == 1:
        raise Untraceable("a single value is indexed; captured tensors and short vectors can be")
    if not isinstance(index, Term):
        if not -x.width <= index < x.width:
            raise Untraceable(f"index {index} is outside a vector of {x.width} elements")
        index = x.like(index)
    if index.type != "int32" or index.width != 1:
        raise Untraceable("a vector is indexed with what is not one integer; write x[i.int()]")
    return Term(x.builder, _element(x.builder, x.at, index.at, {}))


def _element(builder: Builder, at: int, index: int, done: dict[int, int]) -> int:
    node = builder.nodes[at]
    if node.width == 1:
        return at
    if at not in done:
        if node.op == "load":
            done[at] = builder.leaf("load", node.type, node.attr, (*node.args, index))
        else:
            args = [_element(builder, arg, index, done) for arg in node.args]
            done[at] = builder.make(node.op, *args, type=node.type, attr=node.attr)
    return done[at]


def _install_operators() -> None:
    binary = {
        "add": add,
        "sub": sub,
        "mul": mul,
        "truediv": truediv,
        "floordiv": integral_or_float("floordiv"),
        "mod": integral_or_float("mod"),
        "and": bitwise("and"),
        "or": bitwise("or"),
    }
    for name, function in binary.items():
        setattr(Term, f"__{name}__", function)
        setattr(Term, f"__r{name}__", lambda self, other, f=function: f(other, self))
    for name, function in {
        "lt": comparison("lt"),
        "le": comparison("le"),
        "gt": comparison("lt", swapped=True),
        "ge": comparison("le", swapped=True),
    }.items():
        setattr(Term, f"__{name}__", function)


_install_operators()
