"""The products of a tile in the order of their issue: one warp's work, S and O in tensor memory.

A slot of a ring that a product reads is released by the commit behind it; one that it fills is
handed over so. With one slot of S a tile, P V of a block is followed at once by the next S of the
same tile, which takes the columns of that P: products execute in order. With two, S of the next
block is issued before P V of this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from fa_cute.device import mma_sm100
from fa_cute.device.tmem import Columns
from fa_cute.plan import Plan


@dataclass(frozen=True)
class Product:
    """What the MMA's warp multiplies: descriptors of q, k, v (atom, m, k, stage), their columns."""

    memory: Any
    q: Any
    k: Any
    v: Any


class Products:
    """The products of one plan, of 16-bit ``dtype``, in ``columns`` of tensor memory."""

    def __init__(self, plan: Plan, dtype: type, columns: dict[str, Columns], *, native: bool):
        self.plan, self.config, self.columns = plan, plan.config, columns
        c, gemm = self.config, mma_sm100.Native if native else mma_sm100.Hosted
        self.qk = gemm(dtype, plan.config.tile_n, p_times_v=False, pair=c.pair)
        self.pv = gemm(dtype, plan.width_v, p_times_v=True, pair=c.pair)

    def of(self, memory: Any, buffers: Any) -> Product:
        """The operands in ``buffers`` (q, k, v); where the role begins."""
        self.qk.prepare()
        self.pv.prepare()
        return Product(
            memory,
            self.qk.operand_a(buffers.q),
            self.qk.operand_b(buffers.k),
            self.pv.operand_b(buffers.v),
        )

    @cute.jit
    def tile(self, product: Product, rings, blocks: Int32):
        """A tile's products: the first S, then P V of a block and S of the next, the last P V."""
        q = self.take_queries(rings)
        rings = self.scores(product, rings, q)
        for i in cutlass.range(blocks - 1, unroll=1):
            if const_expr(self.config.s_stages > 1):
                rings = self.scores(product, rings, q)
                rings = self.values(product, rings, None, i > 0)
            else:
                rings = self.values(product, rings, q, i > 0)
        for t in cutlass.range_constexpr(self.config.q_tiles):
            q[t].release(self.qk.commit)
        return self.values(product, rings, None, blocks > 1)

    def take_queries(self, rings) -> tuple:
        """The slots of the tile's Q."""
        return tuple(rings.q.take() for _ in range(self.config.q_tiles))

    def scores(self, product: Product, rings, q: tuple) -> Any:
        """Issue S = Q K^T of the next block for every tile."""
        k = rings.k.take()
        for t, slot in enumerate(q):
            rings = self.score(product, rings, (t, slot, k))
        k.release(self.qk.commit)
        return rings

    def score(self, product: Product, rings, at: tuple) -> Any:
        """Issue S of tile ``at[0]``; its slots of Q and K are ``at[1:]``."""
        t, q, k = at
        with rings.s[t].fill(arrive=self.qk.commit) as s:
            column = self.columns[f"s{t}"].first + s.index * self.config.tile_n
            a, b = self.qk.stage(product.q, q.index), self.qk.stage(product.k, k.index)
            steps = range(self.plan.width // mma_sm100.STEP)
            self.qk.issue(product.memory, column, a, b, steps=steps, adds=False)
        return rings

    def values(self, product: Product, rings, q: tuple | None, adds: Any) -> Any:
        """Issue O += P V of the next block for every tile, each followed by its next S.

        ``q``: the slots of Q, or None where no S follows. ``adds`` is False at the tile's first.
        """
        c = self.config
        v = rings.v.take()
        k = rings.k.take() if q else None
        b = self.pv.stage(product.v, v.index)
        early, steps = c.early // mma_sm100.STEP, c.tile_n // mma_sm100.STEP
        parts = ((rings.p, range(early), adds), (rings.tail, range(early, steps), True))
        for t in range(c.q_tiles):
            with rings.o[t].fill(arrive=self.pv.commit):
                for ring, part, adding in parts:
                    slot = ring[t].take()
                    product.memory.entered()
                    column = self.columns[f"p{t}"].first + slot.index * c.tile_n
                    o = self.columns[f"o{t}"].first
                    self.pv.issue(product.memory, o, column, b, steps=part, adds=adding)
                    slot.release()
                if t == c.q_tiles - 1:
                    # Before the commit that hands O over: after a kernel's last one none is to
                    # come, for a pair's other CTA may have ended.
                    v.release(self.pv.commit)
            if q:
                rings = self.score(product, rings, (t, q[t], k))
        if q:
            k.release(self.qk.commit)
        return rings
