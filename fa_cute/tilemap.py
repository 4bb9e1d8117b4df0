"""The tile map of a mask as a picture: text for a terminal, PNG for a page.

A cell is a tile of (queries, keys): empty, partial or full. Queries go down, keys to the right.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from fa_cute.mods.intervals import EMPTY, FULL, PARTIAL

# Of a mask larger than this, a cell of the picture stands for several tiles.
TEXT_CELLS, PNG_PIXELS = 48, 512
_LETTERS = {EMPTY: ".", PARTIAL: "+", FULL: "#"}
_COLOURS = {EMPTY: (240, 240, 240), PARTIAL: (242, 160, 61), FULL: (38, 84, 124)}


def text(kinds: Tensor) -> str:
    """The map of one head ``(query tiles, key tiles)`` as lines: ``.`` empty, ``+``, ``#`` full."""
    return "\n".join(
        "".join(_LETTERS[cell] for cell in row) for row in merged(kinds, TEXT_CELLS).tolist()
    )


def write_png(kinds: Tensor, path: str | Path) -> None:
    """Write the map of one head ``(query tiles, key tiles)``; OSError where that fails."""
    cells = merged(kinds, PNG_PIXELS)
    size = max(1, PNG_PIXELS // max(cells.shape))
    bytes_ = {"dtype": torch.uint8, "device": "cpu"}
    colours = torch.tensor([_COLOURS[kind] for kind in sorted(_COLOURS)], **bytes_)
    pixels = colours[cells.long()].repeat_interleave(size, 0).repeat_interleave(size, 1)
    if size >= 6:
        pixels[::size] = pixels[:, ::size] = 255
    height, width = pixels.shape[:2]
    rows = torch.cat([torch.zeros(height, 1, **bytes_), pixels.flatten(1)], dim=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(rows.flatten().tolist()), 9)
    parts = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts))


def merged(kinds: Tensor, most: int) -> Tensor:
    """The map with at most ``most`` cells a side: a cell of different tiles is partial."""
    by = -(-max(kinds.shape) // most)
    kinds = kinds.cpu()
    if by == 1:
        return kinds
    rows, columns = (-(-size // by) * by for size in kinds.shape)
    # What is repeated at the border is already there, so it changes no cell's kind.
    wanted = zip((rows, columns), kinds.shape)
    at = [torch.arange(n, device="cpu").clamp(max=size - 1) for n, size in wanted]
    cells = kinds[at[0][:, None], at[1]].unflatten(1, (-1, by)).unflatten(0, (-1, by))
    least, most_seen = cells.amin((1, 3)), cells.amax((1, 3))
    return torch.where(least == most_seen, least, PARTIAL)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
