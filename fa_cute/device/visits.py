"""Which blocks of keys a tile of queries visits under a mask, told by the producer alone.

The producer warp asks a provider for visit 0, 1, ... (from the last block of keys to the first),
loads those blocks, and leaves a word with each slot of K: ``2 * block + whole`` (on Hopper whole of
the next block, so that a consumer branches before it begins one). Consumers learn the number of
visits from the tile's header and the rest from the words: the two sides agree by construction.

A **whole** block needs no mask: every query of the tile sees every key of it. Only the first visit
can pass the end of the keys; consumers mask it whatever its word says.

``RangeVisits`` computes them from the lengths (``mods/ranges.py``), ``ListVisits`` reads lists that
``plan_mask`` made. Both leave out what causal and windows hide.

In a backward a tile of keys visits blocks of queries, likewise from the last to the first, and
``following`` gives one from the one before: ``KeyRangeVisits``, or ``ListVisits`` of lists by key.
There the end of the queries or of the keys is an edge of ``within``: no block that passes it is
whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa_cute.device import emit
from fa_cute.device.fragment import Fragment
from fa_cute.device.score import Given, Modifier, deal
from fa_cute.mods.affine import input_graphs, ranges_of
from fa_cute.mods.graph import Graph, Node
from fa_cute.mods.ranges import Integers, Ranges, Run, blocks_in, clipped, runs
from fa_cute.mods.shown import visible_graph
from fa_cute.plan import BlockLists, Extra, Plan
from fa_cute.spans import KvSpans, QSpans

LANES = 32


class Visit(NamedTuple):
    """A block of keys, and 1 where it needs no mask, else 0."""

    block: Int32
    whole: Int32

    def word(self) -> Int32:
        """Both in one word."""
        return self.block * 2 + self.whole

    @staticmethod
    def of(word: Int32) -> Visit:
        """The inverse of ``word``."""
        return Visit(word >> 1, word & 1)

    def inside(self, within: KvSpans | QSpans) -> Visit:
        """Whole only where bounds leave the block whole too."""
        here = (self.block >= within.middle_begin) & (self.block < within.middle_end)
        return Visit(self.block, cutlass.select_(here, self.whole, Int32(0)))


@cute.jit
def leave(visit: Visit, notes: cute.Tensor, index: Int32):
    """Write the visit's word to ``notes`` (stages,): lane 0, which arrives for it."""
    if cute.arch.lane_idx() == 0:
        notes[index] = visit.word()


class SpanVisits(NamedTuple):
    """Visits that bounds alone decide: ``count`` blocks from ``last`` down."""

    last: Int32
    count: Int32

    def at(self, index: Int32) -> Visit:
        """Visit number ``index``, below ``count``; whether it is whole the consumers know."""
        return Visit(self.last - index, Int32(0))

    def following(self, index: Int32, _: Int32) -> Visit:
        """Visit number ``index``."""
        return self.at(index)

    def before(self, index: Int32, block: Int32, tiles: tuple[Int32, Int32]) -> Int32:
        """How many of ``tiles`` [first, own) visit the block of the own one's visit ``index``."""
        return tiles[1] - tiles[0]

    def at_least_one(self) -> SpanVisits:
        """These; where there are none one, of some block."""
        return self._replace(count=cutlass.max(self.count, 1))


@dataclass(frozen=True)
class RangeVisits:
    """Visits of a mask with affine ranges: disjoint ``runs`` of blocks, the highest first."""

    runs: tuple[Run, ...]
    count: Int32

    @staticmethod
    def of(
        ranges: Ranges,
        inputs: Sequence[Int32],
        place: tuple[tuple[Int32, Int32], tuple[Int32, Int32]],
        tile_n: int,
        within: KvSpans | None,
    ) -> RangeVisits:
        """For ``place``: the tile's queries (begin, end) and the lengths (Sq, Sk).

        ``inputs`` holds the values of ``input_graphs`` for the tile's batch and head; ``within``
        what causal and a window leave.
        """
        found = runs(ranges, inputs, *place, tile_n, INT32)
        if within is not None:
            found = tuple(clipped(run, within, INT32) for run in found)
        found = tuple(Run(*map(Int32, run)) for run in found)
        return RangeVisits(found, sum((run.end - run.begin for run in found), Int32(0)))

    def at(self, index: Int32) -> Visit:
        """Visit number ``index``, below ``count``."""
        block = whole = Int32(0)
        for run in self.runs:
            here = run.end - 1 - index
            inside = (here >= run.begin) & (here < run.end)
            block = cutlass.select_(inside, here, block)
            plain = (here >= run.middle_begin) & (here < run.middle_end)
            whole = cutlass.select_(inside & plain, Int32(1), whole)
            index = index - (run.end - run.begin)
        return Visit(block, whole)

    def at_least_one(self) -> RangeVisits:
        """As ``SpanVisits.at_least_one``."""
        return replace(self, count=cutlass.max(self.count, 1))


