"""What the compiler says of its own types, asked inside a trace."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest


def within_a_trace(describe: Callable[[], None]) -> None:
    """Call ``describe`` while a host function is traced for sm_90a; nothing is compiled."""
    import cutlass.cute as cute
    from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

    from fa_cute.device.recorder import Traced

    @cute.jit
    def host():
        describe()

    stop = mock.Mock(side_effect=Traced)
    with mock.patch.object(CutlassBaseDSL, "compile_and_cache", stop), pytest.raises(Traced):
        cute.compile(host, options="--gpu-arch sm_90a", no_jit_engine=True)


def offsets(shape: Any, stride: Any) -> list[int]:
    """What a mode of a layout maps 0, 1, ... to: the first of its parts is the fastest."""
    if isinstance(shape, int):
        return [stride * i for i in range(shape)]
    parts = [offsets(*part) for part in zip(shape, stride, strict=True)]
    return [sum(reversed(at)) for at in itertools.product(*reversed(parts))]
