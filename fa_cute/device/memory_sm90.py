"""Shared memory of the forward on Hopper: its buffers, what is staged where, the allocation."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa_cute.device import staging as staged
from fa_cute.device.scheduler import HEADER
from fa_cute.plan import SHARED_MEMORY_LIMIT


class Buffers(NamedTuple):
    """Shared memory: q (tile_m, D, stages), k (tile_n, D, ·), v (tile_n, Dv, ·).

    ``bias``: (tile_m, tile_n, ·), or None.
    ``next``: headers (words, stages). ``notes``: the visits' words (stages of K,), or None.
    ``scratch``: 32-bit words of the mods' diagonals, one part a consumer warpgroup, or None.
    ``staging``: the address of what O is staged in (``device/staging.py``), or None.
    ``columns``: what the mask reads by key (words, stages of K), or None.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    next: cute.Tensor
    notes: cute.Tensor | None
    scratch: Any
    bias: cute.Tensor | None
    staging: Int32 | None
    columns: cute.Tensor | None


class Memory:
    """The memory of ``kernels/fwd_sm90.py``, whose plan, tables and mods it reads."""

    def stages_out(self) -> bool:
        """Whether O is staged: where shared memory has room beside all else (2 KiB of barriers).

        And where it is whole panels: d96 spilled 4 bytes.
        """
        plan, c = self.plan, self.config
        held = 2 * c.tile_m * plan.width * c.q_stages
        held += 2 * c.tile_n * (plan.width + plan.width_v) * c.kv_stages
        held += 4 * sum(self.scratch_words) * c.consumers
        held += 4 * self.columns.words * c.kv_stages if self.columns else 0
        room = held + 4 * staged.WARP_BYTES * c.consumers + 2048 <= SHARED_MEMORY_LIMIT
        return room and self.walk.noted and self.opens_early and plan.width_v % staged.COLUMNS == 0

    def allocate(self, x: Any) -> tuple[Any, Buffers]:
        """Shared memory: the barriers' storage, and the buffers as tensors."""
        words_of = cute.make_layout((len(HEADER), self.topology.ring("next").stages))
        sizes = {"next": (Int32, cute.size(words_of))}
        if self.walk.noted:
            sizes["notes"] = (Int32, self.config.kv_stages)
        names = ("q", "k", "v") if self.bias is None else ("q", "k", "v", "bias")
        layouts = dict(zip(names, x.layouts, strict=True))
        for name, layout in layouts.items():
            dtype = self.bias.dtype if name == "bias" else self.dtype
            sizes[name] = (dtype, cute.cosize(layout))
        words = sum(self.scratch_words)
        if words:
            sizes["scratch"] = (Int32, words * self.config.consumers)
        if self.staged:
            sizes["staging"] = (Int32, staged.WARP_BYTES * self.config.consumers)
        if self.columns is not None:
            of_slots = cute.make_layout((self.columns.words, self.config.kv_stages))
            sizes["columns"] = (Int32, cute.size(of_slots))
        # The words of headers and notes lie beside the barriers: with a bias every KiB counts.
        struct = self.topology.storage(sizes, ("next", "notes", "scratch", "columns"))
        storage = cutlass.memory.SmemAllocator().allocate(struct)
        q, k, v, *bias = (
            getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
            for name, layout in layouts.items()
        )
        following, notes = storage.next.get_tensor(words_of), None
        if self.walk.noted:
            notes = storage.notes.get_tensor(cute.make_layout(self.config.kv_stages))
        scratch = storage.scratch.data_ptr() if words else None
        staging = storage.staging.data_ptr().toint() if self.staged else None
        bias = bias[0] if bias else None
        columns = storage.columns.get_tensor(of_slots) if self.columns else None
        return storage, Buffers(q, k, v, following, notes, scratch, bias, staging, columns)
