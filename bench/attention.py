"""Speed of the attention forward beside its peers: ``python -m bench.attention``.

Without flags a small set that takes under a minute of device time: d128 and d64, full and causal,
and the variants at d128. ``--preset full`` is the grid of the published results. A peer that is
absent, fails or lacks a case is named with its reason. ``--compile-only`` compiles our kernels (on
any host, into FA_CUTE_CACHE_DIR) and runs nothing; ``--prime N`` first lets N processes fill the
compile caches of the peers that have one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench import peers
from bench.cases import INPUTS, Case, Inputs
from bench.device import Meter, facts, smi
from bench.plots import PICTURES, draw
from bench.priming import dealt, prime
from bench.results import Report, table
from bench.selection import effort, parser, selection
from bench.timing import Candidate, Stopwatch

# An error of the output that passes, in roundings of its largest element: what rounding P and the
# output costs, with room; a mod's own arithmetic (tanh.approx is good to 2^-11) needs more.
OWN = ("ours", "plain")
ROUNDINGS = {"plain": 2.0, "mod": 8.0}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if a kernel of ours failed or was wrong."""
    arguments = _parser().parse_args(argv)
    chosen = selection(arguments)
    if arguments.compile_only:
        return compile_only(chosen)
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    if arguments.share:
        return _prime_share(chosen, arguments)
    if arguments.prime:
        prime("bench.attention", arguments.prime, sys.argv[1:] if argv is None else argv)
    with torch.no_grad():
        rows = run(chosen, arguments)
    ours = [row for row in rows if row["peer"] == "ours"]
    # Written so that NaN fails.
    bad = [row for row in ours if row["absent"] or not row["error"] <= row["bound"]]
    for row in bad:
        print(f"ours failed at {row['case']}: {row['absent'] or row['error']}")
    return 1 if bad else 0


