"""Attention sinks and a window: a query sees the first few tokens and the most recent ones.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023.
"""

from __future__ import annotations

from collections.abc import Callable


def streaming_llm(first: int = 4, recent: int = 60) -> Callable:
    """The mask_mod for the ``first`` tokens and the ``recent`` ones, the query's own included."""

    def mask_mod(b, h, q, kv):
        return (q >= kv) & ((kv < first) | (q - kv < recent))

    return mask_mod
