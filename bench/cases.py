"""What is measured: a shape, a mask, a variant, and how much work that is.

A ``Case`` is static text and numbers; ``Case.tensors`` draws its inputs and ``Case.arguments``
builds what ``fa_cute.attention`` takes beside q, k and v. The mods have FlexAttention's signature,
so one function serves us, the oracle and FlexAttention.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from fa_cute.variants.softcap import softcap
from fa_cute.variants.t5_relative_bias import t5_relative_bias

from fa_cute.host.problem import FEW_KEYS, FEW_QUERIES

TOKENS = 16384
HIDDEN = 2048
WINDOW = 1024
DECODE_BATCH = 16
SOFTCAP = 30.0
OUTLIER_SHARE = 1e-3
OUTLIER_SCALE = 10.0
INPUTS = (
    f"normal, {OUTLIER_SHARE:g} of the elements of q and k multiplied by {OUTLIER_SCALE:g}; "
    "seeded by the case"
)


class Inputs(NamedTuple):
    """q ``(B, Sq, Hq, D)``, k ``(B, Sk, Hk, D)``, v ``(B, Sk, Hk, Dv)``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Case:
    """One row of the benchmark; ``window`` counts keys left of the diagonal (causal only).

    ``queries``: their number where it is not ``seqlen``, as in decoding.
    """

    head_dim: int
    seqlen: int
    causal: bool = False
    variant: str = "plain"
    heads: int = 16
    heads_kv: int = 16
    batch: int = 2
    head_dim_v: int | None = None
    window: int | None = None
    dtype: str = "bfloat16"
    queries: int | None = None

    @property
    def seqlen_q(self) -> int:
        """Queries a head."""
        return self.seqlen if self.queries is None else self.queries

    @property
    def dim_v(self) -> int:
        """Head dim of v and of the output."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def mask(self) -> str:
        """``full``, ``causal`` or ``window``."""
        if self.window is not None:
            return "window"
        return "causal" if self.causal else "full"

    @property
    def name(self) -> str:
        """Short label, unique among the cases of a run."""
        dims = (
            f"d{self.head_dim}" if self.dim_v == self.head_dim else f"d{self.head_dim}/{self.dim_v}"
        )
        heads = (
            f"h{self.heads}" if self.heads == self.heads_kv else f"h{self.heads}/{self.heads_kv}"
        )
        few = "" if self.queries is None else f"q{self.queries} "
        return f"{dims} {few}s{self.seqlen} b{self.batch} {heads} {self.mask} {self.variant}"

    @property
    def pairs(self) -> float:
        """Query-key pairs a head that count as work: S*S, half if causal, the band of a window."""
        s = self.seqlen
        if self.window is not None:
            kept = min(self.window + 1, s)
            return kept * (kept + 1) / 2 + (s - kept) * kept
        return self.seqlen_q * s * (0.5 if self.causal else 1.0)

    @property
    def flops(self) -> float:
        """Operations of both matrix products (4 B H S S D where Dv = D, causal half)."""
        return 2.0 * self.batch * self.heads * self.pairs * (self.head_dim + self.dim_v)

    def tensors(self, device: torch.device | str = "cuda") -> Inputs:
        """Inputs drawn as ``INPUTS`` says."""
        dtype = getattr(torch, self.dtype)
        generator = torch.Generator(device).manual_seed(self.seqlen * 1009 + self.head_dim)

        def draw(heads: int, dim: int, outliers: bool, length: int) -> torch.Tensor:
            shape = (self.batch, length, heads, dim)
            x = torch.randn(shape, generator=generator, device=device)
            if outliers:
                far = torch.rand(shape, generator=generator, device=device) < OUTLIER_SHARE
                x = torch.where(far, x * OUTLIER_SCALE, x)
            return x.to(dtype)

        return Inputs(
            draw(self.heads, self.head_dim, True, self.seqlen_q),
            draw(self.heads_kv, self.head_dim, True, self.seqlen),
            draw(self.heads_kv, self.dim_v, False, self.seqlen),
        )

    def arguments(self, device: torch.device | str = "cuda") -> dict[str, Any]:
        """Keyword arguments of ``fa_cute.attention`` and the oracle: causal, window, score_mod."""
        arguments: dict[str, Any] = {"causal": self.causal}
        if self.window is not None:
            arguments["window"] = (self.window, None)
        build = VARIANTS[self.variant]
        if build is not None:
            arguments["score_mod"] = build(self, torch.device(device))
        return arguments

    def static(self) -> dict[str, Any]:
        """Keyword arguments of ``fa_cute.compile``; captured tensors without data."""
        arguments = self.arguments("meta")
        arguments["window"] = (self.window is not None, False)
        return arguments | {
            "head_dim": self.head_dim,
            "head_dim_v": self.dim_v,
            "dtype": getattr(torch, self.dtype),
            "gqa_ratio": self.heads // self.heads_kv,
            "few_queries": self.seqlen_q <= FEW_QUERIES,
            "few_keys": self.seqlen <= FEW_KEYS and self.seqlen_q > FEW_QUERIES,
        }


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """ALiBi's slopes ``(heads,)`` fp32: 2^(-8 (h + 1) / heads)."""
    steps = torch.arange(1, heads + 1, dtype=torch.float32, device=device)
    return torch.exp2(-8.0 * steps / heads)


