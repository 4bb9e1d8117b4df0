"""A model checker of protocols. Plain Python.

``check`` lets the warps of a ``protocol.Program`` walk it in many orders, each warp free to run
ahead or to fall behind and each asynchronous completion as early or as late as it may come, and
raises ``Fault`` with the trace of the first thing that is wrong:

    deadlock          no warp can go on and nothing is under way
    phase error       a wait passes, or an arrival counts, in another lap of the ring than its own;
                      or a slot is taken at another tile than it was filled for, or never
    unordered access  a read not after its write, or a write not after the reads before it
    missing fence     the async proxy reads what threads wrote, or fills what the table says lanes
                      read, without a proxy fence between

Order is *happens-before*, by vector clocks over warps and over each asynchronous unit: TMA by slot,
the products of a warp, its tensor-memory loads and stores. What only this run's order protected is
a fault in this run, so few schedules find much.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fa_cute.device.protocol import (
    CLUSTER,
    OPERATORS,
    WARP,
    Arrive,
    Barrier,
    Branch,
    Copy,
    Expr,
    Group,
    Loop,
    Product,
    Program,
    Range,
    Scenario,
    Settle,
    Touch,
    Wait,
)


class Fault(Exception):
    """What is wrong, and the last steps before it."""


@dataclass
class _Mbarrier:
    """``done``: what whoever sees a completed phase comes after; ``clock``: of the phase now."""

    count: int
    arrived: int = 0
    bytes: int = 0
    completed: int = 0
    clock: dict = field(default_factory=dict)
    done: dict = field(default_factory=dict)

    def settle(self) -> None:
        """Complete the phase if all have arrived and all bytes are there."""
        if self.arrived == self.count and self.bytes == 0:
            self.completed, self.arrived = self.completed + 1, 0
            _join(self.done, self.clock)
            self.clock = {}


@dataclass
class _Named:
    arrived: int = 0
    generation: int = 0
    clock: dict = field(default_factory=dict)
    done: dict = field(default_factory=dict)


class _Access(NamedTuple):
    """``at``: a unit's time; ``op``: by identity; ``fenced``: [bool], shared with its warp."""

    at: int
    op: Any
    fenced: list | None


@dataclass
class _Cell:
    begin: int
    end: int
    writes: dict = field(default_factory=dict)
    reads: dict = field(default_factory=dict)


def _text(op: Any) -> str:
    """An operation in the trace: its kind and its fields, ranges by name."""
    return f"{type(op).__name__}({', '.join(map(_field, op._fields, op))})"


def _field(name: str, value: Any) -> str:
    if isinstance(value, Range):
        value = value.name
    elif isinstance(value, tuple) and value and isinstance(value[0], Range):
        value = "+".join(part.name for part in value)
    return f"{name}={value}"


def _join(into: dict, other: Mapping) -> None:
    for unit, at in other.items():
        if into.get(unit, 0) < at:
            into[unit] = at


