"""Prefix-LM: the first tokens of a sequence see each other both ways, the rest is causal.

Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", 2019, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def prefix_lm(prefix: Tensor) -> Callable:
    """The mask_mod for prefixes of ``prefix[b]`` tokens; an integer tensor of shape (B,)."""

    def mask_mod(b, h, q, kv):
        return (kv < prefix[b]) | (q >= kv)

    return mask_mod
