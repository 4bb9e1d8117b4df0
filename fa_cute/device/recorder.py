"""What the verbs of a kernel do, recorded while it is traced: the ``Program`` for ``protocol``.

For the time of a trace, ``recording`` wraps the verbs (rings, copies, products, named barriers,
fences, tensor memory) and the accesses of tensors: each notes itself and does what it always does.
Nothing is left in a kernel that is not being recorded. A loop's body is traced once, so the record
has the tree that the checker walks: each note lies in the dynamic loops and branches that the trace
is in. Bounds and conditions become expressions of what has a name (the fields of what the kernel's
``named`` methods return, words of a message) and of the thread's number; anything else is free, and
listed in ``unknown``.

Which buffer and which slot an access means is found from the values that its address was made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, is_dataclass
from typing import Any, NamedTuple
from unittest import mock

import cutlass
import cutlass.cute as cute
from cutlass._mlir import ir
from cutlass.cute import tensor as tensors
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

from fa_cute.device import bulk, loads, operand, protocol, wgmma
from fa_cute.device.mma_sm90 import Pieces
from fa_cute.device.protocol import Arrive, Barrier, Copy, Group, Product, Range, Settle, Touch
from fa_cute.device.ring import Ring, Slot
from fa_cute.device.topology import WARPGROUP, Topology
from fa_cute.device.values import begun, carried, counting_of, inside, plain

BINARY = {
    "arith.addi": "+",
    "arith.subi": "-",
    "arith.muli": "*",
    "arith.divsi": "//",
    "arith.floordivsi": "//",
    "arith.divui": "//",
    "arith.shrsi": ">>",
    "arith.remsi": "%",
    "arith.remui": "%",
    "arith.andi": "&",
    "arith.ori": "|",
    "arith.xori": "^",
    "arith.minsi": "min",
    "arith.maxsi": "max",
}
COMPARED = ("==", "!=", "<", "<=", ">", ">=", "<", "<=", ">", ">=")
THROUGH = (
    "arith.extsi",
    "arith.extui",
    "arith.trunci",
    "arith.index_cast",
    "cute_nvgpu.arch.make_warp_uniform",
)
# Blocks are one-dimensional; the checker follows lane 0, which is the one that is elected.
CONSTANT = {
    "nvvm.elect.sync": 1,
    "nvvm.read.ptx.sreg.laneid": 0,
    "nvvm.read.ptx.sreg.tid.y": 0,
    "nvvm.read.ptx.sreg.tid.z": 0,
    "nvvm.read.ptx.sreg.ntid.x": 0,  # only ever times the two above
    "nvvm.read.ptx.sreg.ntid.y": 0,
}
NUMBER = {"nvvm.read.ptx.sreg.tid.x": "tid", "nvvm.read.ptx.sreg.cluster.ctarank": "rank"}
NEXT = ("next",)  # whether there is a tile after this one
FRAGMENTS = ("cute.memref.alloca", "cute.mma.make_fragment")
DEPTH = 60  # values between an access and its buffer


class Traced(Exception):
    """The trace is complete: nothing is compiled."""


class Buffer(NamedTuple):
    """A named part of shared memory."""

    name: str
    begin: int
    bytes: int


class Held(NamedTuple):
    """A slot while tracing: its number in the record, its ring, and which of the ring's copies.

    ``fixed``: its index is a constant, as before the first loop.
    """

    number: int
    ring: Ring
    copy: Any
    fixed: bool


@dataclass
class _Node:
    """A dynamic loop or branch: its parts by region, in the order of the trace."""

    owner: Any
    parts: dict[int, list] = field(default_factory=dict)


@dataclass
class Recorder:
    """The record of one trace; ``program`` is its result."""

    topology: Topology
    messages: Mapping[tuple[str, int], str]
    private: Mapping[str, str]
    root: list = field(default_factory=list)
    nodes: dict[int, _Node] = field(default_factory=dict)
    names: dict[int, Any] = field(default_factory=dict)
    buffers: dict[int, Buffer] = field(default_factory=dict)
    slots: dict[int, Held] = field(default_factory=dict)
    fragments: dict[int, int] = field(default_factory=dict)
    found: dict[int, tuple] = field(default_factory=dict)
    operands: set[int] = field(default_factory=set)
    copies: dict[int, Any] = field(default_factory=dict)  # by a ring's first barrier
    latest: dict[str, Held] = field(default_factory=dict)  # by a ring's name
    filling: list[Held] = field(default_factory=list)
    recent: set = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)
    count: int = 0
    program: protocol.Program | None = None

    # The tree.

    def add(self, op: Any) -> None:
        """Note an operation where the trace is now."""
        items, path = self.root, self.path()
        if isinstance(op, Touch | Product):  # of many elements, of many steps: once
            key = (op, tuple(hash(block) for _, block in path))
            if key in self.recent:
                return
            self.recent.add(key)
        else:
            self.recent.clear()
        for owner, block in path:
            blocks = [region.blocks[0] for region in owner.regions if len(region.blocks)]
            key = hash(blocks[0])  # two loops with the same bounds and no results have one hash
            if key not in self.nodes:
                self.nodes[key] = _Node(owner)
                items.append(self.nodes[key])
            part = next(i for i, other in enumerate(blocks) if other == block)
            items = self.nodes[key].parts.setdefault(part, [])
        items.append(op)

    def path(self) -> list[tuple[Any, Any]]:
        """The (operation, block) of the dynamic loops and branches around the trace."""
        return list(inside(ir.InsertionPoint.current.block))[::-1]

    def finished(self) -> protocol.Program:
        """What was recorded, as the checker walks it."""
        rings = {}
        for ring in self.topology.rings:
            empties = ring.empties
            if ring.freed and empties is None:
                empties = 4 * self.topology.role(ring.consumer).warpgroups
            rings[ring.name] = protocol.RingTable(
                ring.stages,
                ring.tx_bytes,
                ring.fills,
                empties or 0,
                ring.freed,
                ring.paired,
                ring.by_lanes,
                ring.early,
            )
        body, ctas = self.freeze(self.root), self.topology.ctas
        return protocol.Program(body, rings, ctas * self.topology.threads // protocol.WARP, ctas)

    def freeze(self, items: Sequence) -> tuple:
        """The tree without accesses of registers that no product has."""
        frozen: list[Any] = []
        for item in items:
            if isinstance(item, _Node):
                parts = {i: self.freeze(part) for i, part in item.parts.items()}
                if any(parts.values()):
                    frozen.append(self.dynamic(item.owner, parts))
            elif not isinstance(item, Touch) or self.shared(item.range):
                frozen.append(item)
        return tuple(frozen)

    def shared(self, part: Range) -> bool:
        return part.space != "registers" or part.begin in self.operands

    def dynamic(self, owner: Any, parts: dict[int, tuple]) -> Any:
        if owner.name == "scf.if":
            condition = self.expression(owner.operands[0])
            return protocol.Branch(condition, parts.get(0, ()), parts.get(1, ()))
        if owner.name == "scf.while":
            assert list(parts) == [1], "a verb in the condition of a loop"
            return protocol.Loop(0, parts[1], tiles=True)
        low, high = (self.expression(owner.operands[i]) for i in range(2))
        return protocol.Loop(("max", ("-", high, low), 0), parts[0])

    # Values.

    def name(self, value: Any, name: Any) -> None:
        """Give a value of the trace a name, unless it has one."""
        if not isinstance(plain(value), int):
            self.names.setdefault(hash(plain(value)), name)

    def expression(self, value: Any) -> Any:
        """A value as an expression of what has a name."""
        value = plain(value)
        if isinstance(value, int):
            return int(value)
        if hash(value) in self.slots:
            return ("slot", self.slots[hash(value)].number)
        if hash(value) in self.names:
            return self.names[hash(value)]
        owner = getattr(value.owner, "operation", value.owner)
        kind = getattr(owner, "name", "an argument")
        if kind == "an argument" and (counting := counting_of(value)) is not None:
            loop, depth = counting
            return folded("+", self.expression(loop.operands[0]), ("turn", depth))
        if kind == "an argument" and hash(first := begun(value)) in self.names:
            return self.names[hash(first)]  # a loop over tiles carries it: of each, what it is
        if kind == "arith.constant":
            return int(ir.IntegerAttr(owner.attributes["value"]).value)
        if kind in BINARY:
            return folded(BINARY[kind], *map(self.expression, owner.operands))
        if kind == "arith.cmpi" and self.names.get(hash(plain(owner.operands[0]))) == NEXT:
            return NEXT  # a tile that was drawn, beside how many there are
        if kind == "arith.cmpi":
            compared = COMPARED[ir.IntegerAttr(owner.attributes["predicate"]).value]
            return folded(compared, *map(self.expression, owner.operands))
        if kind == "arith.select":
            return ("select", *(self.expression(one) for one in owner.operands))
        if kind in CONSTANT:
            return CONSTANT[kind]
        if kind == "scf.if":
            return self.merged(owner, ir.OpResult(value).result_number)
        if kind in NUMBER:
            return (NUMBER[kind],)
        if kind == "nvvm.shfl.sync":
            return self.expression(owner.operands[1])
        if kind in THROUGH:
            return self.expression(owner.operands[0])
        self.unknown.append(kind)
        return ("free", (kind, hash(value)))

    def merged(self, owner: Any, number: int) -> Any:
        """A value that a branch, which is complete, hands on: one side's or the other's."""
        ends = [list(region.blocks[0].operations)[-1] for region in owner.regions]
        then, other = (self.expression(end.operands[number]) for end in ends)
        if then == other:
            return then
        return ("select", self.expression(owner.operands[0]), then, other)

    def origins(self, value: Any) -> tuple[tuple[Buffer, ...], tuple[Held, ...], int | None]:
        """What an address was made of: buffers, slots, and the register fragment, if any."""
        value = plain(value)
        if hash(value) in self.found:
            return self.found[hash(value)]
        buffers, slots, fragment = [], [], None
        todo, seen = [(value, 0)], set()
        while todo:
            at, depth = todo.pop()
            if hash(at) in seen or depth > DEPTH:
                continue
            seen.add(hash(at))
            if hash(at) in self.buffers:
                buffers.append(self.buffers[hash(at)])
                continue
            if hash(at) in self.slots:
                slots.append(self.slots[hash(at)])
                continue
            if (first := carried(at)) is not None:
                todo.append((first, depth + 1))
                continue
            owner = getattr(at.owner, "operation", at.owner)
            if getattr(owner, "name", "") in FRAGMENTS and "rmem" in str(at.type):
                fragment = self.fragments.setdefault(hash(at), len(self.fragments))
            # What memory says is no address, nor what all that a loop carries goes into.
            if not getattr(owner, "name", "").endswith(("load", "scf.for", "scf.while")):
                todo += [(plain(o), depth + 1) for o in getattr(owner, "operands", ())]
        self.found[hash(value)] = tuple(buffers), tuple(slots), fragment
        return self.found[hash(value)]

    def range_of(self, value: Any, at: Any = ()) -> Range | None:
        """The bytes of shared memory, or the fragment, that a tensor lies in; None: neither.

        ``at``: coordinates of an element; one that is a slot's index says which slot.
        """
        buffers, slots, fragment = self.origins(value)
        coordinates = at if isinstance(at, tuple) else (at,)
        known = (hash(plain(c)) for c in coordinates if isinstance(c, cutlass.Int32))
        slots += tuple(self.slots[key] for key in known if key in self.slots)
        if fragment is not None:
            return Range("registers", fragment, 1, f"fragment {fragment}")
        if not buffers:
            return None
        buffer = buffers[0]
        assert len(set(buffers)) == 1 and len(slots) <= 1, f"{buffers} {slots}: which of them?"
        if buffer.name in self.private:
            role = self.private[buffer.name]
            size = buffer.bytes // self.topology.role(role).warpgroups
            mine = ("-", ("//", ("tid",), WARPGROUP), self.topology.first_warpgroup(role))
            return Range("shared", ("+", buffer.begin, ("*", mine, size)), size, buffer.name)
        held = slots[0] if slots else self.latest.get(buffer.name)
        if held is None or not (slots or held.fixed or held.ring.spec.copies):
            return Range("shared", buffer.begin, buffer.bytes, buffer.name)
        stages = held.ring.spec.stages
        size = buffer.bytes // (stages * (held.ring.spec.copies or 1))
        number = folded("+", ("slot", held.number), folded("*", held.copy, stages))
        place = folded("+", buffer.begin, ("*", number, size))
        return Range("shared", place, size, buffer.name)

    # What the verbs note.

    def hold(self, ring: Ring) -> Held:
        """A new slot of a ring, known by its index from here on."""
        index = plain(ring.index)
        copy = self.copies.get(hash(plain(ring.barriers[0])), 0)
        held = Held(self.count, ring, copy, isinstance(index, int))
        self.count += 1
        self.latest[ring.spec.name] = held
        if not isinstance(index, int):
            self.slots[hash(index)] = held
        return held

    def touch(self, tensor: Any, write: bool, at: Any = ()) -> None:
        """A plain access through a tensor."""
        part = self.range_of(tensor.value, at)
        if part is not None:
            self.add(Touch(part, write))

    def product(self, acc: Any, *sources: Any) -> None:
        """``acc = a b``, or a bulk copy (``acc`` is None): issued and not awaited."""
        reads = tuple(filter(None, map(self.range_of, sources)))
        writes = tuple(filter(None, [acc is not None and self.range_of(acc)]))
        self.operands |= {r.begin for r in (*reads, *writes) if r.space == "registers"}
        self.add(Product(reads, writes))

    def copy(self, source: Any, target: Any, barrier: Any) -> None:
        """A copy: TMA's where there is a barrier, else by the threads."""
        if barrier is None:
            self.touch(source, False)
            self.touch(target, True)
            return
        part = self.range_of(target.value)
        size = cute.size(target) * target.element_type.width // 8
        self.add(Copy(self.filling[-1].number, part, size))


