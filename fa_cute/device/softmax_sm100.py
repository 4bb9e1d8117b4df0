"""Online softmax of one row a thread, in base 2, with a stale maximum.

As in ``softmax``, but the maximum that the exponents are relative to follows the true one only when
that is more than log2 256 = 8 above it. Until then P grows to at most 256, which its 16 bits and
the sums in fp32 hold, and O needs no rescaling. Numerator and denominator are relative to the same
maximum, so the quotient is exact whatever it is.

A row that has seen nothing keeps m = -inf; the exponent then uses a finite number in its place. A
thread's scores are one vector (columns,): an operation of the trace is one for all of them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import arith, vector

from fa_cute.device import emit, packed
from fa_cute.device.packed import Pairs
from fa_cute.device.softmax import LN_2, Registers, exp2, join, shift_of

Vector = Any  # of fp32, of the compiler's intermediate form
THRESHOLD = 8.0  # log2 256
CHAINS = 8  # independent maxima and sums: the latency of one chain of 64 would show


class Row:
    """Maximum and sum of this thread's row, in registers; nothing is seen yet."""

    def __init__(self) -> None:
        self.maximum, self.sum = Registers(1), Registers(1)
        self.maximum.fill(-Float32.inf)
        self.sum.fill(0.0)


def raise_maximum(s: list[Vector], row: Row, c: Float32, pairs: Pairs) -> tuple[Float32, Float32]:
    """Take the block's scores into the maximum.

    Returns the factor on O and the sum, 1 where the stale maximum stays and 0 where nothing was
    seen before, and the shift of P = exp2(c s + shift); c > 0.
    """
    stale = row.maximum[0]
    joint = cute.arch.fmax(stale, _largest(s, pairs))
    finite = cutlass.select_(joint == -Float32.inf, Float32(0.0), joint)
    fall = (stale - finite) * c
    keep = fall >= -THRESHOLD
    row.maximum[0] = cutlass.select_(keep, stale, joint)
    factor = cutlass.select_(keep, Float32(1.0), exp2(fall))
    return factor, shift_of(row.maximum[0], c)


class Exponent:
    """P = exp2(c s + shift) of a row, ``emulated`` of every 16 pairs by a polynomial."""

    def __init__(self, scale: tuple[Float32, Float32], pairs: Pairs, emulation: tuple[int, int]):
        self.c, self.shift = (emit.splat(x.ir_value(), 2) for x in scale)
        self.pairs, (self.emulated, self.degree) = pairs, emulation

    def of(self, s: list[Vector], first: int, columns: int) -> list[Vector]:
        """The pairs of P from column ``first`` on, of ``s`` in parts of one width."""
        found, width = [], emit.lanes_of(s[0])
        for i in range(first, first + columns, 2):
            x = self.pairs.fma(emit.part(s[i // width], i % width, 2), self.c, self.shift)
            # Spread over the row, so that neither pipe waits for the other.
            if (i // 2 * self.emulated) % 16 < self.emulated:
                found.append(self.pairs.exp2(x, self.degree))
            else:
                found.append(packed.exp2(x))
        return found


def add_up(p: list[Vector], row: Row, factor: Float32) -> None:
    """Take the pairs ``p`` into the sum. Last in a block: nothing waits for it."""
    chains = p[:CHAINS]
    for i, pair in enumerate(p[CHAINS:]):
        chains[i % CHAINS] = arith.addf(chains[i % CHAINS], pair)
    low, high = map(Float32, emit.lanes_in(_folded(chains, arith.addf)))
    row.sum[0] = cute.math.fma(row.sum[0], factor, low + high)


def finish(
    maximum: Float32, total: Float32, c: Float32, sink: Float32 | None
) -> tuple[Float32, Float32]:
    """(factor on O, natural log-sum-exp) of a row; 0 and -inf where nothing was seen.

    A ``sink`` is one more score of the row, without a value: it joins the maximum and the sum.
    """
    top, share = maximum * (c * LN_2), Float32(1.0)
    if sink is not None:
        top, share, own = join(top, sink)
        total = cute.math.fma(total, share, own)
    empty = total == 0.0
    inverse = cutlass.select_(empty, Float32(0.0), share * cute.arch.rcp_approx(total))
    lse = top + cute.math.log2(total, fastmath=True) * LN_2
    return inverse, cutlass.select_(empty, -Float32.inf, lse)


def _largest(s: list[Vector], pairs: Pairs) -> Float32:
    """Three at a time, in independent chains."""
    values = [value for part in s for value in vector.to_elements(part)]
    chains = list(values[:CHAINS])
    for i in range(CHAINS, len(values), 2):
        at = i // 2 % CHAINS
        chains[at] = pairs.maximum(chains[at], values[i], values[i + 1])
    top = _folded(chains, lambda a, b: pairs.maximum(a, b, b))
    return Float32(top)


def _folded(chains: list, combine: Any) -> Any:
    while len(chains) > 1:
        chains = [combine(a, b) for a, b in zip(chains[::2], chains[1::2], strict=True)]
    return chains[0]
