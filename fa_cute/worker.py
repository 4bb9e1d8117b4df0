"""The process behind ``precompile``: reads pickled plans from its parent, compiles them to disk."""

from __future__ import annotations

import json
import os
import pickle
import sys

from fa_cute.host import compile as compiling


def main() -> None:
    """Answer each line of stdin (a pickled plan in hexadecimal) with a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        plan = pickle.loads(bytes.fromhex(line))
        answer = {"key": compiling.key_of(compiling.key_parts(plan)), "source": "", "seconds": 0.0}
        try:
            kernel = compiling.compiled(plan)
            answer.update(source=kernel.source, seconds=kernel.seconds)
        except Exception as error:
            answer.update(error=f"{type(error).__name__}: {error}")
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
