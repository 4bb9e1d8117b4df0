"""The call: trace the mods, check the problem, plan, obtain the kernel, allocate, launch.

A call on CUDA tensors whose facts were seen before is one dictionary look-up and the launch: facts
are shapes, strides, dtypes, devices, options and the mods' graphs, never data. Addresses are looked
at on every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fa_cute import autograd
from fa_cute.host.backward import Plans, plans_of
from fa_cute.host.compile import Next, compiled
from fa_cute.host.launch import Kernel
from fa_cute.host.planning import NO_MODS, Mods, make_plan
from fa_cute.host.problem import ALIGNMENT, Problem, allocate, check_out, kernel_ready
from fa_cute.host.target import current_target, is_hosted, sm_count
from fa_cute.host.untraced import untraced
from fa_cute.host.workspace import counter, tensor_memory
from fa_cute.mods.derived import taught
from fa_cute.plan import Extra, FwdConfig, Io, Launch, Plan

if TYPE_CHECKING:
    from fa_cute.host.blocks import MaskBlocks

SMALLEST_NORMAL_FLOAT32 = 2.0**-126
PREPARED_LIMIT = 4096
AUTOCAST_FROM = (torch.float32, torch.float16, torch.bfloat16)


class Options(NamedTuple):
    """The keyword arguments of a call that are neither tensors nor mods, as the user gave them."""

    causal: bool
    window: tuple[int | None, int | None] | None
    scale: float | None
    return_lse: bool
    deterministic: bool


@untraced
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    score_mod: Callable | None = None,
    mask_mod: Callable | MaskBlocks | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(mod(q·kᵀ · scale)) · v, with modifiers written in plain Python.

    On CUDA tensors of a Hopper GPU this is one kernel, compiled for the modifiers at hand; on CPU
    tensors the same algorithm in torch.

    Args:
        q: ``(B, Sq, Hq, D)``. fp16 or bf16 on CUDA; fp32 and fp64 too on the CPU.
        k: ``(B, Sk, Hk, D)``, where Hq is a multiple of Hk: query head h reads head h // (Hq / Hk).
        v: ``(B, Sk, Hk, Dv)``.
        score_mod: ``(score, b, h, q, kv) -> score``, on the scaled score, before masking.
        mask_mod: ``(b, h, q, kv) -> bool``, True where key kv counts for query q. Indices are plain
            positions: ``q >= kv`` is a top-left causal mask. Also the ``MaskBlocks`` of
            ``plan_mask``, or FlexAttention's ``BlockMask``.
        causal: query q sees the keys up to ``q + Sk - Sq`` (aligned to the bottom-right corner).
        window: ``(left, right)``: query q sees keys from ``q + Sk - Sq - left`` to
            ``q + Sk - Sq + right``, both included; None or -1 is unlimited.
        scale: factor on q·k, ``1/sqrt(D)`` by default.
        return_lse: also return the natural logarithm of the sum of the exponentials.
        sinks: ``(Hq,)``, fp32, bf16 or fp16: a learned logit a query head, one more score of each
            of its rows, without a value. fp32 is read as it is, others are converted on each call.
        deterministic: bitwise repeatable results, also of the gradients (the forward always is);
            ``torch.use_deterministic_algorithms`` implies it.
        out: ``(B, Sq, Hq, Dv)`` in q's dtype, to be written and returned; without gradients.

    Returns:
        out ``(B, Sq, Hq, Dv)`` in q's dtype; with ``return_lse`` also lse ``(B, Hq, Sq)`` in fp32
        (fp64 for fp64 inputs). Order: scale, score_mod, causal and window, mask_mod, softmax; all
        masks compose. A row that sees no key gives 0, and -inf (with ``sinks`` its sink) in lse.

    Raises:
        TypeError, ValueError: a wrong argument, named with its shape or value and what is accepted;
            also a mod that cannot be traced, with the line at fault.
    """
    mods = NO_MODS
    if score_mod is not None or mask_mod is not None:
        if mask_mod is not None:
            from fa_cute.host.given_mask import as_mask_mod

            mask_mod = as_mask_mod(mask_mod, q, k, v)
        mods = Mods.of(score_mod, mask_mod)
    options = Options(causal, window, scale, return_lse, deterministic)
    if isinstance(q, torch.Tensor) and q.is_cuda:
        if torch.is_autocast_enabled("cuda"):
            q, k, v = autocast((q, k, v))
        result, lse = on_cuda((q, k, v), mods, options, out, sinks)
    else:
        result, lse = _on_cpu((q, k, v), mods, options, out, sinks)
    return (result, lse) if return_lse else result


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Result = tuple[torch.Tensor, torch.Tensor | None]


