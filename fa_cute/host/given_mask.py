"""What a call may give as ``mask_mod`` beside a function: ``MaskBlocks``, or a ``BlockMask``.

FlexAttention's ``BlockMask`` has lists already, of blocks of its own size. They become lists of the
kernels' tiles on the device, in a few operations and without waiting: a tile keeps what any of the
blocks under it keeps, and is full where all of them are.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from fa_cute.host.block_mask import check_sizes, from_block_mask, is_block_mask, table_of
from fa_cute.host.blocks import BlockLists, MaskBlocks, tiles_of
from fa_cute.host.configs import takes
from fa_cute.host.workspace import made_once
from fa_cute.mods.intervals import EMPTY, FULL, PARTIAL, Extents
from fa_cute.mods.trace import trace_mask_mod

Tile = tuple[int, int]
_planned: weakref.WeakKeyDictionary[Any, dict[tuple[Tile, ...], dict[int, MaskBlocks]]]
_planned = weakref.WeakKeyDictionary()


def as_mask_mod(mask: Any, q: Any, k: Any, v: Any) -> Any:
    """``mask`` as a function for q ``(B, Sq, Hq, D)``, k ``(B, Sk, Hk, D)``, v ``(B, Sk, Hk, Dv)``.

    Functions, and what is neither kind of mask, come back as they are; q, k and v are checked
    later. ValueError for a mask that was made for other sizes or is on another device.
    """
    planned = isinstance(mask, MaskBlocks)
    if not planned and not is_block_mask(mask):
        return mask
    if all(isinstance(x, Tensor) and x.ndim == 4 for x in (q, k, v)):
        call = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        name = "the MaskBlocks" if planned else "the BlockMask"
        home = (mask.by_query.offsets if planned else mask.kv_num_blocks).device
        if home != q.device:
            remedy = f"give plan_mask device={str(q.device)!r}" if planned else "make it there"
            raise ValueError(f"{name} is on {home}, but q on {q.device}; {remedy}")
        if not planned:
            function = from_block_mask(mask, call)
            head_dims = q.shape[3], v.shape[3]
            fits = takes(*head_dims) and 0 not in mask.seq_lengths
            return _of_block_mask(mask, function, head_dims) if fits else function
        check_sizes(name, mask.extents, (mask.batch, mask.heads), call)
    return mask if planned else from_block_mask(mask)


def _of_block_mask(mask: Any, function: Any, head_dims: tuple[int, int]) -> MaskBlocks:
    """The lists of a ``BlockMask`` for the kernels' tiles; made once a stream and pair of tiles."""
    device = mask.kv_num_blocks.device
    tiles = tiles_of(head_dims, device)
    known = _planned.setdefault(mask, {}).setdefault(tiles, {})
    return made_once(known, device, lambda: _blocks_of(mask, function, tiles))


def _blocks_of(mask: Any, function: Any, tiles: tuple[Tile, Tile]) -> MaskBlocks:
    table, (seqlen_q, seqlen_k) = table_of(mask), mask.seq_lengths
    extents = Extents(*table.shape[:2], seqlen_q, seqlen_k)
    by_query, by_key = (_kinds(table, mask.BLOCK_SIZE, extents, tile) for tile in tiles)
    lists = _listed(by_query), _listed(by_key.transpose(2, 3))
    traced = trace_mask_mod(function)
    return MaskBlocks(function, traced, extents, *extents[:2], *tiles, *lists, False)


def _kinds(table: Tensor, block: Tile, extents: Extents, tile: Tile) -> Tensor:
    """The kinds of tiles ``(batch, heads, query tiles, key tiles)``, from those of blocks.

    How many blocks under a tile are kept, and whole, is told by sums over all before a corner.
    """
    ends = []
    for size, length, step in zip(block, extents[2:], tile, strict=True):
        begin = torch.arange(0, length, step, device=table.device)
        last = (begin + step).clamp(max=length) - 1
        ends.append((begin // size, last // size + 1))
    (top, bottom), (left, right) = ends
    found = []
    for kind in (PARTIAL, FULL):
        before = torch.nn.functional.pad((table >= kind).int(), (1, 0, 1, 0))
        before = before.cumsum(2).cumsum(3)
        rows = before[:, :, bottom] - before[:, :, top]
        found.append(rows[..., right] - rows[..., left])
    kept, whole = found
    area = (bottom - top)[:, None] * (right - left)
    return torch.where(whole == area, FULL, torch.where(kept > 0, PARTIAL, EMPTY))


def _listed(kinds: Tensor) -> BlockLists:
    """A list for each row of ``kinds``, of its kept columns from the last to the first."""
    kinds = kinds.flip(3)
    kept = (kinds != EMPTY).flatten()
    offsets = torch.zeros(kinds[..., 0].numel() + 1, dtype=torch.int32, device=kinds.device)
    torch.cumsum((kinds != EMPTY).sum(3).flatten(), 0, dtype=torch.int32, out=offsets[1:])
    blocks = torch.arange(kinds.shape[3], device=kinds.device).flip(0)
    words = (2 * blocks + (kinds == FULL)).flatten().int()
    place = torch.where(kept, kept.cumsum(0) - 1, len(kept))
    entries = torch.zeros(len(kept) + 1, dtype=torch.int32, device=kinds.device)
    return BlockLists(offsets, entries.scatter_(0, place, words))
