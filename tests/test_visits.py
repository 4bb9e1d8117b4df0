"""Where a kernel's visits come from: the choice, the lists as it reads them, its resources."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fa_cute.variants.document import document
from fa_cute.variants.longformer import longformer

import fa_cute
from fa_cute import configuration
from fa_cute.configuration import Configuration
from fa_cute.host.backward import plans_of
from fa_cute.host.planning import Mods, make_plan
from fa_cute.host.problem import Problem
from fa_cute.mods.intervals import EMPTY, FULL
from fa_cute.plan import Plan

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
        assert lengths[lists.order[b, 0].long()].diff().min() >= 0
        assert sorted(lists.order[b, 0].tolist()) == list(range(8))


def test_lists_by_key_as_a_backward_reads_them() -> None:
    """Of the backward's tile; a key head's tiles in the order of its heads' lists."""
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
        assert together[lists.order[2, h // 2].long()].diff().min() >= 0


def test_a_backward_visits_what_its_forward_does() -> None:
    """Lists of its own tile; with turns, which are of bounds, bounds."""
    mask = document(DOCUMENTS)
    blocks = fa_cute.plan_mask(mask, 2, None, 1024, 1024)
    facts = {"lse_gradient": False, "deterministic": False}
    for given, visits in ((longformer(), "ranges"), (mask, "ranges"), (blocks, "lists")):
        forward = planned(given)
        listed = getattr(given, "key_tile", None)
        assert plans_of(forward, **facts, listed=listed).main.visits == visits
        turned = plans_of(forward, **facts | {"deterministic": True}, listed=listed)
        assert turned.main.visits == "bounds"
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
