"""Which sums of dQ are zeroed by whom: all of them once, before they are added to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest

from fa_cute.host.backward import _zeroed_before
from fa_cute.spans import heads_together


class Call(NamedTuple):
    """A backward's sizes; ``room``: rows of queries of heads that fit side by side."""

    batch: int
    heads: int
    lengths: tuple[int, int]
    sms: int
    room: int


CALLS = [
    Call(16, 16, (1024, 1024), 132, 16384),
    Call(2, 16, (8192, 8192), 132, 16384),
    Call(2, 8, (8192, 8192), 132, 4096),
    Call(3, 70, (257, 257), 132, 16384),
    Call(5, 7, (100, 700), 16, 300),
    Call(64, 4, (100, 100), 132, 4096),
    Call(1, 1, (1, 1), 132, 16384),
    Call(200, 3, (64, 129), 7, 128),
]


def row_of(tile: int, blocks: int, section: int, rows: int) -> int:
    """The head of a tile where the longest come first, as ``scheduler.Tiles`` has it."""
    first = tile // (blocks * section) * section
    return first + tile % (blocks * section) % min(rows - first, section)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_every_head_is_zeroed_before_it_is_added_to(call: Call, cut: bool) -> None:
    tile_kv, (seqlen_q, seqlen_k) = 128, call.lengths
    main = SimpleNamespace(
        zeroes=True,
        config=SimpleNamespace(tile_kv=tile_kv),
        rows_together=lambda: call.room,
    )
    problem = SimpleNamespace(
        batch=call.batch, heads_q=call.heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k
    )
    before = _zeroed_before(main, problem, call.sms)
    rows, blocks = call.batch * call.heads, -(-seqlen_k // tile_kv)
    ctas = min(rows * blocks, call.sms)
    section = heads_together(seqlen_q, call.room)
    # As device/zeroing.py has it.
    first = -(-ctas // (blocks * section)) * section + section
    assert before == min(rows, first)
    tiles: dict[int, list[int]] = {row: [] for row in range(rows)}
    for tile in range(rows * blocks):
        row = row_of(tile, blocks, section, rows) if cut else tile // blocks
        tiles[row].append(tile)
    for row in range(first, rows):
        duties = tiles[row - section]
        assert len(duties) == blocks, "each tile of that head zeroes a part"
        assert min(duties) >= ctas, "a tile that a CTA begins with may not have begun"
        assert max(duties) < min(tiles[row]), "drawn before, so at work"
