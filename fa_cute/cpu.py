"""Attention on CPU tensors: the kernels' algorithm in torch, on the same graph of the mods.

For a tile of queries the KV blocks are visited from the last visible one down, as a kernel does.
With s a block of scores (scaled, modified, masked), m the running maximum and l the running sum,

    m' = max(m, rowmax s)      r = exp(m - m')      p = exp(s - m')
    l' = l r + rowsum p        O' = O r + p V

and at the end out = O / l, lse = m + ln l. Memory is linear in the lengths, in the backward too: a
tile of queries is recomputed there (``torch.utils.checkpoint``), and autograd differentiates the
graph as torch emits it, captured tensors included. m is a constant to autograd: out and lse do not
depend on it. A sink is one more score of a row, without a value: it joins m and l at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from fa_cute.mods.emit_torch import emit
from fa_cute.mods.intervals import EMPTY, FULL, PARTIAL, Analysis, Extents, region
from fa_cute.mods.trace import Traced
from fa_cute.spans import Bounds, KvSpans, kv_spans

# Keys a block, and about how many scores (of all heads) are alive at once: 4 MiB in fp32 stays near
# a core's cache, while a tile is still large enough to hide torch's call overhead.
TILE_N = 256
SCORES_A_TILE = 1 << 20
CPU = torch.device("cpu")  # named at each tensor: torch.set_default_device may say another


@torch.autocast("cpu", enabled=False)  # the products of a tile stay in fp32
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bounds: Bounds,
    scale: float,
    score_mod: Traced | None = None,
    mask_mod: Traced | None = None,
    sinks: torch.Tensor | None = None,
    skip: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out ``(B, Sq, Hq, Dv)`` in q's dtype and lse ``(B, Hq, Sq)`` in fp32 (fp64 for fp64 inputs).

    The arguments are checked already; ``bounds`` holds causal and the window, ``sinks`` ``(Hq,)``
    logits. ``skip``: leave out tiles that the mods are proved to hide, and the mask where it is
    proved to hide nothing; the result is the same bit for bit.
    Computes in fp32, for fp64 inputs in fp64. Differentiable in q, k, v, sinks, captured tensors.
    """
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    tile_m = tile_rows(q.shape[0] * q.shape[2])
    walk = _Walk(
        q=q.permute(0, 2, 1, 3).to(compute) * scale,
        k_blocks=k.permute(0, 2, 3, 1).to(compute).split(TILE_N, dim=3),
        v_blocks=v.permute(0, 2, 1, 3).to(compute).split(TILE_N, dim=2),
        bounds=bounds,
        score_mod=score_mod and score_mod._replace(captured=_learned(score_mod.captured)),
        mask_mod=mask_mod,
        sinks=None if sinks is None else sinks.to(compute),
    )
    sources = [q, k, v, *(t for mod in (score_mod, mask_mod) if mod for t in mod.captured)]
    sources += [] if sinks is None else [sinks]
    sources = [t for t in sources if t.requires_grad and torch.is_grad_enabled()]
    extents = Extents(q.shape[0], q.shape[2], bounds.seqlen_q, bounds.seqlen_k)
    kinds = _proved(extents, tile_m, score_mod, mask_mod) if skip else None
    tiles = []
    for at, begin in enumerate(range(0, max(1, bounds.seqlen_q), tile_m)):
        place = begin, min(begin + tile_m, bounds.seqlen_q), kinds and kinds[at]
        if sources:
            tiles.append(
                checkpoint(walk.tile, *place, use_reentrant=False, preserve_rng_state=False)
            )
        else:
            tiles.append(walk.tile(*place))
    out = torch.cat([tile[0] for tile in tiles], dim=2).permute(0, 2, 1, 3).to(q.dtype)
    lse = torch.cat([tile[1] for tile in tiles], dim=2)
    for source in sources:
        # An empty sum ties the result to inputs that no tile visited: their gradient is then zero.
        nothing = source.expand(0, *source.shape).sum()
        out, lse = out + nothing.to(out.dtype), lse + nothing.to(lse.dtype)
    return out.contiguous(), lse


