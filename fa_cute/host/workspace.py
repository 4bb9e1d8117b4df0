"""What calls keep on the device: a counter of tiles and lists, for each stream; a hosted scratch.

CTAs draw their tiles from a counter. A kernel leaves it at 0, so launches of one stream, which
follow each other, share one. A captured graph may be replayed on any stream beside any other
launch, so each launch captured has a counter of its own, which the graph zeroes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Made = TypeVar("Made")

_counters: dict[tuple[int, int], torch.Tensor] = {}


def counter(device: torch.device) -> torch.Tensor:
    """An int32 tensor ``(1,)`` holding 0, for a launch on ``device``'s current stream."""
    index = device.index
    stream = torch._C._cuda_getCurrentRawStream(index)
    found = _counters.get((index, stream))
    if found is not None and not torch.cuda.is_current_stream_capturing():
        return found
    # On that stream, so that it is zeroed before the launch reads it.
    fresh = torch.zeros(1, dtype=torch.int32, device=device)
    if not torch.cuda.is_current_stream_capturing():
        _counters[index, stream] = fresh
    return fresh


def made_once(known: dict[int, Made], device: torch.device, make: Callable[[], Made]) -> Made:
    """``make()``, kept in ``known`` for ``device``'s current stream.

    Another stream might read it before it is written. What a capture makes is written when it is
    replayed, so it is not kept; but a capture begins behind all work, and takes any kept one.
    """
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            kept = list(known.values())
            return kept[0] if kept else make()
        stream = torch._C._cuda_getCurrentRawStream(device.index)
    if stream not in known:
        known[stream] = make()
    return known[stream]


def tensor_memory(device: torch.device, sm_count: int) -> torch.Tensor:
    """What stands in for tensor memory under a hosted target: 128 lanes x 512 columns a CTA.

    One a prepared call, so that calls of one kind must not run on two streams at the same time.
    """
    return torch.empty(sm_count * 128 * 512, device=device)
