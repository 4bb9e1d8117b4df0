"""Attention forward on Blackwell: O = softmax(mod(scale Q K^T)) V, tiles of 128 rows in pairs.

S, P and O live in tensor memory. One warp issues every product; a softmax warpgroup a tile has one
row a thread; a correction warpgroup rescales O when a row's maximum rose by more than log2 256, and
stores it at the end. P takes S's place, and the product with V starts when its early columns are
there:

    load        K0 Q0 Q1 V0 K1 V1 K2 ...
    mma         [S0][S1]      [PV0][S0]      [PV1][S1]      [PV0][S0] ...
    softmax 0       max exp exp P.....           max exp exp P.....
    softmax 1            max exp exp P.....           max exp exp P.....
    correction           .              O0?           O1?           O0?   ... O/l, store

With one tile a CTA (head dim 256) S has two slots, and the S of the next block is issued before
the P V of this one. Roles and rings are the tables of ``topology`` below, column ranges those of
``columns``. Blocks of keys are visited from the last to the first (``spans.kv_spans``): one peeled
block with every mask, then spans, each a traced body. Order on a score: scale, score_mod, bounds
(length, causal, window), mask_mod, softmax.

The target ``sm_100@sm_90a`` compiles this file for Hopper with the second implementation of the
verbs in ``tmem`` and ``mma_sm100``: a test device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from fa_cute.device import emit, mma_sm100, modifiers, rows, score, tmem
from fa_cute.device import softmax_sm100 as softmax
from fa_cute.device.bounds import bounds_of
from fa_cute.device.fragment import one_row
from fa_cute.device.lower import schedule
from fa_cute.device.modifiers import Mods
from fa_cute.device.operand import Reuse, TmaOperand, loader, tma_operand
from fa_cute.device.packed import Pairs
from fa_cute.device.scheduler import Place, Tiles, draw
from fa_cute.device.softmax import LOG2_E
from fa_cute.device.topology import WARPGROUP, RingSpec, Role, Topology
from fa_cute.device.walk import Walk
from fa_cute.plan import Extra, Io, Launch, Plan
from fa_cute.spans import Bounds, KvSpans

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
NEXT_STAGES = 2
STAT_STAGES = 1  # of the message to the correction, which reads it at once
SMALL = ("next", "tmem", "stat", "scratch")  # buffers of single words
SCRATCH = 1  # the first named barrier of the mods' scratch, one a softmax warpgroup; 0 is the CTA's
PIECE = 32  # columns of a row that move between tensor memory and registers at a time


def topology(plan: Plan) -> Topology:
    """Who works, and what each waits for."""
    c = plan.config
    tiles = c.q_tiles
    q_bytes = mma_sm100.ROWS * plan.width * 2
    k_bytes = c.tile_n * plan.width * 2
    v_bytes = c.tile_n * plan.width_v * 2
    # The MMA's warp, the correction and every softmax warpgroup read the header.
    readers = 1 + 4 + 4 * tiles
    unfreed: dict[str, Any] = {"freed": False, "copies": tiles}
    in_order = "P V before it was issued earlier, and products execute in order"
    return Topology(
        roles=(
            Role("issue", 1, c.issue_registers, 2, "warp 0 loads by TMA, warp 1 multiplies"),
            Role("softmax", tiles, c.softmax_registers, 4, "S to P, one row a thread"),
            Role("correction", 1, c.correction_registers, 4, "rescales O, stores it"),
        ),
        rings=(
            RingSpec(
                "next", NEXT_STAGES, 0, "issue", "all", "the tile after this", empties=readers
            ),
            RingSpec("q", tiles, q_bytes, "issue", "mma", "freed by the tile's last S", empties=1),
            RingSpec("k", c.k_stages, k_bytes, "issue", "mma", "freed by S", empties=1),
            RingSpec("v", c.v_stages, v_bytes, "issue", "mma", "freed by P V", empties=1),
            RingSpec("s", c.s_stages, 0, "mma", "softmax", in_order, **unfreed),
            RingSpec("p", c.s_stages, 0, "softmax", "mma", in_order, fills=4, **unfreed),
            RingSpec("tail", c.s_stages, 0, "softmax", "mma", in_order, fills=4, **unfreed),
            RingSpec(
                "stat", STAT_STAGES, 0, "softmax", "correction", "factors", fills=4, copies=tiles
            ),
            RingSpec("o", 1, 0, "mma", "correction", "rescaled or stored", copies=tiles),
        ),
    )


def columns(plan: Plan) -> dict[str, tmem.Columns]:
    """The ranges of tensor memory: S (all slots), O and P (in the first slot) of each tile."""
    c = plan.config
    tiles = range(c.q_tiles)
    s = {f"s{t}": c.tile_n * c.s_stages for t in tiles}
    ranges = tmem.lay_out(**s, **{f"o{t}": plan.width_v for t in tiles})
    words = c.tile_n // mma_sm100.PER_COLUMN
    p = {f"p{t}": ranges[f"s{t}"].borrow_as(f"p{t}", words) for t in tiles}
    return ranges | p


class Buffers(NamedTuple):
    """Shared memory: q (128, D, tiles), k (tile_n, D, ·), v (tile_n, Dv, ·), next (stages,).

    ``stat``: fp32 (row, 2, stages, tiles), a block's factor on O, at the end the sum and maximum.
    ``scratch``: 32-bit words of the mods' diagonals, one part a softmax warpgroup, or None.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    next: cute.Tensor
    stat: cute.Tensor
    scratch: Any


