"""Block-causal attention: all tokens of a block (a frame, a chunk of audio) see each other.

Source: Huang et al., "Towards Online End-to-end Transformer Automatic Speech Recognition", 2019;
video generators use it over frames (Yin et al., "From Slow Bidirectional to Fast Autoregressive
Video Diffusion Models", 2024).
"""

from __future__ import annotations

from collections.abc import Callable


def block_causal(block: int = 48) -> Callable:
    """The mask_mod that shows each query its own block of ``block`` tokens and all before it."""

    def mask_mod(b, h, q, kv):
        return q // block >= kv // block

    return mask_mod
