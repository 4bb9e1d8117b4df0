"""Names for writing mods without torch: they work on traced values, tensors and Python numbers.

Each does what torch's function of that name does; on numbers alone the result is a number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fa_cute.mods.value import Value


def _entry(name: str, function: Callable | None = None) -> Callable:
    torch_function = function or getattr(torch, name)

    def apply(*args: object, **kwargs: object) -> object:
        given = (*args, *kwargs.values())
        for arg in given:
            if isinstance(arg, Value):
                return arg.tape.call(name, args, kwargs)
        tensors = [arg for arg in given if isinstance(arg, torch.Tensor)]
        if tensors:
            return torch_function(*(_beside(arg, tensors[0]) for arg in args), **kwargs)
        return torch_function(*(_tensor(arg, "cpu") for arg in args), **kwargs).item()

    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = f"``torch.{name}`` on traced values, tensors or numbers."
    return apply


def _beside(value: object, tensor: torch.Tensor) -> object:
    """A number as a 0-d tensor where ``tensor`` is, as some torch functions take only tensors."""
    if isinstance(value, bool | int | float):
        return _tensor(value, tensor.device)
    return value


def _tensor(value: object, device: torch.device | str) -> torch.Tensor:
    """A number as a 0-d tensor; a float in fp32, whatever torch's default dtype is."""
    dtype = torch.float32 if isinstance(value, float) else None
    return torch.as_tensor(value, dtype=dtype, device=device)


where = _entry("where")
tanh = _entry("tanh")
exp = _entry("exp")
exp2 = _entry("exp2")
log = _entry("log")
log2 = _entry("log2")
sqrt = _entry("sqrt")
rsqrt = _entry("rsqrt")
abs = _entry("abs")
sign = _entry("sign")
sigmoid = _entry("sigmoid")
sin = _entry("sin")
cos = _entry("cos")
erf = _entry("erf")
minimum = _entry("minimum")
maximum = _entry("maximum")
clamp = _entry("clamp")
floor = _entry("floor")
ceil = _entry("ceil")
round = _entry("round")
trunc = _entry("trunc")
dot = _entry("dot", lambda x, y: (x * y).sum(-1))


def cast(x: object, dtype: torch.dtype) -> object:
    """``x`` converted to a torch dtype: a traced value, a tensor or a number."""
    if isinstance(x, Value | torch.Tensor):
        return x.to(dtype)
    return torch.as_tensor(x, device="cpu").to(dtype).item()


def float32(x: object) -> object:
    """``x`` as a float."""
    return cast(x, torch.float32)


def int32(x: object) -> object:
    """``x`` as an integer, truncated toward zero."""
    return cast(x, torch.int32)


def boolean(x: object) -> object:
    """Whether ``x`` is not zero."""
    return cast(x, torch.bool)
