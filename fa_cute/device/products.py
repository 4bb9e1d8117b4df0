"""The five products of the backward on Hopper: where their operands lie, who multiplies what.

S^T  = K Q^T    dP^T = V dO^T    64 keys a warpgroup; wide: 64 keys, a part of the queries
dV  += P^T dO   dK  += dS^T Q    P and dS from registers; wide: from shared memory, and a part
                                 of the columns a warpgroup
dQ   = dS K                      dS from shared memory; a part of the rows, or of the columns
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from fa_cute.device import mma_sm90
from fa_cute.device.topology import WARPGROUP
from fa_cute.plan import Plan


class Buffers(NamedTuple):
    """Shared memory: k (tile_kv, D, 1), v (tile_kv, Dv, 1), q (tile_q, D, ·), do (tile_q, Dv, ·),
    ds (tile_q, tile_kv, ·); shift, delta (tile_q, ·) fp32; p like ds, if wide.

    ``dq``: (4, threads, vectors, consumers, ·) fp32, in the order of its sums, or None.
    ``scratch``: 32-bit words of the mods' diagonals, one part a consumer warpgroup, or None.
    ``notes``: the visits' words (stages,), or None. ``next``: a header (words,).
    ``first``: the tile that the CTA begins with (1,), where it is drawn.
    """

    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor
    shift: cute.Tensor
    delta: cute.Tensor
    p: cute.Tensor | None = None
    dq: cute.Tensor | None = None
    scratch: Any = None
    notes: cute.Tensor | None = None
    next: cute.Tensor | None = None
    first: cute.Tensor | None = None


class Mmas(NamedTuple):
    """``scores``: S^T and dP^T; ``by_v``, ``by_k``: dV and dK."""

    scores: cute.TiledMma
    by_v: cute.TiledMma
    by_k: cute.TiledMma
    dq: cute.TiledMma


class Fragments(NamedTuple):
    """Descriptors (atom, mode, k, stage) and registers.

    ``k_rows``, ``v_rows``, ``q_columns``, ``do_columns``: of S^T and dP^T. ``do``, ``q``: of dV
    and dK, whose other operands are the registers ``p`` and ``ds_rows``, or, wide, what those wrote
    to shared memory, ``p_rows`` and ``ds_turned``. ``ds``, ``k``: of dQ.
    """

    mmas: Mmas
    k_rows: cute.Tensor
    v_rows: cute.Tensor
    q_columns: cute.Tensor
    do_columns: cute.Tensor
    p: cute.Tensor
    p_rows: cute.Tensor | None
    do: cute.Tensor
    ds_rows: cute.Tensor
    ds_turned: cute.Tensor | None
    q: cute.Tensor
    ds: cute.Tensor
    k: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor


class Products:
    """The products of one plan. None waits: each is one commit group."""

    def __init__(self, plan: Plan, dtype: type):
        self.plan, self.config, self.dtype = plan, plan.config, dtype
        self.tile = (plan.config.tile_kv, plan.config.tile_q)  # of S^T

    def own_columns(self, width: int) -> int:
        """Columns of dK or dV that a warpgroup has."""
        return width // self.config.consumers if self.config.wide else width

    def dq_columns(self) -> int:
        """Columns of dQ that a warpgroup multiplies."""
        width = self.plan.width
        return width if self.config.rows_parted else width // self.config.consumers

    def layouts(self) -> tuple:
        """Of k, v, q, do, ds and, wide, p in shared memory."""
        plan, c = self.plan, self.config
        sizes = [
            (c.tile_kv, plan.width, 1, self.dq_columns()),
            (c.tile_kv, plan.width_v, 1, plan.width_v),
            (c.tile_q, plan.width, c.stages, self.own_columns(plan.width)),
            (c.tile_q, plan.width_v, c.stages, self.own_columns(plan.width_v)),
            *[(c.tile_q, c.tile_kv, c.stages, c.tile_kv)] * (1 + c.wide),
        ]
        return tuple(
            mma_sm90.smem_layout(self.dtype, rows, columns, stages, parts=parts)
            for rows, columns, stages, parts in sizes
        )

    def mmas(self) -> Mmas:
        """The tiled MMAs."""
        plan, c = self.plan, self.config
        columns = (1, c.consumers)
        by_v, by_k = self.own_columns(plan.width_v), self.own_columns(plan.width)
        shared = functools.partial(mma_sm90.make_shared_mma, self.dtype)
        if c.wide:
            scores = shared(columns, c.own_queries, a_turned=False, b_turned=False)
            by_v = shared(columns, by_v, a_turned=True, b_turned=True)
            by_k = shared(columns, by_k, a_turned=True, b_turned=True)
        else:
            scores = mma_sm90.make_mma(self.dtype, c.consumers, c.tile_q, p_times_v=False)
            by_v = mma_sm90.make_mma(self.dtype, c.consumers, by_v, p_times_v=True)
            by_k = mma_sm90.make_mma(self.dtype, c.consumers, by_k, p_times_v=True)
        parts = (c.consumers, 1) if c.rows_parted else columns
        dq = shared(parts, self.dq_columns(), a_turned=False, b_turned=True)
        return Mmas(scores, by_v, by_k, dq)

    def fragments(self, mmas: Mmas, buffers: Buffers, warpgroup: Int32) -> Fragments:
        """Descriptors and registers of a warpgroup."""
        c, plan = self.config, self.plan
        scores, by_v, by_k, dq = (mma.get_slice(warpgroup * WARPGROUP) for mma in mmas)
        turned = {name: mma_sm90.transposed(getattr(buffers, name)) for name in ("k", "q", "do")}
        of_dk = mmas.by_k.partition_shape_C((c.tile_kv, plan.width))
        of_dv = mmas.by_v.partition_shape_C((c.tile_kv, plan.width_v))
        if c.wide:
            size = c.tile_kv * c.own_queries // WARPGROUP
            p, ds_rows = (cute.make_rmem_tensor(size, self.dtype) for _ in range(2))
            p_rows = by_v.make_fragment_A(by_v.partition_A(mma_sm90.transposed(buffers.p)))
            ds_turned = by_k.make_fragment_A(by_k.partition_A(mma_sm90.transposed(buffers.ds)))
        else:
            p = by_v.make_fragment_A(mmas.by_v.partition_shape_A(self.tile))
            ds_rows = by_k.make_fragment_A(mmas.by_k.partition_shape_A(self.tile))
            p_rows = ds_turned = None
        return Fragments(
            mmas=mmas,
            k_rows=scores.make_fragment_A(scores.partition_A(buffers.k)),
            v_rows=scores.make_fragment_A(scores.partition_A(buffers.v)),
            q_columns=scores.make_fragment_B(scores.partition_B(buffers.q)),
            do_columns=scores.make_fragment_B(scores.partition_B(buffers.do)),
            p=p,
            p_rows=p_rows,
            do=by_v.make_fragment_B(by_v.partition_B(turned["do"])),
            ds_rows=ds_rows,
            ds_turned=ds_turned,
            q=by_k.make_fragment_B(by_k.partition_B(turned["q"])),
            ds=dq.make_fragment_A(dq.partition_A(buffers.ds)),
            k=dq.make_fragment_B(dq.partition_B(turned["k"])),
            dk=cute.make_rmem_tensor(of_dk, Float32),
            dv=cute.make_rmem_tensor(of_dv, Float32),
        )

    def scores(self, f: Fragments) -> cute.Tensor:
        """A new accumulator for S^T or dP^T."""
        return cute.make_rmem_tensor(f.mmas.scores.partition_shape_C(self.tile), Float32)

    def s(self, f: Fragments, stage: Int32, acc: cute.Tensor) -> cute.Tensor:
        """Issue S^T = K Q^T into ``acc``."""
        return self._scores(f, (f.k_rows, f.q_columns), stage, acc)

    def dp(self, f: Fragments, stage: Int32) -> cute.Tensor:
        """Issue dP^T = V dO^T into a new accumulator."""
        return self._scores(f, (f.v_rows, f.do_columns), stage, self.scores(f))

    def _scores(
        self, f: Fragments, of: tuple[cute.Tensor, cute.Tensor], stage: Int32, acc: cute.Tensor
    ) -> cute.Tensor:
        a, b = of
        a, b = a[None, None, None, 0], b[None, None, None, stage]
        mma_sm90.gemm(f.mmas.scores, acc, a, b, clear=True)
        return acc

    def add_dv(self, f: Fragments, stage: Int32) -> None:
        """Issue dV += P^T dO."""
        p = f.p_rows[None, None, None, stage] if self.config.wide else f.p
        mma_sm90.gemm(f.mmas.by_v, f.dv, p, f.do[None, None, None, stage], clear=False)

    def add_dk(self, f: Fragments, stage: Int32) -> None:
        """Issue dK += dS^T Q."""
        ds = f.ds_turned[None, None, None, stage] if self.config.wide else f.ds_rows
        mma_sm90.gemm(f.mmas.by_k, f.dk, ds, f.q[None, None, None, stage], clear=False)

    def dq(self, f: Fragments, stage: Int32) -> cute.Tensor:
        """Issue this warpgroup's part of dQ = dS K into a new accumulator."""
        shape = f.mmas.dq.partition_shape_C((self.config.tile_q, self.plan.width))
        acc = cute.make_rmem_tensor(shape, Float32)
        ds, k = f.ds[None, None, None, stage], f.k[None, None, None, 0]
        mma_sm90.gemm(f.mmas.dq, acc, ds, k, clear=True)
        return acc
