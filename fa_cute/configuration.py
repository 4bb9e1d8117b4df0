"""The configuration of a kernel: the arguments of ``fa_cute.compile`` as one value, and as JSON."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from fa_cute.host.backward import key_tile, plans_of
from fa_cute.host.planning import MOD_NAMES, Mods, biased, plan_by_elements, takes_lists
from fa_cute.host.target import check_target
from fa_cute.mods.graph import Captured, Graph, Node
from fa_cute.mods.trace import Traced
from fa_cute.plan import BACKWARD, FORWARD, Plan

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Mod = Callable[..., Any] | Graph | None


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What ``fa_cute.compile`` takes; a mod is a function, or a graph that was recorded."""

    head_dim: int
    dtype: torch.dtype | str
    target: str
    head_dim_v: int | None = None
    direction: str = "forward"
    causal: bool = False
    window: tuple[bool, bool] = (False, False)
    gqa_ratio: int = 1
    few_queries: bool = False
    few_keys: bool = False
    score_mod: Mod = None
    mask_mod: Mod = None
    return_lse: bool = False
    sinks: bool = False
    deterministic: bool = False
    block_lists: bool = False
    bias: int | None = None

    @classmethod
    def of(cls, plan: Plan) -> Configuration:
        """The configuration that ``plan`` was made from; its mods are graphs."""
        return cls(**{f.name: getattr(plan, f.name) for f in fields(cls)})

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``fa_cute.compile``."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def plan(self) -> tuple[Plan, Mods]:
        """The main plan and its traced mods; ValueError for what no kernel exists for."""
        plans, mods = self.plans()
        return plans[0], mods

    def plans(self) -> tuple[tuple[Plan, ...], Mods]:
        """The plans of all kernels, the main one first, and the traced mods.

        A backward's come with the passes around it and, unless its score_mod is a recorded graph
        that has its derivative, with the forward that it follows.
        """
        if self.direction not in (FORWARD, BACKWARD):
            raise ValueError(
                f"direction {self.direction!r}: there are {FORWARD!r} and {BACKWARD!r}, of which "
                "the latter brings all that a training call needs"
            )
        mods = Mods(*(_traced(name, getattr(self, name)) for name in MOD_NAMES))
        asked = self._asked()
        if self.direction == FORWARD:
            return (self._forward(asked, mods),), mods
        from fa_cute.autograd import derivative_of

        forward = self._forward(replace(asked, return_lse=True), mods)
        learned = forward.score_mod is not None and bool(forward.score_mod.more)
        derivative = forward.score_mod
        if not learned:
            derivative = derivative_of(mods)
        tile = key_tile(forward) if self.block_lists else None
        before, main, after = plans_of(
            forward,
            deterministic=asked.deterministic,
            lse_gradient=asked.return_lse,
            derivative=derivative,
            listed=tile,
        )
        return (main, before, after, *(() if learned else (forward,))), mods

    def _forward(self, asked: _Asked, mods: Mods) -> Plan:
        plan = plan_by_elements(asked, mods, check_target(self.target))
        if self.block_lists:
            plan = replace(plan, visits=self._lists(mods))
        bias = mods.bias if self.bias is None else self.bias
        return plan if bias is None else biased(plan, bias)

    def _lists(self, mods: Mods) -> str:
        """How a plan says that it reads lists; ValueError for a mask that has none."""
        if mods.mask_mod is None or not takes_lists(mods.mask_mod.graph):
            raise ValueError(
                "block_lists is True, but lists are read for a mask_mod that no ranges tell, and "
                + ("there is none" if mods.mask_mod is None else "ranges tell this: leave it out")
            )
        return "lists"

    def _asked(self) -> _Asked:
        return _Asked(
            dtype=dtype_of(self.dtype),
            head_dim=_head_dim(self.head_dim),
            head_dim_v=_head_dim(self.head_dim if self.head_dim_v is None else self.head_dim_v),
            gqa_ratio=_ratio(self.gqa_ratio),
            few_queries=bool(self.few_queries),
            few_keys=bool(self.few_keys),
            causal=bool(self.causal),
            window=_window(self.window, self.causal),
            return_lse=bool(self.return_lse),
            deterministic=bool(self.deterministic),
            sinks=bool(self.sinks),
        )


@dataclass(frozen=True)
class _Asked:
    """The static half of a ``Problem``: what ``make_plan`` reads."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    gqa_ratio: int
    few_queries: bool
    few_keys: bool
    causal: bool
    window: tuple[int | None, int | None]
    return_lse: bool
    deterministic: bool
    sinks: bool
    device: str = "a compile without tensors"


def _traced(name: str, mod: Mod) -> Traced | None:
    if isinstance(mod, Graph):
        return Traced(mod, (), ())
    return getattr(Mods.of(**{"score_mod": None, "mask_mod": None, name: mod}), name)


def dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype that kernels take, or its name, as a dtype; ValueError for another."""
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ValueError(f"dtype {dtype}: kernels take {' and '.join(DTYPES)}")
    return found


