"""What a call would run, as text, without running it: ``fa_cute.explain``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from fa_cute import cpu, model
from fa_cute.host import cache, compile, configs
from fa_cute.host.blocks import MaskBlocks, plan_mask
from fa_cute.host.given_mask import as_mask_mod
from fa_cute.host.launch import Resources
from fa_cute.host.planning import Mods, make_plan
from fa_cute.host.problem import (
    FEW_KEYS,
    FEW_QUERIES,
    Problem,
    by_tiles,
    described,
    layout_is_ready,
)
from fa_cute.host.target import current_target, is_hosted
from fa_cute.mods.affine import input_graphs, ranges_of
from fa_cute.mods.emit_torch import emit
from fa_cute.mods.intervals import EMPTY
from fa_cute.mods.ranges import Integers, blocks_in, runs
from fa_cute.mods.shown import shown
from fa_cute.mods.tiles import tiled_loads
from fa_cute.mods.trace import Traced
from fa_cute.plan import FwdConfig, FwdSm100Config, Plan, register_pool
from fa_cute.spans import kv_spans
from fa_cute.tilemap import text, write_png

TENSORS = Integers(
    *(
        lambda *numbers, of=of: of(*map(torch.as_tensor, numbers))
        for of in (torch.minimum, torch.maximum, torch.where)
    )
)
# TFLOP/s of the plain full kernel at 16,384 tokens by head dim, on one NVIDIA H200: S16k, and S8k
# from 192 on (bench/results/2026-11-30-attention-plain.json, -dims.json).
MEASURED = {64: 630, 128: 785, 192: 774, 256: 787}


def explain(
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
    target: str | None = None,
    plot: str | Path | None = None,
) -> str:
    """What ``fa_cute.attention`` would run: tile, key, work, graphs, cache state, tile map.

    Nothing is compiled and no attention is run; of the tensors only those that a mask captures are
    read, for its tile map. Arguments and errors are those of ``attention``. ``target`` ("sm_90a")
    explains the kernel for another device than q's; without it, CPU tensors are explained as the
    CPU path that runs them. ``plot``: a PNG file to draw the tile map of the mask to.
    """
    mask_mod = as_mask_mod(mask_mod, q, k, v)
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
        sinks=sinks,
        deterministic=deterministic,
        target=target,
    )
    lines = list(_problem_lines(problem))
    tile = plan = None
    if target is None and problem.device.type == "cpu":
        lines += _cpu_lines(problem)
        tile = (cpu.tile_rows(problem.batch * problem.heads_q), cpu.TILE_N)
    elif problem.empty:
        lines.append("kernel: none; nothing to compute, out is 0 and lse -inf or the sinks")
    else:
        plan = make_plan(problem, mods, target or current_target(problem.device))
        lines += [*_plan_lines(plan), _lengths_line(problem, plan), *_bias_lines(mods, plan)]
        lines += _copy_lines(q, k, v)
        tile = (plan.config.tile_m, plan.config.tile_n)
    mask = _hidden(mods.score_mod) if mask_mod is None and mods.score_mod else mask_mod
    if mask is not None and tile is not None and not problem.empty:
        sizes = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
        blocks = plan_mask(mask, *sizes, device=problem.device, tile=tile)
        lines += _work_lines(problem, tile, blocks, plan)
        lines += _map_lines(blocks, plan, plot)
        if mask_mod is None:
            lines.append("mask: it is what the score_mod does not make minus infinity")
    elif plot is None and tile is not None and not problem.empty:
        lines += _work_lines(problem, tile, None, plan)
    elif plot is not None:
        raise ValueError(
            f"there is no mask to draw to {plot}: give a mask_mod, or a score_mod that hides"
        )
    for name, traced in mods.present():
        lines += [f"{name}: graph {traced.graph.key[:16]}", *_indented(traced.graph.describe())]
        for at, tensor in enumerate(traced.captured):
            said = described(f"captured[{at}] is", tensor)
            lines.append(f"    {said}, strides {tensor.stride()}")
        for at, number in enumerate(traced.scalars):
            lines.append(f"    scalars[{at}] is {number}, passed by value")
    return "\n".join(lines)


def _hidden(score_mod: Traced) -> Traced | None:
    """What the score_mod hides, as a mask."""
    graph = shown(score_mod.graph)
    return None if graph is None else score_mod._replace(graph=graph)


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
    key = compile.key_of(compile.key_parts(plan))
    yield f"kernel: {plan.direction} for {plan.target}, key {key}"
    tile, registers = (_hopper if isinstance(plan.config, FwdConfig) else _blackwell)(plan.config)
    yield tile + (f"; {plan.gqa_ratio} query heads share a tile" if plan.few_queries else "")
    yield f"why: {configs.why(plan.config)}"
    yield registers
    yield f"cache: {_cache_state(plan, key)}"
    yield (
        "another kernel: for another dtype, head dim, ratio of heads, causal, side of the window, "
        "mod or number that it captures, lse or sinks or not, and class of lengths (few queries, "
        "few keys); none for other lengths, batch, strides, scale, sizes of the window or contents "
        "of captured tensors"
    )


def _bias_lines(mods: Mods, plan: Plan) -> Iterator[str]:
    """Captured tensors that score_mod reads at [..., q, kv]: how the kernel does."""
    for slot in () if mods.score_mod is None else tiled_loads(mods.score_mod.graph):
        tensor = mods.score_mod.captured[slot]
        name = f"bias: {described(f'captured tensor {slot} of score_mod,', tensor)}"
        tile = f"{plan.config.rows_a_copy} x {plan.config.tile_n}"
        if slot == plan.bias:
            yield f"{name}, is loaded by TMA in boxes of {tile}, {plan.bias_stages} slots"
        elif by_tiles(tensor):
            yield f"{name}, is read by elements: one bias has a ring, where there is room"
        else:
            yield (
                f"{name}, is read by elements: TMA needs a last stride of 1, the address and other "
                f"strides on 16 bytes, and they are {tensor.stride()}"
            )


def _lengths_line(problem: Problem, plan: Plan) -> str:
    """The call's class of lengths, and whether it has a kernel of its own."""
    said = "more queries and keys than those of a class"
    if problem.few_queries:
        said = f"at most {FEW_QUERIES} queries"
    elif problem.few_keys:
        said = f"at most {FEW_KEYS:,} keys"
    own = plan.few_queries or plan.few_keys
    return f"lengths: {said}; " + ("a kernel for these" if own else "the kernel for any lengths")


