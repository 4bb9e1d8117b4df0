"""The graph of a mod: its key, its leaves and levels, and the errors of what cannot be traced."""

from __future__ import annotations

import functools
import math
import re
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

import fa_cute
from fa_cute.mods import Graph, ModError, Node, trace_mask_mod, trace_score_mod
from fa_cute.mods import trace as tracing
from fa_cute.mods.canonical import canonical
from fa_cute.mods.emit_torch import emit
from fa_cute.mods.intervals import EMPTY, FULL

SLOPES = torch.tensor([0.5, 0.25])
TABLE = torch.arange(24.0).view(2, 3, 4)
LONG = torch.zeros(2, 300)
C = 1.0


def key(mod: Callable) -> str:
    """The key of a score_mod."""
    return trace_score_mod(mod).graph.key


def value(mod: Callable, score: float = 0.0, *, b: int = 0, h: int = 0, q: int = 0, kv: int = 0):
    """A score_mod's graph at one place."""
    at = {"b": b, "h": h, "q": q, "kv": kv}
    leaves = {name: torch.tensor(index, dtype=torch.int32) for name, index in at.items()}
    return emit(*trace_score_mod(mod), score=torch.tensor(score), **leaves).item()


# Identity.


def test_keys_are_the_same_in_every_process() -> None:
    code = """
import torch, math
from fa_cute.mods import trace_score_mod
table = torch.zeros(4, 4)
def mod(score, b, h, q, kv):
    x = torch.where((q >= kv) & (h < 3), score * 0.1 + table[h, kv], float("nan"))
    return torch.where(b == 0, x, -math.inf) + table[b, q]
print(trace_score_mod(mod).graph.key)
"""
    keys = set()
    for seed in ("0", "1", "random"):
        env = {"PYTHONHASHSEED": seed, "PATH": "", "PYTHONPATH": ":".join(sys.path)}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert run.returncode == 0, run.stderr
        keys.add(run.stdout)
    assert len(keys) == 1


def _by_closure(c: float) -> Callable:
    return lambda score, b, h, q, kv: score + c * kv


def _by_global(c: float) -> Callable:
    def mod(score, b, h, q, kv):
        return score + C * kv

    globals()["C"] = c
    return mod


def _by_default(c: float) -> Callable:
    def mod(score, b, h, q, kv, factor=c):
        return score + factor * kv

    return mod


def _helper(kv: object) -> object:
    return kv


def _by_helper(c: float) -> Callable:
    globals()["_helper"] = lambda kv: c * kv
    return lambda score, b, h, q, kv: score + _helper(kv)


def _by_partial(c: float) -> Callable:
    return functools.partial(lambda factor, score, b, h, q, kv: score + factor * kv, c)


class _Adding:
    def __init__(self, c: float) -> None:
        self.c = c

    def __call__(self, score, b, h, q, kv):
        return score + self.c * kv


def _by_cell() -> Callable:
    c = 0.0

    def mod(score, b, h, q, kv):
        return score + c * kv

    def with_c(new: float) -> Callable:
        nonlocal c
        c = new
        return mod

    return with_c


