"""Finds the ranges of keys that a mask shows each query, when they are a few and affine in q.

A comparison is solved for kv: ``q - kv <= 100`` is ``kv >= q - 100``, ``kv // 64 == q // 64`` is
``q // 64 * 64 <= kv <= q // 64 * 64 + 63``, ``|q - kv| <= w`` is two. ``&`` intersects, ``|``
unites, ``~`` is pushed down to the comparisons; what depends on q alone opens or shuts a range.
Solving moves terms across the comparison, which is right only where nothing wraps: every value of
the mod and every term is bounded for positions below 2**30, and what may leave int32 is refused.

What has no such form is taken as unknown: all keys may be visible, none is known to be. A range
that an unknown narrows down is not ``exact``: it holds every key that is seen, and others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from fa_cute.mods.graph import Graph
from fa_cute.mods.ranges import FAR, LARGEST_INPUT, Ranges, Term

# More ranges than this cost a kernel more than the list of blocks does.
MOST_RANGES = 4

_INT32 = range(-(2**31), 2**31)
_FLIPPED = {"lt": "le", "le": "lt", "eq": "ne", "ne": "eq"}


class _NotRanges(Exception):
    """The mask has no such form."""


class _Form(NamedTuple):
    """An int32 value: ``times * ((kv + shift) // divisor) + rest``; shift and rest are terms."""

    times: int
    divisor: int
    shift: int
    rest: int


class _Piece(NamedTuple):
    """One range: kv is at least each of ``lows``, at most each of ``highs`` (terms).

    ``exact``: every key in it is seen; otherwise some may not be.
    """

    lows: frozenset[int] = frozenset()
    highs: frozenset[int] = frozenset()
    exact: bool = True

    @property
    def is_everything(self) -> bool:
        """No bound at all."""
        return not self.lows and not self.highs


@functools.lru_cache(maxsize=256)
def ranges_of(graph: Graph) -> Ranges | None:
    """The ranges that hold what the mask_mod ``graph`` shows, or None: nothing bounds them."""
    finder = _Finder(graph)
    for at, node in enumerate(graph.nodes[: graph.result]):
        # Arguments come before what uses them, so nothing recurses: a mod of 600 nodes may.
        if node.type == "bool":
            for negated in (False, True):
                finder.pieces(at, negated=negated)
        elif node.type == "int32":
            finder.formed(at)
    try:
        pieces = finder.pieces(graph.result, negated=False)
        ranges = tuple(finder.closed(piece) for piece in pieces)
    except _NotRanges:
        return None
    if any(piece.is_everything and not piece.exact for piece in pieces):
        return None
    return finder.used_by(ranges, tuple(piece.exact for piece in pieces))


def exact_ranges(graph: Graph) -> Ranges | None:
    """The ranges that are all that the mask_mod ``graph`` shows, from lengths alone; or None."""
    found = ranges_of(graph)
    if found is None or not found.ranges or found.inputs or not all(found.exact):
        return None
    return found


def input_graphs(graph: Graph) -> tuple[Graph, ...]:
    """For each of the ``inputs`` of ``ranges_of(graph)`` a graph that computes it.

    It reads the captured tensors and scalars at the positions of ``graph``, and of the indices b
    and h only. Empty for a mask without ranges.
    """
    found = ranges_of(graph)
    nodes = () if found is None else found.inputs
    return tuple(Graph(graph.nodes[: at + 1], at, graph.captured, graph.scalars) for at in nodes)


@dataclass
class _Finder:
    graph: Graph
    # Terms to their numbers: looked up, not sought, which took seconds of 600 comparisons.
    numbers: dict[Term, int] = field(default_factory=dict)
    spans: list[tuple[int, int]] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    # A node is looked at once for each sense: a chain of n choices would be walked 2**n times.
    found: dict[tuple[int, bool], list[_Piece]] = field(default_factory=dict)
    forms: dict[int, _Form | None] = field(default_factory=dict)

    def term(self, op: str, *args: int, value: int = 0) -> int:
        """The term, shared if it is there already; refused if it may leave int32."""
        new = Term(op, args, value)
        if op in ("add", "sub") and self.is_number(args[1], 0):
            return args[0]
        if op in ("times", "floordiv") and value == 1:
            return args[0]
        if new in self.numbers:
            return self.numbers[new]
        ends = self._ends(new)
        if any(end not in _INT32 for end in ends):
            raise _NotRanges
        if args and ends[0] == ends[1] and op != "number":
            return self.number(ends[0])
        self.spans.append((min(ends), max(ends)))
        return self.numbers.setdefault(new, len(self.numbers))

    def number(self, value: int) -> int:
        return self.term("number", value=value)

    def is_number(self, at: int, value: int) -> bool:
        return self.numbers.get(Term("number", (), value)) == at

    def _ends(self, new: Term) -> list[int]:
        given = [self.spans[arg] for arg in new.args]
        if new.op == "number":
            return [new.value, new.value]
        if new.op == "q":
            return [0, FAR - 1]
        if new.op == "input":
            return [-LARGEST_INPUT, LARGEST_INPUT]
        if new.op == "gate":
            return [-FAR if given[0][0] < 0 else FAR, FAR if given[0][1] >= 0 else -FAR]
        if new.op == "times":
            return sorted(end * new.value for end in given[0])
        if new.op == "floordiv":
            return [end // new.value for end in given[0]]
        (a, b), (c, d) = given
        if new.op == "add":
            return [a + c, b + d]
        if new.op == "sub":
            return [a - d, b - c]
        extremum = min if new.op == "minimum" else max
        return [extremum(a, c), extremum(b, d)]

    def pieces(self, at: int, *, negated: bool) -> list[_Piece]:
        """The ranges that hold the keys where a bool node is True (with ``negated``: False)."""
        if (at, negated) not in self.found:
            try:
                self.found[at, negated] = self._pieces(at, negated)
            except _NotRanges:
                self.found[at, negated] = [_Piece(exact=False)]
        return self.found[at, negated]

    def _pieces(self, at: int, negated: bool) -> list[_Piece]:
        node = self.graph.nodes[at]
        if node.type != "bool" or node.width != 1:
            raise _NotRanges
        if node.op == "const":
            return [_Piece()] if node.attr != negated else []
        if self.graph.levels()[at] in ("tile", "constant"):
            return self._gated(self._input(at), negated)
        if node.op == "not":
            return self.pieces(node.args[0], negated=not negated)
        if node.op in ("and", "or"):
            join = _both if (node.op == "and") != negated else _either
            return join(*(self.pieces(arg, negated=negated) for arg in node.args))
        if node.op == "where":
            return self._choice(*node.args, negated=negated)
        if node.op in _FLIPPED:
            if self.graph.nodes[node.args[0]].type == "bool":
                same = (node.op == "eq") != negated
                return self._choice_of(node.args[0], node.args[1], same)
            return self._compared(_FLIPPED[node.op] if negated else node.op, node.args, negated)
        if node.op == "xor":
            return self._choice_of(node.args[0], node.args[1], negated)
        raise _NotRanges

    def _choice(self, condition: int, x: int, y: int, *, negated: bool) -> list[_Piece]:
        yes = _both(self.pieces(condition, negated=False), self.pieces(x, negated=negated))
        no = _both(self.pieces(condition, negated=True), self.pieces(y, negated=negated))
        return _either(yes, no)

    def _choice_of(self, x: int, y: int, same: bool) -> list[_Piece]:
        """Where two bools are the same, or differ."""
        sides = [[self.pieces(at, negated=negated) for negated in (False, True)] for at in (x, y)]
        (a, not_a), (b, not_b) = sides
        return _either(_both(a, b if same else not_b), _both(not_a, not_b if same else b))

    def _compared(self, op: str, args: tuple[int, int], negated: bool) -> list[_Piece]:
        x, y = args[::-1] if negated and op in ("lt", "le") else args
        if self.graph.nodes[x].type != "int32":
            raise _NotRanges
        if op in ("eq", "ne"):
            if op == "eq":
                return _both(self._at_most(x, y, 0), self._at_most(y, x, 0))
            return _either(self._at_most(x, y, 1), self._at_most(y, x, 1))
        return self._at_most(x, y, 1 if op == "lt" else 0)

    def _at_most(self, x: int, y: int, gap: int) -> list[_Piece]:
        """Where ``x + gap <= y``, for int32 nodes."""
        for at, other, right in ((x, y, False), (y, x, True)):
            node = self.graph.nodes[at]
            if node.op in ("minimum", "maximum", "abs") and not self._is_row(at):
                join = _either if (node.op == "minimum") != right else _both
                sides = [self.form(arg) for arg in node.args]
                if node.op == "abs":
                    sides.append(self._scaled(sides[0], -1))
                known = self.form(other)
                pairs = [(known, side) if right else (side, known) for side in sides]
                return join(*(self._solved(a, b, gap) for a, b in pairs))
        return self._solved(self.form(x), self.form(y), gap)

    def _is_row(self, at: int) -> bool:
        return self.graph.levels()[at] in ("constant", "tile", "row")

    def _solved(self, x: _Form, y: _Form, gap: int) -> list[_Piece]:
        """Where ``x + gap <= y``, solved for kv."""
        times, divisor, shift, rest = self._sum(x, self._scaled(y, -1))
        rest = self.term("add", rest, self.number(gap))
        minus = self.term("times", rest, value=-1)
        if times == 0:
            return self._gated(minus, False, zero=True)
        if times > 0:
            most = self.term("floordiv", minus, value=times)
            end = self.term("times", most, value=divisor)
            end = self.term("add", end, self.number(divisor - 1))
            return [_Piece(highs=frozenset([self.term("sub", end, shift)]))]
        least = self.term("times", self.term("floordiv", minus, value=-times), value=-1)
        begin = self.term("sub", self.term("times", least, value=divisor), shift)
        return [_Piece(lows=frozenset([begin]))]

    def _gated(self, at: int, negated: bool, zero: bool = False) -> list[_Piece]:
        """All keys where a term is 1 (with ``zero``: 0) or more, else none."""
        if not zero:
            one = self.number(1)
            at = self.term("sub", self.number(0), at) if negated else self.term("sub", at, one)
        least, most = self.spans[at]
        if least >= 0 or most < 0:
            return [_Piece()] if least >= 0 else []
        return [_Piece(highs=frozenset([self.term("gate", at)]))]

    def closed(self, piece: _Piece) -> tuple[int, int]:
        """A piece as one low and one high term."""
        lows, highs = sorted(piece.lows), sorted(piece.highs)
        low = functools.reduce(functools.partial(self.term, "maximum"), lows or [self.number(0)])
        high = functools.reduce(
            functools.partial(self.term, "minimum"), highs or [self.number(FAR)]
        )
        return low, high

    def used_by(self, ranges: tuple[tuple[int, int], ...], exact: tuple[bool, ...]) -> Ranges:
        """``ranges`` with the terms and inputs they need only: a kernel computes every one."""
        every = list(self.numbers)
        used = {end for pair in ranges for end in pair}
        for at in reversed(range(len(every))):
            used.update(every[at].args if at in used else ())
        moved = {at: new for new, at in enumerate(sorted(used))}
        terms = [every[at] for at in moved]
        read = sorted({term.value for term in terms if term.op == "input"})
        terms = [
            term._replace(value=read.index(term.value))
            if term.op == "input"
            else term._replace(args=tuple(moved[arg] for arg in term.args))
            for term in terms
        ]
        pairs = tuple((moved[low], moved[high]) for low, high in ranges)
        return Ranges(tuple(terms), pairs, tuple(self.inputs[at] for at in read), exact)

    def form(self, at: int) -> _Form:
        """An int32 node in the one form that is solved for kv."""
        found = self.formed(at)
        if found is None:
            raise _NotRanges
        return found

    def formed(self, at: int) -> _Form | None:
        """The form, or None if the node has none."""
        if at not in self.forms:
            try:
                self.forms[at] = self._form(at)
            except _NotRanges:
                self.forms[at] = None
        return self.forms[at]

    def _form(self, at: int) -> _Form:
        node = self.graph.nodes[at]
        zero = self.number(0)
        if node.type != "int32" or node.width != 1:
            raise _NotRanges
        if node.op == "const":
            return _Form(0, 1, zero, self.number(node.attr))
        if node.op == "q":
            return _Form(0, 1, zero, self.term("q"))
        if node.op == "kv":
            return _Form(1, 1, zero, zero)
        if self.graph.levels()[at] in ("tile", "constant"):
            return _Form(0, 1, zero, self._input(at))
        rule = _FORMS.get(node.op)
        if rule is None:
            raise _NotRanges
        return self._bounded(rule(self, *node.args))

    def _input(self, at: int) -> int:
        if at not in self.inputs:
            self.inputs.append(at)
        return self.term("input", value=self.inputs.index(at))

    def _bounded(self, form: _Form) -> _Form:
        """``form``; refused if the value of the mod's own node may wrap."""
        low, high = self.spans[form.shift]
        inner = [low // form.divisor * form.times, (FAR + high) // form.divisor * form.times]
        low, high = self.spans[form.rest]
        if min(inner) + low not in _INT32 or max(inner) + high not in _INT32:
            raise _NotRanges
        return form

    def _scaled(self, x: _Form, by: int) -> _Form:
        return x._replace(times=x.times * by, rest=self.term("times", x.rest, value=by))

    def _sum(self, x: _Form, y: _Form) -> _Form:
        rest = self.term("add", x.rest, y.rest)
        if x.times == 0 or y.times == 0:
            return (y if x.times == 0 else x)._replace(rest=rest)
        if x[1:3] != y[1:3]:
            raise _NotRanges
        return _Form(x.times + y.times, *x[1:3], rest)

    def _divided(self, x: _Form, by: int) -> _Form:
        """``x // by``, by > 0: a quotient of a quotient is one quotient."""
        zero = self.number(0)
        if x.times == 0:
            return x._replace(rest=self.term("floordiv", x.rest, value=by))
        if x.times not in (1, -1):
            raise _NotRanges
        if x.times == 1:
            added = self.term("times", x.rest, value=x.divisor)
        else:
            # (r - f) // by is -((f - r + by - 1) // by).
            rest = self.term("sub", self.number(by - 1), x.rest)
            added = self.term("times", rest, value=x.divisor)
        shift = self.term("add", x.shift, added)
        return _Form(x.times, x.divisor * by, shift, zero)

    def _constant(self, at: int) -> int:
        node = self.graph.nodes[at]
        if node.op != "const":
            raise _NotRanges
        return node.attr

    def on_add(self, x: int, y: int) -> _Form:
        return self._sum(self.form(x), self.form(y))

    def on_sub(self, x: int, y: int) -> _Form:
        return self._sum(self.form(x), self._scaled(self.form(y), -1))

    def on_neg(self, x: int) -> _Form:
        return self._scaled(self.form(x), -1)

    def on_mul(self, x: int, y: int) -> _Form:
        if self.graph.nodes[x].op == "const":
            x, y = y, x
        return self._scaled(self.form(x), self._constant(y))

    def on_floordiv(self, x: int, y: int) -> _Form:
        if self._constant(y) <= 0:
            raise _NotRanges
        return self._divided(self.form(x), self._constant(y))

    def on_shr(self, x: int, y: int) -> _Form:
        return self._divided(self.form(x), 1 << self._constant(y))

    def on_shl(self, x: int, y: int) -> _Form:
        return self._scaled(self.form(x), 1 << self._constant(y))

    def on_mod(self, x: int, y: int) -> _Form:
        return self._remainder(x, self._constant(y))

    def on_and(self, x: int, y: int) -> _Form:
        bits = self._constant(y)
        if bits < 0 or bits & (bits + 1):
            raise _NotRanges
        return self._remainder(x, bits + 1)

    def _remainder(self, x: int, by: int) -> _Form:
        """x % by, of what depends on q only: kv's own remainder is no range."""
        value = self.form(x)
        if value.times or by <= 0:
            raise _NotRanges
        whole = self.term("times", self.term("floordiv", value.rest, value=by), value=by)
        return value._replace(rest=self.term("sub", value.rest, whole))

    def on_minimum(self, x: int, y: int) -> _Form:
        return self._picked("minimum", x, y)

    def on_maximum(self, x: int, y: int) -> _Form:
        return self._picked("maximum", x, y)

    def on_abs(self, x: int) -> _Form:
        value = self.form(x)
        if value.times:
            raise _NotRanges
        minus = self.term("times", value.rest, value=-1)
        return value._replace(rest=self.term("maximum", value.rest, minus))

    def _picked(self, op: str, x: int, y: int) -> _Form:
        left, right = self.form(x), self.form(y)
        if left.times or right.times:
            raise _NotRanges
        return left._replace(rest=self.term(op, left.rest, right.rest))


_FORMS: dict[str, Callable[..., _Form]] = {
    "add": _Finder.on_add,
    "sub": _Finder.on_sub,
    "neg": _Finder.on_neg,
    "mul": _Finder.on_mul,
    "floordiv": _Finder.on_floordiv,
    "mod": _Finder.on_mod,
    "and": _Finder.on_and,
    "shr": _Finder.on_shr,
    "shl": _Finder.on_shl,
    "minimum": _Finder.on_minimum,
    "maximum": _Finder.on_maximum,
    "abs": _Finder.on_abs,
}


def _both(x: list[_Piece], y: list[_Piece]) -> list[_Piece]:
    return _few(
        _Piece(a.lows | b.lows, a.highs | b.highs, a.exact and b.exact) for a in x for b in y
    )


def _either(x: list[_Piece], y: list[_Piece]) -> list[_Piece]:
    return _few([*x, *y])


def _few(pieces) -> list[_Piece]:
    """Each piece once, without those inside another; too many are refused."""
    kept: list[_Piece] = []
    for piece in pieces:
        if not any(k.lows <= piece.lows and k.highs <= piece.highs for k in kept):
            inside = [k for k in kept if piece.lows <= k.lows and piece.highs <= k.highs]
            kept = [k for k in kept if k not in inside] + [piece]
    if len(kept) > MOST_RANGES:
        raise _NotRanges
    return kept
