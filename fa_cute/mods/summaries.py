"""Bounds of captured tensors over ranges of an index, from one pass over each.

A summary keeps the least and the greatest element of every ``GRAIN`` neighbours along one
dimension, and of every power of two of such groups: a table of ``n / GRAIN * log2(n / GRAIN)``
pairs for n elements, made on the tensor's device. A range of indices is covered by two overlapping
entries, so that bounds over any range cost two look-ups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GRAIN = 16
# Ranges of at most this many indices are looked at one by one where several dimensions have one.
WINDOW = 3

_LIMITS = {
    torch.bool: (0, 1),
    torch.uint8: (0, 255),
    torch.int8: (-128, 127),
    torch.uint16: (0, 2**16 - 1),
    torch.int16: (-(2**15), 2**15 - 1),
}


@dataclass(frozen=True)
class Summary:
    """``least``, ``greatest``: ``(levels, *other dimensions, groups)``; entry i of level k covers
    the groups ``i .. i + 2**k - 1`` that exist.
    """

    least: Tensor
    greatest: Tensor

    @classmethod
    def of(cls, source: Tensor, dim: int) -> Summary:
        """The summary of ``source`` along ``dim``; nothing is read on the host."""
        source = readable(source).movedim(dim, -1)
        missing = -source.shape[-1] % GRAIN
        if missing:
            tail = source[..., -1:].expand(*source.shape[:-1], missing)
            source = torch.cat([source, tail], dim=-1)
        groups = source.unflatten(-1, (-1, GRAIN))
        return cls(_levels(groups.amin(-1), torch.minimum), _levels(groups.amax(-1), torch.maximum))

    def over(self, others: Sequence[Tensor], first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds over the indices ``first .. last`` (inside the tensor), at other indices."""
        begin, end = first // GRAIN, last // GRAIN
        level = torch.frexp((end - begin + 1).double()).exponent.long() - 1
        ends = begin, end + 1 - torch.bitwise_left_shift(torch.ones_like(level), level)
        least = [self.least[(level, *others, at)] for at in ends]
        greatest = [self.greatest[(level, *others, at)] for at in ends]
        return torch.minimum(*least), torch.maximum(*greatest)


def readable(source: Tensor) -> Tensor:
    """``source`` as loads give it: int32 (also for bool), fp32 or fp64."""
    if source.dtype == torch.bool or not source.dtype.is_floating_point:
        return source.to(torch.int32)
    return source if source.dtype == torch.float64 else source.float()


def limits(dtype: torch.dtype) -> tuple[float, float]:
    """The least and the greatest value that a load of ``dtype`` can give."""
    if dtype.is_floating_point:
        return -torch.inf, torch.inf
    return _LIMITS.get(dtype, (-(2**31), 2**31 - 1))


def window(
    source: Tensor, first: Sequence[Tensor], last: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Bounds over a box of indices: exact where each side has at most WINDOW, else the dtype's."""
    small = None
    for begin, end in zip(first, last, strict=True):
        fits = end - begin < WINDOW
        small = fits if small is None else small & fits
    corners: list[tuple[Tensor, ...]] = [()]
    for begin, end in zip(first, last, strict=True):
        single = begin is end
        steps = [begin] if single else [torch.minimum(begin + i, end) for i in range(WINDOW)]
        corners = [(*corner, step) for corner in corners for step in steps]
    least = greatest = None
    for corner in corners:
        value = readable(source[corner])
        least = value if least is None else torch.minimum(least, value)
        greatest = value if greatest is None else torch.maximum(greatest, value)
    low, high = limits(source.dtype)
    return torch.where(small, least, low), torch.where(small, greatest, high)


def _levels(level: Tensor, extremum) -> Tensor:
    levels, groups, reach = [level], level.shape[-1], 1
    while 2 * reach <= groups:
        ahead = torch.arange(groups, device=level.device) + reach
        level = extremum(level, level.index_select(-1, ahead.clamp_(max=groups - 1)))
        levels.append(level)
        reach *= 2
    return torch.stack(levels)
