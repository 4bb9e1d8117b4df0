"""Limits of size and style, and the layers of docs/architecture.md, as tests over the sources."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fa_cute.host import compile as compiling

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES = 600
FUNCTION_LINES = 80
POSITIONAL = 6

# A modifier's own arguments are an interface, here and in FlashAttention-4 as the bench calls it.
MODIFIER = {"score", "b", "h", "q", "kv", "seqlen", "seqlen_info", "aux", "aux_tensors"}

LEAVES = {"mods", "plan", "spans"}
# What each part of the package may import from the package. Parts that are not listed (api, the
# command line, the demo, __init__) may import anything but kernels and device.
MAY_IMPORT = {
    "mods": {"mods"},
    "spans": set(),
    "plan": {"mods"},
    "device": LEAVES | {"device"},
    "kernels": LEAVES | {"device"},
    "host": LEAVES | {"host"},
    "cpu": LEAVES,
    "reference": LEAVES,
    "variants": {"mods"},
}
NEEDS_CUTLASS = {"device", "kernels"}
COMPILES = {"fa_cute.host.compile", "fa_cute.host.fakes"}
# What host/compile.py uses around a compile, and no kernel is made from.
HOSTS = ("cache.py", "launch.py", "repeats.py", "target.py", "worker.py")


def _files() -> list[Path]:
    folders = ("fa_cute", "variants", "tests", "bench")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _sources() -> list[Path]:
    return [path for path in _files() if path.relative_to(ROOT).parts[0] in ("fa_cute", "variants")]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _part(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "fa_cute" else parts[0]


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "fa_cute" else ("fa_cute", *parts)
    return ".".join(parts)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, at the top or inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@pytest.fixture(params=_files(), ids=_name)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(params=_sources(), ids=_name)
def source(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_sizes(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= FILE_LINES, "file too long"
    assert path.name != "utils.py", "name the file after what it answers"
    for function in _functions(ast.parse(text)):
        where = f"{_name(path)}:{function.lineno} {function.name}"
        lines = function.end_lineno - function.lineno + 1
        assert lines <= FUNCTION_LINES, f"{where}: {lines} lines"
        names = [a.arg for a in function.args.posonlyargs + function.args.args]
        names = [n for n in names if n not in {"self", "cls"} | MODIFIER]
        assert len(names) <= POSITIONAL, f"{where}: {len(names)} positional arguments"


def test_words(path: Path) -> None:
    forbidden = "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", r"HA" + "CK"])
    machine = r"(?<![\w.])/(?:home|root|work|Users)/"
    for number, line in enumerate(path.read_text().splitlines(), 1):
        where = f"{_name(path)}:{number}"
        assert not re.search(rf"\b({forbidden})\b", line), f"{where}: unfinished work"
        assert path == Path(__file__) or not re.search(machine, line), f"{where}: a machine's path"


def test_imports_point_down(source: Path) -> None:
    part, module = _part(source), _module(source)
    allowed = MAY_IMPORT.get(part)
    for line, name in _imports(ast.parse(source.read_text())):
        where = f"{_name(source)}:{line} imports {name}"
        top, *rest = name.split(".")
        if top == "cutlass":
            assert part in NEEDS_CUTLASS or module in COMPILES, where
        if top != "fa_cute" or not rest:
            continue
        if module == "fa_cute.host.compile" and rest[0] == "kernels":
            continue
        if allowed is None:
            assert rest[0] not in ("kernels", "device"), where
        else:
            assert rest[0] in allowed, where
        for one, other in (("_sm90", "_sm100"), ("_sm100", "_sm90")):
            assert not (one in module and other in name), where


def test_what_a_kernel_is_made_from_is_in_its_fingerprint() -> None:
    """Sources that the fingerprint covers import no other source of the package."""
    package = ROOT / "fa_cute"
    covered = set()
    for name in compiling.SOURCES:
        place = package / name
        covered |= set(place.rglob("*.py")) if place.is_dir() else {place}
    hosts = {package / "host" / name for name in HOSTS}
    for path in sorted(covered):
        for line, name in _imports(ast.parse(path.read_text())):
            parts = name.split(".")[1:]
            if not name.startswith("fa_cute.") or parts == ["host"]:
                continue
            tries = [package.joinpath(*parts[:n]) for n in range(1, len(parts) + 1)]
            files = {t.with_suffix(".py") for t in tries if t.with_suffix(".py").exists()}
            assert files <= covered | hosts, f"{_name(path)}:{line} imports {name}"


def test_lazy_compiler() -> None:
    """The host reaches the compiler and the kernels only inside functions."""
    for module in COMPILES:
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for line, name in _imports(ast.Module(body=[node], type_ignores=[])):
                    where = f"{module}:{line}: {name}"
                    assert not name.startswith(("cutlass", "fa_cute.kernels")), where


def test_public_functions_are_described(source: Path) -> None:
    tree = ast.parse(source.read_text())
    assert ast.get_docstring(tree), f"{_name(source)} has no docstring"
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        where = f"{_name(source)}:{node.lineno} {node.name}"
        assert ast.get_docstring(node), f"{where} has no docstring"
        if isinstance(node, ast.FunctionDef) and _part(source) not in ("variants", "device"):
            assert node.returns is not None, f"{where} does not say what it returns"


def test_ruff() -> None:
    ruff = shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    run = subprocess.run([ruff, "check", "."], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
