"""Bounds are sound: no element of a rectangle lies outside them, for random mods and rectangles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fa_cute
from fa_cute.mods import bounds as rules
from fa_cute.mods.congruence import ANY, Congruence, congruences, never_equal
from fa_cute.mods.emit_torch import emit
from fa_cute.mods.graph import Graph
from fa_cute.mods.intervals import EMPTY, FULL, PARTIAL, Analysis, Extents, Region
from fa_cute.mods.summaries import GRAIN, Summary, window
from fa_cute.mods.trace import Traced, trace_mask_mod, trace_score_mod
from tests.test_mods_properties import GROWN, KV, B, Expression, H, Leaves, Q

QUICK = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
Box = tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int]]


def boxes(sizes: tuple[int, int, int, int]) -> st.SearchStrategy[Box]:
    """(first, last) along b (one), h (one), q and kv."""

    def side(size: int, one: bool) -> st.SearchStrategy[tuple[int, int]]:
        ends = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1))
        return ends.map(lambda pair: (pair[0], pair[0]) if one else tuple(sorted(pair)))

    return st.tuples(*(side(size, at < 2) for at, size in enumerate(sizes)))


def region(box: Box) -> Region:
    (b, _), (h, _), q, kv = box
    return Region(*(torch.tensor(end) for end in (b, h, *q, *kv)))


def places(box: Box) -> dict[str, torch.Tensor]:
    """All elements of a box, as leaves of the graph."""
    names = ("b", "h", "q", "kv")
    return {
        name: torch.arange(first, last + 1).view([-1 if i == at else 1 for i in range(4)])
        for at, (name, (first, last)) in enumerate(zip(names, box, strict=True))
    }


def check(traced: Traced, box: Box, extents: Extents, score: torch.Tensor | None = None) -> None:
    """Every node of the graph, on every element of the box, lies in its bounds."""
    analysis = Analysis.of(traced, extents, "cpu")
    where = region(box)
    for at, node in enumerate(traced.graph.nodes):
        if node.width > 1:
            continue
        part = Graph(traced.graph.nodes[: at + 1], at, traced.graph.captured, traced.graph.scalars)
        bounds = Analysis(
            part,
            analysis.captured,
            analysis.scalars,
            analysis.remainders[: at + 1],
            analysis.device,
            analysis.summaries,
        ).bounds(where)
        value = emit(part, traced.captured, traced.scalars, score=score, **places(box))
        if node.type == "bool":
            value = value.bool()
            assert (value | ~bounds.lo).all() and (~value | bounds.hi).all(), node
            continue
        value = value.double() if node.type == "float32" else value.long()
        strange = value.isnan()
        assert not strange.any() or bounds.nan.all(), node
        outside = (value < bounds.lo) | (value > bounds.hi)
        assert not (outside & ~strange).any(), (node, bounds, value.min(), value.max())


@QUICK
@given(GROWN["bool"], boxes((B, H, Q, KV)))
def test_every_value_of_a_mask_lies_in_its_bounds(expression: Expression, box: Box) -> None:
    traced = trace_mask_mod(
        lambda b, h, q, kv: expression(Leaves((q * 3 - kv) * 0.375, b, h, q, kv))
    )
    check(traced, box, Extents(B, H, Q, KV))


@settings(QUICK, max_examples=60)
@given(GROWN["float"], boxes((B, H, Q, KV)))
def test_every_value_of_a_score_mod_lies_in_its_bounds(expression: Expression, box: Box) -> None:
    traced = trace_score_mod(lambda *args: expression(Leaves(*args)))
    size = [last - first + 1 for first, last in box]
    score = 3 * torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    check(traced, box, Extents(B, H, Q, KV), score)


@pytest.mark.parametrize("key", [0, 3], ids=["one number", "a range"])
def test_a_row_that_floats_choose(key: int) -> None:
    """It is a number a tile, known to its rounding only: it was taken to be the lower one."""
    table = torch.arange(10.0).view(2, 5)

    def score_mod(score, b, h, q, kv):
        level = torch.sigmoid(h + 3.0)
        row = (level <= level).int()  # 1, though bounds of the level do not say so
        return table[row, torch.minimum(kv, torch.tensor(4)) if key else h]

    traced = trace_score_mod(score_mod)
    check(traced, ((0, 0), (1, 1), (0, 0), (0, key)), Extents(1, 2, 5, 5), torch.zeros(1, 1, 1, 1))


def test_a_mask_whose_row_floats_choose() -> None:
    """Planned, no tile that shows something is told to be empty: they all were."""
    table = torch.zeros(2, 256, dtype=torch.bool)
    table[1, 128:] = True

    def mask_mod(b, h, q, kv):
        level = torch.sigmoid(h + 3.0)
        return table[(level <= level).int(), kv]

    blocks = fa_cute.plan_mask(mask_mod, 1, 1, 256, 256, tile=(128, 128), device="cpu")
    assert blocks.kinds().tolist() == [[[[EMPTY, PARTIAL], [EMPTY, PARTIAL]]]]


S = 3000
STARTS = torch.tensor([0, 7, 900, 901, 1500, 2999])
DOCUMENTS = torch.zeros(S, dtype=torch.int64).index_fill_(0, STARTS, 1).cumsum(0)
NOISE = torch.randint(-50, 50, (2, S), generator=torch.Generator().manual_seed(0))


def atoms() -> st.SearchStrategy[Callable]:
    """Masks as people write them, with random numbers."""
    number = st.integers(1, 700)
    shapes = [
        lambda n, m: lambda b, h, q, kv: q >= kv,
        lambda n, m: lambda b, h, q, kv: q - kv <= n,
        lambda n, m: lambda b, h, q, kv: (q - kv).abs() <= n * (h + 1),
        lambda n, m: lambda b, h, q, kv: q // n == kv // n,
        lambda n, m: lambda b, h, q, kv: (q // n - kv // n).abs() <= m // 100,
        lambda n, m: lambda b, h, q, kv: (q % n - kv % n).abs() <= m,
        lambda n, m: lambda b, h, q, kv: (q - kv) % n < m,
        lambda n, m: lambda b, h, q, kv: (q >> 5) & 7 != (kv >> 5) & (n % 16),
        lambda n, m: lambda b, h, q, kv: (q ^ kv) < n,
        lambda n, m: lambda b, h, q, kv: (q | n) > (kv & m),
        lambda n, m: lambda b, h, q, kv: kv < n,
        lambda n, m: lambda b, h, q, kv: torch.minimum(q, kv + n) >= torch.maximum(kv, q - m),
        lambda n, m: lambda b, h, q, kv: DOCUMENTS[q] == DOCUMENTS[kv],
        lambda n, m: lambda b, h, q, kv: NOISE[b, q] < NOISE[b, kv - n] + m,
        lambda n, m: lambda b, h, q, kv: DOCUMENTS[NOISE[b, q] + n] <= DOCUMENTS[kv],
        lambda n, m: lambda b, h, q, kv: (q - kv).float() * 0.37 + n < kv.float() / m,
        lambda n, m: lambda b, h, q, kv: torch.where(q > n, q - kv < m, kv < n),
        lambda n, m: lambda b, h, q, kv: q * kv * n > m,
        lambda n, m: lambda b, h, q, kv: (6 * q + n) % 3 == (3 * kv + m) % 6 % 3,
    ]
    return st.builds(lambda shape, n, m: shape(n, m), st.sampled_from(shapes), number, number)


def joined(masks: st.SearchStrategy[Callable]) -> st.SearchStrategy[Callable]:
    def both(a: Callable, b: Callable, how: str) -> Callable:
        def mask(*at):
            x, y = a(*at), b(*at)
            return {"and": lambda: x & y, "or": lambda: x | ~y, "xor": lambda: x ^ y}[how]()

        return mask

    return st.builds(both, masks, masks, st.sampled_from(["and", "or", "xor"]))


MASKS = st.recursive(atoms(), joined, max_leaves=4)


@settings(QUICK, max_examples=150)
@given(MASKS, boxes((2, 3, S, S)), st.integers(1, 90), st.integers(1, 90))
def test_masks_people_write(mask: Callable, box: Box, rows: int, keys: int) -> None:
    b, h, (q, _), (kv, _) = box
    box = (b, h, (q, min(q + rows, S - 1)), (kv, min(kv + keys, S - 1)))
    check(trace_mask_mod(mask), box, Extents(2, 3, S, S))


def kind(mask: Callable, box: Box, size: int = 1024) -> int:
    traced = trace_mask_mod(mask)
    return int(Analysis.of(traced, Extents(1, 1, size, size), "cpu").visible(region(box)))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (lambda b, h, q, kv: q >= kv, EMPTY),
        (lambda b, h, q, kv: q < kv, FULL),
        (lambda b, h, q, kv: q + 80 >= kv, PARTIAL),
        (lambda b, h, q, kv: q // 256 == kv // 256, FULL),
        (lambda b, h, q, kv: q % 256 < 64, FULL),
        (lambda b, h, q, kv: kv % 256 < 64, EMPTY),
        (lambda b, h, q, kv: (q & 63) <= (kv | 128), FULL),
        (lambda b, h, q, kv: (kv - q).abs() <= 191, FULL),
        (lambda b, h, q, kv: (2 * q + 1) % 6 == (4 * kv) % 6, EMPTY),
        (lambda b, h, q, kv: (3 * q) % 3 == 0, FULL),
        (lambda b, h, q, kv: q.float().sqrt() < 12, FULL),
        (lambda b, h, q, kv: torch.where(q < 32, kv < 0, kv >= 64), PARTIAL),
        (lambda b, h, q, kv: (q + 1) * 2**26 > 0, PARTIAL),
    ],
)
def test_what_is_told(mask: Callable, expected: int) -> None:
    """Queries 0 .. 63 and keys 128 .. 191: precise, but cautious where int32 wraps."""
    assert kind(mask, ((0, 0), (0, 0), (0, 63), (128, 191))) == expected


def test_nan_is_neither_above_nor_below() -> None:
    table = torch.ones(64)
    table[3] = float("nan")
    box = ((0, 0), (0, 0), (0, 0), (5, 5))
    assert kind(lambda b, h, q, kv: table[q + 3] < 1e9, box) == PARTIAL
    assert kind(lambda b, h, q, kv: ~(table[q + 3] < 1e9), box) == PARTIAL
    assert kind(lambda b, h, q, kv: table[q + 32] < 1e9, box) == FULL


def test_a_score_of_minus_infinity_hides() -> None:
    inf = float("inf")
    box = region(((0, 0), (0, 0), (0, 63), (128, 191)))

    def hidden(mod: Callable) -> bool:
        return bool(Analysis.of(trace_score_mod(mod), Extents(1, 1, 512, 512), "cpu").hidden(box))

    assert hidden(lambda s, b, h, q, kv: torch.where(q >= kv, s, -inf))
    assert hidden(lambda s, b, h, q, kv: s + torch.where(q >= kv, 0.0, -inf))
    assert hidden(lambda s, b, h, q, kv: torch.tanh(s) + torch.log((q >= kv).float()))
    assert not hidden(lambda s, b, h, q, kv: torch.where(q >= kv - 70, s, -inf))
    assert not hidden(lambda s, b, h, q, kv: s * 2 + torch.where(q >= kv, 0.0, -inf))
    assert not hidden(lambda s, b, h, q, kv: s - 1e30)


@pytest.mark.parametrize("name", ["mod", "floordiv", "abs", "sub", "lt", "and", "where"])
def test_a_broken_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The properties above can fail: a rule that only looks at the first ends is caught."""
    right = rules.RULES[name]

    def careless(context, *operands):
        value = right(context, *(rules.Interval(x.lo, x.lo, x.nan) for x in operands))
        return rules.Interval(value.lo, value.lo, value.nan)

    monkeypatch.setitem(rules.RULES, name, careless)
    with pytest.raises(AssertionError):
        test_masks_people_write.hypothesis.inner_test(
            lambda b, h, q, kv: torch.where(
                ((q - 40).abs() % 7 < kv // 3) & ((q & kv) < 9), q < 41, kv - q < 5
            ),
            ((0, 0), (0, 0), (30, 30), (20, 20)),
            40,
            40,
        )


def test_a_broken_congruence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from fa_cute.mods import congruence

    monkeypatch.setitem(congruence._RULES, "add", lambda x, y: Congruence(6, 1))
    with pytest.raises(AssertionError):
        check(
            trace_mask_mod(lambda b, h, q, kv: (2 * q + 3 * kv) % 6 == 1),
            ((0, 0), (0, 0), (0, 20), (0, 20)),
            Extents(1, 1, 100, 100),
        )


@QUICK
@given(st.integers(-40, 40), st.integers(0, 9), st.integers(-40, 40), st.integers(0, 9))
def test_congruences_that_never_meet(a: int, m: int, b: int, n: int) -> None:
    xs = {a + m * i for i in range(-200, 200)}
    ys = {b + n * i for i in range(-200, 200)}
    assert never_equal(Congruence(m, a), Congruence(n, b)) == (not xs & ys)


def test_remainders_survive_wrapping_only_as_powers_of_two() -> None:
    graph = trace_mask_mod(lambda b, h, q, kv: (q * 12) % 12 == 0).graph
    at = next(i for i, node in enumerate(graph.nodes) if node.op == "mul")
    wraps = [i == at for i in range(len(graph.nodes))]
    assert congruences(graph, (), wraps)[at] == Congruence(4, 0)
    assert congruences(graph, (), [False] * len(wraps))[at] == Congruence(12, 0)
    assert congruences(graph, (), wraps)[0] == ANY


@settings(QUICK, max_examples=40)
@given(st.integers(1, 200), st.data())
def test_a_summary_covers_every_range(size: int, data: st.DataObject) -> None:
    table = torch.randint(-99, 99, (3, size, 2), generator=torch.Generator().manual_seed(size))
    first = data.draw(st.integers(0, size - 1))
    last = data.draw(st.integers(first, size - 1))
    at = torch.tensor([2]), torch.tensor([1])
    ends = torch.tensor([first]), torch.tensor([last])
    least, greatest = Summary.of(table, 1).over(at, *ends)
    inside = table[2, first : last + 1, 1]
    assert least <= inside.min() and inside.max() <= greatest
    if first % GRAIN == 0 and ((last + 1) % GRAIN == 0 or last == size - 1):
        assert (least, greatest) == (inside.min(), inside.max())
    low, high = window(table, [*at, ends[0]][::2] + [at[1]], [*at, ends[1]][::2] + [at[1]])
    assert low <= inside.min() and inside.max() <= high
