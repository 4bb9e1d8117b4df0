"""The two products of the forward on Hopper: S = Q K^T and O += P V, of one warpgroup's rows.

Each is issued as one commit group; none waits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from fa_cute.device import mma_sm90
from fa_cute.device.topology import WARPGROUP


class Fragments(NamedTuple):
    """Descriptors of q, k, v (atom, mode, k, stage); registers of p (operand), o (accumulator).

    ``own_q``: the tile's Q in registers, where ``FwdConfig.q_registers`` says so.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    p: cute.Tensor
    o: cute.Tensor
    own_q: cute.Tensor | None = None


class Products:
    """The products of ``kernels/fwd_sm90.py``, whose plan and config they read."""

    def open(self, x: Any, rings, f: Fragments, s: cute.Tensor, tile: Int32) -> None:
        """Issue the first S of ``tile``, the next to be taken; does not wait for it.

        If there is no such tile, S of what lies in the slots, for nobody: ptxas would have a branch
        round the product wait for it.
        """
        there = tile < x.tiles.count
        indices = [ring.await_next(there) for ring in (rings.q, rings.k)]
        q, k = (
            part[None, None, None, cute.arch.make_warp_uniform(index)]
            for part, index in zip((f.q, f.k), indices, strict=True)
        )
        mma_sm90.gemm(x.qk, s, q, k, clear=True)

    def issue_scores(self, body: Any, k: Any) -> cute.Tensor:
        """Issue S = Q K^T of the slot ``k`` into a new accumulator; does not wait."""
        x, f = body.x, body.f
        s = self.scores(x)
        mma, q = x.own_qk, f.own_q
        if q is None:
            mma, q = x.qk, f.q[None, None, None, self.uniform(body.q.index)]
        k_stage = f.k[None, None, None, self.uniform(k.index)]
        mma_sm90.gemm(mma, s, q, k_stage, clear=True)
        return s

    def queries(self, x: Any, buffers: Any, group: Int32, q: Any) -> cute.Tensor:
        """Q of the slot ``q`` in registers.

        (192, 128), whose blocks take 2,250 cycles of shared memory, 384 of them for Q, beside 2,560
        of the tensor cores: S8k causal + 0.9 %, with the next tile's S early + 1.4, S1k + 3.1.
        """
        thread = group * WARPGROUP + mma_sm90.thread_again()
        return mma_sm90.loaded(x.own_qk, thread, buffers.q[None, None, q.index])

    def scores(self, x: Any) -> cute.Tensor:
        """An accumulator of S."""
        shape = x.qk.partition_shape_C((self.config.tile_m, self.config.tile_n))
        return cute.make_rmem_tensor(shape, Float32)

    def add_values(self, x: Any, f: Fragments, v: Any) -> None:
        """Issue O += P V of the slot ``v``; does not wait."""
        v_stage = f.v[None, None, None, self.uniform(v.index)]
        mma_sm90.gemm(x.pv, f.o, f.p, v_stage, clear=False)

    def uniform(self, index: Int32) -> Int32:
        """A slot's index, beside a mod said to be the same in all of a warp.

        ptxas then keeps wgmma's descriptors in uniform registers there as well: 40 instructions a
        block less, ALiBi and T5 + 2 to 3 %.
        """
        modified = self.plan.score_mod is not None or self.plan.mask_mod is not None
        return cute.arch.make_warp_uniform(index) if modified else index

    def fragments(self, x: Any, buffers: Any, group: Int32) -> Fragments:
        """Descriptors of Q, K and V for this warpgroup; registers of P and O."""
        c, plan = self.config, self.plan
        qk, pv = (mma.get_slice(group * WARPGROUP) for mma in (x.qk, x.pv))
        v = mma_sm90.transposed(buffers.v)
        return Fragments(
            q=qk.make_fragment_A(qk.partition_A(buffers.q)),
            k=qk.make_fragment_B(qk.partition_B(buffers.k)),
            v=pv.make_fragment_B(pv.partition_B(v)),
            p=mma_sm90.operand_like(x.pv, self.p_shape),
            o=cute.make_rmem_tensor(x.pv.partition_shape_C((c.tile_m, plan.width_v)), Float32),
        )
