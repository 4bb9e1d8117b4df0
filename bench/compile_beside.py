"""Compile times beside FlashAttention-4's, which the same compiler makes: CPU seconds, with a GPU.

    python -m bench.compile_beside [--repeats 3] [--out FILE]

A fresh process a repeat; each side first compiles float16, which is not counted. Ours: compile,
export and link. FA4 compiles within a call; counted is its ``cute.compile`` alone, of a forward or
of all kernels of a backward together.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench import compile_time, device
from bench.results import Report, table

OURS = (
    *(("sm_90a", case, "forward") for case in ("plain", "causal", "causal softcap")),
    *(("sm_90a", "plain", way) for way in ("backward", "passes")),
    *(("sm_100a", case, "forward") for case in ("plain", "causal")),
)


def ours() -> None:
    """A line of JSON for each of ``OURS``."""
    from fa_cute.host.compile import build

    plain = compile_time.by_direction("plain", "sm_90a")
    _build(build, [replace(plan, dtype="float16") for plans in plain.values() for plan in plans])
    for target, case, way in OURS:
        plans = compile_time.by_direction(case, target)[way]
        spent = compile_time.timed(functools.partial(_build, build, plans))
        _put("ours", f"{target} {way}, {case}", spent["cpu"])


def _build(build: Callable, plans: list[Any]) -> None:
    for plan in plans:
        with tempfile.TemporaryDirectory() as folder:
            build(plan, Path(folder))


def flash() -> None:
    """Lines of JSON for FA4's forward and backward, full and causal."""
    from cutlass.base_dsl.compiler import CompileCallable
    from flash_attn.cute import flash_attn_func

    spent, inner = [0.0], CompileCallable._compile

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = compile_time.cpu_seconds()
        try:
            return inner(*args, **kwargs)
        finally:
            spent[0] += compile_time.cpu_seconds() - started

    CompileCallable._compile = timed
    for dtype, causal in ((torch.float16, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        q, k, v = (
            torch.randn(1, 1024, 16, 128, device="cuda", dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        for way in ("forward", "backward"):
            spent[0] = 0.0
            if way == "forward":
                out = flash_attn_func(q, k, v, causal=causal)
                out = out[0] if isinstance(out, tuple) else out
            else:
                out.sum().backward()
            if dtype is torch.bfloat16:
                _put("FA4", f"sm_90a {way}, {'causal' if causal else 'plain'}", spent[0])


def _put(who: str, what: str, seconds: float) -> None:
    print(json.dumps({"who": who, "what": what, "cpu": seconds}), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, write a JSON."""
    parser = argparse.ArgumentParser(prog="bench.compile_beside")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", choices=("ours", "flash"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.measure:
        {"ours": ours, "flash": flash}[options.measure]()
        return 0
    report = Report("compile-beside", device.facts(), options.out)
    for repeat in range(options.repeats):
        for side in ("ours", "flash"):
            command = [sys.executable, "-m", "bench.compile_beside", "--measure", side]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                print(f"{side}: {run.stderr.strip()[-300:]}", file=sys.stderr)
            lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
            report.rows += [json.loads(line) | {"repeat": repeat} for line in lines]
            report.save()
    found: dict[tuple[str, str], list[float]] = {}
    for row in report.rows:
        found.setdefault((row["what"], row["who"]), []).append(row["cpu"])
    lines = [
        [f"{what}, {who}", f"{statistics.median(times):.2f}", f"{min(times):.2f}", str(len(times))]
        for (what, who), times in sorted(found.items())
    ]
    print(table(["CPU seconds", "median", "least", "runs"], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
