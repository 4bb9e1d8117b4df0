"""A captured bias [..., q, kv] as a TMA operand: for which mods, tensors and plans."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fa_cute.variants.t5_relative_bias import t5_relative_bias

import fa_cute
from fa_cute.configuration import Configuration
from fa_cute.host import configs
from fa_cute.host.backward import plans_of
from fa_cute.host.planning import Mods
from fa_cute.host.problem import by_tiles
from fa_cute.mods.derivative import differentiate
from fa_cute.mods.tiles import lead_graphs, shared_by, tiled_loads
from fa_cute.mods.trace import trace_score_mod
from fa_cute.plan import SHARED_MEMORY_LIMIT
from tests.gpu.configurations import BIASES
from tests.tracing import offsets, within_a_trace

HEAD_DIMS = ((8, 8), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
B, H, S = 2, 8, 256


def table(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*sizes, dtype=dtype, device="meta")


by_head, square, whole = table(H, S, S), table(S, S), table(B, H, S, S)
ids = torch.zeros(B, dtype=torch.int64, device="meta")
deep = table(1, 1, 1, 1, S, S)
numbers = table(S, S, dtype=torch.int32)
fp8 = table(S, S, dtype=torch.float8_e4m3fn)

# A term of the score, and which of b and h share its boxes; None: it is read by elements.
TERMS: dict[str, tuple[Callable, str | None]] = {
    "by head": (lambda b, h, q, kv: by_head[h, q, kv], "b"),
    "by neither": (lambda b, h, q, kv: square[q, kv], "bh"),
    "by both": (lambda b, h, q, kv: whole[b, h, q, kv], ""),
    "by a group of heads": (lambda b, h, q, kv: by_head[h // 4, q, kv], "b"),
    "by a constant": (lambda b, h, q, kv: whole[b, -1, q, kv], "h"),
    "by a captured number": (lambda b, h, q, kv: by_head[ids[b], q, kv], "h"),
    "indexed in parts": (lambda b, h, q, kv: whole[b][h][q, kv], ""),
    "as a factor": (lambda b, h, q, kv: torch.exp(by_head[h, q, kv]) * h, "b"),
    "transposed": (lambda b, h, q, kv: by_head[h, kv, q], None),
    "shifted": (lambda b, h, q, kv: by_head[h, q, kv + 1], None),
    "halved": (lambda b, h, q, kv: by_head[h, q // 2, kv], None),
    "by a query before": (lambda b, h, q, kv: by_head[q % 2, q, kv], None),
    "by a key before": (lambda b, h, q, kv: by_head[kv % 2, q, kv], None),
    "by query alone": (lambda b, h, q, kv: square[h, q], None),
    "of integers": (lambda b, h, q, kv: numbers[q, kv], None),
    "of fp8": (lambda b, h, q, kv: fp8[q, kv].float(), None),
    "of six dimensions": (lambda b, h, q, kv: deep[0, 0, 0, 0, q, kv], None),
}


@pytest.mark.parametrize("name", TERMS)
def test_which_loads_read_a_tile(name: str) -> None:
    term, shared = TERMS[name]
    graph = trace_score_mod(lambda score, b, h, q, kv: score + term(b, h, q, kv)).graph
    slots = tiled_loads(graph)
    assert bool(slots) == (shared is not None)
    for slot, at in slots.items():
        assert graph.nodes[at].op == "load" and graph.nodes[at].attr == slot
        assert shared_by(graph, slot) == frozenset(shared or "")
        lead = lead_graphs(graph, slot)
        assert len(lead) == graph.captured[slot].ndim - 2
        assert all(one.dependence()[one.result].isdisjoint(("q", "kv", "score")) for one in lead)


def test_the_first_that_is_ready() -> None:
    """Of two, each read by tiles, the one whose layout TMA takes; a third load is an element's."""
    odd = table(S, S + 1)[:, :-1]

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + odd[q, kv] * by_head[h, q, kv] + by_head[h, kv, q]

    mods = Mods.of(score_mod, None)
    assert len(tiled_loads(mods.score_mod.graph)) == 2
    assert mods.score_mod.captured[mods.bias] is by_head


