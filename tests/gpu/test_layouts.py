"""Where tensors lie: strides, alignment, out=, neighbours in memory, sizes past 32 bits."""

from __future__ import annotations

import math

import pytest
import torch

import fa_cute

from .configurations import MODS, PLAIN, WITHOUT_LSE
from .judging import DEVICE, Inputs, arguments, call, check, inputs, judge

pytestmark = pytest.mark.gpu
SENTINEL = 1234.0
FAR = 2**31 + 64  # elements, more than an int32 counts


def _fused(x: Inputs) -> Inputs:
    """Slices of one (B, S, Hq + 2 Hk, D) tensor, as a fused projection leaves them."""
    fused = torch.cat(x, dim=2)
    return Inputs(*fused.split([t.shape[2] for t in x], dim=2))


def _interleaved(x: Inputs) -> Inputs:
    """k and v slices of one (B, S, Hk, 2 D) tensor, q the first half of another."""
    k, v = torch.cat(x[1:], dim=3).chunk(2, dim=3)
    return Inputs(torch.cat([x.q, x.q], dim=3).chunk(2, dim=3)[0], k, v)


def _head_major(x: Inputs) -> Inputs:
    """(B, H, S, D) tensors, transposed."""
    return Inputs(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in x))


def _batch_inside(x: Inputs) -> Inputs:
    """(S, B, H, D) tensors, transposed."""
    return Inputs(*(t.transpose(0, 1).contiguous().transpose(0, 1) for t in x))


def _expanded(x: Inputs) -> Inputs:
    """One key/value head for all heads, and one batch for all, with strides 0."""
    return Inputs(x.q, *(t[:1, :, :1].expand(t.shape) for t in x[1:]))


def _odd_rows(x: Inputs) -> Inputs:
    """Views of tensors whose last size is odd: no row is aligned."""
    return Inputs(*(torch.nn.functional.pad(t, (0, 1))[..., :-1] for t in x))


def _odd_start(x: Inputs) -> Inputs:
    """Views one element into their storage."""

    def moved(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)

    return Inputs(*map(moved, x))


def _reversed_dims(x: Inputs) -> Inputs:
    """The last dimension not contiguous."""
    return Inputs(*(t.transpose(1, 3).contiguous().transpose(1, 3) for t in x))


LAYOUTS = (
    _fused,
    _interleaved,
    _head_major,
    _batch_inside,
    _expanded,
    _odd_rows,
    _odd_start,
    _reversed_dims,
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["d128-bf16-causal-1", "d64-bf16-full-4"])
def test_strided_inputs(name: str, layout) -> None:
    check(PLAIN[name], layout(inputs(PLAIN[name], (129, 129), heads_k=4)))


@pytest.mark.parametrize("lengths", [(64, 64), (257, 257), (1, 513)], ids=str)
def test_layouts_in_turn(lengths: tuple[int, int]) -> None:
    """One kernel serves batch 1, stride 0, materialised heads and lengths in any order."""
    configuration = PLAIN["d64-bf16-full-8"]
    whole = inputs(configuration, lengths, batch=4, heads_k=2)
    single = Inputs(*(t[:1] for t in whole))
    once = Inputs(*(t[:1].expand(t.shape) for t in whole))
    for x in (single, whole, _expanded(whole), once, whole, single):
        check(configuration, x)


@pytest.mark.parametrize("case", ["contiguous", "head major", "inside", "unaligned"])
def test_out(case: str) -> None:
    """out= is written in place, all of it, and nothing round it."""
    configuration = WITHOUT_LSE["d64-full"]
    x = inputs(configuration, (129, 129), heads_k=2)
    guard = torch.full((4, 200, 4, 96), SENTINEL, device=DEVICE, dtype=x.q.dtype)
    out = {
        "contiguous": guard.view(-1)[4096 : 4096 + x.q.numel()].view(x.q.shape),
        "head major": guard.view(-1)[: x.q.numel()].view(2, 2, 129, 64).transpose(1, 2),
        "inside": guard[1:3, 30:159, 1:3, 16:80],
        "unaligned": guard[1:3, 30:159, 1:3, 3:67],
    }[case]
    out.fill_(torch.nan)
    assert fa_cute.attention(*x, out=out) is out
    torch.cuda.synchronize()
    judge(configuration, x, arguments(configuration, x), (out, None))
    out.fill_(SENTINEL)
    assert (guard == SENTINEL).all(), "memory outside out was written"


