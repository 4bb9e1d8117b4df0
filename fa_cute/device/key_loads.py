"""The producer warp of the backward on Hopper: which boxes TMA loads, in which order.

    each tile    K V Q0 dO0 Q1 dO1 ... | asked, draw

A block's rows of shift and delta come with its Q and dO. The next tile is drawn when all of this
one is under way, so K and V of it are loaded as soon as the last block has read them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync

from fa_cute.device.operand import Reuse, loader, row_loader
from fa_cute.device.products import Buffers
from fa_cute.device.scheduler import BLOCK, ask, draw, tell


class KeyLoads:
    """The producer's part of ``kernels/bwd_sm90.py``, whose plan and walk it reads."""

    @cute.jit
    def load(self, x: Any, rings, buffers: Buffers):
        for operand in (x.k, x.v, x.q, x.do):
            cpasync.prefetch_descriptor(operand.atom)
        tile, place = self.walk.first(x, buffers)
        while tile < x.tiles.count:
            with rings.k.fill() as k:
                loader(x.k, buffers.k, place.head, place.batch, Reuse.ONCE)(place.block, k)
            with rings.v.fill() as v:
                loader(x.v, buffers.v, place.head, place.batch, Reuse.ONCE)(place.block, v)
            if const_expr(self.plan.zeroes):
                self.zeroing.wait(x, place)  # for all who learn of the tile's Q
            for i in cutlass.range(self.plan.gqa_ratio, unroll=1):
                head = place.head * self.plan.gqa_ratio + i
                load_q = loader(x.q, buffers.q, head, place.batch, Reuse.OFTEN)
                load_do = loader(x.do, buffers.do, head, place.batch, Reuse.OFTEN)
                load_shift = row_loader(x.io.shift[place.batch, head, None], buffers.shift)
                load_delta = row_loader(x.io.delta[place.batch, head, None], buffers.delta)
                visits = self.walk.visits(x, place._replace(head=head))
                block = self.walk.spans(x, place).end
                for j in cutlass.range(visits.count, unroll=1):
                    visit = self.walk.following(visits, j, block)
                    block = visit.block
                    note = (buffers.notes, visit.word()) if const_expr(self.walk.noted) else None
                    with rings.q.fill(note) as q:
                        load_q(block, q)
                        load_shift(block, q)
                    with rings.do.fill() as do:
                        load_do(block, do)
                        load_delta(block, do)
            asked = ask(x.counter)
            with rings.next.fill():
                tile = draw(x.tiles, x.counter, asked, buffers.next, every=self.plan.in_turn)
                if const_expr(self.walk.sorted):
                    # A tile past the last has no place: memcheck saw the order read past its end.
                    if tile < x.tiles.count:
                        place = self.walk.place(x, tile)
                else:
                    place = self.walk.place(x, tile)
                tell(buffers.next, BLOCK, place)
