"""The flags that choose what a benchmark measures, and the named sets of cases."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

from bench.cases import VARIANTS, Case, cases
from bench.peers import PEERS
from bench.timing import Effort

PLAIN = "--dims=64,128,256 --lengths=1024,4096,8192,16384 --masks=full,causal"
MODS = "--dims=128 --masks=full,causal --variants=plain,alibi,softcap,t5"
WINDOW = "--dims=128 --lengths=8192,16384 --masks=causal,window"
GQA = "--dims=128 --masks=full,causal --ratios=4"


class Sets(NamedTuple):
    """A benchmark's named sets of cases, and the small one of a run without flags."""

    name: str
    about: str
    presets: dict[str, str]
    default: list[str]
    peers: list[str]


FORWARD = Sets(
    "bench.attention",
    "Speed of the attention forward beside its peers.",
    {
        "plain": PLAIN,
        "mods": MODS,
        "window": WINDOW,
        "bias": "--dims=128 --masks=full,causal --variants=plain,bias,shared-bias,bias-by-elements",
        "gqa": GQA,
        "decode": "--dims=128 --lengths=8192 --ratios=4 --queries=1,4,16,64",
        "dims": "--dims=96,192,192/128 --lengths=1024,4096,8192,16384 --masks=full,causal",
    },
    [
        "--dims=128 --lengths=1024,8192 --masks=full,causal",
        "--dims=64 --masks=full,causal",
        "--dims=128 --variants=alibi,softcap",
        "--dims=128 --masks=window",
    ],
    list(PEERS),
)
BACKWARD = Sets(
    "bench.backward",
    "Speed of the gradient beside its peers.",
    {
        "plain": PLAIN,
        "mods": MODS,
        "window": WINDOW,
        "gqa": GQA,
        "dims": "--dims=96,192,192/128 --masks=full,causal",
    },
    [
        "--dims=128 --lengths=1024,8192 --masks=full,causal",
        "--dims=64,256 --masks=full,causal",
        "--dims=128 --masks=full,causal --variants=alibi,softcap,t5",
        "--dims=128 --masks=window",
    ],
    ["ours", "deterministic", *(name for name in PEERS if name not in ("ours", "plain"))],
)
PRESETS = FORWARD.presets


def parser(sets: Sets = FORWARD) -> argparse.ArgumentParser:
    """All flags of a benchmark of the cases in ``sets``; of peers, if it has any."""
    result = argparse.ArgumentParser(prog=sets.name, description=sets.about)
    grid = result.add_argument_group("cases (without any: a small set)")
    grid.add_argument("--preset", type=_words, help=f"full, or some of {', '.join(sets.presets)}")
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
    grid.add_argument("--queries", type=_numbers, default=[], help="fewer than keys", **choose)
    how = result.add_argument_group("how")
    how.add_argument("--rounds", type=int, default=5)
    how.add_argument("--batch-ms", type=float, default=15.0, help="device time a round and peer")
    how.add_argument("--energy", type=float, default=0.0, help="seconds a peer, for joules a call")
    how.add_argument("--rest", type=seconds, default=0.0, help="idle seconds before each turn")
    how.add_argument("--cold", action="store_true", help="flush the L2 before every call")
    how.add_argument("--out", type=Path, help="JSON (default: a new bench/results/DATE-KIND.json)")
    if sets.peers:
        how.add_argument("--peers", type=_words, default=sets.peers, help=",".join(sets.peers))
        how.add_argument("--prime", type=int, default=0, help="processes that compile first")
        how.add_argument("--share", help=argparse.SUPPRESS)
        how.add_argument("--compile-only", action="store_true", help="run nothing: see the docs")
    result.set_defaults(chosen=False, sets=sets)
    return result


def selection(arguments: argparse.Namespace) -> list[Case]:
    """The cases that the flags select, each once."""
    sets, flags = arguments.sets, []
    if arguments.preset:
        names = sets.presets if arguments.preset == ["full"] else arguments.preset
        unknown = set(names) - set(sets.presets)
        if unknown:
            known = ", ".join(sets.presets)
            raise SystemExit(f"no preset {sorted(unknown)}; there are full, {known}")
        flags = [sets.presets[name] for name in names]
    elif not arguments.chosen:
        flags = sets.default
    grids = [parser(sets).parse_args(one.split()) for one in flags] or [arguments]
    found: dict[Case, None] = {}
    for grid in grids:
        axes = (grid.dims, grid.lengths, grid.masks, grid.variants, grid.ratios, grid.queries)
        found |= dict.fromkeys(cases(*axes))
    return list(found)


class _Chosen(argparse.Action):
    """Stores the value and notes that the user chose a grid of their own."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, values)
        namespace.chosen = True


def effort(arguments: argparse.Namespace, **others: Any) -> Effort:
    """What the flags of ``parser`` ask for."""
    a = arguments
    return Effort(a.rounds, a.batch_ms, a.energy, a.cold, rest_s=a.rest, **others)


def seconds(text: str) -> float:
    """A time of a flag; argparse tells the user of one below 0."""
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} seconds; give 0 or more")
    return value


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _dims(text: str) -> list[tuple[int, int]]:
    pairs = [word.partition("/") for word in text.split(",")]
    return [(int(dim), int(dim_v or dim)) for dim, _, dim_v in pairs]
