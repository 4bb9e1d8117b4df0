"""Plain Python to graph: run the mod on traced values, then look its tape up.

A mod is traced anew on every call, so nothing that it reads (globals, defaults, cells, attributes)
can go stale. That costs about a microsecond an operation, because a tape seen before is only looked
up; a new one is elaborated into a typed, canonical graph. A fault found there is located by running
the mod once more on a tape that notes lines.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy
import torch
from torch.overrides import TorchFunctionMode

from fa_cute.mods.canonical import Finished
from fa_cute.mods.elaborate import Elaboration, Reference
from fa_cute.mods.errors import (
    Location,
    ModError,
    Untraceable,
    calls_mods,
    definition,
    error_at,
    raised_at,
)
from fa_cute.mods.graph import Graph
from fa_cute.mods.indexing import Partial
from fa_cute.mods.operations import OPERATIONS
from fa_cute.mods.tape import LEAVES, Tape
from fa_cute.mods.value import Value, remedy

# Custom ops whose body is known: attention-gym's softcap calls the hardware's tanh by this name.
_CUSTOM_OPS = {"approx::tanh": "tanh"}
_SAVED = (
    "a custom autograd.Function takes a traced value beside a tensor that requires a gradient, and "
    "saves both; write its arithmetic as a plain function, which is differentiated as it stands"
)
_TRANSPARENT_NAMESPACES = ("aten", "prims")
_GETITEM = torch.Tensor.__getitem__
# Tapes kept: a mod whose captured number changes each call would otherwise grow the table forever.
_MOST_TAPES = 4096

_names: dict[object, str] = {}
_lock = threading.Lock()


class Traced(NamedTuple):
    """A mod as a graph, with the tensors and numbers that the graph's positions stand for."""

    graph: Graph
    captured: tuple[torch.Tensor, ...]
    scalars: tuple[int | float | bool, ...]


# A finished tape, and what it gives: the same at each call if it reads no tensor and no 0-d number.
Known = tuple[Finished, Traced | None]
_known_tapes: dict[tuple, Known] = {}


def trace_score_mod(fn: Callable) -> Traced:
    """Trace ``fn(score, b, h, q, kv) -> score``; a ``ModError`` names the line it cannot trace."""
    return _trace(fn, "score_mod")


def trace_mask_mod(fn: Callable) -> Traced:
    """Trace ``fn(b, h, q, kv) -> bool``; a ``ModError`` names the line it cannot trace."""
    return _trace(fn, "mask_mod")


@calls_mods
def run(fn: Callable, kind: str, *, noting_lines: bool = False) -> tuple[Tape, Reference]:
    """Run a mod on a fresh tape: the tape, and the reference of what the mod returned."""
    if not callable(fn):
        raise ModError(f"a {kind} is a function, and {fn!r} of type {type(fn).__name__} is not")
    tape = Tape(kind, noting_lines)
    arguments = tape.arguments()
    mode = _Tracing(tape)
    try:
        # What `with mode` does, whose two methods in Python take as long as five traced values.
        torch._C._push_on_torch_function_stack(mode)
        try:
            result = fn(*arguments)
        finally:
            torch._C._pop_torch_function_stack()
    except ModError:
        raise
    except Exception as fault:
        if tape.fault is not None:
            raise tape.fault from None
        if isinstance(fault, TypeError):
            raise _type_error(fault, fn, kind, arguments) from None
        raise
    if type(result) is Value and result.tape is tape:
        return tape, result.at
    return tape, _returned(tape, result, fn, kind)


def locate(fn: Callable, kind: str, at: int | None) -> Location | None:
    """The user's line that wrote entry ``at`` of the tape; the definition where that is unknown."""
    if at is not None and at >= len(LEAVES[kind]):
        tape, _ = run(fn, kind, noting_lines=True)
        if tape.ops.lines.get(at):
            return tape.ops.lines[at]
    return definition(fn)


def _trace(fn: Callable, kind: str) -> Traced:
    tape, result = run(fn, kind)
    key = (result, tuple(tape.ops))
    known = _known_tapes.get(key)
    if known is None:
        known = _elaborated(fn, kind, tape, result)
        _remember(key, known)
    finished, bare = known
    if bare is not None:
        return bare
    captured = []
    for slot in finished.captured:
        tensor = tape.tensors[slot]
        # A view may have its minus still to come, as ``angles.conj().imag``; a kernel reads memory.
        captured.append(tensor.resolve_neg() if tensor.is_neg() else tensor)
    scalars = tuple([tape.scalars[slot] for slot in finished.scalars]) if finished.scalars else ()
    return Traced(finished.graph, tuple(captured), scalars)


