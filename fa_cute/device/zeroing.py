"""Zeroes for the sums of dQ, written while earlier heads are at work: so they stay in the L2.

A tile of keys zeroes a part of the sums of the head that is a section of heads behind its own, and
that head's tiles wait for all such parts. They were drawn before, so the wait is one look at a
counter. Tiles that CTAs begin with have no such duty (a CTA whose tile is not drawn may not have
begun, where others hold its SM): what they would zero, and the first section, is zeroed before the
launch (``host/backward.py``). So whoever is waited for is at work, and none waits for ever.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm

from fa_cute.device import turns, vectors
from fa_cute.device.key_walk import KeyWalk
from fa_cute.device.products import Buffers
from fa_cute.device.scheduler import Place, told
from fa_cute.plan import Plan

LANES = 32
AT_ONCE = 16  # vectors a lane


class Zeroing:
    """Of one plan's sums of dQ."""

    def __init__(self, plan: Plan, walk: KeyWalk):
        self.plan, self.config, self.walk = plan, plan.config, walk

    @cute.jit
    def zero(self, x: Any, rings, buffers: Buffers):
        """Zero what is behind each tile."""
        tile, place = self.walk.first(x, buffers)
        while tile < x.tiles.count:
            row = place.batch * x.tiles.heads + place.head + x.tiles.section
            if (row >= zeroed_before(x)) & (row < x.tiles.rows):
                self._part(x, place._replace(head=row % x.tiles.heads, batch=row // x.tiles.heads))
            with rings.next.drain():
                tile, place = told(buffers.next)

    @cute.jit
    def _part(self, x: Any, place: Place):
        """Every so many-th block of queries of a head, as there are tiles of keys."""
        block_bytes, lane = 4 * self.config.tile_q * self.plan.width, cute.arch.lane_idx()
        sums = x.io.sums[place.batch, place.head, 0, None].iterator.toint()
        blocks = cute.ceil_div(x.bounds.seqlen_q, self.config.tile_q)
        for block in cutlass.range(place.block, blocks, x.tiles.blocks, unroll=1):
            first = sums + (Int64(block) * block_bytes + lane * vectors.BYTES)
            for _ in cutlass.range(block_bytes // (AT_ONCE * LANES * vectors.BYTES), unroll=1):
                clear(first)
                first = first + AT_ONCE * LANES * vectors.BYTES
        cute.arch.sync_warp()
        turns.give(counter(x, place))

    @cute.jit
    def wait(self, x: Any, place: Place):
        """Wait until the sums of the head at ``place`` are zeroed: for all lanes of a warp."""
        if place.batch * x.tiles.heads + place.head >= zeroed_before(x):
            turns.wait(counter(x, place), x.tiles.blocks)


def zeroed_before(x: Any) -> Int32:
    """Heads of all batches whose sums are zeroed before the launch."""
    section = x.tiles.section
    begun = cute.ceil_div(cute.arch.grid_dim()[0], x.tiles.blocks * section) * section
    return begun + section


def counter(x: Any, place: Place) -> cute.Pointer:
    """How many tiles have zeroed their part of the sums of the head at ``place``."""
    return x.io.zeroed[place.batch, place.head, None].iterator


def clear(target: Int64) -> None:
    """Write ``AT_ONCE`` vectors of zeros, a warp's side by side."""
    places = [LANES * vectors.BYTES * i for i in range(AT_ONCE)]
    lines = [f"st.global.v4.f32 [$0 + {at}], {{zero, zero, zero, zero}};" for at in places]
    llvm.inline_asm(
        None,
        [target.ir_value()],
        "\n".join(["{ .reg .f32 zero; mov.f32 zero, 0f00000000;", *lines, "}"]),
        "l",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
