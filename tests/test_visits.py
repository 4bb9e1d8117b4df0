"""Where a kernel's visits come from: the choice, the lists as it reads them, its resources."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fa_cute.variants.document import document
from fa_cute.variants.longformer import longformer
from torch.nn.attention.flex_attention import create_block_mask

import fa_cute
from fa_cute import configuration
from fa_cute.configuration import Configuration
from fa_cute.host import given_mask
from fa_cute.host.backward import plans_of
from fa_cute.host.planning import Mods, make_plan
from fa_cute.host.problem import Problem
from fa_cute.host.workspace import made_once
from fa_cute.mods import trace_mask_mod
from fa_cute.mods.affine import ranges_of
from fa_cute.mods.intervals import EMPTY, FULL
from fa_cute.mods.ranges import blocks_in, runs
from fa_cute.plan import Plan
from fa_cute.spans import Bounds, q_spans, visible

DOCUMENTS = torch.tensor([[0] * 300 + [1] * 90 + [2] * 400 + [3] * 234, [7] * 1024]).int()
STATIC = {"head_dim": 128, "dtype": "bfloat16", "target": "sm_90a"}


def planned(mask: Callable) -> Plan:
    """The plan of a call with ``mask`` on tensors of two batches of 1,024."""
    q = torch.empty(2, 1024, 4, 128, dtype=torch.bfloat16)
    mods = Mods.of(None, mask)
    return make_plan(Problem.of(q, q, q, mods=mods, target="sm_90a"), mods, "sm_90a")


def test_the_plan_chooses() -> None:
    """Ranges that tell it all, else lists of the kernel's own tile, else any ranges, else none."""
    mask = document(DOCUMENTS)
    assert planned(longformer()).visits == "ranges"
    assert planned(mask).visits == "ranges"
    assert planned(lambda b, h, q, kv: DOCUMENTS[b, q] == DOCUMENTS[b, kv]).visits == "bounds"
    sizes = (2, None, 1024, 1024)
    assert planned(fa_cute.plan_mask(mask, *sizes)).visits == "lists"
    assert planned(fa_cute.plan_mask(mask, *sizes, tile=(64, 64))).visits == "ranges"
    assert planned(fa_cute.plan_mask(longformer(), *sizes)).visits == "ranges"
    keys = {planned(m).key for m in (mask, fa_cute.plan_mask(mask, *sizes))}
    assert len(keys) == 2


def test_a_planned_mask_is_not_traced_again() -> None:
    """Its lists are of the function as it was: what changes later changes neither."""
    limit = 5
    mask = lambda b, h, q, kv: kv < limit  # noqa: E731
    blocks = fa_cute.plan_mask(mask, None, None, 100, 100)
    limit = 50
    assert Mods.of(None, blocks).mask_mod is blocks.traced
    q = torch.zeros(1, 100, 1, 16)
    v = torch.arange(100.0).view(1, 100, 1, 1)
    assert fa_cute.attention(q, q, v, mask_mod=blocks)[0, 0, 0, 0] == 2.0
    assert fa_cute.attention(q, q, v, mask_mod=mask)[0, 0, 0, 0] == 24.5


def test_lists_as_a_kernel_reads_them() -> None:
    blocks = fa_cute.plan_mask(document(DOCUMENTS), 2, None, 1024, 1024, tile=(128, 64))
    lists, kinds = blocks.lists_for(2, 6), blocks.kinds()
    assert blocks.lists_for(2, 6) is lists
    assert all(t.shape == (2, 6, 8) and t.dtype == torch.int32 for t in lists[:3])
    for b in range(2):
        for t in range(8):
            found = lists.entries[lists.begin[b, 5, t] : lists.end[b, 5, t]] >> 1
            kept = (kinds[b, 0, t] != EMPTY).nonzero()[:, 0]
            assert found.tolist() == kept.tolist()[::-1]
        lengths = (kinds[b, 0] != EMPTY).sum(1)
        in_bins = sorted(range(8), key=lambda t, n=lengths: int(n[t]).bit_length())
        assert lists.order[b, 0].tolist() == in_bins


def test_lists_of_nothing_have_an_entry_to_be_read() -> None:
    """A forward's producer reads one for a tile that sees nothing, before consumers hide it."""
    never = torch.full((256,), -1)
    blocks = fa_cute.plan_mask(lambda b, h, q, kv: kv < never[q], 1, None, 256, 256)
    lists = blocks.lists_for(1, 2)
    assert torch.equal(lists.begin, lists.end) and len(lists.entries) >= 1


