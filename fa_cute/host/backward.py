"""The backward of a call: its three plans and kernels, workspaces, and launches.

    preprocess   delta and shift of every row; zeroes the sums of dQ      kernels/bwd_preprocess.py
    main         dK, dV; adds up dQ in fp32                               kernels/bwd_sm90.py
    postprocess  dQ in its dtype                                          kernels/bwd_postprocess.py

Workspaces are linear in the length: 4 bytes an element of dQ (D padded to a multiple of 32), and 8
a row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from fa_cute.host import configs
from fa_cute.host.compile import compiled
from fa_cute.host.launch import Kernel
from fa_cute.host.problem import kernel_ready
from fa_cute.host.workspace import counter
from fa_cute.plan import (
    BACKWARD,
    POSTPROCESS,
    PREPROCESS,
    BwdIo,
    Extra,
    Launch,
    Plan,
    PostprocessIo,
    PreprocessIo,
)

if TYPE_CHECKING:
    from fa_cute.host.problem import Problem


class Saved(NamedTuple):
    """What the forward read and gave: q, k, v, out as a kernel reads them, lse ``(B, Hq, Sq)``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class Gradients(NamedTuple):
    """dq, dk, dv in the shapes and dtypes of q, k, v; ``delta`` ``(B, Hq, Sq)`` float32.

    ``delta`` is rowsum(out * dout) - dlse of each row. A sink's logit has the gradient
    -sum(exp(sink - lse) * delta) over its head's rows.
    """

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    delta: torch.Tensor


class Plans(NamedTuple):
    """The plans of the three kernels, in the order of their launches."""

    preprocess: Plan
    main: Plan
    postprocess: Plan


def plans_of(forward: Plan, *, deterministic: bool, lse_gradient: bool) -> Plans:
    """The backward of the ``forward`` plan; ``lse_gradient``: lse has one too."""
    cut = forward.causal or any(forward.window)
    modified = forward.score_mod is not None or forward.mask_mod is not None
    config = configs.bwd_sm90(forward.head_dim, forward.head_dim_v, cut=cut, modified=modified)
    main = replace(
        forward,
        direction=BACKWARD,
        config=config,
        deterministic=deterministic,
        return_lse=False,
        sinks=False,
    )
    # The passes around it know nothing of masks and mods: one kernel each for all of these.
    around = replace(
        main, gqa_ratio=1, causal=False, window=(False, False), score_mod=None, mask_mod=None
    )
    return Plans(
        replace(around, direction=PREPROCESS, return_lse=lse_gradient),
        main,
        replace(around, direction=POSTPROCESS, deterministic=False),
    )


def backward(
    problem: Problem,
    plans: Plans,
    saved: Saved,
    gradients: tuple[torch.Tensor, torch.Tensor | None],
    extra: Extra,
    launch: Launch,
) -> Gradients:
    """Run the three kernels; ``gradients`` are dout ``(B, Sq, Hq, Dv)`` and dlse or None.

    ``saved.q`` and ``launch.scale`` are those the forward's kernel had, so the scale is positive.
    """
    q, k, v, out, lse = saved
    dout, dlse = gradients
    if problem.empty:
        delta = torch.zeros_like(lse)
        return Gradients(*(torch.zeros_like(x) for x in (q, k, v)), delta)
    shape = (problem.batch, problem.heads_q)
    config = plans.main.config
    blocks = -(-problem.seqlen_q // config.tile_q)
    rows = blocks * config.tile_q
    shift, delta = torch.empty((2, *shape, rows), dtype=torch.float32, device=q.device)
    sums = torch.empty((*shape, rows, plans.main.width), dtype=torch.float32, device=q.device)
    turns = None
    if plans.main.deterministic:
        turns = torch.empty((*shape, blocks * config.consumers), dtype=torch.int32, device=q.device)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dout = kernel_ready(dout)
    dlse = None if dlse is None else dlse.float().contiguous()
    launch = launch._replace(counter=counter(q.device))
    preprocess, main, postprocess = (compiled(plan) for plan in plans)
    _launch(preprocess, PreprocessIo(out, dout, lse, dlse, shift, delta, sums, turns), launch)
    main(BwdIo(q, k, v, dout, shift, delta, sums, dk, dv, turns), extra, launch)
    _launch(postprocess, PostprocessIo(sums, dq), launch)
    return Gradients(dq, dk, dv, delta[..., : problem.seqlen_q])


def _launch(kernel: Kernel, io: PreprocessIo | PostprocessIo, launch: Launch) -> None:
    kernel(io, Extra(), launch)
