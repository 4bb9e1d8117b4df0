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
``columns``. Blocks of keys are visited from the last to the first (``spans.kv_spans``): edges that
a bound crosses, then whole blocks, each a traced body; where the end of the keys is the only bound,
it is cut in tensor memory, and one body is all. The tiles of a CTA are a loop's turns for the MMA's
warp and the correction: traced once. Order on a score: scale, score_mod, bounds (length, causal,
window), mask_mod, softmax.

The target ``sm_100@sm_90a`` compiles this file for Hopper with the second implementation of the
verbs in ``tmem`` and ``mma_sm100``: a test device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from fa_cute.device import emit, mma_sm100, modifiers, packing, rows, score, tmem
from fa_cute.device import softmax_sm100 as softmax
from fa_cute.device.bias import Bias, RowReader
from fa_cute.device.bounds import bounds_of
from fa_cute.device.correction_sm100 import Correction, Work
from fa_cute.device.fragment import one_row
from fa_cute.device.loads_sm100 import Loads
from fa_cute.device.lower import schedule
from fa_cute.device.modifiers import Mods
from fa_cute.device.operand import TmaOperand, tma_operand
from fa_cute.device.packed import Pairs
from fa_cute.device.products_sm100 import Products
from fa_cute.device.scheduler import Place, Tiles
from fa_cute.device.softmax import LOG2_E
from fa_cute.device.topology import WARPGROUP, RingSpec, Role, Topology
from fa_cute.device.visits import Visit
from fa_cute.device.walk import Walk, side_of
from fa_cute.plan import Extra, Io, Launch, Plan
from fa_cute.spans import Bounds

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
NEXT_STAGES = 2
NOTE_STAGES = 8  # more than the blocks that loads are ahead of the softmax
STAT_STAGES = 1  # of the message to the correction, which reads it at once
SMALL = ("next", "notes", "tmem", "stat", "scratch")  # buffers of single words
SCRATCH = 1  # the first named barrier of the mods' scratch, one a softmax warpgroup; 0 is the CTA's
PIECE = 32  # columns of S moved at a time


