"""The CPU path against the oracle: values, lse and gradients, in linear memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import fa_cute

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
}


def make(
    shape: tuple[int, int, int, int, int], d: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """q, k, v for (B, Sq, Sk, Hq, Hk), normal with a few large outliers."""
    b, sq, sk, hq, hk = shape
    generator = torch.Generator().manual_seed(sq * 1000 + sk)
    inputs = []
    for size in ((b, sq, hq, d), (b, sk, hk, d), (b, sk, hk, d)):
        x = torch.randn(size, generator=generator)
        x[torch.rand(size, generator=generator) < 0.002] *= 20
        inputs.append(x.to(dtype))
    return tuple(inputs)


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
    """attention equals the oracle: out within an ulp of the dtype or so, lse near fp32's."""
    out, lse = fa_cute.attention(q, k, v, return_lse=True, **options)
    expected, expected_lse = fa_cute.reference.attention(q, k, v, return_lse=True, **options)
    assert expected.isfinite().all(), "an oracle with NaN would hide a fault"
    assert out.dtype == q.dtype and out.shape == expected.shape and out.is_contiguous()
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    size = max(1.0, expected.abs().max().item() if expected.numel() else 1.0)
    bound = TOLERANCE[q.dtype] * size
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=bound)
    atol = 1e-12 if q.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_dtypes(dtype: torch.dtype, causal: bool) -> None:
    check(*make((2, 70, 300, 4, 2), dtype=dtype), causal=causal)


SHAPES = [(1, 1, 1, 1, 1), (2, 63, 129, 3, 1), (1, 600, 257, 2, 2), (1, 1, 700, 8, 2)]
BOUNDS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (100, 0)},
    {"window": (0, 0)},
    {"window": (3, 300)},
    {"window": (None, 40)},
    {"window": (40, None), "causal": True},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_bounds(shape: tuple, bounds: dict) -> None:
    check(*make(shape), **bounds)


def test_value_dimension_and_scale_of_their_own() -> None:
    q, k, v = make((1, 40, 50, 4, 2), d=24)
    for scale in (0.0, -0.3, 2.0):
        check(q, k, v[..., :5], scale=scale, causal=True)


def mods() -> dict[str, tuple[Callable | None, Callable | None]]:
    """Pairs (score_mod, mask_mod) for q (2, 70, ·) and k (2, 300, ·) of 4 query heads."""
    slopes, bias = torch.tensor([0.5, 0.25, 0.125, 0.0625]), torch.randn(4, 2048)
    row, key = torch.randn(2, 70), torch.randn(300, 4).t()
    rope = torch.randn(2, 4, 70, 3)
    cap = torch.tensor(5.0)
    document = torch.arange(300).div(37, rounding_mode="floor").expand(2, 300)

    def vector(s, b, h, q, kv):
        return s + (rope[b, h, q] * torch.tanh(s)).sum(-1)

    return {
        "alibi": (lambda s, b, h, q, kv: s + slopes[h] * (kv - q), None),
        "softcap": (lambda s, b, h, q, kv: cap * torch.tanh(s / cap), None),
        "relative": (lambda s, b, h, q, kv: s + bias[h, q - kv + 1024], None),
        "row and key": (lambda s, b, h, q, kv: s * torch.sigmoid(row[b, q]) - key[h, kv], None),
        "constant": (lambda s, b, h, q, kv: s * 0 + 1.0, None),
        "infinite": (lambda s, b, h, q, kv: torch.where(q >= kv - 40, s, -float("inf")), None),
        "vector": (vector, None),
        "document": (None, lambda b, h, q, kv: document[b, q] == document[b, kv]),
        "none": (None, lambda b, h, q, kv: kv < 0),
        "strided": (None, lambda b, h, q, kv: (kv % (h + 2) == 0) & (kv != q + 3 * b)),
        "both": (
            lambda s, b, h, q, kv: torch.log(s.abs() + kv),
            lambda b, h, q, kv: (q + kv) % 3 != b,
        ),
    }


@pytest.mark.parametrize("name", mods())
def test_mods(name: str) -> None:
    score_mod, mask_mod = mods()[name]
    for bounds in ({}, {"causal": True}, {"window": (100, 0)}):
        check(*make((2, 70, 300, 4, 2)), score_mod=score_mod, mask_mod=mask_mod, **bounds)


