"""Figures of a fresh process of Python, which nothing has warmed but its modules' bytecode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def figures(code: str, bytecode: str, **environment: str) -> dict[str, Any]:
    """What a process that runs ``code`` prints last, a line of JSON.

    ``bytecode``: the folder that keeps the modules' bytecode. RuntimeError if the process fails.
    """
    folder = {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", code]
    run = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | folder | environment
    )
    if run.returncode:
        raise RuntimeError(f"the measured process failed: {run.stderr.strip()}")
    return json.loads(run.stdout.splitlines()[-1])
