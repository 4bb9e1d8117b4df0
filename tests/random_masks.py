"""Masks drawn at random, as source that says which failed: integers, tables and comparisons.

Every look-up is inside its table and no shift passes the word, so that torch on int32 tensors says
exactly what each element is; what leaves int32 wraps on both sides.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import NamedTuple

import torch

LENGTH, BATCH, HEADS = 1600, 2, 4
Shape = tuple[int, int, int, int]

# In a template i is an integer, c a condition, n a positive number.
LEAVES = ("q", "kv", "q", "kv", "h", "b", "position[q]", "position[kv]", "by_head[h]", "shift")
INTEGERS = (
    *("(<i> + <i>)", "(<i> - <i>)", "(<i> - <i>)", "(<i> + <n>)", "(<n> - <i>)", "(<i> * 3)"),
    *("(<i> * -2)", "(<i> // <n>)", "(<i> // <n> * <n>)", "(<i> // -<n>)", "(<i> % <n>)"),
    *("(<i> & 7)", "(<i> & -16)", "(<i> ^ <i>)", "(<i> | <n>)", "(<i> >> 3)", "(<i> << 1)"),
    *("(<i>).abs()", "torch.minimum(<i>, <i>)", "torch.maximum(<i>, <i>)", "(<i>).clamp(-<n>)"),
    *("torch.where(<c>, <i>, <i>)", f"position[(<i>).clamp(-{LENGTH}, {LENGTH - 1})]"),
)
SIMPLE = (
    *("(q >= kv)", "(q - kv < by_head[h])", "((q - kv).abs() <= <n>)", "flag[kv]", "(kv < <n>)"),
    *("(document[b, q] == document[b, kv])", "grid[q // 100, kv // 100]"),
    "(q // <n> == kv // <n>)",
    *(f"(<i> {op} <i>)" for op in ("<=", "<", ">=", ">", "==", "!=")),
)
JOINED = ("(<c> & <c>)", "(<c> & <c>)", "(<c> | <c>)", "(<c> | <c>)", "(~<c>)", "(<c> ^ <c>)")
NUMBERS = (1, 2, 3, 5, 7, 16, 31, 64, 100, 128, 129, 300, 511)


class Drawn(NamedTuple):
    """A mask: what it is, and the function, whose tables are on the device asked for."""

    source: str
    mask_mod: Callable


def draw(seed: int, device: torch.device | str = "cpu") -> Drawn:
    """The mask of a seed: for up to ``LENGTH`` positions, ``BATCH`` batches and ``HEADS`` heads."""
    source = _written(random.Random(seed), "<c>", 4)
    generator = torch.Generator().manual_seed(seed)

    def table(least: int, most: int, *size: int) -> torch.Tensor:
        return torch.randint(least, most, size, generator=generator, dtype=torch.int32)

    tables = {
        "position": table(-400, 400, LENGTH),
        "document": table(0, 100, BATCH, LENGTH).eq(0).cumsum(1, dtype=torch.int32),
        "flag": table(0, 2, LENGTH).bool(),
        "grid": table(0, 3, LENGTH // 100, LENGTH // 100) > 0,
        "by_head": table(-200, 700, HEADS),
    }
    names = {name: tensor.to(device) for name, tensor in tables.items()}
    names |= {"torch": torch, "shift": table(-50, 50, 1)[0]}
    return Drawn(source, eval(f"lambda b, h, q, kv: {source}", names))


def elements(mask_mod: Callable, shape: Shape, device: torch.device | str = "cpu") -> torch.Tensor:
    """What torch makes of the mask on every element of ``(B, H, Sq, Sk)``."""
    places = []
    for at, size in enumerate(shape):
        place = torch.arange(size, device=device, dtype=torch.int32)
        places.append(place.view([-1 if i == at else 1 for i in range(4)]))
    return torch.as_tensor(mask_mod(*places), device=device).expand(shape)


def _written(r: random.Random, template: str, depth: int) -> str:
    """``template`` with its places filled, to a depth of so many operations."""

    def filled(place: re.Match) -> str:
        if place[0] == "<n>":
            return str(r.choice(NUMBERS))
        plain, compound = (SIMPLE, JOINED) if place[0] == "<c>" else (LEAVES, INTEGERS)
        stops = depth <= 1 or r.random() < 0.3
        if stops and place[0] == "<c>" and depth <= 0:
            return r.choice(SIMPLE[:1])
        return _written(r, r.choice(plain if stops else compound), depth - 1)

    return re.sub("<[icn]>", filled, template)
