"""Planned masks: block lists against brute force, accepted by the call, skipped on the CPU."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

import fa_cute
from fa_cute import cli, cpu, tilemap, variants
from fa_cute.host import given_mask
from fa_cute.host.blocks import BlockLists
from fa_cute.mods import ModError, all_of, any_of, negate, trace_mask_mod
from fa_cute.mods.emit_torch import emit
from fa_cute.mods.intervals import EMPTY, FULL, PARTIAL
from fa_cute.spans import Bounds
from tests.test_cpu import Largest, make

SIZES = (2, 4, 500, 700)
TILE = (32, 48)
GALLERY = {
    name: variant.build("cpu", variants.Shape(*SIZES))["mask_mod"]
    for name, variant in variants.ALL.items()
    if variant.kind == "mask_mod"
}
DENSE = torch.rand(500, 700, generator=torch.Generator().manual_seed(0)) < 0.0008
PAIRS = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]], dtype=torch.uint8)
MASKS = {
    **GALLERY,
    "all": lambda b, h, q, kv: q >= 0,
    "none": lambda b, h, q, kv: kv < 0,
    "dense": lambda b, h, q, kv: DENSE[q, kv],
    "blocks": lambda b, h, q, kv: PAIRS[q // 240, kv // 240] != 0,
    "batch and head": lambda b, h, q, kv: (q + 100 * b - kv).abs() < 50 * (h + 1),
}


def truth(mask: Callable, sizes: tuple = SIZES, tile: tuple = TILE) -> torch.Tensor:
    """The kinds of all tiles ``(B, H, query tiles, key tiles)``, from every element."""
    places = {
        name: torch.arange(size).view([-1 if i == at else 1 for i in range(4)])
        for at, (name, size) in enumerate(zip(("b", "h", "q", "kv"), sizes, strict=True))
    }
    seen = emit(*trace_mask_mod(mask), **places).expand(sizes)
    rows = [
        torch.stack(
            [part.flatten(2).any(2).int() + part.flatten(2).all(2).int() for part in columns], -1
        )
        for columns in (row.split(tile[1], 3) for row in seen.split(tile[0], 2))
    ]
    return torch.stack(rows, 2)


def as_lists(lists: BlockLists) -> list[list[int]]:
    ends, entries = lists.offsets.tolist(), lists.entries.tolist()
    return [entries[a:b] for a, b in zip(ends, ends[1:], strict=False)]


@pytest.mark.parametrize("name", MASKS)
def test_lists_against_brute_force(name: str) -> None:
    """Never called empty or full wrongly, and exact for most masks; both lists hold the same."""
    blocks = fa_cute.plan_mask(MASKS[name], *SIZES, tile=TILE)
    kinds, right = blocks.kinds(), truth(MASKS[name])
    told = kinds.expand(right.shape)
    assert ((told == right) | (told == PARTIAL)).all()
    assert blocks.evaluated == (name == "dense")
    if name not in ("neighbourhood", "dilated", "tree"):
        assert (told == right).float().mean() > 0.99
    for lists, rows in ((blocks.by_query, kinds), (blocks.by_key, kinds.transpose(2, 3))):
        expected = [
            [2 * at + (kind == FULL) for at, kind in enumerate(row) if kind != EMPTY][::-1]
            for row in rows.flatten(0, 2).tolist()
        ]
        assert as_lists(lists) == expected
    counts = [int((kinds == kind).sum()) for kind in (EMPTY, PARTIAL, FULL)]
    assert list(blocks.counts()) == counts


def test_only_what_a_mask_reads_has_lists_of_its_own() -> None:
    def own(mask: Callable, batch: int | None = 3, heads: int | None = 4) -> tuple[int, int]:
        blocks = fa_cute.plan_mask(mask, batch, heads, 100, 100)
        return blocks.batch, blocks.heads

    assert own(lambda b, h, q, kv: q >= kv, None, None) == (1, 1)
    assert own(lambda b, h, q, kv: q + h >= kv, None) == (1, 4)
    assert own(lambda b, h, q, kv: q + b >= kv) == (3, 1)


class Asked(TorchFunctionMode):
    """Counts what would make the host wait for a device."""

    times = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        waits = ("tolist", "item", "nonzero", "unique", "bincount", "cpu", "masked_select")
        self.times += getattr(func, "__name__", "") in waits
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["document", "dense", "causal"])
def test_one_wait(name: str) -> None:
    with Asked() as asked:
        blocks = fa_cute.plan_mask(MASKS[name], *SIZES, tile=TILE)
    assert asked.times == 1
    q, k, v = make((2, 500, 700, 4, 4))
    with Asked() as asked:
        fa_cute.attention(q, k, v, mask_mod=blocks)
    assert asked.times <= 1, "one read of what is proved"


def test_a_long_document_mask_takes_linear_memory() -> None:
    """No tensor much larger than the number of tokens, where tiles are their square / 16,384."""
    length = 1 << 18
    document = (torch.rand(length, generator=torch.Generator().manual_seed(0)) < 1 / 4096).cumsum(0)
    mask = lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv)  # noqa: E731
    with Largest() as seen:
        blocks = fa_cute.plan_mask(mask, 1, 8, length, length, tile=(128, 128))
    assert seen.elements <= 2 * length
    counts = blocks.counts()
    assert counts.full > counts.partial > length // 128 and sum(counts) == (length // 128) ** 2


INF = float("inf")
SCORE_MODS = {
    "hidden": lambda s, b, h, q, kv: torch.where(q + 10 * h >= kv, s, -INF),
    "bias": lambda s, b, h, q, kv: s * 0.5 + (h - 1) * 0.01 * (q - kv),
}


@pytest.mark.parametrize("name", [*GALLERY, "none", "dense", *SCORE_MODS, "both"])
def test_skipping_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """out, lse and gradients on the CPU path, with and without the proofs, under bounds too.

    Tiles are 16 x 32, so that all kinds occur.
    """
    monkeypatch.setattr(cpu, "TILE_N", 32)
    monkeypatch.setattr(cpu, "SCORES_A_TILE", 1)
    score_mod, mask_mod = SCORE_MODS.get(name), MASKS.get(name)
    if name == "both":
        score_mod, mask_mod = SCORE_MODS["hidden"], MASKS["chunked"]
    mods = {
        "score_mod": score_mod and fa_cute.mods.trace_score_mod(score_mod),
        "mask_mod": mask_mod and trace_mask_mod(mask_mod),
    }
    for bounds in (Bounds(80, 200), Bounds(80, 200, left=70, right=0)):
        results = []
        for skip in (True, False):
            inputs = [t.requires_grad_() for t in make((2, 80, 200, 4, 2))]
            out, lse = cpu.attention(*inputs, bounds=bounds, scale=0.3, skip=skip, **mods)
            seen = torch.where(lse == -INF, 0, lse)
            loss = (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() + seen.sum()
            results.append([out, lse, *torch.autograd.grad(loss, inputs)])
        for ours, everywhere in zip(*results, strict=True):
            assert torch.equal(ours, everywhere)


def test_what_is_proved_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal mask on 2048 tokens, tiles of 512 x 256: 20 blocks of 32, the mask on 8 of them."""
    calls = {"mask": 0, "scores": 0}
    real_emit, real_scores = cpu.emit, cpu._Walk._scores

    def counting_emit(*args, **kwargs):
        calls["mask"] += 1
        return real_emit(*args, **kwargs)

    def counting_scores(self, *args):
        calls["scores"] += 1
        return real_scores(self, *args)

    monkeypatch.setattr(cpu, "emit", counting_emit)
    monkeypatch.setattr(cpu._Walk, "_scores", counting_scores)
    q, k, v = make((1, 2048, 2048, 1, 1))
    fa_cute.attention(q, k, v, mask_mod=lambda b, h, q, kv: q >= kv)
    assert calls == {"mask": 8, "scores": 20}


