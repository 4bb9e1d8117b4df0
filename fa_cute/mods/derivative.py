"""The derivative of a score_mod: reverse mode on its graph.

One graph holds the mod and its derivative, so that whoever evaluates both computes what they share
once: of ``cap * tanh(score / cap)`` the factor is ``1 - t * t`` with the forward's own tanh. Linear
mods (ALiBi, a bias) have the constant factor 1, and cost nothing.

Rules are torch's, also where a function has no derivative: |x| has 0 at 0; of equal operands
``maximum`` and ``minimum`` give half to each, a clamp at its bound gives all to what it clamps and
relu nothing; steps (floor, round, sign, ``//``, conversions to int or bool, comparisons) give 0; a
rounding to a narrower float passes its gradient on. A custom ``autograd.Function`` was traced
through its forward: its own backward is not used.

Where the score becomes the constant -inf its probability, and all that is multiplied by it, is 0:
there the derivative may be anything finite, and is not masked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from fa_cute.mods.canonical import Builder
from fa_cute.mods.derived import taught
from fa_cute.mods.graph import Graph, Node

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_STEPS = frozenset(("floor", "ceil", "round", "trunc", "sign", "floordiv"))


@functools.lru_cache(maxsize=256)
def differentiate(graph: Graph, wanted: frozenset[int] = frozenset()) -> Graph:
    """A score_mod's graph with its derivative, also for the captured tensors (places) ``wanted``.

    Its result is the mod's value; ``derived`` reads its ``more``. Captured tensors and scalars keep
    their places.
    """
    return _Reverse(graph, wanted).run()


@functools.lru_cache(maxsize=256)
def differentiable(graph: Graph) -> frozenset[int]:
    """The captured tensors (places) that the mod's value depends on other than by steps."""
    floats = frozenset(at for at, c in enumerate(graph.captured) if c.dtype in FLOATS)
    return frozenset(taught(differentiate(graph, floats)))


class _Part(NamedTuple):
    """A gradient: ``times`` a node, or the number itself where ``at`` is None."""

    times: float
    at: int | None


