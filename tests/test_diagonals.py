"""Sums along the diagonals of a warp's scores: what threads write and read, on integers."""

from __future__ import annotations

import pytest
import torch

from fa_cute.device.fragment import Fragment

pytestmark = pytest.mark.compile
WARP = 32


@pytest.mark.parametrize("width", [32, 64, 128])
def test_every_diagonal_has_its_sum(width: int) -> None:
    from fa_cute.device import diagonals, mma_sm90

    part = mma_sm90.fragment(width, transposed=True)
    scores = torch.randint(1000, (part.height, width), generator=torch.Generator().manual_seed(0))
    span = width + diagonals.LEAD
    for warp in range(diagonals.WARPS):
        threads, found = range(WARP * warp, WARP * (warp + 1)), {}
        held = _written(part, threads, scores)
        assert sorted(held) == list(range(diagonals.LANE_ROWS * span))
        for thread in threads:
            for offset in diagonals.offsets(part):
                places = [diagonals.read(thread, offset, row) for row in range(8)]
                values = [held[r * span + at] for r, at in enumerate(places) if 0 <= at < span]
                found[diagonals.lowest(thread) + thread % WARP + offset] = sum(values)
        keys = scores[16 * warp : 16 * warp + 16]
        right = {d - 16 * warp: int(keys.diagonal(d).sum()) for d in range(-15, width)}
        assert {ahead: total for ahead, total in found.items() if ahead in right} == right
        assert not any(total for ahead, total in found.items() if ahead not in right)


def _written(part: Fragment, threads: range, scores: torch.Tensor) -> dict[int, int]:
    """The warp's words of shared memory: a thread's sums of its rows, each word once."""
    from fa_cute.device import diagonals

    held: dict[int, int] = {}
    for thread in threads:
        for slot in range(-part.lead, part.columns):
            total = 0
            for i, row in enumerate(part.rows):
                column = slot + part.shift * i
                if 0 <= column < part.columns:
                    at = part.first_column(thread) + part.column(column)
                    total += int(scores[part.first_row(thread) + row, at])
            place = diagonals.written(part, thread, slot)
            assert place not in held
            held[place] = total
    return held
