"""Every file in variants/: on the CPU path beside the oracle, and compiled for sm_90a."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from fa_cute.variants import Shape

import fa_cute
from fa_cute import reference, variants

FOLDER = Path(variants.__file__).parent


def _inputs(shape: Shape, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v with two query heads a key/value head; one element in fifty is ten times as large."""
    generator = torch.Generator().manual_seed(0)
    batch, heads, seqlen_q, seqlen_k = shape
    sizes = [(seqlen_q, heads), (seqlen_k, heads // 2), (seqlen_k, heads // 2)]
    made = []
    for length, count in sizes:
        x = torch.randn(batch, length, count, 32, generator=generator, dtype=dtype)
        outlier = torch.rand(x.shape, generator=generator) < 0.02
        made.append(torch.where(outlier, 10 * x, x))
    return made


def test_all_are_found() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert (
        set(variants.ALL)
        == files
        >= {
            *("alibi", "causal", "sliding_window", "softcap", "prefix_lm", "document"),
            *("t5_relative_bias", "dilated"),
        }
    )


@pytest.mark.parametrize("name", variants.ALL)
def test_a_variant_is_a_short_file(name: str) -> None:
    """At most 40 lines: a docstring with its source, and one function of the file's name."""
    text = (FOLDER / f"{name}.py").read_text()
    assert 13 <= text.count("\n") <= 40
    assert text.count("\ndef ") == 1 and f"\ndef {name}(" in text
    assert any(f", 20{year:02}" in text for year in range(100)), "no source"


@pytest.mark.parametrize("lengths", [(70, 70), (33, 300)], ids=str)
@pytest.mark.parametrize("name", variants.ALL)
def test_on_the_cpu(name: str, lengths: tuple[int, int]) -> None:
    shape = Shape(2, 4, *lengths)
    mods = variants.ALL[name].build("cpu", shape)
    q, k, v = _inputs(shape, torch.float32)
    out, lse = fa_cute.attention(q, k, v, return_lse=True, **mods)
    right, right_lse = reference.attention(q, k, v, return_lse=True, **mods)
    assert torch.isfinite(right).all()
    torch.testing.assert_close(out.double(), right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-4)
    plain = fa_cute.attention(q, k, v)
    assert (out - plain).abs().max() > 0.05, "the variant changes nothing"


@pytest.mark.compile
@pytest.mark.parametrize("name", variants.ALL)
def test_compiles_for_hopper(name: str) -> None:
    """Without a GPU; the captured tensors need no memory for it."""
    mods = variants.ALL[name].build("meta", Shape())
    kernel = fa_cute.compile(head_dim=128, dtype=torch.bfloat16, target="sm_90a", **mods)
    assert kernel.resources.spill_bytes == 0
    again = fa_cute.compile(head_dim=128, dtype=torch.bfloat16, target="sm_90a", **mods)
    assert again.key == kernel.key and again.source == "memory"


def test_alibis_slopes() -> None:
    """The paper's slopes for 8 heads: 1/2, 1/4, ..., 1/256."""
    mod = variants.ALL["alibi"].build("cpu", Shape(heads=8))["score_mod"]
    zero, one = torch.tensor(0), torch.tensor(1)
    for h in range(8):
        penalty = mod(torch.tensor(0.0), zero, torch.tensor(h), one, zero)
        assert penalty.item() == pytest.approx(-(2.0 ** -(h + 1)))


def test_t5s_buckets() -> None:
    """The bucket of every distance is T5's: 8 exact, then logarithmic up to 128, each way."""
    table = torch.arange(32.0)[:, None]
    mod = variants.t5_relative_bias.t5_relative_bias(table)
    zero = torch.tensor(0)
    for distance in range(-300, 300):
        n = abs(distance)
        # 8 (n / 8) ** 2 = 2 ** (3 + bucket): in integers, so that no rounding can move a border.
        far = 8 + next((i for i in range(8) if n * n < 64 * 2 ** (i + 1)), 7)
        bucket = (n if n < 8 else far) + (16 if distance > 0 else 0)
        bias = mod(torch.tensor(0.0), zero, zero, torch.tensor(400), torch.tensor(400 + distance))
        assert bias.item() == bucket, distance


def test_softcap_stays_under_its_cap() -> None:
    mod = variants.ALL["softcap"].build("cpu", Shape())["score_mod"]
    score = torch.tensor([-1e4, 0.0, 1.0, 1e4])
    capped = mod(score, *([torch.tensor(0)] * 4))
    right = torch.tensor([-50.0, 0.0, 50 * math.tanh(0.02), 50.0])
    torch.testing.assert_close(capped, right)
