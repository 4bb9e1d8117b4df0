"""A composition: causal documents that also see a shared prefix, from three masks.

The parts are prefix-LM's (Raffel et al., 2019) and document masking's (He et al., "FlexAttention",
2024); ``all_of``, ``any_of`` and ``negate`` join any mask functions.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fa_cute.mods import all_of, any_of, negate


def causal_documents(documents: Tensor, shared: int = 16) -> Callable:
    """The mask_mod for ``documents[b, position]`` (B, S), after ``shared`` tokens that all see."""

    def own(b, h, q, kv):
        return documents[b, q] == documents[b, kv]

    def prefix(b, h, q, kv):
        return kv < shared

    def later(b, h, q, kv):
        return kv > q

    return all_of(any_of(own, prefix), negate(later))
