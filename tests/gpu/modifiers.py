"""The mods of the gpu tier. Each builds its functions for a device and a shape.

Their captured tensors hold numbers that follow from the position alone, so that building one twice
gives the same tensor, and building it on the meta device is enough to compile its kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Shape(NamedTuple):
    """What the captured tensors are sized by."""

    batch: int = 2
    heads: int = 8
    seqlen_q: int = 256
    seqlen_k: int = 256


Mods = dict[str, Callable]
Builder = Callable[[torch.device, Shape], Mods]

INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")
FP32 = "float32"
FLOATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")


def ramp(shape: tuple[int, ...], device: torch.device, dtype: str = "float32") -> torch.Tensor:
    """Small numbers, multiples of 1/4 from -2 to 2 (integers: 0 to 4, bool: 0 or 1); never equal in
    neighbours, so that a wrong index shows."""
    count = 1
    for size in shape:
        count *= size
    step = (torch.arange(count, device=device, dtype=torch.int64) * 7 + 3) % 17
    values = step // 4 if dtype in INTEGERS else (step - 8) / 4
    values = values % 2 if dtype == "bool" else values
    return values.reshape(shape).to(getattr(torch, dtype))


def before_nan(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A ramp whose storage goes on with NaN: reading past the end shows in any sum."""
    count = 1
    for size in shape:
        count *= size
    storage = torch.full((2 * count + 4096,), torch.nan, device=device)
    storage[:count] = ramp((count,), device)
    return storage[:count].view(shape)


def alibi(device: torch.device, shape: Shape) -> Mods:
    """ALiBi with captured slopes."""
    slopes = torch.exp2(-torch.arange(1, shape.heads + 1, device=device) / 2.0)
    return {"score_mod": lambda score, b, h, q, kv: score + slopes[h] * (kv - q)}


def alibi_turned(device: torch.device, shape: Shape) -> Mods:
    """ALiBi's line the other way round: the first keys have the largest scores."""
    slopes = torch.exp2(-torch.arange(1, shape.heads + 1, device=device) / 2.0)
    return {"score_mod": lambda score, b, h, q, kv: score - slopes[h] * (kv - q)}


def falling_with_keys(device: torch.device, shape: Shape) -> Mods:
    """A line of the key alone, and a factor of the head on the score."""
    factors = 1.0 + torch.arange(shape.heads, device=device) / 8.0
    return {"score_mod": lambda score, b, h, q, kv: score * factors[h] - 0.25 * kv}


def softcap(cap: float) -> Builder:
    """Soft capping at a captured number."""

    def build(device: torch.device, shape: Shape) -> Mods:
        return {"score_mod": lambda score, b, h, q, kv: cap * torch.tanh(score / cap)}

    return build


def capped_documents(device: torch.device, shape: Shape) -> Mods:
    """A softcap in packed documents."""
    return softcap(30.0)(device, shape) | document(device, shape)


def typed(names: tuple[str, ...]) -> Builder:
    """Head i reads a table of dtype ``names[i]``, strided, by q and kv."""

    def build(device: torch.device, shape: Shape) -> Mods:
        tables = [
            ramp((shape.seqlen_k, 2, shape.seqlen_q), device, name)[:, 1].transpose(0, 1)
            for name in names
        ]

        def score_mod(score, b, h, q, kv):
            for head, table in enumerate(tables):
                value = table[q, kv].to(torch.float32)
                score = torch.where(h == head, score + value, score)
            return score

        return {"score_mod": score_mod}

    return build


def tight(device: torch.device, shape: Shape) -> Mods:
    """Tables of exactly the lengths, NaN behind each: by kv, by q, by (b, h)."""
    by_kv = before_nan((shape.seqlen_k,), device)
    by_q = before_nan((shape.seqlen_q,), device)
    by_head = before_nan((shape.batch, shape.heads), device)
    return {
        "score_mod": lambda score, b, h, q, kv: score * by_q[q] + by_kv[kv] + by_head[b, h],
    }


def tight_diagonal(device: torch.device, shape: Shape) -> Mods:
    """A table of Sq + Sk - 1 biases by q - kv, NaN behind it."""
    table = before_nan((shape.heads, shape.seqlen_q + shape.seqlen_k - 1), device)
    last = shape.seqlen_k - 1
    # One number in a kernel for every length: a captured Python number would be a constant.
    shift = torch.full((), last, device=device, dtype=torch.int32)
    return {"score_mod": lambda score, b, h, q, kv: score + table[h, q - kv + shift]}


