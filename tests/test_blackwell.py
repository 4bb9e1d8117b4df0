"""The forward on sm_100 without one: ledgers, the model, and every row compiled and counted."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fa_cute
from bench import spills
from fa_cute import model
from fa_cute.cli import main
from fa_cute.configuration import Configuration
from fa_cute.device import tmem
from fa_cute.host import compile as compiling
from fa_cute.host import configs
from fa_cute.host.configs import FWD_SM100, FWD_SM100_BIASED, FWD_SM100_PAIRS
from fa_cute.kernels import fwd_sm100
from fa_cute.plan import Plan, register_pool
from fa_cute.spans import Bounds

ROWS = list(dict.fromkeys(row.head_dims for row in FWD_SM100))


def plan(head_dims: tuple[int, int], target: str = "sm_100a", **options: Any) -> Plan:
    found, _ = Configuration(
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dtype=torch.bfloat16,
        target=target,
        **options,
    ).plan()
    return found


def counted(ptx: str) -> model.Counts:
    """The instructions of a kernel's text that the model speaks of."""
    wanted = model.Counts(
        products=r"tcgen05\.mma",
        exponentials=r"ex2\.approx",
        multiply_adds=r"fma\.rn\.f32x2",
        adds=r"(?:add|sub)(?:\.r[nm])?\.f32x2",
        multiplies=r"mul(?:\.rn)?\.f32x2",
        maxima=r"max\.f32",
        conversions=r"cvt\.rn\.bf16x2\.f32",
        loads=r"tcgen05\.ld\.",
        stores=r"tcgen05\.st\.",
    )
    return model.Counts(*(len(re.findall(rf"\b{pattern}", ptx)) for pattern in wanted))


@pytest.mark.parametrize("row", (*FWD_SM100, *FWD_SM100_PAIRS, *FWD_SM100_BIASED), ids=str)
def test_ledgers(row: configs.Row) -> None:
    """Columns and registers of a row fit: the topology and the layout refuse what does not."""
    own = replace(plan(row.head_dims), config=row.config)
    assert 0 < own.config.early < own.config.tile_n
    ranges = [r for r in fwd_sm100.columns(own).values() if not r.name.startswith("p")]
    ends = [r.first + r.count for r in ranges]
    assert [r.first for r in ranges] == [0, *ends[:-1]]
    assert sum(r.count for r in ranges) <= tmem.COLUMNS
    assert fwd_sm100.topology(own).threads == own.config.threads
    assert own.config.registers <= register_pool(own.config.threads)


def test_two_tiles_of_128_take_every_column() -> None:
    columns = fwd_sm100.columns(plan((128, 128)))
    assert sum(columns[name].count for name in ("s0", "s1", "o0", "o1")) == tmem.COLUMNS
    assert columns["p1"] == ("p1", columns["s1"].first, 64)


def test_too_many_columns_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"s0 256 \+ o0 264 = 520 columns; 512 exist"):
        tmem.lay_out(s0=256, o0=264)


def test_an_alias_must_fit() -> None:
    s = tmem.lay_out(s0=64)["s0"]
    assert s.borrow_as("p0", 32) == ("p0", 0, 32)
    with pytest.raises(AssertionError, match="p0 needs 65 columns; s0, which it aliases, has 64"):
        s.borrow_as("p0", 65)


def test_the_papers_cycles() -> None:
    """FA4's figures for 128^3, and for 256 x 128^2: without emulation."""
    config = replace(plan((128, 128)).config, emulated=0)
    two = model.cycles(config, 128, 128)
    assert two[:3] == (2048, 1536, 2048)
    assert tuple(x / 2 for x in two[:3]) == (1024, 768, 1024)


