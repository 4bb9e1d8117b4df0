"""How large a mod's scores can be, whatever q, k and the captured tensors hold.

``softcap(30)`` gives none beyond 30; ALiBi's have no bound. A NaN is in every bound.
"""

from __future__ import annotations

import functools
import math

from fa_cute.mods.graph import Graph, Node

_ONE = frozenset(("tanh", "erf", "sin", "cos", "sigmoid", "sign"))
_SAME = frozenset(("neg", "abs", "round_to"))


@functools.lru_cache(maxsize=256)
def largest(graph: Graph) -> float:
    """The largest magnitude of the score_mod's result, in nats; inf where none is known.

    -inf, which hides a key, does not count.
    """
    found: list[float] = []
    for node in graph.nodes:
        found.append(_of(node, [found[arg] for arg in node.args]))
    return found[graph.result]


def _of(node: Node, args: list[float]) -> float:
    if node.op == "const":
        return 0.0 if node.attr == -math.inf else abs(float(node.attr))
    if node.op in _ONE:
        return 1.0
    if node.op in _SAME or (node.op == "cast" and node.type == "float32"):
        return args[0]
    if node.op in ("add", "sub"):
        return sum(args)
    if node.op == "mul":
        return math.inf if math.inf in args else args[0] * args[1]
    if node.op == "where":
        return max(args[1:])
    return max(args) if node.op in ("minimum", "maximum") else math.inf
