"""score_mod and mask_mod on the fragment of S that a warpgroup holds.

Everything here is an object of the trace: frozen, built by plain Python while a kernel is traced,
and holding values of the kernel. Each step down computes once what does not change below it:

    mod = Modifier.of(graph, given, scale=scale, fragment=fragment, scratch=scratch)
    for each tile:                                # a dynamic loop
        rows = mod.tile(b, h).rows(q_first)       # q_first: the first of the fragment's rows
        for each KV block:                        # a dynamic loop
            block = rows.block(kv_first)          # loads by column, dear diagonals: needs no S
            ...                                   # wait for S = Q K^T
            block.score(s)                        # in place; the score is then mod.gain * s
            block.hide(s)                         # of a mask_mod: s = -inf where it gives False
            slopes = block.differentiate(s)       # instead of score, of a mod with its derivative
            slopes.apply(d_score)                 # d_score *= d mod / d score

``s`` is fp32 ``(rows, columns)`` of a thread, as its ``Fragment`` says. Of a transposed one rows
are keys: ``rows(kv_first)``, then ``block(q_first)``. ``score`` applies the softmax scale itself,
and works in natural units. Rows and columns past the ends are harmless: loads clamp, and what they
give is for the bounds to hide.

**Diagonals.** A value of q - kv alone has 2 + tile_n / 4 values a thread of wgmma's fragment, not
tile_n / 2: row 1 of a pair of columns lies on the diagonal of row 0 of the pair before. Where
computing it is dear (a load, a logarithm) the warpgroup computes its height + width - 1 values once
a block in shared memory: ``scratch`` then is ``scratch_words`` 32-bit words and a named barrier of
128 threads, both the warpgroup's own. Two mods of a kernel need words of their own
(``Scratch.past``), not barriers. Where blocks of keys follow each other downwards, a block has only
``width`` diagonals that the one before had not: ``rolling`` scratch keeps the others. Diagonal d is
then word d mod ``_period``, and once more a period on, so that a block's lie in a row; the period
holds what a slower warp still reads beside what is written, which saves a barrier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir.dialects import arith

from fa_cute.device import emit
from fa_cute.device.captured import Source
from fa_cute.device.fragment import Fragment
from fa_cute.device.lower import UNIFORM, Schedule, schedule
from fa_cute.device.scope import Line, Operands, Ramp, Scope, Value
from fa_cute.mods.derived import contributions, factor, tame
from fa_cute.mods.graph import Graph

THREADS = 128  # of a warpgroup
# Columns at a time. All 32 at once spilled 892 bytes with a dot of vectors, 16 did 308 and 8 none
# (D 128, tiles of 128 x 128); the compile takes no longer.
CHUNK = 8
ELEMENT_LOAD = ("load", "element")  # an operation and its level

Tiles = Mapping[int, Callable[[range], Value]]
_NUMERIC = {"float32": Float32, "int32": Int32, "bool": Boolean}


class Scratch(NamedTuple):
    """A warpgroup's shared memory (a pointer to words) and its named barrier's id.

    For dear diagonals, and for what columns load.
    """

    pointer: Any
    barrier: Any
    rolling: bool = False

    def past(self, words: int) -> Scratch:
        """What is left behind the first ``words`` words."""
        return self._replace(pointer=self.pointer + words)


class Sparing(NamedTuple):
    """What spares registers beside loads by element, of which ptxas issues all that it can at once.

    ``in_turn``: those of some columns wait for the scores of the columns before. ``rows``: what a
    row holds of their addresses is made again in each block.
    """

    in_turn: bool = False
    rows: bool = False


def _span(fragment: Fragment) -> int:
    """height + width - 1 diagonals, rounded up so that every thread computes equally many."""
    return -(-(fragment.height + fragment.width - 1) // THREADS) * THREADS


def _width(fragment: Fragment) -> int:
    """The columns of a block, rounded up likewise."""
    return -(-fragment.width // THREADS) * THREADS


def _period(fragment: Fragment) -> int:
    """A power of two, not below a block's diagonals and those that are computed for the next."""
    most = fragment.height + fragment.width - 1 + _width(fragment)
    return 1 << (most - 1).bit_length()


def _room(fragment: Fragment, rolling: bool) -> int:
    """Words of a dear diagonal."""
    return 2 * _period(fragment) if rolling else _span(fragment)


