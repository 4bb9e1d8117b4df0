"""Reading a graph with its derivative, as ``derivative.differentiate`` makes it.

``Graph.more`` holds the node d mod / d score, then a load and a value for each contribution to a
captured tensor, so that rewriting the graph keeps track of them.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from fa_cute.mods.graph import Graph

# Their values are finite wherever their operands are.
_TAME = frozenset(
    ("score", "b", "h", "q", "kv", "const", "scalar", "load", "neg", "abs", "sign", "tanh", "erf")
    + ("sigmoid", "sin", "cos", "floor", "ceil", "round", "trunc", "not", "cast", "sum", "add")
    + ("sub", "mul", "minimum", "maximum", "lt", "le", "eq", "ne", "and", "or", "xor", "shl", "shr")
    + ("where", "round_to")
)


class Contribution(NamedTuple):
    """What one load adds to the gradient of its captured tensor, a factor on d mod.

    ``slot`` is the tensor's place in ``Graph.captured``, ``load`` the load's node, ``value`` the
    factor's, of width 1 or of the load's.
    """

    slot: int
    load: int
    value: int


def factor(graph: Graph) -> int:
    """The node d mod / d score of a graph with its derivative, lowered or not."""
    return graph.more[0]


def contributions(graph: Graph) -> tuple[Contribution, ...]:
    """What a graph with its derivative, lowered or not, gives to captured tensors."""
    pairs = zip(graph.more[1::2], graph.more[2::2], strict=True)
    return tuple(Contribution(graph.nodes[load].attr, load, value) for load, value in pairs)


def reads_scores(graph: Graph | None) -> bool:
    """Whether what a graph with its derivative gives to captured tensors depends on the score."""
    if graph is None or not graph.more:
        return False
    needs = graph.dependence()
    return any("score" in needs[one.value] for one in contributions(graph))


def taught(graph: Graph) -> tuple[int, ...]:
    """The captured tensors (places) that get gradients, in order."""
    return tuple(sorted({one.slot for one in contributions(graph)}))


@functools.lru_cache(maxsize=256)
def tame(graph: Graph) -> bool:
    """Whether the derivative is finite for finite operands, so that a probability of 0 mutes it."""
    todo, seen = [graph.more[0], *graph.more[2::2]], set()
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        node = graph.nodes[at]
        whole = node.type != "float32"
        infinite = node.op == "const" and not whole and not math.isfinite(node.attr)
        divided = node.op == "truediv" and bool(graph.nodes[node.args[1]].attr)
        if infinite or not (whole or divided or node.op in _TAME):
            return False
        # What decides something is bool or int, finite whatever its operands are.
        todo += [] if whole else node.args
    return True
