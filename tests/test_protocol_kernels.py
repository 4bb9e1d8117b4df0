"""The protocol check of the shipped kernels, and faults seeded in their records that it must find.

Each kernel is traced (2 to 4 s, nothing is compiled) and its record walked in many orders.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fa_cute.device import checker, protocol
from fa_cute.device.protocol import (
    CLUSTER,
    Arrive,
    Barrier,
    Branch,
    Group,
    Loop,
    Product,
    Settle,
    Touch,
)
from fa_cute.plan import Plan
from tests.protocol_kernels import recorded, scenarios
from tests.protocol_plans import (
    KERNELS,
    backward,
    biased,
    documents,
    forward,
    paired,
    queries_in_registers,
)

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("name", KERNELS)
def test_shipped_kernels(name: str) -> None:
    plan = KERNELS[name]()
    program, unknown = recorded(plan)
    # What the recorder cannot express decides no loop of verbs: those have names. A consumer's
    # branch on a block's note (whether it is whole; Hopper's loop carries it to the next block) is
    # between bodies with the same verbs, whose sides are both walked; a correction warp's vote
    # (whether some row needs rescaling) is of its own accesses; so is whether a first block passes
    # the end of the keys.
    told = {"cute.memref.load", "an argument", "nvvm.vote.sync", "cute.get_scalars"}
    assert set(unknown) <= told, unknown
    assert not any("free" in repr(loop.count) for loop in _loops(program.body))
    count = 30 if program.ctas > 1 else 60
    assert checker.check(program, scenarios(plan, 12), count) > 10_000


def _loops(items: tuple) -> list:
    found = []
    for item in items:
        if isinstance(item, Loop):
            found += [item, *_loops(item.body)]
        elif isinstance(item, Branch):
            found += [*_loops(item.then), *_loops(item.other)]
    return found


def edited(program: Any, edit: Callable[[list], list]) -> Any:
    """The program with ``edit`` applied to each straight run of its tree, innermost first."""

    def run(items: tuple) -> tuple:
        inner = []
        for item in items:
            if isinstance(item, Loop):
                inner.append(item._replace(body=run(item.body)))
            elif isinstance(item, Branch):
                inner.append(item._replace(then=run(item.then), other=run(item.other)))
            else:
                inner.append(item)
        return tuple(edit(inner))

    return replace(program, body=run(program.body))


def wrong_by(program: Any, edit: Callable[[list], list]) -> Any:
    """``edited``, which has to change something."""
    wrong = edited(program, edit)
    assert wrong != program
    return wrong


def ring_of(program: Any) -> dict[int, str]:
    """Each slot's ring."""
    found: dict[int, str] = {}

    def note(items: list) -> list:
        found.update({op.slot: op.ring for op in items if isinstance(op, protocol.Wait)})
        return items

    edited(program, note)
    return found


def releases(program: Any, name: str) -> Callable[[Any], bool]:
    """Whether an operation releases a slot of the ring ``name``."""
    rings = ring_of(program)
    return lambda op: isinstance(op, Arrive) and op.side == "empty" and rings[op.slot] == name


def without(unwanted: Callable[[Any], bool]) -> Callable[[list], list]:
    return lambda items: [item for item in items if not unwanted(item)]


def changed(change: Callable[[Any], Any]) -> Callable[[list], list]:
    return lambda items: [change(item) for item in items]


def found_in(plan: Plan, wrong: Any, count: int = 60) -> str:
    with pytest.raises(checker.Fault) as fault:
        checker.check(wrong, scenarios(plan, 12), count)
    return str(fault.value)


def before(late: Callable[[Any], bool], wait: Callable[[Any], bool]) -> Callable[[list], list]:
    """Move each operation that is ``late`` before the ``wait`` right in front of it."""

    def edit(items: list) -> list:
        items = list(items)
        for i in range(1, len(items)):
            if late(items[i]) and wait(items[i - 1]):
                items[i - 1], items[i] = items[i], items[i - 1]
        return items

    return edit


