"""The tuned rows: which tile, how many stages and registers, for which kind of forward.

A row is chosen by static facts alone (head dims, whether a bound cuts tiles, whether a mod adds
registers to the softmax), never by lengths. The first row that fits is taken. Each row says why it
is there; a row without a measurement says so.

Register arithmetic on sm_90: 65,536 registers an SM, given out by warpgroup of 128 threads, so
``128 * (producer + consumers * consumer)`` must not pass 65,536; each figure is a multiple of 8.
Shared memory: 227 KiB a CTA; two bytes an element of Q (tile_m rows) and of kv_stages blocks of K
and of V.
"""

from __future__ import annotations

from typing import NamedTuple

from fa_cute.plan import FwdConfig

REGISTERS_PER_SM = 65_536


class Row(NamedTuple):
    """One line of a table; ``cut`` and ``modified`` are True, False, or None for either.

    ``cut``: causal or a window cuts tiles. ``modified``: a score_mod or a mask_mod is present.
    """

    head_dims: tuple[int, int]
    cut: bool | None
    modified: bool | None
    config: FwdConfig
    why: str


FWD_SM90: tuple[Row, ...] = (
    Row(
        (128, 128),
        False,
        False,
        FwdConfig(128, 176, 2, 1, 24, 240),
        "S8k full: 664 TFLOP/s, 128 x 128 644, 128 x 160 654; 209 KiB, so one stage of Q",
    ),
    Row(
        (128, 128),
        None,
        None,
        FwdConfig(128, 128, 2, 2, 24, 240),
        "S1k causal: 473 TFLOP/s, 128 x 160 438, 128 x 176 434; mods need the registers",
    ),
    Row(
        (64, 64),
        None,
        None,
        FwdConfig(192, 128, 2, 2, 32, 160),
        "S8k full: 543 TFLOP/s, 128 x 128 418, 128 x 192 408; three consumers, 160 registers",
    ),
)


def fwd_sm90(head_dim: int, head_dim_v: int, *, cut: bool, modified: bool) -> FwdConfig:
    """The configuration of a forward on sm_90; ValueError names the head dims that have rows."""
    for row in FWD_SM90:
        fits = row.cut in (None, cut) and row.modified in (None, modified)
        if row.head_dims == (head_dim, head_dim_v) and fits:
            return row.config
    raise ValueError(
        f"no forward kernel for sm_90 has head_dim {head_dim} and head_dim_v {head_dim_v}; "
        f"(head_dim, head_dim_v) may be {listed_head_dims()}"
    )


def head_dims() -> tuple[tuple[int, int], ...]:
    """The (head_dim, head_dim_v) pairs that have a forward row, each once, smallest first."""
    return tuple(sorted({row.head_dims for row in FWD_SM90}))


def listed_head_dims() -> str:
    """``head_dims()`` as words for an error message."""
    return " or ".join(str(dims) for dims in head_dims())
