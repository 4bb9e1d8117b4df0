"""What a call accepts, what it refuses and in which words, and how layouts reach a kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from fa_cute.host.configs import FWD_SM90
from fa_cute.host.planning import NO_MODS, Mods, make_plan
from fa_cute.host.problem import (
    Problem,
    allocate,
    check_captured,
    check_out,
    kernel_ready,
    layout_is_ready,
)
from fa_cute.plan import register_pool

B, SQ, SK, HQ, HK, D = 2, 5, 7, 4, 2, 64


def tensors(**changes: Any) -> dict[str, torch.Tensor]:
    """q, k and v of the shapes above, some replaced."""
    q = torch.zeros(B, SQ, HQ, D, dtype=torch.bfloat16)
    k = torch.zeros(B, SK, HK, D, dtype=torch.bfloat16)
    return {"q": q, "k": k, "v": k.clone(), **changes}


def problem(**changes: Any) -> Problem:
    """The problem of those tensors."""
    return Problem.of(**{"mods": NO_MODS, **tensors(), **changes})


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": [1]}, TypeError, "q must be a torch.Tensor, not list"),
        ({"k": None}, TypeError, "k must be a torch.Tensor, not NoneType"),
        ({"q": half(5, 4, 64)}, ValueError, r"q \(5, 4, 64\) torch.bfloat16 has 3 dimensions"),
        ({"v": half(B, SK, HK, D).to_sparse()}, ValueError, "v .* is torch.sparse_coo"),
        ({"q": half(B, SQ, HQ, D).int()}, ValueError, "q .*torch.int32 on cpu: .*torch.float64"),
        ({"k": half(B, SK, HK, D).half()}, ValueError, "k .*torch.float16 differs .*bfloat16"),
        ({"q": half(B, SQ, HQ, D).to("meta")}, ValueError, "q is on meta; .*CUDA.*CPU"),
        ({"k": half(B, SK, HK, D).to("meta")}, ValueError, "k is on meta, but q on cpu"),
        ({"k": half(B, SK + 1, HK, D)}, ValueError, r"k \(2, 8, 2, 64\) .* and v \(2, 7, 2, 64\)"),
        ({"q": half(3, SQ, HQ, D)}, ValueError, r"q \(3, 5.* and k \(2.* differ in batch"),
        ({"q": half(B, SQ, HQ, 32)}, ValueError, "differ in head dimension"),
        ({"q": half(B, SQ, 3, D)}, ValueError, "3 heads and k .* 2: .* positive multiple"),
        ({"q": half(B, SQ, 0, D)}, ValueError, "positive multiple"),
        ({"window": 3}, TypeError, r"window must be \(left, right\) or None, not 3"),
        ({"window": {1, 2}}, TypeError, r"window must be \(left, right\) or None, not {1, 2}"),
        ({"window": (1, 2, 3)}, ValueError, "two bounds"),
        ({"window": (1.5, None)}, TypeError, "left bound must be an integer or None, not float"),
        ({"window": (1, True)}, TypeError, "right bound must be an integer or None, not bool"),
        ({"window": (None, -3)}, ValueError, "right bound is -3; .*0 or more, or -1 or None"),
        ({"scale": "1"}, TypeError, "scale must be a number or None .*, not str"),
        ({"scale": torch.tensor(1.0)}, TypeError, "captured by a score_mod"),
        ({"scale": float("nan")}, ValueError, "scale is nan; it must be finite in float32"),
        ({"scale": 1e39}, ValueError, "finite in float32"),
        ({"causal": 1}, TypeError, "causal must be True or False, not 1"),
        ({"return_lse": "yes"}, TypeError, "return_lse must be True or False, not 'yes'"),
        ({"out": 3}, TypeError, "out must be a torch.Tensor or None, not int"),
        ({"out": half(B, SQ, HQ, 32)}, ValueError, r"the result is \(2, 5, 4, 64\) \(B, Sq, Hq"),
        ({"out": half(B, SQ, HQ, D).half()}, ValueError, "torch.float16; the result .*bfloat16"),
        ({"out": half(B, SQ, 1, D).expand(B, SQ, HQ, D)}, ValueError, "share one address"),
        ({"out": half(B, SQ, HQ, D).requires_grad_()}, ValueError, "out requires grad"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(changes: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        problem(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {name: t[..., :36] for name, t in tensors().items()},
            r"head dims \(D, Dv\) are \(36, 36\); kernels exist for multiples of 8 up to 256; pad",
        ),
        ({"v": half(B, SK, HK, 264)}, r"are \(64, 264\)"),
        (
            {name: t.float() for name, t in tensors().items()},
            "torch.float32 .*bfloat16 are accepted",
        ),
    ],
    ids=str,
)
def test_limits_of_the_kernels(changes: dict, words: str) -> None:
    problem(**changes)
    with pytest.raises(ValueError, match=words):
        problem(**changes, target="sm_90a")


def test_lengths_have_a_limit() -> None:
    long = half(1, 1, 1, D).expand(1, 2**30 + 1, 1, D)
    with pytest.raises(ValueError, match=r"k \(1, 1073741825, 1, 64\) .* at most 2\^30"):
        Problem.of(half(1, 1, 1, D), long, long, mods=NO_MODS)


@pytest.mark.parametrize(
    ("causal", "window", "left", "right"),
    [
        (False, None, None, None),
        (False, (-1, -1), None, None),
        (False, [None, 0], None, 0),
        (True, (-1, 0), None, 0),
        (True, (3, 2), 3, 0),
        (False, (np.int64(3), np.int32(2)), 3, 2),
        (False, (2**40, 2**31 - 1), SK, SQ),
        (True, (2**31 - 1, None), SK, 0),
    ],
)
def test_window(causal: bool, window: Any, left: int | None, right: int | None) -> None:
    bounds = problem(causal=causal, window=window).bounds
    assert (bounds.left, bounds.right) == (left, right)


def test_scale_takes_numbers_of_numpy() -> None:
    assert problem().scale == D**-0.5
    assert problem(scale=np.float32(0.5)).scale == 0.5
    assert problem(causal=np.bool_(True)).causal is True


# Layouts.


def test_ready_layouts_are_not_touched() -> None:
    whole = torch.zeros(3, 16, 6, 4, D, dtype=torch.bfloat16)
    expanded = whole[0, :, :, :1].expand(16, 6, 4, D)
    for tensor in (whole[0], whole[:, :, 2], whole[0].transpose(0, 1), expanded):
        assert layout_is_ready(tensor) and kernel_ready(tensor) is tensor


def test_a_stride_of_a_dimension_of_one_is_replaced_without_a_copy() -> None:
    store = torch.arange(5 * D, dtype=torch.bfloat16)
    for stride in (0, 3, 7):
        tensor = store.as_strided((1, 5, 1, D), (stride, D, stride, 1))
        ready = kernel_ready(tensor)
        assert ready.data_ptr() == tensor.data_ptr() and torch.equal(ready, tensor)
        assert all(step % 8 == 0 for step in ready.stride()[:-1])


@pytest.mark.parametrize("case", ["odd row", "odd address", "inner stride", "odd head"])
def test_other_layouts_are_copied(case: str) -> None:
    tensor = {
        "odd row": torch.randn(1, 5, 4, 65).bfloat16()[..., :D],
        "odd address": torch.randn(5 * 4 * D + 1).bfloat16()[1:].view(1, 5, 4, D),
        "inner stride": torch.randn(1, 5, 4, 2 * D).bfloat16()[..., ::2],
        "odd head": torch.randn(1, 5, 4, D + 4).bfloat16()[..., :D],
    }[case]
    ready = kernel_ready(tensor)
    assert not layout_is_ready(tensor) and layout_is_ready(ready)
    assert ready.data_ptr() != tensor.data_ptr() and torch.equal(ready, tensor)


def test_allocate_reads_no_data() -> None:
    asked = dataclasses.replace(problem(return_lse=True), device=torch.device("meta"))
    out, lse = allocate(asked)
    assert out.shape == (B, SQ, HQ, D) and out.dtype == torch.bfloat16 and out.is_contiguous()
    assert lse.shape == (B, HQ, SQ) and lse.dtype == torch.float32
    assert allocate(problem(), out)[0] is out and allocate(problem())[1] is None


def test_out_on_another_device() -> None:
    with pytest.raises(ValueError, match="is on meta, but q on cpu"):
        check_out(problem(), half(B, SQ, HQ, D).to("meta"))


# Captured tensors.


def test_a_captured_tensor_must_reach_as_far_as_its_index() -> None:
    for name, size in (("b", B), ("h", HQ), ("q", SQ), ("kv", SK)):
        for missing in (0, 1):
            table = torch.zeros(3, size - missing)

            def mod(score, b, h, q, kv, table=table, name=name):
                return score + table[0, {"b": b, "h": h, "q": q, "kv": kv}[name]]

            mods = Mods.of(mod, None)
            if not missing:
                problem(mods=mods)
                continue
            words = rf"captured tensor 0 of score_mod, \(3, {size - 1}\) torch.float32, is indexed by {name} in dimension 1, where it has {size - 1} elements; {size} are needed"  # fmt: skip # noqa: E501
            with pytest.raises(ValueError, match=words):
                problem(mods=mods)


def test_a_captured_tensor_must_be_on_the_device_of_q() -> None:
    table, scalar = torch.zeros(SK), torch.tensor(2.0)
    mods = Mods.of(None, lambda b, h, q, kv: table[kv] < scalar)
    on_gpu = dataclasses.replace(problem(), device=torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"0 of mask_mod, \(7,\) .* is on cpu, but q on cuda:0"):
        check_captured(on_gpu, "mask_mod", mods.mask_mod)
    check_captured(on_gpu, "score_mod", Mods.of(lambda s, b, h, q, kv: s * scalar, None).score_mod)
    elsewhere = torch.zeros(SK, device="meta")
    with pytest.raises(ValueError, match="is on meta, but q on cpu"):
        problem(mods=Mods.of(None, lambda b, h, q, kv: elsewhere[kv] > 0))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([half(SQ, HQ, D), half(SQ + 1, HQ, D)], layout=layout)
    with pytest.raises(ValueError, match="q is a nested tensor"):
        problem(q=nested)


def test_a_captured_tensor_that_int32_cannot_index() -> None:
    """Of the launch it was an error of another kind: "Out of bound extra[0][0].shape[1]"."""
    on_gpu = dataclasses.replace(problem(), device=torch.device("cuda", 0))
    wide = torch.zeros(1, 1, dtype=torch.uint8).expand(2, 2**31)

    class OnGpu:
        device, layout, shape, dtype = on_gpu.device, wide.layout, wide.shape, wide.dtype

        @staticmethod
        def numel() -> int:
            return wide.numel()

    traced = Mods.of(None, lambda b, h, q, kv: wide[b, kv] > 0).mask_mod
    with pytest.raises(ValueError, match=r"\(2, 2147483648\) .* more than 2147483647 elements"):
        check_captured(on_gpu, "mask_mod", traced._replace(captured=(OnGpu(),)))
    problem(mods=Mods(None, traced))  # on the CPU path torch indexes it


def test_a_captured_tensor_without_elements() -> None:
    table = torch.zeros(0)
    mods = Mods.of(lambda score, b, h, q, kv: score + table[q - kv], None)
    with pytest.raises(ValueError, match="has no element to read"):
        problem(mods=mods)
    problem(mods=mods, q=half(B, 0, HQ, D))


def test_a_captured_tensor_must_be_dense() -> None:
    table = torch.zeros(HQ).to_sparse()
    mods = Mods.of(lambda score, b, h, q, kv: score + table[h], None)
    with pytest.raises(ValueError, match="0 of score_mod, .* is torch.sparse_coo; a dense one"):
        problem(mods=mods)


# Plans.


def test_a_plan_holds_static_facts_only() -> None:
    def key(**changes: Any) -> str:
        return make_plan(problem(**changes, target="sm_90a"), NO_MODS, "sm_90a").key

    longer = {"k": half(B, 99, HK, D), "v": half(B, 99, HK, D)}
    same = [{}, longer, {"scale": 3.0}, {"deterministic": True}, {"window": (-1, None)}]
    assert len({key(**changes) for changes in same}) == 1
    assert key(window=(3, 0)) == key(window=(1000, 7))
    assert key(causal=True) == key(causal=True, window=(None, 7))
    one_head = {"k": half(B, SK, 1, D), "v": half(B, SK, 1, D)}
    different = [
        {"causal": True},
        {"return_lse": True},
        {"window": (3, None)},
        {"window": (None, 3)},
        one_head,
    ]
    different += [{name: tensor.half() for name, tensor in tensors().items()}]
    assert len({key(), *(key(**changes) for changes in different)}) == 1 + len(different)


def test_lengths_choose_a_kernel_by_their_class_alone() -> None:
    """Few queries, few keys, more: within a class no length does."""

    def key(queries: int, keys: int, ratio: int) -> str:
        asked = problem(
            q=half(1, queries, ratio, 128),
            k=half(1, keys, 1, 128),
            v=half(1, keys, 1, 128),
            target="sm_90a",
        )
        return make_plan(asked, NO_MODS, "sm_90a").key

    for ratio in (1, 8):
        decoding = {key(queries, keys, ratio) for queries in (1, 64) for keys in (1, 1024, 9000)}
        short = {key(queries, keys, ratio) for queries in (65, 5000) for keys in (1, 100, 1024)}
        longer = {key(queries, keys, ratio) for queries in (65, 5000) for keys in (1025, 9000)}
        assert len(decoding) == len(short) == len(longer) == 1
        assert short != longer and (decoding == longer) == (ratio == 1)


def test_query_heads_share_a_tile_where_queries_are_few() -> None:
    def packed(queries: int, heads: int, mods: Mods = NO_MODS, **options: Any) -> bool:
        asked = problem(q=half(B, queries, heads, D), mods=mods, target="sm_90a", **options)
        return make_plan(asked, mods, "sm_90a").config.packed

    assert packed(1, 4 * HK) and packed(64, 4 * HK)
    assert not packed(65, 4 * HK) and not packed(1, HK)
    assert not packed(1, 5 * HK)  # 5 divides no tile
    assert not packed(1, 4 * HK, Mods.of(lambda score, b, h, q, kv: score + h, None))
    assert not packed(1, 4 * HK, sinks=torch.zeros(4 * HK))


def test_a_target_without_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kernels for sm_90a, sm_100a, .*, not for sm_80"):
        make_plan(problem(), NO_MODS, "sm_80")


def test_configuration_rows_fit_the_machine() -> None:
    for (d, dv), _, _, config, why, *_ in FWD_SM90:
        assert why and config.tile_m % 64 == 0 and config.tile_n % 8 == 0
        registers = config.producer_registers, config.consumer_registers
        assert all(count % 8 == 0 for count in registers)
        pool = register_pool(128 * (1 + config.consumers))
        assert 128 * (registers[0] + config.consumers * registers[1]) <= pool
        elements = config.tile_m * max(d, dv) + config.kv_stages * config.tile_n * (d + dv)
        assert 2 * elements <= 226 * 1024, "1 KiB stays for barriers"


def test_function_transforms_are_refused() -> None:
    with pytest.raises(ValueError, match="q is inside a torch.func transform"):
        torch.vmap(lambda q: Problem.of(q, q, q, mods=NO_MODS))(half(3, B, SQ, HQ, D))
