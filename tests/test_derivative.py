"""The derivative of a mod's graph against torch's autograd of the user's own function, in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import fa_cute
from fa_cute.device.lower import lower
from fa_cute.mods.derivative import differentiable, differentiate
from fa_cute.mods.derived import contributions, factor, tame
from fa_cute.mods.emit_torch import values_of
from fa_cute.mods.trace import Traced, trace_score_mod
from tests.test_emit import _spelled_out
from tests.test_mods_properties import GROWN, QUICK, Leaves, leaves

SHAPE = B, H, Q, KV = (2, 3, 6, 7)


def eager(score_mod: Callable, place: dict, learned: Sequence[torch.Tensor] = ()) -> list:
    """d sum(weight * mod) / d score and / d each learned tensor, by torch."""
    score = place["score"].clone().requires_grad_()
    value = score_mod(*{**place, "score": score}.values())
    value = value + 0.0 * score  # a mod may ignore it
    (weight() * value).sum().backward()
    return [score.grad, *(tensor.grad for tensor in learned)]


def weight() -> torch.Tensor:
    """Some numbers in d mod's place."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64)


def reverse(traced: Traced, place: dict, wanted: frozenset[int] = frozenset()) -> list:
    """The mod's value, and the same by the derivative's graph."""
    graph = differentiate(traced.graph, wanted)
    given = contributions(graph)
    captured = [tensor.detach() for tensor in traced.captured]

    def computed(nodes: Sequence[int]) -> list[torch.Tensor]:
        return values_of(graph, nodes, captured, traced.scalars, place)

    value, slope = computed([graph.result, factor(graph)])
    totals = {slot: torch.zeros_like(captured[slot], dtype=torch.float64) for slot in wanted}
    for one in given:
        node = graph.nodes[one.load]
        _scatter(totals[one.slot], node.width, computed(node.args), *computed([one.value]))
    return [value.expand(SHAPE), weight() * slope, *(totals[slot] for slot in sorted(wanted))]


def _scatter(
    total: torch.Tensor, width: int, indices: Sequence[torch.Tensor], value: torch.Tensor
) -> None:
    """Add the weighted ``value`` at ``indices``; of short vectors, of ``width``, a whole row."""
    added, shape = weight(), SHAPE
    if width > 1:
        added, shape = added[..., None], (*SHAPE, width)
        value = value[..., None] if value.ndim == 4 else value
    added = (added * value).expand(shape)
    index = []
    for at, size in zip(indices, total.shape, strict=False):
        at = torch.where(at < 0, at + size, at).clamp(0, size - 1).long()
        index.append(at.view((1,) * (4 - at.ndim) + at.shape).expand(SHAPE))
    if index:
        total.index_put_(tuple(index), added.double(), accumulate=True)
    else:
        total += added.sum()


def agree(score_mod: Callable, place: dict | None = None, rtol: float = 1e-9) -> None:
    place = leaves() if place is None else place
    want = eager(score_mod, place)[0]
    _, found = reverse(trace_score_mod(score_mod), place)
    torch.testing.assert_close(found.expand(SHAPE), want, rtol=rtol, atol=rtol)


def at_scores(*values: float) -> dict:
    """The leaves with scores among ``values``."""
    place = leaves()
    chosen = torch.tensor(values, dtype=torch.float64)
    place["score"] = chosen[torch.arange(math.prod(SHAPE)) % len(values)].view(SHAPE)
    return place


