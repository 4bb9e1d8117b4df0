"""Which configuration a forward gets: a row of ``rows.py`` or of the tables of sm_100."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from fa_cute.host.rows import FWD_SM90, FWD_SM90_BIASED, Row
from fa_cute.plan import FwdConfig, FwdSm100Config

STEP = 8  # elements in 16 bytes: what TMA and the stores move
LARGEST_HEAD_DIM = 256  # the columns of one wgmma
HEAD_DIMS = f"multiples of {STEP} up to {LARGEST_HEAD_DIM}"

# sm_100: 512 columns of tensor memory, a CTA; 227 KiB of shared memory; 65,536 registers for two
# softmax warpgroups, the correction's and the one that loads and multiplies. None is measured: no
# such GPU was at hand. ``emulated`` follows the cycle model of docs/blackwell.md.
FWD_SM100: tuple[Row, ...] = (
    Row(
        (64, 64),
        None,
        True,
        FwdSm100Config(2, 128, 4, 4, 1, 96, 3, 200, 56, 56),
        "not measured; a quarter emulated, or 192 to soften with, spills 8 bytes of T5's bias",
    ),
    Row(
        (64, 64),
        None,
        None,
        FwdSm100Config(2, 128, 4, 4, 1, 96, 4, 192, 56, 72),
        "not measured; bound by exponentials, a quarter emulated",
    ),
    Row(
        (96, 96),
        None,
        True,
        FwdSm100Config(2, 128, 3, 3, 1, 96, 3, 200, 56, 56),
        "not measured; as the row of 64",
    ),
    Row(
        (96, 96),
        None,
        None,
        FwdSm100Config(2, 128, 3, 3, 1, 96, 3, 192, 56, 72),
        "not measured; 192 KiB; 48 registers to correct with spill up to 112 bytes without lse",
    ),
    Row(
        (128, 128),
        None,
        True,
        FwdSm100Config(2, 128, 2, 2, 1, 96, 0, 200, 56, 56),
        "not measured; bound by products; 192 to soften with spill 8 bytes of ALiBi and documents",
    ),
    Row(
        (128, 128),
        None,
        None,
        FwdSm100Config(2, 128, 2, 2, 1, 96, 2, 192, 56, 72),
        "not measured; 192 KiB, 512 columns",
    ),
    Row(
        (192, 128),
        None,
        True,
        FwdSm100Config(2, 96, 2, 2, 1, 64, 0, 192, 56, 72),
        "not measured; 216 KiB: blocks of 128 keys leave no room for what mods load by column",
    ),
    Row(
        (192, 128),
        None,
        None,
        FwdSm100Config(2, 128, 2, 1, 1, 96, 2, 192, 56, 72),
        "not measured; 224 KiB, so one slot of V",
    ),
    Row(
        (256, 256),
        None,
        None,
        FwdSm100Config(1, 96, 2, 1, 2, 64, 0, 240, 112, 80),
        "not measured; O takes 256 columns, so one tile with two slots of S; 208 KiB",
    ),
)

# With a captured bias in rings of its own, one a softmax warpgroup, whose box has the tile's
# columns; ``dtype`` of a row is the bias'. fp32 has no room beside head dims (192, 128).
FWD_SM100_BIASED: tuple[Row, ...] = (
    Row(
        (64, 64),
        None,
        True,
        FwdSm100Config(2, 64, 3, 3, 1, 32, 3, 192, 56, 72),
        "not measured; two slots, 208 KiB; 128 keys leave one slot to K and to V",
        dtype="float32",
    ),
    Row(
        (64, 64),
        None,
        True,
        FwdSm100Config(2, 128, 2, 2, 1, 96, 3, 192, 56, 72),
        "not measured; one slot, 160 KiB",
    ),
    Row(
        (96, 96),
        None,
        True,
        FwdSm100Config(2, 64, 3, 3, 1, 32, 3, 192, 56, 72),
        "not measured; one slot, 184 KiB",
        dtype="float32",
    ),
    Row(
        (96, 96),
        None,
        True,
        FwdSm100Config(2, 128, 2, 2, 1, 96, 3, 192, 56, 72),
        "not measured; one slot, 208 KiB",
    ),
    Row(
        (128, 128),
        None,
        True,
        FwdSm100Config(2, 64, 2, 2, 1, 32, 0, 192, 56, 72),
        "not measured; one slot, 192 KiB",
        dtype="float32",
    ),
    Row(
        (128, 128),
        None,
        True,
        FwdSm100Config(2, 96, 2, 2, 1, 64, 0, 192, 56, 72),
        "not measured; one slot, 208 KiB; 128 keys leave one slot to K and to V",
    ),
    Row(
        (192, 128),
        None,
        True,
        FwdSm100Config(2, 64, 2, 2, 1, 32, 0, 192, 56, 72),
        "not measured; one slot, 208 KiB",
    ),
    Row(
        (256, 256),
        None,
        True,
        FwdSm100Config(1, 64, 2, 1, 2, 32, 0, 240, 112, 80),
        "not measured; two slots, 192 KiB, of fp32 224",
    ),
)


# Pairs of CTAs (``FwdSm100Config.pair``), where FlashAttention-4 has them. None is a default: it
# takes FA_CUTE_PAIRS=1. They have been compiled and protocol-checked, never run, and on paper they
# only relieve shared memory, which bounds none of these head dims.
FWD_SM100_PAIRS: tuple[Row, ...] = (
    Row(
        (128, 128),
        False,
        False,
        FwdSm100Config(2, 128, 4, 4, 1, 96, 2, 192, 64, 64, pair=True),
        "not run; 1,024 cycles of shared memory a block where one CTA has 1,536; 192 KiB",
    ),
    Row(
        (192, 128),
        False,
        False,
        FwdSm100Config(2, 128, 3, 2, 1, 96, 2, 184, 56, 88, pair=True),
        "not run; a second slot of V, which one CTA has no room for; 200 KiB",
    ),
    Row(
        (256, 256),
        None,
        False,
        FwdSm100Config(1, 128, 2, 2, 2, 96, 0, 240, 112, 80, pair=True),
        "not run; blocks of 128 keys and a second slot of V where one CTA has 96 and one; 192 KiB",
    ),
)


def fwd_sm90(
    head_dim: int,
    head_dim_v: int,
    *,
    cut: bool,
    modified: bool,
    dtype: str = "bfloat16",
    few_keys: bool = False,
    light: bool = False,
    presumed: bool = False,
    scored: bool = False,
    sought: bool = False,
) -> FwdConfig:
    """The configuration of a forward on sm_90; ValueError says which head dims have one.

    ``few_keys``: the call is in that class of lengths (see above). ``light``, ``presumed``,
    ``scored``, ``sought``: as in ``Row``.
    """
    table = [
        row
        for row in FWD_SM90
        if row.config.few_keys <= few_keys
        and row.light <= light
        and row.presumed <= presumed
        and row.scored <= scored
        and row.sought <= sought
    ]
    return _first(table, (head_dim, head_dim_v), cut, modified, dtype)


def biased(
    config: FwdConfig | FwdSm100Config, head_dims: tuple[int, int], dtype: str
) -> FwdConfig | FwdSm100Config:
    """The row with rings of a bias of ``dtype`` in the place of ``config``; as ``fwd_sm90``.

    It emulates no more exponentials than ``config``.
    """
    if isinstance(config, FwdConfig):
        return _first(FWD_SM90_BIASED, head_dims, False, True, dtype)
    found = _first(FWD_SM100_BIASED, head_dims, False, True, dtype)
    return replace(found, emulated=min(found.emulated, config.emulated))


def fwd_sm100(
    head_dim: int, head_dim_v: int, *, cut: bool, modified: bool, dtype: str = "bfloat16"
) -> FwdSm100Config:
    """The configuration of a forward on sm_100 and sm_103; ValueError as ``fwd_sm90``."""
    return _first(FWD_SM100, (head_dim, head_dim_v), cut, modified, dtype)


def _first(
    table: Sequence[Row], head_dims: tuple[int, int], cut: bool, modified: bool, dtype: str
) -> FwdConfig | FwdSm100Config:
    head_dim, head_dim_v = head_dims
    if not takes(head_dim, head_dim_v):
        raise ValueError(
            f"no forward kernel has head_dim {head_dim} and head_dim_v {head_dim_v}; "
            f"each may be one of the {HEAD_DIMS}"
        )
    fitting = [
        row
        for row in table
        if row.cut in (None, cut)
        and row.modified in (None, modified)
        and row.dtype in (None, dtype)
        and _holds(row, head_dims)
    ]
    return min(fitting, key=lambda row: row.head_dims).config


def fwd_sm103(
    head_dim: int, head_dim_v: int, *, cut: bool, modified: bool, dtype: str = "bfloat16"
) -> FwdSm100Config:
    """``fwd_sm100`` without emulation: MUFU of sm_103 gives twice the exponentials a clock."""
    found = fwd_sm100(head_dim, head_dim_v, cut=cut, modified=modified, dtype=dtype)
    return replace(found, emulated=0)


def paired(config: FwdSm100Config, head_dims: tuple[int, int], *, cut: bool) -> FwdSm100Config:
    """The row for pairs of CTAs in the place of ``config``, or ``config`` where there is none.

    It emulates no more exponentials than ``config``.
    """
    narrowest = min(row.head_dims for row in FWD_SM100 if _holds(row, head_dims))
    for row in FWD_SM100_PAIRS:
        if row.head_dims == narrowest and row.cut in (None, cut):
            return replace(row.config, emulated=min(row.config.emulated, config.emulated))
    return config


def _holds(row: Row, head_dims: tuple[int, int]) -> bool:
    return all(d <= most for d, most in zip(head_dims, row.head_dims, strict=True))


def why(config: FwdConfig | FwdSm100Config) -> str:
    """The reason of the row of a forward's ``config``, or of the row that it was made from."""
    made = ("packed",) if isinstance(config, FwdConfig) else ("packed", "emulated")
    rows = (*FWD_SM90, *FWD_SM90_BIASED, *FWD_SM100, *FWD_SM100_BIASED, *FWD_SM100_PAIRS)
    exact = (row for row in rows if row.config is config)
    near = (
        row
        for row in rows
        if type(row.config) is type(config)
        and row.config == replace(config, **{name: getattr(row.config, name) for name in made})
    )
    return next(chain(exact, near)).why


def takes(head_dim: int, head_dim_v: int) -> bool:
    """Whether a forward on sm_90 has these head dims: the kernel pads what no row names."""
    return all(0 < d <= LARGEST_HEAD_DIM and d % STEP == 0 for d in (head_dim, head_dim_v))
