"""Which blocks of a mask are kept: ``plan_mask`` and the lists that it makes.

Two passes. The first classifies super-tiles of FAN x FAN tiles by interval arithmetic
(``mods/intervals.py``); their counts are the one thing that the host waits for. The second looks
inside the kept ones and writes the lists. So work and memory follow what is kept, not S x S: a
document mask over a million tokens is a million super-tiles and a few hundred thousand tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_cute.host import configs
from fa_cute.host.block_mask import from_block_mask, is_block_mask
from fa_cute.host.problem import check_indexed
from fa_cute.mods.intervals import (
    EMPTY,
    FULL,
    PARTIAL,
    Analysis,
    Extents,
    Region,
    evaluated,
    region,
)
from fa_cute.mods.trace import Traced, trace_mask_mod
from fa_cute.plan import BlockLists as KernelLists

FAN = 8
# Tiles classified at once, and elements evaluated at once: what bounds the working memory.
TILES_AT_ONCE = 1 << 21
ELEMENTS_AT_ONCE = 1 << 23


class TileCounts(NamedTuple):
    """Tiles of all lists of a mask."""

    empty: int
    partial: int
    full: int


@dataclass(frozen=True, eq=False)
class BlockLists:
    """Kept blocks, a list after the other. List i is ``entries[offsets[i] : offsets[i + 1]]``.

    ``offsets`` int32 ``(lists + 1,)``; ``entries`` int32, each ``2 * block + full``, where a full
    block needs no mask. ``entries`` may go on past the last list.
    """

    offsets: Tensor
    entries: Tensor


@dataclass(frozen=True, eq=False)
class MaskBlocks:
    """A mask with its kept blocks, for any number of calls: ``attention(..., mask_mod=blocks)``.

    ``extents`` are the sizes it is for; ``batch`` and ``heads`` how many batches and heads have
    lists of their own (1 stands for all). ``tile`` is (queries, keys). Query tile t of (b, h) has
    list ``(b * heads + h) * query_tiles + t`` of ``by_query``, which goes from the last block of
    keys to the first; key tile t has list ``(b * heads + h) * key_tiles + t`` of ``by_key``, from
    the first tile of queries to the last (b and h are 0 where 1 stands for all). Causal and window
    are no part of it. Calling it calls the mask function.
    """

    mask_mod: Callable
    traced: Traced
    extents: Extents
    batch: int
    heads: int
    tile: tuple[int, int]
    by_query: BlockLists
    by_key: BlockLists
    evaluated: bool
    _counts: list[TileCounts] = field(default_factory=list, repr=False)
    _lists: dict[tuple[int, int], KernelLists] = field(default_factory=dict, repr=False)

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return self.mask_mod(b, h, q, kv)

    @property
    def query_tiles(self) -> int:
        """Tiles of queries a head."""
        return -(-self.extents.seqlen_q // self.tile[0])

    @property
    def key_tiles(self) -> int:
        """Blocks of keys a head."""
        return -(-self.extents.seqlen_k // self.tile[1])

    def lists_for(self, batch: int, heads: int) -> KernelLists:
        """The lists of ``by_query`` as a kernel reads them, for a call of these sizes."""
        found = self._lists.get((batch, heads))
        if found is None:
            found = self._lists[batch, heads] = self._expanded(batch, heads)
        return found

    def _expanded(self, batch: int, heads: int) -> KernelLists:
        offsets = self.by_query.offsets
        shape = (self.batch, self.heads, self.query_tiles)
        order = offsets.diff().view(shape).sort(dim=-1, stable=True).indices.int()
        tables = (offsets[:-1].view(shape), offsets[1:].view(shape), order)
        tables = (table.expand(batch, heads, -1) for table in tables)
        return KernelLists(*tables, self.by_query.entries)

    def counts(self) -> TileCounts:
        """How many tiles are empty, partial and full; waits for the device the first time."""
        if not self._counts:
            kept = int(self.by_query.offsets[-1])
            full = int((self.by_query.entries[:kept] & 1).sum())
            tiles = self.batch * self.heads * self.query_tiles * self.key_tiles
            self._counts.append(TileCounts(tiles - kept, kept - full, full))
        return self._counts[0]

    def kinds(self) -> Tensor:
        """The tile map, int8 ``(batch, heads, query tiles, key tiles)``: EMPTY, PARTIAL or FULL."""
        shape = (self.batch, self.heads, self.query_tiles, self.key_tiles)
        lengths = self.by_query.offsets.diff().long()
        entries = self.by_query.entries[: int(lengths.sum())].long()
        kinds = torch.zeros(shape, dtype=torch.int8, device=entries.device)
        if entries.numel():
            rows = torch.arange(len(lengths), device=entries.device).repeat_interleave(lengths)
            flat = kinds.view(-1, shape[3])
            flat[rows, entries >> 1] = ((entries & 1) + PARTIAL).to(torch.int8)
        return kinds


def plan_mask(
    mask_mod: Callable,
    B: int | None,
    H: int | None,
    Sq: int,
    Sk: int,
    *,
    device: torch.device | str | None = None,
    head_dim: int = 128,
    tile: tuple[int, int] | None = None,
) -> MaskBlocks:
    """Find the blocks that a mask keeps, once for many calls.

    mask_mod: ``(b, h, q, kv) -> bool``, or a ``BlockMask`` of FlexAttention for these sizes.

    B, H: batches and query heads (None for a mask that does not read b, or h); Sq, Sk: lengths.
    ``device``: where the lists live, by default where the captured tensors are. The tile is that of
    the kernel for ``head_dim``; ``tile=(queries, keys)`` sets it. The captured tensors are read
    now: plan again when their contents change. The host waits for the device once.

    ValueError: negative sizes, an axis that the mask reads and that has no size, a captured tensor
    elsewhere or too small for an index.
    """
    if is_block_mask(mask_mod):
        mask_mod = from_block_mask(mask_mod, (B, H, Sq, Sk))
    traced = trace_mask_mod(mask_mod)
    reads = traced.graph.dependence()[traced.graph.result]
    for name, size, leaf in (("B", B, "b"), ("H", H, "h")):
        if size is None and leaf in reads:
            raise ValueError(f"{name} is None, but the mask_mod reads {leaf}: give its size")
    extents = Extents(1 if B is None else B, 1 if H is None else H, Sq, Sk)
    for name, size in zip(("B", "H", "Sq", "Sk"), extents, strict=True):
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ValueError(f"{name} is {size!r}; it must be an integer, 0 or more")
    device = _device_of(traced, device)
    check_indexed(extents, "mask_mod", traced)
    if tile is None:
        config = configs.fwd_sm90(head_dim, head_dim, cut=False, modified=True)
        tile = (config.tile_m, config.tile_n)
    pair = isinstance(tile, tuple | list) and len(tile) == 2
    if not pair or not all(isinstance(size, int) and size > 0 for size in tile):
        raise ValueError(f"tile is {tile!r}; it must be two positive integers, (queries, keys)")
    own = extents.batch if "b" in reads else 1, extents.heads if "h" in reads else 1
    evaluates = False
    if extents.empty:
        counts = (own[0] * own[1] * -(-n // size) for n, size in zip((Sq, Sk), tile, strict=True))
        lists = tuple(_nothing(count, device) for count in counts)
    else:
        analysis = Analysis.of(traced, extents, device)
        lists, evaluates = _Grid(traced, analysis, extents, *own, tile).lists(), analysis.opaque
    return MaskBlocks(mask_mod, traced, extents, *own, tile, *lists, evaluates)


def _nothing(lists: int, device: torch.device) -> BlockLists:
    """So many empty lists."""
    empty = {"dtype": torch.int32, "device": device}
    return BlockLists(torch.zeros(lists + 1, **empty), torch.empty(0, **empty))


def _device_of(traced: Traced, device: torch.device | str | None) -> torch.device:
    homes = {tensor.device for tensor in traced.captured}
    if device is None:
        device = next(iter(homes), torch.device("cpu"))
    device = torch.empty(0, device=device).device
    for home in homes - {device}:
        raise ValueError(
            f"a captured tensor of the mask_mod is on {home}, not on {device}: move it there"
        )
    return device


@dataclass(frozen=True, eq=False)
class _Grid:
    """The tiles of a mask, and the super-tiles over them."""

    traced: Traced
    analysis: Analysis
    extents: Extents
    batch: int
    heads: int
    tile: tuple[int, int]

    @property
    def fine(self) -> tuple[int, int]:
        """Tiles of queries and of keys."""
        return tuple(-(-n // size) for n, size in zip(self.extents[2:], self.tile, strict=True))

    @property
    def coarse(self) -> tuple[int, int]:
        """Super-tiles of queries and of keys."""
        return tuple(-(-n // FAN) for n in self.fine)

    @torch.no_grad()
    def lists(self) -> tuple[BlockLists, BlockLists]:
        """Both passes: the kept blocks by query tile and by key tile."""
        kinds = self.first_pass()
        count = torch.stack([(kinds == kind).sum() for kind in (PARTIAL, FULL)])
        partial, full = count.tolist()  # the one wait
        capacity = (partial + full) * FAN * FAN
        if capacity >= 2**31:
            raise ValueError(
                f"the mask may keep {capacity} tiles of {self.tile}; lists hold fewer than 2^31: "
                "plan larger tiles, or parts of the batch"
            )
        at = torch.cat([_compact(kinds == PARTIAL, partial), _compact(kinds == FULL, full)])
        place = self.placed(at)
        inner = self.second_pass(place, partial)
        return (
            self.listed(place, inner, self.coarse, self.fine, descending=True),
            self.listed(
                (place[0], place[2], place[1]),
                inner.transpose(1, 2),
                self.coarse[::-1],
                self.fine[::-1],
                descending=False,
            ),
        )

    def first_pass(self) -> Tensor:
        """Kinds of the super-tiles, flat over (batch, heads, queries, keys)."""
        device, (rows, columns) = self.analysis.device, self.coarse
        b, h = (torch.arange(n, device=device) for n in (self.batch, self.heads))
        size = (self.tile[0] * FAN, self.tile[1] * FAN)
        kv = torch.arange(columns, device=device)
        step = max(1, TILES_AT_ONCE // (self.batch * self.heads * columns))
        parts = []
        for begin in range(0, rows, step):
            q = torch.arange(begin, min(begin + step, rows), device=device)
            place = (b.view(-1, 1, 1, 1), h.view(-1, 1, 1), q.view(-1, 1), kv)
            parts.append(self.analysis.visible(region(self.extents, size, place)))
        return torch.cat(parts, dim=2).flatten()

    def placed(self, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(batch and head, query super-tile, key super-tile) of flat positions."""
        rows, columns = self.coarse
        return at // (rows * columns), at // columns % rows, at % columns

    def second_pass(self, place: tuple[Tensor, Tensor, Tensor], partial: int) -> Tensor:
        """Kinds of the tiles in each kept super-tile ``(kept, FAN, FAN)``; partial ones first."""
        device, (rows, columns) = self.analysis.device, self.fine
        head, q, kv = place
        fan = torch.arange(FAN, device=device)
        q, kv = q[:, None] * FAN + fan, kv[:, None] * FAN + fan
        kinds = torch.full((len(head), FAN, FAN), FULL, dtype=torch.int8, device=device)
        elements = self.tile[0] * self.tile[1] * FAN * FAN
        step = TILES_AT_ONCE // FAN**2
        if self.analysis.opaque:
            step = max(1, ELEMENTS_AT_ONCE // elements)
        for begin in range(0, partial, step):
            part = slice(begin, min(begin + step, partial))
            at = head[part, None, None]
            place = (at // self.heads, at % self.heads, q[part, :, None], kv[part, None, :])
            kinds[part] = self.told(region(self.extents, self.tile, place))
        inside = (q < rows)[:, :, None] & (kv < columns)[:, None, :]
        return torch.where(inside, kinds, EMPTY)

    def told(self, tiles: Region) -> Tensor:
        """The kinds of tiles: by bounds, or by evaluation where bounds cannot tell much."""
        if self.analysis.opaque:
            return evaluated(self.traced, tiles, self.tile)
        return self.analysis.visible(tiles)

    def listed(
        self,
        place: tuple[Tensor, Tensor, Tensor],
        inner: Tensor,
        coarse: tuple[int, int],
        fine: tuple[int, int],
        *,
        descending: bool,
    ) -> BlockLists:
        """Lists for the first axis of ``inner (kept, FAN, FAN)``, holding tiles of the second.

        Super-tiles are sorted by row and then by column; the slot of each tile then follows from
        counts alone, so no tile is sorted.
        """
        head, row, column = place
        device, (rows, columns) = head.device, coarse
        row = head * rows + row
        key = row * columns + (columns - 1 - column if descending else column)
        order = key.argsort()
        row, column, inner = row[order], column[order], inner[order]
        fan = torch.arange(FAN, device=device)
        block = column[:, None] * FAN + fan
        if descending:
            block, inner = block.flip(1), inner.flip(2)
        lists = self.batch * self.heads * rows
        widths = torch.zeros(lists, dtype=torch.int64, device=device)
        widths.index_add_(0, row, torch.ones_like(row))
        starts = widths.cumsum(0) - widths
        rank = torch.arange(len(row), device=device) - starts[row]
        first = starts[row] * FAN + rank
        slot = first[:, None] + fan * widths[row][:, None]
        kinds = torch.zeros((len(row) * FAN, FAN), dtype=torch.int8, device=device)
        blocks = torch.zeros((len(row) * FAN, FAN), dtype=torch.int32, device=device)
        kinds[slot] = inner
        blocks[slot] = block.int()[:, None, :].expand(-1, FAN, -1)
        entries = 2 * blocks.flatten() + (kinds.flatten() == FULL)
        kept = kinds.flatten() != EMPTY
        before = torch.zeros(len(kept) + 1, dtype=torch.int32, device=device)
        torch.cumsum(kept, 0, dtype=torch.int32, out=before[1:])
        begins = (starts[:, None] * FAN + fan * widths[:, None]) * FAN
        begins = begins.view(self.batch * self.heads, -1)[:, : fine[0]].flatten()
        offsets = torch.cat([before[begins], before[-1:]])
        target = torch.where(kept, before[:-1], len(kept)).long()
        packed = torch.zeros(len(kept) + 1, dtype=torch.int32, device=device)
        packed.scatter_(0, target, entries.int())
        return BlockLists(offsets, packed[:-1])


def _compact(chosen: Tensor, count: int) -> Tensor:
    """The positions of the ``count`` True elements, in order, without asking the device."""
    place = chosen.cumsum(0) - 1
    place = torch.where(chosen, place, count)
    found = torch.zeros(count + 1, dtype=torch.int64, device=chosen.device)
    found.scatter_(0, place, torch.arange(len(chosen), device=chosen.device))
    return found[:-1]
