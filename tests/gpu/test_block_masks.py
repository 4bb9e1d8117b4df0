"""FlexAttention's ``BlockMask``, given as it is, and faults that its like had elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import fa_cute
from fa_cute.host import given_mask

from .configurations import Configuration
from .judging import DEVICE, everywhere, inputs, judge

pytestmark = pytest.mark.gpu
KEPT = ((0, 2), (1, 3), (0, 3), (2, 3))


@pytest.mark.parametrize("block", [128, (64, 32)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_block_mask_of_flex_attention(head_dim: int, block: int | tuple[int, int]) -> None:
    """Given as it is: the kernel reads lists made of its own, and the call waits for nothing."""
    x = inputs(Configuration(head_dim, ratio=2), (777, 900), heads_k=2, kind="outliers")
    number = torch.arange(900, device=x.q.device) // 250
    mask = lambda b, h, q, kv: (number[q] == number[kv]) | (q + 30 * h < kv)  # noqa: E731
    given = create_block_mask(mask, None, 4, 777, 900, device=x.q.device, BLOCK_SIZE=block)
    options = {"mask_mod": given, "causal": False}
    out, lse = fa_cute.attention(*x, return_lse=True, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = fa_cute.attention(*x, return_lse=True, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)
    taken = options | {"mask_mod": given_mask.as_mask_mod(given, *x)}
    right, right_lse, visits = everywhere(x, taken)
    assert visits == "lists"
    assert torch.equal(out, right) and torch.equal(lse, right_lse)
    judge(Configuration(head_dim), x, options | {"mask_mod": mask}, (out, lse))


def _always(b, h, q, kv):
    return q >= 0


@pytest.mark.parametrize("inner", [None, _always], ids=["none", "always"])
def test_lists_count_without_a_function(inner: Callable | None) -> None:
    """4 x 4 blocks of 256, two kept in a row, and a mask_mod that hides nothing. [PT#188322]"""
    counts = torch.full((1, 1, 4), 2, dtype=torch.int32, device=DEVICE)
    kept = torch.tensor(KEPT, dtype=torch.int32, device=DEVICE)
    rest = torch.zeros(4, 2, dtype=torch.int32, device=DEVICE)
    blocks = torch.cat((kept, rest), 1)[None, None]
    given = BlockMask.from_kv_blocks(counts, blocks, BLOCK_SIZE=256, mask_mod=inner)
    x = inputs(Configuration(128), (1024, 1024), batch=1, heads_k=2)
    out = fa_cute.attention(x.q * 0, x.k, x.v, mask_mod=given)
    for row, columns in enumerate(KEPT):
        seen = torch.cat([x.v[:, 256 * c : 256 * (c + 1)] for c in columns], 1)
        right = seen.double().mean(1, keepdim=True).expand(-1, 256, -1, -1)
        found = out[:, 256 * row : 256 * (row + 1)].double()
        torch.testing.assert_close(found, right, rtol=2**-7, atol=2**-9)
    taken = given_mask.as_mask_mod(given, *x)
    assert everywhere(x, {"mask_mod": taken, "causal": False})[2] == "lists"


@pytest.mark.parametrize("first", [1, 8])
def test_lists_of_one_head_and_of_all_do_not_share(first: int) -> None:
    """The same lengths with lists for one head and for eight, in either order. [FA#2298]"""
    x = inputs(Configuration(64, ratio=4), (257, 257), heads_k=2)
    for heads in (first, 9 - first):
        reach = 40 if heads == 1 else 20

        def mask(b, h, q, kv, many=heads > 1, reach=reach):
            near = (q - kv).abs() <= (reach + 10 * h if many else reach)
            return near & ((q * kv) % 5 != 1)

        blocks = fa_cute.plan_mask(mask, 2, 8, 257, 257, device=DEVICE, head_dim=64)
        assert blocks.heads == heads
        out, lse = fa_cute.attention(*x, mask_mod=blocks, return_lse=True)
        judge(Configuration(64, ratio=4), x, {"mask_mod": mask, "causal": False}, (out, lse))


def test_a_full_block_is_bounded_by_the_lengths() -> None:
    """One document that holds everything: all blocks are full, the last ones ragged. [FA#2091]"""
    number = torch.zeros(1, 384, dtype=torch.int32, device=DEVICE)
    mask = lambda b, h, q, kv: number[0, q] == number[0, kv]  # noqa: E731
    x = inputs(Configuration(128), (384, 300), batch=1)
    blocks = fa_cute.plan_mask(mask, 1, 1, 384, 300, device=DEVICE)
    assert blocks.counts().partial == blocks.counts().empty == 0
    out, lse = fa_cute.attention(*x, mask_mod=blocks, return_lse=True)
    right, right_lse, visits = everywhere(x, {"mask_mod": blocks, "causal": False})
    assert visits == "lists" and torch.equal(out, right) and torch.equal(lse, right_lse)


def test_many_tiles_without_a_block() -> None:
    """Sq 8192 on 128 keys, lists of a window of 64: 62 of 64 tiles keep nothing. [FA#2258]"""
    x = inputs(Configuration(128, ratio=16), (8192, 128))
    number = torch.arange(8192, dtype=torch.int32, device=DEVICE)
    mask = lambda b, h, q, kv: (number[q] - number[kv]).abs() <= 64  # noqa: E731
    blocks = fa_cute.plan_mask(mask, None, None, 8192, 128, device=DEVICE)
    out, lse = fa_cute.attention(*x, mask_mod=blocks, return_lse=True)
    torch.cuda.synchronize()
    assert (out[:, 192:] == 0).all() and (lse[..., 192:] == -torch.inf).all()
    judge(Configuration(128, ratio=16), x, {"mask_mod": mask, "causal": False}, (out, lse))
