"""The backward's tolerance rule: twice torch's own error in the same dtype, plus one ulp.

Beside it stands the rounding of dP and delta as sums, element by element: each is a sum of Dv
products, cut by ``CUT`` of the sum of their sizes. Where a row sees one key, dP = delta exactly and
dS = P (dP - delta) is 0; so is torch's error, for its softmax takes its delta from that dP. Ours
comes from another kernel, added in another order: 5e-7 to 1.5e-5 in dq and dk, seen on an H200.
That is 2e-3 of an ulp of a gradient of 1: what is allowed for it decides where the gradient is 0.

Torch's own error is that of autograd through SDPA; where SDPA cannot (a window, lse's gradient,
unequal lengths under causal), through the eager formula in that dtype. Both against fp64 autograd
of the formula.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import fa_cute

from .judging import drawn

DEVICE = torch.device("cuda")
# A tensor core adds 16 products at a time and keeps some 21 bits below the largest (``judging``
# tells how that was seen); over the 4 to 16 steps of a sum such cuts do not all add up.
CUT = 2.0**-21
NAMES = ("dq", "dk", "dv")


class Case(NamedTuple):
    """One call and what its loss gives: ``lse`` whether the loss reads lse too."""

    dims: tuple[int, int] = (128, 128)
    lengths: tuple[int, int] = (300, 300)
    heads: tuple[int, int] = (2, 2)
    batch: int = 2
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    kind: str = "normal"
    lse: bool = False
    deterministic: bool = False


class Tensors(NamedTuple):
    """q, k, v ``(B, S, H, ·)``, dout like out, dlse ``(B, Hq, Sq)`` or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None


def tensors(case: Case) -> Tensors:
    """Inputs of the case's kind; dout is always normal with outliers."""
    generator = torch.Generator(DEVICE).manual_seed(1000 * case.lengths[0] + case.lengths[1])

    def draw(length: int, heads: int, width: int, kind: str) -> torch.Tensor:
        return drawn(generator, (case.batch, length, heads, width), kind, case.dtype)

    (seqlen_q, seqlen_k), (d, dv), (hq, hk) = case.lengths, case.dims, case.heads
    q, k = draw(seqlen_q, hq, d, case.kind), draw(seqlen_k, hk, d, case.kind)
    v, dout = draw(seqlen_k, hk, dv, case.kind), draw(seqlen_q, hq, dv, "outliers")
    dlse = None
    if case.lse:
        shape = (case.batch, hq, seqlen_q)
        dlse = torch.randn(shape, generator=generator, device=DEVICE)
    return Tensors(q, k, v, dout, dlse)


def gradients(case: Case, x: Tensors) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) of ``fa_cute.attention``."""
    leaves = [t.detach().requires_grad_() for t in x[:3]]
    out, lse = fa_cute.attention(
        *leaves,
        causal=case.causal,
        window=case.window,
        scale=case.scale,
        return_lse=True,
        deterministic=case.deterministic,
    )
    poison()
    if x.dlse is None:
        return torch.autograd.grad(out, leaves, x.dout)
    return torch.autograd.grad((out, lse), leaves, (x.dout, x.dlse))


def poison() -> None:
    """Leave NaN in the allocator's free blocks, where workspaces will be."""
    blocks = [torch.full((1 << n,), math.nan, device=DEVICE) for n in range(9, 25)]
    del blocks


