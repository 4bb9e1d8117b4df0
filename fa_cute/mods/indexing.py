"""Reading a captured tensor: what ``tensor[key]`` means when the key holds traced values."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from fa_cute.mods.errors import Untraceable, caller, error_at
from fa_cute.mods.operations import DTYPE_KIND
from fa_cute.mods.value import Value, whole

if TYPE_CHECKING:
    from fa_cute.mods.tape import Tape

Scalar = bool | int | float
READABLE = frozenset(getattr(torch, name) for name in DTYPE_KIND)
_ALL = slice(None)
_UNINDEXED = (slice, type(Ellipsis))


class Partial:
    """A captured tensor with two or more dimensions left to index: ``table[b][h][q, kv]``."""

    __slots__ = ("_given", "_tape", "_tensor")

    def __init__(self, tape: Tape, tensor: torch.Tensor, given: tuple) -> None:
        self._tape, self._tensor, self._given = tape, tensor, given

    def __getitem__(self, key: object) -> Value | Partial:
        more = key if isinstance(key, tuple) else (key,)
        return self._tape.index(self._tensor, (*self._given, *more))

    def complaint(self) -> str:
        """What to tell whoever uses this as a value."""
        shape, given = tuple(self._tensor.shape), len(self._given)
        return (
            f"a captured tensor of shape {shape} is used with only {given} of its dimensions "
            "indexed; index all of them for one value, or all but one for a short vector"
        )

    def __bool__(self) -> NoReturn:
        raise error_at(caller(), self.complaint())


def lookup(tape: Tape, tensor: torch.Tensor, key: object) -> tuple | Partial:
    """The tape's entry for ``tensor[key]``: ("load", slot, dtype, rank, width, *index references).

    ``width`` is 0 for a full index, else the size of the dimension that a partial index leaves; it
    becomes the operand's last. A static slice becomes part of the operand, as a view.
    """
    parts = key if isinstance(key, tuple) else (key,)
    dtype, rank = tensor.dtype, tensor.ndim
    if dtype not in READABLE:
        raise Untraceable(
            f"a captured tensor has dtype {dtype}; bool, integers, fp8 (e4m3fn, e5m2), fp16, bf16, "
            "fp32 and fp64 can be read: convert it first"
        )
    if rank - 1 <= len(parts) <= rank and not any(isinstance(p, _UNINDEXED) for p in parts):
        refs = [
            part.at
            if type(part) is Value and part.tape is tape
            else _index(tape, tensor, dim, part)
            for dim, part in enumerate(parts)
        ]
        width = 0 if len(parts) == rank else _width(tensor)
        return ("load", tape.slot(tensor), dtype, rank, width, *refs)
    return _general(tape, tensor, _expanded(parts, rank))


def _general(tape: Tape, tensor: torch.Tensor, parts: tuple) -> tuple | Partial:
    """``lookup`` for one part a dimension, slices among them."""
    for part in parts:
        if isinstance(part, slice):
            _check_bounds(part)
    kept = [dim for dim, part in enumerate(parts) if isinstance(part, slice)]
    if len(kept) > 1:
        if all(part is _ALL for part in parts[kept[0] :]):
            return Partial(tape, tensor, parts[: kept[0]])
        raise Untraceable(
            f"{len(kept)} dimensions of a captured tensor of shape {tuple(tensor.shape)} are left "
            "unindexed; a short vector has one, so index the others"
        )
    refs = [
        _index(tape, tensor, dim, part)
        for dim, part in enumerate(parts)
        if not isinstance(part, slice)
    ]
    if not kept or (kept[0] == tensor.ndim - 1 and whole(parts[-1])):
        slot = tape.slot(tensor)
    else:
        part = parts[kept[0]]
        identity = (kept[0], part.start, part.stop, part.step)
        slot = tape.slot(tensor, identity, lambda whole: _view(whole, part, kept[0]))
    width = _width(tape.tensors[slot]) if kept else 0
    return ("load", slot, tensor.dtype, tensor.ndim, width, *refs)


def _width(tensor: torch.Tensor) -> int:
    width = tensor.shape[-1]
    if width == 0:
        raise Untraceable("a partial index leaves a vector of 0 elements")
    return width


def _check_bounds(part: slice) -> None:
    for bound in (part.start, part.stop, part.step):
        if bound is not None and type(bound) is not int:
            raise Untraceable(
                "a slice of a captured tensor has a bound that is no Python integer; slices are "
                "fixed when a mod is traced, so index with a value, as table[h, q - kv + 5]"
            )


def _view(tensor: torch.Tensor, part: slice, dim: int) -> torch.Tensor:
    """The operand that ``tensor`` sliced along ``dim`` is: that dimension goes last."""
    tensor = tensor.movedim(dim, -1)
    return tensor if whole(part) else tensor[..., part]


def _expanded(parts: tuple, rank: int) -> tuple:
    """One part a dimension: an ellipsis written out, missing ones at the end as ``:``."""
    ellipses = [at for at, part in enumerate(parts) if part is Ellipsis]
    missing = rank - (len(parts) - len(ellipses))
    if len(ellipses) > 1 or missing < 0:
        raise Untraceable(
            f"{len(parts) - len(ellipses)} indices are given to a captured tensor, "
            f"which has {rank} dimensions"
        )
    at = ellipses[0] if ellipses else len(parts)
    return (*parts[:at], *(_ALL,) * missing, *parts[at + len(ellipses) :])


def _index(tape: Tape, tensor: torch.Tensor, dim: int, part: object) -> object:
    if type(part) is int:
        size = tensor.shape[dim]
        if not -size <= part < size:
            raise Untraceable(f"index {part} is outside dimension {dim}, which has {size} elements")
    elif part is None or isinstance(part, bool):
        raise Untraceable(
            f"a captured tensor is indexed with {part}; write one integer a dimension, : or ..."
        )
    elif isinstance(part, torch.Tensor) and part.ndim:
        raise Untraceable(
            f"a captured tensor is indexed with a tensor of shape {tuple(part.shape)}; index that "
            "one first, as table[ids[q]]"
        )
    return tape.operand(part)
