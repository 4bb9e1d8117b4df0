"""Gradients of captured tensors: short vectors, and a fixed order's where it is asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fa_cute

from .backward_judging import poison
from .learned import DEVICE, SQUARE, Learned, Shape, check, mods, tensors

pytestmark = pytest.mark.gpu
Case = tuple[Learned, Callable[[Learned], Callable]]

# How each is indexed, and so added up: see ``device/gradient.py``.
PATTERNS = {
    "a number": "scalar",
    "alibi": "head",
    "rows and columns": "rows, columns",
    "diagonals": "q - kv",
    "t5": "buckets",
    "t5 in bf16": "buckets",
    "elements": "elements",
}


def vectors(shape: Shape) -> dict[str, Case]:
    """Mods with partial indices, whose gradients are short vectors, at every level."""
    generator = torch.Generator(DEVICE).manual_seed(8)

    def learned(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=DEVICE)

    b, h, q, kv = shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_k
    return {
        "dots": (
            {"u": learned(b, h, q, 12) / 4, "w": learned(kv, 12)},
            lambda x: lambda s, b, h, q, kv: s + (x["u"][b, h, q] * x["w"][kv]).sum(-1),
        ),
        "a head's": (
            {"z": learned(h, 16) / 16},
            lambda x: lambda s, b, h, q, kv: s * (1 + x["z"][h]).sum(-1) / 16,
        ),
        "distances": (
            {"r": learned(q + kv, 3), "a": learned(h, 3) / 3},
            lambda x: lambda s, b, h, q, kv: s + (x["r"][q - kv + 300] * x["a"][h]).sum(-1),
        ),
        "of the score": (
            {"r": learned(40, 3) / 4, "a": learned(h, 3)},
            lambda x: lambda s, b, h, q, kv: s * (x["r"][(q * kv) % 40] * x["a"][h]).sum(-1),
        ),
    }


def all_cases(shape: Shape) -> dict[str, Case]:
    """``mods`` of every pattern, and ``vectors``."""
    return {name: mods(shape)[name] for name in PATTERNS} | vectors(shape)


NAMES = tuple(PATTERNS) + ("dots", "a head's", "distances", "of the score")


@pytest.mark.parametrize("name", ["dots", "a head's", "distances", "of the score"])
def test_short_vectors(name: str) -> None:
    check(*vectors(SQUARE)[name])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["a number", "a head's factor"])
def test_at_128(name: str, deterministic: bool) -> None:
    """Two numbers an element, and one: rows of their own."""
    shape = Shape(1, 130, 300, 4, 2, 128)
    learned, build = mods(shape)[name]
    check(learned, build, shape=shape, causal=True, deterministic=deterministic)


@pytest.mark.parametrize("name", NAMES)
def test_fixed_point(name: str) -> None:
    """Right, and the same bit for bit in every repeat, on dirty memory."""
    learned, build = all_cases(SQUARE)[name]
    check(learned, build, causal=True, deterministic=True)
    *qkv, dout = tensors(SQUARE, torch.bfloat16)

    def once() -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in qkv]
        held = {key: tensor.detach().requires_grad_() for key, tensor in learned.items()}
        poison()
        options = {"score_mod": build(held), "causal": True, "deterministic": True}
        return torch.autograd.grad(
            fa_cute.attention(*leaves, **options), [*leaves, *held.values()], dout
        )

    first = once()
    for _ in range(100 if name in ("t5", "rows and columns", "a number") else 10):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


def test_a_term_that_is_not_finite() -> None:
    """A fixed-point sum has no infinity: it is NaN, and only where that term went."""
    *qkv, dout = tensors(SQUARE, torch.bfloat16)
    dout[0, 5, 1] = torch.inf
    slopes = torch.zeros(4, device=DEVICE, requires_grad=True)
    out = fa_cute.attention(
        *qkv, score_mod=lambda s, b, h, q, kv: s + slopes[h] * kv, deterministic=True
    )
    (found,) = torch.autograd.grad(out, slopes, dout)
    assert found.isnan().tolist() == [False, True, False, False]


def test_large_and_small_terms() -> None:
    """A loss scaled by 2^20 and by 2^-40 has gradients scaled alike."""
    *qkv, dout = tensors(SQUARE, torch.bfloat16)
    learned, build = mods(SQUARE)["alibi"]
    slopes = learned["slopes"].requires_grad_()
    options = {"score_mod": build({"slopes": slopes}), "deterministic": True}
    found = []
    for power in (0, 20, -40):
        out = fa_cute.attention(*qkv, **options)
        (gradient,) = torch.autograd.grad(out, slopes, dout * 2.0**power)
        found.append(gradient * 2.0**-power)
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2], rtol=2**-20, atol=0)
