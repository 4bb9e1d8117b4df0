"""The benchmark's variants as FlashAttention-4 takes them: CuTe functions over small vectors.

Imported only where FA4 is installed. Captured tensors travel as ``aux_tensors``; FA4 hands such a
mod one element at a time on sm_90.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import torch

from bench.cases import Case, alibi_slopes, dense_bias, shared_bias, t5_table


def _one(value: Any) -> Any:
    """A loaded element as the one-element vector that FA4's mods compute on, fp32."""
    fragment = cute.make_rmem_tensor(1, cutlass.Float32)
    fragment[0] = cutlass.Float32(value)
    return fragment.load()


@cute.jit
def _alibi(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return score + _one(aux_tensors[0][h[0]]) * (kv_idx - q_idx).to(cutlass.Float32)


@cute.jit
def _bias(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return score + _one(aux_tensors[0][h[0], q_idx[0], kv_idx[0]])


@cute.jit
def _shared_bias(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return score + _one(aux_tensors[0][q_idx[0], kv_idx[0]])


@cute.jit
def _t5(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    distance = q_idx[0] - kv_idx[0]
    far = distance if distance > 0 else -distance
    near = far if far > 1 else cutlass.Int32(1)
    steps = cute.math.log(cutlass.Float32(near) / 8.0, fastmath=True) * (8.0 / math.log(16.0))
    bucket = cutlass.Int32(8.0 + steps + 1e-4)
    bucket = bucket if bucket < 15 else cutlass.Int32(15)
    bucket = far if far < 8 else bucket
    bucket = bucket + 16 if distance < 0 else bucket
    return score + _one(aux_tensors[0][bucket, h[0]])


@cute.jit
def _added(gradient, score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return gradient


def modifiers(case: Case, device: torch.device) -> dict[str, Any]:
    """FA4's keyword arguments for the case's variant."""
    build: dict[str, Callable[[], dict[str, Any]]] = {
        "plain": dict,
        "softcap": lambda: {"softcap": 30.0},
        "alibi": lambda: _captured(_alibi, alibi_slopes(case.heads, device)),
        "bias": lambda: _captured(_bias, dense_bias(case, device)),
        "padded-bias": lambda: _captured(_bias, dense_bias(case, device)),
        "bias-by-elements": lambda: _captured(_bias, dense_bias(case, device)),
        "shared-bias": lambda: _captured(_shared_bias, shared_bias(case, device)),
        "t5": lambda: _captured(_t5, t5_table(case.heads, device)),
    }
    return build[case.variant]()


def _captured(mod: Any, tensor: torch.Tensor) -> dict[str, Any]:
    """A mod that adds to the score; FA4 wants its derivative written by hand, and none of
    ``tensor``."""
    return {"score_mod": mod, "score_mod_bwd": _added, "aux_tensors": [tensor]}
