"""The examples in docs/writing_a_mod.md and the README run; what is listed can be called."""

from __future__ import annotations

import re
from pathlib import Path

from fa_cute.mods.operations import OPERATIONS

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/writing_a_mod.md").read_text()


def _programs(text: str) -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 2
    return blocks


def test_the_examples_run() -> None:
    exec("\n".join(_programs(TEXT)), {})


def test_the_readme_runs() -> None:
    """On CPU tensors, which it says are computed by the same call, and on fewer of them."""
    program = "\n".join(_programs((ROOT / "README.md").read_text()))
    for there, here in (('device="cuda"', 'device="cpu"'), ("(2, 8192, 16,", "(1, 70, 16,")):
        assert there in program
        program = program.replace(there, here)
    exec(program, {})


def test_the_listed_functions_exist() -> None:
    listed = TEXT.partition("torch's functions and methods")[2].partition("- Conversions")[0]
    names = set(re.findall(r"`(\w+)`", listed)) - {"or", "xor", "not"}
    assert len(names) > 50 and names <= set(OPERATIONS)
