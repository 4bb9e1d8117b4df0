"""Graph to torch: the CPU path, and the oracle of the other emitters.

Types follow torch: constants and by-value scalars are weak Python numbers, integers are int32, and
a float keeps its precision, so an fp64 score is computed in fp64 and differentiates. Shapes follow
the leaves by broadcasting; a short vector has one more dimension, the last.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fa_cute.mods.fold import Number
from fa_cute.mods.graph import Graph, Node

_INTEGERS = frozenset(
    (torch.int8, torch.int16, torch.int64, torch.uint8, torch.uint16, torch.uint32)
)
_WIDE_FLOATS = (torch.float32, torch.float64)
_DTYPES = {"bool": torch.bool, "int32": torch.int32, "float32": torch.float32}


def _constant(x: Tensor | Number) -> Tensor | Number:
    return x.detach() if isinstance(x, Tensor) else x


def _floordiv(x: Tensor | Number, y: Tensor | Number) -> Tensor | Number:
    """``x // y`` with the gradient of a step, 0, as in the kernels: torch's has none and raises."""
    return _constant(x) // _divisor(_constant(y))


def _mod(x: Tensor | Number, y: Tensor | Number) -> Tensor | Number:
    return x % _divisor(y)


def _divisor(y: Tensor | Number) -> Tensor | Number:
    """``y``, an integer 0 as 1: on a CPU torch raises, behind a ``where`` that guards it too."""
    if isinstance(y, Tensor):
        return y if y.dtype.is_floating_point else torch.where(y == 0, 1, y)
    return 1 if type(y) is int and y == 0 else y


_FUNCTIONS: dict[str, Callable] = {
    "floordiv": _floordiv,
    **{name: getattr(torch, name) for name in ("neg", "abs", "sign", "exp", "exp2", "log", "sqrt")},
    **{name: getattr(torch, name) for name in ("rsqrt", "tanh", "sigmoid", "sin", "cos", "erf")},
    **{name: getattr(torch, name) for name in ("floor", "ceil", "round", "trunc")},
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv")},
    **{name: getattr(operator, name) for name in ("pow", "lt", "le", "eq", "ne")},
    "mod": _mod,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": operator.invert,
    "shl": operator.lshift,
    "shr": operator.rshift,
    "where": torch.where,
    "sum": lambda x: x.sum(-1),
}
# These take no Python number beside a tensor.
_TENSORS_ONLY = {"minimum": torch.minimum, "maximum": torch.maximum}


def emit(
    graph: Graph,
    captured: Sequence[Tensor],
    scalars: Sequence[Number],
    *,
    score: Tensor | None = None,
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
) -> Tensor:
    """The value of ``graph``: float for a score_mod, bool for a mask_mod.

    The leaves are tensors that broadcast together; the result has their broadcast shape, or a
    smaller one where the mod does not read them all. ``score`` may have any float dtype: fp16 and
    bf16 are computed in fp32, fp32 and fp64 as they are. Differentiable with respect to ``score``
    and the captured tensors.
    """
    leaves = {"b": b, "h": h, "q": q, "kv": kv}
    if score is not None:
        leaves["score"] = _as_float(score)
    (result,) = values_of(graph, (graph.result,), captured, scalars, leaves)
    return result if score is None else result.to(leaves["score"].dtype)


def values_of(
    graph: Graph,
    wanted: Sequence[int],
    captured: Sequence[Tensor],
    scalars: Sequence[Number],
    leaves: Mapping[str, Tensor],
) -> list[Tensor]:
    """The values of the nodes ``wanted``; ``leaves`` as in ``emit``, by name."""
    near = leaves["q"]
    leaves = {
        name: leaf if name == "score" else leaf.to(torch.int32) for name, leaf in leaves.items()
    }
    values: list[Tensor | Number] = []
    for node in graph.nodes:
        if node.op == "const":
            values.append(node.attr)
        elif node.op == "scalar":
            values.append(scalars[node.attr])
        elif node.op == "load":
            values.append(_load(captured[node.attr], [values[arg] for arg in node.args], near))
        elif node.op in leaves:
            values.append(leaves[node.op])
        else:
            values.append(_apply(graph, node, values, near))
    return [_tensor(values[at], graph.nodes[at].type, near) for at in wanted]


