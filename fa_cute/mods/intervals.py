"""Is a tile of a mask empty, full or partial? Interval arithmetic over the graph of a mod.

Each node gets bounds over a rectangle of (b, h, q, kv): what is called EMPTY is False for every
element, what is called FULL is True for every one; what cannot be told is PARTIAL. The bounds are
tensors, so that all tiles of a grid are classified at once, on the device of the captured tensors,
and without reading anything on the host: a row's values are computed once a row, a column's once a
column, and only what mixes q and kv once a tile.

Sound for what kernels compute too: an int32 that may leave its range can be anything (it wraps),
floats may be rounded to fp32, NaN makes every comparison but ``ne`` False, and the functions that
hardware approximates get a wide margin. Scores are taken as any finite number.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fa_cute.mods.bounds import (
    LEAST,
    MOST,
    RULES,
    Context,
    Interval,
    exactly,
    finite,
    inside,
    measured,
    tightened,
    top,
)
from fa_cute.mods.congruence import ANY, Congruence, congruences
from fa_cute.mods.emit_torch import emit
from fa_cute.mods.graph import Graph, Node
from fa_cute.mods.summaries import Summary, limits, readable, window
from fa_cute.mods.trace import Traced

EMPTY, PARTIAL, FULL = 0, 1, 2

# An index that advances once in this many positions makes a table of blocks, not of elements.
_SLOW = 16


class Extents(NamedTuple):
    """The sizes of a problem: batches, query heads, queries, keys."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int

    @property
    def empty(self) -> bool:
        """There is no element at all."""
        return 0 in self


class Region(NamedTuple):
    """Rectangles: int64 tensors that broadcast together, ends included, not past the lengths."""

    b: Tensor
    h: Tensor
    q_first: Tensor
    q_last: Tensor
    kv_first: Tensor
    kv_last: Tensor


@dataclass(frozen=True)
class Analysis:
    """A traced mod made ready for bounds: summaries of what it captures, remainders of its values.

    ``device`` is where the bounds are computed.
    """

    graph: Graph
    captured: tuple[Tensor, ...]
    scalars: tuple
    remainders: tuple[Congruence, ...]
    device: torch.device
    summaries: dict[tuple[int, int], Summary] = field(default_factory=dict)

    @classmethod
    @torch.no_grad()
    def of(cls, traced: Traced, extents: Extents, device: torch.device | str) -> Analysis:
        """Summarise the captured tensors (one pass over each) for rectangles in ``extents``."""
        graph, captured, scalars = traced
        device = torch.device(device)
        captured = tuple(tensor.detach() for tensor in captured)
        reads = graph.dependence()
        summaries = {}
        for node in graph.nodes:
            if node.op == "load" and node.width == 1:
                ranged = _ranged(node, reads)
                if len(ranged) == 1 and (node.attr, ranged[0]) not in summaries:
                    of = Summary.of(captured[node.attr], ranged[0])
                    summaries[node.attr, ranged[0]] = of
        wraps = _may_wrap(graph, scalars, extents)
        remainders = congruences(graph, scalars, wraps)
        return cls(graph, captured, scalars, remainders, device, summaries)

    @property
    def reads(self) -> frozenset[str]:
        """The leaves that the mod reads; without b (or h), one batch (or head) stands for all."""
        return self.graph.dependence()[self.graph.result]

    @property
    def opaque(self) -> bool:
        """Whether a dense captured tensor decides, of which no small summary exists."""
        reads = self.graph.dependence()
        for node in self.graph.nodes:
            if node.op == "load" and len(ranged := _ranged(node, reads)) > 1:
                if not all(_is_slow(self.graph, node.args[dim]) for dim in ranged):
                    return True
        return False

    @torch.no_grad()
    def bounds(self, region: Region) -> Interval:
        """Bounds of the mod's value on each rectangle."""
        leaves = {
            "b": Interval(region.b, region.b),
            "h": Interval(region.h, region.h),
            "q": Interval(region.q_first, region.q_last),
            "kv": Interval(region.kv_first, region.kv_last),
        }
        return self._values(leaves)[self.graph.result]

    def _values(self, leaves: dict[str, Interval]) -> list[Interval]:
        values: list[Interval] = []
        for at, node in enumerate(self.graph.nodes):
            if node.op in leaves:
                value = leaves[node.op]
            elif node.op == "score":
                value = finite(self.device)
            elif node.width > 1 or any(self.graph.nodes[arg].width > 1 for arg in node.args):
                value = top(node.type, self.device)
            elif node.op == "load":
                value = self._load(node, [values[arg] for arg in node.args])
            elif node.op in ("const", "scalar"):
                number = node.attr if node.op == "const" else self.scalars[node.attr]
                value = exactly(number, node.type, self.device)
            else:
                value = self._apply(node, values)
            if self.remainders[at].modulus > 1:
                value = tightened(value, self.remainders[at])
            values.append(value)
        return values

    def visible(self, region: Region) -> Tensor:
        """EMPTY, PARTIAL or FULL (int8) for a mask_mod, in the broadcast shape of the region."""
        value = self.bounds(region)
        kinds = value.lo.to(torch.int8) + value.hi.to(torch.int8)
        return kinds.expand(torch.broadcast_shapes(*(part.shape for part in region)))

    def hidden(self, region: Region) -> Tensor:
        """Where a score_mod gives -inf for every score, in the region's broadcast shape."""
        value = self.bounds(region)
        hidden = (value.hi == -torch.inf) & ~value.nan
        return hidden.expand(torch.broadcast_shapes(*(part.shape for part in region)))

    def _apply(self, node: Node, values: list[Interval]) -> Interval:
        rule = RULES.get(node.op)
        if rule is None:
            return top(node.type, self.device)
        operands = [self.graph.nodes[arg] for arg in node.args]
        context = Context(node, operands, [self.remainders[arg] for arg in node.args])
        return rule(context, *(values[arg] for arg in node.args))

    def _load(self, node: Node, indices: list[Interval]) -> Interval:
        source = self.captured[node.attr]
        if not source.numel() or source.is_meta:
            return top(node.type, self.device)
        sides = [inside(index, size) for index, size in zip(indices, source.shape, strict=True)]
        ranged = _ranged(node, self.graph.dependence())
        if len(ranged) > 1:
            first, last = [side.lo for side in sides], [side.hi for side in sides]
            least, greatest = window(source, first, last)
        else:
            least, greatest = self._over(node.attr, ranged, sides)
        if node.type == "bool":
            return Interval(least != 0, greatest != 0)
        if node.type == "int32":
            return Interval(least.long(), greatest.long())
        return measured(least, greatest)

    def _over(self, slot: int, ranged: list[int], sides: list[Interval]) -> tuple[Tensor, Tensor]:
        """Bounds of a load where at most one index is ``ranged`` and the others are numbers.

        A number that floats have had a part in is known to their rounding: it may be either of two
        neighbours. Of what is known less, the bounds are its dtype's.
        """
        source, found = self.captured[slot], []
        numbers = [side for dim, side in enumerate(sides) if dim not in ranged]
        ends = [side[:1] if side.lo is side.hi else side[:2] for side in numbers]
        for at in itertools.product(*ends):
            if ranged:
                side = sides[ranged[0]]
                found.append(self.summaries[slot, ranged[0]].over(at, side.lo, side.hi))
            else:
                found.append((readable(source[at]),) * 2)
        lows, highs = zip(*found, strict=True)
        least, greatest = (
            functools.reduce(torch.minimum, lows),
            functools.reduce(torch.maximum, highs),
        )
        near = [side.hi - side.lo <= 1 for side in numbers if side.lo is not side.hi]
        if near:
            known, (low, high) = functools.reduce(torch.logical_and, near), limits(source.dtype)
            least, greatest = torch.where(known, least, low), torch.where(known, greatest, high)
        return least, greatest


