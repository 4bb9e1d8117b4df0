"""A captured tensor that score_mod reads at ``[..., q, kv]``, loaded by TMA beside K.

A tile of scores reads one box of it. The producer copies the box into a slot of a ring of its own,
in the widest swizzle, and fetches the next into L2; a consumer reads what its threads hold of the
scores, in the order of their accumulators. 16-bit elements come by ldmatrix, four 8 x 8 matrices at
a time: thread t of a warp gets row t / 4, columns 2 (t % 4) + {0, 1} of each, as wgmma gives it S;
no bank is asked twice. They are read while S is multiplied; the slot is freed when S is there, for
the fence before that would wait for the loads (d256, 604 TFLOP/s, and 628 freed late). fp32
comes in pairs, when S is there: all of it would take as many registers as S. Two rows then share
banks (a pair is 8 bytes of a 16-byte chunk), so a tile takes 4 passes of a bank for 2.

Rows and columns past the tensor's ends arrive as zeros, and no other index leaves it: each is
wrapped once if negative and clamped, as by ``captured.Source``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, vector
from cutlass.cute.nvgpu import warp

from fa_cute.device import emit
from fa_cute.device.lower import lower
from fa_cute.device.mma_sm90 import FRAGMENT_ROWS, smem_layout
from fa_cute.device.operand import Reuse, TmaOperand, box_fetcher, box_loader, box_operand
from fa_cute.device.scope import Value
from fa_cute.mods.graph import Graph
from fa_cute.mods.tiles import lead_graphs, shared_by, tiled_loads
from fa_cute.plan import Plan

DTYPES = {
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "float32": cutlass.Float32,
}
Columns = Callable[[range], Value]
VECTOR = 128  # bits that a thread reads of its row at a time


@dataclass(frozen=True)
class Bias:
    """The captured tensor ``slot`` of ``graph`` in boxes of ``box`` = (queries, keys)."""

    graph: Graph
    slot: int
    box: tuple[int, int]

    @staticmethod
    def of(plan: Plan) -> Bias | None:
        """The plan's bias in boxes as tall as a copy of Q, or None."""
        if plan.bias is None:
            return None
        return Bias(plan.score_mod, plan.bias, (plan.config.rows_a_copy, plan.config.tile_n))

    @property
    def dtype(self) -> type:
        """The compiler's type of its elements."""
        return DTYPES[self.graph.captured[self.slot].dtype]

    @property
    def bytes(self) -> int:
        """Of one box."""
        return self.box[0] * self.box[1] * self.dtype.width // 8

    @property
    def shared_by(self) -> frozenset[str]:
        """Which of batches ("b") and query heads ("h") read the same boxes."""
        return shared_by(self.graph, self.slot)

    @property
    def node(self) -> int:
        """The load, in the graph as ``lower`` makes it."""
        return tiled_loads(lower(self.graph).graph)[self.slot]

    def layout(self, stages: int) -> Any:
        """Of shared memory: (queries, keys, stages)."""
        return smem_layout(self.dtype, *self.box, stages)

    def operand(self, tensor: cute.Tensor, layout: Any) -> TmaOperand:
        """``tensor`` (..., Sq, Sk), its coordinates in the order (Sq, Sk, ...)."""
        last = cute.rank(tensor) - 1
        modes = [last - 1, last, *range(last - 1)]
        by_row = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))
        return box_operand(by_row, layout, self.box)

    @property
    def lead(self) -> tuple[Graph, ...]:
        """What computes the indices before q and kv, for ``visits.inputs_of``."""
        return lead_graphs(self.graph, self.slot)

    def loader(
        self, operand: TmaOperand, s: cute.Tensor, lead: Sequence[Int32], block: Int32
    ) -> tuple[Callable[[Int32, Any], None], Callable[[Int32], None]]:
        """``load(keys, slot)``: copy the box of queries ``block`` and that block of keys to ``s``.

        And ``fetch(keys)``, which brings it into L2. ``lead``: the values of the graphs of
        ``lead``.
        """
        extents = operand.tensor.shape[2:]
        at = tuple(inside(*pair) for pair in zip(lead, extents, strict=True))
        reuse = Reuse.SOON if self.shared_by else Reuse.ONCE
        boxes = (block, None)
        return box_loader(operand, s, at, boxes, reuse), box_fetcher(operand, s, at, boxes)

    def reader(self, mma: cute.TiledMma, s: cute.Tensor, thread: Int32) -> Reader:
        """What ``thread`` (of all the consumers') reads of ``s`` (queries, keys, stages)."""
        return Reader.of(self, mma, s, thread)

    def row_reader(self, s: cute.Tensor, row: Int32) -> RowReader:
        """What a thread reads that has ``row`` of ``s`` (queries, keys, stages)."""
        return RowReader(self.node, self.dtype, s, row)


def inside(index: Int32, extent: Int32) -> Int32:
    """``index``, from the end if negative, clamped into a dimension of ``extent``."""
    index = cutlass.select_(index < 0, index + extent, index)
    return cutlass.min(cutlass.max(index, Int32(0)), extent - 1)


