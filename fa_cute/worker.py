"""A process that compiles to disk: reads pickled plans, one a line in hexadecimal, answers in JSON.

It has no torch. The compiler's call ABI imports it where it is installed, for conversions that no
compile needs, and that takes longer than a kernel: 1.5 s of 2.9.
"""

from __future__ import annotations

import json
import os
import pickle
import sys


def main() -> None:
    """Answer each line of stdin with one line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.modules["torch"] = None  # an import of it is an ImportError, as where it is not installed
    from fa_cute.host import compile as compiling

    for line in sys.stdin:
        plan = pickle.loads(bytes.fromhex(line))
        answer = {"key": compiling.key_of(compiling.key_parts(plan)), "source": "", "seconds": 0.0}
        try:
            answer["source"], answer["seconds"] = compiling.publish(plan)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
