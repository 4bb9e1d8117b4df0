"""The entry points: arguments of ``attention``, what importing costs, ``explain``."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fa_cute
from fa_cute import api
from fa_cute.host.planning import NO_MODS


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_out_is_written_in_place() -> None:
    q = half(1, 5, 2, 16)
    expected, lse = fa_cute.attention(q, q, q, causal=True, return_lse=True)
    for out in (
        torch.empty_like(q),
        torch.empty(1, 2, 5, 16).bfloat16().transpose(1, 2),
        q.clone(),
    ):
        written, again = fa_cute.attention(q, q, q, causal=True, out=out, return_lse=True)
        assert written is out and torch.equal(out, expected) and torch.equal(lse, again)
    assert fa_cute.attention(q, q, q, causal=True, out=q) is q and torch.equal(q, expected)


def test_out_has_no_gradient() -> None:
    q, out = half(1, 5, 2, 16), half(1, 5, 2, 16)
    with pytest.raises(ValueError, match="out= has no gradient"):
        fa_cute.attention(q.requires_grad_(), q, q, out=out)
    with torch.no_grad():
        assert fa_cute.attention(q, q, q, out=out) is out


def test_a_mod_must_be_a_function() -> None:
    q = half(1, 5, 2, 16)
    for name in ("score_mod", "mask_mod"):
        with pytest.raises(TypeError, match=f"{name} must be a function or None, not float"):
            fa_cute.attention(q, q, q, **{name: 1.0})


def test_q_may_be_anything_until_it_is_checked() -> None:
    with pytest.raises(TypeError, match="q must be a torch.Tensor, not ndarray"):
        fa_cute.attention(half(1, 5, 2, 16).float().numpy(), None, None)
    meta = half(1, 5, 2, 64).to("meta")
    with pytest.raises(ValueError, match="q is on meta; fa_cute runs on CUDA tensors"):
        fa_cute.attention(meta, meta, meta)


def test_a_kernel_takes_a_positive_scale() -> None:
    """sign * q with the positive scale gives the scores of q with the scale: exactly."""
    for scale in (0.3, -0.3, 0.0, 1e-60):
        sign, positive = api.positive_scale(scale)
        assert positive > 0 and sign * positive == pytest.approx(scale, abs=1e-38)


def test_an_empty_problem_launches_nothing() -> None:
    """Everything that a call on the GPU does when there is no key, on CPU tensors."""
    q, k = half(2, 5, 4, 64), half(2, 0, 2, 64)
    options = api.Options(False, None, None, True, False)

    def run(q: torch.Tensor, out: torch.Tensor | None) -> api.Result:
        qkv = (q, k, k)
        return api.on_gpu(api.lookup(qkv, NO_MODS, options), qkv, NO_MODS, out)

    out, lse = run(q, None)
    assert (out == 0).all() and (lse == -math.inf).all() and lse.dtype == torch.float32
    given = half(2, 5, 4, 64)
    assert run(q, given)[0] is given and (given == 0).all()
    with pytest.raises(ValueError, match="strides|share one"):
        run(q.detach(), half(1, 5, 4, 64).expand(2, 5, 4, 64))


def test_equal_facts_are_checked_once() -> None:
    q, k = half(2, 5, 4, 64), half(2, 0, 2, 64)
    options = api.Options(False, (3, 0), None, True, False)
    first = api.lookup((q, k, k), NO_MODS, options)
    assert api.lookup((q.clone(), k, k), NO_MODS, options) is first
    assert api.lookup((q, k, k), NO_MODS, options._replace(window=(4, 0))) is not first
    assert api.lookup((q, k, k), NO_MODS, options._replace(window=[3, 0])).problem == first.problem
    with pytest.raises(TypeError, match="k must be a torch.Tensor, not int"):
        api.lookup((q, 3, k), NO_MODS, options)


def test_explain() -> None:
    q, k = half(2, 5, 4, 64), half(2, 7, 2, 64)
    slopes, cap = torch.rand(4), torch.tensor(3.0)

    def mod(score, b, h, q, kv):
        return cap * torch.tanh(score / cap) + slopes[h] * (kv - q)

    text = fa_cute.explain(q, k, k, score_mod=mod, window=(3, None))
    for part in (
        "B 2, Sq 5, Sk 7, Hq 4, Hk 2 (ratio 2), D 64, Dv 64, torch.bfloat16 on cpu",
        "left 3, right unlimited",
        "the CPU path",
        "score_mod: graph",
        "tanh",
        "captured[0] is (4,) torch.float32, strides (1,)",
        "scalars[0] is 3.0, passed by value",
    ):
        assert part in text, text
    text = fa_cute.explain(q, k, k, causal=True, target="sm_90a")
    for part in ("forward for sm_90a, key ", "queries x ", "registers: ", "cache: ", "right 0"):
        assert part in text, text
    odd = half(2, 5, 4, 65)[..., :64]
    assert "copy: q (2, 5, 4, 64)" in fa_cute.explain(odd, k, k, target="sm_90a")
    assert "nothing to compute" in fa_cute.explain(q, k[:, :0], k[:, :0], target="sm_90a")


def test_explain_counts_what_the_kernel_visits() -> None:
    """Ranges that hold more than the mask shows are visited whole; lists, what is kept alone."""
    q = half(1, 1024, 2, 64)
    documents = (torch.arange(1024) // 100)[None]

    def work(mask: object, **options: object) -> float:
        text = fa_cute.explain(q, q, q, mask_mod=mask, target="sm_90a", **options)
        return float(text.split("work: ")[1].split("%")[0])

    def document(b, h, q, kv):
        return (documents[b, q] == documents[b, kv]) & (q >= kv)

    causal = work(lambda b, h, q, kv: q >= kv)
    assert causal == work(document) == work(document, causal=True) > 50
    planned = fa_cute.plan_mask(document, 1, 2, 1024, 1024, head_dim=64)
    assert work(planned) < causal / 2
    lengths = torch.tensor([0, 5])
    assert work(lambda b, h, q, kv: kv < lengths[h]) == 4.5  # one of 11 blocks, of one head of two


def test_the_default_device_and_dtype_are_the_users(tmp_path: Path) -> None:
    """What a call makes for itself is where and what it must be, whatever new tensors are."""
    q, k = torch.randn(1, 300, 2, 8), torch.randn(1, 310, 2, 8)
    slopes, ids = torch.rand(2), torch.arange(310) // 40

    def score_mod(score, b, h, q, kv):
        return torch.tanh(score) - slopes[h] * (q - kv).abs() * fa_cute.mods.sqrt(0.5)

    def mask_mod(b, h, q, kv):
        return (ids[q] == ids[kv]) | (kv < 130)

    def results() -> tuple[torch.Tensor, ...]:
        mods = {"score_mod": score_mod, "mask_mod": mask_mod}
        out = fa_cute.attention(q, k, k, **mods, causal=True)
        blocks = fa_cute.plan_mask(mask_mod, None, None, 300, 310)
        assert blocks.counts().full and fa_cute.check(score_mod).ok
        text = fa_cute.explain(q, k, k, **mods, plot=tmp_path / "map.png")
        assert "told by interval arithmetic" in text
        return out, blocks.kinds(), fa_cute.reference.attention(q, k, k, **mods)

    right = results()
    with torch.device("meta"):
        assert all(map(torch.equal, results(), right))
    torch.set_default_dtype(torch.float16)
    try:
        assert all(map(torch.equal, results(), right))
    finally:
        torch.set_default_dtype(torch.float32)


def test_torch_compile_leaves_a_call_alone() -> None:
    """It compiles what is before a call and after it; results and gradients are the same."""
    from torch._dynamo.testing import CompileCounter

    bias = torch.randn(30, requires_grad=True)

    def step(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        mask = fa_cute.plan_mask(lambda b, h, q, kv: q + 3 >= kv, None, None, 9, 9)
        out = fa_cute.attention(
            q * 2, k, k, score_mod=lambda s, b, h, q, kv: s + bias[q - kv + 15], mask_mod=mask
        )
        return out + 1

    q, k = (torch.randn(1, 9, 2, 8, requires_grad=True) for _ in "qk")
    counter = CompileCounter()
    found = torch.compile(step, backend=counter)(q, k)
    assert torch.equal(found, step(q, k)) and counter.frame_count <= 3
    gradients = [torch.autograd.grad(out.sum(), (q, k, bias)) for out in (found, step(q, k))]
    assert all(map(torch.equal, *gradients))


def test_explain_of_eight_million_tokens() -> None:
    """What is visited is a sum over rows of tiles, not a map of 65,536 x 65,536 of them."""
    q = half(1, 1, 1, 128).expand(1, 2**23, 1, 128)
    text = fa_cute.explain(q, q, q, causal=True, target="sm_90a")
    assert "work: 50.0% of all tiles is visited" in text


def test_explain_beside_a_damaged_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FA_CUTE_CACHE_DIR", str(tmp_path))
    q = half(1, 5, 1, 128)
    text = fa_cute.explain(q, q, q, target="sm_90a")
    (tmp_path / f"{re.search('key (.*)', text)[1]}.so").write_bytes(b"no kernel")
    with pytest.warns(RuntimeWarning, match="is not used"):
        assert "a call compiles it" in fa_cute.explain(q, q, q, target="sm_90a")


def test_the_package_lists_what_it_offers() -> None:
    assert set(fa_cute.__all__) <= set(dir(fa_cute))
    for name in fa_cute.__all__:
        assert getattr(fa_cute, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'attend'"):
        _ = fa_cute.attend


PROGRAM = """
import sys, time, torch
start = time.process_time()
import fa_cute
package = time.process_time() - start
fa_cute.attention
call = time.process_time() - start
q = torch.zeros(1, 4, 1, 64)
fa_cute.attention(q, q, q, score_mod=lambda s, b, h, q, kv: s + h)
fa_cute.explain(q.bfloat16(), q.bfloat16(), q.bfloat16(), target="sm_90a")
print(package, call, "cutlass" in sys.modules)
"""


def test_importing_is_cheap_and_never_loads_the_compiler() -> None:
    """Beside torch: 1 ms for the package and 30 ms of CPU for the call, from bytecode."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    for last in (False, True):
        run = subprocess.check_output([sys.executable, "-c", PROGRAM], text=True, env=environment)
        package, call, cutlass = run.split()
        assert cutlass == "False"
        if float(package) < 0.05 and float(call) < 0.1:
            return
        # The first process may have compiled the bytecode.
        assert not last, f"import fa_cute took {package} s, with fa_cute.attention {call} s"