# Head dims, keys, emulated: cycles of products, shared memory, MUFU, fp32, other arithmetic; bound.
DOCUMENTED = {
    ((64, 64), 128, 4): (1024, 768, 1536, 892, 780, "exponentials"),
    ((64, 64), 128, 3): (1024, 768, 1664, 796, 716, "exponentials"),
    ((96, 96), 128, 3): (1536, 1152, 1664, 796, 716, "exponentials"),
    ((128, 128), 128, 2): (2048, 1536, 1792, 700, 652, "products"),
    ((128, 128), 128, 0): (2048, 1536, 2048, 508, 524, "products"),
    ((192, 128), 128, 2): (2560, 2048, 1792, 700, 652, "products"),
    ((192, 128), 96, 0): (1920, 1728, 1536, 380, 396, "products"),
    ((256, 256), 96, 0): (1536, 1280, 768, 190, 198, "products"),
}


def test_every_row_is_documented() -> None:
    """The table of docs/blackwell.md is the model's, row by row."""
    text = (Path(__file__).parent.parent / "docs" / "blackwell.md").read_text().splitlines()
    for row in FWD_SM100:
        found, tile = model.cycles(row.config, *row.head_dims), row.config
        assert (*found, found.bound) == DOCUMENTED[row.head_dims, tile.tile_n, tile.emulated]
        cells = " | ".join(f"{number:.0f}" for number in found)
        ends = f"{found.bound} | {found.share:.0%} |".replace("%", " %")
        title = f"| {row.head_dims[0]}, {row.head_dims[1]}"
        size = f" | {tile.tile_m} × {tile.tile_n} | "
        here = [line for line in text if line.startswith(title) and size in line]
        assert any(line.endswith(f"| {cells} | {ends}") for line in here)


def test_what_bounds_a_row_for_a_bias() -> None:
    """As docs/blackwell.md says: what bounds the row for mods, but shared memory at (192, 128)."""
    for row in FWD_SM100_BIASED:
        found = model.cycles(row.config, *row.head_dims)
        if row.head_dims == (192, 128):
            assert (found.bound, found.shared, found.products) == ("shared", 1408, 1280)
            continue
        own = [r for r in FWD_SM100 if r.head_dims == row.head_dims and r.modified is not False]
        assert found.bound == model.cycles(own[0].config, *row.head_dims).bound


def test_a_tile_is_the_sum_of_its_blocks() -> None:
    """1,024 queries and keys, causal: tiles of 256 see 2, 4, 6 and 8 blocks, two of them edges."""
    own = plan((128, 128), causal=True)
    block, edge = (model.cycles(own.config, 128, 128, edge=edge) for edge in (False, True))
    tiles = model.tiles(own, Bounds(1024, 1024, right=0))
    assert [tile.products for tile in tiles] == [n * block.products for n in (2, 4, 6, 8)]
    assert [tile.other for tile in tiles] == [
        n * block.other + 2 * edge.other for n in (0, 2, 4, 6)
    ]


def test_explain_prints_the_model() -> None:
    """S8k, full: products bound a block, so all of a B200's rate is left."""
    q = torch.empty(2, 8192, 16, 128, dtype=torch.bfloat16)
    text = fa_cute.explain(q, q, q, target="sm_100a")
    assert "256 queries x 128 keys, 2 softmax warpgroups" in text
    assert "192 a softmax thread, 56 a correction's" in text and "65536 of 65536" in text
    assert "2048 cycles of products, 1536 of shared memory, 1792 of exponentials" in text
    assert "emulating 2 of 16 pairs takes off 256 cycles of exponentials for 192 of fp32" in text
    assert "conditional rescaling 256 of fp32 and 32 accesses" in text
    assert "at most 2250 TFLOP/s" in text and "on an H200" not in text


