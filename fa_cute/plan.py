"""Every static decision of one kernel, in one frozen value.

A ``Plan`` is the compile key, the constructor argument of the kernel and the identity in the cache.
Nothing in it depends on lengths, strides, batch, scale or the contents of a captured tensor: those
are run-time arguments (``Io``, ``Extra``, ``Launch``). This file is a leaf: the host, the kernels
and the device pieces all read it, and it imports only the graph of the mods.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from fa_cute.mods.graph import Graph

BACKWARD_BYTES = 16 << 20  # of an H200's L2 of 60 MB, for heads of a backward side by side
SHARED_MEMORY_LIMIT = 232448  # 227 KiB, what one CTA of sm_90 may have


@dataclass(frozen=True)
class FwdConfig:
    """One row of a forward config table (``host/rows.py``).

    ``tile_m`` query rows a CTA, 64 of them a consumer warpgroup; ``tile_n`` keys a block;
    ``kv_stages`` slots in each of the K and the V ring, ``q_stages`` in Q's; registers a thread as
    ``setmaxnreg`` sets them, for the producer's warpgroup and for each consumer's. ``ping_pong``:
    consumers issue their products in strict turns. ``packed``: the query heads that share a
    key/value head are rows of one tile (short Sq). ``few_keys``: chosen for a short Sk. ``own_p``:
    where maxima are presumed, P of a block has registers of its own, so that its exponentials pass
    under the P V of the block before (``softmax.presume``). ``emulated``: of the ``tile_n / 16``
    pieces of a block's exponentials, those that the FMA pipes compute under a mod that takes MUFU
    itself (``softmax.How``). ``q_registers``: Q of a tile is read into registers, so that
    its slot is the next tile's while this one is at work.
    """

    tile_m: int
    tile_n: int
    kv_stages: int
    q_stages: int
    producer_registers: int
    consumer_registers: int
    ping_pong: bool = True
    packed: bool = False
    few_keys: bool = False
    own_p: bool = False
    emulated: int = 0
    q_registers: bool = False

    @property
    def consumers(self) -> int:
        """Consumer warpgroups a CTA."""
        return self.tile_m // 64

    @property
    def rows_a_copy(self) -> int:
        """Rows of Q that one copy brings."""
        return self.tile_m


@dataclass(frozen=True)
class BwdConfig:
    """One row of a backward config table (``host/configs.py``).

    ``tile_kv`` keys a CTA; ``tile_q`` queries a block; ``stages`` slots in each of the Q and the dO
    ring and of dS; registers a thread, as in ``FwdConfig``. Each of the ``consumers`` warpgroups
    has 64 keys of its own, or, ``wide``, all have the same 64: they part the queries of S and the
    columns of dK and dV, so that head dims whose dK and dV pass the registers of one fit. ``bulk``:
    dQ is added from shared memory, as a deterministic one is unless ``wide``, else from registers;
    from ``dq_slots``, of which the kernel takes fewer where memory has no room.
    """

    tile_q: int
    tile_kv: int
    stages: int
    producer_registers: int
    consumer_registers: int
    wide: bool = False
    bulk: bool = False
    dq_slots: int = 1

    @property
    def consumers(self) -> int:
        """Consumer warpgroups a CTA."""
        return 2 if self.wide else self.tile_kv // 64

    @property
    def own_queries(self) -> int:
        """Columns of S^T that one warpgroup has."""
        return self.tile_q // self.consumers if self.wide else self.tile_q

    @property
    def rows_parted(self) -> bool:
        """Whether the warpgroups share a tile of dQ by rows; else by columns."""
        return self.tile_q == 64 * self.consumers


@dataclass(frozen=True)
class FwdSm100Config:
    """One row of the forward's table for sm_100.

    ``q_tiles`` tiles of 128 query rows a CTA, each with a softmax warpgroup; ``tile_n`` keys a
    block; slots of K, of V and, a tile, of S in tensor memory. ``early`` columns of P are given to
    the product before the rest. Of every 16 pairs of exponentials ``emulated`` are computed on the
    FMA pipes, by a polynomial of ``degree``. Registers a thread: of a softmax warpgroup, of the
    correction's, and of the one whose warps load and multiply. ``packed``: as in ``FwdConfig``.
    ``pair``: two CTAs of a cluster share each block, half of K and of V in either, and their
    products are one (``cta_group::2``).
    """

    q_tiles: int
    tile_n: int
    k_stages: int
    v_stages: int
    s_stages: int
    early: int
    emulated: int
    softmax_registers: int
    correction_registers: int
    issue_registers: int
    degree: int = 3
    packed: bool = False
    pair: bool = False

    @property
    def ctas(self) -> int:
        """CTAs that share a tile of queries."""
        return 2 if self.pair else 1

    @property
    def tile_m(self) -> int:
        """Query rows a tile: of a CTA, or of both of a pair."""
        return self.rows_a_copy * self.q_tiles * self.ctas

    @property
    def rows_a_copy(self) -> int:
        """Rows of Q that one copy brings: those of one product."""
        return 128

    @property
    def threads(self) -> int:
        """Of a CTA: a softmax warpgroup a tile, the correction's and the issuing one."""
        return 128 * (2 + self.q_tiles)

    @property
    def registers(self) -> int:
        """What all warpgroups of a CTA ask for."""
        others = self.correction_registers + self.issue_registers
        return 128 * (self.q_tiles * self.softmax_registers + others)


