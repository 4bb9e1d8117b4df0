"""Callers that are not one thread in one stream: threads, and a function that torch compiles."""

from __future__ import annotations

import threading

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
