"""The tuned rows: which tile, how many stages and registers, for which kind of forward.

A row is chosen by static facts alone (head dims, whether a bound cuts tiles, whether a mod adds
registers to the softmax), and of lengths by their class alone: a row whose config says ``few_keys``
is for calls of at most ``problem.FEW_KEYS`` keys, the others are for any. Of the rows whose head
dims hold the call's, those of the narrowest are looked at, and the first that fits is taken: other
head dims are padded inside the kernel. Each row says why it is there; a row without a measurement
says so.

Register arithmetic on sm_90: ``128 * (producer + consumers * consumer)`` must not pass what the CTA
is launched with (``plan.register_pool``: 64,512 with two consumers, 65,536 with three).
Shared memory: 227 KiB a CTA; two bytes an element of Q (tile_m rows) and of kv_stages blocks of K
and of V.
"""

from __future__ import annotations

from typing import NamedTuple

from fa_cute.plan import FwdConfig, FwdSm100Config


class Row(NamedTuple):
    """One line of a table; ``cut`` and ``modified`` are True, False, or None for either.

    ``cut``: causal or a window cuts tiles. ``modified``: a score_mod or a mask_mod is present.
    ``dtype``: "bfloat16" or "float16", whose conversions take more registers; None for either.
    ``presumed``: only for calls without lse, and not for a few queries that share a tile.
    ``scored``: only for calls whose one mod is a score_mod that hides nothing, so that no lists of
    blocks are made for their tile. ``light``: and takes few registers (``planning.is_light``).
    ``sought``: only for calls with lse, and not for a few queries that share a tile.
    """

    head_dims: tuple[int, int]
    cut: bool | None
    modified: bool | None
    config: FwdConfig | FwdSm100Config
    why: str
    dtype: str | None = None
    light: bool = False
    presumed: bool = False
    scored: bool = False
    sought: bool = False