def scalars(device: torch.device, shape: Shape) -> Mods:
    """A captured 0-d tensor on the device, and two on the CPU, which travel by value."""
    factor = torch.full((), 0.5, device=device)
    shift, period = torch.tensor(1.5), torch.tensor(3)
    return {"score_mod": lambda score, b, h, q, kv: score * factor + (kv % period) * shift}


def wide_table(device: torch.device, shape: Shape) -> Mods:
    """A table whose second row lies more than 2^31 elements behind the first."""
    stride = 2**31 + 64 if device.type == "cuda" else 1024
    storage = torch.empty(stride + shape.seqlen_k, dtype=torch.uint8, device=device)
    table = storage.as_strided((2, shape.seqlen_k), (stride, 1))
    table.copy_(ramp((2, shape.seqlen_k), device, "uint8"))
    return {"score_mod": lambda score, b, h, q, kv: score + table[b, kv]}


def dense(lead: str, dtype: str, *, tiled: bool = True) -> Builder:
    """A bias (b and h as ``lead`` says, q, kv), NaN in the rest of each row.

    ``tiled``: rows are apart by a multiple of 16 bytes, so that TMA can load it; else no row is.
    """

    def build(device: torch.device, shape: Shape) -> Mods:
        table = rows_apart(lead, dtype, device, shape, odd=not tiled)

        def score_mod(score, b, h, q, kv):
            at = {"b": b, "h": h}
            return score + table[(*(at[x] for x in lead), q, kv)]

        return {"score_mod": score_mod}

    return build


def rows_apart(
    lead: str, dtype: str, device: torch.device, shape: Shape, *, odd: bool = False
) -> torch.Tensor:
    """A ramp (lead, Sq, Sk) whose rows are 8 elements, or one more, and NaN apart."""
    sizes = {"b": shape.batch, "h": shape.heads}
    width = shape.seqlen_k // 8 * 8 + 8 + odd
    rows = (*(sizes[x] for x in lead), shape.seqlen_q)
    table = torch.full((*rows, width), torch.nan, device=device, dtype=getattr(torch, dtype))
    table[..., : shape.seqlen_k] = ramp((*rows, shape.seqlen_k), device, dtype)
    return table[..., : shape.seqlen_k]


def two_biases(device: torch.device, shape: Shape) -> Mods:
    """The first by tiles, the second element by element, and the first once more, transposed."""
    length = max(shape.seqlen_q, shape.seqlen_k)
    square = shape._replace(seqlen_q=length, seqlen_k=length)
    first, second = (rows_apart(x, d, device, square) for x, d in (("h", "bfloat16"), ("b", FP32)))

    def score_mod(score, b, h, q, kv):
        return score * 0.5 + first[h, q, kv] * second[b, q, kv] - first[h, kv, q]

    return {"score_mod": score_mod}


