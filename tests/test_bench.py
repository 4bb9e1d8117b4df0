"""The benchmark's arithmetic, selection and reports: what can be told of it without a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import backward, compile_time, instructions, masks, peers, plots, results, turns
from bench.attention import summary
from bench.cases import VARIANTS, Case
from bench.priming import dealt
from bench.results import Report, command, table
from bench.selection import BACKWARD, FORWARD, Sets, parser, selection
from bench.sweep import ROWS, row
from fa_cute import variants
from fa_cute.host.blocks import TileCounts
from fa_cute.mods.trace import trace_mask_mod, trace_score_mod
from fa_cute.spans import Bounds, visible


def test_work_by_the_convention() -> None:
    """4 B H S S D; causal half; a window by the pairs that are visible, counted one by one."""
    full = Case(128, 1024, batch=2, heads=16, heads_kv=4)
    assert full.flops == 4 * 2 * 16 * 1024 * 1024 * 128
    assert Case(128, 1024, causal=True, batch=2).flops == full.flops / 2
    assert Case(192, 1024, head_dim_v=128).flops == 2 * 2 * 16 * 1024**2 * (192 + 128)
    window = Case(64, 700, causal=True, window=100)
    ends = [visible(Bounds(700, 700, 100, 0), q, q + 1) for q in range(700)]
    assert window.pairs == sum(end - begin for begin, end in ends)
    assert Case(64, 70, causal=True, window=100).pairs == 70 * 71 / 2


@pytest.mark.parametrize("flags", [[], ["--preset=full"], ["--dims=96,192/128", "--ratios=1,4"]])
@pytest.mark.parametrize("sets", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_selection_names_each_case_once(sets: Sets, flags: list[str]) -> None:
    names = [case.name for case in selection(parser(sets).parse_args(flags))]
    assert names and len(names) == len(set(names))


@pytest.mark.parametrize("sets", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_presets_are_the_issue_of_16k_tokens(sets: Sets) -> None:
    for preset in sets.presets:
        for case in selection(parser(sets).parse_args([f"--preset={preset}"])):
            assert case.queries or case.batch * case.seqlen == 16384
            assert case.heads % case.heads_kv == 0
    with pytest.raises(SystemExit, match="no preset"):
        selection(parser(sets).parse_args(["--preset=none"]))


def test_shares_are_all_jobs_once() -> None:
    jobs = list(range(11))
    assert sorted(sum((dealt(jobs, f"{i}/3") for i in range(3)), [])) == jobs


def test_backward_report() -> None:
    """Beside the best peer, and beside ours without the window: ours twice is no peer."""
    rows = []
    for case, speeds in (
        (Case(128, 4096, causal=True), {"ours": 600.0, "deterministic": 700.0, "fa4": 500.0}),
        (Case(128, 4096, causal=True, window=1024), {"ours": 450.0, "fa4": 500.0}),
    ):
        for peer, speed in speeds.items():
            rows.append(
                backward.row(case, peer, "backward", 0.1) | {"tflops": speed, "error": 0.05}
            )
    first, second = backward.summary(rows, ["ours", "deterministic", "fa4"]).splitlines()[2:]
    assert first.split()[-7:] == "600 700 500 1.200 1.000 0.50 -".split()
    assert second.split()[-7:] == "450 - 500 0.900 0.750 0.50 -".split()


def test_a_learned_table_is_told() -> None:
    """Of the variants only T5 learns, and what it learns is one tensor for every use of a case."""
    case = backward.Trained.of(Case(64, 64, variant="t5", batch=1, heads=2, heads_kv=2))
    (table_of,) = backward.learned(case.arguments("cpu"))
    assert table_of.requires_grad and backward.learned(case.arguments("cpu"))[0] is table_of
    fixed = backward.Trained.of(Case(64, 64, variant="alibi", batch=1, heads=2, heads_kv=2))
    assert not any(t.requires_grad for t in backward.learned(fixed.arguments("cpu")))


@pytest.mark.parametrize("variant", [name for name, build in VARIANTS.items() if build])
def test_variants_trace_without_data(variant: str) -> None:
    """A kernel compiled from tensors without data is the one that the benchmark will ask for."""
    case = Case(64, 64, variant=variant, batch=1, heads=2, heads_kv=2)
    static = trace_score_mod(case.static()["score_mod"]).graph
    assert static.key == trace_score_mod(case.arguments("cpu")["score_mod"]).graph.key


def test_rows_are_within_the_register_file() -> None:
    for text in " ".join(ROWS.values()).split():
        c = row(text)
        registers = 128 * (c.producer_registers + c.consumers * c.consumer_registers)
        assert registers <= 65536 and c.tile_n % 8 == 0, text
    with pytest.raises(SystemExit, match="is no row"):
        row("128x128")


def test_a_peer_that_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)
    case = Case(64, 64, batch=1, heads=1, heads_kv=1)
    with pytest.raises(peers.Absent, match="not installed"):
        peers.build("fa3", case, case.tensors("cpu"))
    with pytest.raises(peers.Absent, match="score_mod"):
        peers.build("fa2", Case(64, 64, variant="alibi"), case.tensors("cpu"))


def test_report(tmp_path: Path) -> None:
    """Ours beside the best peer; an absent peer is named with its reason."""
    base = {"case": "d128", "absent": None}
    rows = [
        base | {"peer": "ours", "tflops": 660.0, "host_us": 12.0, "error": 1e-3},
        base | {"peer": "fa3", "tflops": 600.0},
        base | {"peer": "flex", "absent": "not installed"},
    ]
    text = summary(rows, ["ours", "fa3", "flex"])
    assert "1.100" in text and "flex: not installed" in text
    report = Report("attention", {"device": "none"}, tmp_path / "r.json")
    report.rows += rows
    report.save()
    assert json.loads(report.path.read_text())["rows"] == rows
    lines = table(["a", "b"], [["x", "1"], ["yy", "22"]]).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_no_result_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of the docs, run on its day, had replaced the file that it names."""
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    reports = []
    for _ in range(3):
        reports.append(Report("spills", {}))
        reports[-1].save()
    first, *others = (report.path.stem for report in reports)
    assert others == [f"{first}-2", f"{first}-3"]


