"""A kernel of nothing but a mod's derivative, in the transposed fragments of the backward.

Compiled on any host and kept in FA_CUTE_CACHE_DIR, as ``tile_kernel`` is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from fa_cute.host import launch
from fa_cute.mods.derivative import differentiable, differentiate
from fa_cute.mods.derived import taught
from fa_cute.mods.graph import Captured, Graph
from fa_cute.mods.trace import trace_score_mod
from tests.tile_kernel import DEVICE, ROOT, ROWS, _folder, keep

TILE_Q = 64


def build(score_mod: Callable) -> Callable:
    """The kernel of a score_mod's derivative, compiled or from FA_CUTE_CACHE_DIR."""
    graph = _derivative(score_mod)
    digest = hashlib.sha256(graph.key.encode())
    sources = [f"fa_cute/device/{name}.py" for name in (*DEVICE, "diagonals", "fixed", "gradient")]
    for path in (*sources, "tests/slope_kernel.py", "tests/slope_device.py"):
        digest.update((ROOT / path).read_bytes())
    path = _folder() / f"{digest.hexdigest()[:24]}.so"
    if not path.exists():
        keep(compiled(graph), path)
    return launch.load(path)


def slopes(
    score_mod: Callable, scores: torch.Tensor, weights: torch.Tensor, scale: float
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """``weights`` times d mod / d score, and the gradients of captured tensors, by their id.

    ``scores`` and ``weights``: (B, H, Sq, Sk) fp32, whole tiles of 64.
    """
    traced, graph = trace_score_mod(score_mod), _derivative(score_mod)
    scores, weights = (x.mT.contiguous() for x in (scores, weights))
    out = torch.full_like(scores, torch.nan)
    targets = [
        torch.zeros(traced.captured[slot].shape, device=scores.device) for slot in taught(graph)
    ]
    captured = tuple(tensor.detach() for tensor in traced.captured)
    given = (captured or None, traced.scalars or None, tuple(targets) or None)
    build(score_mod)(scores, weights, out, given, scale)
    ids = [id(traced.captured[slot]) for slot in taught(graph)]
    return out.mT, dict(zip(ids, targets, strict=True))


def _derivative(score_mod: Callable) -> Graph:
    graph = trace_score_mod(score_mod).graph
    return differentiate(graph, differentiable(graph))


def compiled(graph: Graph, options: str = "") -> Any:
    """The compiler's object for the kernel of a derivative's graph, on fake tensors."""
    import cutlass.cute as cute
    from cutlass import Boolean, Float32, Int32
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from fa_cute.host.fakes import captured_tensor
    from tests.slope_device import SlopeKernel

    def scores() -> Any:
        shape = tuple(cute.sym_int() for _ in range(4))
        strides = (*(cute.sym_int64() for _ in range(3)), 1)
        return make_fake_tensor(Float32, shape, strides, assumed_align=16)

    def like(captured: Captured) -> Any:
        return captured_tensor(Captured("float32", captured.ndim))

    numbers = {"float32": Float32, "int32": Int32, "bool": Boolean}
    given = (
        tuple(map(captured_tensor, graph.captured)) or None,
        tuple(numbers[kind](0) for kind in graph.scalars) or None,
        tuple(like(graph.captured[slot]) for slot in taught(graph)) or None,
    )
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    arguments = (scores(), scores(), scores(), given, Float32(1.0), stream)
    options = f"--enable-tvm-ffi --gpu-arch sm_90a {options}"
    kernel = SlopeKernel(graph, TILE_Q)
    return cute.compile(kernel, *arguments, options=options, no_jit_engine=True)


assert ROWS == TILE_Q, "the kernel's tiles are square, so that lengths fit either way"
