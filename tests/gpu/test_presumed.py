"""Rows whose maximum rises late: what was computed under the old one is done again."""

from __future__ import annotations

import pytest
import torch

from .configurations import BOUNDED, PRESUMED
from .judging import KINDS, Inputs, arguments, call, check, inputs

pytestmark = pytest.mark.gpu
NAMES = (
    *("d128-bf16-full", "d128-bf16-causal", "d64-fp16-full", "d64-fp16-causal"),
    *("d128-bf16-alibi", "d128-bf16-alibi-turned", "d64-fp16-alibi-turned", "d256-bf16-keys"),
    *("d128-bf16-capped", "d96-bf16-capped", "d64-fp16-capped-causal", "d64-bf16-capped-causal"),
)
LENGTHS = ((1, 1), (129, 200), (300, 129), (1000, 1000), (1337, 2049))

# Keys are visited from the last to the first.
STEPS = ((12.0, 0.0), (60.0, 0.0), (200.0, 100.0, 9.0, 0.0), (0.0, 300.0))


def rising(x: Inputs, steps: tuple[float, ...], rows: slice) -> Inputs:
    """Scores of ``rows`` higher by ``steps`` nats, one for each part of the keys in their order."""
    k, q = x.k.clone(), x.q.clone()
    part = -(-k.shape[1] // len(steps))
    q[..., 0] = 0
    q[:, rows, :, 0] = 8.0
    for i, step in enumerate(steps):
        k[:, i * part : (i + 1) * part, :, 0] = step * q.shape[3] ** 0.5 / 8.0
    return Inputs(q, k, x.v)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", PRESUMED)
def test_check(name: str, lengths: tuple[int, int], kind: str) -> None:
    there = PRESUMED[name].window
    sizes = tuple(size if one else None for size, one in zip((70, 20), there, strict=True))
    window = {"window": sizes} if any(there) else {}
    check(PRESUMED[name], inputs(PRESUMED[name], lengths, heads_k=2, kind=kind), **window)


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize("rows", [slice(None), slice(5, 6), slice(100, 700, 64)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_rising(name: str, rows: slice, steps: tuple[float, ...]) -> None:
    x = inputs(PRESUMED[name], (1000, 1000), heads_k=2)
    check(PRESUMED[name], rising(x, steps, rows))


@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_touch_each_other(name: str) -> None:
    """A row beside one whose maximum rises keeps its bits."""
    x = inputs(PRESUMED[name], (1000, 1000), batch=1)
    calm, _ = check(PRESUMED[name], rising(x, (200.0, 0.0), slice(0, 0)))
    some, _ = check(PRESUMED[name], rising(x, (200.0, 0.0), slice(3, 1000, 64)))
    others = torch.ones(1000, dtype=torch.bool, device=calm.device)
    others[3::64] = False
    assert torch.equal(calm[:, others], some[:, others])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", BOUNDED)
def test_bounded(name: str, lengths: tuple[int, int], kind: str) -> None:
    """A softcap's scores need no maximum: calm ones, and ones far above and below the cap."""
    configuration = BOUNDED[name]
    x = inputs(configuration, lengths, heads_k=2, kind=kind)
    options = {"window": (70, 20)} if any(configuration.window) else {}
    if configuration.sinks:
        options["sinks"] = torch.linspace(-3.0, 3.0, x.q.shape[2], device=x.q.device)
    check(configuration, x, **options)
    check(configuration, rising(x, (200.0, -200.0, 0.0), slice(5, 300, 7)), **options)


@pytest.mark.parametrize("name", ["d128-full", "d96-full", "d64-causal-sinks"])
def test_a_nan_is_not_hidden(name: str) -> None:
    """Of whichever key, and so by whichever way its exponential is computed."""
    x = inputs(BOUNDED[name], (65, 300), batch=1)
    sinks = {"sinks": torch.zeros(x.q.shape[2], device=x.q.device)} if BOUNDED[name].sinks else {}
    for key in range(0, 235, 3):  # causal: all rows see them
        k = x.k.clone()
        k[:, key] = torch.nan
        out, _ = call(BOUNDED[name], Inputs(x.q, k, x.v), **arguments(BOUNDED[name], x, **sinks))
        assert out.isnan().all(), key
