"""Bounds on values and how operations carry them: the rules of the interval arithmetic.

An ``Interval`` holds the least and the greatest value that an element of a rectangle can have:
int64 tensors for int32 values, fp64 for floats, and for bools ``lo`` "surely True" and ``hi``
"possibly True". A rule maps the operands' bounds to bounds that hold for every combination of
values in them; where two operands vary together (``q - q // 2``) that is wider than the truth, and
never narrower.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fa_cute.mods.congruence import Congruence, never_equal
from fa_cute.mods.fold import Number
from fa_cute.mods.graph import Node

LEAST, MOST = -(2**31), 2**31 - 1
LARGEST, SMALLEST = 3.4028234663852886e38, 2.0**-126
# What the functions of a GPU may be off by (tanh.approx: 2**-11 relative), with room.
RELATIVE, ABSOLUTE = 2.0**-9, 2.0**-16


class Interval(NamedTuple):
    """Bounds, ends included; ``nan``: a float that may be NaN besides."""

    lo: Tensor
    hi: Tensor
    nan: Tensor | None = None


class Context(NamedTuple):
    """What a rule may ask beside its operands' bounds: the nodes, and the operands' remainders."""

    node: Node
    operands: list[Node]
    remainders: list[Congruence]


Rule = Callable[..., Interval]


def top(type: str, device: torch.device) -> Interval:
    """Anything of a type."""
    if type == "bool":
        false = torch.zeros((), dtype=torch.bool, device=device)
        return Interval(false, ~false)
    if type == "int32":
        return Interval(_full(LEAST, device), _full(MOST, device))
    ends = (torch.full((), end, dtype=torch.float64, device=device) for end in (-1, 1))
    low, high = (end * torch.inf for end in ends)
    return Interval(low, high, torch.ones((), dtype=torch.bool, device=device))


def finite(device: torch.device) -> Interval:
    """A score: any finite float, of fp64 too."""
    high = torch.full((), sys.float_info.max, dtype=torch.float64, device=device)
    return Interval(-high, high, torch.zeros((), dtype=torch.bool, device=device))


def exactly(value: Number, type: str, device: torch.device) -> Interval:
    """One number, in a type."""
    if type == "bool":
        one = torch.full((), bool(value), dtype=torch.bool, device=device)
        return Interval(one, one)
    if type == "int32":
        one = _full(int(value), device)
        return Interval(one, one)
    one = torch.full((), float(value), dtype=torch.float64, device=device)
    return _rounded(one, one, one.isnan())


def measured(least: Tensor, greatest: Tensor) -> Interval:
    """Floats that were read; a NaN among them makes both ends NaN."""
    return _rounded(least.double(), greatest.double(), least.isnan() | greatest.isnan())


def tightened(value: Interval, remainder: Congruence) -> Interval:
    """Ends moved inward to numbers that leave the remainder."""
    modulus, rest = remainder
    lo = value.lo + torch.remainder(rest - value.lo, modulus)
    hi = value.hi - torch.remainder(value.hi - rest, modulus)
    return Interval(lo, hi)


def inside(index: Interval, size: int) -> Interval:
    """Where a load reads for an index: wrapped once if negative, then clamped to the dimension."""
    lo, hi = index.lo, index.hi
    if size <= 1:
        return Interval(torch.zeros_like(lo), torch.zeros_like(hi))
    crosses = (lo < 0) & (hi >= 0)
    first = torch.where(lo < 0, lo + size, lo).clamp(0, size - 1)
    if lo is hi:
        return Interval(first, first)
    last = torch.where(hi < 0, hi + size, hi).clamp(0, size - 1)
    return Interval(torch.where(crosses, 0, first), torch.where(crosses, size - 1, last))


def _full(value: int, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.int64, device=device)


def _wrapped(lo: Tensor, hi: Tensor) -> Interval:
    """An int32 result: anything where it may leave the range."""
    out = (lo < LEAST) | (hi > MOST)
    return Interval(torch.where(out, LEAST, lo), torch.where(out, MOST, hi))


def _rounded(lo: Tensor, hi: Tensor, nan: Tensor) -> Interval:
    """A float result, exact or rounded to fp32 (small ones flushed to 0, large ones infinite).

    Rounding keeps order, so rounding the ends bounds every rounded value. An end that is NaN says
    nothing.
    """
    nan = nan | lo.isnan() | hi.isnan()
    low, high = torch.minimum(lo, lo.float().double()), torch.maximum(hi, hi.float().double())
    low = torch.where((low > 0) & (low < SMALLEST), 0.0, low)
    high = torch.where((high < 0) & (high > -SMALLEST), 0.0, high)
    low, high = torch.where(nan, -torch.inf, low), torch.where(nan, torch.inf, high)
    return Interval(low, high, nan)


def _corners(function: Callable, x: Interval, y: Interval) -> tuple[Tensor, Tensor]:
    """The least and greatest of a function that is monotone in each operand."""
    ends = [function(a, b) for a in (x.lo, x.hi) for b in (y.lo, y.hi)]
    low = torch.minimum(torch.minimum(ends[0], ends[1]), torch.minimum(ends[2], ends[3]))
    high = torch.maximum(torch.maximum(ends[0], ends[1]), torch.maximum(ends[2], ends[3]))
    return low, high


def _infinite(x: Interval) -> Tensor:
    return x.lo.isinf() | x.hi.isinf()


def _holds_zero(x: Interval) -> Tensor:
    return (x.lo <= SMALLEST) & (x.hi >= -SMALLEST)


def _add(c: Context, x: Interval, y: Interval) -> Interval:
    if c.node.type == "int32":
        return _wrapped(x.lo + y.lo, x.hi + y.hi)
    opposed = (_is(x.hi, 1) & _is(y.lo, -1)) | (_is(x.lo, -1) & _is(y.hi, 1))
    return _rounded(x.lo + y.lo, x.hi + y.hi, x.nan | y.nan | opposed)


def _is(end: Tensor, sign: int) -> Tensor:
    return end == sign * torch.inf


def _sub(c: Context, x: Interval, y: Interval) -> Interval:
    return _add(c, x, Interval(-y.hi, -y.lo, y.nan))


def _mul(c: Context, x: Interval, y: Interval) -> Interval:
    low, high = _corners(torch.mul, x, y)
    if c.node.type == "int32":
        return _wrapped(low, high)
    unknown = (_infinite(x) & _holds_zero(y)) | (_infinite(y) & _holds_zero(x))
    return _rounded(low, high, x.nan | y.nan | unknown)


def _truediv(c: Context, x: Interval, y: Interval) -> Interval:
    unknown = _holds_zero(y) | (_infinite(x) & _infinite(y))
    divisor = Interval(*(torch.where(unknown, 1.0, end) for end in y[:2]))
    return _rounded(*_corners(torch.div, x, divisor), x.nan | y.nan | unknown)


def _floordiv(c: Context, x: Interval, y: Interval) -> Interval:
    if c.node.type == "int32":
        unknown = (y.lo <= 0) & (y.hi >= 0)
        divisor = Interval(*(torch.where(unknown, 1, end) for end in y[:2]))
        low, high = _corners(_floor_divide, x, divisor)
        return _wrapped(torch.where(unknown, LEAST, low), torch.where(unknown, MOST, high))
    quotient = _truediv(c, x, y)
    return Interval(quotient.lo.floor() - 1, quotient.hi.floor() + 1, quotient.nan)


def _floor_divide(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, y, rounding_mode="floor")


def _mod(c: Context, x: Interval, y: Interval) -> Interval:
    if c.node.type != "int32":
        unknown = _holds_zero(y) | _infinite(x) | _infinite(y)
        low, high = y.lo.clamp(max=0.0), y.hi.clamp(min=0.0)
        return _rounded(low, high, x.nan | y.nan | unknown)
    unknown = (y.lo <= 0) & (y.hi >= 0)
    low = torch.where(y.hi < 0, y.lo + 1, 0)
    high = torch.where(y.lo > 0, y.hi - 1, 0)
    divisor = torch.where(unknown, 1, y.lo)
    quotient = _floor_divide(x.lo, divisor)
    one = (y.lo == y.hi) & (quotient == _floor_divide(x.hi, divisor))
    low = torch.where(one, x.lo - quotient * divisor, low)
    high = torch.where(one, x.hi - quotient * divisor, high)
    return Interval(torch.where(unknown, LEAST, low), torch.where(unknown, MOST, high))


def _neg(c: Context, x: Interval) -> Interval:
    if c.node.type == "int32":
        return _wrapped(-x.hi, -x.lo)
    return Interval(-x.hi, -x.lo, x.nan)


def _abs(c: Context, x: Interval) -> Interval:
    low = torch.maximum(torch.maximum(x.lo, -x.hi), torch.zeros_like(x.lo))
    high = torch.maximum(-x.lo, x.hi)
    return _wrapped(low, high) if c.node.type == "int32" else Interval(low, high, x.nan)


def _sign(c: Context, x: Interval) -> Interval:
    return Interval(x.lo.sign(), x.hi.sign(), x.nan)


def _minimum(c: Context, x: Interval, y: Interval) -> Interval:
    return _picked(torch.minimum, x, y)


def _maximum(c: Context, x: Interval, y: Interval) -> Interval:
    return _picked(torch.maximum, x, y)


def _picked(extremum: Callable, x: Interval, y: Interval) -> Interval:
    """minimum or maximum; with a NaN it may be NaN (torch) or the other operand (hardware)."""
    low, high = extremum(x.lo, y.lo), extremum(x.hi, y.hi)
    if x.nan is None:
        return Interval(low, high)
    nan = x.nan | y.nan
    low = torch.where(nan, torch.minimum(x.lo, y.lo), low)
    return Interval(low, torch.where(nan, torch.maximum(x.hi, y.hi), high), nan)


def _where(c: Context, choice: Interval, x: Interval, y: Interval) -> Interval:
    no = ~choice.hi
    if c.node.type == "bool":
        low = (x.lo & y.lo) | (choice.lo & x.lo) | (no & y.lo)
        return Interval(low, (x.hi & y.hi) | (~no & x.hi) | (~choice.lo & y.hi))
    low = torch.where(choice.lo, x.lo, torch.where(no, y.lo, torch.minimum(x.lo, y.lo)))
    high = torch.where(choice.lo, x.hi, torch.where(no, y.hi, torch.maximum(x.hi, y.hi)))
    if x.nan is None:
        return Interval(low, high)
    return Interval(low, high, (x.nan & ~no) | (y.nan & ~choice.lo))


def _ordered(strict: bool) -> Rule:
    def rule(c: Context, x: Interval, y: Interval) -> Interval:
        sure = x.hi < y.lo if strict else x.hi <= y.lo
        possible = x.lo < y.hi if strict else x.lo <= y.hi
        return Interval(sure if x.nan is None else sure & ~(x.nan | y.nan), possible)

    return rule


def _eq(c: Context, x: Interval, y: Interval) -> Interval:
    if c.operands[0].type == "bool":
        return _inverted(_xor(c, x, y))
    sure = (x.lo == x.hi) & (y.lo == y.hi) & (x.lo == y.lo)
    possible = (x.lo <= y.hi) & (y.lo <= x.hi)
    if never_equal(*c.remainders):
        possible = torch.zeros_like(possible)
    return Interval(sure if x.nan is None else sure & ~(x.nan | y.nan), possible)


def _ne(c: Context, x: Interval, y: Interval) -> Interval:
    return _inverted(_eq(c, x, y))


def _inverted(x: Interval) -> Interval:
    return Interval(~x.hi, ~x.lo)


def _not(c: Context, x: Interval) -> Interval:
    return Interval(~x.hi, ~x.lo)


def _and(c: Context, x: Interval, y: Interval) -> Interval:
    if c.node.type == "bool":
        return Interval(x.lo & y.lo, x.hi & y.hi)
    for value, mask, node in ((x, y, c.operands[1]), (y, x, c.operands[0])):
        bits = node.attr if node.op == "const" else -1
        if bits >= 0 and bits & (bits + 1) == 0:
            modulus = Interval(mask.lo + 1, mask.hi + 1)
            return _mod(c, value, modulus)
    both = (x.lo >= 0) & (y.lo >= 0)
    either = (x.lo >= 0) | (y.lo >= 0)
    least = torch.minimum(x.hi, y.hi)
    one = torch.where(x.lo >= 0, x.hi, y.hi)
    high = torch.where(both, least, torch.where(either, one, MOST))
    return _exact_bits(torch.bitwise_and, x, y, torch.where(either, 0, LEAST), high)


def _or(c: Context, x: Interval, y: Interval) -> Interval:
    if c.node.type == "bool":
        return Interval(x.lo | y.lo, x.hi | y.hi)
    both = (x.lo >= 0) & (y.lo >= 0)
    low = torch.where(both, torch.maximum(x.lo, y.lo), LEAST)
    return _exact_bits(torch.bitwise_or, x, y, low, torch.where(both, _filled(x.hi | y.hi), MOST))


def _xor(c: Context, x: Interval, y: Interval) -> Interval:
    if c.operands[0].type == "bool":
        low = (x.lo & ~y.hi) | (~x.hi & y.lo)
        return Interval(low, ~((x.lo & y.lo) | (~x.hi & ~y.hi)))
    both = (x.lo >= 0) & (y.lo >= 0)
    high = torch.where(both, _filled(x.hi | y.hi), MOST)
    return _exact_bits(torch.bitwise_xor, x, y, torch.where(both, 0, LEAST), high)


def _exact_bits(
    function: Callable, x: Interval, y: Interval, low: Tensor, high: Tensor
) -> Interval:
    """A bitwise result: exact where each operand is one number."""
    single = (x.lo == x.hi) & (y.lo == y.hi)
    exact = function(x.lo, y.lo)
    return Interval(torch.where(single, exact, low), torch.where(single, exact, high))


def _filled(x: Tensor) -> Tensor:
    """All bits set from the highest one of a number that is not negative."""
    for bits in (1, 2, 4, 8, 16):
        x = x | (x >> bits)
    return x


def _shift(function: Callable) -> Rule:
    def rule(c: Context, x: Interval, y: Interval) -> Interval:
        unknown = (y.lo < 0) | (y.hi > 31)
        places = Interval(*(torch.where(unknown, 0, end) for end in y[:2]))
        low, high = _corners(function, x, places)
        return _wrapped(torch.where(unknown, LEAST, low), torch.where(unknown, MOST, high))

    return rule


def _shifted_left(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.bitwise_left_shift(torch.ones_like(y), y)


def _cast(c: Context, x: Interval) -> Interval:
    source, target = c.operands[0].type, c.node.type
    if source == "float32" and target == "int32":
        unknown = x.nan | (x.lo <= LEAST) | (x.hi >= MOST)
        low, high = (torch.where(unknown, 0.0, end).trunc().long() for end in x[:2])
        return Interval(torch.where(unknown, LEAST, low), torch.where(unknown, MOST, high))
    if target == "int32":
        return Interval(x.lo.long(), x.hi.long())
    low, high = x.lo.double(), x.hi.double()
    return _rounded(low, high, torch.zeros_like(low, dtype=torch.bool))


def _step(function: Callable) -> Rule:
    return lambda c, x: Interval(function(x.lo), function(x.hi), x.nan)


def _approximate(function: Callable, low: float = -math.inf, high: float = math.inf) -> Rule:
    """An increasing function on ``[low, high]``, NaN outside; hardware approximates it."""

    def rule(c: Context, x: Interval) -> Interval:
        ends = function(x.lo.clamp(low, high)), function(x.hi.clamp(low, high))
        # Infinite ends have no margin: log(0) is -inf everywhere.
        margins = [torch.where(e.isinf(), 0.0, e.abs() * RELATIVE + ABSOLUTE) for e in ends]
        nan = x.nan | (x.lo < low) | (x.hi > high)
        ends = _rounded(ends[0] - margins[0], ends[1] + margins[1], nan)
        return ends._replace(hi=torch.where(ends.hi > LARGEST, torch.inf, ends.hi))

    return rule


def _wave(c: Context, x: Interval) -> Interval:
    most = torch.full_like(x.lo, 1.0 + RELATIVE)
    return _rounded(-most, most, x.nan | _infinite(x))


def _round_to(c: Context, x: Interval) -> Interval:
    dtype = getattr(torch, c.node.attr)
    low, high = (end.float().to(dtype).double() for end in x[:2])
    return _rounded(torch.minimum(x.lo, low), torch.maximum(x.hi, high), x.nan | low.isnan())


RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "truediv": _truediv,
    "floordiv": _floordiv,
    "mod": _mod,
    "neg": _neg,
    "abs": _abs,
    "sign": _sign,
    "minimum": _minimum,
    "maximum": _maximum,
    "where": _where,
    "lt": _ordered(strict=True),
    "le": _ordered(strict=False),
    "eq": _eq,
    "ne": _ne,
    "not": _not,
    "and": _and,
    "or": _or,
    "xor": _xor,
    "shl": _shift(_shifted_left),
    "shr": _shift(torch.bitwise_right_shift),
    "cast": _cast,
    "round_to": _round_to,
    **{name: _step(getattr(torch, name)) for name in ("floor", "ceil", "round", "trunc")},
    **{name: _approximate(getattr(torch, name)) for name in ("exp", "exp2", "tanh", "sigmoid")},
    "erf": _approximate(torch.erf),
    "log": _approximate(torch.log, low=0.0),
    "sqrt": _approximate(torch.sqrt, low=0.0),
    "sin": _wave,
    "cos": _wave,
}
