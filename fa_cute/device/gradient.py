"""Gradients of captured tensors: what each load contributes, added up where its index allows it.

A contribution is d score x its factor, at the address that the load read. By the level of that
address, in a transposed fragment (rows are keys):

    tile      (a head, a scalar)  one register a thread over all blocks; then one add a warp
    row       (kv)                one register a row over all blocks; then one add a row
    column    (q)                 summed over the warp's rows, then one add a column
    others    (q - kv, elements)  where all addresses of a warp are one, as they are far from the
                                  diagonal of bucketed distances: one register a thread, for as
                                  many blocks as have that address; then one add a warp. Else
                                  q - kv: summed along the warp's diagonals, then one add for those
                                  in a row that have one address (``diagonals``, with shared
                                  memory); the rest one add an element

A short vector's contributions come component by component, each as above, but added after every
block: registers for all components would be too many.

An add is ``red.global.add.f32``: sums in fp32, in no fixed order. Where the targets are int64 it is
``fixed.add``, whose sums do not depend on the order; all that is added up before is in one order.
Addresses are clamped as loads are, and what is hidden or past the ends adds 0, so no add leaves its
tensor.

    collector = Collector.of(mod, targets)      # once a kernel
    collector.clear()                           # before the blocks of a head
    slopes = block.differentiate(s)             # each block: see ``score``
    collector.add(block, slopes, d_score)
    collector.flush(rows)                       # after them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm, scf

from fa_cute.device import diagonals, emit, fixed
from fa_cute.device.captured import Source
from fa_cute.device.fragment import Fragment
from fa_cute.device.lower import Schedule, schedule
from fa_cute.device.scope import Scope, Value
from fa_cute.device.score import Block, Modifier, Rows, Slopes
from fa_cute.mods.derived import Contribution, contributions, taught
from fa_cute.mods.graph import Graph

WARP, QUAD = 32, 4


def scratch_words(graph: Graph | None, fragment: Fragment) -> int:
    """32-bit words of shared memory with which a warpgroup adds up by diagonal; 0: nothing to."""
    if graph is None or not graph.more:
        return 0
    program = schedule(graph, fragment.transposed)
    levels = [_level(program, one) for one in contributions(program.lowered.graph)]
    return diagonals.words(fragment) if "diagonal" in levels else 0


class Run(NamedTuple):
    """Blocks in a row where a load has one address for all of a warp: what the thread adds up.

    ``indices`` (n,): the load's, those that are not the tile's (``args``). A sum of 0 may go to any
    address. An add a block instead had T5, causal, at 0.63 of plain: the last bucket's numbers of
    all heads lie in one line, and 10^6 adds to it took the time.
    """

    args: tuple[int, ...]
    indices: cute.Tensor
    total: cute.Tensor

    @staticmethod
    def of(args: Sequence[int]) -> Run:
        """For a load with those varying ``args``."""
        indices = cute.make_rmem_tensor(len(args), Int32)
        return Run(tuple(args), indices, cute.make_rmem_tensor(1, Float32))

    def begin(self, indices: Sequence[Int32 | int]) -> None:
        """Begin with a sum of 0."""
        for i, index in enumerate(indices):
            self.indices[i] = Int32(index)
        self.total[0] = Float32(0.0)

    def known(self) -> dict[int, Value]:
        """The nodes of its indices, as a scope knows them."""
        return {
            arg: Value("tile", (self.indices[i].ir_value(),)) for i, arg in enumerate(self.args)
        }


@dataclass(frozen=True)
class Collector:
    """A warpgroup's contributions. Build it with ``of``."""

    mod: Modifier
    targets: dict[int, Source]
    given: tuple[Contribution, ...]
    sums: tuple[cute.Tensor | None, ...]
    runs: dict[int, Run]
    fixed: bool
    scratch: Any = None

    @staticmethod
    def of(mod: Modifier, targets: Sequence[cute.Tensor] | None, scratch: Any = None) -> Collector:
        """``targets``: as ``plan.Extra.gradients``, for the captured tensors of ``taught``, in
        order; None: none. ``scratch`` points to ``scratch_words`` of the warpgroup, or is None."""
        graph = mod.schedule.lowered.graph
        given, targets = contributions(graph), list(targets or ())
        pairs = zip(taught(graph), targets, strict=True)
        fixed_point = any(target.element_type is Int64 for target in targets)
        dtype = "int64" if fixed_point else "float32"
        sources = {slot: Source.of(target, dtype) for slot, target in pairs}
        program, sizes = mod.schedule, {"tile": 1, "row": len(mod.fragment.rows)}
        levels = (_level(program, one) if _width(program, one) == 1 else None for one in given)
        sums = [
            cute.make_rmem_tensor(sizes[level], Float32) if level in sizes else None
            for level in levels
        ]
        runs = {
            at: Run.of(_varying(program, one))
            for at, one in enumerate(given)
            if _width(program, one) == 1
            and _level(program, one) in ("diagonal", "element")
            and _may_be_one(program, one)
        }
        return Collector(mod, sources, given, tuple(sums), runs, fixed_point, scratch)

    def clear(self) -> None:
        """Begin a head."""
        for held in self.sums:
            if held is not None:
                held.fill(0.0)
        for run in self.runs.values():
            run.begin([0] * len(run.args))

    def add(self, block: Block, slopes: Slopes, d_score: cute.Tensor) -> None:
        """Take a block's contributions; ``d_score`` (rows, columns) is P (dP - delta)."""
        for at, (one, held) in enumerate(zip(self.given, self.sums, strict=True)):
            own = block
            if slopes.again and not _may_be_one(self.mod.schedule, one):
                own = block.again(self.mod.schedule.lowered.graph.nodes[one.load].args)
            if held is not None:
                for i, total in enumerate(self._totals(one, slopes.totals(at, d_score))):
                    held[i] = held[i] + Float32(total)
                continue

            def step(component: Any, at: int = at, own: Block = own) -> None:
                products = slopes.products(at, d_score, component)
                self._give(own, at, products, component)

            emit.repeated(_width(self.mod.schedule, one), step)

    def _totals(self, one: Contribution, totals: list[ir.Value]) -> list[ir.Value]:
        """The thread's sums ``totals``, one a row; or one, where the address is the tile's."""
        return [_summed(totals)] if _level(self.mod.schedule, one) == "tile" else totals

    def _give(self, block: Block, at: int, products: list[ir.Value], component: Any) -> None:
        """Add a block's contributions to memory, or to a run's sum."""
        one = self.given[at]
        level = _level(self.mod.schedule, one)
        if level in ("tile", "row"):
            totals = self._totals(one, [emit.total(emit.lanes_in(row)) for row in products])
            self._add_rows(block.rows, one, totals, component)
        elif level == "column":
            self._add_columns(block, one, products, component)
        else:
            self._add_elements(block, at, products, component)

    def _add_rows(
        self, rows: Rows, one: Contribution, totals: Sequence[ir.Value], component: Any = 0
    ) -> None:
        """Add the thread's ``_totals``, together with those of the threads that have its rows."""
        level = _level(self.mod.schedule, one)
        places = rows.scope.spread(self._address(rows.scope, one, component), level)
        if level == "tile":
            self._add_once(places[0], totals[0])
            return
        for place, value in zip(places, totals, strict=True):
            total = Float32(value)
            for distance in (1, 2):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
            self._red(place, total.ir_value(), (self.mod.thread % QUAD == 0).ir_value())

    def _add_columns(
        self, block: Block, one: Contribution, products: list[ir.Value], component: Any
    ) -> None:
        column = emit.lanes_in(_summed(products))
        lane = self.mod.thread % WARP
        for columns in block.chunks():
            address = self._address(block.part(columns), one, component)
            places = emit.lanes_in(emit.part(*address.parts, 0, len(columns)))
            for place, value in zip(places, column[columns.start : columns.stop], strict=True):
                total = Float32(value)
                for distance in (4, 8, 16):
                    total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
                self._red(place, total.ir_value(), (lane < QUAD).ir_value())

    def _add_elements(
        self, block: Block, at: int, products: list[ir.Value], component: Any
    ) -> None:
        one, run = self.given[at], self.runs.get(at)
        values = [
            x
            for columns in block.chunks()
            for row in products
            for x in emit.lanes_in(emit.part(row, columns.start, len(columns)))
        ]
        if not _may_be_one(self.mod.schedule, one):
            self._add_each(block, one, values, component)
            return
        by_diagonal = _level(self.mod.schedule, one) == "diagonal" and self.scratch is not None
        # Addresses are made in the branches: the many that one add spares are not even computed.
        indices = self._indices(block, one)
        branch = scf.IfOp(_all_equal(indices).ir_value(), has_else=True)
        with ir.InsertionPoint(branch.then_block):
            if run is not None:
                self._continue(block.rows, at, [Int32(own[0]) for own in indices], values)
            else:
                address = self._address(block.part(range(1)), one, component)
                self._add_once(emit.lanes_in(address.parts[0])[0], emit.total(values))
            scf.YieldOp([])
        with ir.InsertionPoint(branch.else_block):
            if by_diagonal:
                self._add_diagonals(block, one, products, component)
            else:
                self._add_each(block, one, values, component)
            scf.YieldOp([])

    def _continue(self, rows: Rows, at: int, indices: list[Int32], values: list[ir.Value]) -> None:
        """Add a block of one address to the run's sum, or end that run and begin another."""
        run, other = self.runs[at], Boolean(False)
        for i, index in enumerate(indices):
            other = other | (run.indices[i] != index)
        branch = scf.IfOp(other.ir_value())
        with ir.InsertionPoint(branch.then_block):
            self._end(rows, at)
            run.begin(indices)
            scf.YieldOp([])
        run.total[0] = run.total[0] + Float32(emit.total(values))

    def _end(self, rows: Rows, at: int) -> None:
        run, scope = self.runs[at], rows.tile.scope
        scope = replace(scope, known={**scope.known, **run.known()})
        address = self._address(scope, self.given[at], 0)
        self._add_once(address.parts[0], run.total[0].ir_value())

    def _add_each(
        self, block: Block, one: Contribution, values: list[ir.Value], component: Any
    ) -> None:
        places: list[ir.Value] = []
        for columns in block.chunks():
            scope = block.part(columns)
            address = self._address(scope, one, component)
            places += [x for part in scope.spread(address, "element") for x in emit.lanes_in(part)]
        for place, value in zip(places, values, strict=True):
            self._red(place, value)

    def _add_diagonals(
        self, block: Block, one: Contribution, products: list[ir.Value], component: Any
    ) -> None:
        thread, fragment = self.mod.thread, self.mod.fragment
        lane, rows = thread % WARP, [emit.lanes_in(row) for row in products]
        totals = diagonals.sums(fragment, thread, self.scratch, rows)
        start = block.first - block.rows.first + diagonals.lowest(thread) + lane
        scope = block.rows.collapsed(start, diagonals.offsets(fragment))
        places = emit.lanes_in(self._address(scope, one, component).parts[0])
        for place, total in zip(places, totals, strict=True):
            value, begins = diagonals.runs(place, total, lane)
            self._red(place, value.ir_value(), begins)

    def _indices(self, block: Block, one: Contribution) -> list[list[ir.Value]]:
        """The thread's values of each index that is not the tile's."""
        args = _varying(self.mod.schedule, one)
        found: dict[int, list[ir.Value]] = {arg: [] for arg in args}
        for columns in block.chunks():
            memo = block.part(columns).evaluate(args)
            for arg in args:
                found[arg] += [x for part in memo[arg].parts for x in emit.lanes_in(part)]
        return list(found.values())

    def flush(self, rows: Rows) -> None:
        """End a head: what was held goes to memory."""
        for at in self.runs:
            self._end(rows, at)
        for one, held in zip(self.given, self.sums, strict=True):
            if held is not None:
                totals = [held[i].ir_value() for i in range(cute.size(held))]
                self._add_rows(rows, one, totals)

    def _add_once(self, place: ir.Value, value: ir.Value) -> None:
        """Add the warp's sum of ``value`` at ``place``."""
        total = Float32(value)
        for distance in (16, 8, 4, 2, 1):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
        self._red(place, total.ir_value(), (self.mod.thread % WARP == 0).ir_value())

    def _red(self, place: ir.Value, value: ir.Value, where: ir.Value | None = None) -> None:
        """Add ``value`` to the sum at the address ``place``, if ``where`` holds."""
        (fixed.add if self.fixed else _red)(place, value, where)

    def _address(self, scope: Scope, one: Contribution, component: Any) -> Value:
        """Where the load's contribution goes: the load's own address, in the target."""
        graph = self.mod.schedule.lowered.graph
        own = tuple(self.targets.get(at) for at in range(len(graph.captured)))
        scope = replace(scope, operands=replace(scope.operands, sources=own), addresses={})
        address = scope.address(one.load)
        if _width(self.mod.schedule, one) == 1:
            return address
        step = own[one.slot].step
        return Value(address.level, tuple(step(part, component) for part in address.parts))


