"""The kernel with one technique taken away, or with one that was tried and left put in.

Each entry of ``CHANGES`` replaces one function, class or constant while a kernel is compiled. All
of them compute attention: what differs is how.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from fa_cute.device import loads, lower, mma_sm90, modifiers, scheduler, score, softmax
from fa_cute.device.operand import Reuse, loader
from fa_cute.device.scheduler import BLOCK, ask, draw, tell
from fa_cute.device.scope import Scope
from fa_cute.device.topology import WARPGROUP
from fa_cute.kernels import fwd_sm90
from fa_cute.kernels.fwd_sm90 import FwdSm90


class Change(NamedTuple):
    """``name`` of ``owner`` becomes ``value``; ``about`` says what that means."""

    about: str
    owner: Any
    name: str
    value: Any

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The change, within the block."""
        kept = getattr(self.owner, self.name)
        self._put(self.value)
        try:
            yield
        finally:
            self._put(kept)

    def _put(self, value: Any) -> None:
        setattr(self.owner, self.name, value)
        for remembered in (lower.lower, lower.schedule):
            remembered.cache_clear()


class _NoOverlap(FwdSm90):
    """P V of the block before is waited for before S of this one is issued."""

    @cute.jit
    def step(self, body, rings, block, needs: cutlass.Constexpr):
        v = rings.v.take()
        self.turns.wait(body.work.warpgroup)
        self.add_values(body.x, body.f, v)
        k = rings.k.take()
        warpgroup.wait_group(0)
        s = self.issue_scores(body, k)
        self.turns.give(body.work.warpgroup)
        blocks = self.enter_block(body, body.mods, block, None)
        warpgroup.wait_group(0)
        k.release()
        self.modify(body, blocks, s, block, needs[0])
        if const_expr(self.seeks(needs[2])):
            self.sought(body, s, v)
        else:
            self.presumed(body, s, v, None)
        return rings, None


class _Sought(FwdSm90):
    """Every block's maximum is sought before its exponentials, and O rescaled to it."""

    def seeks(self, edge):
        return True


class _MaskedEverywhere(FwdSm90):
    """Every block takes every mask: spans are not told apart."""

    def modify(self, body, blocks, s, block, edge):
        super().modify(body, blocks, s, block, True)


class _ShortestFirst(FwdSm90):
    """Tiles in the order of rows, whatever their length."""

    def __init__(self, plan):
        super().__init__(plan)
        self.walk.longest_first = False


class _LateScores(FwdSm90):
    """A tile's first S is issued when the one before it is stored."""

    def __init__(self, plan):
        super().__init__(plan)
        self.opens_early = False


class _DrawnFirst(FwdSm90):
    """A CTA draws its next tile when it begins to load this one (and opens none early)."""

    def __init__(self, plan):
        super().__init__(plan)
        self.opens_early = False

    @cute.jit
    def load(self, x, rings, buffers):
        tile = Int32(cute.arch.block_idx()[0])
        while tile < x.tiles.count:
            place = self.walk.place(x, tile)
            visits = self.walk.visits(x, place)
            with rings.next.fill() as header:
                words = buffers.next[None, header.index]
                tile = draw(x.tiles, x.counter, ask(x.counter), words)
                tell(words, BLOCK, self.walk.place(x, tile))
            if visits.count > 0:
                kv_head = place.head // self.walk.ratio
                load_q = loader(x.q, buffers.q, place.head, place.batch, Reuse.ONCE)
                load_k = loader(x.k, buffers.k, kv_head, place.batch, Reuse.OFTEN)
                load_v = loader(x.v, buffers.v, kv_head, place.batch, Reuse.OFTEN)
                with rings.k.fill() as first:
                    load_k(visits.at(Int32(0)).block, first)
                with rings.q.fill() as only:
                    load_q(place.block, only)
                for i in cutlass.range(1, visits.count, unroll=1):
                    with rings.k.fill() as k:
                        load_k(visits.at(i).block, k)
                    with rings.v.fill() as v:
                        load_v(visits.at(i - 1).block, v)
                with rings.v.fill() as last:
                    load_v(visits.at(visits.count - 1).block, last)


