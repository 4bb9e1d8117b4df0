"""A kernel of nothing but 2^x, for its error on a GPU; kept as ``tile_kernel`` keeps its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from fa_cute.host import launch
from tests.tile_kernel import ROOT, _folder, keep

SOURCES = ("fa_cute/device/emit.py", "fa_cute/device/packed.py", "tests/exp2_device.py")


def build() -> Callable:
    """``f(x, out)``: ``x`` (n,) fp32, n in 512s; ``out`` (4, n) fp32: MUFU, degrees 3, 4 and 5."""
    digest = hashlib.sha256(b"".join((ROOT / source).read_bytes() for source in SOURCES))
    path = _folder() / f"{digest.hexdigest()[:24]}.so"
    if not path.exists():
        _compile(path)
    return launch.load(path)


def _compile(path: Path) -> None:
    import cutlass.cute as cute
    from cutlass import Float32
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    from tests.exp2_device import Exp2Kernel

    n = cute.sym_int()
    arguments = (
        make_fake_compact_tensor(Float32, (n,)),
        make_fake_compact_tensor(Float32, (4, n), stride_order=(1, 0)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    options = "--enable-tvm-ffi --gpu-arch sm_90a"
    keep(cute.compile(Exp2Kernel(), *arguments, options=options, no_jit_engine=True), path)