def test_planned_masks_are_accepted() -> None:
    sizes = (2, 4, 130, 300)
    q, k, v = make((2, 130, 300, 4, 2))
    for name in ("document", "per_head_window", "tree"):
        blocks = fa_cute.plan_mask(MASKS[name], *sizes)
        out = fa_cute.attention(q, k, v, mask_mod=blocks, causal=True)
        assert torch.equal(out, fa_cute.attention(q, k, v, mask_mod=MASKS[name], causal=True))
        right = fa_cute.reference.attention(q, k, v, mask_mod=blocks, causal=True)
        torch.testing.assert_close(out.double(), right, rtol=1e-4, atol=1e-4)


def test_a_planned_mask_is_for_its_sizes() -> None:
    q, k, v = make((2, 500, 700, 4, 2))
    causal = fa_cute.plan_mask(MASKS["causal"], None, None, 500, 700)
    fa_cute.attention(q[:1, :, :2], k[:1, :, :1], v[:1, :, :1], mask_mod=causal)
    heads = fa_cute.plan_mask(MASKS["batch and head"], *SIZES)
    for wrong, part in (
        ((q[:, :400], k, v), "number of queries of 500, but this call has 400"),
        ((q, k[:, :40], v[:, :40]), "number of keys of 700, but this call has 40"),
        ((q[:1], k[:1], v[:1]), "batch of 2, but this call has 1"),
        ((q[:, :, :2], k, v), "number of query heads of 4, but this call has 2"),
    ):
        with pytest.raises(ValueError, match=part):
            fa_cute.attention(*wrong, mask_mod=heads)
    with pytest.raises(TypeError, match="q must be a torch.Tensor"):
        fa_cute.attention(None, k, v, mask_mod=heads)
    with pytest.raises(ValueError, match="is on cpu, but q on meta; give plan_mask device='meta'"):
        fa_cute.attention(*(x.to("meta") for x in (q, k, v)), mask_mod=heads)