def region(
    extents: Extents, tile: tuple[int, int], place: tuple[Tensor, Tensor, Tensor, Tensor]
) -> Region:
    """The tiles of (rows, keys) at ``place``: numbers of batch, head, query tile and key tile.

    Cut off at the lengths; a tile beyond them stands for the last element.
    """
    b, h, *numbers = place
    ends = []
    for number, size, length in zip(numbers, tile, extents[2:], strict=True):
        ends += [(number * size).clamp(max=length - 1)]
        ends += [(number * size + (size - 1)).clamp(max=length - 1)]
    return Region(b, h, *ends)


@torch.no_grad()
def evaluated(traced: Traced, region: Region, tile: tuple[int, int]) -> Tensor:
    """The kinds of tiles told by evaluating the mask on each element, ``tile`` (rows, keys) a tile.

    The region's parts broadcast to the shape of the result; elements past its ends are left out.
    """
    rows, keys = (torch.arange(size, device=region.q_first.device) for size in tile)
    b, h, q_first, q_last, kv_first, kv_last = (part[..., None, None] for part in region)
    q = torch.minimum(q_first + rows[:, None], q_last)
    places = {"b": b, "h": h, "q": q, "kv": torch.minimum(kv_first + keys, kv_last)}
    seen = emit(*traced, **places)
    shape = torch.broadcast_shapes(*(part.shape for part in places.values()))
    seen = seen.expand(shape).flatten(-2)
    return seen.all(-1).to(torch.int8) + seen.any(-1).to(torch.int8)


def _ranged(node: Node, reads: tuple[frozenset[str], ...]) -> list[int]:
    """The dimensions of a load whose index is not one number a tile."""
    return [dim for dim, arg in enumerate(node.args) if reads[arg] & {"q", "kv", "score"}]


def _is_slow(graph: Graph, at: int) -> bool:
    node = graph.nodes[at]
    divisor = graph.nodes[node.args[1]].attr if len(node.args) == 2 else None
    if not isinstance(divisor, int):
        return False
    if node.op == "shr":
        return 2**divisor >= _SLOW
    return node.op == "floordiv" and divisor >= _SLOW


def _may_wrap(graph: Graph, scalars: tuple, extents: Extents) -> list[bool]:
    """Whether an int32 node may leave its range anywhere: its bounds over everything are all."""
    nothing = tuple(torch.empty(0, device="meta") for _ in graph.captured)
    blind = Analysis(graph, nothing, scalars, (ANY,) * len(graph.nodes), torch.device("cpu"))
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    everywhere = {
        name: Interval(zero, torch.tensor(max(0, size - 1), device="cpu"))
        for name, size in zip(("b", "h", "q", "kv"), extents, strict=True)
    }
    bounds = blind._values(everywhere)
    return [
        node.type == "int32" and bool((value.lo == LEAST) & (value.hi == MOST))
        for node, value in zip(graph.nodes, bounds, strict=True)
    ]
