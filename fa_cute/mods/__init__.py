"""The modifier language: plain Python functions on scores and indices, traced to a small graph.

Names are imported when they are first used: a call without mods needs the graph alone, and starts
sooner.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "check": ("Report", "check"),
    "compose": ("all_of", "any_of", "negate"),
    "errors": ("ModError",),
    "graph": ("Captured", "Graph", "Node"),
    "trace": ("Traced", "trace_mask_mod", "trace_score_mod"),
    "vocabulary": (
        "abs",
        "boolean",
        "cast",
        "ceil",
        "clamp",
        "cos",
        "dot",
        "erf",
        "exp",
        "exp2",
        "float32",
        "floor",
        "int32",
        "log",
        "log2",
        "maximum",
        "minimum",
        "round",
        "rsqrt",
        "sigmoid",
        "sign",
        "sin",
        "sqrt",
        "tanh",
        "trunc",
        "where",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fa_cute.mods' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fa_cute.mods.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
