"""The expression graph of a modifier: its nodes, its identity, and what each node depends on.

A traced ``score_mod`` or ``mask_mod`` is a tuple of typed scalar operations in topological order.
Everything that reads a mod (the torch emitter, the kernel emitter, the cache key) reads this.

Types are ``bool``, ``int32`` and ``float32``; operand types are explicit, so a conversion is a
``cast`` node. A node of ``width`` n > 1 is a short vector; elementwise operations repeat width 1.

Operations, all elementwise unless noted:

- leaves: ``score b h q kv``, ``const`` (``attr``: the number), ``scalar`` (``attr``: a place in
  ``Graph.scalars``), ``load`` (``attr``: a place in ``Graph.captured``; ``args``: one int32 index
  a dimension, or one fewer for a vector of the last dimension). A negative index counts from the
  end; after that an index is clamped into the dimension, so no load leaves its tensor.
- one operand: ``neg abs sign`` (int32, float32), ``exp exp2 log sqrt rsqrt tanh sigmoid sin cos erf
  floor ceil round trunc`` (float32; ``round`` is half to even), ``not`` (bool; int32: bitwise),
  ``cast`` (to ``type``; float to int truncates, to bool is ``!= 0``), ``round_to`` (a float
  rounded to the dtype that ``attr`` names), ``sum`` (of a vector, width 1).
- two operands of one type: ``add sub mul minimum maximum`` (int32, float32; ``attr`` "clamp" or
  "relu" says what gradient the first of equal operands gets, all or none), ``floordiv mod``
  (int32, float32; floor semantics, as Python), ``truediv pow`` (float32), ``lt le eq ne`` (give
  bool), ``and or xor`` (bool; int32: bitwise), ``shl shr`` (int32; ``shr`` keeps the sign).
- ``where(condition, a, b)``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

LEAVES = ("score", "b", "h", "q", "kv", "const", "scalar", "load")
UNARY = (
    *("neg", "abs", "sign", "exp", "exp2", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos"),
    *("erf", "floor", "ceil", "round", "trunc", "not", "cast", "round_to", "sum"),
)
COMMUTATIVE = frozenset(("add", "mul", "minimum", "maximum", "eq", "ne", "and", "or", "xor"))
COMPARISONS = frozenset(("lt", "le", "eq", "ne"))

# Approximate issue slots an element on a recent NVIDIA SM: what decides whether hoisting pays.
_COST = {
    **dict.fromkeys(("score", "b", "h", "q", "kv", "const", "scalar"), 0),
    **dict.fromkeys(("exp2", "tanh", "rsqrt"), 4),
    **dict.fromkeys(("exp", "log", "sqrt", "sin", "cos", "sigmoid", "truediv"), 8),
    **dict.fromkeys(("pow", "floordiv", "mod"), 16),
    **dict.fromkeys(("load", "erf"), 24),
}


@dataclass(frozen=True)
class Node:
    """One value: an operation on earlier nodes (positions in ``Graph.nodes``), or a leaf."""

    op: str
    args: tuple[int, ...]
    type: str
    width: int = 1
    attr: object = None

    def text(self) -> str:
        """The node as text that tells any two different nodes apart, on every machine alike."""
        attr = "" if self.attr is None else f"[{number_text(self.attr)}]"
        width = "" if self.width == 1 else f"x{self.width}"
        return f"{self.op}{attr}({','.join(map(str, self.args))}):{self.type}{width}"


@dataclass(frozen=True)
class Captured:
    """A captured tensor operand: torch's name of its dtype, and its rank.

    ``inner`` is the size of the last dimension where a partial index makes it static, else None.
    """

    dtype: str
    ndim: int
    inner: int | None = None


@dataclass(frozen=True, eq=False)
class Graph:
    """A canonical graph. Two mods that compute the same way have equal graphs, and equal ``key``.

    ``scalars`` holds the types of the captured 0-d CPU tensors, which travel by value. ``more``:
    nodes that are wanted beside the result (of a derivative); usually none.
    """

    nodes: tuple[Node, ...]
    result: int
    captured: tuple[Captured, ...]
    scalars: tuple[str, ...]
    more: tuple[int, ...] = ()
    key: str = field(init=False)

    def __post_init__(self) -> None:
        lines = [node.text() for node in self.nodes]
        lines += [f"captured {c.dtype} {c.ndim} {c.inner}" for c in self.captured]
        lines += [f"scalars {self.scalars}", f"result {self.result}"]
        lines += [f"more {self.more}"] if self.more else []
        object.__setattr__(self, "key", hashlib.sha256("\n".join(lines).encode()).hexdigest())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def dependence(self) -> tuple[frozenset[str], ...]:
        """For each node the leaves that it reads: of score, b, h, q, kv, scalar, load."""
        return self._dependence

    def levels(self) -> tuple[str, ...]:
        """For each node how often it must be computed.

        "constant"; "tile": b, h, scalars and captured values only; "row": q too; "column": kv too;
        "diagonal": q and kv only through q - kv, so evaluating it at (q - kv, 0) gives its value;
        "element": everything else.
        """
        return self._levels

    def describe(self) -> str:
        """A listing for people: one line a node, with its type and its level."""
        lines = []
        for at, (node, level) in enumerate(zip(self.nodes, self.levels(), strict=True)):
            width = "" if node.width == 1 else f"x{node.width}"
            lines.append(f"%{at:<3} {node.type + width:<11} {level:<9} {self._spelled(node)}")
        lines.append(f"result %{self.result}")
        for at, c in enumerate(self.captured):
            inner = "" if c.inner is None else f", last dimension {c.inner}"
            lines.append(f"captured[{at}]: {c.dtype}, {c.ndim} dimensions{inner}")
        lines += [f"scalars[{at}]: {kind}" for at, kind in enumerate(self.scalars)]
        return "\n".join(lines)

    def _spelled(self, node: Node) -> str:
        operands = ", ".join(f"%{arg}" for arg in node.args)
        if node.op == "const":
            return repr(node.attr)
        if node.op == "load":
            return f"captured[{node.attr}][{operands}]"
        if node.op == "scalar":
            return f"scalars[{node.attr}]"
        if node.op == "round_to":
            return f"round_to({operands}, {node.attr})"
        return node.op if node.op in LEAVES else f"{node.op}({operands})"

    @cached_property
    def _dependence(self) -> tuple[frozenset[str], ...]:
        reads: list[frozenset[str]] = []
        for node in self.nodes:
            own = {node.op} if node.op in LEAVES and node.op != "const" else set()
            reads.append(frozenset(own).union(*(reads[arg] for arg in node.args)))
        return tuple(reads)

    @cached_property
    def _levels(self) -> tuple[str, ...]:
        levels: list[str] = []
        slopes: list[tuple[int, int] | None] = []
        for node, reads in zip(self.nodes, self._dependence, strict=True):
            slopes.append(_slopes(self.nodes, node, slopes))
            indices = reads & {"score", "q", "kv"}
            if not indices:
                levels.append("tile" if reads else "constant")
            elif len(indices) == 1 and "score" not in indices:
                levels.append("row" if "q" in indices else "column")
            else:
                diagonal = _is_diagonal(node, slopes, levels)
                levels.append("diagonal" if diagonal else "element")
        return tuple(levels)


def cost(node: Node) -> int:
    """Roughly the instruction slots that the node takes an element: 1 for plain arithmetic."""
    return _COST.get(node.op, 1) * node.width


def number_text(value: object) -> str:
    """A number (or a name) as text: exact for floats, one spelling for every NaN."""
    if isinstance(value, float):
        return "nan" if value != value else value.hex()
    return repr(value)


def _slopes(
    nodes: tuple[Node, ...], node: Node, known: list[tuple[int, int] | None]
) -> tuple[int, int] | None:
    """(d/dq, d/dkv) of a node that is affine in q and kv with exact integer arithmetic, else None.

    A float32 node counts when it is the cast of such a node, or a sum or difference of such casts:
    those are exact below 2**24, so shifting q and kv together leaves them unchanged.
    """
    if node.op in ("q", "kv"):
        return (1, 0) if node.op == "q" else (0, 1)
    args = [known[arg] for arg in node.args]
    if node.op == "const" or (node.type == "int32" and args.count((0, 0)) == len(args)):
        whole = node.type == "int32" or (float(node.attr).is_integer() and abs(node.attr) < 2**22)
        return (0, 0) if whole else None
    if None in args or not args:
        return None
    if node.op == "cast" and node.type != "bool":
        return args[0] if nodes[node.args[0]].type != "float32" else None
    if node.op == "neg":
        return (-args[0][0], -args[0][1])
    if node.op in ("add", "sub"):
        sign = 1 if node.op == "add" else -1
        return (args[0][0] + sign * args[1][0], args[0][1] + sign * args[1][1])
    if node.op == "mul" and node.type == "int32":
        for factor, other in (node.args, node.args[::-1]):
            if nodes[factor].op == "const":
                times = nodes[factor].attr
                return (times * known[other][0], times * known[other][1])
    return None


def _is_diagonal(node: Node, slopes: list[tuple[int, int] | None], levels: list[str]) -> bool:
    own = slopes[-1]
    if own is not None:
        return own[0] == -own[1] != 0
    if node.op in COMPARISONS:
        left, right = (slopes[arg] for arg in node.args)
        if left is not None and right is not None:
            return left[0] - right[0] == right[1] - left[1] != 0
    return bool(node.args) and all(
        levels[arg] in ("constant", "tile", "diagonal") for arg in node.args
    )
