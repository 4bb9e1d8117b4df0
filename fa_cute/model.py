"""The forward on sm_100 on paper: cycles of each unit for one block of keys, from static counts.

For M query rows a CTA, N keys, head dims D and Dv, on one SM of a B200, per block:

    products       M N (D + Dv) / 4096     4,096 multiply-adds a clock, dense 16-bit
    shared         bytes / 128             Q and K read by S = Q K^T, V by P V; P comes from
                                           tensor memory
    exponentials   M MUFU's / 16           32 on an SM of sm_103
    fp32           M pairs 2 / 128         packed multiply-adds and additions of a row
    other          M others / 64           maxima, conversions, integers, comparisons of a row

A row's counts are those of ``Body``, which ``expected`` sums up to a kernel's text: the tests hold
that against what the compiler made. The largest bounds the kernel. The first three rates are the
FlashAttention-4 paper's, the others CUDA's for sm_90; nothing here is measured.
"""

from __future__ import annotations

from typing import NamedTuple

from fa_cute.plan import FwdSm100Config, Plan
from fa_cute.spans import Bounds, kv_spans

MULTIPLY_ADDS = 4096  # a clock and SM
SHARED_BYTES = 128
EXPONENTIALS = {"sm_100a": 16, "sm_103a": 32}
FP32 = 128
OTHERS = 64
ROWS = 128  # of one product
PIECE, PIECE_O = 32, 16  # columns of tensor memory an access moves: of S and of O
SMS, TFLOPS = 148, 2250  # a B200, dense 16-bit
CLOCK = TFLOPS * 1e12 / (2 * MULTIPLY_ADDS * SMS)  # 1.86 GHz


class Body(NamedTuple):
    """Instructions of a softmax thread, which has one row, for one block of keys."""

    exponentials: int
    multiply_adds: int
    adds: int
    maxima: int
    conversions: int
    integers: int
    comparisons: int


def body(config: FwdSm100Config, *, edge: bool = False) -> Body:
    """The counts for a row of the table; in an ``edge`` every score is tested and selected."""
    pairs = config.tile_n // 2
    emulated = sum(i * config.emulated % 16 < config.emulated for i in range(pairs))
    return Body(
        exponentials=2 * (pairs - emulated) + 1,  # the factor on O
        multiply_adds=pairs + config.degree * emulated,
        adds=pairs - 1 + 3 * emulated,
        maxima=pairs + 4 + 2 * emulated,
        conversions=pairs,
        integers=2 * emulated,
        comparisons=2 * edge * config.tile_n,
    )


class Cycles(NamedTuple):
    """Cycles of each unit."""

    products: float
    shared: float
    exponentials: float
    fp32: float
    other: float

    @property
    def bound(self) -> str:
        """The unit that takes longest."""
        return max(self._fields, key=lambda name: getattr(self, name))

    @property
    def share(self) -> float:
        """The part of the tensor cores' rate that the bound leaves."""
        return self.products / max(self)


def cycles(
    config: FwdSm100Config,
    width: int,
    width_v: int,
    *,
    edge: bool = False,
    target: str = "sm_100a",
) -> Cycles:
    """One block of keys in one CTA: all its tiles of queries."""
    m, n, row = config.tile_m // config.ctas, config.tile_n, body(config, edge=edge)
    of_q, of_k, of_v = ROWS * width * 2, n * width * 2, n * width_v * 2
    # The factor on O is one exponential and one maximum a row, in a tail that hides.
    others = row.maxima - 1 + row.conversions + row.integers + row.comparisons
    return Cycles(
        m * n * (width + width_v) / MULTIPLY_ADDS,
        config.q_tiles * (of_q + (of_k + of_v) / config.ctas) / SHARED_BYTES,
        m * (row.exponentials - 1) / EXPONENTIALS[target],
        m * 2 * (row.multiply_adds + row.adds) / FP32,
        m * others / OTHERS,
    )


class Rescaling(NamedTuple):
    """What a block costs the correction where every row is rescaled: cycles, accesses a thread."""

    fp32: float
    accesses: int


def rescaling(config: FwdSm100Config, width_v: int) -> Rescaling:
    """What conditional rescaling takes off a block in which no row rises by 8."""
    return Rescaling(
        config.tile_m // config.ctas * width_v / FP32, 2 * config.q_tiles * width_v // PIECE_O
    )


def tiles(plan: Plan, bounds: Bounds) -> list[Cycles]:
    """Each tile of queries of a head: all blocks of keys that it visits; mods are not counted."""
    c = plan.config
    middle, edge = (
        cycles(c, plan.width, plan.width_v, edge=edge, target=plan.target) for edge in (False, True)
    )
    found = []
    for q in range(0, bounds.seqlen_q, c.tile_m):
        spans = kv_spans(bounds, q, q + c.tile_m, c.tile_n)
        whole = spans.middle_end - spans.middle_begin
        rest = spans.end - spans.begin - whole
        found.append(Cycles(*(whole * a + rest * b for a, b in zip(middle, edge, strict=True))))
    return found


class Counts(NamedTuple):
    """Instructions of a kernel's text: products, and what softmax and correction compute."""

    products: int
    exponentials: int
    multiply_adds: int
    adds: int
    multiplies: int
    maxima: int
    conversions: int
    loads: int
    stores: int


def expected(plan: Plan) -> Counts:
    """What the text of ``plan``'s kernel holds, without mods or sinks.

    S before the loop, P V and S in it, P V behind it; a softmax body for whole blocks, with what
    cuts the end of the keys in tensor memory, or one for edges, which puts its late columns back
    there; either reads those twice; one rescaling of O and one division of it. The CTA's tiles are
    turns of a loop, or warpgroups: each has this text.
    """
    c = plan.config
    s, pv = plan.width // 16, c.tile_n // 16
    kinds = 1 + (plan.causal or any(plan.window))
    row = Body(*(kinds * count for count in body(c)))
    o = plan.width_v
    pieces, late = 2 * c.tile_n // PIECE, (c.tile_n - c.early) // PIECE
    return Counts(
        products=2 * (s + pv),
        exponentials=row.exponentials,
        multiply_adds=row.multiply_adds,
        adds=row.adds,
        multiplies=2 * o // 2,
        maxima=row.maxima,
        conversions=row.conversions + o // 2,
        loads=pieces + kinds * late + 2 * o // PIECE_O,
        stores=pieces + (kinds - 1) * late + o // PIECE_O,
    )
