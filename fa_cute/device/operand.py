"""A tensor that TMA loads: its copy atom, its view by coordinates, and the copy of one block."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import cute as cute_dialect
from cutlass.cute.nvgpu import cpasync


class Reuse(Enum):
    """L2's policy for what a copy reads: the encoded cache hints of the PTX ISA.

    K and V are read by every tile of queries, Q by one. d128 causal, 628 -> 632 TFLOP/s at S8k and
    638 -> 652 at S16k, at 675 W where it was 721 W (the card's limit is 700 W).
    """

    ONCE = 0x12F0000000000000  # evict first
    SOON = 0x1000000000000000  # evict normal: read again within microseconds, by other heads
    OFTEN = 0x14F0000000000000  # evict last


ONE_CTA = cpasync.CopyBulkTensorTileG2SOp()


class TmaOperand(NamedTuple):
    """``atom`` copies a (rows, columns) box; ``tensor`` (S, D, H, B) holds coordinates.

    Of a bias, (Sq, Sk, ...): its other dimensions follow.
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor


def tma_operand(
    tensor: cute.Tensor, layout: Any, box: tuple[int, int], load: Any = ONE_CTA
) -> TmaOperand:
    """``tensor`` (B, S, H, D) loaded in boxes of ``box`` = (rows of S, columns of D).

    ``layout`` is the staged shared-memory layout. Rows past S arrive as zeros, whatever memory
    holds there.
    """
    # The compiler's ``cute.select`` reads the shape for each mode: 32 operations traced.
    layout_by_row = cute_dialect.select(tensor.layout, mode=[1, 3, 2, 0])
    by_row = cute.make_tensor(tensor.iterator, layout_by_row)
    return box_operand(by_row, layout, box, load)


def box_operand(
    by_row: cute.Tensor, layout: Any, box: tuple[int, int], load: Any = ONE_CTA
) -> TmaOperand:
    """``by_row`` (rows, columns, ...) loaded in boxes of ``box``; ``layout`` as above."""
    one_stage = cute.select(layout, mode=[0, 1])
    return TmaOperand(*cpasync.make_tiled_tma_atom(load, by_row, one_stage, box, 1))


def loader(
    operand: TmaOperand,
    s: cute.Tensor,
    head: Int32,
    batch: Int32,
    reuse: Reuse,
    column: Int32 | int = 0,
) -> Callable[[Int32, Any], None]:
    """``load(block, slot)``: copy that block of the head's rows into the slot's stage.

    ``column``: which box of the columns, where one does not hold all.
    """
    return box_loader(operand, s, (head, batch), (None, column), reuse)


def box_loader(
    operand: TmaOperand, s: cute.Tensor, at: tuple, boxes: tuple, reuse: Reuse
) -> Callable[[Int32, Any], None]:
    """``load(block, slot)``: copy a box of the operand's first two dimensions at ``at``.

    ``boxes``: which box of rows and which of columns; ``block`` takes the place of None.
    """
    to, of = _parts(operand, s, at, boxes)

    def load(block: Int32, slot: Any) -> None:
        source, target = of[None, block], to[None, slot.index]
        policy = Int64(reuse.value)
        bound = operand.atom._unpack(tma_bar_ptr=slot.barrier, cache_policy=policy)
        issue(bound, source, target, slot.barrier)

    return load


def issue(bound: Any, source: cute.Tensor, target: cute.Tensor, barrier: Any) -> None:
    """Issue one copy by the atom ``bound``, which completes on ``barrier``.

    ``cute.copy`` of the same, with its questions about shapes, is 61 operations traced, not 4.
    """
    cute_dialect.copy(bound, [source.value], [target.value])


def box_fetcher(
    operand: TmaOperand, s: cute.Tensor, at: tuple, boxes: tuple
) -> Callable[[Int32], None]:
    """``fetch(block)``: bring into L2 what ``box_loader``'s ``load`` will copy."""
    _, of = _parts(operand, s, at, boxes)
    return lambda block: cute.prefetch(operand.atom, of[None, block])


def _parts(operand: TmaOperand, s: cute.Tensor, at: tuple, boxes: tuple) -> tuple[Any, Any]:
    """Shared memory (box, stages) and the operand (box, blocks), as TMA sees them."""
    box = (cute.size(s, mode=[0]), cute.size(s, mode=[1]))
    g = cute.local_tile(operand.tensor[(None, None, *at)], box, boxes)
    return cpasync.tma_partition(
        operand.atom,
        0,
        cute.make_layout(1),
        cute_dialect.group_modes(s.value, 0, 2),
        cute_dialect.group_modes(g.value, 0, 2),
    )


def row_loader(rows: cute.Tensor, s: cute.Tensor) -> Callable[[Int32, Any], None]:
    """``load(block, slot)``: copy a block of the fp32 ``rows`` (n,) to the slot's of ``s``.

    ``s`` is (block, stages); ``rows`` holds whole blocks. One lane copies.
    """
    size = cute.size(s, mode=[0])
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    of = cute.local_tile(rows, (size,), (None,))

    def load(block: Int32, slot: Any) -> None:
        with cute.arch.elect_one():
            bound = atom._unpack(mbar_ptr=slot.barrier)
            issue(bound, of[None, block], s[None, slot.index], slot.barrier)

    return load
