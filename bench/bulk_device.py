"""The device side of ``bulk_copies``: one warp copies rows to shared memory, another reads them.

    copy   wait empty -> arrive on full and announce the bytes, and copy; in either order
    read   wait full -> load the row -> add -> fence -> arrive on empty

A ring of one slot: a barrier for full, one for empty. Without the fence ptxas lets the loads be
under way when the warp arrives.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

WARP, ROW, ROWS = 32, 64, 8  # floats a row; rows
# What differs from a kernel's ring, which announces, copies, and waits on either side.
ORDERS = ("announced first", "copied first", "by a tensor map", "read unawaited", "freed unawaited")


class Kernel:
    """``out`` (64,) becomes the sum of the rows of ``x`` (8, 64)."""

    def __init__(self, order: str):
        self.order = order

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream):
        layout = cute.make_layout((1, ROW), stride=(ROW, 1))
        load = cpasync.CopyBulkTensorTileG2SOp()
        atom, tensor = cpasync.make_tiled_tma_atom(load, x, layout, (1, ROW), 1)
        self.kernel(x, out, atom, tensor).launch(
            grid=[1, 1, 1], block=[2 * WARP, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor, atom: cute.CopyAtom, tensor: cute.Tensor):
        allocator = cutlass.memory.SmemAllocator()
        row = allocator.allocate_tensor(Float32, cute.make_layout((1, ROW)), byte_alignment=128)
        barriers = allocator.allocate_array(cutlass.Int64, 2)
        full, empty = barriers, barriers + 1
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(full, 1)
                cute.arch.mbarrier_init(empty, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp == 0:
            for i in cutlass.range(ROWS, unroll=1):
                if cutlass.const_expr(self.order != "freed unawaited"):
                    cute.arch.mbarrier_wait(empty, (i + 1) % 2)
                if cutlass.const_expr(self.order == "copied first"):
                    self.copy(x, row, full, atom, tensor, i)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, 4 * ROW)
                if cutlass.const_expr(self.order != "copied first"):
                    self.copy(x, row, full, atom, tensor, i)
        else:
            self.read(row, out, full, empty)

    @cute.jit
    def copy(self, x, row, full, atom, tensor, i: Int32):
        if cutlass.const_expr(self.order == "by a tensor map"):
            box = cute.local_tile(tensor, (1, ROW), (None, 0))
            to, of = cpasync.tma_partition(
                atom,
                0,
                cute.make_layout(1),
                cute.group_modes(row, 0, 2),
                cute.group_modes(box, 0, 2),
            )
            cute.copy(atom, of[None, i], to, tma_bar_ptr=full)
        else:
            bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
            with cute.arch.elect_one():
                cute.copy(bulk, x[i, None], row[0, None], mbar_ptr=full)

    @cute.jit
    def read(self, row, out, full, empty):
        lane = cute.arch.lane_idx()
        low, high = Float32(0.0), Float32(0.0)
        for i in cutlass.range(ROWS, unroll=1):
            if cutlass.const_expr(self.order != "read unawaited"):
                cute.arch.mbarrier_wait(full, i % 2)
            low = low + row[0, lane]
            high = high + row[0, lane + WARP]
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty)
        if cutlass.const_expr(self.order == "read unawaited"):
            cute.arch.mbarrier_wait(full, (ROWS - 1) % 2)
        out[lane] = low
        out[lane + WARP] = high
