"""The producer warp of the forward on Blackwell: which boxes TMA loads, in which order.

    a tile      header K0 Q0 Q1 bias0 K1 V0 bias1 K2 V1 bias2 ... Vn

The next tile is drawn beside the header. A bias' boxes, one a tile of 128 queries, come behind V:
their slots are free when the softmax has read those of the block before.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from fa_cute.device.loads import lead_of
from fa_cute.device.operand import Reuse, loader
from fa_cute.device.scheduler import COUNT, Place, ask, draw, tell
from fa_cute.device.visits import leave


class Loads:
    """The producer's part of ``kernels/fwd_sm100.py``, whose plan, walk and bias it reads."""

    @cute.jit
    def load(self, x: Any, storage, buffers: Any):
        filled = self.on("producer", "next", "q", "k", "v", "note", "bias")
        rings = self.topology.rings_from(storage, **filled)
        for operand in (x.q, x.k, x.v):
            cpasync.prefetch_descriptor(operand.atom)
        rank = self.rank()
        tile, ctas = self.first_tile(), self.step()
        while tile < x.tiles.count:
            place = self.walk.place(x, tile)
            visits = self.walk.visits(x, place)
            own = (visits.count, place.block) if const_expr(self.walk.noted) else ()
            if const_expr(self.config.pair):
                tile = tile + ctas
            else:
                # Drawn before this tile's loads: the atomic's microsecond passes under them.
                with rings.next.fill() as header:
                    words = buffers.next[None, header.index]
                    tell(words, COUNT, own)
                    tile = draw(x.tiles, x.counter, ask(x.counter), words)
            if visits.count > 0:
                kv_head = place.head // self.walk.ratio
                load_q = loader(x.q, buffers.q, place.head, place.batch, Reuse.ONCE)
                load_k = loader(x.k, buffers.k, kv_head, place.batch, Reuse.OFTEN)
                load_v = loader(x.v, buffers.v, kv_head, place.batch, Reuse.OFTEN, rank)
                boxes = self.boxes(x, buffers, place)
                visit = visits.at(Int32(0))
                if const_expr(self.walk.noted):
                    with rings.note.fill() as top:
                        leave(visit, buffers.notes, top.index)
                block = visit.block
                with rings.k.fill() as first:
                    load_k(block * self.config.ctas + rank, first)
                for t in cutlass.range_constexpr(self.config.q_tiles):
                    with rings.q.fill() as q:
                        load_q(self.number(place, t), q)
                if const_expr(self.bias is not None):
                    self.load_boxes(rings, boxes, block, self.ahead(visits, Int32(1)))
                    rings.bias.passed()
                for i in cutlass.range(1, visits.count, unroll=1):
                    following = visits.at(i)
                    if const_expr(self.walk.noted):
                        with rings.note.fill() as note:
                            leave(following, buffers.notes, note.index)
                    with rings.k.fill() as k:
                        load_k(following.block * self.config.ctas + rank, k)
                    with rings.v.fill() as v:
                        load_v(block, v)
                    if const_expr(self.bias is not None):
                        self.load_boxes(rings, boxes, following.block, self.ahead(visits, i + 1))
                        rings.bias.passed()
                    block = following.block
                with rings.v.fill() as last:
                    load_v(block, last)

    def boxes(self, x: Any, buffers: Any, place: Place) -> list:
        """Of each tile ``load(block, slot)`` and ``fetch(block)`` of the bias' boxes beside it."""
        if self.bias is None:
            return []
        lead = lead_of(self, x, place)
        return [
            self.bias.loader(x.bias, self.boxes_of(buffers, t), lead, self.number(place, t))
            for t in range(self.config.q_tiles)
        ]

    def boxes_of(self, buffers: Any, t: Int32 | int) -> cute.Tensor:
        """The slots of the bias that are tile ``t``'s."""
        return cute.domain_offset((0, 0, t * self.plan.bias_stages), buffers.bias)

    def load_boxes(self, rings, boxes: list, block: Int32, ahead: Int32) -> None:
        """Load every tile's box beside that block of keys; bring those of the next into L2."""
        for t, (load, fetch) in enumerate(boxes):
            with rings.bias.of(t).fill() as slot:
                load(block, slot)
            fetch(ahead)

    def ahead(self, visits: Any, index: Int32) -> Int32:
        """The block of visit number ``index``, or of the last one."""
        return visits.at(cutlass.min(index, visits.count - 1)).block
