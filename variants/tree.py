"""Tree attention for speculative decoding: a drafted token sees its ancestors in the tree only.

Source: Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based
Speculative Inference and Verification", 2023. Tokens are numbered depth first, so that a subtree
is a range of numbers, and key kv is an ancestor of query q when q lies in kv's subtree.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def tree(subtree_end: Tensor) -> Callable:
    """The mask_mod for ``subtree_end[b, kv]``: the number after the last descendant of token kv.

    An integer tensor of shape (B, S); a token is a descendant of itself. Tokens before the tree
    (the prompt) have the end S: every later token sees them.
    """

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (q < subtree_end[b, kv])

    return mask_mod