def _elaborated(fn: Callable, kind: str, tape: Tape, result: Reference) -> Known:
    try:
        elaboration = Elaboration()
        elaboration.extend(tape.ops)
        finished = elaboration.finish(result, kind)
    except Untraceable as fault:
        raise error_at(locate(fn, kind, fault.at), str(fault)) from None
    reads = finished.captured or finished.scalars
    return finished, None if reads else Traced(finished.graph, (), ())


def _remember(key: tuple, known: Known) -> None:
    with _lock:
        while len(_known_tapes) >= _MOST_TAPES:
            del _known_tapes[next(iter(_known_tapes))]
        _known_tapes[key] = known


class _Tracing(TorchFunctionMode):
    """Turns torch's functions on traced values, and captured tensors indexed by them, into entries.

    A mode is needed because ``tensor[index]`` does not ask an index for ``__torch_function__``.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is _GETITEM:
            if type(args[1]) is Value or Value in types or _holds_value(args[1]):
                return self._tape.index(*args)
        elif Value in types:
            return self._tape.call(_names.get(func) or self._name(func), args, kwargs)
        return func(*args, **(kwargs or {}))

    def _name(self, func: Callable) -> str:
        name = _bare_name(func)
        if name not in OPERATIONS:
            self._tape.fail(f"{_full_name(func)} is called on a traced value; {_advice(func)}")
        _names[func] = name
        return name


def _holds_value(key: object) -> bool:
    parts = key if isinstance(key, tuple) else (key,)
    for part in parts:
        if type(part) is Value:
            return True
        if isinstance(part, slice) and _holds_value((part.start, part.stop, part.step)):
            return True
    return False


def _bare_name(func: Callable) -> str:
    qualified = getattr(func, "_qualified_op_name", None) or getattr(func, "_name", None)
    if isinstance(qualified, str) and "::" in qualified:
        namespace, _, rest = qualified.partition("::")
        name = rest.partition(".")[0]
        if namespace in _TRANSPARENT_NAMESPACES:
            return name
        return _CUSTOM_OPS.get(f"{namespace}::{name}", qualified)
    name = getattr(func, "__name__", repr(func)).removeprefix("special_")
    return name.strip("_") if name.startswith("__") else name


def _full_name(func: Callable) -> str:
    module = getattr(func, "__module__", None)
    name = _bare_name(func)
    return name if "::" in name or not module else f"{module}.{name}"


def _advice(func: Callable) -> str:
    name = _bare_name(func)
    if "::" in name:
        return "a custom op cannot be looked into; write it with torch's own functions"
    return remedy(name)


def _returned(tape: Tape, result: object, fn: Callable, kind: str) -> Reference:
    if type(result) is Value:
        return tape.operand(result)
    if result is None:
        message = f"the {kind} returns nothing; end it with `return ...`"
    elif isinstance(result, torch.Tensor) and result.ndim:
        message = (
            f"the {kind} returns a tensor of shape {tuple(result.shape)}; index it down to one "
            "value"
        )
    elif isinstance(result, Partial):
        message = result.complaint()
    elif isinstance(result, torch.Tensor | bool | int | float | numpy.generic):
        return tape.operand(result)
    else:
        message = (
            f"the {kind} returns {result!r} of type {type(result).__name__}; return one value "
            "computed from its arguments"
        )
    raise error_at(definition(fn), message)


def _type_error(fault: TypeError, fn: Callable, kind: str, arguments: list[Value]) -> TypeError:
    """What to raise for a TypeError out of a mod: ``fault`` itself if it is the mod's own."""
    wanted = f"a {kind} is called as {kind}({', '.join(LEAVES[kind])})"
    signature = _unfit_signature(fn, arguments)
    if signature is not None:
        return error_at(definition(fn), f"{wanted}, and this one takes {signature}")
    where, said = raised_at(fault), str(fault).partition(", but expected")[0]
    if "save_for_backward" in said:
        return error_at(where, _SAVED)
    if where is None:
        # Nothing of the user's ran: a builtin, or torch's own code, refused the arguments.
        name = getattr(fn, "__name__", type(fn).__name__)
        return error_at(
            definition(fn),
            f"{wanted}, which {name} does not take; write a function that calls it, as "
            f"lambda {', '.join(LEAVES[kind])}: {name}(...)",
        )
    if Value.__name__ in said:
        said = said.replace(Value.__name__, "traced value")
        return error_at(
            where,
            f"torch refuses the call: {said}. A traced value stands for a 0-d tensor, so each "
            "argument is a traced value, or a number where torch takes one; a condition that is "
            "a Python bool belongs into a Python if",
        )
    return fault


def _unfit_signature(fn: Callable, arguments: list[Value]) -> inspect.Signature | None:
    """The signature of a function that cannot be called with ``arguments``."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*arguments)
    except TypeError:
        return signature
    return None
