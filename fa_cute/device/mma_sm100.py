"""tcgen05: shared-memory layouts, the two products of attention, and the arrival of a commit.

One warp issues ``D = A B`` for 128 rows: D (128, N) fp32 and A in tensor memory, or A like B in
shared memory. S = Q K^T reads both from shared memory, K-major; O += P V reads P, 16-bit and two a
column, from tensor memory and V as it lies, MN-major. Products of a thread execute in the order of
their issue, so that one that overwrites what an earlier one reads needs no barrier.

``Hosted`` is the second implementation, for a GPU without tcgen05: the same warp multiplies with
warp-level mma, reading the same swizzled layouts element by element, and arrives itself where
``commit`` would. It has no asynchrony: what it issued is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir.dialects import cute as cute_dialect
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05, warp

from fa_cute.device import tmem

ROWS = 128  # of one product
STEP = 16  # of k, an instruction
BOTH = 0b11  # the CTAs of a pair, as a multicast mask
PER_COLUMN = 2  # 16-bit elements of A in a column of tensor memory


def smem_layout(dtype: type, rows: int, columns: int, stages: int) -> Any:
    """Row-major (rows, columns, stages), in the widest swizzle that ``columns`` allows."""
    kinds = tcgen05.SmemLayoutAtomKind
    for bits, kind in ((1024, kinds.K_SW128), (512, kinds.K_SW64), (256, kinds.K_SW32)):
        if columns * dtype.width % bits == 0:
            atom = tcgen05.make_smem_layout_atom(kind, dtype)
            return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))
    raise AssertionError(f"rows of {columns} elements fill no swizzle atom; pad to 16")


def load_op(*, pair: bool) -> Any:
    """TMA's load; of a pair it tells its bytes to the first CTA's barrier."""
    return cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO if pair else tcgen05.CtaGroup.ONE)


class Native:
    """One product with N = ``columns``; ``p_times_v``: A from tensor memory, B MN-major.

    Of a ``pair`` of CTAs the product is of 256 rows, 128 in either, each with all columns of D in
    its own tensor memory; B is halved by columns between their shared memories.
    """

    def __init__(self, dtype: type, columns: int, *, p_times_v: bool, pair: bool):
        self.dtype, self.columns, self.p_times_v = dtype, columns, p_times_v
        self.ctas = 2 if pair else 1
        self.group = tcgen05.CtaGroup.TWO if pair else tcgen05.CtaGroup.ONE

    def prepare(self) -> None:
        """Trace what every ``issue`` of the role that begins here needs, once."""
        mma, rows = self._mma(), ROWS * self.ctas
        self._op = mma.op
        self._acc = mma.make_fragment_C(mma.partition_shape_C((rows, self.columns))).layout
        if self.p_times_v:
            a = mma.make_fragment_A(mma.partition_shape_A((rows, STEP)))
            self._words = a[None, None, 0].layout
        self._atoms = {adds: self._atom(adds) for adds in (False, True)}

    def _mma(self) -> cute.TiledMma:
        return self._made((ROWS * self.ctas, self.columns), self.group)

    def _slice(self) -> Any:
        """What a CTA has of the operands: those of a product of its own, half as wide in a pair."""
        own = self._made((ROWS, self.columns // self.ctas), tcgen05.CtaGroup.ONE)
        return own.get_slice(0)

    def _made(self, size: tuple[int, int], group: tcgen05.CtaGroup) -> cute.TiledMma:
        source = tcgen05.OperandSource.TMEM if self.p_times_v else tcgen05.OperandSource.SMEM
        op = tcgen05.MmaF16BF16Op(
            self.dtype,
            Float32,
            (*size, STEP),
            group,
            source,
            OperandMajorMode.K,
            OperandMajorMode.MN if self.p_times_v else OperandMajorMode.K,
        )
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    def operand_a(self, s: cute.Tensor) -> Any:
        """A's descriptors: (atom, m, k, stage) of ``s`` (128, k, stages)."""
        return self._mma().make_fragment_A(self._slice().partition_A(s))

    def operand_b(self, s: cute.Tensor) -> Any:
        """B's descriptors: (atom, n, k, stage) of ``s`` (n, k, stages), of P V (k, n, stages)."""
        part = self._slice().partition_B(transposed(s) if self.p_times_v else s)
        return self._mma().make_fragment_B(part)

    def stage(self, operand: Any, index: Int32) -> Any:
        """One stage of an operand."""
        return operand[None, None, None, index]

    def issue(
        self, memory: tmem.Native, d: Int32 | int, a: Any, b: Any, *, steps: range, adds: Any
    ) -> None:
        """D at column ``d`` = A B over ``steps`` of k16, plus D where ``adds``; does not wait.

        ``a``, ``b``: one stage of the descriptors; of P V ``a`` is the column of P.
        """
        acc = cute.make_tensor(memory.pointer(Float32, d), self._acc)
        later = self._atoms[True]
        first = self._atoms[adds] if isinstance(adds, bool) else self._atom(adds)
        left = self._words_of_p(memory, a) if self.p_times_v else lambda k: a[None, None, k]
        # ``cute.gemm`` asks for shapes before it does this: 66 operations traced a step.
        for k in steps:
            atom, operands = first if k == steps.start else later, (left(k), b[None, None, k])
            cute_dialect.gemm(atom, acc.value, *([one.value] for one in operands), acc.value)

    def _words_of_p(self, memory: tmem.Native, column: Any) -> Callable:
        """Step k of P, which begins at ``column``."""

        def step(k: int) -> cute.Tensor:
            pointer = memory.pointer(self.dtype, column + k * (STEP // PER_COLUMN))
            return cute.make_tensor(pointer, self._words)

        return step

    def _atom(self, adds: Any) -> Any:
        """The instruction of one step; ``adds``: plus what D holds."""
        atom = cute.make_mma_atom(self._op)
        atom.set(tcgen05.Field.ACCUMULATE, adds)
        return atom._unpack()

    def commit(self, barrier: Any) -> None:
        """Arrive on ``barrier``, of a pair in both CTAs, when all that this warp issued is done."""
        with cute.arch.elect_one():
            if self.ctas > 1:
                tcgen05.commit(barrier, BOTH, self.group)
            else:
                tcgen05.commit(barrier)


def transposed(s: cute.Tensor) -> cute.Tensor:
    """(n, d, stages) seen as (d, n, stages): V as the B operand of P V, without a copy."""
    return cute.make_tensor(s.iterator, cute.select(s.layout, mode=[1, 0, 2]))


class Hosted:
    """The product by warp-level mma, m16n8k16, ``columns`` of D at a time in registers."""

    PIECE = 32  # columns of D at a time: 16 accumulators a thread

    def __init__(self, dtype: type, columns: int, *, p_times_v: bool, pair: bool):
        assert not pair, "pairs of CTAs are not hosted"
        self.dtype, self.columns, self.p_times_v = dtype, columns, p_times_v

    def prepare(self) -> None:
        """Nothing is."""

    def operand_a(self, s: cute.Tensor) -> cute.Tensor:
        """``s`` itself, (128, k, stages)."""
        return s

    def operand_b(self, s: cute.Tensor) -> cute.Tensor:
        """``s`` as (n, k, stages)."""
        return transposed(s) if self.p_times_v else s

    def stage(self, operand: cute.Tensor, index: Int32) -> cute.Tensor:
        """One stage of an operand."""
        return operand[None, None, index]

    def issue(
        self, memory: tmem.Hosted, d: Int32 | int, a: Any, b: Any, *, steps: range, adds: Any
    ) -> None:
        """As ``Native.issue``, and done when it returns."""
        self._multiply(memory.words, Int32(d), (a, b), (steps.start, steps.stop), Boolean(adds))

    def fragment_a(self, words: cute.Tensor, a: Any, at: tuple[Int32, Int32]) -> cute.Tensor:
        """The thread's 8 elements of A (16, 16): rows r, r + 8 of columns k, k + 8, in pairs."""
        row, k = at
        fragment = cute.make_rmem_tensor((8, 1), self.dtype)
        pairs = cute.recast_tensor(fragment, Float32)
        for i in range(4):
            r, column = row + 8 * (i % 2), k + 8 * (i // 2)
            if self.p_times_v:
                pairs[i] = words[r, a + column // PER_COLUMN]
            else:
                fragment[2 * i], fragment[2 * i + 1] = a[r, column], a[r, column + 1]
        return fragment

    def fragment_b(self, b: cute.Tensor, at: tuple[Int32, Int32]) -> cute.Tensor:
        """The thread's 4 elements of B (8, 16): row n, columns k, k + 8, in pairs."""
        n, k = at
        fragment = cute.make_rmem_tensor((4, 1), self.dtype)
        for i in range(4):
            fragment[i] = b[n, k + 8 * (i // 2) + i % 2]
        return fragment

    @staticmethod
    def commit(barrier: Any) -> None:
        """Arrive on ``barrier``: what this warp issued is done."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def _multiply(
        self, words: cute.Tensor, d: Int32, operands: tuple, steps: cutlass.Constexpr, adds: Boolean
    ) -> None:
        """D (128, N) at column ``d`` of ``words``, over the steps [begin, end) of k16."""
        a, b = operands
        atom = cute.make_mma_atom(warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, STEP)))
        lane = cute.arch.lane_idx()
        row, pair = lane // 4, 2 * (lane % 4)
        pieces = self.columns // self.PIECE
        tiles = self.PIECE // 8
        cute.arch.sync_warp()
        for work in cutlass.range(ROWS // 16 * pieces, unroll=1):
            m, n = (work // pieces) * 16 + row, (work % pieces) * self.PIECE
            acc = cute.make_rmem_tensor((4, 1, 1, tiles), Float32)
            for j in cutlass.range_constexpr(tiles):
                for i in cutlass.range_constexpr(4):
                    old = words[m + 8 * (i // 2), d + n + 8 * j + pair + i % 2]
                    acc[i, 0, 0, j] = cutlass.select_(adds, old, Float32(0.0))
            for k in cutlass.range(steps[0], steps[1], unroll=1):
                fragment = self.fragment_a(words, a, (m, k * STEP + pair))
                for j in cutlass.range_constexpr(tiles):
                    column = n + 8 * j + row
                    part = self.fragment_b(b, (column, k * STEP + pair))
                    sums = acc[None, None, None, j]
                    cute.gemm(atom, sums, fragment, part, sums)
            for j in cutlass.range_constexpr(tiles):
                for i in cutlass.range_constexpr(4):
                    words[m + 8 * (i // 2), d + n + 8 * j + pair + i % 2] = acc[i, 0, 0, j]
        cute.arch.sync_warp()