def copy_of(dtype: type, mma: cute.TiledMma) -> cute.TiledCopy:
    """From shared memory, in pieces, to where the threads of ``mma`` hold their scores."""
    operation, options = warp.LdMatrix8x8x16bOp(num_matrices=4), {}
    if dtype.width == 32:
        operation, options = cute.nvgpu.CopyUniversalOp(), {"num_bits_per_copy": 64}
    return cute.make_tiled_copy_C(cute.make_copy_atom(operation, dtype, **options), mma)


class Reader(NamedTuple):
    """A thread's part of the boxes in shared memory: ``source`` ((values, pieces), 1, 1, stages).

    A piece of 16-bit elements is four matrices: 4 columns of both rows of the fragment, in the
    order (pair, row, half); one of fp32 is 2 columns of a row, and rows alternate.
    """

    node: int
    dtype: type
    copy: cute.TiledCopy
    source: cute.Tensor

    @staticmethod
    def of(bias: Bias, mma: cute.TiledMma, s: cute.Tensor, thread: Int32) -> Reader:
        """See ``Bias.reader``."""
        copy = copy_of(bias.dtype, mma)
        return Reader(bias.node, bias.dtype, copy, copy.get_slice(thread).partition_S(s))

    @property
    def early(self) -> bool:
        """Whether ``values`` reads the box at once: 16-bit elements take half of S's registers."""
        return self.dtype.width == 16

    def values(self, stage: Int32) -> dict[int, Columns]:
        """For ``score.Rows.block``: how to get the load's value from the slot ``stage``.

        The slot is free when the score is there.
        """
        if self.early:
            count = cute.size(self.source, mode=[0, 1])
            piece = [self._piece(at, stage) for at in range(count)].__getitem__
        else:
            piece = functools.partial(self._piece, stage=stage)
        return {self.node: lambda columns: self._columns(columns, piece)}

    def _columns(self, columns: range, piece: Callable[[int], cute.Tensor]) -> Value:
        """Columns of the fragment: for each of its rows a vector of fp32."""
        rows: list[list[Any]] = [[] for _ in range(FRAGMENT_ROWS)]
        if self.dtype.width == 32:
            for at in range(columns.start, columns.stop):
                rows[at % FRAGMENT_ROWS].append(piece(at).load().ir_value())
        else:
            for at in range(columns.start // 4, columns.stop // 4):
                found = _widened(piece(at))
                for row, parts in enumerate(rows):
                    parts += [emit.part(found, first + 2 * row, 2) for first in (0, 4)]
        return Value("element", tuple(map(emit.joined, rows)))

    def _piece(self, at: int, stage: Int32) -> cute.Tensor:
        source = self.source[(None, at), 0, 0, stage]
        found = cute.make_rmem_tensor(source.shape, self.dtype)
        cute.copy(self.copy, source, found)
        return found


class RowReader(NamedTuple):
    """One thread, one row of the boxes in shared memory ``s`` (queries, keys, stages).

    16 bytes at a time: the swizzle gives the rows of eight threads that read side by side eight
    different sixteenths of a bank line.
    """

    node: int
    dtype: type
    s: cute.Tensor
    row: Int32

    def values(self, stage: Int32) -> dict[int, Columns]:
        """As ``Reader.values``."""
        return {self.node: lambda columns: self._columns(columns, stage)}

    def _columns(self, columns: range, stage: Int32) -> Value:
        width = VECTOR // self.dtype.width
        assert columns.start % width == columns.stop % width == 0
        parts = [self.piece(at, stage) for at in range(columns.start, columns.stop, width)]
        wide = [part.load().to(cutlass.Float32).ir_value() for part in parts]
        return Value("element", (emit.joined(wide),))

    def piece(self, first: int, stage: Int32) -> cute.Tensor:
        """The 16 bytes of the row from column ``first`` on."""
        width = VECTOR // self.dtype.width
        source = cute.local_tile(self.s[self.row, None, stage], (width,), (first // width,))
        found = cute.make_rmem_tensor(source.shape, self.dtype)
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=VECTOR
        )
        cute.copy(atom, source, found)
        return found


def _widened(piece: cute.Tensor) -> Any:
    """Eight 16-bit values in fp32; of bfloat16 an instruction each, where ptxas makes three of two.

    522 instructions a block became 490: d128 full 571 -> 577 TFLOP/s, causal 531 -> 587.
    """
    found = piece.load()
    if piece.element_type is not cutlass.BFloat16:
        return found.to(cutlass.Float32).ir_value()
    words, floats = (ir.VectorType.get([4], kind) for kind in (emit.integer(32), ir.F32Type.get()))
    pairs = vector.bitcast(words, found.ir_value())
    halves = arith.shli(pairs, emit.like(pairs, 16)), arith.andi(pairs, emit.like(pairs, -1 << 16))
    low, high = (vector.bitcast(floats, half) for half in halves)
    return vector.shuffle(low, high, [0, 4, 1, 5, 2, 6, 3, 7])
