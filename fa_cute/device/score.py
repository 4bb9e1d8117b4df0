"""score_mod and mask_mod on the S fragment of a consumer warpgroup.

Everything here is an object of the trace: frozen, built by plain Python while a kernel is traced,
and holding values of the kernel. Each step down computes once what does not change below it:

    mod = Modifier.of(graph, given, scale=scale, tile_n=128, scratch=scratch)
    for each tile:                                # a dynamic loop
        rows = mod.tile(b, h).rows(q_first)       # q_first: the first of the warpgroup's 64 rows
        for each KV block:                        # a dynamic loop
            block = rows.block(kv_first)          # loads by column, dear diagonals: needs no S
            ...                                   # wait for S = Q K^T
            block.score(s)                        # in place; the score is then mod.gain * s
            block.hide(s)                         # of a mask_mod: s = -inf where it gives False

``s`` is fp32 ``(2, tile_n / 4)`` as ``mma_sm90`` describes it: two rows and ``column_of`` columns.
``score`` applies the softmax scale itself, and works in natural units. Rows and columns past the
ends are harmless: loads clamp, and what they give is for the bounds to hide.

**Diagonals.** A value of q - kv alone has 2 + tile_n / 4 values a thread, not tile_n / 2: row 1 of
a pair of columns lies on the diagonal of row 0 of the pair before. Where computing it is dear (a
load, a logarithm) the warpgroup computes its 64 + tile_n - 1 values once a block in shared memory:
``scratch`` then is ``scratch_words`` 32-bit words and a named barrier of 128 threads, both the
warpgroup's own. Two mods of a kernel need words of their own (``Scratch.past``), not barriers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir.dialects import arith

from fa_cute.device import emit
from fa_cute.device.captured import Source
from fa_cute.device.lower import Schedule, schedule
from fa_cute.device.mma_sm90 import FRAGMENT_ROWS, ROWS, column_of, row_of
from fa_cute.device.scope import Operands, Ramp, Scope, Value, spread
from fa_cute.mods.graph import Graph

THREADS = 128  # of a warpgroup
# Columns at a time. All 32 at once spilled 892 bytes with a dot of vectors, 16 did 308 and 8 none
# (D 128, tiles of 128 x 128); the compile takes no longer.
CHUNK = 8

_NUMERIC = {"float32": Float32, "int32": Int32, "bool": Boolean}


class Scratch(NamedTuple):
    """A warpgroup's shared memory for diagonals (a pointer to words) and its named barrier's id."""

    pointer: Any
    barrier: Any

    def past(self, words: int) -> Scratch:
        """What is left behind the first ``words`` words."""
        return Scratch(self.pointer + words, self.barrier)


def _span(tile_n: int) -> int:
    """64 + tile_n - 1 diagonals, rounded up so that every thread computes equally many."""
    return -(-(ROWS + tile_n - 1) // THREADS) * THREADS


def scratch_words(graph: Graph | None, tile_n: int) -> int:
    """32-bit words of shared memory that a warpgroup needs for ``graph``; 0: no dear diagonal."""
    return 0 if graph is None else len(schedule(graph).diagonal) * _span(tile_n)


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
    tile_n: int
    thread: Any
    scratch: Scratch | None

    @staticmethod
    def of(
        graph: Graph,
        given: Given,
        *,
        scale: Float32,
        tile_n: int,
        scratch: Scratch | None = None,
    ) -> Modifier:
        """``given``: the graph's operands, from ``deal``; ``scale`` is the softmax scale.

        Raises ValueError where ``scratch_words`` is not 0 and no scratch is given.
        """
        program, words = schedule(graph), scratch_words(graph, tile_n)
        if words and scratch is None:
            raise ValueError(f"this mod needs {words} words of shared memory and a barrier")
        tensors = zip(given.captured, graph.captured, strict=True)
        numbers = zip(given.scalars, graph.scalars, strict=True)
        operands = Operands(
            tuple(Source.of(tensor, captured.dtype) for tensor, captured in tensors),
            tuple(_NUMERIC[kind](number) for number, kind in numbers),
            Float32(scale),
        )
        thread = cute.arch.thread_idx()[0] % THREADS
        return Modifier(program, Scope(program, operands, {}), tile_n, thread, scratch)

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

    def rows(self, q_first: Int32) -> Rows:
        """Enter the 64 rows of a warpgroup from query ``q_first`` on."""
        q_first = Int32(q_first)
        q = q_first + row_of(self.mod.thread)
        both = Value("row", tuple((q + 8 * i).ir_value() for i in range(FRAGMENT_ROWS)))
        scope = self.scope.below(q=both)
        return Rows(self, scope.entered(self.mod.schedule.row, "row"), q_first)


@dataclass(frozen=True)
class Rows:
    """A mod with what depends on q computed for the thread's two rows."""

    tile: Tile
    scope: Scope
    q_first: Int32

    def block(self, kv_first: Int32) -> Block:
        """Enter the KV block of keys ``[kv_first, kv_first + tile_n)``.

        With dear diagonals this synchronises the 128 threads of the warpgroup, twice.
        """
        kv_first, program = Int32(kv_first), self.tile.mod.schedule
        if program.diagonal:
            self._fill(kv_first)
        scope = self.columns(kv_first, range(self.tile.mod.tile_n // 4))
        return Block(self, scope.entered(program.column, "column"), kv_first)

    def columns(self, kv_first: Int32, columns: range) -> Scope:
        """The scope of some of the thread's columns of a block."""
        mod = self.tile.mod
        kv = kv_first + 2 * (mod.thread % 4)
        # Two lanes more on the left: row 1 lies 8 diagonals above row 0, one pair of columns.
        offsets = tuple(-column_of(c) for c in range(columns.start - 2, columns.stop))
        diagonal = self._collapsed(self.q_first + row_of(mod.thread) - kv, offsets)
        return replace(
            self.scope.below(kv=Ramp("column", kv, tuple(map(column_of, columns)))),
            columns=len(columns),
            across=lambda at, component: self._across(diagonal, offsets, at, component),
        )

    def _collapsed(self, start: Int32, offsets: tuple[int, ...]) -> Scope:
        """The scope of the diagonals ``start + offsets``."""
        q, kv = Ramp("diagonal", start, offsets), Value("tile", (emit.constant(0, "int32"),))
        scope = self.tile.scope.below(q=q, kv=kv)
        return replace(scope, columns=len(offsets) - 2, collapsed=True)

    def _fill(self, kv_first: Int32) -> None:
        """Compute the dear diagonals into shared memory: word p has diagonal p - (tile_n - 1)."""
        mod, wanted = self.tile.mod, self.tile.mod.schedule.diagonal
        offsets = tuple(range(0, _span(mod.tile_n), THREADS))
        start = self.q_first - kv_first - (mod.tile_n - 1) + mod.thread
        scope = self._collapsed(start, offsets)
        values = scope.evaluate(wanted)
        self._synchronise()  # another warp may still read the block before
        for slot, at in enumerate(wanted):
            target = self._words(slot, mod.thread)
            found = emit.to_word(spread(values[at], "diagonal", scope.columns)[0])
            for offset, word in zip(offsets, emit.lanes_in(found), strict=True):
                target[offset] = Int32(word)
        self._synchronise()

    def _across(self, scope: Scope, offsets: tuple[int, ...], at: int, component: Any) -> Value:
        """A node of the diagonals: from shared memory, or computed here."""
        mod = self.tile.mod
        if at not in mod.schedule.diagonal:
            return scope.evaluate([at], component)[at]
        own = row_of(mod.thread) - 2 * (mod.thread % 4)
        source = self._words(mod.schedule.diagonal.index(at), own)
        words = [source[offset + mod.tile_n - 1].ir_value() for offset in offsets]
        kind = mod.schedule.lowered.graph.nodes[at].type
        return Value("diagonal", (emit.from_word(emit.gathered(words, len(words)), kind),))

    def _words(self, slot: int, first: Int32) -> cute.Tensor:
        mod = self.tile.mod
        words = _span(mod.tile_n)
        pointer = cute.recast_ptr(mod.scratch.pointer, dtype=Int32) + (slot * words + first)
        return cute.make_tensor(pointer, cute.make_layout(words))

    def _synchronise(self) -> None:
        cute.arch.barrier(barrier_id=self.tile.mod.scratch.barrier, number_of_threads=THREADS)


@dataclass(frozen=True)
class Block:
    """A mod ready for the fragment of one KV block."""

    rows: Rows
    scope: Scope
    kv_first: Int32

    def score(self, s: cute.Tensor) -> None:
        """Replace ``s`` (2, tile_n / 4), which holds Q K^T, by the modified score over ``gain``."""
        self._replace(s, lambda result, row: result)

    def hide(self, s: cute.Tensor) -> None:
        """Put -inf into ``s`` (2, tile_n / 4) wherever the mask_mod gives False."""
        self._replace(s, lambda seen, row: arith.select(seen, row, emit.like(row, -math.inf)))

    def _replace(self, s: cute.Tensor, combine: Callable[[Any, Any], Any]) -> None:
        before = [s[i, None].load().ir_value() for i in range(FRAGMENT_ROWS)]
        after: list[list[Any]] = [[] for _ in before]
        for columns in self._chunks():
            rows = tuple(emit.part(row, columns.start, len(columns)) for row in before)
            for new, result, row in zip(after, self._results(columns, rows), rows, strict=True):
                new.append(combine(result, row))
        for i, parts in enumerate(after):
            target = s[i, None]
            target.store(cute.TensorSSA(emit.joined(parts), target.shape, Float32))

    def _chunks(self) -> list[range]:
        """The columns to compute at a time."""
        columns = self.scope.columns
        return [range(at, min(at + CHUNK, columns)) for at in range(0, columns, CHUNK)]

    def _results(self, columns: range, score: tuple[Any, ...]) -> tuple[Any, ...]:
        program = self.rows.tile.mod.schedule
        scope = self.rows.columns(self.kv_first, columns).below(score=Value("element", score))
        loaded = {
            at: Value(
                "column", (emit.part(*self.scope.known[at].parts, columns.start, len(columns)),)
            )
            for at in program.column
        }
        scope = replace(scope, known={**scope.known, **loaded})
        at = program.lowered.graph.result
        return spread(scope.evaluate([at])[at], "element", scope.columns)
