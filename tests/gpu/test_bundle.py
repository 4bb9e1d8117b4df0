"""A bundle on a host that has no compiler: its kernels run, and give what they gave here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fa_cute
from fa_cute.bundle import bundle

from .. import bare_host

pytestmark = pytest.mark.gpu

PROGRAM = """
import importlib.util, sys
import torch, fa_cute
absent = importlib.util.find_spec("cutlass") is None
kernels = fa_cute.load_bundle({path!r})
q, k, v, out = torch.load({tensors!r}, map_location="cuda")
found = fa_cute.attention(q, k, v, causal=True)
print(absent, len(kernels), torch.equal(found, out), "cutlass" in sys.modules)
q.requires_grad_()
fa_cute.attention(q, k, v, causal=True).float().sum().backward()
"""


def test_a_bundle_runs_without_the_compiler(tmp_path: Path) -> None:
    q, k, v = (
        torch.randn(2, length, 4, 64, device="cuda", dtype=torch.bfloat16)
        for length in (300, 1100, 1100)
    )
    out = fa_cute.attention(q, k, v, causal=True)
    keys = [fa_cute.compile(head_dim=64, dtype="bfloat16", causal=True, target="sm_90a").key]
    path, tensors = tmp_path / "kernels.fa", tmp_path / "tensors.pt"
    bundle(path, keys=keys)
    torch.save([q, k, v, out], tensors)
    program = PROGRAM.format(path=str(path), tensors=str(tensors))
    site = bare_host.site(tmp_path / "site")
    forward = program[: program.index("q.requires_grad_")]
    assert bare_host.run(site, forward).split() == ["True", "1", "True", "False"]
    with pytest.raises(AssertionError, match="nor in a loaded bundle"):
        bare_host.run(site, program)
