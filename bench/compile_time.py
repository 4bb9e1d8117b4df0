"""How long a kernel takes to exist: ours, FlashAttention-4's, and through nvcc from CUTLASS.

    python -m bench.compile_time [--repeats 3] [--only ours,fa4,cutlass,fa3] [--nvcc NVCC]
        [--cutlass DIR] [--fa3-source DIR] [--cases plain,causal] [--cpp-cases plain,softcap]

No GPU is needed. One process at a time; wall and CPU seconds, peak memory (resident, of the largest
process); a row a repeat in the JSON, medians in the table. Repeats go round all sides, and each row
is written as it comes: an interrupted run has what it measured, and prints it. What each way
includes is ``INCLUDED``, which the table and the plot repeat. A backward is three kernels; the two
``passes`` around the main one are the same for all masks and mods, so they are a row of their own,
of one case. ``first`` less ``after`` is the same whatever the kernel: of one case, too. Our Python
is in bytecode, as pip leaves it.

FlashAttention-4's forward is compiled of fake tensors where its package is installed
(``fa4_compile.py``): the same compiler on the same host, whatever that host's speed.

C++ is ``hopper_fmha.cu`` beside this file, on the headers of the PyPI package ``nvidia-cutlass``
4.2.0.0 (``--cutlass``: its ``cutlass_library/source``, found by itself where it is installed), and
one of FlashAttention-3's own instantiation files, of a checkout with CUTLASS in ``csrc/cutlass``.

What is missing (nvcc, a package, the checkout) is named, and the rest is measured.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench import fa4_compile
from bench.device import commit
from bench.results import Report, table

CASES = ("plain", "causal", "alibi", "window", "softcap", "causal softcap")
TARGETS = ("sm_90a", "sm_100a")
FUSIONS = {
    "plain": "Plain",
    "causal": "Causal",
    "alibi": "LinearBias",
    "window": "Window",
    "softcap": "Softcap",
}
FIRST = "plain"
INCLUDED = {
    "ours first": "first compile of a process that has torch: the compiler's import, then as after",
    "ours after": "tracing, IR passes, libNVVM, ptxas, export, link; not the process's first",
    "ours disk": "found on disk by a fresh process; the first also loads the launch runtime",
    "ours memory": "asked for again by the same process",
    "fa4 compile": "cute.compile alone of FlashAttention-4's forward, not the process's first",
    "cutlass nvcc": "nvcc, nothing to an object file: one forward kernel, or a backward's three",
    "fa3 features off": "nvcc on FlashAttention-3's own file, its optional features compiled out",
    "fa3 features on": "nvcc on FlashAttention-3's own file, with all features",
}
HERE = Path(__file__).resolve().parent
FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "--use_fast_math", "--expt-relaxed-constexpr")
FA3_FEATURES = (
    *("SPLIT", "PAGEDKV", "APPENDKV", "LOCAL", "SOFTCAP", "PACKGQA", "FP8", "VARLEN", "CLUSTER"),
    *("FP16", "SM8x", "HDIM64", "HDIM96", "HDIM192", "HDIM256"),
)
FA3_FILES = {
    "forward": "hopper/instantiations/flash_fwd_hdim128_bf16_sm90.cu",
    "backward": "hopper/instantiations/flash_bwd_hdim128_bf16_sm90.cu",
}


class Usage(NamedTuple):
    """What a process and its children took: seconds, and GiB of the largest of them."""

    wall: float
    cpu: float
    peak_gib: float


def run(command: list[str], more: Mapping[str, str] | None = None) -> tuple[str, Usage]:
    """Standard output and usage of a command; RuntimeError with its last lines if it fails.

    ``more``: of its environment.
    """
    environment = os.environ | dict(more or {})
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        started = time.perf_counter()
        child = subprocess.Popen(command, stdout=out, stderr=errors, env=environment)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - started
        out.seek(0)
        errors.seek(0)
        if child.returncode:
            tail = errors.read().strip()[-600:]
            raise RuntimeError(f"{command[0]} ended with {child.returncode}: {tail}")
        usage = Usage(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / (1 << 20))
        return out.read(), usage


# --- ours: what a measured process does


def by_direction(case: str, target: str) -> dict[str, list[Any]]:
    """Plans by direction; a direction or target that has no kernel yet is left out."""
    from fa_cute.configuration import Configuration, find_mod
    from fa_cute.host.backward import plans_of
    from fa_cute.host.compile import has_kernel
    from fa_cute.mods.derivative import differentiate

    options: dict[str, Any] = {"causal": "causal" in case or case == "window"}
    if case == "window":
        options["window"] = (True, False)
    mod = case.removeprefix("causal").strip()
    if mod in ("alibi", "softcap"):
        options["score_mod"] = find_mod(mod)
    try:
        plan, _ = Configuration(
            head_dim=128, dtype="bfloat16", target=target, return_lse=True, **options
        ).plan()
        graph = plan.score_mod and differentiate(plan.score_mod)
        backward = plans_of(plan, deterministic=False, lse_gradient=False, derivative=graph)
    except (ValueError, NotImplementedError):
        return {}
    found = {"forward": [plan], "backward": [backward.main]}
    if case == FIRST:
        found["passes"] = [backward.preprocess, backward.postprocess]
    return {direction: plans for direction, plans in found.items() if all(map(has_kernel, plans))}


def timed(action: Callable[[], Any]) -> dict[str, float]:
    """Wall and CPU seconds of ``action``, its child processes (the linker) included."""
    before, started = cpu_seconds(), time.perf_counter()
    action()
    return {"wall": time.perf_counter() - started, "cpu": cpu_seconds() - before}


def cpu_seconds() -> float:
    """CPU seconds of this process and its children that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def _compile_all(plans: list[Any]) -> None:
    from fa_cute.host.compile import compiled

    for plan in plans:
        compiled(plan)


