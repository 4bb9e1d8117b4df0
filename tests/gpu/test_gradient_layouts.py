"""Gradients of tensors as they come: strides, neighbours, lengths, memory, and all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fa_cute.variants.t5_relative_bias import t5_relative_bias

import fa_cute
from fa_cute.host import compile as compiling
from fa_cute.plan import BACKWARD, FORWARD

from .backward_judging import Case, Tensors, check, gradients, poison, tensors
from .learned import DEVICE, Learned, Shape, close
from .learned import check as check_learned

pytestmark = pytest.mark.gpu
FAR = 2**24 + 64  # rows of 128: more elements than an int32 counts
DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]


def _turned(x: torch.Tensor) -> torch.Tensor:
    """The same with heads outside of rows in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _sliced(x: torch.Tensor) -> torch.Tensor:
    """The same as one of three parts of wider rows, as of a fused projection; NaN beside it."""
    wide = x.new_full((*x.shape[:2], 3, *x.shape[2:]), torch.nan)
    wide[:, :, 1] = x
    return wide[:, :, 1]


def _misaligned(x: torch.Tensor) -> torch.Tensor:
    """The same one element off 16 bytes, rows an odd number of elements apart."""
    wide = x.new_full((*x.shape[:3], x.shape[3] + 1), torch.nan)
    wide[..., 1:] = x
    return wide[..., 1:]


def _cached(x: torch.Tensor) -> torch.Tensor:
    """The same as the first rows of a longer buffer; NaN behind them."""
    longer = x.new_full((x.shape[0], x.shape[1] + 70, *x.shape[2:]), torch.nan)
    longer[:, : x.shape[1]] = x
    return longer[:, : x.shape[1]]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "turned": _turned,
    "sliced": _sliced,
    "misaligned": _misaligned,
    "cached": _cached,
}


def _same(found: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> None:
    """dk and dv bit for bit; dq but for the order of its sums."""
    for a, b in zip(found[1:], right[1:], strict=True):
        assert torch.equal(a, b)
    close(found[0], right[0])


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dims: tuple[int, int]) -> None:
    """Of q, k, v and dout."""
    case = Case(dims=dims, lengths=(129, 200), heads=(4, 2), causal=True)
    x = tensors(case)
    change = LAYOUTS[layout]
    _same(gradients(case, Tensors(*map(change, x[:4]), None)), gradients(case, x))


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dout_of_a_sum(dims: tuple[int, int]) -> None:
    """One number, expanded over all of ``out``: what ``out.sum()`` gives."""
    case = Case(dims=dims, heads=(4, 2), causal=True)
    x = tensors(case)
    one = x.dout.new_ones(()).expand(x.dout.shape)
    _same(gradients(case, x._replace(dout=one)), gradients(case, x._replace(dout=one.clone())))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_keys_expanded_over_heads(dim: int) -> None:
    """k and v of one head, seen by four with stride 0: each head's gradient, added up by torch."""
    case = Case(dims=(dim, dim), heads=(4, 1), causal=True)
    x = tensors(case)
    leaves = [t.detach().requires_grad_() for t in x[:3]]
    q, k, v = leaves[0], *(t.expand(-1, -1, 4, -1) for t in leaves[1:])
    out = fa_cute.attention(q, k, v, causal=True)
    found = torch.autograd.grad(out, leaves, x.dout)
    for a, b in zip(found, gradients(case, x), strict=True):
        close(a, b)


@pytest.mark.parametrize("dims", [(192, 128), (256, 256), (160, 160)], ids=str)
def test_wide_heads_in_fp16(dims: tuple[int, int]) -> None:
    check(Case(dims=dims, lengths=(300, 300), heads=(3, 1), causal=True, dtype=torch.float16))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_long(dim: int, causal: bool) -> None:
    """64 blocks of keys, and a last one that is not whole."""
    case = Case(dims=(dim, dim), lengths=(8100, 8100), heads=(1, 1), batch=1, causal=causal)
    check(case._replace(kind="outliers"))


