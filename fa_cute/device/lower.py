"""A mod's graph rewritten for the hardware: the same values, in operations that a GPU has cheaply.

Graph in, graph out, so that it is tested with the torch emitter and needs no compiler:

- the leaf ``score`` becomes the raw accumulator, and the mod's score ``score * scale`` with the
  softmax scale as one more scalar (position ``SCALE``). Factors that do not change within a tile
  then gather on the scale: ``tanh(score / cap)`` costs one multiplication, not two.
- a positive constant factor of the result becomes ``gain``, which the softmax folds into its own
  multiplication by log2 e: ``cap * tanh(...)`` costs none.
- ``truediv`` becomes a multiplication by a ``reciprocal`` (of these graphs only),
  computed at the level of the divisor; ``sigmoid`` and ``pow`` become ``exp2`` and products.
- ``score * scale + x`` becomes one ``fma`` (of these graphs only).
- ``float(|q - kv|)`` becomes ``|float(q) - float(kv)|``: those casts need no conversions.

A value that decides something (an operand of a comparison, of ``floor``, of a cast to int, ...)
stays ``exact``: not regrouped, divided properly and, where it is computed less often than once a
score, its logarithm not approximated. So a kernel and torch fall on the same side of a step, such
as a bucket's border.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from fa_cute.mods.graph import Graph, Node, cost

SCALE = -1  # ``scalar`` position of the softmax scale
LEVELS = ("constant", "tile", "row", "column", "diagonal", "element")
UNIFORM = LEVELS[:2]

_STEPS = frozenset(
    ("floor", "ceil", "round", "trunc", "sign", "floordiv", "mod", "lt", "le", "eq", "ne")
)
_SHRINKING = frozenset(("floordiv", "mod", "shr", "minimum"))
_DEAR = 10  # issue slots of a diagonal value from which shared memory and two barriers are cheaper
# Nodes of columns in shared memory, 512 bytes each a warpgroup: a bias' boxes leave 2 KiB of it.
_MOST_COLUMNS = 2
# Of a lowered graph: what MUFU computes, or begins.
_MUFU = frozenset(
    ("exp2", "tanh", "rsqrt", "exp", "log", "sqrt", "sin", "cos", "reciprocal", "truediv", "pow")
)
_UNROLLED_POWER = 16  # x ** 16 is four products; beyond, exp2(y log2 x) is as short


class Lowered(NamedTuple):
    """The new graph; the mod's value is ``gain`` times its result.

    Per node: is it ``exact``; is it never negative? ``natural`` holds where q and kv are indices,
    ``natural_anywhere`` also where (q - kv, 0) stands for them. Sums and products never count: they
    can wrap.
    """

    graph: Graph
    gain: float
    exact: tuple[bool, ...]
    natural: tuple[bool, ...]
    natural_anywhere: tuple[bool, ...]


@dataclass(frozen=True)
class Schedule:
    """What is computed where; a pure function of the graph.

    Levels are those of the fragment: ``transposed``, "row" is what depends on kv, "column" on q.
    ``tile``, ``row``: nodes computed on entering the tile, the rows; ``column``, ``diagonal``:
    nodes that go through shared memory, of columns only what loads (other operations cost the same
    later) and at most ``_MOST_COLUMNS``. Short vectors are in none: they would fill the registers.
    """

    lowered: Lowered
    levels: tuple[str, ...]
    tile: tuple[int, ...]
    row: tuple[int, ...]
    column: tuple[int, ...]
    diagonal: tuple[int, ...]
    transposed: bool


@functools.lru_cache(maxsize=256)
def schedule(graph: Graph, transposed: bool = False) -> Schedule:
    """Lower ``graph`` and place its nodes, for a fragment that is ``transposed`` or not."""
    lowered = lower(graph)
    nodes = lowered.graph.nodes
    levels = tuple(level_in(transposed, level) for level in lowered.graph.levels())
    readers: list[set[str]] = [set() for _ in nodes]
    for at, node in enumerate(nodes):
        for arg in node.args:
            readers[arg].add(levels[at])
    for at in (lowered.graph.result, *lowered.graph.more):
        readers[at].add("result")
    for load in lowered.graph.more[1::2]:  # a contribution's place: the index of what it read
        for arg in nodes[load].args:
            readers[arg].add("result")

    def leaving(level: str) -> list[int]:
        return [
            at
            for at, node in enumerate(nodes)
            if levels[at] == level and node.width == 1 and readers[at] - {level}
        ]

    loads: list[bool] = []  # one load a column, that is; kv < prefix[b] is a comparison
    for at, node in enumerate(nodes):
        own = node.op == "load" and levels[at] == "column"
        loads.append(own or any(loads[arg] for arg in node.args))
    column = [at for at in leaving("column") if loads[at]][:_MOST_COLUMNS]
    diagonal = (at for at in leaving("diagonal") if _slots(lowered.graph, levels, at) >= _DEAR)
    places = (leaving("tile"), leaving("row"), column, diagonal)
    return Schedule(lowered, levels, *(tuple(place) for place in places), transposed)


def level_in(transposed: bool, level: str) -> str:
    """A graph's level as a fragment has it, or the other way round."""
    return {"row": "column", "column": "row"}.get(level, level) if transposed else level


