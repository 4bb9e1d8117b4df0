"""Spans against brute force: every visible key is visited, and the middle needs no mask."""

from __future__ import annotations

import itertools

import pytest

from fa_cute.spans import Bounds, heads_together, kv_spans, q_spans, visible

LENGTHS = [(1, 1), (5, 12), (12, 5), (8, 8), (13, 16), (3, 0), (9, 1)]
SIDES = [None, 0, 1, 3, 40]


def sees(bounds: Bounds, q: int, kv: int) -> bool:
    """The definition of visibility."""
    diagonal = q + bounds.seqlen_k - bounds.seqlen_q
    left = bounds.left is None or kv >= diagonal - bounds.left
    right = bounds.right is None or kv <= diagonal + bounds.right
    return left and right and 0 <= kv < bounds.seqlen_k


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("tile", [(4, 4), (8, 3), (3, 8)], ids=str)
def test_spans_cover_what_is_visible(lengths: tuple[int, int], tile: tuple[int, int]) -> None:
    tile_m, tile_n = tile
    for left, right in itertools.product(SIDES, SIDES):
        bounds = Bounds(*lengths, left, right)
        for q_begin in range(0, lengths[0], tile_m):
            rows = range(q_begin, min(q_begin + tile_m, lengths[0]))
            spans = kv_spans(bounds, q_begin, q_begin + tile_m, tile_n)
            keys = [kv for kv in range(lengths[1]) if any(sees(bounds, q, kv) for q in rows)]
            assert 0 <= spans.begin <= spans.middle_begin <= spans.middle_end <= spans.last
            assert spans.last <= spans.end
            visited = range(spans.begin, spans.end)
            assert {kv // tile_n for kv in keys} == set(visited), (bounds, q_begin)
            for block in range(spans.middle_begin, spans.middle_end):
                inside = range(block * tile_n, (block + 1) * tile_n)
                assert all(sees(bounds, q, kv) for q in rows for kv in inside), (bounds, block)
            if keys:
                assert spans.last == spans.end - 1, "the highest block is the first one visited"
                assert visible(bounds, q_begin, q_begin + tile_m) == (min(keys), max(keys) + 1) or (
                    visible(bounds, q_begin, q_begin + tile_m)[0] < 0 and min(keys) == 0
                )


def test_bounds_stay_in_int32() -> None:
    """Sums of the longest sequences and of the widest windows fit the kernels' integers."""
    longest = 2**30
    bounds = Bounds(longest, longest, longest, longest)
    spans = kv_spans(bounds, longest - 128, longest, 128)
    assert max(spans) < 2**31 and visible(bounds, 0, 128)[0] > -(2**31)
    assert (longest - 1) + longest - longest + longest < 2**31


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("tile", [(4, 4), (8, 3), (3, 8)], ids=str)
def test_spans_of_queries_cover_what_is_visible(
    lengths: tuple[int, int], tile: tuple[int, int]
) -> None:
    tile_q, tile_kv = tile
    for left, right in itertools.product(SIDES, SIDES):
        bounds = Bounds(*lengths, left, right)
        for kv_begin in range(0, lengths[1], tile_kv):
            keys = range(kv_begin, kv_begin + tile_kv)
            spans = q_spans(bounds, kv_begin, kv_begin + tile_kv, tile_q)
            rows = [q for q in range(lengths[0]) if any(sees(bounds, q, kv) for kv in keys)]
            assert 0 <= spans.begin <= spans.middle_begin <= spans.middle_end <= spans.end
            assert {q // tile_q for q in rows} == set(range(spans.begin, spans.end))
            for block in range(spans.middle_begin, spans.middle_end):
                inside = range(block * tile_q, min((block + 1) * tile_q, lengths[0]))
                assert all(sees(bounds, q, kv) for q in inside for kv in keys), (bounds, block)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("tile", [(4, 4), (8, 3), (3, 8)], ids=str)
def test_tiles_of_keys_that_visit_a_block(lengths: tuple[int, int], tile: tuple[int, int]) -> None:
    """What a block's turns are counted by: tiles in a row, from the first visible key's on."""
    tile_q, tile_kv = tile
    tiles, blocks = (range(-(-n // size)) for n, size in zip(lengths[::-1], tile[::-1]))
    for left, right in itertools.product(SIDES, SIDES):
        bounds = Bounds(*lengths, left, right)
        for block in blocks:
            visiting = []
            for n in tiles:
                spans = q_spans(bounds, n * tile_kv, (n + 1) * tile_kv, tile_q)
                if spans.begin <= block < spans.end:
                    visiting.append(n)
            begin, end = visible(bounds, block * tile_q, (block + 1) * tile_q)
            if visiting:
                begin = max(begin, 0) // tile_kv if left is not None else 0
                assert visiting == list(range(begin, -(-end // tile_kv)))


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 512, 513, 1024, 1025, 2**30])
def test_heads_that_fit_together(rows: int) -> None:
    fitting = [count for count in (2, 4, 8, 16, 32, 64) if rows * count <= 1024]
    assert heads_together(rows, 1024) == max(fitting, default=1)
