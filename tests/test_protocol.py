"""The model checker on small programs written by hand: right ones pass, each kind of fault shows.

A producer warp (0) loads blocks of K into a ring by TMA, four consumer warps multiply them; then
variations with named barriers, generic writes and tensor memory.
"""

from __future__ import annotations

from typing import Any

import pytest

from fa_cute.device.checker import Fault, check
from fa_cute.device.protocol import (
    Arrive,
    Barrier,
    Branch,
    Copy,
    Group,
    Loop,
    Product,
    Program,
    Range,
    RingTable,
    Scenario,
    Settle,
    Touch,
    Wait,
)

STAGES, BYTES = 2, 64
PRODUCER = ("<", ("tid",), 32)
SCENARIOS = [Scenario(({"blocks": n}, {"blocks": 0}, {"blocks": m})) for n, m in ((3, 2), (5, 0))]


def stage_of(slot: int, name: str = "k", size: int = BYTES) -> Range:
    return Range("shared", ("*", ("slot", slot), size), size, name)


FILL = (Wait("k", "fill", 0), Arrive(0, "full"), Copy(0, stage_of(0), BYTES))
SCORES = Range("registers", 0, 1, "s")
MULTIPLY = Product((stage_of(1),), (SCORES,))
READ = Touch(SCORES, False)
TAKE = (
    Wait("k", "take", 1),
    MULTIPLY,
    Group(),
    Group(0),
    Arrive(1, "empty"),
    READ,
)


def program(fill: tuple = FILL, take: tuple = TAKE, *, empties: int = 4, tx: int = BYTES) -> Any:
    """Both roles walk the tiles, and the blocks of each."""
    roles = Branch(PRODUCER, (Loop("blocks", fill),), (Loop("blocks", take),))
    ring = RingTable(STAGES, tx, 1, empties)
    return Program((Loop(0, (roles,), tiles=True),), {"k": ring}, 5)


def faults(wrong: Program, count: int = 60) -> str:
    with pytest.raises(Fault) as found:
        check(wrong, SCENARIOS, count)
    return str(found.value)


def test_a_right_ring_passes() -> None:
    assert check(program(), SCENARIOS, 60) > 60


def test_a_slot_taken_without_waiting_was_awaited_before() -> None:
    awaited = Wait("k", "take awaited", 1)
    assert check(program(take=(Wait("k", "peek", 2), awaited, *TAKE[1:])), SCENARIOS, 60) > 60
    text = faults(program(take=(awaited, *TAKE[1:])))
    assert "Wait" in text and "which is not filled" in text


def moved(ops: tuple, what: Any, to: int) -> tuple:
    rest = [op for op in ops if op is not what]
    rest.insert(to, what)
    return tuple(rest)


def test_release_before_the_wait_of_the_product() -> None:
    early = moved(TAKE, TAKE[4], 3)
    text = faults(program(take=early))
    assert "unordered access: Copy" in text and "read" in text and "The last steps" in text


def test_a_wait_that_leaves_one_group_under_way() -> None:
    weak = tuple(Group(1) if op == Group(0) else op for op in TAKE)
    assert "unordered access" in faults(program(take=weak))


def test_an_uncommitted_product_is_not_waited_for() -> None:
    assert "unordered access" in faults(program(take=tuple(op for op in TAKE if op != Group())))


def test_accumulators_read_before_their_wait() -> None:
    text = faults(program(take=moved(TAKE, READ, 2)))
    assert "accesses s" in text


def test_a_missing_release() -> None:
    text = faults(program(take=tuple(op for op in TAKE if not isinstance(op, Arrive))))
    assert "deadlock" in text and "warp 0" in text


def test_a_release_too_many() -> None:
    text = faults(program(take=(*TAKE, TAKE[4])))
    assert "phase error" in text or "unordered" in text


def test_fewer_arrivals_than_consumers() -> None:
    text = faults(program(empties=3))
    assert "phase error" in text or "unordered" in text


def test_more_arrivals_than_consumers() -> None:
    assert "deadlock" in faults(program(empties=5))


def test_swapped_phases() -> None:
    swapped = (TAKE[0]._replace(flip=1), *TAKE[1:])
    text = faults(program(take=swapped))
    assert "phase error" in text or "deadlock" in text


def test_wrong_stage() -> None:
    other = Range("shared", ("-", BYTES, ("*", ("slot", 1), BYTES)), BYTES, "k")
    wrong = tuple(op._replace(reads=(other,)) if op is MULTIPLY else op for op in TAKE)
    text = faults(program(take=wrong))
    assert "before any write" in text or "unordered" in text


