"""P and the gradient of the scores on the backward's fragments, a piece of 8 values at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import arith
from cutlass._mlir.dialects import math as math_dialect

from fa_cute.device import emit
from fa_cute.device.lower import lower
from fa_cute.device.mma_sm90 import FRAGMENT_ROWS, PIECE, Pieces, by_row
from fa_cute.mods.derived import contributions, reads_scores
from fa_cute.mods.graph import Graph, cost

DEAR = 10  # issue slots of a score's mod and of its derivative


def in_turn(graph: Graph | None) -> bool:
    """Whether the rows' shifts are to be read in turn, beside a mod with its derivative at d128.

    ptxas reads all of them before there is a P. Where the mod is dear, or the gradients make again
    what depends on q and kv, registers are worth more than that: S8k, causal and full, a sigmoid
    gate 3.06 -> 2.68 ms and 5.70 -> 5.71, learned slopes 2.23 -> 2.20 and 4.46 -> 4.36. Elsewhere
    they are not: softcap 2.44 -> 2.46 and 4.83 -> 4.99.
    """
    if graph is None:
        return False
    needs = graph.dependence()
    if any({"q", "kv"} <= needs[one.value] for one in contributions(graph)):
        return not reads_scores(graph)
    lowered = lower(graph).graph
    needs = lowered.dependence()
    return sum(cost(node) for at, node in enumerate(lowered.nodes) if "score" in needs[at]) >= DEAR


def exponentiate(s: cute.Tensor, c: Float32, shifts: Iterable[Any], made: list[Any]) -> None:
    """S (2, columns) becomes P = exp2(c S + shift) in place; ``shifts``: a vector (8,) a piece.

    ``made`` gets a number of each piece of P, for who reads shifts in turn.
    """
    pieces, factor = Pieces(s), by_row([c] * FRAGMENT_ROWS)
    for number, (scores, shift) in enumerate(zip(pieces.all(), shifts, strict=True)):
        exponent = math_dialect.fma(scores, factor, shift)
        p = math_dialect.exp2(exponent, fastmath=arith.FastMathFlags.fast)
        made.append(emit.lanes_in(p)[0])
        pieces.store(number, p)


def differentiate(p: cute.Tensor, dp: cute.Tensor, deltas: Iterable[Any]) -> None:
    """dP (2, columns) becomes dS = P (dP - delta) in place; ``deltas``: a vector (8,) a piece."""
    pieces = Pieces(dp)
    values = zip(Pieces(p).all(), pieces.all(), deltas, strict=True)
    for number, vectors in enumerate(values):
        # Lane by lane: of vectors ptxas takes all differences first, and d64 spilled 136 bytes.
        lanes = zip(*map(emit.lanes_in, vectors), strict=True)
        products = [arith.mulf(one, arith.subf(slope, delta)) for one, slope, delta in lanes]
        pieces.store(number, emit.gathered(products, PIECE))
