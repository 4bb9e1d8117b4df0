"""How long each kernel of a backward takes: ``python -m bench.passes``.

The pass before the main kernel reads O and dO and writes zeros for dQ's sums, the one after reads
the sums and writes dQ: bytes by length, whatever a window or a short length leaves of the main one.
Also where q alone, or k and v alone require a gradient: what is not asked for is not computed.
Flags as of ``bench.backward``. Times by torch's profiler, means over ``CALLS`` calls.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import fa_cute
from bench.backward import Trained, learned
from bench.cases import INPUTS
from bench.device import facts
from bench.results import Report, table
from bench.selection import BACKWARD, parser, selection

CALLS = 8
REQUIRED = ("qkv", "q", "kv")
KERNELS = {"BwdPreprocess": "before", "BwdSm90": "main", "BwdPostprocess": "after"}


def main(argv: list[str] | None = None) -> int:
    """Measure the cases that the flags choose, and print a row each."""
    arguments = parser(BACKWARD._replace(name="bench.passes")).parse_args(argv)
    report = Report("backward-passes", facts() | {"inputs": INPUTS}, arguments.out)
    for case in selection(arguments):
        modes = [(False, required) for required in REQUIRED]
        if "deterministic" in arguments.peers:
            modes.append((True, "qkv"))
        for deterministic, required in modes:
            row = {"case": case.name, "deterministic": deterministic, "required": required}
            report.rows.append(row | times(Trained.of(case), deterministic, required))
            report.save()
    header = ["case", "deterministic", "required", *KERNELS.values(), "others"]
    lines = [
        [row["case"], "yes" if row["deterministic"] else "no", row["required"]]
        + [f"{row[name]:.1f}" for name in header[3:]]
        for row in report.rows
    ]
    print(table(header, lines))
    print(f"microseconds; in {report.path}")
    return 0


def times(case: Trained, deterministic: bool, required: str) -> dict[str, Any]:
    """Microseconds a call of each kernel, where the tensors ``required`` have gradients."""
    options = case.arguments() | {"deterministic": deterministic}
    inputs = [
        x.requires_grad_(name in required) for name, x in zip("qkv", case.tensors(), strict=True)
    ]
    out = fa_cute.attention(*inputs, **options)
    leaves = [x for x in (*inputs, *learned(options)) if x.requires_grad]
    dout = torch.randn_like(out)

    def call() -> None:
        torch.autograd.grad(out, leaves, dout, retain_graph=True)

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    found = dict.fromkeys((*KERNELS.values(), "others"), 0.0)
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = next((told for part, told in KERNELS.items() if part in event.name), "others")
            found[name] += event.self_device_time_total / CALLS
    return found


if __name__ == "__main__":
    sys.exit(main())
