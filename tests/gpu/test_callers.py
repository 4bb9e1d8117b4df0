"""Callers that are not one thread in one stream: threads, processes, a function torch compiles."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import fa_cute

from .configurations import MODS, PLAIN
from .judging import DEVICE, Inputs, arguments, inputs

pytestmark = pytest.mark.gpu


def _call(number: int) -> tuple[Inputs, dict]:
    """Inputs and arguments of one of eight kinds of calls."""
    configuration = (PLAIN["d64-bf16-causal-3"], MODS["alibi"])[number % 2]
    x = inputs(configuration, (100 + 131 * number, 90 + 211 * number), heads_k=2)
    return x, {**arguments(configuration, x), "causal": configuration.causal}


@pytest.mark.parametrize("streams", [False, True])
def test_threads(streams: bool) -> None:
    """Eight threads, on one stream or on one each, forward and backward: as each is alone."""

    def gradients(number: int) -> list[torch.Tensor]:
        x, given = kinds[number]
        leaves = [t.detach().requires_grad_() for t in x]
        out = fa_cute.attention(*leaves, deterministic=True, **given)
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    def repeated(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream() if streams else torch.cuda.default_stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(20):
                found = gradients(number)
                same = (torch.equal(a, b) for a, b in zip(found, alone[number], strict=True))
                if not all(same):
                    wrong.append(number)

    kinds = [_call(number) for number in range(8)]
    alone = [gradients(number) for number in range(8)]
    torch.cuda.synchronize()
    wrong: list[int] = []
    threads = [threading.Thread(target=repeated, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not wrong


RANK = """
import hashlib, torch, fa_cute
from fa_cute.host import compile
torch.manual_seed(1)
q, k, v = (torch.randn(1, 300, 2, 64, device="cuda", dtype=torch.float16) for _ in range(3))
out = fa_cute.attention(q, k, v, score_mod=lambda score, b, h, q, kv: score - 0.5 * (q - kv).abs())
(plan,) = compile.plans_in_memory()
digest = hashlib.sha256(out.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
print(compile.compiled(plan).source, digest)
"""


def test_eight_processes_on_a_cold_cache(tmp_path: Path) -> None:
    """As the ranks of a job begin: one compiles, seven wait for it, all have the same result."""
    command = [sys.executable, "-c", RANK]
    environment = os.environ | {"FA_CUTE_CACHE_DIR": str(tmp_path / "kernels")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, env=environment, **pipes) for _ in range(8)]
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), said
    sources, digests = zip(*(out.split() for out, _ in said), strict=True)
    assert sorted(sources) == ["compiled"] + ["disk"] * 7 and len(set(digests)) == 1
    assert len(list((tmp_path / "kernels").glob("*.so"))) == 1


TRAINING = """
import hashlib, torch, fa_cute
from fa_cute.host import worker
worker._cores_are_free = lambda: True
torch.manual_seed(1)
x = torch.randn(3, 1, 300, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
mod = lambda score, b, h, q, kv: score - 0.5 * (q - kv).abs()
fa_cute.attention(*x, score_mod=mod, deterministic=True).sum().backward()
print(hashlib.sha256(x.grad.cpu().view(torch.uint8).numpy().tobytes()).hexdigest())
"""


def test_a_backward_compiled_beside_its_forward(tmp_path: Path) -> None:
    """On a cold cache a second process compiles it; on a warm one there is none. Same bits."""
    environment = os.environ | {"FA_CUTE_CACHE_DIR": str(tmp_path), "FA_CUTE_LOG": "cache"}
    command = [sys.executable, "-c", TRAINING]
    cold, warm = (
        subprocess.run(command, env=environment, capture_output=True, text=True) for _ in range(2)
    )
    assert "compiles 3 more, which will be wanted next" in cold.stderr, cold.stderr
    assert "compiles" not in warm.stderr and "is being compiled" not in warm.stderr
    assert len(list(tmp_path.glob("*.so"))) == 4 and len(cold.stdout.split()) == 1
    assert cold.stdout == warm.stdout


def test_a_function_that_torch_compiles() -> None:
    """Of several lengths, on another stream too: bit for bit, and few frames are compiled."""
    from torch._dynamo.testing import CompileCounter

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return fa_cute.attention(q * 2, k, v, score_mod=alibi, causal=True, deterministic=True) + 1

    def alibi(score, b, h, q, kv):
        return score - slopes[h] * (q - kv).abs()

    slopes = torch.rand(6, device=DEVICE)
    counter = CompileCounter()
    compiled = torch.compile(step, backend=counter)
    for length in (64, 100, 333, 1025):
        x = inputs(PLAIN["d64-bf16-causal-3"], (length, length), heads_k=2)
        leaves = [t.requires_grad_() for t in x]
        right = step(*leaves)
        gradients = torch.autograd.grad(right.sum(), leaves)
        stream = torch.cuda.Stream()
        for chosen in (torch.cuda.current_stream(), stream):
            chosen.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(chosen):
                found = compiled(*leaves)
                again = torch.autograd.grad(found.sum(), leaves)
            torch.cuda.synchronize()
            assert torch.equal(found, right)
            assert all(map(torch.equal, again, gradients))
    assert counter.frame_count <= 12


def test_new_tensors_are_on_the_gpu() -> None:
    """``torch.set_default_device("cuda")``: calls, plans and the CPU path as without it."""
    x = inputs(PLAIN["d64-bf16-causal-3"], (333, 333), heads_k=2)
    slopes, ids = torch.rand(6), torch.arange(333) // 50

    def results(device: str) -> list[torch.Tensor]:
        leaves = [t.detach().to(device).requires_grad_() for t in (*x, slopes)]
        number = ids.to(device)

        def score_mod(score, b, h, q, kv):
            return score - leaves[3][h] * (q - kv).abs() * fa_cute.mods.sqrt(0.5)

        def mask_mod(b, h, q, kv):
            return (number[q] == number[kv]) | (kv < 130)

        mask = fa_cute.plan_mask(mask_mod, None, None, 333, 333, head_dim=64)
        given = {"score_mod": score_mod, "deterministic": True}
        outs = [fa_cute.attention(*leaves[:3], mask_mod=m, **given) for m in (mask, mask_mod)]
        return [*outs, *torch.autograd.grad(sum(outs), leaves, torch.ones_like(outs[0]))]

    for device in ("cuda", "cpu"):
        right = results(device)
        with torch.device("cuda"):
            assert all(map(torch.equal, results(device), right)), device


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_forward_and_backward() -> None:
    """On a device that is not current, with mods, a planned mask and sinks: the same bits."""

    def results(device: str) -> list[torch.Tensor]:
        table, ids = torch.linspace(0, 1, 6), torch.arange(333) // 50
        table, ids, sinks = (t.to(device) for t in (table, ids, torch.linspace(-1, 1, 6)))
        leaves = [t.to(device).requires_grad_() for t in (*x, table, sinks)]

        def score_mod(score, b, h, q, kv):
            return score + leaves[3][h] * (q - kv).abs() * 0.01

        mask = fa_cute.plan_mask(lambda b, h, q, kv: ids[q] >= ids[kv], 2, 6, 333, 333, head_dim=64)
        out = fa_cute.attention(
            *leaves[:3], score_mod=score_mod, mask_mod=mask, sinks=leaves[4], deterministic=True
        )
        found = [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]
        assert torch.cuda.current_device() == 0 and all(t.device == out.device for t in found)
        return [t.cpu() for t in found]

    x = inputs(PLAIN["d64-bf16-causal-3"], (333, 333), heads_k=2)
    here = results("cuda:0")
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        assert all(map(torch.equal, results(device), here))
