"""What a score_mod hides: never more than it gives minus infinity to, and told to the kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fa_cute.configuration import Configuration
from fa_cute.mods import trace_mask_mod, trace_score_mod
from fa_cute.mods.affine import ranges_of
from fa_cute.mods.emit_torch import emit
from fa_cute.mods.shown import shown, visible_graph

INF = float("inf")
CUT = torch.tensor([3, 40])
HIDING: dict[str, tuple[Callable, int]] = {
    "causal": (lambda s, b, h, q, kv: torch.where(q + 10 * h >= kv, s, -INF), 1),
    "two": (
        lambda s, b, h, q, kv: torch.where(
            q - kv > 30, -INF, torch.where(kv < CUT[b], -INF, s.tanh() * 3)
        ),
        1,
    ),
    "a term": (lambda s, b, h, q, kv: s * 2 + torch.where(q >= kv, 0.0, -INF), 1),
    "either": (lambda s, b, h, q, kv: torch.where(kv < 9, s, torch.where(q >= kv, s, -INF)), 2),
    "less": (lambda s, b, h, q, kv: torch.minimum(s, torch.where(kv > q, -INF, 5.0)) - 1, 1),
}
SHOWING = {
    "scaled": lambda s, b, h, q, kv: s * 2,
    "by the score": lambda s, b, h, q, kv: torch.where(s > 0, s, -INF),
    "plus infinity": lambda s, b, h, q, kv: torch.where(q >= kv, s, INF),
    "a factor": lambda s, b, h, q, kv: s * torch.where(q >= kv, 1.0, -INF),
}


@pytest.mark.parametrize("name", HIDING)
def test_what_is_hidden(name: str) -> None:
    """False exactly where the score_mod is -inf; ranges are found in it."""
    mod, count = HIDING[name]
    traced = trace_score_mod(mod)
    graph = shown(traced.graph)
    sizes = (2, 3, 60, 70)
    at = {
        leaf: torch.arange(size).view([-1 if i == axis else 1 for i in range(4)])
        for axis, (leaf, size) in enumerate(zip(("b", "h", "q", "kv"), sizes, strict=True))
    }
    score = torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    value = emit(*traced, score=score, **at)
    seen = emit(graph, traced.captured, traced.scalars, score=score, **at).expand(sizes)
    assert torch.equal(seen, value > -INF)
    found = ranges_of(graph)
    assert len(found.ranges) == count and all(found.exact)


@pytest.mark.parametrize("hides", [True, False])
def test_each_node_is_looked_at_once(hides: bool) -> None:
    """800 sums of a value with itself, and as many choices: neither 2**800 walks nor as deep."""

    def mod(s, b, h, q, kv):
        x = torch.where(q >= kv, s, -INF) if hides else s
        for i in range(800):
            x = torch.where(q > 7 * i, x, x + 1.0) if i % 2 else x + x
        return x

    graph = shown(trace_score_mod(mod).graph)
    assert (graph is not None) == hides
    if hides:
        assert len(ranges_of(graph).ranges) == 1


@pytest.mark.parametrize("name", SHOWING)
def test_what_hides_nothing_for_sure(name: str) -> None:
    assert shown(trace_score_mod(SHOWING[name]).graph) is None


def test_a_mask_mod_counts_alone() -> None:
    score = trace_score_mod(HIDING["causal"][0]).graph
    mask = trace_mask_mod(lambda b, h, q, kv: kv < 9).graph
    assert visible_graph(score, mask) is mask
    assert visible_graph(None, None) is None


def test_the_plan_leaves_out_what_a_score_mod_hides() -> None:
    static = {"head_dim": 128, "dtype": "bfloat16", "target": "sm_90a"}
    plan, _ = Configuration(**static, score_mod=HIDING["two"][0]).plan()
    assert plan.visits == "ranges" and plan.mask_mod is None
    assert Configuration(**static, score_mod=SHOWING["scaled"]).plan()[0].visits == "bounds"