@pytest.mark.parametrize("change", ["early", "missing"])
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_a_slot_of_the_bias(target: str, change: str) -> None:
    """Released before its last reading, the next box overwrites it; not released, nothing moves.

    Of fp32. 16-bit boxes are read before K is released, whose slot the producer fills first.
    """
    plan = biased(torch.float32, target=target)
    program, _ = recorded(plan)
    release = releases(program, "bias")

    def early(items: list) -> list:
        mine = [item for item in items if release(item)]
        rest = [item for item in items if not release(item)]
        taken = (
            isinstance(i, protocol.Wait) and (i.ring, i.side) == ("bias", "take") for i in rest
        )
        at = next((at for at, yes in enumerate(taken, 1) if yes), 0)
        return rest[:at] + mine + rest[at:]

    wrong = wrong_by(program, early if change == "early" else without(release))
    expected = "unordered access: Copy" if change == "early" else "deadlock"
    assert expected in found_in(plan, wrong)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_a_slot_of_the_bias_that_no_fence_frees(target: str) -> None:
    """Lanes read a box, and TMA writes the next over it."""
    plan = biased(target=target)
    program, _ = recorded(plan)
    wrong = wrong_by(program, without(lambda op: op == Settle("fence")))
    assert "missing fence: Copy" in found_in(plan, wrong)


def test_a_slot_of_queries_that_no_fence_frees() -> None:
    """Lanes read Q into registers, and TMA writes the next tile's over it."""
    plan = queries_in_registers(causal=True)
    program, _ = recorded(plan)
    wrong = wrong_by(program, without(lambda op: op == Settle("fence")))
    assert "missing fence: Copy" in found_in(plan, wrong)


@pytest.mark.parametrize("change", ["read late", "not told"])
def test_columns_beside_k(change: str) -> None:
    """A second warp writes a mask's columns when K's slot is free, and arrives for them there."""
    plan = documents()
    program, _ = recorded(plan)
    release, rings = releases(program, "k"), ring_of(program)

    def late(items: list) -> list:
        reads = [i for i in items if isinstance(i, Touch) and i.range.name == "columns"]
        reads = [i for i in reads if not i.write]
        rest = [item for item in items if item not in reads]
        at = next((at for at, item in enumerate(rest, 1) if release(item)), len(rest))
        return rest[:at] + reads + rest[at:]

    if change == "read late":
        wrong, expected = wrong_by(program, late), "unordered access"
    else:
        arrival = functools.partial(_writes, rings)
        wrong, expected = wrong_by(program, without(arrival)), "deadlock"
    assert expected in found_in(plan, wrong)


def _writes(rings: dict[int, str], op: Any) -> bool:
    return isinstance(op, Arrive) and op.writes and rings[op.slot] == "k"


def is_wait(op: Any) -> bool:
    return isinstance(op, Group) and op.pending is not None


@pytest.mark.parametrize("ring", ["k", "v"])
def test_a_release_before_the_wait_of_its_product(ring: str) -> None:
    program, _ = recorded(forward())
    wrong = wrong_by(program, before(releases(program, ring), is_wait))
    assert "unordered access: Copy" in found_in(forward(), wrong)


def test_queries_released_before_the_last_scores() -> None:
    program, _ = recorded(forward())
    release = releases(program, "q")

    def edit(items: list) -> list:
        mine = [item for item in items if release(item)]
        rest = [item for item in items if not release(item)]
        at = next((i for i, item in enumerate(rest) if isinstance(item, Loop)), 0)
        return rest[:at] + mine + rest[at:]

    assert "unordered access: Copy" in found_in(forward(), wrong_by(program, edit))


def test_one_group_more_under_way() -> None:
    """wait_group(1) and (0) as (2) and (1): P is rewritten under the product that reads it."""
    program, _ = recorded(forward())
    wrong = edited(
        program, changed(lambda o: o._replace(pending=o.pending + 1) if is_wait(o) else o)
    )
    assert "fragment" in found_in(forward(), wrong)


@pytest.mark.parametrize("ring", ["next", "q", "k", "v"])
def test_a_missing_release(ring: str) -> None:
    program, _ = recorded(forward())
    wrong = wrong_by(program, without(releases(program, ring)))
    assert "deadlock" in found_in(forward(), wrong)


@pytest.mark.parametrize("ring", ["next", "q", "k", "v"])
def test_fewer_arrivals_than_consumers(ring: str) -> None:
    """What a count of warpgroups, where warps arrive, would be: 7 of 8."""
    program, _ = recorded(forward())
    table = replace(program.rings[ring], empties=7)
    text = found_in(forward(), replace(program, rings={**program.rings, ring: table}))
    assert "phase error" in text or "unordered" in text


def test_swapped_phases() -> None:
    program, _ = recorded(forward())

    def flipped(op: Any) -> Any:
        mine = isinstance(op, protocol.Wait) and (op.ring, op.side) == ("k", "take")
        return op._replace(flip=1) if mine else op

    text = found_in(forward(), wrong_by(program, changed(flipped)))
    assert "phase error" in text or "deadlock" in text