def _slots(graph: Graph, levels: tuple[str, ...], at: int) -> int:
    """Issue slots of computing a node, less what is hoisted to the tile."""
    closure, todo = set(), [at]
    while todo:
        node = todo.pop()
        if node not in closure and levels[node] not in UNIFORM:
            closure.add(node)
            todo.extend(graph.nodes[node].args)
    return sum(1 if _is_bitwise(graph, node) else cost(graph.nodes[node]) for node in closure)


def _is_bitwise(graph: Graph, at: int) -> bool:
    """A // or % by a power of two, which is a shift or a mask."""
    node = graph.nodes[at]
    if node.op not in ("floordiv", "mod") or node.type != "int32":
        return False
    divisor = graph.nodes[node.args[1]].attr
    return isinstance(divisor, int) and divisor > 0 and divisor & (divisor - 1) == 0


@functools.lru_cache(maxsize=256)
def lower(graph: Graph) -> Lowered:
    """Rewrite ``graph`` (of either mod) for a kernel; see the module's text."""
    exact = _exact(graph)
    rewriter = _Rewriter(graph, exact)
    result, *more = rewriter.run()
    result, gain = rewriter.gain_of(result)
    nodes, (result, *more) = _reachable(rewriter.nodes, (result, *more))
    lowered = Graph(nodes, result, graph.captured, graph.scalars, tuple(more))
    natural, anywhere = (
        _natural(lowered, indices) for indices in (("q", "kv", "b", "h"), ("b", "h"))
    )
    return Lowered(lowered, gain, _exact(lowered), natural, anywhere)


def takes_mufu(graph: Graph) -> bool:
    """Whether each score has a MUFU operation of the mod's, beside its exponential."""
    lowered = lower(graph).graph
    placed = zip(lowered.nodes, lowered.levels(), strict=True)
    return any(node.op in _MUFU and level == "element" for node, level in placed)


def _exact(graph: Graph) -> tuple[bool, ...]:
    """Per node: does a discontinuous operation of the mod read it, directly or not?

    Those of a derivative do not count: it takes the mod's values as the forward computed them.
    """
    marks = [False] * len(graph.nodes)
    needed = {graph.result}
    for at in range(graph.result, -1, -1):
        if at not in needed:
            continue
        node = graph.nodes[at]
        needed.update(node.args)
        steps = node.op in _STEPS or (node.op == "cast" and node.type != "float32")
        for arg in node.args:
            marks[arg] = marks[arg] or marks[at] or steps
    return tuple(marks)


