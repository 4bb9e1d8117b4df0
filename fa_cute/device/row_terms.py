"""The shifts and deltas of a block's queries, as the columns of S^T that a thread has need them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from fa_cute.device import emit, mma_sm90
from fa_cute.plan import BwdConfig

APART = 2  # pieces of P, where one's shifts are read when the other is there


@dataclass(frozen=True)
class RowTerms:
    """How the threads of one kernel read them.

    All at once; ``tight``, where registers are few: where they are used; ``spaced``: and no earlier
    than a number of the piece ``APART`` before is there.
    """

    config: BwdConfig
    tight: bool
    spaced: bool

    def of(
        self, rows: cute.Tensor, stage: Int32, column: Int32, made: list[Any] | None = None
    ) -> Iterator[Any]:
        """A vector (8,) a piece of the thread's columns from ``column`` on.

        ``rows`` (tile_q, stages) in shared memory; ``made``: a number of each piece that is there.
        """
        pairs = cute.make_layout((2, self.config.tile_q // 2))
        all_pairs = cute.make_tensor(rows[None, stage].iterator, pairs)
        first = all_pairs[None, column // 2].iterator
        every_fourth = cute.make_layout((2, self.config.own_queries // 8), stride=(1, 8))
        mine = cute.make_tensor(first, every_fourth)
        if self.tight:
            for number in range(self.config.own_queries // 16):
                late = 0
                if made is not None and number >= APART and self.spaced:
                    late = emit.nought_after(made[number - APART])
                held = cute.make_tensor(mine.iterator + late, mine.layout)
                four = [held[k, 2 * number + j].ir_value() for j in range(2) for k in range(2)]
                yield mma_sm90.by_column(emit.gathered(four, 4), 0)
            return
        r = cute.make_rmem_tensor(mine.shape, Float32)
        cute.autovec_copy(mine, r)
        for eight in mma_sm90.Pieces(r).all():
            yield from (mma_sm90.by_column(eight, first) for first in (0, 4))
