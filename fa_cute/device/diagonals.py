"""Sums along the diagonals q - kv of a warp's part of a transposed wgmma fragment.

A warp has 16 keys by ``width`` queries: width + 15 diagonals. A thread's two rows lie on diagonals
of its own, the lower row's two columns on (``Fragment.shift``): it adds those pairs up, and the
four threads of a row then have width + 8 diagonals in a row, each once. They write them to shared
memory, 8 rows of them a warp, and each lane adds up every 32nd diagonal: in one order, always.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir

from fa_cute.device import emit
from fa_cute.device.fragment import Fragment

WARP, QUAD, WARPS = 32, 4, 4
KEYS = 16  # rows of a warp: 8 that lanes differ in, twice
LANE_ROWS = WARP // QUAD
LEAD = 8  # columns before the first, on whose diagonals a thread's lower row begins


def words(fragment: Fragment) -> int:
    """32-bit words of shared memory for a warpgroup."""
    return WARPS * LANE_ROWS * (fragment.width + LEAD)


def offsets(fragment: Fragment) -> tuple[int, ...]:
    """A lane's diagonals, relative to the lane and the warp's lowest."""
    return tuple(range(0, fragment.width + KEYS - 1, WARP))


def lowest(thread: Int32) -> Int32:
    """The warp's lowest q - kv, relative to the fragment's first query less its first key."""
    return 1 - KEYS - KEYS * (thread // WARP)


def written(fragment: Fragment, thread: Int32, slot: int) -> Int32:
    """Where of the warp's words ``thread`` writes the sum of the diagonal of column ``slot``."""
    row = thread % WARP // QUAD * (fragment.width + LEAD)
    return row + fragment.first_column(thread) + LEAD + fragment.column(slot)


def read(thread: Int32, offset: int, row: int) -> Int32:
    """Where in ``row`` of the warp's words the lane's diagonal is; outside if it has none."""
    return thread % WARP + (offset + row + 1 - LANE_ROWS)


def sums(
    fragment: Fragment, thread: Int32, scratch: Any, rows: list[list[ir.Value]]
) -> list[Float32]:
    """The sums on the diagonals ``lowest + lane + offset``; ``rows`` hold the thread's values.

    ``scratch`` points to the warpgroup's ``words``. Only the warp is synchronised.
    """
    span = fragment.width + LEAD
    size = LANE_ROWS * span
    start = cute.recast_ptr(scratch, dtype=Float32) + thread // WARP * size
    held = cute.make_tensor(start, cute.make_layout(size))
    cute.arch.sync_warp()  # a lane may still read the block before
    for slot in range(-fragment.lead, fragment.columns):
        columns = (slot + fragment.shift * i for i in range(len(rows)))
        pairs = zip(rows, columns, strict=True)
        values = [row[column] for row, column in pairs if 0 <= column < fragment.columns]
        total = values[0] if len(values) == 1 else emit.add(*values)
        held[written(fragment, thread, slot)] = Float32(total)
    cute.arch.sync_warp()
    found = []
    for offset in offsets(fragment):
        total = Float32(0.0)
        for row in range(LANE_ROWS):
            at = read(thread, offset, row)
            inside = cutlass.min(cutlass.max(at, Int32(0)), Int32(span - 1))
            value = held[inside + row * span]
            total = total + cutlass.select_(at == inside, value, Float32(0.0))
        found.append(total)
    return found


def runs(place: ir.Value, total: Float32, lane: Int32) -> tuple[Float32, ir.Value]:
    """(sum, whether the lane begins a run) of the lanes in a row that have one address ``place``.

    The sum is the run's where it begins.
    """
    halves = emit.halves(place)
    after = [cute.arch.shuffle_sync_down(half, 1) for half in halves]
    differs = (halves[0] != after[0]) | (halves[1] != after[1]) | (lane == WARP - 1)
    ended = cutlass.select_(differs, Int32(1), Int32(0))
    before = cute.arch.shuffle_sync_up(ended, 1)
    begins = (before == 1) | (lane == 0)
    for distance in (1, 2, 4, 8, 16):
        other = cute.arch.shuffle_sync_down(total, distance)
        further = cute.arch.shuffle_sync_down(ended, distance)
        total = total + cutlass.select_(ended == 0, other, Float32(0.0))
        ended = ended | further
    return total, begins.ir_value()
