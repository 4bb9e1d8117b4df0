"""Ready-made variants of attention, one a file, each a single function to use or to copy from.

A file defines one function of its own name: a mod, or a factory that returns one. ``ALL`` finds
them; ``ALL[name].build`` makes one with example arguments, so that one test can run them all.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Shape(NamedTuple):
    """The sizes that example arguments are made for."""

    batch: int = 2
    heads: int = 8
    seqlen_q: int = 256
    seqlen_k: int = 256


class Variant(NamedTuple):
    """A variant: its name, its function, and which argument of ``attention`` it is for."""

    name: str
    function: Callable
    kind: str

    def build(self, device: torch.device | str, shape: Shape) -> dict[str, Callable]:
        """{"score_mod" or "mask_mod": mod}, with example arguments on ``device``.

        ``shape`` has the fields of ``Shape``. The example tensors follow from the shape alone.
        """
        return {self.kind: _built(self.function, torch.device(device), shape)}


def _prefix(device: torch.device, shape: Shape) -> Tensor:
    return (torch.arange(shape.batch, device=device) + 1) * shape.seqlen_k // (shape.batch + 1)


def _documents(device: torch.device, shape: Shape) -> Tensor:
    position = torch.arange(max(shape.seqlen_q, shape.seqlen_k), device=device, dtype=torch.int32)
    return torch.stack([position // (37 + 11 * batch) for batch in range(shape.batch)])


def _table(device: torch.device, shape: Shape) -> Tensor:
    return torch.sin(torch.arange(32 * shape.heads, device=device).float()).view(32, shape.heads)


def _windows(device: torch.device, shape: Shape) -> Tensor:
    return (torch.arange(shape.heads, device=device) + 1) * 10


def _subtree_end(device: torch.device, shape: Shape) -> Tensor:
    """A quarter is the prompt; then token n has the numbers up to n + lowest bit of n below it."""
    length = max(shape.seqlen_q, shape.seqlen_k)
    position = torch.arange(length, device=device)
    end = torch.where(position <= length // 4, length, position + (position & -position))
    return end.clamp(max=length).expand(shape.batch, -1)


# Example arguments by parameter name; a parameter with a default keeps it.
_EXAMPLES: dict[str, Callable[[torch.device, Shape], object]] = {
    "heads": lambda device, shape: shape.heads,
    "prefix": _prefix,
    "documents": _documents,
    "table": _table,
    "windows": _windows,
    "subtree_end": _subtree_end,
}


def _built(function: Callable, device: torch.device, shape: Shape) -> Callable:
    parameters = inspect.signature(function).parameters
    if list(parameters)[-4:] == ["b", "h", "q", "kv"]:
        return function
    return function(
        **{name: make(device, shape) for name, make in _EXAMPLES.items() if name in parameters}
    )


def _discovered() -> dict[str, Variant]:
    found = {}
    for module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        function = getattr(importlib.import_module(f"{__name__}.{module}"), module)
        mod = _built(function, torch.device("meta"), Shape(1, 1, 1, 1))
        kind = "score_mod" if len(inspect.signature(mod).parameters) == 5 else "mask_mod"
        found[module] = Variant(module, function, kind)
    return found


ALL: dict[str, Variant] = _discovered()
