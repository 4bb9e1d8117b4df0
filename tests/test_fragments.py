"""Which thread holds which element: each exactly once, and where the kernels think that it is."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fa_cute.configuration import Configuration
from fa_cute.device import protocol
from fa_cute.plan import padded
from fa_cute.spans import Bounds
from tests.protocol_kernels import recorded
from tests.tracing import offsets, within_a_trace

pytestmark = pytest.mark.compile

THREADS, ROWS = 128, 64
WIDTHS = (64, 80, 128, 176)


@pytest.fixture(scope="module")
def layouts() -> dict[tuple[str, int], tuple]:
    """The compiler's (thread, value) -> row + 64 column of wgmma's operand A and accumulator."""
    from cutlass import BFloat16

    from fa_cute.device import mma_sm90

    found = {}

    def describe() -> None:
        for width in WIDTHS:
            mma = mma_sm90.make_mma(BFloat16, 2, width, p_times_v=True)
            for name in "AC":
                layout = getattr(mma, f"tv_layout_{name}")
                found[name, width] = layout.shape, layout.stride

    within_a_trace(describe)
    return found


def _coordinates(layout: tuple, thread: int) -> list[tuple[int, int]]:
    """(row, column) of each value of a thread, in order."""
    (threads, values), (by_thread, by_value) = layout
    start = offsets(threads, by_thread)[thread]
    return [((start + v) % ROWS, (start + v) // ROWS) for v in offsets(values, by_value)]


@pytest.mark.parametrize("width", WIDTHS)
def test_an_accumulator_is_where_the_kernels_think(layouts: Any, width: int) -> None:
    from fa_cute.device.mma_sm90 import fragment

    own = fragment(width)
    seen: Counter = Counter()
    for thread in range(THREADS):
        held = _coordinates(layouts["C", width], thread)
        # rows_and_columns: value 4 (c // 2) + 2 r + c % 2 is row r of column c.
        expected = {
            4 * (c // 2) + 2 * r + c % 2: (
                own.first_row(thread) + own.rows[r],
                own.first_column(thread) + own.column(c),
            )
            for r in range(2)
            for c in range(own.columns)
        }
        assert held == [expected[v] for v in range(len(held))]
        seen.update(held)
    assert seen == Counter(itertools.product(range(ROWS), range(width)))


@pytest.mark.parametrize("width", WIDTHS)
def test_p_is_an_operand_without_movement(layouts: Any, width: int) -> None:
    """Value v of the k16 step j of operand A is value 8 j + v of the accumulator of S."""
    for thread in range(THREADS):
        held = _coordinates(layouts["C", width], thread)
        step = _coordinates(layouts["A", width], thread)
        operand = [(row, 16 * j + k) for j in range(width // 16) for row, k in step]
        assert operand == held


def _bounds() -> Iterator[Bounds]:
    for lengths in ((64, 64), (100, 37), (40, 130)):
        for left, right in itertools.product((None, 0, 9), (None, 0, 5)):
            yield Bounds(*lengths, left, right)


def _sees(bounds: Bounds, q: int, kv: int) -> bool:
    diagonal = q + bounds.seqlen_k - bounds.seqlen_q
    left = bounds.left is None or kv >= diagonal - bounds.left
    return left and (bounds.right is None or kv <= diagonal + bounds.right)


def _inside(column: int, low: int | None, high: int) -> bool:
    return column < high and (low is None or column >= low)


@pytest.fixture
def plain_select(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's select on Python's numbers."""
    from fa_cute.device import mask, rows

    for module in (mask, rows):
        monkeypatch.setattr(module.cutlass, "select_", lambda c, a, b: a if c else b)
    monkeypatch.setattr(mask, "Int32", int)


