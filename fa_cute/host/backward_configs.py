"""The tuned rows of the backward on Hopper, chosen as ``host/configs.py`` chooses the forward's."""

from __future__ import annotations

from typing import NamedTuple

from fa_cute.plan import BwdConfig


class BwdRow(NamedTuple):
    """One line of the backward's table; members as in ``configs.Row``.

    ``heavy``: only for calls of at least that ``backward.heaviness``.
    """

    head_dims: tuple[int, int]
    cut: bool | None
    modified: bool | None
    config: BwdConfig
    why: str
    heavy: int = 0


BWD_SM90: tuple[BwdRow, ...] = (
    BwdRow(
        (64, 64),
        None,
        True,
        BwdConfig(64, 64, 2, 24, 240, wide=True),
        "short vectors, whose adds take the time: 64 x 128 spills 140 bytes to 3 KiB of them",
        heavy=2,
    ),
    BwdRow(
        (64, 64),
        None,
        True,
        BwdConfig(64, 128, 2, 24, 240),
        "S8k full, unmodified: 430 TFLOP/s; 128 x 128 with a mod passes the registers",
    ),
    BwdRow(
        (64, 64),
        None,
        None,
        BwdConfig(128, 128, 2, 24, 240),
        "S8k full: 535 TFLOP/s, causal 532, FA4 556, 548; 64 x 128 430 of 531, 421 of 509",
    ),
    BwdRow(
        (128, 128),
        None,
        True,
        BwdConfig(64, 64, 2, 24, 240, wide=True),
        "S4k full, a learned cap: 353 TFLOP/s, 64 x 128 192; but a learned factor 389 and 462",
        heavy=1,
    ),
    BwdRow(
        (128, 128),
        None,
        None,
        BwdConfig(64, 128, 2, 24, 240, bulk=True, dq_slots=2),
        "S8k full: 632 TFLOP/s, causal 629, FA4 626, 563; from registers 608 of 619, 578 of 604",
    ),
    BwdRow(
        (192, 128),
        None,
        None,
        BwdConfig(64, 64, 2, 24, 240, wide=True),
        "not measured",
    ),
    BwdRow(
        (256, 256),
        None,
        None,
        BwdConfig(64, 64, 2, 24, 240, wide=True),
        "not measured; 225 KiB",
    ),
)


def bwd_sm90(
    head_dim: int, head_dim_v: int, *, cut: bool, modified: bool, heavy: int = 0
) -> BwdConfig:
    """The configuration of a backward on sm_90; ValueError says which head dims have one."""
    fitting = [
        row
        for row in BWD_SM90
        if row.cut in (None, cut)
        and row.modified in (None, modified)
        and row.heavy <= heavy
        and all(d <= most for d, most in zip((head_dim, head_dim_v), row.head_dims, strict=True))
    ]
    if not fitting:
        raise ValueError(
            f"no backward kernel for sm_90 has head_dim {head_dim} and head_dim_v {head_dim_v}"
        )
    return min(fitting, key=lambda row: row.head_dims).config
