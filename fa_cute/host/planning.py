"""From a checked problem and traced mods to the ``Plan``: the static decisions of one kernel.

What reads a mod is imported where there is one: a call without mods starts 100 ms sooner.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fa_cute.host import configs
from fa_cute.host.problem import Problem, by_tiles
from fa_cute.host.target import wants_pairs
from fa_cute.plan import FwdConfig, Plan

if TYPE_CHECKING:
    from fa_cute.host.blocks import MaskBlocks
    from fa_cute.mods.graph import Graph
    from fa_cute.mods.trace import Traced

HOSTED = "sm_100@sm_90a"  # the kernel of sm_100 on a Hopper GPU: a test device
CONFIGS = {
    "sm_90a": configs.fwd_sm90,
    "sm_100a": configs.fwd_sm100,
    "sm_103a": configs.fwd_sm103,
    HOSTED: configs.fwd_sm100,
}
DEAR = 10  # issue slots of what depends on q - kv; from there on it goes through shared memory
MOD_NAMES = ("score_mod", "mask_mod")


class Mods:
    """The traced mods of a call; None where there is none. ``blocks``: a mask that was planned.

    ``captured`` (tensors) and ``scalars`` (0-d CPU tensors as numbers) are score_mod's, then
    mask_mod's: a call reads them four times.
    """

    __slots__ = ("blocks", "captured", "mask_mod", "scalars", "score_mod")

    def __init__(
        self,
        score_mod: Traced | None = None,
        mask_mod: Traced | None = None,
        blocks: MaskBlocks | None = None,
    ) -> None:
        self.score_mod, self.mask_mod, self.blocks = score_mod, mask_mod, blocks
        self.captured: tuple[torch.Tensor, ...] = ()
        self.scalars: tuple[Any, ...] = ()
        if score_mod is not None:
            _, self.captured, self.scalars = score_mod
        if mask_mod is not None:
            self.captured += mask_mod.captured
            self.scalars += mask_mod.scalars

    @classmethod
    def of(cls, score_mod: Callable | None, mask_mod: Callable | MaskBlocks | None) -> Mods:
        """Trace both functions; TypeError for what is not callable.

        A ``MaskBlocks`` is taken as it was traced when it was planned: its lists are of that graph.
        """
        (trace_score_mod, trace_mask_mod), planned, _ = _readers()
        traced = None if score_mod is None else trace_score_mod(_function(score_mod, "score_mod"))
        if mask_mod is None:
            return cls(traced)
        if isinstance(mask_mod, planned):
            return cls(traced, mask_mod.traced, mask_mod)
        return cls(traced, trace_mask_mod(_function(mask_mod, "mask_mod")))

    def present(self) -> Iterator[tuple[str, Traced]]:
        """(name, traced) of the mods that are there: score_mod first, as the kernel takes them."""
        for name, traced in zip(MOD_NAMES, (self.score_mod, self.mask_mod), strict=True):
            if traced is not None:
                yield name, traced

    def facts(self) -> tuple[Any, ...]:
        """What chooses a call's kernel: graphs, the tensor that TMA loads, shapes and devices."""
        score_mod, mask_mod = self.score_mod, self.mask_mod
        facts = (
            None if score_mod is None else score_mod.graph.key,
            None if mask_mod is None else mask_mod.graph.key,
        )
        if self.captured:
            facts += (self.bias,)
            for tensor in self.captured:
                facts += (tensor.shape, tensor.device)
        return facts if self.blocks is None else facts + self.blocks.tile

    def graphs(self) -> tuple[Graph | None, Graph | None]:
        """The graphs of score_mod and mask_mod."""
        score_mod, mask_mod = self.score_mod, self.mask_mod
        return score_mod and score_mod.graph, mask_mod and mask_mod.graph

    @property
    def bias(self) -> int | None:
        """The first captured tensor of score_mod that TMA can load by tiles, if there is one.

        Its layout decides, which is why a tensor that moves may need another kernel.
        """
        if self.score_mod is None or not self.score_mod.captured:
            return None
        for slot in _readers()[2](self.score_mod.graph):
            if by_tiles(self.score_mod.captured[slot]):
                return slot
        return None


def _function(mod: Any, name: str) -> Callable:
    if not callable(mod):
        raise TypeError(f"{name} must be a function or None, not {type(mod).__name__}")
    return mod


@functools.cache
def _readers() -> tuple[tuple[Callable, Callable], type, Callable]:
    """What reads mods, imported at the first: to ask for it again took a call 2 us a time."""
    from fa_cute.host.blocks import MaskBlocks
    from fa_cute.mods.tiles import tiled_loads
    from fa_cute.mods.trace import trace_mask_mod, trace_score_mod

    return (trace_score_mod, trace_mask_mod), MaskBlocks, tiled_loads


NO_MODS = Mods()


def make_plan(problem: Problem, mods: Mods, target: str) -> Plan:
    """The plan of a forward for ``target`` (``CONFIGS``); ValueError for a target without kernels.

    Where a captured tensor of the score_mod can be loaded by tiles, it is.
    """
    plan = plan_by_elements(problem, mods, target)
    return plan if mods.bias is None else biased(plan, mods.bias)


