"""The kernel of sm_100 on a Hopper GPU, its verbs in their second implementation.

What this cannot see is listed in docs/blackwell.md: tcgen05 itself, its fences and waits,
descriptors, allocation.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fa_cute
from fa_cute import variants
from fa_cute.device import ring
from fa_cute.device.correction_sm100 import Correction
from fa_cute.host import compile as compiling
from fa_cute.kernels import fwd_sm100

from .configurations import BROKEN, HOSTED, variant
from .hosting import hosted as hosted
from .judging import Inputs, arguments, call, check, inputs, judge
from .modifiers import Shape

pytestmark = pytest.mark.gpu
LENGTHS = ((1, 1), (63, 300), (257, 128), (513, 700), (300, 100), (1000, 1000))


def _run_time(name: str, x: Inputs, window: tuple[int, int] = (100, 30)) -> dict:
    configuration = HOSTED[name]
    found = {}
    if any(configuration.window):
        pairs = zip(configuration.window, window, strict=True)
        found["window"] = tuple(bound if there else None for there, bound in pairs)
    if configuration.sinks:
        found["sinks"] = torch.linspace(-1, 3, x.q.shape[2], device=x.q.device)
    return found


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", HOSTED)
def test_forward(name: str, lengths: tuple[int, int]) -> None:
    """Lengths inside and at the ends of tiles; causal with Sq > Sk, whose first rows see none."""
    kind = "outliers" if lengths[0] > 100 else "normal"
    x = inputs(HOSTED[name], lengths, heads_k=2 if lengths[0] < 1000 else 1, kind=kind)
    check(HOSTED[name], x, **_run_time(name, x))


@pytest.mark.parametrize("window", [(0, 0), (127, 128), (300, 700)], ids=str)
@pytest.mark.parametrize("name", ["64-window", "64-left"])
def test_windows(name: str, window: tuple[int, int]) -> None:
    x = inputs(HOSTED[name], (700, 500))
    check(HOSTED[name], x, **_run_time(name, x, window))


@pytest.mark.parametrize("name", sorted(variants.ALL))
def test_variants(name: str) -> None:
    configuration = variant(name)
    check(configuration, inputs(configuration, (300, 700), batch=1, heads_k=Shape().heads))


def test_scores_that_rise() -> None:
    """Each block's maximum is far above those before it: every row is rescaled in every block."""
    x = _rising(inputs(HOSTED["128-full"], (300, 1000), batch=1))
    check(HOSTED["128-full"], x)


def test_repeats() -> None:
    """100 launches of more tiles than CTAs: one result, bit for bit."""
    x = inputs(HOSTED["64-causal"], (1200, 1200), batch=2, heads_k=6)
    first = call(HOSTED["64-causal"], x, causal=True)
    for _ in range(100):
        again = call(HOSTED["64-causal"], x, causal=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def _rising(x: Inputs) -> Inputs:
    """Keys whose scores grow towards the first: blocks are visited from the last."""
    growth = torch.linspace(6, 0.1, x.k.shape[1], device=x.k.device)[:, None, None]
    return x._replace(k=(x.k * growth).to(x.k.dtype))


def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The softmax does not wait for S.

    That the MMA's warp does not wait for P stays unseen here: its hosted products are so slow that
    P is always there (on an H200 this test passed as if nothing were broken). With one block of
    keys the softmax arrives nowhere twice, so nothing hangs.
    """
    take = ring.Ring.take

    def without(self: ring.Ring) -> ring.Slot:
        if self.spec.name != "s":
            return take(self)
        slot = ring.Slot(self.index, None, None)
        self.slots.append(slot)
        self._advance()
        return slot

    monkeypatch.setattr(ring.Ring, "take", without)


def _wrong_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """O of the second tile begins in O of the first."""
    columns = fwd_sm100.columns

    def shifted(plan: object) -> dict:
        found = columns(plan)
        return found | {"o1": found["o1"]._replace(first=found["o0"].first + 16)}

    monkeypatch.setattr(fwd_sm100, "columns", shifted)


def _no_rescale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The correction leaves O as it is."""
    monkeypatch.setattr(Correction, "multiply_row", lambda self, *given: None)


@pytest.mark.parametrize(
    ("damage", "keys"), [(_no_wait, 100), (_wrong_columns, 1000), (_no_rescale, 1000)]
)
def test_a_broken_kernel_is_seen(
    damage: Callable, keys: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A dropped wait, a wrong column range and a missing rescale: each gives wrong results."""
    monkeypatch.setenv("FA_CUTE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "_memory", {})
    damage(monkeypatch)
    x = _rising(inputs(BROKEN, (300, keys), batch=1))
    out = fa_cute.attention(*x)
    torch.cuda.synchronize()
    with pytest.raises(AssertionError):
        _hold(x, out)


@pytest.mark.parametrize("keys", [100, 1000])
def test_the_unbroken_kernel_is_right(
    keys: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same inputs and the same judge, without damage."""
    monkeypatch.setenv("FA_CUTE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "_memory", {})
    x = _rising(inputs(BROKEN, (300, keys), batch=1))
    _hold(x, fa_cute.attention(*x))


def _hold(x: Inputs, out: torch.Tensor) -> None:
    judge(BROKEN, x, arguments(BROKEN, x), (out, None))
