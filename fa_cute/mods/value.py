"""The traced values of a mod: each operation on one appends to its tape."""

from __future__ import annotations

import keyword
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import torch

from fa_cute.mods.errors import ModAttributeError, caller, error_at
from fa_cute.mods.operations import OPERATIONS

if TYPE_CHECKING:
    from fa_cute.mods.tape import Tape

_TRUTH = (
    "the truth of a traced value is asked (by if, while, and, or, not, in, min, max, or a chained "
    "comparison), but a mod is traced once for all elements; write where(condition, a, b), "
    "& | ~ for and or not, (a <= x) & (x < b) for a <= x < b, and minimum or maximum"
)
_NUMBER = (
    "a traced value is made a Python number (by float, int, math.*, range, or as the index of a "
    "list or array); use torch's function of that name, and torch.as_tensor(list)[index]"
)
_REMEDIES = {
    "item": "a mod is traced once for all elements, so compute on the value as it is",
    "tolist": "a mod is traced once for all elements, so compute on the value as it is",
    "detach": "a gradient cannot be stopped inside a mod; leave detach out",
    "any": "a mod works on one element, so write the condition itself",
    "isin": "write (x == a) | (x == b), or index a captured bool tensor",
    "setitem": "a mod changes no tensor; write where(condition, a, b)",
    "softmax": "attention applies the softmax itself; a mod changes one score",
    "stack": "only captured tensors have dimensions; write the elements out as arithmetic",
    "cat": "only captured tensors have dimensions; write the elements out as arithmetic",
    "gather": "index the captured tensor instead, as table[h, q - kv + n]",
    "embedding": "index the captured tensor instead, as table[bucket, h]",
    "index_select": "index the captured tensor instead, as table[h]",
}

bits = struct.Struct("d").pack  # of a float, in a sixth of the time of its hex()


class Value:
    """A traced value: every operation on it appends to its tape."""

    __slots__ = ("at", "tape")

    def __init__(self, tape: Tape, at: int) -> None:
        self.tape = tape
        self.at = at

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None) -> NoReturn:
        raise error_at(caller(), "a traced value is used after its mod has returned")

    def __array_ufunc__(self, ufunc, method: str, *inputs: object, **kwargs: object) -> Value:
        """numpy's functions, and the operators of numpy's scalars, by their names."""
        if method != "__call__" or ufunc.__name__ not in OPERATIONS:
            self.tape.fail(f"numpy.{ufunc.__name__} is called on a traced value; use torch's")
        return self.tape.call(ufunc.__name__, inputs, kwargs)

    @property
    def dtype(self) -> torch.dtype:
        return self.tape.dtype(self.at)

    @property
    def shape(self) -> Shape:
        return Shape(self.tape.shape(self.at))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        """Where a new 0-d tensor is passed by value: a mod has no device of its own."""
        return torch.device("cpu")

    def size(self, dimension: int | None = None) -> Shape | int:
        return self.shape if dimension is None else self.shape[dimension]

    def dim(self) -> int:
        return self.ndim

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, key: object) -> Value:
        key = key[0] if isinstance(key, tuple) and len(key) == 1 else key
        if key is Ellipsis or (isinstance(key, slice) and whole(key)):
            return self
        return self.tape.record("element", self.at, self.tape.operand(key))

    def __divmod__(self, other: object) -> tuple[Value, Value]:
        return self // other, self % other

    def __floor__(self) -> Value:
        return self.floor().int()

    def __ceil__(self) -> Value:
        return self.ceil().int()

    def __trunc__(self) -> Value:
        return self.trunc().int()

    def __round__(self, digits: int | None = None) -> Value:
        return self.round().int() if digits is None else self.round(decimals=digits)

    def __repr__(self) -> str:
        return f"<traced {self.tape.ops[self.at][0]}>"

    def __format__(self, spec: str) -> str:
        if spec:
            self.tape.fail(
                f"a traced value is formatted with {spec!r}, but it has no number while its mod is "
                "traced; return it, or call the mod on torch's tensors to look at numbers"
            )
        return repr(self)

    def __bool__(self) -> NoReturn:
        self.tape.fail(_TRUTH)

    def __float__(self) -> NoReturn:
        self.tape.fail(_NUMBER)

    __int__ = __index__ = __complex__ = __len__ = __float__

    def __iter__(self) -> NoReturn:
        self.tape.fail("a traced value is iterated over; index a short vector, as x[0]")

    def __setitem__(self, key: object, value: object) -> NoReturn:
        self.tape.fail("an element of a traced value is assigned; write where(condition, a, b)")

    def __getattr__(self, name: str) -> Callable:
        if name.startswith("__"):
            raise AttributeError(name)
        message = f".{name} is asked of a traced value; {remedy(name)}"
        raise ModAttributeError(str(error_at(caller(), message)))


