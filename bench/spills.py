"""Bytes that kernels spill, as ptxas reports: every row of the tables, by bounds and by mod.

    python -m bench.spills [--target sm_100a] [--part 0/1] [--bounds full,causal] [WORD ...]

No GPU is needed. Each kernel is compiled and ptxas asked: of Blackwell the forwards with lse, of
Hopper (``--target sm_90a``) those without lse too, and the backwards, under causal and full, of
the mods in ``LEARNED`` as well. A WORD chooses mods by a part of their name ("none" is no mod), or
is two of them beside each other ("alibi+document"); ``--part i/n`` takes every n-th case. The exit
status counts what spills.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.device import commit
from bench.results import Report
from fa_cute import variants
from fa_cute.configuration import Configuration
from fa_cute.host import compile as compiling
from fa_cute.host.backward_configs import BWD_SM90
from fa_cute.host.configs import FWD_SM90, FWD_SM100
from fa_cute.host.target import is_hosted
from fa_cute.plan import BACKWARD, FORWARD

NONE, BESIDE, HOPPER = "none", "+", "sm_90a"
BOUNDS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"window": (True, True)},
    "left": {"causal": True, "window": (True, False)},
}


def _taught(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(sizes, device="meta", dtype=dtype).requires_grad_()


def _slopes() -> Callable:
    slopes = _taught(8)
    return lambda s, b, h, q, kv: s - slopes[h] * (q - kv).abs()


def _factor() -> Callable:
    factors = _taught(8)
    return lambda s, b, h, q, kv: s * factors[h]


def _gate() -> Callable:
    return lambda s, b, h, q, kv: s * torch.sigmoid(s)


def _t5() -> Callable:
    return variants.t5_relative_bias.t5_relative_bias(_taught(32, 8))


def _elements() -> Callable:
    bias = _taught(8, 256, 256)
    return lambda s, b, h, q, kv: s + bias[h, q, kv]


def _rows_and_columns() -> Callable:
    rows, columns = _taught(2, 256), _taught(256)
    return lambda s, b, h, q, kv: s + rows[b, q] * columns[kv]


def _dots() -> Callable:
    rows, columns = _taught(2, 8, 256, 12), _taught(256, 12)
    return lambda s, b, h, q, kv: s + (rows[b, h, q] * columns[kv]).sum(-1)


# What tests/gpu/learned.py learns, for a backward alone.
LEARNED: dict[str, Callable[[], Callable]] = {
    "learned_slopes": _slopes,
    "learned_factor": _factor,
    "gate": _gate,
    "learned_t5": _t5,
    "learned_elements": _elements,
    "learned_rows_and_columns": _rows_and_columns,
    "learned_dots": _dots,
}


class Case(NamedTuple):
    """One kernel: of ``mod``, a variant's name, two of them, one of ``LEARNED``, or ``NONE``."""

    mod: str
    head_dims: tuple[int, int]
    bounds: str
    target: str
    direction: str = FORWARD
    lse: bool = True

    def mods(self) -> dict[str, Any]:
        """Its score_mod and mask_mod."""
        if self.mod in LEARNED:
            return {"score_mod": LEARNED[self.mod]()}
        found: dict[str, Any] = {}
        for one in () if self.mod == NONE else self.mod.split(BESIDE):
            found |= variants.ALL[one].build("meta", variants.Shape())
        return found

    def spilled(self) -> dict[str, Any]:
        """The row of the case: bytes of spills, and where its visits come from."""
        head_dim, head_dim_v = self.head_dims
        plan, _ = Configuration(
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype="bfloat16",
            target=self.target,
            direction=self.direction,
            return_lse=self.lse,
            **BOUNDS[self.bounds],
            **self.mods(),
        ).plan()
        with tempfile.TemporaryDirectory() as folder:
            found = compiling.listing(plan, Path(folder)).resources
        row = {"mod": self.mod, "D": head_dim, "Dv": head_dim_v, "bounds": self.bounds}
        row |= {"target": self.target, "direction": self.direction, "lse": self.lse}
        return row | {"visits": plan.visits, "spilled": found.spill_bytes}


def cases(words: list[str], bounds: list[str], target: str) -> Iterator[Case]:
    """Those that ``words`` choose; with a mod under causal and full alone."""
    names = [NONE, *sorted(variants.ALL)]
    hopper = target == HOPPER

    def chosen(names: list[str]) -> list[str]:
        found = [name for name in names if not words or any(word in name for word in words)]
        return found + [word for word in words if BESIDE in word]

    def all_of(names: list[str], table: tuple) -> Iterator[tuple[str, tuple[int, int], str]]:
        dims = dict.fromkeys(row.head_dims for row in table)
        for name, kind, size in itertools.product(chosen(names), bounds, dims):
            if name == NONE or kind in ("causal", "full"):
                yield name, size, kind

    for name, size, kind in all_of(names, FWD_SM90 if hopper else FWD_SM100):
        for lse in (True, False) if hopper else (True,):
            yield Case(name, size, kind, target, FORWARD, lse)
    for name, size, kind in all_of([*names, *LEARNED], BWD_SM90 if hopper else ()):
        yield Case(name, size, kind, target, BACKWARD)


def main(argv: list[str] | None = None) -> int:
    """Compile, print a line each, write a JSON."""
    parser = argparse.ArgumentParser(prog="bench.spills", description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--target", default="sm_100a")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--bounds", default=",".join(BOUNDS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    assert not is_hosted(options.target), "a hosted kernel has 128 registers a thread, and spills"
    index, count = map(int, options.part.split("/"))
    report = Report("spills", {"commit": commit()}, options.out)
    listed = list(cases(options.words, options.bounds.split(","), options.target))
    if not listed:
        words, bounds = " ".join(options.words), options.bounds
        parser.error(f"no kernel for {options.target} is named by {words!r} under {bounds}")
    for case in listed[index::count]:
        report.rows.append(case.spilled())
        report.save()
        print(*report.rows[-1].values(), flush=True)
    return sum(row["spilled"] > 0 for row in report.rows)


if __name__ == "__main__":
    sys.exit(main())