def test_a_stage_of_another_ring() -> None:
    """P V reads V at K's index: they differ, for K runs a block ahead."""
    program, _ = recorded(forward())
    rings = ring_of(program)

    def edit(items: list) -> list:
        takes = [op for op in items if isinstance(op, protocol.Wait) and op.ring == "k"]
        return [_at(op, rings, takes[0].slot) if takes else op for op in items]

    text = found_in(forward(), wrong_by(program, edit))
    assert "v" in text and ("unordered" in text or "before any write" in text)


def _at(op: Any, rings: dict[int, str], slot: int) -> Any:
    if not isinstance(op, Product):
        return op
    reads = tuple(
        part._replace(begin=_with_slot(part.begin, slot)) if part.name == "v" else part
        for part in op.reads
    )
    return op._replace(reads=reads)


def _with_slot(e: Any, slot: int) -> Any:
    if isinstance(e, tuple):
        return ("slot", slot) if e[0] == "slot" else tuple(_with_slot(part, slot) for part in e)
    return e


def test_an_empty_tile_that_the_producer_fills() -> None:
    """Known fault 50: tiles that see nothing, one role thinking otherwise."""
    plan = forward(causal=True, head_dim=256)
    program, _ = recorded(plan)

    def edit(items: list) -> list:
        return [
            item._replace(condition=1)
            if isinstance(item, Branch) and _fills_keys(item.then)
            else item
            for item in items
        ]

    text = found_in(plan, wrong_by(program, edit))
    assert "phase error" in text or "deadlock" in text


def test_a_tile_after_the_last() -> None:
    """Its boxes are loaded, and nobody takes them."""
    plan = forward(causal=True)
    program, _ = recorded(plan)

    def edit(items: list) -> list:
        return [
            item._replace(condition=1) if getattr(item, "condition", 0) == ("next",) else item
            for item in items
        ]

    assert "never taken" in found_in(plan, wrong_by(program, edit))


def _fills_keys(items: tuple) -> bool:
    mine = [op for op in items if isinstance(op, protocol.Wait)]
    return any((op.ring, op.side) == ("k", "fill") for op in mine)


def test_a_turn_that_is_not_given() -> None:
    program, _ = recorded(forward(few_keys=True))
    wrong = wrong_by(program, without(lambda op: isinstance(op, Barrier) and not op.waits))
    assert "deadlock" in found_in(forward(few_keys=True), wrong)


def test_a_missing_proxy_fence() -> None:
    """Known fault 51: dS is written by threads and read by the async proxy."""
    program, _ = recorded(backward())
    wrong = wrong_by(program, without(lambda op: op == Settle("fence")))
    assert "missing fence" in found_in(backward(), wrong)


def test_a_missing_meeting_of_the_consumers() -> None:
    program, _ = recorded(backward())
    wrong = wrong_by(program, without(lambda op: isinstance(op, Barrier) and op.id == 1))
    text = found_in(backward(), wrong)
    assert "ds" in text and ("unordered" in text or "before any write" in text)


def test_one_slot_of_ds() -> None:
    """With a single slot, a fast warpgroup writes dS while another still multiplies it."""
    program, _ = recorded(backward())

    def first(part: Any) -> Any:
        return part._replace(begin=part.begin[1]) if part.name == "ds" else part

    def change(op: Any) -> Any:
        if isinstance(op, protocol.Touch):
            return op._replace(range=first(op.range))
        return op._replace(reads=tuple(map(first, op.reads))) if isinstance(op, Product) else op

    text = found_in(backward(), wrong_by(program, changed(change)))
    assert "unordered access" in text and "ds" in text


def test_the_backwards_release_before_its_wait() -> None:
    """Of Q. That of dO would be harmless: the producer fills Q's slot, freed later, before dO's."""
    program, _ = recorded(backward())
    harmless = wrong_by(program, before(releases(program, "do"), is_wait))
    assert checker.check(harmless, scenarios(backward(), 12), 30)
    wrong = wrong_by(program, before(releases(program, "q"), is_wait))
    assert "unordered access: Copy" in found_in(backward(), wrong)


@pytest.mark.parametrize("ring", ["turn", "dq"])
def test_a_turn_that_the_consumers_keep(ring: str) -> None:
    """Wide, in turn: those add to dQ themselves; one who waits for turns, one who gives them on."""
    plan = backward(head_dim=256, deterministic=True)
    program, _ = recorded(plan)
    table = program.rings[ring]
    fewer = {"turn": {"empties": 7}, "dq": {"fills": 7}}[ring]
    text = found_in(plan, replace(program, rings={**program.rings, ring: replace(table, **fewer)}))
    assert "phase error" in text or "deadlock" in text
    rings = ring_of(program)
    kept = without(lambda op: isinstance(op, Arrive) and rings[op.slot] == ring)
    assert "deadlock" in found_in(plan, wrong_by(program, kept))


