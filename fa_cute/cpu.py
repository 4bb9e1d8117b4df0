"""Attention on CPU tensors: the kernels' algorithm in torch, on the same graph of the mods.

For a tile of queries the KV blocks are visited from the last visible one down, as a kernel does.
With s a block of scores (scaled, modified, masked), m the running maximum and l the running sum,

    m' = max(m, rowmax s)      r = exp(m - m')      p = exp(s - m')
    l' = l r + rowsum p        O' = O r + p V

and at the end out = O / l, lse = m + ln l. Memory is linear in the lengths, in the backward too: a
tile of queries is recomputed there (``torch.utils.checkpoint``), and autograd differentiates the
graph as torch emits it, captured tensors included. m is a constant to autograd: out and lse do not
depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from fa_cute.mods.emit_torch import emit
from fa_cute.mods.trace import Traced
from fa_cute.spans import Bounds, KvSpans, kv_spans

# Keys a block, and about how many scores (of all heads) are alive at once: 4 MiB in fp32 stays near
# a core's cache, while a tile is still large enough to hide torch's call overhead.
TILE_N = 256
SCORES_A_TILE = 1 << 20


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """out ``(B, Sq, Hq, Dv)`` in q's dtype and lse ``(B, Hq, Sq)`` in fp32 (fp64 for fp64 inputs).

    The arguments are checked already; ``bounds`` holds causal and the window.
    Computes in fp32, for fp64 inputs in fp64. Differentiable in q, k, v and captured tensors.
    """
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    tile_m = tile_rows(q.shape[0] * q.shape[2])
    walk = _Walk(
        q=q.permute(0, 2, 1, 3).to(compute) * scale,
        k_blocks=k.permute(0, 2, 3, 1).to(compute).split(TILE_N, dim=3),
        v_blocks=v.permute(0, 2, 1, 3).to(compute).split(TILE_N, dim=2),
        bounds=bounds,
        score_mod=score_mod,
        mask_mod=mask_mod,
    )
    sources = [q, k, v, *(t for mod in (score_mod, mask_mod) if mod for t in mod.captured)]
    sources = [t for t in sources if t.requires_grad and torch.is_grad_enabled()]
    tiles = []
    for begin in range(0, max(1, bounds.seqlen_q), tile_m):
        end = min(begin + tile_m, bounds.seqlen_q)
        if sources:
            tiles.append(
                checkpoint(walk.tile, begin, end, use_reentrant=False, preserve_rng_state=False)
            )
        else:
            tiles.append(walk.tile(begin, end))
    out = torch.cat([tile[0] for tile in tiles], dim=2).permute(0, 2, 1, 3).to(q.dtype)
    lse = torch.cat([tile[1] for tile in tiles], dim=2)
    for source in sources:
        # An empty sum ties the result to inputs that no tile visited: their gradient is then zero.
        nothing = source.expand(0, *source.shape).sum()
        out, lse = out + nothing.to(out.dtype), lse + nothing.to(lse.dtype)
    return out.contiguous(), lse


def tile_rows(heads: int) -> int:
    """Queries a tile when ``heads`` (of all batches) are computed at once."""
    return max(16, min(512, SCORES_A_TILE // (TILE_N * max(1, heads))))


@dataclass(frozen=True)
class _Walk:
    """A call: scaled q ``(B, Hq, Sq, D)``, blocks of K ``(B, Hk, D, n)``, V ``(B, Hk, n, Dv)``."""

    q: torch.Tensor
    k_blocks: tuple[torch.Tensor, ...]
    v_blocks: tuple[torch.Tensor, ...]
    bounds: Bounds
    score_mod: Traced | None
    mask_mod: Traced | None

    def tile(self, q_begin: int, q_end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """out ``(B, Hq, m, Dv)`` and lse ``(B, Hq, m)`` of the queries ``[q_begin, q_end)``."""
        q = self.q[:, :, q_begin:q_end]
        batch, heads, rows, _ = q.shape
        row_max = q.new_full((batch, heads, rows), -torch.inf)
        row_sum = q.new_zeros((batch, heads, rows))
        acc = q.new_zeros((batch, heads, rows, self.v_blocks[0].shape[3]))
        spans = kv_spans(self.bounds, q_begin, q_end, TILE_N)
        for block in reversed(range(spans.begin, spans.end)):
            seen = self._seen(spans, block, q_begin, q_end)
            if seen is not None and not seen.any():
                continue
            scores, v = self._scores(q, block, seen, q_begin)
            new_max = torch.maximum(row_max, scores.detach().amax(dim=-1))
            # Only the subtrahend is made finite: the stored maximum of a row that has seen nothing
            # stays -inf, so that a later strongly negative score still becomes its maximum.
            finite = torch.where(new_max == -torch.inf, 0, new_max)
            rescale = torch.exp(row_max - finite)
            p = torch.exp_(scores - finite[..., None])
            row_sum = row_sum * rescale + p.sum(dim=-1)
            acc = acc * rescale[..., None] + _grouped(p, v)
            row_max = new_max
        blind = row_sum == 0
        row_sum = torch.where(blind, 1, row_sum)
        lse = torch.where(blind, -torch.inf, row_max + torch.log(row_sum))
        return acc / row_sum[..., None], lse

    def _seen(self, spans: KvSpans, block: int, q_begin: int, q_end: int) -> torch.Tensor | None:
        """Which scores of a block count, broadcastable to ``(B, Hq, m, n)``; None: all of them."""
        seen = None
        if not spans.middle_begin <= block < spans.middle_end:
            seen = self._inside(block, q_begin, q_end)
        if self.mask_mod is not None:
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
        return {
            "b": torch.arange(batch, dtype=torch.int32).view(-1, 1, 1, 1),
            "h": torch.arange(heads, dtype=torch.int32).view(1, -1, 1, 1),
            "q": torch.arange(q_begin, q_end, dtype=torch.int32).view(1, 1, -1, 1),
            "kv": torch.arange(kv_begin, kv_begin + size, dtype=torch.int32).view(1, 1, 1, -1),
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
        scores = _grouped(q, k)
        if self.score_mod is not None:
            if seen is not None:
                scores = torch.where(seen, scores, 0)
            where = self._positions(block, q_begin, q_begin + rows)
            modified = emit(*self.score_mod, score=scores, **where)
            scores = modified.to(scores.dtype).expand(scores.shape)
        return (scores if seen is None else torch.where(seen, scores, -torch.inf)), v


def _grouped(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left (B, Hq, m, x) @ right (B, Hk, x, y)``, a group of query heads on its own KV head."""
    batch, heads, rows, inner = left.shape
    groups = right.shape[1]
    product = left.reshape(batch, groups, heads // groups * rows, inner) @ right
    return product.view(batch, heads, rows, right.shape[3])
