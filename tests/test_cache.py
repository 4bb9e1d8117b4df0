"""The cache of kernels: keys, single flight, atomic publishing, damage, limits.

The kernels here are a C function that does nothing, so that the cache's own behaviour is tested
without the compiler; tests/test_compile.py uses real ones.
"""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import resource
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from fa_cute.host import cache, launch
from fa_cute.host import compile as compiling
from fa_cute.host.launch import Resources
from fa_cute.plan import Extra, FwdConfig, Io, Launch, Plan

FORK = multiprocessing.get_context("fork")
PLAN = Plan(
    direction="forward",
    dtype="bfloat16",
    head_dim=64,
    head_dim_v=64,
    gqa_ratio=1,
    causal=False,
    window=(False, False),
    score_mod=None,
    mask_mod=None,
    return_lse=False,
    sinks=False,
    deterministic=False,
    target="sm_90a",
    config=FwdConfig(128, 128, 2, 1, 24, 240),
)


def _store() -> cache.Store:
    store = cache.opened()
    assert store is not None
    return store


def _launch(kernel: compiling.Kernel) -> None:
    kernel(Io(None, None, None, None), Extra(), Launch(1.0, 0, 0, 1, None))


def test_memory_then_disk_then_compiler(builds: Callable[[], int]) -> None:
    first = compiling.compiled(PLAN)
    assert first.source == "compiled" and builds() == 1
    assert compiling.compiled(PLAN) is first
    compiling.forget()
    again = compiling.compiled(PLAN)
    assert again.source == "disk" and builds() == 1
    assert again.key == first.key and again.resources == Resources(168, 0, 1024)
    _launch(again)


def test_every_part_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {
        "direction": "backward",
        "dtype": "float16",
        "head_dim": 128,
        "head_dim_v": 128,
        "gqa_ratio": 4,
        "causal": True,
        "window": (True, False),
        "return_lse": True,
        "sinks": True,
        "deterministic": True,
        "target": "sm_100a",
        "visits": "ranges",
        "config": FwdConfig(128, 128, 3, 1, 24, 240),
    }
    keys = {compiling.key_of(compiling.key_parts(PLAN))}
    for name, value in changed.items():
        plan = dataclasses.replace(PLAN, **{name: value})
        keys.add(compiling.key_of(compiling.key_parts(plan)))
    for name in ("_fingerprint", "_compiler_version"):
        with monkeypatch.context() as patch:
            patch.setattr(compiling, name, lambda: "another")
            keys.add(compiling.key_of(compiling.key_parts(PLAN)))
    for name, value in (("host_arch", "aarch64"), ("cuda_flavour", 99)):
        with monkeypatch.context() as patch:
            patch.setattr(compiling.target, name, lambda value=value: value)
            keys.add(compiling.key_of(compiling.key_parts(PLAN)))
    assert len(keys) == 1 + len(changed) + 4


def test_parts_are_words_that_every_machine_shares() -> None:
    for name, value in compiling.key_parts(PLAN).items():
        assert " at 0x" not in value and os.sep not in value.replace("://", ""), name


def test_the_sources_count_and_the_folder_they_lie_in_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here, package = compiling.key_parts(PLAN), Path(compiling.__file__).parent.parent
    elsewhere = tmp_path / "elsewhere" / package.name
    shutil.copytree(package, elsewhere, ignore=shutil.ignore_patterns("variants", "__pycache__"))
    monkeypatch.setattr(compiling, "__file__", str(elsewhere / "host" / "compile.py"))
    monkeypatch.setattr(compiling, "_fingerprint", compiling._fingerprint.__wrapped__)
    with open(elsewhere / "api.py", "a") as source:
        source.write("# no kernel is made from this\n")
    assert compiling.key_parts(PLAN) == here
    with open(elsewhere / "kernels" / "fwd_sm90.py", "a") as source:
        source.write("# another kernel\n")
    assert cache.differences(compiling.key_parts(PLAN), here) == ["sources"]


def test_the_driver_the_device_and_the_interpreter_are_in_no_key() -> None:
    """A kernel is shared by hosts that differ in them: nothing but this is in the key."""
    host = {"abi", "compiler", "cuda", "host", "sources"}
    plan = {field.name for field in dataclasses.fields(PLAN)}
    assert set(compiling.key_parts(PLAN)) == host | plan


