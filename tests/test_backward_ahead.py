"""Kernels of training ahead of a call: ``direction="backward"``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fa_cute.variants.softcap import softcap

import fa_cute
from fa_cute import configuration
from fa_cute.autograd import derivative_of
from fa_cute.configuration import Configuration
from fa_cute.host import compile as compiling
from fa_cute.host.backward import plans_of
from fa_cute.host.planning import Mods
from fa_cute.plan import BACKWARD, FORWARD, POSTPROCESS, PREPROCESS

ARGUMENTS = {"head_dim": 64, "dtype": "bfloat16", "target": "sm_90a", "gqa_ratio": 2}


def document(documents: torch.Tensor) -> Any:
    return lambda b, h, q, kv: documents[b, q] == documents[b, kv]


def test_the_kernels_are_those_of_a_call() -> None:
    """The four plans that ``attention`` makes of a call that is differentiated."""
    slopes = torch.ones(8, requires_grad=True)

    def mod(score, b, h, q, kv):
        return score + slopes[h] * (kv - q)

    asked = Configuration(**ARGUMENTS, score_mod=mod, causal=True, direction=BACKWARD)
    (main, before, after, forward), mods = asked.plans()
    assert (
        forward == Configuration(**ARGUMENTS, score_mod=mod, causal=True, return_lse=True).plan()[0]
    )
    derivative = derivative_of(Mods.of(mod, None))
    wanted = plans_of(forward, deterministic=False, lse_gradient=False, derivative=derivative)
    assert (before, main, after) == wanted
    directions = [plan.direction for plan in (main, before, after, forward)]
    assert directions == [BACKWARD, PREPROCESS, POSTPROCESS, FORWARD]
    assert mods.score_mod is not None and main.score_mod.more


@pytest.mark.parametrize("deterministic", [False, True])
def test_lists_of_a_mask(deterministic: bool) -> None:
    mask = document(torch.zeros(1, 64, dtype=torch.int32))
    asked = {**ARGUMENTS, "mask_mod": mask, "block_lists": True, "deterministic": deterministic}
    main, *_, forward = Configuration(**asked, direction=BACKWARD).plans()[0]
    assert forward.visits == "lists" and main.deterministic == deterministic
    assert main.visits == "lists"


def test_a_recorded_backward_survives_a_file(tmp_path: Path) -> None:
    """Its graph has its derivative: the main plan and the passes, without a forward."""
    plans, _ = Configuration(**ARGUMENTS, score_mod=softcap(30.0), direction=BACKWARD).plans()
    path = tmp_path / "configurations.json"
    configuration.save(path, [Configuration.of(plans[0]).arguments()])
    (again,) = configuration.load(path)
    assert Configuration(**again).plans()[0] == plans[:3]


@pytest.mark.compile
def test_compile() -> None:
    kernel = fa_cute.compile(**ARGUMENTS, direction=BACKWARD)
    assert kernel.plan.direction == BACKWARD and kernel.resources.spill_bytes == 0
    plans, _ = Configuration(**ARGUMENTS, direction=BACKWARD).plans()
    assert all(compiling.in_memory(plan) for plan in plans)
    recorded = [one["direction"] for one in fa_cute.recorded_configurations()]
    assert set(recorded) <= {FORWARD, BACKWARD} and BACKWARD in recorded
    with pytest.raises(ValueError, match="backward kernel, which no call"):
        kernel(*(torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16) for _ in range(3)))
