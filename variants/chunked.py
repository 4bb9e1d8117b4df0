"""Chunked (block-causal) attention: causal within chunks of the sequence, blind across them.

Source: Meta AI, "The Llama 4 herd", 2025, whose local layers attend in chunks of 8192 tokens; the
block-diagonal form is that of Child et al., "Generating Long Sequences with Sparse Transformers",
2019.
"""

from __future__ import annotations

from collections.abc import Callable


def chunked(chunk: int = 64) -> Callable:
    """The mask_mod that shows each query the keys up to itself in its chunk of ``chunk`` tokens."""

    def mask_mod(b, h, q, kv):
        return (q // chunk == kv // chunk) & (q >= kv)

    return mask_mod
