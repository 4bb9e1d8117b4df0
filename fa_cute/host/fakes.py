"""Arguments that stand for those of a kernel while it is compiled: types, and what is unknown.

Lengths and strides are symbols, of which only what TMA asks is presumed: so no length and no stride
ever recompiles.
"""

from __future__ import annotations

from typing import Any

from fa_cute.host import target
from fa_cute.mods.derived import taught
from fa_cute.mods.graph import Captured
from fa_cute.plan import (
    FORWARD,
    POSTPROCESS,
    PREPROCESS,
    BlockLists,
    BwdIo,
    Extra,
    Io,
    Launch,
    Plan,
    PostprocessIo,
    PreprocessIo,
)


def arguments(plan: Plan) -> tuple[Any, Extra, Launch]:
    """Tensors and numbers of the kernel's types: lengths and strides are unknowns."""
    import cutlass
    from cutlass import Float32, Int32

    graphs = [graph for graph in (plan.score_mod, plan.mask_mod) if graph is not None]
    numbers = {"float32": Float32, "int32": Int32, "bool": cutlass.Boolean}
    captured = [captured_tensor(c) for graph in graphs for c in graph.captured]
    if plan.bias is not None:  # score_mod's are the first
        captured[plan.bias] = _tiled(plan.score_mod.captured[plan.bias])
    scalars = tuple(numbers[kind](0) for graph in graphs for kind in graph.scalars)
    return (
        _io(plan),
        Extra(
            tuple(captured) or None,
            scalars or None,
            _sinks() if plan.sinks else None,
            _gradients(plan),
            _lists(turns=plan.deterministic) if plan.block_lists else None,
        ),
        Launch(Float32(0), Int32(0), Int32(0), Int32(0), _counter(), _scratch(plan)),
    )


def _io(plan: Plan) -> Any:
    q, dk, k, v, out, dout = (
        _operand(plan.dtype, width) for width in (plan.head_dim,) * 3 + (plan.head_dim_v,) * 3
    )
    if plan.direction == FORWARD:
        return Io(q, k, v, out, _rows() if plan.return_lse else None)
    of_q, of_kv = plan.gradients
    sums = _operand("float32", plan.width) if of_q else None
    if plan.direction == POSTPROCESS:
        return PostprocessIo(sums, dk)
    shift, delta = _rows(aligned=True), _rows(aligned=True)
    turns = _rows("int32") if plan.in_turn else None
    zeroed = _rows("int32") if plan.zeroes else None
    if plan.direction == PREPROCESS:
        dlse = _rows() if plan.return_lse else None
        return PreprocessIo(out, dout, _rows(), dlse, shift, delta, sums, turns, zeroed)
    dk, dv = (dk, out) if of_kv else (None, None)
    return BwdIo(q, k, v, dout, shift, delta, sums, dk, dv, turns, zeroed)


def _element(dtype: str) -> Any:
    import cutlass

    special = {
        "bool": "Uint8",
        "bfloat16": "BFloat16",
        "float8_e4m3fn": "Float8E4M3FN",
        "float8_e5m2": "Float8E5M2",
    }
    return getattr(cutlass, special.get(dtype, dtype.capitalize()))


def _operand(dtype: str, width: int) -> Any:
    """(B, S, H, width): the last dimension contiguous, rows on 16 bytes."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    element = _element(dtype)
    step = 128 // element.width
    shape = (*(cute.sym_int() for _ in range(3)), width)
    stride = (*(cute.sym_int64(divisibility=step) for _ in range(3)), 1)
    return make_fake_tensor(element, shape, stride, assumed_align=16)


def _rows(dtype: str = "float32", *, aligned: bool = False) -> Any:
    """(B, Hq, ·), the last dimension contiguous; ``aligned``: each (b, h) begins on 16 bytes."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    shape = tuple(cute.sym_int() for _ in range(3))
    step = 4 if aligned else 1
    stride = (*(cute.sym_int64(divisibility=step) for _ in range(2)), 1)
    return make_fake_tensor(_element(dtype), shape, stride, assumed_align=4 * step)


def _sinks() -> Any:
    """(Hq,) of float32, any stride."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    return make_fake_tensor(
        _element("float32"), (cute.sym_int(),), (cute.sym_int64(),), assumed_align=4
    )


def _lists(*, turns: bool) -> BlockLists:
    """begin, end and order (B, Hq, tiles), entries and turns (n,): int32, any strides."""
    ranks = (3, 3, 3, 1, 1) if turns else (3, 3, 3, 1)
    return BlockLists(*(captured_tensor(Captured("int32", rank)) for rank in ranks))


def _counter() -> Any:
    from cutlass.cute.runtime import make_fake_compact_tensor

    return make_fake_compact_tensor(_element("int32"), (1,))


def _scratch(plan: Plan) -> Any:
    """(words,) of float32 where the target is hosted, else None."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor

    if not target.is_hosted(plan.target):
        return None
    return make_fake_compact_tensor(_element("float32"), (cute.sym_int(),), assumed_align=16)


def captured_tensor(captured: Captured) -> Any:
    """Any shape and strides; the last dimension is static where a partial index makes it so."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    element = _element(captured.dtype)
    shape = [cute.sym_int() for _ in range(captured.ndim)]
    if captured.inner is not None:
        shape[-1] = captured.inner
    stride = tuple(cute.sym_int64() for _ in range(captured.ndim))
    return make_fake_tensor(element, tuple(shape), stride, assumed_align=element.width // 8)


def _tiled(captured: Captured) -> Any:
    """Any shape; the last dimension contiguous, all else on 16 bytes, as TMA reads."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    element = _element(captured.dtype)
    step = 128 // element.width
    shape = tuple(cute.sym_int() for _ in range(captured.ndim))
    stride = (*(cute.sym_int64(divisibility=step) for _ in shape[1:]), 1)
    return make_fake_tensor(element, shape, stride, assumed_align=16)


def _gradients(plan: Plan) -> tuple[Any, ...] | None:
    """Sums like those that a graph with its derivative gives gradients to: see ``Extra``."""
    graph = plan.score_mod
    if graph is None or not graph.more:
        return None
    dtype = "int64" if plan.deterministic else "float32"
    shapes = (graph.captured[slot].ndim for slot in taught(graph))
    return tuple(captured_tensor(Captured(dtype, ndim)) for ndim in shapes) or None
