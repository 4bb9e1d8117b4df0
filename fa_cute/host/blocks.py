"""Which blocks of a mask are kept: ``plan_mask`` and the lists that it makes.

Two passes. The first classifies super-tiles of FAN x FAN tiles by interval arithmetic
(``mods/intervals.py``); their counts are the one thing that the host waits for. The second looks
inside the kept ones and writes the lists. So work and memory follow what is kept, not S x S: a
document mask over a million tokens is a million super-tiles and a few hundred thousand tiles.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_cute.host import configs
from fa_cute.host.backward_configs import bwd_sm90
from fa_cute.host.block_mask import from_block_mask, is_block_mask
from fa_cute.host.planning import CONFIGS
from fa_cute.host.problem import MAX_LENGTH, check_indexed
from fa_cute.host.target import target_for
from fa_cute.host.untraced import untraced
from fa_cute.host.workspace import made_once
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
    block needs no mask. ``entries`` goes on past the last list, by one at least: a kernel reads
    behind a list that is empty, and torch gives a tensor without elements no address.
    """

    offsets: Tensor
    entries: Tensor


@dataclass(frozen=True, eq=False)
class MaskBlocks:
    """A mask with its kept blocks, for any number of calls: ``attention(..., mask_mod=blocks)``.

    ``extents`` are the sizes it is for; ``batch`` and ``heads`` how many batches and heads have
    lists of their own (1 stands for all). ``tile`` is the forward's (queries, keys), ``key_tile``
    the backward's. Tile t of queries of (b, h) has list ``(b * heads + h) * tiles + t`` of
    ``by_query``, blocks of keys; tile t of keys likewise of ``by_key``, blocks of queries (b and h
    are 0 where 1 stands for all). All lists go from the last block to the first. Causal and window
    are no part of it. Calling it calls the mask function.
    """

    mask_mod: Callable
    traced: Traced
    extents: Extents
    batch: int
    heads: int
    tile: tuple[int, int]
    key_tile: tuple[int, int]
    by_query: BlockLists
    by_key: BlockLists
    evaluated: bool
    _counts: list[TileCounts] = field(default_factory=list, repr=False)
    _lists: dict[tuple, dict[int, KernelLists]] = field(default_factory=dict, repr=False)
    _turns: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return self.mask_mod(b, h, q, kv)

    @property
    def query_tiles(self) -> int:
        """Tiles of queries a head, in the forward."""
        return -(-self.extents.seqlen_q // self.tile[0])

    @property
    def key_tiles(self) -> int:
        """Blocks of keys a head, in the forward."""
        return -(-self.extents.seqlen_k // self.tile[1])

    def lists_for(self, batch: int, heads: int) -> KernelLists:
        """The lists of ``by_query`` as a forward reads them, for a call of these sizes."""
        return self._read(self.by_query, batch, heads, 1)

    def key_lists_for(
        self, batch: int, heads: int, ratio: int, *, turns: bool = False
    ) -> KernelLists:
        """The lists of ``by_key`` as a backward reads them; ``ratio`` heads share a key head.

        ``turns``: with those of a deterministic one.
        """
        found = self._read(self.by_key, batch, heads, ratio)
        if not turns:
            return found
        lists = self.by_key
        made = made_once(self._turns, lists.offsets.device, lambda: self._turns_of(lists))
        return found._replace(turns=made)

    def _turns_of(self, lists: BlockLists) -> Tensor:
        """int32 (entries,): how many lists of the head before an entry's have its block, too.

        Entries of one block stay in the order of their lists when they are sorted by block.
        """
        at = torch.arange(len(lists.entries), device=lists.entries.device)
        tiles = (len(lists.offsets) - 1) // (self.batch * self.heads)
        head = torch.searchsorted(lists.offsets[1:], at, right=True, out_int32=True) // tiles
        block = head.long() * 2**31 + (lists.entries >> 1)
        block, order = block.sort(stable=True)
        rank = at - torch.searchsorted(block, block)
        return torch.empty_like(lists.entries).scatter_(0, order, rank.int())

    def _read(self, lists: BlockLists, *sizes: int) -> KernelLists:
        """``lists`` for a call of ``sizes``: batch, heads, and how many of these share a tile."""
        known = self._lists.setdefault((lists is self.by_key, *sizes), {})
        return made_once(known, lists.offsets.device, lambda: self._ordered(lists, *sizes))

    def _ordered(self, lists: BlockLists, batch: int, heads: int, ratio: int) -> KernelLists:
        shape = self.batch, self.heads, -1
        begin, end = (x.view(shape) for x in (lists.offsets[:-1], lists.offsets[1:]))
        lengths = end - begin
        if self.heads > 1:
            lengths = lengths.view(self.batch, heads // ratio, ratio, -1).sum(2)
        # By the power of two: tiles of one bin lie side by side and share keys in L2, which
        # an order by the length itself tears apart (documents, S16k, d128: 0.348 and 0.326 ms).
        _, bins = torch.frexp(lengths.float())
        order = bins.sort(dim=-1, stable=True).indices.int()
        return KernelLists(
            begin.expand(batch, heads, -1),
            end.expand(batch, heads, -1),
            order.expand(batch, heads // ratio, -1),
            lists.entries,
        )

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


@untraced
def plan_mask(
    mask_mod: Callable | Traced,
    B: int | None,
    H: int | None,
    Sq: int,
    Sk: int,
    *,
    device: torch.device | str | None = None,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    tile: tuple[int, int] | None = None,
) -> MaskBlocks:
    """Find the blocks that a mask keeps, once for many calls.

    mask_mod: ``(b, h, q, kv) -> bool``, traced or not, or a ``BlockMask`` of FlexAttention for
    these sizes.

    B, H: batches and query heads (None for a mask that does not read b, or h); Sq, Sk: lengths.
    ``device``: where the lists live, by default where the captured tensors are. The tiles are those
    of the kernels for ``head_dim`` (and ``head_dim_v``, if it is another), forward and backward;
    ``tile=(queries, keys)`` sets both. The captured tensors are read now: plan again when their
    contents change. The host waits for the device once.

    ValueError: negative sizes, an axis that the mask reads and that has no size, a captured tensor
    elsewhere or too small for an index.
    """
    if is_block_mask(mask_mod):
        mask_mod = from_block_mask(mask_mod, (B, H, Sq, Sk))
    traced = mask_mod if isinstance(mask_mod, Traced) else trace_mask_mod(mask_mod)
    reads = traced.graph.dependence()[traced.graph.result]
    for name, size, leaf in (("B", B, "b"), ("H", H, "h")):
        if size is None and leaf in reads:
            raise ValueError(f"{name} is None, but the mask_mod reads {leaf}: give its size")
    extents = Extents(1 if B is None else B, 1 if H is None else H, Sq, Sk)
    extents = Extents(*map(_size, ("B", "H", "Sq", "Sk"), extents))
    device = _device_of(traced, device)
    check_indexed(extents, "mask_mod", traced)
    tiles = tiles_of((head_dim, head_dim if head_dim_v is None else head_dim_v), device, tile)
    own = extents.batch if "b" in reads else 1, extents.heads if "h" in reads else 1
    evaluates = False
    if extents.empty:
        rows = -(-Sq // tiles[0][0]), -(-Sk // tiles[1][1])
        lists = tuple(_nothing(own[0] * own[1] * count, device) for count in rows)
    else:
        analysis = Analysis.of(traced, extents, device)
        grids = [_Grid(traced, analysis, extents, *own, size) for size in dict.fromkeys(tiles)]
        lists, evaluates = _lists(grids), analysis.opaque
    return MaskBlocks(mask_mod, traced, extents, *own, *tiles, *lists, evaluates)


def _size(name: str, size: Any) -> int:
    """A size of the problem as an int of Python; ValueError for what none can be."""
    whole = hasattr(size, "__index__") and not isinstance(size, bool | Tensor)
    if not whole or size < 0:
        raise ValueError(f"{name} is {size!r}; it must be an integer, 0 or more")
    if name in ("Sq", "Sk") and size > MAX_LENGTH:
        raise ValueError(f"{name} is {size}; at most 2^30 positions work")
    return operator.index(size)


def tiles_of(
    head_dims: tuple[int, int], device: torch.device, tile: tuple[int, int] | None = None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The tiles (queries, keys) of the forward and of the backward under a mask."""
    if tile is None:
        choose = CONFIGS.get(target_for(device), configs.fwd_sm90)
        forward = choose(*head_dims, cut=False, modified=True)
        backward = bwd_sm90(*head_dims, cut=False, modified=True)
        return (forward.tile_m, forward.tile_n), (backward.tile_q, backward.tile_kv)
    pair = isinstance(tile, tuple | list) and len(tile) == 2
    if not pair or not all(isinstance(size, int) and size > 0 for size in tile):
        raise ValueError(f"tile is {tile!r}; it must be two positive integers, (queries, keys)")
    return tuple(tile), tuple(tile)


@torch.no_grad()
def _lists(grids: list[_Grid]) -> tuple[BlockLists, BlockLists]:
    """Both passes: by query tile of the first grid and by key tile of the last (or only) one."""
    kinds = [grid.first_pass() for grid in grids]
    count = torch.stack([(found == kind).sum() for found in kinds for kind in (PARTIAL, FULL)])
    counts = count.view(-1, 2).tolist()  # the one wait
    kept = [grid.kept(*found) for grid, *found in zip(grids, kinds, counts, strict=True)]
    first, last = grids[0], grids[-1]
    by_query = first.listed(kept[0], first.coarse, first.fine)
    return by_query, last.listed(kept[-1].turned(), last.coarse[::-1], last.fine[::-1])


def _nothing(lists: int, device: torch.device) -> BlockLists:
    """So many empty lists."""
    empty = {"dtype": torch.int32, "device": device}
    return BlockLists(torch.zeros(lists + 1, **empty), torch.zeros(1, **empty))


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


class Kept(NamedTuple):
    """Super-tiles: batch and head, row, column ``(kept,)``; kinds inside ``(kept, FAN, FAN)``."""

    head: Tensor
    row: Tensor
    column: Tensor
    kinds: Tensor

    def turned(self) -> Kept:
        """With columns for rows."""
        return Kept(self.head, self.column, self.row, self.kinds.transpose(1, 2))


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

    def kept(self, kinds: Tensor, counts: list[int]) -> Kept:
        """The ``counts`` (partial, full) super-tiles of ``kinds`` that are kept."""
        partial, full = counts
        capacity = (partial + full) * FAN * FAN
        if capacity >= 2**31:
            raise ValueError(
                f"the mask may keep {capacity} tiles of {self.tile}; lists hold fewer than 2^31: "
                "plan larger tiles, or parts of the batch"
            )
        at = torch.cat([_compact(kinds == PARTIAL, partial), _compact(kinds == FULL, full)])
        place = self.placed(at)
        return Kept(*place, self.second_pass(place, partial))

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

    def listed(self, kept: Kept, coarse: tuple[int, int], fine: tuple[int, int]) -> BlockLists:
        """A list for each row of ``kept``, of its columns from the last to the first.

        Super-tiles are sorted by row and then by column; the slot of each tile then follows from
        counts alone, so no tile is sorted.
        """
        head, row, column, inner = kept
        device, (rows, columns) = head.device, coarse
        row = head * rows + row
        order = (row * columns + (columns - 1 - column)).argsort()
        row, column, inner = row[order], column[order], inner[order].flip(2)
        fan = torch.arange(FAN, device=device)
        block = (column[:, None] * FAN + fan).flip(1)
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
        return BlockLists(offsets, packed)


def _compact(chosen: Tensor, count: int) -> Tensor:
    """The positions of the ``count`` True elements, in order, without asking the device."""
    place = chosen.cumsum(0) - 1
    place = torch.where(chosen, place, count)
    found = torch.zeros(count + 1, dtype=torch.int64, device=chosen.device)
    found.scatter_(0, place, torch.arange(len(chosen), device=chosen.device))
    return found[:-1]