def _apply(graph: Graph, node: Node, values: list[Tensor | Number], near: Tensor) -> Tensor:
    operands = [graph.nodes[arg] for arg in node.args]
    args = [values[arg] for arg in node.args]
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    strict = node.op in _TENSORS_ONLY
    # torch.where takes a tensor condition, and at most one number beside it.
    bare = node.op == "where" and (len(tensors) == 1 or not isinstance(args[0], Tensor))
    if strict or bare or not tensors:
        dtype = next((t.dtype for t in tensors if t.dtype.is_floating_point), None)
        args = [
            _tensor(arg, operand.type, near, dtype)
            for arg, operand in zip(args, operands, strict=True)
        ]
    if node.width > 1:
        args = [
            arg.unsqueeze(-1) if operand.width == 1 and isinstance(arg, Tensor) else arg
            for arg, operand in zip(args, operands, strict=True)
        ]
    if node.op == "cast":
        return _cast(args[0], operands[0].type, node.type)
    if node.attr in _TIES:
        return _TIES[node.attr](node.op, *args)
    if node.op == "round_to":
        return args[0].to(getattr(torch, node.attr)).to(args[0].dtype)
    return (_TENSORS_ONLY if strict else _FUNCTIONS)[node.op](*args)


def _clamp(op: str, x: Tensor, bound: Tensor) -> Tensor:
    """``minimum`` or ``maximum``, whose gradient is all of ``x`` where they are equal."""
    loses = x > bound if op == "minimum" else x < bound
    return torch.where(loses, bound, x)


def _relu(op: str, x: Tensor, bound: Tensor) -> Tensor:
    """The same with no gradient where they are equal; NaN stays."""
    wins = x < bound if op == "minimum" else x > bound
    return torch.where(wins | (x != x), x, bound)


_TIES = {"clamp": _clamp, "relu": _relu}


def _cast(value: Tensor, source: str, type: str) -> Tensor:
    return value if source == type else value.to(_DTYPES[type])


def _tensor(
    value: Tensor | Number, type: str, near: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    if isinstance(value, Tensor):
        return value
    chosen = dtype if dtype is not None and type == "float32" else _DTYPES[type]
    return torch.tensor(value, dtype=chosen, device=near.device)


def _as_float(value: Tensor) -> Tensor:
    return value if value.dtype in _WIDE_FLOATS else value.float()


def _load(source: Tensor, indices: list[Tensor | Number], near: Tensor) -> Tensor:
    """``source[indices]`` with each index wrapped once if negative, then clamped."""
    if source.dtype.itemsize < 2 or source.dtype in (torch.uint16, torch.uint32):
        # torch does not index every narrow dtype on every device; the wide copy is exact.
        source = _readable(source)
    if indices:
        # A constant index has as many dimensions as the leaves: torch promotes 0-d values less.
        ones = (1,) * near.ndim
        inside = [
            _inside(x if isinstance(x, Tensor) else _tensor(x, "int32", near).view(ones), size)
            for x, size in zip(indices, source.shape, strict=False)
        ]
        learned = source.requires_grad and torch.is_grad_enabled()
        source = _Read.apply(source, *inside) if learned else source[tuple(inside)]
    return _readable(source)


class _Read(torch.autograd.Function):
    """``source[indices]``, whose gradient is added up in one order.

    Torch adds it up in several threads: not the same bits twice, and in 1.2 to 5 times the time (a
    million elements to 32 to a million places, two cores).
    """

    @staticmethod
    def forward(ctx: FunctionCtx, source: Tensor, *indices: Tensor) -> Tensor:
        ctx.shape = source.shape
        ctx.save_for_backward(*indices)
        return source[indices]

    @staticmethod
    def backward(ctx: FunctionCtx, given: Tensor) -> tuple[Tensor | None, ...]:
        indices = ctx.saved_tensors
        leading, rest = ctx.shape[: len(indices)], ctx.shape[len(indices) :]
        place = indices[0]
        for index, size in zip(indices[1:], leading[1:], strict=True):
            place = place * size + index
        total = given.new_zeros(leading.numel(), *rest)
        total = total.index_add(0, place.reshape(-1), given.reshape(-1, *rest))
        return total.view(ctx.shape), *(None for _ in indices)


def _readable(value: Tensor) -> Tensor:
    if value.dtype in _INTEGERS:
        return value.to(torch.int32)
    return value if value.dtype in (torch.bool, torch.int32) else _as_float(value)


def _inside(index: Tensor, size: int) -> Tensor:
    return torch.where(index < 0, index + size, index).clamp(0, size - 1).long()
