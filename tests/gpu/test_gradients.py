"""Gradients through ``fa_cute.attention``: mods, captured tensors, lse, sinks, and torch's tools.

The rule is the backward's: against fp64 autograd of the oracle, at most twice the error that torch
makes with materialised scores in the same dtype, plus one ulp of the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fa_cute
from variants.softcap import softcap
from variants.t5_relative_bias import t5_relative_bias

from .backward_judging import poison

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


class Shape(NamedTuple):
    """Sizes of a call."""

    batch: int = 2
    seqlen_q: int = 300
    seqlen_k: int = 300
    heads: int = 4
    heads_k: int = 2
    dim: int = 64


SQUARE = Shape()
NAMES = (
    *("softcap", "sigmoid gate", "leaky", "hidden by the mod", "ignores the score", "alibi"),
    *("a number", "t5", "t5 in bf16", "diagonals", "elements", "rows and columns"),
    "a head's factor",
)
Learned = dict[str, torch.Tensor]


def tensors(shape: Shape, dtype: torch.dtype, kind: str = "outliers") -> tuple[torch.Tensor, ...]:
    """q, k, v and dout; k's outliers make some scores large."""
    generator = torch.Generator(DEVICE).manual_seed(11)

    def draw(length: int, heads: int, far: float) -> torch.Tensor:
        size = (shape.batch, length, heads, shape.dim)
        x = torch.randn(size, generator=generator, device=DEVICE)
        if kind == "outliers":
            chosen = torch.rand(size, generator=generator, device=DEVICE) < 0.01
            x = torch.where(chosen, far * x, x)
        return x.to(dtype)

    return (
        draw(shape.seqlen_q, shape.heads, 5.0),
        draw(shape.seqlen_k, shape.heads_k, 5.0),
        draw(shape.seqlen_k, shape.heads_k, 1.0),
        draw(shape.seqlen_q, shape.heads, 5.0),
    )


def _normal(*size: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(size))
    return torch.randn(size, generator=generator, device=DEVICE)


def mods(shape: Shape) -> dict[str, tuple[Learned, Callable[[Learned], Callable]]]:
    """What each mod learns, and the mod as a function of that."""
    h, q, kv = shape.heads, shape.seqlen_q, shape.seqlen_k
    slopes, head = _normal(h).abs() / 8, {"head": 1 + _normal(h) / 8}
    return {
        "softcap": ({}, lambda x: softcap(15.0)),
        "sigmoid gate": ({}, lambda x: lambda s, b, h, q, kv: s * torch.sigmoid(s)),
        "leaky": ({}, lambda x: lambda s, b, h, q, kv: torch.where(s > 0, s, 0.1 * s)),
        "hidden by the mod": (
            {},
            lambda x: lambda s, b, h, q, kv: torch.where((q + kv) % 3 > 0, s * 2, float("-inf")),
        ),
        "ignores the score": ({}, lambda x: lambda s, b, h, q, kv: 0.01 * (kv - q)),
        "alibi": (
            {"slopes": slopes},
            lambda x: lambda s, b, h, q, kv: s - x["slopes"][h] * (q - kv).abs(),
        ),
        "a number": (
            {"cap": torch.tensor(12.0, device=DEVICE)},
            lambda x: lambda s, b, h, q, kv: x["cap"] * torch.tanh(s / x["cap"]),
        ),
        "t5": ({"table": _normal(32, h)}, lambda x: t5_relative_bias(x["table"])),
        "t5 in bf16": (
            {"table": _normal(32, h).bfloat16()},
            lambda x: t5_relative_bias(x["table"]),
        ),
        "diagonals": (
            {"ribbon": _normal(h, q + kv)},
            lambda x: lambda s, b, h, q, kv: s + x["ribbon"][h, q - kv + kv_of(shape)],
        ),
        "elements": (
            {"bias": _normal(h, q, kv)},
            lambda x: lambda s, b, h, q, kv: s + x["bias"][h, q, kv],
        ),
        "rows and columns": (
            {"rows": _normal(shape.batch, q), "columns": _normal(kv)},
            lambda x: lambda s, b, h, q, kv: s + x["rows"][b, q] * x["columns"][kv],
        ),
        "a head's factor": (head, lambda x: lambda s, b, h, q, kv: s * x["head"][h]),
    }


def kv_of(shape: Shape) -> int:
    return shape.seqlen_k


