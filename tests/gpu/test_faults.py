"""Faults that users reported of other attention kernels, each with its right value.

Most values are exact, worked out by hand: q = 0 makes every score 0 (or the mod's), a single key
makes the output that key's value. Numbers in brackets are the reports that showed the class.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import fa_cute

from .configurations import FAULTS, MODS, PLAIN, WINDOWS, Configuration
from .judging import DEVICE, Inputs, arguments, call, check, inputs

pytestmark = pytest.mark.gpu


def _values(configuration: Configuration, values: list[float], heads_k: int = 1) -> Inputs:
    """q = 0, k = 0, and v of key j equal to ``values[j]`` everywhere; one batch, Sq = Sk."""
    length, dim = len(values), configuration.head_dim
    dtype = configuration.torch_dtype
    q = torch.zeros(1, length, heads_k * configuration.ratio, dim, device=DEVICE, dtype=dtype)
    k = torch.zeros(1, length, heads_k, dim, device=DEVICE, dtype=dtype)
    v = torch.tensor(values, device=DEVICE).to(dtype)[None, :, None, None].expand(k.shape)
    return Inputs(q, k, v)


def _along(configuration: Configuration, length: int, q: float, k: float) -> Inputs:
    """q and k along the first axis: every score is q * k / sqrt(D) before the mod."""
    shape = (1, length, 1, configuration.head_dim)
    x = [torch.zeros(shape, device=DEVICE, dtype=configuration.torch_dtype) for _ in range(3)]
    x[0][..., 0], x[1][..., 0] = q, k
    x[2][:] = (torch.arange(length, device=DEVICE) / length)[None, :, None, None]
    return Inputs(*x)


@pytest.mark.parametrize(("name", "mean"), [("hide_upper", 0.24805), ("hide_lower", 0.74805)])
def test_running_maximum_survives_a_hidden_tile(name: str, mean: float) -> None:
    """Scores of -200 and a first tile wholly masked, in either visiting order. [FA#2174]"""
    configuration = FAULTS[name]
    x = _along(configuration, 256, 40.0, -40.0)
    out, lse = call(configuration, x, **arguments(configuration, x))
    assert (out.float() - mean).abs().max() < 0.002
    assert (lse - (-195.148)).abs().max() < 0.001


@pytest.mark.parametrize("c", [1, 2, 3])
@pytest.mark.parametrize("spelling", ["closure", "default", "attribute", "rebound"])
def test_captured_numbers_are_part_of_the_kernel(c: int, spelling: str) -> None:
    """[FA#1953 and the like] Two keys, score c * kv: the sigmoid of c."""
    configuration = FAULTS[f"slope_{c}"]
    x = _values(configuration, [0.0, 1.0])
    cell = 5 - c if spelling == "rebound" else c

    class Object:
        slope = c

        def __call__(self, score, b, h, q, kv):
            return score + self.slope * kv

    def closure(score, b, h, q, kv):
        return score + cell * kv

    def default(score, b, h, q, kv, slope=c):
        return score + slope * kv

    mods = {"closure": closure, "default": default, "attribute": Object(), "rebound": closure}
    if spelling == "rebound" and cell in (1, 2, 3):
        call(configuration, x, score_mod=closure)
    cell = c
    out, _ = call(configuration, x, score_mod=mods[spelling])
    assert (out.float() - 1 / (1 + math.exp(-c))).abs().max() < 0.003


def test_caps_do_not_share_a_kernel() -> None:
    """softcap 10, 50 and none on the same tensors, in one process. [FA#2402]"""
    configuration = FAULTS["softcap_10"]
    x = inputs(configuration, (300, 300), kind="outliers")
    results = [
        check(FAULTS["softcap_10"], x)[0],
        check(FAULTS["softcap_50"], x)[0],
        fa_cute.attention(*x),
    ]
    pairs = itertools.combinations(results, 2)
    assert not any(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "q", "k", "right", "allowed"),
    [("softcap_10", 16.0, 15.0, 9.95055, 0.006), ("softcap_50", 200.0, 200.0, 50.0, 0.01)],
)
def test_softcap_of_one_key(name: str, q: float, k: float, right: float, allowed: float) -> None:
    """lse is the capped score: finite and right for a score of 5000. [FA#2396, FA#2466]"""
    configuration = FAULTS[name]
    x = _along(configuration, 1, q, k)
    _, lse = call(configuration, x, **arguments(configuration, x))
    assert (lse - right).abs().max() < allowed


