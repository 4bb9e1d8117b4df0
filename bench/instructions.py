"""Instructions of the Blackwell forwards, ours and FlashAttention-4's, counted in their SASS.

    python -m bench.instructions --cuobjdump CUOBJDUMP [--only ours,fa4] [--target sm_100a]

No GPU is needed: each kernel is compiled here, FlashAttention-4's from its package's source
(``flash-attn-4``, with ``quack-kernels`` and ``triton``), for a device of 148 SMs. The disassembler
is CUDA's. Only counts are kept. Beside the whole text, three loops are told apart, each the
shortest one that holds what its name says: what one block of keys costs a warp.

* ``softmax``: the exponentials of a block without a mask, one row a thread. ``late`` ones are
  computed when the early columns of P are stored, which the product begins with.
* ``products``: every tcgen05.mma of a block, for all tiles of a CTA (of a pair: of both CTAs).
* ``correction``: the rescaling of O, for all tiles, where a row asks for it.

In ours the tiles of a CTA are turns of a loop in the last two: what it holds counts once a tile.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench import fa4_compile
from bench.device import commit
from bench.results import Report, table

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
_INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P[0-9T]+ )?([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)([^;]*);",
    re.MULTILINE,
)
# What is counted, by the start of the opcode.
KINDS = {
    "mma": ("UTCHMMA",),
    "ex2": ("MUFU.EX2",),
    "ffma2": ("FFMA2",),
    "fadd2": ("FADD2",),
    "fmul2": ("FMUL2",),
    "floor": ("FADD2.RM",),
    "maximum": ("FMNMX",),
    "convert": ("F2FP",),
    "compare": ("ISETP", "FSETP"),
    "select": ("FSEL", "SEL"),
    "ldtm": ("LDTM",),
    "sttm": ("STTM",),
    "tma": ("UTMALDG", "UTMASTG"),
    "local": ("LDL", "STL"),
}
LOOPS = {"softmax": ("ex2", "convert"), "products": ("mma",), "correction": ("sttm", "fmul2")}


class Instruction(NamedTuple):
    """One instruction: its address, its opcode, and where it may branch to."""

    address: int
    opcode: str
    target: int | None


def instructions(sass: str) -> list[Instruction]:
    """The instructions of a disassembly, in order."""
    found = []
    for address, opcode, rest in _INSTRUCTION.findall(sass):
        target = re.search(r"0x([0-9a-f]+)\s*$", rest) if opcode.startswith("BRA") else None
        found.append(Instruction(int(address, 16), opcode, target and int(target[1], 16)))
    return found


def count(code: list[Instruction]) -> dict[str, int]:
    """Instructions by kind, and all of them."""
    opcodes = Counter(one.opcode for one in code)
    kinds = {
        kind: sum(number for opcode, number in opcodes.items() if opcode.startswith(starts))
        for kind, starts in KINDS.items()
    }
    return {"all": len(code)} | {kind: number for kind, number in kinds.items() if number}


def loops(code: list[Instruction], turns: int = 1) -> dict[str, dict[str, int]]:
    """The counts of ``LOOPS``: of each the shortest that holds at least 4 of every kind.

    With ``turns`` > 1 those behind ``softmax`` are the shortest round such a loop, which counts
    that often.
    """
    bodies = sorted({(x.target, x.address) for x in code if x.target and x.target <= x.address})
    counts = {
        (begin, end): count([one for one in code if begin <= one.address <= end])
        for begin, end in bodies
    }
    found = {}
    for name, kinds in LOOPS.items():
        holding = [b for b, c in counts.items() if all(c.get(kind, 0) >= 4 for kind in kinds)]
        if name == "softmax" or turns == 1:
            choices = [Counter(counts[body]) for body in holding]
        else:
            choices = [
                Counter(counts[outer]) + Counter({k: (turns - 1) * n for k, n in inner.items()})
                for outer in bodies
                if (inner := _inside(outer, holding, counts))
            ]
        if choices:
            found[name] = dict(min(choices, key=lambda c: c["all"]))
        if choices and name == "softmax":
            begin, end = min(holding, key=lambda body: counts[body]["all"])
            found[name]["late"] = late([one for one in code if begin <= one.address <= end])
    return found


def late(block: list[Instruction]) -> int:
    """Exponentials behind the last store of P but one: those that the product need not wait for."""
    stores = [at for at, one in enumerate(block) if one.opcode.startswith("STTM")]
    return sum(one.opcode.startswith("MUFU.EX2") for one in block[stores[-2] :])


def _inside(outer: tuple[int, int], bodies: list, counts: dict) -> dict[str, int] | None:
    """The counts of the longest of ``bodies`` that lies in ``outer`` and is not it."""
    mine = [b for b in bodies if b != outer and outer[0] <= b[0] and b[1] <= outer[1]]
    return max((counts[b] for b in mine), key=lambda c: c["all"], default=None)


def read(folder: Path, cuobjdump: str, turns: int) -> dict[str, Any]:
    """What there is to count in a folder with one PTX and one cubin; ``turns`` as in ``loops``."""
    (ptx,), (cubin,) = folder.glob("*.ptx"), folder.glob("*.cubin")
    text = ptx.read_text()
    command = [cuobjdump, "-sass", str(cubin)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    code = instructions(run.stdout)
    return {
        "text": count(code),
        "loops": loops(code, turns),
        "barriers": len(re.findall(r"\bmbarrier\.init", text)),
        "registers": [int(n) for n in re.findall(r"setmaxnreg\.\S+\s+(\d+)", text)],
    }


# --- what a process that compiles does


def ours(case: tuple[int, int, bool], target: str, folder: Path) -> dict[str, Any]:
    """Compile ours into ``folder``; its tile and shared memory."""
    from cutlass.base_dsl import compiler

    from fa_cute.configuration import Configuration
    from fa_cute.host import compile as compiling

    width, width_v, causal = case
    plan, _ = Configuration(
        head_dim=width, head_dim_v=width_v, dtype="bfloat16", target=target, causal=causal
    ).plan()
    keep = (compiler.KeepPTX(True), compiler.KeepCUBIN(True), compiler.DumpDir(str(folder)))
    function, _ = compiling._compile(plan, folder, keep)
    shared = compiling._shared_memory(str(function.ir_module))
    c = plan.config
    return {"rows": c.tile_m, "keys": c.tile_n, "shared_memory": shared, "turns": c.q_tiles}


def fa4(case: tuple[int, int, bool], target: str, folder: Path) -> dict[str, Any]:
    """Compile FlashAttention-4's forward into ``folder``; its tile and shared memory."""
    from fa_cute.host.compile import _shared_memory

    found: dict[str, Any] = {}

    def compiled(compile_: Any, kernel: Any, *arguments: Any, options: str) -> None:
        options += f" --keep-ptx --keep-cubin --dump-dir {folder}"
        function = compile_(kernel, *arguments, options=options, no_jit_engine=True)
        found["kernel"] = type(kernel).__name__
        rows = getattr(kernel, "cta_tiler", (None, None))
        found.update(rows=rows[0], keys=rows[1])
        found["pair"] = bool(getattr(kernel, "use_2cta_instrs", False))
        found["shared_memory"] = _shared_memory(str(function.ir_module))

    width, width_v, causal = case
    fa4_compile.forward(target, compiled, widths=(width, width_v), causal=causal)
    return found


