"""What can be told about a mod before there are tensors to run it on."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fa_cute.mods.elaborate import Elaboration
from fa_cute.mods.errors import ModError, Untraceable, error_at
from fa_cute.mods.graph import Graph, cost
from fa_cute.mods.tape import LEAVES
from fa_cute.mods.trace import Traced, locate, run, trace_mask_mod, trace_score_mod

# Where the values of a level are computed, cheapest first.
_LEVELS = {
    "tile": "once a tile",
    "row": "once a query row of a tile",
    "column": "once a key column",
    "diagonal": "once a diagonal q - kv",
    "element": "for every score",
}


@dataclass(frozen=True)
class Report:
    """What ``check`` found: ``problems`` stop the mod from running, ``notes`` are worth knowing.

    ``kind`` is "score_mod" or "mask_mod"; ``graph`` is None when there are problems.
    """

    kind: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    graph: Graph | None

    @property
    def ok(self) -> bool:
        """Whether the mod can run."""
        return not self.problems

    def __str__(self) -> str:
        lines = [f"{self.kind}: {'ok' if self.ok else 'cannot run'}"]
        lines += [f"problem: {problem}" for problem in self.problems]
        lines += [f"note: {note}" for note in self.notes]
        if self.graph is not None:
            lines.append(self.graph.describe())
        return "\n".join(lines)


def check(mod: Callable, kind: str | None = None) -> Report:
    """Trace a mod and report every problem found, what each level of it costs, and its graph.

    ``kind`` is "score_mod" or "mask_mod"; by default it is told from the number of parameters (five
    or four). Raises ``ValueError`` for another ``kind``, and where it cannot be told.
    """
    if not callable(mod):
        raise ValueError(f"a mod is a function, and {mod!r} of type {type(mod).__name__} is not")
    kind = kind or _kind(mod)
    if kind not in LEAVES:
        raise ValueError(f"kind is {kind!r}; it is 'score_mod' or 'mask_mod'")
    try:
        problems = _problems(mod, kind)
    except ModError as fault:
        problems = [str(fault)]
    if problems:
        return Report(kind, tuple(problems), (), None)
    traced = (trace_score_mod if kind == "score_mod" else trace_mask_mod)(mod)
    return Report(kind, (), tuple(_notes(traced)), traced.graph)


def _kind(mod: Callable) -> str:
    try:
        parameters = inspect.signature(mod).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    for kind, leaves in LEAVES.items():
        if len(required) == len(leaves):
            return kind
    raise ValueError(
        f"{mod!r} has {len(required)} required parameters; a score_mod(score, b, h, q, kv) has "
        "five, a mask_mod(b, h, q, kv) four: pass kind='score_mod' or kind='mask_mod'"
    )


def _problems(mod: Callable, kind: str) -> list[str]:
    """Every fault of the elaboration, each at its line; what running the mod raises is raised."""
    tape, result = run(mod, kind)
    found: list[tuple[int, str]] = []
    elaboration = Elaboration(found)
    elaboration.extend(tape.ops)
    if not found:
        try:
            elaboration.finish(result, kind)
        except Untraceable as fault:
            found.append((fault.at, str(fault)))
    return [str(error_at(locate(mod, kind, at), message)) for at, message in found]


def _notes(traced: Traced) -> list[str]:
    graph = traced.graph
    notes = []
    if graph.nodes[graph.result].op == "const":
        notes.append(f"it always gives {graph.nodes[graph.result].attr}")
    spent = Counter()
    for node, level in zip(graph.nodes, graph.levels(), strict=True):
        spent[level] += cost(node)
    for level, when in _LEVELS.items():
        if spent[level]:
            plural = "" if spent[level] == 1 else "s"
            notes.append(f"about {spent[level]} instruction{plural} {when}")
    for at, tensor in enumerate(traced.captured):
        told = f"captured[{at}] has shape {tuple(tensor.shape)} on {tensor.device}"
        if tensor.dtype is torch.float64:
            told += ", is fp64, and kernels compute in fp32"
        elif tensor.dtype is torch.int64:
            told += ", is int64, and is read as int32"
        notes.append(told)
    return notes