FORWARD, BACKWARD = "forward", "backward"
PREPROCESS, POSTPROCESS = "backward-preprocess", "backward-postprocess"


@dataclass(frozen=True)
class Plan:
    """The static facts of one attention kernel.

    ``direction``: FORWARD, BACKWARD, or one of the two passes around the latter. A backward's
    ``score_mod`` is the graph with its derivative.
    ``window`` says whether a left and a right bound exist (their sizes are run-time numbers).
    ``gqa_ratio`` is query heads a key/value head. Dtypes are torch's names ("bfloat16").
    ``visits`` says where the blocks that a tile visits come from: "bounds" (causal and the window
    alone: a mask_mod is evaluated on all they leave), "ranges" (those of the mask_mod, computed in
    the kernel) or "lists" (``Extra.block_lists``). ``bias``: the place of the captured tensor of
    score_mod that TMA loads by tiles (``mods/tiles.py``), or None. ``gradients``, of a backward:
    whether it computes dQ, and whether dK and dV.
    """

    direction: str
    dtype: str
    head_dim: int
    head_dim_v: int
    gqa_ratio: int
    causal: bool
    window: tuple[bool, bool]
    score_mod: Graph | None
    mask_mod: Graph | None
    return_lse: bool
    sinks: bool
    deterministic: bool
    target: str
    config: FwdConfig | FwdSm100Config | BwdConfig
    visits: str = "bounds"
    bias: int | None = None
    gradients: tuple[bool, bool] = (True, True)

    @property
    def in_turn(self) -> bool:
        """Whether tiles of keys add to dQ in turn."""
        return self.deterministic and self.gradients[0]

    @property
    def zeroes(self) -> bool:
        """Whether tiles of a backward zero the sums of later heads (``device/zeroing.py``).

        In turn, and by the length of lists, tiles come in other orders. Where query heads share a
        key head there is more to zero at once than the L2 keeps: S8k, 4 of them, full 612 to 593
        TFLOP/s.
        """
        shared = self.deterministic or self.gqa_ratio > 1
        return self.gradients[0] and not shared and self.visits != "lists"

    def rows_together(self, spread: int = 1) -> int:
        """Of a backward: rows of queries of the key heads whose tiles run side by side.

        Q, dO and dQ's sums of these are 16 MB: d128 S1k causal, 325 TFLOP/s by Q and dO alone (64
        heads), 354 with dQ in 32 MB (32 heads), 366 so (16); S8k 615, 610, 610. Query heads of a
        key head follow each other, so that one of them counts: 4 of them, S8k causal, 604 so, 554
        by all, which left 64 tiles a section; d256 in turn 338 with 4 key heads, 288 with 2; of
        narrow heads not tried in turn. ``spread``: so many times as much.
        """
        row_bytes = 2 * (self.head_dim + self.head_dim_v) + 4 * self.width
        heads = self.gqa_ratio if self.deterministic and not self.config.wide else 1
        return spread * BACKWARD_BYTES // (row_bytes * heads)

    @property
    def bias_stages(self) -> int:
        """Slots of the ring of ``bias``: two, or one where two do not fit; 0 where none does.

        What the rest takes: tiles of Q, K and V, diagonals of the mods (``device/score.py``), and a
        KiB for barriers and words; on Blackwell the messages to the correction and what columns
        load (``device/lower.py``), 512 bytes a node, too.
        """
        c = self.config
        if self.bias is None or isinstance(c, BwdConfig):
            return 0
        room = SHARED_MEMORY_LIMIT - 1024
        if isinstance(c, FwdConfig):
            slots, groups, height = (c.q_stages, c.kv_stages, c.kv_stages), c.consumers, 64
        else:
            slots, groups, height = (1, c.k_stages, c.v_stages), c.q_tiles, 128
            room -= 2048 * groups
        q, k, v = slots
        room -= 2 * c.tile_m * self.width * q
        room -= 2 * c.tile_n * (self.width * k + self.width_v * v)
        words = -(-(height + c.tile_n - 1) // 128) * 128 * groups
        room -= 4 * words * sum(map(_diagonals, (self.score_mod, self.mask_mod)))
        size = 4 if self.score_mod.captured[self.bias].dtype == "float32" else 2
        return max(0, min(2, room // (c.tile_m * c.tile_n * size)))

    @property
    def seeks(self) -> bool:
        """Whether every block's maximum is sought before its exponentials: with lse."""
        return self.return_lse

    @property
    def few_queries(self) -> bool:
        """Whether query heads share tiles, as suits a short Sq."""
        return getattr(self.config, "packed", False)

    @property
    def few_keys(self) -> bool:
        """Whether the row is one for a short Sk."""
        return getattr(self.config, "few_keys", False)

    @property
    def width(self) -> int:
        """Columns of Q and K in shared memory: head_dim, padded there with zeros."""
        return padded(self.head_dim, self._step)

    @property
    def width_v(self) -> int:
        """Columns of V in shared memory and of O in registers: head_dim_v, padded with zeros."""
        return padded(self.head_dim_v, self._step)

    @property
    def _step(self) -> int:
        """A row's swizzle atom and a quad's vectors of O, for each part of a row."""
        return 64 if getattr(self.config, "wide", False) else 32

    @property
    def block_lists(self) -> bool:
        """Whether a call brings the lists of ``plan_mask``."""
        return self.visits == "lists"

    def parts(self) -> dict[str, str]:
        """The named parts of the identity, as text that is stable across processes and machines."""
        return {f.name: _text(getattr(self, f.name)) for f in fields(self)}

    @property
    def key(self) -> str:
        """A stable digest of ``parts()``: 32 hexadecimal digits."""
        text = "\n".join(f"{name}={value}" for name, value in self.parts().items())
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def register_pool(threads: int) -> int:
    """The registers that a CTA of ``threads`` is launched with, all that setmaxnreg can pass on.

    An SM has 65,536; each thread gets the same multiple of 8. A warpgroup that asks for more than
    the others gave back waits for ever: 32 + 2 x 240 a thread is 65,536 and hangs, because 384
    threads are launched with 168 each, 64,512.
    """
    return 65536 // threads // 8 * 8 * threads


def _diagonals(graph: Graph | None) -> int:
    """At most how many values of q - kv alone a graph hands on to values that are not."""
    if graph is None:
        return 0
    levels = graph.levels()
    used = {graph.result}
    for node, level in zip(graph.nodes, levels, strict=True):
        used.update(() if level == "diagonal" else node.args)
    return sum(levels[at] == "diagonal" for at in used)


def padded(head_dim: int, step: int = 32) -> int:
    """A head dim up to the next multiple of ``step``."""
    return -(-head_dim // step) * step


def _text(value: Any) -> str:
    if isinstance(value, Graph):
        return value.key
    if is_dataclass(value):
        return ",".join(f"{f.name}:{getattr(value, f.name)}" for f in fields(value))
    return str(value)


class Io(NamedTuple):
    """The tensors of a forward call.

    q, out ``(B, Sq, Hq, ·)``, k, v ``(B, Sk, Hk, ·)``, lse ``(B, Hq, Sq)`` or None.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any = None


class BwdIo(NamedTuple):
    """The tensors of the main backward kernel.

    q, dout ``(B, Sq, Hq, ·)``; k, v, dk, dv ``(B, Sk, Hk, ·)``. From the preprocess: ``shift`` and
    ``delta`` ``(B, Hq, P)`` float32, P = Sq padded to whole blocks of ``tile_q``; ``sums``
    ``(B, Hq, P, width)`` float32, dQ in fragment order; ``turns`` int32, one a block,
    ``(B, Hq, P / tile_q)``; None unless deterministic. ``zeroed`` int32 ``(B, Hk, 1)``: how many
    tiles of earlier heads have zeroed their part of the head's sums, if the plan ``zeroes``. What
    is not computed has None.
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    shift: Any
    delta: Any
    sums: Any
    dk: Any
    dv: Any
    turns: Any = None
    zeroed: Any = None


class PreprocessIo(NamedTuple):
    """The tensors of the pass before: out, dout ``(B, Sq, Hq, Dv)``, lse, dlse ``(B, Hq, Sq)``.

    dlse is None where lse has no gradient. It writes the others: see ``BwdIo``; of ``sums``, seen
    here as ``(1, n, P, width)``, those of the first n heads of all batches.
    """

    out: Any
    dout: Any
    lse: Any
    dlse: Any
    shift: Any
    delta: Any
    sums: Any
    turns: Any = None
    zeroed: Any = None


class PostprocessIo(NamedTuple):
    """The tensors of the pass after: ``sums`` of ``BwdIo`` become dq ``(B, Sq, Hq, D)``."""

    sums: Any
    dq: Any


class BlockLists(NamedTuple):
    """The kept blocks of keys of each tile of queries; in a backward, of queries of one of keys.

    All int32, with any strides. Tile t of batch b and query head h keeps
    ``entries[begin[b, h, t] : end[b, h, t]]``, each ``2 * block + full``, from the last block to
    the first; a full block needs no mask. ``order`` numbers the tiles of a head from those with
    short lists to those with long ones; in a backward those of a key/value head, by all lists of
    its query heads. ``begin`` has a stride of 0 where lists serve all batches, or all heads.
    ``turns`` (a deterministic backward): of each entry, how many tiles before its own have the
    block in the list of their head.
    """

    begin: Any
    end: Any
    order: Any
    entries: Any
    turns: Any = None


class Fixed(NamedTuple):
    """A fixed-point sum of ``words`` int64: word i < words - 1 counts 2^(lowest + 32 i), and the
    last one terms that did not fit."""

    words: int
    lowest: int


# Terms up to 2^47 (1e14), and of one of 2^-48 (4e-15) still all 24 bits.
FIXED = Fixed(5, -72)


class Extra(NamedTuple):
    """What some plans need beside ``Io``; a member that a plan lacks is None: no part of the call.

    ``captured`` holds the mods' captured tensors (score_mod's, then mask_mod's), ``scalars`` their
    captured 0-d CPU tensors as Python numbers, in the same order. ``sinks`` is ``(Hq,)`` float32,
    ``block_lists`` a ``BlockLists`` for the tile of the plan. ``gradients``, of a backward: tensors
    like the captured ones that get one, to be added to: float32, or, deterministic, int64, the
    first of each sum's ``FIXED.words``, which follow each other.
    """

    captured: Any = None
    scalars: Any = None
    sinks: Any = None
    gradients: Any = None
    block_lists: Any = None


class Launch(NamedTuple):
    """Run-time numbers of a launch.

    Softmax scale; window bounds (used if the plan has them); SM count; ``counter``, an int32 tensor
    ``(1,)`` on the device, from which CTAs draw their next tile: 0 before a launch and 0 after it.
    Launches that may run at the same time need a counter each. ``scratch``: fp32 words that stand
    in for tensor memory, 65,536 a CTA, in the plan of a hosted target; else None.
    """

    scale: Any
    window_left: Any
    window_right: Any
    sm_count: Any
    counter: Any
    scratch: Any = None
