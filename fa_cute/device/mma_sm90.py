"""wgmma: shared-memory layouts, tiled MMAs, one gemm, and the fragment seen as rows and columns.

A warpgroup multiplies 64 rows by N columns. Its fp32 accumulator gives thread ``t`` (of 128) the
rows ``16 (t / 32) + (t % 32) / 4 + {0, 8}`` and the columns ``8 j + 2 (t % 4) + {0, 1}``. In value
order the accumulator of S is (pair, row, j), and the A operand of the next wgmma, from registers,
is (pair, row, half of k16, k16): the same order, so P needs a conversion and no movement.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Numeric
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm, vector
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from fa_cute.device import emit, wgmma
from fa_cute.device.fragment import Fragment

ROWS = 64  # rows of one wgmma
FRAGMENT_ROWS = 2  # rows a thread owns
PIECE = 8  # values of a fragment that are worked on at a time: two rows of four columns
PIECE_COLUMNS = (0, 1, 0, 1, 2, 3, 2, 3)  # the fragment column of each, from the piece's first on


def smem_layout(
    dtype: type, rows: int, columns: int, stages: int, *, parts: int | None = None
) -> Any:
    """Row-major (rows, columns, stages), in the widest swizzle that ``columns`` allows.

    Where warpgroups share the columns in ``parts`` of so many, the swizzle fits one part.
    """
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, parts or columns)
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def transposed(s: cute.Tensor) -> cute.Tensor:
    """(n, d, stages) seen as (d, n, stages): V as the B operand of P V, without a copy."""
    layout = cute.select(s.layout, mode=[1, 0, 2])
    return cute.make_tensor(s.iterator, layout)


def make_mma(
    dtype: type, warpgroups: int, columns: int, *, p_times_v: bool, q_registers: bool = False
) -> cute.TiledMma:
    """S = Q K^T (both K-major, from shared memory) or O += P V (P from registers, V MN-major).

    ``q_registers``: Q from registers too (``loaded``).
    """
    held = p_times_v or q_registers
    source = warpgroup.OperandSource.RMEM if held else warpgroup.OperandSource.SMEM
    b_major = OperandMajorMode.MN if p_times_v else OperandMajorMode.K
    return hopper.make_trivial_tiled_mma(
        dtype,
        dtype,
        OperandMajorMode.K,
        b_major,
        Float32,
        (warpgroups, 1, 1),
        (ROWS, columns),
        source,
    )


def make_shared_mma(
    dtype: type, parts: tuple[int, int], columns: int, *, a_turned: bool, b_turned: bool
) -> cute.TiledMma:
    """A product from shared memory; warpgroups part it in ``parts`` of rows and of columns.

    ``columns``: those of one warpgroup. ``a_turned`` (k, m), ``b_turned`` (k, n): the operand lies
    transposed in memory, MN-major.
    """
    majors = (OperandMajorMode.K, OperandMajorMode.MN)
    return hopper.make_trivial_tiled_mma(
        dtype,
        dtype,
        majors[a_turned],
        majors[b_turned],
        Float32,
        (*parts, 1),
        (ROWS, columns),
        warpgroup.OperandSource.SMEM,
    )


def operand_like(mma: cute.TiledMma, shape: tuple[int, int]) -> cute.Tensor:
    """Registers of the operand A of ``mma`` for a tile of ``shape``."""
    return mma.make_fragment_A(mma.partition_shape_A(shape))


def loaded(mma: cute.TiledMma, thread: cutlass.Int32, memory: cute.Tensor) -> cute.Tensor:
    """The operand A of ``mma``, in registers, from ``memory`` of the tile's shape."""
    operand = operand_like(mma, cute.shape(memory))
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(num_matrices=4), memory.element_type)
    load = cute.make_tiled_copy_A(atom, mma)
    part = load.get_slice(thread)
    cute.copy(load, part.partition_S(memory), part.retile(operand))
    return operand


def store_turned(
    mma: cute.TiledMma, thread: cutlass.Int32, fragment: cute.Tensor, target: tuple
) -> None:
    """Write rounded values in an accumulator's order to memory that holds the tile transposed.

    ``target``: the shape (m, n) of ``mma``'s tile, and memory of that shape whose m is contiguous.
    """
    shape, memory = target
    matrices = warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4)
    atom = cute.make_copy_atom(matrices, fragment.element_type)
    store = cute.make_tiled_copy_C(atom, mma)
    layout = cute.make_rmem_tensor(mma.partition_shape_C(shape), Float32).layout
    source = store.retile(cute.make_tensor(fragment.iterator, layout))
    cute.copy(store, source, store.get_slice(thread).partition_D(memory))


