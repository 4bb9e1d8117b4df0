"""Random mods: a graph computes what its function computes, and canonical form is a fixed point."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from fa_cute.mods import trace
from fa_cute.mods.canonical import canonical
from fa_cute.mods.emit_torch import emit
from fa_cute.mods.graph import Graph
from fa_cute.mods.simplify import RULES
from fa_cute.mods.trace import trace_mask_mod, trace_score_mod

B, H, Q, KV = 2, 3, 6, 7
QUICK = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


def _tables() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "float": torch.randn(B, H, generator=generator),
        "half": torch.randn(H, Q + KV, generator=generator, dtype=torch.float16),
        "double": torch.randn(Q, KV, generator=generator, dtype=torch.float64).t(),
        "int": torch.randint(0, 5, (B, KV), generator=generator),
        "byte": torch.randint(0, 5, (KV,), generator=generator, dtype=torch.uint8),
        "bool": torch.rand(Q, generator=generator) < 0.5,
    }


TABLES = _tables()
SCALARS = {"float": torch.tensor(0.75), "int": torch.tensor(3), "bool": torch.tensor(True)}


class Leaves(NamedTuple):
    """The arguments of a mod: traced values, or tensors that broadcast to (B, H, Q, KV)."""

    score: object
    b: object
    h: object
    q: object
    kv: object


Expression = Callable[[Leaves], object]


def _unary(function: Callable, x: Expression) -> Expression:
    return lambda leaves: function(x(leaves))


def _binary(function: Callable, x: Expression, y: Expression) -> Expression:
    return lambda leaves: function(x(leaves), y(leaves))


def _ternary(c: Expression, x: Expression, y: Expression) -> Expression:
    return lambda leaves: torch.where(c(leaves), x(leaves), y(leaves))


FLOAT_UNARY = (
    *(
        torch.neg,
        torch.abs,
        torch.tanh,
        torch.sigmoid,
        torch.sin,
        torch.cos,
        torch.erf,
        torch.floor,
    ),
    *(torch.ceil, torch.trunc, torch.sign, F.relu, F.silu, F.gelu, F.softplus, F.elu, F.hardtanh),
    *(F.logsigmoid, F.softsign, F.leaky_relu, F.hardswish, F.mish, torch.square, torch.expm1),
    functools.partial(F.gelu, approximate="tanh"),
    lambda x: torch.exp(-x.abs()),
    lambda x: torch.exp2(torch.clamp(x, -4, 4)),
    lambda x: torch.log(x.abs() + 1.0),
    lambda x: torch.log1p(x.abs()),
    lambda x: torch.log2(x.abs() + 2),
    lambda x: torch.sqrt(x * x),
    lambda x: torch.rsqrt(x * x + 1),
    lambda x: 1 / (1 + x**2),
    lambda x: x / 4,
    lambda x: x * -1.0 + 0,
    lambda x: (2.5 - x) / 1.5,
    lambda x: x.clamp(min=-1).clamp_max(2.0),
    lambda x: x.masked_fill(x > 1, 0.5),
    lambda x: torch.fmod(x, 1.5),
    lambda x: x % 1.25,
    lambda x: x // 0.75,
    lambda x: torch.zeros_like(x) + 1 - x,
)
FLOAT_BINARY = (
    *(torch.add, torch.sub, torch.mul, torch.minimum, torch.maximum, torch.logaddexp),
    lambda x, y: x - 0.5 * y,
    lambda x, y: x / (y.abs() + 1),
    lambda x, y: (x.abs() + 1) ** torch.clamp(y, -2, 2),
)
INT_UNARY = (
    *(torch.neg, torch.abs, torch.sign, torch.bitwise_not, F.relu),
    *(lambda x, n=n: x // n for n in (1, 3, 4, -2, -3)),
    *(lambda x, n=n: x % n for n in (1, 3, 4, -2, -3)),
    lambda x: x * 2 - 7,
    lambda x: 5 - x,
    lambda x: x**2,
    lambda x: x << 2,
    lambda x: x >> 1,
    lambda x: torch.div(x, 3, rounding_mode="trunc"),
    lambda x: torch.fmod(x, 3),
    lambda x: (x + 3) + 4,
    lambda x: x.clamp(-3, 5),
    lambda x: x.to(torch.uint8).int(),
    lambda x: x * 0,
)
INT_BINARY = (
    *(torch.add, torch.sub, torch.mul, torch.minimum, torch.maximum),
    lambda x, y: x & y,
    lambda x, y: x | y,
    lambda x, y: x ^ y,
    lambda x, y: x // (y * y + 1),
    lambda x, y: x % (y * y + 1),
    lambda x, y: x % -(y * y + 1),
)
BOOL_BINARY = (
    *(torch.logical_and, torch.logical_or, torch.logical_xor, torch.eq, torch.ne),
    lambda x, y: x & ~y,
    lambda x, y: ~x | y,
    lambda x, y: x ^ y,
)
COMPARE = (torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne)


def _indices(x: Expression, size: int) -> Expression:
    return lambda leaves: x(leaves) % size


def _loads(ints: st.SearchStrategy[Expression], name: str) -> st.SearchStrategy[Expression]:
    table = TABLES[name]

    def read(*index: Expression) -> Expression:
        inside = [_indices(x, size) for x, size in zip(index, table.shape, strict=True)]
        return lambda leaves: table[tuple(x(leaves) for x in inside)]

    return st.builds(read, *([ints] * table.ndim))


def _constants(values: list[object]) -> st.SearchStrategy[Expression]:
    return st.sampled_from(values).map(
        lambda value: lambda leaves: torch.zeros_like(leaves.q) + value
    )


def _grow(depth: int) -> dict[str, st.SearchStrategy[Expression]]:
    """Strategies of float, int and bool expressions of at most some depth."""
    if depth == 0:
        return {
            "int": st.sampled_from([lambda x: x.q, lambda x: x.kv, lambda x: x.h, lambda x: x.b])
            | _constants([0, 1, 4, -3])
            | st.just(lambda x: x.h + SCALARS["int"]),
            "float": st.sampled_from([lambda x: x.score, lambda x: x.score * SCALARS["float"]])
            | _constants([0.0, 1.0, 0.5, -2.25]),
            "bool": st.sampled_from(
                [lambda x: x.q >= x.kv, lambda x: (x.h == 1) & SCALARS["bool"]]
            ),
        }
    less = _grow(depth - 1)
    float, int, bool = less["float"], less["int"], less["bool"]
    sample = st.sampled_from
    half = _loads(int, "half").map(lambda load: lambda leaves: load(leaves).float())
    byte = _loads(int, "byte").map(lambda load: lambda leaves: load(leaves).int())
    # One alternative, as likely as any other: `|` alone would make each table one.
    floats = st.one_of(half, _loads(int, "float"), _loads(int, "double")).map(_same)
    ints = st.one_of(byte, _loads(int, "int")).map(_same)
    return {
        "float": st.builds(_unary, sample(FLOAT_UNARY), float)
        | st.builds(_binary, sample(FLOAT_BINARY), float, float)
        | st.builds(_ternary, bool, float, float)
        | st.builds(_unary, sample([lambda x: x.float() / 3, lambda x: x / 2, torch.sigmoid]), int)
        | floats,
        "int": st.builds(_unary, sample(INT_UNARY), int)
        | st.builds(_binary, sample(INT_BINARY), int, int)
        | st.builds(_ternary, bool, int, int)
        | st.builds(_unary, sample([lambda x: x.int(), lambda x: x + 2]), bool)
        | ints,
        "bool": st.builds(_unary, sample([torch.logical_not, lambda x: ~x]), bool)
        | st.builds(_binary, sample(BOOL_BINARY), bool, bool)
        | st.builds(_binary, sample(COMPARE), int, int)
        | st.builds(_binary, sample(COMPARE), float, float)
        | st.builds(_unary, sample([lambda x: x.bool(), lambda x: x != 0, lambda x: x < 3]), int)
        | _loads(int, "bool"),
    }


def _same(expression: Expression) -> Expression:
    return expression


GROWN = _grow(4)


def leaves() -> dict[str, torch.Tensor]:
    """Index leaves and fp64 scores that broadcast to (B, H, Q, KV)."""
    generator = torch.Generator().manual_seed(1)
    sizes = {"b": B, "h": H, "q": Q, "kv": KV}
    shapes = {name: [1] * at + [-1] + [1] * (3 - at) for at, name in enumerate(sizes)}
    indices = {
        name: torch.arange(size, dtype=torch.int32).view(shapes[name])
        for name, size in sizes.items()
    }
    score = torch.randn(B, H, Q, KV, generator=generator, dtype=torch.float64) * 2
    return {"score": score, **indices}


def emitted(graph: Graph, traced: object) -> torch.Tensor:
    """The graph's value at every (b, h, q, kv)."""
    value = emit(graph, traced.captured, traced.scalars, **leaves())
    return value.expand(B, H, Q, KV)


