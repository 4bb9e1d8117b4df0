"""Inputs, and the one tolerance rule: twice torch's own error in the same dtype, plus one ulp.

Torch's own error is that of SDPA; with a mod, of eager attention with scores materialised in that
dtype. Both are against the fp64 oracle, over the rows that see something; a row that sees nothing
must be exactly 0 and -inf. The root mean square is held to the same rule: outliers cannot hide it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_cute
from fa_cute import api
from fa_cute.host.compile import compiled
from fa_cute.host.planning import Mods

from .configurations import Configuration
from .modifiers import Shape

DEVICE = torch.device("cuda")
# Not cuDNN: it builds a plan for every shape, which takes longer than all the rest.
SDPA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
KINDS = ("normal", "outliers", "constant")


class Inputs(NamedTuple):
    """q ``(B, Sq, Hq, D)``, k ``(B, Sk, Hk, D)``, v ``(B, Sk, Hk, Dv)``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def shape(self) -> Shape:
        """Batch, query heads and lengths."""
        return Shape(self.q.shape[0], self.q.shape[2], self.q.shape[1], self.k.shape[1])


def drawn(
    generator: torch.Generator, shape: tuple[int, ...], kind: str, dtype: torch.dtype
) -> torch.Tensor:
    """A tensor where the generator is; ``kind`` is one of ``KINDS``."""
    if kind == "constant":
        return torch.full(shape, 0.75, device=generator.device, dtype=dtype)
    x = torch.randn(shape, generator=generator, device=generator.device)
    if kind == "outliers":
        far = torch.rand(shape, generator=generator, device=generator.device) < 0.01
        x = torch.where(far, 20 * x, x)
    return x.to(dtype)


def inputs(
    configuration: Configuration,
    lengths: tuple[int, int],
    *,
    batch: int = 2,
    heads_k: int = 1,
    kind: str = "normal",
) -> Inputs:
    """Tensors for a configuration; ``kind`` is one of ``KINDS``."""
    generator = torch.Generator(DEVICE).manual_seed(1000 * lengths[0] + lengths[1])

    def draw(length: int, heads: int, width: int = configuration.head_dim) -> torch.Tensor:
        return drawn(generator, (batch, length, heads, width), kind, configuration.torch_dtype)

    heads_q = heads_k * configuration.ratio
    q, k = draw(lengths[0], heads_q), draw(lengths[1], heads_k)
    return Inputs(q, k, draw(lengths[1], heads_k, configuration.width_v))


def arguments(configuration: Configuration, x: Inputs, **run_time: Any) -> dict[str, Any]:
    """The keyword arguments of a call, mods built for the inputs.

    ``run_time``: window, scale, sinks.
    """
    mods = configuration.modifiers(DEVICE, x.shape)
    return {"causal": configuration.causal} | mods | run_time


def planned(configuration: Configuration, x: Inputs, options: dict[str, Any]) -> dict[str, Any]:
    """The options with their mask planned, where the configuration reads lists."""
    if not configuration.block_lists:
        return options
    device, dim = x.q.device, configuration.head_dim
    blocks = fa_cute.plan_mask(options["mask_mod"], *x.shape, device=device, head_dim=dim)
    return options | {"mask_mod": blocks}


def call(configuration: Configuration, x: Inputs, **options: Any) -> tuple[torch.Tensor, Any]:
    """``fa_cute.attention`` by keyword; (out, lse), lse None where the kernel has none."""
    result = fa_cute.attention(*x, return_lse=configuration.return_lse, **options)
    return result if configuration.return_lse else (result, None)


def everywhere(
    x: Inputs, options: dict[str, Any], *, return_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None, str]:
    """(out, lse) with the mask evaluated on every block; where the call itself gets its visits."""
    mods = Mods.of(options.get("score_mod"), options.get("mask_mod"))
    window, sinks = options.get("window"), options.get("sinks")
    chosen = api.Options(options["causal"], window, None, return_lse, False)
    prepared = api.lookup(tuple(x), mods, chosen, sinks)
    plan = prepared.kernel.plan
    kernel = compiled(replace(plan, visits="bounds"))
    result = api.on_gpu(prepared._replace(kernel=kernel), tuple(x), mods, None, sinks)
    return *result, plan.visits


def check(configuration: Configuration, x: Inputs, **run_time: Any) -> tuple[torch.Tensor, Any]:
    """Run and judge; the result (out, lse)."""
    options = arguments(configuration, x, **run_time)
    out, lse = call(configuration, x, **options)
    torch.cuda.synchronize()
    judge(configuration, x, options, (out, lse))
    return out, lse


def check_as_everywhere(configuration: Configuration, x: Inputs, **run_time: Any) -> None:
    """Bit for bit what the mask evaluated on every block gives, and right by the oracle."""
    options = planned(configuration, x, arguments(configuration, x, **run_time))
    torch.full((64 << 20,), torch.nan, device=DEVICE)  # poison what the allocator hands out
    out, lse = call(configuration, x, **options)
    right, right_lse, visits = everywhere(x, options, return_lse=configuration.return_lse)
    assert visits == ("lists" if configuration.block_lists else "ranges")
    assert torch.equal(out, right)
    assert lse is right_lse is None or torch.equal(lse, right_lse)
    judge(configuration, x, options, (out, lse))


