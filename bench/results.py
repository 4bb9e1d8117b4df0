"""A run's result: one JSON file, and one table printed last."""

from __future__ import annotations

import datetime
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATHS = ("--out", "--cuobjdump", "--nvcc", "--cutlass", "--fa3-source")
FOLDER = Path(__file__).parent / "results"


class Report:
    """``head`` (device, software, inputs) and ``rows``, written as often as ``save`` is called."""

    def __init__(self, kind: str, head: dict[str, Any], path: Path | None = None) -> None:
        now = datetime.datetime.now(datetime.timezone.utc)
        stamp = now.strftime("%Y-%m-%dT%H:%MZ")
        self.path = path or _free(f"{now:%Y-%m-%d}-{kind}")
        self.head = {"kind": kind, "date": stamp, "command": command(sys.argv)} | head
        self.rows: list[dict[str, Any]] = []

    def save(self) -> None:
        """Write the file as it stands: a run that is cut short keeps its rows."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.head | {"rows": self.rows}, indent=1) + "\n")


def _free(name: str) -> Path:
    """A file of that name that is not there yet: a result is never written over."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for path in (FOLDER / f"{one}.json" for one in names) if not path.exists())


def command(argv: Sequence[str]) -> str:
    """How to run it again, on any machine: without its paths (the module's, and of ``PATHS``)."""
    words, kept = iter(argv[1:]), []
    for word in words:
        if word in PATHS:
            next(words, None)
        elif word.partition("=")[0] not in PATHS:
            kept.append(word)
    return " ".join([f"python -m bench.{Path(argv[0]).stem}", *kept])


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Text columns, the first one flush left."""
    widths = [max(len(row[i]) for row in (header, *lines)) for i in range(len(header))]

    def one(row: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join([row[0].ljust(widths[0]), *cells])

    return "\n".join([one(header), one(["-" * width for width in widths]), *map(one, lines)])
