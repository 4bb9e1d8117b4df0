"""What only sm_100 has stays behind the verbs that have a second implementation."""

from __future__ import annotations

import ast
from pathlib import Path

import fa_cute

ROOT = Path(fa_cute.__file__).parent
WALL = {"device/tmem.py", "device/mma_sm100.py", "device/packed.py"}
VERBS = ("tcgen05", "packed_f32x2", "alloc_tmem", "dealloc_tmem")


def _names(path: Path) -> set[str]:
    """Every name, attribute and imported name in a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found.update(alias.name for alias in node.names)
            found.add(getattr(node, "module", None) or "")
    return found


def _offences(path: Path) -> list[str]:
    return [
        name
        for name in sorted(_names(path))
        if name.startswith("Pipeline") or any(verb in name for verb in VERBS)
    ]


def test_only_the_verbs_name_what_sm_100_has() -> None:
    offences = {
        path.relative_to(ROOT).as_posix(): _offences(path)
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).as_posix() not in WALL
    }
    assert not {path: names for path, names in offences.items() if names}


def test_the_search_finds_what_it_looks_for() -> None:
    found = {name: _offences(ROOT / name) for name in WALL}
    assert all(found.values())