def judge(
    configuration: Configuration,
    x: Inputs,
    options: dict[str, Any],
    result: tuple[torch.Tensor, Any],
) -> None:
    """Hold a result against the oracle; AssertionError with the figures."""
    out, lse = result
    right, right_lse = fa_cute.reference.attention(*x, return_lse=True, **options)
    assert out.shape == right.shape and out.dtype == x.q.dtype
    assert right.isfinite().all(), "the oracle itself is not finite"
    sees = (right_lse > -math.inf).transpose(1, 2)[..., None]
    assert (out == 0).logical_or(sees).all(), "a row that sees nothing is not 0"

    own = torch.where(sees, torch_attention(x, options).double() - right, 0)
    error = torch.where(sees, out.double() - right, 0)
    ulp = _ulp(right, out.dtype)
    allowed = 2 * own.abs().max() + ulp
    excess = error.abs() - allowed
    assert not (excess > 0).any() and not excess.isnan().any(), (
        f"error {error.abs().max():.3g}, torch's {own.abs().max():.3g}, worst excess "
        f"{excess.max():.3g} at {_where(excess)} of {tuple(out.shape)}"
    )
    rms, own_rms = error.square().mean().sqrt(), own.square().mean().sqrt()
    assert rms <= 2 * own_rms + ulp.square().mean().sqrt(), f"rms {rms:.3g}, torch's {own_rms:.3g}"
    if lse is not None:
        scale = options.get("scale") or x.q.shape[3] ** -0.5
        allowed = configuration.approximation + abs(scale) * _product_error(x.q, x.k)
        _judge_lse(lse, right_lse, allowed)


def _product_error(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """``(B, Hq, Sq)``: what a tensor core's sum may cost a row's largest product q k.

    It adds 16 products at a time and cuts the sum to about 21 bits below the largest term: the
    same cut made in fp64 arithmetic gives 9e-4 in the lse of a row whose sum of |q k| is 388,
    seen on an H200 as up to 1.3e-3. So D / 16 steps of 2^-21 of that sum.
    """
    q, k = (t.abs().float().transpose(1, 2) for t in (q, k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    largest = torch.stack([(a @ k[:, h].mT).amax(-1) for h, a in enumerate(q.unbind(1))], 1)
    return q.shape[3] / 16 * 2.0**-21 * largest


def _judge_lse(lse: torch.Tensor, right: torch.Tensor, approximation: torch.Tensor) -> None:
    assert lse.dtype == torch.float32 and lse.shape == right.shape
    blind = right == -math.inf
    assert ((lse == -math.inf) == blind).all(), "lse is -inf elsewhere than in rows without a key"
    # fp32 sums and exponentials: a few 2^-23 of the score, a few 2^-22 of the sum.
    allowed = approximation + 1e-4 + 2e-6 * right.abs()
    excess = torch.where(blind, 0.0, (lse.double() - right).abs() - allowed)
    assert not (excess > 0).any() and not excess.isnan().any(), (
        f"lse is off by {excess.max():.3g} more than allowed at {_where(excess)}"
    )


def torch_attention(x: Inputs, options: dict[str, Any]) -> torch.Tensor:
    """What torch makes of the same call in the same dtype: ``(B, Sq, Hq, Dv)``."""
    # Copies: torch 2.11's flash kernel faults on rows that are not aligned.
    q, k, v = (t.clone(memory_format=torch.contiguous_format).transpose(1, 2) for t in x)
    ratio = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    scale = options.get("scale") or q.shape[3] ** -0.5
    visible = _visible(q.shape[2], k.shape[2], options)
    if options.keys().isdisjoint(("score_mod", "mask_mod", "sinks")):
        square = options["causal"] and options.get("window") is None and q.shape[2] == k.shape[2]
        mask = None if square or visible is None else visible
        with sdpa_kernel(SDPA):
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=square, scale=scale
            )
    else:
        out = _eager((q, k, v), scale, visible, options)
    return out.nan_to_num(0.0).transpose(1, 2)


def _eager(
    qkv: tuple[torch.Tensor, ...],
    scale: float,
    visible: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    q, k, v = qkv
    scores = q @ k.transpose(2, 3) * scale
    sizes = scores.shape
    at = [
        torch.arange(size, device=q.device, dtype=torch.int32).view(
            *(size if i == dim else 1 for i in range(4))
        )
        for dim, size in enumerate(sizes)
    ]
    if "score_mod" in options:
        scores = options["score_mod"](scores, *at)
    hidden = torch.zeros(sizes, dtype=torch.bool, device=q.device)
    if visible is not None:
        hidden |= ~visible
    if "mask_mod" in options:
        hidden |= ~options["mask_mod"](*at)
    scores = scores.masked_fill(hidden, -math.inf).to(q.dtype)
    if "sinks" in options:
        sink = options["sinks"].to(q.dtype).view(1, -1, 1, 1).expand(*sizes[:3], 1)
        scores = torch.cat((scores, sink), -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v


def _visible(seqlen_q: int, seqlen_k: int, options: dict[str, Any]) -> torch.Tensor | None:
    """``(Sq, Sk)`` of causal and window, or None where neither bounds anything."""
    left, right = (None if b == -1 else b for b in options.get("window") or (None, None))
    right = 0 if options["causal"] else right
    if left is None and right is None:
        return None
    diagonal = torch.arange(seqlen_q, device=DEVICE)[:, None] + seqlen_k - seqlen_q
    ahead = torch.arange(seqlen_k, device=DEVICE)[None, :] - diagonal
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if left is not None:
        visible &= ahead >= -left
    if right is not None:
        visible &= ahead <= right
    return visible


def _ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The spacing of ``dtype`` at each element of ``x``."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.abs().clamp(min=info.smallest_normal))
    return torch.ldexp(torch.full_like(x, info.eps), exponent - 1)


def _where(excess: torch.Tensor) -> tuple[int, ...]:
    flat = int(excess.nan_to_num(math.inf).argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), excess.shape))
