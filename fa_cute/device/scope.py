"""Evaluating a mod's nodes: each at the level of the indices that it depends on.

A value is held once a tile, once a row, once a column (a vector), once a diagonal (a vector with
``Fragment.lead`` lanes more) or once an element (a vector a row), and is spread where a wider one
meets it. A short vector (of a partial index) is evaluated by component, in the sum that reads it.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fa_cute.device import emit
from fa_cute.device.captured import Source
from fa_cute.device.fragment import Fragment
from fa_cute.device.lower import SCALE, UNIFORM, Schedule, level_in

_SCALAR_LEVELS = ("tile", "row")
_UNROLLED = 8  # components; 64 of them unrolled took ptxas 28 s


class Value(NamedTuple):
    """A node's value: the level it changes at, and its parts: one a row for rows and elements."""

    level: str
    parts: tuple[Any, ...]


class Ramp(NamedTuple):
    """An index whose lanes are ``start + offsets``: kv by column, or q - kv by diagonal."""

    level: str
    start: Any
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Line:
    """A float32 value whose lanes are ``start + step * offsets``, ``step`` None being 1.

    Of ALiBi's ``slope * (kv - q)`` it makes one FFMA a lane with the offset in the instruction,
    where a ramp and a product are two. Its lanes are computed where they are read.
    """

    level: str
    start: Any
    step: Any | None
    offsets: tuple[int, ...]
    by_lane: bool

    @property
    def parts(self) -> tuple[Any, ...]:
        """As a ``Value`` has them."""
        if self.step is None:
            return (emit.ramp(self.start, self.offsets, by_lane=self.by_lane),)
        return (emit.line(self.start, self.step, self.offsets, by_lane=self.by_lane),)

    def after(self, op: str, others: Sequence[Any], place: int) -> Line | None:
        """``op`` of the line as operand ``place`` and scalars; None if that is no line."""
        if op == "neg":
            return self._turned(emit.on_floats("neg", self.start))
        if op in ("add", "sub"):
            operands = (self.start, *others) if place == 0 else (*others, self.start)
            start = emit.on_floats(op, *operands)
            return self._turned(start) if (op, place) == ("sub", 1) else replace(self, start=start)
        if op != "mul":
            return None
        (factor,) = others
        step = factor if self.step is None else emit.on_floats("mul", self.step, factor)
        return replace(self, start=emit.on_floats("mul", self.start, factor), step=step)

    def _turned(self, start: Any) -> Line:
        return replace(self, start=start, offsets=tuple(-x for x in self.offsets))


@dataclass(frozen=True)
class Operands:
    """What a mod reads beside its indices: captured tensors and scalars, the softmax scale."""

    sources: tuple[Source, ...]
    scalars: tuple[Any, ...]
    scale: Any


def join(levels: Iterable[str]) -> str:
    """The level of a value that is computed from values of ``levels``."""
    found = set(levels) - {"tile"}
    return found.pop() if len(found) == 1 else "element" if found else "tile"


def spread(value: Value, level: str, columns: int, fragment: Fragment) -> tuple[Any, ...]:
    """The parts of ``value`` as one of ``level`` has them, with ``columns`` columns a thread."""
    rows, lead = len(fragment.rows), fragment.lead
    if value.level == level:
        return value.parts
    if level == "row":
        return value.parts * rows
    parts = value.parts
    if value.level == "diagonal":
        firsts = (lead - fragment.shift * row for row in range(rows))
        return tuple(emit.part(parts[0], first, columns) for first in firsts)
    if value.level in _SCALAR_LEVELS:
        parts = tuple(emit.splat(x, columns + lead * (level == "diagonal")) for x in parts)
    return parts * rows if level == "element" and len(parts) == 1 else parts


