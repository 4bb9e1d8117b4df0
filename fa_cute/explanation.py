"""What a call would run, as text, without running it: ``fa_cute.explain``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from fa_cute import cpu
from fa_cute.host import cache, compile
from fa_cute.host.configs import REGISTERS_PER_SM
from fa_cute.host.planning import Mods, make_plan
from fa_cute.host.problem import Problem, described, layout_is_ready
from fa_cute.host.target import current_target
from fa_cute.plan import Plan


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    target: str | None = None,
) -> str:
    """What ``fa_cute.attention`` would run: tile, key, captured operands, graphs, cache state.

    Nothing is compiled or launched, and no data is read. Arguments and errors are those of
    ``attention``. ``target`` ("sm_90a") explains the kernel for another device than q's; without
    it, CPU tensors are explained as the CPU path that runs them.
    """
    mods = Mods.of(score_mod, mask_mod)
    problem = Problem.of(
        q,
        k,
        v,
        mods=mods,
        causal=causal,
        window=window,
        scale=scale,
        return_lse=return_lse,
        deterministic=deterministic,
        target=target,
    )
    lines = list(_problem_lines(problem))
    if target is None and problem.device.type == "cpu":
        lines += _cpu_lines(problem)
    elif problem.empty:
        lines.append("kernel: none; nothing to compute, out is 0 and lse -inf")
    else:
        plan = make_plan(problem, mods, target or current_target(problem.device))
        lines += _plan_lines(plan)
        lines += _copy_lines(q, k, v)
    for name, traced in mods.present():
        lines += [f"{name}: graph {traced.graph.key[:16]}", *_indented(traced.graph.describe())]
        for at, tensor in enumerate(traced.captured):
            text = described(f"captured[{at}] is", tensor)
            lines.append(f"    {text}, strides {tensor.stride()}")
        for at, number in enumerate(traced.scalars):
            lines.append(f"    scalars[{at}] is {number}, passed by value")
    return "\n".join(lines)


def _problem_lines(problem: Problem) -> Iterator[str]:
    yield (
        f"problem: B {problem.batch}, Sq {problem.seqlen_q}, Sk {problem.seqlen_k}, "
        f"Hq {problem.heads_q}, Hk {problem.heads_k} (ratio {problem.gqa_ratio}), "
        f"D {problem.head_dim}, Dv {problem.head_dim_v}, {problem.dtype} on {problem.device}"
    )
    _, _, *bounds = problem.bounds
    left, right = ("unlimited" if bound is None else str(bound) for bound in bounds)
    yield f"visible: causal {problem.causal}, left {left}, right {right}; scale {problem.scale:.6g}"


def _cpu_lines(problem: Problem) -> Iterator[str]:
    rows = cpu.tile_rows(problem.batch * problem.heads_q)
    yield f"runs: the CPU path, tiles of {rows} queries x {cpu.TILE_N} keys; nothing is compiled"


def _plan_lines(plan: Plan) -> Iterator[str]:
    config = plan.config
    key = compile.key_of(compile.key_parts(plan))
    registers = 128 * (config.producer_registers + config.consumers * config.consumer_registers)
    yield f"kernel: {plan.direction} for {plan.target}, key {key}"
    yield (
        f"tile: {config.tile_m} queries x {config.tile_n} keys, {config.consumers} consumer "
        f"warpgroups, {config.kv_stages} stages of K and of V, {config.q_stages} of Q"
    )
    yield (
        f"registers: {config.producer_registers} a producer's thread, "
        f"{config.consumer_registers} a consumer's; {registers} of {REGISTERS_PER_SM} an SM"
    )
    yield f"cache: {_cache_state(plan, key)}"


def _cache_state(plan: Plan, key: str) -> str:
    if compile.in_memory(plan):
        return "in memory"
    folder = cache.folder()
    if folder is None:
        return "not in memory; the disk is switched off, so a call compiles it"
    if (folder / f"{key}.so").exists():
        return f"on disk in {folder}"
    return f"neither in memory nor in {folder}: a call compiles it"


def _copy_lines(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[str]:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not layout_is_ready(tensor):
            yield f"copy: {described(name, tensor)} has strides {tensor.stride()}, made contiguous"


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]
