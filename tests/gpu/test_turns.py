"""A deterministic backward of many more tiles than SMs: each waits for tiles that have begun."""

from __future__ import annotations

import math

import pytest
import torch

import fa_cute

from .backward_judging import Case, Tensors, gradients, tensors

pytestmark = pytest.mark.gpu
BOUNDS = [(False, None), (True, None), (False, (1000, 200)), (True, (1000, None))]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Sums in another order, rounded once: an ulp of the largest part."""
    return bool((a.float() - b.float()).abs().max() <= 2**-7 * b.float().abs().max())


@pytest.mark.parametrize("mask", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("dim", "batch", "length", "heads"),
    [
        *((128, 2, 8192, (8, 8)), (64, 2, 8192, (8, 8)), (256, 2, 8192, (8, 8))),
        *((256, 1, 8192, (16, 16)), (256, 4, 8192, (4, 4)), (256, 2, 8192, (16, 4))),
        *((256, 16, 1024, (8, 8)), (192, 2, 4096, (8, 8))),
    ],
    ids=str,
)
def test_repeats(
    dim: int, batch: int, length: int, heads: tuple[int, int], mask: tuple[bool, tuple | None]
) -> None:
    """1,024 to 2,048 tiles (512 at head dim 192): bit for bit, and beside the plain kernel's."""
    causal, window = mask
    case = Case((dim, dim), (length, length), heads, batch, causal=causal, window=window)
    x, turned = tensors(case), case._replace(deterministic=True)
    first = gradients(turned, x)
    plain = gradients(case, x)
    for _ in range(5):
        again = gradients(turned, x)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(first[1], plain[1]) and torch.equal(first[2], plain[2])
    assert close(first[0], plain[0])


@pytest.mark.parametrize("dim", [128, 256])
def test_beside_itself_and_others(dim: int) -> None:
    """Three streams at once, each holding SMs that the others' CTAs would begin on."""
    case = Case((dim, dim), (4096, 4096), (8, 8), causal=True, deterministic=True)
    x = tensors(case)
    first = gradients(case, x)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(3):
        found = []
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append(gradients(case._replace(deterministic=number > 0), x))
        torch.cuda.synchronize()
        for again in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dim", [128, 256])
def test_a_graph_replayed(dim: int) -> None:
    """Its counters are its own, and zeroed in it."""
    x: Tensors = tensors(Case((dim, dim), (4096, 4096), (4, 4), causal=True))
    leaves = [t.detach().requires_grad_() for t in x[:3]]

    def call() -> tuple[torch.Tensor, ...]:
        out = fa_cute.attention(*leaves, causal=True, deterministic=True)
        return torch.autograd.grad(out, leaves, x.dout)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        first = call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        found = call()
    for _ in range(5):
        for tensor in found:
            tensor.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))
