"""Small launches of every kind of the backward's kernels, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 \\
    compute-sanitizer --tool memcheck --kernel-name kns=Bwd python3 -m bench.sanitize_backward

Every shape of tile, every way in which gradients of captured tensors are added up; a few tiles,
ragged at every edge, and the result is held against fp64 autograd. The kernels are those of the gpu
tier, so that none compiles under the sanitizer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import fa_cute
from tests.gpu import backward_judging as backward
from tests.gpu.learned import DEVICE, SQUARE, Given, Learned, mods
from tests.gpu.test_captured_gradients import vectors

PASSES: dict[str, backward.Case] = {
    "full d128": backward.Case(lengths=(200, 300)),
    "causal d64, rows without keys": backward.Case((64, 64), (300, 100), causal=True),
    "ratio 4, lse's gradient": backward.Case((64, 64), heads=(4, 1), causal=True, lse=True),
    "window": backward.Case((64, 64), window=(70, 20)),
    "d256": backward.Case((256, 256), (129, 200), causal=True),
    "d192/128": backward.Case((192, 128), (200, 300), heads=(4, 2)),
    "padded d40/72": backward.Case((40, 72), (257, 129)),
    "deterministic d128": backward.Case(causal=True, heads=(4, 2), deterministic=True),
    "deterministic window": backward.Case((64, 64), window=(64, 3), deterministic=True),
    "deterministic d256": backward.Case((256, 256), causal=True, deterministic=True),
}
LEARNED = (
    *("softcap", "a number", "alibi", "rows and columns", "diagonals", "t5", "elements"),
    *("dots", "a head's"),
)


def main(argv: list[str] | None = None) -> int:
    """Launch the kinds whose names contain a word given, or all; 1 if one is off."""
    about = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser(prog="bench.sanitize_backward", description=about)
    parser.add_argument("words", nargs="*", help="choose kinds by a part of the name")
    wrong = 0
    for name, error in errors(parser.parse_args(argv).words):
        good = error < 0.05
        wrong += not good
        print(f"{name}: error {error:.1e}" + ("" if good else " WRONG"), flush=True)
    return 1 if wrong else 0


def _wanted(name: str, words: list[str]) -> bool:
    return not words or any(word in name for word in words)


def errors(words: list[str]) -> Iterator[tuple[str, float]]:
    """(name, largest error of a gradient as a part of its largest element)."""
    for name, case in PASSES.items():
        if _wanted(name, words):
            x = backward.tensors(case)
            found = backward.gradients(case, x)
            yield name, _apart(found, backward.formula(case, x, torch.float64))
    for name, given in _with_mods().items():
        if _wanted(name, words):
            yield name, _apart(given.gradients("ours"), given.gradients("right"))


def _with_mods() -> dict[str, Given]:
    def given(learned: Learned, build: Callable | None, **options: Any) -> Given:
        sinks = options.pop("sinks", None)
        return Given(learned, build, SQUARE, torch.bfloat16, sinks, 0.3, options, 0)

    cases = mods(SQUARE) | vectors(SQUARE)
    found = {name: given(*cases[name]) for name in LEARNED}
    found |= {
        f"{name}, deterministic": given(*cases[name], causal=True, deterministic=True)
        for name in ("alibi", "t5", "rows and columns", "dots")
    }
    found |= {
        f"a planned mask{', deterministic' * turned}": given(
            {}, None, mask_mod=_planned(), deterministic=turned
        )
        for turned in (False, True)
    }
    sinks = torch.linspace(-1, 1, SQUARE.heads, device=DEVICE)
    return found | {"sinks": given({}, None, sinks=sinks, causal=True)}


def _planned() -> Any:
    document = (torch.arange(SQUARE.seqlen_q, device=DEVICE) // 70)[None]

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return document[0, q] == document[0, kv]

    sizes = (None, None, SQUARE.seqlen_q, SQUARE.seqlen_k)
    return fa_cute.plan_mask(mask, *sizes, device=DEVICE, head_dim=SQUARE.dim)


def _apart(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """The largest error of dq, dk and dv; the gpu tier judges captured tensors' gradients."""
    torch.cuda.synchronize()
    assert all(x.isfinite().all() for x in found)
    pairs = zip(found[:3], right[:3], strict=True)
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)


if __name__ == "__main__":
    sys.exit(main())
