"""The protocol of a kernel as data: what its warps do to barriers and buffers. Plain Python.

A ``Program`` is a tree that every warp walks: loops, branches and operations, with expressions
where a kernel has numbers. ``recorder`` makes one from a kernel's trace, ``checker`` walks it.

Buffers are ranges (bytes of shared memory, columns of tensor memory, a warp's own register
fragments), so that aliases collide.

A pair of CTAs walks one program: each has its own barriers and memory, and a product reads and
writes those of both.

Expressions: an int; a name, whose value the scenario gives by tile; ``("tid",)`` in the CTA;
``("rank",)``, which CTA of a pair; ``("slot", s)``, the stage that slot ``s`` has; ``("turn", d)``,
of the loop that has ``d`` round it; ``("free", key)``, decided at random, by warp and iteration;
``(operator, a, b)`` with Python's operators; ``("select", c, a, b)``.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Expr = Any
WARP = 32
CLUSTER = -1  # the barrier of all threads of a pair
OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "&": operator.and_,
    ">>": operator.rshift,
    "|": operator.or_,
    "^": operator.xor,
    "min": min,
    "max": max,
}


class Range(NamedTuple):
    """``size`` units of ``space`` ("shared", "tensor", "registers") from ``begin`` on."""

    space: str
    begin: Expr
    size: int
    name: str = ""


class Loop(NamedTuple):
    """``count`` times ``body``; ``tiles``: its iterations are the tiles of the scenario."""

    count: Expr
    body: tuple
    tiles: bool = False


class Branch(NamedTuple):
    """``then`` where the condition is not 0, else ``other``."""

    condition: Expr
    then: tuple
    other: tuple = ()


class Wait(NamedTuple):
    """Take the next slot of a ring, to fill it or (``side`` "take") to read it; name it ``slot``.

    "peek" waits for it and does not take it, where it is ``there``: the next tile's first, say.
    "take awaited" takes it without waiting: it is a fault if it is not filled.
    ``copy``: which of the ring's copies. ``flip``: 1 waits for the other phase (a seeded fault).
    """

    ring: str
    side: str
    slot: int
    copy: Expr = 0
    flip: int = 0
    there: Expr = 1


class Arrive(NamedTuple):
    """Arrive on the slot's "full" or "empty"; ``commit``: when this warp's products are done.

    On a full barrier the ring's bytes by TMA, if any, are announced too; not by a warp that
    ``writes`` to the slot beside TMA.
    """

    slot: int
    side: str
    commit: bool = False
    writes: bool = False


class Copy(NamedTuple):
    """TMA: write ``bytes`` to a range some time later, and tell the slot's full barrier."""

    slot: int
    to: Range
    bytes: int


class Touch(NamedTuple):
    """The warp's threads read or write (``write``) a range, each its own part of it.

    ``via``: "" for a plain access, or the unit that does it later: "load", "store".
    """

    range: Range
    write: bool
    via: str = ""


class Product(NamedTuple):
    """An MMA that is issued here and reads and writes until it is waited for."""

    reads: tuple[Range, ...]
    writes: tuple[Range, ...]


class Group(NamedTuple):
    """End a group of products (``pending`` None), or wait until only ``pending`` are under way."""

    pending: int | None = None


class Settle(NamedTuple):
    """Wait for this warp's "load" or "store" accesses; "fence": generic before async proxy.

    "entered": tensor memory is used after what the barriers that were waited for announced.
    """

    what: str


class Barrier(NamedTuple):
    """Named barrier: ``threads`` take part; ``waits`` False arrives only. ``CLUSTER``: a pair's."""

    id: Expr
    threads: int
    waits: bool = True


@dataclass(frozen=True)
class RingTable:
    """A ring's row: stages, bytes by TMA, arrivals that fill and empty a slot, whether it waits.

    ``paired``: arrivals of threads and bytes count in the first CTA, those of commits in both.
    ``by_lanes``: lanes of the consumers read what TMA filled. ``early``: a tile's first slot may be
    filled at the tile before.
    """

    stages: int
    tx_bytes: int
    fills: int
    empties: int
    freed: bool = True
    paired: bool = False
    by_lanes: bool = False
    early: bool = False


@dataclass(frozen=True)
class Program:
    """What ``warps`` warps walk, of ``ctas`` CTAs together, and the rings between them."""

    body: tuple
    rings: Mapping[str, RingTable]
    warps: int
    ctas: int = 1


class Scenario(NamedTuple):
    """The values of names, tile by tile."""

    tiles: tuple[Mapping[str, int], ...]
