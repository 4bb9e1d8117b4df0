"""The oracle: attention in fp64 with materialised scores, independent of everything that it checks.

It shares no code with the kernels, the CPU path or the graph of the mods: a mod is the user's own
function, run eagerly by torch for each (b, h, q, kv) through ``torch.vmap``, as FlexAttention's
eager mode does. So it judges the tracing too. Its gradient is torch's autograd, for captured
tensors also. Memory is several times ``B * Hq * Sq * Sk * 8`` bytes. Tensors may be on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """out ``(B, Sq, Hq, Dv)`` in fp64; with ``return_lse`` also lse ``(B, Hq, Sq)``, fp64, natural.

    Arguments and conventions are those of ``fa_cute.attention``. A key that no query sees does not
    exist: NaN in it reaches nothing. A mod's errors are torch's own (an index out of range raises).
    """
    heads, ratio = q.shape[2], q.shape[2] // k.shape[2]
    q, k, v = (t.permute(0, 2, 1, 3).double() for t in (q, k, v))
    k, v = k.repeat_interleave(ratio, dim=1), v.repeat_interleave(ratio, dim=1)
    shape = (q.shape[0], heads, q.shape[2], k.shape[2])
    scale = q.shape[3] ** -0.5 if scale is None else scale

    seen = _bounded(shape, causal, window, q.device)
    if mask_mod is not None:
        seen = seen & _run(mask_mod, (), shape, q.device).bool()
    used = seen.any(dim=2)[..., None]
    k, v = torch.where(used, k, 0), torch.where(used, v, 0)

    # What does not count is 0 until the mod has run, so no gradient meets an infinite slope there.
    scores = torch.where(seen, q @ k.transpose(2, 3) * scale, 0)
    if score_mod is not None:
        scores = _run(score_mod, (scores,), shape, q.device).double()
    scores = torch.where(seen, scores, -torch.inf)

    joined = scores
    if sinks is not None:
        sink = sinks.double().view(1, heads, 1, 1).expand(*shape[:3], 1)
        joined = torch.cat((scores, sink), dim=3)
    lse = torch.logsumexp(joined, dim=3)
    blind = lse == -torch.inf
    p = torch.exp(scores - torch.where(blind, 0, lse)[..., None])
    out = (p @ v).permute(0, 2, 1, 3)
    return (out, lse) if return_lse else out


def _bounded(
    shape: tuple[int, int, int, int],
    causal: bool,
    window: tuple[int | None, int | None] | None,
    device: torch.device,
) -> torch.Tensor:
    """Which scores causal and the window leave, ``shape``: bottom-right aligned, ends included."""
    seqlen_q, seqlen_k = shape[2:]
    diagonal = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device=device)[None, :]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    left, right = (None if bound == -1 else bound for bound in window or (None, None))
    if causal:
        seen &= key <= diagonal
    if left is not None:
        seen &= diagonal - key <= left
    if right is not None:
        seen &= key - diagonal <= right
    return seen.expand(shape)


def _run(
    mod: Callable, scores: tuple[torch.Tensor, ...], shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """The mod's value at every (b, h, q, kv): ``shape``. The mod itself sees 0-d tensors."""

    def one(*arguments: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(mod(*arguments), device=device)

    each = one
    for dim in (3, 2, 1, 0):
        indices = [0 if at == dim else None for at in range(4)]
        each = torch.vmap(each, in_dims=(*(0 for _ in scores), *indices))
    places = [torch.arange(size, dtype=torch.int32, device=device) for size in shape]
    if 0 in shape:
        return torch.zeros(shape, dtype=torch.float64, device=device)
    with _TensorIndexing():
        return each(*scores, *places)


class _TensorIndexing(TorchFunctionMode):
    """Under vmap ``table[h]`` would ask for the number in ``h``; gather by tensors instead."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            table, index = args
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(part, torch.Tensor) for part in index):
                table, parts = _gather_index(table, index)
                # Its gradient is a sum over all reads of an element: in bf16 it would stand still.
                wide = table.double() if table.requires_grad else table
                return torch.ops.aten.index(wide, parts).to(table.dtype)
        return func(*args, **(kwargs or {}))


def _gather_index(
    table: torch.Tensor, index: tuple
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The table, sliced, and one tensor a dimension: None for a whole one (``:``, an ellipsis)."""
    if Ellipsis in [part for part in index if not isinstance(part, torch.Tensor)]:
        at = next(i for i, part in enumerate(index) if part is Ellipsis)
        whole = (slice(None),) * (table.ndim - len(index) + 1)
        index = (*index[:at], *whole, *index[at + 1 :])
    parts: list[torch.Tensor | None] = []
    for dim, part in enumerate(index):
        if isinstance(part, slice):
            table = table.movedim(dim, 0)[part].movedim(0, dim)
            parts.append(None)
        else:
            parts.append(torch.as_tensor(part, device=table.device))
    return table, parts