def _random(length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    size = (1, length, 1, 128)
    return torch.randn(size, generator=generator, device=DEVICE, dtype=torch.bfloat16)


def test_queries_past_32_bits() -> None:
    """2^31 elements of q, out, dq and its sums; the last 64 rows alone see keys."""
    leaves = [_random(n, n).requires_grad_() for n in (FAR, 64, 64)]
    dout = _random(1, 5).expand(1, FAR, 1, 128)
    out = fa_cute.attention(*leaves, causal=True)
    dq, *found = torch.autograd.grad(out, leaves, dout)
    last = [x.detach()[:, -64:].requires_grad_() for x in leaves]
    out = fa_cute.attention(*last, causal=True)
    right, *others = torch.autograd.grad(out, last, dout[:, -64:])
    assert not dq[:, :-64].any()
    close(dq[:, -64:], right)
    for a, b in zip(found, others, strict=True):
        assert torch.equal(a, b)


def test_keys_past_32_bits() -> None:
    """2^31 elements of k, v, dk and dv: the first and the last of them by the formula."""
    q, k, v = (_random(n, n).requires_grad_() for n in (64, FAR, FAR))
    dout = _random(64, 7)
    out, lse = fa_cute.attention(q, k, v, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert dq.isfinite().all()
    rows, given, made = (x.detach()[0, :, 0].double() for x in (q, dout, out))
    for part in (slice(0, 100), slice(-100, None)):
        keys, values = (x.detach()[0, part, 0].double() for x in (k, v))
        p = torch.exp(rows @ keys.T * 128**-0.5 - lse.detach()[0, 0, :, None])
        ds = p * (given @ values.T - (given * made).sum(1, keepdim=True))
        close(dv[0, part, 0], p.T @ given)
        close(dk[0, part, 0], ds.T @ rows * 128**-0.5)


@pytest.mark.parametrize("sizes", [(0, 64, 64), (2, 0, 64), (2, 64, 0)], ids=str)
def test_an_empty_problem(sizes: tuple[int, int, int]) -> None:
    batch, seqlen_q, seqlen_k = sizes
    lengths = (seqlen_q, seqlen_k, seqlen_k)
    leaves = [
        torch.ones(batch, n, 2, 64, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        for n in lengths
    ]
    poison()
    out = fa_cute.attention(*leaves, causal=True)
    for leaf, found in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert found.shape == leaf.shape and (found == 0).all()


@pytest.mark.parametrize("length", [1024, 4096])
def test_workspaces_are_as_stated(length: int) -> None:
    """4 bytes an element of dq and 8 a row, beside the gradients themselves."""
    size = (1, length, 4, 128)
    leaves = [
        torch.ones(size, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    ]
    out = fa_cute.attention(*leaves)
    dout = torch.ones_like(out)
    torch.autograd.grad(out, leaves, dout, retain_graph=True)  # what is made once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, leaves, dout, retain_graph=True)
    added = torch.cuda.max_memory_allocated() - before
    elements = leaves[0].numel()
    stated = 3 * 2 * elements + 4 * elements + 8 * length * 4
    assert added <= stated + 8 * 512  # the allocator rounds each up to 512 bytes


def _all_at_once(dim: int) -> tuple[Shape, Learned, dict[str, Any]]:
    """A planned mask of documents, a learned T5 table, sinks, grouped heads, a causal bound."""
    shape = Shape(2, 700, 700, 6, 2, dim)
    document = (torch.arange(700, device=DEVICE) // 150)[None]

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return document[0, q] == document[0, kv]

    planned = fa_cute.plan_mask(mask, None, None, 700, 700, device=DEVICE, head_dim=dim)
    table = torch.randn(32, 6, generator=torch.Generator(DEVICE).manual_seed(2), device=DEVICE)
    return shape, {"table": table}, {"mask_mod": planned, "causal": True}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_all_at_once(dim: int, deterministic: bool) -> None:
    """Right; where it is asked for, 100 repeats equal bit for bit on dirty memory."""
    shape, learned, options = _all_at_once(dim)
    sinks = torch.linspace(-1, 2, 6, device=DEVICE)
    options["deterministic"] = deterministic

    def build(x: Learned) -> Callable:
        return t5_relative_bias(x["table"])

    check_learned(learned, build, shape=shape, sinks=sinks, **options)
    forward = {p.visits for p in compiling.plans_in_memory() if p.direction == FORWARD}
    assert "lists" in forward
    backward = [p for p in compiling.plans_in_memory() if p.direction == BACKWARD]
    assert ("lists", deterministic) in {(p.visits, p.deterministic) for p in backward}
    if not deterministic:
        return
    x = tensors(Case((dim, dim), (700, 700), (6, 2)))
    leaves = [t.detach().requires_grad_() for t in (*x[:3], learned["table"], sinks)]
    options["score_mod"] = t5_relative_bias(leaves[3])

    def once() -> tuple[torch.Tensor, ...]:
        poison()
        out, lse = fa_cute.attention(*leaves[:3], sinks=leaves[4], return_lse=True, **options)
        poison()
        return torch.autograd.grad((out, lse), leaves, (x.dout, torch.ones_like(lse)))

    first = once()
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))
