"""Packed GQA: the query heads that share a key/value head as rows of one tile.

Where Sq is short (decoding), a tile of 128 rows a query head would be nearly empty and each head
would read the same K and V again. Packed, row ``i`` of a key/value head is query ``i // ratio`` of
the group's head ``i % ratio``: a view of q, out and lse, nothing moves. The kernel then works on
``Sq * ratio`` rows of ``Hk`` heads; only the bounds of visibility still speak of queries.
"""

from __future__ import annotations

import cutlass.cute as cute

from fa_cute.plan import Io


def packed(io: Io, ratio: int) -> Io:
    """``io`` with q, out (B, (ratio, Sq), Hk, ·) and lse (B, Hk, (ratio, Sq))."""
    lse = None if io.lse is None else _rows_last(io.lse, ratio)
    return io._replace(q=_rows(io.q, ratio), out=_rows(io.out, ratio), lse=lse)


def _rows(tensor: cute.Tensor, ratio: int) -> cute.Tensor:
    batch, queries, heads, columns = tensor.shape
    of_batch, of_query, of_head, of_column = tensor.stride
    layout = cute.make_layout(
        (batch, (ratio, queries), heads // ratio, columns),
        stride=(of_batch, (of_head, of_query), of_head * ratio, of_column),
    )
    return cute.make_tensor(tensor.iterator, layout)


def _rows_last(lse: cute.Tensor, ratio: int) -> cute.Tensor:
    batch, heads, queries = lse.shape
    of_batch, of_head, of_query = lse.stride
    layout = cute.make_layout(
        (batch, heads // ratio, (ratio, queries)),
        stride=(of_batch, of_head * ratio, (of_head, of_query)),
    )
    return cute.make_tensor(lse.iterator, layout)
