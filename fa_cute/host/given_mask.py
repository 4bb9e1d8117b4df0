"""What a call may give as ``mask_mod`` beside a function: ``MaskBlocks``, or a ``BlockMask``."""

from __future__ import annotations

from typing import Any

import torch

from fa_cute.host.block_mask import check_sizes, from_block_mask, is_block_mask
from fa_cute.host.blocks import MaskBlocks


def as_mask_mod(mask: Any, q: Any, k: Any) -> Any:
    """``mask`` as a function for q ``(B, Sq, Hq, D)`` and k ``(B, Sk, Hk, D)``.

    Functions, and what is neither kind of mask, come back as they are; q and k are checked later.
    ValueError for a mask that was made for other sizes or is on another device.
    """
    planned = isinstance(mask, MaskBlocks)
    if not planned and not is_block_mask(mask):
        return mask
    if all(isinstance(x, torch.Tensor) and x.ndim == 4 for x in (q, k)):
        call = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        name = "the MaskBlocks" if planned else "the BlockMask"
        home = (mask.by_query.offsets if planned else mask.kv_num_blocks).device
        if home != q.device:
            raise ValueError(f"{name} is on {home}, but q on {q.device}; make it there")
        if not planned:
            return from_block_mask(mask, call)
        check_sizes(name, mask.extents, (mask.batch, mask.heads), call)
    return mask if planned else from_block_mask(mask)