@dataclass(frozen=True)
class Operands:
    """All that the kernel reads and writes."""

    q: TmaOperand
    k: TmaOperand
    v: TmaOperand
    out: cute.Tensor
    lse: cute.Tensor | None
    counter: cute.Tensor
    scratch: cute.Tensor | None
    layouts: tuple
    tiles: Tiles
    bounds: Bounds
    scale: Float32
    extra: Extra | None


@dataclass(frozen=True)
class Product:
    """What the MMA's warp multiplies: descriptors of q, k, v (atom, m, k, stage), their columns."""

    memory: Any
    q: Any
    k: Any
    v: Any


@dataclass(frozen=True)
class Sweep:
    """A softmax thread's share of a tile, and the registers that it updates in place."""

    x: Operands
    memory: Any
    stat: cute.Tensor
    state: softmax.Row
    limit: rows.Limit
    mods: Mods
    column: Int32


class FwdSm100:
    """The kernel of one plan; ``__call__`` is its host entry, ``(Io, Extra, Launch, stream)``."""

    def __init__(self, plan: Plan):
        self.plan, self.config = plan, plan.config
        self.native = "@" not in plan.target
        self.topology, self.columns = topology(plan), columns(plan)
        self.dtype = DTYPES[plan.dtype]
        self.memory = tmem.Native if self.native else tmem.Hosted
        self.pairs = Pairs(self.native)
        gemm = mma_sm100.Native if self.native else mma_sm100.Hosted
        self.qk = gemm(self.dtype, plan.config.tile_n, p_times_v=False)
        self.pv = gemm(self.dtype, plan.width_v, p_times_v=True)
        self.fragment = one_row(plan.config.tile_n, WARPGROUP)
        self.walk = Walk(plan, self.fragment)
        graphs = (plan.score_mod, plan.mask_mod)
        self.scratch_words = [score.scratch_words(graph, self.fragment) for graph in graphs]

    @cute.jit
    def __call__(self, io: Io, extra: Extra, launch: Launch, stream):
        plan, c = self.plan, self.config
        boxes = (
            (mma_sm100.ROWS, plan.width),
            (c.tile_n, plan.width),
            (c.tile_n, plan.width_v),
        )
        stages = (c.q_tiles, c.k_stages, c.v_stages)
        layouts = tuple(
            mma_sm100.smem_layout(self.dtype, *box, staged)
            for box, staged in zip(boxes, stages, strict=True)
        )
        q, k, v = (
            tma_operand(tensor, layout, box)
            for tensor, layout, box in zip((io.q, io.k, io.v), layouts, boxes, strict=True)
        )
        operands = Operands(
            q=q,
            k=k,
            v=v,
            out=io.out,
            lse=io.lse,
            counter=launch.counter,
            scratch=launch.scratch,
            layouts=layouts,
            tiles=self.walk.number(io, io.q.shape[1]),
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
        if warp == 1:
            self.memory.allocate(storage.tmem.data_ptr())
        cute.arch.sync_threads()
        memory = self.memory.at(storage.tmem.data_ptr(), x.scratch)
        group = warp // 4
        if group == 0:
            self.registers("issue", False)
            if warp == 0:
                self.load(x, storage, buffers)
            if warp == 1:
                self.multiply(x, storage, buffers, memory)
        elif group <= self.config.q_tiles:
            self.registers("softmax", True)
            self.soften(x, storage, buffers, memory)
        else:
            self.registers("correction", False)
            self.correct(x, storage, buffers, memory)
        cute.arch.sync_threads()
        if warp == 1:
            memory.free()

    def registers(self, role: str, more: bool) -> None:
        """Take the role's registers: all four warps of its warpgroups."""
        if self.native:
            less, greater = cute.arch.setmaxregister_decrease, cute.arch.setmaxregister_increase
            (greater if more else less)(self.topology.role(role).registers)

    def allocate(self, x: Operands) -> tuple[Any, Buffers]:
        """Shared memory: the barriers' storage, and the buffers as tensors."""
        stat = cute.make_layout((mma_sm100.ROWS, 2, STAT_STAGES, self.config.q_tiles))
        sizes = {
            "next": (Int32, NEXT_STAGES),
            "tmem": (Int32, 1),
            "stat": (Float32, cute.size(stat)),
        }
        words = sum(self.scratch_words)
        if words:
            sizes["scratch"] = (Int32, words * self.config.q_tiles)
        sizes |= {
            name: (self.dtype, cute.cosize(layout))
            for name, layout in zip("qkv", x.layouts, strict=True)
        }
        storage = cutlass.memory.SmemAllocator().allocate(self.topology.storage(sizes, SMALL))
        q, k, v = (
            getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
            for name, layout in zip("qkv", x.layouts, strict=True)
        )
        following = storage.next.get_tensor(cute.make_layout(NEXT_STAGES))
        scratch = storage.scratch.data_ptr() if words else None
        return storage, Buffers(q, k, v, following, storage.stat.get_tensor(stat), scratch)

    @cute.jit
    def load(self, x: Operands, storage, buffers: Buffers):
        rings = self.topology.rings_from(
            storage, next="producer", q="producer", k="producer", v="producer"
        )
        for operand in (x.q, x.k, x.v):
            cpasync.prefetch_descriptor(operand.atom)
        tile, ctas = Int32(cute.arch.block_idx()[0]), cute.arch.grid_dim()[0]
        while tile < x.tiles.count:
            place = self.walk.place(x, tile)
            spans = self.walk.spans(x.bounds, place)
            # Drawn before this tile's loads: the atomic's microsecond passes under them.
            with rings.next.fill() as following:
                target = cute.local_tile(buffers.next, (1,), (following.index,))
                tile = draw(x.tiles, x.counter, ctas, target, ())
            if spans.begin < spans.end:
                kv_head = place.head // self.plan.gqa_ratio
                load_q = loader(x.q, buffers.q, place.head, place.batch, Reuse.ONCE)
                load_k = loader(x.k, buffers.k, kv_head, place.batch, Reuse.OFTEN)
                load_v = loader(x.v, buffers.v, kv_head, place.batch, Reuse.OFTEN)
                with rings.k.fill() as first:
                    load_k(spans.last, first)
                for t in cutlass.range_constexpr(self.config.q_tiles):
                    with rings.q.fill() as q:
                        load_q(place.block * self.config.q_tiles + t, q)
                for i in cutlass.range(spans.last - spans.begin, unroll=1):
                    block = spans.last - i
                    with rings.k.fill() as k:
                        load_k(block - 1, k)
                    with rings.v.fill() as v:
                        load_v(block, v)
                with rings.v.fill() as last:
                    load_v(spans.begin, last)

    @cute.jit
    def multiply(self, x: Operands, storage, buffers: Buffers, memory):
        rings = self.topology.rings_from(
            storage,
            **dict.fromkeys(("next", "q", "k", "v", "p", "tail"), "consumer"),
            **dict.fromkeys(("s", "o"), "producer"),
        )
        product = Product(
            memory,
            self.qk.operand_a(buffers.q),
            self.qk.operand_b(buffers.k),
            self.pv.operand_b(buffers.v),
        )
        tile = Int32(cute.arch.block_idx()[0])
        while tile < x.tiles.count:
            spans = self.walk.spans(x.bounds, self.walk.place(x, tile))
            if spans.begin < spans.end:
                rings = self.products(product, rings, spans.end - spans.begin)
            with rings.next.drain() as following:
                tile = buffers.next[following.index]

    @cute.jit
    def products(self, product: Product, rings, blocks: Int32):
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
                v.release(self.pv.commit)
            if q:
                rings = self.score(product, rings, (t, q[t], k))
        if q:
            k.release(self.qk.commit)
        return rings

    @cute.jit
    def soften(self, x: Operands, storage, buffers: Buffers, memory):
        t = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        rings = self.topology.rings_from(
            storage,
            t,
            **dict.fromkeys(("next", "s"), "consumer"),
            **dict.fromkeys(("p", "tail", "stat"), "producer"),
        )
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        stat = buffers.stat[thread, None, None, t]
        column = t * self.columns["s0"].count
        mods = self.modifiers(x, buffers, t)
        tile = Int32(cute.arch.block_idx()[0])
        while tile < x.tiles.count:
            place = self.walk.place(x, tile)
            spans = self.walk.spans(x.bounds, place)
            if spans.begin < spans.end:
                first = place.block * self.config.tile_m + t * mma_sm100.ROWS
                limit = rows.limit_of(x.bounds, first + thread)
                own = modifiers.enter(mods, (place.batch, place.head), first)
                body = Sweep(x, memory, stat, softmax.Row(), limit, own, column)
                rings = self.attend(body, rings, spans)
            with rings.next.drain() as following:
                tile = buffers.next[following.index]

    def modifiers(self, x: Operands, buffers: Buffers, t: Int32) -> Mods:
        """The plan's mods for softmax warpgroup ``t``, with its part of the scratch."""
        graphs, words, scratch = (self.plan.score_mod, self.plan.mask_mod), self.scratch_words, None
        if sum(words):
            scratch = score.Scratch(buffers.scratch + t * sum(words), SCRATCH + t)
        return modifiers.of(graphs, x.extra or Extra(), x.scale, self.fragment, scratch)

    @cute.jit
    def attend(self, body: Sweep, rings, spans: KvSpans):
        """One tile that sees something: the peeled first block, the spans, the sums."""
        rings = self.block(body, rings, spans.last, (True, True))
        rings = self.sweep(body, rings, spans.middle_end, spans.last, True)
        rings = self.sweep(body, rings, spans.middle_begin, spans.middle_end, False)
        if const_expr(body.x.bounds.left is not None):
            rings = self.sweep(body, rings, spans.begin, spans.middle_begin, True)
        with rings.stat.fill() as end:
            body.stat[0, end.index] = body.state.sum[0]
            body.stat[1, end.index] = body.state.maximum[0]
        return rings

    @cute.jit
    def sweep(self, body: Sweep, rings, begin: Int32, end: Int32, edge: cutlass.Constexpr):
        """Blocks ``end - 1`` down to ``begin``."""
        for i in cutlass.range(end - begin, unroll=1):
            rings = self.block(body, rings, end - 1 - i, (edge, False))
        return rings

    def block(self, body: Sweep, rings, block: Int32, kind: tuple[bool, bool]) -> Any:
        """S of one block becomes P in its place; ``kind``: (is an edge, is the tile's first)."""
        (edge, first), memory, c = kind, body.memory, self.config
        mods = modifiers.enter_block(body.mods, block * c.tile_n)
        slot = rings.s.take()
        memory.entered()
        column = body.column + slot.index * c.tile_n
        pieces = range(0, c.tile_n, PIECE)
        s = emit.joined([memory.load(column + at, PIECE) for at in pieces])
        memory.loaded()
        slot.release()
        if mods.score is not None:
            s = rows.modified(s, mods.score.score)
        if edge:
            s = rows.hide(s, body.limit, block * c.tile_n)
        if mods.mask is not None:
            s = rows.modified(s, mods.mask.hide)
        gain = self.gain(body.x)
        factor, shift = softmax.raise_maximum(s, body.state, gain, self.pairs, first=first)
        if not first:
            with rings.stat.fill() as message:
                body.stat[0, message.index] = factor
        exponent = softmax.Exponent((gain, shift), self.pairs, (c.emulated, c.degree))
        p = []
        for ring, part in (
            (rings.p, range(0, c.early, PIECE)),
            (rings.tail, range(c.early, c.tile_n, PIECE)),
        ):
            with ring.fill():
                for at in part:
                    piece = exponent.of(s, at, PIECE)
                    memory.store(column + at // 2, rows.rounded(emit.joined(piece), self.dtype))
                    p += piece
                memory.stored()
        softmax.add_up(p, body.state, factor, first=first)
        return rings

    def gain(self, x: Operands) -> Float32:
        """c, what a score is multiplied with to become an exponent of 2."""
        graph = self.plan.score_mod
        return Float32((x.scale if graph is None else schedule(graph).lowered.gain) * LOG2_E)

    @cute.jit
    def correct(self, x: Operands, storage, buffers: Buffers, memory):
        rings = self.topology.rings_from(storage, next="consumer", stat="consumer", o="consumer")
        tile = Int32(cute.arch.block_idx()[0])
        while tile < x.tiles.count:
            place = self.walk.place(x, tile)
            spans = self.walk.spans(x.bounds, place)
            if spans.begin < spans.end:
                for _ in cutlass.range(spans.last - spans.begin, unroll=1):
                    for t in cutlass.range_constexpr(self.config.q_tiles):
                        rings = self.rescale(rings, buffers, memory, t)
                for t in cutlass.range_constexpr(self.config.q_tiles):
                    rings = self.finish((x, place), rings, buffers, memory, t)
            else:
                for t in cutlass.range_constexpr(self.config.q_tiles):
                    self.store_nothing(x, place, t)
            with rings.next.drain() as following:
                tile = buffers.next[following.index]

    def rescale(self, rings, buffers: Buffers, memory: Any, t: int) -> Any:
        """Multiply O of tile ``t`` by a block's factors, where some row of the warp needs it."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        with rings.stat[t].drain() as message:
            factor = buffers.stat[thread, 0, message.index, t]
        o = rings.o[t].take()
        memory.entered()
        self.multiply_row(memory, self.columns[f"o{t}"].first, factor)
        o.release()
        return rings

    @cute.jit
    def multiply_row(self, memory, column: cutlass.Constexpr, factor: Float32):
        """Multiply this thread's row of O by ``factor``; nothing where every one is 1."""
        if cute.arch.vote_any_sync(factor < 1.0):
            for at in cutlass.range_constexpr(0, self.plan.width_v, PIECE):
                o = memory.load(column + at, PIECE)
                memory.loaded()
                memory.store(column + at, rows.scaled(o, factor))
            memory.stored()

    def finish(self, work: tuple, rings, buffers: Buffers, memory: Any, t: int) -> Any:
        """Divide O of tile ``t`` by its sums; store it and the log-sum-exp."""
        x, place = work
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        with rings.stat[t].drain() as message:
            total, maximum = (buffers.stat[thread, i, message.index, t] for i in range(2))
        sink = x.extra.sinks[place.head] if self.plan.sinks else None
        factor, log = softmax.finish(maximum, total, self.gain(x), sink)
        o = rings.o[t].take()
        memory.entered()
        row = place.block * self.config.tile_m + t * mma_sm100.ROWS + thread
        g_out = x.out[place.batch, None, place.head, None]
        for at in range(0, self.plan.width_v, PIECE):
            piece = memory.load(self.columns[f"o{t}"].first + at, PIECE)
            memory.loaded()
            words = rows.rounded(rows.scaled(piece, factor), self.dtype)
            rows.store_piece(words, g_out, (row, x.bounds.seqlen_q), at)
        o.release()
        if x.lse is not None:
            rows.store_log(log, x.lse[place.batch, place.head, None], row, x.bounds.seqlen_q)
        return rings

    def store_nothing(self, x: Operands, place: Place, t: int) -> None:
        """The rows of tile ``t``, which see no key: zeros, and -inf or the sink."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        row = place.block * self.config.tile_m + t * mma_sm100.ROWS + thread
        words = emit.constant_of(0, emit.integer(32), PIECE // 2)
        g_out = x.out[place.batch, None, place.head, None]
        for at in range(0, self.plan.width_v, PIECE):
            rows.store_piece(words, g_out, (row, x.bounds.seqlen_q), at)
        sink = x.extra.sinks[place.head] if self.plan.sinks else -Float32.inf
        if x.lse is not None:
            rows.store_log(sink, x.lse[place.batch, place.head, None], row, x.bounds.seqlen_q)