def _on_cpu(
    qkv: Inputs,
    mods: Mods,
    options: Options,
    out: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> Result:
    from fa_cute import cpu

    problem = Problem.of(*qkv, mods=mods, sinks=sinks, out=out, **options._asdict())
    _refuse_out(out, qkv, mods, sinks)
    result, lse = cpu.attention(
        *qkv,
        bounds=problem.bounds,
        scale=problem.scale,
        score_mod=mods.score_mod,
        mask_mod=mods.mask_mod,
        sinks=sinks,
    )
    return (result if out is None else out.copy_(result)), lse


def autocast(qkv: Inputs) -> Inputs:
    """q, k and v as torch's own attention gets them in an autocast region: in its dtype.

    For the kernels, which take no fp32; the CPU path keeps the precision of its inputs.
    """
    dtype = torch.get_autocast_dtype(qkv[0].device.type)
    return tuple(
        x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in AUTOCAST_FROM else x for x in qkv
    )


def on_cuda(
    qkv: Inputs,
    mods: Mods,
    options: Options,
    out: torch.Tensor | None,
    sinks: torch.Tensor | None,
    config: FwdConfig | None = None,
) -> Result:
    """A call on CUDA tensors: (out, lse), recorded for autograd where an input requires it."""
    if not autograd.wants_gradient(qkv, sinks, mods.captured):
        return on_gpu(lookup(qkv, mods, options, sinks, config), qkv, mods, out, sinks)
    _refuse_out(out, qkv, mods, sinks)
    deterministic = options.deterministic or torch.are_deterministic_algorithms_enabled()
    derivative = autograd.derivative_of(mods)

    def backward_of(forward: Plan) -> Plans:
        return plans_of(
            forward,
            deterministic=deterministic,
            lse_gradient=options.return_lse,
            derivative=derivative,
            listed=None if mods.blocks is None else mods.blocks.key_tile,
            gradients=(qkv[0].requires_grad, qkv[1].requires_grad or qkv[2].requires_grad),
        )

    prepared = lookup(
        qkv,
        mods,
        options._replace(return_lse=True),
        sinks,
        config,
        lambda forward: backward_of(forward).slowest_first(),
    )
    plans, idle = None, ()
    if prepared.kernel is not None:
        plans = backward_of(prepared.kernel.plan)
    elif derivative is not None:
        idle = taught(derivative)
    call = autograd.Call(
        lambda: on_gpu(prepared, qkv, mods, None, sinks),
        prepared.problem,
        plans,
        prepared.launch,
        mods.scalars or None,
        prepared.sign,
        mods.blocks,
        idle,
    )
    return autograd.attend(call, qkv, sinks, mods)


class Prepared(NamedTuple):
    """What a call needs beside its tensors; ``kernel`` is None where there is nothing to compute.

    ``ready``: the strides of q, k and v suit the kernel as they are. ``sign``: factor on q that
    makes the scale positive, as the kernel's softmax takes it. ``alike``: out is as q is, which
    torch allocates in half the time.
    """

    problem: Problem
    kernel: Kernel | None
    launch: Launch | None
    ready: bool
    sign: int
    alike: bool = False


NOTHING = Extra()
_prepared: dict[tuple, Prepared] = {}


def on_gpu(
    prepared: Prepared,
    qkv: Inputs,
    mods: Mods,
    out: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> Result:
    """Run what ``lookup`` prepared: (out, lse), lse None unless the options ask for it."""
    problem, kernel, launch, ready, sign, alike = prepared
    if out is None:
        result, lse = allocate(problem, torch.empty_like(qkv[0]) if alike else None)
    else:
        check_out(problem, out)
        result, lse = allocate(problem, out if _writable(out, (*qkv, *mods.captured)) else None)
    if kernel is None:
        result.zero_()
        if lse is not None and sinks is not None:
            lse.copy_(sinks[:, None])
        elif lse is not None:
            lse.fill_(-math.inf)
    else:
        q, k, v = qkv
        if sign != 1:
            q = q * sign
        if not ready or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
            q, k, v = kernel_ready(q), kernel_ready(k), kernel_ready(v)
        if launch.scratch is not None:
            launch.scratch.fill_(math.nan)  # a test device: what is read before it is written shows
        launch = Launch(*launch[:4], counter(q.device), launch.scratch)
        extra = _extra(mods, sinks)
        if mods.blocks is not None and kernel.plan.block_lists:
            lists = mods.blocks.lists_for(problem.batch, problem.heads_q)
            extra = extra._replace(block_lists=lists)
        kernel(Io(q, k, v, result, lse), extra, launch)
    return (result if out is None or out is result else out.copy_(result)), lse


def lookup(
    qkv: Inputs,
    mods: Mods,
    options: Options,
    sinks: torch.Tensor | None = None,
    config: FwdConfig | None = None,
    following: Next | None = None,
) -> Prepared:
    """The prepared call for these facts, made and checked the first time.

    ``config``: the row to take instead of the one for the call's class of lengths. ``following``:
    of a plan that must be compiled, those whose kernels will be wanted next.
    """
    q, k, v = qkv
    try:
        key = (
            q.shape,
            q.stride(),
            q.dtype,
            q.device,
            k.shape,
            k.stride(),
            k.dtype,
            k.device,
            v.shape,
            v.stride(),
            v.dtype,
            v.device,
            options,
        )
        if mods is not NO_MODS:
            key += mods.facts()
        if sinks is not None:
            key += ("sinks", sinks.shape, sinks.dtype, sinks.device)
        if config is not None:
            key += (config,)
        prepared = _prepared.get(key)
    except (AttributeError, TypeError):
        # A list for the window, or no tensor at all: the checks below accept it or say what it is.
        return _prepare(qkv, mods, options, sinks, config, following)
    if prepared is None:
        prepared = _prepare(qkv, mods, options, sinks, config, following)
        if len(_prepared) >= PREPARED_LIMIT:
            _prepared.clear()
        _prepared[key] = prepared
    return prepared


def _prepare(
    qkv: Inputs,
    mods: Mods,
    options: Options,
    sinks: torch.Tensor | None,
    config: FwdConfig | None,
    following: Next | None,
) -> Prepared:
    problem = Problem.of(*qkv, mods=mods, sinks=sinks, **options._asdict())
    if problem.empty:
        return Prepared(problem, None, None, ready=True, sign=1)
    plan = make_plan(problem, mods, current_target(problem.device))
    if config is not None:
        plan = replace(plan, config=config)
    sign, scale = positive_scale(problem.scale)
    left, right = (0 if bound is None else bound for bound in problem.window)
    launch = Launch(scale, left, right, sm_count(problem.device), None)
    if is_hosted(plan.target):
        launch = launch._replace(scratch=tensor_memory(problem.device, launch.sm_count))
    ready = all(kernel_ready(tensor) is tensor for tensor in qkv)
    alike = qkv[0].is_contiguous() and qkv[0].shape == problem.out_shape
    return Prepared(problem, compiled(plan, following), launch, ready, sign, alike)


def positive_scale(scale: float) -> tuple[int, float]:
    """(sign, positive scale) with the same scores from sign * q: exact in every dtype.

    The kernel's softmax takes the maximum before it scales, which holds for positive factors only;
    one below fp32's normal numbers counts as zero.
    """
    if abs(scale) < SMALLEST_NORMAL_FLOAT32:
        return 0, 1.0
    return (1, scale) if scale > 0 else (-1, -scale)


def _extra(mods: Mods, sinks: torch.Tensor | None) -> Extra:
    if sinks is not None:
        sinks = sinks.float()
    elif mods is NO_MODS:
        return NOTHING
    return Extra(mods.captured or None, mods.scalars or None, sinks)


def _refuse_out(
    out: torch.Tensor | None, qkv: Inputs, mods: Mods, sinks: torch.Tensor | None
) -> None:
    if out is not None and autograd.wants_gradient(qkv, sinks, mods.captured):
        raise ValueError("out= has no gradient, but an input requires one; leave out, or no_grad()")


def _writable(out: torch.Tensor, inputs: tuple[Any, ...]) -> bool:
    """A kernel may write ``out`` itself: ready in layout, and in a storage apart from inputs."""
    storage = out.untyped_storage().data_ptr()
    shared = any(tensor.untyped_storage().data_ptr() == storage for tensor in inputs)
    return not shared and kernel_ready(out) is out
