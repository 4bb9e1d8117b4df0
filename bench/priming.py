"""Processes that compile what a benchmark will run, so that the run itself compiles nothing.

Compilers hold one core each, and what they make is kept on disk (our kernels, FA4's, Inductor's).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TypeVar

Job = TypeVar("Job")


def prime(module: str, processes: int, argv: Sequence[str]) -> None:
    """Run ``python -m module`` with the flags ``argv`` as so many shares of its compilation."""
    begin = time.perf_counter()
    shares = [[f"--share={i}/{processes}", "--prime=0"] for i in range(processes)]
    command = [sys.executable, "-m", module, *argv]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    children = [subprocess.Popen([*command, *share], **silent) for share in shares]
    for child in children:
        child.wait()
    print(f"primed in {time.perf_counter() - begin:.0f} s", flush=True)


def dealt(jobs: Sequence[Job], share: str) -> Sequence[Job]:
    """The jobs of the share ``"i/n"``: every n-th from the i-th on."""
    index, count = map(int, share.split("/"))
    return jobs[index::count]