def _learned(captured: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """``captured`` with what is learned in fp32 at least: a sum of a gradient in bf16 stands still.

    Of 18 million terms of seven numbers it was 35 % off.
    """
    return tuple(
        t.float() if t.requires_grad and t.dtype.itemsize < 4 and torch.is_grad_enabled() else t
        for t in captured
    )


def tile_rows(heads: int) -> int:
    """Queries a tile when ``heads`` (of all batches) are computed at once."""
    return max(16, min(512, SCORES_A_TILE // (TILE_N * max(1, heads))))


def _proved(
    extents: Extents, tile_m: int, score_mod: Traced | None, mask_mod: Traced | None
) -> list[list[int]] | None:
    """EMPTY, PARTIAL or FULL for each tile of queries and block of keys, all heads together.

    None where nothing is to be proved: without mods, or with one block of keys.
    """
    if extents.empty or extents.seqlen_k <= TILE_N or (score_mod is None and mask_mod is None):
        return None
    rows = torch.arange(0, extents.seqlen_q, tile_m, device=CPU) // tile_m
    blocks = torch.arange(0, extents.seqlen_k, TILE_N, device=CPU) // TILE_N
    kinds = torch.full((1, 1, len(rows), len(blocks)), FULL, dtype=torch.int8, device=CPU)
    for mod in (score_mod, mask_mod):
        if mod is not None:
            analysis = Analysis.of(mod, extents, CPU)
            b = torch.arange(extents.batch if "b" in analysis.reads else 1, device=CPU)
            h = torch.arange(extents.heads if "h" in analysis.reads else 1, device=CPU)
            place = (b.view(-1, 1, 1, 1), h.view(-1, 1, 1), rows.view(-1, 1), blocks)
            tiles = region(extents, (tile_m, TILE_N), place)
            if mod is mask_mod:
                told = analysis.visible(tiles)
            else:
                told = torch.where(analysis.hidden(tiles), EMPTY, FULL)
            kinds = torch.minimum(kinds, told)
    kinds = kinds.flatten(0, 1)
    kept, whole = (kinds != EMPTY).any(0), (kinds == FULL).all(0)
    return (kept.int() + whole.int()).tolist()


@dataclass(frozen=True)
class _Walk:
    """A call: scaled q ``(B, Hq, Sq, D)``, blocks of K ``(B, Hk, D, n)``, V ``(B, Hk, n, Dv)``."""

    q: torch.Tensor
    k_blocks: tuple[torch.Tensor, ...]
    v_blocks: tuple[torch.Tensor, ...]
    bounds: Bounds
    score_mod: Traced | None
    mask_mod: Traced | None
    sinks: torch.Tensor | None

    def tile(
        self, q_begin: int, q_end: int, kinds: list[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out ``(B, Hq, m, Dv)`` and lse ``(B, Hq, m)`` of the queries ``[q_begin, q_end)``.

        ``kinds``: what is proved of each block of keys, or None.
        """
        q = self.q[:, :, q_begin:q_end]
        batch, heads, rows, _ = q.shape
        row_max = q.new_full((batch, heads, rows), -torch.inf)
        row_sum = q.new_zeros((batch, heads, rows))
        acc = q.new_zeros((batch, heads, rows, self.v_blocks[0].shape[3]))
        spans = kv_spans(self.bounds, q_begin, q_end, TILE_N)
        for block in reversed(range(spans.begin, spans.end)):
            kind = PARTIAL if kinds is None else kinds[block]
            if kind == EMPTY:
                continue
            seen = self._seen(spans, block, q_begin, q_end, masked=kind != FULL)
            if seen is not None and not seen.any():
                continue
            scores, v = self._scores(q, block, seen, q_begin)
            row_max, finite, rescale = _raised(row_max, scores.detach().amax(dim=-1))
            p = torch.exp_(scores - finite[..., None])
            row_sum = row_sum * rescale + p.sum(dim=-1)
            acc = acc * rescale[..., None] + _grouped(p, v)
        if self.sinks is not None:
            sink = self.sinks[None, :, None]
            row_max, finite, rescale = _raised(row_max, sink.detach())
            row_sum = row_sum * rescale + torch.exp(sink - finite)
            acc = acc * rescale[..., None]
        blind = row_sum == 0
        row_sum = torch.where(blind, 1, row_sum)
        lse = torch.where(blind, -torch.inf, row_max + torch.log(row_sum))
        return acc / row_sum[..., None], lse

    def _seen(
        self, spans: KvSpans, block: int, q_begin: int, q_end: int, *, masked: bool
    ) -> torch.Tensor | None:
        """Which scores of a block count, broadcastable to ``(B, Hq, m, n)``; None: all of them."""
        seen = None
        if not spans.middle_begin <= block < spans.middle_end:
            seen = self._inside(block, q_begin, q_end)
        if self.mask_mod is not None and masked:
            where = self._positions(block, q_begin, q_end)
            mask = emit(*self.mask_mod, **where)
            seen = mask if seen is None else seen & mask
        return seen

    def _inside(self, block: int, q_begin: int, q_end: int) -> torch.Tensor | None:
        """The causal and window bounds on a block, ``(1, 1, m, n)``; None where there are none."""
        left, right = self.bounds.left, self.bounds.right
        if left is None and right is None:
            return None
        where = self._positions(block, q_begin, q_end)
        distance = where["kv"].long() - where["q"].long()
        distance = distance - (self.bounds.seqlen_k - self.bounds.seqlen_q)
        if left is None:
            return distance <= right
        return distance >= -left if right is None else (distance >= -left) & (distance <= right)

    def _positions(self, block: int, q_begin: int, q_end: int) -> dict[str, torch.Tensor]:
        """The index leaves of a block of scores, each broadcastable to ``(B, Hq, m, n)``."""
        kv_begin, size = block * TILE_N, self.k_blocks[block].shape[3]
        batch, heads = self.q.shape[:2]
        integers = {"dtype": torch.int32, "device": CPU}
        return {
            "b": torch.arange(batch, **integers).view(-1, 1, 1, 1),
            "h": torch.arange(heads, **integers).view(1, -1, 1, 1),
            "q": torch.arange(q_begin, q_end, **integers).view(1, 1, -1, 1),
            "kv": torch.arange(kv_begin, kv_begin + size, **integers).view(1, 1, 1, -1),
        }

    def _scores(
        self, q: torch.Tensor, block: int, seen: torch.Tensor | None, q_begin: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The modified, masked scores of a block ``(B, Hq, m, n)``, and its V ``(B, Hk, n, Dv)``.

        Keys that no query of the tile sees are taken as zero, and scores that do not count as zero
        until the mod has run: whatever lies in such slots, NaN included, reaches neither the
        output (0 * NaN) nor a gradient.
        """
        k, v = self.k_blocks[block], self.v_blocks[block]
        batch, heads, rows, _ = q.shape
        if seen is not None:
            shape = (batch, k.shape[1], heads // k.shape[1], rows, k.shape[3])
            used = seen.expand(batch, heads, rows, k.shape[3]).reshape(shape).any(3).any(2)
            k = torch.where(used[:, :, None, :], k, 0)
            v = torch.where(used[..., None], v, 0)
        if self.mask_mod is not None:
            # One layout for the products whether the mask was evaluated or not: their order of
            # summation, and so the last bit, may depend on it.
            k, v = k.contiguous(), v.contiguous()
        scores = _grouped(q, k)
        if self.score_mod is not None:
            if seen is not None:
                scores = torch.where(seen, scores, 0)
            where = self._positions(block, q_begin, q_begin + rows)
            modified = emit(*self.score_mod, score=scores, **where)
            scores = modified.to(scores.dtype).expand(scores.shape)
        return (scores if seen is None else torch.where(seen, scores, -torch.inf)), v


def _raised(
    row_max: torch.Tensor, top: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The maximum with ``top`` in it, what to subtract from scores, and the factor on sums so far.

    Only the subtrahend is made finite: the stored maximum of a row that has seen nothing stays
    -inf, so that a later strongly negative score still becomes its maximum.
    """
    new_max = torch.maximum(row_max, top)
    finite = torch.where(new_max == -torch.inf, 0, new_max)
    return new_max, finite, torch.exp(row_max - finite)


def _grouped(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left (B, Hq, m, x) @ right (B, Hk, x, y)``, a group of query heads on its own KV head."""
    batch, heads, rows, inner = left.shape
    groups = right.shape[1]
    product = left.reshape(batch, groups, heads // groups * rows, inner) @ right
    return product.view(batch, heads, rows, right.shape[3])
