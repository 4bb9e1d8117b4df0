"""The command line: ``fa-cute demo | compile | explain | cache | bundle | bench``."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fa_cute import __version__
from fa_cute.host import cache
from fa_cute.host.repeats import form

DEFAULT_TARGET = "sm_90a"
BENCHES = {
    "attention": "bench.attention",
    "sweep": "bench.sweep",
    "figures": "bench.figures",
    "compile": "bench.compile_time",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, or 1 after an error, which is printed as a sentence."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["bench"]:  # the flags behind it are the benchmark's own
        run = functools.partial(_bench, given[1:])
    else:
        options = _parser().parse_args(given)
        run = functools.partial(options.run, options)
    try:
        status = run() or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever reads has enough, as head does; nothing is left to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, TypeError, NotImplementedError, RuntimeError, OSError) as error:
        print(f"fa-cute: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fa-cute", description="FlashAttention as a just-in-time framework."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser("demo", help="three variants, checked, compiled, and timed on a GPU")
    demo.set_defaults(run=_demo)
    for name, run, about in (
        ("compile", _compile, "compile a kernel into the cache; no GPU needed"),
        ("explain", _explain, "say what a kernel would be, without compiling it"),
    ):
        command = commands.add_parser(name, help=about)
        _add_configuration(command)
        command.set_defaults(run=run)
        if name == "explain":
            command.add_argument("--plot", metavar="PNG", help="draw the mask's tile map")
            command.add_argument("--length", type=int, default=1024, help="queries and keys")
        if name == "compile":
            command.add_argument("--from", dest="file", help="a JSON list instead")
            command.add_argument("--workers", type=int, help="processes; the number of cores")
    _add_cache(commands)
    bundle = commands.add_parser("bundle", help="pack kernels for hosts without the compiler")
    bundle.add_argument("out", help="the file to write")
    bundle.add_argument("keys", nargs="*", help="keys or their first digits; all by default")
    bundle.add_argument("--target", help="only kernels for this target")
    bundle.set_defaults(run=_bundle)
    about = "measure beside the peers: fa-cute bench [NAME] --preset plain --peers ours,fa3 ..."
    commands.add_parser("bench", help=about)
    return parser


def _add_cache(commands: argparse._SubParsersAction) -> None:
    kept = commands.add_parser("cache", help="list, explain, prune or clear the kernels on disk")
    kept.set_defaults(run=_list)
    actions = kept.add_subparsers(metavar="action")
    listing = actions.add_parser("list", help="what is kept, most recently used first")
    listing.set_defaults(run=_list)
    explain = actions.add_parser("explain", help="all parts of a key")
    explain.add_argument("key", help="a key, or its first digits")
    explain.set_defaults(run=_explain_key)
    prune = actions.add_parser("prune", help="drop the least recently used beyond a size")
    prune.add_argument("--to", metavar="SIZE", help="500M, 2G; the configured limit by default")
    prune.set_defaults(run=_prune)
    actions.add_parser("clear", help="drop everything").set_defaults(run=_clear)


def _add_configuration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--head-dim-v", type=int, help="of v and the output; that of q by default")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window-left", action="store_true", help="a call bounds the left side")
    parser.add_argument("--window-right", action="store_true", help="... the right side")
    parser.add_argument("--gqa-ratio", type=int, default=1, help="query heads a key/value head")
    parser.add_argument("--return-lse", action="store_true")
    for mod in ("score", "mask"):
        parser.add_argument(
            f"--{mod}-mod",
            metavar="MOD",
            help="a variant (with its example arguments), module:function or file.py:function",
        )
    parser.add_argument("--target", default=DEFAULT_TARGET, help="sm_90a by default")


def _configuration(
    options: argparse.Namespace, sizes: tuple[int, int, int, int] | None = None
) -> dict[str, Any]:
    """The arguments of ``fa_cute.compile`` that a command line names; ``sizes`` of example mods."""
    from fa_cute.configuration import find_mod

    return {
        "head_dim": options.head_dim,
        "head_dim_v": options.head_dim_v,
        "dtype": options.dtype,
        "causal": options.causal,
        "window": (options.window_left, options.window_right),
        "gqa_ratio": options.gqa_ratio,
        "return_lse": options.return_lse,
        "score_mod": options.score_mod and find_mod(options.score_mod, sizes),
        "mask_mod": options.mask_mod and find_mod(options.mask_mod, sizes),
        "target": options.target,
    }


def _bench(rest: list[str]) -> int:
    """Hand the command line over to a benchmark, which lives beside the package in a checkout."""
    name = "attention"
    if rest and not rest[0].startswith("-"):
        name, *rest = rest
    if name not in BENCHES:
        raise ValueError(f"there is no benchmark {name!r}; there are {', '.join(BENCHES)}")
    root = Path(__file__).resolve().parent.parent
    if not (root / "bench" / "__init__.py").is_file():
        raise RuntimeError(
            f"the benchmarks are no part of the installed package, and {root} has none: "
            "run this from a checkout of the repository (pip install -e .)"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(BENCHES[name]).main(rest)


def _demo(options: argparse.Namespace) -> int:
    from fa_cute import demo

    return demo.run()


def _compile(options: argparse.Namespace) -> int:
    import fa_cute

    if options.file is not None:
        return _compile_all(options)
    if options.workers is not None:
        raise ValueError("--workers compile what --from lists; one kernel takes one")
    kernel = fa_cute.compile(**_configuration(options))
    registers, spills, shared, _ = kernel.resources
    found = "compiled" if kernel.source == "compiled" else f"found on {kernel.source}"
    print(f"{kernel.key}  {kernel.plan.target}  {found} in {kernel.seconds:.3f} s")
    print(f"{registers} registers a thread, {spills} bytes spilled, {shared} of shared memory")
    return 0


def _compile_all(options: argparse.Namespace) -> int:
    from fa_cute import configuration
    from fa_cute.ahead import precompile

    started = time.perf_counter()
    results = precompile(
        configuration.load(options.file), workers=options.workers, progress=_show_progress
    )
    for result in results:
        print(f"{result.key}  {result.error or f'{result.source} in {result.seconds:.2f} s'}")
    failed = sum(bool(result.error) for result in results)
    seconds = time.perf_counter() - started
    print(f"{len(results) - failed} kernels in the cache, {failed} failed, {seconds:.1f} s")
    return 1 if failed else 0


def _show_progress(done: int, total: int, result: Any) -> None:
    width = 30
    bar = "#" * (width * done // total)
    end = "\n" if done == total else ""
    print(f"\r[{bar:<{width}}] {done}/{total} kernels", end=end, file=sys.stderr, flush=True)


def _explain(options: argparse.Namespace) -> None:
    import torch

    import fa_cute
    from fa_cute.configuration import dtype_of

    length = options.length
    if length < 0:
        raise ValueError(f"--length is {length}; it is a number of queries and keys, 0 or more")
    asked = _configuration(options, (1, options.gqa_ratio, length, length))
    dtype = dtype_of(asked["dtype"])
    for name in ("gqa_ratio", "head_dim", "head_dim_v"):
        if asked[name] is not None and asked[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {asked[name]}; it is 1 or more")
    head_dim_v = asked["head_dim_v"] or asked["head_dim"]
    q = torch.empty(1, length, asked["gqa_ratio"], asked["head_dim"], dtype=dtype)
    k, v = q[:, :, :1], torch.empty(1, length, 1, head_dim_v, dtype=dtype)
    window = tuple(512 if side else None for side in asked["window"])
    names = ("causal", "return_lse", "score_mod", "mask_mod", "target")
    given = {name: asked[name] for name in names}
    print(fa_cute.explain(q, k, v, window=window, plot=options.plot, **given))


def _bundle(options: argparse.Namespace) -> None:
    from fa_cute.bundle import bundle

    kernels = bundle(options.out, keys=options.keys or None, target=options.target)
    for kernel in kernels:
        parts = kernel["parts"]
        print(f"{kernel['key']}  {variant_of(kernel)}  {plan_words(parts)}  {parts['target']}")
    print(f"{len(kernels)} kernels in {options.out}")


def _store() -> cache.Store:
    store = cache.opened()
    if store is None:
        raise ValueError("there is no kernel cache: it is switched off or cannot be used")
    return store


def _list(options: argparse.Namespace) -> None:
    store = _store()
    entries, now = store.entries(), time.time()
    print(f"{len(entries)} kernels, {_size(sum(e.size for e in entries))}, in {store.path}")
    rows = [("key", "variant", "plan", "target", "size", "age", "used", "hits")]
    for entry in entries:
        rows.append(
            (
                entry.key[:12],
                variant_of(entry.about),
                plan_words(entry.parts),
                f"{entry.parts['target']} cu{entry.parts['cuda']}",
                _size(entry.size),
                _age(now - entry.created),
                _age(now - entry.used),
                str(entry.hits),
            )
        )
    print_table(rows)


def variant_of(about: Mapping[str, Any]) -> str:
    """The variants whose graphs a kernel holds, else the digests of its graphs; or "plain"."""
    names = _variants_by_form()
    mods = about["mods"].items()
    return "+".join(names.get(form(t), about["parts"][name][:8]) for name, t in mods) or "plain"


@functools.cache
def _variants_by_form() -> dict[str, str]:
    """Names of the variants by the form of their graphs; a size may change what folds away."""
    from fa_cute import variants
    from fa_cute.host.planning import Mods

    found = {}
    for name, variant in variants.ALL.items():
        for heads in (8, 20):
            built = variant.build("cpu", variants.Shape(heads=heads))
            mods = Mods.of(built.get("score_mod"), built.get("mask_mod"))
            for _, traced in mods.present():
                found[form(traced.graph.describe())] = name
    return found


def plan_words(parts: Mapping[str, str]) -> str:
    """The plan's facts in a few words: direction, dtype, head dims, and what is switched on."""
    dims = parts["head_dim"]
    if parts["head_dim_v"] != dims:
        dims += f"/{parts['head_dim_v']}"
    words = [parts["direction"], parts["dtype"], f"d{dims}"]
    if parts["gqa_ratio"] != "1":
        words.append(f"gqa{parts['gqa_ratio']}")
    words += [name for name in ("causal", "return_lse", "sinks") if parts[name] == "True"]
    if "True" in parts["window"]:
        words.append(f"window{parts['window']}")
    return " ".join(words)