def test_which_layouts_tma_takes() -> None:
    base = torch.zeros(4, 64, 72, dtype=torch.bfloat16)
    assert by_tiles(base) and by_tiles(base[:, 3:, :-8]) and by_tiles(base[:, :, 8:])
    assert by_tiles(base.transpose(0, 1)) and by_tiles(base[:1].expand(4, 64, 72))
    assert by_tiles(base.float()[..., :-4])
    assert not by_tiles(base.transpose(1, 2)) and not by_tiles(base[..., ::2])
    assert not by_tiles(base[..., 1:]) and not by_tiles(base[..., :1].expand(4, 64, 72))
    assert not by_tiles(torch.zeros(4, 64, 68, dtype=torch.bfloat16))
    assert by_tiles(torch.zeros(4, 64, 68)) and not by_tiles(torch.zeros(4, 64, 66))


def planned(term: Callable, **facts: Any) -> Any:
    asked = {"head_dim": 128, "dtype": "bfloat16", "target": "sm_90a", **facts}
    mod = Configuration(score_mod=lambda s, b, h, q, kv: s + term(b, h, q, kv), **asked)
    return mod.plan()[0]


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_head_dim_has_room(dims: tuple[int, int], dtype: torch.dtype) -> None:
    bias = table(H, S, S, dtype=dtype)
    facts = {"head_dim": dims[0], "head_dim_v": dims[1]}
    plan = planned(lambda b, h, q, kv: bias[h, q, kv], **facts)
    c, size = plan.config, bias.element_size()
    assert plan.bias == 0 and plan.bias_stages == (2 if size == 2 else plan.bias_stages) >= 1
    used = 2 * (c.tile_m * plan.width * c.q_stages)
    used += 2 * c.tile_n * (plan.width + plan.width_v) * c.kv_stages
    used += c.tile_m * c.tile_n * size * plan.bias_stages
    assert used + 1024 <= SHARED_MEMORY_LIMIT
    assert "not measured" in configs.why(c) or "TFLOP/s" in configs.why(c)


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_head_dim_has_room_on_blackwell(dims: tuple[int, int], dtype: torch.dtype) -> None:
    """But fp32 at (192, 128), which is read by elements: Q, K and V leave 80 KiB."""
    bias = table(H, S, S, dtype=dtype)
    facts = {"head_dim": dims[0], "head_dim_v": dims[1], "target": "sm_100a"}
    plan = planned(lambda b, h, q, kv: bias[h, q, kv], **facts)
    c = plan.config
    if dims == (192, 128) and dtype == torch.float32:
        assert (plan.bias, c.tile_n) == (None, 96)
        return
    assert plan.bias == 0 and plan.bias_stages >= 1 and "not measured" in configs.why(c)
    later = planned(lambda b, h, q, kv: bias[h, q, kv], **facts | {"target": "sm_103a"})
    assert later.config == replace(c, emulated=0)
    used = 2 * c.tile_m * plan.width + 1024 * c.q_tiles  # Q, messages to the correction
    used += 2 * c.tile_n * (plan.width * c.k_stages + plan.width_v * c.v_stages)
    used += c.tile_m * c.tile_n * bias.element_size() * plan.bias_stages
    assert used + 1024 <= SHARED_MEMORY_LIMIT


def test_diagonals_take_room_from_the_ring() -> None:
    """One fits beside two slots of a bias at d128, three beside one."""
    biases = [t5_relative_bias(table(32, H, dtype=torch.float32)) for _ in range(3)]

    def stages(count: int) -> int:
        def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            for mod in biases[:count]:
                score = torch.tanh(mod(score, b, h, q, kv))
            return score + by_head[h, q, kv]

        asked = Configuration(head_dim=128, dtype="bfloat16", target="sm_90a", score_mod=score_mod)
        return asked.plan()[0].bias_stages

    assert [stages(count) for count in (0, 1, 3)] == [2, 2, 1]


def test_the_plan_says_so() -> None:
    """Its key has it, on Blackwell too; its backward has none."""
    term = TERMS["by head"][0]
    plan = planned(term)
    assert plan.bias == 0 and plan.key != replace(plan, bias=None).key
    odd = table(H, S, S + 1)[..., :-1]
    assert planned(lambda b, h, q, kv: odd[h, q, kv]).bias is None
    assert planned(term, target="sm_100a").bias == 0
    derivative = differentiate(plan.score_mod)
    plans = plans_of(plan, deterministic=False, lse_gradient=False, derivative=derivative)
    assert all(one.bias is None for one in plans)