def _width(program: Schedule, one: Contribution) -> int:
    """Components of the load that contributes."""
    return program.lowered.graph.nodes[one.load].width


def _level(program: Schedule, one: Contribution) -> str:
    """The level of a contribution's address."""
    args = program.lowered.graph.nodes[one.load].args
    levels = {program.levels[arg] for arg in args} - {"constant", "tile"}
    return levels.pop() if len(levels) == 1 else "element" if levels else "tile"


def _varying(program: Schedule, one: Contribution) -> list[int]:
    """The nodes of the load's indices that are not the tile's, each once."""
    args = program.lowered.graph.nodes[one.load].args
    return [at for at in dict.fromkeys(args) if program.levels[at] not in ("constant", "tile")]


def _may_be_one(program: Schedule, one: Contribution) -> bool:
    """Whether many elements may have one address: not where q and kv themselves index."""
    nodes = program.lowered.graph.nodes
    plain = {nodes[arg].op for arg in nodes[one.load].args}
    return not {"q", "kv"} <= plain


def _summed(values: Sequence[ir.Value]) -> ir.Value:
    total = values[0]
    for value in values[1:]:
        total = emit.add(total, value)
    return total


def _all_equal(groups: list[list[ir.Value]]) -> Boolean:
    """Whether in each group of int32 all numbers of all lanes of the warp are equal."""
    same = emit.constant(True, "bool")
    for numbers in groups:
        first = cute.arch.shuffle_sync(Int32(numbers[0]), 0).ir_value()
        for number in numbers:
            same = arith.andi(same, emit.compare("eq", number, first))
    return Boolean(cute.arch.vote_all_sync(Boolean(same)))


def _red(place: ir.Value, value: ir.Value, where: ir.Value | None = None) -> None:
    """Add ``value`` to the fp32 number at the address ``place``, if ``where`` holds."""
    operands, text, kinds = [place, value], "red.global.add.f32 [$0], $1;", "l,f"
    if where is not None:
        operands.append(arith.extui(emit.integer(32), where))
        text, kinds = f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; @p {text} }}", "l,f,r"
    llvm.inline_asm(
        None,
        operands,
        text,
        kinds,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
