"""The tiles of keys of a backward, and the blocks of queries that each visits.

A ``KeyWalk`` is of a plan. Roles that must agree (who loads, who computes) ask the same one. Blocks
are visited from the last to the first; but see ``KeyWalk.turned``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa_cute.device.fragment import Fragment
from fa_cute.device.mma_sm90 import ROWS
from fa_cute.device.scheduler import Place, Tiles
from fa_cute.device.visits import KeyRangeVisits, ListVisits, Visit, ranges_at
from fa_cute.mods.shown import visible_graph
from fa_cute.plan import BwdIo, Plan
from fa_cute.spans import Arithmetic, QSpans, heads_together, q_spans, visible

ARITHMETIC = Arithmetic(cutlass.min, cutlass.max)


class Mirror(NamedTuple):
    """The way of a tile through the blocks: number ``n`` of its spans is block base + sign * n."""

    base: Int32
    sign: Int32

    def block(self, number: Int32) -> Int32:
        """The block of that number, or the number of that block."""
        return self.base + self.sign * number


class Visits(NamedTuple):
    """``count`` blocks, which ``provider`` gives one after another."""

    provider: Any
    count: Int32


class NumberedVisits(NamedTuple):
    """Visits that bounds alone decide: ``count`` numbers from ``last`` down, of those blocks."""

    last: Int32
    count: Int32
    mirror: Mirror | None

    def following(self, index: Int32, _: Int32) -> Visit:
        """Visit number ``index``, below ``count``; whether it is whole the consumers know."""
        number = self.last - index
        return Visit(self.mirror.block(number) if self.mirror else number, Int32(0))


class OwnSpans(NamedTuple):
    """As ``QSpans``, of a warpgroup: the tile's other blocks it does not see."""

    own_begin: Int32
    own_middle_begin: Int32
    own_middle_end: Int32
    own_end: Int32

    def turn(self, low: Any) -> list[Int32]:
        """Where the upper edge begins, and the whole blocks and it end; ``low``: the lower edge,
        and none whole."""
        upper = self.own_middle_end, self.own_middle_end, self.own_end
        lower = self.own_begin, self.own_middle_begin, self.own_middle_begin
        return [cutlass.select_(low, a, b) for a, b in zip(lower, upper, strict=True)]


