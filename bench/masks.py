"""What the masks of the gallery cost beside what they keep: ``python -m bench.masks``.

Every mask of ``fa_cute.variants`` at d128, with sizes for 16,384 tokens: the tiles that it keeps,
our time beside the plain full kernel's and beside the same kernel with the mask evaluated
everywhere, interleaved; and how long ``plan_mask`` takes, for a document mask over a million tokens
too. ``bound`` is (full tiles + 1.25 x partial tiles) / all tiles x the plain full time x 1.1 +
10 us. ``--flex``: then, in the same run, how long FlexAttention's ``create_block_mask`` takes for
the masks that it names (as it is called in eager torch: compiled, it first compiles for minutes),
and last those masks again beside its compiled kernel, interleaved (``ours_beside_flex``). That
compiles for seconds to a minute each: ``--prime`` does only that for ``--masks``, and fills torch's
cache on disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.cases import INPUTS, Case, Inputs
from bench.device import Meter, facts
from bench.results import Report, table
from bench.timing import Candidate, Effort, Stopwatch

LENGTH = 16384
LONG = (1 << 18, 1 << 20)
CASE = Case(128, LENGTH, batch=1)
PARTIAL_COST, MARGIN, LAUNCH_MS = 1.25, 1.1, 0.01
# What gives the masks their sizes: parameters of the variants by name.
SIZES: dict[str, dict[str, Any]] = {
    "causal": {},
    "sliding_window": {"left": 1024},
    "streaming_llm": {"first": 64, "recent": 1024},
    "longformer": {"tokens": 128, "reach": 512},
    "chunked": {"chunk": 2048},
    "block_causal": {"block": 256},
    "dilated": {"reach": 128, "step": 8},
    "neighbourhood": {"width": 128, "reach": 6},
    "prefix_lm": {"prefix": lambda device: torch.tensor([4096], device=device)},
    "per_head_window": {"windows": lambda device: 256 * torch.arange(1, 17, device=device)},
    "document": {"documents": lambda device: documents(LENGTH, 2048, device)},
    "causal_documents": {
        "documents": lambda device: documents(LENGTH, 2048, device),
        "shared": 128,
    },
    "tree": {"subtree_end": lambda device: subtrees(LENGTH, device)},
}


def documents(length: int, mean: int, device: torch.device | str) -> torch.Tensor:
    """Numbers of packed documents ``(1, length)`` int32, of half to one and a half ``mean``."""
    if torch.device(device).type == "meta":
        return torch.empty(1, length, dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(3)
    sizes = torch.randint(mean // 2, mean * 3 // 2, (2 * length // mean + 1,), generator=generator)
    ends = sizes.cumsum(0).to(device)
    numbers = torch.searchsorted(ends, torch.arange(length, device=device), right=True)
    return numbers.int()[None]


def subtrees(length: int, device: torch.device | str) -> torch.Tensor:
    """``(1, length)``: a prompt of half the tokens, then draft tokens in a tree of runs of 64."""
    position = torch.arange(length, device=device)
    drafted = position - length // 2
    end = torch.where(drafted % 512 < 64, (drafted // 512 + 1) * 512, (drafted // 64 + 1) * 64)
    return torch.where(drafted <= 0, length, end + length // 2).clamp(max=length)[None].int()


def mask_of(name: str, device: torch.device | str) -> Callable:
    """The mask_mod of a variant in the size of this benchmark."""
    from fa_cute import variants

    function = variants.ALL[name].function
    sizes = SIZES[name]
    if not sizes:
        return function
    return function(**{key: x(device) if callable(x) else x for key, x in sizes.items()})


def main(argv: list[str] | None = None) -> int:
    """Measure all or the named masks; the exit status is 1 if ours is wrong or over its bound."""
    parser = argparse.ArgumentParser(prog="bench.masks", description=__doc__.split("\n")[0])
    parser.add_argument("--masks", default=",".join(SIZES), help="comma separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-ms", type=float, default=15.0)
    parser.add_argument("--flex", default="", help="masks beside FlexAttention too, or all")
    parser.add_argument("--flex-s", type=float, default=120.0, help="none begins later than this")
    parser.add_argument("--prime", action="store_true", help="only compile FlexAttention's kernels")
    parser.add_argument("--compile-only", action="store_true", help="our kernels, without a GPU")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    names = arguments.masks.split(",")
    if arguments.compile_only:
        return compile_only(names)
    with torch.no_grad():
        rows = prime(names) if arguments.prime else run(names, arguments)
    measured = [row for row in rows if "bound_ms" in row]
    return int(not all(row["same"] and row["ours_ms"] <= row["bound_ms"] for row in measured))


def run(names: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure, write the report after each mask, print the table last; the rows.

    All of ours is measured before FlexAttention is so much as imported.
    """
    begin = time.perf_counter()
    stopwatch = Stopwatch(Effort(arguments.rounds, arguments.batch_ms), Meter())
    report = Report("masks", facts() | {"inputs": INPUTS, "case": CASE.name}, arguments.out)

    def done(row: dict[str, Any]) -> None:
        report.save()
        print(f"{time.perf_counter() - begin:.0f} s", row, flush=True)

    for length in LONG:
        report.rows.append(long_documents(length))
        done(report.rows[-1])
    inputs = CASE.tensors()
    for name in names:
        report.rows.append(measure(name, inputs, stopwatch))
        done(report.rows[-1])
    rows = report.rows[len(LONG) :]
    chosen = names if arguments.flex == "all" else arguments.flex.split(",")
    for part in (flex_plan, functools.partial(beside_flex, stopwatch=stopwatch)):
        for row in rows:
            if row["mask"] in chosen and time.perf_counter() - begin < arguments.flex_s:
                row |= absent_unless(part, mask_of(row["mask"], inputs.q.device), inputs)
                done(row)
    print(f"\n{report.head['device']}; ms a call; in {report.path}\n")
    print(summary(rows))
    return report.rows


