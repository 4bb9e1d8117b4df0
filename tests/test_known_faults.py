"""Faults that users of attention kernels reported, and the right value in each: CPU path and plans.

Each test names its class and the public reports behind it (FA Dao-AILab/flash-attention, PT
pytorch/pytorch, FI flashinfer, TE TransformerEngine, VL vllm, AG attention-gym). Inputs are small:
with q = 0 or one key the answers are exact.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

import fa_cute
from fa_cute.host.planning import Mods, make_plan
from fa_cute.host.problem import Problem


def make(sq: int, sk: int, heads: tuple[int, int] = (2, 2), d: int = 64, b: int = 1) -> list:
    """Random q, k, v in fp32."""
    generator = torch.Generator().manual_seed(sq + sk)
    shapes = (b, sq, heads[0], d), (b, sk, heads[1], d), (b, sk, heads[1], d)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """out, after comparing out and lse with the oracle; fp32's error grows with the scores."""
    out, lse = fa_cute.attention(q, k, v, return_lse=True, **options)
    expected, expected_lse = fa_cute.reference.attention(q, k, v, return_lse=True, **options)
    assert expected.isfinite().all()
    largest = expected_lse.masked_fill(expected_lse == -math.inf, 0).abs().max().item()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5 + 1e-6 * largest)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)
    return out


def gradients(attention: Any, inputs: list, loss: Any = torch.sum, **options: Any) -> tuple:
    """Gradients of ``loss(out)``."""
    leaves = [t.detach().double().requires_grad_() for t in inputs]
    return torch.autograd.grad(loss(attention(*leaves, **options)), leaves)


def check_gradients(inputs: list, loss: Any = torch.sum, **options: Any) -> tuple:
    """Our gradients, after comparing them with the oracle's."""
    ours = gradients(fa_cute.attention, inputs, loss, **options)
    theirs = gradients(fa_cute.reference.attention, inputs, loss, **options)
    for one, other in zip(ours, theirs, strict=True):
        assert other.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    return ours


def key(score_mod: Any = None, mask_mod: Any = None, **options: Any) -> str:
    """The compile key of a call with these mods on sm_90a."""
    q = torch.zeros(1, 2, 2, 64, dtype=torch.bfloat16)
    mods = Mods.of(score_mod, mask_mod)
    problem = Problem.of(q, q, q, mods=mods, target="sm_90a", **options)
    return make_plan(problem, mods, "sm_90a").key


def two_keys() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q = 0, two keys, v = [0, 1]: out is the weight of the second key."""
    q = torch.zeros(1, 1, 1, 64)
    v = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1).expand(1, 2, 1, 64)
    return q, torch.zeros(1, 2, 1, 64), v


def test_1_window_sentinels() -> None:
    """TE#3528, FA#2251, FA#1116: -1 means unlimited on either side, beside causal too."""
    q, k, v = make(70, 70)
    full, causal = check(q, k, v), check(q, k, v, causal=True)
    for window in ((-1, -1), (None, None), (None, -1)):
        assert torch.equal(check(q, k, v, window=window), full)
    assert torch.equal(check(q, k, v, causal=True, window=(-1, 0)), causal)
    assert torch.equal(check(q, k, v, window=(None, 0)), causal)
    torch.testing.assert_close(check(q, k, v, window=(0, 0)), v, rtol=0, atol=0)
    with pytest.raises(ValueError, match="-3"):
        fa_cute.attention(q, k, v, window=(-1, -3))


def test_2_more_queries_than_keys() -> None:
    """FA#1778, FA#282: causal is aligned to the bottom-right corner; early rows see nothing."""
    q, k, v = make(200, 64, (1, 1))
    out, lse = fa_cute.attention(q, k, v, causal=True, return_lse=True)
    assert (out[:, :136] == 0).all() and (lse[:, :, :136] == -math.inf).all()
    assert torch.equal(out[:, 136], v[:, 0])
    full = check(q, k, v)
    torch.testing.assert_close(check(q, k, v, causal=True)[:, 199], full[:, 199])
    dq, _, _ = check_gradients([q, k, v], causal=True)
    assert (dq[:, :136] == 0).all()


