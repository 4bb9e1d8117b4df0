"""Bulk reductions: sums in global memory that a copy from shared memory adds to.

PTX ISA, "cp.reduce.async.bulk". The threads that wrote the source have fenced
(``fence_proxy("async.shared")``) before the thread that adds knows of it.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int64
from cutlass._mlir.dialects import llvm


def add(source: cute.Tensor, target: Int64, *, visible: bool = False) -> None:
    """Add the compact fp32 ``source`` in shared memory to the numbers at the address ``target``.

    One thread calls it. When it returns the source has been read; ``visible``: and what it added is
    seen by all that synchronise with the thread.
    """
    size = 4 * cute.cosize(source.layout)
    lines = [
        "fence.proxy.async.global;",
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], {size};",
        "cp.async.bulk.commit_group;",
        f"cp.async.bulk.wait_group{'' if visible else '.read'} 0;",
        *(["fence.proxy.async.global;"] if visible else []),
    ]
    llvm.inline_asm(
        None,
        [target.ir_value(), source.iterator.toint().ir_value()],
        "\n".join(lines),
        "l,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
