"""Real kernels through the compiler: resources, sources, fresh processes, bundles, the seven ways.

One module-wide cache holds the few kernels that these tests compile.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fa_cute
from fa_cute import configuration
from fa_cute.bundle import bundle, load_bundle, read_manifest
from fa_cute.cli import main
from fa_cute.configuration import Configuration
from fa_cute.host import cache, launch, repeats
from fa_cute.host import compile as compiling
from fa_cute.mods.graph import Captured, Graph, Node

from . import bare_host

PLAIN = {"head_dim": 64, "dtype": "bfloat16", "target": "sm_90a"}
FRESH_PROCESS = """
import json, sys, time, torch
started = time.perf_counter()
import fa_cute
{before}
kernel = fa_cute.compile(head_dim=64, dtype="bfloat16", target="sm_90a")
seconds = time.perf_counter() - started
compiler = any(name.split(".")[0] == "cutlass" for name in sys.modules)
print(json.dumps([kernel.key, kernel.source, kernel.seconds, seconds, compiler]))
"""


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of this module's own, empty at first."""
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FA_CUTE_CACHE_DIR", str(folder))
        patch.setattr(compiling, "_memory", {})
        yield folder


def _fresh_process(before: str = "", **environment: str) -> list[Any]:
    run = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS.format(before=before)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.compile
def test_compiled_then_memory_then_disk_in_a_fresh_process() -> None:
    kernel = fa_cute.compile(**PLAIN)
    assert kernel.source == "compiled" and kernel.seconds > 0.1
    assert 0 < kernel.resources.registers <= 255
    assert kernel.resources.spill_bytes == 0
    assert 64 * 1024 < kernel.resources.shared_memory <= 227 * 1024
    again = fa_cute.compile(**PLAIN, head_dim_v=64)
    assert again.source == "memory" and again.key == kernel.key
    for seed in ("1", "2"):
        key, source, load, _, compiler = _fresh_process(PYTHONHASHSEED=seed)
        assert (key, source, compiler) == (kernel.key, "disk", False)
        assert load < 0.5


@pytest.mark.compile
def test_without_a_linker_the_compilers_loader_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "LINKERS", ())
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.delenv("CC", raising=False)
    unlinked = {**PLAIN, "dtype": "float16"}
    with pytest.warns(RuntimeWarning, match="no linker was found"):
        key = fa_cute.compile(**unlinked).key
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "_memory", {})
        again = fa_cute.compile(**unlinked)
        assert again.source == "disk" and again.key == key
    with pytest.raises(ValueError, match="without a linker"):
        bundle("never-written", keys=[key])


@pytest.mark.compile
def test_a_kernel_refuses_what_it_was_not_made_for() -> None:
    kernel = fa_cute.compile(**PLAIN)
    q = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="q is no CUDA tensor"):
        kernel(q, q, q)


@pytest.mark.compile
def test_captured_tensors_of_every_dtype() -> None:
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    dtypes += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    dtypes += [torch.float8_e4m3fn, torch.float8_e5m2]
    tables = [torch.zeros(4, 3, dtype=torch.float32).to(dtype)[:, 1] for dtype in dtypes]
    scalars = [torch.tensor(2.0), torch.tensor(3), torch.tensor(True)]

    def mod(score, b, h, q, kv):
        for table in tables:
            score = score + table[h].to(torch.float32)
        return torch.where((q < kv) & scalars[2], score * scalars[0], score + scalars[1])

    kernel = fa_cute.compile(**PLAIN, score_mod=mod)
    taken = {c.dtype for c in kernel.plan.score_mod.captured}
    assert taken == {str(dtype).removeprefix("torch.") for dtype in dtypes}
    assert sorted(kernel.plan.score_mod.scalars) == ["bool", "float32", "int32"]


