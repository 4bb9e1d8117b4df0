"""What a mask reads by key (``documents[b, kv]``), brought by a warp beside the one that loads K.

It walks the same visits. Its lanes load a block's columns, 4 of 128 each, before they wait for the
block's slot of K, and arrive at that slot's barrier when they have written them: to consumers they
are a part of K. Loaded by the consumers they came too late: the block's number, the load, a
barrier, words in shared memory and a barrier followed each other, behind the products that a warp
has issued. Done by the warp that loads K, in whatever way, ptxas no longer knows that TMA's
coordinates are the same in a warp, and loops over each copy.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from fa_cute.device import emit
from fa_cute.device.fragment import Fragment
from fa_cute.device.lower import schedule
from fa_cute.device.scheduler import Place
from fa_cute.device.scope import Ramp, Scope, Value
from fa_cute.device.score import Given, Modifier, Tiles
from fa_cute.mods.graph import Graph

LANES = 32


@dataclass(frozen=True)
class Columns:
    """What ``graph`` reads by column of a ``fragment``: ``nodes``, each ``width`` words a slot."""

    graph: Graph
    fragment: Fragment

    @staticmethod
    def of(graph: Graph | None, fragment: Fragment) -> Columns | None:
        """None where nothing is brought: the mask reads by query and by key, as documents do.

        ``tree``, which reads by key alone, has few masked blocks, and took 1 % longer with it. Dear
        diagonals want the consumers' scratch.
        """
        program = None if graph is None else schedule(graph)
        if program is None or not program.column or program.diagonal:
            return None
        nodes = zip(program.lowered.graph.nodes, program.levels, strict=True)
        by_query = any(node.op == "load" and level == "row" for node, level in nodes)
        return Columns(graph, fragment) if by_query else None

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes of the lowered graph."""
        return schedule(self.graph).column

    @property
    def width(self) -> int:
        """The columns of a block, rounded up so that every lane loads equally many."""
        return -(-self.fragment.width // LANES) * LANES

    @property
    def words(self) -> int:
        """32-bit words of a slot."""
        return self.width * len(self.nodes)

    def entered(self, given: Given, place: Place) -> Scope:
        """The producer's scope of the tile at ``place``; ``given``: the graph's operands."""
        of = {"scale": Float32(1.0), "fragment": self.fragment, "brought": True}
        return Modifier.of(self.graph, given, **of).tile(place.batch, place.head).scope

    def registers(self) -> cute.Tensor:
        """A lane's words of a block."""
        return cute.make_rmem_tensor(self.words // LANES, Int32)

    def load(self, scope: Scope, first: Int32, loaded: cute.Tensor) -> None:
        """Begin to load this lane's words of the block from key ``first`` on."""
        index = Ramp("column", first + cute.arch.lane_idx(), self._own())
        scope = replace(scope.below(kv=index), columns=len(self._own()))
        found = scope.evaluate(self.nodes)
        vectors = (emit.to_word(scope.spread(found[at], "column")[0]) for at in self.nodes)
        for at, word in enumerate(chain.from_iterable(map(emit.lanes_in, vectors))):
            loaded[at] = Int32(word)

    def leave(self, loaded: cute.Tensor, slot: cute.Tensor) -> None:
        """Write them to the words of a ``slot``."""
        for at in range(cute.size(loaded)):
            slot[LANES * at + cute.arch.lane_idx()] = loaded[at]

    def tiles(self, slot: cute.Tensor, thread: Int32) -> Tiles:
        """For ``score.Rows.block``: the columns of ``thread`` of a warpgroup, read at once.

        So the slot of K, which is free when S is there, is not read behind that.
        """
        own, nodes = self.fragment.first_column(thread), schedule(self.graph).lowered.graph.nodes
        tiles = {}
        for number, at in enumerate(self.nodes):
            pointer = slot.iterator + (number * self.width + own)
            words = cute.make_tensor(pointer, cute.make_layout(self.width))
            every = range(self.fragment.columns)
            found = [words[self.fragment.column(c)].ir_value() for c in every]
            tiles[at] = functools.partial(_some, found, nodes[at].type)
        return tiles

    def _own(self) -> tuple[int, ...]:
        return tuple(range(0, self.width, LANES))


def _some(words: list[Any], kind: str, columns: range) -> Value:
    some = [words[c] for c in columns]
    return Value("column", (emit.from_word(emit.gathered(some, len(some)), kind),))
