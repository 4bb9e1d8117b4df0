"""Every kernel that the gpu tier launches, in one place.

``python -m tests.gpu.configurations`` compiles them all for sm_90a into FA_CUTE_CACHE_DIR, on any
host: a GPU's time is then not spent on compiling. A test may use nothing that is not listed here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import fa_cute
from fa_cute import variants
from fa_cute.host.compile import compiled
from fa_cute.host.planning import takes_lists
from fa_cute.mods.trace import trace_mask_mod

from . import modifiers
from .modifiers import Builder, Shape


@dataclass(frozen=True)
class Configuration:
    """The static facts of one kernel: the keyword arguments of ``fa_cute.compile``.

    ``approximation`` is the error of a score that the mod's own hardware operations may add
    (tanh.approx: 2^-10.9 of the cap). ``everywhere``: the mask is evaluated on every block, which
    no call asks for; the tests compare with it.
    """

    head_dim: int = 128
    dtype: str = "bfloat16"
    causal: bool = False
    ratio: int = 1
    window: tuple[bool, bool] = (False, False)
    return_lse: bool = True
    mods: Builder | None = None
    approximation: float = 0.0
    head_dim_v: int | None = None
    sinks: bool = False
    block_lists: bool = False
    everywhere: bool = False
    few_queries: bool = False
    few_keys: bool = False

    @property
    def width_v(self) -> int:
        """The head dim of v and out."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of q, k, v and out."""
        return getattr(torch, self.dtype)

    def modifiers(self, device: torch.device, shape: Shape) -> dict[str, Any]:
        """score_mod and mask_mod, where it has them."""
        return {} if self.mods is None else self.mods(device, shape)

    def compile(self, target: str = "sm_90a") -> Any:
        """The kernel, from memory, disk or the compiler."""
        kernel = fa_cute.compile(
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=self.torch_dtype,
            causal=self.causal,
            gqa_ratio=self.ratio,
            window=self.window,
            return_lse=self.return_lse,
            sinks=self.sinks,
            block_lists=self.block_lists,
            few_queries=self.few_queries,
            few_keys=self.few_keys,
            target=target,
            **self.modifiers(torch.device("meta"), Shape()),
        )
        return compiled(replace(kernel.plan, visits="bounds")) if self.everywhere else kernel


C = Configuration

