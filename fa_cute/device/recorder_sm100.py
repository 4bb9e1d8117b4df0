"""What the verbs of Blackwell note for the protocol check: tensor memory, its products, copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from cutlass._mlir import ir

from fa_cute.device import mma_sm100, tmem
from fa_cute.device.protocol import Product, Range, Settle, Touch
from fa_cute.device.recorder import Recorder, wrapped
from fa_cute.device.ring import Ring
from fa_cute.device.topology import Topology
from fa_cute.device.values import plain


def verbs(record: Recorder) -> Iterator[tuple[Any, str, Callable]]:
    """The verbs to wrap, for ``recorder.recording``; a product's own steps are not noted."""
    memory, gemm = tmem.Native, mma_sm100.Native
    issue, make, of = gemm.issue, Topology._ring, Ring.of

    def columns(first: Any, count: int) -> Range:
        return Range("tensor", record.expression(first), count, "tensor memory")

    def loads(_: Any, column: Any, count: int) -> None:
        record.add(Touch(columns(column, count), False, "load"))

    def stores(_: Any, column: Any, words: Any) -> None:
        count = ir.VectorType(words.type).shape[0]
        record.add(Touch(columns(column, count), True, "store"))

    def issued(product: Any, to: Any, d: Any, a: Any, b: Any, *, steps: range, adds: Any) -> None:
        with mock.patch.object(record, "product", lambda *operands: None):
            issue(product, to, d, a, b, steps=steps, adds=adds)
        width = mma_sm100.STEP // mma_sm100.PER_COLUMN
        if product.p_times_v:
            first = record.expression(a)
            p = ("+", first, steps.start * width) if steps.start else first
            left = Range("tensor", p, len(steps) * width, "tensor memory")
        else:
            left = record.range_of(a.value)
        record.add(Product((left, record.range_of(b.value)), (columns(d, product.columns),)))

    def recorded_make(topology: Topology, ring: Any, side: str, storage: Any, copy: Any) -> Any:
        made = make(topology, ring, side, storage, copy)
        number = record.expression(copy) if ring.copies else 0
        record.copies[hash(plain(made.barriers[0]))] = number
        return made

    def recorded_of(ring: Ring, number: Any) -> Ring:
        made = of(ring, number)
        record.copies[hash(plain(made.barriers[0]))] = record.expression(number)
        return made

    yield Topology, "_ring", recorded_make
    yield Ring, "of", recorded_of
    yield memory, "load", wrapped(memory.load, loads)
    yield memory, "store", wrapped(memory.store, stores)
    yield memory, "loaded", wrapped(memory.loaded, lambda _: record.add(Settle("load")))
    yield memory, "stored", wrapped(memory.stored, lambda _: record.add(Settle("store")))
    yield memory, "entered", wrapped(memory.entered, lambda _: record.add(Settle("entered")))
    yield gemm, "issue", issued