@pytest.mark.parametrize("rest", ["-1", "nan", "inf", "soon"])
def test_a_rest_that_is_none(rest: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([f"--rest={rest}"])
    assert rest in capsys.readouterr().err


def test_a_command_names_no_machine() -> None:
    argv = ["/somewhere/bench/attention.py", "--dims=64", "--out", "/tmp/a.json", "--rounds", "4"]
    assert command(argv) == "python -m bench.attention --dims=64 --rounds 4"
    assert command([*argv[:2], "--out=/tmp/a.json"]) == "python -m bench.attention --dims=64"


def test_inputs_have_outliers() -> None:
    x = Case(64, 512, batch=1, heads=4, heads_kv=4).tensors("cpu")
    assert x.q.abs().max() > 10 and x.q.dtype == torch.bfloat16
    assert x.q.shape == (1, 512, 4, 64)


def _compile_times(tmp_path: Path) -> Report:
    facts = {"cpu": "a CPU", "commit": "c", "included": compile_time.INCLUDED}
    report = Report("compile-time", facts, tmp_path / "compile.json")
    way = {"who": "ours", "target": "sm_90a", "case": "plain", "direction": "forward"}
    for wall in (3.0, 1.0, 2.0):
        report.rows.append(way | {"what": "after", "wall": wall, "cpu": 2 * wall, "peak_gib": 0.5})
    report.rows.append(way | {"what": "disk", "wall": 0.002, "cpu": 0.001, "peak_gib": 0.2})
    report.save()
    return report


def test_compile_times_are_medians_by_way(tmp_path: Path) -> None:
    report = _compile_times(tmp_path)
    after, disk, _, *included = compile_time.summary(report.rows).splitlines()[2:]
    assert after.split() == "sm_90a forward plain ours after 2.000 4.000 0.5 3".split()
    assert disk.split()[-4:] == ["0.002", "0.001", "0.2", "1"]
    assert [line.partition(":")[0] for line in included] == ["ours after", "ours disk"]


def test_compile_times_are_of_the_kernels_that_exist() -> None:
    assert set(compile_time.by_direction("alibi", "sm_90a")) == {"forward", "backward"}
    assert set(compile_time.by_direction("plain", "sm_90a")) == {"forward", "backward", "passes"}
    assert set(compile_time.by_direction("window", "sm_100a")) == {"forward"}


def test_an_interrupted_run_prints_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    way = {"who": "ours", "target": "sm_90a", "case": "plain", "direction": "forward"}

    def ours(cases: list[str]) -> Iterator[dict]:
        yield way | {"what": "after", "wall": 1.5, "cpu": 2.5, "peak_gib": 0.5}
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_time, "_ours", ours)
    out = tmp_path / "compile.json"
    assert compile_time.main(["--only", "ours", "--out", str(out)]) == 0
    assert "sm_90a forward plain ours after" in capsys.readouterr().out
    assert len(json.loads(out.read_text())["rows"]) == 1