def test_4_stale_maximum() -> None:
    """FA#2174: a first tile that is masked whole, then strongly negative scores."""
    q, k = torch.zeros(1, 1, 1, 64), torch.zeros(1, 1024, 1, 64)
    q[..., 0], k[..., 0] = 40, -40
    v = (torch.arange(1024) / 1024).view(1, -1, 1, 1).expand(1, 1024, 1, 64)
    for hidden, mean in (((512, 1024), 0.24951), ((0, 512), 0.74951)):
        out, lse = fa_cute.attention(
            q, k, v, mask_mod=lambda b, h, q, kv, at=hidden: (kv < at[0]) | (kv >= at[1]),
            return_lse=True,
        )  # fmt: skip
        assert out.flatten()[0].item() == pytest.approx(mean, abs=1e-5)
        assert lse.item() == pytest.approx(-200 + math.log(512), abs=1e-4)


@pytest.mark.parametrize("length", [65, 129, 2046])
def test_5_captured_tensors_of_exactly_the_length(length: int) -> None:
    """PT#137801, FA#2020: nothing is read past a table, where a NaN lies in the same storage."""
    store = torch.full((2 * length,), math.nan)
    store[:length] = torch.linspace(-1, 1, length)
    table = store[:length]
    mod = lambda s, b, h, q, kv: s + table[q] * table[kv]  # noqa: E731
    check(*make(length, length, (1, 1), d=16), score_mod=mod)


def test_6_full_blocks_still_end_at_the_length() -> None:
    """FA#2091: a mask that is true everywhere equals no mask, at ragged lengths."""
    inputs = make(384, 300, (1, 1))
    document = torch.zeros(384, dtype=torch.int32)
    mask = lambda b, h, q, kv: document[q] == document[kv]  # noqa: E731
    assert torch.equal(check(*inputs, mask_mod=mask), check(*inputs))
    check_gradients(inputs, mask_mod=mask)


FACTOR = 0


def _helper() -> int:
    return 0


def _captures(c: int) -> dict[str, Any]:
    """score + c * kv, with c read in each of the ways in which Python can read it."""
    global FACTOR, _helper  # noqa: PLW0603
    FACTOR, _helper = c, lambda: c

    class Callable:
        factor = c

        def __call__(self, s, b, h, q, kv):
            return s + self.factor * kv

    def base(s, b, h, q, kv, factor):
        return s + factor * kv

    cell = 0

    def rebound(s, b, h, q, kv):
        return s + cell * kv

    cell = c
    return {
        "closure": lambda s, b, h, q, kv: s + c * kv,
        "global": lambda s, b, h, q, kv: s + FACTOR * kv,
        "default": lambda s, b, h, q, kv, c=c: s + c * kv,
        "helper": lambda s, b, h, q, kv: s + _helper() * kv,
        "partial": functools.partial(base, factor=c),
        "attribute": Callable(),
        "cell": rebound,
    }


@pytest.mark.parametrize("way", _captures(0))
def test_7_what_a_mod_captures_is_in_its_key(way: str) -> None:
    """FA#1953 and others: a changed value never runs the old kernel; an equal one shares it."""
    keys = []
    for c, weight in ((1, 0.7311), (2, 0.8808), (3, 0.9526)):
        mod = _captures(c)[way]
        out = fa_cute.attention(*two_keys(), score_mod=mod)
        assert out[0, 0, 0, 0].item() == pytest.approx(weight, abs=1e-4)
        keys.append(key(mod))
        assert key(_captures(c)[way]) == key(_captures(c)["closure"]) == keys[-1]
    assert len(set(keys)) == 3


def test_7_one_function_whose_global_changes() -> None:
    """The same function object, retraced: nothing that it reads can go stale."""
    global FACTOR  # noqa: PLW0603
    mod = lambda s, b, h, q, kv: s + FACTOR * kv  # noqa: E731
    for FACTOR, weight in ((1, 0.7311), (2, 0.8808), (1, 0.7311)):  # noqa: B007
        out = fa_cute.attention(*two_keys(), score_mod=mod)
        assert out[0, 0, 0, 0].item() == pytest.approx(weight, abs=1e-4)


def test_9_options_that_become_constants() -> None:
    """FA#2402: softcap 15, then 50, then none, in one process: three results, three keys."""

    def softcap(cap: float) -> Any:
        return lambda s, b, h, q, kv: cap * torch.tanh(s / cap)

    q, k, v = make(65, 65)
    q = 20 * q
    outs = [check(q, k, v, score_mod=mod) for mod in (softcap(15.0), softcap(50.0), None)]
    assert not any(torch.allclose(outs[i], outs[j]) for i, j in ((0, 1), (1, 2), (0, 2)))
    assert len({key(softcap(15.0)), key(softcap(50.0)), key()}) == 3
    assert not torch.allclose(check(q, k, v, scale=0.01), check(q, k, v, scale=0.02))
    assert not torch.allclose(check(q, k, v, window=(3, 0)), check(q, k, v, window=(9, 0)))