@dataclass(frozen=True)
class Scope:
    """Where nodes are evaluated: the leaves that have values here, and what is computed already.

    ``columns``: columns of ``fragment`` at hand, all or a part. ``across`` gives a node of the
    diagonals, of a short vector one component (an int, or a value of the kernel). In a
    ``collapsed`` scope q stands for q - kv and kv for 0, so that every node there is a function of
    the diagonal.
    """

    schedule: Schedule
    operands: Operands
    fragment: Fragment
    leaves: Mapping[str, Any] = field(default_factory=dict)
    known: Mapping[int, Value] = field(default_factory=dict)
    addresses: Mapping[int, tuple[Value, frozenset[int]]] = field(default_factory=dict)
    columns: int = 0
    collapsed: bool = False
    across: Callable[[int, Any], Value] | None = None

    def below(self, **leaves: Any) -> Scope:
        """This scope with more leaves."""
        return replace(self, leaves={**self.leaves, **leaves})

    def spread(self, value: Value, level: str) -> tuple[Any, ...]:
        """The parts of ``value`` as one of ``level`` has them."""
        return spread(value, level, self.columns, self.fragment)

    def entered(self, targets: Iterable[int], level: str) -> Scope:
        """This scope with ``targets`` computed.

        ``level`` is being entered: tile, row or column. What a tile or a row decides of the
        addresses of deeper loads is computed too.
        """
        graph, levels = self.schedule.lowered.graph, self.schedule.levels
        deeper = ("element",) if level == "row" else ("row", "column", "diagonal", "element")
        entering = UNIFORM if level == "tile" else (level,)
        dimensions = {
            at: [d for d, arg in enumerate(node.args) if levels[arg] in entering]
            for at, node in enumerate(graph.nodes)
            if node.op == "load" and levels[at] in deeper and level in _SCALAR_LEVELS
        }
        indices = [graph.nodes[at].args[d] for at, here in dimensions.items() for d in here]
        memo = self.evaluate([*targets, *indices])
        known = {**self.known, **{at: memo[at] for at in targets}}
        found = {at: self._address(at, here, memo) for at, here in dimensions.items() if here}
        return replace(self, known=known, addresses={**self.addresses, **found})

    def evaluate(self, targets: Iterable[int], component: Any = 0) -> dict[int, Value]:
        """The values of ``targets`` (of short vectors: one component) and of what they need."""
        nodes = self.schedule.lowered.graph.nodes
        memo: dict[int, Value] = dict(self.known)
        order = self._closure(targets)
        for at in order:
            if nodes[at].width == 1 and at not in memo:
                memo[at] = self._compute(at, memo, 0)
        self._components(targets, memo, component)
        return memo

    def _closure(self, targets: Iterable[int]) -> list[int]:
        found, todo = set(), list(targets)
        while todo:
            at = todo.pop()
            if at not in found and at not in self.known:
                found.add(at)
                if not self._elsewhere(at):
                    todo.extend(self.schedule.lowered.graph.nodes[at].args)
        return sorted(found)

    def _elsewhere(self, at: int) -> bool:
        return self.schedule.levels[at] == "diagonal" and not self.collapsed

    def _components(self, targets: Iterable[int], memo: Any, component: Any) -> None:
        """Add one component of the short vectors among ``targets`` and of those that they need."""
        nodes = self.schedule.lowered.graph.nodes
        vectors, todo = set(), list(targets)
        while todo:
            at = todo.pop()
            if nodes[at].width > 1 and at not in vectors:
                vectors.add(at)
                if not self._elsewhere(at):
                    todo.extend(nodes[at].args)
        for at in sorted(vectors):
            memo[at] = self._compute(at, memo, component)

    def _compute(self, at: int, memo: Mapping[int, Value], component: Any) -> Value:
        node = self.schedule.lowered.graph.nodes[at]
        if self._elsewhere(at):
            return self.across(at, component)
        if node.op == "const":
            return Value("tile", (emit.constant(node.attr, node.type),))
        if node.op == "scalar":
            scalar = self.operands.scale if node.attr == SCALE else self.operands.scalars[node.attr]
            return Value("tile", (scalar.ir_value(),))
        if node.op in self.leaves:
            return self._leaf(node.op, "int32")
        if node.op == "load":
            return self._load(at, memo, component)
        if node.op == "sum":
            return self._sum(node.args[0], memo)
        inner = self.schedule.lowered.graph.nodes[node.args[0]]
        if node.op == "cast" and isinstance(self.leaves.get(inner.op), Ramp):
            return self._leaf(inner.op, node.type) if node.type == "float32" else memo[node.args[0]]
        return self._operation(at, memo)

    def _leaf(self, name: str, kind: str) -> Value | Line:
        leaf = self.leaves[name]
        if isinstance(leaf, Value):
            return leaf
        start = leaf.start.ir_value()
        start = emit.to_float(start) if kind == "float32" else start
        by_lane = len(self.fragment.rows) == 1
        if kind == "float32":
            return Line(leaf.level, start, None, leaf.offsets, by_lane)
        return Value(leaf.level, (emit.ramp(start, leaf.offsets, by_lane=by_lane),))

    def _operand(self, at: int, value: Any) -> emit.Operand:
        lowered = self.schedule.lowered
        node = lowered.graph.nodes[at]
        natural = lowered.natural_anywhere if self.collapsed else lowered.natural
        return emit.Operand(value, node.attr if node.op == "const" else None, natural[at])

    def _operation(self, at: int, memo: Mapping[int, Value]) -> Value | Line:
        node = self.schedule.lowered.graph.nodes[at]
        line = self._line(at, [memo[arg] for arg in node.args])
        if line is not None:
            return line
        level = join(memo[arg].level for arg in node.args)
        # By the graph's own level: a fragment and its transpose compute the same score.
        own = level_in(self.schedule.transposed, level)
        exact = own in _SCALAR_LEVELS or (own != "element" and self.schedule.lowered.exact[at])
        spreads = (self.spread(memo[arg], level) for arg in node.args)
        parts = []
        for values in zip(*spreads, strict=True):
            operands = [self._operand(*pair) for pair in zip(node.args, values, strict=True)]
            parts.append(emit.operation(node, operands, exact=exact))
        return Value(level, tuple(parts))

    def _line(self, at: int, operands: list[Any]) -> Line | None:
        """The node, if it is a line: of one, and of what the tile holds; not where bits decide."""
        lines = [i for i, operand in enumerate(operands) if isinstance(operand, Line)]
        others = [x for i, x in enumerate(operands) if i not in lines]
        inexact = not self.schedule.lowered.exact[at]
        if len(lines) != 1 or not inexact or any(x.level != "tile" for x in others):
            return None
        (place,) = lines
        op = self.schedule.lowered.graph.nodes[at].op
        return operands[place].after(op, [x.parts[0] for x in others], place)

    def _sum(self, vector: int, memo: Mapping[int, Value]) -> Value:
        """The sum of a short vector's components; from nine on in a loop of the kernel."""

        def one(component: Any) -> Value:
            local = ChainMap({}, memo)
            self._components([vector], local, component)
            return local[vector]

        width = self.schedule.lowered.graph.nodes[vector].width
        level, total = one(0)
        if width > _UNROLLED:
            return Value(level, emit.accumulated(1, width, total, lambda j: one(j).parts))
        for component in range(1, width):
            total = tuple(map(emit.add, total, one(component).parts))
        return Value(level, tuple(total))

    def _address(self, at: int, dimensions: Iterable[int], memo: Mapping[int, Value]) -> Any:
        """(address, dimensions in it): what is known of a load's address, plus ``dimensions``."""
        node = self.schedule.lowered.graph.nodes[at]
        source = self.operands.sources[node.attr]
        start = Value("tile", (source.address,)), frozenset()
        total, done = self.addresses.get(at, start)
        offsets: dict[str, Value] = {}
        for dimension in sorted(set(dimensions) - done):
            arg = node.args[dimension]
            level, parts = memo[arg]
            new = (source.offset(dimension, self._operand(arg, x)) for x in parts)
            found = Value(level, tuple(new))
            offsets[level] = self._added(offsets[level], found) if level in offsets else found
        for level in ("tile", "row", "column", "diagonal", "element"):
            if level in offsets:
                total = self._added(total, offsets[level])
        return total, done.union(dimensions)

    def _added(self, a: Value, b: Value) -> Value:
        level = join((a.level, b.level))
        pairs = zip(self.spread(a, level), self.spread(b, level), strict=True)
        return Value(level, tuple(emit.add(x, y) for x, y in pairs))

    def address(self, at: int) -> Value:
        """The address of the load ``at`` (of a short vector: of its first component)."""
        node = self.schedule.lowered.graph.nodes[at]
        return self._address(at, range(len(node.args)), self.evaluate(node.args))[0]

    def _load(self, at: int, memo: Mapping[int, Value], component: Any) -> Value:
        node = self.schedule.lowered.graph.nodes[at]
        source = self.operands.sources[node.attr]
        address, _ = self._address(at, range(len(node.args)), memo)
        parts = address.parts
        if len(node.args) < len(source.strides):
            parts = tuple(source.step(x, component) for x in parts)
        return Value(address.level, tuple(source.load(x) for x in parts))
