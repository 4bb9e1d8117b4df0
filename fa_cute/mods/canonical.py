"""Building graphs in canonical form: shared subexpressions, folded constants, ordered operands.

A ``Builder`` interns nodes as they are made. Operands of commutative operations are ordered by a
digest of their structure, not by the order in which a user wrote them, so two spellings of one mod
give one graph. Building a canonical graph again gives the same graph.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import NamedTuple

from fa_cute.mods.errors import Untraceable
from fa_cute.mods.fold import Number, fold, number
from fa_cute.mods.graph import COMMUTATIVE, Captured, Graph, Node, number_text
from fa_cute.mods.simplify import RULES

# Longer vectors than this would be unrolled into more registers than a thread has.
LONGEST_VECTOR = 256


class Finished(NamedTuple):
    """A graph, and which of the builder's captured tensors and scalars its positions are."""

    graph: Graph
    captured: tuple[int, ...]
    scalars: tuple[int, ...]


class Builder:
    """Interned nodes, each in normal form.

    ``origin`` is the position on the tape that is being built; ``origins[i]`` is where node i first
    arose, so that a fault found later still points at a line.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.origin = 0
        self.origins: list[int] = []
        self._known: dict[tuple, int] = {}
        self._digests: list[bytes] = []

    def leaf(
        self,
        op: str,
        type: str,
        attr: object = None,
        args: tuple[int, ...] = (),
        width: int = 1,
    ) -> int:
        """A leaf: an argument of the mod, a scalar, or a load at ``args`` of captured ``attr``."""
        return self._intern(Node(op, args, type, width, attr))

    def const(self, value: Number, type: str) -> int:
        """A constant of a type; an int32 that does not fit raises ``Untraceable``."""
        return self._intern(Node("const", (), type, 1, number(value, type)))

    def make(self, op: str, *args: int, type: str, attr: object = None) -> int:
        """The node for an operation on earlier nodes, simplified."""
        width = 1 if op == "sum" else max(self.nodes[arg].width for arg in args)
        if op in COMMUTATIVE:
            args = self.in_order(args)
        simple = self._simplified(op, args, type)
        # A simplification may drop the operand that made the value a vector: then keep the node.
        if simple is not None and self.nodes[simple].width == width:
            return simple
        return self._intern(Node(op, args, type, width, attr))

    def value(self, at: int) -> Number | None:
        """The number that node ``at`` is, or None when it is not a constant."""
        node = self.nodes[at]
        return node.attr if node.op == "const" else None

    def in_order(self, args: tuple[int, ...]) -> tuple[int, ...]:
        """Operands in canonical order: by structure, constants last."""
        return tuple(sorted(args, key=lambda at: (*self.order(at), at)))

    def order(self, at: int) -> tuple[bool, bytes]:
        """What orders commutative operands; the same for loads that differ only in tensor."""
        return (self.nodes[at].op == "const", self._digests[at])

    def finish(self, result: int, captured: list[Captured], scalars: list[str]) -> Finished:
        """The graph of what ``result`` reads, in depth-first order, renumbered.

        ``captured`` and ``scalars`` describe what the positions in loads and scalars mean here; the
        graph keeps those that it reads, in the order in which it reads them.
        """
        final: dict[int, int] = {}
        slots: dict[str, dict[object, int]] = {"load": {}, "scalar": {}}
        nodes = []
        for at in self._depth_first(result):
            node = self.nodes[at]
            if node.op == "load" and node.width > LONGEST_VECTOR:
                raise Untraceable(
                    f"a partial index gives a vector of {node.width} elements and at most "
                    f"{LONGEST_VECTOR} are held; index the last dimension too",
                    self.origins[at],
                )
            args, attr = node.args, node.attr
            if node.op in COMMUTATIVE:
                args = tuple(sorted(args, key=lambda arg: (*self.order(arg), final[arg])))
            if node.op in slots:
                attr = slots[node.op].setdefault(attr, len(slots[node.op]))
            final[at] = len(nodes)
            nodes.append(Node(node.op, tuple(final[a] for a in args), node.type, node.width, attr))
        loads, numbers = tuple(slots["load"]), tuple(slots["scalar"])
        operands = tuple(
            replace(captured[slot], inner=_inner(nodes, position, captured[slot].ndim))
            for position, slot in enumerate(loads)
        )
        kinds = tuple(scalars[slot] for slot in numbers)
        return Finished(Graph(tuple(nodes), final[result], operands, kinds), loads, numbers)

    def _depth_first(self, result: int) -> list[int]:
        order, seen, stack = [], set(), [(result, False)]
        while stack:
            at, ready = stack.pop()
            if ready:
                order.append(at)
            elif at not in seen:
                seen.add(at)
                stack.append((at, True))
                stack.extend((arg, False) for arg in reversed(self.nodes[at].args))
        return order

    def _intern(self, node: Node) -> int:
        known = (node.op, node.args, node.type, node.width, number_text(node.attr))
        at = self._known.get(known)
        if at is None:
            at = self._known[known] = len(self.nodes)
            self.nodes.append(node)
            self.origins.append(self.origin)
            self._digests.append(self._digest(node))
        return at

    def _digest(self, node: Node) -> bytes:
        """Structure without identity: which captured tensor or scalar it is does not count."""
        attr = None if node.op in ("load", "scalar") else node.attr
        text = f"{node.op} {number_text(attr)} {node.type} {node.width}"
        digest = hashlib.sha256(text.encode())
        for arg in node.args:
            digest.update(self._digests[arg])
        return digest.digest()

    def _simplified(self, op: str, args: tuple[int, ...], type: str) -> int | None:
        values = [self.value(arg) for arg in args]
        if None not in values:
            folded = fold(op, values, self.nodes[args[0]].type, type)
            if folded is not None:
                return self.const(folded, type)
        rule = RULES.get(op)
        return rule(self, args, values, type) if rule else None


def _inner(nodes: list[Node], position: int, ndim: int) -> int | None:
    """The size of the last dimension of a captured tensor, if a partial index reads it whole."""
    for node in nodes:
        if node.op == "load" and node.attr == position and len(node.args) < ndim:
            return node.width
    return None


def canonical(graph: Graph) -> Graph:
    """The graph built again: the same graph, if it was canonical."""
    builder = Builder()
    at: list[int] = []
    for node in graph.nodes:
        args = tuple(at[arg] for arg in node.args)
        if node.op == "const":
            at.append(builder.const(node.attr, node.type))
        elif node.op == "load" or not args:
            at.append(builder.leaf(node.op, node.type, node.attr, args, node.width))
        else:
            at.append(builder.make(node.op, *args, type=node.type, attr=node.attr))
    return builder.finish(at[graph.result], list(graph.captured), list(graph.scalars)).graph
