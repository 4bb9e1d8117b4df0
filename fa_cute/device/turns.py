"""Turns between CTAs: a counter in global memory says whose it is.

Who has waited may read what was written before the turn was given, and add to it. One lane does
both, for all of its CTA: the CTA's own barriers hand on what it has seen, and show it what others
have written.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def wait(counter: cute.Pointer, turn: Int32):
    """Wait until ``counter`` is ``turn``; a warp calls it, and lane 0 has waited."""
    if cute.arch.lane_idx() == 0:
        seen = Int32(cute.arch.load(counter, Int32, sem="acquire", scope="gpu"))
        while seen != turn:
            seen = Int32(cute.arch.load(counter, Int32, sem="acquire", scope="gpu"))


@cute.jit
def give(counter: cute.Pointer):
    """Advance ``counter`` by one: what the CTA wrote before is visible to who waits for it.

    A warp calls it, for all whose writes happened before.
    """
    if cute.arch.lane_idx() == 0:
        cute.arch.red(counter, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")
