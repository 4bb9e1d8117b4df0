"""A loaded kernel: the call ABI, and how a shared object on disk becomes one.

A kernel takes ``(Io, Extra, Launch)``; TVM-FFI passes the tuples member by member, checks dtype,
rank, alignment and device of each tensor, switches to the tensors' device, and launches on torch's
current stream there. Nothing here imports the compiler, nor, before a launch, torch: a process that
only compiles starts in half the time without.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fa_cute.host import target
from fa_cute.plan import Extra, Io, Launch, Plan

if TYPE_CHECKING:
    import torch

SYMBOL = "fa_cute_kernel"


class Resources(NamedTuple):
    """What ptxas reports of a kernel, and its shared memory: registers a thread, then bytes.

    ``serialised`` counts ptxas's notes that it made wgmmas wait where the kernel does not (C7510 to
    C7519): their registers did not suffice, or were touched too early. A sound kernel has none.
    """

    registers: int
    spill_bytes: int
    shared_memory: int
    serialised: int = 0


class Kernel:
    """One compiled kernel, ready to launch.

    ``source`` says where it came from in this process ("disk" or "compiled"), ``seconds`` how long
    that took, beside the launch runtime's own load (``runtime``).
    """

    __slots__ = ("_function", "_has_bool", "key", "plan", "resources", "seconds", "source")

    def __init__(
        self,
        plan: Plan,
        key: str,
        function: Callable[..., Any],
        *,
        resources: Resources,
        source: str,
        seconds: float,
    ) -> None:
        self._function = function
        self.plan = plan
        self.key = key
        self.resources = resources
        self.source = source
        self.seconds = seconds
        graphs = [graph for graph in (plan.score_mod, plan.mask_mod) if graph is not None]
        self._has_bool = any(c.dtype == "bool" for graph in graphs for c in graph.captured)

    def __call__(self, io: Io, extra: Extra, launch: Launch) -> None:
        """Launch on torch's current stream of the tensors' device; does not wait."""
        if self._has_bool:
            # DLPack's bool is a type of its own that the compiler's tensors lack.
            extra = extra._replace(captured=tuple(map(_without_bool, extra.captured)))
        self._function(io, extra, launch)


def _without_bool(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection: of the compiler's import it takes 40 %, and frees nothing.

    What was made meanwhile goes to the oldest generation unseen: the next two collections of young
    objects would walk all of an import, 0.1 s each.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # who froze objects himself wants them to stay so
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@functools.cache
def runtime() -> float:
    """Import TVM-FFI and load the compiler's launch runtime, once a process; its seconds."""
    started = time.perf_counter()
    with uncollected():
        import tvm_ffi  # noqa: F401
    # Kernels leave the runtime's symbols undefined, so these must be visible to all.
    ctypes.CDLL(str(target.runtime_library()), mode=ctypes.RTLD_GLOBAL)
    return time.perf_counter() - started


def load(path: Path) -> Callable[..., Any]:
    """The kernel's function in the linked object at ``path``. Needs no GPU and no compiler."""
    runtime()
    import tvm_ffi

    return tvm_ffi.load_module(str(path))[SYMBOL]
