"""Mods in the kernel: captured tensors of every kind, masks, tails, and every variant."""

from __future__ import annotations

import functools

import pytest
import torch

from fa_cute import variants

from .configurations import MODS, variant
from .judging import arguments, call, check, inputs
from .modifiers import Shape

pytestmark = pytest.mark.gpu
TAILS = ((1, 1), (65, 65), (129, 65), (1, 300), (300, 129), (1000, 1000))


@pytest.mark.parametrize("lengths", TAILS, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "alibi",
        "tight",
        "tight_diagonal",
        "document",
        "even_keys_causal",
        "nothing",
        "both",
        "scalars",
    ],
)
def test_lengths(name: str, lengths: tuple[int, int]) -> None:
    """Lengths that end inside a tile; the tight tables have NaN behind their last element."""
    check(MODS[name], inputs(MODS[name], lengths, heads_k=2))


@pytest.mark.parametrize("length", [2046, 4096])
@pytest.mark.parametrize("name", ["tight", "both", "alibi"])
def test_long(name: str, length: int) -> None:
    check(MODS[name], inputs(MODS[name], (length, length), batch=1, kind="outliers"))


@pytest.mark.parametrize("name", ["integers", "floats"])
def test_captured_dtypes(name: str) -> None:
    """Head i reads dtype i, through strides that are not the tensor's shape."""
    check(MODS[name], inputs(MODS[name], (129, 200), heads_k=6))


@pytest.mark.parametrize("window", [(700, 0), (64, 64)], ids=str)
def test_mask_and_window(window: tuple[int, int]) -> None:
    """A mask_mod counts inside a window's full tiles too."""
    configuration = MODS["even_keys_window"]
    check(configuration, inputs(configuration, (1024, 1024)), window=window)


def test_captured_contents_are_read_at_launch() -> None:
    """A captured tensor overwritten between calls: the same kernel, the new values."""
    configuration = MODS["alibi"]
    x = inputs(configuration, (129, 129))
    slopes = torch.full((x.q.shape[2],), 0.25, device=x.q.device)

    def score_mod(score, b, h, q, kv):
        return score + slopes[h] * (kv - q)

    first, _ = call(configuration, x, causal=True, score_mod=score_mod)
    slopes.fill_(0.0)
    second, _ = call(configuration, x, causal=True, score_mod=score_mod)
    assert not torch.equal(first, second)
    # With zero slopes the kernel computes plain attention, if not with the same roundings.
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in x), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    assert (second.double() - plain.double()).abs().max() < 0.04


@pytest.mark.parametrize("lengths", [(129, 129), (1000, 1000), (300, 700)], ids=str)
@pytest.mark.parametrize("name", sorted(variants.ALL))
def test_variants(name: str, lengths: tuple[int, int]) -> None:
    """Every file in variants/, beside eager attention in bf16."""
    configuration = variant(name)
    # A variant may hold the number of heads as a constant: the compiled one's.
    check(configuration, inputs(configuration, lengths, heads_k=Shape().heads))


def test_spellings_share_one_kernel() -> None:
    """A closure, a partial, a default argument and a callable object of one mod: one result."""
    configuration = MODS["alibi"]
    x = inputs(configuration, (65, 65))
    right = call(configuration, x, **arguments(configuration, x))
    slopes = torch.exp2(-torch.arange(1, x.q.shape[2] + 1, device=x.q.device) / 2.0)

    def with_table(score, b, h, q, kv, table):
        return score + table[h] * (kv - q)

    def with_default(score, b, h, q, kv, table=slopes):
        return (kv - q) * table[h] + score

    class Callable:
        def __call__(self, score, b, h, q, kv):
            return with_table(score, b, h, q, kv, slopes)

    for score_mod in (functools.partial(with_table, table=slopes), with_default, Callable()):
        out, lse = call(configuration, x, causal=True, score_mod=score_mod)
        assert torch.equal(out, right[0]) and torch.equal(lse, right[1])
