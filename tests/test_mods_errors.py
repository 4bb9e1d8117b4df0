"""What Python or torch would say of a traced value is said in the words of mods."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest
import torch

import fa_cute
from fa_cute.mods.errors import ModError
from fa_cute.mods.trace import trace_mask_mod, trace_score_mod

HERE = f"{__name__.rpartition('.')[2]}.py:"


def _message(mod: Callable, trace: Callable = trace_score_mod) -> str:
    with pytest.raises(ModError) as caught:
        trace(mod)
    return str(caught.value)


@pytest.mark.parametrize(
    ("mod", "said"),
    [
        (lambda s, b, h, q, kv: (f"{s:.3f}", s)[1], "formatted with '.3f'"),
        (lambda s, b, h, q, kv: s * s.shape[0], "dimension 0 .* no dimensions"),
        (lambda s, b, h, q, kv: s * s.size(-1), "dimension -1 .* no dimensions"),
        (
            lambda s, b, h, q, kv: torch.where(True, s, 0),
            r"bool, traced value, int\)\. .*Python if",
        ),
    ],
)
def test_a_sentence_at_the_users_line(mod: Callable, said: str) -> None:
    message = _message(mod)
    assert HERE in message
    assert re.search(said, message), message


@pytest.mark.parametrize(
    ("mod", "trace", "name"),
    [
        (torch.add, trace_score_mod, "add"),
        (functools.partial(torch.add, 1), trace_score_mod, "partial"),
        (torch.ge, trace_mask_mod, "ge"),
        (torch.nn.ReLU(), trace_score_mod, "ReLU"),
        (int, trace_score_mod, "int"),
    ],
)
def test_a_builtin_as_a_mod(mod: Callable, trace: Callable, name: str) -> None:
    """The remedy is a function around it; no line of a library, nor of the caller, is blamed."""
    message = _message(mod, trace)
    assert f"which {name} does not take; write a function" in message
    assert ".py:" not in message


def test_check_is_asked_of_no_function() -> None:
    with pytest.raises(ValueError, match="a mod is a function, and None of type NoneType is not"):
        fa_cute.check(None)


def test_a_builtin_that_asks_for_truth() -> None:
    message = _message(max)
    assert "the truth of a traced value" in message
    assert ".py:" not in message


def test_an_error_of_the_mods_own_stays_as_it_is() -> None:
    def own(s, b, h, q, kv):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="^mine$") as caught:
        trace_score_mod(own)
    assert type(caught.value) is TypeError


def test_a_value_prints_without_its_address() -> None:
    seen = []
    trace_score_mod(lambda s, b, h, q, kv: (seen.append(f"{s} {h!r}"), s)[1])
    assert seen == ["<traced score> <traced h>"]


def test_a_long_line_is_cut() -> None:
    # fmt: off
    message = _message(lambda s, b, h, q, kv: s.frobnicate() + 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9)
    # fmt: on
    quoted = message.partition("`")[2].partition("`")[0]
    assert len(quoted) <= 80
    assert quoted.endswith(" ...")


@pytest.mark.parametrize("tile", [16, (16,), (16, 0), "ab"])
def test_a_tile_is_a_pair(tile: object) -> None:
    with pytest.raises(ValueError, match=r"tile is .*\(queries, keys\)"):
        fa_cute.plan_mask(lambda b, h, q, kv: q >= kv, 1, 2, 16, 16, tile=tile)