def scratch_words(graph: Graph | None, fragment: Fragment, rolling: bool = False) -> int:
    """32-bit words of shared memory that a warpgroup needs for ``graph``; often 0."""
    if graph is None:
        return 0
    program = schedule(graph, fragment.transposed)
    diagonals = len(program.diagonal) * _room(fragment, rolling)
    return diagonals + len(program.column) * _width(fragment)


class Given(NamedTuple):
    """A graph's own captured tensors and scalars."""

    captured: tuple[Any, ...]
    scalars: tuple[Any, ...]


def deal(
    graphs: Sequence[Graph | None], captured: Sequence[Any] | None, scalars: Sequence[Any] | None
) -> tuple[Given, ...]:
    """Part a kernel's operands (None: none) among its graphs: first come the first graph's."""
    tensors, numbers = list(captured or ()), list(scalars or ())
    given = []
    for graph in graphs:
        own = (0, 0) if graph is None else (len(graph.captured), len(graph.scalars))
        given.append(Given(tuple(tensors[: own[0]]), tuple(numbers[: own[1]])))
        tensors, numbers = tensors[own[0] :], numbers[own[1] :]
    return tuple(given)


@dataclass(frozen=True)
class Modifier:
    """A mod with its operands: where a warpgroup begins. Build it with ``of``."""

    schedule: Schedule
    scope: Scope
    fragment: Fragment
    thread: Any
    scratch: Scratch | None
    sparing: Sparing = Sparing()

    @staticmethod
    def of(
        graph: Graph,
        given: Given,
        *,
        scale: Float32,
        fragment: Fragment,
        scratch: Scratch | None = None,
        brought: bool = False,
    ) -> Modifier:
        """``given``: the graph's operands, from ``deal``; ``scale`` is the softmax scale.

        ``brought``: what columns load is always at hand (``device/columns.py``).
        Raises ValueError where ``scratch_words`` is not 0 and no scratch is given.
        """
        program = schedule(graph, fragment.transposed)
        words = scratch_words(graph, fragment, scratch is not None and scratch.rolling)
        if words and scratch is None and not brought:
            raise ValueError(f"this mod needs {words} words of shared memory and a barrier")
        tensors = zip(given.captured, graph.captured, strict=True)
        numbers = zip(given.scalars, graph.scalars, strict=True)
        operands = Operands(
            tuple(Source.of(tensor, captured.dtype) for tensor, captured in tensors),
            tuple(_NUMERIC[kind](number) for number, kind in numbers),
            Float32(scale),
        )
        thread = cute.arch.thread_idx()[0] % THREADS
        return Modifier(program, Scope(program, operands, fragment), fragment, thread, scratch)

    @property
    def gain(self) -> float:
        """After ``Block.score`` the score is ``gain * s``, in natural units. Positive."""
        return self.schedule.lowered.gain

    def tile(self, b: Int32, h: Int32) -> Tile:
        """Enter a tile: batch and query head."""
        batch, head = (Value("tile", (Int32(index).ir_value(),)) for index in (b, h))
        scope = self.scope.below(b=batch, h=head)
        return Tile(self, scope.entered(self.schedule.tile, "tile"))


@dataclass(frozen=True)
class Tile:
    """A mod with what depends on b, h and scalars computed."""

    mod: Modifier
    scope: Scope

    def rows(self, first: Int32) -> Rows:
        """Enter the fragment's rows from query (transposed: key) ``first`` on."""
        first, fragment = Int32(first), self.mod.fragment
        own = first + fragment.first_row(self.mod.thread)
        index = Value("row", tuple((own + row).ir_value() for row in fragment.rows))
        scope = self.scope.below(**{fragment.row_index: index})
        return Rows(self, scope.entered(self.mod.schedule.row, "row"), first)


