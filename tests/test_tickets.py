"""Tiles in turn, which CTAs draw from the first on: every tile once, and none waits for ever."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fa_cute.configuration import Configuration
from fa_cute.host import compile as compiling
from fa_cute.host.backward import plans_of
from fa_cute.spans import Bounds, q_spans

pytestmark = pytest.mark.compile


class Word:
    """The counter in memory; what is written where a condition does not hold is not there."""

    def __init__(self) -> None:
        self.value, self.resets, self.conditions = 0, 0, []

    def asked(self) -> int:
        self.value += 1
        return self.value - 1

    def __setitem__(self, at: int, value: int) -> None:
        if all(self.conditions):
            self.value, self.resets = value, self.resets + 1


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``scheduler.draw`` on Python's integers: ``draw(counter, count, ctas, every)``."""
    from fa_cute.device import scheduler

    words: list[Word] = []

    @contextmanager
    def where(condition: bool) -> Iterator[None]:
        words[-1].conditions.append(condition)
        yield
        words[-1].conditions.pop()

    def drawn(counter: Word, count: int, ctas: int, every: bool) -> int:
        words.append(counter)
        arch = SimpleNamespace(
            grid_dim=lambda: (ctas, 1, 1), lane_idx=lambda: 0, shuffle_sync=lambda value, _: value
        )
        monkeypatch.setattr(scheduler, "cute", SimpleNamespace(arch=arch))
        tiles = SimpleNamespace(count=count)
        return scheduler.draw(tiles, counter, counter.asked(), {}, every=every)

    monkeypatch.setattr(scheduler, "emit", SimpleNamespace(where=where))
    return drawn


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize(("count", "ctas"), [(1, 1), (7, 7), (8, 3), (300, 132)])
def test_the_last_draw_sets_the_counter_back(count: int, ctas: int, every: bool, draw: Any) -> None:
    counter = Word()
    for seed in range(5):  # launch after launch
        rng, done = random.Random(seed), set()
        begun = [draw(counter, count, ctas, True) if every else i for i in range(ctas)]
        while begun:
            at = rng.randrange(len(begun))
            tile = begun[at]
            if tile >= count:
                assert every or tile not in done
                del begun[at]
                continue
            assert tile not in done
            done.add(tile)
            begun[at] = draw(counter, count, ctas, every)
        assert done == set(range(count))
        assert counter.value == 0 and counter.resets == seed + 1


def turns_of(bounds: Bounds, heads: int) -> list[list[tuple[tuple[int, int], int]]]:
    """Of each tile of 64 keys the blocks it adds to, from the last on, and after how many others.

    The heads are side by side, tiles go from the first keys on, as ``KeyWalk`` has them.
    """
    found, added = [], Counter()
    for tile, head in itertools.product(range(-(-bounds.seqlen_k // 64)), range(heads)):
        spans = q_spans(bounds, 64 * tile, 64 * tile + 64, 64)
        blocks = [(head, n) for n in reversed(range(spans.begin, spans.end))]
        found.append([(block, added[block]) for block in blocks])
        added.update(blocks)
    return found


def ends(turns: list, ctas: int, free: int, *, seed: int, every: bool) -> bool:
    """Whether all is added where ``free`` of the CTAs run at once, which begin in any order."""
    rng, drawn, added = random.Random(seed), itertools.count(), Counter()
    waiting, running = rng.sample(range(ctas), ctas), {}
    given = 0 if every else ctas
    while waiting or running:
        while waiting and len(running) < free:
            cta = waiting.pop()
            number = next(drawn) if every else cta
            running[cta] = turns[number][::-1] if number < len(turns) else []
        moved = False
        for cta in rng.sample(sorted(running), len(running)):
            todo = running[cta]
            while todo and added[todo[-1][0]] == todo[-1][1]:
                added[todo.pop()[0]] += 1
                moved = True
            if not todo:
                moved, number = True, next(drawn) + given
                if number < len(turns):
                    running[cta] = turns[number][::-1]
                else:
                    del running[cta]
        if not moved:
            return False
    assert added == Counter(block for tile in turns for block, _ in tile)
    return True


@pytest.mark.parametrize("sides", [(None, None), (None, 0), (100, 0), (64, 200)], ids=str)
@pytest.mark.parametrize("lengths", [(1000, 1000), (129, 1500), (1500, 129)], ids=str)
def test_turns_end_whichever_cta_begins(
    lengths: tuple[int, int], sides: tuple[int | None, int | None]
) -> None:
    turns = turns_of(Bounds(*lengths, *sides), heads=3)
    for ctas, free, seed in itertools.product((7, 16), (1, 3, 7, 16), range(5)):
        assert ends(turns, ctas, free, seed=seed, every=True)


def test_turns_of_tiles_by_the_number_of_a_cta_do_not() -> None:
    """What was: who is waited for may never begin."""
    turns = turns_of(Bounds(1000, 1000), heads=3)
    assert not all(ends(turns, 16, 3, seed=seed, every=False) for seed in range(5))
    assert ends(turns, 16, 16, seed=0, every=False)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_a_warp_waits_for_its_turn_as_one(head_dim: int, tmp_path: Path) -> None:
    """A lane that waits alone may leave the others behind: the loop ends by a vote of all."""
    forward = Configuration(head_dim=head_dim, dtype="bfloat16", target="sm_90a").plan()[0]
    main = plans_of(forward, deterministic=True, lse_gradient=False).main
    lines = compiling.listing(main, tmp_path).ptx.split("\n")
    looks = [at for at, line in enumerate(lines) if "ld.acquire.gpu" in line]
    assert looks
    for at in looks:
        ends = next(n for n in range(at, len(lines)) if re.search(r"\bbra\b", lines[n]))
        assert any("vote.sync.any" in line for line in lines[at:ends])
