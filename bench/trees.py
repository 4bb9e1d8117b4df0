"""Source trees beside each other in one process: ``python -m bench.trees old=../old new=.``.

Processes that take turns compare kernels badly: of one and the same, two were 5 to 8 % apart on an
H200, for their memory lies elsewhere. Here all trees read the same q, k, v and dout in turns; with
``--rest 0.03`` a copy of a tree is mostly within 0.1 % of it, at times 0.8: give one as a control.
A tree is a folder that has the package, as ``git worktree add`` or ``git archive`` makes it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench.backward import FACTORS, gradient_of_out
from bench.cases import INPUTS, Case
from bench.device import Meter, facts, smi
from bench.results import Report, table
from bench.selection import BACKWARD, effort, parser, selection
from bench.timing import Candidate, Stopwatch

PASSES = {"forward": 1.0, "backward": FACTORS["backward"]}


class Tree:
    """The package of one folder, whose modules stand in for ours while it is entered."""

    def __init__(self, name: str, folder: Path) -> None:
        if not (folder / "fa_cute" / "__init__.py").is_file():
            raise SystemExit(f"{name}={folder} has no package fa_cute; give a source tree's folder")
        self.name, self.folder = name, folder.resolve()
        self.modules: dict[str, ModuleType] = {}

    @contextlib.contextmanager
    def entered(self) -> Iterator[ModuleType]:
        """Its ``fa_cute``; what a call imports late is its own too."""
        ours = _taken()
        sys.modules.update(self.modules)
        sys.path.insert(0, str(self.folder))
        try:
            yield importlib.import_module("fa_cute")
        finally:
            sys.path.remove(str(self.folder))
            self.modules = _taken()
            sys.modules.update(ours)


def _taken() -> dict[str, ModuleType]:
    """The package's modules, taken out of the interpreter."""
    names = [name for name in sys.modules if name.partition(".")[0] == "fa_cute"]
    return {name: sys.modules.pop(name) for name in names}


def call_of(
    tree: Tree, case: Case, inputs: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> Callable[[], Any]:
    """A call of a tree's forward, or of its backward if there is a ``dout`` behind q, k and v."""
    q, k, v, *dout = inputs
    given = case.arguments(q.device) | options
    with tree.entered() as package:
        forward = functools.partial(package.attention, q, k, v, **given)
        if not dout:
            return forward
        out = forward()
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def measure(case: Case, trees: list[Tree], flags: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a tree."""
    inputs, options = case.tensors(), {}
    if flags.which == "backward":
        inputs = (*(x.requires_grad_() for x in inputs), gradient_of_out(inputs))
        options = {"deterministic": flags.deterministic}
    calls = {tree.name: call_of(tree, case, inputs, options) for tree in trees}
    found, first = {}, None
    for tree in trees:
        with tree.entered():
            result = calls[tree.name]()
        parts = [x.float() for x in (result if isinstance(result, tuple) else (result,))]
        first = first or parts
        apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(parts, first))
        found[tree.name] = {"case": case.name, "tree": tree.name, "apart_from_first": apart}
    watch = Stopwatch(effort(flags, host_calls=5), Meter())
    candidates = [Candidate(tree.name, calls[tree.name], tree.entered) for tree in trees]
    for name, figures in watch.measure(candidates).items():
        speed = PASSES[flags.which] * case.flops / figures.device_ms / 1e9
        found[name] |= figures.row() | {"tflops": speed, "rounds_ms": figures.rounds_ms}
    return list(found.values())


def named(flags: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[Tree]:
    """The trees of a command line; argparse tells the user what it cannot take."""
    parts = [one.partition("=") for one in arguments.trees]
    for name, _, folder in parts:
        if not (name and folder):
            flags.error(f"a tree is NAME=FOLDER, not {name!r}")
    names = [name for name, _, _ in parts]
    if len(set(names)) < len(names):
        flags.error(f"each tree needs a name of its own, not {', '.join(names)}")
    if arguments.deterministic and arguments.which == "forward":
        flags.error("--deterministic is about the backward; give --which backward with it")
    return [Tree(name, Path(folder)) for name, _, folder in parts]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    flags = parser(BACKWARD._replace(name="bench.trees", about=__doc__.splitlines()[0], peers=[]))
    flags.add_argument("trees", nargs="+", metavar="NAME=FOLDER")
    flags.add_argument("--which", choices=PASSES, default="backward", help="the pass that is timed")
    flags.add_argument("--deterministic", action="store_true", help="of the backward")
    arguments = flags.parse_args(argv)
    trees = named(flags, arguments)
    report = Report("trees", facts() | {"inputs": INPUTS}, arguments.out)
    lines = []
    for case in selection(arguments):
        rows = measure(case, trees, arguments)
        report.rows += rows
        report.save()
        speeds = [row["tflops"] for row in rows]
        cells = [f"{speed:.1f} ({speed / speeds[0]:.3f})" for speed in speeds]
        lines.append([case.name, *cells])
        print(*lines[-1], flush=True)
    report.head["after"] = smi()
    report.save()
    print(f"\n{report.head['device']}; TFLOP/s, and of the first tree's; in {report.path}\n")
    print(table(["case", *(tree.name for tree in trees)], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