@dataclass(frozen=True)
class Rows:
    """A mod with what depends on the thread's rows computed."""

    tile: Tile
    scope: Scope
    first: Int32

    def block(self, first: Int32, tiles: Tiles | None = None, follows: bool = False) -> Block:
        """Enter the block of keys (transposed: queries) ``[first, first + width)``.

        ``tiles``: loads that are at hand, by node: how to read some columns of the fragment.
        ``follows``: the block entered before is the one of the keys right after these.
        What goes through shared memory is put there: see ``_fill``.
        """
        first, scratch = Int32(first), self.tile.mod.scratch
        if scratch is not None:
            self._fill(first, follows and scratch.rolling)
        scope = self.columns(first, range(self.tile.mod.fragment.columns))
        return Block(self, scope, first, tiles or {})

    def columns(self, first: Int32, columns: range) -> Scope:
        """The scope of some of the thread's columns of a block."""
        mod, fragment = self.tile.mod, self.tile.mod.fragment
        column = first + fragment.first_column(mod.thread)
        row, sign = self.first + fragment.first_row(mod.thread), -1
        if fragment.transposed:
            sign, start = 1, column - row
        else:
            start = row - column
        lanes = range(columns.start - fragment.lead, columns.stop)
        offsets = tuple(sign * fragment.column(c) for c in lanes)
        diagonal = self.collapsed(start, offsets)
        index = Ramp("column", column, tuple(map(fragment.column, columns)))
        return replace(
            self.scope.below(**{fragment.column_index: index}),
            columns=len(columns),
            across=lambda at, component: self._across(first, diagonal, at, component),
        )

    def collapsed(self, start: Int32, offsets: tuple[int, ...]) -> Scope:
        """The scope of the diagonals q - kv = ``start + offsets``, a lane each."""
        q, kv = Ramp("diagonal", start, offsets), Value("tile", (emit.constant(0, "int32"),))
        scope = self.tile.scope.below(q=q, kv=kv)
        columns = len(offsets) - self.tile.mod.fragment.lead
        return replace(scope, columns=columns, collapsed=True)

    def _lowest(self, first: Int32) -> Int32:
        """The lowest diagonal of the block from ``first`` on."""
        fragment = self.tile.mod.fragment
        ahead = first - self.first if fragment.transposed else self.first - first
        return ahead + fragment.lowest_diagonal

    def _fill(self, first: Int32, follows: bool) -> None:
        """Compute what goes through shared memory for the block from ``first`` on.

        Of the dear diagonals word p has the p-th from the lowest (rolling: see above), of what
        columns load word c that of column c: a thread loads one column, not its 32. This
        synchronises the 128 threads of the warpgroup, twice unless the block ``follows``.
        """
        mod, fragment = self.tile.mod, self.tile.mod.fragment
        known = fragment.height - 1 if follows else 0
        count = _width(fragment) if follows else _span(fragment)
        by_diagonal = tuple(range(known, known + count, THREADS))
        by_column = tuple(range(0, _width(fragment), THREADS))
        index = Ramp("column", first + mod.thread, by_column)
        columns = self.scope.below(**{fragment.column_index: index})
        lowest = self._lowest(first) + mod.thread
        parts = (
            ("diagonal", by_diagonal, self.collapsed(lowest, by_diagonal)),
            ("column", by_column, replace(columns, columns=len(by_column))),
        )
        found = []
        for level, offsets, scope in parts:
            wanted = getattr(mod.schedule, level)
            values = scope.evaluate(wanted)
            found += [(at, offsets, scope.spread(values[at], level)[0]) for at in wanted]
        if not follows or mod.schedule.column:
            self._synchronise()  # another warp may still read the block before
        for at, offsets, value in found:
            rolls = mod.scratch.rolling and at in mod.schedule.diagonal
            for offset, word in zip(offsets, emit.lanes_in(emit.to_word(value)), strict=True):
                if rolls:
                    target = self._words(at, lowest + offset & _period(fragment) - 1)
                    target[0] = target[_period(fragment)] = Int32(word)
                else:
                    self._words(at, mod.thread)[offset] = Int32(word)
        self._synchronise()

    def _across(self, first: Int32, scope: Scope, at: int, component: Any) -> Value:
        """A node of the diagonals of the block from ``first`` on: read, or computed here."""
        mod, fragment = self.tile.mod, self.tile.mod.fragment
        if at not in mod.schedule.diagonal:
            return scope.evaluate([at], component)[at]
        own = fragment.first_row(mod.thread) - fragment.first_column(mod.thread)
        own = -own if fragment.transposed else own
        if mod.scratch.rolling:
            own = own + (self._lowest(first) & _period(fragment) - 1)
        offsets = (offset - fragment.lowest_diagonal for offset in scope.leaves["q"].offsets)
        return self._read(at, "diagonal", own, tuple(offsets))

    def loaded(self, at: int, columns: range) -> Value:
        """What the thread's ``columns`` loaded, from shared memory."""
        fragment = self.tile.mod.fragment
        offsets = tuple(map(fragment.column, columns))
        return self._read(at, "column", fragment.first_column(self.tile.mod.thread), offsets)

    def _read(self, at: int, level: str, own: Int32, offsets: tuple[int, ...]) -> Value:
        source = self._words(at, Int32(own))
        words = [source[offset].ir_value() for offset in offsets]
        kind = self.tile.mod.schedule.lowered.graph.nodes[at].type
        return Value(level, (emit.from_word(emit.gathered(words, len(words)), kind),))

    def _words(self, at: int, first: Int32) -> cute.Tensor:
        """The words of node ``at`` from the one of ``first`` on: diagonals', then columns'."""
        mod, program = self.tile.mod, self.tile.mod.schedule
        room, words = _room(mod.fragment, mod.scratch.rolling), _width(mod.fragment)
        if at in program.diagonal:
            words, slot = room, program.diagonal.index(at) * room
        else:
            slot = len(program.diagonal) * room + program.column.index(at) * words
        pointer = cute.recast_ptr(mod.scratch.pointer, dtype=Int32) + (slot + first)
        return cute.make_tensor(pointer, cute.make_layout(words))

    def _synchronise(self) -> None:
        cute.arch.barrier(barrier_id=self.tile.mod.scratch.barrier, number_of_threads=THREADS)