def test_lists_of_another_tile_go_before() -> None:
    """(192, 128) has room for a bias in tiles of 128 x 96 alone; lists are of 128 x 128."""
    facts = {"head_dim": 192, "head_dim_v": 128, "mask_mod": lambda b, h, q, kv: square[q, kv] > 0}
    assert planned(TERMS["by head"][0], **facts).bias == 0
    listed = planned(TERMS["by head"][0], **facts, block_lists=True)
    assert (listed.visits, listed.bias) == ("lists", None)


def test_a_recorded_configuration_keeps_it() -> None:
    plan = planned(TERMS["by head"][0])
    recorded = Configuration.of(plan)
    assert recorded.plan()[0] == plan
    assert replace(recorded, bias=None).plan()[0].bias is None
    with pytest.raises(ValueError, match=r"reads no captured tensor 3 at \[..., q, kv\]"):
        replace(recorded, bias=3).plan()


def test_explain_says_how_it_is_read() -> None:
    q = torch.zeros(2, 256, 8, 128, dtype=torch.bfloat16)
    bias = torch.zeros(8, 256, 264, dtype=torch.bfloat16)
    loaded = "loaded by TMA in boxes of 128 x "
    for target, width, said in (
        ("sm_90a", 256, f"{loaded}128, 2 slots"),
        ("sm_100a", 256, f"{loaded}96, 1 slots"),
        ("sm_90a", 255, "by element"),
    ):
        part = bias.flatten()[: 8 * 256 * width].view(8, 256, width)
        text = fa_cute.explain(
            q,
            q[:, :width],
            q[:, :width],
            score_mod=lambda s, b, h, q, kv, part=part: s + part[h, q, kv],
            target=target,
        )
        assert said in next(line for line in text.splitlines() if line.startswith("bias:"))


