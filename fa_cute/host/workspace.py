"""The counter from which a launch's CTAs draw their tiles, one for each stream; a hosted scratch.

A kernel leaves its counter at 0, so launches of one stream, which follow each other, share one.
A captured graph may be replayed on any stream beside any other launch, so each launch captured has
a counter of its own, which the graph zeroes.
"""

from __future__ import annotations

import torch

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


def tensor_memory(device: torch.device, sm_count: int) -> torch.Tensor:
    """What stands in for tensor memory under a hosted target: 128 lanes x 512 columns a CTA.

    One a prepared call, so that calls of one kind must not run on two streams at the same time.
    """
    return torch.empty(sm_count * 128 * 512, device=device)