SMOOTH = {
    "softcap": lambda s, b, h, q, kv: 20.0 * torch.tanh(s / 20.0),
    "alibi": lambda s, b, h, q, kv: s - torch.exp2(-8.0 * (h + 1) / 3) * (q - kv).abs(),
    "sigmoid": lambda s, b, h, q, kv: torch.sigmoid(s) * s,
    "gelu": lambda s, b, h, q, kv: F.gelu(s),
    "silu": lambda s, b, h, q, kv: F.silu(s - kv),
    "softplus": lambda s, b, h, q, kv: F.softplus(s),
    "exponentials": lambda s, b, h, q, kv: torch.exp(-s * s) + torch.exp2(s) - torch.expm1(s),
    "logarithms": lambda s, b, h, q, kv: torch.log(s.abs() + 1) + torch.log2(s * s + 2),
    "roots": lambda s, b, h, q, kv: torch.sqrt(s * s + 1) + torch.rsqrt(s * s + 2),
    "waves": lambda s, b, h, q, kv: torch.sin(s) * torch.cos(s * q),
    "erf": lambda s, b, h, q, kv: torch.erf(s / 3),
    "quotient": lambda s, b, h, q, kv: (s + 1) / (s * s + 1) - 2.0 / (s.abs() + 1),
    "powers": lambda s, b, h, q, kv: s**2 + s**5 + (s.abs() + 0.5) ** 1.5 + 1.7**s,
    "power of the score": lambda s, b, h, q, kv: (s.abs() + 0.5) ** torch.clamp(s, -2, 2),
    "remainder": lambda s, b, h, q, kv: s % 1.25 + torch.fmod(s, 0.75),
    "steps": lambda s, b, h, q, kv: torch.floor(s) + s.int() + torch.sign(s) + s.round() * s,
    "ignored": lambda s, b, h, q, kv: q - kv + 0.0 * h,
    "branches": lambda s, b, h, q, kv: torch.where(q > kv, s * s, torch.where(s > 0, 3 * s, -s)),
    "twice": lambda s, b, h, q, kv: torch.minimum(s * 2, s + 1) + torch.maximum(s, -s),
    "narrowed": lambda s, b, h, q, kv: s.float().double() * 3,
}


@pytest.mark.parametrize("name", SMOOTH)
def test_agrees_with_autograd(name: str) -> None:
    agree(SMOOTH[name], rtol=2e-6 if name in ("alibi", "narrowed") else 1e-9)


