"""Kernels on disk: one file a kernel, published atomically, checked before it is loaded.

A file is a linked shared object, then a JSON description, then a trailer that holds the length of
the description and a SHA-256 of all that precedes it. A loader of shared objects ignores what
follows the object, so a kernel and its description are one file: a reader sees all of it or none.
Beside it, ``<key>.used`` grows by one byte a load (its size is the count of hits, its time the last
use), and ``<key>.lock`` exists while somebody compiles.

The folder holds code that this process will run, so it must belong to the user and must not be
writable by everybody. A folder that cannot be used means "memory only", with one warning.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
DEFAULT_LIMIT = 2 << 30
ABANDONED_SECONDS = 3600
_MAGIC = b"fa_cute\x01"
_TRAILER = struct.Struct("<Q32s8s")
_warned: set[str] = set()


def log(text: str) -> None:
    """Print a line to stderr if ``FA_CUTE_LOG`` holds ``cache``."""
    if logging():
        print(f"fa_cute cache: {text}", file=sys.stderr, flush=True)


def logging() -> bool:
    """Whether ``FA_CUTE_LOG`` (a comma-separated list) asks for the cache's doings."""
    return "cache" in os.environ.get("FA_CUTE_LOG", "").split(",")


def warn_once(text: str) -> None:
    """A RuntimeWarning, once a process for equal texts."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def folder() -> Path | None:
    """Where kernels are kept: ``FA_CUTE_CACHE_DIR``, else the user's cache; None if switched off.

    ``FA_CUTE_CACHE=0`` switches the disk off.
    """
    if os.environ.get("FA_CUTE_CACHE", "1") == "0":
        return None
    named = os.environ.get("FA_CUTE_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "fa_cute"


def size_limit() -> int:
    """Bytes that the folder may hold: ``FA_CUTE_CACHE_SIZE`` (``500M``, ``2G``), else 2 GiB."""
    text = os.environ.get("FA_CUTE_CACHE_SIZE")
    try:
        return DEFAULT_LIMIT if not text else parse_size(text)
    except ValueError as error:
        warn_once(f"FA_CUTE_CACHE_SIZE is not used: {error}. The limit is 2 GiB.")
        return DEFAULT_LIMIT


def parse_size(text: str) -> int:
    """Bytes from ``123``, ``500K``, ``500M`` or ``2G``; ValueError for anything else."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = units.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdigit():
        raise ValueError(f"{text!r} is not a size; write bytes, or 500K, 500M, 2G")
    return int(digits) * unit


@dataclass(frozen=True)
class Entry:
    """A kernel on disk: its file, and its description (``parts``, ``resources``, ``seconds``)."""

    path: Path
    about: Mapping[str, Any]
    size: int
    hits: int
    created: float
    used: float

    @property
    def key(self) -> str:
        return self.path.stem

    @property
    def parts(self) -> Mapping[str, str]:
        return self.about["parts"]


class Damaged(Exception):
    """A file that is not a kernel of this format."""


def pack(code: bytes, about: Mapping[str, Any]) -> bytes:
    """The contents of a kernel's file."""
    text = json.dumps({"format": FORMAT, **about}, sort_keys=True).encode()
    body = code + text
    return body + _TRAILER.pack(len(text), hashlib.sha256(body).digest(), _MAGIC)


def unpack(data: bytes) -> tuple[bytes, dict[str, Any]]:
    """Code and description from a kernel's file; ``Damaged`` says what is wrong with it."""
    if len(data) <= _TRAILER.size:
        raise Damaged("it is too short")
    length, digest, magic = _TRAILER.unpack(data[-_TRAILER.size :])
    body = data[: -_TRAILER.size]
    if magic != _MAGIC:
        raise Damaged("it is truncated or not a kernel of this version")
    if hashlib.sha256(body).digest() != digest:
        raise Damaged("its checksum is wrong")
    about = json.loads(body[len(body) - length :])
    if about.get("format") != FORMAT:
        raise Damaged(f"its format is {about.get('format')}, this version reads {FORMAT}")
    return body[: len(body) - length], about