def eager(
    qkv: tuple[torch.Tensor, ...], shape: Shape, options: dict[str, Any], sinks: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) with materialised scores, products in the dtype of q and the rest in fp32."""
    q, k, v = qkv
    keys, values = (x.repeat_interleave(shape.heads // shape.heads_k, 2) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    s = torch.einsum("bqhd,bkhd->bhqk", q, keys).to(wide) * shape.dim**-0.5
    index = [
        torch.arange(n, device=DEVICE).view([-1 if d == at else 1 for d in range(4)])
        for at, n in enumerate(s.shape)
    ]
    if options.get("score_mod"):
        s = options["score_mod"](s, *index).to(wide).expand(s.shape)
    if options.get("causal"):
        seen = index[3] <= index[2] + shape.seqlen_k - shape.seqlen_q
        s = torch.where(seen, s, -torch.inf)
    joined = s
    if sinks is not None:
        column = sinks.to(wide).view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        joined = torch.cat((s, column), 3)
    lse = torch.logsumexp(joined, 3)
    blind = lse == -torch.inf
    p = torch.exp(s - torch.where(blind, 0, lse)[..., None])
    out = torch.einsum("bhqk,bkhd->bqhd", p.to(q.dtype), values)
    return out, lse


def judge(name: str, ours: Any, right: Any, own: Any) -> str | None:
    """What is wrong with a gradient, or None."""
    assert ours is not None and ours.shape == right.shape, name
    assert right.isfinite().all(), name
    error, theirs = (ours.double() - right).abs().max(), (own.double() - right).abs().max()
    ulp = torch.finfo(ours.dtype).eps * right.abs().max()
    # Captured sums are in fp32: their own ulp is far below that of what they add up.
    if ours.dtype == torch.float32:
        ulp = 2.0**-9 * right.abs().max()
    if not error <= 2 * theirs + ulp:
        return f"{name}: {error:.3g}, torch's {theirs:.3g}, largest {right.abs().max():.3g}"
    return None


def close(ours: torch.Tensor, right: torch.Tensor) -> None:
    """Two roundings of one sum in bf16, added up in whatever order."""
    least = float(right.abs().max()) * 2**-8
    torch.testing.assert_close(ours.double(), right.double(), rtol=2**-6, atol=least)


def check(
    learned: Learned,
    build: Callable[[Learned], Callable] | None,
    *,
    shape: Shape = SQUARE,
    dtype: torch.dtype = torch.bfloat16,
    sinks: torch.Tensor | None = None,
    lse_weight: float = 0.3,
    **options: Any,
) -> None:
    """Hold all gradients of one call against the oracle."""
    *qkv, dout = tensors(shape, dtype)
    generator = torch.Generator(DEVICE).manual_seed(3)
    size = (shape.batch, shape.heads, shape.seqlen_q)
    dlse = torch.randn(size, generator=generator, device=DEVICE) * lse_weight

    def run(kind: str) -> list[torch.Tensor]:
        to = torch.float64 if kind == "right" else dtype
        leaves = [x.detach().to(to).requires_grad_() for x in qkv]
        wide = torch.float64 if kind == "right" else None
        held = {n: t.detach().to(wide or t.dtype).requires_grad_() for n, t in learned.items()}
        sink = None if sinks is None else sinks.detach().to(wide or sinks.dtype).requires_grad_()
        given = dict(options)
        if build is not None:
            given["score_mod"] = build(held)
        if kind == "ours":
            poison()
            out, lse = fa_cute.attention(*leaves, sinks=sink, return_lse=True, **given)
        else:
            out, lse = eager(tuple(leaves), shape, given, sink)
        seen = lse != -torch.inf
        loss = (out * dout.to(out.dtype)).sum(dtype=torch.float64)
        if lse_weight:
            loss = loss + (torch.where(seen, lse, 0).double() * dlse).sum()
        wanted = [*leaves, *held.values(), *([] if sink is None else [sink])]
        return list(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))

    names = ["dq", "dk", "dv", *learned, "sinks"]
    found, right, own = run("ours"), run("right"), run("own")
    faults = [
        fault
        for name, *three in zip(names, found, right, own, strict=False)
        if (fault := judge(name, *three))
    ]
    assert not faults, "; ".join(faults)


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


def _loss(leaves: list[torch.Tensor], slopes: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    def score_mod(s, b, h, q, kv):
        return s - slopes[h] * (q - kv).abs()

    return (fa_cute.attention(*leaves, score_mod=score_mod, causal=True) * dout).sum()


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


def test_a_cuda_graph_of_both_passes() -> None:
    """A replay follows the inputs of now, gradients of captured tensors included."""
    *qkv, dout = tensors(SQUARE, torch.bfloat16)
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    slopes = (torch.rand(4, device=DEVICE) / 8).requires_grad_()

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(_loss(leaves, slopes, dout), [*leaves, slopes])

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
        graph.replay()
    torch.cuda.synchronize()
    for ours, want in zip(found, both(), strict=True):
        close(ours, want)


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


def test_only_what_is_required() -> None:
    """q alone, k alone, a captured tensor alone."""
    *qkv, dout = tensors(SQUARE, torch.bfloat16)
    for at in range(3):
        leaves = [x.detach().requires_grad_(i == at) for i, x in enumerate(qkv)]
        out = fa_cute.attention(*leaves)
        out.backward(dout)
        assert [x.grad is not None for x in leaves] == [i == at for i in range(3)]
        assert leaves[at].grad.isfinite().all()
    slopes = torch.zeros(4, device=DEVICE, requires_grad=True)
    _loss([x.detach() for x in qkv], slopes, dout).backward()
    assert slopes.grad.isfinite().all() and slopes.grad.abs().sum() > 0


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