@dataclass(frozen=True)
class ListVisits:
    """Visits of a planned mask: the first ``count`` of the ``entries``.

    ``within``: what causal and a window leave whole, or None without them; of a tile of keys its
    ``QSpans``.
    """

    entries: cute.Tensor
    count: Int32
    within: KvSpans | QSpans | None
    turns: cute.Tensor | None = None

    @staticmethod
    def of(
        lists: BlockLists, place: tuple[Int32, Int32, Int32], within: KvSpans | QSpans | None
    ) -> ListVisits:
        """For the tile at ``place`` (batch, query head, tile); all lanes of a warp call it."""
        first, end = lists.begin[place], lists.end[place]
        turns = lists.turns
        if within is not None:
            # Entries fall: those above the bounds come first, those below last.
            last = first + count_from(lists.entries, (first, end), within.begin)
            first = first + count_from(lists.entries, (first, end), within.end)
            end = last
        own = cute.domain_offset((first,), lists.entries)  # a register less than an index
        if turns is not None:
            turns = cute.domain_offset((first,), turns)
        return ListVisits(own, end - first, within, turns)

    def at(self, index: Int32) -> Visit:
        """Visit number ``index``, below ``count``."""
        visit = Visit.of(self.entries[index])
        if self.within is None:
            return visit
        return visit.inside(self.within)

    def at_least_one(self) -> ListVisits:
        """As ``SpanVisits.at_least_one``: of the entry behind an empty list (one ends them all)."""
        return replace(self, count=cutlass.max(self.count, 1))

    def following(self, index: Int32, _: Int32) -> Visit:
        """Visit number ``index``."""
        return self.at(index)

    def before(self, index: Int32, block: Int32, tiles: tuple[Int32, Int32]) -> Int32:
        """As ``SpanVisits.before``, for all tiles before: they start at 0 without a left bound."""
        return self.turns[index]


@dataclass(frozen=True)
class KeyRangeVisits:
    """Visits of a tile of keys under a mask with affine ranges.

    The ranges are of keys, for queries: so each block of queries is asked whether its runs hold the
    tile, 32 blocks at a time, one a lane. All lanes of a warp call every method.
    """

    ranges: Ranges
    inputs: tuple[Int32, ...]
    place: tuple[Int32, tuple[Int32, Int32]]
    tile: tuple[int, int]
    within: QSpans

    @property
    def count(self) -> Int32:
        """How many blocks of queries the tile visits."""
        return _count_asked(self)

    def following(self, _: Int32, previous: Int32) -> Visit:
        """The visit after that of block ``previous`` (the first: ``within.end``), if there is."""
        return _next_asked(self, previous)

    def runs(self, block: Int32) -> list[Run]:
        """The tiles of keys that a ``block`` of queries sees, without bounds."""
        tile_q, tile_kv = self.tile
        queries = block * tile_q, (block + 1) * tile_q
        found = runs(self.ranges, self.inputs, queries, self.place[1], tile_kv, INT32)
        return [Run(*map(Int32, run)) for run in found]

    def before(self, _: Int32, block: Int32, tiles: tuple[Int32, Int32]) -> Int32:
        """As ``SpanVisits.before``."""
        return blocks_in(self.runs(block), *tiles, INT32)

    def asked(self, block: Int32) -> tuple[Int32, Int32]:
        """Whether a ``block`` of queries is visited, and whether it is whole: 0 or 1."""
        key_tile = self.place[0]
        kept = whole = Int32(0)
        for run in self.runs(block):
            here = (key_tile >= run.begin) & (key_tile < run.end)
            plain = (key_tile >= run.middle_begin) & (key_tile < run.middle_end)
            kept = cutlass.select_(here, Int32(1), kept)
            whole = cutlass.select_(plain, Int32(1), whole)
        there = (block >= self.within.begin) & (block < self.within.end)
        kept = cutlass.select_(there, kept, Int32(0))
        return kept, Visit(block, whole).inside(self.within).whole