class Store:
    """The kernels in one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.so"

    def __contains__(self, key: str) -> bool:
        """Whether there is a file of ``key``, sound or not."""
        return self._file(key).exists()

    def read(self, key: str) -> Entry | None:
        """The entry of ``key``, checked and counted as used; None if there is no sound one."""
        path = self._file(key)
        try:
            entry = self._entry(path)
        except FileNotFoundError:
            return None
        except (Damaged, ValueError, KeyError, OSError) as error:
            warn_once(f"the cached kernel {path} is not used: {error}. It is built anew.")
            return None
        with contextlib.suppress(OSError), open(path.with_suffix(".used"), "ab") as used:
            used.write(b".")
        return entry

    def _entry(self, path: Path) -> Entry:
        data = path.read_bytes()
        status = path.stat()
        if status.st_uid != os.geteuid():
            raise Damaged(f"it belongs to user {status.st_uid}")
        about = unpack(data)[1]
        if about["key"] != path.stem:
            raise Damaged(f"it is the kernel {about['key']} under another name")
        hits, used = 0, status.st_mtime
        with contextlib.suppress(OSError):
            uses = path.with_suffix(".used").stat()
            hits, used = uses.st_size, max(used, uses.st_mtime)
        return Entry(path, about, len(data), hits, status.st_mtime, used)

    def publish(self, key: str, code: bytes, about: Mapping[str, Any]) -> Entry:
        """Write a kernel, visible to readers only once complete, and evict beyond the limit.

        OSError if the folder takes no more; nothing is left behind then.
        """
        data = pack(code, {"key": key, **about})
        self.insert(key, data)
        self.prune(size_limit(), keep=key)
        return self._entry(self._file(key))

    def insert(self, key: str, data: bytes) -> None:
        """Write the packed file of ``key``; OSError if the folder takes no more."""
        handle, part = tempfile.mkstemp(prefix="part-", dir=self.path)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(part, self._file(key))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise

    def entries(self) -> list[Entry]:
        """All sound entries, the most recently used first."""
        found = []
        for path in self.path.glob("*.so"):
            with contextlib.suppress(Damaged, ValueError, KeyError, OSError):
                found.append(self._entry(path))
        return sorted(found, key=lambda entry: -entry.used)

    def prune(self, limit: int, keep: str | None = None) -> list[Entry]:
        """Drop the least recently used entries until ``limit`` bytes remain; what was dropped.

        ``keep`` stays. Files that are no sound kernels go first: they count, and nobody uses them.
        Parts that a killed process left behind for an hour go too.
        """
        old = time.time() - ABANDONED_SECONDS
        for part in self.path.glob("part-*"):
            with contextlib.suppress(OSError):
                if part.stat().st_mtime < old:
                    part.unlink()
        files = {}
        for path in self.path.glob("*.so"):
            with contextlib.suppress(FileNotFoundError):  # another process prunes, too
                files[path] = path.stat().st_size
        sizes = sum(files.values())
        if sizes <= limit:
            return []
        entries = self.entries()
        for path in files.keys() - {entry.path for entry in entries}:
            with contextlib.suppress(OSError):
                self._drop(path)
                sizes -= files[path]
        dropped = []
        for entry in reversed(entries):
            if sizes <= limit:
                break
            if entry.key != keep:
                self._drop(entry.path)
                sizes -= entry.size
                dropped.append(entry)
        return dropped

    def clear(self) -> int:
        """Drop everything, damaged files too; how many kernels there were."""
        files = list(self.path.glob("*.so"))
        for path in files:
            self._drop(path)
        for leftover in [*self.path.glob("part-*"), *self.path.glob("*.used")]:
            leftover.unlink(missing_ok=True)
        return len(files)

    def _drop(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        path.with_suffix(".used").unlink(missing_ok=True)

    @contextlib.contextmanager
    def single_flight(self, key: str) -> Iterator[None]:
        """Hold the lock of ``key`` against threads and processes, waiting as long as it takes.

        The kernel of the operating system drops the lock of a process that dies, so there is no
        stale one. The holder removes the file; who had waited for the removed one tries again.
        """
        path = self.path / f"{key}.lock"
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                _lock(handle, key)
            except BaseException:
                os.close(handle)
                raise
            if _is_at(handle, path):
                break
            os.close(handle)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(handle)

    def why_missed(self, parts: Mapping[str, str]) -> str:
        """Which parts differ from the nearest entry: the sentence that ``FA_CUTE_LOG`` prints."""
        entries = self.entries()
        if not entries:
            return "the cache is empty"
        nearest = min(entries, key=lambda entry: len(differences(parts, entry.parts)))
        changed = ", ".join(
            f"{name} ({nearest.parts.get(name, 'absent')} there, {parts.get(name, 'absent')} here)"
            for name in differences(parts, nearest.parts)
        )
        return f"nearest entry {nearest.key} differs in {changed}"


def _lock(handle: int, key: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log(f"{key} is being compiled elsewhere; waiting for it")
        fcntl.flock(handle, fcntl.LOCK_EX)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Names of the parts in which two keys differ, sorted."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def opened() -> Store | None:
    """The store of ``folder()``, made if it is missing; None, with one warning, if unusable."""
    path = folder()
    if path is None:
        return None
    remedy = "Kernels are kept in memory only; FA_CUTE_CACHE_DIR may name another folder."
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        warn_once(f"the kernel cache {path} cannot be used ({error.strerror}). {remedy}")
        return None
    if status.st_uid != os.geteuid():
        warn_once(f"the kernel cache {path} belongs to user {status.st_uid}, not to you. {remedy}")
        return None
    if status.st_mode & 0o002:
        warn_once(f"the kernel cache {path} is writable by everybody: chmod o-w it. {remedy}")
        return None
    return Store(path)


def unwritable(error: OSError, path: Path) -> None:
    """Warn, once, that ``path`` takes no more kernels."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    hint = " (fa-cute cache prune makes room)" if error.errno == errno.ENOSPC else ""
    warn_once(f"the kernel cache {path} takes no kernels: {reason}{hint}; kept in memory only.")