class _Reverse:
    """One sweep from the result back to the score and to the loads."""

    def __init__(self, graph: Graph, wanted: frozenset[int]) -> None:
        self.graph, self.wanted = graph, wanted
        self.builder = Builder()
        self.place = self._copied()
        self.parts: dict[int, list[_Part]] = {}

    def _copied(self) -> list[int]:
        """The mod's nodes in the builder."""
        place: list[int] = []
        for node in self.graph.nodes:
            args = tuple(place[arg] for arg in node.args)
            if node.op == "const":
                place.append(self.builder.const(node.attr, node.type))
            elif node.op == "load" or not args:
                leaf = self.builder.leaf(node.op, node.type, node.attr, args, node.width)
                place.append(leaf)
            else:
                place.append(self.builder.make(node.op, *args, type=node.type, attr=node.attr))
        return place

    def run(self) -> Graph:
        active = self._active()
        self.parts[self.graph.result] = [_Part(1.0, None)]
        total = self.number(0.0)
        given: list[int] = []
        for at in range(len(self.graph.nodes) - 1, -1, -1):
            node = self.graph.nodes[at]
            part = self.sum(self.parts.get(at, [])) if active[at] else None
            if part is None:
                continue
            if node.op == "score":
                total = self.node(part)
            elif node.op == "load":
                given += (self.place[at], self.node(part))
            else:
                self.spread(at, node, part, active)
        result, nodes = self.place[self.graph.result], tuple(self.builder.nodes)
        captured, scalars = self.graph.captured, self.graph.scalars
        return Graph(nodes, result, captured, scalars, (total, *given))

    def _active(self) -> list[bool]:
        """Whether a node carries a gradient to the score or to a wanted load."""
        active: list[bool] = []
        for node in self.graph.nodes:
            source = node.op == "score" or (node.op == "load" and node.attr in self.wanted)
            passes = node.op not in _STEPS and node.op != "load"
            inner = passes and any(active[arg] for arg in node.args)
            active.append(node.type == "float32" and (source or inner))
        return active

    def spread(self, at: int, node: Node, part: _Part, active: list[bool]) -> None:
        """Give ``part`` of the node ``at`` on to its operands."""
        if node.op == "where":
            self._where(node, part, active)
            return
        args = tuple(self.place[arg] for arg in node.args)
        rule = _RULES[node.op]
        for i, arg in enumerate(node.args):
            if active[arg]:
                given = rule(self, node, part, (*args, self.place[at]), i)
                self.add(arg, given, node.width)

    def _where(self, node: Node, part: _Part, active: list[bool]) -> None:
        condition, *branches = node.args
        hidden = any(self.graph.nodes[arg].attr == -math.inf for arg in branches)
        for i, arg in enumerate(branches):
            if active[arg]:
                # The result itself is -inf in the other branch: its probability is 0.
                free = hidden and part.at is None and part.times > 0
                given = part if free else self.chosen(self.place[condition], part, first=i == 0)
                self.add(arg, given, node.width)

    def add(self, arg: int, part: _Part | None, width: int) -> None:
        """Note what an operation of ``width`` gives to its operand ``arg``."""
        if part is None or part.times == 0.0:
            return
        if width > 1 and self.graph.nodes[arg].width == 1:
            if part.at is None or self.builder.nodes[part.at].width == 1:
                part = _Part(part.times * width, part.at)
            else:
                part = _Part(part.times, self.builder.make("sum", part.at, type="float32"))
        self.parts.setdefault(arg, []).append(part)

    def sum(self, parts: list[_Part]) -> _Part | None:
        """The parts together, those of one node as one."""
        gathered: dict[int | None, float] = {}
        for part in parts:
            gathered[part.at] = gathered.get(part.at, 0.0) + part.times
        left = [_Part(times, at) for at, times in gathered.items() if times != 0.0]
        if len(left) < 2:
            return left[0] if left else None
        nodes = [self.node(part) for part in left]
        return _Part(1.0, functools.reduce(self.plus, nodes))

    def number(self, value: float) -> int:
        return self.builder.const(value, "float32")

    def node(self, part: _Part) -> int:
        """The part as a node."""
        if part.at is None:
            return self.number(part.times)
        return self.make("mul", part.at, self.number(part.times))

    def make(self, op: str, *args: int) -> int:
        return self.builder.make(op, *args, type="float32")

    def plus(self, x: int, y: int) -> int:
        return self.make("add", x, y)

    def times(self, part: _Part, at: int) -> _Part:
        """``part`` times the node ``at``."""
        value = self.builder.value(at)
        if value is not None and value == value and not math.isinf(value):
            return _Part(part.times * value, part.at)
        return _Part(part.times, at if part.at is None else self.make("mul", part.at, at))

    def chosen(self, condition: int, part: _Part, *, first: bool) -> _Part:
        """``part`` where the condition holds (``first``) or does not, else 0."""
        at, zero = self.number(1.0) if part.at is None else part.at, self.number(0.0)
        branches = (at, zero) if first else (zero, at)
        return _Part(part.times, self.make("where", condition, *branches))

    def compared(self, op: str, x: int, y: int) -> int:
        return self.builder.make(op, x, y, type="bool")


# A rule gives what operand i of a node gets. ``a`` holds the operands and, last, the node itself.
_Rule = Callable[[_Reverse, Node, _Part, tuple[int, ...], int], "_Part | None"]


def _through(sign: float) -> _Rule:
    return lambda r, node, part, a, i: part._replace(times=part.times * (sign if i else 1.0))


def _scaled_by(slope: Callable[[_Reverse, int, int], int]) -> _Rule:
    """A function of one operand: the slope, of the operand's node and the value's."""
    return lambda r, node, part, a, i: r.times(part, slope(r, a[0], a[1]))


def _mul(r: _Reverse, node: Node, part: _Part, a: tuple[int, ...], i: int) -> _Part:
    return r.times(part, a[1 - i])


