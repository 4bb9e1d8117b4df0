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
from fa_cute.device.mma_sm90 import ROWS
from fa_cute.device.products import Buffers
from fa_cute.device.scheduler import Place, Tiles
from fa_cute.device.visits import KeyRangeVisits, ListVisits, SpanVisits, Visit, ranges_at
from fa_cute.plan import BwdIo, Plan
from fa_cute.spans import Arithmetic, QSpans, heads_together, q_spans, visible

ARITHMETIC = Arithmetic(cutlass.min, cutlass.max)


class Visits(NamedTuple):
    """``count`` blocks, which ``provider`` gives one after another."""

    provider: Any
    count: Int32


class OwnSpans(NamedTuple):
    """As ``QSpans``, of a warpgroup: the tile's other blocks it does not see."""

    own_begin: Int32
    own_middle_begin: Int32
    own_middle_end: Int32
    own_end: Int32


def edge_of(own: OwnSpans, low: Any) -> list[Int32]:
    """Where the upper edge begins, and the whole blocks and it end; ``low``: the lower edge, and
    none whole. Not a method: a loop would carry the spans, unnamed."""
    upper = own.own_middle_end, own.own_middle_end, own.own_end
    lower = own.own_begin, own.own_middle_begin, own.own_middle_begin
    return [cutlass.select_(low, a, b) for a, b in zip(lower, upper, strict=True)]


class KeyWalk:
    """The walk of one plan; ``fragment``: a thread's part of S^T, for what masks capture.

    ``noted``: the producer's words name the visits.

    ``parted``: a right bound hides whole blocks of a tile from one of its warpgroups, 64 keys each.
    """

    def __init__(self, plan: Plan, fragment: Fragment):
        self.plan, self.config, self.fragment = plan, plan.config, fragment
        self.noted = plan.visits != "bounds"
        self.modified = plan.score_mod is not None or plan.mask_mod is not None
        self.cut = plan.causal or any(plan.window) or plan.deterministic or self.noted
        self.two_edges = plan.window[0] or self.modified
        # Beside a mod it took registers: a learned slope spilled 76 bytes for 64. A window of 1,024
        # at d128 466 to 473 TFLOP/s, in turn, with S ahead, 448 to 455.
        smaller = self.config.tile_q < self.config.tile_kv
        hidden = plan.causal or plan.window[1]
        self.parted = bool(hidden and smaller and not self.modified)
        # By their length lists would put a tile before others whose turns come first.
        self.sorted = plan.visits == "lists" and not plan.deterministic

    def number(self, io: BwdIo) -> Tiles:
        """The numbering of tiles."""
        batch, seqlen_k, heads = (io.k.shape[i] for i in range(3))
        section = self.section(io.q.shape[1])
        if self.sorted:
            # A few tiles may be far longer than the rest: those of all heads come first.
            section = heads * batch
        return Tiles.of(cute.ceil_div(seqlen_k, self.config.tile_kv), heads, batch, section)

    def section(self, rows: Int32) -> Int32:
        """Heads side by side, each of so many ``rows`` of queries.

        In turn all tiles of a head begin at one block, and the n-th waits n turns: with more heads
        side by side less, but their sums leave the L2. Of 16 and 64 MB, d128 S8k causal 517 and 564
        TFLOP/s, full 590 and 605. Of d256, added to from registers, S8k full 4 and 8 heads 408 and
        369, causal 8 and 16 378 and 385, in a window 324 and 272; S16k causal 4 and 8 389 and 404;
        S4k full 16 and 32 265 and 211, causal 358 and 248.
        """
        if not (self.plan.in_turn and self.config.wide):
            return self._together(rows, 4 if self.plan.in_turn else 1)
        if self.plan.window[0] or self.noted:
            return cutlass.min(self._together(rows, 8), 16)
        if self.plan.causal or self.plan.window[1]:
            return cutlass.min(self._together(rows, 16), 16)
        return cutlass.max(self._together(rows, 1), 4)

    def _together(self, rows: Int32, spread: int) -> Int32:
        """Heads that fit into ``spread`` times 16 MB."""
        return Int32(heads_together(rows, self.plan.rows_together(spread), ARITHMETIC))

    def place(self, x: Any, number: Int32) -> Place:
        """The place of tile ``number``: by key head. Where tiles differ, the longest come first."""
        place = x.tiles.place(number, self.cut)
        if self.sorted:
            order = x.extra.block_lists.order
            return place._replace(block=order[place.batch, place.head, place.block])
        # Under causal, and as far as is known under a mask, most queries see the first keys.
        return place._replace(block=x.tiles.blocks - 1 - place.block) if self.cut else place

    def first(self, x: Any, buffers: Buffers) -> tuple[Int32, Place]:
        """The number and the place of the CTA's first tile; in turn, the one drawn for it."""
        number = buffers.first[0] if self.plan.in_turn else Int32(cute.arch.block_idx()[0])
        return number, self.place(x, number)

    def spans(self, x: Any, place: Place) -> QSpans:
        """The blocks that causal and the window leave a tile."""
        return self._blocks_of(x, place.block * self.config.tile_kv, self.config.tile_kv)

    def own(self, x: Any, place: Place, spans: QSpans, first_key: Int32) -> OwnSpans:
        """Those of the tile's ``spans`` that a warpgroup's keys from ``first_key`` on see."""
        if not self.parted:
            return OwnSpans(*spans)
        seen = self._blocks_of(x, first_key, ROWS)
        return OwnSpans(*[cutlass.max(spans.begin, cutlass.min(n, spans.end)) for n in seen])

    def _blocks_of(self, x: Any, first: Int32, keys: int) -> QSpans:
        """The blocks that see some of the ``keys`` from ``first`` on."""
        c = self.config
        spans = q_spans(x.bounds, first, first + keys, c.tile_q, ARITHMETIC)
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
