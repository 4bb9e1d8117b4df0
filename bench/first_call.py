"""A first call on a cold cache: from ``import fa_cute`` to its results, in fresh processes.

    python -m bench.first_call [--runs 5] [--out FILE]

Each process has an empty cache of kernels. It imports torch, which is not counted; then it imports
fa_cute, makes its CUDA tensors (and with them CUDA's context) and calls ``attention``; a training
call then computes gradients. ``beside``: as users have it, where a second process compiles the
backward's kernels while the call compiles its forward; ``alone``: without it, all in one process.
``cpu_s`` is of the measured process, without the one beside. All modules are in bytecode.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import device, fresh
from bench.results import Report, table

PROCESS = """
import json, time
import torch
started, used = time.perf_counter(), time.process_time()
import fa_cute
{alone}
x = torch.randn(3, 1, 2048, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad={training})
torch.cuda.synchronize()
ready = time.perf_counter()
out = fa_cute.attention(*x, causal=True)
torch.cuda.synchronize()
forward = time.perf_counter()
if {training}:
    out.sum().backward()
    torch.cuda.synchronize()
finished, used = time.perf_counter(), time.process_time() - used
from fa_cute.host import compile
kernels = [compile.compiled(plan) for plan in compile.plans_in_memory()]
print(json.dumps({{
    "tensors_s": ready - started,
    "forward_s": forward - ready,
    "backward_s": finished - forward,
    "all_s": finished - started,
    "cpu_s": used,
    "sources": [kernel.source for kernel in kernels],
}}))
"""
ALONE = "from fa_cute.host import worker; worker.ahead = lambda plans: None"
KINDS = {
    "forward": {"training": False, "alone": ""},
    "training, beside": {"training": True, "alone": ""},
    "training, alone": {"training": True, "alone": ALONE},
}


def start(kind: str, bytecode: str) -> dict[str, Any]:
    """Seconds and facts of one fresh process of a kind; ``bytecode``: a folder of modules'."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as kernels:
        code = PROCESS.format(**KINDS[kind])
        return {"kind": kind, **fresh.figures(code, bytecode, FA_CUTE_CACHE_DIR=kernels)}


def main(argv: list[str] | None = None) -> int:
    """Measure the kinds in turn, print a table, write a JSON."""
    parser = argparse.ArgumentParser(prog="bench.first_call", description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    report = Report("first-call", device.facts(), arguments.out)
    with tempfile.TemporaryDirectory() as bytecode:
        start("training, alone", bytecode)
        for _ in range(arguments.runs):
            for kind in KINDS:
                report.rows.append(start(kind, bytecode))
                report.save()
    names = [name for name in report.rows[0] if name.endswith("_s")]
    lines = []
    for kind in KINDS:
        rows = [row for row in report.rows if row["kind"] == kind]
        medians = [f"{statistics.median(row[name] for row in rows):.2f}" for name in names]
        lines.append([kind, *medians])
    print(table(["medians", *names], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
