"""Masks whose blocks the kernel leaves out: beside the oracle, and beside evaluation everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fa_cute

from .backward_judging import poison
from .configurations import MASKS, Configuration, masks
from .judging import (
    Inputs,
    arguments,
    call,
    check,
    check_as_everywhere,
    everywhere,
    inputs,
    judge,
    planned,
)
from .modifiers import Shape
from .test_launches import LONG
from .test_presumed import STEPS, rising

pytestmark = pytest.mark.gpu
LENGTHS = ((1, 1), (129, 129), (300, 1000), (1000, 300), (1337, 1337))
ALL = masks()


def _inputs(name: str, lengths: tuple[int, int], **options: Any) -> Inputs:
    # A variant may hold the number of heads as a constant: the compiled one's.
    heads = 2 if name in MASKS else Shape().heads
    return inputs(ALL[name], lengths, heads_k=heads, **options)


def _run_time(name: str) -> dict[str, Any]:
    if name.endswith("-window"):
        return {"window": (200, 70)}
    return {"window": (333, None)} if name.endswith("-left") else {}


def _sinks(configuration: Configuration, x: Inputs) -> dict[str, torch.Tensor]:
    heads = x.q.shape[2]
    return {"sinks": torch.linspace(-1, 2, heads, device=x.q.device)} if configuration.sinks else {}


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", sorted(ALL))
def test_as_everywhere(name: str, lengths: tuple[int, int]) -> None:
    """Bit for bit what evaluating the mask on every block gives; with a score_mod, too."""
    configuration = ALL[name]
    x = _inputs(name, lengths, kind="outliers")
    check_as_everywhere(configuration, x, **_run_time(name), **_sinks(configuration, x))


@pytest.mark.parametrize("steps", STEPS[1:3], ids=str)
@pytest.mark.parametrize("name", sorted(ALL))
def test_as_everywhere_without_lse(name: str, steps: tuple[float, ...]) -> None:
    """There maxima are presumed: where rows begin and rise, what is left out changes no bit."""
    configuration = replace(ALL[name], return_lse=False)
    x = rising(_inputs(name, (1000, 1000)), steps, slice(100, 900, 3))
    check_as_everywhere(configuration, x, **_run_time(name), **_sinks(configuration, x))


@pytest.mark.parametrize(
    "name", ["cutoffs", "ends", "scattered", "document-planned", "longformer", "hiding"]
)
def test_long(name: str) -> None:
    """Many consecutive empty tiles, and more tiles than CTAs: no hang, no difference."""
    configuration = ALL[name]
    x = _inputs(name, (8100, 16300))
    options = planned(configuration, x, arguments(configuration, x))
    out, lse = call(configuration, x, **options)
    right, right_lse, _ = everywhere(x, options)
    assert torch.equal(out, right) and torch.equal(lse, right_lse)


def test_lists_of_another_tile_are_not_read() -> None:
    configuration, x = ALL["document"], _inputs("document", (300, 300))
    options = arguments(configuration, x)
    blocks = fa_cute.plan_mask(
        options["mask_mod"], 2, Shape().heads, 300, 300, device=x.q.device, tile=(32, 32)
    )
    result = call(configuration, x, **options | {"mask_mod": blocks})
    judge(configuration, x, options, result)


def test_a_mask_that_keeps_nothing() -> None:
    """Lists without an entry: no block is loaded, every row is 0 and -inf."""
    configuration, x = ALL["apart"], _inputs("apart", (300, 300))
    options = planned(configuration, x, arguments(configuration, x))
    assert options["mask_mod"].counts().empty == 2 * 9
    out, lse = call(configuration, x, **options)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_lists_in_a_captured_graph() -> None:
    """A call with lists waits for nothing: it can be captured, and replayed after new inputs."""
    configuration = ALL["document-planned"]
    x = _inputs("document-planned", (1000, 1000))
    options = planned(configuration, x, arguments(configuration, x))
    eager, _ = call(configuration, x, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = call(configuration, x, **options)
    captured.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, eager)


@pytest.mark.parametrize("first", ["busy stream", "capture"])
def test_lists_first_read_where_they_are_not_made_yet(first: str) -> None:
    """Their order is made at the first call: on a stream that is busy, or that only captures."""
    configuration = ALL["document-planned"]
    x = _inputs("document-planned", (1000, 1000))
    options = arguments(configuration, x)
    eager, _ = call(configuration, x, **planned(configuration, x, options))
    mask = planned(configuration, x, options)
    poison()
    torch.cuda.synchronize()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    if first == "capture":
        with torch.cuda.graph(graph):
            one, _ = call(configuration, x, **mask)
    else:
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG)
            one, _ = call(configuration, x, **mask)
    other, _ = call(configuration, x, **mask)
    if first == "capture":
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(other, eager) and torch.equal(one, eager)


@pytest.mark.parametrize("name", ["document", "scattered"])
def test_plan_on_the_device_as_on_the_cpu(name: str) -> None:
    """The lists that the device makes are those that the CPU makes."""
    configuration = ALL[name]
    shape = Shape(2, 8, 1337, 1500)
    lists = []
    for device in ("cuda", "cpu"):
        mask = configuration.modifiers(torch.device(device), shape)["mask_mod"]
        blocks = fa_cute.plan_mask(mask, 2, 8, 1337, 1337, device=device)
        kept = int(blocks.by_query.offsets[-1])
        lists.append((blocks.by_query.offsets.cpu(), blocks.by_query.entries[:kept].cpu()))
    assert all(torch.equal(a, b) for a, b in zip(*lists, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", sorted(ALL.keys() - MASKS.keys()))
def test_the_gallery_spills_nothing(name: str, head_dim: int) -> None:
    kernel = replace(ALL[name], head_dim=head_dim).compile()
    assert kernel.resources.spill_bytes == kernel.resources.serialised == 0


def test_check_with_everything_on_top() -> None:
    """Causal, a window and GQA over ranges with captured numbers, at a length inside a tile."""
    configuration = ALL["cutoffs-window"]
    check(configuration, inputs(configuration, (777, 999), heads_k=3), window=(150, 40))
