"""Four floats at a time to and from global memory, where a kernel addresses them by number."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm

FLOATS = 4  # 16 bytes


def vector_of(tensor: cute.Tensor, at: Any) -> cute.Tensor:
    """The vector number ``at`` of a compact fp32 tensor on 16 bytes, as a tensor (4,)."""
    pointer = tensor.iterator + at * FLOATS
    aligned = cute.make_ptr(Float32, pointer.toint(), pointer.memspace, assumed_align=16)
    return cute.make_tensor(aligned, cute.make_layout(FLOATS))


def add_to(target: cute.Tensor, values: list[Float32]) -> None:
    """Add four values to the vector ``target`` in global memory: one reduction at the L2."""
    address = target.iterator.toint().ir_value()
    operands = [address, *(Float32(value).ir_value() for value in values)]
    llvm.inline_asm(
        None,
        operands,
        "red.global.add.v4.f32 [$0], {$1, $2, $3, $4};",
        "l,f,f,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def add_parts(sums: cute.Tensor, place: tuple[Int32, int, Int32], values: cute.Tensor) -> None:
    """Add a thread's ``values`` to its part of the compact fp32 ``sums``.

    ``place``: the number of the group's part, the group's threads, the thread's number among them.
    Vector j of thread t is number ``threads * j + t`` of the part: a warp adds to whole lines.
    """
    part, threads, thread = place
    count = cute.size(values) // FLOATS
    first = Int64(part) * (count * threads)
    for j in range(count):
        target = vector_of(sums, first + (j * threads + thread))
        add_to(target, [values[FLOATS * j + k] for k in range(FLOATS)])
