"""Recorded kernels for the protocol check: their programs, and the scenarios that they walk."""

from __future__ import annotations

import functools
import random
import warnings
from typing import Any, NamedTuple

from fa_cute.host import compile as compiling
from fa_cute.host import fakes
from fa_cute.host.target import arch_of
from fa_cute.plan import BACKWARD, Plan


class Recorded(NamedTuple):
    """A kernel's program, and what the recorder could not express."""

    program: Any
    unknown: tuple[str, ...]


@functools.cache
def recorded(plan: Plan) -> Recorded:
    """Trace the kernel of ``plan``; nothing is compiled."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    from fa_cute.device.recorder import recording

    kernel = compiling._entry(plan)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    walk = getattr(kernel, "walk", None)
    named = ["visits", "spans"] if walk else ["spans"]
    if plan.direction == BACKWARD:
        named.append("own")
    blackwell = plan.target.startswith("sm_10")
    messages, private = {("next", 0): ("next",)}, {"scratch": "softmax" if blackwell else "math"}
    if walk and walk.noted:
        messages["next", 1] = "count"
        named = ["visits"]
    more = []
    if blackwell:
        from fa_cute.device.recorder_sm100 import verbs

        more = [verbs]
    options = f"--enable-tvm-ffi --gpu-arch {arch_of(plan.target)}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with recording(kernel, named, messages, private, more) as record:
            cute.compile(
                kernel,
                *fakes.arguments(plan),
                stream,
                options=options,
                no_jit_engine=True,
            )
    return Recorded(record.program, tuple(record.unknown))


def scenarios(plan: Plan, count: int, seed: int = 0) -> list:
    """Small trip counts: tiles of queries or, of the backward, of keys; some see nothing."""
    from fa_cute.device.protocol import Scenario

    rng, found = random.Random(seed), []
    spans = _queries if plan.direction == BACKWARD else _keys
    for i in range(count):
        tiles = 1 + i % 4
        found.append(Scenario(tuple(spans(rng, plan) for _ in range(tiles))))
    return found


def _keys(rng: random.Random, plan: Plan) -> dict[str, int]:
    """Spans as ``spans.KvSpans`` has them, with the edges that the plan can have.

    Without bounds and visits of a mask every tile of the forward sees some key.
    """
    bare = not (plan.causal or any(plan.window)) and plan.visits == "bounds"
    left = rng.randrange(3) * plan.window[0]
    right = rng.randrange(3) * (plan.causal or plan.window[1])
    middle, begin = rng.randrange(4), rng.randrange(3)
    if rng.random() < 0.25 and not bare:
        return {
            **dict.fromkeys(("begin", "middle_begin", "middle_end", "last", "end"), begin),
            "count": 0,
        }
    last = begin + left + middle + right
    return {
        "begin": begin,
        "middle_begin": begin + left,
        "middle_end": begin + left + middle,
        "last": last,
        "end": last + 1,
        "count": last + 1 - begin,
    }


def _queries(rng: random.Random, plan: Plan) -> dict[str, int]:
    """Spans as ``spans.QSpans`` has them, with the edges that the plan can have."""
    cuts = sorted(rng.randrange(6) for _ in range(4))
    if rng.random() < 0.25:
        cuts = [2] * 4
    if not _two_edges(plan):
        cuts[2] = cuts[3]
    spans = dict(zip(("begin", "middle_begin", "middle_end", "end"), cuts, strict=True))
    own = sorted(rng.randint(cuts[0], cuts[3]) for _ in range(4))
    if not _two_edges(plan):
        own[2] = own[3] = cuts[3]
    if plan.config.wide:
        own = cuts
    names = ("own_begin", "own_middle_begin", "own_middle_end", "own_end")
    own_spans = dict(zip(names, own, strict=True))
    return spans | own_spans | {"count": cuts[3] - cuts[0]}


def _two_edges(plan: Plan) -> bool:
    from fa_cute.device.key_walk import KeyWalk
    from fa_cute.device.mma_sm90 import fragment

    return KeyWalk(plan, fragment(plan.config.own_queries, transposed=True)).two_edges
