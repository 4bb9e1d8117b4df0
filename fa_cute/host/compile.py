"""Plan → kernel: from memory, from disk, or compiled, linked and published.

Only a compile imports the compiler (``cutlass``) and the kernels, inside the functions that need
them; a warm call and a load from disk never do.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fa_cute.host import cache, fakes, launch, repeats, target, worker
from fa_cute.host.launch import Kernel, Resources
from fa_cute.mods.graph import Graph
from fa_cute.plan import BACKWARD, FORWARD, POSTPROCESS, PREPROCESS, Plan

ABI = "1"
# What a kernel is made from; nothing else in the package can change one for a given plan.
SOURCES = (
    *("device", "kernels", "mods/affine.py", "mods/derived.py", "mods/graph.py"),
    *("mods/magnitude.py", "mods/ranges.py", "mods/shown.py", "mods/tiles.py"),
    *("plan.py", "spans.py", "host/compile.py", "host/fakes.py"),
)
COMPILER = "nvidia-cutlass-dsl"
BLACKWELL = ("sm_100a", "sm_103a", "sm_100@sm_90a")
# The linker itself takes 5 ms of CPU; through cc, whose start files an object has no use for, 23.
LINKERS = ("ld", "cc", "gcc", "clang", "ld.lld")
# Module and class of each kernel; a compile imports its own and no other.
KERNELS = {
    (FORWARD, "sm_90a"): ("fwd_sm90", "FwdSm90"),
    (BACKWARD, "sm_90a"): ("bwd_sm90", "BwdSm90"),
    (PREPROCESS, "sm_90a"): ("bwd_preprocess", "BwdPreprocess"),
    (POSTPROCESS, "sm_90a"): ("bwd_postprocess", "BwdPostprocess"),
    **{(FORWARD, name): ("fwd_sm100", "FwdSm100") for name in BLACKWELL},
}

# What will be wanted next where a plan's kernel is: of a training call's forward, its backward.
Next = Callable[[Plan], Sequence[Plan]]

_memory: dict[Plan, Kernel] = {}
_bundles: list[cache.Store] = []
_flights: dict[str, threading.Lock] = {}
_flights_guard = threading.Lock()
_compiler_lock = threading.Lock()


def compiled(plan: Plan, following: Next | None = None) -> Kernel:
    """The kernel of ``plan``: from memory, else from disk, else compiled and kept on disk.

    Where it must be compiled, the kernels ``following`` it are, by a process beside.
    """
    kernel = _memory.get(plan)
    return _obtain(plan, following) if kernel is None else kernel


def in_memory(plan: Plan) -> bool:
    """Whether ``compiled(plan)`` would answer from memory."""
    return plan in _memory


def plans_in_memory() -> list[Plan]:
    """The plans whose kernels this process has used, in the order of their first use."""
    return list(_memory)


def also_look_in(store: cache.Store) -> None:
    """Look for kernels in ``store`` too, after the cache on disk: a loaded bundle."""
    _bundles.append(store)


def forget() -> None:
    """Drop the kernels in memory; those on disk stay."""
    _memory.clear()


def key_parts(plan: Plan) -> dict[str, str]:
    """All that identifies the machine code of ``plan``'s kernel, named, stable on every host."""
    return {**plan.parts(), **host_parts()}


def host_parts() -> dict[str, str]:
    """The parts of a key that do not come from the plan."""
    return {
        "abi": ABI,
        "compiler": _compiler_version(),
        "cuda": str(target.cuda_flavour()),
        "host": target.host_arch(),
        "sources": _fingerprint(),
    }


def key_of(parts: Mapping[str, str]) -> str:
    """The digest of ``key_parts``: 32 hexadecimal digits."""
    text = "\n".join(f"{name}={parts[name]}" for name in sorted(parts))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def _compiler_version() -> str:
    # A host that only loads kernels has the runtime's package, of the same version.
    for name in (COMPILER, *(f"{COMPILER}-libs-cu{flavour}" for flavour in (13, 12))):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "none"


@functools.cache
def _fingerprint() -> str:
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for name in SOURCES:
        files = sorted((root / name).rglob("*.py")) if (root / name).is_dir() else [root / name]
        for path in files:
            text = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:16]


def _obtain(plan: Plan, following: Next | None) -> Kernel:
    parts = key_parts(plan)
    key = key_of(parts)
    with _flights_guard:
        flight = _flights.setdefault(key, threading.Lock())
    with flight:
        kernel = _memory.get(plan)
        if kernel is None:
            kernel = _memory[plan] = _from_disk_or_compiler(plan, key, parts, following)
    return kernel


