"""The tiles of keys of a backward, and the blocks of queries that each visits.

A ``KeyWalk`` is of a plan. Roles that must agree (who loads, who computes) ask the same one. Blocks
are visited from the last to the first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa_cute.device.fragment import Fragment
from fa_cute.device.scheduler import Place, Tiles, section_of
from fa_cute.device.visits import KeyRangeVisits, ListVisits, SpanVisits, Visit, ranges_at
from fa_cute.plan import BwdIo, Plan
from fa_cute.spans import Arithmetic, QSpans, q_spans, visible

ARITHMETIC = Arithmetic(cutlass.min, cutlass.max)


class Visits(NamedTuple):
    """``count`` blocks, which ``provider`` gives one after another."""

    provider: Any
    count: Int32


class KeyWalk:
    """The walk of one plan; ``fragment``: a thread's part of S^T, for what masks capture.

    ``noted``: the producer's words name the visits.
    """

    def __init__(self, plan: Plan, fragment: Fragment):
        self.plan, self.config, self.fragment = plan, plan.config, fragment
        self.noted = plan.visits != "bounds"
        self.modified = plan.score_mod is not None or plan.mask_mod is not None
        self.cut = plan.causal or any(plan.window) or plan.deterministic or self.noted
        # By their length lists would put a tile before others whose turns come first.
        self.sorted = plan.visits == "lists" and not plan.deterministic

    def number(self, io: BwdIo) -> Tiles:
        """The numbering of tiles."""
        batch, seqlen_k, heads = (io.k.shape[i] for i in range(3))
        # Q, dO and the sums of dQ of a section in 16 MB: d128 S1k causal, 325 TFLOP/s by Q and dO
        # alone (64 heads), 354 with dQ in 32 MB (32 heads), 366 so (16); S8k 615, 610, 610.
        row_bytes = 2 * (self.plan.head_dim + self.plan.head_dim_v) + 4 * self.plan.width
        section = section_of(2 * row_bytes * io.q.shape[1] * self.plan.gqa_ratio, 1)
        if self.sorted:
            # A few tiles may be far longer than the rest: those of all heads come first.
            section = heads * batch
        return Tiles.of(cute.ceil_div(seqlen_k, self.config.tile_kv), heads, batch, section)

    def place(self, x: Any, number: Int32) -> Place:
        """The place of tile ``number``: by key head. Where tiles differ, the longest come first."""
        place = x.tiles.place(number, self.cut)
        if self.sorted:
            order = x.extra.block_lists.order
            return place._replace(block=order[place.batch, place.head, place.block])
        # Under causal, and as far as is known under a mask, most queries see the first keys.
        return place._replace(block=x.tiles.blocks - 1 - place.block) if self.cut else place

    def first(self, x: Any) -> tuple[Int32, Place]:
        """The number and the place of the CTA's first tile."""
        number = Int32(cute.arch.block_idx()[0])
        return number, self.place(x, number)

    def spans(self, x: Any, place: Place) -> QSpans:
        """The blocks that causal and the window leave a tile."""
        c = self.config
        first = place.block * c.tile_kv
        spans = q_spans(x.bounds, first, first + c.tile_kv, c.tile_q, ARITHMETIC)
        if not self.modified:
            return spans
        # Past the last query shift is -inf and hides any finite score, which a mod's may not be.
        whole = cutlass.min(spans.middle_end, x.bounds.seqlen_q // c.tile_q)
        return spans._replace(middle_end=cutlass.max(whole, spans.middle_begin))

    def visits(self, x: Any, place: Place) -> Visits:
        """What a tile visits of the query head ``place.head``; all lanes of a warp call it."""
        plan, c, spans = self.plan, self.config, self.spans(x, place)
        if plan.visits == "lists":
            at = place.batch, place.head, place.block
            provider = ListVisits.of(x.extra.block_lists, at, spans)
        elif plan.visits == "ranges":
            ranges = ranges_at(plan, x.extra, self.fragment, (place.batch, place.head))
            at = place.block, (x.bounds.seqlen_q, x.bounds.seqlen_k)
            provider = KeyRangeVisits(*ranges, at, (c.tile_q, c.tile_kv), spans)
        else:
            provider = SpanVisits(spans.end - 1, spans.end - spans.begin)
        return Visits(provider, provider.count)

    def following(self, visits: Visits, index: Int32, previous: Int32) -> Visit:
        """Visit number ``index``, after that of block ``previous`` (the first: the spans' end)."""
        return visits.provider.following(index, previous)

    def turn(self, x: Any, place: Place, visits: Visits, index: Int32, block: Int32) -> Int32:
        """How many tiles of keys before this one visit the ``block`` that is visit ``index``."""
        first = Int32(0)
        if x.bounds.left is not None:
            tile = self.config.tile_q
            keys, _ = visible(x.bounds, block * tile, (block + 1) * tile, ARITHMETIC)
            first = cutlass.max(keys, Int32(0)) // self.config.tile_kv
        return visits.provider.before(index, block, (first, place.block))
