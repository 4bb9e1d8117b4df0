"""A warm start: from ``import fa_cute`` to the first launched kernel, in fresh processes.

    python -m bench.warm_start [--runs 7] [--out FILE]

The kernels are on disk before: a process that had to compile one does not count. Each process
imports torch and makes its CUDA tensors, which is not counted; then it imports fa_cute, calls
``attention`` and notes when the call returned, which is when its kernel was launched. ``load_ms``
is the look-up on disk, the checksum and the loading of one kernel, without a GPU's part: of the
first kernel of a process and of a second one. ``runtime_ms`` is what the first call imports and
loads before: TVM-FFI's package and the compiler's launch runtime, once a process. All modules are
in bytecode, as pip leaves them; a process that had to compile some does not count either.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from bench import device, fresh
from bench.results import Report, table

PROCESS = """
import json, sys, time
import torch
q, k, v = (torch.randn(1, 1024, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
torch.cuda.synchronize()
started = time.perf_counter()
import fa_cute
imported = time.perf_counter()
fa_cute.attention(q, k, v)
launched = time.perf_counter()
torch.cuda.synchronize()
finished = time.perf_counter()
fa_cute.attention(q, k, v, causal=True)
second = time.perf_counter()
from fa_cute.host import compile, launch
kernels = [compile.compiled(plan) for plan in compile.plans_in_memory()]
print(json.dumps({
    "import_ms": 1e3 * (imported - started),
    "first_call_ms": 1e3 * (launched - imported),
    "first_launched_ms": 1e3 * (launched - started),
    "first_finished_ms": 1e3 * (finished - started),
    "second_kernel_ms": 1e3 * (second - finished),
    "runtime_ms": 1e3 * launch.runtime(),
    "first_load_ms": 1e3 * kernels[0].seconds,
    "second_load_ms": 1e3 * kernels[1].seconds,
    "sources": sorted({kernel.source for kernel in kernels}),
    "imports_compiler": any(name.split(".")[0] == "cutlass" for name in sys.modules),
}))
"""


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, write a JSON."""
    parser = argparse.ArgumentParser(prog="bench.warm_start", description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    report = Report("warm-start", device.facts(), arguments.out)
    with tempfile.TemporaryDirectory() as bytecode:
        fresh.figures(PROCESS, bytecode)
        while len(report.rows) < arguments.runs:
            row = fresh.figures(PROCESS, bytecode)
            if row["sources"] == ["disk"]:
                report.rows.append(row)
                report.save()
    names = [name for name in report.rows[0] if name.endswith("_ms")]
    lines = []
    for name in names:
        values = [row[name] for row in report.rows]
        numbers = (statistics.median(values), min(values), max(values))
        lines.append([name, *(f"{number:.1f}" for number in numbers)])
    print(table(["milliseconds", "median", "least", "most"], lines))
    print("imports the compiler:", any(row["imports_compiler"] for row in report.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
