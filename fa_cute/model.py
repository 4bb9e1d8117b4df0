"""The forward on sm_100 on paper: cycles of each unit for one block of keys, from static counts.

For M query rows a CTA, N keys, head dims D and Dv, on one SM of a B200, per block:

    products   M N (D + Dv) / 4096        4,096 multiply-adds a clock, dense 16-bit
    smem       bytes / 128                Q and K read by S = Q K^T, V by P V; P comes from
                                          tensor memory
    MUFU       M N (1 - emulated) / 16    exponentials a clock

The largest bounds the kernel. Rates are the FlashAttention-4 paper's; nothing here is measured.
"""

from __future__ import annotations

from typing import NamedTuple

from fa_cute.plan import FwdSm100Config, Plan

MULTIPLY_ADDS = 4096  # a clock and SM
SHARED_BYTES = 128
EXPONENTIALS = 16
ROWS = 128  # of one product


class Cycles(NamedTuple):
    """Cycles of each unit for one block, and the multiply-adds of the block."""

    products: float
    shared: float
    exponentials: float

    @property
    def bound(self) -> str:
        """The unit that takes longest."""
        return max(self._fields, key=lambda name: getattr(self, name))

    @property
    def share(self) -> float:
        """The part of the tensor cores' rate that the bound leaves."""
        return self.products / max(self)


def cycles(config: FwdSm100Config, width: int, width_v: int, emulated: int | None = None) -> Cycles:
    """The model for a row of the table; ``emulated`` of 16 pairs, the row's own by default."""
    m, n = config.tile_m, config.tile_n
    share = (config.emulated if emulated is None else emulated) / 16
    of_q, of_k, of_v = ROWS * width * 2, n * width * 2, n * width_v * 2
    return Cycles(
        m * n * (width + width_v) / MULTIPLY_ADDS,
        config.q_tiles * (of_q + of_k + of_v) / SHARED_BYTES,
        m * n * (1 - share) / EXPONENTIALS,
    )


class Counts(NamedTuple):
    """Instructions of a kernel's text: products, hardware exponentials, packed multiply-adds."""

    products: int
    exponentials: int
    packed: int


def expected(plan: Plan) -> Counts:
    """What the text of ``plan``'s kernel holds, without mods or sinks.

    S before the loop, P V and S in it, P V behind it; a softmax body for the first block, one for
    each kind of block after it, with one exponential more for the factor on O.
    """
    c = plan.config
    s, pv = plan.width // 16, c.tile_n // 16
    bodies = 2 + (plan.causal or plan.window[1]) + plan.window[0]
    pairs = [i * c.emulated % 16 < c.emulated for i in range(c.tile_n // 2)]
    hardware = 2 * (len(pairs) - sum(pairs))
    return Counts(
        c.q_tiles * 2 * (s + pv),
        bodies * hardware + bodies - 1,
        bodies * (len(pairs) + c.degree * sum(pairs)),
    )
