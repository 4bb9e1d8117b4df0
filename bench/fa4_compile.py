"""FlashAttention-4's forward compiled without a GPU, of fake tensors, by its package's source.

The package is ``flash-attn-4``, with ``quack-kernels``, ``einops`` and ``triton``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

SM_COUNT = 148
SEQLEN, HEADS = 8192, 16


class Compiled(Exception):
    """There is nothing to launch on."""


def forward(
    target: str,
    compiled: Callable[..., None],
    *,
    widths: tuple[int, int] = (128, 128),
    causal: bool = False,
    dtype: str = "bfloat16",
) -> None:
    """Call FlashAttention-4's forward for ``target``, on a device of 148 SMs.

    ``compiled(compile, kernel, *arguments, options)`` is called in place of its ``cute.compile``,
    which is the first argument.
    """
    os.environ |= {"FLASH_ATTENTION_ARCH": target, "FLASH_ATTENTION_NUM_SMS": str(SM_COUNT)}
    os.environ["CUTE_DSL_ARCH"] = target
    import cutlass
    import cutlass.cute as cute
    import torch
    from cutlass import Int32
    from flash_attn.cute import interface, tile_scheduler
    from torch._subclasses.fake_tensor import FakeTensorMode

    def grid(params: Any, *, loc: Any = None, ip: Any = None) -> tuple:
        most = SM_COUNT // params.cluster_shape_m * params.cluster_shape_m
        blocks = params.total_blocks_cluster * params.cluster_shape_m
        return cutlass.min(most, blocks), Int32(1), Int32(1)

    # The package asks the driver for the number of SMs.
    tile_scheduler.StaticPersistentTileScheduler.get_grid_shape = staticmethod(grid)
    compile_ = cute.compile

    def instead(kernel: Any, *arguments: Any, options: str = "") -> None:
        compiled(compile_, kernel, *arguments, options=options)
        raise Compiled

    cute.compile = instead
    width, width_v = widths
    try:
        with FakeTensorMode(), torch.no_grad():
            q, k, v = (
                torch.empty(1, SEQLEN, HEADS, d, device="cuda", dtype=getattr(torch, dtype))
                for d in (width, width, width_v)
            )
            interface.flash_attn_func(q, k, v, causal=causal)
    except Compiled:
        pass
    finally:
        cute.compile = compile_


def seconds(cases: list[str], target: str) -> None:
    """A line of JSON for ``plain`` and ``causal``, after one of float16: its ``cute.compile``."""
    spent: dict[str, float] = {}

    def timed(compile_: Any, kernel: Any, *arguments: Any, options: str) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        compile_(kernel, *arguments, options=options, no_jit_engine=True)
        spent.update(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu)

    forward(target, timed, dtype="float16")
    for case in cases:
        if case in ("plain", "causal"):
            forward(target, timed, causal=case == "causal")
            row = {"case": case, "direction": "forward", "what": "compile"}
            print(json.dumps(row | spent), flush=True)
