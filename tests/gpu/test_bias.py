"""A captured bias [..., q, kv] that TMA loads by tiles: against the oracle, and against the kernel
that reads the same bias element by element.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fa_cute
from fa_cute.host.planning import Mods

from .configurations import BIASES, UNTILED, Configuration
from .judging import DEVICE, Inputs, arguments, call, check, inputs, judge, planned
from .modifiers import dense

pytestmark = pytest.mark.gpu
LENGTHS = ((1, 1), (65, 65), (129, 200), (300, 129), (1, 513), (257, 640), (1000, 1000))
FAR = 2**31 + 64  # elements, more than an int32 counts


def run_time(configuration: Configuration, x: Inputs) -> dict[str, Any]:
    """What a call gives beside the mods."""
    found: dict[str, Any] = {}
    if any(configuration.window):
        left, right = configuration.window
        found["window"] = (100 if left else None, 70 if right else None)
    if configuration.sinks:
        found["sinks"] = torch.linspace(-3.0, 3.0, x.q.shape[2], device=DEVICE)
    return found


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", BIASES)
def test_against_the_oracle(name: str, lengths: tuple[int, int]) -> None:
    configuration = BIASES[name]
    x = inputs(configuration, lengths, heads_k=2)
    options = arguments(configuration, x, **run_time(configuration, x))
    assert Mods.of(options["score_mod"], None).bias is not None
    result = call(configuration, x, **planned(configuration, x, options))
    torch.cuda.synchronize()
    judge(configuration, x, options, result)


@pytest.mark.parametrize("length", [2046, 4096])
@pytest.mark.parametrize(
    "name",
    ["d128-bf16", "d128-fp32-causal", "d64-bf16-causal", "d256-fp32", "d256-fp32-without-lse"],
)
def test_long(name: str, length: int) -> None:
    """Rings that wrap many times, and more tiles than SMs.

    And the same bits again: a box that the next overwrites while it is read shows there first.
    """
    configuration = BIASES[name]
    x = inputs(configuration, (length, length), batch=3, kind="outliers")
    out, _ = check(configuration, x)
    options = arguments(configuration, x)
    for _ in range(7):
        assert torch.equal(call(configuration, x, **options)[0], out)


@pytest.mark.parametrize("lengths", [(129, 200), (1000, 1000), (300, 129)], ids=str)
@pytest.mark.parametrize("name", UNTILED)
def test_as_element_by_element(name: str, lengths: tuple[int, int]) -> None:
    """Bit for bit where both kernels have the same tiles."""
    x = inputs(BIASES[name], lengths, heads_k=2)
    results, tiles = [], set()
    for members, slot in ((BIASES, 0), (UNTILED, None)):
        config = members[name].compile().plan.config
        tiles.add((config.tile_m, config.tile_n))
        options = arguments(members[name], x, **run_time(members[name], x))
        assert Mods.of(options["score_mod"], None).bias == slot
        results.append(call(members[name], x, **options))
        judge(members[name], x, options, results[-1])
    if len(tiles) == 1:
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def _layouts(table: torch.Tensor) -> dict[str, tuple[torch.Tensor, bool]]:
    """A bias (H, Sq, Sk) in other places, and whether TMA can load it there."""
    heads, rows, columns = table.shape
    inside = torch.full((heads + 2, rows + 8, columns + 16), torch.nan, device=table.device)
    inside = inside.to(table.dtype)
    inside[1:-1, 8:, 8:-8] = table
    moved = torch.cat([table.new_zeros(1), table.flatten()])[1:].view(table.shape)
    return {
        "inside": (inside[1:-1, 8:, 8:-8], True),
        "heads inside": (table.transpose(0, 1).contiguous().transpose(0, 1), True),
        "one head for all": (table[:1].expand(table.shape), True),
        "one row for all": (table[:, :1].expand(table.shape), True),
        "moved": (moved, False),
        "turned": (table.transpose(1, 2).contiguous().transpose(1, 2), False),
        "one column for all": (table[..., :1].expand(table.shape), False),
    }


def test_layouts_in_turn() -> None:
    """Each call gets the kernel that its bias can have, whatever was called before."""
    configuration = BIASES["d128-bf16"]
    x = inputs(configuration, (200, 264), heads_k=3)
    generator = torch.Generator(DEVICE).manual_seed(3)
    table = torch.randn((3, 200, 264), generator=generator, device=DEVICE).bfloat16()
    layouts = list(_layouts(table).items())
    for name, (bias, tiled) in layouts + layouts[::-1]:
        options = {"causal": False, "score_mod": lambda s, b, h, q, kv, t=bias: s + t[h, q, kv]}
        assert (Mods.of(options["score_mod"], None).bias == 0) == tiled, name
        judge(configuration, x, options, call(configuration, x, **options))


def test_contents_are_read_at_launch() -> None:
    configuration = BIASES["d128-bf16"]
    x = inputs(configuration, (129, 200))
    bias = torch.zeros((1, 129, 200), device=DEVICE, dtype=torch.bfloat16)
    options = {"causal": False, "score_mod": lambda s, b, h, q, kv: s + bias[h, q, kv]}
    for column in (7, 150):
        bias.zero_()
        bias[..., column] = 300.0
        out, _ = call(configuration, x, **options)
        assert torch.equal(out, x.v[:, column : column + 1].expand(out.shape))


def test_a_bias_past_32_bits() -> None:
    """Heads of it lie more than 2^31 elements apart."""
    configuration = BIASES["d128-bf16"]
    x = inputs(configuration, (129, 200), heads_k=2)
    near = arguments(configuration, x)
    storage = torch.empty(FAR + 129 * 200, device=DEVICE, dtype=torch.bfloat16)
    far = storage.as_strided((2, 129, 200), (FAR, 200, 1))
    far.copy_(torch.randn((2, 129, 200), device=DEVICE))
    options = near | {"score_mod": lambda s, b, h, q, kv: s + far[h, q, kv]}
    assert Mods.of(options["score_mod"], None).bias == 0
    judge(configuration, x, options, call(configuration, x, **options))


def test_gradients_are_those_of_the_other_path() -> None:
    """The backward reads the bias element by element; its forward's kernel is either one."""
    name, lengths = "d128-bf16", (129, 200)
    found = []
    for configuration in (BIASES[name], UNTILED[name]):
        x = inputs(configuration, lengths, heads_k=2)
        leaves = Inputs(*(t.clone().requires_grad_() for t in x))
        options = arguments(configuration, x)
        out = fa_cute.attention(*leaves, **options, deterministic=True)
        generator = torch.Generator(DEVICE).manual_seed(11)
        out.backward(torch.randn(out.shape, generator=generator, device=DEVICE).to(out.dtype))
        found.append([t.grad for t in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_gradient_of_a_bias() -> None:
    """A bias that requires one gets it, beside the forward's TMA."""
    x = inputs(BIASES["d128-bf16"], (129, 200), heads_k=2)
    bias = torch.randn((2, 129, 200), device=DEVICE).bfloat16().requires_grad_()
    grad = torch.randn(x.q.shape, device=DEVICE)

    def gradient(attention: Any, tensors: Any, of: torch.Tensor) -> torch.Tensor:
        out = attention(*tensors, score_mod=lambda s, b, h, q, kv: s + of[h, q, kv])
        return torch.autograd.grad(out, of, grad.to(out.dtype))[0]

    assert Mods.of(lambda s, b, h, q, kv: s + bias[h, q, kv], None).bias == 0
    found = gradient(fa_cute.attention, x, bias)
    right = gradient(fa_cute.reference.attention, x, bias.detach().double().requires_grad_())
    assert (found.double() - right).abs().max() <= 0.02 * right.abs().max()


def test_dense_builds_what_it_says() -> None:
    shape = inputs(BIASES["d128-bf16"], (33, 40)).shape
    for lead, tiled in (("h", True), ("", False)):
        mods = dense(lead, "bfloat16", tiled=tiled)(DEVICE, shape)
        assert Mods.of(mods["score_mod"], None).bias == (0 if tiled else None)
