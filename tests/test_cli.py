"""The command line: what it prints, and its exit status."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fa_cute
from fa_cute import demo, reference
from fa_cute.cli import main
from fa_cute.configuration import Configuration
from fa_cute.host import cache
from fa_cute.host import compile as compiling
from fa_cute.plan import Plan

ARGUMENTS = {"head_dim": 128, "dtype": "bfloat16", "target": "sm_90a", "gqa_ratio": 4}


@pytest.fixture
def two_kernels(builds: Callable[[], int]) -> list[str]:
    """The keys of a plain and of a softcapped kernel in the cache."""
    softcap, _ = Configuration(**ARGUMENTS, score_mod=_softcap).plan()
    return [compiling.compiled(plan).key for plan in (_plain(), softcap)]


def _plain() -> Plan:
    return Configuration(**ARGUMENTS, causal=True, window=(True, False)).plan()[0]


def _softcap(score, b, h, q, kv):
    return 30.5 * torch.tanh(score / 30.5)


def test_the_list_says_what_is_kept(two_kernels: list[str], capsys: pytest.CaptureFixture) -> None:
    compiling.forget()
    compiling.compiled(_plain())
    assert main(["cache"]) == 0
    head, names, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("2 kernels") and str(cache.folder()) in head
    assert names.split() == ["key", "variant", "plan", "target", "size", "age", "used", "hits"]
    plain = next(row for row in rows if row.startswith(two_kernels[0][:12]))
    assert "plain" in plain and "d128 gqa4 causal window(True, False)" in plain
    assert plain.split()[-1] == "1" and "sm_90a cu" in plain
    capped = next(row for row in rows if row.startswith(two_kernels[1][:12]))
    assert "softcap" in capped and capped.split()[-1] == "0"


def test_explain_a_key(two_kernels: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(["cache", "explain", two_kernels[0][:10]]) == 0
    text = capsys.readouterr().out
    assert f"key {two_kernels[0]}" in text and "gqa_ratio" in text and "registers" in text
    assert main(["cache", "explain", "zz"]) == 1
    assert "0 kernels have a key that starts with 'zz'" in capsys.readouterr().err


def test_prune_and_clear(two_kernels: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(["cache", "prune", "--to", "1G"]) == 0
    assert main(["cache", "prune", "--to", "0"]) == 0
    assert main(["cache", "clear"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("dropped 0") and lines[1].startswith("dropped 2")
    assert lines[2] == "dropped 0 kernels"


def test_compile_prints_the_key_and_the_resources(
    builds: Callable[[], int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = tmp_path / "mine.py"
    source.write_text("def double(score, b, h, q, kv):\n    return score * 2\n")
    command = ["compile", "--head-dim", "64", "--causal", "--score-mod", f"{source}:double"]
    assert main(command) == 0
    key, *words = capsys.readouterr().out.split()
    assert words[:3] == ["sm_90a", "compiled", "in"] and builds() == 1
    assert (cache.folder() / f"{key}.so").exists()


def test_an_error_is_a_sentence_and_a_status(capsys: pytest.CaptureFixture) -> None:
    assert main(["compile", "--head-dim", "97"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("fa-cute: ") and "97" in error and "Traceback" not in error
    assert main(["explain", "--dtype", "tf32"]) == 1
    assert "dtype tf32: kernels take bfloat16 and float16" in capsys.readouterr().err
    assert main(["explain", "--score-mod", "no_module:mod"]) == 1
    assert "'no_module:mod' names no module" in capsys.readouterr().err
    assert main(["compile", "--workers", "2"]) == 1
    assert "--workers compile what --from lists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"), [("--gqa-ratio", "0"), ("--head-dim", "-8"), ("--head-dim-v", "0")]
)
def test_explain_names_a_wrong_size(option: str, value: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", option, value]) == 1
    assert capsys.readouterr().err == f"fa-cute: {option} is {value}; it is 1 or more\n"


GRAPH = {"nodes": [["q", [], "int32", 1, None]], "result": 0, "captured": [], "scalars": []}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"window": 3}, "window 3: two booleans"),
        ({"mask_mod": {"nodes": 3}}, "configuration 0: mask_mod is no graph"),
        ({"mask_mod": {**GRAPH, "result": 5}}, "a result is not among its 1 nodes"),
        ({"mask_mod": {**GRAPH, "nodes": [["not", [0], "bool", 1]]}}, "which are not before it"),
        ({"score_mod": [1]}, "score_mod is no graph"),
    ],
)
def test_a_list_of_configurations_that_is_none(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps([{**ARGUMENTS, **changes}]))
    assert main(["compile", "--from", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("fa-cute: ") and said in error
    path.write_bytes(b"\xe4\xff")
    assert main(["compile", "--from", str(path)]) == 1
    assert f"{path} is no JSON" in capsys.readouterr().err


def test_a_bundle_holds_what_was_asked_for(
    two_kernels: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = str(tmp_path / "kernels.zip")
    assert main(["bundle", out, two_kernels[0][:8], "zz"]) == 1
    assert "has a key that starts 'zz'" in capsys.readouterr().err and not Path(out).exists()
    assert main(["bundle", out, *two_kernels]) == 0
    assert capsys.readouterr().out.endswith(f"2 kernels in {out}\n")


def _cut(archive: dict[str, bytes], key: str) -> dict[str, bytes]:
    return {**archive, f"{key}.so": archive[f"{key}.so"][:-1]}


def _left_out(archive: dict[str, bytes], key: str) -> dict[str, bytes]:
    return {name: data for name, data in archive.items() if name != f"{key}.so"}


def _without_needs(archive: dict[str, bytes], key: str) -> dict[str, bytes]:
    return {**archive, "manifest.json": b'{"format": 1}'}


def _a_list(archive: dict[str, bytes], key: str) -> dict[str, bytes]:
    return {**archive, "manifest.json": b"[1]"}


def _no_json(archive: dict[str, bytes], key: str) -> dict[str, bytes]:
    return {**archive, "manifest.json": b"{"}


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_cut, "is damaged: it is truncated"),
        (_left_out, "is damaged: .*no item named"),
        (_without_needs, "does not fit this host"),
        (_a_list, "is no bundle of kernels"),
        (_no_json, "is no bundle of kernels"),
    ],
)
def test_a_damaged_bundle(
    harm: Callable, said: str, two_kernels: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "kernels.zip"
    assert main(["bundle", str(path)]) == 0
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in harm(held, two_kernels[0]).items():
            archive.writestr(name, data)
    with pytest.raises(ValueError, match=said):
        fa_cute.load_bundle(path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"ELF", b"FLE"))
    with pytest.raises(ValueError, match="damaged|no bundle|does not fit"):
        fa_cute.load_bundle(path)


def test_a_benchmark_without_a_gpu_is_a_sentence_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--preset", "plain", "--rounds", "1"]) == 1
    assert "fa-cute: this benchmark runs kernels" in capsys.readouterr().err


def test_explain_says_what_a_call_would_run(
    builds: Callable[[], int], capsys: pytest.CaptureFixture
) -> None:
    assert main(["explain", "--head-dim", "128", "--window-left", "--gqa-ratio", "4"]) == 0
    assert "sm_90a" in capsys.readouterr().out and builds() == 0
    assert main(["explain", "--mask-mod", "document", "--length", "300"]) == 0
    assert "Sq 300, Sk 300" in capsys.readouterr().out
    assert main(["explain", "--length", "-4"]) == 1
    assert "--length is -4; it is a number" in capsys.readouterr().err


def test_a_switched_off_cache_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("FA_CUTE_CACHE", "0")
    assert main(["cache"]) == 1
    assert "switched off" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert re.fullmatch(r"fa-cute \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_the_module_runs() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "fa_cute", "--help"], capture_output=True, text=True, check=True
    )
    for command in ("demo", "compile", "explain", "cache", "bundle"):
        assert command in run.stdout


@pytest.mark.parametrize("case", demo.cases(4), ids=lambda case: case.name)
def test_the_demo_judges_by_a_sound_yardstick(case: demo.Case) -> None:
    x = demo.inputs(96, (4, 2), torch.float64, torch.device("cpu"))
    right = reference.attention(*x, **case.mods)
    assert torch.allclose(demo.eager(x, case.mods), right, atol=1e-12)
    cells, fine = demo._judged((right + 1e-3).float(), case, demo.Inputs(*(t.float() for t in x)))
    assert not fine and "WRONG" in cells[0]


def test_the_demo(
    builds: Callable[[], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(demo, "TOKENS", 200)
    monkeypatch.setattr(demo, "_gpu", lambda: None)
    assert main(["demo"]) == 0
    said = capsys.readouterr()
    for name in ("ALiBi", "sliding window", "softcap"):
        assert name in said.out and f"{name}: compiling for sm_90a ..." in said.err
    assert "compiled, but not run" in said.out and "All checks held" in said.out
    assert builds() == 3


def test_bench_hands_its_flags_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from bench import attention, sweep

    given: list[tuple[str, list[str]]] = []
    for name, module in (("attention", attention), ("sweep", sweep)):
        monkeypatch.setattr(module, "main", lambda rest, name=name: given.append((name, rest)))
    assert main(["bench", "--preset", "plain", "--rounds", "1"]) == 0
    assert main(["bench", "sweep", "--dims", "64"]) == 0
    assert given == [
        ("attention", ["--preset", "plain", "--rounds", "1"]),
        ("sweep", ["--dims", "64"]),
    ]
    assert main(["bench", "nothing"]) == 1
    assert "there is no benchmark 'nothing'; there are attention" in capsys.readouterr().err
