"""Bundles: a set of compiled kernels in one file, for hosts without the compiler.

A bundle is a zip archive of kernel files as the cache keeps them (see ``host/cache.py``), and a
``manifest.json`` that says what they are. It holds only what fa_cute compiled, no library of
NVIDIA's: the host that loads it needs ``apache-tvm-ffi`` and ``libcute_dsl_runtime.so``
(``pip install --no-deps nvidia-cutlass-dsl-libs-cu13``). A bundle is code: load what you trust.
"""

from __future__ import annotations

import atexit
import json
import tempfile
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fa_cute.host import cache
from fa_cute.host import compile as compiling

FORMAT = 1
MANIFEST = "manifest.json"
DESCRIBED = ("parts", "mods", "resources")
DAMAGE = (zipfile.BadZipFile, zlib.error, KeyError)  # what reading a part of an archive may raise


def bundle(
    path: str | Path, *, keys: Iterable[str] | None = None, target: str | None = None
) -> list[dict[str, Any]]:
    """Write the kernels in the cache that this fa_cute can use to ``path``; what they are.

    ``keys`` (or their first digits) and ``target`` choose among them. ValueError if there are none,
    if a key is none of theirs, or if one of them is not linked.
    """
    store = cache.opened()
    here = compiling.host_parts()
    starts = ("",) if keys is None else tuple(keys)
    chosen = []
    for entry in [] if store is None else store.entries():
        fits = all(entry.parts.get(name) == value for name, value in here.items())
        if fits and entry.key.startswith(starts) and target in (None, entry.parts["target"]):
            chosen.append(entry)
    if not chosen and not any(starts):
        raise ValueError("the cache holds no such kernels: fill it with `fa-cute compile` first")
    for start in starts:
        if not any(entry.key.startswith(start) for entry in chosen):
            raise ValueError(f"no kernel that this fa_cute can use has a key that starts {start!r}")
    if not all(entry.about["linked"] for entry in chosen):
        raise ValueError("a kernel was compiled without a linker; install gcc and compile it anew")
    kernels = [
        {"key": entry.key, **{name: entry.about[name] for name in DESCRIBED}} for entry in chosen
    ]
    manifest = {"format": FORMAT, "needs": here, "kernels": kernels}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MANIFEST, json.dumps(manifest, indent=1))
        for entry in chosen:
            archive.write(entry.path, entry.path.name)
    return kernels


def read_manifest(path: str | Path) -> dict[str, Any]:
    """What a bundle holds; ValueError if ``path`` is not one that this version reads."""
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = json.loads(archive.read(MANIFEST))
    except (*DAMAGE, ValueError) as error:
        raise ValueError(f"{path} is no bundle of kernels: {error}") from error
    if not isinstance(manifest, dict):
        raise ValueError(f"{path} is no bundle of kernels: its {MANIFEST} holds no object")
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path} is a bundle of format {manifest.get('format')}; this version reads {FORMAT}"
        )
    return manifest


def load_bundle(path: str | Path) -> list[dict[str, Any]]:
    """Make a bundle's kernels available to this process; what they are.

    A later ``attention`` or ``compile`` finds them as it finds kernels on disk. ValueError, naming
    each difference, if they were made for another host, CUDA flavour, compiler or fa_cute; also if
    the bundle is damaged.
    """
    manifest = read_manifest(path)
    here, needs = compiling.host_parts(), manifest.get("needs", {})
    wrong = [
        f"{name} {needs.get(name)} (here {value})"
        for name, value in here.items()
        if needs.get(name) != value
    ]
    if wrong:
        raise ValueError(f"the bundle {path} does not fit this host: {', '.join(wrong)}")
    folder = tempfile.TemporaryDirectory(prefix="fa_cute-bundle-")
    atexit.register(folder.cleanup)
    store = cache.Store(Path(folder.name))
    try:
        with zipfile.ZipFile(path) as archive:
            for kernel in manifest["kernels"]:
                data = archive.read(f"{kernel['key']}.so")
                cache.unpack(data)
                store.insert(kernel["key"], data)
    except (*DAMAGE, cache.Damaged) as error:
        raise ValueError(f"the bundle {path} is damaged: {error}; write it anew") from error
    compiling.also_look_in(store)
    return manifest["kernels"]
