"""The tiles of queries of a forward, and the blocks of keys that each visits: one for every kernel.

A ``Walk`` is of a plan. Roles that must agree (who loads, who computes) ask the same one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa_cute.device.fragment import Fragment
from fa_cute.device.scheduler import BLOCK, Place, Tiles, section_of
from fa_cute.device.visits import INT32, ListVisits, RangeVisits, SpanVisits, ranges_at
from fa_cute.mods.affine import exact_ranges, ranges_of
from fa_cute.mods.ranges import reached, shrinking
from fa_cute.mods.shown import visible_graph
from fa_cute.mods.tiles import shared_by
from fa_cute.plan import Extra, Io, Plan
from fa_cute.spans import Arithmetic, Bounds, KvSpans, kv_spans


class Entered(NamedTuple):
    """A consumer's tile: ``count`` visits; its ``spans``, or None where notes name the blocks."""

    count: Int32
    spans: KvSpans | None


def side_of(spans: KvSpans, side: Int32) -> tuple[Int32, Int32, Int32]:
    """Edges of the right (``side`` 0) or the left, begin and end; where whole blocks begin.

    These follow the edges of the right, up to ``middle_end``. So a loop over the sides has one
    body for edges and one for whole blocks, where a window's spans in a row have three.
    """
    right = side == 0
    return (
        cutlass.select_(right, spans.middle_end, spans.begin),
        cutlass.select_(right, spans.end, spans.middle_begin),
        cutlass.select_(right, spans.middle_begin, spans.middle_end),
    )


class Walk:
    """The walk of one plan; ``fragment``: a thread's part of S, for what masks capture.

    ``noted``: the producer's words name the visits. ``hides``: the mods hide keys. ``cut``: bounds
    do. ``exact``: ranges that are all that the mask_mod shows, or None. ``sees_some``: every tile
    sees a key. ``group``: consecutive rows that are heads of one query; ``ratio``: query heads that
    read a key/value head one after another.
    """

    def __init__(self, plan: Plan, fragment: Fragment):
        self.plan, self.fragment = plan, fragment
        self.noted = plan.visits != "bounds"
        self.cut = plan.causal or any(plan.window)
        self.longest_first = self.cut or self.noted
        # No call has queries without keys: only bounds and lists leave a tile none.
        self.sees_some = not self.longest_first
        # Batches that share the boxes of a bias run side by side: one reads them from L2. Heads
        # that share them do not: it took d128 S8k full from 0.76 of plain to 0.71.
        shared = shared_by(plan.score_mod, plan.bias) if plan.bias is not None else ()
        self.batches_inside = "b" in shared and "h" not in shared and plan.gqa_ratio == 1
        mask = visible_graph(plan.score_mod, plan.mask_mod)
        self.hides = mask is not None
        self.exact = None if plan.mask_mod is None else exact_ranges(plan.mask_mod)
        self.first_longest = plan.visits == "ranges" and shrinking(ranges_of(mask))
        self.group, self.ratio = (plan.gqa_ratio, 1) if plan.config.packed else (1, plan.gqa_ratio)

    @property
    def header(self) -> int:
        """Words of a tile's header, without its batch and head."""
        return BLOCK + 1 if self.noted else 1

    def number(self, io: Io, rows: Int32, extra: Extra | None) -> Tiles:
        """The numbering of tiles, each head of ``rows`` rows."""
        batch, heads = io.q.shape[0], io.q.shape[2]
        key_bytes = 2 * (self.plan.head_dim + self.plan.head_dim_v)
        section = section_of(self.reach(io, extra) * key_bytes, self.ratio)
        inner, outer = (batch, heads) if self.batches_inside else (heads, batch)
        return Tiles.of(cute.ceil_div(rows, self.plan.config.tile_m), inner, outer, section)

    def reach(self, io: Io, extra: Extra | None) -> Int32:
        """About how many keys of a head are in use at a time: by tiles that run side by side.

        Where a tile sees few, more heads fit into L2 together, and a few tiles that are far longer
        than the rest come first for all of them: under global tokens and a window (S16k, d128) one
        takes 190 us of a call's 250.
        """
        plan, c, seqlen_k = self.plan, self.plan.config, Int32(io.k.shape[1])
        if plan.visits == "lists":
            begin, entries = extra.block_lists.begin, extra.block_lists.entries
            lists = Int32(begin.shape[2])
            for size, stride in zip(begin.shape[:2], begin.stride[:2], strict=True):
                lists = lists * cutlass.select_(stride == 0, Int32(1), Int32(size))
            blocks = Int32(cute.size(entries)) // lists
        elif plan.visits == "ranges":
            ranges = ranges_of(visible_graph(plan.score_mod, plan.mask_mod))
            seqlen_q = Int32(io.q.shape[1])
            ends = (seqlen_q // 2, seqlen_q - c.tile_m)
            tiles = [(cutlass.max(end, 0), cutlass.max(end, 0) + c.tile_m) for end in ends]
            lengths = seqlen_q, seqlen_k
            found = [reached(ranges, tile, lengths, c.tile_n, INT32) for tile in tiles]
            blocks = cutlass.max(*map(Int32, found))
        else:
            return seqlen_k
        return cutlass.min(2 * blocks * c.tile_n, seqlen_k)

    def place(self, x: Any, tile: Int32) -> Place:
        """The place of tile number ``tile``, the longest first."""
        place = self.numbered(x, tile)
        if self.first_longest:
            return place._replace(block=x.tiles.blocks - 1 - place.block)
        if self.plan.visits != "lists":
            return place
        order = x.extra.block_lists.order
        return place._replace(block=order[place.batch, place.head, place.block])

    def numbered(self, x: Any, tile: Int32) -> Place:
        """The place of tile number ``tile`` as ``number`` has it; a mask may change its block."""
        place = x.tiles.place(tile, self.longest_first)
        if self.batches_inside:
            return Place(place.block, place.batch, place.head)
        return place

    def entered(self, x: Any, tile: Int32, words: list[Int32]) -> tuple[Place, Entered]:
        """A consumer's tile, by the ``words`` of its header behind the first."""
        place = self.numbered(x, tile)
        if self.noted:
            return place._replace(block=words[1]), Entered(words[0], None)
        spans = self.spans(x.bounds, place)
        return place, Entered(spans.end - spans.begin, spans)

    def spans(self, bounds: Bounds, place: Place) -> KvSpans:
        """The KV blocks that causal and the window leave a tile: the same for every role."""
        c = self.plan.config
        first = place.block * c.tile_m
        first, end = first // self.group, cute.ceil_div(first + c.tile_m, self.group)
        return kv_spans(bounds, first, end, c.tile_n, Arithmetic(cutlass.min, cutlass.max))

    def visits(self, x: Any, place: Place) -> Any:
        """What the producer loads for a tile: a provider of ``device/visits.py``."""
        plan, c = self.plan, self.plan.config
        spans = self.spans(x.bounds, place)
        within = spans if plan.causal or any(plan.window) else None
        if plan.visits == "lists":
            at = place.batch, place.head, place.block
            return ListVisits.of(x.extra.block_lists, at, within)
        if plan.visits == "ranges":
            ranges = ranges_at(plan, x.extra, self.fragment, (place.batch, place.head))
            tile = place.block * c.tile_m, (place.block + 1) * c.tile_m
            lengths = x.bounds.seqlen_q, x.bounds.seqlen_k
            return RangeVisits.of(*ranges, (tile, lengths), c.tile_n, within)
        return SpanVisits(spans.last, spans.end - spans.begin)
