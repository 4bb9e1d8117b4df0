"""A tape made into a typed, canonical graph."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from fa_cute.mods.canonical import Builder, Finished
from fa_cute.mods.errors import Untraceable
from fa_cute.mods.graph import Captured
from fa_cute.mods.operations import DTYPE_KIND, OPERATIONS
from fa_cute.mods.terms import Term, kind

Reference = int | tuple
Entry = tuple

_LEAF_TYPES = {"score": "float32", "b": "int32", "h": "int32", "q": "int32", "kv": "int32"}
_SCALAR_TYPES = {bool: "bool", int: "int32", float: "float32"}
# torch's names of leading arguments that may be given by keyword.
_POSITIONAL = ("condition", "input", "self", "other", "exponent")


class Elaboration:
    """Terms for the entries of a tape, extended as the tape grows.

    With ``problems`` a list, faults are noted there as (position, message) and a stand-in goes on.
    """

    def __init__(self, problems: list[tuple[int, str]] | None = None) -> None:
        self.builder = Builder()
        self.terms: list[Term] = []
        self.captured: list[Captured | None] = []
        self.scalars: list[str] = []
        self._problems = problems

    def extend(self, ops: Sequence[Entry]) -> None:
        """Elaborate the entries not seen yet; ``Untraceable`` names the position of a fault."""
        for at in range(len(self.terms), len(ops)):
            self.builder.origin = at
            try:
                self.terms.append(self._term(*ops[at]))
            except Untraceable as fault:
                if self._problems is None:
                    raise Untraceable(str(fault), at) from None
                self._problems.append((at, str(fault)))
                self.terms.append(Term(self.builder, self.builder.const(0, "int32")))

    def finish(self, result: Reference, kind_of_mod: str) -> Finished:
        """The graph whose result is ``result``, as a float32 score or a bool mask."""
        at = result if isinstance(result, int) else None
        value = self._decoded(result)
        term = value if isinstance(value, Term) else None
        type, width = kind(value), term.width if term else 1
        if width > 1:
            raise Untraceable(
                f"a vector of {width} elements is returned; reduce it, as x.sum(-1) or x.dot(y)", at
            )
        if kind_of_mod == "mask_mod" and type != "bool":
            # What is added to scores is 0 where a key counts: `!= 0` would show what it hides.
            added = "of a mask that is added to scores (0 or -inf) `value == 0`"
            comparison = added if type == "float32" else "`value != 0`"
            raise Untraceable(
                f"a mask_mod returns {_article(type)}; return a bool, True where a key counts, as "
                f"a comparison gives: {comparison}",
                at,
            )
        if kind_of_mod == "score_mod" and type == "bool":
            raise Untraceable(
                "a score_mod returns a bool; return a score, as "
                "`where(visible, score, float('-inf'))`, or pass it as mask_mod",
                at,
            )
        wanted = "bool" if kind_of_mod == "mask_mod" else "float32"
        node = term.cast(wanted).at if term else self.builder.const(value, wanted)
        return self.builder.finish(node, self.captured, self.scalars)

    def _term(self, name: str, *refs: Reference) -> Term:
        if name in _LEAF_TYPES:
            return Term(self.builder, self.builder.leaf(name, _LEAF_TYPES[name]))
        if name == "scalar":
            return self._scalar(*refs)
        if name == "load":
            return self._load(*refs)
        args, kwargs = self._arguments(refs)
        try:
            result = OPERATIONS[name](*args, **kwargs)
        except TypeError as fault:
            told = str(fault).partition("()")[2].strip() or str(fault)
            raise Untraceable(f"{name} on a traced value {told}") from None
        return result if isinstance(result, Term) else self.terms[0].like(result)

    def _arguments(self, refs: Sequence[Reference]) -> tuple[list, dict]:
        args = []
        kwargs = {}
        for ref in refs:
            if isinstance(ref, tuple) and ref[0] is dict:
                kwargs = {key: self._decoded(value) for key, value in ref[1]}
            else:
                args.append(self._decoded(ref))
        args += [kwargs.pop(key) for key in _POSITIONAL if key in kwargs]
        return args, kwargs

    def _decoded(self, ref: Reference) -> object:
        if isinstance(ref, int):
            return self.terms[ref]
        how, value = ref
        if how is float:
            return struct.unpack("d", value)[0]
        if how is tuple:
            return tuple(self._decoded(item) for item in value)
        return value

    def _scalar(self, slot: int, python: type) -> Term:
        self.scalars.append(_SCALAR_TYPES[python])
        return Term(self.builder, self.builder.leaf("scalar", _SCALAR_TYPES[python], slot))

    def _load(self, slot: int, dtype: torch.dtype, ndim: int, width: int, *refs: Reference) -> Term:
        name = str(dtype).removeprefix("torch.")
        self.captured += [None] * (slot + 1 - len(self.captured))
        self.captured[slot] = Captured(name, ndim)
        indices = [self._index(ref) for ref in refs]
        if width == 1:
            # One element is a value, not a vector: it needs no static size.
            indices, width = [*indices, self.builder.const(0, "int32")], 0
        at = self.builder.leaf("load", DTYPE_KIND[name], slot, tuple(indices), width or 1)
        return Term(self.builder, at)

    def _index(self, ref: Reference) -> int:
        index = self._decoded(ref)
        if kind(index) != "int32":
            raise Untraceable(
                f"a captured tensor is indexed with {_article(kind(index))}; write index.int()"
            )
        if not isinstance(index, Term):
            return self.builder.const(index, "int32")
        if index.width > 1:
            raise Untraceable(
                "a captured tensor is indexed with a vector; index with one value a dimension"
            )
        return index.at


def _article(type: str) -> str:
    return {"bool": "a bool", "int32": "an integer", "float32": "a float"}[type]
