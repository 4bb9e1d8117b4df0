"""What each technique is worth: ``python -m bench.ablation``.

A line of ``LINES`` is a case and rows of ``bench.sweep``, some of them with a change of
``bench.ablated``; FA3 and all rows of a line take turns in the same rounds. ``--share I/N`` with
``--compile-only`` compiles every N-th line from the I-th on, on any host.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from bench import sweep
from bench.cases import HIDDEN, INPUTS, TOKENS, Case
from bench.device import Meter, facts
from bench.results import Report
from bench.selection import seconds
from bench.timing import Effort, Stopwatch

FULL, CUT, MODDED = "128x176x2x1:24/240:n", "128x128x2x2:24/240:n", "128x128x2x2:24/240:t"
D64, D96 = "192x128x2x2:32/160:t", "192x96x2x2:32/160:t"
D256 = "128x80x2x1:24/240:t"
SCORED, ONE_Q = "192x80x2x2:32/160:t", "128x128x2x1:24/240:n"
SPARE = "128x128x2x2:40/232:t"
LINES = f"""
d128 full plain 8192: {FULL} {FULL}@sought {FULL[:-1]}t {MODDED} {FULL}@no-overlap {FULL}@one-hint
d128 full plain 8192: {CUT} {ONE_Q} {CUT}@p-shared
d128 full plain 1024: {FULL} {MODDED} {MODDED}@sought
d128 full plain 4096: {FULL} {MODDED} {MODDED}p
d128 causal plain 16384: {CUT} {CUT}p
d128 causal plain 8192: {CUT} {CUT}@sought {MODDED} {CUT}@no-overlap {CUT}@masked
d128 causal plain 8192: {CUT} {CUT}@row-order {CUT}@one-hint {CUT}@sections-16 {CUT}@draw-first
d128 causal plain 1024: {CUT} {CUT}@late-scores {CUT}@sought {CUT}@row-order {CUT}@masked {ONE_Q}
d64 full plain 8192: {D64} {D64}@sought {D64[:-1]}n 128x128x2x2:24/240:t {D64}@no-overlap
d256 causal plain 8192: {D256} {D256}@sought {D256[:-1]}n {D256}@row-order {D256}@sections-16
d128 full alibi 8192: {SCORED} {SCORED}@not-left {MODDED} {SCORED}@not-hoisted {SCORED}@no-lines
d128 causal alibi 8192: {SCORED} {SCORED}@not-left {SCORED[:-1]}n {MODDED}
d128 full softcap 8192: {SCORED} {SCORED}e1 {SCORED}@checked {SCORED[:-1]}n {SCORED}@not-folded
d128 causal softcap 8192: {SCORED} {SCORED}e1 {SCORED}@checked {SCORED[:-1]}n {MODDED}
d64 full softcap 8192: {D64}e3 {D64}e2 {D64}
d96 full softcap 8192: {D96}e2 {D96}
d128 full t5 8192: {SCORED} {MODDED} {SPARE} {MODDED}@not-rolling {SCORED}@not-hoisted
"""


def main(argv: list[str] | None = None) -> int:
    """Compile or measure."""
    arguments = _parser().parse_args(argv)
    first, step = map(int, arguments.share.split("/"))
    lines = [parsed(line) for line in LINES.strip().splitlines()][first::step]
    if arguments.compile_only:
        return sum(sweep.compile_only([case], texts) for case, texts in lines)
    effort = Effort(arguments.rounds, arguments.batch_ms, rest_s=arguments.rest)
    stopwatch = Stopwatch(effort, Meter())
    report = Report("ablation", facts() | {"inputs": INPUTS}, arguments.out)
    with torch.no_grad():
        for number, (case, texts) in enumerate(lines):
            measured = sweep.measure(case, texts, stopwatch)
            report.rows += [row | {"line": number} for row in measured]
            report.save()
    print(sweep.summary(report.rows))
    return 0


def parsed(line: str) -> tuple[Case, list[str]]:
    """The case and the rows of a line such as ``d128 causal plain 8192: ROW ROW@NAME``."""
    head, _, rows = line.partition(": ")
    dim, mask, variant, length = head.split()
    heads = HIDDEN // int(dim[1:])
    case = Case(
        head_dim=int(dim[1:]),
        seqlen=int(length),
        batch=max(1, TOKENS // int(length)),
        heads=heads,
        heads_kv=heads,
        causal=mask == "causal",
        variant=variant,
    )
    return case, rows.split()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.ablation", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batch-ms", type=float, default=6.0)
    parser.add_argument("--rest", type=seconds, default=0.0, help="idle seconds before a turn")
    parser.add_argument("--share", default="0/1", help="I/N: every N-th line from the I-th on")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compile-only", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