def test_compile_times_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = _compile_times(tmp_path)
    assert plots.main([str(report.path), "--into", str(tmp_path)]) == 0
    assert (tmp_path / "compile-seconds.png").stat().st_size > 0


def test_usage_counts_the_children() -> None:
    """What nvcc's own children take is its: a shell's child burns half a second of CPU here."""
    burn = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    command = ["sh", "-c", f"{sys.executable} -c '{burn}'; echo done"]
    out, usage = compile_time.run(command)
    assert out == "done\n"
    assert usage.cpu >= 0.5
    assert usage.wall >= usage.cpu * 0.9
    with pytest.raises(RuntimeError, match="ended with 3: wrong"):
        compile_time.run(["sh", "-c", "echo wrong >&2; exit 3"])


def test_without_a_compiler_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    out = tmp_path / "compile.json"
    assert compile_time.main(["--only", "cutlass,fa3", "--out", str(out)]) == 0
    assert "nvcc is not on the PATH" in capsys.readouterr().out


def test_the_bound_of_a_mask() -> None:
    """(full + 1.25 partial) / all x full time x 1.1 + 10 us."""
    row = masks.bound(TileCounts(empty=50, partial=20, full=30), 2.0)
    assert row["bound_ms"] == pytest.approx(0.55 * 2.0 * 1.1 + 0.01)
    assert (row["empty"], row["partial"], row["full"]) == (50, 20, 30)


@pytest.mark.parametrize("name", masks.SIZES)
def test_masks_trace_without_data(name: str) -> None:
    static = trace_mask_mod(masks.mask_of(name, "meta")).graph
    assert static.key == trace_mask_mod(masks.mask_of(name, "cpu")).graph.key


def test_every_mask_of_the_gallery_is_measured() -> None:
    found = {name for name, variant in variants.ALL.items() if variant.kind == "mask_mod"}
    assert found == set(masks.SIZES)


def test_loops_of_a_disassembly() -> None:
    """The shortest loop that holds enough of each kind; predicates and branches forward aside."""
    store = ("STTM.x16 tmem[UR5], R4", 1)
    lines = [("MUFU.EX2 R0, R1", 3), store, ("MUFU.EX2 R0, R1", 2)]
    lines += [("F2FP.BF16.F32.PACK_AB R2, R0, R1", 4), store, ("@P0 BRA 0x200", 1)]
    lines += [("@!UP1 FADD2.RM R4, R5, R6", 1), ("BRA.U UP0, 0x10", 1), ("BRA 0x0", 1)]
    text, address = "", 0
    for line, times in lines:
        for _ in range(times):
            text += f"        /*{address:04x}*/    {line} ;   /* 0x0123 */\n"
            address += 16
    code = instructions.instructions(text)
    assert [one.target for one in code if one.opcode.startswith("BRA")] == [0x200, 0x10, 0]
    kinds = {"fadd2": 1, "floor": 1, "convert": 4, "sttm": 2}
    assert instructions.count(code) == {"all": 15, "ex2": 5, **kinds}
    inner = {"all": 13, "ex2": 4, **kinds, "late": 2}
    assert instructions.loops(code) == {"softmax": inner}


def test_tiles_that_go_up_do_not_wait() -> None:
    """By two heads side by side, under causal: the n-th tile of a head waits n turns going down."""
    model = turns.Model(Bounds(2048, 2048, None, 0), heads=16, ctas=32)
    free = turns.duration(model, "down", 2, turns=False)
    took = {order: turns.duration(model, order, 2) for order in turns.ORDERS}
    assert took["mixed"] < 1.05 * free and took["up"] < 1.15 * free and took["down"] > 1.3 * free
