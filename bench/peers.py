"""Ours and every peer behind one signature: ``build(case, inputs) -> Candidate``.

A peer that is not installed, or that lacks a case, raises ``Absent`` with the reason; the benchmark
writes the reason down and goes on. Peers are imported lazily.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from bench.cases import SOFTCAP, Case, Inputs
from bench.timing import Candidate


class Absent(Exception):
    """Why a peer does not run a case."""


def build(name: str, case: Case, inputs: Inputs) -> Candidate:
    """The candidate ``name`` for ``case``, called once so that it is compiled, or ``Absent``."""
    try:
        candidate = PEERS[name](case, inputs)
        with candidate.context():
            candidate.call()
            torch.cuda.synchronize()
    except Absent:
        raise
    except Exception as error:
        # Whatever a peer dies of must not end a run.
        lines = str(error).strip().splitlines() or [""]
        raise Absent(f"{type(error).__name__}: {lines[0][:160]}") from error
    return candidate


def output(result: Any) -> torch.Tensor:
    """The output ``(B, S, H, Dv)`` of a candidate's result."""
    out = result[0] if isinstance(result, tuple) else result
    return out


def _ours(case: Case, x: Inputs) -> Candidate:
    import fa_cute

    arguments = case.arguments(x.q.device)
    return Candidate("ours", lambda: fa_cute.attention(x.q, x.k, x.v, **arguments))


def _plain(case: Case, x: Inputs) -> Candidate:
    """Ours without the case's mod: what the mod costs, in the same rounds."""
    if case.variant == "plain":
        raise Absent("the case has no mod")
    return replace(_ours(replace(case, variant="plain"), x), name="plain")


def _fa3(case: Case, x: Inputs) -> Candidate:
    if case.variant not in ("plain", "softcap"):
        raise Absent("FA3 has no score_mod")
    if case.window is not None:
        raise Absent("this build of FA3 leaves out windows")
    if case.dtype != "bfloat16":
        raise Absent("this build of FA3 leaves out fp16")
    attention = _import("fa3_fwd_interface").flash_attn_func
    softcap = SOFTCAP if case.variant == "softcap" else 0.0
    return Candidate("fa3", lambda: attention(x.q, x.k, x.v, causal=case.causal, softcap=softcap))


def _fa4(case: Case, x: Inputs) -> Candidate:
    attention = _import("flash_attn.cute").flash_attn_func
    mods = _import("bench.fa4_mods").modifiers(case, x.q.device)
    window = (None, None) if case.window is None else (case.window, 0)
    arguments = {"causal": case.causal, "window_size": window, **mods}
    return Candidate("fa4", lambda: attention(x.q, x.k, x.v, **arguments))


def _sdpa(name: str, case: Case, x: Inputs) -> Candidate:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.variant != "plain" or case.window is not None:
        raise Absent("no score_mod or window without a materialised mask")
    backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}[name]
    q, k, v = (t.transpose(1, 2) for t in x)
    gqa = case.heads != case.heads_kv

    def call() -> torch.Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=gqa)
        return out.transpose(1, 2)

    return Candidate(name, call, functools.partial(sdpa_kernel, backend))


def _flex(case: Case, x: Inputs) -> Candidate:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # One compilation a case: FlexAttention specialises on shapes, and dynamo limits recompilations.
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    q, k, v = (t.transpose(1, 2) for t in x)
    block_mask = None
    if case.causal:
        block_mask = create_block_mask(
            _flex_mask(case.window), None, None, case.seqlen, case.seqlen, device=q.device
        )
    score_mod = case.arguments(q.device).get("score_mod")
    gqa = case.heads != case.heads_kv

    def call() -> torch.Tensor:
        out = compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=gqa)
        return out.transpose(1, 2)

    return Candidate("flex", call)


def _flex_mask(window: int | None) -> Callable:
    def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv

    def banded(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv <= window)

    return causal if window is None else banded


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Absent(f"not installed ({error})") from error


PEERS: dict[str, Callable[[Case, Inputs], Candidate]] = {
    "ours": _ours,
    "plain": _plain,
    "fa3": _fa3,
    "fa4": _fa4,
    "cudnn": functools.partial(_sdpa, "cudnn"),
    "fa2": functools.partial(_sdpa, "fa2"),
    "flex": _flex,
}
