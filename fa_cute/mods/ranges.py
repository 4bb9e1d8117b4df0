"""Masks that show each query a few ranges of keys, and the blocks of keys that these touch.

``Ranges`` says it as data: for each range a least and a greatest key, as terms over q and over
numbers that are fixed within a tile (``inputs``). ``runs`` turns that into blocks for a tile of
queries, with plain arithmetic on Python's ints or the compiler's Int32 alike, so a kernel computes
from the lengths at run time which blocks to visit: no list, no memory. ``affine.py`` finds the
ranges in a mod's graph. A leaf: it imports nothing but the standard library.

A key kv is visible to query q when, for some range, ``low(q) <= kv <= high(q)``; one that is not
``exact`` holds other keys too, and none of its blocks goes without a mask. Over a tile of queries
the least low and the greatest high bound what any row sees; the greatest low and the least high
bound what every row sees, and blocks between those need no mask.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# Positions are below 2**30. Inputs beyond this could make a sum leave int32: then nothing is
# concluded from them.
LARGEST_INPUT = 2**29
FAR = 2**30


class Term(NamedTuple):
    """A step of the arithmetic on ``args`` (positions of earlier terms) and ``value``.

    ``number`` (value), ``q``, ``input`` (value: its position), ``add``, ``sub``, ``minimum``,
    ``maximum``, ``times`` and ``floordiv`` (by value; a divisor is positive), ``gate``: FAR where
    the argument is 0 or more, else -FAR.
    """

    op: str
    args: tuple[int, ...] = ()
    value: int = 0


@dataclass(frozen=True)
class Ranges:
    """``ranges``: pairs of terms (low, high), ends included. ``inputs``: positions of the nodes of
    the mod's graph, int32 or bool (0 or 1), that change from one (batch, head) to another only.
    ``exact``: for each range, whether all of it is visible.
    """

    terms: tuple[Term, ...]
    ranges: tuple[tuple[int, int], ...]
    inputs: tuple[int, ...]
    exact: tuple[bool, ...]


class Run(NamedTuple):
    """Blocks ``[begin, end)``, of which ``[middle_begin, middle_end)`` need no mask.

    ``begin <= middle_begin <= middle_end <= end``; nothing to visit when ``begin == end``. Block
    ``end - 1`` can pass the end of the keys only if it is no part of the middle.
    """

    begin: Any
    middle_begin: Any
    middle_end: Any
    end: Any


@dataclass(frozen=True)
class Integers:
    """What the kind of integer in use needs beside + - * and comparisons; Python's by default.

    ``select(condition, a, b)``; ``floordiv`` rounds down.
    """

    minimum: Callable[[Any, Any], Any] = min
    maximum: Callable[[Any, Any], Any] = max
    select: Callable[[Any, Any, Any], Any] = lambda condition, a, b: a if condition else b
    floordiv: Callable[[Any, int], Any] = operator.floordiv


PYTHON = Integers()


def term_bounds(
    ranges: Ranges,
    inputs: Sequence[Any],
    q_first: Any,
    q_last: Any,
    integers: Integers = PYTHON,
) -> list[tuple[Any, Any]]:
    """The least and greatest value of each term for the queries ``q_first .. q_last``."""
    low, high = integers.minimum, integers.maximum
    found: list[tuple[Any, Any]] = []
    for op, args, value in ranges.terms:
        if op in ("number", "input"):
            number = value if op == "number" else inputs[value]
            found.append((number, number))
        elif op == "q":
            found.append((q_first, q_last))
        elif op in ("times", "floordiv"):
            ends = found[args[0]]
            if op == "times":
                ends = tuple(end * value for end in (ends if value >= 0 else ends[::-1]))
            else:
                ends = tuple(integers.floordiv(end, value) for end in ends)
            found.append(ends)
        elif op == "gate":
            ends = found[args[0]]
            found.append(tuple(integers.select(end >= 0, FAR, -FAR) for end in ends))
        else:
            (a, b), (c, d) = found[args[0]], found[args[1]]
            if op == "add":
                found.append((a + c, b + d))
            elif op == "sub":
                found.append((a - d, b - c))
            else:
                extremum = low if op == "minimum" else high
                found.append((extremum(a, c), extremum(b, d)))
    return found


def runs(
    ranges: Ranges,
    inputs: Sequence[Any],
    tile: tuple[Any, Any],
    seqlens: tuple[Any, Any],
    tile_n: int,
    integers: Integers = PYTHON,
) -> tuple[Run, ...]:
    """The blocks of ``tile_n`` keys that the queries ``[tile[0], tile[1])`` visit, high to low.

    As many runs as there are ranges, disjoint; ``seqlens`` is (Sq, Sk), both positive. Every key
    that a query of the tile sees is in a run; in a run's middle every query sees every key. With an
    input beyond LARGEST_INPUT the first run is all blocks, without a middle.
    """
    seqlen_q, seqlen_k = seqlens
    q_last = integers.minimum(tile[1], seqlen_q) - 1
    bounds = term_bounds(ranges, inputs, tile[0], q_last, integers)
    found = [
        _blocks(bounds[low], bounds[high], seqlen_k, tile_n, integers)
        for low, high in ranges.ranges
    ]
    found = [
        run if exact else run._replace(middle_begin=run.begin, middle_end=run.begin)
        for run, exact in zip(found, ranges.exact, strict=True)
    ]
    if ranges.inputs and found:
        blocks = (seqlen_k + tile_n - 1) // tile_n
        found = [_checked(run, at, inputs, blocks, integers) for at, run in enumerate(found)]
    return _disjoint(found, integers)


def blocks_in(found: Sequence[Run], begin: Any, end: Any, integers: Integers = PYTHON) -> Any:
    """How many blocks of the ``runs`` that were ``found`` lie in ``[begin, end)``."""
    total = 0
    for run in found:
        inside = integers.minimum(run.end, end) - integers.maximum(run.begin, begin)
        total = total + integers.maximum(inside, 0)
    return total


def shrinking(ranges: Ranges) -> bool:
    """Whether the first queries see more keys than the last ones: a guess, with inputs of 0."""
    length, tile = 1 << 16, 128

    def visited(begin: int) -> int:
        return reached(ranges, (begin, begin + tile), (length, length), tile)

    return visited(0) > visited(length - tile)


def reached(
    ranges: Ranges,
    tile: tuple[Any, Any],
    seqlens: tuple[Any, Any],
    tile_n: int,
    integers: Integers = PYTHON,
) -> Any:
    """How many blocks the queries of ``tile`` visit, with inputs of 0; arguments as ``runs``."""
    found = runs(ranges, [0] * len(ranges.inputs), tile, seqlens, tile_n, integers)
    return sum(run.end - run.begin for run in found)


def clipped(run: Run, within: Any, integers: Integers = PYTHON) -> Run:
    """``run`` under causal and the window too; ``within`` is their ``KvSpans`` of the same tile."""
    low, high = integers.minimum, integers.maximum
    begin = high(run.begin, within.begin)
    end = high(low(run.end, within.end), begin)
    middle_begin = low(high(high(run.middle_begin, within.middle_begin), begin), end)
    middle_end = high(low(low(run.middle_end, within.middle_end), end), middle_begin)
    return Run(begin, middle_begin, middle_end, end)


def _blocks(
    lows: tuple[Any, Any], highs: tuple[Any, Any], seqlen_k: Any, tile_n: int, integers: Integers
) -> Run:
    low, high = integers.minimum, integers.maximum
    first, last = high(lows[0], 0), low(highs[1], seqlen_k - 1)
    # A block number below zero never shows: the quotient of what may be negative is not used.
    begin = first // tile_n
    end = integers.select(last >= first, high(last, 0) // tile_n + 1, begin)
    # Ends are cut to the keys first, so that adding to them stays in int32.
    whole_first = low(high(lows[1], 0), seqlen_k)
    whole_end = high(low(highs[0], seqlen_k - 1) + 1, 0)
    middle_begin = low(high((whole_first + tile_n - 1) // tile_n, begin), end)
    middle_end = low(high(whole_end // tile_n, middle_begin), end)
    return Run(begin, middle_begin, middle_end, end)


def _checked(run: Run, at: int, inputs: Sequence[Any], blocks: Any, integers: Integers) -> Run:
    """``run``; with an input out of bounds run 0 is everything, masked, and the others nothing."""
    everything = Run(0, 0, 0, blocks) if at == 0 else Run(0, 0, 0, 0)
    for given in inputs:
        for beyond in (given > LARGEST_INPUT, given < -LARGEST_INPUT):
            run = _chosen(beyond, everything, run, integers)
    return run


def _disjoint(found: list[Run], integers: Integers) -> tuple[Run, ...]:
    """Sorted by end, the highest first, each cut where one before it begins.

    What a cut takes away lies in a run before it: that one keeps its own middle, so a block that
    only the other range shows whole is masked.
    """
    for last in range(len(found) - 1, 0, -1):
        for at in range(last):
            swap = found[at].end < found[at + 1].end
            found[at], found[at + 1] = (
                _chosen(swap, found[at + 1], found[at], integers),
                _chosen(swap, found[at], found[at + 1], integers),
            )
    kept: list[Run] = []
    floor = None
    for run in found:
        if floor is not None:
            end = integers.maximum(integers.minimum(run.end, floor), 0)
            begin = integers.minimum(run.begin, end)
            middle_begin = integers.minimum(run.middle_begin, end)
            run = Run(begin, middle_begin, integers.minimum(run.middle_end, end), end)
        # An empty run begins anywhere: it must not cut the ones after it.
        lowest = integers.select(run.begin < run.end, run.begin, FAR)
        floor = lowest if floor is None else integers.minimum(floor, lowest)
        kept.append(run)
    return tuple(kept)


def _chosen(condition: Any, a: Run, b: Run, integers: Integers) -> Run:
    return Run(*(integers.select(condition, x, y) for x, y in zip(a, b, strict=True)))