def test_limits_hide_what_a_row_does_not_see(plain_select: None) -> None:
    """Hopper's two rows a thread (also with keys as rows), Blackwell's one: every element."""
    from fa_cute.device import mask, rows
    from fa_cute.device.mma_sm90 import fragment

    own, first = fragment(64), 32  # the block's first column
    for bounds in _bounds():
        for thread in range(THREADS):
            row, quad = own.first_row(thread), own.first_column(thread)
            queries = mask.limits(bounds, row, quad)
            keys = mask.limits_of_keys(bounds, row, quad)
            for r, c in itertools.product(range(2), range(own.columns)):
                at, column = row + own.rows[r], quad + own.column(c) + first
                for limit, seen in (
                    (queries, column < bounds.seqlen_k and _sees(bounds, at, column)),
                    (
                        keys,
                        at < bounds.seqlen_k
                        and column < bounds.seqlen_q
                        and _sees(bounds, column, at),
                    ),
                ):
                    low = None if limit.low is None else limit.low[r]
                    assert _inside(column - quad, low, limit.high[r]) == seen
            single = rows.limit_of(bounds, thread)
            for column in range(first, first + 64):
                seen = column < bounds.seqlen_k and _sees(bounds, thread, column)
                assert _inside(column, single.low, single.high) == seen


def test_a_blackwell_row_hides_column_by_column() -> None:
    """The operations that ``rows.hide`` emits, folded by the compiler: bits of words, as limits."""
    lows, highs = (None, -(2**30), 0, 64, 95, 96, 191, 192), (-5, 64, 65, 96, 191, 192, 2**31 - 1)
    cases, first = list(itertools.product(lows, highs)), 64
    for (low, high), seen in zip(cases, _hidden_of(cases, first, columns=128), strict=True):
        assert seen == [_inside(first + c, low, high) for c in range(128)], (low, high)


