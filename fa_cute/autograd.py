"""The gradient of a call on CUDA: what is saved, and what the backward gives to each input.

Saved are q, k, v, the output and one number a row (lse): nothing quadratic in the length. Gradients
of captured tensors are those of the function ``mods/derivative.py`` makes of the score_mod; a
mask_mod has none. With P = exp(S - lse) and delta = rowsum(out dout) - dlse

    dS = P (dP - delta) d mod / d score        d sink = - sum over rows of exp(sink - lse) delta

Only what an input requires is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import FunctionCtx

from fa_cute.host import backward as host
from fa_cute.mods.derived import taught
from fa_cute.plan import FIXED, Extra

if TYPE_CHECKING:
    from fa_cute.host.blocks import MaskBlocks
    from fa_cute.host.planning import Mods
    from fa_cute.host.problem import Problem
    from fa_cute.mods.graph import Graph
    from fa_cute.plan import BlockLists, Launch

Tensors = tuple[torch.Tensor, ...]
FIRST_CAPTURED = 5  # the arguments before: call, q, k, v, sinks


class Call(NamedTuple):
    """A call beside its tensors: ``run(captured) -> (out, lse)`` is its forward.

    ``plans`` is None where nothing is computed; ``sign`` is the factor on q that makes the scale of
    ``launch`` positive; ``blocks`` a mask that was planned; ``idle`` the captured tensors, by
    place, whose gradient is 0 because nothing is computed.
    """

    run: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    problem: Problem
    plans: host.Plans | None
    launch: Launch | None
    scalars: tuple[Any, ...] | None
    sign: int
    blocks: MaskBlocks | None = None
    idle: tuple[int, ...] = ()

    def block_lists(self) -> BlockLists | None:
        """What the main kernel of the backward reads of ``blocks``."""
        if self.blocks is None or self.plans is None or not self.plans.main.block_lists:
            return None
        problem = self.problem
        sizes = problem.batch, problem.heads_q, problem.gqa_ratio
        return self.blocks.key_lists_for(*sizes, turns=self.plans.main.deterministic)


def attend(call: Call, qkv: Tensors, sinks: torch.Tensor | None, mods: Mods) -> Tensors:
    """(out, lse) of a call, differentiable: the inputs are all that may require a gradient."""
    return _Attention.apply(call, *qkv, sinks, *mods.captured)


def wants_gradient(qkv: Tensors, sinks: torch.Tensor | None, captured: Tensors) -> bool:
    """Whether a call is to be recorded."""
    if not torch.is_grad_enabled():
        return False
    q, k, v = qkv
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    for tensor in captured:
        if tensor.requires_grad:
            return True
    return sinks is not None and sinks.requires_grad


def derivative_of(mods: Mods) -> Graph | None:
    """The score_mod's graph with its derivative, for the captured tensors that require one."""
    traced = mods.score_mod
    if traced is None:
        return None
    from fa_cute.mods.derivative import differentiable, differentiate

    required = [at for at, tensor in enumerate(traced.captured) if tensor.requires_grad]
    return differentiate(traced.graph, frozenset(required) & differentiable(traced.graph))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        call: Call,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        *captured: torch.Tensor,
    ) -> Tensors:
        out, lse = call.run()
        # What inference_mode made cannot be saved: a BlockMask's table at its first call, say.
        ctx.aside = tuple(t if t.is_inference() else None for t in captured)
        saved = (t if aside is None else None for t, aside in zip(captured, ctx.aside))
        ctx.save_for_backward(q, k, v, out, lse, sinks, *saved)
        ctx.call = call._replace(run=None)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(
        ctx: FunctionCtx, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint unpacks no tensor a second time
        with torch.no_grad():
            given = _gradients(ctx, saved, dout, dlse)
        # torch's once_differentiable refuses only where dout requires a gradient: not for a sum.
        if not torch.is_grad_enabled():
            return given
        return _Last.apply(len(given), *given, dout, dlse, *saved)


class _Last(torch.autograd.Function):
    """Gradients that are used to build more graph (``create_graph``): they have none.

    They come from what they were computed of: else ``torch.autograd.grad`` of them with respect to
    a weight behind q would leave this out without a word, and be wrong.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, count: int, *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        return tuple(x if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: FunctionCtx, *_: torch.Tensor | None) -> None:
        raise RuntimeError(
            "fa_cute.attention cannot be differentiated twice: leave create_graph=True out, or "
            "detach its gradients"
        )


def _gradients(
    ctx: FunctionCtx, saved: Tensors, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """What ``_Attention.backward`` gives to each of the inputs; ``saved``: the tensors of ctx."""
    if dout is None and dlse is None:
        return (None,) * len(ctx.needs_input_grad)
    call, needs = ctx.call, ctx.needs_input_grad
    q, k, v, out, lse, sinks, *kept = saved
    captured = [t if aside is None else aside for t, aside in zip(kept, ctx.aside)]
    dout = torch.zeros_like(out) if dout is None else dout
    sums = _zeros(call.plans, captured)
    targets = tuple(x[..., 0] if x.dtype == torch.int64 else x for x in sums.values())
    extra = Extra(
        tuple(captured) or None,
        call.scalars,
        gradients=targets or None,
        block_lists=call.block_lists(),
    )
    found = host.backward(
        call.problem,
        call.plans,
        host.Saved(q if call.sign == 1 else q * call.sign, k, v, out, lse),
        (dout, dlse),
        extra,
        call.launch,
        needs=host.Needs(needs[1], needs[2], needs[3], bool(sums)),
    )
    dq = found.dq
    if dq is not None and call.sign != 1:
        dq = dq * call.sign
    given = [None] * len(captured)
    for slot in call.idle:
        given[slot] = torch.zeros_like(captured[slot])
    for slot, total in sums.items():
        total = fixed_total(total) if total.dtype == torch.int64 else total
        given[slot] = total.to(captured[slot].dtype)
    d_sinks = _of_sinks(sinks, lse, found.delta) if needs[4] else None
    return (None, dq, found.dk, found.dv, d_sinks, *given)


def _zeros(plans: host.Plans | None, captured: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Sums for the captured tensors that get gradients, by place: fp32, or words of ``FIXED``."""
    graph = None if plans is None else plans.main.score_mod
    if graph is None:
        return {}
    words, dtype = (), torch.float32
    if plans.main.deterministic:
        words, dtype = (FIXED.words,), torch.int64
    tensors = {slot: captured[slot] for slot in taught(graph)}
    return {
        slot: torch.zeros((*tensor.shape, *words), dtype=dtype, device=tensor.device)
        for slot, tensor in tensors.items()
    }


def fixed_total(words: torch.Tensor) -> torch.Tensor:
    """fp64 (...) of fixed-point sums (..., ``FIXED.words``); see ``device/fixed.py``."""
    *parts, wrong = words.unbind(-1)
    total = torch.zeros_like(wrong, dtype=torch.float64)
    for i, part in enumerate(parts):
        total += part.double() * 2.0 ** (FIXED.lowest + 32 * i)
    return total.masked_fill_(wrong != 0, torch.nan)


def _of_sinks(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The gradient (Hq,) of the sinks. A row with lse -inf has no sum that a sink is part of."""
    share = torch.exp(sinks.float()[:, None] - lse)
    share = torch.where(lse == -torch.inf, 0.0, share)
    return -(share * delta).sum(dim=(0, 2)).to(sinks.dtype)
