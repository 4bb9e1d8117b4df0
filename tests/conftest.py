"""Tiers, and the two guards that every test runs under.

Tiers: no marker (CPU path, graphs, errors, plans), ``compile`` (cross-compiles for sm_90a) and
``gpu`` (skipped without a device of compute capability 9.0). Each gpu test has a time limit: a
kernel that hangs cannot be interrupted, so the process prints its stacks and ends. Kernels are
cached in a folder of their own unless FA_CUTE_CACHE_DIR already names one.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fa_cute.host import cache
from fa_cute.host import compile as compiling
from fa_cute.host.compile import Built
from fa_cute.host.launch import SYMBOL, Resources

GPU_LIMIT_SECONDS = 180.0
_STDERR = pytest.StashKey[int]()


def _has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def pytest_configure(config: pytest.Config) -> None:
    """Keep a handle on the real stderr, where the stacks of a hanging gpu test are printed."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        config.stash[_STDERR] = os.dup(2)
    if "FA_CUTE_CACHE_DIR" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="fa_cute-tests-")
        os.environ["FA_CUTE_CACHE_DIR"] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the gpu tier where there is no Hopper GPU."""
    if _has_hopper():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device of compute capability 9.0")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _gpu_time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    marker = request.node.get_closest_marker("gpu")
    if marker is None:
        yield
        return
    limit = marker.kwargs.get("limit", GPU_LIMIT_SECONDS)
    faulthandler.dump_traceback_later(limit, exit=True, file=request.config.stash[_STDERR])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def object_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared object with a function of TVM-FFI's calling convention that does nothing."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("object")
    source = folder / "kernel.c"
    source.write_text(
        f"int __tvm_ffi_{SYMBOL}(void *f, const void *a, int n, void *r) {{ return 0; }}\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "kernel.so", source], check=True)
    return folder / "kernel.so"


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, object_file: Path) -> Callable[[], int]:
    """A cold cache in a folder of its own, and a stand-in for the compiler: a call counts its runs.

    The stand-in's kernels do nothing; all processes count.
    """
    monkeypatch.setenv("FA_CUTE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(compiling, "_memory", {})
    monkeypatch.setattr(cache, "_warned", set())
    record = tmp_path / "builds"

    def build(plan: object, scratch: Path) -> Built:
        with open(record, "a") as file:
            file.write("x")
        time.sleep(0.1)
        linked = scratch / "kernel.so"
        shutil.copy(object_file, linked)
        return Built(linked, True, Resources(168, 0, 1024))

    monkeypatch.setattr(compiling, "build", build)
    return lambda: record.stat().st_size if record.exists() else 0