def _hopper(config: FwdConfig) -> tuple[str, str]:
    registers = 128 * (config.producer_registers + config.consumers * config.consumer_registers)
    return (
        f"tile: {config.tile_m} queries x {config.tile_n} keys, {config.consumers} consumer "
        f"warpgroups, {config.kv_stages} stages of K and of V, {config.q_stages} of Q",
        f"registers: {config.producer_registers} a producer's thread, "
        f"{config.consumer_registers} a consumer's; {registers} of "
        f"{register_pool(128 * (1 + config.consumers))} of the CTA",
    )


def _blackwell(config: FwdSm100Config) -> tuple[str, str]:
    return (
        f"tile: {config.tile_m} queries x {config.tile_n} keys, {config.q_tiles} softmax "
        f"warpgroups of one row a thread, {config.k_stages} stages of K, {config.v_stages} of V, "
        f"{config.s_stages} of S a tile" + ("; a pair of CTAs shares it" if config.pair else ""),
        f"registers: {config.softmax_registers} a softmax thread, {config.correction_registers} a "
        f"correction's, {config.issue_registers} of those that load and multiply; "
        f"{config.registers} of {register_pool(config.threads)} of the CTA",
    )


def _cache_state(plan: Plan, key: str) -> str:
    if compile.in_memory(plan):
        return f"in memory; {_resources(compile.compiled(plan).resources)}"
    folder = cache.folder()
    if folder is None:
        return "not in memory; the disk is switched off, so a call compiles it"
    entry = cache.Store(folder).read(key)
    if entry is not None:
        return f"on disk in {folder}; {_resources(Resources(**entry.about['resources']))}"
    return f"neither in memory nor in {folder}: a call compiles it"


def _resources(found: Resources) -> str:
    return (
        f"{found.registers} registers a thread, {found.spill_bytes} bytes spilled, "
        f"{found.shared_memory} bytes of shared memory"
    )