def gemm(
    mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, *, clear: bool
) -> None:
    """Issue ``acc = a b`` (clear) or ``acc += a b`` as one commit group; does not wait.

    ``a`` (atom, m, k), ``b`` (atom, n, k): fragments or descriptors of one stage. ``clear`` must be
    a constant of the wgmma: one that travels as a kernel argument is a predicate, keeps the old
    accumulator alive, and costs 64 registers and the asynchrony.
    """
    warpgroup.fence()
    wgmma.issue(mma, acc, a, b, clear=clear)
    warpgroup.commit_group()


def rows_and_columns(acc: cute.Tensor) -> cute.Tensor:
    """The accumulator ((2, 2, N / 8), 1, 1) of one warpgroup's 64 rows, viewed as (2, N / 4)."""
    groups = cute.size(acc) // 4
    layout = cute.make_layout((FRAGMENT_ROWS, (2, groups)), stride=(2, (1, 4)))
    return cute.make_tensor(acc.iterator, layout)


def column_of(c: int) -> int:
    """The column of fragment column ``c``, less the thread's own ``2 (t % 4)``."""
    return 8 * (c // 2) + c % 2


class Pieces:
    """An accumulator, or its view as rows and columns, in pieces of 8 contiguous values.

    Work on pieces traces and compiles an order faster than on elements. Longer vectors cost: one of
    88 is legalised into halves and repacked, 45 PRMT a block in P's conversion, which serialises
    the wgmmas that read it. Two operations an access; through a tensor of 8 values it is seven.
    """

    def __init__(self, fragment: cute.Tensor) -> None:
        self.fragment = fragment
        self.count = cute.size(fragment) // PIECE
        self._type = fragment.element_type.mlir_type
        self._base = fragment.iterator.llvm_ptr

    def load(self, number: int) -> Any:
        """The vector (8,) of piece ``number``."""
        return llvm.load(ir.VectorType.get([PIECE], self._type), self._place(number))

    def store(self, number: int, values: Any) -> None:
        """Write a vector (8,) into piece ``number``, in the fragment's type."""
        llvm.store(values, self._place(number))

    def all(self) -> list[Any]:
        """The vectors of all pieces."""
        return [self.load(number) for number in range(self.count)]

    def _place(self, number: int) -> Any:
        base = self._base
        return llvm.getelementptr(base.type, base, [], [number * PIECE], self._type, None)


def by_row(values: list[Numeric]) -> Any:
    """The vector that holds ``values[r]`` wherever a piece has row r."""
    rows = [value.ir_value() for value in values for _ in range(2)]
    return emit.gathered(rows * (PIECE // len(rows)), PIECE)


def by_rows(rows: list[Any]) -> Any:
    """The piece of the vectors (4,) of its two rows."""
    return vector.shuffle(*rows, [0, 1, 4, 5, 2, 3, 6, 7])


def by_column(values: Any, first: int) -> Any:
    """The vector that holds ``values[first + c]`` wherever a piece has its column c of four."""
    return vector.shuffle(values, values, [first + c for c in PIECE_COLUMNS])


def multiply(fragment: cute.Tensor, factors: list[Numeric]) -> None:
    """Multiply the rows of an fp32 fragment by ``factors``."""
    by, pieces = by_row(factors), Pieces(fragment)
    for number, values in enumerate(pieces.all()):
        pieces.store(number, arith.mulf(values, by))


def convert(source: cute.Tensor, target: cute.Tensor) -> None:
    """Round the fp32 fragment ``source`` into ``target``, value by value in the same order."""
    rounded = Pieces(target)
    kind = ir.VectorType.get([PIECE], target.element_type.mlir_type)
    for number, values in enumerate(Pieces(source).all()):
        rounded.store(number, arith.truncf(kind, values))


def thread_again() -> cutlass.Int32:
    """The thread's number in its warpgroup, read from its register here: never kept from before."""
    return _read_again() % 128


def warp_again() -> cutlass.Int32:
    """The warp's number in the CTA, likewise."""
    return cute.arch.make_warp_uniform(_read_again() // 32)


def _read_again() -> cutlass.Int32:
    text = "mov.u32 $0, %tid.x;"
    found = llvm.inline_asm(cutlass.Int32.mlir_type, [], text, "=r", has_side_effects=True)
    return cutlass.Int32(found)


def row_of(thread: cutlass.Int32) -> cutlass.Int32:
    """The first of the two rows of 64 that ``thread`` (0..127) owns; the other is 8 below."""
    return (thread // 32) * 16 + (thread % 32) // 4


def fragment(width: int, *, transposed: bool = False) -> Fragment:
    """A warpgroup's accumulator of 64 x ``width`` scores, viewed by ``rows_and_columns``."""
    return Fragment(
        height=ROWS,
        width=width,
        rows=tuple(8 * r for r in range(FRAGMENT_ROWS)),
        columns=width // 4,
        shift=2,
        first_row=row_of,
        first_column=first_column_of,
        column=column_of,
        transposed=transposed,
    )


def first_column_of(thread: cutlass.Int32) -> cutlass.Int32:
    """The column that ``column_of`` is relative to, of ``thread`` (0..127)."""
    return 2 * (thread % 4)
