"""Kernels ahead of a call: compiled on any host, for any target, with or without a GPU."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from fa_cute import api
from fa_cute.configuration import Configuration, Mod
from fa_cute.host import cache, worker
from fa_cute.host import compile as compiling
from fa_cute.host.launch import Kernel, Resources
from fa_cute.host.planning import Mods
from fa_cute.host.untraced import untraced
from fa_cute.plan import BACKWARD, FORWARD, Plan

LENGTHS = {"few_queries", "few_keys"}  # the classes of lengths, as ``compile`` names them


class CompiledAttention:
    """A kernel of one configuration, with its mods fixed: ``kernel(q, k, v)`` runs it.

    ``key`` identifies the machine code; ``source`` says where this request found it ("memory",
    "disk" or "compiled") and ``seconds`` how long that took; ``resources`` holds ``registers`` a
    thread, ``spill_bytes`` and ``shared_memory`` in bytes.
    """

    def __init__(self, kernel: Kernel, mods: Mods, source: str, seconds: float) -> None:
        self._kernel, self._mods = kernel, mods
        self.source, self.seconds = source, seconds

    @property
    def key(self) -> str:
        """32 hexadecimal digits."""
        return self._kernel.key

    @property
    def plan(self) -> Plan:
        """The static decisions that the kernel was made from."""
        return self._kernel.plan

    @property
    def resources(self) -> Resources:
        """What ptxas reported."""
        return self._kernel.resources

    @untraced
    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run on CUDA tensors: shapes, results and errors as of ``fa_cute.attention``.

        The mods stay as they were traced at compile time, the tensors that they captured included.
        ValueError if q, k, v, the window or sinks need another kernel than this one.
        """
        if self.plan.direction != FORWARD:
            raise ValueError(
                f"this is a {self.plan.direction} kernel, which no call on q, k and v runs: "
                "differentiate fa_cute.attention on tensors that require a gradient"
            )
        if not (isinstance(q, torch.Tensor) and q.is_cuda):
            raise ValueError(
                f"this is a kernel for {self.plan.target}, and q is no CUDA tensor; "
                "fa_cute.attention runs CPU tensors"
            )
        if any(len(mod.captured) != len(mod.graph.captured) for _, mod in self._mods.present()):
            raise ValueError(
                "this kernel was compiled from a graph, without the tensors that its mod reads: "
                "call fa_cute.attention with the mod itself, which finds the same kernel"
            )
        options = api.Options(self.plan.causal, window, scale, self.plan.return_lse, False)
        needed = api.lookup((q, k, v), self._mods, options, sinks, self.plan.config).kernel
        if needed is not None and needed.key != self.key:
            raise ValueError(self._mismatch(needed.plan))
        result, lse = api.on_cuda((q, k, v), self._mods, options, out, sinks, self.plan.config)
        return (result, lse) if options.return_lse else result

    def _mismatch(self, needed: Plan) -> str:
        asked, compiled_for = needed.parts(), self.plan.parts()
        changes = ", ".join(
            f"{name} {asked[name]} (compiled for {compiled_for[name]})"
            for name in cache.differences(asked, compiled_for)
        )
        return f"this call needs another kernel: {changes}; compile one, or call fa_cute.attention"

    def __repr__(self) -> str:
        return f"CompiledAttention({self.key}, {self.plan.target}, from {self.source})"


