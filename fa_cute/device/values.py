"""What stands behind a value of a trace: the loops round it, and what they carry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cutlass._mlir import ir


def inside(block: Any) -> Iterator[tuple[Any, Any]]:
    """The (operation, block) of the loops and branches round ``block``, the innermost first."""
    while block is not None:
        owner = getattr(block.owner, "operation", block.owner)
        if owner.name.endswith((".func", ".module")):
            return
        if owner.name.startswith("scf."):
            yield owner, block
        block = owner.block


def looped(value: Any, kind: str) -> tuple[Any, int] | None:
    """The loop of that ``kind`` whose body has the argument ``value``, and its number; or None."""
    if not isinstance(value.owner, ir.Block):
        return None
    loop, block = next(inside(value.owner), (None, None))
    if loop is None or block != value.owner or loop.name != kind:
        return None
    return loop, ir.BlockArgument(value).arg_number


def begun(value: Any) -> Any:
    """What the ``scf.while`` whose body has the argument ``value`` began with there; or None."""
    found = looped(value, "scf.while")
    return None if found is None else plain(found[0].operands[found[1]])


def carried(value: Any) -> Any:
    """What a ``scf.for`` began with where its body has the argument ``value``, no number; or None.

    The loop may be under way, so whether it hands on what it got is not known: a tensor stays in
    its buffer.
    """
    found = None if isinstance(value.type, ir.IntegerType) else looped(value, "scf.for")
    if found is None or found[1] == 0:  # the counter
        return None
    return plain(found[0].operands[2 + found[1]])  # behind begin, end and step


def counting_of(value: Any) -> tuple[Any, int] | None:
    """The loop whose turns ``value`` counts, and how many loops are round it; or None."""
    found = looped(value, "scf.for")
    if found is None or found[1] != 0:
        return None
    loop = found[0]
    return loop, sum(op.name in ("scf.for", "scf.while") for op, _ in inside(loop.block))


def plain(value: Any) -> Any:
    """The value of the trace behind one of the compiler's Python objects, or a Python int.

    Emits nothing: ``ir_value`` of a pointer would be a conversion.
    """
    while not isinstance(value, ir.Value | int):
        value = value.value
    return value if isinstance(value, int) else ir.Value(value)  # its base class has a hash
