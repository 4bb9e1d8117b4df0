"""The order of a backward's tiles of keys, and of dQ's sums, which take turns in it."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fa_cute.configuration import Configuration
from fa_cute.host.backward import plans_of
from fa_cute.plan import Plan
from fa_cute.spans import PYTHON, Bounds, visible

pytestmark = pytest.mark.compile
LENGTHS = ((1024, 1024), (1000, 1000), (129, 700), (700, 129), (65, 1), (1, 300))
SIDES = ((None, 0), (None, None), (100, None), (0, 0), (300, 3), (64, 200))


def deterministic(sides: tuple[int | None, int | None], head_dim: int) -> Plan:
    left, right = (side is not None for side in sides)
    forward = Configuration(
        head_dim=head_dim,
        dtype="bfloat16",
        target="sm_90a",
        causal=sides[1] == 0,
        window=(left, right and sides[1] != 0),
    ).plan()[0]
    return plans_of(forward, deterministic=True, lse_gradient=False).main


@pytest.fixture
def on_ints(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The walk's arithmetic on Python's integers."""
    from fa_cute.device import key_walk, scheduler

    def select(condition: bool, a: int, b: int) -> int:
        return a if condition else b

    ints = SimpleNamespace(select_=select, min=min, max=max)
    for module in (key_walk, scheduler):
        monkeypatch.setattr(module, "cutlass", ints)
        monkeypatch.setattr(module, "Int32", int)
    monkeypatch.setattr(key_walk, "ARITHMETIC", PYTHON)
    return key_walk.KeyWalk


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("sides", SIDES, ids=str)
def test_a_turn_is_that_of_tiles_drawn_before(
    sides: tuple[int | None, int | None], head_dim: int, on_ints: Any
) -> None:
    """So none waits for a tile that is not drawn, and each block is added to in one order."""
    from fa_cute.device.mma_sm90 import fragment
    from fa_cute.device.scheduler import Tiles

    plan = deterministic(sides, head_dim)
    walk = on_ints(plan, fragment(plan.config.own_queries, transposed=True))
    for lengths, (heads, batch, section) in itertools.product(LENGTHS, ((2, 1, 2), (3, 2, 4))):
        blocks = -(-lengths[1] // plan.config.tile_kv)
        tiles = Tiles.of(blocks, heads, batch, section)
        x = SimpleNamespace(tiles=tiles, bounds=Bounds(*lengths, *sides))
        added: Counter = Counter()
        places = [walk.place(x, number) for number in range(tiles.count)]
        assert len(set(places)) == tiles.count == blocks * heads * batch
        for place in places:
            visits = walk.visits(x, place)
            seen = {walk.following(visits, i, 0).block for i in range(visits.count)}
            assert len(seen) == visits.count and seen <= set(range(-(-lengths[0] // 64)))
            for i in range(visits.count):
                block = walk.following(visits, i, 0).block
                sums = place.batch, place.head, block
                assert walk.turn(x, place, visits, i, block) == added[sums], (x, place, block)
                added[sums] += 1


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("sides", SIDES, ids=str)
def test_a_warpgroup_passes_by_what_its_keys_do_not_see(
    sides: tuple[int | None, int | None], in_turn: bool, on_ints: Any
) -> None:
    from fa_cute.device.mma_sm90 import fragment
    from fa_cute.device.scheduler import Tiles

    plan = replace(deterministic(sides, 128), deterministic=in_turn)
    walk = on_ints(plan, fragment(plan.config.own_queries, transposed=True))
    assert walk.parted == (sides[1] is not None)
    for lengths in LENGTHS:
        tiles = Tiles.of(-(-lengths[1] // 128), 2, 2, 2)
        x = SimpleNamespace(tiles=tiles, bounds=Bounds(*lengths, *sides))
        for number, group in itertools.product(range(tiles.count), range(2)):
            place = walk.place(x, number)
            spans, first_key = walk.spans(x, place), place.block * 128 + 64 * group
            own = walk.own(x, place, spans, first_key)
            assert list(own) == sorted(own) and spans.begin <= own.own_begin
            assert own.own_end <= spans.end
            for n in range(spans.begin, spans.end):
                seen = kept(x.bounds, 64 * n, first_key)
                if not own.own_begin <= n < own.own_end:
                    assert seen == 0
                if own.own_middle_begin <= n < own.own_middle_end:
                    assert seen == 64 * min(64, lengths[0] - 64 * n)


def kept(bounds: Bounds, first_row: int, first_key: int) -> int:
    """Pairs of a block of 64 queries by 64 keys that bounds leave."""
    total = 0
    for q in range(first_row, min(first_row + 64, bounds.seqlen_q)):
        begin, end = visible(bounds, q, q + 1)
        total += max(0, min(end, first_key + 64) - max(begin, first_key))
    return total


@pytest.mark.parametrize(
    ("sides", "head_dim", "heads"),
    [
        ((None, None), 256, (8, 4, 4, 4)),
        ((None, 0), 256, (16, 16, 16, 8)),
        ((1024, 0), 256, (16, 16, 8, 4)),
        ((None, 0), 128, (64, 16, 8, 4)),
        ((None, None), 128, (64, 16, 8, 4)),
    ],
    ids=str,
)
def test_heads_side_by_side(
    sides: tuple[int | None, int | None], head_dim: int, heads: tuple[int, ...], on_ints: Any
) -> None:
    """Of 1, 4, 8 and 16 thousand queries."""
    from fa_cute.device.mma_sm90 import fragment

    plan = deterministic(sides, head_dim)
    walk = on_ints(plan, fragment(plan.config.own_queries, transposed=True))
    assert tuple(walk.section(rows) for rows in (1024, 4096, 8192, 16384)) == heads