def _explain_key(options: argparse.Namespace) -> None:
    found = [entry for entry in _store().entries() if entry.key.startswith(options.key)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} kernels have a key that starts with {options.key!r}")
    entry = found[0]
    print(f"key {entry.key}: {variant_of(entry.about)}, {plan_words(entry.parts)}")
    width = max(map(len, entry.parts))
    for name, value in sorted(entry.parts.items()):
        print(f"  {name:<{width}}  {value}")
    for name, description in entry.about["mods"].items():
        print(f"{name}\n{description}")
    print(f"compiled in {entry.about['seconds']} s; {entry.about['resources']}")
    print(f"{entry.path}: {_size(entry.size)}, loaded {entry.hits} times")


def _prune(options: argparse.Namespace) -> None:
    limit = cache.size_limit() if options.to is None else cache.parse_size(options.to)
    dropped = _store().prune(limit)
    print(f"dropped {len(dropped)} kernels, {_size(sum(e.size for e in dropped))}")


def _clear(options: argparse.Namespace) -> None:
    print(f"dropped {_store().clear()} kernels")


def _size(count: int) -> str:
    return f"{count / 1024:.0f} KiB" if count < 1 << 20 else f"{count / (1 << 20):.1f} MiB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns; the first is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for at, row in enumerate(rows):
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())
        if at == 0:
            print("  ".join("-" * width for width in widths))