# Each value of head dim, dtype, causal and ratio meets each value of the others at least once.
PLAIN: dict[str, Configuration] = {
    "d128-bf16-full-1": C(),
    "d128-bf16-causal-1": C(causal=True),
    "d128-bf16-full-3": C(ratio=3),
    "d128-bf16-causal-4": C(causal=True, ratio=4),
    "d128-fp16-full-4": C(dtype="float16", ratio=4),
    "d128-fp16-causal-8": C(dtype="float16", causal=True, ratio=8),
    "d64-bf16-full-8": C(64, ratio=8),
    "d64-bf16-causal-3": C(64, causal=True, ratio=3),
    "d64-fp16-full-1": C(64, dtype="float16"),
    "d64-fp16-causal-1": C(64, dtype="float16", causal=True),
    "d64-bf16-full-4": C(64, ratio=4),
}
WITHOUT_LSE = {
    "d128-causal": C(causal=True, return_lse=False),
    "d64-full": C(64, return_lse=False),
}
# What gives no lse and hides nothing presumes maxima.
PRESUMED: dict[str, Configuration] = {
    "d128-bf16-full": C(return_lse=False),
    "d128-bf16-causal": C(causal=True, return_lse=False),
    "d64-fp16-full": C(64, dtype="float16", return_lse=False),
    "d64-fp16-causal": C(64, dtype="float16", causal=True, return_lse=False),
    "d96-bf16-causal-3": C(96, causal=True, ratio=3, return_lse=False),
    "d192-128-bf16-full": C(192, head_dim_v=128, return_lse=False),
    "d192-128-fp16-causal-4": C(
        192, "float16", head_dim_v=128, causal=True, ratio=4, return_lse=False
    ),
    "d192-128-bf16-window": C(192, head_dim_v=128, window=(True, True), return_lse=False),
    "d192-128-bf16-left": C(192, head_dim_v=128, window=(True, False), return_lse=False),
    "d192-96-bf16-causal": C(192, head_dim_v=96, causal=True, return_lse=False),
    "d128-bf16-window": C(causal=True, window=(True, False), return_lse=False),
    "d256-bf16-causal": C(256, causal=True, return_lse=False),
    "d64-bf16-window": C(64, window=(True, True), return_lse=False),
    # What these add is left to the softmax; of the third maxima rise with every block.
    "d128-bf16-alibi": C(mods=modifiers.alibi, return_lse=False),
    "d128-bf16-alibi-causal": C(mods=modifiers.alibi, causal=True, ratio=4, return_lse=False),
    "d128-bf16-alibi-turned": C(mods=modifiers.alibi_turned, return_lse=False),
    "d64-fp16-alibi-turned": C(64, "float16", mods=modifiers.alibi_turned, return_lse=False),
    "d256-bf16-keys": C(256, mods=modifiers.falling_with_keys, return_lse=False),
    "d96-bf16-keys-window": C(
        96, mods=modifiers.falling_with_keys, window=(True, True), return_lse=False
    ),
    # At d64 and d96 a share of their exponentials passes on the FMA pipes.
    "d128-bf16-capped": C(mods=modifiers.softcap(50.0), approximation=0.03, return_lse=False),
    "d96-bf16-capped": C(96, mods=modifiers.softcap(50.0), approximation=0.03, return_lse=False),
    "d64-fp16-capped-causal": C(
        64,
        "float16",
        causal=True,
        mods=modifiers.softcap(50.0),
        approximation=0.03,
        return_lse=False,
    ),
    "d64-bf16-capped-causal": C(
        64,
        causal=True,
        mods=modifiers.softcap(50.0),
        approximation=0.03,
        return_lse=False,
    ),
}
# Scores that a mod bounds: under no maximum at all.
BOUNDED: dict[str, Configuration] = {
    name: replace(one, mods=modifiers.softcap(30.0), approximation=0.018, return_lse=False)
    for name, one in {
        "d128-full": C(ratio=3),
        "d128-causal": C(causal=True),
        "d128-window": C(window=(True, True)),
        "d64-causal-sinks": C(64, causal=True, sinks=True),
        "d96-full": C(96),
        "d256-causal": C(256, causal=True),
        "d192-128-full": C(192, head_dim_v=128),
    }.items()
}
BOUNDED["d128-hiding"] = C(mods=modifiers.capped_documents, approximation=0.018, return_lse=False)
WINDOWS: dict[str, Configuration] = {
    "both": C(64, window=(True, True)),
    "left": C(64, window=(True, False)),
    "right": C(64, window=(False, True)),
    "causal-left": C(128, causal=True, window=(True, False)),
}
RATIOS: dict[str, Configuration] = {
    "7": C(64, causal=True, ratio=7),
    "10": C(128, causal=True, ratio=10),
}
# Query heads that share a tile: Sq of at most 64.
PACKED: dict[str, Configuration] = {
    "full-4": C(ratio=4, few_queries=True),
    "causal-8": C(causal=True, ratio=8, few_queries=True),
    "causal-16-d64": C(64, causal=True, ratio=16, few_queries=True),
    "window-2-d256": C(256, causal=True, window=(True, False), ratio=2, few_queries=True),
    "full-32-fp16-d72": C(72, "float16", ratio=32, return_lse=False, few_queries=True),
}
MODS: dict[str, Configuration] = {
    "alibi": C(mods=modifiers.alibi, causal=True, ratio=4),
    "tight": C(64, mods=modifiers.tight),
    "tight_diagonal": C(64, mods=modifiers.tight_diagonal),
    "integers": C(64, mods=modifiers.typed(modifiers.INTEGERS)),
    "floats": C(64, mods=modifiers.typed(modifiers.FLOATS)),
    "scalars": C(64, mods=modifiers.scalars),
    "wide_table": C(64, mods=modifiers.wide_table),
    "document": C(128, mods=modifiers.document),
    "even_keys_causal": C(64, causal=True, mods=modifiers.even_keys),
    "even_keys_window": C(64, window=(True, True), mods=modifiers.even_keys),
    "nothing": C(64, mods=modifiers.nothing),
    "both": C(128, causal=True, ratio=3, mods=modifiers.both),
}
FAULTS: dict[str, Configuration] = {
    "hide_upper": C(64, mods=modifiers.hidden(128, 256)),
    "hide_lower": C(64, mods=modifiers.hidden(0, 128)),
    "slope_1": C(64, mods=modifiers.slope(1)),
    "slope_2": C(64, mods=modifiers.slope(2)),
    "slope_3": C(64, mods=modifiers.slope(3)),
    "softcap_10": C(64, mods=modifiers.softcap(10.0), approximation=0.006),
    "softcap_50": C(64, mods=modifiers.softcap(50.0), approximation=0.03),
    "head_and_position": C(64, ratio=4, mods=modifiers.head_and_position),
    "distance": C(64, causal=True, mods=modifiers.distance),
}
# Head dims of every row of the table and, padded, between them; full and causal, dtypes in turn.
HEAD_DIMS: dict[str, Configuration] = {
    "96-full": C(96),
    "96-causal": C(96, causal=True, ratio=3),
    "192-full": C(192, ratio=4),
    "192-causal": C(192, dtype="float16", causal=True),
    "256-full": C(256),
    "256-causal": C(256, causal=True, ratio=3),
    "256-fp16": C(256, dtype="float16", causal=True),
    "192-128-full": C(192, head_dim_v=128),
    "192-128-causal": C(192, head_dim_v=128, causal=True, ratio=4),
    "8": C(8, dtype="float16"),
    "32": C(32, causal=True),
    "40": C(40),
    "72": C(72, causal=True, ratio=3),
    "80": C(80, dtype="float16"),
    "104": C(104),
    "136": C(136, causal=True),
    "160": C(160),
    "200": C(200, causal=True),
    "224": C(224, dtype="float16"),
    "248": C(248),
    "64-128": C(64, head_dim_v=128),
    "128-96": C(128, head_dim_v=96, causal=True),
    "256-64": C(256, head_dim_v=64),
    "72-200": C(72, head_dim_v=200, causal=True),
}
WIDE_MODS: dict[str, Configuration] = {
    "96-both": C(96, causal=True, ratio=3, mods=modifiers.both),
    "192-document": C(192, mods=modifiers.document),
    "192-128-alibi": C(192, head_dim_v=128, causal=True, mods=modifiers.alibi, ratio=4),
    "256-both": C(256, causal=True, ratio=3, mods=modifiers.both),
    "256-tight_diagonal": C(256, mods=modifiers.tight_diagonal),
    "256-softcap": C(256, mods=modifiers.softcap(50.0), approximation=0.03),
    "256-window": C(256, window=(True, True)),
    "72-tight": C(72, mods=modifiers.tight),
}
SINKS: dict[str, Configuration] = {
    "64-full": C(64, sinks=True),
    "128-causal": C(128, causal=True, ratio=4, sinks=True),
    "128-fp16-window": C(128, dtype="float16", window=(True, True), sinks=True),
    "256-causal": C(256, causal=True, sinks=True),
    "64-alibi": C(64, causal=True, ratio=4, mods=modifiers.alibi, sinks=True),
    "without lse": C(64, ratio=4, return_lse=False, sinks=True),
}
# Masks whose blocks the kernel leaves out: by ranges, or by lists.
MASKS: dict[str, Configuration] = {
    "cutoffs": C(mods=modifiers.cutoffs, ratio=4),
    "cutoffs-causal": C(mods=modifiers.cutoffs, causal=True),
    "cutoffs-window": C(64, mods=modifiers.cutoffs, window=(True, True), dtype="float16"),
    "ends": C(mods=modifiers.ends),
    "ends-sinks": C(64, mods=modifiers.ends, sinks=True),
    "late": C(mods=modifiers.late),
    "late-256": C(256, mods=modifiers.late),
    "scattered": C(mods=modifiers.scattered, ratio=4, block_lists=True),
    "scattered-causal": C(mods=modifiers.scattered, causal=True, block_lists=True),
    "scattered-window": C(64, mods=modifiers.scattered, window=(True, True), block_lists=True),
    "scattered-left": C(mods=modifiers.scattered, window=(True, False), block_lists=True),
    "apart": C(mods=modifiers.apart, block_lists=True),
    "biased": C(mods=modifiers.biased, block_lists=True),
    "biased-ranges": C(mods=modifiers.biased_ranges, ratio=3),
    "hiding": C(mods=modifiers.hiding, ratio=2),
    "hiding-causal": C(64, mods=modifiers.hiding, causal=True),
}
# A captured bias [..., q, kv], which TMA loads by tiles: each row of its table, each dtype.
BIASES: dict[str, Configuration] = {
    "d128-bf16": C(mods=modifiers.dense("h", "bfloat16")),
    "d128-fp16-causal": C(
        dtype="float16", causal=True, ratio=4, mods=modifiers.dense("bh", "float16")
    ),
    "d128-fp32": C(mods=modifiers.dense("", "float32")),
    "d128-fp32-causal": C(causal=True, mods=modifiers.dense("h", "float32"), ratio=3),
    "d64-bf16-causal": C(64, causal=True, mods=modifiers.dense("b", "bfloat16")),
    "d64-fp32-window": C(64, window=(True, True), mods=modifiers.dense("h", "float32")),
    "d40-fp16-fp16": C(40, "float16", mods=modifiers.dense("", "float16"), ratio=4),
    "d96-fp16": C(96, mods=modifiers.dense("bh", "float16"), ratio=2),
    "d72-fp32-causal": C(72, causal=True, mods=modifiers.dense("h", "float32")),
    "d192-bf16": C(192, mods=modifiers.dense("h", "bfloat16")),
    "d192-fp32": C(192, causal=True, mods=modifiers.dense("", "float32")),
    "d192-128-bf16": C(192, head_dim_v=128, causal=True, mods=modifiers.dense("h", "bfloat16")),
    "d192-128-fp32": C(192, head_dim_v=128, mods=modifiers.dense("b", "float32"), ratio=4),
    "d256-bf16-causal": C(256, causal=True, ratio=3, mods=modifiers.dense("h", "bfloat16")),
    "d256-fp32": C(256, "float16", mods=modifiers.dense("", "float32")),
    "left": C(causal=True, window=(True, False), mods=modifiers.dense("b", "bfloat16")),
    "sinks": C(64, sinks=True, mods=modifiers.dense("h", "bfloat16")),
    "without lse": C(ratio=4, return_lse=False, mods=modifiers.dense("h", "bfloat16")),
    "d256-fp32-without-lse": C(256, return_lse=False, mods=modifiers.dense("", "float32")),
    "two": C(mods=modifiers.two_biases, ratio=4),
    "chosen": C(64, mods=modifiers.chosen_bias, ratio=4),
    "capped": C(causal=True, mods=modifiers.capped_bias, approximation=0.006),
    "document": C(mods=modifiers.beside("h", "bfloat16", modifiers.document)),
    "ranges": C(mods=modifiers.beside("b", "bfloat16", modifiers.cutoffs), ratio=4),
    "ranges-64-causal": C(
        64, causal=True, mods=modifiers.beside("h", "float32", modifiers.cutoffs)
    ),
    "lists": C(mods=modifiers.beside("h", "bfloat16", modifiers.scattered), block_lists=True),
    "lists-causal": C(
        64, causal=True, mods=modifiers.beside("", "float16", modifiers.scattered), block_lists=True
    ),
}
# The same without TMA: rows of the bias are not apart by 16 bytes.
UNTILED: dict[str, Configuration] = {
    name: replace(BIASES[name], mods=modifiers.dense(lead, dtype, tiled=False))
    for name, lead, dtype in (
        ("d128-bf16", "h", "bfloat16"),
        ("d128-fp16-causal", "bh", "float16"),
        ("d128-fp32", "", "float32"),
        ("d64-bf16-causal", "b", "bfloat16"),
        ("d96-fp16", "bh", "float16"),
        ("d192-bf16", "h", "bfloat16"),
        ("d256-bf16-causal", "h", "bfloat16"),
        ("left", "b", "bfloat16"),
    )
}
# Of these the kernel of sm_100 is compiled, for Hopper: every row of its table, every path in it.
HOSTED_TARGET = "sm_100@sm_90a"
HOSTED: dict[str, Configuration] = {
    "128-full": C(ratio=3),
    "128-causal": C(causal=True, ratio=4),
    "128-fp16": C(dtype="float16"),
    "64-causal": C(64, causal=True, ratio=3),
    "64-window": C(64, window=(True, True)),
    "64-left": C(64, window=(True, False), ratio=4),
    "96-full": C(96),
    "192-128-causal": C(192, head_dim_v=128, causal=True, ratio=4),
    "256-full": C(256),
    "256-causal": C(256, causal=True, ratio=3),
    "72-200": C(72, head_dim_v=200, causal=True),
    "sinks": C(64, causal=True, ratio=4, sinks=True),
    "alibi": C(64, causal=True, ratio=4, mods=modifiers.alibi),
    "tight_diagonal": C(64, mods=modifiers.tight_diagonal),
    "both": C(128, causal=True, ratio=3, mods=modifiers.both),
    "256-both": C(256, causal=True, ratio=3, mods=modifiers.both),
}
# Of ``masks()``: ranges and lists, with bounds, sinks, a score_mod, one and two tiles a CTA.
HOSTED_MASKS = (
    "cutoffs",
    "cutoffs-causal",
    "cutoffs-window",
    "ends-sinks",
    "late-256",
    "scattered",
    "scattered-causal",
    "scattered-window",
    "apart",
    "biased",
    "biased-ranges",
    "document-planned",
    "longformer",
)
# Of ``everything()``: what test_blackwell_matrix.py and the tests of variants and packed heads use.
HOSTED_GROUPS = (
    *("plain", "without lse", "windows", "ratios", "packed", "mods", "faults", "head dims"),
    *("wide mods", "sinks", "variants", "biases"),
)
# Three deliberate breakages of it, compiled where they are tested.
BROKEN = C(64, ratio=4, return_lse=False)