def test_a_blackwell_thread_reads_the_row_that_it_owns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warp reaches lanes 32 (warp % 4) on; a thread's row of its tile is thread % 128."""
    from cutlass import Int32
    from cutlass._mlir import ir

    from fa_cute.device import tmem

    monkeypatch.setattr(tmem.cute, "make_layout", lambda *_: None)
    monkeypatch.setattr(tmem.cute, "make_tensor", lambda *_: [Int32(0)])
    monkeypatch.setattr(tmem.cute.arch, "make_warp_uniform", lambda x: x)
    plan = Configuration(head_dim=128, dtype="bfloat16", target="sm_100a").plan()[0]
    with ir.Context(), ir.Location.unknown():
        for warp in range(4, plan.config.threads // 32):
            monkeypatch.setattr(tmem.cute.arch, "warp_idx", lambda warp=warp: Int32(warp))
            lane, column = divmod(tmem.Native.at(None, None).address.value, 1 << tmem.LANE_BIT)
            owned = [thread % THREADS for thread in range(32 * warp, 32 * warp + 32)]
            assert column == 0 and list(range(lane, lane + tmem.QUARTER)) == owned


def test_a_blackwell_row_is_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every head dim that kernels take: each real element once, none past the row's end."""
    from fa_cute.device import rows
    from fa_cute.kernels.fwd_sm100 import PIECE

    written: list[tuple] = []
    pointers = SimpleNamespace(get=lambda *_: None)
    llvm = SimpleNamespace(
        PointerType=pointers,
        inttoptr=lambda *_: SimpleNamespace(type=None),
        getelementptr=lambda _type, _base, _dynamic, offsets, *_: offsets[0],
        store=lambda value, place, alignment: written.append((value, place, alignment)),
    )
    row = SimpleNamespace(iterator=SimpleNamespace(toint=lambda: SimpleNamespace(ir_value=int)))
    emit = SimpleNamespace(lanes_of=len, part=lambda x, at, n: x[at : at + n], integer=int)
    monkeypatch.setattr(rows, "llvm", llvm)
    monkeypatch.setattr(rows, "emit", emit)
    for width in range(8, 257, 8):
        monkeypatch.setattr(rows.cute, "size", lambda _, width=width: width)
        written.clear()
        for first in range(0, padded(width), PIECE):
            words = [(c, c + 1) for c in range(first, first + PIECE, 2)]
            rows.store(words, row, first)
        held = [
            (column, place // 2 + i)
            for value, place, alignment in written
            for i, column in enumerate(itertools.chain(*value))
            if place % alignment == 0
        ]
        assert held == [(column, column) for column in range(width)]


def _hidden_of(cases: list[tuple], first: int, *, columns: int) -> list[list[bool]]:
    """Of each (low, high) which columns keep a score of 1, from column ``first`` on."""
    from cutlass import Int32
    from cutlass._mlir import ir, passmanager
    from cutlass._mlir.dialects import func

    from fa_cute.device import emit, rows

    with ir.Context(), ir.Location.unknown():
        module, element = ir.Module.create(), ir.F32Type.get()
        with ir.InsertionPoint(module.body):
            row = ir.VectorType.get([columns], element)
            function = func.FuncOp("rows", ((), (row,) * len(cases)))
        with ir.InsertionPoint(function.add_entry_block()):
            scores, found = emit.constant_of(1.0, element, columns), []
            for low, high in cases:
                limit = rows.Limit(None if low is None else Int32(low), Int32(high))
                found.append(rows.hide(scores, limit, Int32(first)))
            func.ReturnOp(found)
        passmanager.PassManager.parse("builtin.module(canonicalize)").run(module.operation)
        folded = list(function.entry_block.operations)[-1].operands
        values = [ir.DenseFPElementsAttr(x.owner.attributes["value"]) for x in folded]
        return [[score == 1.0 for score in value] for value in values]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tensor_memory_is_moved_column_by_column(head_dim: int) -> None:
    """Per block S is read and P written once a column, and P is multiplied as it was written.

    The late columns of S are read once for the maximum and once more to become P.
    From the record of the kernel: the loads and stores of its softmax, the products of its MMA.
    """
    asked = Configuration(head_dim=head_dim, dtype="bfloat16", target="sm_100a")
    plan = asked.plan()[0]
    program, _ = recorded(plan)
    bodies = [run for run in _runs(program.body) if any(_via(op) == "store" for op in run)]
    softmax = next(run for run in bodies if any(getattr(op, "ring", "") == "p" for op in run))
    s, p = (_columns(softmax, via) for via in ("load", "store"))
    late = range(plan.config.early, plan.config.tile_n)
    assert s == Counter(range(plan.config.tile_n)) + Counter(late)
    assert p == Counter(range(plan.config.tile_n // 2))
    multiplied: Counter = Counter()
    issue = next(run for run in _runs(program.body) if any(_takes_p(op) for op in run))
    copy = None
    for op in issue:
        if isinstance(op, protocol.Wait) and op.ring in ("p", "tail"):
            copy = _value(op.copy)
        if isinstance(op, protocol.Product) and op.reads[0].space == "tensor" and copy == 0:
            multiplied.update(_spread(op.reads[0]))
    assert multiplied == p


def _takes_p(op: Any) -> bool:
    return isinstance(op, protocol.Wait) and (op.ring, op.side) == ("p", "take")


def _via(op: Any) -> str:
    return op.via if isinstance(op, protocol.Touch) else ""


def _runs(items: tuple) -> Iterator[tuple]:
    yield items
    for item in items:
        if isinstance(item, protocol.Loop):
            yield from _runs(item.body)
        elif isinstance(item, protocol.Branch):
            yield from _runs(item.then)
            yield from _runs(item.other)


def _columns(run: tuple, via: str) -> Counter:
    """Columns moved by a warpgroup before its run takes S again."""
    found: Counter = Counter()
    taken = 0
    for op in run:
        taken += isinstance(op, protocol.Wait) and (op.ring, op.side) == ("s", "take")
        if _via(op) == via and taken == 1:
            found.update(_spread(op.range))
    return found


def _spread(part: protocol.Range) -> range:
    """The columns of a range, for a CTA's first tile (a loop's turn) and the first of S's slots."""
    begin = _value(part.begin)
    return range(begin, begin + part.size)


def _value(e: Any) -> int:
    if isinstance(e, int):
        return e
    if e[0] == "tid":
        return THREADS  # of the first softmax warpgroup
    return 0 if e[0] in ("slot", "turn") else protocol.OPERATORS[e[0]](_value(e[1]), _value(e[2]))