@pytest.mark.parametrize("tx", [BYTES // 2, 2 * BYTES])
def test_bytes_that_are_announced_wrong(tx: int) -> None:
    assert "deadlock" in faults(program(tx=tx))


def test_a_role_that_disagrees_about_an_empty_tile() -> None:
    """Known fault 50: with no block, the producer still fills one."""
    once = Branch(("==", "blocks", 0), FILL)
    roles = Branch(PRODUCER, (Loop("blocks", FILL), once), (Loop("blocks", TAKE),))
    ring = RingTable(STAGES, BYTES, 1, 4)
    wrong = Program((Loop(0, (roles,), tiles=True),), {"k": ring}, 5)
    assert check(wrong, [Scenario(({"blocks": 2}, {"blocks": 2}))], 20)
    for tiles in (({"blocks": 0}, {"blocks": 2}), ({"blocks": 2}, {"blocks": 0})):
        with pytest.raises(Fault, match="for tile"):
            check(wrong, [Scenario(tiles)], 3)


def test_aliases_collide() -> None:
    """A buffer that shares bytes with the ring's second stage is overwritten there."""
    alias = Range("shared", BYTES, BYTES, "alias")
    wrong = (*TAKE, Touch(alias, True))
    assert "alias" in faults(program(take=wrong))
    apart = Range("shared", STAGES * BYTES, BYTES, "apart")
    assert check(program(take=(*TAKE, Touch(apart, True))), SCENARIOS, 20)


DS = Range("shared", 0, BYTES, "ds")
MEET = Barrier(1, 128)
EXCHANGE = (Touch(DS, True), Settle("fence"), MEET, Product((DS,), ()), Group(), Group(0), MEET)


def exchange(ops: tuple) -> Program:
    """Known fault 51: four warps write a part each, and all multiply the whole."""
    return Program((Loop(3, ops),), {}, 4)


def test_threads_write_what_products_read() -> None:
    assert check(exchange(EXCHANGE), [Scenario(({},))], 30)


@pytest.mark.parametrize(
    ("missing", "message"),
    [(1, "missing fence"), (2, "unordered access"), (5, "unordered access"), (6, "unordered")],
)
def test_each_part_of_an_exchange_is_needed(missing: int, message: str) -> None:
    wrong = tuple(op for i, op in enumerate(EXCHANGE) if i != missing)
    with pytest.raises(Fault, match=message):
        check(exchange(wrong), [Scenario(({},))], 60)


def test_a_fence_after_the_barrier_is_too_late() -> None:
    wrong = (EXCHANGE[0], MEET, *EXCHANGE[1:2], *EXCHANGE[3:])
    with pytest.raises(Fault, match="missing fence"):
        check(exchange(wrong), [Scenario(({},))], 30)


def test_a_named_barrier_that_waits_for_more_threads() -> None:
    wrong = tuple(Barrier(1, 160) if op is MEET else op for op in EXCHANGE)
    with pytest.raises(Fault, match="deadlock"):
        check(exchange(wrong), [Scenario(({},))], 3)


S, P = Range("tensor", 0, 128, "s"), Range("tensor", 0, 64, "p")
LOADS = (Touch(S, False, "load"), Settle("load"))
STORES = (Touch(P, True, "store"), Settle("store"))
ENTERED = Settle("entered")
SOFTEN = (Wait("s", "take", 0), ENTERED, *LOADS, Wait("p", "fill", 1), *STORES, Arrive(1, "full"))
FIRST = (Wait("s", "fill", 2), Product((), (S,)), Arrive(2, "full", True))
SECOND = (Wait("p", "take", 3), ENTERED, Product((P,), ()), Arrive(3, "empty"))


def tensor(soften: tuple = SOFTEN, second: tuple = SECOND) -> Program:
    """Warp 0 multiplies S, warp 1 writes P in its place, warp 0 multiplies that; three times.

    Neither ring waits to be filled: products execute in order, and P follows S.
    """
    rings = {name: RingTable(1, 0, 1, 1, freed=False) for name in "sp"}
    roles = Branch(("<", ("tid",), 32), (*FIRST, *second), soften)
    return Program((Loop(3, (roles,)),), rings, 2)


def test_products_in_order_need_no_barrier() -> None:
    assert check(tensor(), [Scenario(({},))], 30)


@pytest.mark.parametrize("missing", [1, 3, 6])
def test_tensor_memory_accesses_are_settled(missing: int) -> None:
    wrong = tuple(op for i, op in enumerate(SOFTEN) if i != missing)
    with pytest.raises(Fault, match="unordered access"):
        check(tensor(wrong), [Scenario(({},))], 30)


def test_an_arrival_in_place_of_a_commit() -> None:
    roles = Branch(("<", ("tid",), 32), (*FIRST[:2], Arrive(2, "full"), *SECOND), SOFTEN)
    rings = {name: RingTable(1, 0, 1, 1, freed=False) for name in "sp"}
    with pytest.raises(Fault, match="unordered access"):
        check(Program((Loop(3, (roles,)),), rings, 2), [Scenario(({},))], 30)