def _natural(graph: Graph, indices: tuple[str, ...]) -> tuple[bool, ...]:
    known: list[bool] = []
    for node in graph.nodes:
        args = [known[arg] for arg in node.args]
        if node.op == "const":
            known.append(node.type == "int32" and node.attr >= 0)
        elif node.op == "load":
            known.append(graph.captured[node.attr].dtype in ("bool", "uint8", "uint16"))
        elif node.op == "cast":
            known.append(node.type == "int32" and graph.nodes[node.args[0]].type == "bool")
        elif node.op == "maximum":
            known.append(node.type == "int32" and any(args))
        elif node.op == "where":
            known.append(all(args[1:]))
        elif node.op in _SHRINKING:
            known.append(node.type == "int32" and all(args))
        else:
            known.append(node.op in indices)
    return tuple(known)


def _reachable(nodes: list[Node], results: tuple[int, ...]) -> tuple[tuple[Node, ...], list[int]]:
    needed = set(results)
    for at in range(max(results), -1, -1):
        if at in needed:
            needed.update(nodes[at].args)
    place = {old: new for new, old in enumerate(sorted(needed))}
    kept = tuple(
        Node(n.op, tuple(place[arg] for arg in n.args), n.type, n.width, n.attr)
        for n in (nodes[old] for old in sorted(needed))
    )
    return kept, [place[result] for result in results]