@dataclass(frozen=True)
class Block:
    """A mod ready for the fragment of one block."""

    rows: Rows
    scope: Scope
    first: Int32
    tiles: Tiles

    def score(self, s: cute.Tensor) -> None:
        """Replace ``s`` (rows, columns), which holds Q K^T, by the modified score over ``gain``."""
        self._replace(s, lambda result, row: result)

    def line(self) -> Addend | None:
        """What the mod adds to the scaled score, where that is all it does, and a line of kv.

        The softmax then takes it into its exponents, two FFMA a score in all: ALiBi at d128 causal
        686 -> 713 TFLOP/s, full 635 -> 706.
        """
        program = self.rows.tile.mod.schedule
        nodes, levels = program.lowered.graph.nodes, program.levels
        result = nodes[program.lowered.graph.result]
        if result.op != "fma" or nodes[result.args[0]].op != "score":
            return None
        _, factor, added = result.args
        through_memory = (*program.column, *program.diagonal)
        if levels[factor] not in UNIFORM or added in through_memory:
            return None
        if levels[added] not in ("column", "diagonal"):
            return None
        found = self.scope.evaluate([factor, added])
        line = found[added]
        return Addend(self, found[factor].parts[0], line) if isinstance(line, Line) else None

    def hide(self, s: cute.Tensor, columns: range | None = None) -> None:
        """Put -inf into ``s`` (rows, columns) wherever the mask_mod gives False.

        ``columns``: which of the fragment's ``s`` holds, if not all.
        """

        program = self.rows.tile.mod.schedule
        by_element = program.levels[program.lowered.graph.result] == "element"

        def hidden(seen: Any, row: Any) -> Any:
            if by_element:
                return emit.hidden_unless(seen, row)
            return arith.select(seen, row, emit.like(row, -math.inf))

        self._replace(s, hidden, columns)

    def differentiate(self, s: cute.Tensor, *, again: bool = False) -> Slopes:
        """``score``, of a graph with its derivative: ``s`` likewise, and the derivative there.

        ``again``: as in ``Slopes``.
        """
        graph = self.rows.tile.mod.schedule.lowered.graph
        wanted = [factor(graph), *(one.value for one in contributions(graph))]
        scored = [at for at in wanted if "score" in graph.dependence()[at]]
        at_once = [at for at in scored if graph.nodes[at].width == 1]
        raw = self._vectors(s)
        result, *found = self._computed(raw, [graph.result, *at_once])
        self._put(s, result)
        held = dict(zip(at_once, found, strict=True))
        return Slopes(self, tuple(wanted), held, again, None if scored == at_once else raw)

    def _replace(
        self, s: cute.Tensor, combine: Callable[[Any, Any], Any], columns: range | None = None
    ) -> None:
        result = self.rows.tile.mod.schedule.lowered.graph.result
        (found,) = self._computed(self._vectors(s), [result], combine, within=columns)
        self._put(s, found)

    def _put(self, s: cute.Tensor, rows: Sequence[Any]) -> None:
        for i, row in enumerate(rows):
            target = s[i, None]
            target.store(cute.TensorSSA(row, target.shape, Float32))

    def _vectors(self, s: cute.Tensor) -> list[Any]:
        """``s`` (rows, columns) as it is now, a vector a row."""
        return [s[i, None].load().ir_value() for i in range(len(self.scope.fragment.rows))]

    def _computed(
        self,
        before: list[Any] | None,
        wanted: Sequence[int],
        combine: Callable[[Any, Any], Any] = lambda result, row: result,
        component: Any = 0,
        within: range | None = None,
    ) -> list[list[Any]]:
        """The nodes ``wanted`` at the scores ``before`` (None: they read none), a vector a row; of
        short vectors one ``component``; of the columns ``within``, or all."""
        first = 0 if within is None else within.start
        rows = [None] * len(self.scope.fragment.rows) if before is None else before
        after: list[list[list[Any]]] = [[[] for _ in rows] for _ in wanted]
        block = self._sparing()
        for columns in self.chunks(within):
            scope, here = block._after(after[0][-1]).part(columns), rows
            if before is not None:
                here = [emit.part(row, columns.start - first, len(columns)) for row in rows]
                scope = scope.below(score=Value("element", tuple(here)))
            memo = scope.evaluate(wanted, component)
            for new, at in zip(after, wanted, strict=True):
                for row, result, was in zip(
                    new, scope.spread(memo[at], "element"), here, strict=True
                ):
                    row.append(combine(result, was))
        return [[emit.joined(parts) for parts in new] for new in after]

    @property
    def _spares(self) -> Sparing:
        """What is done about the mod's loads by element, where it has some that are not at hand."""
        program = self.rows.tile.mod.schedule
        levels = zip(program.lowered.graph.nodes, program.levels, strict=True)
        loads = (at for at, (node, level) in enumerate(levels) if (node.op, level) == ELEMENT_LOAD)
        nothing = all(at in self.tiles for at in loads)
        return Sparing() if nothing else self.rows.tile.mod.sparing

    def _sparing(self) -> Block:
        """This block, with what its rows hold made again if that is to be spared."""
        if not self._spares.rows:
            return self
        first = self.rows.first + (self.first & emit.nought())  # of the block: not of the loop
        return replace(self, rows=self.rows.tile.rows(first))

    def _after(self, done: list[Any]) -> Block:
        """This block for the next columns, those before having the scores ``done``."""
        if not done or not self._spares.in_turn:
            return self
        late = emit.nought_after(emit.lanes_in(done[-1])[-1])
        return replace(self, first=self.first + late)

    def again(self, nodes: Sequence[int]) -> Block:
        """This block to compute ``nodes`` in once more, rather than to keep what was computed.

        What loads by element is kept: its loads are dearer. Learned slopes (d128) held 16 distances
        from the scores to the sums, and spilled 36 bytes.
        """
        program = self.rows.tile.mod.schedule
        graph, todo, seen = program.lowered.graph, list(nodes), set()
        while todo:
            at = todo.pop()
            node = graph.nodes[at]
            if (node.op, program.levels[at]) == ELEMENT_LOAD:
                return self
            if at not in seen and program.levels[at] != "diagonal":
                todo += node.args
            seen.add(at)
        return replace(self, first=self.first + emit.nought())

    def chunks(self, within: range | None = None) -> list[range]:
        """The columns to compute at a time, of those ``within``, or of all."""
        every = range(self.scope.columns) if within is None else within
        begins = range(every.start, every.stop, CHUNK)
        return [range(at, min(at + CHUNK, every.stop)) for at in begins]

    def part(self, columns: range) -> Scope:
        """The scope of some of the columns, with what they loaded."""
        scope = self.rows.columns(self.first, columns)
        program = self.rows.tile.mod.schedule
        own = (at for at in program.column if at not in self.tiles)
        loaded = {at: self.rows.loaded(at, columns) for at in own}
        tiles = {at: read(columns) for at, read in self.tiles.items()}
        return replace(scope, known={**scope.known, **loaded, **tiles})


