"""A host that loads kernels without the compiler's package: Python packages, but not those."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import fa_cute
from fa_cute.host import target

COMPILER = ("nvidia_cutlass_dsl", "cutlass")
ROOT = Path(fa_cute.__file__).resolve().parent.parent


def site(folder: Path) -> Path:
    """A folder of packages as on such a host: links to this host's, without the compiler's.

    Of the compiler's there is what ``pip install --no-deps nvidia-cutlass-dsl-libs-cu13`` leaves:
    the launch runtime and the distribution's name and version.
    """
    folder.mkdir()
    for place in dict.fromkeys(map(_place, ("torch", "numpy", "apache-tvm-ffi"))):
        for entry in place.iterdir():
            hidden = entry.name.startswith(COMPILER) or entry.name.endswith(".pth")
            if not hidden and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    library = target.runtime_library()
    runtime = folder / "nvidia_cutlass_dsl" / library.parts[-3] / "lib" / library.name
    runtime.parent.mkdir(parents=True)
    runtime.symlink_to(library)
    name = f"nvidia-cutlass-dsl-libs-{library.parts[-3]}"
    version = importlib.metadata.version(name)
    facts = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def _place(name: str) -> Path:
    return Path(str(importlib.metadata.distribution(name).locate_file(""))).resolve()


def run(site: Path, program: str) -> str:
    """Standard output of ``program`` in a fresh process there, with an empty cache of kernels."""
    environment = os.environ | {
        "PYTHONPATH": f"{site}{os.pathsep}{ROOT}",
        "FA_CUTE_CACHE_DIR": str(site / "kernels"),
    }
    command = [sys.executable, "-S", "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
