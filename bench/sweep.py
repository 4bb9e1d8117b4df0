"""Config rows of the forward against each other and FA3: ``python -m bench.sweep``.

First ``--compile-only`` on any host fills FA_CUTE_CACHE_DIR; then, on the device, the same flags
without it measure every row and FA3 in the same rounds. A row is written
``tile_m x tile_n x KV stages x Q stages : producer / consumer registers : t|n`` (turns, none),
e.g. ``128x176x2x1:24/240:t``; a ``p`` behind it: P has registers of its own (``own_p``), ``e1``:
one piece of the exponentials is ``emulated``; ``q``: ``q_registers``; with
``@NAME`` behind it the kernel has that change of ``bench.ablated``. Beside a mod the plain kernel
takes turns too.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fa_cute
from bench import peers
from bench.cases import INPUTS, VARIANTS, Case, Inputs, cases
from bench.device import Meter, facts
from bench.results import Report, table
from bench.selection import seconds
from bench.timing import Candidate, Effort, Stopwatch
from fa_cute.host import compile as compiling
from fa_cute.host.compile import compiled
from fa_cute.host.configs import fwd_sm90
from fa_cute.host.launch import Kernel
from fa_cute.host.planning import NO_MODS, Mods, is_light
from fa_cute.host.problem import FEW_KEYS
from fa_cute.host.target import sm_count
from fa_cute.host.workspace import counter
from fa_cute.plan import Extra, FwdConfig, Io, Launch, Plan

ROWS = {
    (128, 128): (
        "128x128x2x1:24/240:t 128x128x2x1:24/240:n 128x176x2x1:24/240:t 128x176x2x1:24/240:n "
        "128x160x2x1:24/240:t 128x144x2x1:24/240:t 128x112x2x1:24/240:t 128x96x3x1:24/240:t "
        "192x128x2x1:32/160:t 192x128x2x1:24/160:n 192x96x2x1:32/160:t 192x112x2x1:32/160:t"
    ),
    (64, 64): (
        "192x128x2x1:32/160:t 192x128x2x1:32/160:n 192x128x3x1:32/160:t 192x160x2x1:32/160:t "
        "192x192x2x1:32/160:t 192x96x3x1:32/160:t 128x128x3x1:24/240:t 128x192x3x1:24/240:t "
        "128x256x2x1:24/240:t 128x160x3x1:24/240:t"
    ),
}
_changed: dict[tuple[Plan, str], Kernel] = {}
_ROW = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+):(\d+)/(\d+):([tn])(p?)(?:e(\d))?(q?)")


def row(text: str) -> FwdConfig:
    """A config row from its text."""
    found = _ROW.fullmatch(text)
    if found is None:
        raise SystemExit(f"{text!r} is no row; write it like 128x176x2x1:24/240:t")
    how = {"ping_pong": found[7] == "t", "own_p": bool(found[8]), "emulated": int(found[9] or 0)}
    how["q_registers"] = bool(found[10])
    return FwdConfig(*map(int, found.groups()[:6]), **how)


def plan(case: Case, config: FwdConfig, device: str) -> tuple[Plan, Mods]:
    """The plan of ``case`` with ``config``, and its mods with captured tensors on ``device``."""
    arguments = case.arguments(device)
    mods = Mods.of(arguments.get("score_mod"), None)
    score_mod = None if mods.score_mod is None else mods.score_mod.graph
    made = Plan(
        direction="forward",
        dtype=case.dtype,
        head_dim=case.head_dim,
        head_dim_v=case.dim_v,
        gqa_ratio=case.heads // case.heads_kv,
        causal=case.causal,
        window=(case.window is not None, False),
        score_mod=score_mod,
        mask_mod=None,
        return_lse=False,
        sinks=False,
        deterministic=False,
        target="sm_90a",
        config=config,
        bias=mods.bias,
    )
    return (made if made.bias_stages else replace(made, bias=None)), mods


def kernel(case: Case, text: str, device: str) -> tuple[Kernel, Mods]:
    """The kernel that a row's text names, and its mods with captured tensors on ``device``.

    ``plain``: the one that a call without the mod takes.
    """
    if text == "plain":
        case = replace(case, variant="plain")
        return compiled(plan(case, _default(case), device)[0]), NO_MODS
    shape, _, name = text.partition("@")
    made, mods = plan(case, row(shape), device)
    if not name:
        return compiled(made), mods
    from bench.ablated import CHANGES

    at = made, name
    if at not in _changed:
        parts = compiling.key_parts(made) | {"changed": name}
        with CHANGES[name].applied():
            _changed[at] = compiling._from_disk_or_compiler(made, compiling.key_of(parts), parts)
    return _changed[at], mods


def main(argv: list[str] | None = None) -> int:
    """Compile or measure."""
    arguments = _parser().parse_args(argv)
    axes = (arguments.dims, arguments.lengths, arguments.masks, arguments.variants, [1])
    chosen = list(cases(*axes))
    if arguments.compile_only:
        return compile_only(chosen, arguments.rows)
    effort = Effort(arguments.rounds, arguments.batch_ms, rest_s=arguments.rest)
    stopwatch = Stopwatch(effort, Meter())
    report = Report("sweep", facts() | {"inputs": INPUTS}, arguments.out)
    with torch.no_grad():
        for case in chosen:
            report.rows += measure(case, arguments.rows, stopwatch)
            report.save()
    print(summary(report.rows))
    return 0


def summary(rows: list[dict[str, Any]]) -> str:
    """A table of measured rows, the fastest of each case first."""
    lines = [_cells(r) for r in sorted(rows, key=lambda r: (r["case"], -r["tflops"]))]
    return table(
        ["case", "row", "TFLOP/s", "of FA3", "of plain", "error", "regs", "spill", "KiB"], lines
    )


def compile_only(chosen: list[Case], texts: list[str]) -> int:
    """Compile every row that can be; the reasons of those that cannot are printed."""
    failed = 0
    for case in dict.fromkeys(chosen):
        for text in [*_beside(case)[1:], *_rows(case, texts)]:
            try:
                made, _ = kernel(case, text, "meta")
                print(f"{case.name} {text}: {made.source} {made.resources}", flush=True)
            except Exception as error:  # too large a tile fails in many ways: say which, go on
                print(f"{case.name} {text}: {_first_line(error)}", flush=True)
                failed += 1
    return failed


def measure(case: Case, texts: list[str], stopwatch: Stopwatch) -> list[dict[str, Any]]:
    """A line for each row that runs: TFLOP/s, error against the oracle, resources."""
    inputs = case.tensors()
    head = Inputs(*(t[:1, :, :1] for t in inputs))
    right = fa_cute.reference.attention(*head, **case.arguments())
    lines: dict[str, dict[str, Any]] = {}
    ready: list[Candidate] = []
    for text in [*_beside(case), *_rows(case, texts)]:
        try:
            made = peers.build("fa3", case, inputs) if text == "fa3" else _ours(case, text, inputs)
            out = peers.output(made.call())[:1, :, :1]
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{case.name} {text}: {_first_line(error)}", flush=True)
            continue
        error = None if text == "plain" else float((out.double() - right).abs().max())
        lines[text] = {"case": case.name, "row": text, "error": error, "flops": case.flops}
        if text != "fa3":
            lines[text]["resources"] = kernel(case, text, "cuda")[0].resources._asdict()
        ready.append(made)
    for name, figures in stopwatch.measure(ready).items():
        lines[name] |= figures.row() | {"tflops": case.flops / figures.device_ms / 1e9}
    for line, peer in itertools.product(lines.values(), ("fa3", "plain")):
        line[f"of_{peer}"] = line["tflops"] / lines[peer]["tflops"] if peer in lines else None
    return list(lines.values())


def _ours(case: Case, text: str, x: Inputs) -> Candidate:
    made, mods = kernel(case, text, "cuda")
    out = torch.empty_like(x.q[..., : case.dim_v])
    io, extra = Io(*x, out), Extra(mods.captured or None, mods.scalars or None)
    count = sm_count(x.q.device)
    launch = Launch(case.head_dim**-0.5, case.window or 0, 0, count, counter(x.q.device))

    def call() -> torch.Tensor:
        made(io, extra, launch)
        return out

    return Candidate(text, call)


def _rows(case: Case, texts: list[str]) -> list[str]:
    if texts:
        return texts
    dims = (case.head_dim, case.dim_v)
    if dims in ROWS:
        return ROWS[dims].split()
    c = _default(case)
    registers = f"{c.producer_registers}/{c.consumer_registers}"
    tile = f"{c.tile_m}x{c.tile_n}x{c.kv_stages}x{c.q_stages}"
    emulated = f"e{c.emulated}" if c.emulated else ""
    flags = f"{'p' * c.own_p}{emulated}{'q' * c.q_registers}"
    return [f"{tile}:{registers}:{'t' if c.ping_pong else 'n'}{flags}"]


def _beside(case: Case) -> list[str]:
    return ["fa3"] if case.variant == "plain" else ["fa3", "plain"]


def _default(case: Case) -> FwdConfig:
    """The row that a call takes."""
    cut, modified = case.mask != "full", case.variant != "plain"
    score_mod = plan(case, FwdConfig(128, 128, 2, 2, 24, 240), "meta")[0].score_mod
    light = score_mod is not None and is_light(score_mod)
    few, dims = case.seqlen <= FEW_KEYS, (case.head_dim, case.dim_v)
    # No variant of the benchmark hides keys.
    classes = {"light": light, "scored": score_mod is not None, "few_keys": few, "presumed": True}
    return fwd_sm90(*dims, cut=cut, modified=modified, **classes)


def _cells(line: dict[str, Any]) -> list[str]:
    found = line.get("resources")
    resources = ["-"] * 3
    if found:
        kib = found["shared_memory"] / 1024
        resources = [str(found["registers"]), str(found["spill_bytes"]), f"{kib:.0f}"]
    ratios = [f"{line[name]:.3f}" if line[name] else "-" for name in ("of_fa3", "of_plain")]
    error = "-" if line["error"] is None else f"{line['error']:.1e}"
    return [line["case"], line["row"], f"{line['tflops']:.0f}", *ratios, error, *resources]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.sweep", description=__doc__.split("\n")[0])
    parser.add_argument("--dims", type=_dims, default=[(128, 128)])
    parser.add_argument("--lengths", type=_numbers, default=[8192])
    parser.add_argument("--masks", type=_words, default=["full", "causal"])
    parser.add_argument("--variants", type=_words, default=["plain"], help=",".join(VARIANTS))
    parser.add_argument("--rows", type=_words, default=[], help="instead of the listed ones")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-ms", type=float, default=10.0)
    parser.add_argument("--rest", type=seconds, default=0.0, help="idle seconds before a turn")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compile-only", action="store_true")
    return parser


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _dims(text: str) -> list[tuple[int, int]]:
    pairs = [word.partition("/") for word in text.split(",")]
    return [(int(dim), int(dim_v or dim)) for dim, _, dim_v in pairs]


if __name__ == "__main__":
    sys.exit(main())
