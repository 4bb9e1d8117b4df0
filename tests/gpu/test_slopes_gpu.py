"""Derivatives and captured gradients on a GPU against fp64 autograd, without attention around."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.slope_kernel import slopes
from variants.softcap import softcap
from variants.t5_relative_bias import t5_relative_bias

pytestmark = pytest.mark.gpu

B, H, Q, KV = 2, 3, 256, 320
SCALE = 0.37


def cases(
    device: str, dtype: torch.dtype = torch.float32
) -> dict[str, tuple[list[torch.Tensor], Callable]]:
    """Learned tensors (leaves), and the mod that reads them. The numbers are always the same."""
    generator = torch.Generator().manual_seed(2)

    def learned(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    head, scalar, table = learned(H), learned(), learned(16, H)
    rows, columns, element = learned(B, Q), learned(KV, H), learned(H, Q, KV)
    ribbon, wild = learned(H, Q + KV), learned(H)
    return {
        "softcap": ([], softcap(20.0)),
        "alibi": ([head], lambda s, b, h, q, kv: s - head[h] * (q - kv).abs()),
        "a number": ([scalar], lambda s, b, h, q, kv: s + torch.tanh(s) * scalar),
        "t5": ([table], t5_relative_bias(table)),
        "rows": ([rows], lambda s, b, h, q, kv: s * rows[b, q]),
        "columns": ([columns], lambda s, b, h, q, kv: s + torch.tanh(columns[kv, h])),
        "elements": ([element], lambda s, b, h, q, kv: s + element[h, q, kv]),
        "diagonals": ([ribbon], lambda s, b, h, q, kv: s * ribbon[h, q - kv + KV]),
        "two": ([head, rows], lambda s, b, h, q, kv: s * head[h] + rows[b, q] * head[h]),
        "untamed": ([wild], lambda s, b, h, q, kv: s + torch.sqrt(s.abs()) * wild[h]),
        "branches": ([head], lambda s, b, h, q, kv: torch.where(s > 1, s * head[h], -s)),
    }


@pytest.mark.parametrize("name", cases("cpu"))
def test_agrees_with_autograd(name: str) -> None:
    generator = torch.Generator().manual_seed(4)
    shape = (B, H, Q, KV)
    scores, weights = (torch.randn(shape, generator=generator).cuda() for _ in range(2))
    if name == "untamed":  # a hidden score, whose slope is not finite
        scores[..., 5], weights[..., 5] = 0.0, 0.0
    learned, score_mod = cases("cuda")[name]
    found, gradients = slopes(score_mod, scores, weights, SCALE)

    exact, wide = cases("cuda", torch.float64)[name]
    score = (scores.double() * SCALE).requires_grad_()
    index = [
        torch.arange(n, device="cuda").view([-1 if d == at else 1 for d in range(4)])
        for at, n in enumerate(shape)
    ]
    value = wide(score, *index)
    hidden = weights == 0
    total = (torch.where(hidden, 0, value) * weights.double()).sum()
    want, *rest = torch.autograd.grad(total, [score, *exact])
    want = torch.where(hidden, 0, want)
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), want, rtol=2e-3, atol=2e-3)
    for tensor, right in zip(learned, rest, strict=True):
        error = (gradients[id(tensor)].double() - right).abs().max() / right.abs().max()
        assert error < 1e-3, f"{error:.3g}"