def first(case: str, direction: str, target: str) -> None:
    """The process behind ``first`` rows."""
    plans = by_direction(case, target)[direction]
    print(json.dumps(timed(lambda: _compile_all(plans))))


def after(cases: list[str], target: str) -> None:
    """The process behind ``after`` rows: a kernel nobody asked for, then each case."""
    from dataclasses import replace

    found = {case: by_direction(case, target) for case in cases}
    (plan,) = found[cases[0]]["forward"]
    _compile_all([replace(plan, dtype="float16")])
    spent = _Phases()
    for case, directions in found.items():
        for direction, plans in directions.items():
            spent.clear()
            row = timed(lambda plans=plans: _compile_all(plans))
            way = {"case": case, "direction": direction, "what": "after"}
            print(json.dumps({**way, **row, "phases": spent.read()}))


def stored(cases: list[str], target: str) -> None:
    """The process behind ``disk`` and ``memory`` rows."""
    for case in cases:
        for direction, plans in by_direction(case, target).items():
            for source in ("disk", "memory"):
                row = timed(lambda plans=plans: _compile_all(plans))
                print(json.dumps({"case": case, "direction": direction, "what": source, **row}))


class _Phases:
    """CPU seconds within the compiler's phases, read off its own functions; each without others."""

    def __init__(self) -> None:
        from cutlass.base_dsl.compiler import Compiler
        from cutlass.base_dsl.dsl import BaseDSL
        from cutlass.base_dsl.tvm_ffi_builder.tvm_ffi_builder import TVMFFIFunctionBuilder

        from fa_cute.host import compile as compiling

        self._seconds: dict[str, float] = {}
        self._wrap(BaseDSL, "generate_original_ir", "trace")
        self._wrap(Compiler, "compile", "passes, libNVVM and ptxas")
        self._wrap(TVMFFIFunctionBuilder, "attach_ffi_func", "the call's ABI")
        self._wrap(compiling, "_object", "export")
        self._wrap(compiling, "_link", "link")

    def _wrap(self, owner: Any, name: str, phase: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            within, started = sum(self._seconds.values()), cpu_seconds()
            try:
                return inner(*args, **kwargs)
            finally:
                within = sum(self._seconds.values()) - within
                spent = cpu_seconds() - started - within
                self._seconds[phase] = self._seconds.get(phase, 0.0) + spent

        setattr(owner, name, outer)

    def clear(self) -> None:
        """Forget what was spent."""
        self._seconds.clear()

    def read(self) -> dict[str, float]:
        """CPU seconds by phase."""
        return {phase: round(seconds, 3) for phase, seconds in self._seconds.items()}


# --- the rows


def _ours(cases: list[str]) -> Iterator[dict[str, Any]]:
    for target in TARGETS:
        found = {case: by_direction(case, target) for case in cases}
        if not all(found.values()):
            print(f"ours, {target}: no kernel for it yet")
            continue
        common = {"who": "ours", "target": target}
        for direction in found.get(FIRST, {}).keys() - {"passes"}:
            with tempfile.TemporaryDirectory() as folder:
                out, usage = _child("first", target, [FIRST, direction], Path(folder))
            row = {"case": FIRST, "direction": direction, "what": "first"} | json.loads(out)
            yield common | {"peak_gib": usage.peak_gib} | row
        with tempfile.TemporaryDirectory() as folder:
            for child in ("after", "stored"):
                out, usage = _child(child, target, cases, Path(folder))
                for line in out.splitlines():
                    yield common | {"peak_gib": usage.peak_gib} | json.loads(line)


def _fa4(cases: list[str]) -> Iterator[dict[str, Any]]:
    for target in TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            out, usage = _child("fa4", target, cases, Path(folder))
        for line in out.splitlines():
            if line.startswith("{"):
                row = {"who": "fa4", "target": target, "peak_gib": usage.peak_gib}
                yield row | json.loads(line)


def _child(what: str, target: str, words: list[str], folder: Path) -> tuple[str, Usage]:
    command = [sys.executable, "-m", "bench.compile_time", "--measure", what, target, *words]
    return run(command, _bytecode() | {"FA_CUTE_CACHE_DIR": str(folder)})


@functools.cache
def _bytecode() -> dict[str, str]:
    """The environment with a folder of bytecode, which two compiles not measured have filled."""
    folder = tempfile.TemporaryDirectory(prefix="fa_cute-bytecode-")
    atexit.register(folder.cleanup)
    environment = {"PYTHONPYCACHEPREFIX": folder.name, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-m", "bench.compile_time", "--measure", "first", TARGETS[0], FIRST]
    for direction in ("forward", "backward"):
        run([*command, direction], environment | {"FA_CUTE_CACHE": "0"})
    return environment


def _cutlass(nvcc: str, source: Path, cases: list[str]) -> Iterator[dict[str, Any]]:
    example = source / "examples" / "88_hopper_fmha"
    includes = [source / "include", source / "tools" / "util" / "include", example]
    jobs = [(case, "forward") for case in cases if case in FUSIONS]
    jobs += [(case, "backward") for case in cases if case in ("plain", "causal")]
    for case, direction in jobs:
        defines = [f"-DFUSION={FUSIONS[case]}", f"-DBACKWARD={int(direction == 'backward')}"]
        row = {"who": "cutlass", "case": case, "direction": direction, "target": "sm_90a"}
        usage = _nvcc(nvcc, HERE / "hopper_fmha.cu", includes, defines)
        yield row | {"what": "nvcc"} | usage


def _fa3(nvcc: str, source: Path) -> Iterator[dict[str, Any]]:
    includes = [source / "hopper", source / "csrc" / "cutlass" / "include"]
    off = [f"-DFLASHATTENTION_DISABLE_{name}" for name in FA3_FEATURES]
    for direction, file in FA3_FILES.items():
        for what, defines in (("features off", off), ("features on", [])):
            row = {"who": "fa3", "case": "plain", "direction": direction, "target": "sm_90a"}
            yield row | {"what": what} | _nvcc(nvcc, source / file, includes, defines)


def _nvcc(
    nvcc: str, source: Path, includes: list[Path], defines: list[str]
) -> dict[str, float | str]:
    """Usage of a compile, or ``error``: its last words, where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"-I{path}" for path in includes]
        out = ["-c", str(source), "-o", f"{folder}/kernel.o"]
        try:
            return run([nvcc, "-arch=sm_90a", *FLAGS, *paths, *defines, *out])[1]._asdict()
        except RuntimeError as error:
            print(f"{source.name} {' '.join(defines)}: {error}", file=sys.stderr)
            return {"error": "nvcc refused it"}


# --- what there is to measure with


def _found_cutlass() -> Path | None:
    spec = importlib.util.find_spec("cutlass_library")
    roots = [] if spec is None else spec.submodule_search_locations or []
    return next((Path(root, "source") for root in roots if Path(root, "source").is_dir()), None)


def _version(nvcc: str | None) -> str | None:
    if nvcc is None:
        return None
    lines = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout.split("\n")
    return next((line for line in lines if "release" in line), None)


def _cutlass_version(source: Path | None) -> str | None:
    header = source and source / "include" / "cutlass" / "version.h"
    if header is None or not header.exists():
        return None
    parts = re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) (\d+)", header.read_text())
    return ".".join(parts)


def _facts(nvcc: str | None, source: Path | None) -> dict[str, Any]:
    versions = {"cutlass": _cutlass_version(source)}
    for name in ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "flash-attn-4"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    host = {"cpu": model, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
    python = {"python": platform.python_version(), "nvcc": _version(nvcc)}
    return host | python | {"versions": versions, "commit": commit()}


def summary(rows: list[dict[str, Any]]) -> str:
    """A line each for who, what, direction and case: medians over the repeats."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        if "error" in row:
            continue
        key = (row["target"], row["direction"], row["case"], row["who"], row["what"])
        groups.setdefault(key, []).append(row)
    lines = []
    for key, found in sorted(groups.items()):
        medians = [statistics.median(row[name] for row in found) for name in Usage._fields]
        cells = [f"{medians[0]:.3f}", f"{medians[1]:.3f}", f"{medians[2]:.1f}", str(len(found))]
        lines.append([" ".join(key), *cells])
    text = table(["target, direction, case, who, what", "wall s", "CPU s", "GiB", "runs"], lines)
    ways = {f"{row['who']} {row['what']}" for row in rows}
    included = [f"{way}: {words}" for way, words in INCLUDED.items() if way in ways]
    return "\n".join([text, "", *included])


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, write a JSON."""
    options = _options(argv)
    if options.measure:
        what, target, *words = options.measure
        if what == "first":
            first(*words, target)
        else:
            {"after": after, "fa4": fa4_compile.seconds, "stored": stored}[what](words, target)
        return 0
    nvcc = options.nvcc or shutil.which("nvcc")
    wanted, source = options.only.split(","), options.cutlass or _found_cutlass()
    facts = _facts(nvcc, source) | {"included": INCLUDED}
    report = Report("compile-time", facts, options.out)
    cases, cpp = options.cases.split(","), (options.cpp_cases or options.cases).split(",")
    sides: list[Callable[[], Iterator[dict[str, Any]]]] = []
    if "ours" in wanted:
        sides.append(lambda: _ours(cases))
    if "fa4" in wanted and importlib.util.find_spec("flash_attn") is None:
        print("FlashAttention-4 is not measured: pip install flash-attn-4 (a beta: --pre)")
    elif "fa4" in wanted:
        sides.append(lambda: _fa4(cases))
    if nvcc is None:
        print("C++ is not measured: nvcc is not on the PATH (--nvcc names one)")
    elif "cutlass" in wanted and source is None:
        print(
            "CUTLASS is not measured: pip install --no-deps nvidia-cutlass==4.2.0.0, or --cutlass"
        )
    elif "cutlass" in wanted:
        sides.append(lambda: _cutlass(nvcc, source, cpp))
    if nvcc is not None and "fa3" in wanted and options.fa3_source is None:
        print("FlashAttention-3 is not measured: --fa3-source names a checkout")
    elif nvcc is not None and "fa3" in wanted:
        sides.append(lambda: _fa3(nvcc, options.fa3_source))
    with contextlib.suppress(KeyboardInterrupt):
        for repeat in range(options.repeats):
            for row in (row for side in sides for row in side()):
                report.rows.append(row | {"repeat": repeat})
                report.save()
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(summary(report.rows))
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.compile_time", description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--cpp-cases", help="of nvcc; as --cases by default")
    parser.add_argument("--only", default="ours,fa4,cutlass,fa3")
    parser.add_argument("--nvcc", help="the compiler; the one on the PATH by default")
    parser.add_argument("--cutlass", type=Path, help="the source folder of nvidia-cutlass")
    parser.add_argument("--fa3-source", type=Path, help="a checkout of flash-attention")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