@pytest.mark.compile
def test_a_scalar_on_the_device_is_read_in_the_kernel() -> None:
    nodes = (
        Node("score", (), "float32"),
        Node("load", (), "float32", attr=0),
        Node("mul", (0, 1), "float32"),
    )
    graph = Graph(nodes, 2, (Captured("float32", 0),), ())
    kernel = fa_cute.compile(**PLAIN, score_mod=graph)
    assert kernel.plan.score_mod is graph and kernel.resources.spill_bytes == 0


@pytest.mark.compile
def test_precompile_from_a_file_and_bundle(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fa_cute.compile(**PLAIN)
    path = tmp_path / "configurations.json"
    configuration.save(path, [*fa_cute.recorded_configurations(), {**PLAIN, "causal": True}])
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "_memory", {})
        assert main(["compile", "--from", str(path), "--workers", "1"]) == 0
        assert fa_cute.compile(**PLAIN, causal=True).source == "disk"
    out = tmp_path / "kernels.fa"
    wanted = [fa_cute.compile(**PLAIN, causal=causal).key for causal in (False, True)]
    packed = bundle(out, target="sm_90a", keys=wanted)
    keys = {kernel["key"] for kernel in packed}
    assert keys == set(wanted)
    assert read_manifest(out)["needs"] == compiling.host_parts()
    with zipfile.ZipFile(out) as archive:
        assert set(archive.namelist()) == {"manifest.json", *(f"{key}.so" for key in keys)}
    elsewhere = {"FA_CUTE_CACHE_DIR": str(tmp_path / "empty")}
    key, source, _, _, compiler = _fresh_process(f"fa_cute.load_bundle({str(out)!r})", **elsewhere)
    assert key in keys and source == "disk" and not compiler
    monkeypatch.setattr(compiling.target, "host_arch", lambda: "riscv64")
    with pytest.raises(ValueError, match=r"does not fit this host: host x86_64 \(here riscv64\)"):
        load_bundle(out)


WITHOUT_TORCH = """
import importlib, sys
sys.modules["torch"] = None
from fa_cute.host import compile, fakes
for module, _ in compile.KERNELS.values():
    importlib.import_module(f"fa_cute.kernels.{module}")
print(sys.modules["torch"])
"""


@pytest.mark.compile
def test_a_compile_needs_no_torch() -> None:
    """A process of ``precompile`` has none, and so starts 1.5 s sooner."""
    command = [sys.executable, "-c", WITHOUT_TORCH]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.stdout == "None\n", run.stderr


