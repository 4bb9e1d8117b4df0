"""Mods in the forms that FlexAttention's users write them trace unchanged, and compute the same."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from fa_cute import mods
from fa_cute.mods.emit_torch import emit
from fa_cute.mods.trace import trace_mask_mod, trace_score_mod

B, H, S = 2, 4, 9
WIDTH = 3  # of a 3 x 3 image
GENERATOR = torch.Generator().manual_seed(0)


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


SLOPES = torch.exp2(-torch.arange(1, H + 1) * 8.0 / H)
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 2, 2]])
OFFSETS = torch.tensor([[0, 3, 6], [0, 1, 7]], dtype=torch.int32)
LENGTHS = torch.tensor([4, 9])
RELATIVE = rand(2 * S - 1, H)
BIAS = rand(B, H, S, S, dtype=torch.float16)
ROPE_Q, ROPE_K = rand(B, H, S, 16), rand(B, H // 2, S, 16)
TREE = torch.rand(B, S, S, generator=GENERATOR) < 0.5
GATES = rand(B, H, S)
POSITION = torch.tensor(4)
TABLE = nn.Parameter(rand(32, H))


@torch.library.custom_op("approx::tanh", mutates_args=())
def _tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


@_tanh.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class _TanhApprox(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return torch.ops.approx.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (result,) = ctx.saved_tensors
        return grad * (1 - result * result)


class _Capped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cap):
        ctx.save_for_backward(x)
        ctx.cap = cap
        return cap * torch.tanh(x / cap)


def softcap_by_hardware(score, b, h, q_idx, kv_idx):
    return 20 * _TanhApprox.apply(score / 20)


def alibi_bias(score, b, h, q_idx, kv_idx):
    scale = torch.exp2(-((h + 1) * 8.0 / H))
    bias = (kv_idx - q_idx) * scale
    return score + bias


def t5(score, b, h, q_idx, kv_idx, bidirectional=True, num_buckets=32, max_distance=128):
    relative = kv_idx - q_idx
    bucket = 0
    if bidirectional:
        num_buckets //= 2
        bucket = bucket + (relative > 0).to(torch.long) * num_buckets
        relative = torch.abs(relative)
    else:
        relative = -torch.min(relative, torch.zeros_like(relative))
    exact = num_buckets // 2
    scaled = torch.log(relative.float() / exact) / math.log(max_distance / exact)
    large = exact + (scaled * (num_buckets - exact)).clamp(-99, 99).to(torch.long)
    large = torch.min(large, torch.full_like(large, num_buckets - 1))
    bucket = bucket + torch.where(relative < exact, relative, large)
    return score + TABLE[bucket, h]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return q_idx - kv_idx <= 3


def prefix(b, h, q_idx, kv_idx):
    return kv_idx <= LENGTHS[b]


def within_documents(inner: Callable) -> Callable:
    def mask_mod(b, h, q_idx, kv_idx):
        same = DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx]
        q = q_idx - OFFSETS[b, DOCUMENTS[b, q_idx]]
        kv = kv_idx - OFFSETS[b, DOCUMENTS[b][kv_idx]]
        return same & inner(b, h, q, kv)

    return mask_mod


def natten(b, h, q_idx, kv_idx, kernel=1):
    q_x, q_y = q_idx // WIDTH, q_idx % WIDTH
    kv_x, kv_y = kv_idx // WIDTH, kv_idx % WIDTH
    center_x = q_x.clamp(kernel, (WIDTH - 1) - kernel)
    center_y = torch.clamp(q_y, kernel, (WIDTH - 1) - kernel)
    horizontal = (center_x - kv_x).abs() <= kernel
    vertical = (center_y - kv_y).abs() <= kernel
    return horizontal & vertical


def checkerboard(score, b, h, q_idx, kv_idx):
    score = torch.where(torch.abs(kv_idx - q_idx) % 2 == 1, score * 0.5, score)
    return torch.where(torch.abs(kv_idx - q_idx) % 2 == 0, score * 2.0, score)


def sandwich(score, b, h, q_idx, kv_idx):
    for k in range(1, 5):
        score = score + torch.cos((q_idx - kv_idx) / 10000 ** (k / 4)) * 0.1
    return score


class Gated(nn.Module):
    """A callable object with state and a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.Softplus()
        self.gain = 0.5

    def forward(self, score, b, h, q_idx, kv_idx):
        return score * self.gain - self.activation(GATES[b, h, kv_idx])


