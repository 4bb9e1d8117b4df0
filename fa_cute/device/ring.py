"""Rings and turns: the only ways in which warps of a CTA wait for each other.

A **ring** is a staged buffer between a producer warp and consumer warps, two mbarriers a stage:

    producer   wait empty[i] -> expect bytes on full[i] -> TMA copies complete on full[i]
               or, where the warp itself writes:  write -> arrive on full[i]
    consumer   wait full[i]  -> read -> every consumer warp arrives on empty[i]

A consumer warp's arrival speaks only for the reads of that warp: a wgmma reads its B operand once a
warp, so all warps of every consumer warpgroup arrive.

An MMA that reads tensor and shared memory on its own, and is done later, arrives by its commit:
``fill`` and ``release`` take it as ``arrive``. A ring whose table says ``freed=False`` has no empty
barriers: something else orders the next filling after the last reading.

A ring of a **pair** of CTAs (``paired``) has one producer's or one consumer's warp, in the first of
them: the one that multiplies for both. What threads and copies of both CTAs do is counted at the
first one's barriers; commits arrive at both's, where everyone waits at his own.

A **turn** orders warpgroups in strict rotation on named barriers (ping-pong).

The DSL drops, silently, an advance that its dynamic loop does not carry. So a ring knows the region
of code it was made in and refuses to advance elsewhere, and each slot must be released once: both
are errors while tracing, and cost no instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects.nvvm import MemScopeKind

from fa_cute.device import emit

_REGIONS = ("scf.for", "scf.while", "scf.if")


def region() -> Any:
    """The dynamic loop or branch being traced, or None at the top of a function. Emits nothing."""
    block = ir.InsertionPoint.current.block
    while block is not None:
        owner = getattr(block.owner, "operation", block.owner)
        if owner.name in _REGIONS:
            return owner
        if owner.name.endswith((".func", ".module")):
            return None
        block = owner.block
    return None


class Slot:
    """One stage of a ring, held: its ``index``, the ``barrier`` that a TMA copy completes on."""

    def __init__(
        self,
        index: Int32,
        barrier: Any,
        empty: Any,
        *,
        read_by_lanes: bool = False,
        refilled_by_tma: bool = False,
        paired: bool = False,
    ):
        self.index, self.barrier = index, barrier
        self._empty, self._read_by_lanes, self.released = empty, read_by_lanes, False
        self._refilled_by_tma, self._paired = refilled_by_tma, paired

    def release(self, arrive: Callable[[Any], None] | None = None) -> None:
        """This warp has read the slot: one lane arrives for it, or ``arrive`` does.

        Reads by wgmma are over when its wait is. Reads by the lanes themselves are ordered here:
        ptxas lets their loads be under way when the warp arrives, so where TMA writes next (by the
        async proxy) a fence holds the arrival back until they are done.
        """
        assert not self.released, "a slot was released twice; each is released exactly once"
        self.released = True
        if self._empty is None:
            return
        if arrive is not None:
            arrive(self._empty)
            return
        if self._read_by_lanes:
            if self._refilled_by_tma:
                cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
        with cute.arch.elect_one():
            _arrive(self._empty, self._paired)


class Ring:
    """One side of a staged buffer; ``spec`` is its row in the kernel's table.

    ``full``/``empty`` point to the first of ``spec.stages`` mbarriers each. ``index`` and ``phase``
    are what a dynamic loop carries. The producer starts a phase ahead: an empty ring is not waited
    for.
    """

    def __init__(
        self, spec: Any, barriers: tuple[Any, Any], state: tuple[Int32, Int32], slots: list
    ):
        self.spec, self.barriers = spec, barriers
        self.index, self.phase = state
        self.slots, self.home = slots, region()

    @staticmethod
    def producer(spec: Any, barriers: tuple[Any, Any]) -> Ring:
        """The producer's side, at its start."""
        return Ring(spec, barriers, (Int32(0), Int32(1)), [])

    @staticmethod
    def consumer(spec: Any, barriers: tuple[Any, Any]) -> Ring:
        """A consumer's side, at its start."""
        return Ring(spec, barriers, (Int32(0), Int32(0)), [])

    def by_threads(self) -> Ring:
        """The producer's side of another warp, which writes what TMA does not."""
        spec = replace(self.spec, tx_bytes=0)
        return Ring(spec, self.barriers, (self.index, self.phase), self.slots)

    def beside(self, other: Ring) -> Ring:
        """This ring where ``other`` is, which advances for both: taken once for each of its slots.

        Two rings that are always taken together then hold one state in registers.
        """
        assert self.spec.stages == other.spec.stages
        return Ring(self.spec, self.barriers, (other.index, other.phase), self.slots)

    def of(self, number: Int32 | int) -> Ring:
        """Of rings of one kind, whose first this is, that of ``number``, in this one's state.

        For a loop over them in which each takes one slot; this one is ``passed`` behind it.
        """
        full, empty = (first + number * (2 * self.spec.stages) for first in self.barriers)
        return Ring(self.spec, (full, empty), (self.index, self.phase), self.slots)

    def passed(self) -> None:
        """Each ring of the kind took a slot through ``of``."""
        self._advance()

    def _at(self, barriers: Any) -> Any:
        return barriers if self.spec.stages == 1 else barriers + self.index

    def made_uniform(self) -> None:
        """Tell ptxas that the state is the same in all of a warp; it forgets that in long loops.

        wgmma's descriptors then stay in uniform registers: d64, 366 to 329 instructions a block.
        """
        self.index = cute.arch.make_warp_uniform(self.index)
        self.phase = cute.arch.make_warp_uniform(self.phase)

    def _advance(self) -> None:
        here = region()
        assert (here is None) == (self.home is None) and (here is None or here == self.home), (
            f"ring {self.spec.name!r} advances in a loop or branch that does not carry it; "
            "pass the ring into the loop's own body, or return it and rebind it"
        )
        if self.spec.stages == 1:
            self.phase = self.phase ^ 1
            return
        following = self.index + 1
        wraps = following == self.spec.stages
        self.phase = self.phase ^ Int32(wraps)
        self.index = cutlass.select_(wraps, Int32(0), following)

    @contextmanager
    def fill(
        self,
        note: tuple[cute.Tensor, Int32] | None = None,
        *,
        arrive: Callable[[Any], None] | None = None,
    ) -> Iterator[Slot]:
        """Producer: wait until the next slot is free and hand it out.

        Where TMA fills it, its bytes are announced first, and the copies made inside complete on
        ``slot.barrier``. ``note``: words in shared memory, one a stage, and the word to leave there
        with the slot. Where one warp writes a slot, lane 0 must do so: it arrives for the writes
        when the block ends. Where several do, any lane may: one lane of each arrives. ``arrive``
        does so instead, for what the warp has issued and not awaited.
        """
        full, empty = (self._at(barriers) for barriers in self.barriers)
        if self.spec.freed:
            cute.arch.mbarrier_wait(empty, self.phase)
        if self.spec.tx_bytes:
            if self.spec.paired:
                _expect_both(full, 2 * self.spec.tx_bytes)
            else:
                with cute.arch.elect_one():
                    if note is not None:
                        note[0][self.index] = note[1]  # this thread's own arrival releases it
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.spec.tx_bytes)
        yield Slot(self.index, full, None)
        if arrive is not None:
            arrive(full)
        elif not self.spec.tx_bytes:
            if self.spec.fills > 1:
                cute.arch.sync_warp()
            _arrive_from_writer(full, self.spec.paired)
        self._advance()

    def take(self, *, awaited: bool = False) -> Slot:
        """Consumer: wait for the next slot, unless it was ``awaited``; release it exactly once."""
        full, empty = self._at(self.barriers[0]), None
        if not awaited:
            cute.arch.mbarrier_wait(full, self.phase)
        by_lanes = self.spec.noted or self.spec.by_lanes or not self.spec.tx_bytes
        if self.spec.freed:
            empty = self._at(self.barriers[1])
        slot = Slot(
            self.index,
            full,
            empty,
            read_by_lanes=by_lanes,
            refilled_by_tma=self.spec.by_lanes,
            paired=self.spec.paired,
        )
        self.slots.append(slot)
        self._advance()
        return slot

    def filled(self) -> Boolean:
        """Consumer: whether the next slot is filled by now; neither waits for it nor takes it."""
        return cute.arch.mbarrier_test_wait(self._at(self.barriers[0]), self.phase)

    def await_next(self, there: Any, filled: Any = None) -> Int32:
        """Consumer: the next slot's index, after waiting for it (if it is ``there``), not taken.

        ``filled``: the answer that was had before, if it was asked for.
        """
        with emit.where(there if filled is None else there & ~filled):
            cute.arch.mbarrier_wait(self._at(self.barriers[0]), self.phase)
        return self.index

    @contextmanager
    def drain(self) -> Iterator[Slot]:
        """Consumer: take the next slot, and release it at the end of the block."""
        slot = self.take()
        yield slot
        slot.release()

    def check(self) -> None:
        """Every slot that was taken while tracing was released."""
        held = sum(not slot.released for slot in self.slots)
        assert not held, (
            f"ring {self.spec.name!r}: {held} of {len(self.slots)} slots never released"
        )

    def __extract_mlir_values__(self) -> list:
        return [self.index.ir_value(), self.phase.ir_value()]

    def __new_from_mlir_values__(self, values: list) -> Ring:
        state = Int32(values[0]), Int32(values[1])
        return Ring(self.spec, self.barriers, state, self.slots)


