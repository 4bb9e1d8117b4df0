"""The part of a tile of scores that one thread holds, as the evaluation of a mod sees it.

A thread holds some rows and some columns of the tile, relative to a first row and a first column of
its own. Usually rows are queries and columns keys; in a ``transposed`` fragment (S^T of the
backward) rows are keys and columns queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fragment:
    """A tile of ``height`` x ``width`` scores among the threads that hold it together.

    ``rows``: a thread's rows, relative to ``first_row(thread)``. ``columns``: how many it has;
    ``column(c)`` is the c-th, relative to ``first_column(thread)``. ``shift``: the i-th row of
    column c lies on the diagonal of row 0 of column ``c - i * shift``, so that a thread's diagonals
    are those of row 0, with ``lead`` columns more before the first (``column`` takes those too).
    """

    height: int
    width: int
    rows: tuple[int, ...]
    columns: int
    shift: int
    first_row: Callable[[Any], Any]
    first_column: Callable[[Any], Any]
    column: Callable[[int], int]
    transposed: bool = False

    @property
    def lead(self) -> int:
        """Columns before the first that a thread's diagonals need."""
        return self.shift * (len(self.rows) - 1)

    @property
    def row_index(self) -> str:
        """The mod's argument that changes along the rows."""
        return "kv" if self.transposed else "q"

    @property
    def column_index(self) -> str:
        """The mod's argument that changes along the columns."""
        return "q" if self.transposed else "kv"

    @property
    def lowest_diagonal(self) -> int:
        """The tile's smallest q - kv, less its first query and plus its first key."""
        return 1 - (self.height if self.transposed else self.width)


def one_row(width: int, threads: int = 128) -> Fragment:
    """A row of ``width`` contiguous columns a thread, as a thread reads tensor memory."""
    return Fragment(
        height=threads,
        width=width,
        rows=(0,),
        columns=width,
        shift=0,
        first_row=lambda thread: thread,
        first_column=lambda thread: 0,
        column=lambda c: c,
    )