@QUICK
@given(GROWN["float"])
def test_a_score_mod_computes_what_its_function_does(expression: Expression) -> None:
    agree(lambda *args: expression(Leaves(*args)))


def agree(score_mod: Callable) -> None:
    """Raise AssertionError where the graph's value is not the function's own."""
    traced = trace_score_mod(score_mod)
    eager = score_mod(*leaves().values()).expand(B, H, Q, KV)
    steady = _settled(score_mod, eager)
    got = emitted(traced.graph, traced)
    # Eager torch computes what does not touch the score in fp32, in an order of its own.
    torch.testing.assert_close(
        got[steady].double(), eager[steady].double(), rtol=2e-4, atol=2e-4, equal_nan=True
    )


def _settled(score_mod: Callable, eager: torch.Tensor) -> torch.Tensor:
    """Where the function is continuous: rounding alone may not carry it over a step."""
    place = leaves()
    steady = torch.ones(B, H, Q, KV, dtype=torch.bool)
    for shift in (1e-6, -1e-6):
        moved = score_mod(*{**place, "score": place["score"] * (1 + shift) + shift}.values())
        near = torch.isclose(moved.double(), eager.double(), rtol=1e-3, atol=1e-3, equal_nan=True)
        steady &= near.expand(B, H, Q, KV)
    return steady & torch.isfinite(eager.double())


