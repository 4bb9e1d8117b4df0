"""The bounds of visibility of a launch: its lengths, and those window bounds that its plan has."""

from __future__ import annotations

from cutlass import Int32

from fa_cute.plan import Launch, Plan
from fa_cute.spans import Bounds


def bounds_of(plan: Plan, lengths: tuple[Int32, Int32], launch: Launch) -> Bounds:
    """``lengths`` are (Sq, Sk); causal is a right bound of 0."""
    has_left, has_right = plan.window
    right = Int32(0) if plan.causal else launch.window_right if has_right else None
    return Bounds(*lengths, launch.window_left if has_left else None, right)