def _from_disk_or_compiler(
    plan: Plan, key: str, parts: Mapping[str, str], following: Next | None = None
) -> Kernel:
    store = cache.opened()
    kernel = _from_disk(store, plan, key)
    if kernel is not None:
        return kernel
    with contextlib.ExitStack() as stack:
        if store is not None:
            try:
                stack.enter_context(store.single_flight(key))
            except OSError as error:
                cache.unwritable(error, store.path)
                following = None
            kernel = _from_disk(store, plan, key)
            if kernel is not None:
                return kernel
        _require_compiler(plan)
        _log_miss(store, key, parts)
        if store is not None and following is not None:
            worker.ahead([other for other in following(plan) if _missing(store, other)])
        return _from_compiler(store, plan, key, parts)


def _missing(store: cache.Store, plan: Plan) -> bool:
    """Whether to compile ``plan`` ahead: there is such a kernel, and it is not at hand."""
    if plan in _memory or not has_kernel(plan):
        return False
    key = key_of(key_parts(plan))
    return not any(key in place for place in (store, *_bundles))


def publish(plan: Plan) -> tuple[str, float]:
    """Have the kernel of ``plan`` on disk, without loading it: "disk" or "compiled", and seconds.

    For a process that only compiles, which needs no torch. OSError if the folder takes no kernel.
    """
    started, parts = time.perf_counter(), key_parts(plan)
    key, store = key_of(parts), cache.opened()
    if store is None:
        raise OSError("there is no folder for kernels")
    with store.single_flight(key):
        if store.read(key) is not None:
            return "disk", time.perf_counter() - started
        _log_miss(store, key, parts)
        with tempfile.TemporaryDirectory(prefix="fa_cute-") as scratch:
            path, about = _described(plan, key, parts, Path(scratch))
            store.publish(key, path.read_bytes(), about)
    seconds = time.perf_counter() - started
    cache.log(f"compiled {key} in {seconds:.2f} s")
    return "compiled", seconds


def _log_miss(store: cache.Store | None, key: str, parts: Mapping[str, str]) -> None:
    if store is not None and cache.logging():
        cache.log(f"miss {key}: {store.why_missed(parts)}")


def _require_compiler(plan: Plan) -> None:
    if importlib.util.find_spec("cutlass") is None:
        parts = ", ".join(f"{name} {value}" for name, value in plan.parts().items())
        raise RuntimeError(
            f"the kernel of this call is neither on disk nor in a loaded bundle ({parts}), and the "
            f"compiler is not installed here: install {COMPILER}, or put the kernel in the bundle "
            "(fa_cute.recorded_configurations lists what a program uses)"
        )


def _from_disk(store: cache.Store | None, plan: Plan, key: str) -> Kernel | None:
    seconds = launch.runtime()
    started = time.perf_counter()
    stores = _bundles if store is None else (store, *_bundles)
    entry = next(filter(None, (place.read(key) for place in stores)), None)
    if entry is None:
        return None
    try:
        kernel = _kernel(plan, entry.path, entry.about, "disk", started)
    except (OSError, RuntimeError):
        if entry.path.exists():
            raise
        return None  # dropped meanwhile, by a process that had no room
    cache.log(
        f"hit {key}, loaded in {1e3 * kernel.seconds:.1f} ms "
        f"(the launch runtime once a process, in {1e3 * seconds:.1f} ms)"
    )
    return kernel


def _kernel(
    plan: Plan, path: Path, about: Mapping[str, Any], source: str, started: float
) -> Kernel:
    function = launch.load(path) if about["linked"] else _load_unlinked(path)
    return Kernel(
        plan,
        about["key"],
        function,
        resources=Resources(**about["resources"]),
        source=source,
        seconds=time.perf_counter() - started,
    )


def _from_compiler(
    store: cache.Store | None, plan: Plan, key: str, parts: Mapping[str, str]
) -> Kernel:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fa_cute-") as scratch:
        path, about = _described(plan, key, parts, Path(scratch))
        if store is not None:
            try:
                path = store.publish(key, path.read_bytes(), about).path
            except OSError as error:
                cache.unwritable(error, store.path)
        kernel = _kernel(plan, path, about, "compiled", started)
    cache.log(f"compiled {key} in {kernel.seconds:.2f} s")
    repeats.note(plan)
    return kernel


