"""A process that compiles to disk, without torch: its main, how one is started, and ``ahead``.

It reads pickled plans, one a line in hexadecimal, and answers each with a line of JSON. The
compiler's call ABI imports torch where it is installed, for conversions that no compile needs, and
that takes longer than a kernel: 1.5 s of 2.9.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence

from fa_cute.host import cache
from fa_cute.plan import Plan

# With two (and other work on them) two compiles at a time took longer than one after the other: a
# training call's four kernels 3.4 s instead of 2.5.
LEAST_CORES = 4


def main() -> None:
    """Answer each line of stdin with one line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.modules["torch"] = None  # an import of it is an ImportError, as where it is not installed
    from fa_cute.host import compile as compiling

    for request in sys.stdin:
        plan = pickle.loads(bytes.fromhex(request))
        answer = {"key": compiling.key_of(compiling.key_parts(plan)), "source": "", "seconds": 0.0}
        try:
            answer["source"], answer["seconds"] = compiling.publish(plan)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=answers, flush=True)


def start(*, stdout: int = subprocess.PIPE, stderr: int | None = None) -> subprocess.Popen:
    """A process that runs ``main``, with a pipe to its stdin. It finds modules as this one does."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from fa_cute.host.worker import main; main()"
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, text=True)


def line(plan: Plan) -> str:
    """What to write to a worker for ``plan``."""
    return pickle.dumps(plan).hex() + "\n"


def ahead(plans: Sequence[Plan]) -> None:
    """Have ``plans`` compiled by a process beside this one, for when they will be wanted.

    Nobody waits for it: who wants a kernel while it is compiled waits for the lock of its key, and
    who comes before, or where the process fails, compiles it himself. It ends with its work.
    """
    if not plans or not _cores_are_free() or not _is_python(sys.executable):
        return
    try:
        said = None if cache.logging() else subprocess.DEVNULL
        process = start(stdout=subprocess.DEVNULL, stderr=said)
        with process.stdin as pipe:
            pipe.write("".join(map(line, plans)))
    except OSError as error:
        cache.log(f"no process compiles beside this one: {error}")
        return
    cache.log(f"process {process.pid} compiles {len(plans)} more, which will be wanted next")
    threading.Thread(target=process.wait, daemon=True).start()


def _cores_are_free() -> bool:
    """Whether there are cores enough, and fewer that run or wait for one than the host has."""
    few = len(os.sched_getaffinity(0)) < LEAST_CORES
    return not few and os.getloadavg()[0] < (os.cpu_count() or 1) - 1


def _is_python(executable: str | None) -> bool:
    """Whether a process of ``executable`` runs Python: an interpreter may be part of a program."""
    return "python" in os.path.basename(executable or "")
