"""The error of a modifier that cannot be traced, and where in the user's code it happened."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable
from types import CodeType
from typing import NamedTuple

import numpy
import torch

# Frames of these packages are never the user's line.
_NOT_USERS = (
    os.path.dirname(__file__) + os.sep,
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(numpy.__file__) + os.sep,
)


class ModError(TypeError):
    """A modifier does what the graph cannot hold. The message names the line and the remedy."""


class ModAttributeError(ModError, AttributeError):
    """No such attribute of a traced value; an ``AttributeError`` too, so that ``hasattr`` works."""


class Untraceable(Exception):
    """Raised where the user's line is not known; whoever knows it turns this into a ``ModError``.

    ``at`` is the position on the tape that is to blame, if it is not the current one.
    """

    def __init__(self, message: str, at: int | None = None) -> None:
        super().__init__(message)
        self.at = at


# Code that calls a mod: no line of the user's mod lies above it on the stack.
_CALLS_MODS: set[CodeType] = set()
_MOST_QUOTED = 80  # characters of a line


class Location(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        if len(source) > _MOST_QUOTED:
            source = source[: _MOST_QUOTED - 4].rstrip() + " ..."
        code = f": `{source}`" if source else ""
        return f"{self.file}:{self.line}, in {self.function}{code}"


def calls_mods(function: Callable) -> Callable:
    """Marks the function that calls mods: ``caller`` looks no further up."""
    _CALLS_MODS.add(function.__code__)
    return function


def caller() -> Location | None:
    """The innermost line of the running mod that is neither the tracer's nor torch's.

    None where no line is: a mod may be a builtin, such as ``max``.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code not in _CALLS_MODS:
        if _is_users(frame.f_code):
            return Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def raised_at(error: BaseException) -> Location | None:
    """The innermost line that an exception came through, the tracer's and torch's left out."""
    found, step = None, error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if _is_users(code):
            found = Location(code.co_filename, step.tb_lineno, code.co_name)
        step = step.tb_next
    return found


def _is_users(code: CodeType) -> bool:
    return not code.co_filename.startswith(_NOT_USERS)


def definition(fn: object) -> Location | None:
    """Where a Python callable is defined, through ``functools.partial`` and ``__call__``.

    None for what no user wrote: builtins, torch's own modules.
    """
    while hasattr(fn, "func"):
        fn = fn.func
    if not hasattr(fn, "__code__"):
        fn = type(fn).__call__
    code = getattr(fn, "__code__", None)
    if code is None or not _is_users(code):
        return None
    return Location(code.co_filename, code.co_firstlineno, code.co_name)


def error_at(where: Location | None, message: str) -> ModError:
    """The error to raise for ``message``, at the user's line where that is known."""
    return ModError(f"{where}\n  {message}" if where else message)