def _work_lines(
    problem: Problem, tile: tuple[int, int], mask: MaskBlocks | None, plan: Plan | None
) -> Iterator[str]:
    """What the visited tiles are in operations, and in time for a kernel."""
    rows, columns = tile
    bounds, blocks = problem.bounds, -(-problem.seqlen_k // columns)
    spans = [kv_spans(bounds, q, q + rows, columns) for q in range(0, problem.seqlen_q, rows)]
    begin, end = torch.tensor([[s.begin, s.end] for s in spans], device="cpu").unbind(1)
    share = bounded = (end - begin).double().mean().item() / blocks
    if mask is not None and plan is not None and plan.visits == "ranges":
        share = _by_ranges(mask.traced, problem, tile, (begin, end)).mean().item() / blocks
    elif mask is not None and (plan is None or plan.visits != "bounds"):
        at = torch.arange(blocks, device="cpu")
        visited = (at >= begin[:, None]) & (at < end[:, None]) & (mask.kinds().cpu() != EMPTY)
        share = visited.double().mean().item()
    tiles = problem.batch * problem.heads_q * len(spans) * blocks
    flops = 2 * share * tiles * rows * columns * (problem.head_dim + problem.head_dim_v)
    said = f"work: {share:.1%} of all tiles is visited, {flops:.4g} FLOP"
    if plan is not None and isinstance(plan.config, FwdConfig):
        width = min(MEASURED, key=lambda dim: abs(dim - problem.head_dim))
        rate = MEASURED[width]
        said += (
            f"; {flops / rate / 1e9:.3g} ms at {rate} TFLOP/s, what the plain full kernel of head "
            f"dim {width} reaches on an H200"
        )
    yield said
    if plan is not None and isinstance(plan.config, FwdSm100Config):
        yield from _model_lines(plan, problem, flops, share / bounded)


def _by_ranges(
    mask: Traced, problem: Problem, tile: tuple[int, int], within: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """How many blocks a kernel visits that goes by the mask's ranges: (B, Hq, tiles of queries).

    Ranges that are not exact hold more than the mask shows. ``within``: the first block that bounds
    leave each tile, and the one after the last.
    """
    zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    batch, heads = zero.new_tensor(range(problem.batch)), zero.new_tensor(range(problem.heads_q))
    at = {"b": batch.view(-1, 1, 1), "h": heads.view(-1, 1), "q": zero, "kv": zero}
    captured = tuple(tensor.cpu() for tensor in mask.captured)
    inputs = [emit(graph, captured, mask.scalars, **at) for graph in input_graphs(mask.graph)]
    first = zero.new_tensor(range(0, problem.seqlen_q, tile[0]))
    lengths = problem.seqlen_q, problem.seqlen_k
    found = runs(ranges_of(mask.graph), inputs, (first, first + tile[0]), lengths, tile[1], TENSORS)
    return blocks_in(found, *within, TENSORS).double()


def _model_lines(plan: Plan, problem: Problem, flops: float, kept: float) -> Iterator[str]:
    """Cycles on paper of a block, and time of a call; ``kept``: what a mask leaves of the tiles."""
    if is_hosted(plan.target):
        yield "model: none; a test device, sm_100's kernel hosted on Hopper: slow"
        return
    c = plan.config
    block = model.cycles(c, plan.width, plan.width_v, target=plan.target)
    bare = model.cycles(replace(c, emulated=0), plan.width, plan.width_v, target=plan.target)
    spared = model.rescaling(c, plan.width_v)
    yield (
        f"model: a block of {c.tile_m} x {c.tile_n} takes {block.products:.0f} cycles of products, "
        f"{block.shared:.0f} of shared memory, {block.exponentials:.0f} of exponentials, "
        f"{block.fp32:.0f} of fp32 and {block.other:.0f} of other arithmetic: bound by "
        f"{block.bound}"
    )
    yield (
        f"model: emulating {c.emulated} of 16 pairs takes off "
        f"{bare.exponentials - block.exponentials:.0f} cycles of exponentials for "
        f"{block.fp32 - bare.fp32:.0f} of fp32; conditional rescaling {spared.fp32:.0f} of fp32 "
        f"and {spared.accesses} accesses of tensor memory where no row rises by 8"
    )
    tiles = [max(tile) for tile in model.tiles(plan, problem.bounds)]
    everywhere = kept * problem.batch * problem.heads_q * c.ctas * sum(tiles) / model.SMS
    seconds = max(everywhere, kept * max(tiles)) / model.CLOCK
    yield (
        f"model: at least {1e3 * seconds:.3g} ms, at most {flops / seconds / 1e12:.0f} TFLOP/s, on "
        f"{model.SMS} SMs at {model.CLOCK / 1e9:.2f} GHz; mods not counted, nothing measured"
    )


def _map_lines(blocks: MaskBlocks, plan: Plan | None, plot: str | Path | None) -> Iterator[str]:
    """The mask's tiles: how many of each kind, the proof, and the map of its first head."""
    empty, partial, full = blocks.counts()
    total = empty + partial + full
    proof = "evaluating every element" if blocks.evaluated else "interval arithmetic"
    ranges = ranges_of(blocks.traced.graph)
    yield (
        f"mask: {empty} tiles empty, {partial} partial, {full} full of {total} "
        f"({blocks.batch} x {blocks.heads} maps), told by {proof}; {(partial + full) / total:.1%} "
        "of the work is kept (causal and the window not counted)"
    )
    if ranges is not None:
        exactly = "" if all(ranges.exact) else ", that hold more keys than it shows"
        yield f"mask: {len(ranges.ranges)} affine range(s) of keys a query{exactly}"
    if plan is not None:
        yield f"mask: {_VISITS[plan.visits]}"
    kinds = blocks.kinds()[0, 0]
    if plot is not None:
        write_png(kinds, plot)
        yield f"mask: tile map of batch 0, head 0 drawn to {plot}"
    yield "mask: queries go down, keys to the right; . is empty, + partial, # full"
    yield from _indented(text(kinds))


_VISITS = {
    "ranges": "the kernel computes from its ranges which tiles to visit, for any lengths",
    "lists": "the kernel visits the tiles in the lists of plan_mask",
    "bounds": "the kernel evaluates it on all tiles; give what plan_mask makes of it (for the "
    "kernel's own tile) and it visits the kept ones alone",
}


def _copy_lines(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[str]:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not layout_is_ready(tensor):
            yield f"copy: {described(name, tensor)} has strides {tensor.stride()}, made contiguous"


def _indented(block: str) -> list[str]:
    return [f"    {line}" for line in block.splitlines()]
