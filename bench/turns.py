"""How long tiles of a deterministic backward wait for each other: ``python -m bench.turns``.

A model, on the CPU: CTAs draw tiles of keys, each of which visits its blocks of queries and adds
to their sums of dQ in turn. ``down``: tiles are drawn from the first keys, blocks visited from the
last to the first; ``up``: the other way round; ``mixed``: up, but the last section of heads down.
The figures are the time without turns over the time with them, by heads side by side (a section).
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Iterator
from typing import NamedTuple

from bench.results import table
from fa_cute.spans import Bounds, q_spans

ORDERS = ("down", "up", "mixed")
SECTIONS = (1, 2, 4, 8, 16)


class Model(NamedTuple):
    """A call and the times of its pieces, in microseconds.

    ``block``: until the next dQ is there; ``add``: until the L2 has what was added; ``hand``: until
    the next tile knows; ``tile``: what a tile begins and ends with. ``ctas`` at work.
    """

    bounds: Bounds
    heads: int
    tile_q: int = 64
    tile_kv: int = 128
    block: float = 2.13
    add: float = 1.7
    hand: float = 1.2
    tile: float = 2.0
    ctas: int = 132


def drawn(model: Model, order: str, section: int) -> Iterator[tuple[int, int, bool]]:
    """Head, tile of keys and whether it goes up, in the order of the draws."""
    tiles = -(-model.bounds.seqlen_k // model.tile_kv)
    for first in range(0, model.heads, section):
        last = first + section >= model.heads
        up = order == "up" or (order == "mixed" and not last)
        for number in range(tiles):
            for head in range(first, min(first + section, model.heads)):
                yield head, tiles - 1 - number if up else number, up


def duration(model: Model, order: str, section: int, *, turns: bool = True) -> float:
    """Microseconds of the call. A tile waits only for tiles drawn before it: one pass suffices."""
    free, given, end = [0.0] * model.ctas, {}, 0.0
    for head, number, up in drawn(model, order, section):
        first = number * model.tile_kv
        spans = q_spans(model.bounds, first, first + model.tile_kv, model.tile_q)
        blocks = range(spans.begin, spans.end)
        there = heapq.heappop(free) + model.tile
        added = 0.0
        for block in blocks if up else reversed(blocks):
            there = max(there + model.block, added)  # one slot: the last dQ is read
            begin = max(there, added, given.get((head, block), 0.0) if turns else 0.0)
            added = begin + model.add if turns else there
            given[head, block] = added + model.hand
        heapq.heappush(free, there)
        end = max(end, there, added)
    return end


def main(argv: list[str] | None = None) -> int:
    """Print a row a call and order."""
    parser = argparse.ArgumentParser(prog="bench.turns", description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=16, help="a sequence")
    parser.add_argument("--lengths", default="1024,8192")
    options = parser.parse_args(argv)
    rows = []
    for length in map(int, options.lengths.split(",")):
        for kind, right in (("full", None), ("causal", 0)):
            heads = options.heads * max(1, options.tokens // length)
            model = Model(Bounds(length, length, None, right), heads)
            free = duration(model, "down", 2, turns=False)
            for order in ORDERS:
                ratios = [free / duration(model, order, section) for section in SECTIONS]
                rows.append([f"s{length} {kind} {order}", *(f"{ratio:.2f}" for ratio in ratios)])
    print(table(["heads side by side", *map(str, SECTIONS)], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
