"""The table of forward rows: which one a call gets, and that each makes a sound kernel."""

from __future__ import annotations

import itertools

import pytest
import torch

import fa_cute
from fa_cute.host import configs
from fa_cute.host.configs import FWD_SM90, Row, fwd_sm90
from fa_cute.plan import padded, register_pool

SHARED_MEMORY = 227 * 1024
ALL_HEAD_DIMS = range(configs.STEP, configs.LARGEST_HEAD_DIM + 1, configs.STEP)


def calls(row: Row) -> list[tuple[str, bool, bool]]:
    """The (dtype, cut, modified) of calls with the row's own head dims that get it.

    Those that take more registers come later.
    """
    ways = itertools.product(("bfloat16", "float16"), (False, True), (False, True))
    return [
        (dtype, cut, modified)
        for dtype, cut, modified in ways
        if fwd_sm90(
            *row.head_dims,
            cut=cut,
            modified=modified,
            dtype=dtype,
            few_keys=row.config.few_keys,
            light=row.light,
            presumed=row.presumed,
            scored=row.scored,
            sought=row.sought,
        )
        is row.config
    ]


def test_every_head_dim_has_a_row() -> None:
    for dims in itertools.product(ALL_HEAD_DIMS, repeat=2):
        for cut, modified in itertools.product((False, True), repeat=2):
            config = fwd_sm90(*dims, cut=cut, modified=modified)
            width, width_v = map(padded, dims)
            elements = config.tile_m * width * config.q_stages
            elements += config.tile_n * (width + width_v) * config.kv_stages
            assert 2 * elements + 2048 <= SHARED_MEMORY, dims
            consumers = config.consumers * config.consumer_registers
            pool = register_pool(128 * (1 + config.consumers))
            assert 128 * (config.producer_registers + consumers) <= pool


def test_masks_have_one_tile() -> None:
    """Whatever the bounds and the dtype of a call: lists are made before they are known."""
    for dims in itertools.product(ALL_HEAD_DIMS[::4], repeat=2):
        found = {
            (config.tile_m, config.tile_n)
            for cut, dtype in itertools.product((False, True), ("bfloat16", "float16"))
            for config in [fwd_sm90(*dims, cut=cut, modified=True, dtype=dtype)]
        }
        assert len(found) == 1, (dims, found)


@pytest.mark.parametrize(
    ("dims", "row"),
    [
        ((8, 8), (64, 64)),
        ((64, 72), (96, 96)),
        ((64, 128), (128, 128)),
        ((128, 96), (128, 128)),
        ((192, 128), (192, 128)),
        ((136, 64), (160, 128)),
        ((168, 64), (192, 96)),
        ((168, 104), (192, 128)),
        ((128, 192), (192, 192)),
        ((200, 8), (256, 256)),
    ],
)
def test_the_narrowest_row_that_holds_both(dims: tuple[int, int], row: tuple[int, int]) -> None:
    for cut, modified in itertools.product((False, True), repeat=2):
        options = {"cut": cut, "modified": modified}
        assert fwd_sm90(*dims, **options) is fwd_sm90(*row, **options)


@pytest.mark.parametrize("dims", [(12, 64), (64, 4), (264, 64), (64, 512), (0, 64)], ids=str)
def test_other_head_dims_have_none(dims: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="each may be one of the multiples of 8 up to 256"):
        fwd_sm90(*dims, cut=False, modified=False)


def test_every_row_is_used() -> None:
    assert all(calls(row) for row in FWD_SM90)


@pytest.mark.compile
@pytest.mark.parametrize("at", range(len(FWD_SM90)), ids=lambda at: str(FWD_SM90[at].head_dims))
def test_no_row_spills_or_serialises(at: int) -> None:
    """Each row's kernel for the most work: fp16, bounds on both sides, a softcap, sinks, lse.

    Where there is a row for light score_mods, the others have a mask_mod too, or, if there is one
    for score_mods alone, that loads by query.
    """
    row = FWD_SM90[at]
    dtype, cut, modified = calls(row)[-1]
    lit = any(other.light and other.head_dims == row.head_dims for other in FWD_SM90)
    shared = modified and not (row.light or row.scored) and lit
    by_query = torch.zeros(1 << 14)

    def score_mod(s, b, h, q, kv):
        capped = 30 * torch.tanh(s / 30)
        return capped + by_query[q] if row.scored else capped

    kernel = fa_cute.compile(
        head_dim=row.head_dims[0],
        head_dim_v=row.head_dims[1],
        dtype=dtype,
        causal=cut,
        window=(cut, False),
        score_mod=score_mod if modified else None,
        mask_mod=(lambda b, h, q, kv: q + kv != 3) if shared else None,
        return_lse=not row.presumed,
        sinks=True,
        few_keys=row.config.few_keys,
        target="sm_90a",
    )
    assert kernel.plan.config == row.config
    assert kernel.resources.spill_bytes == 0 and kernel.resources.serialised == 0
    assert kernel.resources.shared_memory <= SHARED_MEMORY


@pytest.mark.compile
def test_a_row_that_needs_too_many_registers_is_told() -> None:
    """d96 in tiles of 192 x 128: ptxas spills, and says that it serialises the wgmmas."""
    from dataclasses import replace

    from fa_cute.configuration import Configuration
    from fa_cute.host.compile import compiled
    from fa_cute.plan import FwdConfig

    plan, _ = Configuration(head_dim=96, dtype="bfloat16", target="sm_90a").plan()
    kernel = compiled(replace(plan, config=FwdConfig(192, 128, 2, 2, 32, 160)))
    assert kernel.resources.spill_bytes > 0 and kernel.resources.serialised > 0


def test_registers_that_no_launch_has() -> None:
    """32 + 2 x 240 a thread is what an SM has, and hangs: 384 threads are launched with 168."""
    from fa_cute.device.topology import Role, Topology

    assert (register_pool(384), register_pool(512)) == (64_512, 65_536)
    roles = Role("load", 1, 32, 1, ""), Role("math", 2, 240, 4, "")
    with pytest.raises(AssertionError, match="= 65536 registers; 384 threads .* with 64512"):
        Topology(roles, ())
