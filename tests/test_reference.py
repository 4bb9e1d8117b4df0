"""The oracle against loops over single elements, torch's own attention, and hand-made values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import fa_cute
from fa_cute.reference import attention


def make(b: int, sq: int, sk: int, hq: int, hk: int, d: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(sq * sk)
    shapes = (b, sq, hq, d), (b, sk, hk, d), (b, sk, hk, d)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)


def test_equals_torch() -> None:
    q, k, v = make(2, 9, 9, 4, 4)
    for causal in (False, True):
        expected = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal
        ).transpose(1, 2)
        torch.testing.assert_close(attention(q, k, v, causal=causal), expected)


def test_a_mod_runs_as_python_would_run_it() -> None:
    """Every element against the same function on plain numbers, with awkward indexing."""
    q, k, v = make(2, 5, 7, 4, 2)
    slopes, bias = torch.randn(4), torch.randn(4, 20)
    vectors, factor = torch.randn(2, 4, 7, 3), torch.tensor(2.0)
    document = torch.randint(0, 2, (2, 7))

    def score_mod(score, b, h, q, kv):
        total = (vectors[b, h, kv] * score).sum(-1) + vectors[b, :, kv][h].sum()
        corner = vectors[b, h, kv, 0] + vectors[..., 0][b, h, q] + vectors[0, ..., 1][h, kv]
        return score * factor + slopes[h] * (kv - q) + bias[h, q - kv + 8] + total + corner

    def mask_mod(b, h, q, kv):
        return (document[b, q] == document[b, kv]) | (q >= kv)

    out, lse = attention(
        q, k, v, score_mod=score_mod, mask_mod=mask_mod, window=(3, -1), return_lse=True
    )
    raw = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * 8**-0.5
    scores = torch.full_like(raw, -math.inf)
    for b, h, i, j in itertools.product(*map(range, raw.shape)):
        if mask_mod(b, h, i, j) and j >= i + 2 - 3:
            scores[b, h, i, j] = score_mod(raw[b, h, i, j], b, h, i, j)
    p = torch.softmax(scores, dim=-1).nan_to_num()
    expected = torch.einsum("bhqk,bkhd->bqhd", p, v.repeat_interleave(2, 2))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_a_mod_may_return_a_number() -> None:
    q, k, v = make(1, 2, 3, 1, 1)
    out = attention(q, k, v, score_mod=lambda s, b, h, i, j: 0.0, mask_mod=lambda b, h, i, j: True)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand(out.shape))


def test_an_index_out_of_range_is_torchs_error() -> None:
    table = torch.zeros(2)
    with pytest.raises(IndexError):
        attention(*make(1, 2, 3, 1, 1), score_mod=lambda s, b, h, i, j: s + table[j])


def test_gradients_reach_captured_tensors() -> None:
    q, k, v = make(1, 4, 5, 2, 1)
    slopes = torch.randn(2, dtype=torch.float64, requires_grad=True)
    q.requires_grad_()

    def run(q, slopes):
        return attention(q, k, v, score_mod=lambda s, b, h, i, j: s + slopes[h] * j, causal=True)

    assert torch.autograd.gradcheck(run, (q, slopes))


def test_rows_without_keys() -> None:
    q, k, v = make(1, 5, 3, 2, 1)
    q.requires_grad_()
    k[:, 2], v[:, 2] = math.nan, math.nan
    out, lse = attention(q, k, v, mask_mod=lambda b, h, i, j: j < 2, causal=True, return_lse=True)
    assert torch.equal(out[:, :2], torch.zeros_like(out[:, :2]))
    assert (lse[:, :, :2] == -math.inf).all()
    assert torch.equal(out[:, 2], v[:, 0].expand(1, 2, 8))
    out.sum().backward()
    assert q.grad.isfinite().all() and (q.grad[:, :2] == 0).all()
    empty_out, empty_lse = attention(q, k[:, :0], v[:, :0], return_lse=True)
    assert (empty_out == 0).all() and (empty_lse == -math.inf).all()


def test_a_slice_of_a_captured_tensor() -> None:
    q, k, v = make(1, 4, 5, 2, 1)
    table = torch.randn(4, 9, 5, dtype=torch.float64)
    part = table[:, 3:7].contiguous()
    found = attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[i, 3:7, j].sum())
    right = attention(q, k, v, score_mod=lambda s, b, h, i, j: s + part[i, :, j].sum())
    torch.testing.assert_close(found, right)
    found = attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[1:3, i, j][1])
    torch.testing.assert_close(
        found, attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[2, i, j])
    )


@pytest.mark.parametrize("call", [attention, fa_cute.attention], ids=["oracle", "CPU path"])
def test_a_learned_table_in_bf16_gets_all_of_its_gradient(call: Callable) -> None:
    """Two numbers that 320,000 scores read: a sum in bf16 stops at 256 times its terms."""
    q, k, v = (t.float() for t in make(1, 400, 400, 2, 1))
    signs = (1 - 2 * (torch.arange(400) % 2)).view(400, 1, 1)
    table = torch.tensor([0.5, -0.25])

    def gradient(table: torch.Tensor) -> torch.Tensor:
        mod = lambda s, b, h, i, j: s + table[(i + j) % 2].float()  # noqa: E731
        out = call(q, k, v.abs() * signs, score_mod=mod)
        return torch.autograd.grad((out * signs).sum(), table)[0]

    right = gradient(table.double().requires_grad_())
    found = gradient(table.bfloat16().requires_grad_())
    assert found.dtype == torch.bfloat16
    assert (found.double() - right).abs().max() <= 0.02 * right.abs().max()