def test_plan_mask_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="H is None, but the mask_mod reads h"):
        fa_cute.plan_mask(MASKS["per_head_window"], None, None, 100, 100)
    with pytest.raises(ValueError, match="Sq is -1; it must be an integer, 0 or more"):
        fa_cute.plan_mask(MASKS["causal"], 1, 1, -1, 100)
    with pytest.raises(ValueError, match="Sk is 1099511627776; at most 2.30 positions work"):
        fa_cute.plan_mask(MASKS["causal"], 1, 1, 100, 2**40)
    with pytest.raises(ValueError, match="Sq is 10.0; it must be an integer"):
        fa_cute.plan_mask(MASKS["causal"], 1, 1, 10.0, 100)
    of_numpy = fa_cute.plan_mask(MASKS["causal"], None, 1, *np.array([100, 100]))
    assert of_numpy.extents == (1, 1, 100, 100) and type(of_numpy.extents.seqlen_q) is int
    with pytest.raises(ValueError, match="tile is .*positive"):
        fa_cute.plan_mask(MASKS["causal"], 1, 1, 100, 100, tile=(0, 128))
    with pytest.raises(ValueError, match="captured tensor of the mask_mod is on cpu, not on meta"):
        fa_cute.plan_mask(MASKS["dense"], 1, 1, 100, 100, device="meta")
    with pytest.raises(ValueError, match="no forward kernel"):
        fa_cute.plan_mask(MASKS["causal"], 1, 1, 100, 100, head_dim=77)
    with pytest.raises(ValueError, match="no forward kernel has head_dim 64 and head_dim_v 0"):
        fa_cute.plan_mask(MASKS["causal"], 1, 1, 100, 100, head_dim=64, head_dim_v=0)


