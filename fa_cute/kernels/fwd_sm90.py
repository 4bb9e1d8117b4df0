"""Attention forward on Hopper: O = softmax(mod(scale Q K^T)) V, one tile of queries after another.

One producer warp (beside some masks a second: ``device/columns.py``), and ``tile_m / 64`` consumer
warpgroups of 64 rows each. A consumer issues S of a block together with P V of the one before; its
exponentials follow when both are there, and presume the row's maximum (``device/softmax.py``).
Meanwhile the others multiply; where it pays, turns keep one on the tensor cores while another is on
the exponentials:

    load        Q K0 K1 V0 K2 V1 ... next Q' K0' Vn        (device/loads.py)
    consumer 0  exp [S1 PV0]......exp [S2 PV1]......exp      [PVn S0'] O/l, store; exp [S1' ...
    consumer 1           exp [S1 PV0]......exp [S2 PV1]......
                          a turn passes when its bracket has been issued

A tile's first S (S0') is issued behind the last P V of the one before it (``opens_early``), else
when that is stored.

Roles and rings are the tables of ``topology`` below. Blocks of keys are visited from the last to
the first: one peeled block with every mask, then, by bounds alone (``spans.kv_spans``), spans, each
a traced body; under a mask with ranges or lists (``device/visits.py``) one of whole blocks, without
the mask, and one of others: the producer names with a slot of K its block, and which body the
next block takes.
Order on a score: scale, score_mod, bounds (length, causal, window), mask_mod, softmax.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from fa_cute.device import emit, epilogue, mask, mma_sm90, modifiers, packing, score, softmax
from fa_cute.device import staging as staged
from fa_cute.device.bias import Bias, Reader
from fa_cute.device.bounds import bounds_of
from fa_cute.device.columns import Columns
from fa_cute.device.loads import Loads
from fa_cute.device.memory_sm90 import Buffers, Memory
from fa_cute.device.modifiers import Mods
from fa_cute.device.operand import TmaOperand, tma_operand
from fa_cute.device.products_sm90 import Fragments, Products
from fa_cute.device.ring import Turns
from fa_cute.device.scheduler import COUNT, Place, Tiles
from fa_cute.device.topology import WARPGROUP, RingSpec, Role, Topology
from fa_cute.device.visits import Visit
from fa_cute.device.walk import Walk
from fa_cute.mods.affine import ranges_of
from fa_cute.plan import Extra, Io, Launch, Plan
from fa_cute.spans import Bounds

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
TURNS = 1  # the first named barrier of the turns; 0 is the CTA's own
NEXT_STAGES = 2


def topology(plan: Plan) -> Topology:
    """Who works, and what each waits for."""
    c = plan.config
    q_bytes = c.tile_m * plan.width * 2
    k_bytes = c.tile_n * plan.width * 2
    v_bytes = c.tile_n * plan.width_v * 2
    noted, tile = plan.visits != "bounds", Bias.of(plan)
    to, early, biases = ("load", "math"), opens_early(plan), ()
    brought = int(columns_of(plan) is not None)  # by a second warp, which reads headers too
    if tile is not None:
        why = "freed when it is added to S"
        spec = RingSpec("bias", plan.bias_stages, tile.bytes, "load", "math", why, by_lanes=True)
        biases = (spec,)
    duty, there = "draws tiles; TMA loads of Q, K, V, a bias", "freed when S is there"
    readers = 4 * c.consumers + brought
    of_q = "freed when it is in registers" if c.q_registers else "freed after the tile's last S"
    return Topology(
        roles=(
            Role("load", 1, c.producer_registers, 1 + brought, duty),
            Role("math", c.consumers, c.consumer_registers, 4, "wgmma, softmax, stores"),
        ),
        rings=(
            RingSpec("next", NEXT_STAGES, 0, *to, "the tile's header", empties=readers),
            RingSpec("q", c.q_stages, q_bytes, *to, of_q, early=early, by_lanes=c.q_registers),
            RingSpec("k", c.kv_stages, k_bytes, *to, there, noted, 1 + brought, early=early),
            RingSpec("v", c.kv_stages, v_bytes, "load", "math", "freed when P V is there"),
            *biases,
        ),
    )


def opens_early(plan: Plan) -> bool:
    """Whether S of the next tile is issued behind the last P V, to be multiplied under its stores.

    If its Q has a slot of its own, or this one's is in registers (without lse: S8k causal 767 ->
    758 TFLOP/s, and not under a left bound alone: 4 bytes spilled). Beside a mask the producer
    finds the next tile's visits while it loads this one's: with 40 registers, those of three
    ranges, or of two and a bound (two and two bounds spilled 4 bytes). d128 S1k causal 528 -> 542
    TFLOP/s, a window 581 -> 601, masks 2 to 6 % less time; d64 full with lse, whose registers are
    all in use, 548 -> 518. Beside a score_mod not, of which docs/performance.md says what it gave;
    with a mask, bounds, sinks and lse as well 12 bytes spilled.
    """
    c = plan.config
    if c.q_registers:
        return not (plan.return_lse or (plan.window[0] and not (plan.causal or plan.window[1])))
    if plan.score_mod is not None or c.q_stages == 1:
        return False
    cut = plan.causal or any(plan.window)
    if plan.visits == "ranges":
        held = len(ranges_of(plan.mask_mod).ranges) + cut + plan.window[0]
        return c.producer_registers > 32 and held <= 3
    if plan.visits == "lists":
        return c.producer_registers > 32
    return plan.mask_mod is None and (cut or not plan.return_lse)


def columns_of(plan: Plan) -> Columns | None:
    """What is brought of a mask beside K, if anything."""
    noted = plan.visits != "bounds" and opens_early(plan)
    return Columns.of(plan.mask_mod, mma_sm90.fragment(plan.config.tile_n)) if noted else None


@dataclass(frozen=True)
class Operands:
    """All that the kernel reads and writes."""

    q: TmaOperand
    k: TmaOperand
    v: TmaOperand
    out: cute.Tensor
    lse: cute.Tensor | None
    counter: cute.Tensor
    qk: cute.TiledMma
    own_qk: cute.TiledMma | None
    pv: cute.TiledMma
    layouts: tuple
    tiles: Tiles
    rows: Int32
    bounds: Bounds
    scale: Float32
    extra: Extra | None
    bias: TmaOperand | None


class Work(NamedTuple):
    """A consumer's share of a tile: the tile, its warpgroup."""

    place: Place
    warpgroup: Int32


