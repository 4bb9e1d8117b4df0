"""16 bytes at a time to and from global memory, where a kernel addresses them by number.

A load is an address and an operation; a copy by the compiler's tensors traces thirty.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm

from fa_cute.device import emit
from fa_cute.device.mma_sm90 import Pieces

FLOATS = 4
BYTES = 16
_DYNAMIC = -(2**31)  # an index of an address that is a value


def load(tensor: cute.Tensor, at: Int32 | Int64) -> Any:
    """The vector number ``at`` of a compact tensor that begins on 16 bytes."""
    element = tensor.element_type
    kind = ir.VectorType.get([8 * BYTES // element.width], element.mlir_type)
    return llvm.load(kind, _place(tensor, at), alignment=BYTES)


def store(tensor: cute.Tensor, at: Int32 | Int64, vector: Any) -> None:
    """Write vector number ``at`` of such a tensor."""
    llvm.store(vector, _place(tensor, at), alignment=BYTES)


def _place(tensor: cute.Tensor, at: Int32 | Int64) -> Any:
    base, vector = tensor.iterator.llvm_ptr, ir.VectorType.get([BYTES], emit.integer(8))
    return llvm.getelementptr(base.type, base, [at.ir_value()], [_DYNAMIC], vector, None)


def add_parts(sums: cute.Tensor, place: tuple[Int32, int, Int32], values: cute.Tensor) -> None:
    """Add a thread's fragment of fp32 ``values`` to its part of the compact fp32 ``sums``.

    ``place``: the number of the group's part, the group's threads, the thread's number among them.
    Vector j of thread t is number ``threads * j + t`` of the part: a warp adds to whole lines. One
    reduction at the L2 a vector.
    """
    part, threads, thread = place
    pieces, wide = Pieces(values), emit.integer(64)
    first = Int64(part) * (cute.size(values) // FLOATS * threads) + thread
    base = (sums.iterator + first * FLOATS).toint().ir_value()
    lanes = [lane for piece in pieces.all() for lane in emit.lanes_in(piece)]
    for j in range(len(lanes) // FLOATS):
        address = arith.addi(base, arith.constant(wide, BYTES * threads * j))
        llvm.inline_asm(
            None,
            [address, *lanes[FLOATS * j : FLOATS * (j + 1)]],
            "red.global.add.v4.f32 [$0], {$1, $2, $3, $4};",
            "l,f,f,f,f",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