def test_the_command_line_prints_the_model(capsys: pytest.CaptureFixture) -> None:
    """B 1, S1024, one head: 4 tiles of 8 blocks, each on an SM of its own."""
    assert main(["explain", "--target", "sm_100a"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("model: ")]
    assert len(lines) == 3 and "2048 cycles of products" in lines[0]
    assert f"at most {2250 * 4 / 148:.0f} TFLOP/s" in lines[2]


def test_explain_prints_what_bounds_a_call() -> None:
    """Exponentials at head dim 64, twice as fast on sm_103; few tiles leave SMs without work."""
    q = torch.empty(1, 4096, 148, 64, dtype=torch.bfloat16)
    assert "bound by exponentials" in (text := fa_cute.explain(q, q, q, target="sm_100a"))
    assert "at most 1500 TFLOP/s" in text
    text = fa_cute.explain(q, q, q, target="sm_103a")
    assert "emulating 0 of 16" in text and "at most 2250 TFLOP/s" in text
    text = fa_cute.explain(q[:, :, :1], q[:, :, :1], q[:, :, :1], target="sm_100a")
    assert "at most 162 TFLOP/s" in text  # 16 tiles
    text = fa_cute.explain(q, q, q, causal=True, window=(256, None), target="sm_103a")
    assert "bound by products" in text and "model: at least" in text


TARGETS = ("sm_100a", "sm_103a")
WINDOW = {"window": (True, True), "return_lse": True}
NATIVE = [
    *(
        (row, target, {"causal": cut})
        for row in ROWS
        for target in TARGETS
        for cut in (False, True)
    ),
    *((row, "sm_103a", WINDOW) for row in ROWS),
    ((128, 128), "sm_100a", {"causal": True, "window": (True, False)}),
]


def test_explain_says_that_a_hosted_target_is_a_test_device() -> None:
    q = torch.empty(1, 4096, 2, 128, dtype=torch.bfloat16)
    assert "model: none; a test device" in fa_cute.explain(q, q, q, target="sm_100@sm_90a")


@pytest.mark.compile
@pytest.mark.parametrize(("head_dims", "target", "options"), NATIVE, ids=str)
def test_native(head_dims: tuple, target: str, options: dict, tmp_path: Path) -> None:
    """No spill under setmaxnreg, and the instructions that the plan says, no more and no fewer."""
    own = plan(head_dims, target, **options)
    found = compiling.listing(own, tmp_path)
    assert found.resources.spill_bytes == 0
    assert found.resources.shared_memory <= 232_448
    assert counted(found.ptx) == model.expected(own)
    assert len(re.findall("setmaxnreg", found.ptx)) == 3


@pytest.mark.compile
@pytest.mark.parametrize(
    "row", [row for row in (*FWD_SM100, *FWD_SM100_BIASED) if row.modified], ids=str
)
def test_rows_for_mods(row: configs.Row, tmp_path: Path) -> None:
    """Their tiles and emulated shares, in a kernel without the mod: the counts are the model's."""
    own = replace(plan(row.head_dims), config=row.config)
    found = compiling.listing(own, tmp_path)
    assert found.resources.spill_bytes == 0 and counted(found.ptx) == model.expected(own)


@pytest.mark.compile
@pytest.mark.parametrize(("head_dims", "degree"), [((64, 64), 5), ((96, 96), 4)], ids=str)
def test_other_degrees(head_dims: tuple, degree: int, tmp_path: Path) -> None:
    """A row may choose a longer polynomial: the counts follow, and nothing spills."""
    own = plan(head_dims)
    own = replace(own, config=replace(own.config, degree=degree))
    found = compiling.listing(own, tmp_path)
    assert found.resources.spill_bytes == 0 and counted(found.ptx) == model.expected(own)


# Each kind of mod at another row; ``bench/spills.py`` compiles the gallery at every row.
GALLERY = [
    ("alibi", (128, 128), "causal"),
    ("softcap", (256, 256), "full"),
    ("t5_relative_bias", (64, 64), "causal"),
    ("block_causal", (128, 128), "causal"),
    ("causal_documents", (192, 128), "full"),
    ("tree", (96, 96), "full"),
]


@pytest.mark.compile
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "head_dims", "bounds"), GALLERY, ids=str)
def test_native_mods(name: str, head_dims: tuple, bounds: str, target: str) -> None:
    """Biases in registers, masks in tensor memory, loads through shared memory: no spill."""
    assert spills.Case(name, head_dims, bounds, target).spilled()["spilled"] == 0