class _PInShared(FwdSm90):
    """P V reads P from shared memory, where the second slot of Q would be: 128 x 128, D 128."""

    def __init__(self, plan):
        super().__init__(plan)
        rings = (replace(r, stages=1) if r.name == "q" else r for r in self.topology.rings)
        self.topology = replace(self.topology, rings=tuple(rings))
        self.opens_early = False

    def fragments(self, x, buffers, group):
        self.place = buffers.q, group
        return super().fragments(x, buffers, group)

    def add_values(self, x, f, v):
        (memory, group), c = self.place, self.config
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(num_matrices=4), self.dtype)
        store = cute.make_tiled_copy_C(atom, x.qk)
        shape = x.qk.partition_shape_C((c.tile_m, c.tile_n))
        layout = cute.make_rmem_tensor(shape, cutlass.Float32).layout
        own = store.get_slice(group * WARPGROUP + mma_sm90.thread_again())
        source = store.retile(cute.make_tensor(f.p.iterator, layout))
        cute.copy(store, source, own.partition_D(memory[None, None, 1]))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=self.own_barrier(group), number_of_threads=WARPGROUP)
        pv = mma_sm90.make_shared_mma(
            self.dtype, (c.consumers, 1), self.plan.width_v, a_turned=False, b_turned=True
        )
        part = pv.get_slice(group * WARPGROUP)
        p = part.make_fragment_A(part.partition_A(memory))[None, None, None, 1]
        mma_sm90.gemm(pv, f.o, p, f.v[None, None, None, self.uniform(v.index)], clear=False)


class _NotRolling(FwdSm90):
    """Every block computes all of its dear diagonals."""

    def __init__(self, plan):
        super().__init__(plan)
        graphs = (plan.score_mod, plan.mask_mod)
        self.rolling = False
        self.scratch_words = [score.scratch_words(graph, self.fragment) for graph in graphs]


def _nothing_hoisted(*graph: Any) -> Any:
    """``lower.schedule`` with no node computed before the element that needs it."""
    return replace(lower.schedule(*graph), tile=(), row=(), column=(), diagonal=())


class _OneHint:
    """``Reuse`` with one policy for all."""

    ONCE = OFTEN = Reuse.OFTEN


def _kernel(value: type) -> tuple[Any, str, type]:
    return fwd_sm90, "FwdSm90", value


def _sections(mebibytes: int) -> Change:
    about = f"heads whose K and V are {mebibytes} MB side by side"
    return Change(about, scheduler, "L2_SECTION_BYTES", mebibytes << 20)


CHANGES: dict[str, Change] = {
    "no-overlap": Change("P V waited for before the next S", *_kernel(_NoOverlap)),
    "p-shared": Change("P through shared memory", *_kernel(_PInShared)),
    "masked": Change("spans not apart: masks on every block", *_kernel(_MaskedEverywhere)),
    "row-order": Change("tiles not longest first", *_kernel(_ShortestFirst)),
    "late-scores": Change("a tile's first S after the stores before", *_kernel(_LateScores)),
    "draw-first": Change("next tile drawn before this one's loads", *_kernel(_DrawnFirst)),
    "sought": Change("every block's maximum sought, O rescaled", *_kernel(_Sought)),
    **{f"sections-{size}": _sections(size) for size in (16, 64, 1024)},
    "one-hint": Change("no L2 policies apart", loads, "Reuse", _OneHint),
    "not-hoisted": Change("mods: all at the element", score, "schedule", _nothing_hoisted),
    "not-rolling": Change("mods: all diagonals of each block", *_kernel(_NotRolling)),
    "no-lines": Change("mods: lines in two steps", Scope, "_line", lambda self, at, operands: None),
    "checked": Change("softcap: presumed, not bounded", softmax, "is_bounded", lambda plan: False),
    "not-left": Change(
        "mods: lines not left to exponents", modifiers, "line_of", lambda mods: None
    ),
    "not-folded": Change(
        "mods: constant factors not folded", lower._Rewriter, "gain_of", lambda self, at: (at, 1.0)
    ),
}
