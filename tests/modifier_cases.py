"""The mods that the emitter's tests run: every operation, every kind of operand, every level."""

from __future__ import annotations

import math

import torch

from tests.tile_kernel import Case, build

BATCH, HEADS = 2, 3
SHAPE = (100, 150)  # neither a multiple of a tile
# Columns of a tile. An operation is the same in a narrow one, which compiles ten times faster.
PLAIN_TILE_N, TILE_N = 16, 32
DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"),
    *("float64", "float8_e4m3fn", "float8_e5m2"),
)
APPROXIMATE = {"tanh": (1e-3, 1e-3)}


def _scores() -> list[Case]:
    """Operations on floats; the scores hold zeros, infinities and NaN."""
    unary = (
        "exp",
        "exp2",
        "sqrt",
        "tanh",
        "sigmoid",
        "sin",
        "cos",
        "erf",
        "floor",
        "ceil",
        "round",
    )
    names = (*unary, "trunc", "abs", "neg", "sign", "log", "rsqrt")
    cases = []
    for name in names:
        function = getattr(torch, name)
        tolerance = APPROXIMATE.get(name, (2e-5, 2e-5))
        cases.append(Case(name, "score", lambda s, b, h, q, kv, f=function: f(s), *tolerance))
    functions = {
        "log of a size": lambda s, b, h, q, kv: torch.log(torch.abs(s)),
        "rsqrt of a size": lambda s, b, h, q, kv: torch.rsqrt(torch.abs(s)),
        "sine of a large angle": lambda s, b, h, q, kv: torch.sin(1e3 * s),
        "add": lambda s, b, h, q, kv: s + (kv - 7) * 0.25,
        "sub": lambda s, b, h, q, kv: (q - kv) * 0.25 - s,
        "mul": lambda s, b, h, q, kv: s * (kv - 7),
        "divide by a constant": lambda s, b, h, q, kv: s / 3.0,
        "divide by a column": lambda s, b, h, q, kv: s / (kv - 7),
        "divide by a score": lambda s, b, h, q, kv: (q + 1) / s,
        "floor of a quotient": lambda s, b, h, q, kv: torch.floor((q * kv) / 49.0),
        "float //": lambda s, b, h, q, kv: s // 1.5,
        "float // negative": lambda s, b, h, q, kv: s // (-0.75 - 0.25 * kv),
        "float %": lambda s, b, h, q, kv: s % 1.5,
        "float % negative": lambda s, b, h, q, kv: s % (-0.75 - 0.25 * kv),
        "minimum": lambda s, b, h, q, kv: torch.minimum(s, (q - kv) * 0.1),
        "maximum": lambda s, b, h, q, kv: torch.maximum(s, (q - kv) * 0.1),
        "cube": lambda s, b, h, q, kv: s**3,
        "inverse square": lambda s, b, h, q, kv: s**-2,
        "square root by **": lambda s, b, h, q, kv: torch.abs(s) ** 0.5,
        "two to a power": lambda s, b, h, q, kv: 2.0 ** (-0.5 * torch.abs(s)),
        "pow": lambda s, b, h, q, kv: torch.abs(s) ** 1.7,
        "pow of a column": lambda s, b, h, q, kv: s + (1.0 + kv) ** -0.3,
        "soft cap": lambda s, b, h, q, kv: 20.0 * torch.tanh(s / 20.0),
        "bfloat16": lambda s, b, h, q, kv: s.to(torch.bfloat16).to(torch.float32),
        "float16": lambda s, b, h, q, kv: s.to(torch.float16).to(torch.float32),
        # Past 448 torch's own conversion differs by version: saturated, or NaN.
        "float8_e4m3fn": lambda s, b, h, q, kv: (
            torch.clamp(s * kv, -448, 448).to(torch.float8_e4m3fn).to(torch.float32)
        ),
        "float8_e5m2": lambda s, b, h, q, kv: (s * kv).to(torch.float8_e5m2).to(torch.float32),
        "to int": lambda s, b, h, q, kv: torch.where(torch.abs(s) < 1e6, s * 3, 0.0).to(
            torch.int32
        ),
        "to bool": lambda s, b, h, q, kv: torch.where(s.to(torch.bool), 1.0, -1.0),
        "compare": lambda s, b, h, q, kv: (
            torch.where((s < 0.5) & ~(s <= -0.5), s, 0.0)
            + torch.where((s == 1.0) | (s != s), 1.0, 2.0)
        ),
        "minus infinity": lambda s, b, h, q, kv: torch.where(q < kv, s, -math.inf),
        "no score": lambda s, b, h, q, kv: (b + h) * 0.5,
        "score twice": lambda s, b, h, q, kv: s * torch.sigmoid(s) + s,
    }
    loose = {"pow": (2e-5, 2e-5), "soft cap": (1e-3, 2e-2), "sine of a large angle": (1e-3, 1e-3)}
    cases += [
        Case(name, "score", mod, *loose.get(name, (1e-5, 1e-5))) for name, mod in functions.items()
    ]
    domains = {"sin": 1e5, "cos": 1e5, "sine of a large angle": 1e2}
    return [case._replace(domain=domains.get(case.name, math.inf)) for case in cases]