@QUICK
@given(GROWN["bool"])
def test_a_mask_mod_computes_what_its_function_does(expression: Expression) -> None:
    place = {name: leaf for name, leaf in leaves().items() if name != "score"}

    def mask_mod(b, h, q, kv):
        return expression(Leaves((q * 3 - kv) * 0.375, b, h, q, kv))

    traced = trace_mask_mod(mask_mod)
    eager = mask_mod(**place)
    got = emit(*traced, **place)
    assert got.dtype == eager.dtype == torch.bool
    differing = (got.expand(B, H, Q, KV) != eager.expand(B, H, Q, KV)).double().mean()
    # A comparison of two roundings of one fp32 number may fall either way.
    assert differing == 0 or _touches_a_step(mask_mod, place), (
        f"{differing:.1%} of the mask differs"
    )


def _touches_a_step(mask_mod: Callable, place: dict[str, torch.Tensor]) -> bool:
    exact = mask_mod(**place)
    with _DefaultDtype(torch.float64), _Doubled():
        return not torch.equal(exact, mask_mod(**place))


class _Doubled(TorchFunctionMode):
    """``.float()`` gives fp64: gelu of a captured number below -6 is 0 in fp32, and not there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        doubled = torch.Tensor.double if func is torch.Tensor.float else func
        return doubled(*args, **(kwargs or {}))


class _DefaultDtype:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._before = dtype, torch.get_default_dtype()

    def __enter__(self) -> None:
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(self._before)


@QUICK
@given(GROWN["float"])
def test_canonical_form_is_a_fixed_point(expression: Expression) -> None:
    graph = trace_score_mod(lambda *args: expression(Leaves(*args))).graph
    again = canonical(graph)
    assert again.nodes == graph.nodes and again.key == graph.key


@settings(QUICK, max_examples=40)
@given(GROWN["float"], GROWN["bool"])
def test_levels_are_sound(expression: Expression, condition: Expression) -> None:
    """A value does not change along the indices that its level says it is constant in."""
    traced = trace_score_mod(
        lambda *args: torch.where(condition(Leaves(*args)), expression(Leaves(*args)), 0.0)
    )
    graph, place = traced.graph, leaves()
    place["q"], place["kv"] = place["q"] + 20, place["kv"] + 20
    moved = {**place, "q": place["q"] + 5, "kv": place["kv"] + 5}
    away = {"row": {"kv": place["kv"] + 3}, "column": {"q": place["q"] + 3}, "diagonal": moved}
    away["tile"] = {"q": place["q"] + 3, "kv": place["kv"] + 4}
    for at, level in enumerate(graph.levels()):
        if level in away:
            part = Graph(graph.nodes[: at + 1], at, graph.captured, graph.scalars)
            here = emit(part, traced.captured, traced.scalars, **place)
            there = emit(part, traced.captured, traced.scalars, **{**place, **away[level]})
            torch.testing.assert_close(there, here, rtol=0, atol=0, equal_nan=True)


def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The properties above can fail: a rule that is wrong for negative numbers shows."""
    monkeypatch.setitem(RULES, "floordiv", lambda b, args, values, type: args[0])
    monkeypatch.setattr(trace, "_known_tapes", {})
    with pytest.raises(AssertionError):
        agree(lambda score, b, h, q, kv: score + (q - kv) // 4)