def chosen_bias(device: torch.device, shape: Shape) -> Mods:
    """Which table a group of heads and a batch read: by a captured index from the end; and once
    more, at half the position."""
    table = rows_apart("hb", "bfloat16", device, shape)
    which = -1 - torch.arange(shape.batch, device=device, dtype=torch.int32)

    def score_mod(score, b, h, q, kv):
        return score + table[h // 2, which[b], q, kv] + table[-1, 0, q // 2, kv]

    return {"score_mod": score_mod}


def capped_bias(device: torch.device, shape: Shape) -> Mods:
    """A bias inside a softcap, ALiBi beside it, and -inf where it is negative."""
    table = rows_apart("h", "float16", device, shape)
    slopes = torch.exp2(-torch.arange(1, shape.heads + 1, device=device) / 2.0)

    def score_mod(score, b, h, q, kv):
        bias = table[h, q, kv]
        capped = 10 * torch.tanh((score + bias) / 10) + slopes[h] * torch.log((q - kv).abs() + 1.0)
        return torch.where(bias >= -1.5, capped, -torch.inf)

    return {"score_mod": score_mod}


def beside(lead: str, dtype: str, other: Builder) -> Builder:
    """A bias beside another builder's mask."""
    return lambda device, shape: (
        dense(lead, dtype)(device, shape) | {"mask_mod": other(device, shape)["mask_mod"]}
    )


def document(device: torch.device, shape: Shape) -> Mods:
    """Packed documents of 100 positions, by a captured table (b, position)."""
    length = max(shape.seqlen_q, shape.seqlen_k)
    ids = (torch.arange(length, device=device) // 100).to(torch.int32).expand(shape.batch, length)
    return {"mask_mod": lambda b, h, q, kv: ids[b, q] == ids[b, kv]}


def even_keys(device: torch.device, shape: Shape) -> Mods:
    """Only keys at even positions."""
    return {"mask_mod": lambda b, h, q, kv: kv % 2 == 0}


def hidden(begin: int, end: int) -> Builder:
    """Keys ``[begin, end)`` do not count."""

    def build(device: torch.device, shape: Shape) -> Mods:
        return {"mask_mod": lambda b, h, q, kv: (kv < begin) | (kv >= end)}

    return build


def nothing(device: torch.device, shape: Shape) -> Mods:
    """Rows at odd positions see nothing."""
    return {"mask_mod": lambda b, h, q, kv: (q % 2 == 0) & (kv >= 0)}


def both(device: torch.device, shape: Shape) -> Mods:
    """A score_mod and a mask_mod together, each with a captured tensor."""
    return alibi(device, shape) | document(device, shape)


def distance(device: torch.device, shape: Shape) -> Mods:
    """score + (q - kv)."""
    return {"score_mod": lambda score, b, h, q, kv: score + (q - kv)}


def head_and_position(device: torch.device, shape: Shape) -> Mods:
    """score + h * kv."""
    return {"score_mod": lambda score, b, h, q, kv: score + h * kv}


def slope(c: float) -> Builder:
    """score + c * kv, c a captured Python number."""

    def build(device: torch.device, shape: Shape) -> Mods:
        return {"score_mod": lambda score, b, h, q, kv: score + c * kv}

    return build


def cutoffs(device: torch.device, shape: Shape) -> Mods:
    """Ranges with a number of the batch and one of the head, and a few global keys."""
    cutoff = shape.seqlen_k * (torch.arange(shape.batch, device=device) + 1) // (shape.batch + 1)
    reach = 20 + 90 * torch.arange(shape.heads, device=device)

    def mask_mod(b, h, q, kv):
        return ((kv < cutoff[b]) & (q - kv <= reach[h])) | (kv < 3)

    return {"mask_mod": mask_mod}


def ends(device: torch.device, shape: Shape) -> Mods:
    """The first keys and the last: everything between is empty."""
    last = shape.seqlen_k - 5
    end = torch.full((shape.batch,), last, device=device, dtype=torch.int32)
    return {"mask_mod": lambda b, h, q, kv: (kv < 3) | (kv >= end[b])}


def late(device: torch.device, shape: Shape) -> Mods:
    """The first 300 queries and the odd ones see nothing."""
    return {"mask_mod": lambda b, h, q, kv: (q >= 300) & (q % 2 == 0) & (kv + 300 <= q)}


def scattered(device: torch.device, shape: Shape) -> Mods:
    """Some blocks of 300 x 280 a head, some of them by halves; head 0 sees nothing at all."""
    sizes = (shape.heads, shape.seqlen_q // 300 + 1, shape.seqlen_k // 280 + 1)
    count = sizes[0] * sizes[1] * sizes[2]
    number = torch.arange(count, device=device).view(sizes)
    table = (number * 40503 % 65536 // 64 % 3 == 0) & (number >= sizes[1] * sizes[2])
    half = number % 2 == 0

    def mask_mod(b, h, q, kv):
        row, column = q // 300, kv // 280
        return table[h, row, column] & (half[h, row, column] | (kv % 2 == b % 2))

    return {"mask_mod": mask_mod}


def apart(device: torch.device, shape: Shape) -> Mods:
    """Documents of which none sees another, nor itself."""
    length = max(shape.seqlen_q, shape.seqlen_k)
    number = torch.arange(length, device=device, dtype=torch.int32).expand(shape.batch, -1)
    limit = torch.tensor(length)
    return {"mask_mod": lambda b, h, q, kv: number[b, q] == number[b, kv] + limit}


def hiding(device: torch.device, shape: Shape) -> Mods:
    """A score_mod that gives minus infinity beyond a number of the batch and behind a window."""
    cutoff = shape.seqlen_k * (torch.arange(shape.batch, device=device) + 1) // (shape.batch + 1)

    def score_mod(score, b, h, q, kv):
        seen = torch.where(q - kv <= 150, 2 * score, -torch.inf)
        return torch.where(kv < cutoff[b], seen, -torch.inf)

    return {"score_mod": score_mod}


def biased(device: torch.device, shape: Shape) -> Mods:
    """A score_mod with a captured tensor beside scattered blocks."""
    return alibi(device, shape) | scattered(device, shape)


def biased_ranges(device: torch.device, shape: Shape) -> Mods:
    """A score_mod with a captured tensor beside ranges that have captured numbers."""
    return alibi(device, shape) | cutoffs(device, shape)
