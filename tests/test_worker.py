"""What is compiled ahead, by a process beside: what, when, and that nothing depends on it."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fa_cute.configuration import Configuration
from fa_cute.host import cache, worker
from fa_cute.host import compile as compiling
from fa_cute.host.backward import plans_of
from fa_cute.plan import Plan

ARGUMENTS = {"head_dim": 64, "dtype": "bfloat16", "target": "sm_90a", "return_lse": True}


def _forward(target: str = "sm_90a") -> Plan:
    return Configuration(**{**ARGUMENTS, "target": target}).plan()[0]


def _following(forward: Plan) -> Sequence[Plan]:
    plans = plans_of(forward, deterministic=False, lse_gradient=False)
    return plans.slowest_first()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The directions of what was to be compiled ahead, a list each time."""
    calls: list[list[str]] = []
    monkeypatch.setattr(worker, "ahead", lambda plans: calls.append([p.direction for p in plans]))
    return calls


def test_what_follows_is_asked_for_where_a_kernel_is_compiled(
    builds: Callable[[], int], asked: list[list[str]]
) -> None:
    forward = _forward()
    compiling.compiled(forward, _following)
    assert asked == [["backward", "backward-postprocess", "backward-preprocess"]]
    compiling.compiled(forward, _following)
    compiling.forget()
    assert compiling.compiled(forward, _following).source == "disk"
    assert len(asked) == 1


def test_what_is_at_hand_or_does_not_exist_is_not_asked_for(
    builds: Callable[[], int], asked: list[list[str]]
) -> None:
    main, after, before = _following(_forward())
    compiling.compiled(after)
    compiling.publish(before)
    compiling.compiled(_forward(), _following)
    compiling.compiled(
        _forward("sm_100a"), lambda forward: [dataclasses.replace(main, target="sm_100a")]
    )
    assert asked == [["backward"], []]


def test_without_a_disk_nothing_is_asked_for(
    builds: Callable[[], int], asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FA_CUTE_CACHE", "0")
    assert compiling.compiled(_forward(), _following).source == "compiled"
    assert not asked


@pytest.mark.parametrize("executable", ["", "/usr/sbin/uwsgi", "/nowhere/python3"])
def test_where_no_process_can_be_started_there_is_none(
    builds: Callable[[], int], monkeypatch: pytest.MonkeyPatch, executable: str
) -> None:
    monkeypatch.setattr(worker, "_cores_are_free", lambda: True)
    monkeypatch.setattr(sys, "executable", executable)
    threads = threading.active_count()
    assert compiling.compiled(_forward(), _following).source == "compiled"
    assert builds() == 1 and threading.active_count() == threads


@pytest.mark.parametrize(
    ("cores", "load", "starts"), [(16, 2.0, True), (16, 15.5, False), (3, 0.0, False)]
)
def test_a_host_without_free_cores_compiles_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, cores: int, load: float, starts: bool
) -> None:
    def start(**_: object) -> None:
        started.append(True)
        raise OSError

    started: list[bool] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(worker, "start", start)
    worker.ahead(_following(_forward()))
    assert bool(started) == starts


@pytest.mark.compile
def test_a_kernel_compiled_beside_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("FA_CUTE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FA_CUTE_LOG", "cache")
    monkeypatch.setattr(compiling, "_memory", {})
    monkeypatch.setattr(worker, "_cores_are_free", lambda: True)
    (_, *passes), store = _following(_forward()), cache.opened()
    worker.ahead(passes)
    keys = [compiling.key_of(compiling.key_parts(plan)) for plan in passes]
    end = time.monotonic() + 120
    while not all(key in store for key in keys) and time.monotonic() < end:
        time.sleep(0.1)
    assert [compiling.compiled(plan).source for plan in passes] == ["disk", "disk"]
    assert "compiles 2 more" in capfd.readouterr().err
