"""What a mod's integers are modulo a number, whatever q and kv are.

``3 * q + 1`` leaves remainder 1 by 3. Intervals cannot tell that, so ``(2 * q) % 2 == 1`` would
look possible; with the remainder it is refuted for every tile at once. Plain integers, no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fa_cute.mods.fold import Number
from fa_cute.mods.graph import Graph, Node

WORD = 2**32  # int32 wraps: only what divides this survives


class Congruence(NamedTuple):
    """The values are ``remainder`` plus multiples of ``modulus``; modulus 0 is one value alone."""

    modulus: int
    remainder: int


ANY = Congruence(1, 0)


def congruences(
    graph: Graph, scalars: Sequence[Number], wraps: Sequence[bool]
) -> tuple[Congruence, ...]:
    """One for each node; ``wraps[i]`` says that node i may leave int32's range."""
    known: list[Congruence] = []
    for node, may_wrap in zip(graph.nodes, wraps, strict=True):
        found = ANY
        if node.type == "int32" and node.width == 1:
            found = _of(graph, node, scalars, known)
        known.append(_reduced(found, WORD if may_wrap else 0))
    return tuple(known)


def never_equal(x: Congruence, y: Congruence) -> bool:
    """No value of ``x`` is one of ``y``."""
    common = math.gcd(x.modulus, y.modulus)
    difference = x.remainder - y.remainder
    return difference != 0 if common == 0 else difference % common != 0


def _of(graph: Graph, node: Node, scalars: Sequence[Number], known: list[Congruence]) -> Congruence:
    if node.op == "const":
        return Congruence(0, node.attr)
    if node.op == "scalar":
        return Congruence(0, scalars[node.attr])
    rule = _RULES.get(node.op)
    if rule is None:
        return ANY
    args = node.args[1:] if node.op == "where" else node.args
    if any(graph.nodes[arg].type != "int32" for arg in args):
        return ANY
    return rule(*(known[arg] for arg in args))


def _reduced(found: Congruence, word: int) -> Congruence:
    modulus = math.gcd(found.modulus, word) if word else found.modulus
    return Congruence(modulus, found.remainder % modulus if modulus else found.remainder)


def _add(x: Congruence, y: Congruence) -> Congruence:
    return Congruence(math.gcd(x.modulus, y.modulus), x.remainder + y.remainder)


def _neg(x: Congruence) -> Congruence:
    return Congruence(x.modulus, -x.remainder)


def _mul(x: Congruence, y: Congruence) -> Congruence:
    modulus = math.gcd(x.modulus * y.modulus, x.modulus * y.remainder, y.modulus * x.remainder)
    return Congruence(modulus, x.remainder * y.remainder)


def _floordiv(x: Congruence, y: Congruence) -> Congruence:
    divisor = y.remainder
    if y.modulus or divisor == 0 or x.modulus % divisor:
        return ANY
    return Congruence(abs(x.modulus // divisor), x.remainder // divisor)


def _mod(x: Congruence, y: Congruence) -> Congruence:
    if y.modulus or y.remainder == 0:
        return ANY
    if x.modulus == 0:
        return Congruence(0, x.remainder % y.remainder)
    return Congruence(math.gcd(x.modulus, y.remainder), x.remainder)


def _and(x: Congruence, y: Congruence) -> Congruence:
    for value, mask in ((x, y), (y, x)):
        if mask.modulus == 0 and mask.remainder >= 0 and not mask.remainder & (mask.remainder + 1):
            return _mod(value, Congruence(0, mask.remainder + 1))
    return ANY


def _shl(x: Congruence, y: Congruence) -> Congruence:
    return ANY if y.modulus or not 0 <= y.remainder < 32 else _mul(x, _power(y))


def _shr(x: Congruence, y: Congruence) -> Congruence:
    return ANY if y.modulus or not 0 <= y.remainder < 32 else _floordiv(x, _power(y))


def _power(y: Congruence) -> Congruence:
    return Congruence(0, 1 << y.remainder)


def _either(x: Congruence, y: Congruence) -> Congruence:
    return Congruence(math.gcd(x.modulus, y.modulus, x.remainder - y.remainder), x.remainder)


_RULES: dict[str, Callable[..., Congruence]] = {
    "add": _add,
    "sub": lambda x, y: _add(x, _neg(y)),
    "neg": _neg,
    "mul": _mul,
    "floordiv": _floordiv,
    "mod": _mod,
    "and": _and,
    "shl": _shl,
    "shr": _shr,
    "not": lambda x: Congruence(x.modulus, ~x.remainder),
    "abs": lambda x: _either(x, _neg(x)),
    "minimum": _either,
    "maximum": _either,
    "where": _either,
}
