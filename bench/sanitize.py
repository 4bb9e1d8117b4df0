"""Small launches of every kind of kernel, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 \\
    compute-sanitizer --tool memcheck --kernel-name kns=FwdSm90 python3 -m bench.sanitize

Each launch is a few tiles (or, named so, more than SMs), ragged at every edge, and its result is
held against the oracle. The kernels are those of the gpu tier, so that none compiles under the
sanitizer. With ``FA_CUTE_TARGET=sm_100@sm_90a`` they are Blackwell's, hosted (``kns=FwdSm100``).
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace

import torch

import fa_cute
from fa_cute.host.target import is_hosted
from tests.gpu.configurations import (
    BIASES,
    BOUNDED,
    HEAD_DIMS,
    HOSTED,
    MASKS,
    MODS,
    PACKED,
    PLAIN,
    PRESUMED,
    RATIOS,
    SINKS,
    WIDE_MODS,
    WINDOWS,
    Configuration,
    masks,
    variant,
)
from tests.gpu.judging import DEVICE, arguments, call, inputs, planned

Kinds = dict[str, tuple[Configuration, tuple[int, int], dict]]
KINDS: Kinds = {
    "full d128": (PLAIN["d128-bf16-full-3"], (200, 300), {}),
    "causal d128": (PLAIN["d128-bf16-causal-4"], (300, 300), {}),
    "full d64": (PLAIN["d64-bf16-full-8"], (65, 257), {}),
    "causal d64, rows without keys": (PLAIN["d64-bf16-causal-3"], (300, 100), {}),
    "ratio 10": (RATIOS["10"], (129, 129), {}),
    "window": (WINDOWS["both"], (300, 300), {"window": (70, 20)}),
    "causal window": (WINDOWS["causal-left"], (400, 400), {"window": (64, None)}),
    "score_mod": (MODS["alibi"], (129, 200), {}),
    "tight tables": (MODS["tight"], (129, 65), {}),
    "diagonal": (MODS["tight_diagonal"], (129, 200), {}),
    "mask_mod": (MODS["document"], (200, 200), {}),
    "both mods": (MODS["both"], (200, 200), {}),
    "integers": (MODS["integers"], (65, 65), {}),
    "floats": (MODS["floats"], (65, 65), {}),
    "d96": (HEAD_DIMS["96-causal"], (300, 300), {}),
    "d192": (HEAD_DIMS["192-full"], (200, 300), {}),
    "d192/128": (HEAD_DIMS["192-128-causal"], (300, 300), {}),
    "d256": (HEAD_DIMS["256-causal"], (300, 300), {}),
    "padded d72": (HEAD_DIMS["72"], (200, 200), {}),
    "padded d248": (HEAD_DIMS["248"], (129, 200), {}),
    "d256, both mods": (WIDE_MODS["256-both"], (200, 200), {}),
    "d256, diagonal": (WIDE_MODS["256-tight_diagonal"], (129, 200), {}),
    "mask, ranges": (MASKS["cutoffs-causal"], (200, 500), {}),
    "mask, lists": (MASKS["scattered-causal"], (900, 900), {}),
    "mask, lists of nothing": (MASKS["apart"], (200, 300), {}),
    "mask, loads by key": (masks()["document-planned"], (300, 500), {}),
    "mask, of a score_mod": (MASKS["hiding"], (200, 500), {}),
    "sinks": (SINKS["128-causal"], (300, 200), {}),
    "presumed, d128": (PRESUMED["d128-bf16-full"], (200, 700), {}),
    "presumed, causal d64": (PRESUMED["d64-fp16-causal"], (300, 500), {}),
    "presumed, window": (PRESUMED["d64-bf16-window"], (400, 700), {"window": (170, 20)}),
    "presumed, a line": (PRESUMED["d128-bf16-alibi-causal"], (300, 500), {}),
    "presumed, lists": (replace(MASKS["scattered-causal"], return_lse=False), (900, 900), {}),
    "bounded": (BOUNDED["d128-causal"], (300, 500), {}),
    "packed heads": (PACKED["causal-8"], (5, 300), {}),
    "bias, bf16": (BIASES["d128-bf16"], (200, 400), {}),
    "bias, presumed": (BIASES["without lse"], (200, 400), {}),
    "bias, fp32": (BIASES["d64-fp32-window"], (300, 500), {"window": (170, 20)}),
    "bias, fp32 presumed": (BIASES["d256-fp32-without-lse"], (129, 300), {}),
    "bias, ranges": (BIASES["ranges"], (200, 500), {}),
    "bias, lists": (BIASES["lists"], (300, 500), {}),
    # More tiles than SMs: the next tile's header and first S, and counters that come to their end.
    "tiles, causal": (PRESUMED["d128-bf16-causal"], (300, 300), {"batch": 80}),
    "tiles, lists": (MASKS["scattered-causal"], (300, 300), {"batch": 80}),
    "tiles, bias": (BIASES["without lse"], (129, 200), {"batch": 20}),
}
# A hosted product is one warp's: few blocks, but each role's loop turns twice and a tile follows.
HOSTED_KINDS: Kinds = {
    "full d128": (HOSTED["128-full"], (200, 300), {}),
    "causal d128": (HOSTED["128-causal"], (300, 300), {}),
    "causal d64, rows without keys": (HOSTED["64-causal"], (300, 100), {}),
    "window": (HOSTED["64-window"], (300, 300), {"window": (70, 20)}),
    "left": (HOSTED["64-left"], (300, 400), {"window": (64, None)}),
    "d96": (HOSTED["96-full"], (65, 257), {}),
    "d192/128": (HOSTED["192-128-causal"], (300, 300), {}),
    "d256": (HOSTED["256-causal"], (300, 300), {}),
    "padded d72/200": (HOSTED["72-200"], (129, 200), {}),
    "sinks": (HOSTED["sinks"], (129, 200), {}),
    "diagonal": (HOSTED["tight_diagonal"], (129, 200), {}),
    "both mods": (HOSTED["both"], (129, 200), {}),
    "d256, both mods": (HOSTED["256-both"], (129, 200), {}),
    "table": (variant("t5_relative_bias"), (129, 200), {}),
    "mask, ranges": (MASKS["cutoffs-causal"], (200, 500), {}),
    "mask, lists": (MASKS["scattered-causal"], (300, 400), {}),
    "mask, loads by key": (masks()["document-planned"], (300, 300), {}),
    "packed heads": (PACKED["causal-8"], (5, 300), {}),
    "a bias": (BIASES["d128-bf16"], (200, 300), {}),
    "a bias, fp32, two slots": (BIASES["d256-fp32"], (129, 200), {}),
}


def main(argv: list[str] | None = None) -> int:
    """Launch the kinds whose names contain a word given, or all; 1 if one is off."""
    parser = argparse.ArgumentParser(prog="bench.sanitize", description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", help="choose kinds by a part of the name")
    words = parser.parse_args(argv).words
    wrong = 0
    kinds = HOSTED_KINDS if is_hosted(os.environ.get("FA_CUTE_TARGET", "")) else KINDS
    for name, (configuration, lengths, run_time) in kinds.items():
        if words and not any(word in name for word in words):
            continue
        run_time = dict(run_time)
        x = inputs(configuration, lengths, batch=run_time.pop("batch", 1), heads_k=2)
        if configuration.sinks:
            run_time["sinks"] = torch.linspace(-1, 1, x.q.shape[2], device=DEVICE)
        options = arguments(configuration, x, **run_time)
        options = planned(configuration, x, options)
        out, _ = call(configuration, x, **options)
        torch.cuda.synchronize()
        right = fa_cute.reference.attention(*x, **options)
        error = float((out.double() - right).abs().max())
        good = error < 0.05
        wrong += not good
        print(f"{name}: error {error:.1e}" + ("" if good else " WRONG"), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