def plan_by_elements(problem: Problem, mods: Mods, target: str) -> Plan:
    """``make_plan``, but captured tensors are read element by element.

    The forward is deterministic by construction (one CTA owns a row of the output and visits its
    blocks in a fixed order), so ``deterministic`` is False in its plan and never splits the cache.
    """
    if target not in CONFIGS:
        raise ValueError(
            f"fa_cute has kernels for {', '.join(CONFIGS)}, not for {target}; "
            "CPU tensors run anywhere, through fa_cute.attention on q.cpu()"
        )
    score_mod, mask_mod = mods.graphs()
    window = tuple(bound is not None for bound in problem.window)
    dtype = str(problem.dtype).removeprefix("torch.")
    config = CONFIGS[target](
        problem.head_dim,
        problem.head_dim_v,
        cut=problem.causal or any(window),
        modified=score_mod is not None or mask_mod is not None,
        dtype=dtype,
        **(_classes(problem, score_mod, mask_mod) if target == "sm_90a" else {}),
    )
    bare = not any((score_mod, mask_mod, problem.sinks))
    if bare and problem.few_queries and packs(problem.gqa_ratio, config):
        config = replace(config, packed=True)
    elif bare and wants_pairs(target):
        head_dims = problem.head_dim, problem.head_dim_v
        config = configs.paired(config, head_dims, cut=problem.causal or any(window))
    return Plan(
        direction="forward",
        dtype=dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        gqa_ratio=problem.gqa_ratio,
        causal=problem.causal,
        window=window,
        score_mod=score_mod,
        mask_mod=mask_mod,
        return_lse=problem.return_lse,
        sinks=problem.sinks,
        deterministic=False,
        target=target,
        config=config,
        visits=_visits(mods, config),
    )


def _classes(problem: Problem, score_mod: Graph | None, mask_mod: Graph | None) -> dict[str, bool]:
    """What more than head dims and bounds chooses a row of sm_90: see ``configs.fwd_sm90``."""
    from fa_cute.mods.shown import shown

    scored = score_mod is not None and mask_mod is None and shown(score_mod) is None
    light = scored and is_light(score_mod)
    decodes = problem.few_queries and problem.gqa_ratio > 1  # bound by memory: not measured there
    classes = {"few_keys": problem.few_keys, "light": light, "scored": scored}
    lse = problem.return_lse
    return classes | {"presumed": not (lse or decodes), "sought": lse and not decodes}


def is_light(score_mod: Graph) -> bool:
    """Whether a score_mod takes a thread few registers, so that three consumers pay.

    It loads nothing by query or key, and nothing dear of q - kv: ALiBi and softcap, not T5, which
    has 576 TFLOP/s with three consumers and 690 with two.
    """
    from fa_cute.mods.graph import cost

    placed = list(zip(score_mod.nodes, score_mod.levels(), strict=True))
    loads = any(node.op == "load" and level not in ("constant", "tile") for node, level in placed)
    diagonal = sum(cost(node) for node, level in placed if level == "diagonal")
    return not loads and diagonal < DEAR


def biased(plan: Plan, slot: int) -> Plan:
    """``plan`` with TMA loading score_mod's captured tensor ``slot`` by tiles, where that can be.

    It cannot where no slot of a ring fits beside the rest, and where lists of blocks are made for a
    tile that has no room for it. ValueError if the mod does not read that tensor at
    ``[..., q, kv]``.
    """
    from fa_cute.mods.tiles import tiled_loads

    if plan.score_mod is None or slot not in tiled_loads(plan.score_mod):
        raise ValueError(f"score_mod reads no captured tensor {slot} at [..., q, kv]")
    dtype = plan.score_mod.captured[slot].dtype
    config = configs.biased(plan.config, (plan.head_dim, plan.head_dim_v), dtype)
    same = (config.tile_m, config.tile_n) == (plan.config.tile_m, plan.config.tile_n)
    found = replace(plan, config=config, bias=slot)
    return found if found.bias_stages and (same or plan.visits != "lists") else plan


def takes_lists(graph: Graph) -> bool:
    """Whether the lists of a mask_mod may say more than ranges that a kernel computes itself."""
    from fa_cute.mods.affine import ranges_of

    ranges = ranges_of(graph)
    return ranges is None or not all(ranges.exact)


def _visits(mods: Mods, config: FwdConfig) -> str:
    """Where the visited blocks come from; lists of another tile than the kernel's are not read."""
    listed = mods.blocks is not None and mods.blocks.tile == (config.tile_m, config.tile_n)
    return visits_of(*mods.graphs(), listed=listed)


def visits_of(score_mod: Graph | None, mask_mod: Graph | None, *, listed: bool) -> str:
    """``Plan.visits`` under these mods; ``listed``: there are lists of the mask for the tile."""
    if score_mod is None and mask_mod is None:
        return "bounds"
    from fa_cute.mods.affine import ranges_of
    from fa_cute.mods.shown import visible_graph

    graph = visible_graph(score_mod, mask_mod)
    if graph is None:
        return "bounds"
    if listed and takes_lists(graph):
        return "lists"
    return "bounds" if ranges_of(graph) is None else "ranges"


def packs(ratio: int, config: FwdConfig) -> bool:
    """Whether ``ratio`` query heads can share a tile: whole queries must fill each copy of Q."""
    return ratio > 1 and config.rows_a_copy % ratio == 0