def test_each_row_for_mods_is_compiled() -> None:
    """Above, for both targets; rows for a bias are in tests/test_bias.py."""
    modified = {row.head_dims for row in FWD_SM100 if row.modified is not False}
    assert {head_dims for _, head_dims, _ in GALLERY} == modified


@pytest.mark.compile
def test_native_lists(tmp_path: Path) -> None:
    """A branch on a block's note costs no spill."""
    own = plan((128, 128), mask_mod=lambda b, h, q, kv: q // 64 == kv // 64, causal=True)
    found = compiling.listing(replace(own, visits="lists"), tmp_path)
    assert own.visits == "ranges" and found.resources.spill_bytes == 0


PAIRS = [(row.head_dims, target, row.cut is None) for row in FWD_SM100_PAIRS for target in TARGETS]


@pytest.mark.compile
@pytest.mark.parametrize(("head_dims", "target", "causal"), PAIRS, ids=str)
def test_native_pairs(
    head_dims: tuple, target: str, causal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products, loads, commits and allocation of two CTAs; what each softmax does is the same."""
    monkeypatch.setenv("FA_CUTE_PAIRS", "1")
    own = plan(head_dims, target, causal=causal)
    assert own.config.pair and own.config.registers <= register_pool(own.config.threads)
    found = compiling.listing(own, tmp_path)
    assert found.resources.spill_bytes == 0
    assert counted(found.ptx) == model.expected(own)
    of_pair = [line for line in found.ptx.splitlines() if "cta_group::2" in line]
    for verb in ("mma", "commit", "alloc", "dealloc", "relinquish_alloc_permit"):
        here = [line for line in found.ptx.splitlines() if f"tcgen05.{verb}." in line]
        assert here and all(line in of_pair for line in here), verb
    commits = [line for line in of_pair if "tcgen05.commit" in line]
    assert all("multicast::cluster" in line for line in commits)
    loads = [line for line in found.ptx.splitlines() if "cp.async.bulk.tensor" in line]
    assert loads and all(line in of_pair for line in loads)


def test_pairs_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan has one by itself, nor where causal cuts tiles at 128, a mod is there, or hosted."""
    assert not plan((128, 128)).config.pair
    monkeypatch.setenv("FA_CUTE_PAIRS", "1")
    own = plan((128, 128))
    assert own.config.pair and own.config.tile_m == 512
    assert plan((128, 128), "sm_103a").config == replace(own.config, emulated=0)
    assert configs.why(own.config).startswith("not run")
    q = torch.empty(1, 4096, 4, 128, dtype=torch.bfloat16)
    text = fa_cute.explain(q, q, q, target="sm_100a")
    assert "512 queries x 128 keys" in text and "a pair of CTAs shares it" in text
    for other in (
        plan((128, 128), causal=True),
        plan((64, 64)),
        plan((128, 128), mask_mod=lambda b, h, q, kv: q >= kv),
        plan((128, 128), "sm_100@sm_90a"),
        plan((128, 128), gqa_ratio=8, few_queries=True),
    ):
        assert not other.config.pair


def test_a_packed_row_has_its_reason() -> None:
    """``why`` finds the row that a packed configuration was made from."""
    own = plan((128, 128), gqa_ratio=8, few_queries=True)
    assert own.config.packed and configs.why(own.config).startswith("not measured")


def test_cycles_of_a_pair() -> None:
    """Either CTA reads half of K and V: 1,024 cycles of shared memory in place of 1,536."""
    row = next(row for row in FWD_SM100_PAIRS if row.head_dims == (128, 128))
    assert model.cycles(replace(row.config, emulated=0), 128, 128)[:3] == (2048, 1024, 2048)
