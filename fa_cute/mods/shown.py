"""What a score_mod leaves to be seen: all that it does not make the constant minus infinity.

``torch.where(q >= kv, score, -inf)`` hides what the mask_mod ``q >= kv`` would. So a kernel without
a mask_mod leaves out the blocks that such a score_mod hides; the others need no mask.
"""

from __future__ import annotations

import functools
import math

from fa_cute.mods.graph import Graph, Node

# Minus infinity passes through these wherever it stands, or (as the first operand) through those.
_PASSING, _FIRST = ("add", "minimum"), ("sub", "cast", "round_to")


def visible_graph(score_mod: Graph | None, mask_mod: Graph | None) -> Graph | None:
    """The mask that tells which blocks are visited: the mask_mod, else what the score_mod shows."""
    if mask_mod is not None or score_mod is None:
        return mask_mod
    return shown(score_mod)


@functools.lru_cache(maxsize=256)
def shown(graph: Graph) -> Graph | None:
    """A mask's graph that is False only where the score_mod ``graph`` is -inf, whatever the score.

    Captured tensors and scalars keep their places. None: nothing is hidden for sure.
    """
    finder = _Finder(graph)
    result = finder.result(graph.result)
    if isinstance(result, bool):
        return None
    return Graph(tuple(finder.nodes), result, graph.captured, graph.scalars)


class _Finder:
    """Adds the mask's nodes to those of the score_mod; True and False stand for constants."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = list(graph.nodes)
        self.reads = graph.dependence()
        self.seen: dict[int, int | bool] = {}

    def result(self, at: int) -> int | bool:
        """Where node ``at``, a float, is not -inf.

        Each node is looked at once, arguments first: 24 times ``x + x`` would be 2**24 walks, and
        a mod of 600 nodes too deep to recurse.
        """
        wanted = {at}
        for node in range(at, -1, -1):
            if node in wanted:
                wanted.update(self._sources(node))
        for node in sorted(wanted):
            self.seen[node] = self._seen(node)
        return self.seen[at]

    def _sources(self, at: int) -> tuple[int, ...]:
        """The operands of node ``at`` whose -inf can make it -inf."""
        node = self.nodes[at]
        if node.op == "where" and "score" not in self.reads[node.args[0]]:
            return node.args[1:]
        if node.op in _PASSING:
            return node.args
        return node.args[:1] if node.op in _FIRST else ()

    def _seen(self, at: int) -> int | bool:
        node, sources = self.nodes[at], [self.seen[source] for source in self._sources(at)]
        if node.op == "const":
            return node.attr != -math.inf
        if node.op != "where" or not sources:
            return functools.reduce(self._and, sources, True)
        first, second = sources
        if first is second:  # both True, both False, or one node's
            return first
        condition = node.args[0]
        return self._or(self._and(condition, first), self._and(self._not(condition), second))

    def _and(self, a: int | bool, b: int | bool) -> int | bool:
        if a is False or b is False:
            return False
        if a is b:  # of one node, in x + x
            return a
        if a is True or b is True:
            return b if a is True else a
        return self._made("and", a, b)

    def _or(self, a: int | bool, b: int | bool) -> int | bool:
        return self._not(self._and(self._not(a), self._not(b)))

    def _not(self, a: int | bool) -> int | bool:
        return (not a) if isinstance(a, bool) else self._made("not", a)

    def _made(self, op: str, *args: int) -> int:
        self.nodes.append(Node(op, args, "bool"))
        return len(self.nodes) - 1