@dataclass(frozen=True)
class Addend:
    """A mod that makes of S ``factor * S + line``, and is left to whoever scales S anyway."""

    block: Block
    factor: Any
    line: Line

    def times(self, c: Any, shifts: Sequence[Any]) -> tuple[Any, Callable[[range], list[Any]]]:
        """c (factor S + line) + shift, of row i ``shifts[i]``: what S is to be multiplied with.

        And what is to be added to that in some columns of the fragment, a vector a row.
        """
        step, fragment = self.line.step, self.block.scope.fragment
        step = c if step is None else emit.on_floats("mul", step, c)
        starts = [emit.fma(self.line.start, c, shift) for shift in shifts]
        shift = fragment.shift if self.line.level == "diagonal" else 0
        lead = shift * (len(starts) - 1)

        def rest(columns: range) -> list[Any]:
            rows = []
            for row, start in enumerate(starts):
                first = lead - shift * row
                offsets = self.line.offsets[first + columns.start : first + columns.stop]
                rows.append(emit.line(start, step, offsets, by_lane=True))
            return rows

        return emit.on_floats("mul", self.factor, c), rest


@dataclass(frozen=True)
class Slopes:
    """The derivative on a block's fragment: factors on d score.

    ``wanted``: nodes of d mod / d score and of the contributions; ``held`` those of them that
    depend on the score, a vector a row. The others are computed when they are used; so are short
    vectors, one component at a time, from the scores as they were (``raw``), if they read those.
    ``again``: registers are short, so that nothing else of the scores' is kept for that.
    """

    block: Block
    wanted: tuple[int, ...]
    held: dict[int, list[Any]]
    again: bool
    raw: list[Any] | None = None

    def apply(self, d_score: cute.Tensor) -> None:
        """Multiply ``d_score`` (rows, columns), P (dP - delta), by d mod / d score in place."""
        self.block._put(d_score, self._times(self.wanted[0], d_score))

    def products(self, at: int, d_score: cute.Tensor, component: Any = 0) -> list[Any]:
        """``d_score`` times the factor of contribution ``at``, a vector a row."""
        return self._times(self.wanted[1 + at], d_score, component)

    def totals(self, at: int, d_score: cute.Tensor) -> list[Any]:
        """The sums of ``products`` over the columns, one a row.

        A chain of FFMA for many columns: of a tree ptxas keeps the branches until it has time. A
        learned factor (d128) spilled 28 bytes, with two chains a row 52.
        """
        graph, values = self.block.rows.tile.mod.schedule.lowered.graph, None
        if tame(graph) and self.block.scope.columns > CHUNK:
            values = self._factors(self.wanted[1 + at])
        if values is None:
            return [emit.total(emit.lanes_in(row)) for row in self.products(at, d_score)]
        found = []
        for pair in zip(self.block._vectors(d_score), values, strict=True):
            total = emit.constant(0.0, "float32")
            for factors in zip(*map(emit.lanes_in, pair), strict=True):
                total = emit.fma(*factors, total)
            found.append(total)
        return found

    def _factors(self, at: int, component: Any = 0) -> list[Any] | None:
        """The node ``at``, a vector a row; None where it is 1."""
        graph = self.block.rows.tile.mod.schedule.lowered.graph
        if graph.nodes[at].op == "const" and graph.nodes[at].attr == 1.0:
            return None
        values = self.held.get(at)
        if values is None:
            before = self.raw if "score" in graph.dependence()[at] else None
            block = self.block.again([at]) if self.again else self.block
            (values,) = block._computed(before, [at], component=component)
        return values

    def _times(self, at: int, d_score: cute.Tensor, component: Any = 0) -> list[Any]:
        graph = self.block.rows.tile.mod.schedule.lowered.graph
        rows, values = self.block._vectors(d_score), self._factors(at, component)
        if values is None:
            return rows
        products = [arith.mulf(row, value) for row, value in zip(rows, values, strict=True)]
        if tame(graph):
            return products
        # A probability of 0 silences a slope that is not finite.
        return [
            arith.select(emit.compare("eq", row, emit.like(row, 0.0)), row, product)
            for row, product in zip(rows, products, strict=True)
        ]