def test_10_layouts_in_any_order() -> None:
    """FA#2298, FA#2177: expanded and materialised, one batch and four, short and long."""
    q, k, v = make(33, 513, (8, 1), b=4)
    expanded = [t.expand(4, 513, 8, 64) for t in (k, v)]
    first = check(q, *expanded)
    for order in ((k, v), [t.contiguous() for t in expanded], (k, v), expanded):
        torch.testing.assert_close(check(q, *order), first, rtol=1e-5, atol=1e-5)
    one = [t[:1].as_strided((1, *t.shape[1:]), (0, *t.stride()[1:])) for t in (q, k, v)]
    torch.testing.assert_close(check(*one), first[:1], rtol=1e-5, atol=1e-5)
    for length in (64, 513, 64):
        check(*make(length, length))


@pytest.mark.parametrize("sizes", [(1, 1, 0), (1, 64, 0), (2, 0, 16), (0, 64, 16)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_12_dense_empty_problems(sizes: tuple[int, int, int], causal: bool) -> None:
    """FA#2470, FA#2503: no key, no query, no batch: 0, -inf, and zero gradients."""
    b, sq, sk = sizes
    inputs = [t.requires_grad_() for t in make(sq, sk, (4, 2), b=b)]
    out, lse = fa_cute.attention(*inputs, causal=causal, return_lse=True)
    assert out.shape == (b, sq, 4, 64) and lse.shape == (b, 4, sq)
    assert (out == 0).all() and (lse == -math.inf).all()
    out.sum().backward()
    for tensor in inputs:
        assert tensor.grad.shape == tensor.shape and (tensor.grad == 0).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_15_unused_slots_do_not_leak(poison: float) -> None:
    """FA#2374, FA#1745, FI#942: what no query sees is as good as zero, in the gradient too."""
    q, k, v = make(1, 128, (2, 2), b=4)
    used = torch.tensor([32, 64, 96, 48])
    unused = (torch.arange(128) >= used[:, None])[..., None, None]
    options = {"mask_mod": lambda b, h, q, kv: kv < used[b]}
    clean = [q, k.masked_fill(unused, 0), v.masked_fill(unused, 0)]
    expected, expected_grads = check(*clean, **options), check_gradients(clean, **options)
    for poisoned in ((True, False), (False, True), (True, True)):
        cache = [
            t.masked_fill(unused, poison if bad else 0)
            for t, bad in zip((k, v), poisoned, strict=True)
        ]
        assert torch.equal(fa_cute.attention(q, *cache, **options), expected)
        oracle = [fa_cute.reference.attention(q, *x, **options) for x in (cache, clean[1:])]
        assert torch.equal(*oracle)
        grads = check_gradients([q, *cache], **options)
        assert all(map(torch.equal, grads, expected_grads))


def test_17_heads_and_rows_given_to_mods_are_logical() -> None:
    """FA#2528, FA#2180, FA#2097: query heads, and rows of their own sequence, under GQA."""
    q, k = torch.zeros(1, 2, 8, 64), torch.zeros(1, 2, 2, 64)
    v = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1).expand(1, 2, 2, 64)
    out = fa_cute.attention(q, k, v, score_mod=lambda s, b, h, q, kv: s + h * kv)
    right = torch.tensor([0.5, 0.7311, 0.8808, 0.9526, 0.9820, 0.9933, 0.9975, 0.9991])
    torch.testing.assert_close(out[0, 0, :, 0], right, rtol=0, atol=1e-4)
    q, k, v = make(65, 65, (8, 2))
    out = fa_cute.attention(0 * q, k, v, causal=True)
    means = v.cumsum(1) / torch.arange(1, 66).view(1, -1, 1, 1)
    torch.testing.assert_close(out, means.repeat_interleave(4, 2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", [(20, 2), (6, 2), (7, 1), (14, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("sq", [1, 65])
def test_18_any_ratio_of_heads(heads: tuple[int, int], sq: int) -> None:
    """FA#2300, FA#2186: equals K and V repeated for each head, gradients summed over the group."""
    q, k, v = make(sq, 70, heads, d=16)
    ratio = heads[0] // heads[1]
    repeated = [t.repeat_interleave(ratio, 2) for t in (k, v)]
    torch.testing.assert_close(check(q, k, v, causal=True), check(q, *repeated, causal=True))
    _, *grads = check_gradients([q, k, v], causal=True)
    _, *per_head = check_gradients([q, *repeated], causal=True)
    for ours, parts in zip(grads, per_head, strict=True):
        torch.testing.assert_close(ours, parts.unflatten(2, (heads[1], ratio)).sum(3))


def test_19_the_backward_sees_positions_and_heads() -> None:
    """FA#2786, FA#2654, FA#2547."""
    mod = lambda s, b, h, q, kv: s * (1 + 0.1 * h) + 0.01 * (q - kv)  # noqa: E731
    check_gradients(make(65, 129, (4, 2), b=2), score_mod=mod)


def test_20_softcap() -> None:
    """FA#2396, FA#2466: c * tanh(s / c), its slope, and large scores; capped before masking."""

    def run(q0: float, k0: float, cap: float) -> tuple[float, float]:
        q, k = torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 1, 64)
        q[..., 0], k[..., 0] = q0, k0
        q.requires_grad_()
        mod = lambda s, b, h, q, kv: cap * torch.tanh(s / cap)  # noqa: E731
        _, lse = fa_cute.attention(q, k, k, score_mod=mod, return_lse=True)
        lse.sum().backward()
        return lse.item(), q.grad.flatten()[0].item() / (k0 / 8)

    assert run(16, 15, 10) == (pytest.approx(9.95055, abs=1e-5), pytest.approx(0.0098660, abs=1e-6))
    assert run(200, 200, 50) == (pytest.approx(50.0), pytest.approx(0.0))
    mod = lambda s, b, h, q, kv: 15 * torch.tanh(s / 15)  # noqa: E731
    check_gradients(make(128, 217, d=128), score_mod=mod, causal=True)


@pytest.mark.parametrize("length", [257, 1025])
def test_21_finite_gradients_at_ragged_lengths(length: int) -> None:
    """PT#153799: score + (q - kv) with causal; scores stay finite in fp32, so gradients do."""
    mod = lambda s, b, h, q, kv: s + (q - kv)  # noqa: E731
    inputs = [t.bfloat16().float() for t in make(length, length, (1, 1))]
    check_gradients(inputs, score_mod=mod, causal=True)


def test_23_strided_and_expanded_gradients() -> None:
    """FA#355, FA#2189, TE#1195: dout transposed, or one number expanded."""
    inputs = make(32, 64, (4, 1), b=2)
    weight = torch.randn(2, 4, 32, 64).double().transpose(1, 2)
    strided = check_gradients(inputs, lambda out: (out * weight).sum())
    leaves = [t.double().requires_grad_() for t in inputs]
    given = torch.autograd.grad(fa_cute.attention(*leaves), leaves, weight)
    for one, other in zip(strided, given, strict=True):
        torch.testing.assert_close(one, other)
    q, k, v = make(32, 64, (1, 1))
    _, _, dv = check_gradients([0 * q, k, v])
    torch.testing.assert_close(dv, torch.full_like(dv, 0.5))


@pytest.mark.parametrize("d", [64, 80, 128])
def test_24_25_strides_and_addresses_are_read(d: int) -> None:
    """FA#2665, FA#2745, FA#2192: transposed, fused, odd rows, odd addresses."""
    plain = make(129, 129, (4, 4), d=d)
    expected = check(*plain)
    fused = torch.stack(plain, dim=2)
    odd = [torch.cat([t, t[..., :1]], dim=-1)[..., :d] for t in plain]
    shifted = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in plain]
    transposed = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in plain]
    for views in (fused.unbind(2), odd, shifted, transposed):
        torch.testing.assert_close(fa_cute.attention(*views), expected, rtol=1e-5, atol=1e-5)


