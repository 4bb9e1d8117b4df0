"""What a kernel is compiled for, and what the host at hand offers.

A target is an architecture as ptxas names it (``"sm_90a"``), or one kernel hosted on another
architecture (``"sm_100@sm_90a"``: the sm_100 kernel, compiled for sm_90a). Any host compiles for
any target; ``FA_CUTE_TARGET`` overrides what the device suggests.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_BY_CAPABILITY = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
_TARGET = re.compile(r"sm_\d+[af]?(@sm_\d+[af]?)?")


def check_target(target: str) -> str:
    """``target`` itself; a ValueError if it is not the name of an architecture."""
    if not isinstance(target, str) or not _TARGET.fullmatch(target):
        raise ValueError(
            f"target {target!r} is not an architecture; write it as ptxas does, e.g. 'sm_90a'"
        )
    return target


def arch_of(target: str) -> str:
    """The architecture that the machine code is made for: the host of a hosted target."""
    return target.rpartition("@")[2]


def is_hosted(target: str) -> bool:
    """Whether ``target`` is one architecture's kernel on another's GPU."""
    return "@" in target


def wants_pairs(target: str) -> bool:
    """Whether pairs of CTAs are asked for (``FA_CUTE_PAIRS=1``) and ``target`` can have them."""
    return target.startswith("sm_10") and not is_hosted(target) and _pairs_asked()


def _pairs_asked() -> bool:
    return os.environ.get("FA_CUTE_PAIRS", "0") not in ("", "0")


@functools.cache
def _device_target(index: int) -> str:
    import torch

    capability = torch.cuda.get_device_capability(index)
    if capability not in _BY_CAPABILITY:
        supported = ", ".join(f"{a}.{b}" for a, b in _BY_CAPABILITY)
        raise ValueError(
            f"cuda:{index} has compute capability {capability[0]}.{capability[1]}; fa_cute has "
            f"kernels for {supported}. Use CPU tensors to develop a mod without such a GPU."
        )
    return _BY_CAPABILITY[capability]


def current_target(device: torch.device) -> str:
    """The target for tensors on ``device``: ``FA_CUTE_TARGET`` if set, else the device's own."""
    override = os.environ.get("FA_CUTE_TARGET")
    if override:
        return check_target(override)
    import torch

    return _device_target(torch.cuda.current_device() if device.index is None else device.index)


def target_for(device: torch.device) -> str:
    """The target that lists for kernels are made for: as ``current_target``; of a CPU, sm_90a."""
    if device.type == "cuda" or os.environ.get("FA_CUTE_TARGET"):
        return current_target(device)
    return "sm_90a"


@functools.cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


def host_arch() -> str:
    """The processor that a kernel's launching code is made for, e.g. ``"x86_64"``."""
    return platform.machine()


@functools.cache
def _driver_cuda() -> int | None:
    """The CUDA version that the driver supports (13 for 13.x), or None without a driver."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value // 1000
    except (OSError, AttributeError):
        pass
    return None


def _runtimes() -> dict[int, Path]:
    """Installed launch runtimes by CUDA flavour. Found without importing the compiler."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    found = {}
    for root in map(Path, roots):
        for path in root.glob("cu*/lib/libcute_dsl_runtime.so"):
            found[int(path.parts[-3][2:])] = path
    return found


@functools.cache
def cuda_flavour() -> int:
    """The CUDA flavour (12 or 13) in use: the newest installed one that the driver supports.

    The compiler package picks its own the same way.
    """
    driver, installed = _driver_cuda(), sorted(_runtimes())
    usable = [flavour for flavour in installed if driver is None or flavour <= driver]
    if usable:
        return usable[-1]
    if installed:
        raise RuntimeError(
            f"the driver supports CUDA {driver}, but the installed launch runtimes are for "
            f"{installed}: install nvidia-cutlass-dsl-libs-cu{driver} or update the driver"
        )
    raise RuntimeError(
        "libcute_dsl_runtime.so was not found: install nvidia-cutlass-dsl[cu13], or to only "
        "load kernels `pip install --no-deps nvidia-cutlass-dsl-libs-cu13`"
    )


def runtime_library() -> Path:
    """The launch runtime that compiled kernels need, of the flavour in use."""
    flavour = cuda_flavour()
    return _runtimes()[flavour]