def measure(name: str, x: Inputs, stopwatch: Stopwatch) -> dict[str, Any]:
    """One row: tiles, times, the bound, building times, and whether the result is right."""
    import fa_cute

    mask = mask_of(name, x.q.device)
    plan = functools.partial(
        fa_cute.plan_mask, mask, 1, CASE.heads, LENGTH, LENGTH, device=x.q.device
    )
    blocks = plan()
    everywhere, visits = _everywhere(blocks, x)
    candidates = [
        Candidate("ours", lambda: fa_cute.attention(*x, mask_mod=blocks)),
        Candidate("full", lambda: fa_cute.attention(*x)),
        Candidate("everywhere", everywhere),
    ]
    if visits == "lists":  # what the function itself gets without plan_mask
        candidates.append(Candidate("unplanned", lambda: fa_cute.attention(*x, mask_mod=mask)))
    row: dict[str, Any] = {"mask": name, "sizes": _described(name), "visits": visits}
    row["same"] = torch.equal(candidates[0].call(), everywhere())
    row["plan_ms"] = building_ms(plan)
    figures = stopwatch.measure(candidates)
    row |= {f"{key}_ms": found.device_ms for key, found in figures.items()}
    row["sm_clock_mhz"] = figures["ours"].row()["sm_clock_mhz"]
    row |= bound(blocks.counts(), row["full_ms"])
    return row | {"within": row["ours_ms"] <= row["bound_ms"]}


def absent_unless(part: Callable, mask: Callable, x: Inputs) -> dict[str, Any]:
    """What ``part`` adds to a row; whatever a peer dies of must not end a run."""
    try:
        return part(mask, x)
    except Exception as error:
        return {"flex_absent": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}


def flex_plan(mask: Callable, x: Inputs) -> dict[str, Any]:
    """How long FlexAttention's ``create_block_mask`` takes."""
    return {"flex_plan_ms": building_ms(flex_building(mask, x), 3)}


def beside_flex(mask: Callable, x: Inputs, stopwatch: Stopwatch) -> dict[str, Any]:
    """Both kernels' times, and how far their results are apart."""
    import fa_cute

    theirs = flex(mask, x)
    blocks = fa_cute.plan_mask(mask, 1, CASE.heads, LENGTH, LENGTH, device=x.q.device)
    ours = Candidate("ours", lambda: fa_cute.attention(*x, mask_mod=blocks))
    difference = ours.call().float() - theirs.call().float()
    figures = stopwatch.measure([ours, theirs])
    return {
        "flex_difference": float(difference.abs().max()),
        "flex_ms": figures["flex"].device_ms,
        "ours_beside_flex_ms": figures["ours"].device_ms,
    }


def bound(counts: Any, full_ms: float) -> dict[str, Any]:
    """The tiles of a mask, and the time that it may take beside ``full_ms`` of all tiles."""
    cost = (counts.full + PARTIAL_COST * counts.partial) / sum(counts)
    return counts._asdict() | {"bound_ms": cost * full_ms * MARGIN + LAUNCH_MS}


