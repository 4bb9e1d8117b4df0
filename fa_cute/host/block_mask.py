"""FlexAttention's ``BlockMask`` as a mask function.

It is more than its ``mask_mod``: a block that its lists leave out is hidden, one in its full lists
is visible whatever the function says. So the function reads both, from a table of a byte a block.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa_cute.host.workspace import made_once
from fa_cute.mods.intervals import FULL, PARTIAL

_converted: weakref.WeakKeyDictionary[Any, dict[int, Callable]] = weakref.WeakKeyDictionary()


def is_block_mask(mask: Any) -> bool:
    """Whether it is FlexAttention's ``BlockMask``, told without importing FlexAttention."""
    kind = type(mask)
    return kind.__name__ == "BlockMask" and kind.__module__.startswith("torch.")


def from_block_mask(mask: Any, call: tuple | None = None) -> Callable:
    """FlexAttention's ``BlockMask`` as a mask function of the same meaning; made once a stream.

    ``call`` is (B, Hq, Sq, Sk), None where it does not matter: ValueError if it is for others, or
    if it is a slice, whose lists are of fewer queries than it says.
    """
    rows, length = mask.BLOCK_SIZE[0], mask.seq_lengths[0]
    held, needed = mask.kv_num_blocks.shape[2], -(-length // rows)
    if held != needed:
        raise ValueError(
            f"the BlockMask has lists of {held} blocks of {rows} queries, but its {length} queries "
            f"are {needed}: it is a slice of another; make one for the queries of the call"
        )
    if call is not None:
        batches = tuple(mask.kv_num_blocks.shape[:2])
        check_sizes("the BlockMask", (*batches, *mask.seq_lengths), batches, call)
    known = _converted.setdefault(mask, {})
    return made_once(known, mask.kv_num_blocks.device, lambda: _from_block_mask(mask))


def check_sizes(name: str, sizes: tuple, kept: tuple[int, int], call: tuple) -> None:
    """ValueError unless a mask for ``sizes`` (B, Hq, Sq, Sk) serves a call of sizes ``call``.

    ``kept`` is how many batches and heads the mask tells apart; 1 serves any number.
    """
    axes = ("batch", "number of query heads", "number of queries", "number of keys")
    for at, (axis, made_for, given) in enumerate(zip(axes, sizes, call, strict=True)):
        serves_any = at < 2 and (kept[at] == 1 or given is None)
        if made_for != given and not serves_any:
            raise ValueError(
                f"{name} was made for a {axis} of {made_for}, but this call has {given}: make one "
                "for these sizes"
            )


def _from_block_mask(mask: Any) -> Callable:
    rows, keys = mask.BLOCK_SIZE
    table = table_of(mask)
    inner, (batch, heads) = mask.mask_mod, table.shape[:2]

    def block_mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        kind = table[b if batch > 1 else 0, h if heads > 1 else 0, q // rows, kv // keys]
        return (kind == FULL) | ((kind == PARTIAL) & inner(b, h, q, kv))

    return block_mask


def table_of(mask: Any) -> Tensor:
    """The kind of each block by the lists: ``(batch, heads, query blocks, key blocks)`` uint8."""
    columns = -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])
    counts = mask.kv_num_blocks
    shape = (*counts.shape, columns + 1)
    table = torch.zeros(shape, dtype=torch.uint8, device=counts.device)
    lists = (
        (PARTIAL, counts, mask.kv_indices),
        (FULL, mask.full_kv_num_blocks, mask.full_kv_indices),
    )
    for kind, count, blocks in lists:
        if count is not None:
            place = torch.arange(blocks.shape[-1], device=counts.device)
            # Slots beyond a list's count hold anything: they go to a column that is cut off.
            blocks = torch.where(place < count[..., None], blocks, columns)
            table.scatter_(3, blocks.long(), kind)
    return table[..., :columns].contiguous()
