"""The gradient's Python without a GPU: what is asked of the kernels, and what becomes of it.

The kernels' places are taken by torch: ``run`` by the CPU path, ``backward`` by its autograd.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fa_cute
from fa_cute import api, autograd, reference
from fa_cute.host import backward as host
from fa_cute.host.planning import NO_MODS, Mods
from fa_cute.mods.derived import contributions, taught
from fa_cute.mods.emit_torch import values_of
from fa_cute.plan import FIXED, Extra

B, SQ, SK, HQ, HK, D = 2, 5, 7, 4, 2, 16


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, SQ, HQ, D), (B, SK, HK, D), (B, SK, HK, D))
    return tuple(torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes)


class Stand:
    """Torch in the kernels' places; ``needs`` is what the last backward was asked for."""

    def __init__(self, mods: Mods, options: dict[str, Any], sinks: torch.Tensor | None) -> None:
        self.mods, self.options, self.sinks = mods, options, sinks
        self.needs: host.Needs | None = None

    def scores(self, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
        keys = k.repeat_interleave(HQ // HK, 2)
        return torch.einsum("bqhd,bkhd->bhqk", q.double(), keys.double()) * scale

    def backward(
        self,
        problem: Any,
        plans: Any,
        saved: host.Saved,
        gradients: tuple,
        extra: Extra,
        launch: Any,
        *,
        needs: host.Needs,
    ) -> host.Gradients:
        self.needs = needs
        q, k, v, out, lse = (x.double() for x in saved)
        dout, dlse = gradients
        delta = (out * dout.double()).sum(-1).transpose(1, 2)
        delta = delta if dlse is None else delta - dlse
        s = self.scores(q, k, launch)
        slope, graph = torch.ones_like(s), plans
        place = _leaves(s)
        if graph is not None:
            asked = [graph.result, graph.more[0]]
            s, slope = values_of(graph, asked, extra.captured, extra.scalars or (), place)
        p = torch.exp(s - lse[..., None])
        values = v.repeat_interleave(HQ // HK, 2)
        dp = torch.einsum("bqhd,bkhd->bhqk", dout.double(), values)
        d_score = p * (dp - delta[..., None])
        if graph is not None:
            self._captured(graph, extra, place, d_score)
        ds = d_score * slope * launch
        dq = torch.einsum("bhqk,bkhd->bqhd", ds, k.repeat_interleave(HQ // HK, 2))
        dk = torch.einsum("bhqk,bqhd->bkhd", ds, q).unflatten(2, (HK, -1)).sum(3)
        dv = torch.einsum("bhqk,bqhd->bkhd", p, dout.double()).unflatten(2, (HK, -1)).sum(3)
        given = [x if need else None for x, need in zip((dq, dk, dv), needs, strict=False)]
        kinds = zip(given, saved[:3], strict=True)
        return host.Gradients(*(x if x is None else x.to(y.dtype) for x, y in kinds), delta)

    def _captured(self, graph: Any, extra: Extra, place: dict, d_score: torch.Tensor) -> None:
        sums = dict(zip(taught(graph), extra.gradients or (), strict=True))
        for one in contributions(graph):
            args = graph.nodes[one.load].args
            (value,) = values_of(graph, [one.value], extra.captured, (), place)
            index = [
                x.long().view((1,) * (4 - x.ndim) + x.shape).expand(d_score.shape)
                for x in values_of(graph, args, extra.captured, (), place)
            ]
            added = (d_score * value).to(sums[one.slot].dtype)
            if index:
                sums[one.slot].index_put_(tuple(index), added, accumulate=True)
            else:
                sums[one.slot] += added.sum()


def _leaves(s: torch.Tensor) -> dict[str, torch.Tensor]:
    leaves = {"score": s}
    for at, name in enumerate(("b", "h", "q", "kv")):
        shape = [-1 if d == at else 1 for d in range(4)]
        leaves[name] = torch.arange(s.shape[at]).view(shape)
    return leaves


def called(
    monkeypatch: pytest.MonkeyPatch,
    qkv: tuple[torch.Tensor, ...],
    *,
    sinks: torch.Tensor | None = None,
    score_mod: Any = None,
    scale: float = 0.3,
    lse_gradient: bool = True,
) -> tuple[Stand, torch.Tensor, torch.Tensor]:
    """(stand, out, lse) of a recorded call whose kernels are torch."""
    mods = NO_MODS if score_mod is None else Mods.of(score_mod, None)
    stand = Stand(mods, {}, sinks)
    monkeypatch.setattr(host, "backward", stand.backward)
    sign, positive = api.positive_scale(scale)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return fa_cute.attention(
            *qkv, sinks=sinks, score_mod=score_mod, scale=scale, return_lse=True
        )

    graph = autograd.derivative_of(mods)
    plans = None if graph is None else _Plans(graph)
    call = autograd.Call(run, None, plans, positive, mods.scalars or None, sign)
    return stand, *autograd.attend(call, qkv, sinks, mods)


class _Plans:
    """Stands for the plans: ``autograd`` reads only the main one's score_mod."""

    def __init__(self, graph: Any) -> None:
        self.main, self.score_mod, self.deterministic = self, graph, False
        self.more, self.result, self.nodes = graph.more, graph.result, graph.nodes


def check(found: Any, right: Any) -> None:
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-5)


def loss(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return (out.double() ** 2).sum() + (lse.double() * 0.3).sin().sum()


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_the_scale_s_sign(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    qkv = inputs()
    _, out, lse = called(monkeypatch, qkv, scale=scale)
    found = torch.autograd.grad(loss(out, lse), qkv)
    right = reference.attention(*qkv, scale=scale, return_lse=True)
    check(found, torch.autograd.grad(loss(*right), qkv))


def test_captured_tensors_and_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = inputs()
    slopes = torch.linspace(0.1, 0.9, HQ).requires_grad_()
    cap, unused, still = torch.tensor(3.0).requires_grad_(), torch.rand(2), torch.rand(SK)
    sinks = torch.linspace(-1, 1, HQ).requires_grad_()
    unused.requires_grad_()

    def score_mod(s, b, h, q, kv):
        bent = cap * torch.tanh(s / cap) - slopes[h] * (q - kv).abs()
        return bent + still[kv] + torch.floor(unused[b])

    leaves = (*qkv, slopes, cap, sinks)
    _, out, lse = called(monkeypatch, qkv, sinks=sinks, score_mod=score_mod)
    found = torch.autograd.grad(loss(out, lse), (*leaves, unused), allow_unused=True)
    assert found[-1] is None
    options = {"sinks": sinks, "score_mod": score_mod, "scale": 0.3, "return_lse": True}
    right = torch.autograd.grad(loss(*reference.attention(*qkv, **options)), leaves)
    check(found[:-1], right)
    assert [x.dtype for x in found[:-1]] == [x.dtype for x in leaves]


def test_only_what_is_required_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    stand, out, lse = called(monkeypatch, (q.detach(), k, v.detach()))
    loss(out, lse).backward()
    assert stand.needs == host.Needs(False, True, False, False) and q.grad is None
    sinks = torch.zeros(HQ, requires_grad=True)
    plain = tuple(t.detach() for t in (q, k, v))
    stand, out, lse = called(monkeypatch, plain, sinks=sinks)
    loss(out, lse).backward()
    assert not any(stand.needs)
    again = reference.attention(*plain, sinks=(other := sinks.detach().requires_grad_()),
                                scale=0.3, return_lse=True)  # fmt: skip
    loss(*again).backward()
    check([sinks.grad], [other.grad])


def test_a_loss_of_one_result(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = inputs()
    for at in (0, 1):
        _, *results = called(monkeypatch, qkv)
        found = torch.autograd.grad(results[at].sum(), qkv)
        right = reference.attention(*qkv, scale=0.3, return_lse=True)[at]
        check(found, torch.autograd.grad(right.sum(), qkv, materialize_grads=True))


def test_twice_differentiating_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = inputs()
    _, out, lse = called(monkeypatch, qkv)
    for total in (loss(out, lse), out.sum()):  # of the sum dout requires no gradient
        (dq,) = torch.autograd.grad(total, qkv[0], create_graph=True, retain_graph=True)
        with pytest.raises(RuntimeError, match="differentiated twice"):
            dq.sum().backward()


@pytest.mark.parametrize("of", ["dq", "dcap"])
@pytest.mark.parametrize("to", ["weight", "cap", "sinks", "dout"])
def test_twice_differentiating_is_an_error_with_respect_to_anything(
    monkeypatch: pytest.MonkeyPatch, of: str, to: str
) -> None:
    """``torch.autograd.grad`` walks only towards what it is asked for: each way must end here."""
    leaves = {name: torch.tensor(1.5, requires_grad=True) for name in ("weight", "cap", "dout")}
    leaves["sinks"] = torch.zeros(HQ, requires_grad=True)
    q, k, v = (t.detach() for t in inputs())
    q = q * leaves["weight"]
    _, out, _ = called(
        monkeypatch,
        (q, k, v),
        sinks=leaves["sinks"],
        score_mod=lambda s, b, h, q, kv: s * leaves["cap"],
    )
    by = q if of == "dq" else leaves["cap"]
    (given,) = torch.autograd.grad(out.sum() * leaves["dout"], by, create_graph=True)
    penalty = given.square().sum() * leaves["weight"] * leaves["cap"]
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(penalty, leaves[to], allow_unused=True)


def test_what_requires_no_gradient_gets_none() -> None:
    table = torch.rand(HQ).requires_grad_()
    mods = Mods.of(lambda s, b, h, q, kv: s * table[h], None)
    assert taught(autograd.derivative_of(mods)) == (0,)
    still = table.detach()
    mods = Mods.of(lambda s, b, h, q, kv: s * still[h], None)
    assert taught(autograd.derivative_of(mods)) == ()


def _words(terms: list[float]) -> list[int]:
    """The words of a fixed-point sum as ``device/fixed.py`` adds them, in Python's integers."""
    words = [0] * FIXED.words
    for term in terms:
        if not math.isfinite(term) or abs(term) >= 2.0**47:
            words[-1] += 1
            continue
        mantissa, exponent = math.frexp(abs(term))
        place = exponent - 24 - FIXED.lowest
        integer = int(mantissa * 2**24) >> max(0, -place)
        at, shift = divmod(max(0, place), 32)
        integer = (integer << shift) * (-1 if term < 0 else 1)
        high = (integer + 2**31) >> 32
        words[at] += integer - (high << 32)
        words[at + 1] += high
    return words


def test_fixed_point_sums() -> None:
    """Exact, in any order, over 30 orders of magnitude; NaN where a term was not finite."""
    generator = torch.Generator().manual_seed(0)
    signed = torch.randn(400, generator=generator)
    sizes = torch.randint(-40, 40, (400,), generator=generator)
    terms = torch.ldexp(signed, sizes).tolist()
    words = _words(terms)
    assert words == _words(terms[::-1]) and all(abs(word) < 2**62 for word in words)
    exact = math.fsum(terms)
    found = autograd.fixed_total(torch.tensor([words, _words([1.0, math.inf]), _words([])]))
    assert found[0].item() == pytest.approx(exact, rel=1e-15)
    assert found[1].isnan() and found[2] == 0
    assert autograd.fixed_total(torch.tensor(_words([2.0**-80, -(2.0**-70)]))) == -(2.0**-70)


def test_an_empty_problem_has_gradients() -> None:
    """No key: what a CUDA call does, on CPU tensors. lse is the sink."""
    q = torch.rand(B, SQ, HQ, 64, dtype=torch.bfloat16, requires_grad=True)
    k = torch.rand(B, 0, HK, 64, dtype=torch.bfloat16, requires_grad=True)
    sinks = torch.zeros(HQ, requires_grad=True)
    options = api.Options(False, None, None, True, False)
    out, lse = api.on_cuda((q, k, k), NO_MODS, options, None, sinks)
    (out.sum() + 2 * lse.sum()).backward()
    assert (q.grad == 0).all() and k.grad.shape == k.shape
    assert (sinks.grad == 2 * B * SQ).all()
    with pytest.raises(ValueError, match="out= has no gradient"):
        api.on_cuda((q, k, k), NO_MODS, options, torch.empty_like(q), sinks)


@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_an_empty_problem_has_gradients_of_captured_tensors(sizes: tuple[int, int, int]) -> None:
    """Zeros where the mod has a derivative, none where it has not: as on the CPU path."""
    batch, seqlen_q, seqlen_k = sizes
    q, k = (torch.rand(batch, n, 2, 64, dtype=torch.bfloat16) for n in (seqlen_q, seqlen_k))
    slopes, steps = torch.rand(2, requires_grad=True), torch.rand(2, requires_grad=True)
    mods = Mods.of(lambda s, b, h, q, kv: s * slopes[h] + torch.floor(steps[h]), None)
    options = api.Options(False, None, None, True, False)
    out, lse = api.on_cuda((q, k, k), mods, options, None, None)
    leaves = [slopes, steps]
    found = torch.autograd.grad(out.sum() + lse.sum(), leaves, allow_unused=True)
    assert (found[0] == 0).all() and found[1] is None


def test_a_captured_tensor_made_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """autograd refuses to save one; a mask planned in a validation step holds such tables."""
    with torch.inference_mode():
        table = torch.linspace(0.5, 1.5, HQ)
    qkv, scores = inputs(), table.clone()
    _, out, lse = called(monkeypatch, qkv, score_mod=lambda s, b, h, q, kv: s * table[h])
    found = torch.autograd.grad(loss(out, lse), qkv)
    options = {"score_mod": lambda s, b, h, q, kv: s * scores[h], "scale": 0.3}
    right = reference.attention(*qkv, return_lse=True, **options)
    check(found, torch.autograd.grad(loss(*right), qkv))


def test_autocast_converts_as_torch_does() -> None:
    q = torch.rand(1, 3, 2, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low, _, indices = api.autocast((q, q, torch.arange(3)))
    assert low.dtype == torch.bfloat16 and indices.dtype == torch.int64
    fa_cute.attention(low, low, low).float().sum().backward()
    assert q.grad.dtype == torch.float32 and q.grad.abs().sum() > 0


def test_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.checkpoint import checkpoint

    qkv = inputs()

    def block(*qkv: torch.Tensor) -> torch.Tensor:
        _, out, lse = called(monkeypatch, qkv)
        return loss(out, lse)

    found = torch.autograd.grad(checkpoint(block, *qkv, use_reentrant=False), qkv)
    check(found, torch.autograd.grad(block(*qkv), qkv))
