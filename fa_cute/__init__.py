"""FlashAttention as a framework: attention variants in plain Python, compiled into one kernel.

``attention`` is the call; ``check`` says what can be told about a mod without tensors; ``compile``
makes a kernel ahead of time, on any host; ``explain`` says what a call would run; ``plan_mask``
finds the blocks that a mask keeps; ``reference`` is the fp64 oracle; ``mods`` holds the vocabulary
of modifiers, ``variants`` ready-made ones.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = [
    "attention",
    "check",
    "compile",
    "explain",
    "load_bundle",
    "mods",
    "plan_mask",
    "precompile",
    "recorded_configurations",
    "reference",
    "variants",
]

# Loaded at first use, so that importing the package costs nothing beside torch.
_HOMES = {
    "attention": "fa_cute.api",
    "check": "fa_cute.mods",
    "compile": "fa_cute.ahead",
    "explain": "fa_cute.explanation",
    "load_bundle": "fa_cute.bundle",
    "plan_mask": "fa_cute.host.blocks",
    "precompile": "fa_cute.ahead",
    "recorded_configurations": "fa_cute.ahead",
}
_MODULES = ("mods", "reference", "variants")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"fa_cute.{name}")
    else:
        raise AttributeError(f"module 'fa_cute' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