def folded(operation: str, a: Any, b: Any) -> Any:
    """An expression of two, or the number that it is."""
    if isinstance(a, int) and isinstance(b, int):
        return int(protocol.OPERATORS[operation](a, b))
    if operation == "+" and 0 in (a, b):
        return b if a == 0 else a
    return (operation, a, b)


def wrapped(original: Callable, before: Callable) -> Callable:
    """``original``, which first has ``before`` note it."""

    def verb(*args: Any, **options: Any) -> Any:
        before(*args, **options)
        return original(*args, **options)

    return verb


def _ring_verbs(record: Recorder) -> Iterator[tuple[Any, str, Callable]]:
    fill, take, release = Ring.fill, Ring.take, Slot.release
    peek, drawn = Ring.await_next, loads.draw
    held: dict[int, Held] = {}
    kept: list[Slot] = []  # so that no other object takes their place

    @contextmanager
    def recorded_fill(ring: Ring, *args: Any, **options: Any) -> Iterator[Slot]:
        mine = record.hold(ring)
        record.add(protocol.Wait(ring.spec.name, "fill", mine.number, mine.copy))
        record.filling.append(mine)
        with fill(ring, *args, **options) as slot:
            if ring.spec.tx_bytes:
                record.add(Arrive(mine.number, "full"))
            yield slot
        record.filling.remove(mine)
        if not ring.spec.tx_bytes:
            commits = any(map(callable, (*args, *options.values())))
            record.add(Arrive(mine.number, "full", commits, not commits))

    def recorded_take(ring: Ring, *, awaited: bool = False) -> Slot:
        mine = record.hold(ring)
        side = "take awaited" if awaited else "take"
        record.add(protocol.Wait(ring.spec.name, side, mine.number, mine.copy))
        slot = take(ring, awaited=awaited)
        held[id(slot)] = mine
        kept.append(slot)
        return slot

    def recorded_peek(ring: Ring, there: Any, filled: Any = None) -> Any:
        mine = record.hold(ring)
        # Before the first loop it is asked of the CTA's first tile, which there is.
        looping = any(owner.name != "scf.if" for owner, _ in record.path())
        where = record.expression(there) if looping else 1
        record.add(protocol.Wait(ring.spec.name, "peek", mine.number, mine.copy, there=where))
        return peek(ring, there, filled)

    def recorded_draw(*args: Any) -> Any:
        tile = drawn(*args)
        record.name(tile, NEXT)
        return tile

    def recorded_release(slot: Slot, *commit: Any) -> None:
        release(slot, *commit)  # which may fence before it arrives
        record.add(Arrive(held[id(slot)].number, "empty", bool(commit)))

    yield Ring, "fill", recorded_fill
    yield Ring, "take", recorded_take
    yield Slot, "release", recorded_release
    yield Ring, "await_next", recorded_peek
    yield loads, "draw", recorded_draw


