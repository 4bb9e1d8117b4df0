"""Causal: a query sees the keys up to its own position, counted from the start of both sequences.

This is top-left aligned, as in FlexAttention's examples (He et al., "FlexAttention", 2024); the
option ``causal=True`` of ``fa_cute.attention`` is bottom-right aligned, and skips whole blocks. The
two agree when both sequences have one length.
"""

from __future__ import annotations


def causal(b, h, q, kv):
    """The mask_mod: key kv is visible to query q where kv <= q."""
    return q >= kv
