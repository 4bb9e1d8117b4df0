"""Gradients through ``fa_cute.attention``: mods, captured tensors, lse, sinks, torch's tools."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fa_cute
from fa_cute.host import compile as compiling
from fa_cute.plan import BACKWARD
from variants.softcap import softcap

from .backward_judging import poison
from .learned import DEVICE, NAMES, SQUARE, Learned, Shape, check, close, mods, tensors

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_mods(name: str, causal: bool) -> None:
    check(*mods(SQUARE)[name], causal=causal)


@pytest.mark.parametrize("name", ["softcap", "alibi", "t5", "elements", "rows and columns"])
def test_mods_elsewhere(name: str) -> None:
    """Lengths and head dims other than those above, in fp16."""
    for shape in (
        Shape(1, 65, 333, 3, 1, 128),
        Shape(2, 257, 129, 4, 4, 128),
        Shape(1, 130, 200, 8, 1, 64),
    ):
        check(*mods(shape)[name], shape=shape, dtype=torch.float16)


@pytest.mark.parametrize("dim", [96, 192, 256])
def test_a_table_beside_wide_heads(dim: int) -> None:
    """Its values by diagonal take shared memory that Q and dO have otherwise."""
    shape = Shape(1, 130, 200, 4, 2, dim)
    check(*mods(shape)["t5"], shape=shape, causal=True)


def test_a_mask_mod_beside_a_score_mod() -> None:
    document = (torch.arange(300, device=DEVICE) // 70)[None]

    def both(x: Learned) -> Callable:
        def score_mod(s, b, h, q, kv):
            inside = document[0, q] == document[0, kv]
            return torch.where(inside, 15 * torch.tanh(s / 15), float("-inf"))

        return score_mod

    check({}, both)
    *qkv, dout = tensors(SQUARE, torch.bfloat16)

    def mask_mod(b, h, q, kv):
        return document[0, q] == document[0, kv]

    grads = []
    masked = {"score_mod": softcap(15.0), "mask_mod": mask_mod}
    for options in (masked, {"score_mod": both({})}):
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = fa_cute.attention(*leaves, **options)
        grads.append(torch.autograd.grad(out, leaves, dout))
    for one, other in zip(*grads, strict=True):
        close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks(dtype: torch.dtype) -> None:
    sinks = torch.linspace(-2, 4, 4, device=DEVICE).to(dtype)
    check({}, None, sinks=sinks, causal=True)
    check({}, None, sinks=sinks, shape=Shape(2, 200, 64), causal=True)  # rows with a sink alone


def test_a_sink_s_gradient_alone() -> None:
    """64 scores of 0, a sink of 0: out = 64/65, lse = ln 65."""
    q = torch.zeros(1, 1, 1, 64, device=DEVICE, dtype=torch.bfloat16)
    k = torch.zeros(1, 64, 1, 64, device=DEVICE, dtype=torch.bfloat16)
    sinks = torch.zeros(1, device=DEVICE, requires_grad=True)
    out, lse = fa_cute.attention(q, k, torch.ones_like(k), sinks=sinks, return_lse=True)
    (of_lse,) = torch.autograd.grad(lse.sum(), sinks, retain_graph=True)
    (of_out,) = torch.autograd.grad(out.sum(), sinks)
    assert of_lse.item() == pytest.approx(1 / 65, rel=1e-5)
    assert of_out.item() == pytest.approx(-64 * 64 / 65**2, rel=1e-2)


@pytest.mark.parametrize("scale", [-0.2, 0.0, 0.2])
def test_scale(scale: float) -> None:
    *qkv, dout = tensors(SQUARE, torch.bfloat16, "normal")
    leaves = [x.detach().requires_grad_() for x in qkv]
    found = torch.autograd.grad(fa_cute.attention(*leaves, scale=scale), leaves, dout)
    wide = [x.detach().double().requires_grad_() for x in qkv]
    out = fa_cute.reference.attention(*wide, scale=scale)
    right = torch.autograd.grad(out, wide, dout.double(), allow_unused=True, materialize_grads=True)
    for ours, theirs in zip(found, right, strict=True):
        assert (ours.double() - theirs).abs().max() <= 0.02 * theirs.abs().max() + 1e-6


def _loss(
    leaves: list[torch.Tensor],
    slopes: torch.Tensor,
    dout: torch.Tensor,
    deterministic: bool = False,
) -> torch.Tensor:
    def score_mod(s, b, h, q, kv):
        return s - slopes[h] * (q - kv).abs()

    options = {"score_mod": score_mod, "causal": True, "deterministic": deterministic}
    return (fa_cute.attention(*leaves, **options) * dout).sum()


def test_checkpointing() -> None:
    *qkv, dout = tensors(SQUARE, torch.bfloat16)
    leaves = [x.detach().requires_grad_() for x in qkv]
    slopes = (torch.rand(4, device=DEVICE) / 8).requires_grad_()
    right = torch.autograd.grad(_loss(leaves, slopes, dout), [*leaves, slopes])
    for reentrant in (False, True):
        loss = checkpoint(lambda *x: _loss(list(x[:3]), x[3], dout), *leaves, slopes,
                          use_reentrant=reentrant)  # fmt: skip
        for leaf in (*leaves, slopes):
            leaf.grad = None
        loss.backward()
        for leaf, want in zip((*leaves, slopes), right, strict=True):
            close(leaf.grad, want)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cuda_graph_of_both_passes(deterministic: bool) -> None:
    """A replay follows the inputs of now, gradients of captured tensors included."""
    *qkv, dout = tensors(SQUARE, torch.bfloat16)
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    slopes = (torch.rand(4, device=DEVICE) / 8).requires_grad_()

    def both() -> tuple[torch.Tensor, ...]:
        loss = _loss(leaves, slopes, dout, deterministic)
        return torch.autograd.grad(loss, [*leaves, slopes])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both()
    with torch.no_grad():
        leaves[0].copy_(leaves[0].flip(1))
        slopes.mul_(2)
    for _ in range(2):
        for x in found:
            x.fill_(math.nan)
        graph.replay()
    torch.cuda.synchronize()
    for ours, want in zip(found, both(), strict=True):
        close(ours, want)
        assert not deterministic or torch.equal(ours, want)


def test_autocast() -> None:
    q, k, v, dout = tensors(SQUARE, torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = fa_cute.attention(*leaves)
    assert out.dtype == torch.bfloat16
    found = torch.autograd.grad(out, leaves, dout.bfloat16())
    assert all(x.dtype == torch.float32 and x.isfinite().all() for x in found)
    halves = [x.detach().bfloat16().requires_grad_() for x in leaves]
    right = torch.autograd.grad(fa_cute.attention(*halves), halves, dout.bfloat16())
    for ours, theirs in zip(found, right, strict=True):
        close(ours, theirs)


def test_deterministic_repeats() -> None:
    *qkv, dout = tensors(Shape(2, 700, 700), torch.bfloat16)
    leaves = [x.detach().requires_grad_() for x in qkv]

    def once() -> tuple[torch.Tensor, ...]:
        poison()
        out = fa_cute.attention(*leaves, score_mod=softcap(15.0), causal=True, deterministic=True)
        return torch.autograd.grad(out, leaves, dout)

    first = once()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_only_what_is_required(dim: int, deterministic: bool) -> None:
    """Of q, k, v and slopes each alone: the same bits where sums have an order."""
    *qkv, dout = tensors(Shape(2, 200, 300, 4, 2, dim), torch.bfloat16)
    slopes = torch.rand(4, device=DEVICE) / 8

    def found(required: tuple[int, ...]) -> list[torch.Tensor | None]:
        leaves = [x.detach().requires_grad_(i in required) for i, x in enumerate((*qkv, slopes))]
        loss = _loss(leaves[:3], leaves[3], dout, deterministic)
        poison()
        loss.backward()
        return [x.grad for x in leaves]

    together = found((0, 1, 2, 3))
    for required in ((0,), (1,), (2,), (3,), (1, 2), (0, 3)):
        alone = found(required)
        assert [x is not None for x in alone] == [i in required for i in range(4)]
        for i in required:
            if deterministic or i in (1, 2):
                assert torch.equal(alone[i], together[i])
            close(alone[i], together[i])
    plans = [p for p in compiling.plans_in_memory() if p.direction == BACKWARD]
    computed = {p.gradients for p in plans if p.head_dim == dim}
    assert {(True, False), (False, True), (False, False)} <= computed


def test_lse_s_gradient_with_one_key() -> None:
    """lse of one key is its score: dq = scale k, dk = scale sum of q, dv = 0."""
    q, k, v, _ = tensors(Shape(1, 65, 1, 2, 2), torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    _, lse = fa_cute.attention(*leaves, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), leaves)
    scale = 1 / math.sqrt(64)
    close(dq, (scale * k).expand(dq.shape))
    close(dk, scale * q.float().sum(1, keepdim=True))
    assert (dv == 0).all()


def test_right_behind_what_writes_dout() -> None:
    """Launched while a product still writes dout, with other work between: no kernel runs early."""
    *qkv, dout = tensors(Shape(1, 700, 700, 4, 4), torch.bfloat16)
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = fa_cute.attention(*leaves, causal=True)
    right = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    noise, identity = torch.randn(2048, 2048, device=DEVICE), torch.eye(4 * 64, device=DEVICE)
    for i in range(200):
        if i % 10 == 0:
            noise = noise @ noise.T * 1e-4
        late = (dout.flatten(2).float() @ identity).bfloat16().view(dout.shape)
        found = torch.autograd.grad(out, leaves, late, retain_graph=True)
        assert torch.equal(found[1], right[1]) and torch.equal(found[2], right[2])
        close(found[0], right[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current() -> None:
    *qkv, dout = tensors(SQUARE, torch.bfloat16)
    found = []
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        leaves = [x.detach().to(device).requires_grad_() for x in qkv]
        slopes = torch.full((4,), 0.1, device=device, requires_grad=True)
        loss = _loss(leaves, slopes, dout.to(device), deterministic=True)
        found.append([x.cpu() for x in torch.autograd.grad(loss, [*leaves, slopes])])
    assert torch.cuda.current_device() == 0
    for one, two, three in zip(*found, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)