def _compile_in_child(plan: Plan, answers: multiprocessing.SimpleQueue) -> None:
    kernel = compiling.compiled(plan)
    _launch(kernel)
    answers.put((kernel.source, kernel.key))


def test_eight_processes_compile_once(builds: Callable[[], int]) -> None:
    answers = FORK.SimpleQueue()
    children = [FORK.Process(target=_compile_in_child, args=(PLAN, answers)) for _ in range(8)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    found = [answers.get() for _ in children]
    assert builds() == 1
    assert sorted(source for source, _ in found) == ["compiled"] + ["disk"] * 7
    assert len({key for _, key in found}) == 1
    assert sorted(path.suffix for path in _store().path.iterdir()) == [".so", ".used"]


@pytest.mark.parametrize("disk", ["1", "0"])
def test_eight_threads_compile_once(
    builds: Callable[[], int], monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    monkeypatch.setenv("FA_CUTE_CACHE", disk)
    kernels: list[compiling.Kernel] = []
    threads = [
        threading.Thread(target=lambda: kernels.append(compiling.compiled(PLAN))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert builds() == 1 and len(kernels) == 8 and len(set(map(id, kernels))) == 1


def test_published_without_being_loaded(
    builds: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a process does that only compiles: another one loads the kernel."""
    with monkeypatch.context() as patch:
        patch.setattr(launch, "load", None)
        assert [compiling.publish(PLAN)[0] for _ in range(2)] == ["compiled", "disk"]
    assert not compiling.in_memory(PLAN) and builds() == 1
    assert compiling.compiled(PLAN).source == "disk"


def test_what_cannot_be_published_is_an_error(builds: Callable[[], int]) -> None:
    """``precompile`` said "compiled" of a kernel that its worker had kept in memory only."""
    _make_file(cache.folder())
    with pytest.warns(RuntimeWarning, match="cannot be used"), pytest.raises(OSError):
        compiling.publish(PLAN)
    assert builds() == 0


def _die_holding(key: str, ready: multiprocessing.SimpleQueue) -> None:
    with _store().single_flight(key):
        ready.put(True)
        time.sleep(60)


def test_the_lock_of_a_killed_compiler_is_taken_over(builds: Callable[[], int]) -> None:
    key, ready = compiling.key_of(compiling.key_parts(PLAN)), FORK.SimpleQueue()
    holder = FORK.Process(target=_die_holding, args=(key, ready))
    holder.start()
    ready.get()
    waiter = threading.Thread(target=compiling.compiled, args=(PLAN,))
    waiter.start()
    waiter.join(0.3)
    assert waiter.is_alive() and builds() == 0
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    waiter.join(30)
    assert not waiter.is_alive() and builds() == 1
    assert not list(_store().path.glob("*.lock"))


def test_a_lock_file_without_a_holder_is_no_lock(builds: Callable[[], int]) -> None:
    key = compiling.key_of(compiling.key_parts(PLAN))
    (_store().path / f"{key}.lock").touch()
    assert compiling.compiled(PLAN).source == "compiled"


def test_a_lock_that_was_waited_for_is_the_one_that_others_find(
    builds: Callable[[], int],
) -> None:
    """The holder removes its file: locked, that one would keep nobody else out."""
    store, seen = _store(), []
    lock = store.path / "key.lock"

    def wait() -> None:
        with store.single_flight("key"):
            seen.append(lock.exists())

    waiter = threading.Thread(target=wait)
    with store.single_flight("key"):
        waiter.start()
        waiter.join(0.3)
        assert waiter.is_alive()
    waiter.join(30)
    assert seen == [True] and not lock.exists()


def _die_writing(plan: Plan) -> None:
    def replace(part: str, whole: Path) -> None:
        os.truncate(part, 100)
        os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace
    compiling.compiled(plan)


def test_killed_while_writing(builds: Callable[[], int]) -> None:
    child = FORK.Process(target=_die_writing, args=(PLAN,))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    store = _store()
    assert store.entries() == [] and len(list(store.path.glob("part-*"))) == 1
    assert compiling.compiled(PLAN).source == "compiled" and builds() == 2
    (part,) = store.path.glob("part-*")
    os.utime(part, (0, 0))
    store.prune(cache.DEFAULT_LIMIT)
    assert not part.exists() and len(store.entries()) == 1


def _flip(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


def _other_format(data: bytes) -> bytes:
    code, about = cache.unpack(data)
    return cache.pack(code, {**about, "format": cache.FORMAT + 1})


def _other_version(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] + 1])


def _foreign(data: bytes) -> bytes:
    code, about = cache.unpack(data)
    return cache.pack(code, {**about, "key": "0" * 32})


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: b"not a kernel at all" * 50,
        _flip,
        _other_format,
        _other_version,
        _foreign,
    ],
    ids=(
        *("empty", "half", "one byte short", "text", "flipped bit"),
        *("other format", "other version", "other key"),
    ),
)
def test_a_damaged_file_is_built_anew(
    builds: Callable[[], int], harm: Callable[[bytes], bytes]
) -> None:
    path = _store().path / f"{compiling.compiled(PLAN).key}.so"
    sound = path.read_bytes()
    path.unlink()
    path.write_bytes(harm(sound))
    compiling.forget()
    with pytest.warns(RuntimeWarning, match="built anew") as reported:
        assert compiling.compiled(PLAN).source == "compiled"
    assert len(reported) == 1 and builds() == 2
    compiling.forget()
    assert compiling.compiled(PLAN).source == "disk"


def _make_file(path: Path) -> None:
    path.write_text("a file where the folder should be")


def _make_public(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


@pytest.mark.parametrize("make", [_make_file, _make_public], ids=["a file", "writable by all"])
def test_an_unusable_folder_means_memory_only(
    builds: Callable[[], int], make: Callable[[Path], None]
) -> None:
    make(cache.folder())
    with pytest.warns(RuntimeWarning, match="in memory only") as reported:
        assert compiling.compiled(PLAN).source == "compiled"
        assert compiling.compiled(PLAN).source == "compiled"
        compiling.compiled(dataclasses.replace(PLAN, causal=True))
    assert len(reported) == 1 and builds() == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_not_trusted(builds: Callable[[], int]) -> None:
    compiling.compiled(PLAN)
    os.chown(cache.folder(), 12345, -1)
    compiling.forget()
    with pytest.warns(RuntimeWarning, match="belongs to user 12345"):
        assert compiling.compiled(PLAN).source == "compiled"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_not_loaded(builds: Callable[[], int]) -> None:
    os.chown(_store().path / f"{compiling.compiled(PLAN).key}.so", 12345, -1)
    compiling.forget()
    with pytest.warns(RuntimeWarning, match="belongs to user 12345. It is built anew"):
        assert compiling.compiled(PLAN).source == "compiled" and builds() == 2


def _compile_on_full_disk(answers: multiprocessing.SimpleQueue) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    insert = cache.Store.insert

    def insert_on_full_disk(store: cache.Store, key: str, data: bytes) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) // 2, resource.RLIM_INFINITY))
        try:
            insert(store, key, data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

    cache.Store.insert = insert_on_full_disk
    answers.put(_sources_and_warnings())


def _compile_on_read_only_disk(answers: multiprocessing.SimpleQueue) -> None:
    _store()

    folder, really_open = str(cache.folder()), os.open

    def open_elsewhere(path: os.PathLike, *args: object, **more: object) -> int:
        if str(path).startswith(folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return really_open(path, *args, **more)

    os.open = open_elsewhere
    answers.put(_sources_and_warnings())


def _sources_and_warnings() -> tuple[list[str], list[str]]:
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        plans = (PLAN, dataclasses.replace(PLAN, causal=True))
        sources = [compiling.compiled(plan).source for plan in plans]
    return sources, [str(warning.message) for warning in reported]


@pytest.mark.parametrize("disk", [_compile_on_full_disk, _compile_on_read_only_disk])
def test_a_disk_that_takes_no_more_means_memory_only(
    builds: Callable[[], int], disk: Callable[[multiprocessing.SimpleQueue], None]
) -> None:
    answers = FORK.SimpleQueue()
    child = FORK.Process(target=disk, args=(answers,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    sources, messages = answers.get()
    assert sources == ["compiled", "compiled"] and builds() == 2
    assert len(messages) == 1 and "takes no kernels" in messages[0]
    assert list(_store().path.iterdir()) == []


def test_the_least_recently_used_go_first(builds: Callable[[], int]) -> None:
    plans = [dataclasses.replace(PLAN, gqa_ratio=ratio) for ratio in (1, 2, 3)]
    keys = [compiling.compiled(plan).key for plan in plans]
    store = _store()
    for age, key in zip((300, 200, 100), keys, strict=True):
        os.utime(store.path / f"{key}.so", (time.time() - age,) * 2)
    assert store.read(keys[0]).hits == 0
    by_key = {entry.key: entry for entry in store.entries()}
    assert by_key[keys[0]].hits == 1
    size = by_key[keys[0]].size
    assert [entry.key for entry in store.prune(2 * size)] == [keys[1]]
    assert [entry.key for entry in store.entries()] == [keys[0], keys[2]]


def test_files_that_are_no_kernels_go_before_those_that_are(builds: Callable[[], int]) -> None:
    """They count, so that a folder full of them would keep no kernel at all."""
    plans = [dataclasses.replace(PLAN, gqa_ratio=ratio) for ratio in (1, 2)]
    first, second = (compiling.compiled(plan).key for plan in plans)
    store = _store()
    path = store.path / f"{first}.so"
    sound = path.read_bytes()
    path.unlink()  # this process has it mapped: written in place, it would crash at its end
    path.write_bytes(_other_format(sound))
    size = store.entries()[0].size
    assert store.prune(2 * path.stat().st_size + size) == [] and path.exists()
    assert store.prune(size) == [] and not path.exists()
    assert [entry.key for entry in store.entries()] == [second]


def test_publishing_keeps_to_the_limit(
    builds: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiling.compiled(PLAN).key
    size = _store().entries()[0].size
    monkeypatch.setenv("FA_CUTE_CACHE_SIZE", str(size + 10))
    second = compiling.compiled(dataclasses.replace(PLAN, causal=True)).key
    assert [entry.key for entry in _store().entries()] == [second] != [first]


def test_the_log_says_which_part_differed(
    builds: Callable[[], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("FA_CUTE_LOG", "other,cache")
    key = compiling.compiled(PLAN).key
    compiling.compiled(dataclasses.replace(PLAN, target="sm_100a"))
    lines = capsys.readouterr().err.splitlines()
    assert "the cache is empty" in lines[0]
    assert f"nearest entry {key} differs in target (sm_90a there, sm_100a here)" in lines[2]


def test_targets_have_entries_of_their_own(builds: Callable[[], int]) -> None:
    compiling.compiled(PLAN)
    compiling.compiled(dataclasses.replace(PLAN, target="sm_100a"))
    compiling.forget()
    kernel = compiling.compiled(dataclasses.replace(PLAN, target="sm_100a"))
    assert kernel.source == "disk" and kernel.plan.target == "sm_100a" and builds() == 2


def test_sizes() -> None:
    sizes = [cache.parse_size(text) for text in ("5", "2K", "3m", "1G")]
    assert sizes == [5, 2048, 3 << 20, 1 << 30]
    with pytest.raises(ValueError, match="'some' is not a size"):
        cache.parse_size("some")


def test_dropped_between_the_check_and_the_load(
    builds: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling.compiled(PLAN)
    compiling.forget()
    read, load = cache.Store.read, launch.load

    def read_and_drop(store: cache.Store, key: str) -> cache.Entry | None:
        entry = read(store, key)
        if entry is not None:
            entry.path.unlink()
        return entry

    def load_anew(path: Path) -> Callable:
        path.stat()  # the loader of the system knows objects that it has loaded by their paths
        return load(path)

    monkeypatch.setattr(cache.Store, "read", read_and_drop)
    monkeypatch.setattr(launch, "load", load_anew)
    assert compiling.compiled(PLAN).source == "compiled" and builds() == 2


def test_a_folder_in_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FA_CUTE_CACHE_DIR", "~/kernels")
    assert cache.folder() == tmp_path / "kernels"


def test_a_limit_that_is_no_size_stops_no_call(
    builds: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was found out after the compile, as an error of the call."""
    monkeypatch.setenv("FA_CUTE_CACHE_SIZE", "plenty")
    with pytest.warns(RuntimeWarning, match="FA_CUTE_CACHE_SIZE is not used: 'plenty'"):
        compiling.compiled(PLAN)
    assert builds() == 1
