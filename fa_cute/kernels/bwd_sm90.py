"""Attention backward on Hopper: dK and dV of a tile of keys in registers, dQ added up in memory.

Every block of queries that sees the tile is visited once; a warpgroup whose own keys bounds hide
from it only has its part in dQ (``pass_by``). Scores are held transposed: S^T = K Q^T
and dP^T = V dO^T have keys as rows, 64 a consumer warpgroup, so that P^T and dS^T are the register
operands of dV += P^T dO and dK += dS^T Q. Only dS passes through shared memory, for dQ = dS K:

    P = exp2(c S + shift)      dS = P (dP - delta) mod'(S)      shift, delta: bwd_preprocess.py

    load       K V Q0 dO0 Q1 dO1 Q2 ... next
    consumers  [dP] exp [dV] dS, write | [dQ dK] dQ to shared memory [S of the next block]
    d64        [dP] exp, dS [dV] write |
    mods       [S] exp [dP dV] dS, write | [dQ dK] ...    | every consumer's part of dS is there
    add dQ                                                             [reduction]

A tile's first S comes before its loop; its last block issues one for nobody. S stands behind the
last use of dQ's registers, and is awaited with dK: in flight over the loop's end it would be
serialised. One more warp zeroes the sums of later heads (``device/zeroing.py``).

A CTA an SM draws one tile of keys after another: the next K and V are loaded while dK and dV are
stored.

Roles and rings are the tables of ``topology`` below; besides them:

    barrier 1        all consumers, once a block: dS is written
    barriers 2, ...  one consumer warpgroup, about the diagonals of mods in shared memory

dS has a slot for each of Q's: a warpgroup writes it again only after the barrier of a later block,
before which all others have multiplied it. Wide heads: all warpgroups have the same 64 keys, part
the queries of S and the columns of dK and dV, and P passes through shared memory as dS does.

dQ is added to fp32 sums in the accumulator's order (see ``bwd_postprocess.py``): a block at once,
from shared memory by a warp of its own, or 16 bytes a thread from registers where memory has no
room (wide) or this is faster (d64). Query heads of a key head follow each other in the same CTA: dK
and dV are sums in registers.

Deterministic: a block of queries counts the tiles of keys that have added to it; each waits for
those of lower keys, all of lower numbers. CTAs draw the tiles that they begin with, too, so of the
tiles drawn and not done the lowest waits for none, and its CTA is at no other: it goes on, in
whatever order CTAs begin, and however few of them run (``tests/test_tickets.py``).
Blocks are visited from the last to the first, so that under a causal bound tile n is at each block
one step, not two, behind tile n - 1. One warp waits for turns, up to two blocks ahead, another
gives them on when the L2 has the block: their round trips pass beside the consumers' work.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from fa_cute.device import (
    differential,
    dq_sums,
    epilogue,
    gradient,
    mask,
    mma_sm90,
    modifiers,
    score,
    softmax,
    zeroing,
)
from fa_cute.device.bounds import bounds_of
from fa_cute.device.key_loads import KeyLoads
from fa_cute.device.key_walk import KeyWalk, OwnSpans, edge_of
from fa_cute.device.modifiers import Mods
from fa_cute.device.operand import TmaOperand, tma_operand
from fa_cute.device.products import Buffers, Fragments, Mmas, Products
from fa_cute.device.row_terms import RowTerms
from fa_cute.device.scheduler import HEADER, Place, Tiles, ask, draw, told
from fa_cute.device.topology import WARPGROUP, RingSpec, Role, Topology
from fa_cute.device.visits import Visit
from fa_cute.mods.derived import reads_scores
from fa_cute.plan import BwdIo, Extra, Launch, Plan
from fa_cute.spans import Bounds, QSpans

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
LOADED = ("k", "v", "q", "do")  # the rings that TMA fills
DS_READY = 1  # the named barrier of the consumers; 0 is the CTA's own


def topology(plan: Plan) -> Topology:
    """Who works, and what each waits for."""
    c = plan.config
    q_bytes = c.tile_q * (plan.width * 2 + 4)
    do_bytes = c.tile_q * (plan.width_v * 2 + 4)
    noted = plan.visits != "bounds"
    of_dq = dq_sums.rings(plan)
    others = len(of_dq) + plan.zeroes
    readers = 4 * c.consumers + others
    return Topology(
        roles=(
            Role("load", 1, c.producer_registers, 1 + others, "draws tiles; TMA; dQ's sums"),
            Role("math", c.consumers, c.consumer_registers, 4, "wgmma, P, dS, dQ, stores"),
        ),
        rings=(
            RingSpec("k", 1, c.tile_kv * plan.width * 2, "load", "math", "held for the whole tile"),
            RingSpec("v", 1, c.tile_kv * plan.width_v * 2, "load", "math", "held likewise"),
            RingSpec(
                "q", c.stages, q_bytes, "load", "math", "and shift; freed when dK is there", noted
            ),
            RingSpec("do", c.stages, do_bytes, "load", "math", "and delta; freed when dV is there"),
            RingSpec("next", 1, 0, "load", "math", "the tile's header", empties=readers),
            *of_dq,
        ),
    )


@dataclass(frozen=True)
class Operands:
    """All that the kernel reads and writes."""

    k: TmaOperand
    v: TmaOperand
    q: TmaOperand
    do: TmaOperand
    io: BwdIo
    mmas: Mmas
    layouts: tuple
    tiles: Tiles
    counter: cute.Tensor
    bounds: Bounds
    scale: Float32
    extra: Extra | None


class Work(NamedTuple):
    """A consumer's share of a tile: the tile, its warpgroup, its thread of 128.

    ``key``: the first of the thread's; ``column``: the first of its queries, and ``first_query``
    of its warpgroup's, in a block.
    """

    place: Place
    warpgroup: Int32
    thread: Int32
    key: Int32
    column: Int32
    first_query: Int32


@dataclass(frozen=True)
class Sweep:
    """What the body of the main loop reads, and the registers that it updates in place.

    ``s``: the accumulator of S; ``lowest``: the last block that the warpgroup sees, by number.
    """

    x: Operands
    buffers: Buffers
    f: Fragments
    mods: Mods
    work: Work
    head: Int32
    c: Float32
    s: cute.Tensor
    lowest: Int32


class BwdSm90(KeyLoads):
    """The kernel of one plan; ``__call__`` is its host entry."""

    def __init__(self, plan: Plan):
        self.fragment = mma_sm90.fragment(plan.config.own_queries, transposed=True)
        graphs = (plan.score_mod, plan.mask_mod)
        self.scratch_words = [score.scratch_words(graph, self.fragment) for graph in graphs]
        self.scratch_words.append(gradient.scratch_words(graphs[0], self.fragment))
        plan = dq_sums.fitting(plan, 4 * sum(self.scratch_words) * plan.config.consumers)
        self.plan, self.config = plan, plan.config
        self.topology = topology(plan)
        self.dtype = DTYPES[plan.dtype]
        self.products = Products(plan, self.dtype)
        self.walk = KeyWalk(plan, self.fragment)
        self.sums = dq_sums.DqSums(plan, self.walk)
        self.zeroing = zeroing.Zeroing(plan, self.walk)
        self.bulk = self.sums.bulk
        # dP after the exponentials is no slower than with S (d128, S8k: full 651 and 650 TFLOP/s,
        # causal 639 and 636), but of 128 queries P, its rounded copy and dP pass the registers:
        # then dV waits for dS. Likewise where a mod's gradient takes the scores beside P and dP: a
        # learned factor spilled 112 bytes at d128, its wgmmas serialised; so 44, and none is.
        # At d64 all fits.
        of_scores = plan.width > 64 and not self.config.wide and reads_scores(plan.score_mod)
        self.late = self.config.own_queries > 64 or of_scores
        # Beside two sums of 64 x 128 no register is left to keep what gradients can compute again:
        # learned slopes spilled 36 bytes. At d64 it is kept: full, 5.63 and 5.86 ms.
        self.again = plan.width > 64 and not self.config.wide
        many = self.config.own_queries > 64
        # S of the next block behind dK: d128, S8k, full 618 to 635 TFLOP/s, causal 586 to 612. Of Q
        # two slots are held then. In turn as well: d64 causal 489 to 512, d128 full 639 to 651,
        # d256 412 to 436; but there d64 spills 28 bytes under a window, 393 to 385.
        modified = plan.score_mod is not None or plan.mask_mod is not None
        spills = plan.in_turn and many and plan.window[0]
        ahead = all(plan.gradients) and not modified and not spills
        self.ahead = ahead and self.config.stages > 1
        # Where threads add to dQ, Q is asked for before: behind the reductions the registers of
        # their addresses are not free until they are under way, d64 causal 548 to 572 TFLOP/s.
        self.asked = self.ahead and not self.sums.handed and not self.config.wide
        # dO awaited with S, and dP at once: d256 full 425 to 451, causal 426 to 439; but d64 590 to
        # 564, d128 688 to 681.
        self.both = self.ahead and self.config.wide
        self.early = many or self.ahead or (self.config.wide and plan.score_mod is None)
        # A mod needs registers of its own: a learned T5 table spilled 184 bytes at d128, now none.
        # With S ahead ptxas serialises the products of d128 otherwise.
        self.tight = plan.score_mod is not None or many or self.ahead
        spaced = self.again and differential.in_turn(plan.score_mod)
        self.terms = RowTerms(self.config, self.tight, spaced)

    @cute.jit
    def __call__(self, io: BwdIo, extra: Extra, launch: Launch, stream):
        plan, c = self.plan, self.config
        layouts = self.products.layouts()
        boxes = [(c.tile_kv, plan.width), (c.tile_kv, plan.width_v)]
        boxes += [(c.tile_q, plan.width), (c.tile_q, plan.width_v)]
        tensors = (io.k, io.v, io.q, io.dout)
        k, v, q, do = (
            tma_operand(tensor, layout, box)
            for tensor, layout, box in zip(tensors, layouts, boxes, strict=False)
        )
        operands = Operands(
            k=k,
            v=v,
            q=q,
            do=do,
            io=io,
            mmas=self.products.mmas(),
            layouts=layouts,
            tiles=self.walk.number(io),
            counter=launch.counter,
            bounds=bounds_of(plan, (io.q.shape[1], io.k.shape[1]), launch),
            scale=launch.scale,
            extra=extra,
        )
        self.kernel(operands).launch(
            grid=[cutlass.min(operands.tiles.count, launch.sm_count), 1, 1],
            block=[self.topology.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, x: Operands):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage, buffers = self.allocate(x)
        if warp == 0:
            self.topology.initialise(storage)
            if const_expr(self.plan.in_turn):
                draw(x.tiles, x.counter, ask(x.counter), buffers.first, every=True)
        cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.topology.role("load").registers)
            if warp == 0:
                filled = dict.fromkeys((*LOADED, "next"), "producer")
                self.load(x, self.topology.rings_from(storage, **filled), buffers)
            if const_expr(self.sums.handed):
                if warp == 1:
                    read = ("next", "dq", "turn")[: 2 + (self.bulk and self.plan.in_turn)]
                    sides = dict.fromkeys(read, "consumer")
                    self.sums.add(x, self.topology.rings_from(storage, **sides), buffers)
            if const_expr(self.plan.in_turn):
                if warp == 2:
                    sides = {"next": "consumer", "turn": "producer"}
                    self.sums.await_turns(x, self.topology.rings_from(storage, **sides), buffers)
            if const_expr(self.plan.zeroes):
                if warp == 3:
                    rings = self.topology.rings_from(storage, next="consumer")
                    self.zeroing.zero(x, rings, buffers)
        else:
            cute.arch.setmaxregister_increase(self.topology.role("math").registers)
            self.math(x, self.rings_of_math(storage), buffers)

    def rings_of_math(self, storage: Any) -> Any:
        """The rings of the consumers; of dQ they are the producers."""
        sides = dict.fromkeys((*LOADED, "next"), "consumer")
        if self.sums.handed:
            sides["dq"] = "producer"
        if self.plan.in_turn and not self.bulk:
            sides["turn"] = "consumer"
        return self.topology.rings_from(storage, **sides)

    def allocate(self, x: Operands) -> tuple[Any, Buffers]:
        """Shared memory: the barriers' storage, and the buffers as tensors."""
        c = self.config
        names = ("k", "v", "q", "do", "ds", "p")[: len(x.layouts)]
        sizes = {
            name: (self.dtype, cute.cosize(layout))
            for name, layout in zip(names, x.layouts, strict=True)
        }
        if self.bulk:
            sizes["dq"] = (Float32, c.tile_q * self.plan.width * c.dq_slots)
        sizes["shift"] = sizes["delta"] = (Float32, c.tile_q * c.stages)
        if self.walk.noted:
            sizes["notes"] = (Int32, c.stages)
        words = sum(self.scratch_words)
        if words:
            sizes["scratch"] = (Int32, words * c.consumers)
        sizes["next"] = (Int32, len(HEADER))
        if self.plan.in_turn:
            sizes["first"] = (Int32, 1)
        words_alone = ("shift", "delta", "notes", "next", "first")
        storage = cutlass.memory.SmemAllocator().allocate(self.topology.storage(sizes, words_alone))
        tiles = [
            getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
            for name, layout in zip(names, x.layouts, strict=True)
        ]
        by_row = cute.make_layout((c.tile_q, c.stages))
        rows = [getattr(storage, name).get_tensor(by_row) for name in ("shift", "delta")]
        dq = storage.dq.get_tensor(self.sums.layout()) if self.bulk else None
        scratch = storage.scratch.data_ptr() if words else None
        notes = storage.notes.get_tensor(cute.make_layout(c.stages)) if self.walk.noted else None
        header = storage.next.get_tensor(cute.make_layout(len(HEADER)))
        p = tiles[5] if c.wide else None
        first = storage.first.get_tensor(cute.make_layout(1)) if self.plan.in_turn else None
        return storage, Buffers(*tiles[:5], *rows, p, dq, scratch, notes, header, first)

    @cute.jit
    def math(self, x: Operands, rings, buffers: Buffers):
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        mods = self.modifiers(x, buffers, group)
        c = Float32((mods.score.gain if mods.score else x.scale) * softmax.LOG2_E)
        tile, place = self.walk.first(x, buffers)
        while tile < x.tiles.count:
            work, first_key = self.work(place, group, thread)
            spans = self.walk.spans(x, place)
            own = self.walk.own(x, place, spans, first_key)
            f = self.products.fragments(x.mmas, buffers, group)
            f.dk.fill(0.0)
            f.dv.fill(0.0)
            # Once a tile, as the header: one state in registers for the three rings.
            k, v = rings.k.beside(rings.next).take(), rings.v.beside(rings.next).take()
            s = self.products.scores(f)
            for i in cutlass.range(self.plan.gqa_ratio, unroll=1):
                head = place.head * self.plan.gqa_ratio + i
                rows = modifiers.enter(mods, (place.batch, head), first_key)
                body = Sweep(x, buffers, f, rows, work, head, c, s, own.own_begin)
                if const_expr(self.walk.noted):
                    count = self.walk.visits(x, place._replace(head=head)).count
                    rings = self.sweep(body, rings, Int32(0), count, None)
                else:
                    rings = self.sweeps(body, rings, spans, own)
                modifiers.leave(rows)
            # The next K and V are loaded while dK and dV are stored.
            k.release()
            v.release()
            if const_expr(self.plan.gradients[1]):
                self.store(x, work, f)
            with rings.next.drain():
                tile, place = told(buffers.next)

    def work(self, place: Place, group: Int32, thread: Int32) -> tuple[Work, Int32]:
        """A consumer's share of the tile at ``place``, and the first key of its warpgroup."""
        first_key, first_query = place.block * self.config.tile_kv, Int32(0)
        if self.config.wide:
            first_query = group * self.config.own_queries
        else:
            first_key = first_key + group * mma_sm90.ROWS
        key = first_key + mma_sm90.row_of(thread)
        column = first_query + 2 * (thread % 4)
        return Work(place, group, thread, key, column, first_query), first_key

    def modifiers(self, x: Operands, buffers: Buffers, group: Int32) -> Mods:
        """The plan's mods for this warpgroup, with its part of the scratch and its own barrier."""
        scratch, words = None, sum(self.scratch_words)
        if words:
            barrier = DS_READY + 1 + group
            scratch = score.Scratch(buffers.scratch + group * words, barrier)
        graphs = (self.plan.score_mod, self.plan.mask_mod)
        extra, by_diagonal = x.extra or Extra(), self.scratch_words[-1] > 0
        return modifiers.of(graphs, extra, x.scale, self.fragment, scratch, by_diagonal=by_diagonal)

    @cute.jit
    def sweeps(self, body: Sweep, rings, spans: QSpans, own: OwnSpans):
        """The tile's blocks as bounds cut them: what the warpgroup sees, and what only others do.

        Without a left bound the first of them are seen whole.
        """
        if const_expr(self.walk.parted and self.plan.window[0]):
            rings = self.pass_by(body, rings, own.own_end, spans.end)
        if const_expr(self.ahead):
            self.open(rings, body, own.own_end > own.own_begin)
            warpgroup.wait_group(0)
        if const_expr(self.walk.two_edges):
            # The edges are turns of one traced body: ptxas - 30 %.
            for turn in cutlass.range(2, unroll=1):
                begin, whole, end = edge_of(own, turn != 0)
                rings = self.sweep(body, rings, begin, end, True)
                rings = self.sweep(body, rings, own.own_middle_begin, whole, False)
        else:
            rings = self.sweep(body, rings, own.own_middle_begin, own.own_middle_end, False)
            rings = self.sweep(body, rings, own.own_begin, own.own_middle_begin, True)
        if const_expr(self.walk.parted):
            rings = self.pass_by(body, rings, spans.begin, own.own_begin)
        return rings

    @cute.jit
    def pass_by(self, body: Sweep, rings, begin: Int32, end: Int32):
        """Blocks hidden from all keys of the warpgroup: it has its part in dQ of the others'."""
        f, of_q = body.f, self.plan.gradients[0]
        for i in cutlass.range(end - begin, unroll=1):
            do_ring = rings.do.beside(rings.q) if const_expr(self.tight) else rings.do
            q = rings.q.take()
            do = do_ring.take()
            do.release()
            if const_expr(of_q):
                f.ds_rows.fill(0.0)
                self.write(body, f.ds_rows, body.buffers.ds, q)
            self.meet_all(body)
            if const_expr(of_q):
                dq = self.products.dq(f, q.index)
                warpgroup.wait_group(0)
                self.put_dq(body, rings, dq, end - 1 - i)
            q.release()
        return rings

    @cute.jit
    def sweep(self, body: Sweep, rings, begin: Int32, end: Int32, edge: cutlass.Constexpr):
        """Blocks of queries ``end - 1`` down to ``begin``; ``edge``: they need the bounds.

        None: so many blocks, and Q's note says which each is and what it needs.
        """
        f, (of_q, of_kv) = body.f, self.plan.gradients
        limit = None
        if const_expr(edge is not False):
            limit = mask.limits_of_keys(body.x.bounds, body.work.key, body.work.column)
        for i in cutlass.range(end - begin, unroll=1):
            do_ring = rings.do.beside(rings.q) if const_expr(self.tight) else rings.do
            q = rings.q.take(awaited=self.both)
            if const_expr(edge is None):
                visit = Visit.of(body.buffers.notes[q.index])
            else:
                visit = Visit(end - 1 - i, Int32(not edge))
            block = visit.block
            s = body.s
            if const_expr(not self.ahead):
                self.products.s(f, q.index, s)
            do = do_ring.take(awaited=self.both)
            if const_expr(self.early):
                dp = self.products.dp(f, do.index)
            first = block * self.config.tile_q + body.work.first_query
            always = body.mods if const_expr(edge is not None) else body.mods._replace(mask=None)
            blocks = modifiers.enter_block(always, first)
            if const_expr(not self.ahead):
                warpgroup.wait_group(1 if self.early else 0)
            s_view = mma_sm90.rows_and_columns(s)
            slopes = self.modify(body, blocks, s_view, block, limit if edge else None)
            if const_expr(edge is None):
                self.restrict(body, s_view, visit, limit)
            self.exponentiate(body, s_view, q)
            if const_expr(not self.late):
                mma_sm90.convert(s, f.p)
            if const_expr(slopes is not None and body.mods.collector is None):
                slopes.apply(s_view)  # not on d score: so their registers are free earlier
            if const_expr(not self.early):
                dp = self.products.dp(f, do.index)
            if const_expr(self.config.wide and of_kv):
                self.write(body, f.p, body.buffers.p, q)
            if const_expr(self.config.wide or self.late or not of_kv):
                warpgroup.wait_group(0)
            else:
                self.products.add_dv(f, do.index)
                warpgroup.wait_group(1)
            dp_view = mma_sm90.rows_and_columns(dp)
            self.differentiate(body, s_view, dp_view, do)
            if const_expr(body.mods.collector is not None):
                modifiers.collect(blocks, slopes, dp_view)
            mma_sm90.convert(dp, f.ds_rows)
            if const_expr(self.late and of_kv):
                mma_sm90.convert(s, f.p)
                self.products.add_dv(f, do.index)
            if const_expr(of_q or (self.config.wide and of_kv)):
                self.write(body, f.ds_rows, body.buffers.ds, q)
            self.meet_all(body)
            if const_expr(self.config.wide and of_kv):
                self.products.add_dv(f, do.index)
            if const_expr(of_q):
                dq = self.products.dq(f, q.index)
            if const_expr(of_kv):
                self.products.add_dk(f, q.index)
            warpgroup.wait_group(of_q + of_kv)
            do.release()
            following = None
            if const_expr(self.ahead):
                filled = rings.q.filled() if const_expr(self.asked) else None
                there = end - 1 - i > body.lowest
                following = functools.partial(self.open, rings, body, there, filled)
            if const_expr(of_q):
                warpgroup.wait_group(int(of_kv))
                self.put_dq(body, rings, dq, block, following)
            warpgroup.wait_group(int(self.ahead))
            q.release()
            warpgroup.wait_group(0)
        return rings

    def open(self, rings: Any, body: Sweep, there: Any, filled: Any = None) -> None:
        """Issue S of the next block that the warpgroup sees; does not wait for it.

        If it is not ``there``, S of what lies in its slot, for nobody: a branch would be waited in.
        ``filled``: whether its slot was, when it was asked for.
        """
        self.products.s(body.f, rings.q.await_next(there, filled), body.s)
        if self.both:
            rings.do.beside(rings.q).await_next(there)

    def modify(
        self, body: Sweep, blocks: Mods, s: cute.Tensor, block: Int32, limit: mask.Limits | None
    ) -> score.Slopes | None:
        """score_mod, then the bounds where the block is an edge (``limit``), then mask_mod, on S.

        What is returned is the derivative of the score_mod, or None.
        """
        slopes = None
        if blocks.score is not None:
            slopes = blocks.score.differentiate(s, again=self.again)
        if limit is not None:
            mask.apply(s, [limit], block * self.config.tile_q)
        if blocks.mask is not None:
            blocks.mask.hide(s)
        return slopes

    @cute.jit
    def restrict(self, body: Sweep, s: cute.Tensor, visit: Visit, limit: mask.Limits):
        """The bounds and mask_mod on S in place, unless the block is whole."""
        if visit.whole == 0:
            first = visit.block * self.config.tile_q + body.work.first_query
            blocks = modifiers.enter_block(body.mods._replace(score=None), first)
            self.modify(body, blocks, s, visit.block, limit)

    def exponentiate(self, body: Sweep, s: cute.Tensor, slot: Any) -> None:
        """S (2, columns) becomes P in place."""
        made: list[Any] = []
        shifts = self.terms.of(body.buffers.shift, slot.index, body.work.column, made)
        differential.exponentiate(s, body.c, shifts, made)

    def differentiate(self, body: Sweep, p: cute.Tensor, dp: cute.Tensor, slot: Any) -> None:
        """dP (2, columns) becomes d score in place: the gradient of the score after its mod."""
        deltas = self.terms.of(body.buffers.delta, slot.index, body.work.column)
        differential.differentiate(p, dp, deltas)

    def write(self, body: Sweep, fragment: cute.Tensor, to: cute.Tensor, slot: Any) -> None:
        """Write a rounded S^T-like fragment to the slot's (tile_q, tile_kv)."""
        thread = body.work.warpgroup * WARPGROUP + body.work.thread
        stage = mma_sm90.transposed(to)[None, None, slot.index]
        shape = (self.config.tile_kv, self.config.tile_q)
        mma_sm90.store_turned(body.x.mmas.scores, thread, fragment, (shape, stage))

    def meet_all(self, body: Sweep) -> None:
        """All consumers have written what the next wgmmas read."""
        cute.arch.fence_proxy("async.shared", space="cta")
        threads = WARPGROUP * self.config.consumers
        cute.arch.barrier(barrier_id=DS_READY, number_of_threads=threads)

    def put_dq(
        self, body: Sweep, rings: Any, dq: cute.Tensor, block: Int32, following: Any = None
    ) -> None:
        """Add the accumulator to the block's sums, or hand it to the warp that does.

        ``following`` issues S of the next block behind dQ's last use: before, d128 had 621 of 686
        TFLOP/s. Before the fence behind what is handed on, d128 had 631 of 675, but d64 in turn 568
        and 520 of 556 and 508.
        """
        first = self.config.own_queries > 64
        if self.bulk:
            with rings.dq.fill() as slot:
                self.sums.hand_on(body.buffers.dq[(*[None] * 4, slot.index)], body.work, dq)
                if following is not None and first:
                    following()
                cute.arch.fence_proxy("async.shared", space="cta")
        else:
            sums = body.x.io.sums[body.work.place.batch, body.head, 0, None]
            with contextlib.ExitStack() as held:
                if self.sums.handed:
                    held.enter_context(rings.turn.drain())
                    held.enter_context(rings.dq.fill())
                self.sums.add_own(sums, body.work, dq, block)
        if following is not None and not (self.bulk and first):
            following()

    def store(self, x: Operands, work: Work, f: Fragments) -> None:
        """Round dK, times the scale, and dV, and write them; keys past the last are not written."""
        place, rows = work.place, x.bounds.seqlen_k
        key = work.key
        if const_expr(self.bulk):
            # Kept over the main loop it spilled 40 bytes at d64 under a window, but made again 16
            # where dQ is added from registers.
            key = self.work(place, work.warpgroup, mma_sm90.thread_again())[0].key
        mma_sm90.multiply(f.dk, [x.scale] * mma_sm90.FRAGMENT_ROWS)
        for acc, target in ((f.dk, x.io.dk), (f.dv, x.io.dv)):
            rounded = cute.make_rmem_tensor(acc.layout, self.dtype)
            mma_sm90.convert(acc, rounded)
            g = target[place.batch, None, place.head, None]
            part = (work.warpgroup, self.config.consumers) if self.config.wide else None
            epilogue.store_rows(rounded, g, key, rows, part)
