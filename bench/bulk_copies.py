"""What racecheck says of bulk copies.

    compute-sanitizer --tool racecheck python3 -m bench.bulk_copies

One kernel in the orders of ``bulk_device.ORDERS``: three that are right, by one barrier each way,
and two with a wait left out, which the tool must report. Compile first, without the tool; what is
compiled is kept in FA_CUTE_CACHE_DIR.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from fa_cute.host import launch
from tests.tile_kernel import ROOT, _folder, keep

SOURCE = ROOT / "bench" / "bulk_device.py"


def main(argv: list[str] | None = None) -> int:
    """Compile all, and run those whose names contain a word given; 1 if a right one is off."""
    parser = argparse.ArgumentParser(prog="bench.bulk_copies", description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", help="choose orders by a part of the name")
    parser.add_argument("--compile-only", action="store_true")
    given = parser.parse_args(argv)
    from bench.bulk_device import ORDERS, ROW, ROWS

    wrong = 0
    for order in ORDERS:
        if given.words and not any(word in order for word in given.words):
            continue
        kernel = build(order)
        if given.compile_only:
            continue
        x = torch.arange(ROWS * ROW, device="cuda", dtype=torch.float32).view(ROWS, ROW)
        out = torch.full((ROW,), torch.nan, device="cuda")
        kernel(x, out)
        good = torch.equal(out, x.sum(0))
        wrong += not good and "unawaited" not in order
        print(f"{order}: {'right' if good else 'WRONG'}", flush=True)
    return 1 if wrong else 0


def build(order: str) -> Callable:
    """``f(x, out)`` of the kernel in that order, compiled once."""
    digest = hashlib.sha256(SOURCE.read_bytes() + order.encode())
    path = Path(_folder()) / f"{digest.hexdigest()[:24]}.so"
    if not path.exists():
        _compile(path, order)
    return launch.load(path)


def _compile(path: Path, order: str) -> None:
    import cutlass.cute as cute
    from cutlass import Float32
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    from bench.bulk_device import ROW, ROWS, Kernel

    arguments = (
        make_fake_compact_tensor(Float32, (ROWS, ROW), stride_order=(1, 0), assumed_align=16),
        make_fake_compact_tensor(Float32, (ROW,)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    options = "--enable-tvm-ffi --gpu-arch sm_90a"
    keep(cute.compile(Kernel(order), *arguments, options=options, no_jit_engine=True), path)


if __name__ == "__main__":
    sys.exit(main())