def topology(plan: Plan) -> Topology:
    """Who works, and what each waits for."""
    c = plan.config
    tiles = c.q_tiles
    q_bytes = mma_sm100.ROWS * plan.width * 2
    k_bytes = c.tile_n * plan.width * 2 // c.ctas
    v_bytes = c.tile_n * plan.width_v * 2 // c.ctas
    headers, notes = (), ()
    if not c.pair:
        # The MMA's warp, the correction and every softmax warpgroup read the header.
        readers, why = 1 + 4 + 4 * tiles, "the tile's header"
        headers = (RingSpec("next", NEXT_STAGES, 0, "issue", "all", why, empties=readers),)
    if plan.visits != "bounds":
        why = "which block, and whether it is whole"
        notes = (RingSpec("note", NOTE_STAGES, 0, "issue", "softmax", why, empties=4 * tiles),)
    shared: dict[str, Any] = {"paired": c.pair}
    loaded: dict[str, Any] = {"empties": 1, **shared}
    unfreed: dict[str, Any] = {"freed": False, "copies": tiles, **shared}
    soft: dict[str, Any] = {"fills": 4 * c.ctas, **unfreed}
    kept: dict[str, Any] = {"empties": 4 * c.ctas, "copies": tiles, **shared}
    biases, tile = (), Bias.of(plan)
    if tile is not None:
        boxed: dict[str, Any] = {"empties": 4, "copies": tiles, "by_lanes": True}
        why = "read when S is there, freed before the maximum"
        biases = (RingSpec("bias", plan.bias_stages, tile.bytes, "issue", "softmax", why, **boxed),)
    in_order = "P V before it was issued earlier, and products execute in order"
    return Topology(
        roles=(
            Role("issue", 1, c.issue_registers, 2, "warp 0 loads by TMA, warp 1 multiplies"),
            Role("softmax", tiles, c.softmax_registers, 4, "S to P, one row a thread"),
            Role("correction", 1, c.correction_registers, 4, "rescales O, stores it"),
        ),
        rings=(
            *headers,
            *notes,
            RingSpec("q", tiles, q_bytes, "issue", "mma", "freed by the tile's last S", **loaded),
            RingSpec("k", c.k_stages, k_bytes, "issue", "mma", "freed by S", **loaded),
            RingSpec("v", c.v_stages, v_bytes, "issue", "mma", "freed by P V", **loaded),
            *biases,
            RingSpec("s", c.s_stages, 0, "mma", "softmax", in_order, **unfreed),
            RingSpec("p", c.s_stages, 0, "softmax", "mma", in_order, **soft),
            RingSpec("tail", c.s_stages, 0, "softmax", "mma", in_order, **soft),
            RingSpec(
                "stat", STAT_STAGES, 0, "softmax", "correction", "factors", fills=4, copies=tiles
            ),
            RingSpec("o", 1, 0, "mma", "correction", "rescaled or stored", **kept),
        ),
        ctas=c.ctas,
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
    """Shared memory: q (128, D, tiles), k (tile_n, D, ·), v (tile_n, Dv, ·).

    ``next``: headers (words, stages). ``notes``: the visits' words (stages of note,), or None.
    ``stat``: fp32 (row, 2, stages, tiles), a block's factor on O, at the end the sum and maximum.
    ``scratch``: 32-bit words of the mods' diagonals, one part a softmax warpgroup, or None.
    ``bias``: (128, tile_n, ·), the slots of one tile behind the other's, or None.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    next: cute.Tensor
    notes: cute.Tensor | None
    stat: cute.Tensor
    scratch: Any
    bias: cute.Tensor | None


@dataclass(frozen=True)
class Operands:
    """All that the kernel reads and writes."""

    q: TmaOperand
    k: TmaOperand
    v: TmaOperand
    bias: TmaOperand | None
    out: cute.Tensor
    lse: cute.Tensor | None
    counter: cute.Tensor
    scratch: cute.Tensor | None
    layouts: tuple
    tiles: Tiles
    rows: Int32
    bounds: Bounds
    scale: Float32
    extra: Extra | None


@dataclass(frozen=True)
class Sweep:
    """A softmax thread's share of a tile, and the registers that it updates in place."""

    x: Operands
    memory: Any
    stat: cute.Tensor
    notes: cute.Tensor | None
    state: softmax.Row
    limit: rows.Limit
    mods: Mods
    column: Int32
    bias: RowReader | None


class FwdSm100(Loads):
    """The kernel of one plan; ``__call__`` is its host entry, ``(Io, Extra, Launch, stream)``."""

    def __init__(self, plan: Plan):
        self.plan, self.config = plan, plan.config
        native = "@" not in plan.target
        self.topology, self.columns = topology(plan), columns(plan)
        self.dtype = DTYPES[plan.dtype]
        self.memory = tmem.Native if native else tmem.Hosted
        self.pairs = Pairs(native)
        self.products = Products(plan, self.dtype, self.columns, native=native)
        self.correction = Correction(plan, self.dtype, self.columns)
        self.bias = Bias.of(plan)
        self.fragment = one_row(plan.config.tile_n, WARPGROUP)
        self.walk = Walk(plan, self.fragment)
        graphs = (plan.score_mod, plan.mask_mod)
        self.scratch_words = [score.scratch_words(graph, self.fragment) for graph in graphs]

    @cute.jit
    def __call__(self, io: Io, extra: Extra, launch: Launch, stream):
        plan, c = self.plan, self.config
        bounds = bounds_of(plan, (io.q.shape[1], io.k.shape[1]), launch)
        if const_expr(c.packed):
            io = packing.packed(io, plan.gqa_ratio)
        keys, width_v = c.tile_n // c.ctas, plan.width_v // c.ctas
        boxes = ((mma_sm100.ROWS, plan.width), (keys, plan.width), (c.tile_n, width_v))
        stages = (c.q_tiles, c.k_stages, c.v_stages)
        layouts = tuple(
            mma_sm100.smem_layout(self.dtype, *box, staged)
            for box, staged in zip(boxes, stages, strict=True)
        )
        q, k, v = (
            tma_operand(tensor, layout, box, mma_sm100.load_op(pair=c.pair))
            for tensor, layout, box in zip((io.q, io.k, io.v), layouts, boxes, strict=True)
        )
        bias = None
        if const_expr(self.bias is not None):
            layouts += (self.bias.layout(plan.bias_stages * c.q_tiles),)
            bias = self.bias.operand(extra.captured[plan.bias], layouts[-1])
        operands = Operands(
            q=q,
            k=k,
            v=v,
            bias=bias,
            out=io.out,
            lse=io.lse,
            counter=launch.counter,
            scratch=launch.scratch,
            layouts=layouts,
            tiles=self.walk.number(io, bounds.seqlen_q * self.walk.group, extra),
            rows=bounds.seqlen_q * self.walk.group,
            bounds=bounds,
            scale=launch.scale,
            extra=extra,
        )
        self.kernel(operands).launch(
            grid=[cutlass.min(operands.tiles.count, launch.sm_count // c.ctas) * c.ctas, 1, 1],
            block=[self.topology.threads, 1, 1],
            cluster=[c.ctas, 1, 1] if c.pair else None,
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
            self.memory.allocate(storage.tmem.data_ptr(), pair=self.config.pair)
        self.meet()
        group = warp // 4
        if group == 0:
            self.registers("issue", False)
            if warp == 0:
                self.load(x, storage, buffers)
            if warp == 1:
                self.multiply(x, storage, buffers)
        elif group <= self.config.q_tiles:
            self.registers("softmax", True)
            self.soften(x, storage, buffers)
        else:
            self.registers("correction", False)
            self.correct(x, storage, buffers)
        self.meet()
        if warp == 1:
            self.tensor_memory(x, storage).free(pair=self.config.pair)

    def tensor_memory(self, x: Operands, storage: Any) -> Any:
        """The verbs of tensor memory. Each role asks: one address held for all of them spilled."""
        return self.memory.at(storage.tmem.data_ptr(), x.scratch)

    def meet(self) -> None:
        """All threads wait for each other: of a pair both CTAs', which share barriers."""
        if self.config.pair:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def rank(self) -> Int32 | int:
        """Which CTA of a pair this is; the first multiplies for both."""
        return cute.arch.block_idx_in_cluster() if self.config.pair else 0

    def multiplies(self, count: Int32) -> Any:
        """Whether this CTA's warp issues the products of a tile of ``count`` blocks."""
        return (count > 0) & (self.rank() == 0) if self.config.pair else count > 0

    def first_tile(self) -> Int32:
        """The tile that this CTA, or this pair, begins with."""
        return Int32(cute.arch.block_idx()[0]) // self.config.ctas

    def step(self) -> Int32:
        """CTAs, or pairs, of the launch. Pairs take tiles in a fixed order: none is drawn."""
        return cute.arch.grid_dim()[0] // self.config.ctas

    def on(self, side: str, *names: str) -> dict[str, str]:
        """Those of the rings ``names`` that this plan has, each seen from ``side``."""
        return {ring.name: side for ring in self.topology.rings if ring.name in names}

    def number(self, place: Place, t: int | Int32) -> Int32:
        """The number of this CTA's tile ``t`` of 128 rows among those of the head."""
        c = self.config
        return (place.block * c.ctas + self.rank()) * c.q_tiles + t

    def registers(self, role: str, more: bool) -> None:
        """Take the role's registers: all four warps of its warpgroups."""
        less, greater = cute.arch.setmaxregister_decrease, cute.arch.setmaxregister_increase
        (greater if more else less)(self.topology.role(role).registers)

    def allocate(self, x: Operands) -> tuple[Any, Buffers]:
        """Shared memory: the barriers' storage, and the buffers as tensors."""
        # Beside its row of the CTA a thread holds no address of messages: that one spilled.
        shape = (mma_sm100.ROWS, 2, STAT_STAGES, self.config.q_tiles)
        stat = cute.make_ordered_layout(shape, order=(0, 2, 3, 1))
        header = cute.make_layout((self.walk.header, NEXT_STAGES))
        sizes = {
            "next": (Int32, cute.size(header)),
            "notes": (Int32, NOTE_STAGES),
            "tmem": (Int32, 1),
            "stat": (Float32, cute.size(stat)),
        }
        words = sum(self.scratch_words)
        if words:
            sizes["scratch"] = (Int32, words * self.config.q_tiles)
        names = ("q", "k", "v") if self.bias is None else ("q", "k", "v", "bias")
        for name, layout in zip(names, x.layouts, strict=True):
            dtype = self.bias.dtype if name == "bias" else self.dtype
            sizes[name] = (dtype, cute.cosize(layout))
        storage = cutlass.memory.SmemAllocator().allocate(self.topology.storage(sizes, SMALL))
        q, k, v, *bias = (
            getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
            for name, layout in zip(names, x.layouts, strict=True)
        )
        following, notes = storage.next.get_tensor(header), None
        if self.walk.noted:
            notes = storage.notes.get_tensor(cute.make_layout(NOTE_STAGES))
        scratch = storage.scratch.data_ptr() if words else None
        messages = storage.stat.get_tensor(stat)
        boxes = bias[0] if bias else None
        return storage, Buffers(q, k, v, following, notes, messages, scratch, boxes)

    def enter(self, x: Operands, rings, buffers: Buffers, tile: Int32) -> tuple:
        """(rings, place, walk, tile after it) of ``tile``; ``walk`` as ``Walk.entered`` has it."""
        if self.config.pair:
            words = [tile + self.step()]
        else:
            with rings.next.drain() as header:
                words = [buffers.next[i, header.index] for i in range(self.walk.header)]
        return rings, *self.walk.entered(x, tile, words[1:]), words[0]

    @cute.jit
    def multiply(self, x: Operands, storage, buffers: Buffers):
        rings = self.topology.rings_from(
            storage,
            **self.on("consumer", "next", "q", "k", "v", "p", "tail"),
            **self.on("producer", "s", "o"),
        )
        product = self.products.of(self.tensor_memory(x, storage), buffers)
        tile = self.first_tile()
        while tile < x.tiles.count:
            rings, _, walk, tile = self.enter(x, rings, buffers, tile)
            if self.multiplies(walk.count):
                rings = self.products.tile(product, rings, walk.count)

    @cute.jit
    def soften(self, x: Operands, storage, buffers: Buffers):
        t = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        rings = self.topology.rings_from(
            storage,
            t,
            **self.on("consumer", "next", "s", "note", "bias"),
            **self.on("producer", "p", "tail", "stat"),
        )
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        stat = buffers.stat[thread, None, None, t]
        memory, column = self.tensor_memory(x, storage), tmem.column_of(self.columns, "s", t)
        mods, bias = self.modifiers(x, buffers, t), None
        if const_expr(self.bias is not None):
            bias = self.bias.row_reader(self.boxes_of(buffers, t), thread)
        tile = self.first_tile()
        while tile < x.tiles.count:
            rings, place, walk, tile = self.enter(x, rings, buffers, tile)
            if walk.count > 0:
                first = self.number(place, t) * mma_sm100.ROWS
                limit = rows.limit_of(x.bounds, first + thread, self.walk.group)
                own = modifiers.enter(mods, (place.batch, place.head), first)
                state = softmax.Row()
                body = Sweep(x, memory, stat, buffers.notes, state, limit, own, column, bias)
                rings = self.attend(body, rings, walk)

    def modifiers(self, x: Operands, buffers: Buffers, t: Int32) -> Mods:
        """The plan's mods for softmax warpgroup ``t``, with its part of the scratch."""
        graphs, words, scratch = (self.plan.score_mod, self.plan.mask_mod), self.scratch_words, None
        if sum(words):
            scratch = score.Scratch(buffers.scratch + t * sum(words), SCRATCH + t)
        return modifiers.of(graphs, x.extra or Extra(), x.scale, self.fragment, scratch)

    @cute.jit
    def attend(self, body: Sweep, rings, walk: Any):
        """One tile that sees something: its blocks, then the sums."""
        spans = walk.spans
        if const_expr(self.walk.noted):
            for _ in cutlass.range(walk.count, unroll=1):
                rings = self.block(body, rings, None, not self.masks_alone)
        elif const_expr(body.x.bounds.left is not None):
            for side in cutlass.range(2, unroll=1):
                begin, end, whole = side_of(spans, side)
                rings = self.sweep(body, rings, begin, end, True)
                rings = self.sweep(body, rings, whole, spans.middle_end, False)
        elif const_expr(self.cuts):
            rings = self.sweep(body, rings, spans.begin, spans.end, False)
        else:
            rings = self.sweep(body, rings, spans.middle_end, spans.end, True)
            rings = self.sweep(body, rings, spans.middle_begin, spans.middle_end, False)
        with rings.stat.fill() as end:
            body.stat[0, end.index] = body.state.sum[0]
            body.stat[1, end.index] = body.state.maximum[0]
        return rings

    @cute.jit
    def sweep(self, body: Sweep, rings, begin: Int32, end: Int32, edge: cutlass.Constexpr):
        """Blocks ``end - 1`` down to ``begin``."""
        for i in cutlass.range(end - begin, unroll=1):
            rings = self.block(body, rings, end - 1 - i, edge)
        return rings

    def block(self, body: Sweep, rings, block: Int32 | None, edge: bool) -> Any:
        """S of a block (None: a note's) becomes P there; an ``edge`` takes every bound."""
        memory, c, visit = body.memory, self.config, None
        if block is None:
            with rings.note.drain() as note:
                visit = Visit.of(body.notes[note.index])
            block = visit.block
        mods = body.mods._replace(mask=None) if self.masks_alone else body.mods
        box = None if self.bias is None else rings.bias.take()
        loads = None if box is None else body.bias.values(box.index)
        mods = modifiers.enter_block(mods, block * c.tile_n, loads)
        slot = rings.s.take()
        memory.entered()
        column = body.column + slot.index * c.tile_n
        if self.masks_alone and visit is None:
            self.hide(body, column, block, bounds=edge)
        elif self.masks_alone:
            self.restrict(body, column, visit)
        if self.cuts:
            self.cut(body, column, block)
        s = self.pieces(memory, column, range(0, c.tile_n, PIECE))
        memory.loaded()
        slot.release()
        bounded = edge and not self.masks_alone
        if mods.score is not None:
            s = self.split(rows.modified(emit.joined(s), mods.score.score))
        if box is not None:
            box.release()
        if bounded:
            s = self.split(rows.hide(emit.joined(s), body.limit, block * c.tile_n))
        if mods.mask is not None:
            s = self.split(rows.modified(emit.joined(s), mods.mask.hide))
        if bounded or mods.score is not None:
            for at in range(c.early, c.tile_n, PIECE):
                memory.store(column + at, s[at // PIECE])
            memory.stored()
        self.hand_over(body, rings, s, column)
        return rings

    def hand_over(self, body: Sweep, rings, s: list, column: Int32) -> None:
        """P = exp2(c s + shift) of the row ``s`` takes its place, the early columns first.

        The late columns are read once more when the early ones of P are there: ptxas would compute
        all exponentials before it stores any, 27 instructions before the end. It also leaves their
        registers to P: ALiBi spilled up to 28 bytes.
        """
        memory, c, gain = body.memory, self.config, self.gain(body.x)
        factor, shift = softmax.raise_maximum(s, body.state, gain, self.pairs)
        with rings.stat.fill() as message:
            body.stat[0, message.index] = factor
        exponent = softmax.Exponent((gain, shift), self.pairs, (c.emulated, c.degree))
        early, late = range(0, c.early, PIECE), range(c.early, c.tile_n, PIECE)
        with rings.p.fill():
            p = self.store(memory, column, (exponent, s), early)
            again = self.pieces(memory, column, late)
            memory.stored()
        memory.loaded()
        with rings.tail.fill():
            p += self.store(memory, column, (exponent, s[: len(early)] + again), late)
            memory.stored()
        softmax.add_up(p, body.state, factor)

    def store(self, memory: Any, column: Int32, row: tuple, columns: range) -> list:
        """Store P of those columns of a ``row`` (exponent, pieces of s); its pairs."""
        exponent, s = row
        p = []
        for at in columns:
            piece = exponent.of(s, at, PIECE)
            if at >= 2 * PIECE and at > columns.start:
                memory.stored()  # long done: the words of earlier pieces may go
            memory.store(column + at // 2, rows.rounded(emit.joined(piece), self.dtype))
            p += piece
        return p

    def pieces(self, memory: Any, column: Int32, columns: range) -> list:
        """Those columns of this thread's row in tensor memory; valid once ``loaded``."""
        return [memory.load(column + at, PIECE) for at in columns]

    def split(self, s: Any) -> list:
        """The row ``s`` in the pieces that it was loaded in."""
        return [emit.part(s, at, PIECE) for at in range(0, self.config.tile_n, PIECE)]

    @property
    def masks_alone(self) -> bool:
        """Whether a mask_mod works in tensor memory: not after a score_mod, which does not."""
        return self.plan.mask_mod is not None and self.plan.score_mod is None

    @property
    def cuts(self) -> bool:
        """Whether the end of the keys is cut in tensor memory, without a body for edges."""
        return self.plan.score_mod is None and (self.walk.noted or not self.walk.cut)

    def cut(self, body: Sweep, column: Int32, block: Int32) -> None:
        """The bounds, where the block passes the end of the keys: only a tile's first can."""
        with emit.where((block + 1) * self.config.tile_n > body.x.bounds.seqlen_k):
            self.hide(body, column, block, mask=False, bounds=True)

    def restrict(self, body: Sweep, column: Int32, visit: Visit) -> None:
        """``hide``, and the bounds, unless the block is whole."""
        with emit.where(visit.whole == 0):
            self.hide(body, column, visit.block, bounds=self.walk.cut)

    def hide(
        self, body: Sweep, column: Int32, block: Int32, *, bounds: bool, mask: bool = True
    ) -> None:
        """The ``mask`` and the ``bounds`` on the row of S in tensor memory, a piece at a time.

        Beside a row in registers a mask spills: up to 232 bytes at head dim 128.
        """
        first = block * self.config.tile_n
        mod = modifiers.enter_block(body.mods._replace(score=None), first).mask

        def hidden(s: Any, at: int) -> Any:
            if bounds:
                s = rows.hide(s, body.limit, first + at)
            if not mask:
                return s
            return rows.modified(s, partial(mod.hide, columns=range(at, at + PIECE)))

        rows.rewrite(body.memory, column, range(0, self.config.tile_n, PIECE), hidden)

    def gain(self, x: Operands) -> Float32:
        """c, what a score is multiplied with to become an exponent of 2."""
        graph = self.plan.score_mod
        return Float32((x.scale if graph is None else schedule(graph).lowered.gain) * LOG2_E)

    @cute.jit
    def correct(self, x: Operands, storage, buffers: Buffers):
        rings = self.topology.rings_from(storage, **self.on("consumer", "next", "stat", "o"))
        memory = self.tensor_memory(x, storage)
        tile = self.first_tile()
        while tile < x.tiles.count:
            rings, place, walk, tile = self.enter(x, rings, buffers, tile)
            work = self.work(x, place, buffers, memory)
            if const_expr(self.walk.sees_some):
                rings = self.correction.tile(work, rings, walk.count)
            elif walk.count > 0:
                rings = self.correction.tile(work, rings, walk.count)
            else:
                self.correction.nothing(work)

    def work(self, x: Operands, place: Place, buffers: Buffers, memory: Any) -> Work:
        """The correction's part in the tile at ``place``."""
        row = self.number(place, 0) * mma_sm100.ROWS + cute.arch.thread_idx()[0] % WARPGROUP
        return Work(
            memory=memory,
            stat=buffers.stat,
            out=x.out[place.batch, None, place.head, None],
            lse=None if x.lse is None else x.lse[place.batch, place.head, None],
            row=row,
            end=x.rows,
            sink=x.extra.sinks[place.head] if self.plan.sinks else None,
            gain=self.gain(x),
        )
