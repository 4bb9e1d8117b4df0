"""Bytes that the Blackwell forwards spill: every row of the table, by bounds and by variant.

    python -m bench.spills [--target sm_100a] [--part 0/1] [--bounds full,causal] [WORD ...]

No GPU is needed. Each kernel is compiled and ptxas asked. A WORD chooses mods by a part of their
name ("none" is no mod), or is two of them beside each other ("alibi+document"); ``--part i/n``
takes every n-th case. The exit status counts what spills.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.device import commit
from bench.results import Report
from fa_cute import variants
from fa_cute.configuration import Configuration
from fa_cute.host import compile as compiling
from fa_cute.host.configs import FWD_SM100
from fa_cute.host.target import is_hosted

NONE, BESIDE = "none", "+"
BOUNDS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"window": (True, True)},
    "left": {"causal": True, "window": (True, False)},
}


def cases(words: list[str], bounds: list[str]) -> Iterator[tuple[str, tuple[int, int], str]]:
    """(mod, head dims, bounds); a variant under causal and full alone."""
    dims = dict.fromkeys(row.head_dims for row in FWD_SM100)
    names = [NONE, *sorted(variants.ALL)]
    chosen = [name for name in names if not words or any(word in name for word in words)]
    chosen += [word for word in words if BESIDE in word]
    for name, kind, size in itertools.product(chosen, bounds, dims):
        if name == NONE or kind in ("causal", "full"):
            yield name, size, kind


def spilled(case: tuple[str, tuple[int, int], str], target: str) -> dict[str, Any]:
    """The row of one case: bytes of spills, and where its visits come from."""
    name, (head_dim, head_dim_v), kind = case
    mods: dict[str, Any] = {}
    for one in () if name == NONE else name.split(BESIDE):
        mods |= variants.ALL[one].build("meta", variants.Shape())
    plan, _ = Configuration(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype="bfloat16",
        target=target,
        return_lse=True,
        **BOUNDS[kind],
        **mods,
    ).plan()
    with tempfile.TemporaryDirectory() as folder:
        found = compiling.listing(plan, Path(folder)).resources
    row = {"mod": name, "D": head_dim, "Dv": head_dim_v, "bounds": kind, "target": target}
    return row | {"visits": plan.visits, "spilled": found.spill_bytes}


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
    for case in list(cases(options.words, options.bounds.split(",")))[index::count]:
        report.rows.append(spilled(case, options.target))
        report.save()
        print(*report.rows[-1].values(), flush=True)
    return sum(row["spilled"] > 0 for row in report.rows)


if __name__ == "__main__":
    sys.exit(main())