SCORE_MODS = {
    "absolute": lambda score, b, h, q, kv: score + (q - kv),
    "alibi": lambda score, b, h, q, kv: score + SLOPES[h] * (kv - q),
    "alibi computed": alibi_bias,
    "T5": t5,
    "T5 decoder": functools.partial(t5, bidirectional=False),
    "softcap": lambda score, b, h, q, kv: 20 * torch.tanh(score / 20),
    "softcap, custom op": softcap_by_hardware,
    "softcap, autograd": lambda score, b, h, q, kv: _Capped.apply(score, 15.0),
    "relative": lambda score, b, h, q, kv: score + RELATIVE[q - kv + S - 1, h],
    "relative, negative": lambda score, b, h, q, kv: score + RELATIVE[q - kv, h],
    "bias": lambda score, b, h, q, kv: score + BIAS[b, h, q, kv],
    "bias, chained": lambda score, b, h, q, kv: score + BIAS[b][h][q][kv].to(score.dtype),
    "bias, one head": lambda score, b, h, q, kv: score + BIAS[0, -1, q, kv],
    "rope": lambda s, b, h, q, kv: s + torch.dot(ROPE_Q[b, h, q], ROPE_K[b, h // 2, kv]) * 0.1,
    "rope, product": lambda s, b, h, q, kv: s + (ROPE_Q[b, h, q] * ROPE_K[b, h // 2, kv]).sum(-1),
    "rope, matmul": lambda s, b, h, q, kv: s + ROPE_Q[b, h, q, :8] @ ROPE_K[b, h // 2, kv, 8:],
    "rope, element": lambda s, b, h, q, kv: s + (ROPE_Q[b, h, q] * 2)[3] + ROPE_Q[b, :, q, 2][h],
    "mean of tanh": lambda s, b, h, q, kv: s + torch.tanh(ROPE_Q[b, h, q] * s).mean(),
    "checkerboard": checkerboard,
    "causal in the score": lambda s, b, h, q, kv: torch.where(q >= kv, s, -float("inf")),
    "masked fill": lambda s, b, h, q, kv: s.masked_fill(q < kv, float("-inf")),
    "lowest": lambda s, b, h, q, kv: torch.where(q >= kv, s, torch.finfo(torch.float32).min),
    "head dependent": lambda s, b, h, q, kv: torch.where(h % 2 == 0, s, s * 0.5),
    "log n": lambda s, b, h, q, kv: s * torch.log(q + 2.0) / math.log(512),
    "kerple": lambda s, b, h, q, kv: s - SLOPES[h] * torch.log1p(0.5 * (q - kv).abs()),
    "sandwich": sandwich,
    "forgetting": lambda s, b, h, q, kv: s + GATES[b, h, q] - GATES[b, h, kv],
    "gate": lambda s, b, h, q, kv: s + F.logsigmoid(GATES[b, h, kv]),
    "module": Gated(),
    "rounded": lambda s, b, h, q, kv: (s * 0.3).to(torch.bfloat16).to(torch.float32),
    "own vocabulary": lambda s, b, h, q, kv: mods.where(
        mods.abs(q - kv) < 3, mods.maximum(s, 0.5), mods.clamp(mods.exp2(-s), max=2.0)
    ),
    "numbers only": lambda s, b, h, q, kv: s * mods.exp(-1.0) + mods.sqrt(2.0),
    "a function of a table": lambda s, b, h, q, kv: s + torch.softmax(SLOPES, 0)[h],
    "largest": lambda s, b, h, q, kv: s + ROPE_Q[b, h, q].amax() - ROPE_K[b, 0, kv].min(),
    "keywords": lambda s, b, h, q, kv: torch.where(
        condition=q > kv, input=torch.add(s, other=q, alpha=2), other=torch.pow(s, exponent=2)
    ),
    "power of two": lambda s, b, h, q, kv: s + 2 ** (h + 1) + 2.0 ** (-h),
}
MASK_MODS = {
    "causal": causal,
    "window": window,
    "and": and_masks(causal, window),
    "or": or_masks(and_masks(causal, window), prefix),
    "noop": noop_mask,
    "prefix": or_masks(prefix, causal),
    "documents": within_documents(causal),
    "dilated": lambda b, h, q, kv: ((q - kv) % 3 == 0) & (q - kv <= 6) & (q >= kv),
    "natten": natten,
    "tree": lambda b, h, q, kv: TREE[b, q, kv],
    "lengths": lambda b, h, q, kv: (q < LENGTHS[b]) & (kv < LENGTHS[b]),
    "decoding": lambda b, h, q, kv: POSITION + q >= kv,
    "head dependent": lambda b, h, q, kv: torch.where(h < 2, q >= kv, q - kv < 2),
    "alternating": lambda b, h, q, kv: torch.logical_xor(q % 2 == 0, kv % 2 == 0) | (q == kv),
    "local and global": lambda b, h, q, kv: ((q - kv).abs() < 2) | (kv < 1) | (q < 1),
    "vision": lambda b, h, q, kv: (DOCUMENTS[b, kv] == 1).logical_not() & (q >= kv),
    "integer table": lambda b, h, q, kv: DOCUMENTS[b, kv].bool(),
    "bits": lambda b, h, q, kv: (q ^ kv) & 1 == 0,
}


def everywhere(mod: Callable, *scores: torch.Tensor) -> torch.Tensor:
    """The mod called for each (b, h, q, kv) on 0-d tensors, as FlexAttention defines it."""
    values = []
    for place in itertools.product(range(B), range(H), range(S), range(S)):
        indices = [torch.tensor(index, dtype=torch.int32) for index in place]
        values.append(torch.as_tensor(mod(*(score[place] for score in scores), *indices)))
    return torch.stack(values).view(B, H, S, S)


def places() -> dict[str, torch.Tensor]:
    sizes = {"b": B, "h": H, "q": S, "kv": S}
    shapes = [[-1 if at == dim else 1 for at in range(4)] for dim in range(4)]
    return {
        name: torch.arange(size, dtype=torch.int32).view(shape)
        for (name, size), shape in zip(sizes.items(), shapes, strict=True)
    }


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods(name: str) -> None:
    score = rand(B, H, S, S) * 3
    mod = SCORE_MODS[name]
    traced = trace_score_mod(mod)
    got = emit(*traced, score=score, **places()).expand(B, H, S, S)
    torch.testing.assert_close(got, everywhere(mod, score).float(), rtol=1e-5, atol=1e-5)
    assert trace_score_mod(mod).graph is traced.graph


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mods(name: str) -> None:
    mod = MASK_MODS[name]
    traced = trace_mask_mod(mod)
    got = emit(*traced, **places()).expand(B, H, S, S)
    assert torch.equal(got, everywhere(mod))


ACTIVATIONS = (
    *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus"),
    *("logsigmoid", "softsign", "hardtanh", "hardsigmoid", "hardswish", "tanhshrink", "softshrink"),
    *("hardshrink", "sigmoid", "tanh"),
)
FUNCTIONS = (
    *("abs", "neg", "sign", "exp", "exp2", "expm1", "sin", "cos", "tan", "sinh", "cosh", "tanh"),
    *("sigmoid", "erf", "erfc", "floor", "ceil", "round", "trunc", "frac", "square", "reciprocal"),
    *("isnan", "isinf", "isfinite", "logical_not", "positive"),
)
POSITIVE = ("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "logit")


@pytest.mark.parametrize("name", [*ACTIVATIONS, *FUNCTIONS, *POSITIVE])
def test_torch_functions(name: str) -> None:
    """Each function, on values about 0, at halves and at powers of two."""
    x = torch.cat([torch.linspace(-3, 3, 49), torch.tensor([1e-6, -1e-6, 20.5, 25.0])])
    if name in POSITIVE:
        x = torch.cat([x.abs() / 26 + 1e-3, 2.0 ** -torch.arange(1, 10)])
    function = getattr(F if name in ACTIVATIONS else torch, name)
    traced = trace_score_mod(lambda score, b, h, q, kv: function(score) * 1.0)
    zero = torch.zeros(1, dtype=torch.int32)
    got = emit(*traced, score=x, b=zero, h=zero, q=zero, kv=zero)
    torch.testing.assert_close(got, function(x) * 1.0, rtol=2e-6, atol=1e-6)
    again = emit(*traced, score=x.double(), b=zero, h=zero, q=zero, kv=zero)
    torch.testing.assert_close(again, function(x.double()).double(), rtol=1e-12, atol=1e-12)
