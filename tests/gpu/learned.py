"""Calls with learned mods, and the rule that their gradients are held to.

The rule is the backward's: against fp64 autograd of the oracle, at most twice the error that torch
makes with materialised scores in the same dtype, plus one ulp of the largest number in that dtype;
the largest error, and the root mean square. It compares the tensors' errors, not those of element
with element: torch's error in one number is one draw from a distribution about 0, and twice that is
no bound (of two draws of one distribution one is more than twice the other in three of ten cases).
So where a gradient has fewer than ``NUMBERS`` elements (a learned cap has one), the call is made
with so many draws of q, k, v and dout, and the gradients of all are joined to one tensor of at
least ``NUMBERS``. That tensor is held to the rule as any other. A single call is then not judged
alone: it may be off by up to twice torch's largest error over the draws.

Ours and torch's differ in kind there. A sum over all scores takes from each row the error of its
delta, and ours is rowsum(O dO) of an O rounded to bf16, as in every kernel that does not keep P;
torch's, sum(P dP), has none, but its dP is rounded. Simulated in fp64 over 24 draws (300 x 300, cap
12), rms errors of the cap's gradient: torch's 0.0195 (causal 0.0157), ours 0.0257 (0.0270), of an O
that is not rounded 0.0161 (0.0182). On an H200 over 40 draws: torch's 0.022 (0.015), ours 0.033
(0.026), the largest 0.053 (0.041) and 0.081 (0.094); with tanh spelled by exponentials 0.032, so
the hardware's tanh is not it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import fa_cute
from variants.softcap import softcap
from variants.t5_relative_bias import t5_relative_bias

from .backward_judging import poison

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
NUMBERS = 32


def tensors(
    shape: Shape, dtype: torch.dtype, kind: str = "outliers", seed: int = 11
) -> tuple[torch.Tensor, ...]:
    """q, k, v and dout; k's outliers make some scores large."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

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
    if options.get("mask_mod"):
        s = torch.where(options["mask_mod"](*index), s, -torch.inf)
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


def judge(name: str, three: list[tuple[torch.Tensor, ...]], dtype: torch.dtype) -> str | None:
    """What is wrong with a gradient, or None; ``three``: (ours, right, torch's) of each draw.

    ``dtype``: the call's, in which torch computes; a captured tensor's own may be wider.
    """
    for ours, right, _ in three:
        assert ours is not None and ours.shape == right.shape and right.isfinite().all(), name
    ours, right, own = (torch.stack([draw[at].double() for draw in three]) for at in range(3))
    error, theirs, largest = (ours - right).abs(), (own - right).abs(), right.abs().max()
    ulp = torch.finfo(dtype).eps * largest.log2().floor().exp2()  # 0 of 0
    rms, own_rms = (x.square().mean().sqrt() for x in (error, theirs))
    if error.max() <= 2 * theirs.max() + ulp and rms <= 2 * own_rms + ulp:
        return None
    return (
        f"{name}: error {error.max():.3g}, rms {rms:.3g}; torch's {theirs.max():.3g}, "
        f"rms {own_rms:.3g}; largest {largest:.3g}, ulp {ulp:.3g}"
    )


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
    """Hold all gradients of a call against the oracle, over enough draws of its inputs."""
    few = min([t.numel() for t in learned.values()] + ([] if sinks is None else [sinks.numel()]),
              default=NUMBERS)  # fmt: skip
    names = ["dq", "dk", "dv", *learned, *([] if sinks is None else ["sinks"])]
    draws: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in names]
    for seed in range(-(-NUMBERS // few)):
        given = Given(learned, build, shape, dtype, sinks, lse_weight, options, seed)
        three = zip(*(given.gradients(kind) for kind in ("ours", "right", "own")), strict=True)
        for held, one in zip(draws, three, strict=True):
            held.append(one)
    judged = [judge(name, held, dtype) for name, held in zip(names, draws, strict=True)]
    assert not any(judged), "; ".join(fault for fault in judged if fault)


class Given(NamedTuple):
    """One draw of a call; see ``check``."""

    learned: Learned
    build: Callable[[Learned], Callable] | None
    shape: Shape
    dtype: torch.dtype
    sinks: torch.Tensor | None
    lse_weight: float
    options: dict[str, Any]
    seed: int

    def gradients(self, kind: str) -> list[torch.Tensor]:
        """Ours, the right ones (fp64), or torch's own in the dtype."""
        *qkv, dout = tensors(self.shape, self.dtype, seed=11 + self.seed)
        generator = torch.Generator(DEVICE).manual_seed(3 + self.seed)
        size = (self.shape.batch, self.shape.heads, self.shape.seqlen_q)
        dlse = torch.randn(size, generator=generator, device=DEVICE) * self.lse_weight

        def leaf(x: torch.Tensor) -> torch.Tensor:
            return x.detach().to(torch.float64 if kind == "right" else x.dtype).requires_grad_()

        leaves, held = [leaf(x) for x in qkv], {n: leaf(t) for n, t in self.learned.items()}
        sink = None if self.sinks is None else leaf(self.sinks)
        given = dict(self.options)
        if self.build is not None:
            given["score_mod"] = self.build(held)
        if kind == "ours":
            poison()
            out, lse = fa_cute.attention(*leaves, sinks=sink, return_lse=True, **given)
        else:
            out, lse = eager(tuple(leaves), self.shape, given, sink)
        loss = (out * dout.to(out.dtype)).sum(dtype=torch.float64)
        if self.lse_weight:
            loss = loss + (torch.where(lse != -torch.inf, lse, 0).double() * dlse).sum()
        wanted = [*leaves, *held.values(), *([] if sink is None else [sink])]
        return list(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))
