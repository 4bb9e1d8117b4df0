"""dQ's way from the consumers' accumulators into its fp32 sums in global memory.

The sums lie in the accumulators' order (``vectors.add_parts``). Either every thread adds its part,
16 bytes a reduction, or all write theirs to shared memory, which one warp adds at once
(``bulk.add``). In turn: a warp waits until the tiles of lower keys have added to a block, one or
two blocks ahead of who adds: the threads, for each of which it waits, or the warp that adds at
once. Either way the turn is given on by a warp that does not multiply.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from fa_cute.device import bulk, turns, vectors
from fa_cute.device.key_walk import KeyWalk
from fa_cute.device.products import Buffers
from fa_cute.device.scheduler import Place, told
from fa_cute.device.topology import WARPGROUP, RingSpec
from fa_cute.plan import SHARED_MEMORY_LIMIT, BwdConfig, Plan

ROOM = SHARED_MEMORY_LIMIT - 2048  # barriers, words and the alignment of buffers take the rest


class DqSums:
    """The sums of one plan's dQ; ``bulk``: they are added to from shared memory."""

    def __init__(self, plan: Plan, walk: KeyWalk):
        self.plan, self.config, self.walk = plan, plan.config, walk
        self.bulk = in_bulk(plan)
        self.handed = self.bulk or plan.in_turn  # a warp is told of each block

    def layout(self) -> cute.Layout:
        """dQ in shared memory: (4, threads, vectors, consumers, slots)."""
        c = self.config
        count = c.tile_q * self.plan.width // (4 * WARPGROUP * c.consumers)
        return cute.make_layout((vectors.FLOATS, WARPGROUP, count, c.consumers, c.dq_slots))

    def hand_on(self, to: cute.Tensor, work: Any, dq: cute.Tensor) -> None:
        """Write the accumulator to shared memory, where a warp adds it from behind a fence."""
        mine = to[None, work.thread, None, work.warpgroup]
        cute.autovec_copy(cute.make_tensor(dq.iterator, cute.make_layout(mine.shape)), mine)

    def add_own(self, sums: cute.Tensor, work: Any, dq: cute.Tensor, block: Int32) -> None:
        """Add the accumulator to the block's part of a head's ``sums``."""
        part = block * self.config.consumers + work.warpgroup
        vectors.add_parts(sums, (part, WARPGROUP, work.thread), dq)

    @cute.jit
    def add(self, x: Any, rings, buffers: Buffers):
        """Add what is handed on, or give on the turns of what is added, tile after tile."""
        tile, place = self.walk.first(x, buffers)
        while tile < x.tiles.count:
            rings = self._add(x, rings, buffers.dq, place)
            with rings.next.drain():
                tile, place = told(buffers.next)

    @cute.jit
    def _add(self, x: Any, rings, dq: cute.Tensor | None, place: Place):
        size = 4 * self.config.tile_q * self.plan.width
        for i in cutlass.range(self.plan.gqa_ratio, unroll=1):
            own = place._replace(head=place.head * self.plan.gqa_ratio + i)
            sums = x.io.sums[own.batch, own.head, 0, None].iterator.toint()
            visits = self.walk.visits(x, own)
            block = self.walk.spans(x, own).end
            for j in cutlass.range(visits.count, unroll=1):
                block = self.walk.following(visits, j, block).block
                if const_expr(self.bulk and self.plan.in_turn):
                    turn = rings.turn.take()
                with rings.dq.drain() as slot:
                    if const_expr(self.bulk):
                        mine = dq[(*[None] * 4, slot.index)]
                        with cute.arch.elect_one():
                            bulk.add(mine, sums + Int64(block) * size, visible=self.plan.in_turn)
                if const_expr(self.bulk and self.plan.in_turn):
                    turn.release()
                if const_expr(self.plan.in_turn):
                    turns.give(counters(x, own) + block)
        return rings

    @cute.jit
    def await_turns(self, x: Any, rings, buffers: Buffers):
        """Wait, for block after block, until the tiles of keys before this one have added to it."""
        tile, place = self.walk.first(x, buffers)
        while tile < x.tiles.count:
            rings = self._await_turns(x, rings, place)
            with rings.next.drain():
                tile, place = told(buffers.next)

    @cute.jit
    def _await_turns(self, x: Any, rings, place: Place):
        for i in cutlass.range(self.plan.gqa_ratio, unroll=1):
            own = place._replace(head=place.head * self.plan.gqa_ratio + i)
            visits = self.walk.visits(x, own)
            block = self.walk.spans(x, own).end
            for j in cutlass.range(visits.count, unroll=1):
                block = self.walk.following(visits, j, block).block
                with rings.turn.fill():
                    turns.wait(counters(x, own) + block, self.walk.turn(x, own, visits, j, block))
        return rings


def in_bulk(plan: Plan) -> bool:
    """Whether dQ is added from shared memory, by a warp of its own.

    In turn too, but for wide heads: 64 KB of dQ left d256 one slot a ring (S8k, full and causal,
    305 and 292 of plain's 425 and 420 TFLOP/s).
    """
    in_turn = plan.deterministic and not plan.config.wide
    return plan.gradients[0] and (in_turn or plan.config.bulk)


def rings(plan: Plan) -> tuple[RingSpec, ...]:
    """What the warps of the kernel's tables ``load`` and ``math`` wait for about dQ."""
    bulk, fills = in_bulk(plan), 4 * plan.config.consumers
    slots, why = (plan.config.dq_slots, "until read") if bulk else (2, "added, or under way")
    dq = RingSpec("dq", slots, 0, "math", "load", why, fills=fills, empties=1)
    adds, empties = ("load", 1) if bulk else ("math", fills)
    why = "the sums are this tile's to add to"
    turn = RingSpec("turn", 2, 0, "load", adds, why, empties=empties)
    return (dq,) * (bulk or plan.in_turn) + (turn,) * plan.in_turn


def counters(x: Any, place: Place) -> cute.Pointer:
    """How many tiles of keys have added to the blocks of the query head at ``place``."""
    return x.io.turns[place.batch, place.head, None].iterator


def fitting(plan: Plan, scratch_bytes: int) -> Plan:
    """The plan, with as many slots a ring as mods' diagonals and the wide heads leave room for."""
    c = plan.config
    tries = [(c.stages, c.dq_slots), (c.stages, 1), (1, 1)]
    configs = [replace(c, stages=stages, dq_slots=slots) for stages, slots in tries]
    fits = (config for config in configs if _bytes(plan, config) + scratch_bytes <= ROOM)
    return replace(plan, config=next(fits, configs[-1]))


def _bytes(plan: Plan, c: BwdConfig) -> int:
    """Shared memory of the rings' slots."""
    a_slot = 2 * c.tile_q * (plan.width + plan.width_v + c.tile_kv * (1 + c.wide) + 4)
    held = 2 * c.tile_kv * (plan.width + plan.width_v)
    held += 4 * c.tile_q * plan.width * in_bulk(plan) * c.dq_slots
    return held + c.stages * a_slot
