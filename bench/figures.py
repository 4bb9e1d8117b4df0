"""The figures that papers on attention turn on: ``python -m bench.figures``.

Peak memory and error against the fp64 oracle by length, beside eager attention with materialised
scores; and bitwise repeatability. With ``--gradient`` of forward + backward, where the error is
dq's and the peer ``deterministic`` is ours with that flag. One JSON, one table. Speed by length and
head dim is ``bench.attention``'s and ``bench.backward``'s.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fa_cute
from bench import peers
from bench.cases import INPUTS, Case, Inputs
from bench.device import facts
from bench.results import Report, table
from bench.timing import Candidate, peak_memory

LENGTHS = (1024, 2048, 4096, 8192, 16384)
REPEATS = 20


def main(argv: list[str] | None = None) -> int:
    """Measure and write the report; 1 if ours does not repeat bit for bit."""
    parser = argparse.ArgumentParser(prog="bench.figures", description=__doc__.split("\n")[0])
    parser.add_argument("--peers", default="ours,eager,fa3,fa2,cudnn", help="comma separated")
    parser.add_argument("--gradient", action="store_true", help="of forward + backward")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    kind = "figures-gradient" if arguments.gradient else "figures"
    report = Report(kind, facts() | {"inputs": INPUTS}, arguments.out)
    with torch.set_grad_enabled(arguments.gradient):
        for length in LENGTHS:
            case = Case(128, length, causal=arguments.causal, batch=1, heads=4, heads_kv=4)
            report.rows += measure(case, arguments.peers.split(","))
            report.save()
    header = ["case", "peer", "MiB", "rms error", "max error", "repeats"]
    print(table(header, [_cells(row) for row in report.rows]))
    print(f"rows in {report.path}")
    repeatable = "deterministic" if arguments.gradient else "ours"
    ours = [row for row in report.rows if row["peer"] == repeatable]
    return 0 if ours and all(row.get("repeats") for row in ours) else 1


def measure(case: Case, names: list[str]) -> list[dict[str, Any]]:
    """Rows of one case: bytes that a call adds, its error, and whether it repeats.

    A call is forward + backward where gradients are enabled, and its result dq.
    """
    inputs = case.tensors()
    dout = torch.randn_like(inputs.q[..., : case.dim_v])
    head = Inputs(*(t[:, :, :1].double() for t in inputs))
    right = _call(lambda: fa_cute.reference.attention(*head, causal=case.causal), head, dout)()
    rows = []
    for name in names:
        row: dict[str, Any] = {"case": case.name, "seqlen": case.seqlen, "peer": name}
        try:
            candidate = _candidate(name, case, inputs)
            call = _call(candidate.call, inputs, dout)
            row |= _figures(Candidate(name, call, candidate.context), right)
        except (peers.Absent, torch.OutOfMemoryError) as reason:
            row["absent"] = str(reason)
        rows.append(row)
    return rows


def _candidate(name: str, case: Case, x: Inputs) -> Candidate:
    if name == "eager":
        return _eager(case, x)
    if name == "deterministic":
        return Candidate(
            name, lambda: fa_cute.attention(*x, causal=case.causal, deterministic=True)
        )
    return peers.build(name, case, x)


def _call(forward: Callable[[], Any], x: Inputs, dout: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The output; dq instead where gradients are enabled."""
    if not torch.is_grad_enabled():
        return lambda: peers.output(forward())
    leaves = [tensor.requires_grad_() for tensor in x]

    def both() -> torch.Tensor:
        out = peers.output(forward())
        return torch.autograd.grad(out, leaves, dout[:, :, : out.shape[2]].to(out.dtype))[0]

    return both


def _figures(candidate: Candidate, right: torch.Tensor) -> dict[str, Any]:
    with candidate.context():
        out = candidate.call()
        repeats = all(torch.equal(candidate.call(), out) for _ in range(REPEATS))
    error = out[:, :, :1].double() - right
    return {
        "rms_error": float(error.square().mean().sqrt()),
        "max_error": float(error.abs().max()),
        "peak_bytes": peak_memory(candidate),
        "repeats": repeats,
    }


def _eager(case: Case, x: Inputs) -> Candidate:
    """Attention as three lines of torch, every score in memory, in the dtype of the inputs."""
    q, k, v = (t.transpose(1, 2) for t in x)

    def call() -> torch.Tensor:
        scores = q @ k.transpose(2, 3) * case.head_dim**-0.5
        if case.causal:
            ahead = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu_(1)
            scores.masked_fill_(ahead, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2)

    return Candidate("eager", call)


def _cells(row: dict[str, Any]) -> list[str]:
    if "absent" in row:
        return [row["case"], row["peer"], row["absent"][:40], "-", "-", "-"]
    mib = f"{row['peak_bytes'] / 2**20:.1f}"
    errors = [f"{row[name]:.2e}" for name in ("rms_error", "max_error")]
    return [row["case"], row["peer"], mib, *errors, "yes" if row["repeats"] else "no"]


if __name__ == "__main__":
    sys.exit(main())
