"""A small transformer on real text, trained four ways: ``python -m bench.training``.

Bytes of this repository's own documents and sources. The same weights and batches: attention by
torch's SDPA and by ours; then with a learned T5 bias, by SDPA with the bias as a materialised mask
and by ours. The loss curves of a pair lie on each other (bf16 rounds, and sums have other orders);
the bias starts at zero and learns. Printed, and written to a result file.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fa_cute.variants.t5_relative_bias import t5_relative_bias
from torch import Tensor, nn

import fa_cute
from bench.device import facts
from bench.results import Report, table

LENGTH, BATCH, WIDTH, HEADS, LAYERS, BUCKETS = 512, 16, 256, 4, 4, 32
WINDOW = 20  # steps that a point of the smoothed curve is the mean of
Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def by_ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Causal attention ``(B, S, H, D)``; ``bias`` is T5's table ``(buckets, H)``."""
    score_mod = None if bias is None else t5_relative_bias(bias)
    return fa_cute.attention(q, k, v, score_mod=score_mod, causal=True)


def by_torch(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """The same by SDPA, whose bias is a materialised mask."""
    mask = None
    if bias is not None:
        place = torch.arange(q.shape[1], device=q.device)
        heads = torch.arange(q.shape[2], device=q.device).view(-1, 1, 1)
        index = place.view(-1, 1), place.view(1, -1)
        mask = t5_relative_bias(bias)(torch.zeros((), device=q.device), 0, heads, *index)
        mask = mask.masked_fill(index[1] > index[0], -math.inf).to(q.dtype)
    turned = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*turned, attn_mask=mask, is_causal=bias is None)
    return out.transpose(1, 2)


class Block(nn.Module):
    """Attention and a two-layer perceptron, normed before."""

    def __init__(self, attention: Attention, biased: bool) -> None:
        super().__init__()
        self.attention = attention
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(BUCKETS, HEADS)) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(2, (3, HEADS, -1)).unbind(2)
        x = x + self.out(self.attention(q, k, v, self.bias).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Bytes in, logits of the next byte out: no other notion of place than attention's."""

    def __init__(self, attention: Attention, biased: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block(attention, biased) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def corpus() -> Tensor:
    """The repository's documents and sources as bytes, in the order of their names."""
    root = Path(__file__).resolve().parent.parent
    paths = [p for p in sorted(root.rglob("*")) if p.suffix in (".md", ".py")]
    folders = ("fa_cute", "docs", "tests", "bench", "variants")
    kept = [p for p in paths if p.relative_to(root).parts[0] in folders]
    return torch.tensor(list(b"\n".join(p.read_bytes() for p in kept)), dtype=torch.uint8)


def train(attention: Attention, *, biased: bool, steps: int, device: str) -> dict[str, Any]:
    """Losses step by step, and how far the bias went from zero."""
    text, model = corpus().to(device), Model(attention, biased).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(1)
    losses, begin = [], time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 50)
        first = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=generator)
        batch = text[(first + torch.arange(LENGTH + 1)).to(device)].long()
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses).tolist()
    moved = None
    if biased:
        moved = [float(block.bias.detach().abs().mean()) for block in model.blocks]
    seconds = time.perf_counter() - begin
    return {"losses": losses, "bias_mean_size": moved, "seconds": round(seconds, 2)}


def smooth(losses: list[float]) -> Tensor:
    """Means over ``WINDOW`` steps."""
    kept = len(losses) // WINDOW * WINDOW
    return torch.tensor(losses[:kept]).view(-1, WINDOW).mean(1)


def main(argv: list[str] | None = None) -> int:
    """Train and compare; the exit status is 1 if curves part or the bias does not learn."""
    parser = argparse.ArgumentParser(prog="bench.training", description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(argv)
    head = facts() if given.device == "cuda" else {"device": "cpu"}
    sizes = {"length": LENGTH, "batch": BATCH, "width": WIDTH, "heads": HEADS, "layers": LAYERS}
    report = Report("training", head | sizes | {"steps": given.steps}, given.out)
    lines, good = [], True
    for name, biased in (("causal", False), ("causal, learned T5 bias", True)):
        pair = []
        for peer, attention in (("sdpa", by_torch), ("ours", by_ours)):
            found = train(attention, biased=biased, steps=given.steps, device=given.device)
            report.rows.append({"model": name, "attention": peer} | found)
            report.save()
            pair.append(smooth(found["losses"]))
            size = found["bias_mean_size"]
            told = "-" if size is None else f"{sum(size) / len(size):.3f}"
            ends = [f"{float(pair[-1][at]):.4f}" for at in (0, len(pair[-1]) // 2, -1)]
            lines.append([f"{name}, {peer}", *ends, told, f"{found['seconds']:.1f}"])
            good &= size is None or min(size) > 1e-3
        apart = float((pair[0] - pair[1]).abs().max())
        lines.append([f"{name}: largest distance of the curves", "", "", f"{apart:.4f}", "", ""])
        good &= apart < 0.05 and float(pair[1][-1]) < float(pair[1][0]) - 0.3
    print(table(["run", "first", "middle", "last", "mean |bias|", "s"], lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