EDGES = {
    "abs": lambda s, b, h, q, kv: s.abs() + (s - 1).abs(),
    "maximum": lambda s, b, h, q, kv: torch.maximum(s, torch.zeros_like(s)),
    "minimum": lambda s, b, h, q, kv: torch.minimum(s * 1.0, s * s),
    "clamp": lambda s, b, h, q, kv: torch.clamp(s, -1.0, 2.0),
    "clamp_min": lambda s, b, h, q, kv: s.clamp(min=1),
    "clamp by values": lambda s, b, h, q, kv: torch.clamp(s, s * s - 2, s * 0 + 1),
    "fmax": lambda s, b, h, q, kv: torch.fmax(s, s * s) + torch.fmin(s * s, s + 2),
    "relu": lambda s, b, h, q, kv: F.relu(s),
    "relu6": lambda s, b, h, q, kv: F.relu6(s * 6),
    "hardtanh": lambda s, b, h, q, kv: F.hardtanh(s),
    "leaky_relu": lambda s, b, h, q, kv: F.leaky_relu(s),
    "logaddexp": lambda s, b, h, q, kv: torch.logaddexp(s, s * s),
    "softplus": lambda s, b, h, q, kv: F.softplus(s),
    "logsigmoid": lambda s, b, h, q, kv: F.logsigmoid(s),
    "square root": lambda s, b, h, q, kv: torch.sqrt(torch.where(s > 0, s, 1.0)),
    "power of zero": lambda s, b, h, q, kv: torch.relu(s) ** 2 + 2.0**s,
    "tanh": lambda s, b, h, q, kv: 20 * torch.tanh(s * 1e3),
    "elu": lambda s, b, h, q, kv: F.elu(s) + F.celu(s, 0.5),
    "near zero": lambda s, b, h, q, kv: torch.expm1(s) + torch.log1p(s.clamp(min=-0.5)),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges_are_as_torch_has_them(name: str) -> None:
    agree(EDGES[name], at_scores(0.0, 1.0, -1.0, 2.0, -2.0, 0.5))


@pytest.mark.parametrize("function", [F.elu, F.softplus, F.gelu, F.silu, F.mish, F.logsigmoid])
def test_large_scores(function: Callable) -> None:
    agree(lambda s, b, h, q, kv: function(s), at_scores(800.0, -800.0, 100.0, -40.0))


def test_saturated_functions_give_nothing() -> None:
    place = at_scores(300.0, -300.0)
    _, found = reverse(
        trace_score_mod(lambda s, b, h, q, kv: torch.tanh(s) + s.clamp(-1, 1)), place
    )
    assert (found == 0).all()


def test_a_floor_division_is_a_step_on_the_cpu_path_too() -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 7, 2, 8, generator=generator).requires_grad_() for _ in range(3))
    out = fa_cute.attention(q, k, v, score_mod=lambda s, b, h, q, kv: s + 0.1 * (s // 0.75))
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).detach() / 8**0.5
    steps = 0.1 * (scores // 0.75)
    right = fa_cute.attention(q, k, v, score_mod=lambda s, b, h, q, kv: s + steps[0, h, q, kv])
    want = torch.autograd.grad(right.square().sum(), (q, k, v))
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y)
        assert x.abs().sum() > 0


@settings(QUICK, max_examples=40)
@given(GROWN["float"])
def test_random_mods(expression: Callable) -> None:
    """Against the user's own function, where it is smooth: rounding may carry it over a step."""

    def score_mod(*args):
        return expression(Leaves(*args))

    try:
        wants = [eager(score_mod, moved(shift))[0] for shift in (0.0, 1e-6, -1e-6)]
    except NotImplementedError:  # torch has no derivative of //
        reject()
    traced = trace_score_mod(score_mod)
    _, found = reverse(traced, leaves())
    found, want = found.expand(SHAPE), wants[0]
    near = [torch.isclose(want, other, rtol=1e-3, atol=1e-3) for other in wants[1:]]
    smooth = near[0] & near[1] & want.isfinite()
    if not tame(differentiate(traced.graph)):  # a root at 0 may be cut off by torch alone
        smooth &= found.isfinite()
    # What an eager mod makes of indices alone has fp32's roundings.
    torch.testing.assert_close(found[smooth], want[smooth], rtol=1e-4, atol=1e-4)


def moved(shift: float) -> dict:
    """The leaves, with scores a little off."""
    place = leaves()
    return place | {"score": place["score"] * (1 + shift) + shift}


# Operations that are exact on small multiples of 1/8, so that two orders of evaluation give one
# number and operands that are equal in one are so in the other.
EXACT_UNARY = (
    *(torch.neg, torch.abs, torch.relu, torch.sign, torch.floor, torch.ceil, torch.trunc),
    *(F.relu6, F.hardtanh, torch.zeros_like, torch.clone),
    lambda x: 0.5 * x,
    lambda x: x + 1,
    lambda x: 1.5 - x,
    lambda x: x.clamp(-1, 1),
    lambda x: x.clamp(min=0.5),
    lambda x: torch.clamp_max(x, 2),
    lambda x: x.masked_fill(x > 1, 0.5),
    lambda x: torch.where(x == 0, x, -x),
    lambda x: torch.tanh(x + 300 * torch.sign(x)),  # saturated, but at 0
    lambda x: torch.sigmoid(1000 * torch.abs(x) + 1000),
    lambda x: 2 * torch.sign(x) * x,
)
EXACT_BINARY = (
    *(torch.add, torch.sub, torch.minimum, torch.maximum, torch.fmin, torch.fmax),
    lambda x, y: torch.clamp(x, min=y),
    lambda x, y: torch.clamp(x, y, y + 1),
)


def _lattice(depth: int) -> st.SearchStrategy:
    """Mods of ties, branches and saturation, of at most some depth."""
    if depth == 0:
        return st.sampled_from([lambda x: x.score, lambda x: x.score, lambda x: x.q - x.kv])
    less = _lattice(depth - 1)
    chosen = st.tuples(st.sampled_from((torch.lt, torch.le, torch.eq, torch.ne)), less, less)
    return (
        st.builds(lambda f, x: lambda at: f(x(at)), st.sampled_from(EXACT_UNARY), less)
        | st.builds(
            lambda f, x, y: lambda at: f(x(at), y(at)), st.sampled_from(EXACT_BINARY), less, less
        )
        | st.builds(
            lambda c, x, y: lambda at: torch.where(c[0](c[1](at), c[2](at)), x(at), y(at)),
            *(chosen, less, less),
        )
    )


@settings(QUICK, max_examples=80)
@given(_lattice(4), st.none() | _lattice(2))
def test_random_ties(expression: Callable, hidden: Callable | None) -> None:
    """Ties, branches, steps, -inf and saturation, exactly as torch's autograd has them.

    ``hidden``: where it is positive the mod gives -inf. There the probability is 0, whatever the
    derivative, if that is finite.
    """

    def score_mod(score, b, h, q, kv):
        at = Leaves(score, b, h, 1.0 * q, 1.0 * kv)
        if hidden is None:
            return expression(at)
        return torch.where(hidden(at) > 0, float("-inf"), expression(at))

    place = at_scores(0.0, 1.0, -1.0, 2.0, 0.5, -0.5, 1.5, 30.0, -30.0)
    want = eager(score_mod, place)[0]
    value, found = reverse(trace_score_mod(score_mod), place)
    found = found.expand(SHAPE)
    seen = value > -torch.inf
    right = score_mod(*place.values()).double().expand(SHAPE)
    torch.testing.assert_close(value.double(), right, rtol=0, atol=0)
    torch.testing.assert_close(found[seen], want[seen], rtol=1e-12, atol=1e-12)
    assert found.isfinite().all()


def _learned(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()


def _buckets(q, kv):
    distance = (q - kv).abs()
    return torch.where(distance < 3, distance, 3) + torch.where(kv > q, 4, 0)


def captured_cases() -> dict[str, tuple[list[torch.Tensor], Callable]]:
    """Learned tensors, and a mod that reads them."""
    slopes, table, bias = _learned(H), _learned(8, H), _learned(H, Q, KV)
    rows, columns, number = _learned(B, Q), _learned(KV), _learned()
    left, right, ribbon = _learned(Q, 4), _learned(KV, 4), _learned(Q + KV)
    return {
        "a head": ([slopes], lambda s, b, h, q, kv: s - slopes[h] * (q - kv).abs()),
        "buckets": ([table], lambda s, b, h, q, kv: s + table[_buckets(q, kv), h]),
        "elements": ([bias], lambda s, b, h, q, kv: s * 2 + bias[h, q, kv]),
        "rows, columns": (
            [rows, columns],
            lambda s, b, h, q, kv: s * rows[b, q] + torch.tanh(columns[kv]),
        ),
        "a number": ([number], lambda s, b, h, q, kv: number * torch.tanh(s / number)),
        "vectors": (
            [left, right],
            lambda s, b, h, q, kv: s + (left[q] * right[kv]).sum(-1) + left[q, 0],
        ),
        "negative index": ([ribbon], lambda s, b, h, q, kv: s + ribbon[q - kv] ** 2),
        "read twice": ([slopes], lambda s, b, h, q, kv: s * slopes[h] + slopes[h * 0]),
        "a choice": (
            [slopes],
            lambda s, b, h, q, kv: torch.where(q >= kv, s * slopes[h], float("-inf")),
        ),
    }


@pytest.mark.parametrize("name", captured_cases())
def test_captured_tensors(name: str) -> None:
    learned, score_mod = captured_cases()[name]
    place, traced = leaves(), trace_score_mod(score_mod)
    shown = leaves()
    shown["q"], shown["kv"] = shown["q"].long(), shown["kv"].long()
    for at in ("b", "h"):
        shown[at] = shown[at].long()
    if name == "a choice":  # -inf has the probability 0, and so the weight 0
        place["kv"] = shown["kv"] = torch.zeros_like(shown["kv"])
    want = eager(score_mod, shown, learned)[1:]
    places = {id(tensor): at for at, tensor in enumerate(traced.captured)}
    wanted = differentiable(traced.graph)
    assert wanted == frozenset(places.values())
    found = reverse(traced, place, wanted)[2:]
    for tensor, gradient in zip(learned, want, strict=True):
        torch.testing.assert_close(found[places[id(tensor)]], gradient, rtol=1e-6, atol=1e-6)


def test_linear_mods_have_the_factor_one() -> None:
    slopes = torch.rand(H)
    for score_mod in (
        lambda s, b, h, q, kv: s - slopes[h] * (q - kv).abs(),
        lambda s, b, h, q, kv: torch.where(q >= kv, s + 1, float("-inf")),
        lambda s, b, h, q, kv: torch.where(s > 0, s, s),
    ):
        graph = differentiate(trace_score_mod(score_mod).graph)
        node = graph.nodes[factor(graph)]
        assert (node.op, node.attr) == ("const", 1.0)


def test_a_soft_cap_shares_the_forward_s_tanh() -> None:
    graph = differentiate(trace_score_mod(SMOOTH["softcap"]).graph)
    lowered = lower(graph).graph
    assert [node.op for node in lowered.nodes].count("tanh") == 1
    (tanh,) = (at for at, node in enumerate(lowered.nodes) if node.op == "tanh")
    assert lowered.result == tanh and lower(graph).gain == 20.0
    slope = lowered.nodes[factor(lowered)]
    assert slope.op == "sub" and lowered.nodes[slope.args[1]].args == (tanh, tanh)


@pytest.mark.parametrize("name", SMOOTH)
def test_the_derivative_does_not_change_the_lowered_mod(name: str) -> None:
    """The backward's scores are the forward's: the same operations, exact where those are."""
    forward = trace_score_mod(SMOOTH[name]).graph
    alone, beside = lower(forward), lower(differentiate(forward))
    kept = _closure(beside.graph)
    spelled = [beside.graph.nodes[at] for at in sorted(kept)]
    assert [node.op for node in spelled] == [node.op for node in alone.graph.nodes]
    assert alone.gain == beside.gain
    assert [beside.exact[at] for at in sorted(kept)] == list(alone.exact)


def _closure(graph) -> set[int]:
    needed, todo = set(), [graph.result]
    while todo:
        at = todo.pop()
        if at not in needed:
            needed.add(at)
            todo += graph.nodes[at].args
    return needed


@pytest.mark.parametrize("name", SMOOTH)
def test_lowering_keeps_the_derivative(name: str) -> None:
    place, traced = leaves(), trace_score_mod(SMOOTH[name])
    graph = differentiate(traced.graph)
    (want,) = values_of(graph, [factor(graph)], traced.captured, traced.scalars, place)
    lowered = lower(graph).graph
    spelled, at = _spelled_out(lowered), factor(lowered)
    if any(node.op in ("fma", "reciprocal") for node in lowered.nodes):
        spelled, at = _spelled_with(lowered, at)
    (found,) = values_of(spelled, [at], traced.captured, (*traced.scalars, 1.0), place)
    torch.testing.assert_close(found.double(), want.double(), rtol=1e-6, atol=1e-6)


def _spelled_with(lowered, at: int):
    from dataclasses import replace

    spelled = _spelled_out(replace(lowered, result=at))
    return spelled, spelled.result


def test_wild_derivatives_are_known() -> None:
    def wild(score_mod: Callable) -> bool:
        return not tame(differentiate(trace_score_mod(score_mod).graph))

    assert wild(lambda s, b, h, q, kv: torch.sqrt(s.abs()))
    assert wild(lambda s, b, h, q, kv: torch.log(s.abs()))
    assert not wild(SMOOTH["softcap"]) and not wild(SMOOTH["branches"])


def test_integers_and_steps_have_no_gradient() -> None:
    whole, stepped, used = torch.ones(H, dtype=torch.int32), torch.rand(H), torch.rand(H)
    graph = trace_score_mod(
        lambda s, b, h, q, kv: s * whole[h] + torch.floor(stepped[h]) * used[h]
    ).graph
    assert differentiable(graph) == frozenset(
        at for at, c in enumerate(graph.captured) if c.dtype == "float32"
    ) - {_place_of_stepped(graph)}


def _place_of_stepped(graph) -> int:
    (floor,) = (node for node in graph.nodes if node.op == "floor")
    return graph.nodes[floor.args[0]].attr
