"""The mods of a kernel, entered level by level: score_mod and mask_mod; in a backward the score_mod
has its derivative with it, and a collector gathers the gradients of captured tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from fa_cute.device import gradient, score
from fa_cute.device.fragment import Fragment
from fa_cute.mods.graph import Graph
from fa_cute.plan import Extra


class Mods(NamedTuple):
    """Each is None where there is none; the first two are entered as far as the holder says."""

    score: Any
    mask: Any
    collector: gradient.Collector | None = None


def of(
    graphs: tuple[Graph | None, Graph | None],
    extra: Extra,
    scale: Float32,
    fragment: Fragment,
    scratch: score.Scratch | None,
    *,
    by_diagonal: bool = False,
    brought: bool = False,
) -> Mods:
    """A warpgroup's mods; ``scratch`` holds the words of both, one after the other, and then, if
    ``by_diagonal``, the collector's. ``brought``: as ``score.Modifier.of``."""
    mods = []
    given = score.deal(graphs, extra.captured, extra.scalars)
    for graph, operands in zip(graphs, given, strict=True):
        words = score.scratch_words(graph, fragment, scratch is not None and scratch.rolling)
        own = scratch if words else None
        mods.append(
            graph
            and score.Modifier.of(
                graph, operands, scale=scale, fragment=fragment, scratch=own, brought=brought
            )
        )
        scratch = scratch and scratch.past(words)
    collector = None
    if extra.gradients is not None:
        own = scratch.pointer if by_diagonal else None
        collector = gradient.Collector.of(mods[0], extra.gradients, own)
    return Mods(*mods, collector)


def enter(mods: Mods, head: tuple[Int32, Int32], first: Int32) -> Mods:
    """With what depends on ``head`` (b, h) and on the fragment's rows from ``first`` computed."""
    if mods.collector is not None:
        mods.collector.clear()
    rows = (mod and mod.tile(*head).rows(first) for mod in mods[:2])
    return Mods(*rows, mods.collector)


def enter_block(
    rows: Mods,
    first: Int32,
    tiles: score.Tiles | None = None,
    columns: score.Tiles | None = None,
    *,
    follows: bool = False,
) -> Mods:
    """With what depends on the fragment's columns from ``first`` on computed.

    ``tiles``: loads of the score_mod that are in shared memory (``device/bias.py``), ``columns``
    those of the mask_mod (``device/columns.py``). ``follows``: see ``score.Rows.block``.
    """
    blocks = rows.score and rows.score.block(first, tiles, follows)
    return Mods(blocks, rows.mask and rows.mask.block(first, columns, follows), rows.collector)


def line_of(blocks: Mods) -> score.Addend | None:
    """What the score_mod adds, where that can be left to the softmax: ``score.Block.line``."""
    return blocks.score.line() if blocks.score is not None and blocks.mask is None else None


def collect(blocks: Mods, slopes: score.Slopes, d_score: cute.Tensor) -> None:
    """The gradient of the score after its mod becomes, in place, that of the score before.

    On the way it gives captured tensors their part.
    """
    blocks.collector.add(blocks.score, slopes, d_score)
    slopes.apply(d_score)


def leave(rows: Mods) -> None:
    """A head ends: gradients of captured tensors that were held in registers go to memory."""
    if rows.collector is not None:
        rows.collector.flush(rows.score)
