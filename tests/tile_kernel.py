"""A kernel of nothing but modifiers: scores in, modified scores out, in fragments like wgmma's.

One kernel holds many graphs, so that all operations compile in a few kernels. It is compiled on any
host and kept as a shared object in FA_CUTE_CACHE_DIR: a host with that folder needs no compiler.
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fa_cute.host import launch
from fa_cute.mods import Traced, trace_mask_mod, trace_score_mod
from fa_cute.mods.emit_torch import emit

ROOT = Path(__file__).resolve().parent.parent
ROWS, THREADS = 64, 128
# What the kernel is made of.
DEVICE = ("captured", "emit", "fragment", "lower", "mma_sm90", "scope", "score")


class Case(NamedTuple):
    """A named mod, ``kind`` "score" or "mask"; ``rtol``, ``atol`` bound its kernel's error.

    That holds for scores up to ``domain``; beyond it (angles of many turns, sums that cancel) the
    result need only be finite.
    """

    name: str
    kind: str
    mod: Callable
    rtol: float = 1e-5
    atol: float = 1e-5
    domain: float = math.inf

    def traced(self) -> Traced:
        """The mod's graph and operands."""
        return trace_score_mod(self.mod) if self.kind == "score" else trace_mask_mod(self.mod)


class Built(NamedTuple):
    """The loaded kernel of some cases."""

    traces: tuple[Traced, ...]
    kinds: tuple[str, ...]
    function: Callable
    transposed: bool

    def __call__(self, scores: torch.Tensor, scale: float) -> torch.Tensor:
        """``scores`` (B, H, Sq, Sk) fp32, Sq and Sk whole tiles. Gives (cases, *scores.shape)."""
        scores = scores.mT.contiguous() if self.transposed else scores
        out = torch.full((len(self.traces), *scores.shape), torch.nan, device=scores.device)
        captured = tuple(_bytes(t) for trace in self.traces for t in trace.captured)
        scalars = tuple(x for trace in self.traces for x in trace.scalars)
        self.function(scores, out, captured or None, scalars or None, scale)
        return out.mT if self.transposed else out


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def build(cases: Sequence[Case], tile_n: int, *, transposed: bool = False) -> Built:
    """Compile the kernel of ``cases``, or load it from FA_CUTE_CACHE_DIR.

    ``transposed``: its threads hold 64 keys and ``tile_n`` queries.
    """
    traces = tuple(case.traced() for case in cases)
    kinds = tuple(case.kind for case in cases)
    path = _folder() / f"{_key(traces, kinds, tile_n, transposed)}.so"
    if not path.exists():
        _compile(traces, kinds, tile_n, transposed, path)
    return Built(traces, kinds, launch.load(path), transposed)


def expected(case: Case, scores: torch.Tensor, scale: float) -> torch.Tensor:
    """What torch makes of ``scores`` (B, H, Sq, Sk)."""
    trace = case.traced()
    leaves = {}
    for dimension, name in enumerate(("b", "h", "q", "kv")):
        shape = [1, 1, 1, 1]
        shape[dimension] = -1
        index = torch.arange(scores.shape[dimension], device=scores.device, dtype=torch.int32)
        leaves[name] = index.view(shape)
    score = scores * scale
    if case.kind == "score":
        return emit(*trace, score=score, **leaves).expand(scores.shape)
    seen = emit(*trace, **leaves).expand(scores.shape)
    return torch.where(seen, scores, -torch.inf)


def _folder() -> Path:
    folder = Path(os.environ["FA_CUTE_CACHE_DIR"]) / "tiles"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _key(traces: Sequence[Traced], kinds: Sequence[str], tile_n: int, transposed: bool) -> str:
    graphs = [t.graph.key for t in traces]
    digest = hashlib.sha256(repr((tile_n, transposed, kinds, graphs)).encode())
    sources = [f"fa_cute/device/{name}.py" for name in DEVICE]
    for path in (*sources, "tests/tile_kernel.py", "tests/tile_device.py"):
        digest.update((ROOT / path).read_bytes())
    return digest.hexdigest()[:24]


def compiled(
    traces: Sequence[Traced],
    kinds: Sequence[str],
    tile_n: int,
    options: str = "",
    transposed: bool = False,
) -> Any:
    """The compiler's object for a kernel of these graphs, on fake tensors."""
    import cutlass.cute as cute
    from cutlass import Boolean, Float32, Int32
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from fa_cute.host.fakes import captured_tensor
    from tests.tile_device import TileKernel

    def padded(rank: int) -> Any:
        shape = tuple(cute.sym_int() for _ in range(rank))
        strides = (*(cute.sym_int64() for _ in range(rank - 1)), 1)
        return make_fake_tensor(Float32, shape, strides, assumed_align=16)

    graphs = tuple(trace.graph for trace in traces)
    numbers = {"float32": Float32, "int32": Int32, "bool": Boolean}
    captured = tuple(captured_tensor(c) for graph in graphs for c in graph.captured)
    scalars = tuple(numbers[kind](0) for graph in graphs for kind in graph.scalars)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    arguments = (padded(4), padded(5), captured or None, scalars or None, Float32(1.0), stream)
    kernel = TileKernel(graphs, tuple(kinds), tile_n, transposed)
    options = f"--enable-tvm-ffi --gpu-arch sm_90a {options}"
    return cute.compile(kernel, *arguments, options=options, no_jit_engine=True)


def _compile(
    traces: Sequence[Traced], kinds: Sequence[str], tile_n: int, transposed: bool, path: Path
) -> None:
    keep(compiled(traces, kinds, tile_n, transposed=transposed), path)


def keep(function: Any, path: Path) -> None:
    """Export what the compiler made, link it, and publish it as ``path``."""
    unlinked = path.with_suffix(f".{os.getpid()}.o")
    function.export_to_c(object_file_path=str(unlinked), function_name=launch.SYMBOL)
    linked = unlinked.with_suffix(".linked")
    subprocess.run(["cc", "-shared", "-o", linked, unlinked], check=True)
    unlinked.unlink()
    linked.rename(path)
