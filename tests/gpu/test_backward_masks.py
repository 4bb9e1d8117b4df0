"""Gradients under masks whose blocks the kernel leaves out: beside evaluation everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fa_cute
from fa_cute.host import backward as host
from fa_cute.host import compile as compiling
from fa_cute.plan import BACKWARD

from .backward_judging import poison
from .configurations import MASKS, Configuration
from .judging import Inputs, arguments, inputs, planned

pytestmark = pytest.mark.gpu
LENGTHS = ((1, 1), (129, 700), (700, 129), (1337, 1337))
NAMES = sorted(name for name, one in MASKS.items() if not one.sinks)


def _gradients(x: Inputs, dout: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in x]
    out = fa_cute.attention(*leaves, **options)
    poison()
    return torch.autograd.grad(out, leaves, dout)


def _options(configuration: Configuration, x: Inputs, name: str) -> dict[str, Any]:
    run_time: dict[str, Any] = {}
    if name.endswith(("-window", "-left")):
        run_time["window"] = (200, 70) if name.endswith("-window") else (333, None)
    return planned(configuration, x, arguments(configuration, x, **run_time))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_as_everywhere(name: str, lengths: tuple[int, int]) -> None:
    """Bit for bit what the mask evaluated on every block gives; without turns dq but for its order.

    With them that holds for dq too: a hidden block adds zeros.
    """
    configuration = MASKS[name]
    x = inputs(configuration, lengths, heads_k=2, kind="outliers")
    options = _options(configuration, x, name)
    dout = torch.randn_like(x.q[..., :1].expand(*x.q.shape[:3], x.v.shape[3]))
    found, turned = (_gradients(x, dout, deterministic=d, **options) for d in (False, True))
    backward = [plan for plan in compiling.plans_in_memory() if plan.direction == BACKWARD]
    used = {(plan.visits, plan.deterministic) for plan in backward}
    visits = "lists" if configuration.block_lists else "ranges"
    left = configuration.block_lists and configuration.window[0]  # counted in turns by ranges
    assert (visits, False) in used and ((visits, True) in used or left)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(host, "_visits", lambda *_: "bounds")
        host.plans_of.cache_clear()
        right = _gradients(x, dout, deterministic=True, **options)
    host.plans_of.cache_clear()
    for a, b in zip((*found[1:], *turned), (*right[1:], *right), strict=True):
        assert torch.equal(a, b)
    # dq: sums in another order, rounded once: an ulp of the largest part.
    error = (found[0].float() - right[0].float()).abs().max()
    assert error <= 2**-7 * right[0].float().abs().max()


@pytest.mark.parametrize("listed", [False, True])
def test_what_sees_nothing_has_no_gradient(listed: bool) -> None:
    """Queries from 300 on and keys from 200 on are hidden: whole tiles of both, and parts."""

    def seen(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q < 300) & (kv < 200)

    x = inputs(MASKS["late"], (900, 900), heads_k=2)
    mask = fa_cute.plan_mask(seen, None, None, 900, 900, device=x.q.device) if listed else seen
    dq, dk, dv = _gradients(x, torch.randn_like(x.q), mask_mod=mask)
    assert (dq[:, 300:] == 0).all() and (dk[:, 200:] == 0).all() and (dv[:, 200:] == 0).all()
    right = _gradients(
        Inputs(x.q[:, :300], x.k[:, :200], x.v[:, :200]), torch.ones_like(x.q[:, :300])
    )
    alone = _gradients(x, torch.ones_like(x.q), mask_mod=mask)
    for a, b in zip(alone, right, strict=True):
        error = (a[:, : b.shape[1]].float() - b.float()).abs().max()
        assert error <= 2**-6 * b.float().abs().max()


@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("kind", ["ranges", "lists", "causal"])
def test_turns_of_more_tiles_than_fit(kind: str, dim: int) -> None:
    """1,024 tiles of keys, 2,048 at 256, in turns: each waits for some that run or have run."""
    length, heads = 8192, 8
    document = (torch.arange(length, device="cuda") // 1500)[None]

    def band(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv).abs() <= 900

    def documents(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return document[0, q] == document[0, kv]

    options: dict[str, Any] = {"causal": True}
    if kind == "ranges":
        options["mask_mod"] = band
    elif kind == "lists":
        options["mask_mod"] = fa_cute.plan_mask(documents, None, None, length, length)
    x = Inputs(*torch.randn(3, 2, length, heads, dim, device="cuda", dtype=torch.bfloat16))
    dout = torch.randn_like(x.q)
    first = _gradients(x, dout, deterministic=True, **options)
    for _ in range(5):
        again = _gradients(x, dout, deterministic=True, **options)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    free = _gradients(x, dout, **options)
    assert torch.equal(first[1], free[1]) and torch.equal(first[2], free[2])
    error = (first[0].float() - free[0].float()).abs().max()
    assert error <= 2**-7 * first[0].float().abs().max()
