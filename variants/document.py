"""Document masking: of documents packed into one sequence, tokens see their own only.

Source: He et al., "FlexAttention: The Flexibility of PyTorch with the Performance of
FlashAttention", 2024; the practice is older (Krell et al., "Efficient Sequence Packing", 2021).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def document(documents: Tensor) -> Callable:
    """The mask_mod for ``documents[b, position]``, the number of the document of each token.

    ``documents`` is an integer tensor of shape (B, S); queries and keys are the same S tokens.
    """

    def mask_mod(b, h, q, kv):
        return (documents[b, q] == documents[b, kv]) & (q >= kv)

    return mask_mod
