"""Four floats at a time to and from global memory, where a kernel addresses them by number."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import arith, llvm

from fa_cute.device import emit
from fa_cute.device.mma_sm90 import Pieces

FLOATS = 4
BYTES = 16


def vector_of(tensor: cute.Tensor, at: Any) -> cute.Tensor:
    """The vector number ``at`` of a compact fp32 tensor on 16 bytes, as a tensor (4,)."""
    pointer = tensor.iterator + at * FLOATS
    aligned = cute.make_ptr(Float32, pointer.toint(), pointer.memspace, assumed_align=16)
    return cute.make_tensor(aligned, cute.make_layout(FLOATS))


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