def variant(name: str) -> Configuration:
    """The configuration of a variant in ``fa_cute.variants.ALL``; ``Shape().heads`` query heads."""
    # tanh.approx under the default cap of 50: 50 * 2^-10.9.
    return C(mods=variants.ALL[name].build, approximation=0.03)


def masks() -> dict[str, Configuration]:
    """``MASKS`` and every mask in ``fa_cute.variants``; also planned where lists say more."""
    found = dict(MASKS)
    for name, member in variants.ALL.items():
        if member.kind == "mask_mod":
            (mask_mod,) = member.build("meta", variants.Shape()).values()
            listed = takes_lists(trace_mask_mod(mask_mod).graph)
            found[name] = variant(name)
            if listed:
                found[f"{name}-planned"] = replace(variant(name), block_lists=True)
    return found


def everything() -> Iterator[tuple[str, Configuration]]:
    """(name, configuration) of every kernel."""
    groups = {
        "plain": PLAIN,
        "without lse": WITHOUT_LSE,
        "presumed": PRESUMED,
        "bounded": BOUNDED,
        "windows": WINDOWS,
        "ratios": RATIOS,
        "packed": PACKED,
        "mods": MODS,
        "faults": FAULTS,
        "head dims": HEAD_DIMS,
        "wide mods": WIDE_MODS,
        "sinks": SINKS,
        "variants": {name: variant(name) for name in variants.ALL},
        "biases": BIASES,
        "untiled biases": UNTILED,
        "masks": masks(),
        "masks without lse": {n: replace(c, return_lse=False) for n, c in masks().items()},
        "masks everywhere": {
            name: replace(c, everywhere=True, block_lists=False) for name, c in masks().items()
        },
    }
    for group, members in groups.items():
        for name, configuration in members.items():
            yield f"{group}: {name}", configuration