# --- the rows


def rows(who: str, target: str, cuobjdump: str) -> Iterator[dict[str, Any]]:
    """A row a head dim, full and causal; ``error`` where a compile fails."""
    for width, width_v in HEAD_DIMS:
        for causal in (False, True):
            row = {"who": who, "target": target, "D": width, "Dv": width_v, "causal": causal}
            with tempfile.TemporaryDirectory() as folder:
                words = [who, target, str(width), str(width_v), str(int(causal)), folder]
                command = [sys.executable, "-m", "bench.instructions", "--one", *words]
                run = subprocess.run(command, capture_output=True, text=True)
                if run.returncode:
                    yield row | {"error": run.stderr.strip().splitlines()[-1][:200]}
                    continue
                facts = json.loads(run.stdout.splitlines()[-1])
                turns = facts.pop("turns", 1)
                yield row | facts | read(Path(folder), cuobjdump, turns)


def summary(found: list[dict[str, Any]]) -> str:
    """A line a kernel: what one block of keys costs."""
    names = ("all", "ex2", "floor", "ffma2", "fadd2", "maximum", "convert", "ldtm", "sttm")
    lines = []
    for row in found:
        title = f"{row['who']} {row['D']}/{row['Dv']}{' causal' if row['causal'] else ''}"
        if "error" in row:
            lines.append([title, row["error"][:40], *[""] * (len(names) + 4)])
            continue
        body = row["loops"].get("softmax", {})
        cells = [str(body.get(name, 0)) for name in names]
        ends = [row["loops"].get(name, {}).get("all", 0) for name in ("products", "correction")]
        mma = row["loops"].get("products", {}).get("mma", 0)
        text = row["text"]
        more = map(str, (mma, *ends, text["all"], text.get("local", 0)))
        lines.append([title, *cells, *more])
    header = ["kernel", *names, "mma", "products", "correction", "text", "spills"]
    return table(header, lines)


def main(argv: list[str] | None = None) -> int:
    """Compile, count, print a table, write a JSON."""
    parser = argparse.ArgumentParser(prog="bench.instructions", description=__doc__.split("\n")[0])
    parser.add_argument("--cuobjdump", default="cuobjdump")
    parser.add_argument("--only", default="ours,fa4")
    parser.add_argument("--target", default="sm_100a")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        who, target, width, width_v, causal, folder = options.one
        case = (int(width), int(width_v), causal == "1")
        print(json.dumps({"ours": ours, "fa4": fa4}[who](case, target, Path(folder))))
        return 0
    report = Report("instructions", {"versions": _versions(), "commit": commit()}, options.out)
    for who in options.only.split(","):
        for row in rows(who, options.target, options.cuobjdump):
            report.rows.append(row)
            report.save()
            print(".", end="", file=sys.stderr, flush=True)
    print(f"\n{summary(report.rows)}")
    return 0


def _versions() -> dict[str, str | None]:
    import importlib.metadata

    names, found = ("nvidia-cutlass-dsl", "flash-attn-4", "quack-kernels", "torch"), {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


if __name__ == "__main__":
    sys.exit(main())
