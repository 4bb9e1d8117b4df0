"""A number that a mod captures is a constant, and so one that changes compiles kernel after kernel.

That is right at every step and slow at each, without a word: a decoding loop that captures its
position waits seconds a token. So the process is told once what to capture instead.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from fa_cute.host import cache
from fa_cute.plan import Plan

MANY = 16
_compiled: Counter[tuple] = Counter()


def form(description: str) -> str:
    """A graph's description without the constants in it."""
    return re.sub(r"(constant +)\S+$", r"\1", description, flags=re.MULTILINE)


def note(plan: Plan) -> None:
    """Count a compiled kernel; a RuntimeWarning at the one that is ``MANY`` of one form."""
    graphs = [graph for graph in (plan.score_mod, plan.mask_mod) if graph is not None]
    if not graphs:
        return
    bare = replace(plan, score_mod=None, mask_mod=None, visits="bounds", bias=None)
    alike = (bare, *(form(graph.describe()) for graph in graphs))
    _compiled[alike] += 1
    if _compiled[alike] == MANY:
        cache.warn_once(
            f"{MANY} kernels were compiled that differ only in numbers that a mod captures. A "
            "number that changes from call to call recompiles nothing as a 0-d tensor: capture "
            "torch.tensor(x) in its place."
        )
