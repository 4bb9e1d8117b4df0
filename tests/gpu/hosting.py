"""Calls that take the kernel of sm_100, hosted on Hopper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fa_cute import api

from .configurations import HOSTED_TARGET


@pytest.fixture(autouse=True)
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls take the hosted kernel; prepared calls of another target are forgotten."""
    monkeypatch.setenv("FA_CUTE_TARGET", HOSTED_TARGET)
    api._prepared.clear()
    yield
    api._prepared.clear()
