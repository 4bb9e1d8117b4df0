"""The backward of a call: its three plans and kernels, workspaces, and launches.

    preprocess   delta and shift of every row; zeroes first sums of dQ    kernels/bwd_preprocess.py
    main         dK, dV; adds up dQ in fp32                               kernels/bwd_sm90.py
    postprocess  dQ in its dtype                                          kernels/bwd_postprocess.py

Workspaces are linear in the length: 4 bytes an element of dQ (D padded to a multiple of 32), and 8
a row.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from fa_cute.host.backward_configs import bwd_sm90
from fa_cute.host.compile import compiled
from fa_cute.host.launch import Kernel
from fa_cute.host.planning import visits_of
from fa_cute.host.problem import kernel_ready
from fa_cute.host.workspace import counter
from fa_cute.mods.derived import contributions, factor
from fa_cute.plan import (
    BACKWARD,
    POSTPROCESS,
    PREPROCESS,
    BwdConfig,
    BwdIo,
    Extra,
    Launch,
    Plan,
    PostprocessIo,
    PreprocessIo,
)
from fa_cute.spans import heads_together

if TYPE_CHECKING:
    from fa_cute.host.problem import Problem
    from fa_cute.mods.graph import Graph


class Saved(NamedTuple):
    """What the forward read and gave: q, k, v, out ``(B, S, H, ·)``, lse ``(B, Hq, Sq)``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class Needs(NamedTuple):
    """Which gradients are asked for; ``captured``: any of ``extra.gradients``."""

    dq: bool = True
    dk: bool = True
    dv: bool = True
    captured: bool = False


ALL = Needs()


class Gradients(NamedTuple):
    """dq, dk, dv in the shapes and dtypes of q, k, v (None: not needed); ``delta`` ``(B, Hq, Sq)``.

    ``delta``, float32, is rowsum(out * dout) - dlse of each row. A sink's logit has the gradient
    -sum(exp(sink - lse) * delta) over its head's rows.
    """

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    delta: torch.Tensor


class Plans(NamedTuple):
    """The plans of the three kernels, in the order of their launches."""

    preprocess: Plan
    main: Plan
    postprocess: Plan

    def slowest_first(self) -> tuple[Plan, ...]:
        """For a process that compiles them ahead: while it has the main one, others have a pass."""
        return self.main, self.postprocess, self.preprocess


@functools.lru_cache(maxsize=1024)
def plans_of(
    forward: Plan,
    *,
    deterministic: bool,
    lse_gradient: bool,
    derivative: Graph | None = None,
    listed: tuple[int, int] | None = None,
    gradients: tuple[bool, bool] = (True, True),
) -> Plans:
    """The backward of the ``forward`` plan; ``lse_gradient``: lse has one too.

    ``gradients``: whether dQ, and whether dK and dV are computed.

    ``derivative``: the forward's score_mod as ``mods/derivative.differentiate`` makes it.
    ``listed``: the tile (queries, keys) of the lists that the call has, if any.
    """
    # Lists are made for a tile before it is known whose gradients will be asked for.
    config = _config(forward, heavy=heaviness(derivative) if listed is None else 0)
    main = replace(
        forward,
        direction=BACKWARD,
        score_mod=derivative,
        config=config,
        deterministic=deterministic,
        return_lse=False,
        sinks=False,
        visits=_visits(forward, config, listed, deterministic),
        bias=None,
        gradients=gradients,
    )
    # The passes around it know nothing of masks and mods: one kernel each for all of these.
    around = replace(
        main,
        gqa_ratio=1,
        causal=False,
        window=(False, False),
        score_mod=None,
        mask_mod=None,
        visits="bounds",
        gradients=(gradients[0], True),
    )
    return Plans(
        replace(around, direction=PREPROCESS, return_lse=lse_gradient),
        main,
        replace(around, direction=POSTPROCESS, deterministic=False, gradients=(True, True)),
    )


def key_tile(forward: Plan) -> tuple[int, int]:
    """The tile (queries, keys) of the main kernel of the ``forward`` plan's backward."""
    config = _config(forward)
    return config.tile_q, config.tile_kv


def _config(forward: Plan, *, heavy: int = 0) -> BwdConfig:
    cut = forward.causal or any(forward.window)
    modified = forward.score_mod is not None or forward.mask_mod is not None
    dims = forward.head_dim, forward.head_dim_v
    return bwd_sm90(*dims, cut=cut, modified=modified, heavy=heavy)


def heaviness(derivative: Graph | None) -> int:
    """How far a mod's gradients pass the registers that there are beside P and dP: 0, 1 or 2.

    1: two numbers an element, factors that depend on the score, of d score and of captured tensors.
    2: the components of short vectors of queries or keys.
    """
    if derivative is None:
        return 0
    given, nodes, needs = contributions(derivative), derivative.nodes, derivative.dependence()
    if any(nodes[one.load].width > 1 and needs[one.load] & {"q", "kv"} for one in given):
        return 2
    factors = {factor(derivative), *(one.value for one in given)}
    return int(sum("score" in needs[at] and nodes[at].width == 1 for at in factors) > 1)