def formula(case: Case, x: Tensors, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) by autograd of materialised scores in ``dtype``."""
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in x[:3])
    p, lse = probabilities(case, q, k)
    values = v.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2)
    loss = ((p @ values).transpose(1, 2) * x.dout.to(dtype)).sum()
    if x.dlse is not None:
        loss = loss + (lse * x.dlse.to(dtype)).sum()
    return torch.autograd.grad(loss, (q, k, v))


def probabilities(
    case: Case, q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """P ``(B, Hq, Sq, Sk)`` and lse ``(B, Hq, Sq)``; 0 in rows that see nothing."""
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2)
    scores = q.transpose(1, 2) @ keys.transpose(2, 3) * (case.scale or q.shape[3] ** -0.5)
    hidden = hidden_of(case)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    blind = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(blind, 0.0)
    return scores.softmax(-1).masked_fill(blind, 0.0), scores.logsumexp(-1).masked_fill(
        blind[..., 0], 0.0
    )


def hidden_of(case: Case) -> torch.Tensor | None:
    """``(Sq, Sk)``, True where causal or the window hides a key; None where nothing does."""
    left, right = (None if b == -1 else b for b in case.window or (None, None))
    right = 0 if case.causal else right
    if left is None and right is None:
        return None
    seqlen_q, seqlen_k = case.lengths
    diagonal = torch.arange(seqlen_q, device=DEVICE)[:, None] + seqlen_k - seqlen_q
    ahead = torch.arange(seqlen_k, device=DEVICE)[None, :] - diagonal
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if left is not None:
        hidden |= ahead < -left
    if right is not None:
        hidden |= ahead > right
    return hidden


def torch_gradients(case: Case, x: Tensors) -> tuple[torch.Tensor, ...]:
    """What torch makes of it in the case's dtype."""
    square = case.lengths[0] == case.lengths[1] or not case.causal
    if case.window is not None or case.lse or not square:
        return formula(case, x, case.dtype)
    q, k, v = (t.detach().clone().requires_grad_() for t in x[:3])
    out = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)),
        is_causal=case.causal,
        scale=case.scale,
        enable_gqa=case.heads[0] != case.heads[1],
    )
    return torch.autograd.grad(out, (q, k, v), x.dout.transpose(1, 2).contiguous())


def judge(case: Case, x: Tensors, found: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """Hold gradients against the oracle; the errors, or AssertionError with the figures."""
    right, own = formula(case, x, torch.float64), torch_gradients(case, x)
    figures, faults, cut = {}, [], _cut_sum(case, x)
    for name, a, b, c in zip(NAMES, found, right, own, strict=True):
        assert a.shape == b.shape and a.dtype == case.dtype and b.isfinite().all()
        error, theirs = (a.double() - b).abs(), (c.double() - b).abs().max()
        ulp = torch.finfo(case.dtype).eps * b.abs().max()
        figures[name] = (float(error.max()), float(theirs), float(b.abs().max()))
        rms, own_rms = (t.square().mean().sqrt() for t in (error, (c.double() - b).abs()))
        allowed = 2 * theirs + ulp + cut[name]
        cut_rms = cut[name].square().mean().sqrt()
        within = (error <= allowed).all() and rms <= 2 * own_rms + ulp * 2**-4 + cut_rms
        if not within:
            faults.append(
                f"{name}: error {error.max():.3g}, rms {rms:.3g}; torch's {theirs:.3g}, "
                f"rms {own_rms:.3g}; largest {b.abs().max():.3g}"
            )
    assert not faults, f"{case}: {'; '.join(faults)}"
    return figures


def _cut_sum(case: Case, x: Tensors) -> dict[str, torch.Tensor]:
    """What ``CUT`` of every sum |dO| |V| makes in dq and dk, like those; nothing in dv."""
    q, k, v, dout = (t.detach().abs().double() for t in x[:4])
    ratio = q.shape[2] // k.shape[2]
    p, _ = probabilities(case, *(t.detach().double() for t in x[:2]))
    keys, values = (t.repeat_interleave(ratio, 2).transpose(1, 2) for t in (k, v))
    p *= dout.transpose(1, 2) @ values.transpose(2, 3) * abs(case.scale or q.shape[3] ** -0.5) * CUT
    dk = (p.transpose(2, 3) @ q.transpose(1, 2)).unflatten(1, (-1, ratio)).sum(2)
    return {"dq": (p @ keys).transpose(1, 2), "dk": dk.transpose(1, 2), "dv": torch.zeros_like(v)}


def check(case: Case) -> dict[str, Any]:
    """Run the case and judge it."""
    x = tensors(case)
    return judge(case, x, gradients(case, x))
