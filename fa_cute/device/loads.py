"""The producer warp of the forward on Hopper: which boxes TMA loads, in which order.

    each tile by itself    header K0 Q K1 V0 K2 V1 ... Kn Vm | asked, Vn, draw        (m = n - 1)
    the next one ahead     K1 V0 K2 V1 ... asked Kn Vm | draw, Q' K0' of the next, Vn

Ahead, the next tile is drawn before the last V of this one, whose slot is free a block later: so
the next Q and first K are there when consumers issue their S behind the last P V. Drawn behind that
V they came 1,700 cycles later (d128, where a block of 128 x 128 takes 2,300). It needs two slots of
Q, or one that is free because Q is in registers, and under a mask registers of its own
(``fwd_sm90.opens_early``).

What TMA's coordinates are made of has to stay the same in a warp for ptxas: visits told by lanes,
or a select for those of a tile that sees nothing, and it loops over each copy (the gain was gone).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from fa_cute.device import emit, score
from fa_cute.device.operand import Reuse, loader
from fa_cute.device.scheduler import BLOCK, COUNT, Place, ask, draw, tell
from fa_cute.device.visits import Visit, inputs_of


def lead_of(kernel: Any, x: Any, place: Place) -> tuple:
    """The indices of a ``kernel``'s bias before q and kv, in the tile at ``place``."""
    graphs = kernel.plan.score_mod, kernel.plan.mask_mod
    given, _ = score.deal(graphs, x.extra.captured, x.extra.scalars)
    return inputs_of(kernel.bias.lead, given, kernel.fragment, (place.batch, place.head))


