"""Which tile of queries a CTA takes next.

All tiles are numbered in one dimension, so that batch x heads x tiles may pass 65,535. There are at
most as many CTAs as SMs. CTA ``i`` starts with tile ``i`` and draws each following one from a
counter in global memory, so that a CTA whose tiles are short takes more of them; its loads run
under the epilogue of its last tile. It draws late, when it has almost loaded a tile: drawn before,
the longest tiles of a section each brought a second long one along (SMs of a causal d256 call were
busy for 1.00 to 1.24 million cycles). The draw that finds the last number resets the counter: with
``count`` tiles and ``n`` CTAs there are ``count - n`` draws that give a tile and ``n`` that give
none, so the last of all returns ``count - 1``.

Where tiles wait for those of lower numbers (a deterministic backward) CTAs draw the tile that they
begin with, too, for they need not begin in the order of theirs: the last of all draws returns
``count + n - 1``.

The numbering decides what runs beside what:

* ``section`` heads form a section whose K and V stay in L2 together; sections follow each other. A
  power of two, so that head counts divide: sections of 6 of 32 heads leave one of 2, whose longest
  tiles ran alone at the end (causal, S8k, d128: 609 TFLOP/s).
* within a section the tile of queries is the slow index and the head the fast one when tiles differ
  in length (causal, windows): the longest come first, so that the short ones fill the end.
  Otherwise the tile is the fast index, so that neighbours read the same K and V.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from fa_cute.device import emit

L2_SECTION_BYTES = 32 << 20  # of an H200's 60 MB; q and out stream through the rest
SECTIONS = (64, 32, 16, 8, 4, 2)
# Words of a tile's header: the number of the tile after it; under a mask its own number of visits;
# a place. On Hopper those of the tile after it come late, in a header of their own.
HEADER = ("following", "count", "block", "head", "batch")
COUNT, BLOCK = 1, 2


class Place(NamedTuple):
    """Where a tile lies: its number among a head's tiles of queries, the query head, the batch."""

    block: Int32
    head: Int32
    batch: Int32

    @staticmethod
    def told(header: cute.Tensor) -> Place:
        """As the ``header`` (words,) tells it."""
        return Place(*(header[BLOCK + i] for i in range(3)))


class Tiles(NamedTuple):
    """``count`` tiles, ``blocks`` a head, ``heads`` a batch, ``section`` of ``rows`` heads."""

    count: Int32
    blocks: Int32
    heads: Int32
    section: Int32
    rows: Int32

    @staticmethod
    def of(blocks: Int32, heads: Int32, batch: Int32, section: Int32) -> Tiles:
        """Number ``blocks`` tiles of each of ``heads`` x ``batch`` heads."""
        rows = heads * batch
        return Tiles(blocks * rows, blocks, heads, section, rows)

    def place(self, tile: Int32, longest_first: bool) -> Place:
        """The place of tile number ``tile``."""
        if const_expr(longest_first):
            a_section = self.blocks * self.section
            first = (tile // a_section) * self.section
            rest = self.rows - first
            width = cutlass.select_(rest < self.section, rest, self.section)
            within = tile % a_section
            block = self.blocks - 1 - within // width
            row = first + within % width
        else:
            block = tile % self.blocks
            row = tile // self.blocks
        return Place(block, row % self.heads, row // self.heads)


def section_of(head_bytes: Int32, ratio: int) -> Int32:
    """Query heads a section, for K and V of ``head_bytes`` that ``ratio`` query heads share."""
    section = Int32(1)
    for size in reversed(SECTIONS):
        section = cutlass.select_(head_bytes <= L2_SECTION_BYTES // size, Int32(size), section)
    return section * ratio


@cute.jit
def ask(counter: cute.Tensor) -> Int32:
    """Lane 0 draws the counter's next value, for ``draw``; it is there about 1 us later."""
    asked = Int32(0)
    if cute.arch.lane_idx() == 0:
        asked = cute.arch.atomic_add(counter.iterator, Int32(1), sem="relaxed", scope="gpu")
    return asked


def draw(
    tiles: Tiles, counter: cute.Tensor, asked: Int32, header: cute.Tensor, *, every: bool = False
) -> Int32:
    """The next tile of this CTA, ``>= count`` when none is left: for all lanes of the warp.

    ``asked``: what ``ask`` gave, which is waited for here. Lane 0 writes the tile for the consumers
    into the first word of the ``header``. ``every``: CTAs draw the tiles that they begin with, too.
    """
    ctas = cute.arch.grid_dim()[0]
    draws, given = (tiles.count + ctas, 0) if every else (tiles.count, ctas)
    with emit.where(cute.arch.lane_idx() == 0):
        with emit.where(asked == draws - 1):
            counter[0] = 0
        header[0] = asked + given
    return cute.arch.shuffle_sync(asked, 0) + given


def told(header: cute.Tensor) -> tuple[Int32, Place]:
    """The tile that the ``header`` (words,) names, and its place."""
    return header[0], Place.told(header)


def tell(header: cute.Tensor, first: int, words: tuple) -> None:
    """Lane 0 writes ``words`` into a header for the consumers, from word ``first`` on."""
    with emit.where(cute.arch.lane_idx() == 0):
        for i, word in enumerate(words):
            header[first + i] = word
