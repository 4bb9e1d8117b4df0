"""The flags that choose what ``bench.attention`` measures, and the named sets of cases."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.cases import VARIANTS, Case, cases
from bench.peers import PEERS

PRESETS: dict[str, str] = {
    "plain": "--dims=64,128 --lengths=1024,4096,8192,16384 --masks=full,causal",
    "mods": "--dims=128 --masks=full,causal --variants=plain,alibi,softcap,t5",
    "window": "--dims=128 --lengths=8192,16384 --masks=causal,window",
    "bias": "--dims=128 --lengths=4096 --variants=plain,bias",
    "gqa": "--dims=128 --masks=full,causal --ratios=4",
    "dims": "--dims=96,192,256,192/128 --lengths=1024,4096,8192,16384 --masks=full,causal",
}
DEFAULT = [
    "--dims=128 --lengths=1024,8192 --masks=full,causal",
    "--dims=64 --masks=full,causal",
    "--dims=128 --variants=alibi,softcap",
    "--dims=128 --masks=window",
]


def parser() -> argparse.ArgumentParser:
    """All flags of ``bench.attention``."""
    result = argparse.ArgumentParser(
        prog="bench.attention", description="Speed of the attention forward beside its peers."
    )
    grid = result.add_argument_group("cases (without any: a small set)")
    grid.add_argument("--preset", type=_words, help=f"full, or some of {', '.join(PRESETS)}")
    choose = {"action": _Chosen}
    grid.add_argument("--dims", type=_dims, default=[(128, 128)], help="64,192/128", **choose)
    grid.add_argument("--lengths", type=_numbers, default=[8192], **choose)
    grid.add_argument("--masks", type=_words, default=["full"], help="full,causal,window", **choose)
    grid.add_argument(
        "--variants", type=_words, default=["plain"], help=",".join(VARIANTS), **choose
    )
    grid.add_argument(
        "--ratios", type=_numbers, default=[1], help="query heads a key/value head", **choose
    )
    how = result.add_argument_group("how")
    how.add_argument("--peers", type=_words, default=list(PEERS), help=",".join(PEERS))
    how.add_argument("--rounds", type=int, default=5)
    how.add_argument("--batch-ms", type=float, default=15.0, help="device time a round and peer")
    how.add_argument("--energy", type=float, default=0.0, help="seconds a peer, for joules a call")
    how.add_argument("--cold", action="store_true", help="flush the L2 before every call")
    how.add_argument("--out", type=Path, help="JSON (default: bench/results/DATE-attention.json)")
    how.add_argument("--prime", type=int, default=0, help="processes that compile peers first")
    how.add_argument("--share", help=argparse.SUPPRESS)
    how.add_argument("--compile-only", action="store_true", help="our kernels, without a GPU")
    result.set_defaults(chosen=False)
    return result


def selection(arguments: argparse.Namespace) -> list[Case]:
    """The cases that the flags select, each once."""
    if arguments.preset:
        names = PRESETS if arguments.preset == ["full"] else arguments.preset
        unknown = set(names) - set(PRESETS)
        if unknown:
            raise SystemExit(f"no preset {sorted(unknown)}; there are full, {', '.join(PRESETS)}")
        grids = [parser().parse_args(PRESETS[name].split()) for name in names]
    elif arguments.chosen:
        grids = [arguments]
    else:
        grids = [parser().parse_args(flags.split()) for flags in DEFAULT]
    found: dict[Case, None] = {}
    for grid in grids:
        axes = (grid.dims, grid.lengths, grid.masks, grid.variants, grid.ratios)
        found |= dict.fromkeys(cases(*axes))
    return list(found)


class _Chosen(argparse.Action):
    """Stores the value and notes that the user chose a grid of their own."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, values)
        namespace.chosen = True


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _dims(text: str) -> list[tuple[int, int]]:
    pairs = [word.partition("/") for word in text.split(",")]
    return [(int(dim), int(dim_v or dim)) for dim, _, dim_v in pairs]
