"""The epilogue, thread by thread: each real element is written once, with its own value."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from fa_cute.host.configs import LARGEST_HEAD_DIM, STEP
from fa_cute.plan import padded

ROWS, QUAD = 64, 4


class Quad:
    """Four lanes in lockstep: a butterfly shuffle of one hands over what its partner sends."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(QUAD, timeout=20)
        self.sent: list[Any] = [None] * QUAD
        self.own = threading.local()

    def exchanged(self, value: Any, distance: int) -> Any:
        self.sent[self.own.lane] = value
        self.barrier.wait()
        got = self.sent[self.own.lane ^ distance]
        self.barrier.wait()
        return got

    def run(self, body: Any) -> list[Any]:
        results: list[Any] = [None] * QUAD

        def work(lane: int) -> None:
            self.own.lane = lane
            results[lane] = body(lane)

        threads = [threading.Thread(target=work, args=(lane,)) for lane in range(QUAD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@pytest.mark.compile
def test_each_real_element_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every head dim that kernels take, every thread of a warpgroup, every value it holds."""
    from fa_cute.device import epilogue
    from fa_cute.device.mma_sm90 import column_of, row_of

    quad = Quad()
    monkeypatch.setattr(epilogue, "_chosen", lambda c, a, b: a if c else b)
    monkeypatch.setattr(epilogue, "_exchanged", quad.exchanged)

    def pair(lane: int, group: int) -> tuple[int, int]:
        """The columns of a lane's packed pair ``group``, by the accumulator's layout."""
        return tuple(column_of(2 * group + half) + 2 * lane for half in range(2))

    for columns in range(STEP, LARGEST_HEAD_DIM + 1, STEP):
        groups = padded(columns) // 8
        assert groups % QUAD == 0

        def body(lane: int, groups: int = groups, columns: int = columns) -> list:
            written = []
            for block in range(groups // QUAD):
                words = [pair(lane, block * QUAD + j) for j in range(QUAD)]
                vector = epilogue.transpose_quad(words, epilogue.sides_of(lane))
                start = lane * epilogue.VECTOR_COLUMNS
                offset, real = epilogue.vector_at(block, start, columns)
                first = start + offset
                held = [column for word in vector for column in word]
                assert held == list(range(first, first + 8)), (columns, block, lane, held)
                written += held if real else []
            return written

        counts = Counter(column for lane in quad.run(body) for column in lane)
        assert counts == Counter(range(columns)), columns
    rows = Counter(row_of(thread) + 8 * r for thread in range(128) for r in range(2))
    assert rows == Counter(QUAD * list(range(ROWS))), "a row belongs to the lanes of one quad"
    assert all(row_of(thread) == row_of(thread - thread % QUAD) for thread in range(128))


@pytest.mark.compile
def test_staged_rows_are_written_once() -> None:
    """What a warp's lanes stage, by the accumulator's layout, they read again row by row."""
    from fa_cute.device import staging
    from fa_cute.device.mma_sm90 import column_of, row_of

    memory: dict[int, tuple[int, int]] = {}
    for group in range(0, staging.COLUMNS // 8, 2):
        addresses = [staging.matrix_row(lane, group) for lane in range(32)]
        for lane in range(32):
            for matrix in range(staging.MATRICES):
                half, at = matrix % 2, group + matrix // 2
                for pair in range(2):
                    # Lane i holds words i % 4 of row i / 4 of each matrix, whose rows' addresses
                    # are those of eight lanes.
                    target = addresses[8 * matrix + lane // 4] + 4 * (lane % 4) + 2 * pair
                    assert target not in memory
                    column = column_of(2 * at + pair) + 2 * (lane % 4)
                    memory[target] = row_of(lane) + 8 * half, column
    assert sorted(memory) == list(range(0, staging.WARP_BYTES, 2))
    for turn in range(staging.TURNS):
        for quarter in range(4):  # lanes that read at once
            lanes = range(8 * quarter, 8 * quarter + 8)
            banks = {staging.vector_at(lane, turn) % 128 for lane in lanes}
            assert len(banks) == 8, "two lanes read in one bank"
        for lane in range(32):
            begin, row = staging.vector_at(lane, turn), staging.vector_row(lane, turn)
            found = [memory.pop(begin + 2 * i) for i in range(8)]
            assert found == [(row, 8 * (lane % 8) + i) for i in range(8)]
    assert not memory