@pytest.mark.parametrize("name", mods())
def test_gradients(name: str) -> None:
    """dq, dk, dv equal autograd of the oracle, through out and lse."""
    score_mod, mask_mod = mods()[name]
    options = {"score_mod": score_mod, "mask_mod": mask_mod, "causal": True, "return_lse": True}
    grads = []
    for attention in (fa_cute.attention, fa_cute.reference.attention):
        inputs = [t.double().requires_grad_() for t in make((2, 70, 300, 4, 2))]
        out, lse = attention(*inputs, **options)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        loss = (out * weight).sum() + torch.where(lse == -math.inf, 0, lse).sum()
        grads.append(torch.autograd.grad(loss, inputs))
    for ours, theirs in zip(*grads, strict=True):
        assert theirs.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_gradients_of_captured_tensors() -> None:
    q, k, v = (t.double() for t in make((2, 20, 20, 4, 2)))
    sources = {
        "slopes": torch.randn(4, dtype=torch.float64),
        "shared": torch.randn(20, 20, dtype=torch.float64),
        "scalar": torch.tensor(0.7, dtype=torch.float64),
        "unused": torch.randn(3, dtype=torch.float64),
    }
    grads = []
    for attention in (fa_cute.attention, fa_cute.reference.attention):
        at = {name: t.clone().requires_grad_() for name, t in sources.items()}

        def mod(s, b, h, q, kv, at=at):
            return s * at["scalar"] + at["slopes"][h] * (kv - q) + at["shared"][q, kv]

        loss = attention(q, k, v, score_mod=mod, causal=True).square().sum()
        grads.append(torch.autograd.grad(loss, list(at.values()), allow_unused=True))
    assert grads[0][3] is None
    for ours, theirs in zip(grads[0][:3], grads[1][:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_autocast_does_not_lower_the_precision() -> None:
    q, k, v = (t.requires_grad_() for t in make((1, 20, 30, 2, 1)))
    expected = fa_cute.attention(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fa_cute.attention(q, k, v)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert torch.equal(out, expected)
    assert all(map(torch.equal, grads, torch.autograd.grad(expected.sum(), (q, k, v))))


def test_gradcheck() -> None:
    inputs = [t.double().requires_grad_() for t in make((1, 3, 4, 2, 1), d=4)]

    def run(q, k, v):
        mod = lambda s, b, h, q, kv: torch.tanh(s) * (h + 1)  # noqa: E731
        return fa_cute.attention(q, k, v, score_mod=mod, causal=True, return_lse=True)

    assert torch.autograd.gradcheck(run, inputs)


class Largest(TorchFunctionMode):
    """Remembers the largest number of elements that any operation returned."""

    elements = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_memory_is_linear() -> None:
    """No tensor grows with Sq * Sk, and what the backward keeps grows with the length only."""

    def kept(length: int) -> tuple[int, int]:
        q, k, v = (t.requires_grad_() for t in make((1, length, length, 1, 1)))
        saved = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: (saved.append(t.numel()), t)[1], lambda t: t
        )
        mod = lambda s, b, h, q, kv: torch.tanh(s) + q - kv  # noqa: E731
        with Largest() as seen, hooks:
            out = fa_cute.attention(q, k, v, score_mod=mod)
            out.sum().backward()
        return sum(saved), seen.elements

    saved, largest = kept(1024)
    assert largest == 512 * 256 == 1024 * 1024 // 8
    assert saved <= 2.5 * kept(512)[0]


def test_gradients_of_captured_tensors_repeat_bit_for_bit() -> None:
    """Sums of many terms in a few places, which torch's own threads add up in any order."""
    q, k, v = (t.requires_grad_() for t in make((2, 300, 300, 4, 4)))
    table, rows = torch.randn(7, requires_grad=True), torch.randn(300, 8, requires_grad=True)

    def mod(s, b, h, q, kv):
        return s + table[(q - kv) % 7] + torch.dot(rows[q], rows[kv])

    def gradients() -> tuple[torch.Tensor, ...]:
        out = fa_cute.attention(q, k, v, score_mod=mod, deterministic=True)
        return torch.autograd.grad(out.square().sum(), (q, k, v, table, rows))

    first = gradients()
    assert all(all(map(torch.equal, gradients(), first)) for _ in range(8))
