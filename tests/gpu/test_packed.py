"""Query heads that share a tile (short Sq, GQA), against the oracle and against heads apart."""

from __future__ import annotations

import pytest
import torch

import fa_cute
from fa_cute import api
from fa_cute.host.planning import NO_MODS
from fa_cute.plan import Plan

from .configurations import PACKED, PLAIN
from .judging import check, inputs, judge

pytestmark = pytest.mark.gpu


LENGTHS = ((1, 1), (1, 1000), (3, 129), (33, 257), (64, 64), (64, 40), (17, 8192))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_packed(name: str, lengths: tuple[int, int]) -> None:
    configuration = PACKED[name]
    bounds = {"window": (20, None)} if configuration.window[0] else {}
    x = inputs(configuration, lengths, batch=2, heads_k=3, kind="outliers")
    check(configuration, x, **bounds)


def test_few_queries_pick_the_packed_kernel() -> None:
    """By themselves; one more query, or a kernel that was compiled for the others, does not."""
    configuration = PLAIN["d128-bf16-causal-4"]
    options = api.Options(True, None, None, True, False)

    def plan(queries: int) -> Plan:
        x = inputs(configuration, (queries, 300))
        return api.lookup(tuple(x), NO_MODS, options).kernel.plan

    assert plan(64).few_queries and not plan(65).few_queries
    x = inputs(configuration, (64, 300))
    judge(configuration, x, {"causal": True}, configuration.compile()(*x))


def test_a_packed_layout_may_be_strided() -> None:
    """Heads before positions in memory, for q and out alike."""
    x = inputs(PACKED["causal-8"], (5, 300), heads_k=2)
    plain, _ = fa_cute.attention(*x, causal=True, return_lse=True)
    q = x.q.transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.full_like(q, float("nan"))
    assert fa_cute.attention(q, x.k, x.v, causal=True, return_lse=True, out=out)[0] is out
    assert torch.equal(out, plain)


def test_each_head_gets_its_own() -> None:
    """v tells the key/value heads apart, q the heads of a group: equal to one head at a time."""
    x = inputs(PACKED["full-4"], (7, 200), batch=1, heads_k=2)
    together, _ = fa_cute.attention(*x, return_lse=True)
    for head in range(x.q.shape[2]):
        one = fa_cute.reference.attention(
            x.q[:, :, head : head + 1],
            x.k[:, :, head // 4 :][:, :, :1],
            x.v[:, :, head // 4 :][:, :, :1],
        )
        assert (together[:, :, head : head + 1].double() - one).abs().max() < 0.02
