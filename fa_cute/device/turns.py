"""Turns between CTAs: a counter in global memory says whose it is.

Who has waited may read what was written before the turn was given, and add to it. One warp does
both, for all of its CTA: the CTA's own barriers hand on what it has seen, and show it what others
have written. Who is waited for must have begun, so CTAs draw all of their tiles
(``device/scheduler.py``).
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def wait(counter: cute.Pointer, turn: Int32):
    """Wait until ``counter`` is ``turn``; all lanes of a warp call it, and leave it together.

    Were lane 0 to wait alone, nothing would keep the others beside it: on an H200 the 31 were seen
    a tile behind, at a phase of the ring that had come round, and calls did not end.
    """
    waiting = True
    while waiting:
        seen = Int32(cute.arch.load(counter, Int32, sem="acquire", scope="gpu"))
        waiting = cute.arch.vote_any_sync(seen != turn)


@cute.jit
def give(counter: cute.Pointer):
    """Advance ``counter`` by one: what the CTA wrote before is visible to who waits for it.

    A warp calls it, for all whose writes happened before.
    """
    if cute.arch.lane_idx() == 0:
        cute.arch.red(counter, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")
