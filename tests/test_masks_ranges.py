"""Ranges of keys: found in a mask's graph, and turned into runs of blocks by plain arithmetic."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa_cute import variants
from fa_cute.mods import affine, ranges, trace_mask_mod
from fa_cute.mods.affine import exact_ranges, input_graphs, ranges_of
from fa_cute.mods.emit_torch import emit
from fa_cute.mods.ranges import LARGEST_INPUT, Run, clipped, runs, term_bounds
from fa_cute.mods.trace import Traced
from fa_cute.spans import Bounds, kv_spans

QUICK = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
SIZE = 90
PREFIX, WINDOWS = torch.tensor([20, 71]), torch.tensor([3, 30, 200])
ON = torch.tensor([True, False])
SCALAR = torch.tensor(11)


def leaves(b: int, h: int, seqlen_q: int, seqlen_k: int) -> dict[str, torch.Tensor]:
    return {
        "b": torch.tensor([[b]]),
        "h": torch.tensor([[h]]),
        "q": torch.arange(seqlen_q).view(-1, 1),
        "kv": torch.arange(seqlen_k).view(1, -1),
    }


def inputs_of(traced: Traced, b: int, h: int) -> list[int]:
    """The numbers that a kernel would compute once a (batch, head)."""
    return [
        int(emit(graph, *traced[1:], **leaves(b, h, 1, 1)).flatten()[0])
        for graph in input_graphs(traced.graph)
    ]


def check(
    mask: Callable, lengths: tuple[int, int], tile: tuple[int, int], exact: bool = False
) -> bool:
    """Runs against every element; False if the mask has no ranges."""
    traced = trace_mask_mod(mask)
    found = ranges_of(traced.graph)
    if found is None:
        return False
    (seqlen_q, seqlen_k), (tile_m, tile_n) = lengths, tile
    for b, h in ((0, 0), (1, 1), (1, 2)):
        inputs = inputs_of(traced, b, h)
        seen = emit(*traced, **leaves(b, h, *lengths)).expand(lengths)
        for begin in range(0, seqlen_q, tile_m):
            visited: dict[int, bool] = {}
            floor = 2**40
            for run in runs(found, inputs, (begin, begin + tile_m), lengths, tile_n):
                assert 0 <= run.begin <= run.middle_begin <= run.middle_end <= run.end
                if run.begin < run.end:
                    assert run.end <= floor, "runs go from high to low and are disjoint"
                    floor = run.begin
                for block in range(run.begin, run.end):
                    visited[block] = run.middle_begin <= block < run.middle_end
            for block in range(-(-seqlen_k // tile_n)):
                part = seen[begin : begin + tile_m, block * tile_n : (block + 1) * tile_n]
                whole = visited.get(block, False)
                assert block in visited or not part.any(), (begin, block)
                assert not whole or (part.all() and part.shape[1] == tile_n), (begin, block)
                assert not exact or (block in visited) == bool(part.any()), (begin, block)
            assert all(block < -(-seqlen_k // tile_n) for block in visited)
    return True


GALLERY = {
    "causal": (1, lambda b, h, q, kv: q >= kv),
    "window": (1, lambda b, h, q, kv: (q - kv).abs() <= 20),
    "chunked": (1, lambda b, h, q, kv: (q // 24 == kv // 24) & (q >= kv)),
    "chunk of a power of two": (1, lambda b, h, q, kv: (q // 32 == kv // 32) & (q >= kv)),
    "block causal": (1, lambda b, h, q, kv: q // 20 >= kv // 20),
    "prefix": (2, lambda b, h, q, kv: (kv < PREFIX[b]) | (q >= kv)),
    "longformer": (3, lambda b, h, q, kv: ((q - kv).abs() <= 9) | (kv < 5) | (q < 5)),
    "sinks": (2, lambda b, h, q, kv: (q >= kv) & ((kv < 4) | (q - kv < 30))),
    "per head": (1, lambda b, h, q, kv: (q >= kv) & (q - kv <= WINDOWS[h])),
    "outside": (2, lambda b, h, q, kv: ~((q - kv).abs() <= 20)),
    "switched": (2, lambda b, h, q, kv: torch.where(ON[b], q >= kv, q <= kv)),
    "shifted": (1, lambda b, h, q, kv: q + SCALAR >= kv),
    "remainder": (1, lambda b, h, q, kv: kv <= q % 30),
    "least": (1, lambda b, h, q, kv: torch.minimum(q, SCALAR + 40) >= torch.maximum(kv, q - 30)),
    "all": (1, lambda b, h, q, kv: q >= 0),
    "none": (0, lambda b, h, q, kv: (q > kv) & (kv < 0) & False),
    "odd keys before": (1, lambda b, h, q, kv: (kv % 2 == 1) & (q >= kv)),
    "a few and some": (2, lambda b, h, q, kv: ((q * kv % 5 == 0) & (kv > q + 20)) | (kv < 9)),
    "not the unknown": (1, lambda b, h, q, kv: ~((q * kv % 5 == 0) | (kv >= PREFIX[b]))),
}


@pytest.mark.parametrize("name", GALLERY)
def test_masks_that_are_ranges(name: str) -> None:
    count, mask = GALLERY[name]
    found = ranges_of(trace_mask_mod(mask).graph)
    assert len(found.ranges) == count
    for lengths in ((SIZE, SIZE), (41, SIZE), (SIZE, 37)):
        for tile in ((16, 8), (8, 16), (32, 32)):
            check(mask, lengths, tile, exact=name in ("causal", "chunked", "sinks", "prefix"))


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, kv: (q - kv) % 3 == 0,
        lambda b, h, q, kv: kv % 16 < q,
        lambda b, h, q, kv: PREFIX[kv % 2] > q,
        lambda b, h, q, kv: q * kv > 4,
        lambda b, h, q, kv: q.float() > kv,
        lambda b, h, q, kv: q * 2**10 > kv,
        lambda b, h, q, kv: ((q - kv).abs() % 9 < 3) | (q > kv),
        lambda b, h, q, kv: (kv == 1) | (kv == 3) | (kv == 5) | (kv == 7) | (kv == 9),
    ],
)
def test_masks_that_are_not(mask: Callable) -> None:
    """No form for kv, or a value that may wrap, or too many ranges."""
    assert ranges_of(trace_mask_mod(mask).graph) is None


def test_which_variants_are_ranges() -> None:
    """All of the gallery: some exactly, some by more keys than they show."""
    shape = variants.Shape(2, 4, 100, 100)
    exact, wider = set(), set()
    for name, variant in variants.ALL.items():
        mask = variant.build("cpu", shape).get("mask_mod")
        if mask is not None:
            found = ranges_of(trace_mask_mod(mask).graph)
            (exact if all(found.exact) else wider).add(name)
    assert exact == {
        *("causal", "sliding_window", "prefix_lm", "chunked", "block_causal", "longformer"),
        *("streaming_llm", "per_head_window"),
    }
    assert wider == {"document", "causal_documents", "dilated", "neighbourhood", "tree"}


def _atoms() -> st.SearchStrategy[Callable]:
    number = st.integers(-40, 120)
    shapes = [
        lambda n, m: lambda b, h, q, kv: q + n >= kv,
        lambda n, m: lambda b, h, q, kv: (q - kv + n).abs() > m,
        lambda n, m: lambda b, h, q, kv: (abs(m) + 3) - kv < n - q,
        lambda n, m: lambda b, h, q, kv: (q + n) // (abs(m) + 1) == (kv - n) // (abs(m) + 1),
        lambda n, m: lambda b, h, q, kv: -kv // (abs(m) + 2) > -q // 3 + n,
        lambda n, m: lambda b, h, q, kv: (n - kv // 4) // (abs(m) + 1) != q >> 4,
        lambda n, m: lambda b, h, q, kv: kv < n,
        lambda n, m: lambda b, h, q, kv: q == n,
        lambda n, m: lambda b, h, q, kv: kv <= PREFIX[b] + n - q % (abs(m) + 1),
        lambda n, m: lambda b, h, q, kv: torch.maximum(kv, q - n) < torch.minimum(q + m, kv + 99),
        lambda n, m: lambda b, h, q, kv: q - kv <= WINDOWS[h] - n,
        lambda n, m: lambda b, h, q, kv: ON[b] ^ (kv - q > m),
        lambda n, m: lambda b, h, q, kv: (2 * kv - q) - kv < SCALAR + n,
        lambda n, m: lambda b, h, q, kv: (q * kv + n) % 5 < 2,
        lambda n, m: lambda b, h, q, kv: torch.minimum(kv % 16, q) <= (abs(m) + 1),
    ]
    return st.builds(lambda shape, n, m: shape(n, m), st.sampled_from(shapes), number, number)


def _joined(masks: st.SearchStrategy[Callable]) -> st.SearchStrategy[Callable]:
    def both(a: Callable, b: Callable, how: str) -> Callable:
        def mask(*at):
            x, y = a(*at), b(*at)
            return {"and": lambda: x & y, "or": lambda: x | y, "not": lambda: x & ~y}[how]()

        return mask

    return st.builds(both, masks, masks, st.sampled_from(["and", "or", "not"]))


SIZES = st.tuples(st.integers(1, SIZE), st.integers(1, SIZE))
TILES = st.tuples(st.sampled_from([1, 8, 16, 40]), st.sampled_from([1, 8, 13, 32]))


@QUICK
@given(st.recursive(_atoms(), _joined, max_leaves=3), SIZES, TILES)
def test_runs_are_sound(mask: Callable, lengths: tuple[int, int], tile: tuple[int, int]) -> None:
    check(mask, lengths, tile)


@QUICK
@given(_joined(_atoms()), st.tuples(st.integers(1, SIZE), st.integers(1, SIZE)))
def test_exact_ranges_are_all_that_a_row_sees(mask: Callable, lengths: tuple[int, int]) -> None:
    """A kernel hides by them, row by row, and does not evaluate such a mask."""
    traced = trace_mask_mod(mask)
    found = exact_ranges(traced.graph)
    if found is None:
        return
    seen = emit(*traced, **leaves(0, 0, *lengths)).expand(lengths)
    for q in range(lengths[0]):
        terms = term_bounds(found, (), q, q)
        assert all(low == high for low, high in terms), "a row's terms are numbers"
        shown = torch.zeros(lengths[1], dtype=torch.bool)
        for first, last in found.ranges:
            shown[max(terms[first][0], 0) : max(terms[last][1] + 1, 0)] = True
        assert torch.equal(shown, seen[q]), q


def test_the_gallery_has_exact_ranges() -> None:
    shape = variants.Shape()
    names = ("causal", "sliding_window", "streaming_llm", "longformer", "chunked", "block_causal")
    for name, variant in variants.ALL.items():
        mask = variant.build("meta", shape).get("mask_mod")
        found = mask and exact_ranges(trace_mask_mod(mask).graph)
        assert bool(found) == (name in names), name


def test_unsound_arithmetic_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: bounds of a sum that take the first ends only."""
    real = ranges.term_bounds

    def careless(*args):
        return [(low, low) for low, _ in real(*args)]

    monkeypatch.setattr(ranges, "term_bounds", careless)
    with pytest.raises(AssertionError):
        check(GALLERY["causal"][1], (SIZE, SIZE), (16, 8))
    monkeypatch.undo()
    affine.ranges_of.cache_clear()
    monkeypatch.setattr(affine, "_both", lambda x, y: x)
    with pytest.raises(AssertionError):
        check(GALLERY["window"][1], (SIZE, SIZE), (16, 8))
    affine.ranges_of.cache_clear()