def test_lists_by_key_as_a_backward_reads_them() -> None:
    """Of the backward's tile; a key head's tiles in bins of the length of its heads' lists."""
    mask = lambda b, h, q, kv: (q - kv).abs() <= 100 * (h + 1)  # noqa: E731
    blocks = fa_cute.plan_mask(mask, None, 4, 1000, 900)
    assert (blocks.tile, blocks.key_tile) == ((128, 128), (64, 128))
    same = fa_cute.plan_mask(mask, None, 4, 1000, 900, tile=(64, 128))
    assert torch.equal(blocks.by_key.offsets, same.by_key.offsets)
    lists, kinds = blocks.key_lists_for(3, 4, 2), same.kinds()[0]
    assert lists.begin.shape == lists.end.shape == (3, 4, 8) and lists.order.shape == (3, 2, 8)
    for h in range(4):
        for t in range(8):
            found = lists.entries[lists.begin[2, h, t] : lists.end[2, h, t]]
            kept = (kinds[h, :, t] != EMPTY).nonzero()[:, 0].flip(0)
            assert (found >> 1).tolist() == kept.tolist()
            assert (found & 1).tolist() == (kinds[h, kept, t] == FULL).tolist()
        together = (kinds != EMPTY).sum(1).view(2, 2, 8).sum(1)[h // 2]
        in_bins = sorted(range(8), key=lambda t, n=together: int(n[t]).bit_length())
        assert lists.order[2, h // 2].tolist() == in_bins


def test_what_is_made_on_a_stream_is_read_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream makes its own; a capture takes a kept one, and keeps none."""
    here = {"stream": 1, "captures": True}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: here["captures"])
    asked = lambda index: here["stream"]  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", asked, raising=False)
    known: dict[int, object] = {}

    def made() -> object:
        return made_once(known, torch.device("cuda", 0), object)

    assert made() is not made() and not known
    here["captures"] = False
    first = made()
    assert made() is first
    here["stream"] = 2
    second = made()
    assert made() is second is not first
    here |= {"stream": 3, "captures": True}
    assert made() is first and set(known) == {1, 2}


def test_turns_of_lists() -> None:
    """Each counts the tiles before it, of its head, that have the block."""
    mask = lambda b, h, q, kv: document(DOCUMENTS)(b, h, q, kv) & (q + h * 200 >= kv)  # noqa: E731
    blocks = fa_cute.plan_mask(mask, 2, 4, 1024, 1024)
    lists = blocks.key_lists_for(2, 4, 2, turns=True)
    for head in itertools.product(range(2), range(4)):
        seen: Counter[int] = Counter()
        for begin, end in zip(lists.begin[head].tolist(), lists.end[head].tolist(), strict=True):
            found = (lists.entries[begin:end] >> 1).tolist()
            assert lists.turns[begin:end].tolist() == [seen[block] for block in found]
            seen.update(found)
        assert max(seen.values()) > 1


@pytest.mark.parametrize("bounds", [(None, None), (None, 0), (300, 0), (70, 40)], ids=str)
@pytest.mark.parametrize("lengths", [(1024, 1024), (900, 1500), (1500, 700)], ids=str)
def test_turns_of_ranges(lengths: tuple[int, int], bounds: tuple) -> None:
    """What a block's runs count before a tile is how many tiles before it visit the block."""
    limits, (tile_q, tile_kv) = Bounds(*lengths, *bounds), (64, 128)
    blocks, tiles = (-(-n // size) for n, size in zip(lengths, (tile_q, tile_kv), strict=True))
    spans = [q_spans(limits, n * tile_kv, (n + 1) * tile_kv, tile_q) for n in range(tiles)]
    for mask in (longformer(), lambda b, h, q, kv: q // 300 == kv // 300):
        ranges = ranges_of(trace_mask_mod(mask).graph)
        for block in range(blocks):
            queries = block * tile_q, (block + 1) * tile_q
            found = runs(ranges, (), queries, lengths, tile_kv)
            first = max(0, visible(limits, *queries)[0]) // tile_kv
            before = 0
            for tile, (begin, _, _, end) in enumerate(spans):
                if begin <= block < end and blocks_in(found, tile, tile + 1):
                    assert blocks_in(found, first, tile) == before
                    before += 1


def test_a_backward_visits_what_its_forward_does() -> None:
    """Lists of its own tile; in turns too, but for lists under a left bound."""
    mask = document(DOCUMENTS)
    blocks = fa_cute.plan_mask(mask, 2, None, 1024, 1024)
    facts = {"lse_gradient": False, "deterministic": False}
    for given, visits in ((longformer(), "ranges"), (mask, "ranges"), (blocks, "lists")):
        forward = planned(given)
        listed = getattr(given, "key_tile", None)
        assert plans_of(forward, **facts, listed=listed).main.visits == visits
        facts["deterministic"] = True
        assert plans_of(forward, **facts, listed=listed).main.visits == visits
        left = replace(forward, window=(True, False))
        assert plans_of(left, **facts, listed=listed).main.visits == "ranges"
        facts["deterministic"] = False
        around = plans_of(forward, **facts, listed=listed)
        assert around.preprocess.visits == around.postprocess.visits == "bounds"


@pytest.mark.parametrize("sizes", [(0, 3, 5, 5), (2, 3, 0, 5), (2, 3, 5, 0)], ids=str)
def test_sizes_of_zero_plan_nothing(sizes: tuple[int, ...]) -> None:
    """As a call of such sizes computes nothing: no list, or lists of nothing."""
    blocks = fa_cute.plan_mask(lambda b, h, q, kv: q + b >= kv + h, *sizes)
    assert blocks.counts() == (blocks.kinds().numel(), 0, 0)
    q, k = (torch.ones(sizes[0], length, 3, 16) for length in sizes[2:])
    assert (fa_cute.attention(q, k, k, mask_mod=blocks) == 0).all()


def test_a_captured_tensor_that_is_too_small_is_named() -> None:
    for sizes, what in (((3, None, 1024, 1024), "batch size"), ((2, None, 1025, 9), "queries")):
        with pytest.raises(ValueError, match=f"captured tensor 0 of mask_mod, .* {what}"):
            fa_cute.plan_mask(document(DOCUMENTS), *sizes)


def test_lists_are_for_masks_without_ranges() -> None:
    for mask in (None, longformer()):
        with pytest.raises(ValueError, match="block_lists is True, but lists are read"):
            Configuration(**STATIC, mask_mod=mask, block_lists=True).plan()
    plan, _ = Configuration(**STATIC, mask_mod=document(DOCUMENTS), block_lists=True).plan()
    assert Configuration.of(plan).plan()[0] == plan


def test_recorded_lists_survive_a_file(tmp_path) -> None:
    plan, _ = Configuration(**STATIC, mask_mod=document(DOCUMENTS), block_lists=True).plan()
    configuration.save(tmp_path / "all.json", [Configuration.of(plan).arguments()])
    (row,) = configuration.load(tmp_path / "all.json")
    assert Configuration(**row).plan()[0].key == plan.key


@pytest.mark.compile
@pytest.mark.parametrize("listed", [True, False], ids=["lists", "ranges"])
def test_one_body_with_a_branch_keeps_its_registers(listed: bool) -> None:
    """The branch round the masks neither spills nor makes the products wait; causal on top."""
    mask = document(DOCUMENTS) if listed else longformer()
    kernel = fa_cute.compile(**STATIC, mask_mod=mask, causal=True, block_lists=listed)
    assert kernel.plan.visits == ("lists" if listed else "ranges")
    assert kernel.resources.spill_bytes == 0 and kernel.resources.serialised == 0


def test_lists_have_an_entry_behind_the_last() -> None:
    """A kernel reads it for a tile that sees nothing, also where no tile of the mask does."""

    def apart(b, h, q, kv):
        return DOCUMENTS[b, q] == DOCUMENTS[b, kv] + 100

    hidden = fa_cute.plan_mask(apart, 2, None, 1024, 1024)
    some = fa_cute.plan_mask(document(DOCUMENTS), 2, None, 1024, 1024)
    of_flex = create_block_mask(apart, 2, None, 1024, 1024, device="cpu")
    q = torch.zeros(2, 1024, 4, 128)
    for blocks in (hidden, some, given_mask.as_mask_mod(of_flex, q, q, q)):
        for lists in (blocks.by_query, blocks.by_key):
            assert len(lists.entries) > int(lists.offsets[-1])
    assert hidden.counts().empty == 2 * 8 * hidden.key_tiles
