"""The blocks of queries that a tile of keys visits under ranges: nothing seen is left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fa_cute.mods.affine import ranges_of
from fa_cute.mods.emit_torch import emit
from fa_cute.mods.trace import trace_mask_mod
from fa_cute.spans import Bounds

pytestmark = pytest.mark.gpu
TILE = (64, 128)
REACH = torch.tensor(77)
FAR = 1 << 20
MASKS: dict[str, Callable] = {
    "two ranges": lambda b, h, q, kv: ((q // 3 - kv).abs() <= 40) | (kv < 4),
    "chunks": lambda b, h, q, kv: q // 200 == kv // 200,
    "a number of the call": lambda b, h, q, kv: (q - kv <= REACH) & (q >= kv),
    "backwards": lambda b, h, q, kv: 900 - q >= kv,
    "not exact": lambda b, h, q, kv: (q >= kv) & ((q - kv) % 7 == 0),
    "few rows": lambda b, h, q, kv: (q >= 1900) & (q < 1970) & (kv < 300),
    "nothing": lambda b, h, q, kv: kv < 0,
}


@pytest.mark.parametrize("name", MASKS)
def test_visits_of_keys(name: str) -> None:
    from tests.visits_device import compiled

    traced = trace_mask_mod(MASKS[name])
    ranges = ranges_of(traced.graph)
    kernel = compiled(ranges, TILE)
    numbers = torch.tensor([int(REACH)][: len(ranges.inputs)] or [0]).int().cuda()
    for lengths in ((1, 1), (2000, 1000), (1000, 2000), (5000, 4990)):
        for left, right in ((FAR, FAR), (300, 0)):
            bounds = Bounds(*lengths, left, right)
            out = torch.full((-(-lengths[1] // TILE[1]), 200), -7).int().cuda()
            kernel(out, numbers, bounds)
            _judge(traced, bounds, out.tolist())


def _judge(traced: object, bounds: Bounds, rows: list[list[int]]) -> None:
    q, kv = torch.arange(bounds.seqlen_q)[:, None], torch.arange(bounds.seqlen_k)
    zero = torch.zeros(1, 1)
    seen = emit(*traced, b=zero, h=zero, q=q, kv=kv).expand(len(q), kv.numel())
    behind = q + bounds.seqlen_k - bounds.seqlen_q - kv
    inside = (behind <= bounds.left) & (behind >= -bounds.right)
    for at, (count, *words) in enumerate(rows):
        keys = slice(at * TILE[1], (at + 1) * TILE[1])
        assert words[count] == -7, "no more than it counts"
        blocks = [word >> 1 for word in words[:count]]
        assert blocks == sorted(set(blocks), reverse=True)
        rest = (seen & inside)[:, keys].clone()
        for word in words[:count]:
            queries = slice((word >> 1) * TILE[0], ((word >> 1) + 1) * TILE[0])
            part = (seen & inside)[queries, keys]
            whole = part.all() and part.shape == TILE
            assert whole or not word & 1, "whole in the mask, the bounds and the lengths"
            rest[queries] = False
        assert not rest.any(), "all that is seen is visited"
