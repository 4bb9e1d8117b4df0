"""What once gave a wrong result without a word: each is right now, or an error."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fa_cute
from fa_cute.mods.errors import ModError
from fa_cute.mods.trace import trace_score_mod


def _qkv() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 11, 2, 8, dtype=torch.float64, generator=generator) for _ in "qkv")


def _close(**mods) -> None:
    found = fa_cute.attention(*_qkv(), **mods)
    right = fa_cute.reference.attention(*_qkv(), **mods)
    torch.testing.assert_close(found, right, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32])
def test_integers_that_do_not_fit(dtype: torch.dtype) -> None:
    ids = torch.tensor([0] * 5 + [2**32 - 1] * 6, dtype=torch.int64).to(dtype)
    with pytest.raises(ValueError, match="int32.*renumber"):
        fa_cute.attention(*_qkv(), mask_mod=lambda b, h, q, kv: ids[q] == ids[kv])


def test_look_ups_by_a_traced_value() -> None:
    with pytest.raises(ModError, match="set or a dict"):
        fa_cute.attention(*_qkv(), mask_mod=lambda b, h, q, kv: q >= kv if h in {0, 1} else kv < 3)
    with pytest.raises(ModError, match="table\\[h\\]"):
        fa_cute.attention(*_qkv(), score_mod=lambda s, b, h, q, kv: s * {0: 0.5}.get(h, 1.0))


def test_the_opposite_of_a_constant_mask() -> None:
    nothing = fa_cute.mods.negate(lambda b, h, q, kv: True)
    assert fa_cute.attention(*_qkv(), mask_mod=nothing).abs().sum() == 0
    assert fa_cute.reference.attention(*_qkv(), mask_mod=nothing).abs().sum() == 0


def test_a_number_of_numpy_is_a_result() -> None:
    everything = fa_cute.attention(*_qkv(), mask_mod=lambda *_: True)
    assert torch.equal(fa_cute.attention(*_qkv(), mask_mod=lambda *_: np.bool_(True)), everything)
    zero = fa_cute.attention(*_qkv(), score_mod=lambda *_: np.float32(0))
    assert torch.equal(zero, fa_cute.attention(*_qkv(), score_mod=lambda *_: 0.0))


def test_infinities_and_nan() -> None:
    low = torch.full((11,), -math.inf)

    def equal(b, h, q, kv):
        return torch.isnan(torch.logaddexp(low[q], low[kv])) | (q >= kv)

    def below(b, h, q, kv):
        return torch.isnan(torch.log1p(low[kv]))

    _close(mask_mod=equal)
    _close(mask_mod=below)


@pytest.mark.parametrize("pick", [torch.fmax, torch.fmin])
def test_the_one_that_is_a_number(pick) -> None:
    _close(score_mod=lambda s, b, h, q, kv: pick(torch.where(q > kv, s, math.nan), s * 0))


def test_a_view_whose_minus_is_still_to_come() -> None:
    """torch keeps it as a bit; what takes the address of such a view, as a kernel, misses it."""
    angles = torch.linspace(0.1, 3.0, 11)
    sine = torch.polar(torch.ones(11), angles).conj().imag
    assert sine.is_neg()

    def score_mod(score, b, h, q, kv):
        return score * sine[kv]

    (captured,) = trace_score_mod(score_mod).captured
    assert not captured.is_neg()
    torch.testing.assert_close(captured, -angles.sin())
    _close(score_mod=score_mod)
