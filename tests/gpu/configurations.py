"""Every kernel that the gpu tier launches, in one place.

``python -m tests.gpu.configurations`` compiles them all for sm_90a into FA_CUTE_CACHE_DIR, on any
host: a GPU's time is then not spent on compiling. A test may use nothing that is not listed here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import fa_cute
from fa_cute import variants

from . import modifiers
from .modifiers import Builder, Shape


@dataclass(frozen=True)
class Configuration:
    """The static facts of one kernel: the keyword arguments of ``fa_cute.compile``.

    ``approximation`` is the error of a score that the mod's own hardware operations may add
    (tanh.approx: 2^-10.9 of the cap).
    """

    head_dim: int = 128
    dtype: str = "bfloat16"
    causal: bool = False
    ratio: int = 1
    window: tuple[bool, bool] = (False, False)
    return_lse: bool = True
    mods: Builder | None = None
    approximation: float = 0.0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of q, k, v and out."""
        return getattr(torch, self.dtype)

    def modifiers(self, device: torch.device, shape: Shape) -> dict[str, Any]:
        """score_mod and mask_mod, where it has them."""
        return {} if self.mods is None else self.mods(device, shape)

    def compile(self, target: str = "sm_90a") -> Any:
        """The kernel, from memory, disk or the compiler."""
        return fa_cute.compile(
            head_dim=self.head_dim,
            dtype=self.torch_dtype,
            causal=self.causal,
            gqa_ratio=self.ratio,
            window=self.window,
            return_lse=self.return_lse,
            target=target,
            **self.modifiers(torch.device("meta"), Shape()),
        )


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


def variant(name: str) -> Configuration:
    """The configuration of a variant in ``fa_cute.variants.ALL``; ``Shape().heads`` query heads."""
    # tanh.approx under the default cap of 50: 50 * 2^-10.9.
    return C(mods=variants.ALL[name].build, approximation=0.03)


def everything() -> Iterator[tuple[str, Configuration]]:
    """(name, configuration) of every kernel."""
    groups = {
        "plain": PLAIN,
        "without lse": WITHOUT_LSE,
        "windows": WINDOWS,
        "ratios": RATIOS,
        "mods": MODS,
        "faults": FAULTS,
        "variants": {name: variant(name) for name in variants.ALL},
    }
    for group, members in groups.items():
        for name, configuration in members.items():
            yield f"{group}: {name}", configuration


def main() -> int:
    """Compile all; the exit status counts those that failed."""
    failed, begin, seen = 0, time.perf_counter(), set()
    for name, configuration in everything():
        try:
            kernel = configuration.compile()
        except Exception as error:  # one that fails must not keep the others from the device
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            failed += 1
            continue
        seen.add(kernel.key)
        print(f"{name}: {kernel.source}, {kernel.seconds:.1f} s, {kernel.resources}", flush=True)
    print(f"{len(seen)} kernels in {time.perf_counter() - begin:.0f} s, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