def test_heads_given_to_a_mod_are_query_heads() -> None:
    """8 query heads on 2 key/value heads, score h * kv. [FA#2528, FA#2180]"""
    configuration = FAULTS["head_and_position"]
    x = _values(configuration, [0.0, 1.0], heads_k=2)
    out, _ = call(configuration, x, **arguments(configuration, x))
    right = torch.sigmoid(torch.arange(8, device=DEVICE, dtype=torch.float64))
    assert (out[0, 0].double() - right[:, None]).abs().max() < 0.003


def test_causal_limit_is_not_scaled_by_the_ratio() -> None:
    """q = 0, causal, ratio 4: row i is the mean of v[0..i]. [FA#2097]"""
    configuration = PLAIN["d128-bf16-causal-4"]
    x = inputs(configuration, (65, 65), heads_k=2)
    out, lse = call(configuration, Inputs(torch.zeros_like(x.q), x.k, x.v), causal=True)
    rows = torch.arange(1, 66, device=DEVICE)
    mean = (x.v.double().cumsum(1) / rows[:, None, None]).repeat_interleave(4, 2)
    assert (out.double() - mean).abs().max() <= 2**-8 * mean.abs().max()
    assert (lse - rows.log()).abs().max() < 1e-5


def test_lse_is_a_natural_logarithm() -> None:
    """[FA#1817, AG#200] q = 0 and 64 keys: ln 64."""
    configuration = PLAIN["d128-bf16-full-3"]
    _, lse = call(configuration, _values(configuration, [0.0] * 64))
    assert (lse - 4.158883).abs().max() < 1e-5


@pytest.mark.parametrize("length", [257, 1025])
def test_positions_in_the_last_tile(length: int) -> None:
    """score + (q - kv), a length that is one past a tile. [PT#153799]"""
    check(FAULTS["distance"], inputs(FAULTS["distance"], (length, length), batch=1))


def test_a_mask_counts_below_the_diagonal_too() -> None:
    """Even keys only, with causal: row i is the mean of v[0], v[2], ... up to i. [FI PR#4695]"""
    configuration = MODS["even_keys_causal"]
    x = inputs(configuration, (1024, 1024))
    x = Inputs(torch.zeros_like(x.q), x.k, x.v)
    out, _ = call(configuration, x, **arguments(configuration, x))
    even = torch.arange(1024, device=DEVICE) % 2 == 0
    counted = torch.where(even[:, None, None], x.v.double(), 0)
    mean = counted.cumsum(1) / even.cumsum(0)[:, None, None]
    assert (out.double() - mean).abs().max() <= 2**-8 * mean.abs().max()


def test_a_full_tile_is_bounded_by_the_length() -> None:
    """One document that holds everything, Sq 384, Sk 300. [FA#2091]"""
    configuration = MODS["document"]
    x = inputs(configuration, (384, 300))
    ids = torch.zeros(x.q.shape[0], 384, dtype=torch.int32, device=DEVICE)
    out, _ = call(configuration, x, mask_mod=lambda b, h, q, kv: ids[b, q] == ids[b, kv])
    right = fa_cute.reference.attention(*x)
    assert (out.double() - right).abs().max() < 0.02


def test_many_tiles_without_work() -> None:
    """Sq 8192 on 128 keys, a window of 64: most tiles are empty, nothing hangs. [FA#2258]"""
    configuration = WINDOWS["causal-left"]
    x = inputs(configuration, (8192, 128), heads_k=16)
    out, lse = call(configuration, x, causal=True, window=(64, None))
    torch.cuda.synchronize()
    assert (out[:, : 8192 - 128] == 0).all() and (lse[..., : 8192 - 128] == -math.inf).all()
    tail = Inputs(x.q[:, -128:], x.k, x.v)
    right = fa_cute.reference.attention(*tail, causal=True, window=(64, None))
    assert (out[:, -128:].double() - right).abs().max() < 0.03


def test_scalars_do_not_recompile() -> None:
    """Fresh 0-d tensors and new-but-equal closures: one kernel. [FA#2616]"""
    configuration = MODS["scalars"]
    x = inputs(configuration, (64, 64))
    keys, results = set(), []
    for step in range(8):
        factor = torch.full((), 0.1 * step, device=DEVICE)
        shift, period = torch.tensor(float(step)), torch.tensor(step + 1)

        def score_mod(score, b, h, q, kv, factor=factor, shift=shift, period=period):
            return score * factor + (kv % period) * shift

        kernel = fa_cute.compile(
            head_dim=64,
            dtype=torch.bfloat16,
            score_mod=score_mod,
            return_lse=True,
            target="sm_90a",
        )
        keys.add(kernel.key)
        results.append(call(configuration, x, score_mod=score_mod)[0])
        right = fa_cute.reference.attention(*x, score_mod=score_mod)
        assert (results[-1].double() - right).abs().max() < 0.05
    assert len(keys) == 1
    assert not torch.equal(results[1], results[2])