BARE = """
import importlib.util
import fa_cute
absent = importlib.util.find_spec("cutlass") is None
fa_cute.load_bundle({path!r})
print(absent, fa_cute.compile(**{plain!r}).source)
try:
    fa_cute.compile(**{plain!r}, causal=True)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.compile
def test_a_bundle_loads_on_a_host_without_the_compiler(tmp_path: Path) -> None:
    path = tmp_path / "kernels.fa"
    bundle(path, keys=[fa_cute.compile(**PLAIN).key])
    site = bare_host.site(tmp_path / "site")
    found, error = bare_host.run(site, BARE.format(path=str(path), plain=PLAIN)).splitlines()
    assert found == "True disk"
    assert "neither on disk nor in a loaded bundle" in error and "causal" in error


@pytest.mark.parametrize("on", [True, False])
def test_garbage_is_collected_after_a_compile_as_before(on: bool) -> None:
    was_on = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        with launch.uncollected():
            assert not gc.isenabled()
        assert gc.isenabled() == on
    finally:
        (gc.enable if was_on else gc.disable)()


def test_what_a_compile_made_is_not_walked_and_frozen_objects_stay_frozen() -> None:
    gc.collect()
    with launch.uncollected():
        made = [[] for _ in range(1000)]
    young = {id(found) for generation in (0, 1) for found in gc.get_objects(generation)}
    assert not young & set(map(id, made)) and not gc.get_freeze_count()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with launch.uncollected():
            pass
        assert gc.get_freeze_count() >= frozen > 0
    finally:
        gc.unfreeze()


def test_every_kernel_that_is_listed_can_be_named() -> None:
    """The table of kernels names modules and classes as text; a compile imports one of them."""
    for module, name in set(compiling.KERNELS.values()):
        source = Path(compiling.__file__).parent.parent / "kernels" / f"{module}.py"
        assert re.search(rf"^class {name}\b", source.read_text(), re.MULTILINE)


def _key(**arguments: Any) -> str:
    plan, _ = Configuration(**{**PLAIN, **arguments}).plan()
    return compiling.key_of(compiling.key_parts(plan))


slope = 1.0


def _global_mod(score, b, h, q, kv):
    return score + slope * kv


def _helper(kv):
    return kv * 1.0


def _helper_mod(score, b, h, q, kv):
    return score + _helper(kv)


def _closure(value: float) -> Callable:
    return lambda score, b, h, q, kv: score + value * kv


def _global(value: float) -> Callable:
    globals()["slope"] = value
    return _global_mod


def _default(value: float) -> Callable:
    def mod(score, b, h, q, kv, slope=value):
        return score + slope * kv

    return mod


def _swapped_helper(value: float) -> Callable:
    globals()["_helper"] = lambda kv: kv * value
    return _helper_mod


def _partial(value: float) -> Callable:
    return functools.partial(lambda slope, score, b, h, q, kv: score + slope * kv, value)


class _Callable:
    def __init__(self, value: float) -> None:
        self.slope = value

    def __call__(self, score, b, h, q, kv):
        return score + self.slope * kv


def _cell_mod() -> Callable[[float], Callable]:
    value = 0.0

    def mod(score, b, h, q, kv):
        return score + value * kv

    def change(new: float) -> Callable:
        nonlocal value
        value = new
        return mod

    return change


SEVEN_WAYS = {
    "closure": _closure,
    "global": _global,
    "default": _default,
    "helper": _swapped_helper,
    "partial": _partial,
    "attribute": _Callable,
    "changed cell": _cell_mod(),
}


@pytest.mark.parametrize("way", SEVEN_WAYS.values(), ids=SEVEN_WAYS)
def test_a_changed_value_is_another_kernel_and_an_equal_one_the_same(way: Callable) -> None:
    keys = [_key(score_mod=way(value)) for value in (1.0, 2.0, 3.0)]
    assert len(set(keys)) == 3
    assert _key(score_mod=way(2.0)) == keys[1] == _key(score_mod=_closure(2.0))


def test_a_captured_layout_or_dtype_is_another_kernel_but_contents_are_not() -> None:
    def with_table(table: torch.Tensor) -> str:
        return _key(score_mod=lambda score, b, h, q, kv: score + table[h])

    first = with_table(torch.zeros(4))
    assert with_table(torch.ones(9)) == first == with_table(torch.ones(8)[::2])
    assert with_table(torch.zeros(4, dtype=torch.float16)) != first


def test_decode_steps_with_a_run_time_scalar_compile_once(builds: Callable[[], int]) -> None:
    def step(position: Any) -> Callable:
        return lambda b, h, q, kv: q + position >= kv

    for at in range(64):
        fa_cute.compile(**PLAIN, mask_mod=step(torch.tensor(100 + at)))
    assert builds() == 1
    assert len({_key(mask_mod=step(100 + at)) for at in range(64)}) == 64


def test_a_number_that_compiles_kernel_after_kernel_is_told(builds: Callable[[], int]) -> None:
    """Once a process, and not of kernels that differ in more."""

    def step(position: Any, **more: Any) -> None:
        fa_cute.compile(**{**PLAIN, **more}, mask_mod=lambda b, h, q, kv: q + position >= kv)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for at in range(repeats.MANY // 2 + 1):
            step(100 + at, causal=True)
        for at in range(repeats.MANY - 1):
            step(100 + at)
            step(torch.tensor(at))
    with pytest.warns(RuntimeWarning, match="16 kernels were compiled .* torch.tensor"):
        step(200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(201)


def test_options_lowered_to_constants_are_in_the_key() -> None:
    def cap(value: float) -> Callable:
        return lambda score, b, h, q, kv: torch.tanh(score / value) * value

    assert len({_key(), _key(score_mod=cap(15.0)), _key(score_mod=cap(50.0))}) == 3


def test_a_right_bound_beside_causal_is_no_other_kernel() -> None:
    assert _key(causal=True, window=(True, True)) == _key(causal=True, window=(True, False))


def test_configurations_survive_a_file(tmp_path: Path) -> None:
    table = torch.zeros(4, dtype=torch.float16)

    def mod(score, b, h, q, kv):
        return torch.where(q < kv, score * 0.1 + table[h], float("-inf"))

    plan, _ = Configuration(**PLAIN, score_mod=mod, window=(True, False), gqa_ratio=4).plan()
    path = tmp_path / "configurations.json"
    configuration.save(path, [Configuration.of(plan).arguments()])
    (again,) = configuration.load(path)
    assert Configuration(**again).plan()[0] == plan


def test_a_file_may_name_its_mods(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text("def double(score, b, h, q, kv):\n    return score * 2\n")
    path = tmp_path / "configurations.json"
    path.write_text(json.dumps([{**PLAIN, "score_mod": f"{source}:double"}]))
    (read,) = configuration.load(path)
    assert _key(score_mod=read["score_mod"]) == _key(score_mod=lambda s, b, h, q, kv: s * 2)
    with pytest.raises(ValueError, match="is a function, which JSON cannot hold"):
        configuration.save(path, [read])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"head_dim": 100}, "head_dim 100 .* multiples of 8 up to 256"),
        ({"dtype": "float32"}, "bfloat16 and float16"),
        ({"dtype": torch.float64}, "bfloat16 and float16"),
        ({"target": "hopper"}, "'sm_90a'"),
        ({"target": "sm_80"}, "sm_80"),
        ({"gqa_ratio": 0}, "gqa_ratio 0"),
        ({"window": (128, 0)}, "two booleans"),
        ({"window": True}, "two booleans"),
        ({"head_dim": "64"}, "head dim '64': it is an integer"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fa_cute.compile(**{**PLAIN, **wrong})


def test_what_is_not_there_yet_says_so() -> None:
    with pytest.raises(ValueError, match="'sideways'.*'forward' and 'backward'"):
        fa_cute.compile(**PLAIN, direction="sideways")
    with pytest.raises(TypeError, match="score_mod must be a function"):
        fa_cute.compile(**PLAIN, score_mod=3)


def test_precompile_needs_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_CUTE_CACHE", "0")
    assert cache.opened() is None
    with pytest.raises(ValueError, match="switched off"):
        fa_cute.precompile([PLAIN])


def test_precompile_needs_a_worker() -> None:
    with pytest.raises(ValueError, match="workers is -1; it is a number of processes, 1 or more"):
        fa_cute.precompile([PLAIN], workers=-1)


def test_precompile_starts_nothing_that_must_fail(builds: Callable[[], int]) -> None:
    with pytest.raises(ValueError, match="configuration 1: there is no backward kernel for sm_"):
        fa_cute.precompile([PLAIN, {**PLAIN, "target": "sm_100a", "direction": "backward"}])
    assert builds() == 0


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("{")
    with pytest.raises(ValueError, match="list.json is no JSON"):
        configuration.load(tmp_path / "list.json")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"head_dim": 64, "dtype": "float16"}, "configuration 1: target is missing; .* at least"),
        ({"dtyp": 1}, "configuration 1: 'dtyp' is no argument of fa_cute.compile"),
    ],
)
def test_a_file_with_a_wrong_name_says_which(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps([PLAIN, row]))
    with pytest.raises(ValueError, match=f"list.json, {message}"):
        configuration.load(path)