def _described(
    plan: Plan, key: str, parts: Mapping[str, str], scratch: Path
) -> tuple[Path, dict[str, Any]]:
    """The kernel of ``plan``, compiled: its file in ``scratch``, and what the cache says of it."""
    started = time.perf_counter()
    built = build(plan, scratch)
    return built.path, {
        "key": key,
        "parts": dict(parts),
        "mods": {name: graph.describe() for name, graph in _mods(plan)},
        "linked": built.linked,
        "resources": built.resources._asdict(),
        "seconds": round(time.perf_counter() - started, 3),
    }


def _mods(plan: Plan) -> list[tuple[str, Graph]]:
    pairs = (("score_mod", plan.score_mod), ("mask_mod", plan.mask_mod))
    return [(name, graph) for name, graph in pairs if graph is not None]


class Built(NamedTuple):
    """A compiled object: its file, whether it is linked, and what ptxas reported."""

    path: Path
    linked: bool
    resources: Resources


def build(plan: Plan, scratch: Path) -> Built:
    """Compile and link the kernel of ``plan`` into the folder ``scratch``."""
    # One compile a process at a time: the compiler keeps its state in globals.
    with _compiler_lock, launch.uncollected():
        function, remarks = _compile(plan, scratch)
        shared = _shared_memory(_launching_code(function.ir_module))
        unlinked = scratch / "kernel.o"
        unlinked.write_bytes(_object(function))
    resources = Resources(*_ptxas(remarks), shared, len(re.findall(r"\(C751\d\)", remarks)))
    linked = scratch / "kernel.so"
    if _link(unlinked, linked):
        return Built(linked, True, resources)
    return Built(unlinked, False, resources)


class Listing(NamedTuple):
    """What the compiler made of a plan: the PTX as text, and ptxas's report."""

    ptx: str
    resources: Resources


def listing(plan: Plan, scratch: Path) -> Listing:
    """Compile ``plan`` for its instructions to be counted; ``scratch`` is an empty folder."""
    from cutlass.base_dsl import compiler

    with _compiler_lock:
        keep = compiler.KeepPTX(True), compiler.DumpDir(str(scratch))
        function, remarks = _compile(plan, scratch, keep)
        shared = _shared_memory(_launching_code(function.ir_module))
    (ptx,) = scratch.glob("*.ptx")
    return Listing(ptx.read_text(), Resources(*_ptxas(remarks), shared))


def _compile(plan: Plan, scratch: Path, more: tuple = ()) -> tuple[Any, str]:
    import cutlass.cute as cute
    from cutlass.base_dsl import compiler
    from cutlass.cute.runtime import make_fake_stream

    remarks = scratch / "remarks.yaml"
    # ptxas's report by hand: --remark-filter asks for the same, and for the source line of each
    # operation too, which takes as long again as all the rest of tracing.
    options = (
        compiler.EnableTVMFFI(True),
        compiler.GPUArch(target.arch_of(plan.target)),
        compiler.PtxasOptions("-v"),
        compiler.ExtraCompilerOpts("diagnostic=ptx"),
        compiler.RemarkOutput(str(remarks)),
        *more,
    )
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with _no_tuple_warnings(), _symbols_looked_up():
        function = cute.compile[options](
            _entry(plan), *fakes.arguments(plan), stream, no_jit_engine=True
        )
    return function, remarks.read_text() if remarks.exists() else ""


def has_kernel(plan: Plan) -> bool:
    """Whether there is a kernel of ``plan``'s direction for its target."""
    return (plan.direction, plan.target) in KERNELS


def check_kernel(plan: Plan) -> None:
    """ValueError unless there is a kernel of ``plan``'s direction for its target."""
    if not has_kernel(plan):
        raise ValueError(
            f"there is no {_pass(plan.direction)} kernel for {plan.target}; there are "
            + ", ".join(dict.fromkeys(f"{_pass(way)} for {name}" for way, name in KERNELS))
        )


def _pass(direction: str) -> str:
    """What a user calls it: the kernels around a backward are a part of it."""
    return direction.partition("-")[0]


def _entry(plan: Plan) -> Any:
    check_kernel(plan)
    module, name = KERNELS[plan.direction, plan.target]
    return getattr(importlib.import_module(f"fa_cute.kernels.{module}"), name)(plan)