def test_26_expanded_heads() -> None:
    """FA#2189: gradients of expanded K and V are those of materialised ones, summed by autograd."""
    q, k, v = (t.double() for t in make(70, 70, (4, 1)))
    grads = []
    for materialise in (False, True):
        leaves = [t.clone().requires_grad_() for t in (k, v)]
        wide = [t.expand(1, 70, 4, 64) for t in leaves]
        wide = [t.contiguous() for t in wide] if materialise else wide
        grads.append(torch.autograd.grad(fa_cute.attention(q, *wide, causal=True).sum(), leaves))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("bounds", [{"causal": True}, {"window": (700, 0)}], ids=str)
def test_28_masks_compose_on_every_tile(bounds: dict) -> None:
    """FI PR#4695: the user's mask counts on interior tiles too, in both directions."""
    q, k, v = make(1024, 1024, (1, 1), d=16)
    mask = lambda b, h, q, kv: kv % 2 == 0  # noqa: E731
    out = check(0 * q, k, v, mask_mod=mask, **bounds)
    if "causal" in bounds:
        counts = torch.arange(1024).div(2, rounding_mode="floor") + 1
        sums = torch.where(torch.arange(1024).view(-1, 1) % 2 == 0, v[0, :, 0], 0).cumsum(0)
        torch.testing.assert_close(out[0, :, 0], sums / counts[:, None], rtol=1e-4, atol=1e-5)
    check_gradients([q, k, v], mask_mod=mask, **bounds)