class Loads:
    """The producer's part of ``kernels/fwd_sm90.py``, whose plan, walk and bias it reads."""

    @cute.jit
    def load(self, x: Any, rings, buffers: Any):
        for operand in (x.q, x.k, x.v):
            cpasync.prefetch_descriptor(operand.atom)
        if const_expr(self.opens_early):
            self.load_ahead(x, rings, buffers)
        else:
            self.load_each(x, rings, buffers)

    @cute.jit
    def load_ahead(self, x: Any, rings, buffers: Any):
        """All tiles, each with the first boxes of the next."""
        tile = Int32(cute.arch.block_idx()[0])
        place = self.walk.place(x, tile)
        with rings.next.fill() as opening:
            self.introduce(x, buffers.next[None, opening.index], tile, place)
        rings = self.load_first(x, rings, buffers, place)
        while tile < x.tiles.count:
            visits, asked = self.seen(x, place), Int32(0)
            kv_head = place.head // self.walk.ratio
            load_k = loader(x.k, buffers.k, kv_head, place.batch, Reuse.OFTEN)
            load_v = loader(x.v, buffers.v, kv_head, place.batch, Reuse.OFTEN)
            visit, ahead = visits.at(Int32(0)), self.ahead(visits, Int32(1))
            if visits.count == 1:
                asked = ask(x.counter)
            for i in cutlass.range(1, visits.count, unroll=1):
                if i == visits.count - 1:
                    asked = ask(x.counter)
                if const_expr(self.walk.noted):
                    before, visit, ahead = visit, ahead, self.ahead(visits, i + 1)
                else:  # cheaper than to carry
                    before, visit = visits.at(i - 1), visits.at(i)
                with rings.k.fill(self.note(buffers, visit, ahead)) as k:
                    load_k(visit.block, k)
                with rings.v.fill() as v:
                    load_v(before.block, v)
            block = (
                visit.block if const_expr(self.walk.noted) else visits.at(visits.count - 1).block
            )
            with rings.next.fill() as following:
                words = buffers.next[None, following.index]
                tile = draw(x.tiles, x.counter, asked, words)
                drawn = tile
                if const_expr(self.walk.noted):  # past the last no order of tiles is read
                    drawn = cutlass.min(tile, x.tiles.count - 1)
                place = self.walk.place(x, drawn)
                self.introduce(x, words, None, place)
            if tile < x.tiles.count:
                rings = self.load_first(x, rings, buffers, place)
            with rings.v.fill() as last:
                load_v(block, last)

    @cute.jit
    def bring(self, x: Any, rings, buffers: Any):
        """All tiles' columns (``device/columns.py``): the warp beside the one that loads ahead."""
        rings = rings._replace(k=rings.k.by_threads())
        rings, tile, _, place = self.follow_on(x, rings, buffers)
        while tile < x.tiles.count:
            visits = self.seen(x, place)
            _, given = score.deal(self.graphs, x.extra.captured, x.extra.scalars)
            mask = self.columns.entered(given, place)
            visit, loaded = Visit(visits.at(Int32(0)).block, Int32(0)), self.columns.registers()
            loaded.fill(0)
            for i in cutlass.range(visits.count, unroll=1):
                ahead = self.ahead(visits, i + 1)
                with emit.where(visit.whole == 0):
                    self.columns.load(mask, visit.block * self.config.tile_n, loaded)
                with rings.k.fill() as slot:  # of a whole block some words, for nobody
                    self.columns.leave(loaded, buffers.columns[None, slot.index])
                visit = ahead
            rings, tile, _, place = self.follow_on(x, rings, buffers)

    def introduce(self, x: Any, words: cute.Tensor, tile: Int32 | None, place: Place) -> None:
        """Tell consumers of the tile at ``place``; its number, unless ``draw`` has told it."""
        if tile is not None:
            tell(words, 0, (tile,))
        if self.walk.noted:
            tell(words, COUNT, (self.walk.visits(x, place).count, *place))
        else:
            tell(words, BLOCK, place)

    @cute.jit
    def load_first(self, x: Any, rings, buffers: Any, place: Place):
        """A tile's Q and its first K."""
        load_q = loader(x.q, buffers.q, place.head, place.batch, Reuse.ONCE)
        load_k = loader(x.k, buffers.k, place.head // self.walk.ratio, place.batch, Reuse.OFTEN)
        visits = self.seen(x, place)
        visit, ahead = visits.at(Int32(0)), self.ahead(visits, Int32(1))
        with rings.q.fill() as only:
            load_q(place.block, only)
        with rings.k.fill(self.note(buffers, visit, ahead)) as first:
            load_k(visit.block, first)
        return rings

    def seen(self, x: Any, place: Place) -> Any:
        """The tile's visits, one at least: of a tile that sees nothing, hidden by the consumers."""
        return self.walk.visits(x, place).at_least_one()

    @cute.jit
    def load_each(self, x: Any, rings, buffers: Any):
        """All tiles, one after another."""
        tile = Int32(cute.arch.block_idx()[0])
        while tile < x.tiles.count:
            place = self.walk.place(x, tile)
            visits = self.walk.visits(x, place)
            kv_head = place.head // self.walk.ratio
            load_v = loader(x.v, buffers.v, kv_head, place.batch, Reuse.OFTEN)
            if const_expr(self.walk.noted):
                with rings.next.fill() as header:
                    tell(buffers.next[None, header.index], COUNT, (visits.count, *place))
            block = Int32(0)
            if visits.count > 0:
                load_q = loader(x.q, buffers.q, place.head, place.batch, Reuse.ONCE)
                load_k = loader(x.k, buffers.k, kv_head, place.batch, Reuse.OFTEN)
                load_bias, fetch_bias = self.bias_loader(x, buffers, place)
                visit, ahead = visits.at(Int32(0)), self.ahead(visits, Int32(1))
                with rings.k.fill(self.note(buffers, visit, ahead)) as first:
                    load_k(visit.block, first)
                with rings.q.fill() as only:
                    load_q(place.block, only)
                if const_expr(self.bias is not None):
                    with rings.bias.fill() as opening:
                        load_bias(visit.block, opening)
                block = visit.block
                for i in cutlass.range(1, visits.count, unroll=1):
                    visit, ahead = ahead, self.ahead(visits, i + 1)
                    with rings.k.fill(self.note(buffers, visit, ahead)) as k:
                        load_k(visit.block, k)
                    with rings.v.fill() as v:
                        load_v(block, v)
                    if const_expr(self.bias is not None):
                        with rings.bias.fill() as box:
                            load_bias(visit.block, box)
                        fetch_bias(ahead.block)
                    block = visit.block
            # Late, so that who is done first takes the longest left; a wait for V hides the atomic.
            tile = ask(x.counter)
            if visits.count > 0:
                with rings.v.fill() as last:
                    load_v(block, last)
            with rings.next.fill() as following:
                words = buffers.next[None, following.index]
                tile = draw(x.tiles, x.counter, tile, words)
                if const_expr(not self.walk.noted):  # divisions that consumers would wait for
                    tell(words, BLOCK, self.walk.place(x, tile))

    def bias_loader(self, x: Any, buffers: Any, place: Place) -> Any:
        """``load(block, slot)``, ``fetch(block)`` of the bias' boxes beside a tile of queries."""
        if self.bias is None:
            return None, None
        lead = lead_of(self, x, place)
        return self.bias.loader(x.bias, buffers.bias, lead, place.block)

    def ahead(self, visits: Any, index: Int32) -> Visit:
        """Visit number ``index``, or the last one."""
        return visits.at(cutlass.min(index, visits.count - 1))

    def note(self, buffers: Any, visit: Visit, ahead: Visit) -> Any:
        """What the producer leaves with a slot of K, for ``Ring.fill``.

        The block, and whether the one after it is whole: a consumer branches before it begins one
        (docs/masks.md says why).
        """
        return (buffers.notes, Visit(visit.block, ahead.whole).word()) if self.walk.noted else None
