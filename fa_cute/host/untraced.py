"""Functions that ``torch.compile`` leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable)


def untraced(function: Function) -> Function:
    """``function``, at which torch.compile breaks its graph, and in which it compiles nothing.

    What ``torch.compiler.disable`` does, without a wrapper and without importing the tracer, which
    takes a second. Left to itself it compiled 122 frames of a call's checks and look-ups in 30 s.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "its kernels are compiled already"
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function