@cute.jit
def _count_asked(visits: KeyRangeVisits) -> Int32:
    lane, found, top = cute.arch.lane_idx(), Int32(0), Int32(visits.within.end)
    while top > visits.within.begin:
        kept, _ = visits.asked(top - 1 - lane)
        found = found + cute.arch.popc(cute.arch.vote_ballot_sync(kept != 0))
        top = top - LANES
    return found


@cute.jit
def _next_asked(visits: KeyRangeVisits, top: Int32) -> Visit:
    lane = cute.arch.lane_idx()
    kept, whole = visits.asked(top - 1 - lane)
    kept, whole = (cute.arch.vote_ballot_sync(word != 0) for word in (kept, whole))
    while (kept == 0) & (top > visits.within.begin):
        top = top - LANES
        kept, whole = visits.asked(top - 1 - lane)
        kept, whole = (cute.arch.vote_ballot_sync(word != 0) for word in (kept, whole))
    first = cute.arch.popc((kept & -kept) - 1)
    return Visit(top - 1 - first, (whole >> first) & 1)


@cute.jit
def count_from(entries: cute.Tensor, part: tuple, block: Int32) -> Int32:
    """How many ``entries`` of ``[part[0], part[1])`` are of ``block`` or a later one.

    They come first. A warp looks at 32 at a time and stops where the first is not.
    """
    first, end = part
    lane = cute.arch.lane_idx()
    found, going = Int32(0), first < end
    while going:
        at = first + found + lane
        later = Int32(0)
        if at < end:
            later = Int32((entries[at] >> 1) >= block)
        here = cute.arch.popc(cute.arch.vote_ballot_sync(later != 0))
        found = found + here
        going = (here == LANES) & (first + found < end)
    return found


def ranges_at(
    plan: Plan, extra: Extra | None, fragment: Fragment, place: tuple[Int32, Int32]
) -> tuple[Ranges, tuple[Int32, ...]]:
    """The ranges that the plan visits by, and their inputs at ``place`` (batch, query head)."""
    extra, mask = extra or Extra(), visible_graph(plan.score_mod, plan.mask_mod)
    graphs = (plan.score_mod, plan.mask_mod)
    of_score, of_mask = deal(graphs, extra.captured, extra.scalars)
    given = of_score if plan.mask_mod is None else of_mask
    return ranges_of(mask), inputs_of(input_graphs(mask), given, fragment, place)


def inputs_of(
    graphs: Sequence[Graph], given: Given, fragment: Fragment, place: tuple[Int32, Int32]
) -> tuple[Int32, ...]:
    """The values of ``input_graphs`` at ``place`` (batch, query head); a bool as 0 or 1."""
    found = []
    for graph in graphs:
        mod = Modifier.of(graph, given, scale=Float32(1.0), fragment=fragment)
        at = mod.schedule.lowered.graph.result
        value = mod.tile(*place).scope.evaluate([at])[at]
        found.append(Int32(emit.to_word(value.parts[0])))
    return tuple(found)


def _minimum(a: Any, b: Any) -> Any:
    return min(a, b) if _known(a, b) else cutlass.min(Int32(a), Int32(b))


def _maximum(a: Any, b: Any) -> Any:
    return max(a, b) if _known(a, b) else cutlass.max(Int32(a), Int32(b))


def _select(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, bool):
        return a if condition else b
    return cutlass.select_(condition, Int32(a), Int32(b))


def _floordiv(a: Any, divisor: int) -> Any:
    if _known(a):
        return a // divisor
    number = emit.Operand(emit.constant(divisor, "int32"), divisor)
    node = Node("floordiv", (0, 1), "int32")
    return Int32(emit.operation(node, (emit.Operand(a.ir_value()), number), exact=True))


def _known(*numbers: Any) -> bool:
    return all(isinstance(number, int) for number in numbers)


INT32 = Integers(_minimum, _maximum, _select, _floordiv)