def test_blocks_that_are_passed_by_without_a_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their dQ reads what the other warpgroup has written of dS."""
    import cutlass.cute as cute

    from fa_cute.kernels.bwd_sm90 import BwdSm90

    passed, meet, passing = BwdSm90.pass_by, BwdSm90.meet_all, []

    def pass_by(self: Any, *arguments: Any) -> Any:
        passing.append(self)
        try:
            return passed(self, *arguments)
        finally:
            passing.pop()

    monkeypatch.setattr(BwdSm90, "pass_by", pass_by)

    def fence(self: Any, body: Any) -> None:
        if passing:
            cute.arch.fence_proxy("async.shared", space="cta")
        else:
            meet(self, body)

    monkeypatch.setattr(BwdSm90, "meet_all", fence)
    plan = backward(window=(True, True))
    program, _ = recorded.__wrapped__(plan)
    assert "unordered access" in found_in(plan, program)


def test_a_slot_that_is_taken_as_awaited_and_was_not() -> None:
    """Wide heads await dO of the next block with its Q, and take both without waiting."""
    plan = backward(head_dim=256)
    program, _ = recorded(plan)
    awaits = without(
        lambda op: isinstance(op, protocol.Wait) and (op.ring, op.side) == ("do", "peek")
    )
    assert "which is not filled" in found_in(plan, wrong_by(program, awaits))


def blackwell() -> Plan:
    return forward(target="sm_100a")


@pytest.mark.parametrize("what", ["load", "store", "entered"])
def test_tensor_memory_that_is_not_settled(what: str) -> None:
    program, _ = recorded(blackwell())
    wrong = wrong_by(program, without(lambda op: op == Settle(what)))
    assert "tensor memory" in found_in(blackwell(), wrong)


@pytest.mark.parametrize("ring", ["s", "o", "v"])
def test_an_arrival_in_place_of_a_commit(ring: str) -> None:
    """The warp arrives at once, while its products are under way."""
    program, _ = recorded(blackwell())
    rings = ring_of(program)

    def early(op: Any) -> Any:
        mine = isinstance(op, Arrive) and op.commit and rings[op.slot] == ring
        return op._replace(commit=False) if mine else op

    assert "unordered access" in found_in(blackwell(), wrong_by(program, changed(early)))


def test_an_arrival_for_p_before_its_last_columns() -> None:
    program, _ = recorded(blackwell())
    rings = ring_of(program)

    def edit(items: list) -> list:
        found = []
        for op in items:
            mine = getattr(op, "slot", None) in rings and rings[op.slot] == "tail"
            if mine and isinstance(op, protocol.Wait) and op.side == "fill":
                found += [op, Arrive(op.slot, "full")]
            elif not (mine and isinstance(op, Arrive) and op.side == "full"):
                found.append(op)
        return found

    text = found_in(blackwell(), wrong_by(program, edit))
    assert "unordered access" in text and "tensor memory" in text


def test_p_in_the_other_tiles_columns() -> None:
    program, _ = recorded(blackwell())

    def beside(op: Any) -> Any:
        mine = isinstance(op, protocol.Touch) and op.via == "store" and "tid" in repr(op.range)
        return op._replace(range=_beside(op.range)) if mine else op

    def _beside(part: Any) -> Any:
        return part._replace(begin=("^", part.begin, 128))

    text = found_in(blackwell(), wrong_by(program, changed(beside)))
    assert "unordered access" in text and "tensor memory" in text


@pytest.mark.parametrize(
    ("ring", "wrong", "what"),
    [
        ("p", {"paired": False, "fills": 4}, "unordered access"),
        ("o", {"paired": False}, "deadlock"),
        ("k", {"tx_bytes": 8192}, "unordered access|before any write"),
    ],
    ids=["a product before the other CTA's P", "a commit for one CTA", "one CTA's bytes"],
)
def test_a_ring_of_a_pair_as_of_one_cta(ring: str, wrong: dict, what: str) -> None:
    program, _ = recorded(paired())
    table = replace(program.rings[ring], **wrong)
    text = found_in(paired(), replace(program, rings={**program.rings, ring: table}), 12)
    assert re.search(what, text)


def test_a_pair_that_does_not_meet_at_its_end() -> None:
    """Then a CTA may end while the other still arrives at its barriers."""
    program, _ = recorded(paired())
    meeting = [op for op in program.body if isinstance(op, Barrier) and op.id == CLUSTER]
    assert len(meeting) == 2
    wrong = replace(program, body=tuple(op for op in program.body if op is not meeting[1]))
    assert "has ended" in found_in(paired(), wrong)