def t5_table(heads: int, device: torch.device) -> torch.Tensor:
    """A T5 relative-bias table ``(32 buckets, heads)`` fp32."""
    return _normal((32, heads), device, torch.float32)


def dense_bias(case: Case, device: torch.device) -> torch.Tensor:
    """A bias ``(heads, S, S)`` in the case's dtype, shared by the batch."""
    return _normal((case.heads, case.seqlen, case.seqlen), device, getattr(torch, case.dtype))


def shared_bias(case: Case, device: torch.device) -> torch.Tensor:
    """A bias ``(S, S)`` in the case's dtype, shared by batch and heads."""
    return _normal((case.seqlen, case.seqlen), device, getattr(torch, case.dtype))


def _normal(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if device.type == "meta":
        return torch.empty(shape, device=device, dtype=dtype)
    generator = torch.Generator(device).manual_seed(5)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


def _alibi(case: Case, device: torch.device) -> Callable:
    slopes = alibi_slopes(case.heads, device)
    return lambda score, b, h, q, kv: score + slopes[h] * (kv - q)


def _softcap(case: Case, device: torch.device) -> Callable:
    return softcap(SOFTCAP)


def _bias(case: Case, device: torch.device) -> Callable:
    bias = dense_bias(case, device)
    return lambda score, b, h, q, kv: score + bias[h, q, kv]


def _shared_bias(case: Case, device: torch.device) -> Callable:
    bias = shared_bias(case, device)
    return lambda score, b, h, q, kv: score + bias[q, kv]


def _padded_bias(case: Case, device: torch.device, padding: int = 64) -> Callable:
    """``_bias`` with rows that many elements further apart."""
    size = case.heads, case.seqlen, case.seqlen + padding
    bias = _normal(size, device, getattr(torch, case.dtype))[..., :-padding]
    return lambda score, b, h, q, kv: score + bias[h, q, kv]


def _bias_by_elements(case: Case, device: torch.device) -> Callable:
    """``_bias`` as TMA cannot load it: rows one element further apart."""
    return _padded_bias(case, device, 1)


def _t5(case: Case, device: torch.device) -> Callable:
    return t5_relative_bias(t5_table(case.heads, device))


VARIANTS: dict[str, Callable[[Case, torch.device], Callable] | None] = {
    "plain": None,
    "alibi": _alibi,
    "softcap": _softcap,
    "bias": _bias,
    "shared-bias": _shared_bias,
    "padded-bias": _padded_bias,
    "bias-by-elements": _bias_by_elements,
    "t5": _t5,
}


def cases(
    dims: list[tuple[int, int]],
    lengths: list[int],
    masks: list[str],
    variants: list[str],
    groups: list[int],
    queries: Sequence[int] = (),
) -> Iterator[Case]:
    """The grid at 16k tokens: hidden 2048, or 4096 where query heads share keys (ratio > 1).

    With ``queries``, calls of so many, in batches of 16.
    """
    few = queries or [None]
    for (dim, dim_v), ratio in itertools.product(dims, groups):
        heads = (HIDDEN if ratio == 1 else 2 * HIDDEN) // dim
        for length, number, mask, variant in itertools.product(lengths, few, masks, variants):
            yield Case(
                head_dim=dim,
                head_dim_v=dim_v,
                seqlen=length,
                batch=DECODE_BATCH if number else max(1, TOKENS // length),
                heads=heads,
                heads_kv=heads // ratio,
                causal=mask != "full",
                window=WINDOW if mask == "window" else None,
                variant=variant,
                queries=number,
            )