FWD_SM90: tuple[Row, ...] = (
    Row(
        (128, 128),
        False,
        False,
        FwdConfig(128, 128, 2, 2, 24, 240, few_keys=True),
        "S1k full: 676 TFLOP/s, without turns 670; 128 x 176 649, FA3 634",
    ),
    Row(
        (128, 128),
        False,
        False,
        FwdConfig(128, 128, 2, 2, 24, 240, own_p=True),
        "S4k full: 729 TFLOP/s, P not its own 716, 128 x 176 709, FA3 665; S8k 748, 723, 752, 688",
        presumed=True,
    ),
    Row(
        (128, 128),
        True,
        False,
        FwdConfig(128, 128, 2, 2, 24, 240, few_keys=True),
        "S1k causal: 535 TFLOP/s, P its own 528, FA3 501",
        presumed=True,
    ),
    Row(
        (128, 128),
        True,
        False,
        FwdConfig(128, 128, 2, 2, 24, 240, ping_pong=False, own_p=True),
        "S8k causal: 723 TFLOP/s, P not its own 719, S16k 711 and 689, a window of 1k 595 and 574",
        presumed=True,
    ),
    Row(
        (128, 128),
        False,
        False,
        FwdConfig(128, 128, 2, 2, 24, 240),
        "S4k, S8k, S16k full: 736, 745, 750 TFLOP/s, 128 x 176 705, 733, 741, no turns 719, 749",
        sought=True,
        dtype="bfloat16",
    ),
    Row(
        (128, 128),
        False,
        False,
        FwdConfig(128, 176, 2, 1, 24, 240),
        "S8k full, two cards: 718, 710 TFLOP/s, without turns 725, 695; 128 x 128 715, 705",
    ),
    Row(
        (128, 128),
        None,
        True,
        FwdConfig(192, 80, 2, 2, 32, 160),
        "S8k full, causal: softcap 666, 654 TFLOP/s, a piece emulated 655, 653; ALiBi 775, 758",
        light=True,
    ),
    Row(
        (128, 128),
        None,
        True,
        FwdConfig(128, 128, 2, 2, 24, 240),
        "S8k full, causal: T5 700, 681 TFLOP/s, 40/232 registers 666, 658; 128 x 144 659, 646",
        scored=True,
    ),
    Row(
        (128, 128),
        None,
        True,
        FwdConfig(128, 128, 2, 2, 40, 232),
        "masks, whose producer needs 40 registers to find the next tile's visits; T5 666, 658",
    ),
    Row(
        (128, 128),
        None,
        None,
        FwdConfig(128, 128, 2, 2, 24, 240),
        "S8k causal: 690 TFLOP/s, without turns 682, FA3 651; S1k 539 and 535, FA3 500",
    ),
    Row(
        (64, 64),
        None,
        True,
        FwdConfig(192, 128, 2, 2, 32, 160, emulated=3),
        "S8k full, causal: softcap 428, 401 TFLOP/s, none emulated 389, 372; 4 pieces spill",
        light=True,
    ),
    Row(
        (64, 64),
        None,
        True,
        FwdConfig(192, 96, 2, 2, 24, 160),
        "not measured; 192 x 112 spills 16 bytes with a document mask, 192 x 128 536",
    ),
    Row(
        (64, 64),
        True,
        False,
        FwdConfig(128, 128, 2, 2, 24, 240, ping_pong=False, few_keys=True),
        "S1k causal: 377 TFLOP/s, with turns 368; 192 x 128 339, FA3 306; but S2k 433 and 469",
    ),
    Row(
        (64, 64),
        None,
        None,
        FwdConfig(192, 128, 2, 2, 32, 160),
        "S8k full: 620 TFLOP/s, without turns 580, FA3 548; causal 588 and 576, FA3 522",
    ),
    Row(
        (96, 96),
        None,
        True,
        FwdConfig(192, 96, 2, 2, 32, 160, emulated=2),
        "S8k full, causal: softcap 551, 503 TFLOP/s, none emulated 531, 489; ALiBi 625",
        light=True,
    ),
    Row(
        (96, 96),
        None,
        True,
        FwdConfig(192, 80, 2, 2, 32, 160),
        "not measured; 192 x 96 spills 104 bytes with ALiBi and a document mask",
    ),
    Row(
        (96, 96),
        None,
        None,
        FwdConfig(192, 96, 2, 2, 32, 160),
        "S8k causal 670 TFLOP/s, full 704; 128 x 192 613, 629, FA3 563, 622",
    ),
    Row(
        (160, 128),
        None,
        None,
        FwdConfig(128, 128, 2, 1, 24, 240),
        "as (192, 128) beside a mod; Q in registers not measured, with (160, 96) 4 bytes spilled",
    ),
    Row(
        (192, 96),
        None,
        None,
        FwdConfig(128, 128, 2, 1, 24, 240),
        "as (192, 128) beside a mod; Q in registers not measured, 28 bytes spilled",
    ),
    Row(
        (192, 128),
        None,
        False,
        FwdConfig(128, 128, 2, 1, 24, 240, q_registers=True),
        "with lse, S8k full, causal: 786, 767 TFLOP/s, Q in shared memory 779, 758; S1k 517, 503",
        sought=True,
    ),
    Row(
        (192, 128),
        None,
        False,
        FwdConfig(128, 128, 2, 1, 24, 240, q_registers=True),
        "S8k, S16k causal: 802, 833 TFLOP/s, Q in shared memory 791, 824, FA4 761, 801",
        presumed=True,
    ),
    Row(
        (192, 128),
        None,
        None,
        FwdConfig(128, 128, 2, 1, 24, 240),
        "S8k causal 728 TFLOP/s, without turns 717; full 749 and 725; FA3 686 and 685; 210 KiB",
    ),
    Row(
        (192, 192),
        None,
        True,
        FwdConfig(128, 96, 2, 1, 24, 240),
        "not measured; leaves 28 KiB for the diagonals of mods",
    ),
    Row(
        (192, 192),
        None,
        None,
        FwdConfig(128, 112, 2, 1, 24, 240),
        "S8k causal 696 TFLOP/s, without turns 694, FA3 683; 218 KiB, 128 x 128 would be 246",
    ),
    Row(
        (256, 256),
        None,
        True,
        FwdConfig(128, 64, 2, 1, 24, 240),
        "S8k full: ALiBi 747 TFLOP/s, 128 x 80 735, without room for the diagonals of two mods",
    ),
    Row(
        (256, 256),
        None,
        None,
        FwdConfig(128, 80, 2, 1, 24, 240),
        "S8k causal 720 TFLOP/s, full 759, without turns 720, 750; FA3 720, 740; 226 of 227 KiB",
    ),
)


# With a captured bias in a ring of its own: two slots of 16 bits an element (or one of 32) fit
# beside Q, K and V; ``Plan.bias_stages`` is how many do. ``dtype`` of a row is the bias'.
FWD_SM90_BIASED: tuple[Row, ...] = (
    Row(
        (64, 64),
        None,
        True,
        FwdConfig(128, 128, 2, 2, 24, 240),
        "S8k full: 314 TFLOP/s, 192 x 80 228, 192 x 112 224: TMA rows of 32 bytes",
    ),
    Row(
        (96, 96),
        None,
        True,
        FwdConfig(128, 128, 2, 2, 24, 240),
        "not measured; 192 x 80 spills 8 bytes with a left bound and sinks, and as d64; 209 KiB",
    ),
    Row(
        (128, 128),
        None,
        True,
        FwdConfig(128, 128, 2, 1, 24, 240),
        "S8k full: 508 TFLOP/s, 128 x 144 with one slot 401",
    ),
    Row((192, 128), None, True, FwdConfig(128, 96, 2, 1, 24, 240), "not measured; 217 KiB"),
    Row((192, 192), None, True, FwdConfig(128, 64, 2, 1, 24, 240), "not measured; 177 KiB"),
    Row(
        (256, 256),
        None,
        True,
        FwdConfig(128, 64, 2, 1, 32, 232),
        "S8k full: 590 TFLOP/s; 225 KiB; the producer spills 4 bytes at 24 registers",
    ),
)
