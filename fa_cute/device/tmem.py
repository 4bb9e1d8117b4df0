"""Tensor memory: named column ranges, and the verbs that move a row of it.

An SM of sm_100 has 128 lanes of 512 columns of 32 bits. A warp reaches the 32 lanes of its own
quarter, warp % 4, so that with 128 rows a tile each thread owns one row. Loads and stores are
asynchronous: ``loaded`` and ``stored`` wait for those of this warp and order them before the
arrival that follows; ``entered`` orders what follows after a wait on a barrier.

``Hosted`` is the second implementation of the verbs, for a GPU without tensor memory: 128 x 512
words of global memory a CTA, lane fastest, so that a warp's access is one line of 128 bytes. Its
accesses are complete when they are issued, and barriers order them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm, vector
from cutlass._mlir.extras import types

from fa_cute.device import emit

LANES = 128
COLUMNS = 512  # of an SM; a CTA that allocates all of them is alone on its SM
LANE_BIT = 16  # an address is lane << 16 | column
QUARTER = 32
Vector = Any  # of 32-bit words, of the compiler's intermediate form
_TENSOR = 6  # the address space


class Columns(NamedTuple):
    """A named range of columns."""

    name: str
    first: int
    count: int

    def borrow_as(self, name: str, count: int) -> Columns:
        """The first ``count`` columns under another ``name``: an alias, on purpose."""
        assert count <= self.count, (
            f"{name} needs {count} columns; {self.name}, which it aliases, has {self.count}"
        )
        return Columns(name, self.first, count)


def lay_out(**counts: int) -> dict[str, Columns]:
    """Ranges of that many columns, side by side in the order given; at most 512 together."""
    ranges, first = {}, 0
    for name, count in counts.items():
        ranges[name] = Columns(name, first, count)
        first += count
    terms = " + ".join(f"{name} {count}" for name, count in counts.items())
    assert first <= COLUMNS, f"tensor memory needs {terms} = {first} columns; {COLUMNS} exist"
    return ranges


def column_of(ranges: dict[str, Columns], kind: str, number: Int32 | int) -> Int32 | int:
    """The first column of ``kind``'s range of that number, of ranges equally far apart."""
    first = ranges[f"{kind}0"].first
    following = ranges.get(f"{kind}1", ranges[f"{kind}0"]).first
    return first + number * (following - first)


@dataclass(frozen=True)
class Native:
    """The tensor memory of sm_100: its first column, and that in this warp's quarter."""

    base: Int32
    address: Int32

    @staticmethod
    def allocate(holder: Any, *, pair: bool) -> None:
        """One warp takes all columns; their address is left in shared memory at ``holder``.

        Of a pair of CTAs, one warp of each: the two are one allocation.
        """
        cute.arch.alloc_tmem(COLUMNS, holder, pair)
        cute.arch.relinquish_tmem_alloc_permit(pair)

    @staticmethod
    def at(holder: Any, scratch: None) -> Native:
        """What ``allocate`` took, after a barrier of the CTA."""
        base = cute.make_tensor(holder, cute.make_layout(1))[0]
        return Native(base, base + _quarter() * (QUARTER << LANE_BIT))

    def free(self, *, pair: bool) -> None:
        """Give the columns back: the warp that took them, when no other one uses them."""
        cute.arch.dealloc_tmem(self.pointer(Float32, 0), COLUMNS, pair)

    def pointer(self, dtype: type, column: Int32 | int) -> Any:
        """The operand of an MMA at ``column``: lane 0, elements of ``dtype``."""
        space = cute.AddressSpace.tmem
        return cute.make_ptr(dtype, self.base + column, space, assumed_align=16)

    def load(self, column: Int32 | int, count: int) -> Vector:
        """``count`` words of this thread's row as fp32; valid after ``loaded``."""
        words = ir.VectorType.get([count], emit.integer(32))
        found = nvvm.tcgen05_ld(words, _ROW, self._row(column))
        return vector.bitcast(emit.as_type(types.f32(), found), found)

    def store(self, column: Int32 | int, words: Vector) -> None:
        """Write 32-bit ``words`` to this thread's row from ``column`` on; done after ``stored``."""
        words = vector.bitcast(emit.as_type(emit.integer(32), words), words)
        nvvm.tcgen05_st(_ROW, self._row(column), words)

    def _row(self, column: Int32 | int) -> Any:
        pointer = llvm.PointerType.get(_TENSOR)
        return llvm.inttoptr(pointer, Int32(self.address + column).ir_value())

    def loaded(self) -> None:
        """This warp's loads are done: their words may be used, their columns overwritten."""
        nvvm.tcgen05_wait(nvvm.Tcgen05WaitKind.LOAD)
        nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)

    def stored(self) -> None:
        """This warp's stores are done, and an arrival that follows publishes them."""
        nvvm.tcgen05_wait(nvvm.Tcgen05WaitKind.STORE)
        nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)

    def entered(self) -> None:
        """What follows comes after what the barrier that was waited for announced."""
        nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)


_ROW = nvvm.Tcgen05LdStShape.SHAPE_32X32B


@dataclass(frozen=True)
class Hosted:
    """Tensor memory in global memory: ``words`` (128 lanes, 512 columns) of this CTA, fp32."""

    words: cute.Tensor
    lane: Int32

    @staticmethod
    def allocate(holder: Any, *, pair: bool) -> None:
        """Nothing to take; no pairs."""
        assert not pair, "pairs of CTAs are not hosted"

    @staticmethod
    def at(holder: Any, scratch: cute.Tensor) -> Hosted:
        """This CTA's part of ``scratch`` (words,), which holds 65,536 fp32 a CTA."""
        first = cutlass.Int64(cute.arch.block_idx()[0]) * (LANES * COLUMNS)
        layout = cute.make_layout((LANES, COLUMNS))
        words = cute.make_tensor(scratch.iterator + first, layout)
        return Hosted(words, _quarter() * QUARTER + cute.arch.lane_idx())

    def free(self, *, pair: bool) -> None:
        """Nothing was taken."""

    def load(self, column: Int32 | int, count: int) -> Vector:
        """As ``Native.load``; valid at once."""
        return self._row(column, count).load().ir_value()

    def store(self, column: Int32 | int, words: Vector) -> None:
        """As ``Native.store``; done at once."""
        words = vector.bitcast(emit.as_type(types.f32(), words), words)
        row = self._row(column, emit.lanes_of(words))
        row.store(cute.TensorSSA(words, row.shape, Float32))

    def _row(self, column: Int32 | int, count: int) -> cute.Tensor:
        first = self.words.iterator + (self.lane + column * LANES)
        return cute.make_tensor(first, cute.make_layout(count, stride=LANES))

    def loaded(self) -> None:
        """Loads are done when they are issued."""

    def stored(self) -> None:
        """Stores are done when they are issued."""

    def entered(self) -> None:
        """The barrier's wait has ordered everything."""


def _quarter() -> Int32:
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
