"""P and the gradient of the scores on the backward's fragments, a piece of 8 values at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import arith
from cutlass._mlir.dialects import math as math_dialect

from fa_cute.device import emit
from fa_cute.device.mma_sm90 import FRAGMENT_ROWS, PIECE, Pieces, by_row


def exponentiate(s: cute.Tensor, c: Float32, shifts: Iterable[Any]) -> None:
    """S (2, columns) becomes P = exp2(c S + shift) in place; ``shifts``: a vector (8,) a piece."""
    pieces, factor = Pieces(s), by_row([c] * FRAGMENT_ROWS)
    for number, (scores, shift) in enumerate(zip(pieces.all(), shifts, strict=True)):
        exponent = math_dialect.fma(scores, factor, shift)
        pieces.store(number, math_dialect.exp2(exponent, fastmath=arith.FastMathFlags.fast))


def differentiate(p: cute.Tensor, dp: cute.Tensor, deltas: Iterable[Any]) -> None:
    """dP (2, columns) becomes dS = P (dP - delta) in place; ``deltas``: a vector (8,) a piece."""
    pieces = Pieces(dp)
    values = zip(Pieces(p).all(), pieces.all(), deltas, strict=True)
    for number, vectors in enumerate(values):
        # Lane by lane: of vectors ptxas takes all differences first, and d64 spilled 136 bytes.
        lanes = zip(*map(emit.lanes_in, vectors), strict=True)
        products = [arith.mulf(one, arith.subf(slope, delta)) for one, slope, delta in lanes]
        pieces.store(number, emit.gathered(products, PIECE))
