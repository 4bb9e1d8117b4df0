"""Speed of the gradient beside its peers: ``python -m bench.backward``.

Two rows a case and peer: the backward alone (of one forward, over and over) and forward + backward.
TFLOP/s count 2.5 and 3.5 times the forward's operations. The peer ``deterministic`` is ours with
that flag. The variant ``t5`` learns its table where the peer can (ours, Flex); ALiBi's slopes are
fixed. Peak memory is that of forward + backward.

Compiling takes minutes: ``--prime N`` does it first with N processes, ``--compile-only --prime N``
does nothing else, so that a later run with the same flags measures at once. Rows are written as
they come.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bench import peers
from bench.cases import INPUTS, Case, Inputs
from bench.device import Meter, facts, smi
from bench.priming import dealt, prime
from bench.results import Report, table
from bench.selection import BACKWARD, effort, parser, selection
from bench.timing import Candidate, Stopwatch
from fa_cute.host.problem import FEW_KEYS

FACTORS = {"backward": 2.5, "both": 3.5}
OWN = ("ours", "deterministic")
# An error of dq or dk that passes, in roundings of the largest element; seen, 0.5 to 0.9.
ROUNDINGS = 2.0


@dataclass(frozen=True)
class Trained(Case):
    """A case whose mod is made once, so that its learned tensors can be told."""

    made: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(case: Case, **changed: Any) -> Trained:
        """The case, with some fields ``changed``."""
        fields = {name: getattr(case, name) for name in Case.__dataclass_fields__}
        return Trained(**fields | changed)

    def arguments(self, device: torch.device | str = "cuda") -> dict[str, Any]:
        """As of ``Case``; the T5 table requires a gradient."""
        if not self.made:
            self.made.update(super().arguments(device))
            for tensor in learned(self.made) if self.variant == "t5" else ():
                tensor.requires_grad_()
        return dict(self.made)


def learned(arguments: dict[str, Any]) -> list[torch.Tensor]:
    """The floating tensors that the arguments' score_mod captures."""
    from fa_cute.mods import trace_score_mod

    score_mod = arguments.get("score_mod")
    captured = () if score_mod is None else trace_score_mod(score_mod).captured
    return [tensor for tensor in captured if tensor.is_floating_point()]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if ours failed or was wrong."""
    arguments = parser(BACKWARD).parse_args(argv)
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    chosen = selection(arguments)
    if arguments.share:
        return compile_share(chosen, arguments.peers, arguments.share)
    if arguments.prime:
        prime("bench.backward", arguments.prime, sys.argv[1:] if argv is None else argv)
    if arguments.compile_only:
        return 0
    stopwatch = Stopwatch(effort(arguments, host_calls=5), Meter())
    report = Report("backward", facts() | {"inputs": INPUTS}, arguments.out)
    for case in chosen:
        report.rows += measure(Trained.of(case), arguments.peers, stopwatch)
        report.save()
    report.head["after"] = smi()
    report.save()
    print(f"\n{report.head['device']}; TFLOP/s; in {report.path}\n")
    print(summary(report.rows, arguments.peers))
    return int(any(bad(row) for row in report.rows if row["peer"] in OWN))


def compile_share(chosen: list[Case], names: list[str], share: str) -> int:
    """Call some of the cases of peers that compile, each once, both passes; small where lengths do
    not matter to the kernel."""
    jobs: dict[tuple[str, Case], None] = {}
    for name in ("flex", *OWN, "fa4"):
        for case in chosen if name in names else ():
            small = min(case.seqlen, FEW_KEYS + 512)  # long calls have a forward of their own
            jobs[name, case if name == "flex" else replace(case, seqlen=small, batch=1)] = None
    for name, case in dealt(list(jobs), share):
        trained = Trained.of(case)
        inputs = Inputs(*(x.requires_grad_() for x in trained.tensors()))
        try:
            passes(name, trained, inputs, torch.ones_like(inputs.q[..., : case.dim_v]))[
                "backward"
            ].call()
        except Exception as reason:
            print(f"{name} {case.name}: {reason}", file=sys.stderr)
    return 0


def bad(row: dict[str, Any]) -> bool:
    """Whether a row of ours is missing or wrong; NaN is."""
    return bool(row["absent"]) or not row["error"] <= row["bound"]


def measure(case: Trained, names: list[str], stopwatch: Stopwatch) -> list[dict[str, Any]]:
    """Two rows a peer."""
    inputs = Inputs(*(x.requires_grad_() for x in case.tensors()))
    dout = gradient_of_out(inputs)
    right = oracle(case, inputs, dout)
    bound = ROUNDINGS * torch.finfo(dout.dtype).eps * max(float(x.abs().max()) for x in right)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    ready: dict[str, list[Candidate]] = {which: [] for which in FACTORS}
    for name in names:
        for which in FACTORS:
            rows[name, which] = row(case, name, which, bound)
        try:
            for which, candidate in passes(name, case, inputs, dout).items():
                rows[name, which]["error"] = error(candidate, right)
                ready[which].append(candidate)
        except Exception as reason:
            # Whatever a peer dies of must not end a run.
            lines = str(reason).strip().splitlines() or [""]
            for which in FACTORS:
                rows[name, which]["absent"] = f"{type(reason).__name__}: {lines[0][:160]}"
    for which, candidates in ready.items():
        kept = [c for c in candidates if not rows[c.name, which]["absent"]]
        for name, figures in stopwatch.measure(kept).items():
            speed = FACTORS[which] * case.flops / figures.device_ms / 1e9
            rows[name, which] |= figures.row() | {"tflops": speed}
    for which in FACTORS:
        told = [
            f"{n} {r['tflops']:.0f}" for (n, w), r in rows.items() if w == which and "tflops" in r
        ]
        print(f"{case.name} {which}: {', '.join(told)}", flush=True)
    return list(rows.values())


def gradient_of_out(x: Inputs) -> torch.Tensor:
    """dO, the same in every run."""
    generator = torch.Generator(x.q.device).manual_seed(9)
    shape = (*x.q.shape[:3], x.v.shape[3])
    return torch.randn(shape, generator=generator, device=x.q.device).to(x.q.dtype)


def passes(name: str, case: Trained, x: Inputs, dout: torch.Tensor) -> dict[str, Candidate]:
    """The candidates of a peer; each gives (dq, dk, dv, ...)."""
    if name == "fa3":
        raise peers.Absent("the packed FA3 holds its forward alone")
    if name == "deterministic":
        case = replace(case, made=case.arguments() | {"deterministic": True})
    forward = peers.build("ours" if name in OWN else name, case, x)
    leaves = [*x, *(t for t in learned(case.arguments()) if t.requires_grad and name != "fa4")]

    def of(out: Callable[[], torch.Tensor], keep: bool) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(out(), leaves, dout, retain_graph=keep)

    with forward.context():
        once = peers.output(forward.call())
    both = of(lambda: peers.output(forward.call()), False)
    return {
        "backward": Candidate(name, of(lambda: once, True), forward.context),
        "both": Candidate(name, both, forward.context),
    }


def oracle(case: Trained, x: Inputs, dout: torch.Tensor) -> list[torch.Tensor]:
    """dq of batch 0 and head 0 in fp64; dk too, where that head has keys of its own."""
    import fa_cute

    leaves = [t[:1, :, :1].detach().double().requires_grad_() for t in x]
    with torch.enable_grad():
        out = fa_cute.reference.attention(*leaves, **case.arguments())
    found = torch.autograd.grad(out, leaves, dout[:1, :, :1].double())
    return list(found[: 2 if case.heads == case.heads_kv else 1])


def error(candidate: Candidate, right: list[torch.Tensor]) -> float:
    """The largest error of what the oracle has."""
    with candidate.context():
        found = candidate.call()
    pairs = zip(found, right, strict=False)
    return max(float((a[:1, :, :1].double() - b).abs().max()) for a, b in pairs)


def row(case: Case, peer: str, which: str, bound: float) -> dict[str, Any]:
    """A row before it is measured."""
    plain = replace(case, variant="plain", window=None)
    told = {"case": case.name, "plain": plain.name, "peer": peer, "pass": which}
    return told | {
        "absent": None,
        "error": None,
        "bound": bound,
        "flops": FACTORS[which] * case.flops,
    }


def summary(rows: list[dict[str, Any]], names: list[str]) -> str:
    """TFLOP/s a peer; ours as a ratio to the best of them and to ours without mod and window; its
    error in roundings allowed, and the MiB that a call adds."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for one in rows:
        found.setdefault((one["case"], one["pass"]), {})[one["peer"]] = one
    lines = []
    for (case, which), by_peer in found.items():
        ours, speeds = by_peer.get("ours", {}), {p: r.get("tflops") for p, r in by_peer.items()}
        mine = speeds.get("ours")
        best = max((s for peer, s in speeds.items() if s and peer not in OWN), default=None)
        plain = found.get((ours.get("plain"), which), {}).get("ours", {}).get("tflops")
        wrong = f"{ours['error'] / ours['bound']:.2f}" if ours.get("error") is not None else "-"
        peak = f"{ours['peak_bytes'] / 2**20:.0f}" if ours.get("peak_bytes") else "-"
        cells = [f"{speeds[name]:.0f}" if speeds.get(name) else "-" for name in names]
        cells += [f"{mine / other:.3f}" if mine and other else "-" for other in (best, plain)]
        lines.append([f"{case} {which}", *cells, wrong, peak])
    header = ["case", *names, "ours/best", "of plain", "error/bound", "MiB"]
    reasons = {f"{r['peer']}: {r['absent']}": r["case"] for r in rows if r["absent"]}
    absent = [f"\nabsent  {reason}  ({case})" for reason, case in reasons.items()]
    return table(header, lines) + "".join(absent)


if __name__ == "__main__":
    sys.exit(main())
