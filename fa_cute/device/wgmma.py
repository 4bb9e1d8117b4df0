"""All wgmmas of one product as one piece of PTX, with the accumulator in and out once.

The compiler's own ``cute.gemm`` issues them one by one: each loads the whole accumulator (88
registers), names it twice and stores it again, which the optimisers then undo. That was 9 of 12.5
thousand operations of a plain forward (d128) after the passes, and half of the time before ptxas.
The instructions are the same: PTX ISA, "wgmma.mma_async", ``.m64nNk16``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass._mlir.dialects import arith, builtin, llvm
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from fa_cute.device import emit

NAMES = {"BFloat16": "bf16", "Float16": "f16"}
STEP = 16  # columns of A, rows of B, that one wgmma takes
WORDS = 4  # 32-bit registers of A a step, where it comes from registers


def issue(
    mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, *, clear: bool
) -> None:
    """Issue ``acc = a b`` (``clear``) or ``acc += a b``; neither fences nor commits.

    ``acc``: one wgmma's accumulator, fp32. ``a`` (atom, 1, k): descriptors, or registers in the
    order of the steps. ``b`` (atom, 1, k): descriptors.
    """
    count, steps = cute.size(acc), cute.size(b, mode=[2])
    op, fp32 = mma.op, emit.FLOATS["float32"].get()
    assert op.shape_mnk[1] == 2 * count, f"{op.shape_mnk} is not the shape of {count} registers"
    inputs = [] if clear else emit.registers(acc, fp32, count)
    turned = [int(mode == OperandMajorMode.MN) for mode in (op.a_major_mode, op.b_major_mode)]
    if op.a_src == warpgroup.OperandSource.RMEM:
        left, each, turned = emit.registers(a, emit.integer(32), WORDS * steps), WORDS, turned[1:]
    else:
        left, each = _descriptors(a), 1
    operands = [*inputs, *left, *_descriptors(b)]
    constraints = ["=f"] * count + [str(i) for i in range(len(inputs))]
    constraints += ["r" if each == WORDS else "l"] * len(left) + ["l"] * steps
    name = NAMES[op.a_dtype.__name__]
    head = f"wgmma.mma_async.sync.aligned.m64n{2 * count}k{STEP}.f32.{name}.{name}"
    first, second = count + len(inputs), count + len(inputs) + len(left)
    lines = [".reg .pred adds;", f"setp.ne.b32 adds, {int(not clear)}, 0;"]
    for k in range(steps):
        if clear and k == 1:
            lines.append("setp.ne.b32 adds, 1, 0;")
        mine = range(first + each * k, first + each * (k + 1))
        source = _listed(mine) if each == WORDS else f"${mine[0]}"
        flags = ", ".join(map(str, [1, 1, *turned]))
        lines.append(f"{head} {_listed(range(count))}, {source}, ${second + k}, adds, {flags};")
    result = llvm.inline_asm(
        emit.structure(fp32, count),
        operands,
        "{\n" + "\n".join(lines) + "\n}",
        ",".join(constraints),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    llvm.store(result, acc.iterator.llvm_ptr)


def _listed(numbers: Sequence[int]) -> str:
    return "{" + ", ".join(f"${i}" for i in numbers) + "}"


def _descriptors(operand: cute.Tensor) -> list[Any]:
    """The 64-bit descriptor of each step: the stage's own, moved on."""
    wide = emit.integer(64)
    base = builtin.unrealized_conversion_cast([wide], [operand.iterator])
    return [arith.addi(base, arith.constant(wide, start)) for start in _starts(operand)]


def _starts(operand: cute.Tensor) -> list[int]:
    """Where each step begins in shared memory, in units of 16 bytes."""
    shape, stride = _flat(operand.layout.shape[2]), _flat(operand.layout.stride[2])
    starts = []
    for k in range(math.prod(shape)):
        start = 0
        for extent, step in zip(shape, stride, strict=True):
            k, at = divmod(k, extent)
            start += at * step
        starts.append(start)
    return starts


def _flat(mode: Any) -> list[int]:
    return [x for part in mode for x in _flat(part)] if isinstance(mode, tuple) else [mode]