class KeyWalk:
    """The walk of one plan; ``fragment``: a thread's part of S^T, for what masks capture.

    ``noted``: the producer's words name the visits.

    ``turned``: if deterministic, under a right bound alone, all sections of heads but the last take
    their tiles from the last keys, their blocks from the first to the last: blocks are numbered
    backwards (``mirror``). Tiles of neighbouring keys that begin together are then a tile apart at
    each block, and none waits. From the first keys they begin at one block: the n-th of a head
    waits n turns, of 1.3 blocks' time each, and all that follow are as late (S8k, d128: 0.84 of
    plain). The last section ends the call, with short tiles.

    ``parted``: a right bound hides whole blocks of a tile from one of its warpgroups, 64 keys each.
    """

    def __init__(self, plan: Plan, fragment: Fragment):
        self.plan, self.config, self.fragment = plan, plan.config, fragment
        self.noted = plan.visits != "bounds"
        self.modified = plan.score_mod is not None or plan.mask_mod is not None
        self.cut = plan.causal or any(plan.window) or plan.deterministic or self.noted
        right = plan.causal or plan.window[1]
        # Under a mask all orders are one: what it leaves out changes no bit of dK and dV.
        shown = visible_graph(plan.score_mod, plan.mask_mod) is None
        # With these two a window's call of more tiles than SMs did not end (which, is not known).
        alone = bool(right and not plan.window[0])
        self.turned = bool(plan.deterministic and alone and shown and not self.noted)
        self.two_edges = plan.window[0] or self.modified or self.turned
        # Beside a mod it took registers: a learned slope spilled 76 bytes for 64.
        self.parted = alone and not self.modified and self.config.tile_q < self.config.tile_kv
        # By their length lists would put a tile before others whose turns come first.
        self.sorted = plan.visits == "lists" and not plan.deterministic

    def number(self, io: BwdIo) -> Tiles:
        """The numbering of tiles."""
        batch, seqlen_k, heads = (io.k.shape[i] for i in range(3))
        # In turn more heads side by side wait less: S8k causal 580 and, of 32 MB, 589; where all
        # begin at one block, 517 and, of 64 MB, 564, full 590 and 605.
        spread = (2 if self.turned else 4) if self.plan.in_turn else 1
        room = self.plan.rows_together(spread)
        section = Int32(heads_together(io.q.shape[1], room, ARITHMETIC))
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
        if not self.cut:
            return place
        # Under causal, and as far as is known under a mask, most queries see the first keys.
        block = x.tiles.blocks - 1 - place.block
        if self.turned:
            block = cutlass.select_(self.upward(x, place), place.block, block)
        return place._replace(block=block)

    def upward(self, x: Any, place: Place) -> Any:
        """Whether the place is of a section that takes its blocks from the first to the last."""
        tiles = x.tiles
        row = place.batch * tiles.heads + place.head
        return row < (tiles.rows - 1) // tiles.section * tiles.section

    def mirror(self, x: Any, place: Place) -> Mirror | None:
        """What the numbers of the spans at ``place`` stand for; None: for themselves."""
        if not self.turned:
            return None
        up, last = self.upward(x, place), self.blocks(x) - 1
        return Mirror(cutlass.select_(up, last, Int32(0)), cutlass.select_(up, Int32(-1), Int32(1)))

    def blocks(self, x: Any) -> Int32:
        """Blocks of queries."""
        return cute.ceil_div(Int32(x.bounds.seqlen_q), self.config.tile_q)

    def first(self, x: Any) -> tuple[Int32, Place]:
        """The number and the place of the CTA's first tile."""
        number = Int32(cute.arch.block_idx()[0])
        return number, self.place(x, number)

    def spans(self, x: Any, place: Place) -> QSpans:
        """The blocks that causal and the window leave a tile, by number (``mirror``)."""
        return self._numbered(x, place, place.block * self.config.tile_kv, self.config.tile_kv)

    def own(self, x: Any, place: Place, spans: QSpans, first_key: Int32) -> OwnSpans:
        """Those of the tile's ``spans`` that a warpgroup's keys from ``first_key`` on see."""
        if not self.parted:
            return OwnSpans(*spans)
        seen = self._numbered(x, place, first_key, ROWS)
        return OwnSpans(*[cutlass.max(spans.begin, cutlass.min(n, spans.end)) for n in seen])

    def _numbered(self, x: Any, place: Place, first: Int32, keys: int) -> QSpans:
        spans = self._blocks_of(x, first, keys)
        if not self.turned:
            return spans
        up, blocks = self.upward(x, place), self.blocks(x)
        turned = [cutlass.select_(up, blocks - a, b) for a, b in zip(spans[::-1], spans)]
        return QSpans(*turned)

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
            count = spans.end - spans.begin
            provider = NumberedVisits(spans.end - 1, count, self.mirror(x, place))
        return Visits(provider, provider.count)

    def following(self, visits: Visits, index: Int32, previous: Int32) -> Visit:
        """Visit number ``index``, after that of block ``previous`` (the first: the spans' end)."""
        return visits.provider.following(index, previous)

    def turn(self, x: Any, place: Place, visits: Visits, index: Int32, block: Int32) -> Int32:
        """How many tiles of keys before this one visit the ``block`` that is visit ``index``."""
        c, first = self.config, Int32(0)
        keys = visible(x.bounds, block * c.tile_q, (block + 1) * c.tile_q, ARITHMETIC)
        if x.bounds.left is not None:
            first = cutlass.max(keys[0], Int32(0)) // c.tile_kv
        if self.noted:
            return visits.provider.before(index, block, (first, place.block))
        before = place.block - first
        if self.turned:
            after = cute.ceil_div(Int32(keys[1]), c.tile_kv) - 1 - place.block
            before = cutlass.select_(self.upward(x, place), after, before)
        return before