class Shape(tuple):
    """``()`` of a single value, ``(n,)`` of a short vector; an index past it is a ``ModError``."""

    def __getitem__(self, key: object) -> object:
        try:
            return super().__getitem__(key)
        except IndexError:
            dimensions = "one dimension" if len(self) else "no dimensions: it is one element"
            message = f"dimension {key} of a traced value is asked, which has {dimensions}"
            remedy = "ask a captured tensor for its sizes, as bias.shape[-1]"
            raise error_at(caller(), f"{message}; {remedy}") from None


def whole(part: slice) -> bool:
    """Whether a slice is ``:``, told without comparing traced values."""
    return part.start is None and part.stop is None and part.step is None


def remedy(name: str) -> str:
    """What to write instead of an operation that the graph lacks."""
    if name.endswith("_") and name[:-1] in OPERATIONS:
        return f"traced values never change in place: write {name[:-1]}, and use its result"
    known = "docs/writing_a_mod.md lists what a mod can do"
    return _REMEDIES.get(name, f"no such operation is traced ({known})")


def _operator(name: str, *, reflected: bool = False) -> Callable:
    """``self OP other``, or ``other OP self`` where it is ``reflected``."""

    def apply(self: Value, other: object) -> Value:
        tape = self.tape
        kind = type(other)
        if kind is Value and other.tape is tape:
            ref = other.at
        elif kind is int:
            ref = (int, other)
        elif kind is float:
            ref = (float, bits(other))
        else:
            ref = tape.operand(other)
        ops = tape.ops
        ops.append((name, ref, self.at) if reflected else (name, self.at, ref))
        return Value(tape, len(ops) - 1)

    return apply


def _prefix(name: str) -> Callable:
    def apply(self: Value) -> Value:
        tape = self.tape
        ops = tape.ops
        ops.append((name, self.at))
        return Value(tape, len(ops) - 1)

    return apply


def _method(name: str) -> Callable:
    def call(self: Value, *args: object, **kwargs: object) -> Value:
        tape = self.tape
        if args or kwargs:
            return tape.call(name, (self, *args), kwargs)
        ops = tape.ops
        ops.append((name, self.at))
        return Value(tape, len(ops) - 1)

    return call


def _unhashable(value: Value) -> NoReturn:
    value.tape.fail(
        "a traced value is looked up in a set or a dict; compare it, as (h == 0) | (h == 1), or "
        "index a captured tensor, as table[h]"
    )


def _install_operators() -> None:
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Value, f"__{name}__", _operator(name))
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
        *("and", "or", "xor", "lshift", "rshift", "matmul"),
    ):
        setattr(Value, f"__{name}__", _operator(name))
        setattr(Value, f"__r{name}__", _operator(name, reflected=True))
    for name in ("neg", "pos", "abs", "invert"):
        setattr(Value, f"__{name}__", _prefix(name))
    for name in OPERATIONS:
        if not keyword.iskeyword(name):
            setattr(Value, name, _method(name))
    # By identity it would make `h in {0, 1}` and `{0: a}.get(h)` false without a word.
    Value.__hash__ = _unhashable


_install_operators()