def compile(
    *,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype | str,
    direction: str = "forward",
    causal: bool = False,
    window: tuple[bool, bool] = (False, False),
    gqa_ratio: int = 1,
    few_queries: bool = False,
    few_keys: bool = False,
    score_mod: Mod = None,
    mask_mod: Mod = None,
    return_lse: bool = False,
    sinks: bool = False,
    deterministic: bool = False,
    block_lists: bool = False,
    bias: int | None = None,
    target: str,
) -> CompiledAttention:
    """Compile, or find in memory or on disk, the kernel of one configuration.

    ``window`` says which sides a call bounds; ``target`` is an architecture such as ``"sm_90a"``,
    which the host need not have; a mod is a function, or a graph that was recorded. With
    ``block_lists`` calls give the mask as a ``MaskBlocks`` of ``plan_mask``. ``few_queries`` and
    ``few_keys`` name the class of lengths to be fast at: calls of at most 64 queries, whose heads
    then share tiles where they share keys, and, of the others, those of at most 1,024 keys; each is
    right at any length. ``bias``: of a recorded graph, which captured tensor of score_mod TMA loads
    by tiles; for a function its tensors' layout says so. ``direction`` "backward": all kernels of a
    call that is differentiated; the result is the main one's, and ``fa_cute.attention`` on tensors
    that require a gradient runs them. ValueError for what no kernel exists for.
    """
    started = time.perf_counter()
    configuration = Configuration(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        direction=direction,
        causal=causal,
        window=window,
        gqa_ratio=gqa_ratio,
        few_queries=few_queries,
        few_keys=few_keys,
        score_mod=score_mod,
        mask_mod=mask_mod,
        return_lse=return_lse,
        sinks=sinks,
        deterministic=deterministic,
        block_lists=block_lists,
        bias=bias,
        target=target,
    )
    (plan, *others), mods = configuration.plans()
    for other in others:
        compiling.compiled(other)
    known = compiling.in_memory(plan)
    kernel = compiling.compiled(plan)
    seconds = time.perf_counter() - started
    return CompiledAttention(kernel, mods, "memory" if known else kernel.source, seconds)


def recorded_configurations() -> list[dict[str, Any]]:
    """The configurations that this process has used, as arguments for ``compile``.

    The passes around a backward come with it. Their mods are graphs.
    ``fa_cute.configuration.save`` writes them to a file, from which ``fa-cute compile --from``
    fills the cache next time.
    """
    used = (plan for plan in compiling.plans_in_memory() if plan.direction in (FORWARD, BACKWARD))
    return [Configuration.of(plan).arguments() for plan in used]


class Precompiled(NamedTuple):
    """A result of ``precompile``: ``source`` is "disk" or "compiled", or ``error`` says why not."""

    key: str
    source: str
    seconds: float
    error: str = ""


def precompile(
    configurations: Iterable[Mapping[str, Any]],
    *,
    workers: int | None = None,
    progress: Callable[[int, int, Precompiled], None] | None = None,
) -> list[Precompiled]:
    """Fill the cache on disk with the kernels of many ``compile`` arguments, in parallel.

    ``workers`` processes (the number of cores by default) compile what is not on disk yet, each
    kernel once; that of each class of lengths (``few_queries``, ``few_keys``) where arguments name
    neither. ``progress(done, total, result)`` is called after each. Wrong arguments are
    ValueErrors before anything compiles; a compile that fails is an ``error`` in its result.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}; it is a number of processes, 1 or more")
    if cache.opened() is None:
        raise ValueError("precompile fills the cache on disk, which is switched off or unusable")
    plans = {}
    for at, arguments in enumerate(configurations):
        for lengths in [{}] if LENGTHS & arguments.keys() else [{}, *({n: True} for n in LENGTHS)]:
            try:
                for plan in Configuration(**arguments, **lengths).plans()[0]:
                    compiling.check_kernel(plan)
                    plans[compiling.key_of(compiling.key_parts(plan))] = plan
            except ValueError as error:
                raise ValueError(f"configuration {at}: {error}") from error
    queue, results = list(plans.items()), {}
    guard = threading.Lock()

    def work() -> None:
        with _Worker() as compiler:
            while True:
                with guard:
                    if not queue:
                        return
                    key, plan = queue.pop(0)
                result = compiler.compile(key, plan)
                with guard:
                    results[key] = result
                    if progress is not None:
                        progress(len(results), len(plans), result)

    count = min(len(plans), workers or os.cpu_count() or 1)
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[key] for key in plans]


class _Worker:
    """A process that compiles plans, one a line, and answers with one line each."""

    def __enter__(self) -> _Worker:
        self._process = worker.start()
        return self

    def compile(self, key: str, plan: Plan) -> Precompiled:
        """Have ``plan`` compiled; a worker that dies over it is replaced."""
        try:
            self._process.stdin.write(worker.line(plan))
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            status = self._process.wait()
            self._process = worker.start()
            return Precompiled(key, "", 0.0, f"the compiling process ended with status {status}")
        return Precompiled(**json.loads(answer))

    def __exit__(self, *exception: object) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
