"""Attention sinks: a learned logit a query head, one more score of each row, without a value."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fa_cute
from fa_cute import api, reference
from fa_cute.configuration import Configuration
from fa_cute.host.planning import NO_MODS
from fa_cute.plan import Extra

B, SQ, SK, HQ, HK, D = 2, 5, 300, 4, 2, 16


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def inputs(seqlen_q: int = SQ, seqlen_k: int = SK) -> tuple[torch.Tensor, ...]:
    shape = (B, seqlen_k, HK, D)
    return draw(B, seqlen_q, HQ, D), draw(*shape), draw(*shape) + 1


def zeros(seqlen_k: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """One query of zeros, ``seqlen_k`` keys of zeros, values of ones: every score is 0."""
    q, k = torch.zeros(1, 1, 1, D, dtype=dtype), torch.zeros(1, seqlen_k, 1, D, dtype=dtype)
    return q, k, torch.ones_like(k)


@pytest.mark.parametrize(
    ("keys", "sink", "out", "lse"),
    [
        (64, 0.0, 64 / 65, math.log(65)),
        (1, 100.0, 0.0, 100.0),
        (1, 0.0, 0.5, math.log(2)),
        (0, 0.5, 0.0, 0.5),
        (64, -math.inf, 1.0, math.log(64)),
        (0, -math.inf, 0.0, -math.inf),
        (300, -1e4, 1.0, math.log(300)),
    ],
)
@pytest.mark.parametrize("run", [fa_cute.attention, reference.attention])
def test_values_by_hand(run: Any, keys: int, sink: float, out: float, lse: float) -> None:
    result, logs = run(*zeros(keys), sinks=torch.tensor([sink]), return_lse=True)
    assert result.flatten().tolist() == pytest.approx([out] * D, abs=1e-6)
    assert logs.item() == pytest.approx(lse, rel=1e-6)


@pytest.mark.parametrize("lengths", [(5, 300), (300, 5), (70, 600)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_the_oracle(lengths: tuple[int, int], dtype: torch.dtype) -> None:
    """Causal, so that with more queries than keys the first rows see their sink alone."""
    q, k, v = (t.to(dtype) for t in inputs(*lengths))
    sinks = torch.tensor([0.5, -2.0, 6.0, -math.inf])
    options: dict[str, Any] = {
        "sinks": sinks,
        "causal": True,
        "score_mod": lambda s, b, h, q, kv: s - 0.1 * (q - kv).abs(),
        "return_lse": True,
    }
    out, lse = fa_cute.attention(q, k, v, **options)
    right, right_lse = reference.attention(q, k, v, **options)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.double(), right, rtol=tolerance, atol=tolerance)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(lse.double(), right_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("run", [fa_cute.attention, reference.attention])
def test_gradients(run: Any) -> None:
    """Of the sinks too, in rows that see their sink alone (two of the five)."""
    q, k, v = (t.requires_grad_() for t in inputs(5, 3))
    sinks = draw(HQ).requires_grad_()

    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> Any:
        return run(q, k, v, sinks=sinks, causal=True, return_lse=True)

    assert torch.autograd.gradcheck(both, (q, k, v, sinks))


def test_only_the_sinks_need_a_gradient() -> None:
    sinks = torch.zeros(1, requires_grad=True)
    out, lse = fa_cute.attention(*zeros(64), sinks=sinks, return_lse=True)
    (of_lse,) = torch.autograd.grad(lse.sum(), sinks, retain_graph=True)
    (of_out,) = torch.autograd.grad(out.sum(), sinks)
    assert of_lse.item() == pytest.approx(1 / 65)
    assert of_out.item() == pytest.approx(-D * 64 / 65**2)
    with pytest.raises(ValueError, match="out= has no gradient"):
        fa_cute.attention(*zeros(64), sinks=sinks, out=torch.empty(1, 1, 1, D))


def test_an_empty_problem_on_the_gpus_way() -> None:
    """No key: nothing is launched, and lse is the sink. On CPU tensors, which take the same way."""
    q, k, v = (t.bfloat16() for t in inputs(SQ, 0))
    sinks = draw(HQ, dtype=torch.bfloat16)
    options = api.Options(False, None, None, True, False)
    prepared = api.lookup((q, k, v), NO_MODS, options, sinks)
    out, lse = api.on_gpu(prepared, (q, k, v), NO_MODS, None, sinks)
    assert prepared.problem.sinks and (out == 0).all()
    assert torch.equal(lse, sinks.float()[None, :, None].expand(B, HQ, SQ))
    assert not api.lookup((q, k, v), NO_MODS, options).problem.sinks


class Launched(Exception):
    """Raised by the stand-in for a kernel, with what it was given."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_kernel_reads_fp32(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    def kernel(io: Any, extra: Extra, launch: Any) -> None:
        raise Launched(extra)

    monkeypatch.setattr(api, "counter", lambda device: None)
    qkv = tuple(t.bfloat16() for t in inputs())
    sinks = torch.tensor([0.5, -2.0, 6.0, 1.0], dtype=dtype)
    options = api.Options(False, None, None, False, False)
    empty = api.lookup((qkv[0], qkv[1][:, :0], qkv[2][:, :0]), NO_MODS, options, sinks)
    launch = api.Launch(1.0, 0, 0, 132, None)
    prepared = empty._replace(kernel=kernel, launch=launch)
    with pytest.raises(Launched) as caught:
        api.on_gpu(prepared, qkv, NO_MODS, None, sinks)
    (extra,) = caught.value.args
    assert extra.captured is None and extra.sinks.dtype == torch.float32
    assert (extra.sinks is sinks) == (dtype == torch.float32)
    assert torch.equal(extra.sinks, sinks.float())


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ([0.0] * HQ, TypeError, "sinks must be a torch.Tensor or None, not list"),
        (torch.zeros(HK), ValueError, r"sinks \(2,\) torch.float32: .* its shape is \(4,\)"),
        (torch.zeros(1, HQ), ValueError, r"sinks \(1, 4\)"),
        (torch.zeros(HQ, dtype=torch.float64), ValueError, "torch.float32, .* are accepted beside"),
        (torch.zeros(HQ, dtype=torch.int32), ValueError, "torch.int32: .* are accepted"),
        (torch.zeros(HQ, device="meta"), ValueError, "sinks is on meta, but q on cpu"),
    ],
)
def test_wrong_sinks_are_named(wrong: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        fa_cute.attention(*(t.float() for t in inputs()), sinks=wrong)


def test_sinks_are_another_plan() -> None:
    plans = [
        Configuration(head_dim=64, dtype="bfloat16", target="sm_90a", sinks=sinks).plan()[0]
        for sinks in (False, True)
    ]
    assert plans[0].key != plans[1].key and plans[1].sinks
