"""Which score_mods only add a line of q - kv, or of kv, to the score: those the softmax takes."""

from __future__ import annotations

import pytest
import torch

from fa_cute.mods.trace import trace_score_mod
from tests.tracing import within_a_trace

pytestmark = pytest.mark.compile

LINES = {
    "line of q - kv": lambda s, b, h, q, kv: s + 0.5 * (kv - q),
    "turned, over a head's slope": lambda s, b, h, q, kv: s - (q - kv) / (h + 1.0),
    "with a factor, of kv": lambda s, b, h, q, kv: s * (b + 2.0) - 0.25 * kv,
}
OTHERS = {
    "of q alone": lambda s, b, h, q, kv: s + 0.5 * q,
    "of the score": lambda s, b, h, q, kv: torch.tanh(s) + 0.5 * (kv - q),
    "no line": lambda s, b, h, q, kv: s - (q - kv).abs(),
    "a factor a row": lambda s, b, h, q, kv: s * (q + 1.0) + 0.5 * (kv - q),
    "a step": lambda s, b, h, q, kv: s + (kv - q) // 16,
}


def test_which_mods_add_a_line() -> None:
    from cutlass import Float32, Int32

    from fa_cute.device import mma_sm90, score

    found = {}

    def describe() -> None:
        for name, score_mod in (LINES | OTHERS).items():
            graph = trace_score_mod(score_mod).graph
            (given,) = score.deal((graph,), (), ())
            options = {"scale": Float32(0.125), "fragment": mma_sm90.fragment(80)}
            mod = score.Modifier.of(graph, given, **options)
            block = mod.tile(Int32(0), Int32(0)).rows(Int32(0)).block(Int32(0))
            found[name] = block.line() is not None

    within_a_trace(describe)
    assert found == dict.fromkeys(LINES, True) | dict.fromkeys(OTHERS, False)