class _Warp:
    """A warp: where it is in the program, its clock, its slots and rings."""

    def __init__(self, number: int, program: Program, scenario: Scenario, seed: int):
        self.number, self.scenario, self.seed = number, scenario, seed
        self.cta, self.local = divmod(number, program.warps // program.ctas)
        self.clock: dict[Any, int] = {number: 1}
        self.entered: dict[Any, int] = {}
        self.slots: dict[int, tuple] = {}
        self.laps: dict[tuple, int] = {}
        self.path: list[int] = []
        self.tile, self.products = 0, 0
        self.groups: list[int] = []
        self.unfenced: list[list] = []
        self.joined: int | None = None
        self.steps = self.walk(program.body)
        self.next: Any = next(self.steps, None)

    def advance(self) -> None:
        self.next = next(self.steps, None)

    def walk(self, nodes: Sequence) -> Iterator:
        for node in nodes:
            if isinstance(node, Loop):
                count = len(self.scenario.tiles) if node.tiles else self.value(node.count)
                self.path.append(0)
                for i in range(count):
                    self.path[-1] = i
                    self.tile = i if node.tiles else self.tile
                    yield from self.walk(node.body)
                self.path.pop()
            elif isinstance(node, Branch):
                yield from self.walk(node.then if self.value(node.condition) else node.other)
            else:
                yield node

    def holds(self, e: Expr) -> bool:
        """Whether the slots of an expression are there: not those of a tile after the last."""
        if not isinstance(e, tuple):
            return True
        if e[0] == "slot":
            return self.slots[e[1]] is not None
        return all(map(self.holds, e[1:]))

    def value(self, e: Expr) -> int:
        """The value of an expression for this warp, here."""
        if isinstance(e, int):
            return e
        if isinstance(e, str):
            return self.scenario.tiles[self.tile][e]
        if e[0] == "tid":
            return WARP * self.local
        if e[0] == "rank":
            return self.cta
        if e[0] == "next":
            return int(self.tile + 1 < len(self.scenario.tiles))
        if e[0] == "slot":
            return self.slots[e[1]][1]
        if e[0] == "free":
            key = (self.seed, self.number, tuple(self.path), repr(e[1]))
            return random.Random(repr(key)).randrange(2)
        if e[0] == "turn":
            return self.path[e[1]]
        if e[0] == "select":
            return self.value(e[2] if self.value(e[1]) else e[3])
        return int(OPERATORS[e[0]](self.value(e[1]), self.value(e[2])))


class _Run:
    """One walk of all warps through a program."""

    def __init__(self, program: Program, scenario: Scenario, seed: int):
        self.program, self.rings = program, program.rings
        self.warps = [_Warp(i, program, scenario, seed) for i in range(program.warps)]
        self.mbarriers: dict[tuple, _Mbarrier] = {}
        self.named: dict[tuple, _Named] = {}
        self.memory: dict[Any, dict] = {}
        self.pending: list[tuple] = []  # copies, and arrivals of commits, under way
        self.filled: dict[tuple, int] = {}  # (ring, turn): the tile that it was filled for
        self.log: list[tuple] = []

    def mbarrier(self, cta: int, ring: tuple, side: str, stage: int) -> _Mbarrier:
        key = (cta, ring, side, stage)
        if key not in self.mbarriers:
            table = self.rings[ring[0]]
            count = table.fills if side == "full" else table.empties
            self.mbarriers[key] = _Mbarrier(count)
        return self.mbarriers[key]

    def fault(self, what: str) -> Fault:
        steps = "\n".join(f"  warp {w:2d} tile {t}  {_text(op)}" for w, t, op in self.log[-40:])
        return Fault(f"{what}\nThe last steps:\n{steps}")

    # What each operation does; False where it has to wait.

    def step(self, warp: _Warp) -> bool:
        """Let a warp do its next operation; False if it has to wait."""
        op = warp.next
        if not _DO[type(op)](self, warp, op):
            return False
        self.log.append((warp.number, warp.tile, op))
        warp.clock[warp.number] += 1
        warp.advance()
        return True

    def wait(self, warp: _Warp, op: Wait) -> bool:
        table, ring = self.rings[op.ring], (op.ring, warp.value(op.copy))
        peeks = op.side == "peek"
        filling = op.side == "fill"
        side = "fill" if filling else "take"
        if peeks and not warp.value(op.there):
            warp.slots[op.slot] = None
            return True
        turn = warp.laps.get((ring, side), 0)
        stage, lap = turn % table.stages, turn // table.stages
        if not filling or table.freed:
            barrier = self.mbarrier(warp.cta, ring, "empty" if filling else "full", stage)
            # A fill of lap n needs n emptyings; a read of lap n needs n + 1 fillings.
            wanted = lap if filling else lap + 1
            if (barrier.completed - wanted + op.flip) % 2:
                if op.side == "take awaited":
                    raise self.fault(f"warp {warp.number} passes {_text(op)}, which is not filled")
                return False
            if barrier.completed != wanted:
                raise self.fault(
                    f"phase error: warp {warp.number} passes {_text(op)} at stage {stage}, "
                    f"lap {lap}, after {barrier.completed} phases where {wanted} were to be over"
                )
            _join(warp.clock, barrier.done)
        if peeks:
            warp.slots[op.slot] = (ring, stage, lap)
            return True
        filled = self.filled.setdefault((ring, turn), warp.tile)
        apart = filled - warp.tile
        if apart and not (table.early and (apart == -1 or (filling and apart == 1))):
            raise self.fault(
                f"phase error: warp {warp.number} takes at tile {warp.tile} what ring "
                f"{op.ring!r} was filled with for tile {filled}"
            )
        warp.slots[op.slot] = (ring, stage, lap)
        warp.laps[(ring, side)] = turn + 1
        return True

    def arrived(self, who: tuple, barrier: _Mbarrier, slot: tuple, clock: Mapping) -> None:
        """One arrival for a slot, which has to be of the lap that the barrier is in.

        ``who``: the warp, and the CTA whose barrier it is.
        """
        warp, cta = who
        if all(other.next is None for other in self.warps if other.cta == cta):
            raise self.fault(
                f"warp {warp.number} arrives at a barrier of CTA {cta}, which has ended"
            )
        if barrier.completed != slot[2]:
            raise self.fault(
                f"phase error: warp {warp.number} arrives for ring {slot[0][0]!r} stage {slot[1]} "
                f"lap {slot[2]}, but {barrier.completed} laps are over"
            )
        barrier.arrived += 1
        _join(barrier.clock, clock)
        barrier.settle()

    def arrive(self, warp: _Warp, op: Arrive) -> bool:
        slot = warp.slots[op.slot]
        table = self.rings[slot[0][0]]
        if op.side == "empty" and not table.freed:
            return True
        ctas = (warp.cta,)
        if table.paired:
            ctas = range(self.program.ctas) if op.commit else (0,)
        if op.side == "full" and table.tx_bytes and not op.writes:
            if warp.cta not in ctas:
                return True  # the first CTA announces what the copies of both bring
            self.mbarrier(warp.cta, slot[0], "full", slot[1]).bytes += table.tx_bytes * (
                self.program.ctas if table.paired else 1
            )
        for cta in ctas:
            barrier = self.mbarrier(cta, slot[0], op.side, slot[1])
            if op.commit:
                clock = {**warp.clock, ("mma", warp.number): warp.products}
                self.pending.append(("commit", (warp, cta), barrier, slot, clock))
            else:
                self.arrived((warp, cta), barrier, slot, dict(warp.clock))
        return True

    def copy(self, warp: _Warp, op: Copy) -> bool:
        slot = warp.slots[op.slot]
        unit, at = ("tma", warp.cta, slot[0], slot[1], op.to.name), slot[2] + 1
        self.access(warp, op.to, (unit, at), True, op)
        cta = 0 if self.rings[slot[0][0]].paired else warp.cta
        barrier = self.mbarrier(cta, slot[0], "full", slot[1])
        self.pending.append(("copy", op.bytes, barrier, unit, at))
        return True

    def complete(self, which: int) -> None:
        """One of the things under way is done."""
        kind, *rest = self.pending.pop(which)
        if kind == "commit":
            self.arrived(*rest)
            return
        count, barrier, unit, at = rest
        barrier.bytes -= count
        _join(barrier.clock, {unit: at})
        barrier.settle()

    def finish(self) -> None:
        """All that was filled was taken."""
        for (ring, turn), tile in self.filled.items():
            takers = [w.laps[(ring, "take")] for w in self.warps if (ring, "take") in w.laps]
            if not takers or turn >= min(takers):
                raise self.fault(
                    f"phase error: ring {ring[0]!r} was filled for tile {tile} and never taken"
                )

    def touch(self, warp: _Warp, op: Touch) -> bool:
        unit = (op.via, warp.number) if op.via else warp.number
        self.access(warp, op.range, (unit, warp.clock[warp.number]), op.write, op)
        return True

    def product(self, warp: _Warp, op: Product) -> bool:
        warp.products += 1
        unit = ("mma", warp.number)
        for part in op.reads:
            if warp.holds(part.begin):
                self.access(warp, part, (unit, warp.products), False, op)
        for part in op.writes:
            self.access(warp, part, (unit, warp.products), True, op)
        return True

    def group(self, warp: _Warp, op: Group) -> bool:
        if op.pending is None:
            warp.groups.append(warp.products)
        elif len(warp.groups) > op.pending:
            done = warp.groups[len(warp.groups) - op.pending - 1]
            warp.groups = warp.groups[len(warp.groups) - op.pending :]
            _join(warp.clock, {("mma", warp.number): done})
        return True

    def settle(self, warp: _Warp, op: Settle) -> bool:
        if op.what == "fence":
            for fenced in warp.unfenced:
                fenced[0] = True
            warp.unfenced = []
        elif op.what == "entered":
            warp.entered = dict(warp.clock)
        else:
            _join(warp.clock, {(op.what, warp.number): warp.clock[warp.number]})
        return True

    def barrier(self, warp: _Warp, op: Barrier) -> bool:
        number = warp.value(op.id)
        barrier = self.named.setdefault((number, number != CLUSTER and warp.cta), _Named())
        if warp.joined is None:
            _join(barrier.clock, warp.clock)
            warp.joined = barrier.generation
            barrier.arrived += 1
            if barrier.arrived == op.threads // WARP:
                barrier.arrived, barrier.generation = 0, barrier.generation + 1
                barrier.done, barrier.clock = barrier.clock, {}
        if op.waits and warp.joined == barrier.generation:
            return False
        if op.waits:
            _join(warp.clock, barrier.done)
        warp.joined = None
        return True

    def access(self, warp: _Warp, part: Range, when: tuple, write: bool, op: Any) -> None:
        """``when``: the unit that does it, and its time; ordered after all that the warp knows."""
        if part.space == "registers":
            self.access_in((part.space, warp.number), warp, part, when, (write, op))
            return
        # A product of a pair is of both CTAs' memory.
        ctas = range(self.program.ctas) if isinstance(op, Product) else (warp.cta,)
        # A warp's threads reach the lanes of its quarter, a product all of them.
        quarters = (warp.number % 4,) if isinstance(op, Touch) else range(4)
        quarters = quarters if part.space == "tensor" else (None,)
        for cta, quarter in itertools.product(ctas, quarters):
            self.access_in((part.space, cta, quarter), warp, part, when, (write, op))

    def access_in(self, space: Any, warp: _Warp, part: Range, when: tuple, what: tuple) -> None:
        """The access ``what`` (is a write, operation) in one of the spaces that do not overlap."""
        (unit, at), (write, op) = when, what
        begin = warp.value(part.begin)
        cells, key = self.memory.setdefault(space, {}), (begin, begin + part.size)
        here = cells.setdefault(key, _Cell(*key))
        near = [c for c in cells.values() if c.begin < key[1] and key[0] < c.end]
        asynchronous = isinstance(unit, tuple) and unit[0] == "mma" and part.space == "shared"

        def before(other: Any, access: _Access) -> bool:
            foreign = (other[1] if isinstance(other, tuple) else other) != warp.number
            known = warp.entered if part.space == "tensor" and foreign else warp.clock
            return other == unit or known.get(other, 0) >= access.at

        for cell in near:
            for other, access in cell.writes.items():
                # Threads that write at the same place in the program write parts of their own.
                together = write and access.op is op and not isinstance(op, Copy)
                if not together and not before(other, access):
                    raise self.race(warp, op, part, "write", other, access.op)
                if asynchronous and not write and access.fenced == [False]:
                    raise self.fault(
                        f"missing fence: {_text(op)} of warp {warp.number} reads {part.name} by "
                        f"the async proxy; warp {other} wrote it and has no proxy fence since"
                    )
            for other, access in cell.reads.items() if write else ():
                if not before(other, access):
                    raise self.race(warp, op, part, "read", other, access.op)
                if self.refills(warp, op) and access.fenced == [False]:
                    raise self.fault(
                        f"missing fence: {_text(op)} of warp {warp.number} fills {part.name} by "
                        f"the async proxy; warp {other} read it and has no proxy fence since"
                    )
        if not write and not any(cell.writes for cell in near):
            raise self.fault(f"warp {warp.number} reads {part.name} before any write: {_text(op)}")
        self.note(warp, here, near, (unit, at, op), write)

    def refills(self, warp: _Warp, op: Any) -> bool:
        """Whether ``op`` copies into a ring whose slots lanes read."""
        return isinstance(op, Copy) and self.rings[warp.slots[op.slot][0][0]].by_lanes

    def note(self, warp: _Warp, here: _Cell, near: list, what: tuple, write: bool) -> None:
        """Remember an access; a write ends what it covers."""
        unit, at, op = what
        fenced = None
        if unit == warp.number:
            fenced = [False]
            warp.unfenced.append(fenced)
        if not write:
            here.reads[unit] = _Access(at, op, fenced)
            return
        for cell in near:
            if here.begin <= cell.begin and cell.end <= here.end:
                cell.reads = {}
                cell.writes = {u: a for u, a in cell.writes.items() if a.op is op and u != unit}
        here.writes[unit] = _Access(at, op, fenced)

    def race(self, warp: _Warp, op: Any, part: Range, kind: str, other: Any, first: Any) -> Fault:
        verb = "reads" if isinstance(op, Product) and part in op.reads else "accesses"
        return self.fault(
            f"unordered access: {_text(op)} of warp {warp.number} {verb} {part.name} "
            f"[{warp.value(part.begin)}, +{part.size}) and nothing orders it after the {kind} by "
            f"{other}: {_text(first)}"
        )


_DO = {
    Wait: _Run.wait,
    Arrive: _Run.arrive,
    Copy: _Run.copy,
    Touch: _Run.touch,
    Product: _Run.product,
    Group: _Run.group,
    Settle: _Run.settle,
    Barrier: _Run.barrier,
}


class Schedule(NamedTuple):
    """Who goes first: ``order`` ranks warps (None: at random); ``late``: completions come last."""

    order: tuple[int, ...] | None
    late: bool | None
    seed: int


def run(program: Program, scenario: Scenario, schedule: Schedule) -> int:
    """Walk the program once; gives the number of steps, and raises ``Fault``."""
    state, rng = _Run(program, scenario, schedule.seed), random.Random(schedule.seed)
    order = list(schedule.order or range(program.warps))
    steps = 0
    while True:
        if schedule.order is None:
            rng.shuffle(order)
        steps += 1
        early = schedule.late is False or (schedule.late is None and rng.random() < 0.5)
        if early and state.pending:
            state.complete(_due(state.pending, rng))
        elif any(state.warps[w].next is not None and state.step(state.warps[w]) for w in order):
            continue
        elif state.pending:
            state.complete(_due(state.pending, rng))
        elif all(warp.next is None for warp in state.warps):
            state.finish()
            return steps
        else:
            waiting = [
                f"  warp {w.number} at tile {w.tile}: {_text(w.next)}"
                for w in state.warps
                if w.next
            ]
            raise state.fault("deadlock: every warp waits\n" + "\n".join(waiting))


def _due(pending: list, rng: random.Random) -> int:
    """One of the pending: any copy; of the commits of a warp the first."""
    which = rng.randrange(len(pending))
    if pending[which][0] == "commit":
        who = pending[which][1]
        return next(i for i, p in enumerate(pending) if p[0] == "commit" and p[1] == who)
    return which


def schedules(warps: int, count: int) -> Iterable[Schedule]:
    """``count`` of them: each warp (quarters of warpgroups together) ahead, behind, and random."""
    everyone = tuple(range(warps))
    firsts = [everyone, everyone[::-1]]
    for group in range(0, warps, 4):
        mine = everyone[group : group + 4]
        rest = tuple(w for w in everyone if w not in mine)
        firsts += [mine + rest, rest + mine]
    for i in range(count):
        late = (True, False, None)[i % 3]
        order = firsts[i // 3] if i // 3 < len(firsts) and i % 3 < 2 else None
        yield Schedule(order, late, i)


def check(program: Program, scenarios: Sequence[Scenario], count: int) -> int:
    """Run ``count`` schedules, the scenarios in turn; gives all steps, raises ``Fault``."""
    return sum(
        run(program, scenarios[i % len(scenarios)], schedule)
        for i, schedule in enumerate(schedules(program.warps, count))
    )