def _integers() -> list[Case]:
    """Integer and bool arithmetic, on both signs."""
    functions = {
        "// 7": lambda s, b, h, q, kv: (3 * q - 2 * kv) // 7,
        "% 7": lambda s, b, h, q, kv: (3 * q - 2 * kv) % 7,
        "// -7": lambda s, b, h, q, kv: (3 * q - 2 * kv) // -7,
        "% -7": lambda s, b, h, q, kv: (3 * q - 2 * kv) % -7,
        "// 8": lambda s, b, h, q, kv: (3 * q - 2 * kv) // 8,
        "% 8": lambda s, b, h, q, kv: (3 * q - 2 * kv) % 8,
        "natural // and %": lambda s, b, h, q, kv: (q // 7) * 100 + kv % 7,
        "// a value": lambda s, b, h, q, kv: (3 * q - kv) // (2 * kv - 31),
        "% a value": lambda s, b, h, q, kv: (3 * q - kv) % (2 * kv - 31),
        "<<": lambda s, b, h, q, kv: (q - kv) << (kv % 5),
        ">>": lambda s, b, h, q, kv: (3 * q - 2 * kv) >> (kv % 5),
        "bits": lambda s, b, h, q, kv: ((q & kv) | (kv ^ 5)) + ~q,
        "bools": lambda s, b, h, q, kv: ((q > kv) ^ (kv > 20)) | ~(q == kv),
        "abs, neg, sign": lambda s, b, h, q, kv: (
            abs(q - 2 * kv) * 4 + torch.sign(2 * q - kv) - (-kv)
        ),
        "minimum, maximum": lambda s, b, h, q, kv: (
            torch.minimum(q, 2 * kv) - torch.maximum(q - 9, kv)
        ),
        "int to bool": lambda s, b, h, q, kv: torch.where((q % 3).to(torch.bool), s * 0 + 1, 0.0),
        "bool to int": lambda s, b, h, q, kv: (q > kv).to(torch.int32) * 3 - (q < 5),
        "clamp": lambda s, b, h, q, kv: torch.clamp(q - kv, -4, 9),
    }
    return [
        Case(name, "score", lambda s, b, h, q, kv, f=f: f(s, b, h, q, kv) + 0.0, 0.0, 0.0)
        for name, f in functions.items()
    ]


def _masks() -> list[Case]:
    functions = {
        "causal": lambda b, h, q, kv: q >= kv,
        "window": lambda b, h, q, kv: (q - kv <= 20) & (kv - q < 5),
        "dilated": lambda b, h, q, kv: (q - kv) % 3 == 0,
        "prefix": lambda b, h, q, kv: (kv < 17) | (q >= kv),
        "rows": lambda b, h, q, kv: q % 5 != 2,
        "columns": lambda b, h, q, kv: kv % 7 < 4,
        "heads": lambda b, h, q, kv: h + b > 1,
    }
    return [Case(name, "mask", mod, 0.0, 0.0) for name, mod in functions.items()]


def planted(
    shape: tuple[int, ...], dtype: str, device: str, order: tuple[int, ...]
) -> torch.Tensor:
    """A tensor of small numbers with its dimensions stored in ``order``; NaN all around it."""
    kind = getattr(torch, dtype)
    count = math.prod(shape)
    values = (torch.arange(count, dtype=torch.float32, device=device) * 7 + 3) % 17 - 8
    values = values / 4 if kind.is_floating_point else values
    values = values.abs() % 2 if dtype == "bool" else values.abs() if dtype == "uint8" else values
    poison = torch.nan if kind.is_floating_point else 1 if dtype == "bool" else 111
    storage = torch.full((count + 512,), poison, device=device, dtype=torch.float32).to(kind)
    storage[256 : 256 + count] = values.to(kind)
    stored = storage[256 : 256 + count].view([shape[d] for d in order])
    return stored.permute([order.index(d) for d in range(len(shape))])


def loads(dtype: str, device: str) -> list[Case]:
    """A tensor of ``dtype`` read at each level."""
    q, kv = SHAPE
    head = planted((HEADS,), dtype, device, (0,))
    row = planted((BATCH, q), dtype, device, (1, 0))
    column = planted((kv, BATCH), dtype, device, (1, 0))
    ribbon = planted((q + kv - 1,), dtype, device, (0,))
    full = planted((HEADS, q, kv), dtype, device, (2, 0, 1))
    functions = {
        "tile": lambda s, b, h, q, kv: s + head[h],
        "row": lambda s, b, h, q, kv: s + row[b, q],
        "column": lambda s, b, h, q, kv: s + column[kv, b],
        "diagonal": lambda s, b, h, q, kv: s + ribbon[q - kv],
        "element": lambda s, b, h, q, kv: s + full[h, q, kv],
    }
    return [Case(f"{dtype} {name}", "score", mod) for name, mod in functions.items()]


def operands(device: str) -> list[Case]:
    """Loads at indices that are loads, short vectors, scalars, and T5's table."""
    q, kv = SHAPE
    order = planted((kv,), "int32", device, (0,))
    table = planted((5, HEADS), "float32", device, (1, 0))
    shared = planted((1, q, kv), "float32", device, (0, 1, 2)).expand(HEADS, q, kv)
    few = planted((BATCH, q, 4), "bfloat16", device, (0, 1, 2))
    left = planted((HEADS, q, 32), "float32", device, (0, 2, 1))
    right = planted((HEADS, kv, 32), "float16", device, (0, 1, 2))
    ribbon = planted((q + kv - 1, 12), "float32", device, (0, 1))
    buckets = planted((32, HEADS), "float32", device, (0, 1))
    real, whole, truth = torch.tensor(0.75), torch.tensor(3), torch.tensor(True)
    held = torch.tensor(1.5, device=device)
    documents = planted((BATCH, kv), "int64", device, (0, 1))

    def t5(s, b, h, q, kv):
        n = torch.abs(q - kv)
        large = 16 + (torch.log(n / 16) / math.log(8) * 16).to(torch.int32)
        return s + buckets[torch.where(n < 16, n, torch.clamp(large, max=31)), h]

    functions = {
        "index of an index": lambda s, b, h, q, kv: s + table[order[kv], h],
        "element index": lambda s, b, h, q, kv: s + table[(q * kv) % 5, h],
        "stride 0": lambda s, b, h, q, kv: s + shared[h, q, kv],
        "negative index": lambda s, b, h, q, kv: s + table[-1 - h, h],
        "short vector": lambda s, b, h, q, kv: s + (few[b, q] * s).sum(-1),
        "dot": lambda s, b, h, q, kv: s + (left[h, q] * right[h, kv]).sum(-1),
        "vector of a diagonal": lambda s, b, h, q, kv: s + (ribbon[q - kv] * (kv % 3)).sum(-1),
        "scalars": lambda s, b, h, q, kv: torch.where(truth, s * real, s) + whole * kv,
        "scalar on the device": lambda s, b, h, q, kv: s * held,
        "T5": t5,
        "two dear diagonals": lambda s, b, h, q, kv: (
            s * ribbon[q - kv, 1] + torch.log(1.0 + torch.abs(q - kv))
        ),
    }
    domains = {"short vector": 1e5}
    cases = [
        Case(name, "score", mod, 1e-5, 2e-4, domains.get(name, math.inf))
        for name, mod in functions.items()
    ]
    mask = Case(
        "documents", "mask", lambda b, h, q, kv: documents[b, q] == documents[b, kv], 0.0, 0.0
    )
    return [*cases, mask]


def plain() -> list[Case]:
    """The cases that capture nothing."""
    return [*_scores(), *_integers(), *_masks()]


def wide(device: str) -> list[Case]:
    """What depends on the tile's width: diagonals, columns, short vectors, masks."""
    names = {"T5", "two dear diagonals", "dot", "vector of a diagonal", "documents", "stride 0"}
    return [*(case for case in operands(device) if case.name in names), *_masks()]


def kernels(device: str) -> dict[str, tuple[list[Case], int, bool]]:
    """Every kernel of the gpu tier by name: its cases, its tile's columns, is it transposed."""
    return {
        "plain": (plain(), PLAIN_TILE_N, False),
        "operands": (operands(device), TILE_N, False),
        **{dtype: (loads(dtype, device), TILE_N, False) for dtype in DTYPES},
        **{f"wide {tile_n}": (wide(device), tile_n, False) for tile_n in (128, 176)},
        "operands, transposed": (operands(device), TILE_N, True),
        "wide 128, transposed": (wide(device), 128, True),
    }


if __name__ == "__main__":  # compile them all, for a GPU host without the compiler
    for name, (cases, tile_n, transposed) in kernels("cpu").items():
        print(name, flush=True)
        build(cases, tile_n, transposed=transposed)