@dataclass
class _Rewriter:
    graph: Graph
    exact: tuple[bool, ...]
    nodes: list[Node] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)

    def run(self) -> list[int]:
        """Rewrite every node in order; the positions of the result and of what more is wanted."""
        new: list[int] = []
        depth = [LEVELS.index(level) for level in self.graph.levels()]
        for at, node in enumerate(self.graph.nodes):
            args = tuple(new[arg] for arg in node.args)
            rewrite = getattr(self, f"_on_{node.op}", None)
            new.append(
                rewrite(at, node, args, depth[at]) if rewrite else self._same(node, args, depth[at])
            )
        return [new[at] for at in (self.graph.result, *self.graph.more)]

    def gain_of(self, result: int) -> tuple[int, float]:
        """Split a positive constant factor off the result."""
        node = self.nodes[result]
        if node.op == "mul" and node.type == "float32":
            for factor, other in (node.args, node.args[::-1]):
                value = self._constant(factor)
                if value is not None and 0.0 < value < math.inf:
                    return other, value
        return result, 1.0

    def _add(self, op: str, args: tuple[int, ...], level: int, attr: object = None) -> int:
        """A new float32 node, or the equal one that is there already."""
        width = max((self.nodes[arg].width for arg in args), default=1)
        return self._place(Node(op, args, "float32", width, attr), level)

    def _place(self, node: Node, level: int) -> int:
        at = self.places.setdefault(node.text(), len(self.nodes))
        if at == len(self.nodes):
            self.nodes.append(node)
            self.levels.append(level)
        return at

    def _same(self, node: Node, args: tuple[int, ...], level: int) -> int:
        return self._place(Node(node.op, args, node.type, node.width, node.attr), level)

    def _number(self, value: float) -> int:
        return self._add("const", (), 0, float(value))

    def _constant(self, at: int) -> float | None:
        node = self.nodes[at]
        return node.attr if node.op == "const" else None

    def _on_score(self, at: int, node: Node, args: tuple[int, ...], level: int) -> int:
        raw = self._add("score", (), level)
        return self._add("mul", (raw, self._add("scalar", (), 1, SCALE)), level)

    def _on_mul(self, at: int, node: Node, args: tuple[int, ...], level: int) -> int:
        if node.type != "float32" or self.exact[at]:
            return self._same(node, args, level)
        return self._times(*args, level)

    def _times(self, a: int, b: int, level: int) -> int:
        for scaled, factor in ((a, b), (b, a)):
            inner = self.nodes[scaled]
            if (
                self._is_scaled_score(scaled)
                and self.levels[factor] <= 1
                and self.nodes[factor].width == 1
            ):
                raw, scale = inner.args
                return self._add("mul", (raw, self._add("mul", (scale, factor), 1)), level)
        return self._add("mul", (a, b), level)

    def _on_add(self, at: int, node: Node, args: tuple[int, ...], level: int) -> int:
        for scaled, other in (args, args[::-1]):
            if node.type == "float32" and self._is_scaled_score(scaled):
                return self._add("fma", (*self.nodes[scaled].args, other), level)
        return self._same(node, args, level)

    def _on_sub(self, at: int, node: Node, args: tuple[int, ...], level: int) -> int:
        if node.type == "float32" and self._is_scaled_score(args[0]):
            minus = self._add("neg", (args[1],), self.levels[args[1]])
            return self._add("fma", (*self.nodes[args[0]].args, minus), level)
        return self._same(node, args, level)

    def _is_scaled_score(self, at: int) -> bool:
        node = self.nodes[at]
        return node.op == "mul" and self.nodes[node.args[0]].op == "score"

    def _on_truediv(self, at: int, node: Node, args: tuple[int, ...], level: int) -> int:
        a, b = args
        value = self._constant(b)
        if value is not None:
            inverse = 1.0 / value if value else math.inf
            lossless = math.frexp(value)[0] in (0.5, -0.5)
            if (lossless or not self.exact[at]) and 1e-37 < abs(inverse) < 1e37:
                return self._times(a, self._number(inverse), level)
        rare = level <= LEVELS.index("row")
        if self.exact[at] or rare:
            return self._same(node, args, level)
        inverse = self._add("reciprocal", (b,), self.levels[b])
        return inverse if self._constant(a) == 1.0 else self._times(a, inverse, level)

    def _on_sigmoid(self, at: int, node: Node, args: tuple[int, ...], level: int) -> int:
        power = self._add(
            "exp2", (self._times(args[0], self._number(-math.log2(math.e)), level),), level
        )
        one = self._number(1.0)
        divisor = self._add("add", (one, power), level)
        return self._on_truediv(
            at, Node("truediv", (), "float32", node.width), (one, divisor), level
        )

    def _on_pow(self, at: int, node: Node, args: tuple[int, ...], level: int) -> int:
        base, exponent = args
        power, number = self._constant(exponent), self._constant(base)
        if power in (0.5, -0.5):
            return self._add("sqrt" if power > 0 else "rsqrt", (base,), level)
        if power is not None and power == int(power) and 0 < abs(power) <= _UNROLLED_POWER:
            product = self._unrolled(base, int(abs(power)), level)
            if power > 0:
                return product
            return self._on_truediv(
                at, Node("truediv", (), "float32", node.width), (self._number(1.0), product), level
            )
        cheap = not self.exact[at] and level > LEVELS.index("row")
        if cheap and number is not None and 0.0 < number < math.inf:
            return self._add(
                "exp2", (self._times(exponent, self._number(math.log2(number)), level),), level
            )
        return self._same(node, args, level)

    def _unrolled(self, base: int, power: int, level: int) -> int:
        product = None
        while power:
            if power & 1:
                product = base if product is None else self._add("mul", (product, base), level)
            power >>= 1
            if power:
                base = self._add("mul", (base, base), level)
        return product

    def _on_cast(self, at: int, node: Node, args: tuple[int, ...], level: int) -> int:
        inner = self.nodes[args[0]]
        splits = (
            inner.op in ("add", "sub", "neg", "abs")
            and inner.type == "int32"
            and node.type == "float32"
        )
        if not splits or LEVELS[level] != "diagonal":
            return self._same(node, args, level)
        parts = tuple(self._on_cast(at, node, (arg,), level) for arg in inner.args)
        return self._add(inner.op, parts, level)