def flex_building(mask: Callable, x: Inputs) -> Callable[[], Any]:
    """What makes FlexAttention's BlockMask of a mask.

    A mask that does not read the head is made for one head, as its documentation says.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    from fa_cute.mods.trace import trace_mask_mod

    graph = trace_mask_mod(mask).graph
    reads = graph.dependence()[graph.result]
    shape = (1, CASE.heads if "h" in reads else 1, LENGTH, LENGTH)
    return functools.partial(create_block_mask, mask, *shape, device=x.q.device)


def flex(mask: Callable, x: Inputs) -> Candidate:
    """FlexAttention on the same mask, compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = flex_building(mask, x)()
    q, k, v = (t.transpose(1, 2) for t in x)

    def call() -> torch.Tensor:
        return compiled(q, k, v, block_mask=block_mask).transpose(1, 2)

    return Candidate("flex", call)


def prime(names: list[str]) -> list[dict[str, Any]]:
    """Compile what ``flex`` calls, one call each; no rows."""
    inputs = CASE.tensors()
    for name in names:
        begin = time.perf_counter()
        flex(mask_of(name, "cuda"), inputs).call()
        torch.cuda.synchronize()
        print(f"{name}: FlexAttention in {time.perf_counter() - begin:.1f} s", flush=True)
    return []


def long_documents(length: int) -> dict[str, Any]:
    """``plan_mask`` of documents of about 4,096 tokens, ``length`` tokens in all."""
    from fa_cute.variants.document import document

    import fa_cute

    mask = document(documents(length, 4096, "cuda"))
    plan = functools.partial(fa_cute.plan_mask, mask, 1, None, length, length, device="cuda")
    milliseconds = building_ms(plan)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    blocks = plan()
    torch.cuda.synchronize()
    return {
        "mask": f"document over {length:,} tokens",
        "plan_ms": milliseconds,
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
        "kept_bytes": torch.cuda.memory_allocated() - before,
        **blocks.counts()._asdict(),
    }


def building_ms(build: Callable[[], Any], calls: int = 5) -> float:
    """Median milliseconds from the call to its end on the device, after one call to warm up."""
    times = []
    for _ in range(calls + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        build()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[1:] or times)


def _everywhere(blocks: Any, x: Inputs) -> tuple[Callable[[], torch.Tensor], str]:
    """The same kernel with the mask evaluated on every block; where the call gets its visits."""
    from fa_cute import api
    from fa_cute.host.compile import compiled
    from fa_cute.host.planning import Mods

    mods = Mods.of(None, blocks)
    prepared = api.lookup(tuple(x), mods, api.Options(False, None, None, False, False))
    plan = prepared.kernel.plan
    kernel = compiled(dataclasses.replace(plan, visits="bounds"))
    prepared = prepared._replace(kernel=kernel)
    return lambda: api.on_gpu(prepared, tuple(x), mods, None)[0], plan.visits


def compile_only(names: list[str]) -> int:
    """Compile what the benchmark launches, without a GPU."""
    import fa_cute
    from fa_cute.host.compile import compiled
    from fa_cute.host.planning import takes_lists
    from fa_cute.mods.trace import trace_mask_mod

    static = {"head_dim": 128, "dtype": torch.bfloat16, "target": "sm_90a"}
    fa_cute.compile(**static)
    for name in names:
        mask = mask_of(name, "meta")
        listed = takes_lists(trace_mask_mod(mask).graph)
        kernel = fa_cute.compile(**static, mask_mod=mask, block_lists=listed)
        fa_cute.compile(**static, mask_mod=mask)
        everywhere = compiled(dataclasses.replace(kernel.plan, visits="bounds"))
        print(name, kernel.plan.visits, kernel.resources, everywhere.resources, flush=True)
    return 0


def summary(rows: list[dict[str, Any]]) -> str:
    """The table of all masks."""
    header = ["mask", "visits", "full", "partial", "kept", "ours", "bound", "unplanned"]
    header += ["everywhere", "Flex", "ours then"]
    header += ["plan", "Flex's", "same"]
    lines = []
    for row in rows:
        tiles = row["full"] + row["partial"] + row["empty"]
        kept = f"{(row['full'] + row['partial']) / tiles:.1%}"
        names = ("ours", "bound", "unplanned", "everywhere", "flex", "ours_beside_flex")
        times = [row.get(f"{name}_ms") for name in names]
        times += [row["plan_ms"], row.get("flex_plan_ms")]
        cells = ["-" if t is None else f"{t:.3f}" for t in times]
        counts = [str(row["full"]), str(row["partial"]), kept]
        lines.append([row["mask"], row["visits"], *counts, *cells, str(row["same"])])
    return table(header, lines)


def _described(name: str) -> dict[str, Any]:
    return {key: "a tensor" if callable(x) else x for key, x in SIZES[name].items()}


if __name__ == "__main__":
    sys.exit(main())