def test_31_a_number_that_changes_every_step() -> None:
    """FA#2616, VL#27178: as a scalar tensor one key; as a Python number right at every step."""
    q, k, v = make(1, 200, (1, 1), d=16)
    scalar_keys, number_keys = set(), set()
    for offset in range(100, 164):
        tensor = torch.tensor(offset)

        def by_scalar(b, h, q, kv, tensor=tensor):
            return q + tensor >= kv

        def by_number(b, h, q, kv, offset=offset):
            return q + offset >= kv

        expected = fa_cute.attention(q, k[:, : offset + 1], v[:, : offset + 1])
        for mask in (by_scalar, by_number):
            torch.testing.assert_close(fa_cute.attention(q, k, v, mask_mod=mask), expected)
        scalar_keys.add(key(mask_mod=by_scalar))
        number_keys.add(key(mask_mod=by_number))
    assert len(scalar_keys) == 1 and len(number_keys) == 64


def test_30_numbers_of_other_kinds_do_not_split_the_key() -> None:
    """FA#2507, FA#2762: numpy integers and booleans are numbers like any other."""
    keys = {
        key(window=(3, 0), causal=False, scale=1.0),
        key(window=(np.int64(3), np.int32(0)), causal=np.bool_(False), scale=np.float32(1.0)),
        key(window=[4, 1], scale=1),
    }
    assert len(keys) == 1


def test_48_lse() -> None:
    """FA#1817, FA#889, AG#200: natural logarithm, and its gradient is not dropped."""
    q, k, v = (t.requires_grad_() for t in make(5, 1, (1, 1)))
    _, lse = fa_cute.attention(q, k, v, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    torch.testing.assert_close(dq, (k / 8).expand_as(q))
    torch.testing.assert_close(dk, q.sum(1, keepdim=True) / 8)
    assert (dv == 0).all()
    q, k, v = make(3, 64, (1, 1))
    _, lse = fa_cute.attention(0 * q, k, v, return_lse=True)
    torch.testing.assert_close(lse, torch.full_like(lse, 4.15888), rtol=0, atol=1e-5)


@pytest.mark.parametrize("wide", [300, 2**31 - 1, 2**40])
def test_windows_that_cover_everything(wide: int) -> None:
    """FA#895: a wide right bound loses no key when Sq > Sk; a wide left one keeps causal."""
    q, k, v = make(300, 100, (1, 1), d=16)
    full = check(q, k, v)
    assert torch.equal(check(q, k, v, window=(None, wide)), full)
    assert torch.equal(check(q, k, v, window=(wide, wide)), full)
    causal = check(q, k, v, causal=True)
    assert torch.equal(check(q, k, v, window=(wide, None), causal=True), causal)
    square = make(100, 100, d=16)
    torch.testing.assert_close(check(*square, window=(99, 0)), check(*square, causal=True))


def test_learnable_captured_tensors() -> None:
    """AG#171, PT PR#188869, PT PR#188302: 0-d and shared parameters, alone in needing gradients."""
    q, k, v = (t.double() for t in make(9, 9, b=2))
    grads = []
    for attention in (fa_cute.attention, fa_cute.reference.attention):
        gain = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        bias = torch.linspace(0, 1, 81, dtype=torch.float64).view(9, 9).requires_grad_()

        def mod(s, b, h, q, kv, gain=gain, bias=bias):
            return s * gain + bias[q, kv]

        grads.append(torch.autograd.grad(attention(q, k, v, score_mod=mod).sum(), (gain, bias)))
    for ours, theirs in zip(*grads, strict=True):
        assert (theirs != 0).any()
        torch.testing.assert_close(ours, theirs)


def test_outlier_heavy_inputs() -> None:
    """TE#3216: random normals hide faults; constants and large values do not."""
    q, k, v = make(70, 130, (4, 2), b=2)
    k[:, ::7] *= 50
    check(q, k, v, causal=True)
    check(torch.full_like(q, 3.0), torch.full_like(k, -3.0), v)
    check_gradients([q, k, v], causal=True)
