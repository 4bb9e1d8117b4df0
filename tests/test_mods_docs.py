"""The examples in docs/writing_a_mod.md run, and what it lists can be called."""

from __future__ import annotations

import re
from pathlib import Path

from fa_cute.mods.operations import OPERATIONS

TEXT = (Path(__file__).parent.parent / "docs/writing_a_mod.md").read_text()


def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(blocks) == 2
    exec("\n".join(blocks), {})


def test_the_listed_functions_exist() -> None:
    listed = TEXT.partition("torch's functions and methods")[2].partition("- Conversions")[0]
    names = set(re.findall(r"`(\w+)`", listed)) - {"or", "xor", "not"}
    assert len(names) > 50 and names <= set(OPERATIONS)
