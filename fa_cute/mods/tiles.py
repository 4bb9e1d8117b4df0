"""Captured tensors that a score_mod reads at exactly ``[..., q, kv]``: a tile of scores reads a
tile of the tensor, so that a kernel can load it as one box.
"""

from __future__ import annotations

import functools

from fa_cute.mods.graph import Graph

DTYPES = ("float16", "bfloat16", "float32")
MOST_DIMENSIONS = 5  # of a TMA descriptor
UNIFORM = ("constant", "tile")


@functools.lru_cache(maxsize=256)
def tiled_loads(graph: Graph) -> dict[int, int]:
    """By captured tensor the node that reads it at ``[..., q, kv]``; the first, where several do.

    The indices before may be anything that changes with b and h alone: ``h // 4``, ``which[b]``.
    """
    nodes, levels = graph.nodes, graph.levels()
    found: dict[int, int] = {}
    for at, node in enumerate(nodes):
        if node.op != "load" or node.attr in found:
            continue
        captured = graph.captured[node.attr]
        whole = len(node.args) == captured.ndim and 2 <= captured.ndim <= MOST_DIMENSIONS
        if not whole or captured.dtype not in DTYPES:
            continue
        *lead, row, column = node.args
        by_tile = nodes[row].op == "q" and nodes[column].op == "kv"
        if by_tile and all(levels[index] in UNIFORM for index in lead):
            found[node.attr] = at
    return found


@functools.lru_cache(maxsize=256)
def lead_graphs(graph: Graph, slot: int) -> tuple[Graph, ...]:
    """A graph for each index of ``tiled_loads(graph)[slot]`` before q and kv: of b and h alone."""
    lead = graph.nodes[tiled_loads(graph)[slot]].args[:-2]
    return tuple(Graph(graph.nodes[: at + 1], at, graph.captured, graph.scalars) for at in lead)


def shared_by(graph: Graph, slot: int) -> frozenset[str]:
    """Which of "b" and "h" no index of the load names: those share its tiles."""
    reads = graph.dependence()
    lead = graph.nodes[tiled_loads(graph)[slot]].args[:-2]
    return frozenset("bh").difference(*(reads[at] for at in lead))
