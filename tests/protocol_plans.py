"""The plans of all topologies that the protocol check walks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from fa_cute.variants.t5_relative_bias import t5_relative_bias

from fa_cute.configuration import Configuration
from fa_cute.host import configs
from fa_cute.host.backward import plans_of
from fa_cute.plan import Plan


def forward(**facts: Any) -> Plan:
    defaults = {"head_dim": 128, "dtype": "bfloat16", "target": "sm_90a"}
    return Configuration(**{**defaults, **facts}).plan()[0]


def backward(*, deterministic: bool = False, **facts: Any) -> Plan:
    return plans_of(forward(**facts), deterministic=deterministic, lse_gradient=False).main


def chunked(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q // 64) == (kv // 64)


def queries_in_registers(**facts: Any) -> Plan:
    plan = forward(head_dim=192, head_dim_v=128, **facts)
    assert plan.config.q_registers
    return plan


def documents() -> Plan:
    numbers = torch.empty(2, 256, dtype=torch.int32, device="meta")
    return listed(mask_mod=lambda b, h, q, kv: numbers[b, q] == numbers[b, kv])


def biased(dtype: torch.dtype = torch.bfloat16, **facts: Any) -> Plan:
    bias = torch.empty(16, 256, 256, dtype=dtype, device="meta")
    return forward(score_mod=lambda s, b, h, q, kv: s + bias[h, q, kv], **facts)


def paired(**facts: Any) -> Plan:
    """The plan's row for pairs of CTAs."""
    plan = forward(target="sm_100a", **facts)
    dims = plan.head_dim, plan.head_dim_v
    return replace(plan, config=configs.paired(plan.config, dims, cut=plan.causal))


def listed(**facts: Any) -> Plan:
    return replace(forward(**{"mask_mod": chunked, **facts}), visits="lists")


KERNELS: dict[str, Callable[[], Plan]] = {
    "two consumers in turns": lambda: forward(few_keys=True),
    "two consumers, P of a block its own, turns": lambda: forward(),
    "two consumers, causal, no turns": lambda: forward(causal=True),
    "three consumers, window": lambda: forward(head_dim=64, window=(True, True)),
    "Q in registers, causal": lambda: queries_in_registers(causal=True),
    "Q in registers, lse": lambda: queries_in_registers(return_lse=True),
    "one slot of Q, window": lambda: forward(head_dim=256, window=(True, True)),
    "ranges of a mask": lambda: forward(mask_mod=chunked),
    "lists of a mask": listed,
    "lists of a mask, columns brought by a warp": documents,
    "diagonals in shared memory": lambda: forward(score_mod=t5_relative_bias(torch.zeros(32, 8))),
    "a bias, two slots": biased,
    "a bias, one slot, causal": lambda: biased(torch.float32, causal=True),
    "a bias, three consumers, window": lambda: biased(head_dim=64, window=(True, True)),
    "a bias under a mask": lambda: biased(mask_mod=chunked),
    "backward": backward,
    "backward, 64, causal": lambda: backward(head_dim=64, causal=True, gqa_ratio=2),
    "backward, 64, causal, deterministic": lambda: backward(
        head_dim=64, causal=True, deterministic=True
    ),
    "backward, window": lambda: backward(window=(True, True)),
    "backward, window, deterministic": lambda: backward(
        window=(True, True), gqa_ratio=2, deterministic=True
    ),
    "backward, causal, deterministic": lambda: backward(
        causal=True, gqa_ratio=2, deterministic=True
    ),
    "backward, deterministic": lambda: backward(deterministic=True),
    "backward, 64, window, deterministic": lambda: backward(
        head_dim=64, window=(True, True), deterministic=True
    ),
    "backward, wide, causal, deterministic": lambda: backward(
        head_dim=256, causal=True, deterministic=True
    ),
    "backward, wide, window, deterministic": lambda: backward(
        head_dim=256, window=(True, True), gqa_ratio=2, deterministic=True
    ),
    "backward, wide, lists of a mask, deterministic": lambda: replace(
        backward(head_dim=256, mask_mod=chunked, deterministic=True), visits="lists"
    ),
    "backward, ranges of a mask": lambda: backward(mask_mod=chunked, gqa_ratio=2),
    "backward, lists of a mask": lambda: replace(backward(mask_mod=chunked), visits="lists"),
    "backward, ranges of a mask, deterministic": lambda: backward(
        mask_mod=chunked, causal=True, gqa_ratio=2, deterministic=True
    ),
    "backward, lists of a mask, deterministic": lambda: replace(
        backward(mask_mod=chunked, deterministic=True), visits="lists"
    ),
    "backward, dQ alone, causal": lambda: replace(backward(causal=True), gradients=(True, False)),
    "backward, dK and dV alone": lambda: replace(backward(), gradients=(False, True)),
    "backward, wide, dQ alone": lambda: replace(backward(head_dim=256), gradients=(True, False)),
    "backward, wide": lambda: backward(head_dim=256),
    "backward, wide, one slot a ring": lambda: forward(
        direction="backward", head_dim=256, score_mod=t5_relative_bias(torch.zeros(32, 8))
    ),
    "Blackwell": lambda: forward(target="sm_100a"),
    "Blackwell, causal, window": lambda: forward(
        target="sm_100a", causal=True, window=(True, False)
    ),
    "Blackwell, one tile a CTA": lambda: forward(target="sm_100a", head_dim=256),
    "Blackwell, ranges of a mask": lambda: forward(target="sm_100a", mask_mod=chunked),
    "Blackwell, lists of a mask": lambda: listed(target="sm_100a", causal=True),
    "Blackwell, pairs": lambda: paired(),
    "Blackwell, pairs of one tile, causal": lambda: paired(head_dim=256, causal=True),
    "Blackwell, a bias, causal": lambda: biased(target="sm_100a", causal=True),
    "Blackwell, a bias, one tile a CTA, two slots": lambda: biased(target="sm_100a", head_dim=256),
    "Blackwell, a bias under a mask": lambda: biased(target="sm_100a", mask_mod=chunked),
    "Blackwell, diagonals": lambda: forward(
        target="sm_100a", score_mod=t5_relative_bias(torch.zeros(32, 8))
    ),
}
