"""Random masks: their graphs and the tiles that are proved empty or full, beside torch."""

from __future__ import annotations

import pytest
import torch

import fa_cute
from fa_cute.mods.emit_torch import emit
from fa_cute.mods.intervals import EMPTY, FULL
from fa_cute.mods.trace import trace_mask_mod
from tests.random_masks import BATCH, HEADS, draw, elements

SHAPE = (BATCH, HEADS, 150, 177)


@pytest.mark.parametrize("seed", range(40))
def test_proofs_hold_for_every_element(seed: int) -> None:
    drawn = draw(seed)
    seen = elements(drawn.mask_mod, SHAPE)
    traced = trace_mask_mod(drawn.mask_mod)
    names = ("b", "h", "q", "kv")
    places = {
        name: torch.arange(size).view([-1 if i == at else 1 for i in range(4)])
        for at, (name, size) in enumerate(zip(names, SHAPE, strict=True))
    }
    assert torch.equal(emit(*traced, **places).expand(SHAPE), seen), drawn.source
    rows, keys = tile = (16, 8 + seed % 5)
    kinds = fa_cute.plan_mask(drawn.mask_mod, *SHAPE, tile=tile).kinds()
    kinds = kinds.repeat_interleave(rows, 2).repeat_interleave(keys, 3)
    kinds = kinds[:, :, : SHAPE[2], : SHAPE[3]]
    assert not ((kinds == EMPTY) & seen).any(), drawn.source
    assert not ((kinds == FULL) & ~seen).any(), drawn.source
