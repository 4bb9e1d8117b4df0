"""Pictures of result files: ``python -m bench.plots bench/results/*.json --into docs/images``.

Bars a case for ``attention`` files, and curves by length and by head dim of the cases that differ
in that alone, which ``backward`` files have too; memory and error by length for ``figures`` files;
seconds for ``compile-time`` files; losses for ``training`` files. Needs matplotlib (extra
``bench``).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

PICTURES = Path("docs/images")
# What a curve is over: its label, where a case's name has it, what makes cases of one curve alike.
AXES = {
    "lengths": ("sequence length", r" s(\d+) ", (r" s\d+ b\d+ ", " ")),
    "head-dims": (
        "head dim, heads * head dim constant",
        r"^d(\d+) s",
        (r"^d\d+ (s\d+) b\d+ h\d+ ", r"\1 "),
    ),
}
COLOURS = {
    "ours": "#c0392b",
    "plain": "#e6a49c",
    "deterministic": "#e6a49c",
    "fa3": "#2c6fbb",
    "fa4": "#6aa84f",
    "cudnn": "#8e7cc3",
    "fa2": "#999999",
    "cutlass": "#2c6fbb",
    "flex": "#e69138",
    "eager": "#555555",
}


def main(argv: list[str] | None = None) -> int:
    """Draw each file; the names of the pictures are printed."""
    parser = argparse.ArgumentParser(prog="bench.plots", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, default=PICTURES)
    arguments = parser.parse_args(argv)
    for path in arguments.files:
        draw(path, arguments.into)
    return 0


def draw(path: Path, into: Path) -> None:
    """Write the pictures of one result file as PNG; their names are printed."""
    result = json.loads(path.read_text())
    kind = KINDS.get(result.get("kind"))
    if kind is None:
        print(f"{path}: no picture for kind {result.get('kind')!r}")
        return
    into.mkdir(parents=True, exist_ok=True)
    for name, figure in kind(result):
        picture = into / f"{path.stem}-{name}.png"
        figure.savefig(picture, dpi=120, bbox_inches="tight")
        print(picture)


def _attention(result: dict[str, Any]) -> list[tuple[str, Any]]:
    """Bars of every case; curves of the cases that differ in length, or in head dim, only."""
    rows = [row for row in result["rows"] if row.get("tflops")]
    pictures = [("bars", _bars(result, rows))]
    for name, (label, place, alike) in AXES.items():
        curves = defaultdict(list)
        for row in rows:
            found = re.search(place, row["case"])
            if found:
                curves[re.sub(*alike, row["case"])].append((int(found[1]), row))
        curves = {key: row for key, row in curves.items() if len({n for n, _ in row}) > 2}
        if curves:
            pictures.append((name, _curves(result, curves, label)))
    return pictures


def _backward(result: dict[str, Any]) -> list[tuple[str, Any]]:
    """The curves, of the backward alone."""
    rows = [row for row in result["rows"] if row["pass"] == "backward"]
    return _attention(result | {"rows": rows})[1:]


def _bars(result: dict[str, Any], rows: list[dict[str, Any]]) -> Any:
    plt = _pyplot()
    cases = list(dict.fromkeys(row["case"] for row in rows))
    peers = [name for name in COLOURS if any(row["peer"] == name for row in rows)]
    figure, axes = plt.subplots(figsize=(2 + 1.1 * len(cases), 4))
    width = 0.8 / max(1, len(peers))
    for i, peer in enumerate(peers):
        speeds = {row["case"]: row["tflops"] for row in rows if row["peer"] == peer}
        at = [j + (i - len(peers) / 2 + 0.5) * width for j, case in enumerate(cases)]
        heights = [speeds.get(case, 0) for case in cases]
        axes.bar(at, heights, width, label=peer, color=COLOURS[peer])
    axes.set_xticks(range(len(cases)), cases, rotation=40, ha="right", fontsize=8)
    return _finished(figure, axes, result, "TFLOP/s")


def _curves(result: dict[str, Any], curves: dict[str, list], label: str) -> Any:
    plt = _pyplot()
    columns = min(3, len(curves))
    lines = -(-len(curves) // columns)
    size = (4.2 * columns, 3.2 * lines)
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False)
    for axes, (name, found) in zip(grid.flat, curves.items(), strict=False):
        for peer, colour in COLOURS.items():
            points = sorted((n, row["tflops"]) for n, row in found if row["peer"] == peer)
            if points:
                axes.plot(*zip(*points, strict=True), "o-", label=peer, color=colour)
        axes.set_xscale("log", base=2)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel(label)
        _finished(figure, axes, None, "TFLOP/s")
    for axes in list(grid.flat)[len(curves) :]:
        axes.set_visible(False)
    figure.suptitle(_caption(result), fontsize=9)
    figure.tight_layout()
    return figure


def _figures(result: dict[str, Any]) -> list[tuple[str, Any]]:
    plt = _pyplot()
    figure, both = plt.subplots(1, 2, figsize=(9, 3.6))
    quantities = (("peak_bytes", "bytes that a call adds"), ("rms_error", "rms error against fp64"))
    for axes, (field, label) in zip(both, quantities, strict=True):
        for peer, colour in COLOURS.items():
            rows = [r for r in result["rows"] if r["peer"] == peer and field in r]
            if rows:
                lengths, values = [r["seqlen"] for r in rows], [r[field] for r in rows]
                axes.plot(lengths, values, "o-", label=peer, color=colour)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("sequence length")
        _finished(figure, axes, None, label)
    figure.suptitle(_caption(result), fontsize=9)
    figure.tight_layout()
    return [("memory-error", figure)]


def _training(result: dict[str, Any]) -> list[tuple[str, Any]]:
    """Loss by step, means over 10 steps, of each pair of runs."""
    plt = _pyplot()
    models = list(dict.fromkeys(row["model"] for row in result["rows"]))
    figure, grid = plt.subplots(1, len(models), figsize=(5 * len(models), 3.6), sharey=True)
    for axes, model in zip(grid, models, strict=True):
        for row in (row for row in result["rows"] if row["model"] == model):
            # Curves lie on each other: the first is broad and the second dashed.
            style = {"linewidth": 5, "alpha": 0.4, "color": COLOURS["fa3"]}
            if row["attention"] == "ours":
                style = {"linewidth": 1.5, "linestyle": "--", "color": COLOURS["ours"]}
            losses, size = row["losses"], 10
            means = [statistics.mean(losses[i : i + size]) for i in range(0, len(losses), size)]
            steps = range(size // 2, len(losses), size)
            axes.plot(steps, means, label=row["attention"], **style)
        axes.set_title(model, fontsize=9)
        axes.set_xlabel("step")
        _finished(figure, axes, None, "loss, nats a byte")
    figure.suptitle(_caption(result), fontsize=9)
    figure.tight_layout()
    return [("curves", figure)]


def _compile_time(result: dict[str, Any]) -> list[tuple[str, Any]]:
    """Wall seconds, medians over the repeats, on a logarithmic scale: a bar for each way."""
    plt = _pyplot()
    seconds = defaultdict(list)
    for row in (row for row in result["rows"] if "error" not in row):
        way = (row["target"], row["direction"], row["case"], row["who"], row["what"])
        seconds[way].append(row["wall"])
    ways = sorted(seconds, reverse=True)
    medians = [max(statistics.median(seconds[way]), 1e-5) for way in ways]
    figure, axes = plt.subplots(figsize=(8, 1 + 0.17 * len(ways)))
    colours = [COLOURS.get(who, COLOURS["eager"]) for _, _, _, who, _ in ways]
    axes.barh(range(len(ways)), medians, color=colours)
    axes.set_yticks(range(len(ways)), [" ".join(way) for way in ways], fontsize=6)
    for at, median in enumerate(medians):
        axes.text(median * 1.1, at, f"{median:.2g}", va="center", fontsize=6)
    axes.set_xscale("log")
    axes.set_xlabel("seconds")
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(f"{result['cpu']}, {result['date'][:10]}, {result['commit']}", fontsize=9)
    named = {f"{who} {what}" for _, _, _, who, what in ways}
    lines = [f"{way}: {words}" for way, words in result["included"].items() if way in named]
    axes.text(
        0,
        -0.6 / figure.get_figheight(),
        "\n".join(lines),
        fontsize=6,
        va="top",
        transform=axes.transAxes,
    )
    return [("seconds", figure)]


def _finished(figure: Any, axes: Any, result: dict[str, Any] | None, label: str) -> Any:
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)
    if result is not None:
        axes.set_title(_caption(result), fontsize=9)
    return figure


def _caption(result: dict[str, Any]) -> str:
    return f"{result.get('device', '')}, {result['date'][:10]}, {result.get('commit', '')}"


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


KINDS = {
    "attention": _attention,
    "backward": _backward,
    "figures": _figures,
    "figures-gradient": _figures,
    "compile-time": _compile_time,
    "training": _training,
}

if __name__ == "__main__":
    sys.exit(main())