class Turns:
    """Strict rotation of ``count`` warpgroups; ``first`` is the first of ``count`` named barriers.

    Barrier i holds the turn of warpgroup i: 128 threads wait there, 128 arrive from the one before.
    With one warpgroup there is nothing to order, and no instruction.
    """

    THREADS = 256

    def __init__(self, first: int, count: int):
        self.first, self.count = first, count

    def open(self, warpgroup: Int32) -> None:
        """The last warpgroup arrives once for the first: somebody has to start."""
        if self.count > 1:
            _open_turns(warpgroup, self)

    def wait(self, warpgroup: Int32) -> None:
        """Wait for this warpgroup's turn."""
        if self.count > 1:
            cute.arch.barrier(barrier_id=self.first + warpgroup, number_of_threads=self.THREADS)

    def give(self, warpgroup: Int32) -> None:
        """Pass the turn to the next warpgroup."""
        if self.count > 1:
            following = warpgroup + 1
            following = cutlass.select_(following == self.count, Int32(0), following)
            cute.arch.barrier_arrive(
                barrier_id=self.first + following, number_of_threads=self.THREADS
            )


def _arrive(barrier: Any, paired: bool) -> None:
    """One arrival; of a pair at the first CTA's barrier, ordered for all of the cluster."""
    if paired:
        cute.arch.mbarrier_arrive(barrier, 0, scope=MemScopeKind.CLUSTER)
    else:
        cute.arch.mbarrier_arrive(barrier)


def _arrive_from_writer(full: Any, paired: bool) -> None:
    with emit.where(cute.arch.lane_idx() == 0):
        _arrive(full, paired)


def _expect_both(full: Any, count: int) -> None:
    """The first CTA announces what the copies of both bring."""
    with emit.where(cute.arch.block_idx_in_cluster() == 0), cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, count)


def _open_turns(warpgroup: Int32, turns: Turns) -> None:
    with emit.where(warpgroup == turns.count - 1):
        cute.arch.barrier_arrive(barrier_id=turns.first, number_of_threads=turns.THREADS)