@pytest.mark.compile
@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("shape", [(2, 128), (3, 96), (2, 64), (3, 80)], ids=str)
def test_each_element_is_read_once_where_the_scores_are(shape: tuple, size: int) -> None:
    """A piece's values, in the order in which they are read, against the accumulator's rows and
    columns; and the addresses that lanes give ldmatrix against the matrices that it hands out."""
    from fa_cute.device.mma_sm90 import fragment

    consumers, width = shape
    rows, own = 64 * consumers, fragment(width)
    given, got = _copy_layouts(consumers, width, size)
    seen: Counter = Counter()
    for thread in range(128 * consumers):
        place = own.first_row(thread % 128) + thread // 128 * 64, own.first_column(thread)
        values = [(at % rows, at // rows) for at in _values(got, thread)]
        assert values == [
            (place[0] + own.rows[r], place[1] + own.column(c)) for r, c in _order(own.columns, size)
        ]
        seen.update(values)
        if size == 16:
            lane, warp = thread % 32, thread // 32
            row = warp * 16 + lane % 8 + lane // 8 % 2 * 8
            addresses = [(at % rows, at // rows) for at in _values(given, thread)]
            starts = [16 * piece + lane // 16 * 8 for piece in range(width // 16)]
            assert addresses == [(row, start + i) for start in starts for i in range(8)]
    assert seen == Counter(itertools.product(range(rows), range(width)))


def _order(columns: int, size: int) -> list[tuple[int, int]]:
    """(row, column) of a fragment in the order of ``bias.Reader``'s pieces."""
    if size == 32:
        pieces = itertools.product(range(0, columns, 2), range(2))
        return [(r, c + pair) for c, r in pieces for pair in range(2)]
    parts = itertools.product(range(0, columns, 4), (0, 2), range(2))
    return [(r, c + half + pair) for c, half, r in parts for pair in range(2)]


def _values(layout: tuple, thread: int) -> list[int]:
    (threads, values), (by_thread, by_value) = layout
    start = offsets(threads, by_thread)[thread]
    return [start + offset for offset in offsets(values, by_value)]


def _copy_layouts(consumers: int, width: int, size: int) -> tuple[tuple, tuple]:
    """The compiler's (thread, value) -> row + rows * column of ``bias.copy_of``: source, target."""
    import cutlass

    from fa_cute.device import bias, mma_sm90

    found: list[tuple] = []

    def describe() -> None:
        mma = mma_sm90.make_mma(cutlass.BFloat16, consumers, width, p_times_v=False)
        copy = bias.copy_of(cutlass.Float32 if size == 32 else cutlass.BFloat16, mma)
        for layout in (copy.layout_src_tv_tiled, copy.layout_dst_tv_tiled):
            found.append((layout.shape, layout.stride))

    within_a_trace(describe)
    return found[0], found[1]


@pytest.mark.compile
@pytest.mark.parametrize("row", configs.FWD_SM100_BIASED, ids=lambda row: str(row.head_dims))
def test_a_row_of_a_box_is_read_in_vectors(row: configs.Row) -> None:
    """16 bytes of a thread's row lie together, and eight rows' in eight sixteenths of the banks."""
    import cutlass

    from fa_cute.device import mma_sm90

    width, layouts = row.config.tile_n, []
    kind = cutlass.Float32 if row.dtype == "float32" else cutlass.BFloat16

    def describe() -> None:
        layout = mma_sm90.smem_layout(kind, 128, width, 2)
        layouts.append((layout.outer.shape, layout.outer.stride, str(layout.inner)))

    within_a_trace(describe)
    (shape, stride, swizzle), size = layouts[0], kind.width // 8
    bits, base, shift = map(int, swizzle[2:-1].split(","))
    mask = ((1 << bits) - 1) << base + shift
    rows, columns, stages = (offsets(*mode) for mode in zip(shape, stride, strict=True))
    seen: Counter = Counter()
    for stage, start in itertools.product(range(2), range(0, width, 16 // size)):
        found = []
        for r in rows:
            plain = [size * (r + c + stages[stage]) for c in columns[start : start + 16 // size]]
            places = [at ^ (at & mask) >> shift for at in plain]
            assert places == list(range(places[0], places[0] + 16, size)) and places[0] % 16 == 0
            found.append(places[0])
        seen.update(found)
        for eight in zip(*[iter(found)] * 8, strict=True):
            assert {at // 16 % 8 for at in eight} == set(range(8))
    assert seen == Counter(range(0, 2 * 128 * width * size, 16))


def for_most_work(row: configs.Row, score_mod: Any, target: str) -> Any:
    """The row's kernel for the most work: fp16, bounds on both sides, sinks, lse."""
    kernel = fa_cute.compile(
        head_dim=row.head_dims[0],
        head_dim_v=row.head_dims[1],
        dtype="float16",
        causal=True,
        window=(True, False),
        score_mod=score_mod,
        return_lse=True,
        sinks=True,
        target=target,
    )
    assert kernel.plan.bias == 0
    assert kernel.resources.spill_bytes == 0
    assert kernel.resources.shared_memory <= SHARED_MEMORY_LIMIT
    return kernel


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("row", configs.FWD_SM100_BIASED, ids=lambda row: str(row.head_dims))
def test_no_row_of_blackwell_spills(row: configs.Row, target: str) -> None:
    bias = table(H, S, S, dtype=getattr(torch, row.dtype or "bfloat16"))
    kernel = for_most_work(row, lambda score, b, h, q, kv: score + bias[h, q, kv], target)
    emulated = row.config.emulated if target == "sm_100a" else 0
    assert kernel.plan.config == replace(row.config, emulated=emulated)


@pytest.mark.compile
@pytest.mark.parametrize("row", configs.FWD_SM90_BIASED, ids=lambda row: str(row.head_dims))
def test_no_row_spills_or_serialises(row: configs.Row) -> None:
    kernel = for_most_work(row, lambda score, b, h, q, kv: score + by_head[h, q, kv], "sm_90a")
    assert kernel.plan.config == row.config and kernel.resources.serialised == 0


@pytest.mark.compile
@pytest.mark.parametrize(
    "name",
    [
        "d128-bf16",
        "d128-fp16-causal",
        "d64-bf16-causal",
        "d192-128-bf16",
        "d256-bf16-causal",
        "left",
        "two",
    ],
)
def test_nothing_spills_without_lse(name: str) -> None:
    """Maxima are presumed there, which holds S until it is known whether that did."""
    kernel = replace(BIASES[name], return_lse=False).compile()
    assert kernel.plan.bias == 0
    assert kernel.resources.spill_bytes == kernel.resources.serialised == 0