def block_mask(mask_mod: Callable | None = None):
    """FlexAttention's: four blocks of 64 a side, two kept in each row."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    kept = torch.tensor([[0, 2, 1, 3], [1, 3, 0, 2], [0, 3, 1, 2], [2, 3, 0, 1]]).int()
    counts = torch.tensor([2, 2, 2, 2]).int()
    return flex.BlockMask.from_kv_blocks(
        counts[None, None], kept[None, None], BLOCK_SIZE=64, mask_mod=mask_mod
    )


@pytest.mark.parametrize("inner", [None, lambda b, h, q, kv: q >= kv], ids=["always", "causal"])
def test_flex_attentions_block_mask(inner: Callable | None) -> None:
    """The lists count, not only the function: with q = 0 a row is the mean of what it sees."""
    given = block_mask(inner)
    kept = [[0, 2], [1, 3], [0, 3], [2, 3]]
    seen = torch.zeros(256, 256, dtype=torch.bool)
    for row, columns in enumerate(kept):
        for column in columns:
            seen[row * 64 : row * 64 + 64, column * 64 : column * 64 + 64] = True
    if inner is not None:
        seen &= torch.ones(256, 256).tril().bool()
    q, k, v = make((2, 256, 256, 2, 2))
    out = fa_cute.attention(q * 0, k, v, mask_mod=given)
    weights = seen.double() / seen.sum(1, keepdim=True).clamp(min=1)
    right = torch.einsum("qk,bkhd->bqhd", weights, v.double())
    torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-5)
    blocks = fa_cute.plan_mask(given, None, None, 256, 256, tile=(32, 64))
    assert not blocks.evaluated
    assert torch.equal(blocks.kinds(), truth(blocks, (1, 1, 256, 256), (32, 64)))


@pytest.mark.parametrize("block", [128, 64, (96, 160)], ids=str)
def test_a_block_mask_becomes_lists_without_waiting(block: int | tuple[int, int]) -> None:
    """Of the kernels' tiles: what plan_mask, which waits, proves of the blocks, by brute force."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = lambda b, h, q, kv: (q + 40 * h >= kv) & (q // 300 == kv // 300)  # noqa: E731
    given = flex.create_block_mask(mask, None, 2, 500, 700, device="cpu", BLOCK_SIZE=block)
    q, k, v = make((3, 500, 700, 2, 1), 128)
    with Asked() as asked:
        blocks = given_mask.as_mask_mod(given, q, k, v)
    assert asked.times == 0 and given_mask.as_mask_mod(given, q, k, v) is blocks
    rows, columns = (block, block) if isinstance(block, int) else block
    table = given_mask.table_of(given)
    for tile, lists in ((blocks.tile, blocks.by_query), (blocks.key_tile, blocks.by_key)):
        elements = table.repeat_interleave(rows, 2).repeat_interleave(columns, 3)[0, :, :500, :700]
        right = [
            [
                [2 * at + bool((part == FULL).all()) for at, part in enumerate(parts) if part.any()]
                for parts in (
                    (row.split(tile[1], 1) for row in head.split(tile[0]))
                    if lists is blocks.by_query
                    else (column.split(tile[0]) for column in head.split(tile[1], 1))
                )
            ]
            for head in elements
        ]
        assert as_lists(lists) == [found[::-1] for head in right for found in head]


def test_a_block_mask_is_for_its_lengths() -> None:
    q, k, v = make((2, 200, 256, 2, 2))
    with pytest.raises(ValueError, match="BlockMask was made for a number of queries of 256"):
        fa_cute.attention(q, k, v, mask_mod=block_mask())
    with pytest.raises(ValueError, match="BlockMask was made for a number of keys of 256"):
        fa_cute.plan_mask(block_mask(), None, None, 256, 300)


