"""The tape that the traced values of a mod write.

An entry of the tape is a tuple: the name of an operation, then one reference an operand. A
reference is a position on the tape (an int) or an encoded literal (a tuple that tells 1 from 1.0
from True, and compares equal for two NaNs). A tape is hashable, holds no tensor and no type, and
two tapes that are equal are one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch

from fa_cute.mods.elaborate import Elaboration, Entry, Reference
from fa_cute.mods.errors import (
    Location,
    ModError,
    Untraceable,
    caller,
    error_at,
)
from fa_cute.mods.indexing import READABLE, Partial, Scalar, lookup
from fa_cute.mods.terms import Term
from fa_cute.mods.value import Value, bits

LEAVES = {"score_mod": ("score", "b", "h", "q", "kv"), "mask_mod": ("b", "h", "q", "kv")}
_BEGINNINGS = {kind: [(leaf,) for leaf in leaves] for kind, leaves in LEAVES.items()}

_DTYPES = {"float32": torch.float32, "int32": torch.int32, "bool": torch.bool}
_PYTHON_DTYPES = {float: torch.float64, int: torch.int64, bool: torch.bool}
# Tuples: `a | b` makes a union anew each time that it is evaluated.
_NUMBERS = (int, float)
_SEQUENCES = (tuple, list)
_PLACES = (torch.device, torch.layout, torch.memory_format)


class Tape:
    """What one run of a mod did, and the captured tensors that it met."""

    __slots__ = ("_elaboration", "_scalar_at", "_slots", "fault", "ops", "scalars", "tensors")

    def __init__(self, kind: str, noting_lines: bool = False) -> None:
        self.ops: list[Entry] = NotedOps() if noting_lines else []
        self.ops += _BEGINNINGS[kind]
        self.tensors: list[torch.Tensor] = []
        self.scalars: list[Scalar] = []
        # The last fault, for when who called us (numpy, autograd) puts an error of its own over it.
        self.fault: ModError | None = None
        self._slots: dict[object, int] = {}
        self._scalar_at: dict[int, tuple[int, torch.Tensor]] = {}
        self._elaboration: Elaboration | None = None

    def arguments(self) -> list[Value]:
        """The values that the mod is called with."""
        # One by one: as a comprehension it takes half as long again.
        values = [Value(self, 0), Value(self, 1), Value(self, 2), Value(self, 3)]
        if len(self.ops) == 5:
            values.append(Value(self, 4))
        return values

    def record(self, *entry: object) -> Value:
        """Append an operation; its operands must be references already."""
        self.ops.append(entry)
        return Value(self, len(self.ops) - 1)

    def operand(self, value: object) -> Reference:
        """The reference of a number, a traced value or a captured 0-d tensor."""
        kind = type(value)
        if kind is int or kind is bool:
            return (kind, value)
        if kind is float:
            return (float, bits(value))
        if kind is Value:
            if value.tape is self:
                return value.at
            self.fail("a traced value outlived its call; compute it anew each time the mod runs")
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, Partial):
            self.fail(value.complaint())
        if isinstance(value, _NUMBERS):
            return self.operand(int(value) if isinstance(value, int) else float(value))
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            return self.operand(value.item())
        return self.fail(
            f"{value!r} of type {kind.__name__} meets a traced value; numbers, traced values and "
            "captured tensors (torch.as_tensor makes one) can"
        )

    def literal(self, value: object) -> Reference:
        """The reference of any argument of a torch function."""
        kind = type(value)
        if kind is Value or kind is int or kind is float or kind is bool:
            return self.operand(value)
        if value is None or isinstance(value, str):
            return (str, value)
        if kind is torch.dtype:
            return (torch.dtype, value)
        if kind is type and value in _PYTHON_DTYPES:
            return (torch.dtype, _PYTHON_DTYPES[value])
        if isinstance(value, _SEQUENCES):
            return (tuple, tuple([self.literal(item) for item in value]))
        if isinstance(value, _PLACES):
            return (str, None)
        return self.operand(value)

    def call(self, name: str, args: Sequence[object], kwargs: Mapping | None) -> Value:
        """Append a call of a torch function or method that ``OPERATIONS`` has."""
        entry = [name]
        for arg in args:
            known = type(arg) is Value and arg.tape is self
            entry.append(arg.at if known else self.literal(arg))
        if kwargs:
            named = tuple([(key, self.literal(value)) for key, value in kwargs.items()])
            entry.append((dict, named))
        ops = self.ops
        ops.append(tuple(entry))
        return Value(self, len(ops) - 1)

    def index(self, tensor: torch.Tensor, key: object) -> Value | Partial:
        """A read from a captured tensor."""
        dtype = tensor.dtype
        if type(key) is tuple:
            refs = [part.at for part in key if type(part) is Value and part.tape is self]
            full = len(refs) == len(key)
        elif type(key) is Value and key.tape is self:
            refs, full = (key.at,), True
        else:
            refs, full = (), False
        if full and len(refs) == tensor.ndim and dtype in READABLE:
            found = ("load", self.slot(tensor), dtype, len(refs), 0, *refs)
        else:
            try:
                found = lookup(self, tensor, key)
            except Untraceable as fault:
                self.fail(str(fault))
            if type(found) is Partial:
                return found
        ops = self.ops
        ops.append(found)
        return Value(self, len(ops) - 1)

    def slot(
        self, tensor: torch.Tensor, identity: object = None, view: Callable | None = None
    ) -> int:
        """The operand that a tensor is; ``identity`` and ``view`` tell and make a view of it."""
        known = (id(tensor), identity)
        slot = self._slots.get(known)
        if slot is None:
            slot = self._slots[known] = len(self.tensors)
            # A tensor that is held keeps its id from being reused during the trace.
            if view is not None:
                self._slots[known, "held"], tensor = tensor, view(tensor)
            self.tensors.append(tensor)
        return slot

    def dtype(self, at: int) -> torch.dtype:
        """The dtype of a value, which takes elaborating the tape up to it."""
        return _DTYPES[self._term(at).type]

    def shape(self, at: int) -> torch.Size:
        """() for a single value, (n,) for a short vector."""
        width = self._term(at).width
        return torch.Size(() if width == 1 else (width,))

    def fail(self, message: str) -> NoReturn:
        """Raise ``message`` at the user's line that is running."""
        self.fault = error_at(caller(), message)
        raise self.fault

    def _term(self, at: int) -> Term:
        if self._elaboration is None:
            self._elaboration = Elaboration()
        try:
            self._elaboration.extend(self.ops[: at + 1])
        except Untraceable as fault:
            self.fail(str(fault))
        return self._elaboration.terms[at]

    def _tensor(self, tensor: torch.Tensor) -> Reference:
        known = self._scalar_at.get(id(tensor))
        if known is not None:
            return known[0]
        # The mode of the trace would see every attribute of the tensor that is asked: 1.5 us each.
        with torch._C.DisableTorchFunction():
            return self._new_tensor(tensor)

    def _new_tensor(self, tensor: torch.Tensor) -> Reference:
        if tensor.ndim:
            self.fail(
                f"a captured tensor of shape {tuple(tensor.shape)} is used whole; index it down to "
                f"one value, as table[{', '.join(('b', 'h', 'q', 'kv')[-tensor.ndim :])}]"
            )
        if tensor.device.type != "cpu" or (tensor.requires_grad and torch.is_grad_enabled()):
            return self.record(*lookup(self, tensor, ())).at
        value = tensor.item()
        kind = type(value)
        if kind is complex or (kind is int and not -(2**31) <= value < 2**31):
            self.fail(f"the captured scalar {value} is neither float, int32 nor bool")
        at = self.record("scalar", len(self.scalars), kind).at
        self.scalars.append(value)
        # Holding the tensor keeps its id from being reused during the trace.
        self._scalar_at[id(tensor)] = (at, tensor)
        return at


class NotedOps(list):
    """A tape's entries with the user's line of each: slower, for when an error must be located."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[int, Location | None] = {}

    def append(self, entry: Entry) -> None:
        self.lines[len(self)] = caller()
        super().append(entry)