def run(chosen: list[Case], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every case, write the report after each, print the table last; the rows."""
    stopwatch = Stopwatch(effort(arguments), Meter())
    l2 = "flushed before every call" if arguments.cold else "warm"
    report = Report("attention", facts() | {"inputs": INPUTS, "l2": l2}, arguments.out)
    report.head["cublas_tflops"] = _ceiling(stopwatch)
    for case in chosen:
        try:
            report.rows += measure(case, arguments.peers, stopwatch)
        except Exception as error:
            # A fault inside a kernel ends the context: what was measured before it still counts.
            print(f"{case.name}: {type(error).__name__}: {error}", flush=True)
            report.rows.append(_row(case, "ours", 0.0) | {"absent": f"the run ended: {error}"})
            break
        report.save()
    report.head["after"] = smi()
    report.save()
    print(f"\n{report.head['device']}; cuBLAS {report.head['cublas_tflops']:.0f} TFLOP/s")
    print(f"TFLOP/s by 4 B H S S D, causal half, windows by visible pairs; in {report.path}\n")
    print(summary(report.rows, arguments.peers))
    if arguments.plot:
        draw(report.path, arguments.plot)
    return report.rows


def measure(case: Case, names: list[str], stopwatch: Stopwatch) -> list[dict[str, Any]]:
    """One row a peer: TFLOP/s, times, error of head 0 against the oracle, or why it is absent."""
    inputs = case.tensors()
    reference = _oracle(case, inputs)
    roundings = ROUNDINGS["plain" if case.variant == "plain" else "mod"]
    bound = roundings * torch.finfo(inputs.q.dtype).eps * float(reference.abs().max())
    rows: dict[str, dict[str, Any]] = {}
    ready: list[Candidate] = []
    for name in names:
        rows[name] = _row(case, name, bound)
        begin = time.perf_counter()
        try:
            candidate = peers.build(name, case, inputs)
            rows[name]["first_call_s"] = time.perf_counter() - begin
            rows[name]["error"] = _error(candidate, reference)
            ready.append(candidate)
        except peers.Absent as reason:
            rows[name]["absent"] = str(reason)
    for name, figures in stopwatch.measure(ready).items():
        rows[name] |= figures.row() | {"tflops": case.flops / figures.device_ms / 1e9}
    cells = [f"{name} {row['tflops']:.0f}" for name, row in rows.items() if "tflops" in row]
    cells += [f"no {name}" for name, row in rows.items() if row["absent"]]
    print(f"{case.name}: {', '.join(cells)}", flush=True)
    return list(rows.values())


def summary(rows: list[dict[str, Any]], names: list[str]) -> str:
    """The table: TFLOP/s a peer; ours as a ratio to the best of them, its host time and error."""
    by_case: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["peer"]] = row
    lines = []
    for name, found in by_case.items():
        speeds = {peer: row.get("tflops") for peer, row in found.items()}
        best = max((s for peer, s in speeds.items() if s and peer not in OWN), default=None)
        ours = found.get("ours", {})
        cells = [_cell(speeds.get(peer), "{:.0f}") for peer in names]
        cells += [
            *(_ratio(speeds.get("ours"), other) for other in (best, speeds.get("plain"))),
            _cell(ours.get("host_us"), "{:.0f}"),
            _cell(ours.get("joules"), "{:.3f}"),
            _cell(ours.get("sm_clock_mhz"), "{:.0f}"),
            _cell(ours.get("error"), "{:.1e}"),
        ]
        lines.append([name, *cells])
    header = ["case", *names, "ours/best", "of plain", "host us", "joules", "MHz", "error"]
    reasons = {f"{row['peer']}: {row['absent']}": row["case"] for row in rows if row["absent"]}
    absent = [f"\nabsent  {reason}  ({case})" for reason, case in reasons.items()]
    return table(header, lines) + "".join(absent)


def compile_only(chosen: list[Case]) -> int:
    """Compile our kernel of each case for sm_90a, without a GPU; 1 if one is refused."""
    import fa_cute

    refused, seen = 0, set()
    for case in chosen:
        try:
            kernel = fa_cute.compile(target="sm_90a", **case.static())
        except (NotImplementedError, ValueError) as error:
            print(f"{case.name}: {error}", flush=True)
            refused = 1
            continue
        if kernel.key not in seen:
            seen.add(kernel.key)
            print(f"{case.name}: {kernel.source}, {kernel.seconds:.1f} s", kernel.resources)
            sys.stdout.flush()
    return refused


def _parser() -> argparse.ArgumentParser:
    result = parser()
    about = f"draw bars, and curves by length and head dim, into a folder ({PICTURES})"
    result.add_argument("--plot", type=Path, nargs="?", const=PICTURES, help=about)
    return result


def _row(case: Case, peer: str, bound: float) -> dict[str, Any]:
    row = {"case": case.name, "peer": peer, "absent": None, "bound": bound, "error": None}
    return row | {"mask": case.mask, "variant": case.variant, "flops": case.flops}


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _ratio(ours: float | None, other: float | None) -> str:
    return _cell(ours / other if ours and other else None, "{:.3f}")


def _oracle(case: Case, x: Inputs) -> torch.Tensor:
    """The fp64 output of batch 0, head 0."""
    import fa_cute

    q, k, v = (t[:1, :, :1] for t in x)
    return peers.output(fa_cute.reference.attention(q, k, v, **case.arguments(q.device)))


def _error(candidate: Candidate, reference: torch.Tensor) -> float:
    with candidate.context():
        out = peers.output(candidate.call())[:1, :, :1]
    return float((out.double() - reference).abs().max())


def _ceiling(stopwatch: Stopwatch) -> float:
    """TFLOP/s of an 8192-cubed bf16 product of random matrices."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    figures = stopwatch.measure([Candidate("cublas", lambda: a @ b)])
    return 2 * 8192**3 / figures["cublas"].device_ms / 1e9


def _prime_share(chosen: list[Case], arguments: argparse.Namespace) -> int:
    """Call every n-th of the peers' cases that compile something, each once."""
    jobs = [("flex", case) for case in chosen if "flex" in arguments.peers]
    if "fa4" in arguments.peers:
        # FA4's kernel does not depend on the length: one case of each kernel is enough.
        kernels = {
            (c.head_dim, c.dim_v, c.mask, c.variant, c.heads // c.heads_kv): c for c in chosen
        }
        jobs += [("fa4", case) for case in kernels.values()]
    with torch.no_grad():
        for name, case in dealt(jobs, arguments.share):
            try:
                peers.build(name, case, case.tensors())
            except peers.Absent as reason:
                print(f"{name} {case.name}: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
