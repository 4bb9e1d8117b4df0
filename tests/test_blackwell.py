"""The forward on sm_100 without one: ledgers, the model, and every row compiled and counted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fa_cute import model
from fa_cute.configuration import Configuration
from fa_cute.device import tmem
from fa_cute.host import compile as compiling
from fa_cute.host.configs import FWD_SM100
from fa_cute.kernels import fwd_sm100
from fa_cute.plan import Plan

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
    wanted = (r"\btcgen05\.mma", r"\bex2\.approx", r"\bfma\.rn\.f32x2")
    return model.Counts(*(len(re.findall(pattern, ptx)) for pattern in wanted))


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
def test_ledgers(head_dims: tuple[int, int]) -> None:
    """Columns and registers of a row fit: the topology and the layout refuse what does not."""
    own = plan(head_dims)
    ranges = [r for r in fwd_sm100.columns(own).values() if not r.name.startswith("p")]
    ends = [r.first + r.count for r in ranges]
    assert [r.first for r in ranges] == [0, *ends[:-1]]
    assert sum(r.count for r in ranges) <= tmem.COLUMNS
    assert fwd_sm100.topology(own).threads == 128 * (2 + own.config.q_tiles)


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
    config = plan((128, 128)).config
    two = model.cycles(config, 128, 128, emulated=0)
    assert two[:3] == (2048, 1536, 2048)
    assert tuple(x / 2 for x in two) == (1024, 768, 1024)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("head_dims", "target", "options"),
    [(row, "sm_100a", {"causal": i % 2 == 0}) for i, row in enumerate(ROWS)]
    + [((96, 96), "sm_100a", {"causal": True})]
    + [((128, 128), "sm_103a", {"causal": True, "return_lse": True})],
    ids=str,
)
def test_native(head_dims: tuple, target: str, options: dict, tmp_path: Path) -> None:
    """No spill under setmaxnreg, and the instructions that the plan says, no more and no fewer."""
    own = plan(head_dims, target, **options)
    found = compiling.listing(own, tmp_path)
    assert found.resources.spill_bytes == 0
    assert found.resources.shared_memory <= 232_448
    assert counted(found.ptx) == model.expected(own)
    assert len(re.findall("setmaxnreg", found.ptx)) == 3
