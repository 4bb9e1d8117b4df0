"""``fa-cute demo``: three variants in plain Python, checked, compiled, and timed where a GPU is.

Each variant runs on the CPU path and is compared with the fp64 oracle; its kernel for sm_90a is
compiled with an empty cache, then loaded from disk. On a Hopper GPU the kernel runs too, on bf16
inputs with outliers, is compared with the oracle, and is timed beside torch's own attention.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import fa_cute
from fa_cute import reference, variants
from fa_cute.host import compile as compiling

TARGET = "sm_90a"
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 2048, 4, 2, 128
TIMED_TOKENS, TIMED_HEADS = 8192, 16
WINDOW = 256


class Case(NamedTuple):
    """A variant: its mods, and the share of all scores that it lets count, for TFLOP/s."""

    name: str
    mods: dict[str, Callable]
    share: Callable[[int], float]


def cases(heads: int) -> list[Case]:
    """The three variants for ``heads`` query heads."""
    alibi = variants.ALL["alibi"].function(heads)
    sliding_window = variants.ALL["sliding_window"].function(WINDOW)
    softcap = variants.ALL["softcap"].function()
    return [
        Case("ALiBi", {"score_mod": alibi}, lambda tokens: 1.0),
        Case("sliding window", {"mask_mod": sliding_window}, lambda tokens: WINDOW / tokens),
        Case("softcap", {"score_mod": softcap}, lambda tokens: 1.0),
    ]


class Inputs(NamedTuple):
    """q ``(1, S, Hq, D)``, k and v ``(1, S, Hk, D)``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def inputs(tokens: int, heads: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Inputs:
    """Random tensors of which every thousandth element is 20 times as large, as activations are."""
    generator = torch.Generator().manual_seed(0)

    def one(count: int) -> torch.Tensor:
        x = torch.randn(1, tokens, count, HEAD_DIM, generator=generator)
        outlier = torch.rand(x.shape, generator=generator) < 1e-3
        return torch.where(outlier, 20 * x, x).to(dtype).to(device)

    return Inputs(one(heads[0]), one(heads[1]), one(heads[1]))


def run() -> int:
    """Print the demonstration; 0 if every check held, else 1."""
    started = time.perf_counter()
    device = _gpu()
    head = ["variant", "CPU path", "cold compile", "warm load", "registers", "spills"]
    rows = [head + (["GPU", "TFLOP/s", "SDPA plain"] if device is not None else [])]
    with _empty_cache():
        sound = True
        for case in cases(HEADS):
            cells, fine = _on_cpu(case)
            sound &= fine
            rows.append([case.name, *cells, *_kernel(case)])
        if device is not None:
            for row, case in zip(rows[1:], cases(HEADS), strict=True):
                cells, fine = _on_gpu(case, device)
                sound &= fine
                row.extend(cells)
    _print_results(rows, device, time.perf_counter() - started, sound)
    return 0 if sound else 1


def _gpu() -> torch.device | None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return torch.device("cuda", torch.cuda.current_device())
    return None


@contextlib.contextmanager
def _empty_cache() -> Iterator[None]:
    """A cache folder that starts empty and goes away, so that cold is cold on every run."""
    before = os.environ.get("FA_CUTE_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="fa_cute-demo-") as folder:
        os.environ["FA_CUTE_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["FA_CUTE_CACHE_DIR"]
            if before is not None:
                os.environ["FA_CUTE_CACHE_DIR"] = before


def _on_cpu(case: Case) -> tuple[list[str], bool]:
    x = inputs(TOKENS, (HEADS, KV_HEADS), torch.float32, torch.device("cpu"))
    with progress(f"{case.name}: CPU path on {TOKENS} tokens, against the fp64 oracle"):
        return _judged(fa_cute.attention(*x, **case.mods), case, x)


def _judged(out: torch.Tensor, case: Case, x: Inputs) -> tuple[list[str], bool]:
    """The largest error, and torch's in the same dtype: at most twice that, plus a rounding."""
    right = reference.attention(*x, **case.mods)
    error, torchs = ((o.double() - right).abs().max().item() for o in (out, eager(x, case.mods)))
    allowed = 2 * torchs + torch.finfo(out.dtype).eps * right.abs().max().item()
    verdict = "ok" if error <= allowed else f"WRONG, {allowed:.1e} allowed"
    return [f"{error:.1e} ({torchs:.1e}) {verdict}"], error <= allowed


def eager(x: Inputs, mods: dict[str, Callable]) -> torch.Tensor:
    """Attention as torch users write it, scores materialised in the dtype of the inputs."""
    q, k, v = (t.transpose(1, 2) for t in x)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    places = [torch.arange(size, device=q.device) for size in scores.shape]
    places = [p.view([-1 if at == dim else 1 for dim in range(4)]) for at, p in enumerate(places)]
    if "score_mod" in mods:
        scores = mods["score_mod"](scores, *places).to(scores.dtype)
    if "mask_mod" in mods:
        scores = scores.masked_fill(~mods["mask_mod"](*places), -torch.inf)
    return (scores.softmax(dim=3) @ v).transpose(1, 2)


def _kernel(case: Case) -> list[str]:
    def get() -> fa_cute.ahead.CompiledAttention:
        return fa_cute.compile(
            head_dim=HEAD_DIM,
            dtype=torch.bfloat16,
            gqa_ratio=HEADS // KV_HEADS,
            target=TARGET,
            **case.mods,
        )

    with progress(f"{case.name}: compiling for {TARGET}"):
        cold = get()
    compiling.forget()
    warm = get()
    registers, spills, *_ = warm.resources
    sources = f"{cold.source} then {warm.source}"
    if sources != "compiled then disk":
        raise RuntimeError(f"the demo expected a cold compile and a warm load, not {sources}")
    return [f"{cold.seconds:.2f} s", f"{1e3 * warm.seconds:.1f} ms", str(registers), str(spills)]


def _on_gpu(case: Case, device: torch.device) -> tuple[list[str], bool]:
    small = inputs(TOKENS, (HEADS, KV_HEADS), torch.bfloat16, device)
    with progress(f"{case.name}: running on {torch.cuda.get_device_name(device)}"):
        cells, fine = _judged(fa_cute.attention(*small, **case.mods), case, small)
        kv_heads = TIMED_HEADS * KV_HEADS // HEADS
        x = inputs(TIMED_TOKENS, (TIMED_HEADS, kv_heads), torch.bfloat16, device)
        timed = next(c for c in cases(TIMED_HEADS) if c.name == case.name)
        ours = _seconds(lambda: fa_cute.attention(*x, **timed.mods))
        q, k, v = (t.transpose(1, 2) for t in x)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        torchs = _seconds(lambda: sdpa(q, k, v, enable_gqa=True))
    flops = 4 * TIMED_TOKENS**2 * TIMED_HEADS * HEAD_DIM
    share = case.share(TIMED_TOKENS)
    return [*cells, f"{flops * share / ours / 1e12:.0f}", f"{flops / torchs / 1e12:.0f}"], fine


def _seconds(call: Callable[[], Any], repeats: int = 20) -> float:
    """Mean time of a call on the device, after a warm-up."""
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """A line that says what is going on, with the seconds so far where stderr is a terminal."""
    started, done = time.perf_counter(), threading.Event()

    def tick() -> None:
        while not done.wait(0.2):
            _write(f"\r{text} ... {time.perf_counter() - started:.1f} s")

    live = sys.stderr.isatty()
    ticker = threading.Thread(target=tick, daemon=True)
    _write(f"{text} ...")
    if live:
        ticker.start()
    try:
        yield
    finally:
        done.set()
        if live:
            ticker.join()
        start = f"\r{text} ..." if live else ""
        _write(f"{start} {time.perf_counter() - started:.1f} s\n")


def _write(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def _print_results(
    rows: list[list[str]], device: torch.device | None, seconds: float, sound: bool
) -> None:
    from fa_cute.cli import print_table

    print(
        f"\n{TOKENS} tokens, {HEADS} query and {KV_HEADS} key/value heads, D = {HEAD_DIM}; random "
        f"with outliers; kernels: bf16, {TARGET}.\n"
        "Errors are the largest against fp64, in brackets torch's in the same dtype.\n"
    )
    print_table(rows)
    print()
    if device is None:
        print("This host has no Hopper GPU: the kernels were compiled, but not run.")
    else:
        print(
            f"Timed on {torch.cuda.get_device_name(device)}: {TIMED_TOKENS} tokens, {TIMED_HEADS} "
            "heads; only scores that count are counted, and SDPA is torch's plain attention."
        )
    print(f"{'All checks held' if sound else 'A CHECK FAILED'}; {seconds:.0f} s in all.")