def _head_dim(head_dim: int) -> int:
    if isinstance(head_dim, bool) or not isinstance(head_dim, int):
        raise ValueError(f"head dim {head_dim!r}: it is an integer")
    return head_dim


def _ratio(ratio: int) -> int:
    if isinstance(ratio, bool) or not isinstance(ratio, int) or ratio < 1:
        raise ValueError(f"gqa_ratio {ratio!r}: it is query heads a key/value head, 1 or more")
    return ratio


def _window(window: tuple[bool, bool], causal: bool) -> tuple[int | None, int | None]:
    """Bounds that are there or not; a right one beside causal adds nothing, as in a call."""
    pair = isinstance(window, tuple | list) and len(window) == 2
    if not pair or not all(isinstance(side, bool) for side in window):
        raise ValueError(f"window {window!r}: two booleans, whether a left and a right bound exist")
    left, right = window
    return (0 if left else None), (0 if right and not causal else None)


def find_mod(text: str, sizes: tuple[int, int, int, int] | None = None) -> Callable[..., Any]:
    """The mod that ``text`` names: ``module:function``, ``file.py:function``, or a variant.

    A variant that takes arguments gets the examples of ``fa_cute.variants``, made for ``sizes``
    (B, Hq, Sq, Sk) where they are given.
    """
    from fa_cute import variants

    if text in variants.ALL:
        shape = variants.Shape() if sizes is None else variants.Shape(*sizes)
        (mod,) = variants.ALL[text].build("cpu", shape).values()
        return mod
    where, _, name = text.rpartition(":")
    if not where:
        raise ValueError(
            f"{text!r} is no variant; there are {', '.join(variants.ALL)}. A mod of your own is "
            "named module:function or file.py:function"
        )
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise ValueError(f"{text!r} names no module: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"{text!r} names no function: {module.__name__} has no {name}")
    return found


def save(path: str | Path, configurations: Iterable[Mapping[str, Any]]) -> None:
    """Write configurations as JSON; mods must be graphs, as recorded ones are, or None."""
    rows = [
        {name: _data(name, value) for name, value in configuration.items()}
        for configuration in configurations
    ]
    Path(path).write_text(json.dumps(rows, indent=1) + "\n")


def load(path: str | Path) -> list[dict[str, Any]]:
    """Read arguments of ``fa_cute.compile`` from JSON: a list of objects.

    A mod is null, a graph that ``save`` wrote, or a text that ``find_mod`` reads. ValueError if the
    file is something else.
    """
    try:
        rows = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} holds no list of configurations")
    _check_names(path, rows)
    rows = [
        {k: _read(f"{path}, configuration {at}", k, v) for k, v in row.items()}
        for at, row in enumerate(rows)
    ]
    return [{k: Configuration(**row).arguments()[k] for k in row} for row in rows]


def _check_names(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """ValueError for a configuration that lacks an argument or has one that there is not."""
    names = [f.name for f in fields(Configuration)]
    needed = [f.name for f in fields(Configuration) if f.default is MISSING]
    for at, row in enumerate(rows):
        unknown = [name for name in row if name not in names]
        if unknown:
            raise ValueError(
                f"{path}, configuration {at}: {unknown[0]!r} is no argument of fa_cute.compile; "
                f"they are {', '.join(names)}"
            )
        missing = [name for name in needed if name not in row]
        if missing:
            raise ValueError(
                f"{path}, configuration {at}: {missing[0]} is missing; each names at least "
                f"{', '.join(needed)}"
            )


def _data(name: str, value: Any) -> Any:
    if isinstance(value, Graph):
        return {
            "nodes": [[n.op, n.args, n.type, n.width, n.attr] for n in value.nodes],
            "result": value.result,
            "captured": [[c.dtype, c.ndim, c.inner] for c in value.captured],
            "scalars": value.scalars,
            "more": value.more,
        }
    if callable(value):
        raise ValueError(
            f"{name} is a function, which JSON cannot hold: record configurations with "
            "fa_cute.recorded_configurations(), or write its name, 'module:function'"
        )
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _read(where: str, name: str, value: Any) -> Any:
    """An argument from JSON; ValueError, which names it and ``where``, for a graph that is none."""
    if name == "window":
        return tuple(value) if isinstance(value, list) else value
    if name not in MOD_NAMES or value is None:
        return value
    if isinstance(value, str):
        return find_mod(value)
    try:
        return _graph(value)
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"{where}: {name} is no graph as fa_cute.configuration.save writes it "
            f"({type(error).__name__}: {error})"
        ) from error


def _graph(value: Mapping[str, Any]) -> Graph:
    nodes = tuple(Node(op, tuple(args), *rest) for op, args, *rest in value["nodes"])
    for at, node in enumerate(nodes):
        if any(arg not in range(at) for arg in node.args):
            raise ValueError(f"node {at} has arguments {node.args}, which are not before it")
    captured = tuple(Captured(*c) for c in value["captured"])
    more = tuple(value.get("more", ()))
    if any(at not in range(len(nodes)) for at in (value["result"], *more)):
        raise ValueError(f"a result is not among its {len(nodes)} nodes")
    return Graph(nodes, value["result"], captured, tuple(value["scalars"]), more)
