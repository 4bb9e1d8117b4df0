"""The package as users get it: every folder is in the wheel, variants included, and it imports."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("fa_cute", "variants"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_every_source(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, place in (("fa_cute", "fa_cute"), ("variants", "fa_cute/variants")):
        for path in (ROOT / folder).rglob("*.py"):
            assert f"{place}/{path.relative_to(ROOT / folder).as_posix()}" in names
    assert any(name.endswith("LICENSE") for name in names)


def test_the_wheel_imports_on_its_own(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import fa_cute, fa_cute.variants as v; print(fa_cute.__file__, v.__file__)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == [
        str(tmp_path / "fa_cute/__init__.py"),
        str(tmp_path / "fa_cute/variants/__init__.py"),
    ]


def test_variants_are_importable_here() -> None:
    spec = importlib.util.find_spec("fa_cute.variants")
    assert spec is not None and spec.origin is not None


def test_importing_the_package_does_not_import_the_compiler() -> None:
    code = (
        "import sys, torch, fa_cute; fa_cute.attention; fa_cute.compile; fa_cute.variants.ALL;"
        "print([name for name in sys.modules if name.split('.')[0] == 'cutlass'])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_environment_variable_is_documented() -> None:
    read = {
        name
        for path in (ROOT / "fa_cute").rglob("*.py")
        for name in re.findall(r"FA_CUTE_[A-Z_]+", path.read_text())
    }
    text = (ROOT / "docs/architecture.md").read_text()
    assert "FA_CUTE_CACHE_DIR" in read
    assert [name for name in sorted(read) if f"`{name}" not in text] == []