@contextlib.contextmanager
def _no_tuple_warnings() -> Iterator[None]:
    """An ``Extra`` with only None in it makes the compiler warn, and works."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Argument extra .* cannot be converted")
        yield


@contextlib.contextmanager
def _symbols_looked_up() -> Iterator[None]:
    """Whether a module has a symbol is asked of its table.

    The compiler walks all of the module for each message of the call's ABI: half of the ABI's time.
    """
    from cutlass._mlir import ir
    from cutlass.base_dsl.tvm_ffi_builder import mlir_builder

    builder = mlir_builder.MLIRBuilder
    walked = builder._module_symbol_exists
    builder._module_symbol_exists = lambda _, module, name: name in ir.SymbolTable(module.operation)
    try:
        yield
    finally:
        builder._module_symbol_exists = walked


def _ptxas(remarks: str) -> tuple[int, int]:
    """Registers a thread and spilled bytes from ptxas's report; the largest of its kernels."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", remarks)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", remarks)
    return max(registers, default=0), max((max(map(int, pair)) for pair in spills), default=0)


def _object(function: Any) -> bytes:
    """The relocatable object of a compiled function; its module is not to be used afterwards.

    ``function.export_to_c`` does the same to a copy, through text, and optimises the launching
    code, which runs once a call, at LLVM's level 3: 0.27 s of a plain forward's 2.0, this 0.06.
    """
    from cutlass._mlir import ir
    from cutlass._mlir._mlir_libs._cutlass_ir import _aot_support
    from cutlass.base_dsl.tvm_ffi_builder import rename_tvm_ffi_function

    module = function.ir_module
    rename_tvm_ffi_function(module, function.function_name, launch.SYMBOL)
    with module.context:
        hidden = ir.Attribute.parse("#llvm.linkage<internal>")
        for op in module.body.operations:
            if op.name == "llvm.func" and op.regions[0].blocks:
                if op.attributes["sym_name"].value != f"__tvm_ffi_{launch.SYMBOL}":
                    op.attributes["linkage"] = hidden
    return _aot_support.export_module_to_bytes(module, format="o", opt_level=0, enable_pic=True)


def _launching_code(module: Any) -> str:
    """The functions that launch a kernel, as text: without its machine code, and the call's ABI."""
    functions = (op for op in module.body.operations if op.name == "llvm.func")
    launching = (op for op in functions if "__tvm_ffi" not in op.attributes["sym_name"].value)
    # Without local scope each print walks the whole module for aliases: 0.06 s.
    return "\n".join(op.get_asm(use_local_scope=True) for op in launching)


def _shared_memory(module: str) -> int:
    """Bytes of dynamic shared memory at the launch, from the third member of its configuration.

    ptxas counts only static shared memory, of which these kernels have none.
    """
    config = re.escape("struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>")
    sizes = [0]
    for function in module.split("llvm.func"):
        for place in re.findall(rf"(%\d+) = llvm\.getelementptr %\d+\[0, 2\].*{config}", function):
            value = re.search(rf"llvm\.store (%\d+), {place} : i64", function)
            size = value and re.search(
                rf"{value[1]} = llvm\.mlir\.constant\((\d+) : i64\)", function
            )
            sizes += [int(size[1])] if size else []
    return max(sizes)


def _link(unlinked: Path, linked: Path) -> bool:
    """Make a shared object with the host's linker; False, said once, if there is none."""
    named = os.environ.get("CC")
    for name in ((named,) if named else ()) + LINKERS:
        tool = shutil.which(name)
        if tool is None:
            continue
        run = subprocess.run(
            [tool, "-shared", "-o", str(linked), str(unlinked)], capture_output=True, text=True
        )
        if run.returncode == 0:
            return True
        raise RuntimeError(f"{tool} could not link a kernel: {run.stderr.strip()}")
    cache.warn_once(
        "no linker was found (cc, gcc, clang, ld): kernels are kept unlinked, and each process "
        "that loads one imports the compiler for it. Installing gcc makes loads fast."
    )
    return False


def _load_unlinked(path: Path) -> Any:
    """The kernel's function in an object that was kept unlinked, through the compiler's loader."""
    from cutlass.cute.runtime import load_module

    with tempfile.TemporaryDirectory(prefix="fa_cute-") as scratch:
        if path.suffix != ".o":
            code, _ = cache.unpack(path.read_bytes())
            path = Path(scratch, "kernel.o")
            path.write_bytes(code)
        return getattr(load_module(str(path), enable_tvm_ffi=True), launch.SYMBOL)