def _arch_verbs(record: Recorder) -> Iterator[tuple[Any, str, Callable]]:
    arch, threads = cute.arch, record.topology.threads
    everyone = threads * record.topology.ctas

    def named(waits: bool) -> Callable:
        def note(*, barrier_id: Any, number_of_threads: int) -> None:
            record.add(Barrier(record.expression(barrier_id), number_of_threads, waits))

        return note

    notes = {
        "barrier": named(True),
        "barrier_arrive": named(False),
        "sync_threads": lambda: record.add(Barrier(0, threads)),
        "cluster_wait": lambda: record.add(Barrier(protocol.CLUSTER, everyone)),
        "fence_proxy": lambda *a, **o: record.add(Settle("fence")),
    }
    for name, note in notes.items():
        yield arch, name, wrapped(getattr(arch, name), note)
    yield warpgroup, "commit_group", wrapped(warpgroup.commit_group, lambda: record.add(Group()))
    yield (
        warpgroup,
        "wait_group",
        wrapped(warpgroup.wait_group, lambda pending: record.add(Group(pending))),
    )


def _tensor_verbs(record: Recorder) -> Iterator[tuple[Any, str, Callable]]:
    kind = tensors._Tensor
    get, allocate = kind.__getitem__, cutlass.memory.SmemAllocator.allocate

    def copied(atom: Any, source: Any, target: Any, **options: Any) -> None:
        record.copy(source, target, options.get("tma_bar_ptr", options.get("mbar_ptr")))

    def vectors(source: Any, target: Any, **options: Any) -> None:
        record.copy(source, target, None)

    def multiplied(atom: Any, d: Any, a: Any, b: Any, c: Any, **options: Any) -> None:
        record.product(d.value, a.value, b.value)

    def issued(mma: Any, acc: Any, a: Any, b: Any, **options: Any) -> None:
        record.product(acc.value, a.value, b.value)

    def added(source: Any, target: Any, **options: Any) -> None:
        record.product(None, source.value)
        record.add(Group())
        record.add(Group(0))

    def got(tensor: Any, at: Any, **options: Any) -> Any:
        found = get(tensor, at, **options)
        if not isinstance(found, kind):
            record.touch(tensor, False, at)
            buffers = record.origins(tensor.value)[0]
            row = at[0] if isinstance(at, tuple) else at
            if buffers and isinstance(row, int) and (buffers[0].name, row) in record.messages:
                record.name(found, record.messages[buffers[0].name, row])
        return found

    def allocated(allocator: Any, size: Any, *args: Any, **options: Any) -> Any:
        storage = allocate(allocator, size, *args, **options)
        for name, begin in getattr(size, "_offsets", {}).items():
            member = getattr(storage, name)
            place = Buffer(name, begin, member._size * member._dtype.width // 8)
            record.buffers[hash(plain(member._base))] = place
        return storage

    yield cute, "copy", wrapped(cute.copy, copied)
    yield operand, "issue", wrapped(operand.issue, lambda _, *a: record.copy(*a))
    yield cute, "autovec_copy", wrapped(cute.autovec_copy, vectors)
    yield cute, "gemm", wrapped(cute.gemm, multiplied)
    yield wgmma, "issue", wrapped(wgmma.issue, issued)
    yield bulk, "add", wrapped(bulk.add, added)
    yield kind, "__getitem__", got
    yield (
        kind,
        "__setitem__",
        wrapped(kind.__setitem__, lambda tensor, at, *a, **o: record.touch(tensor, True, at)),
    )
    for name, write in (("store", True), ("fill", True), ("load", False)):
        yield kind, name, wrapped(getattr(kind, name), _noting(record, write))
    for name, write in (("store", True), ("load", False)):
        yield Pieces, name, wrapped(getattr(Pieces, name), _noting_pieces(record, write))
    yield cutlass.memory.SmemAllocator, "allocate", allocated


def _noting(record: Recorder, write: bool) -> Callable:
    return lambda tensor, *a, **o: record.touch(tensor, write)


def _noting_pieces(record: Recorder, write: bool) -> Callable:
    return lambda pieces, *a: record.touch(pieces.fragment, write)


@contextmanager
def recording(
    kernel: Any,
    named: Sequence[str] = ("spans",),
    messages: Mapping[tuple[str, int], str] | None = None,
    private: Mapping[str, str] | None = None,
    more: Sequence[Callable[[Recorder], Iterator]] = (),
) -> Iterator[Recorder]:
    """Record the trace of ``kernel`` inside the block, which ends where compiling would begin.

    ``named``: methods of its walk, or its own, whose result has fields that name the lengths of
    loops. ``messages``: (buffer, word) whose value, where it is read, has this name. ``private``:
    buffers of which each warpgroup of a role has an equal part. ``more``: further verbs to wrap.
    """
    record = Recorder(kernel.topology, messages or {}, private or {})

    def stop(*args: Any, **options: Any) -> None:
        record.program = record.finished()  # now: the trace's values end with it
        raise Traced

    def naming(method: Callable) -> Callable:
        def verb(*args: Any) -> Any:
            found = method(*args)
            for name in getattr(found, "_fields", None) or vars(found):
                value = getattr(found, name)
                if not isinstance(value, tuple) and not is_dataclass(value) and value is not None:
                    record.name(value, name)
            return found

        return verb

    with ExitStack() as stack:
        for verbs in (_ring_verbs, _arch_verbs, _tensor_verbs, *more):
            for owner, name, verb in verbs(record):
                stack.enter_context(mock.patch.object(owner, name, verb))
        owner = type(getattr(kernel, "walk", kernel))
        for name in named:
            stack.enter_context(mock.patch.object(owner, name, naming(getattr(owner, name))))
        stack.enter_context(mock.patch.object(CutlassBaseDSL, "compile_and_cache", stop))
        try:
            yield record
        except Traced:
            return
    raise AssertionError("nothing was traced")
