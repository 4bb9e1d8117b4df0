"""``bench/trees.py``: trees of one process keep their modules apart, and give ours back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import fa_cute
from bench.cases import Case
from bench.trees import Tree, call_of, main

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("dout", [False, True], ids=["forward", "backward"])
def test_two_trees_of_one_process(dout: bool, tmp_path: Path) -> None:
    """The other's forward gives other numbers, so each call is its own tree's."""
    (tmp_path / "fa_cute").mkdir()
    scaled = "from fa_cute.late import two\n\n\ndef attention(q, k, v, **options):\n"
    (tmp_path / "fa_cute" / "__init__.py").write_text(scaled + "    return two(q * v)\n")
    (tmp_path / "fa_cute" / "late.py").write_text("def two(x):\n    return 2 * x\n")
    case = Case(64, 96, causal=True, heads=2, heads_kv=2, batch=1, dtype="float32")
    q, k, v = (x.requires_grad_() for x in case.tensors("cpu"))
    inputs = (q, k, v, torch.randn(q.shape)) if dout else (q, k, v)
    trees, path = [Tree("ours", ROOT), Tree("other", tmp_path)], list(sys.path)
    if dout:  # the other's k has no gradient
        with pytest.raises(RuntimeError, match="not have been used"):
            call_of(trees[1], case, inputs, {})()
    for tree in trees[: 2 - dout]:
        call = call_of(tree, case, inputs, {})
        late = "fa_cute.late" if tree.name == "other" else "fa_cute.api"
        with tree.entered() as package:
            kept = sys.modules[late]
            assert package is not fa_cute and Path(package.__file__).is_relative_to(tree.folder)
            found = call()
        with tree.entered() as again:
            assert again is package and sys.modules[late] is kept
        if tree.name == "other":
            assert torch.equal(found, 2 * q * v)
        else:
            out = fa_cute.attention(q, k, v, causal=True)
            right = torch.autograd.grad(out, (q, k, v), inputs[3]) if dout else (out,)
            for a, b in zip(found if dout else (found,), right, strict=True):
                assert torch.equal(a, b)
        assert sys.modules["fa_cute"] is fa_cute and sys.path == path


def test_a_call_has_its_options(tmp_path: Path) -> None:
    (tmp_path / "fa_cute").mkdir()
    told = "def attention(q, k, v, **options):\n    return options\n"
    (tmp_path / "fa_cute" / "__init__.py").write_text(told)
    case = Case(64, 96, causal=True, heads=2, heads_kv=2, batch=1, dtype="float32")
    found = call_of(Tree("x", tmp_path), case, tuple(case.tensors("cpu")), {"deterministic": True})
    assert found() == {"causal": True, "deterministic": True}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["../old", "new=."], "a tree is NAME=FOLDER, not '../old'"),
        (["old=.", "old=."], "each tree needs a name of its own, not old, old"),
        (["old=.", "--which=forward", "--deterministic"], "--deterministic is about the backward"),
        (["old=.", "--peers=fa4"], "unrecognized arguments: --peers=fa4"),
        (["old=.", "--compile-only"], "unrecognized arguments: --compile-only"),
    ],
    ids=str,
)
def test_flags_that_mean_nothing_here(
    flags: list[str], told: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        main(flags)
    assert told in capsys.readouterr().err


def test_a_folder_without_the_package(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no package fa_cute; give a source tree's folder"):
        Tree("new", tmp_path)