def hosted() -> Iterator[tuple[str, Configuration]]:
    """(name, configuration) of every kernel that is hosted."""
    yield from HOSTED.items()
    for name, configuration in everything():
        if name.partition(":")[0] in HOSTED_GROUPS:
            yield name, configuration
    for name in HOSTED_MASKS:
        yield f"mask: {name}", masks()[name]
        everywhere = replace(masks()[name], everywhere=True, block_lists=False)
        yield f"mask everywhere: {name}", everywhere


def main(target: str = "sm_90a") -> int:
    """Compile all for ``target``; the exit status counts those that failed."""
    failed, begin, seen = 0, time.perf_counter(), set()
    wanted = hosted() if target == HOSTED_TARGET else everything()
    for name, configuration in wanted:
        for lengths in ({}, {"few_queries": True}, {"few_keys": True}):
            try:
                kernel = replace(configuration, **lengths).compile(target)
            except Exception as error:  # one that fails must not keep the others from the device
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                failed += 1
                continue
            if kernel.key not in seen:
                seen.add(kernel.key)
                took = f"{kernel.source}, {kernel.seconds:.1f} s"
                print(f"{name}: {took}, {kernel.resources}", flush=True)
    print(f"{len(seen)} kernels in {time.perf_counter() - begin:.0f} s, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
