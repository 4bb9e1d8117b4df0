"""Turns between CTAs: a counter in global memory says whose it is.

Who has waited may read what was written before the turn was given, and add to it; one thread of a
group that a barrier joins does both for all of them.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def wait(counter: cute.Pointer, turn: Int32):
    """Wait until ``counter`` is ``turn``."""
    seen = Int32(cute.arch.load(counter, Int32, sem="acquire", scope="gpu"))
    while seen != turn:
        seen = Int32(cute.arch.load(counter, Int32, sem="acquire", scope="gpu"))


def give(counter: cute.Pointer) -> None:
    """Advance ``counter`` by one: what this group wrote before is visible to who waits for it."""
    cute.arch.red(counter, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")
