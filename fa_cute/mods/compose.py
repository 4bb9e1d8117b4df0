"""Masks made from masks: ``all_of(a, b)`` is a & b, ``any_of(a, b)`` a | b, ``negate(a)`` ~a.

The results are mask functions like any other: one graph is traced, and its tiles are proved empty
or full as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_, or_
from typing import Any

from fa_cute.mods.errors import ModError

MaskMod = Callable[[Any, Any, Any, Any], Any]


def all_of(*masks: MaskMod) -> MaskMod:
    """The mask that shows what every one of ``masks`` shows; ModError without any."""
    return _joined("all_of", and_, masks)


def any_of(*masks: MaskMod) -> MaskMod:
    """The mask that shows what at least one of ``masks`` shows; ModError without any."""
    return _joined("any_of", or_, masks)


def negate(mask: MaskMod) -> MaskMod:
    """The mask that shows what ``mask`` hides. The mask must give bools (a comparison does)."""
    _check("negate", mask)

    def negated(b: Any, h: Any, q: Any, kv: Any) -> Any:
        shown = mask(b, h, q, kv)
        return not shown if isinstance(shown, bool) else ~shown  # ~True is -2

    return negated


def _joined(name: str, operation: Callable, masks: tuple[MaskMod, ...]) -> MaskMod:
    if not masks:
        raise ModError(f"{name} takes one mask function or more, and none is given")
    for mask in masks:
        _check(name, mask)

    def joined(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return reduce(operation, (mask(b, h, q, kv) for mask in masks))

    return joined


def _check(name: str, mask: object) -> None:
    if not callable(mask):
        raise ModError(f"{name} takes mask functions, and {mask!r} is of {type(mask).__name__}")