def _visits(
    forward: Plan, config: BwdConfig, listed: tuple[int, int] | None, deterministic: bool
) -> str:
    """Where the main kernel's blocks of queries come from.

    Lists count turns as if every tile before saw the block, which a left bound makes untrue.
    """
    listed = listed == (config.tile_q, config.tile_kv) and not (deterministic and forward.window[0])
    return visits_of(forward.score_mod, forward.mask_mod, listed=listed)


def backward(
    problem: Problem,
    plans: Plans,
    saved: Saved,
    gradients: tuple[torch.Tensor, torch.Tensor | None],
    extra: Extra,
    launch: Launch,
    *,
    needs: Needs = ALL,
) -> Gradients:
    """Run the three kernels; ``gradients`` are dout ``(B, Sq, Hq, Dv)`` and dlse or None.

    ``saved.q`` and ``launch.scale`` are those the forward's kernel had, so the scale is positive.
    ``extra.gradients`` (fp32 sums, shaped like the captured tensors that get one) are added to.
    ``extra.block_lists`` are read if the main plan says so.
    """
    q, k, v, out, lse = saved
    dout, dlse = gradients
    if problem.empty:
        delta = torch.zeros_like(lse) if dlse is None else -dlse.float()
        zeros = (torch.zeros_like(x) if need else None for x, need in zip((q, k, v), needs))
        return Gradients(*zeros, delta)
    shape = (problem.batch, problem.heads_q)
    config = plans.main.config
    blocks = -(-problem.seqlen_q // config.tile_q)
    rows = blocks * config.tile_q
    shift, delta, sums, first = _workspace(plans.main, problem, rows, launch.sm_count)
    turns = zeroed = dk = dv = None
    if plans.preprocess.zeroes:
        of_heads = problem.batch, problem.heads_k, 1
        zeroed = torch.empty(of_heads, dtype=torch.int32, device=q.device)
    if plans.main.in_turn:
        turns = torch.empty((*shape, blocks), dtype=torch.int32, device=q.device)
    q, k, v, out, dout = (kernel_ready(x) for x in (q, k, v, out, dout))
    if plans.main.gradients[1]:
        dk, dv = _dense_like(k), _dense_like(v)
    if plans.preprocess.return_lse:
        dlse = torch.zeros_like(lse) if dlse is None else dlse.float().contiguous()
    launch = launch._replace(counter=counter(q.device))
    preprocess = compiled(plans.preprocess)
    before = PreprocessIo(out, dout, lse, dlse, shift, delta, first, turns, zeroed)
    _launch(preprocess, before, launch)
    if any(needs):
        main, later = compiled(plans.main), zeroed if plans.main.zeroes else None
        main(BwdIo(q, k, v, dout, shift, delta, sums, dk, dv, turns, later), extra, launch)
    dq = None
    if needs.dq:
        dq = _dense_like(q)
        _launch(compiled(plans.postprocess), PostprocessIo(sums, dq), launch)
    given = (x if need else None for x, need in zip((dq, dk, dv), needs))
    return Gradients(*given, delta if rows == problem.seqlen_q else delta[..., : problem.seqlen_q])


def _workspace(
    main: Plan, problem: Problem, rows: int, ctas: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """shift and delta ``(B, Hq, rows)``, dQ's sums ``(B, Hq, rows, D)``, those zeroed at first.

    The last two are None where dQ is not computed. One allocation and views of it, 15 us; an
    allocation each took 32 of the 120 that the host spends on a backward.
    """
    batch, heads = problem.batch, problem.heads_q
    all_rows, width = batch * heads * rows, main.width if main.gradients[0] else 0
    flat = torch.empty(all_rows * (width + 2), dtype=torch.float32, device=problem.device)
    layout = (batch, heads, rows), (heads * rows, rows, 1)
    shift, delta = (flat.as_strided(*layout, all_rows * at) for at in (width, width + 1))
    if not width:
        return shift, delta, None, None
    a_head = rows * width
    strides = heads * a_head, a_head, width, 1
    sums = flat.as_strided((batch, heads, rows, width), strides)
    first = flat.as_strided((1, _zeroed_before(main, problem, ctas), rows, width), strides)
    return shift, delta, sums, first


_heads_together = functools.lru_cache(heads_together)


def _zeroed_before(main: Plan, problem: Problem, ctas: int) -> int:
    """Heads of all batches whose sums the preprocess zeroes (``device/zeroing.py``)."""
    heads = problem.batch * problem.heads_q
    if not main.zeroes:
        return heads
    section = _heads_together(problem.seqlen_q, main.rows_together())
    tiles = -(-problem.seqlen_k // main.config.tile_kv)
    begun = -(-min(ctas, tiles * heads) // (tiles * section)) * section
    return min(heads, begun + section)


def _dense_like(tensor: torch.Tensor) -> torch.Tensor:
    """Uninitialised, contiguous, of its shape and dtype: in half the time of ``torch.empty``."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _launch(kernel: Kernel, io: PreprocessIo | PostprocessIo, launch: Launch) -> None:
    kernel(io, Extra(), launch)