def _truediv(r: _Reverse, node: Node, part: _Part, a: tuple[int, ...], i: int) -> _Part:
    x, y, quotient = a
    value = r.builder.value(y)
    if i == 0:
        if value and math.isfinite(value):
            return part._replace(times=part.times / value)
        return r.times(part, r.make("truediv", r.number(1.0), y))
    return r.times(part, r.make("neg", r.make("truediv", quotient, y)))


def _extremum(lower: str) -> _Rule:
    """``lower`` tells where the first operand loses: "lt" for the maximum."""

    def rule(r: _Reverse, node: Node, part: _Part, a: tuple[int, ...], i: int) -> _Part:
        mine, other = a[i], a[1 - i]
        loses = (mine, other) if lower == "lt" else (other, mine)
        kept = r.chosen(r.compared("lt", *loses), part, first=False)
        if node.attr == "relu":
            return r.chosen(r.compared("lt", *loses[::-1]), part, first=True)
        if node.attr == "clamp":
            return kept
        half = r.node(_Part(0.5 * part.times, part.at))
        return _Part(1.0, r.make("where", r.compared("eq", mine, other), half, r.node(kept)))

    return rule


def _pow(r: _Reverse, node: Node, part: _Part, a: tuple[int, ...], i: int) -> _Part:
    x, y, power = a
    zero = r.number(0.0)
    if i == 0:
        less = r.make("pow", x, r.make("sub", y, r.number(1.0)))
        slope = r.make("where", r.compared("eq", y, zero), zero, r.make("mul", y, less))
        return r.times(part, slope)
    flat = r.builder.make("and", r.compared("eq", x, zero), r.compared("le", zero, y), type="bool")
    return r.times(part, r.make("where", flat, zero, r.make("mul", power, r.make("log", x))))


def _mod(r: _Reverse, node: Node, part: _Part, a: tuple[int, ...], i: int) -> _Part:
    return part if i == 0 else r.times(part, r.make("neg", r.make("floordiv", a[0], a[1])))


def _cast(r: _Reverse, node: Node, part: _Part, a: tuple[int, ...], i: int) -> _Part | None:
    return part if r.builder.nodes[a[0]].type == "float32" else None


def _one_minus_square(r: _Reverse, x: int, y: int) -> int:
    return r.make("sub", r.number(1.0), r.make("mul", y, y))


def _logistic(r: _Reverse, x: int, y: int) -> int:
    return r.make("sub", y, r.make("mul", y, y))


def _bell(r: _Reverse, x: int, y: int) -> int:
    power = r.make("exp", r.make("neg", r.make("mul", x, x)))
    return r.make("mul", power, r.number(2.0 / math.sqrt(math.pi)))


def _cube(r: _Reverse, x: int, y: int) -> int:
    return r.make("mul", r.make("mul", r.make("mul", y, y), y), r.number(-0.5))


def _inverse(r: _Reverse, at: int, number: float = 1.0) -> int:
    return r.make("truediv", r.number(number), at)


_RULES: dict[str, _Rule] = {
    "add": _through(1.0),
    "sub": _through(-1.0),
    "neg": lambda r, node, part, a, i: part._replace(times=-part.times),
    "round_to": _through(1.0),
    "sum": _through(1.0),
    "cast": _cast,
    "mul": _mul,
    "truediv": _truediv,
    "pow": _pow,
    "mod": _mod,
    "maximum": _extremum("lt"),
    "minimum": _extremum("gt"),
    "abs": _scaled_by(lambda r, x, y: r.make("sign", x)),
    "exp": _scaled_by(lambda r, x, y: y),
    "exp2": _scaled_by(lambda r, x, y: r.make("mul", y, r.number(math.log(2.0)))),
    "log": _scaled_by(lambda r, x, y: _inverse(r, x)),
    "sqrt": _scaled_by(lambda r, x, y: _inverse(r, y, 0.5)),
    "rsqrt": _scaled_by(_cube),
    "tanh": _scaled_by(_one_minus_square),
    "sigmoid": _scaled_by(_logistic),
    "sin": _scaled_by(lambda r, x, y: r.make("cos", x)),
    "cos": _scaled_by(lambda r, x, y: r.make("neg", r.make("sin", x))),
    "erf": _scaled_by(_bell),
}
