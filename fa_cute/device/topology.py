"""A kernel's two tables, and all that follows from them.

A kernel states its warps (``Role``) and its staged buffers (``RingSpec``) as data. From the tables
come the thread count, the register budget, the mbarriers in shared memory, their initial counts,
the rings of each side, and the diagram in the docs. Budgets are checked here, with the sum in the
message, because a plan that does not fit must not become a launch error.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute

from fa_cute.device.ring import Ring
from fa_cute.plan import SHARED_MEMORY_LIMIT, register_pool

WARPGROUP = 128


@dataclass(frozen=True)
class Role:
    """One duty: ``warpgroups`` whole warpgroups with ``registers`` a thread; ``active`` warps work.

    ``setmaxnreg`` is executed by all four warps of a warpgroup, idle ones too, so registers belong
    to warpgroups and a role covers whole ones.
    """

    name: str
    warpgroups: int
    registers: int
    active: int
    duty: str


@dataclass(frozen=True)
class RingSpec:
    """A staged buffer: TMA fills ``tx_bytes`` a stage (0: the producer warp writes it itself).

    ``fills`` arrivals fill a slot, one a producer warp, and ``empties`` empty it (None: one a warp
    of the consumer's role). ``freed``: False where the slot needs no barrier to be filled again.
    ``copies``: this many rings of one kind, side by side (0: a single ring).
    ``early``: a tile's first slot is filled while the tile before it is at work.
    ``paired``: the two CTAs of a pair share it. Threads of both arrive, and copies of both tell
    their bytes, at the barriers of the first; a commit arrives at those of both.
    ``noted``: the producer leaves a word with each slot, which lanes of the consumers read.
    ``by_lanes``: lanes of the consumers read what TMA filled (wgmma reads it where this is False).
    """

    name: str
    stages: int
    tx_bytes: int
    producer: str
    consumer: str
    why: str
    noted: bool = False
    fills: int = 1
    empties: int | None = None
    freed: bool = True
    copies: int = 0
    by_lanes: bool = False
    paired: bool = False
    early: bool = False


@dataclass(frozen=True)
class Topology:
    """The two tables of one kernel; roles in their warpgroups' order. A pair has 2 ``ctas``."""

    roles: tuple[Role, ...]
    rings: tuple[RingSpec, ...]
    ctas: int = 1

    def __post_init__(self) -> None:
        need = sum(r.warpgroups * WARPGROUP * r.registers for r in self.roles)
        terms = " + ".join(f"{r.warpgroups * WARPGROUP}x{r.registers}" for r in self.roles)
        pool = register_pool(self.threads)
        assert need <= pool, (
            f"the roles need {terms} = {need} registers; {self.threads} threads are launched with "
            f"{pool}"
        )

    @property
    def threads(self) -> int:
        """Threads a CTA."""
        return WARPGROUP * sum(role.warpgroups for role in self.roles)

    def role(self, name: str) -> Role:
        """The role of that name."""
        return next(role for role in self.roles if role.name == name)

    def ring(self, name: str) -> RingSpec:
        """The ring of that name."""
        return next(ring for ring in self.rings if ring.name == name)

    def first_warpgroup(self, name: str) -> int:
        """The number of the role's first warpgroup."""
        names = [role.name for role in self.roles]
        return sum(role.warpgroups for role in self.roles[: names.index(name)])

    def storage(self, buffers: dict[str, tuple[type, int]], words: tuple[str, ...] = ()) -> Any:
        """The shared-memory struct: two mbarriers a stage, each buffer of ``(dtype, elements)``.

        Buffers begin on an atom of the widest swizzle, except ``words``, which nothing but threads
        reads and writes.
        """
        fields: dict[str, Any] = {
            f"bar_{ring.name}": cute.struct.MemRange[cutlass.Int64, self._words(ring)]
            for ring in self.rings
        }
        total = 8 * sum(map(self._words, self.rings))
        for name, (dtype, elements) in buffers.items():
            align = 16 if name in words else 1024
            memory = cute.struct.MemRange[dtype, elements]
            fields[name] = cute.struct.Align[memory, align]
            total = -(-total // align) * align + elements * dtype.width // 8
        assert total <= SHARED_MEMORY_LIMIT, (
            f"barriers and {', '.join(buffers)} need {total} bytes of shared memory; "
            f"a CTA may have {SHARED_MEMORY_LIMIT}"
        )
        return cute.struct(type("SharedStorage", (), {"__annotations__": fields}))

    def initialise(self, storage: Any) -> None:
        """Set the arrival counts; one warp calls it, before the CTA's first barrier."""
        with cute.arch.elect_one():
            for ring in self.rings:
                self._initialise(ring, storage)
        cute.arch.mbarrier_init_fence()

    def _initialise(self, ring: RingSpec, storage: Any) -> None:
        consumers = ring.freed and (ring.empties or 4 * self.role(ring.consumer).warpgroups)
        for copy in range(ring.copies or 1):
            full, empty = self._barriers(ring, storage, copy)
            for stage in range(ring.stages):
                cute.arch.mbarrier_init(full + stage, ring.fills)
                if ring.freed:
                    cute.arch.mbarrier_init(empty + stage, consumers)

    def rings_of(self, side: str, storage: Any) -> Any:
        """A NamedTuple of every ring, seen from ``side``: "producer" or "consumer"."""
        return self.rings_from(storage, **{ring.name: side for ring in self.rings})

    def rings_from(self, storage: Any, copy: Any = 0, **sides: str) -> Any:
        """A NamedTuple of the rings named, each seen from its side: "producer" or "consumer".

        Of a ring with copies: the one of number ``copy`` (a value of the kernel, too).
        """
        specs = {ring.name: ring for ring in self.rings}
        rings = [self._ring(specs[name], side, storage, copy) for name, side in sides.items()]
        return namedtuple("Rings", list(sides))(*rings)

    def _ring(self, ring: RingSpec, side: str, storage: Any, copy: Any) -> Any:
        barriers = self._barriers(ring, storage, copy if ring.copies else 0)
        return getattr(Ring, side)(ring, barriers)

    def _barriers(self, ring: RingSpec, storage: Any, copy: Any) -> tuple[Any, Any]:
        full = getattr(storage, f"bar_{ring.name}").data_ptr()
        if not isinstance(copy, int) or copy:
            full = full + copy * (2 * ring.stages)
        return full, full + ring.stages

    def _words(self, ring: RingSpec) -> int:
        return 2 * ring.stages * (ring.copies or 1)

    def diagram(self) -> str:
        """Roles and rings as text, for ``explain`` and the docs."""
        lines = [
            f"{role.name:<10} warps {4 * self.first_warpgroup(role.name)}.."
            f"{4 * (self.first_warpgroup(role.name) + role.warpgroups) - 1}, "
            f"{role.registers} registers: {role.duty}"
            for role in self.roles
        ]
        lines += [
            f"{ring.producer} -> {ring.name}[{ring.stages}] ({ring.tx_bytes} bytes) -> "
            f"{ring.consumer}: {ring.why}"
            for ring in self.rings
        ]
        return "\n".join(lines)