def test_which_tiles_are_long() -> None:
    """The last ones under causal, the first under its opposite and under global tokens."""
    long_first = {name for name, (_, mask) in GALLERY.items() if _shrinks(mask)}
    assert long_first == {"longformer", "a few and some", "least", "switched"}
    assert _shrinks(lambda b, h, q, kv: q <= kv) and not _shrinks(lambda b, h, q, kv: q >= kv)


def _shrinks(mask: Callable) -> bool:
    return ranges.shrinking(ranges_of(trace_mask_mod(mask).graph))


def test_a_huge_input_decides_nothing() -> None:
    """A window of 2**31 - 1 would wrap in a sum: every block is visited, with its mask."""
    traced = trace_mask_mod(GALLERY["per head"][1])
    found = ranges_of(traced.graph)
    for window in (2**31 - 1, LARGEST_INPUT + 1, -(2**31)):
        assert runs(found, [window], (64, 80), (100, 100), 16) == (Run(0, 0, 0, 7),)
    assert runs(found, [LARGEST_INPUT], (64, 80), (100, 100), 16) == (Run(0, 0, 4, 5),)


def test_under_causal_and_a_window_too() -> None:
    """Clipped runs visit what both leave, and their middle is whole in both."""
    mask, lengths = GALLERY["longformer"][1], (70, 90)
    found = ranges_of(trace_mask_mod(mask).graph)
    seen = emit(*trace_mask_mod(mask), **leaves(0, 0, *lengths)).expand(lengths)
    q, kv = torch.arange(70).view(-1, 1), torch.arange(90)
    for left, right in ((None, 0), (30, 4), (0, None)):
        bounds = Bounds(*lengths, left, right)
        inside = (left is None or kv >= q + 20 - left) & (right is None or kv <= q + 20 + right)
        both = seen & inside
        for begin in range(0, 70, 16):
            spans = kv_spans(bounds, begin, begin + 16, 8)
            visited = {}
            for run in runs(found, [], (begin, begin + 16), lengths, 8):
                run = clipped(run, spans)
                for block in range(run.begin, run.end):
                    visited[block] = run.middle_begin <= block < run.middle_end
            for block in range(12):
                part = both[begin : begin + 16, block * 8 : block * 8 + 8]
                assert block in visited or not part.any()
                assert not visited.get(block) or part.all()


def test_long_chains_take_no_longer_than_they_are() -> None:
    """A chain of n choices was walked 2**n times, and one of some hundreds nested too deep."""

    def choices(b, h, q, kv):
        seen = q >= kv
        for n in range(400):
            seen = seen ^ (kv == 7 * n)
        return seen

    def doubled(b, h, q, kv):
        for _ in range(60):
            q = (q + q) // 2
        return q >= kv

    traced = trace_mask_mod(choices)
    began = time.process_time()
    assert ranges_of(traced.graph) is None
    assert ranges_of(trace_mask_mod(doubled).graph) is not None
    assert time.process_time() - began < 10


def test_what_no_range_needs_is_not_computed() -> None:
    """``kv % 3`` has no form: of the second operand nothing is left, nor of its input."""
    found = ranges_of(trace_mask_mod(lambda b, h, q, kv: (q >= kv) & (kv % 3 < PREFIX[b])).graph)
    assert found is not None and not found.inputs and found.exact == (False,)
    assert [term.op for term in found.terms].count("input") == 0