@dataclass(frozen=True)
class Sweep:
    """What the body of the main loop reads, and the registers that it updates in place."""

    x: Operands
    f: Fragments
    state: softmax.RowState
    mods: Mods
    work: Work
    q: Any
    notes: cute.Tensor | None
    bias: Reader | None
    columns: cute.Tensor | None


class FwdSm90(Loads, Memory, Products):
    """The kernel of one plan; ``__call__`` is its host entry, ``(Io, Extra, Launch, stream)``."""

    def __init__(self, plan: Plan):
        self.plan, self.config = plan, plan.config
        self.topology = topology(plan)
        self.turns = Turns(TURNS, plan.config.consumers if plan.config.ping_pong else 1)
        self.dtype, self.bias = DTYPES[plan.dtype], Bias.of(plan)
        self.how = softmax.How.of(plan)
        self.p_shape = plan.config.tile_m, plan.config.tile_n
        self.fragment = mma_sm90.fragment(plan.config.tile_n)
        self.walk = Walk(plan, self.fragment)
        # Exact ranges hide by limits of each row, as bounds do, and their graph is not evaluated.
        self.graphs = plan.score_mod, None if self.walk.exact is not None else plan.mask_mod
        self.rolling = plan.bias is None and not self.walk.noted  # boxes take the room, notes leap
        self.opens_early, self.columns = opens_early(plan), columns_of(plan)
        graphs = self.graphs if self.columns is None else ()
        words = (score.scratch_words(graph, self.fragment, self.rolling) for graph in graphs)
        self.scratch_words = tuple(words)
        self.staged = self.stages_out()

    @cute.jit
    def __call__(self, io: Io, extra: Extra, launch: Launch, stream):
        plan, c = self.plan, self.config
        bounds = bounds_of(plan, (io.q.shape[1], io.k.shape[1]), launch)
        if const_expr(c.packed):
            io = packing.packed(io, plan.gqa_ratio)
        layouts = (
            mma_sm90.smem_layout(self.dtype, c.tile_m, plan.width, c.q_stages),
            mma_sm90.smem_layout(self.dtype, c.tile_n, plan.width, c.kv_stages),
            mma_sm90.smem_layout(self.dtype, c.tile_n, plan.width_v, c.kv_stages),
        )
        boxes = (
            (c.tile_m, plan.width),
            (c.tile_n, plan.width),
            (c.tile_n, plan.width_v),
        )
        q, k, v = (
            tma_operand(tensor, layout, box)
            for tensor, layout, box in zip((io.q, io.k, io.v), layouts, boxes, strict=True)
        )
        bias, own_qk = None, None
        qk = functools.partial(
            mma_sm90.make_mma, self.dtype, c.consumers, c.tile_n, p_times_v=False
        )
        if const_expr(c.q_registers):
            own_qk = qk(q_registers=True)
        if const_expr(self.bias is not None):
            layouts += (self.bias.layout(plan.bias_stages),)
            bias = self.bias.operand(extra.captured[plan.bias], layouts[-1])
        operands = Operands(
            q=q,
            k=k,
            v=v,
            out=io.out,
            lse=io.lse,
            counter=launch.counter,
            qk=qk(),
            own_qk=own_qk,
            pv=mma_sm90.make_mma(self.dtype, c.consumers, plan.width_v, p_times_v=True),
            layouts=layouts,
            tiles=self.walk.number(io, bounds.seqlen_q * self.walk.group, extra),
            rows=bounds.seqlen_q * self.walk.group,
            bounds=bounds,
            scale=launch.scale,
            extra=extra,
            bias=bias,
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
        cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.topology.role("load").registers)
            if warp == 0:
                self.load(x, self.topology.rings_of("producer", storage), buffers)
            elif const_expr(self.columns is not None):
                if warp == 1:
                    rings = self.topology.rings_from(storage, next="consumer", k="producer")
                    self.bring(x, rings, buffers)
        else:
            cute.arch.setmaxregister_increase(self.topology.role("math").registers)
            self.math(x, self.topology.rings_of("consumer", storage), buffers)

    @cute.jit
    def math(self, x: Operands, rings, buffers: Buffers):
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        mods = self.modifiers(x, buffers, group)
        self.turns.open(group)
        tile, s = Int32(cute.arch.block_idx()[0]), None
        if const_expr(self.opens_early):
            rings, tile, count, place = self.follow_on(x, rings, buffers)
            s = self.scores(x)
            self.open(x, rings, self.fragments(x, buffers, group), s, tile)
        else:
            count, place = Int32(0), self.walk.place(x, tile)
        while tile < x.tiles.count:
            if const_expr(self.walk.noted):
                if const_expr(not self.opens_early):
                    with rings.next.drain() as header:
                        count = buffers.next[COUNT, header.index]
                        place = Place.told(buffers.next[None, header.index])
                walk = count
            else:
                walk = self.walk.spans(x.bounds, place)
                count = walk.end - walk.begin
            work = Work(place, group)
            entered = (mods, (place.batch, place.head), self.first_row(work))
            if const_expr(self.opens_early):
                share = (work, modifiers.enter(*entered), s)
                rings, tile, count, place = self.attend(x, rings, buffers, share, walk)
            else:
                if const_expr(self.walk.sees_some):
                    share = (work, modifiers.enter(*entered), None)
                    rings = self.attend(x, rings, buffers, share, walk)
                elif count > 0:
                    share = (work, modifiers.enter(*entered), None)
                    rings = self.attend(x, rings, buffers, share, walk)
                else:
                    sink = self.sink(x, place)
                    log = -Float32.inf if const_expr(sink is None) else sink
                    self.store(x, work, None, [log] * mma_sm90.FRAGMENT_ROWS)
                rings, tile, count, place = self.follow_on(x, rings, buffers)
        if const_expr(self.opens_early):
            warpgroup.wait_group(0)  # the S that nobody needs

    @cute.jit
    def follow_on(self, x: Operands, rings, buffers: Buffers):
        """The number, visits and place of the next tile, as far as its header has them."""
        with rings.next.drain() as following:
            tile, count = (buffers.next[word, following.index] for word in (0, COUNT))
            place = Place.told(buffers.next[None, following.index])
        return rings, tile, count, place

    def modifiers(self, x: Operands, buffers: Buffers, group: Int32) -> Mods:
        """The plan's mods for this warpgroup, with its part of the scratch and its own barrier."""
        words, scratch = self.scratch_words, None
        if sum(words):
            own = buffers.scratch + group * sum(words)
            scratch = score.Scratch(own, self.own_barrier(group), self.rolling)
        of, brought = (x.extra or Extra(), x.scale, self.fragment, scratch), bool(self.columns)
        mods = modifiers.of(self.graphs, *of, brought=brought)
        if self.bias is None or (self.plan.width, self.plan.width_v) != (128, 128):
            return mods
        # A second bias, d128: full 4.19 -> 4.15 ms, causal 2.09 -> 2.03; d64 6.33 -> 7.93.
        sparing = score.Sparing(in_turn=True, rows=self.walk.cut)
        return mods._replace(score=replace(mods.score, sparing=sparing))

    def sink(self, x: Operands, place: Place) -> Float32 | None:
        """The logit that the head adds to every row's softmax, or None."""
        return x.extra.sinks[place.head] if self.plan.sinks else None

    def own_barrier(self, group: Int32) -> Int32:
        """The named barrier of a consumer warpgroup's 128 threads."""
        return TURNS + self.config.consumers + group

    @cute.jit
    def attend(self, x: Operands, rings, buffers: Buffers, share: tuple, walk: Any):
        """One tile that sees something: the peeled first block, the others, the last P V.

        ``walk`` is the tile's KvSpans; where the producer's notes name the blocks, their number.
        """
        work, mods, s = share
        for ring in (rings.q, rings.k, rings.v):
            ring.made_uniform()
        f = self.fragments(x, buffers, work.warpgroup)
        state = softmax.RowState()
        f.o.fill(0.0)
        q = rings.q.take()
        if const_expr(self.config.q_registers):
            f = f._replace(own_q=self.queries(x, buffers, work.warpgroup, q))
        memory = buffers.notes, self.reader(x, buffers, work), buffers.columns
        body = Sweep(x, f, state, mods, work, q, *memory)
        k = rings.k.take()
        if const_expr(not self.opens_early):
            s = self.issue_scores(body, k)
        block, whole = Visit.of(body.notes[k.index]) if self.walk.noted else (walk.last, None)
        if const_expr(self.walk.noted and self.opens_early):
            # A tile that sees nothing has one block, hidden as past the last key.
            past = cute.ceil_div(x.bounds.seqlen_k, self.config.tile_n)
            block = cutlass.select_(walk > 0, block, past)
        bias = self.take_bias(rings)
        blocks = self.enter_block(body, mods, block, (bias, k))
        warpgroup.wait_group(0)
        k.release()
        if const_expr(self.config.q_registers):
            q.release()
        self.modify(body, blocks, s, block, True)
        self.free(bias)
        softmax.begin(s, f.p, state, self.exponent(body), self.how, sought=self.plan.seeks)
        if const_expr(self.walk.noted):
            rings = self.follow(body, rings, walk - 1, whole)
        elif const_expr(self.plan.seeks and None not in (x.bounds.left, x.bounds.right)):
            # Its edges differ by nothing: turns of one body, with the whole blocks between.
            for turn in cutlass.range(2, unroll=1):
                left = turn != 0
                begin = cutlass.select_(left, walk.begin, walk.middle_end)
                end = cutlass.select_(left, walk.middle_begin, walk.last)
                middle_end = cutlass.select_(left, walk.middle_begin, walk.middle_end)
                rings = self.sweep(body, rings, begin, end, (True, True))
                rings = self.sweep(body, rings, walk.middle_begin, middle_end, (False, False))
        else:
            # Without a right bound the peeled block is the only edge there.
            if const_expr(x.bounds.right is not None):
                rings = self.sweep(body, rings, walk.middle_end, walk.last, (True, True))
            rings = self.sweep(body, rings, walk.middle_begin, walk.middle_end, (False, False))
            if const_expr(x.bounds.left is not None):
                rings = self.sweep(body, rings, walk.begin, walk.middle_begin, (True, False))
        if const_expr(not self.config.q_registers):
            q.release()
        v = rings.v.take()
        self.add_values(x, f, v)
        if const_expr(self.opens_early):
            rings, tile, count, place = self.follow_on(x, rings, buffers)
            self.open(x, rings, f, s, tile)
        warpgroup.wait_group(1 if self.opens_early else 0)
        v.release()
        o_view, sink = mma_sm90.rows_and_columns(f.o), self.sink(x, work.place)
        logs = softmax.finish(o_view, state, self.exponent(body), sink)
        self.store(x, work, (f.o, buffers.staging), logs)
        if const_expr(self.opens_early):
            return rings, tile, count, place
        return rings

    @cute.jit
    def sweep(self, body: Sweep, rings, begin: Int32, end: Int32, edge: cutlass.Constexpr):
        """Blocks ``end - 1`` down to ``begin``; ``edge``: bounds cut them, and from the right."""
        (bounds, right), exact = edge, self.walk.exact is not None
        for i in cutlass.range(end - begin, unroll=1):
            rings, _ = self.step(body, rings, end - 1 - i, (bounds or exact, True, right))
        return rings

    @cute.jit
    def follow(self, body: Sweep, rings, count: Int32, whole: Int32):
        """The next ``count`` blocks, as the producer's notes name them; ``whole``: the first is."""
        for _ in cutlass.range(count, unroll=1):
            if whole != 0:
                rings, whole = self.step(body, rings, None, (False, False, False))
            else:
                cut = self.walk.cut or self.walk.exact is not None
                rings, whole = self.step(body, rings, None, (cut, True, True))
        return rings

    @cute.jit
    def step(self, body: Sweep, rings, block, needs: cutlass.Constexpr):
        """One block: its S, P V of the one before, then exp; the rings, and what K's note tells.

        ``needs``: the bounds, the mask_mod, the maximum. A ``block`` of None is named by K's note.
        """
        k = rings.k.take()
        self.turns.wait(body.work.warpgroup)
        s = self.issue_scores(body, k)
        (edge, masked, first), whole, bias = needs, None, None
        between = masked and self.columns is not None
        if const_expr(between):  # while S is multiplied; behind P V nothing passes under either
            block, whole = Visit.of(body.notes[k.index])
            blocks = self.enter_block(body, body.mods, block, (bias, k), follows=True)
        v = rings.v.take()
        self.add_values(body.x, body.f, v)
        self.turns.give(body.work.warpgroup)
        if const_expr(not between):
            if const_expr(block is None):
                block, whole = Visit.of(body.notes[k.index])
            mods = body.mods if masked else body.mods._replace(mask=None)
            bias = self.take_bias(rings)
            blocks = self.enter_block(body, mods, block, (bias, k), follows=True)
        warpgroup.wait_group(1)
        k.release()
        line = self.modify(body, blocks, s, block, edge)
        self.free(bias)
        if const_expr(self.seeks(first)):
            self.sought(body, s, v)
        else:
            self.presumed(body, s, v, line)
        return rings, whole

    def seeks(self, first: bool) -> bool:
        """Whether a block's maximum is sought first: ``device/softmax.py`` says where and why.

        ``first``: bounds may hide all before it from a row. At a window's left edge they do not.
        """
        return self.plan.seeks or (first and not self.walk.hides and not self.how.bounded)

    def sought(self, body: Sweep, s: cute.Tensor, v: Any) -> None:
        """P of a block under its own maximum; O rescaled to it."""
        f, state = body.f, body.state
        s_view = mma_sm90.rows_and_columns(s)
        softmax.exponentiate(s_view, state, self.exponent(body))
        warpgroup.wait_group(0)
        v.release()
        mma_sm90.convert(s, f.p)  # first: the next S and P V wait for it, and for nothing below
        softmax.rescale(mma_sm90.rows_and_columns(f.o), state)
        softmax.add_up(s_view, state)

    def presumed(self, body: Sweep, s: cute.Tensor, v: Any, line: Any) -> None:
        """P under the maximum of the blocks before, unless its sums tell otherwise."""
        f, state, c, own = body.f, body.state, self.exponent(body), self.how.crossed
        p = mma_sm90.operand_like(body.x.pv, self.p_shape) if own else f.p
        if not own:
            warpgroup.wait_group(0)  # P overwrites what the last P V reads
            v.release()
        softmax.presume(s, p, state, c, self.how, line=line)
        softmax.settle(s, p, f.o, state, c, self.how, line=line)
        if own:
            warpgroup.wait_group(0)
            v.release()
            softmax.uncross(p, f.p)

    def reader(self, x: Operands, buffers: Buffers, work: Work) -> Reader | None:
        """What this thread reads of the bias' boxes, or None; told again (kept, 4 bytes spill)."""
        if self.bias is None:
            return None
        thread = work.warpgroup * WARPGROUP + mma_sm90.thread_again()
        return self.bias.reader(x.qk, buffers.bias, thread)

    def take_bias(self, rings) -> Any:
        """The next slot of the bias' ring, or None."""
        return None if self.bias is None else rings.bias.take()

    def free(self, bias: Any) -> None:
        """Release the bias' slot, if there is one: late, when the fence waits for no load."""
        if bias is not None:
            bias.release()

    def enter_block(self, body: Sweep, mods: Mods, block: Int32, slots: tuple, *, follows=False):
        """The mods with what depends on a KV block's columns computed, while S is multiplied.

        ``slots``: that of the bias' box, or None; that of K, with which the mask's columns come.
        """
        (bias, k), columns = slots, None
        tiles = None if bias is None else body.bias.values(bias.index)
        if self.columns is not None and mods.mask is not None:
            slot = body.columns[None, k.index]
            columns = self.columns.tiles(slot, mma_sm90.thread_again())
        first = block * self.config.tile_n
        return modifiers.enter_block(mods, first, tiles, columns, follows=follows)

    def modify(self, body: Sweep, blocks: Mods, s: cute.Tensor, block: Int32, edge: bool) -> Any:
        """S in place: score_mod, but a line of it is returned; bounds, if an edge; mask_mod."""
        s_view = mma_sm90.rows_and_columns(s)
        # Under a mask none is left: whole blocks would round otherwise than masked ones, and bits
        # would depend on which blocks are told to be whole.
        left = not (edge or self.plan.seeks or self.walk.hides)
        line = modifiers.line_of(blocks) if left else None
        if blocks.score is not None and line is None:
            blocks.score.score(s_view)
        if edge:
            self.bound(body, s_view, block * self.config.tile_n)
        if blocks.mask is not None:
            blocks.mask.hide(s_view)
        return line

    def bound(self, body: Sweep, s: cute.Tensor, first: Int32) -> None:
        """The bounds on keys ``first ...``; if the end of the keys is the only one, where it is."""
        if self.walk.cut or self.walk.exact is not None:
            mask.apply(s, self.limits(body), first)
        else:
            with emit.where(first + self.config.tile_n > body.x.bounds.seqlen_k):
                mask.apply(s, self.limits(body), first)

    def limits(self, body: Sweep) -> list[mask.Limits]:
        """What this thread's rows see; told again at each edge (kept, d64 spilled 24 bytes)."""
        thread = mma_sm90.thread_again()
        row, column = self.first_row(body.work) + mma_sm90.row_of(thread), 2 * (thread % 4)
        limits = mask.limits(body.x.bounds, row, column, self.walk.group)
        if self.walk.exact is None:
            return [limits]
        return mask.shown_by(self.walk.exact, limits, row, column)

    def first_row(self, work: Work) -> Int32:
        """The first row of a warpgroup's 64."""
        return work.place.block * self.config.tile_m + work.warpgroup * mma_sm90.ROWS

    def exponent(self, body: Sweep) -> Float32:
        """c, what a score is multiplied with to become an exponent of 2."""
        rows = body.mods.score
        natural = body.x.scale if rows is None else rows.tile.mod.gain
        return Float32(natural * softmax.LOG2_E)

    def store(self, x: Operands, work: Work, o: tuple | None, logs: list) -> None:
        """Round O (None: zeros) and write it with its LSE, but no row past the last query.

        ``o``: the accumulator, and the address of memory to stage it in, or None.
        """
        place, rows = work.place, x.rows
        # Told again: kept through a tile it is one register too many (d64 spilled 8 bytes).
        row = self.first_row(work) + mma_sm90.row_of(mma_sm90.thread_again())
        g_out = x.out[place.batch, None, place.head, None]
        if o is None:
            epilogue.store_zeros(self.plan.width_v, g_out, row, rows)
        else:
            o, staging = o
            rounded = cute.make_rmem_tensor(o.layout, self.dtype)
            mma_sm90.convert(o, rounded)
            if const_expr(staging is None):
                epilogue.store_rows(rounded, g_out, row, rows)
            else:
                warp = mma_sm90.warp_again() - 4  # the first four load
                first = place.block * self.config.tile_m + staged.ROWS * warp
                own = staging + warp * staged.WARP_BYTES
                staged.store_rows(rounded, g_out, (first, rows), own)
        if const_expr(x.lse is not None):
            epilogue.store_lse(logs, x.lse[place.batch, place.head, None], row, rows)