def test_outputs_are_written_whole() -> None:
    """Output and lse come from memory that held NaN."""
    for name in ("d128-bf16-causal-4", "d64-bf16-full-8"):
        configuration = PLAIN[name]
        for lengths in ((129, 129), (1, 300), (300, 200)):
            x = inputs(configuration, lengths, heads_k=2)
            for _ in range(3):
                poison = [torch.full((n,), torch.nan, device=DEVICE) for n in _sizes(x)]
                del poison
                check(configuration, x)


def _sizes(x: Inputs) -> list[int]:
    """Float32 counts of the allocations that a call makes, so that it gets the poisoned ones."""
    return [x.q.numel() // 2, x.q.numel() // x.q.shape[3]] * 2


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["d128-bf16-causal-4", "d64-bf16-full-8"])
def test_unused_slots_of_a_cache(name: str, poison: float) -> None:
    """K and V are the first 100 positions of a longer cache whose rest is NaN: bit for bit the same
    as with zeros there."""
    configuration = PLAIN[name]
    cache = inputs(configuration, (100, 256), heads_k=2)
    results = []
    for rest in (0.0, poison):
        k, v = cache.k.clone(), cache.v.clone()
        k[:, 100:], v[:, 100:] = rest, rest
        x = Inputs(cache.q, k[:, :100], v[:, :100])
        results.append(call(configuration, x, causal=configuration.causal))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[1][0].isfinite().all()


def test_nan_stays_in_its_head_and_batch() -> None:
    """NaN in one (batch, head) of q, k and v reaches no other."""
    configuration = PLAIN["d64-bf16-full-4"]
    x = inputs(configuration, (129, 129), heads_k=2)
    clean, _ = call(configuration, x)
    dirty = Inputs(*(t.clone() for t in x))
    for t in dirty[1:]:
        t[1, :, 1] = torch.nan
    out, _ = call(configuration, dirty)
    assert torch.equal(out[0], clean[0]) and torch.equal(out[1, :, :4], clean[1, :, :4])
    assert out[1, :, 4:].isnan().all()


def test_addresses_past_32_bits() -> None:
    """Batches, and out's, lie more than 2^31 elements apart."""
    configuration = WITHOUT_LSE["d64-full"]
    near = inputs(configuration, (130, 130))
    q, k, v, out = (_apart(t) for t in (*near, torch.full_like(near.q, torch.nan)))
    fa_cute.attention(q, k, v, out=out)
    torch.cuda.synchronize()
    judge(configuration, near, arguments(configuration, near), (out.contiguous(), None))


def _apart(t: torch.Tensor) -> torch.Tensor:
    """A copy whose batches lie ``FAR`` elements apart."""
    storage = torch.empty(FAR + t[0].numel(), device=DEVICE, dtype=t.dtype)
    return storage.as_strided(t.shape, (FAR, *t.stride()[1:])).copy_(t)


def test_captured_table_past_32_bits() -> None:
    configuration = MODS["wide_table"]
    check(configuration, inputs(configuration, (65, 129)))


def test_more_tiles_than_a_grid_dimension() -> None:
    """B * H * tiles is 140,800, beyond the 65,535 of a grid's second and third dimension."""
    configuration = PLAIN["d64-bf16-full-8"]
    x = inputs(configuration, (1, 65), batch=1100, heads_k=16)
    check(configuration, x)
    wide = PLAIN["d64-fp16-causal-1"]
    x = inputs(wide, (70_000 * 64, 64), batch=1)
    out, lse = call(wide, x, causal=True)
    torch.cuda.synchronize()
    assert (out[:, :-64] == 0).all() and (lse[..., :-64] == -math.inf).all()
    last = Inputs(x.q[:, -64:], x.k, x.v)
    judge(wide, last, {"causal": True}, (out[:, -64:], lse[..., -64:]))


def test_four_million_keys() -> None:
    """2^31 bytes of K and V: with q = 0 every row is the mean of v."""
    configuration = PLAIN["d128-bf16-causal-4"]
    length = 2**22
    q = torch.zeros(1, 256, 4, 128, device=DEVICE, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, length, 1, 128, device=DEVICE, dtype=torch.bfloat16).add_(0.5)
    out, lse = call(configuration, Inputs(q, k, v), causal=True)
    mean = v.mean(1, dtype=torch.float32)
    assert (out[0, -1] - mean[0]).abs().max() < 0.01
    assert (lse[..., -1] - math.log(length)).abs().max() < 1e-3
