"""The table of backward rows: every call gets one, and its kernels are sound."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import spills
from fa_cute.host import configs
from fa_cute.host.backward import plans_of
from fa_cute.host.backward_configs import BWD_SM90, BwdRow, bwd_sm90
from fa_cute.host.compile import build
from fa_cute.mods.derivative import differentiate
from fa_cute.mods.graph import Graph
from fa_cute.mods.trace import trace_score_mod
from fa_cute.plan import BACKWARD, BwdConfig, Plan, padded, register_pool
from variants.t5_relative_bias import t5_relative_bias

SHARED_MEMORY = 227 * 1024
ALL_HEAD_DIMS = range(configs.STEP, configs.LARGEST_HEAD_DIM + 1, configs.STEP)


def forward(head_dim: int, head_dim_v: int, *, causal: bool) -> Plan:
    """A plain forward plan."""
    return Plan(
        direction="forward",
        dtype="bfloat16",
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        gqa_ratio=1,
        causal=causal,
        window=(False, False),
        score_mod=None,
        mask_mod=None,
        return_lse=True,
        sinks=False,
        deterministic=False,
        target="sm_90a",
        config=configs.fwd_sm90(head_dim, head_dim_v, cut=causal, modified=False),
    )


def shared_memory(config: BwdConfig, width: int, width_v: int) -> int:
    """Bytes of K, V, Q, dO, dS, P if it is shared, and two numbers a query."""
    blocks = config.tile_kv * (width + width_v)
    blocks += config.stages * config.tile_q * (width + width_v)
    blocks += config.stages * config.tile_q * config.tile_kv * (1 + config.wide)
    return 2 * blocks + 8 * config.tile_q * config.stages


def test_every_head_dim_has_a_row() -> None:
    for dims in itertools.product(ALL_HEAD_DIMS, repeat=2):
        for cut, modified, heavy in itertools.product((False, True), (False, True), range(3)):
            config = bwd_sm90(*dims, cut=cut, modified=modified, heavy=heavy)
            widths = (padded(d, 64 if config.wide else 32) for d in dims)
            assert shared_memory(config, *widths) + 2048 <= SHARED_MEMORY, dims
            registers = config.producer_registers + config.consumers * config.consumer_registers
            assert 128 * registers <= register_pool(128 * (1 + config.consumers))


def test_the_passes_around_are_shared() -> None:
    """Masks, ratios and mods make no other kernels of the passes before and after."""
    plain, other = (
        plans_of(replace(forward(128, 128, causal=causal), gqa_ratio=ratio), **DIRECTION)
        for causal, ratio in ((False, 1), (True, 4))
    )
    assert plain.preprocess == other.preprocess and plain.postprocess == other.postprocess
    assert plain.main != other.main


DIRECTION = {"deterministic": False, "lse_gradient": False}


@pytest.mark.compile
@pytest.mark.parametrize(
    "row", [row for row in BWD_SM90 if not row.modified], ids=lambda row: str(row.head_dims)
)
def test_a_row_spills_nothing(row: BwdRow, tmp_path: Path) -> None:
    """Causal has all the masks of a plain call."""
    plans = plans_of(forward(*row.head_dims, causal=True), **DIRECTION)
    assert plans.main.config == row.config
    resources = build(plans.main, tmp_path).resources
    assert resources.spill_bytes == 0 and resources.serialised == 0
    assert resources.shared_memory <= SHARED_MEMORY


def learned_cap() -> Graph:
    """Its derivative holds the factor of the cap and that of the score."""
    cap = torch.tensor(12.0, requires_grad=True)
    return trace_score_mod(lambda s, b, h, q, kv: cap * torch.tanh(s / cap)).graph


def test_heavy_mods_have_a_row_of_their_own() -> None:
    def config(graph: Graph, listed: tuple[int, int] | None = None) -> BwdConfig:
        plan = replace(forward(128, 128, causal=True), score_mod=graph)
        derivative = differentiate(graph, frozenset(range(len(graph.captured))))
        return plans_of(plan, derivative=derivative, listed=listed, **DIRECTION).main.config

    table, factors = torch.zeros(32, 4), torch.zeros(4)
    light = trace_score_mod(t5_relative_bias(table)).graph
    scaled = trace_score_mod(lambda s, b, h, q, kv: s * factors[h]).graph
    (wide,) = (one.config for one in BWD_SM90 if one.heavy == 1)
    assert config(learned_cap()) == wide != config(light) == config(scaled)
    assert config(learned_cap(), listed=(64, 128)) == config(light)


@pytest.mark.compile
def test_a_heavy_mod_spills_nothing(tmp_path: Path) -> None:
    """1,364 bytes in the row of other mods."""
    graph = learned_cap()
    plan = replace(forward(128, 128, causal=True), score_mod=graph)
    options = {"derivative": differentiate(graph, frozenset((0,))), **DIRECTION}
    resources = build(plans_of(plan, **options).main, tmp_path).resources
    assert resources.spill_bytes == 0 and resources.serialised == 0


def short_vectors() -> Graph:
    """A dot of one of the query with one of the key."""
    u, w = torch.zeros(300, 12), torch.zeros(300, 12)
    return trace_score_mod(lambda s, b, h, q, kv: s + (u[q] * w[kv]).sum(-1)).graph


@pytest.mark.compile
@pytest.mark.parametrize("dim", [64, 128])
def test_short_vectors_spill_nothing(dim: int, tmp_path: Path) -> None:
    """140 and 820 bytes in the rows of other mods."""
    graph = short_vectors()
    plan = replace(forward(dim, dim, causal=True), score_mod=graph)
    options = {"derivative": differentiate(graph, frozenset((0, 1))), **DIRECTION}
    plans = plans_of(plan, **options)
    assert plans.main.config.wide
    resources = build(plans.main, tmp_path).resources
    assert resources.spill_bytes == 0 and resources.serialised == 0


@pytest.mark.compile
@pytest.mark.parametrize("bounds", ["causal", "full"])
@pytest.mark.parametrize(
    "mod",
    ["learned_slopes", "learned_factor", "learned_elements", "learned_rows_and_columns"],
)
def test_a_learned_mod_spills_nothing(mod: str, bounds: str) -> None:
    """36, 36, 112 and 0 bytes while sums were trees and what two of them need was kept."""
    assert spills.Case(mod, (128, 128), bounds, "sm_90a", BACKWARD).spilled()["spilled"] == 0


@pytest.mark.compile
@pytest.mark.parametrize("bounds", ["causal", "full"])
def test_a_gate_spills_little(bounds: str) -> None:
    """88 and 24 bytes while all shifts were read before there was a P."""
    assert spills.Case("gate", (128, 128), bounds, "sm_90a", BACKWARD).spilled()["spilled"] <= 16


@pytest.mark.compile
def test_a_learned_factor_is_not_serialised(tmp_path: Path) -> None:
    """dV waits for dS, so that the scores, P and dP fit."""
    factors = torch.zeros(4)
    graph = trace_score_mod(lambda s, b, h, q, kv: s * factors[h]).graph
    plan = replace(forward(128, 128, causal=True), score_mod=graph)
    options = {"derivative": differentiate(graph, frozenset((0,))), **DIRECTION}
    resources = build(plans_of(plan, **options).main, tmp_path).resources
    assert resources.serialised == 0 and resources.spill_bytes == 0


@pytest.mark.compile
@pytest.mark.parametrize(("dim", "deterministic"), [(64, True), (256, False)])
def test_a_learned_table_fits(dim: int, deterministic: bool, tmp_path: Path) -> None:
    """In registers, beside dK, dV, S and dP, also in fixed point; and in shared memory at 256."""
    graph = trace_score_mod(t5_relative_bias(torch.zeros(32, 4))).graph
    plan = replace(forward(dim, dim, causal=True), score_mod=graph)
    derivative = differentiate(graph, frozenset((0,)))
    options = {"deterministic": deterministic, "lse_gradient": False, "derivative": derivative}
    built = build(plans_of(plan, **options).main, tmp_path)
    assert built.resources.spill_bytes == 0 and built.resources.serialised == 0