def test_a_slice_of_a_block_mask_says_what_it_is() -> None:
    """It keeps the lengths of the whole; on a GPU the rows it lacks were an assertion there."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = lambda b, h, q, kv: q >= kv  # noqa: E731
    whole = flex.create_block_mask(mask, None, None, 512, 300, device="cpu", BLOCK_SIZE=(128, 64))
    part = whole[:, :, 1:3]
    part.mask_mod = mask
    q, k, v = make((1, 512, 300, 2, 2))
    words = "lists of 2 blocks of 128 queries, but its 512 queries are 4"
    for length in (512, 256):
        with pytest.raises(ValueError, match=words):
            fa_cute.attention(q[:, :length], k, v, mask_mod=part)
    with pytest.raises(ValueError, match=words):
        fa_cute.plan_mask(part, None, None, 512, 300)
    fa_cute.attention(q[:, :256], k, v, mask_mod=whole._adjust(256, 300))


def test_full_blocks_of_a_created_block_mask() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = lambda b, h, q, kv: q + 3 * h >= kv  # noqa: E731
    given = flex.create_block_mask(mask, None, 2, 300, 200, device="cpu", BLOCK_SIZE=(64, 32))
    q, k, v = make((2, 300, 200, 2, 1))
    expected = fa_cute.attention(q, k, v, mask_mod=mask)
    assert torch.equal(fa_cute.attention(q, k, v, mask_mod=given), expected)


def test_compositions() -> None:
    causal, near = MASKS["causal"], lambda b, h, q, kv: (q - kv).abs() <= 40
    wide = lambda b, h, q, kv: kv < 9  # noqa: E731

    def same(mask: Callable, spelled: Callable) -> bool:
        return trace_mask_mod(mask).graph == trace_mask_mod(spelled).graph

    assert same(all_of(causal, near), lambda *at: causal(*at) & near(*at))
    assert same(any_of(all_of(causal, near), wide), lambda *at: causal(*at) & near(*at) | wide(*at))
    assert same(negate(near), lambda *at: ~near(*at))
    assert same(all_of(near), near)
    with pytest.raises(ModError, match="any_of takes one mask function or more"):
        any_of()
    with pytest.raises(ModError, match="negate takes mask functions, and 3 is of int"):
        negate(3)


def test_explain_shows_the_tile_map(tmp_path: Path) -> None:
    q, k, v = make((1, 1500, 1000, 2, 2))
    file = tmp_path / "map.png"
    text = fa_cute.explain(q, k, v, mask_mod=MASKS["causal"], plot=file)
    for part in (
        "mask: 2 tiles empty, 4 partial, 6 full of 12 (1 x 1 maps), told by interval arithmetic",
        "83.3% of the work is kept",
        "mask: 1 affine range(s) of keys a query",
        "    ++..\n    ##++\n    ####",
        ". is empty, + partial, # full",
    ):
        assert part in text, text
    data = file.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (512, 384)
    begin = data.index(b"IDAT") + 4
    length = struct.unpack(">I", data[begin - 8 : begin - 4])[0]
    assert len(zlib.decompress(data[begin : begin + length])) == 384 * (1 + 3 * 512)
    q, k, v = make((1, 500, 700, 1, 1))
    assert "evaluating every element" in fa_cute.explain(q, k, v, mask_mod=MASKS["dense"])
    half, options = [x.half() for x in (q, k, v)], {"target": "sm_90a", "plot": file}
    hiding = fa_cute.explain(*half, score_mod=SCORE_MODS["hidden"], **options)
    assert "not make minus infinity" in hiding and "from its ranges which tiles" in hiding
    with pytest.raises(ValueError, match="there is no mask to draw"):
        fa_cute.explain(q, k, v, score_mod=SCORE_MODS["bias"], plot=file)


def test_the_command_draws_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "map.png"
    assert cli.main(["explain", "--mask-mod", "document", "--plot", str(file)]) == 0
    assert file.exists() and f"drawn to {file}" in capsys.readouterr().out


def test_a_large_map_is_merged() -> None:
    kinds = torch.full((130, 100), FULL, dtype=torch.int8)
    kinds[:, 50:], kinds[0, 0] = EMPTY, PARTIAL
    cells = tilemap.merged(kinds, 48)
    assert cells.shape == (44, 34) and cells[0, 0] == PARTIAL and cells[1, 0] == FULL
    assert cells[0, 33] == EMPTY and cells[5, 16] == PARTIAL
    assert tilemap.text(kinds).count("\n") == 43


@pytest.mark.gpu
def test_one_wait_on_a_device() -> None:
    """CUDA's own count of synchronisations, and the lists of the CPU."""
    mask = variants.ALL["document"].build("cuda", variants.Shape(*SIZES))["mask_mod"]
    expected = fa_cute.plan_mask(MASKS["document"], *SIZES, tile=TILE)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        with pytest.warns(UserWarning, match="synchronizing") as waits:
            blocks = fa_cute.plan_mask(mask, *SIZES, tile=TILE)
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in waits if "synchronizing" in str(w.message)]) == 1
    assert torch.equal(blocks.kinds().cpu(), expected.kinds())


def test_the_documentation_runs() -> None:
    text = (Path(__file__).parent.parent / "docs/masks.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(program, {})
    for picture in re.findall(r"\]\((images/\w+\.png)\)", text):
        assert (Path(__file__).parent.parent / "docs" / picture).exists()
    gallery = set(
        re.findall(r"`(\w+)`", text.partition("## Gallery")[2].partition("`fa_cute.mods")[0])
    )
    assert gallery == set(GALLERY)
