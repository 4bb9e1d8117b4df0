"""The products of a tile in the order of their issue: one warp's work, S and O in tensor memory.

A slot of a ring that a product reads is released by the commit behind it; one that it fills is
handed over so. With one slot of S a tile, P V of a block is followed at once by the next S of the
same tile, which takes the columns of that P: products execute in order. With two, S of the next
block is issued before P V of this one. The tiles of a CTA are a loop's turns: traced once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from fa_cute.device import mma_sm100
from fa_cute.device.tmem import Columns, column_of
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
        q = [rings.q.take() for _ in range(self.config.q_tiles)]
        rings = self.scores(product, rings)
        for i in cutlass.range(blocks - 1, unroll=1):
            if const_expr(self.config.s_stages > 1):
                rings = self.scores(product, rings)
            rings = self.values(product, rings, i > 0, self.config.s_stages == 1)
        for slot in q:
            slot.release(self.qk.commit)
        return self.values(product, rings, blocks > 1, False)

    @cute.jit
    def scores(self, product: Product, rings):
        """Issue S = Q K^T of the next block for every tile."""
        k = rings.k.take()
        for t in cutlass.range(self.config.q_tiles, unroll=1):
            self.score(product, rings, (t, k))
        rings.s.passed()
        k.release(self.qk.commit)
        return rings

    def score(self, product: Product, rings, at: tuple) -> None:
        """Issue S of tile ``at[0]``, whose Q is in the slot of that number; K's slot ``at[1]``."""
        t, k = at
        with rings.s.of(t).fill(arrive=self.qk.commit) as s:
            column = column_of(self.columns, "s", t) + s.index * self.config.tile_n
            a, b = self.qk.stage(product.q, t), self.qk.stage(product.k, k.index)
            steps = range(self.plan.width // mma_sm100.STEP)
            self.qk.issue(product.memory, column, a, b, steps=steps, adds=False)

    @cute.jit
    def values(self, product: Product, rings, adds, scored: cutlass.Constexpr):
        """Issue O += P V of the next block for every tile, where ``scored`` each with its next S.

        ``adds`` is False at the tile's first.
        """
        v, k = rings.v.take(), rings.k.take() if const_expr(scored) else None
        for t in cutlass.range(self.config.q_tiles, unroll=1):
            self.value(product, rings, (t, v), adds)
            if const_expr(scored):
                self.score(product, rings, (t, k))
        for ring in (rings.p, rings.tail, rings.o):
            ring.passed()
        if const_expr(scored):
            rings.s.passed()
            k.release(self.qk.commit)
        return rings

    def value(self, product: Product, rings, at: tuple, adds: Any) -> None:
        """Issue O += P V of tile ``at[0]``, V's slot ``at[1]``: early columns of P, then others."""
        t, v = at
        b, o = self.pv.stage(product.v, v.index), column_of(self.columns, "o", t)
        early, steps = (n // mma_sm100.STEP for n in (self.config.early, self.config.tile_n))
        parts = ((rings.p, range(early), adds), (rings.tail, range(early, steps), True))
        with rings.o.of(t).fill(arrive=self.pv.commit):
            for ring, part, adding in parts:
                slot = ring.of(t).take()
                product.memory.entered()
                p = column_of(self.columns, "p", t) + slot.index * self.config.tile_n
                self.pv.issue(product.memory, o, p, b, steps=part, adds=adding)
                slot.release()
            # Before the commit that hands O over: after a kernel's last one none is to come, for
            # a pair's other CTA may have ended.
            self.free_last(t, partial(v.release, self.pv.commit))

    @cute.jit
    def free_last(self, t: Int32, free: Callable):
        """``free`` the block's slot of V behind the last tile's product."""
        if t == self.config.q_tiles - 1:
            free()