WAYS = {
    "closure": _by_closure,
    "global": _by_global,
    "default": _by_default,
    "helper": _by_helper,
    "partial": _by_partial,
    "attribute": _Adding,
    "cell": _by_cell(),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_mod_captures_is_in_its_key(way: str) -> None:
    keys, values = [], []
    for c in (1.0, 2.0, 3.0):
        mod = WAYS[way](c)
        keys.append(key(mod))
        values.append(value(mod, kv=1))
    assert len(set(keys)) == 3 and values == [1.0, 2.0, 3.0]
    assert set(keys) == {key(_by_closure(c)) for c in (1.0, 2.0, 3.0)}


def test_numbers_that_compare_equal_have_their_own_keys() -> None:
    mods = [
        lambda score, b, h, q, kv: torch.where(score > 0, kv * 1, 0),
        lambda score, b, h, q, kv: torch.where(score > 0, kv * 1.0, 0.0),
        lambda score, b, h, q, kv: torch.where(score > 0, score, 0.0),
        lambda score, b, h, q, kv: torch.where(score > 0, score, -0.0),
    ]
    assert len({key(mod) for mod in mods}) == 4
    assert key(lambda s, b, h, q, kv: s + 2) == key(lambda s, b, h, q, kv: s + 2.0)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_odd_numbers_are_traced_once(number: float) -> None:
    def mod(score, b, h, q, kv):
        return torch.where(q >= kv, score, float(str(number)))

    first = trace_score_mod(mod).graph
    known = len(tracing._known_tapes)
    assert trace_score_mod(mod).graph is first and len(tracing._known_tapes) == known
    assert str(value(mod, q=0, kv=1)) == str(number)


@pytest.mark.parametrize(
    "one, other",
    [
        (lambda s, b, h, q, kv: s + SLOPES[h] * kv, lambda s, b, h, q, kv: kv * SLOPES[h] + s),
        (lambda s, b, h, q, kv: s / 2, lambda s, b, h, q, kv: 0.5 * s),
        (lambda s, b, h, q, kv: s - 1 * (q - q), lambda s, b, h, q, kv: s + 0.0),
        (lambda s, b, h, q, kv: s + (q // 64), lambda s, b, h, q, kv: (q >> 6) + s),
        (lambda s, b, h, q, kv: s + (q % 8), lambda s, b, h, q, kv: (q & 7) + s),
        (
            lambda s, b, h, q, kv: torch.where(q >= kv, s, 0.0),
            lambda s, b, h, q, kv: s.masked_fill(q < kv, 0),
        ),
        (lambda s, b, h, q, kv: s + abs(q - kv), lambda s, b, h, q, kv: s + (kv - q).abs()),
        (lambda s, b, h, q, kv: s**2, lambda s, b, h, q, kv: torch.square(s)),
        (
            lambda s, b, h, q, kv: torch.where((q - kv < 5) & True, s, 0.0),
            lambda s, b, h, q, kv: torch.where(torch.logical_not(q - kv > 4), s, 0.0),
        ),
        (lambda s, b, h, q, kv: s + (q + 2) + 3, lambda s, b, h, q, kv: s + (q + 2) + 3.0),
    ],
)
def test_spellings_of_one_mod_share_a_key(one: Callable, other: Callable) -> None:
    assert key(one) == key(other)


def test_two_tensors_keep_their_places_in_any_spelling() -> None:
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([30.0, 40.0])
    one = trace_score_mod(lambda s, b, h, q, kv: (x[h] + y[h]) * s + x[q])
    other = trace_score_mod(lambda s, b, h, q, kv: x[q] + s * (x[h] + y[h]))
    assert one.graph.key == other.graph.key
    assert value(lambda s, b, h, q, kv: x[h] - y[h]) == -29.0
    assert value(lambda s, b, h, q, kv: y[h] - x[h]) == 29.0
    swapped = [trace_score_mod(lambda s, b, h, q, kv: s + x[h] / (y[h] + x[h] * y[h]))]
    swapped += [trace_score_mod(lambda s, b, h, q, kv: s + y[h] / (x[h] + x[h] * y[h]))]
    assert swapped[0].graph.key == swapped[1].graph.key
    assert swapped[0].captured == swapped[1].captured[::-1]


def test_what_is_computed_twice_is_one_node() -> None:
    graph = trace_score_mod(
        lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q) + (kv - q) * SLOPES[h]
    ).graph
    assert sorted(node.op for node in graph.nodes).count("load") == 1
    assert len({node.text() for node in graph.nodes}) == len(graph.nodes)


def test_the_table_of_tapes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_MOST_TAPES", 8)
    monkeypatch.setattr(tracing, "_known_tapes", {})
    for offset in range(100, 163):
        assert value(lambda s, b, h, q, kv: s + (q + offset), q=1) == offset + 1  # noqa: B023
    assert len(tracing._known_tapes) == 8


def test_lengths_are_not_in_the_key() -> None:
    keys = set()
    for length in (10, 20, 300):
        table = torch.zeros(2, length)
        keys.add(key(lambda s, b, h, q, kv: s + table[h][kv] + table[h, q]))  # noqa: B023
    assert len(keys) == 1


# Leaves, operands, levels.


def test_scalars_travel_by_value_and_never_recompile() -> None:
    cap = torch.tensor(20.0)

    def mod(score, b, h, q, kv):
        return cap * torch.tanh(score / cap) + torch.tensor(3) * torch.tensor(True)

    first = trace_score_mod(mod)
    assert first.graph.scalars.count("float32") == 1 and first.scalars.count(20.0) == 1
    cap.fill_(30.0)
    second = trace_score_mod(mod)
    assert second.graph is first.graph and 30.0 in second.scalars


def test_a_learnable_scalar_keeps_its_gradient() -> None:
    gain = torch.nn.Parameter(torch.tensor(2.0))
    traced = trace_score_mod(lambda s, b, h, q, kv: s * gain)
    assert traced.scalars == () and traced.captured[0] is gain
    assert traced.graph.captured[0].ndim == 0 and "tile" in traced.graph.levels()
    index = torch.tensor(0)
    emit(*traced, score=torch.tensor(3.0), b=index, h=index, q=index, kv=index).backward()
    assert gain.grad.item() == 3.0
    with torch.no_grad():
        assert trace_score_mod(lambda s, b, h, q, kv: s * gain).scalars == (2.0,)


def test_gradients_reach_scores_and_captured_tensors() -> None:
    table = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    traced = trace_score_mod(
        lambda s, b, h, q, kv: torch.tanh(s / 3) * table[h, kv] + torch.exp(table[h, q] * 0.1)
    )
    index = torch.arange(3)
    leaves = {"b": index * 0, "h": index % 2, "q": index.flip(0), "kv": index}
    score = torch.randn(3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(
        lambda s, t: emit(traced.graph, (t,), (), score=s, **leaves), (score, table)
    )


def test_a_guarded_division_by_zero() -> None:
    """Torch raises on a CPU, as it computes both sides of a ``where``; on a GPU it does not."""
    zero = torch.tensor(0)

    def mask_mod(b, h, q, kv):
        seen = torch.where(kv > 0, q // kv + (q - 1) % kv, -1) + torch.where(q > 3, 7 // (q - 3), 0)
        return seen + torch.where(zero == 0, 0, q % zero + q // zero) >= 0

    q, kv = torch.arange(6, dtype=torch.int32)[:, None], torch.arange(6, dtype=torch.int32)
    seen = emit(*trace_mask_mod(mask_mod), b=q, h=q, q=q, kv=kv)
    right = [
        [
            (i // j + (i - 1) % j if j else -1) + (7 // (i - 3) if i > 3 else 0) >= 0
            for j in range(6)
        ]
        for i in range(6)
    ]
    assert seen.tolist() == right
    kinds = fa_cute.plan_mask(mask_mod, None, None, 6, 6, tile=(1, 1)).kinds()[0, 0]
    assert not ((kinds == EMPTY) & seen).any() and not ((kinds == FULL) & ~seen).any()


def test_minus_a_multiple_of_the_least_integer() -> None:
    """-(x * -2**31) wraps to itself; it was refused for a 2**31 that nobody wrote."""
    traced = trace_mask_mod(lambda b, h, q, kv: -(q * -(2**31)) < 0)
    q = torch.arange(5, dtype=torch.int32)
    seen = emit(*traced, b=q, h=q, q=q, kv=q)
    assert seen.tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("index, right", [(0, 0.0), (2, 2.0), (-1, 2.0), (3, 2.0), (-9, 0.0)])
def test_loads_wrap_once_and_stay_inside(index: int, right: float) -> None:
    row = torch.arange(3.0)
    assert value(lambda s, b, h, q, kv: s + row[q], q=index) == right


def test_indices_of_every_form() -> None:
    ids = torch.tensor([2, 0, 1])
    forms = {
        "expressions": (lambda s, b, h, q, kv: TABLE[h, q + 1, kv], TABLE[1, 2, 3]),
        "from a tensor": (lambda s, b, h, q, kv: TABLE[h, ids[q], kv - 1], TABLE[1, 0, 2]),
        "constant": (lambda s, b, h, q, kv: TABLE[1, q, -1], TABLE[1, 1, 3]),
        "chained": (lambda s, b, h, q, kv: TABLE[h][q][kv], TABLE[1, 1, 3]),
        "ellipsis": (lambda s, b, h, q, kv: TABLE[..., kv][h, q], None),
        "a row": (lambda s, b, h, q, kv: TABLE[h, q].sum(), TABLE[1, 1].sum()),
        "a row, spelled": (lambda s, b, h, q, kv: TABLE[h, q, ...].sum(-1), TABLE[1, 1].sum()),
        "a column": (lambda s, b, h, q, kv: TABLE[h, :, kv].mean(), TABLE[1, :, 3].mean()),
        "a slice": (lambda s, b, h, q, kv: TABLE[h, q, 1:3].sum(), TABLE[1, 1, 1:3].sum()),
        "an element": (lambda s, b, h, q, kv: TABLE[h, q][kv], TABLE[1, 1, 3]),
        "dot": (lambda s, b, h, q, kv: TABLE[h, q].dot(TABLE[b, q]), TABLE[1, 1] @ TABLE[0, 1]),
        "transposed": (lambda s, b, h, q, kv: TABLE.mT[h, kv, q], TABLE[1, 1, 3]),
        "tensor by name": (lambda s, b, h, q, kv: TABLE[torch.tensor(1), q, kv], TABLE[1, 1, 3]),
    }
    for name, (mod, right) in forms.items():
        if right is not None:
            assert value(mod, h=1, q=1, kv=3) == right.item(), name
    with pytest.raises(ModError, match="left unindexed"):
        trace_score_mod(forms["ellipsis"][0])


def test_a_partial_index_is_an_operand_with_a_static_last_dimension() -> None:
    graph = trace_score_mod(lambda s, b, h, q, kv: s + TABLE[h, q].sum()).graph
    assert graph.captured[0].inner == 4
    assert [node.width for node in graph.nodes if node.op == "load"] == [4]
    full = trace_score_mod(lambda s, b, h, q, kv: s + TABLE[h, q][kv]).graph
    assert full.captured[0].inner is None


def test_levels() -> None:
    bias, ids = torch.zeros(2, 99), torch.zeros(2, 50, dtype=torch.int32)
    mods = {
        "tile": lambda s, b, h, q, kv: torch.exp(bias[b, h]) * 2,
        "row": lambda s, b, h, q, kv: torch.log(q + 1.0) * bias[b, q],
        "column": lambda s, b, h, q, kv: bias[h, kv] + h,
        "diagonal": lambda s, b, h, q, kv: (
            torch.log((2 * kv - 2 * q + h).float()) + bias[h, q - kv]
        ),
        "element": lambda s, b, h, q, kv: s * 1.5,
        "constant": lambda s, b, h, q, kv: torch.zeros_like(s) + 3,
    }
    for level, mod in mods.items():
        graph = trace_score_mod(mod).graph
        assert graph.levels()[graph.result] == level, graph.describe()
    same = trace_mask_mod(lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & (q >= kv)).graph
    assert {"row", "column", "diagonal", "element"} <= set(same.levels())
    for mod in (lambda s, b, h, q, kv: s * 0 + (q + kv), lambda s, b, h, q, kv: q * kv + s):
        assert "diagonal" not in trace_score_mod(mod).graph.levels()
    mixed = trace_score_mod(lambda s, b, h, q, kv: bias[h, q] + s).graph
    reads = dict(zip((n.op for n in mixed.nodes), mixed.dependence(), strict=True))
    assert reads["load"] == {"h", "q", "load"} and reads["score"] == {"score"}


def test_types_and_dtypes_on_traced_values() -> None:
    seen = {}

    def mod(score, b, h, q, kv):
        seen.update(score=score.dtype, q=q.dtype, mask=(q < kv).dtype, quotient=(q / 2).dtype)
        seen.update(shape=score.shape, row=TABLE[h, q].shape, ndim=q.ndim)
        return score.to(q.dtype).type_as(score)

    trace_score_mod(mod)
    assert seen["score"] == seen["quotient"] == torch.float32
    assert (seen["q"], seen["mask"]) == (torch.int32, torch.bool)
    assert (seen["shape"], seen["row"], seen["ndim"]) == ((), (4,), 0)


@pytest.mark.parametrize(
    "mod, right",
    [
        (lambda s, b, h, q, kv: (q - kv) // 4, -2.0),
        (lambda s, b, h, q, kv: (q - kv) % 4, 3.0),
        (lambda s, b, h, q, kv: (q - kv) % -4, -1.0),
        (lambda s, b, h, q, kv: (q - kv) // -2, 2.0),
        (lambda s, b, h, q, kv: divmod(q - kv, 3)[0] * 10 + divmod(q - kv, 3)[1], -19.0),
        (lambda s, b, h, q, kv: (q - kv) >> 1, -3.0),
        (lambda s, b, h, q, kv: torch.div(q - kv, 4, rounding_mode="trunc"), -1.0),
        (lambda s, b, h, q, kv: (q - kv + 0.5) // 2, -3.0),
        (lambda s, b, h, q, kv: (q - kv + 0.5) % 2, 1.5),
        (lambda s, b, h, q, kv: round(q * 0.5) + math.floor(s - 0.5) + math.ceil(s + 0.2), 0.0),
        (lambda s, b, h, q, kv: (q - 252).to(torch.uint8) + (q + 128).to(torch.int8), -124.0),
        (lambda s, b, h, q, kv: (s + 1 / 3).to(torch.bfloat16), 0.333984375),
        (lambda s, b, h, q, kv: True + (q < kv) * 2.5, 3.5),
        (lambda s, b, h, q, kv: (q + 1.9).int() + (-1.9 - s).long(), 0.0),
        (lambda s, b, h, q, kv: np.float32(2) * kv + kv * np.int64(3) - np.exp2(kv), -7.0),
        (lambda s, b, h, q, kv: 3 - (q < kv) - s.bool(), 2.0),
    ],
)
def test_arithmetic_is_pythons(mod: Callable, right: float) -> None:
    """At q = 0, kv = 5, score = 0."""
    assert value(mod, kv=5) == right


def test_describe_lists_every_node() -> None:
    graph = trace_score_mod(lambda s, b, h, q, kv: s + SLOPES[h] * (q - kv)).graph
    text = graph.describe()
    assert text.count("%") >= len(graph.nodes) and "captured[0]: float32, 1 dimensions" in text
    assert "diagonal" in text and f"result %{graph.result}" in text


def test_a_graph_can_be_built_by_hand_and_made_canonical() -> None:
    nodes = (
        Node("kv", (), "int32"),
        Node("q", (), "int32"),
        Node("le", (0, 1), "bool"),
        Node("not", (2,), "bool"),
        Node("not", (3,), "bool"),
    )
    graph = Graph(nodes, 4, (), ())
    assert canonical(graph) == trace_mask_mod(lambda b, h, q, kv: q >= kv).graph
    assert canonical(graph) != graph and len({graph, Graph(nodes, 4, (), ())}) == 1


# Errors.


def _branch(score, b, h, q, kv):
    if q > kv:
        return score
    return -score


def _chained(b, h, q, kv):
    return 0 <= q - kv < 5


def _softmax(score, b, h, q, kv):
    return torch.softmax(score, 0)


def _in_place(score, b, h, q, kv):
    return score.add_(1)


@torch.library.custom_op("fa_cute_tests::twice", mutates_args=())
def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain):
        ctx.save_for_backward(x, gain)
        return x * gain


GAIN = torch.nn.Parameter(torch.tensor(2.0))

ERRORS = {
    "if": (_branch, "where(condition, a, b)"),
    "chained comparison": (_chained, "(a <= x) & (x < b)"),
    "and": (lambda b, h, q, kv: q > kv and h > 0, "& | ~"),
    "min": (lambda score, b, h, q, kv: min(score, 3.0), "minimum"),
    "math": (lambda score, b, h, q, kv: math.exp(score), "torch's function"),
    "list": (lambda score, b, h, q, kv: score + [1.0, 2.0][h], "torch.as_tensor(list)"),
    "softmax": (_softmax, "attention applies the softmax itself"),
    "in place": (_in_place, "write add"),
    "item": (lambda score, b, h, q, kv: score + SLOPES[h.item()], "compute on the value"),
    "unknown": (lambda score, b, h, q, kv: torch.lgamma(score), "docs/writing_a_mod.md"),
    "custom op": (lambda s, b, h, q, kv: torch.ops.fa_cute_tests.twice(s), "custom op"),
    "whole tensor": (lambda score, b, h, q, kv: score * SLOPES, "as table[kv]"),
    "reflected": (lambda score, b, h, q, kv: SLOPES * score, "(2,)"),
    "partial": (lambda score, b, h, q, kv: score + TABLE[h], "only 1 of its dimensions"),
    "slice": (lambda score, b, h, q, kv: score + SLOPES[h:q].sum(), "no Python integer"),
    "none": (lambda score, b, h, q, kv: SLOPES[h, None], "2 indices"),
    "float index": (lambda score, b, h, q, kv: SLOPES[score], "index.int()"),
    "too many": (lambda score, b, h, q, kv: SLOPES[h, q], "1 dimensions"),
    "outside": (lambda score, b, h, q, kv: TABLE[h, 3, kv], "outside dimension 1"),
    "float bits": (lambda score, b, h, q, kv: (q < kv) & score, "(a < b) & (c < d)"),
    "string": (lambda score, b, h, q, kv: score + "1", "'1' of type str"),
    "large": (lambda score, b, h, q, kv: q + 2**40 + score, "does not fit in int32"),
    "zero": (lambda score, b, h, q, kv: q // 0 + score, "constant 0"),
    "vectors": (lambda s, b, h, q, kv: (TABLE[h, q] + TABLE[h, :, q]).sum(), "one size"),
    "keywords": (lambda s, b, h, q, kv: torch.add(s, 1, out=None), "unexpected keyword"),
    "complex": (lambda s, b, h, q, kv: s + torch.zeros(2, dtype=torch.cfloat)[h], "complex64"),
    "array": (lambda s, b, h, q, kv: s + np.ones(3)[h], "torch.as_tensor(list)"),
    "whole array": (lambda s, b, h, q, kv: s * np.ones(3), "torch.as_tensor makes one"),
    "numpy's function": (lambda s, b, h, q, kv: np.sinc(s), "torch's"),
    "saved": (lambda s, b, h, q, kv: _Scaled.apply(s, GAIN), "plain function"),
    "any": (lambda s, b, h, q, kv: s + (q > kv).any(), "write the condition itself"),
    "long vector": (lambda s, b, h, q, kv: s + LONG[h].sum(), "at most 256"),
    "assignment": (lambda s, b, h, q, kv: SLOPES.__setitem__(h, 1.0), "changes no tensor"),
    "vector result": (lambda s, b, h, q, kv: TABLE[h, q] * s, "x.sum(-1)"),
    "tensor result": (lambda s, b, h, q, kv: SLOPES, "shape (2,)"),
    "nothing": (lambda s, b, h, q, kv: None, "return"),
    "text": (lambda s, b, h, q, kv: "score", "of type str"),
    "bool score": (lambda s, b, h, q, kv: q >= kv, "float('-inf')"),
    "int mask": (lambda b, h, q, kv: q - kv, "value != 0"),
    "float mask": (lambda b, h, q, kv: torch.where(q >= kv, 0.0, -math.inf), "`value == 0`"),
    "arity": (lambda score, q, kv: score, "takes (score, q, kv)"),
    "arity of a mask": (lambda b, h, q: q > 0, "mask_mod(b, h, q, kv)"),
}
MASKS = ("chained comparison", "and", "int mask", "float mask", "arity of a mask")


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_line_and_the_remedy(name: str) -> None:
    mod, remedy = ERRORS[name]
    trace = trace_mask_mod if name in MASKS else trace_score_mod
    with pytest.raises(ModError) as caught:
        trace(mod)
    message = str(caught.value)
    assert remedy in message.partition("\n")[2]  # behind the line, which quotes this table
    found = re.match(rf"{re.escape(__file__)}:(\d+), in ", message)
    assert found, message
    first = mod.__code__.co_firstlineno
    assert first <= int(found[1]) <= first + 2


def test_errors_in_a_helper_name_the_helpers_line() -> None:
    def helper(x):
        y = x * 2
        return y & 1.5

    with pytest.raises(
        ModError, match=f":{helper.__code__.co_firstlineno + 2}, in helper: `return"
    ):
        trace_score_mod(lambda score, b, h, q, kv: score + helper(q))


def test_a_value_that_outlives_its_trace_is_refused() -> None:
    kept = []

    def mod(score, b, h, q, kv):
        kept.append(score)
        return score + kept[0]

    trace_score_mod(mod)
    with pytest.raises(ModError, match="outlived"):
        trace_score_mod(mod)
    with pytest.raises(ModError, match="after its mod has returned"):
        torch.exp(kept[0])


def test_what_a_mod_raises_itself_is_not_hidden() -> None:
    def mod(score, b, h, q, kv):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace_score_mod(mod)
    with pytest.raises(TypeError, match="unhashable"):
        trace_score_mod(lambda score, b, h, q, kv: {[]: score})


def test_what_is_not_a_function_is_refused() -> None:
    with pytest.raises(TypeError, match="is not"):
        trace_score_mod(SLOPES)


# check.


def test_check_reports_every_problem() -> None:
    def mod(score, b, h, q, kv):
        x = (q < kv) & score
        y = score | h
        return x + y

    report = fa_cute.check(mod)
    assert not report.ok and report.graph is None and len(report.problems) == 2
    line = mod.__code__.co_firstlineno
    assert f":{line + 1}," in report.problems[0] and f":{line + 2}," in report.problems[1]
    assert "cannot run" in str(report)


def test_check_tells_what_each_level_costs() -> None:
    report = fa_cute.check(lambda score, b, h, q, kv: score + SLOPES[h] * (kv - q))
    assert report.ok and report.kind == "score_mod"
    assert any("once a tile" in note for note in report.notes)
    assert any("(2,)" in note for note in report.notes)
    assert report.graph.describe() in str(report)
    always = fa_cute.check(lambda b, h, q, kv: q == q)
    assert always.kind == "mask_mod" and "always gives True" in str(always)


def test_check_tells_the_kind_from_the_parameters() -> None:
    assert fa_cute.check(_branch).kind == "score_mod"
    assert fa_cute.check(functools.partial(_chained)).kind == "mask_mod"
    with pytest.raises(ValueError, match="kind='score_mod'"):
        fa_cute.check(lambda *args: args[0])
    assert fa_cute.check(lambda *args: args[0], "score_mod").ok
    with pytest.raises(ValueError, match="'mask_mod'"):
        fa_cute.check(_branch, "other")
