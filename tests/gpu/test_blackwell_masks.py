"""Blocks that masks leave out, and heads that share a tile, in the kernel of sm_100 on Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .configurations import HOSTED_MASKS, MASKS, PACKED, masks
from .hosting import hosted as hosted
from .judging import arguments, call, check, check_as_everywhere, inputs, planned
from .modifiers import Shape

pytestmark = pytest.mark.gpu
ALL = masks()
MASKED = ((1, 1), (300, 1000), (1000, 300), (777, 1337))
SHORT = ((1, 1), (3, 129), (33, 257), (64, 40), (17, 1500))


@pytest.mark.parametrize("lengths", MASKED, ids=str)
@pytest.mark.parametrize("name", HOSTED_MASKS)
def test_as_everywhere(name: str, lengths: tuple[int, int]) -> None:
    """Bit for bit what evaluating the mask on every block gives, and right."""
    configuration = ALL[name]
    heads = 2 if name in MASKS else Shape().heads
    x = inputs(configuration, lengths, batch=1, heads_k=heads, kind="outliers")
    run_time: dict[str, Any] = {"window": (200, 70)} if name.endswith("-window") else {}
    if configuration.sinks:
        run_time["sinks"] = torch.linspace(-1, 2, x.q.shape[2], device=x.q.device)
    check_as_everywhere(configuration, x, **run_time)


def test_a_mask_that_keeps_nothing() -> None:
    """Lists without an entry: no block is loaded, every row is 0 and -inf."""
    configuration = ALL["apart"]
    x = inputs(configuration, (300, 300), heads_k=2)
    options = planned(configuration, x, arguments(configuration, x))
    assert options["mask_mod"].counts().partial == options["mask_mod"].counts().full == 0
    out, lse = call(configuration, x, **options)
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("lengths", SHORT, ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_packed(name: str, lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa_cute.host.problem.FEW_QUERIES", 64)
    configuration = PACKED[name]
    bounds = {"window": (20, None)} if configuration.window[0] else {}
    x = inputs(configuration, lengths, batch=2, heads_k=3, kind="outliers")
    check(configuration, x, **bounds)
