"""The kernel emitter without a GPU: what lowering keeps, where values are placed, the PTX."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable

import pytest
import torch

from fa_cute.device.lower import lower, schedule
from fa_cute.mods.emit_torch import emit
from fa_cute.mods.graph import Graph, Node
from tests import modifier_cases as cases
from tests.tile_kernel import Case, build, compiled, expected

SCALE = 0.37
TILE_N = 128
PER_THREAD = 64 * TILE_N // 128
DIAGONALS = TILE_N // 4 + 2


def _spelled_out(graph: Graph) -> Graph:
    """A lowered graph in the operations that the torch emitter has."""
    nodes: list[Node] = []
    place: list[int] = []

    def add(op: str, *args: int, width: int, attr: object = None) -> int:
        nodes.append(Node(op, args, "float32", width, attr))
        return len(nodes) - 1

    for node in graph.nodes:
        args = tuple(place[arg] for arg in node.args)
        if node.op == "fma":
            product = add("mul", *args[:2], width=node.width)
            place.append(add("add", product, args[2], width=node.width))
        elif node.op == "reciprocal":
            one = add("const", width=1, attr=1.0)
            place.append(add("truediv", one, *args, width=node.width))
        else:
            nodes.append(Node(node.op, args, node.type, node.width, node.attr))
            place.append(len(nodes) - 1)
    return Graph(tuple(nodes), place[graph.result], graph.captured, graph.scalars)


ALL = [*cases.plain(), *cases.operands("cpu"), *cases.loads("float32", "cpu")]


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_lowering_keeps_values(case: Case) -> None:
    generator = torch.Generator().manual_seed(3)
    shape = (cases.BATCH, cases.HEADS, *cases.SHAPE)
    scores = torch.randn(shape, generator=generator, dtype=torch.float64) * 8
    trace = case.traced()
    lowered = lower(trace.graph)
    leaves = {
        name: torch.arange(size).view([-1 if d == at else 1 for d in range(4)])
        for at, (name, size) in enumerate(zip(("b", "h", "q", "kv"), shape, strict=True))
    }
    # The softmax scale is scalar -1: the last of the scalars.
    operands = (_spelled_out(lowered.graph), trace.captured, (*trace.scalars, SCALE))
    if case.kind == "score":
        found = emit(*operands, score=scores, **leaves) * lowered.gain
    else:
        found = torch.where(emit(*operands, **leaves), scores, -torch.inf)
    want = expected(case, scores, SCALE)
    torch.testing.assert_close(
        found.expand(shape).double(), want.double(), rtol=1e-6, atol=1e-6, equal_nan=True
    )


def _named(name: str) -> Case:
    return next(case for case in ALL if case.name == name)


def _alibi() -> Case:
    slopes = torch.rand(cases.HEADS)
    return Case("ALiBi", "score", lambda s, b, h, q, kv: s - slopes[h] * torch.abs(q - kv))


def test_a_positive_factor_of_the_result_is_left_to_the_softmax() -> None:
    assert lower(_named("soft cap").traced().graph).gain == 20.0
    assert lower(_named("divide by a constant").traced().graph).gain == 1.0


def test_lowering_is_the_same_for_equal_graphs() -> None:
    first, second = (lower(_named("T5").traced().graph) for _ in range(2))
    assert first.graph.key == second.graph.key


def test_what_decides_stays_exact() -> None:
    lowered = lower(_named("T5").traced().graph)
    logs = [at for at, node in enumerate(lowered.graph.nodes) if node.op == "log"]
    assert logs and all(lowered.exact[at] for at in logs)
    lowered = lower(_named("floor of a quotient").traced().graph)
    assert "truediv" in {node.op for node in lowered.graph.nodes}


def test_only_dear_diagonals_go_through_shared_memory() -> None:
    def places(case: Case) -> int:
        return len(schedule(case.traced().graph).diagonal)

    assert places(_named("T5")) == 1
    assert places(_named("two dear diagonals")) == 2
    assert places(_named("dilated")) == 1
    assert places(_alibi()) == places(_named("causal")) == places(_named("window")) == 0


def test_short_vectors_are_never_held() -> None:
    plan = schedule(_named("dot").traced().graph)
    nodes = plan.lowered.graph.nodes
    assert all(nodes[at].width == 1 for at in (*plan.tile, *plan.row, *plan.column, *plan.diagonal))


@pytest.mark.compile
def test_scratch_words() -> None:
    from fa_cute.device.mma_sm90 import fragment
    from fa_cute.device.score import scratch_words

    graph = _named("T5").traced().graph
    assert scratch_words(None, fragment(128)) == 0
    assert scratch_words(_alibi().traced().graph, fragment(128)) == 0
    assert [scratch_words(graph, fragment(n)) for n in (64, 65, 128, 192)] == [128, 128, 256, 256]
    assert scratch_words(_named("two dear diagonals").traced().graph, fragment(128)) == 512


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], collections.Counter]:
    """PTX instructions of a kernel of one mod, less what a kernel of ``s + 0`` has."""
    folder = tmp_path_factory.mktemp("ptx")

    def of(case: Case) -> collections.Counter:
        options = f"--keep-ptx --dump-dir {folder}"
        text = compiled([case.traced()], [case.kind], TILE_N, options).artifacts.PTX
        text = text.decode() if isinstance(text, bytes) else str(text)
        found = re.findall(r"^\s+(?:@\S+\s+)?([a-z][\w.]+)\s", text, re.MULTILINE)
        return collections.Counter(found)

    identity = of(Case("nothing", "mask", lambda b, h, q, kv: q >= 0))
    return lambda case: of(case) - identity


@pytest.mark.compile
def test_soft_cap_is_a_product_and_a_tanh(counts: Callable) -> None:
    found = counts(_named("soft cap"))
    assert found["tanh.approx.f32"] == PER_THREAD
    # One product before; this test's kernel multiplies by the gain, which the softmax does not.
    assert found["mul.f32"] <= 2 * PER_THREAD + 2
    assert found["fma.rn.f32"] + found["add.f32"] == 0


@pytest.mark.compile
def test_alibi_is_one_fma_a_score(counts: Callable) -> None:
    found = counts(_alibi())
    assert found["fma.rn.f32"] == PER_THREAD
    floats = ("add.f32", "sub.f32", "mul.f32", "abs.f32", "neg.f32")
    assert sum(found[op] for op in floats) <= 4 * DIAGONALS
    assert found["cvt.rn.f32.s32"] <= 1


@pytest.mark.compile
def test_causal_compares_once_a_diagonal(counts: Callable) -> None:
    found = counts(_named("causal"))
    assert found["setp.gt.s32"] + found["setp.lt.s32"] <= DIAGONALS
    assert found["add.s32"] <= 8


@pytest.mark.compile
def test_loads_happen_at_their_level(counts: Callable) -> None:
    """A column's by one thread of the warpgroup, which leaves it in shared memory."""
    loads = {"tile": 1, "row": 2, "column": 1, "diagonal": 2, "element": PER_THREAD}
    for name, times in loads.items():
        found = counts(_named(f"float32 {name}"))
        assert found["ld.global.nc.b32"] == times, name
        assert found["bar.sync"] == (2 if name in ("column", "diagonal") else 0), name
        if name == "column":
            assert sum(n for op, n in found.items() if op.startswith("ld.shared")) <= TILE_N // 4


@pytest.mark.compile
def test_a_third_load_of_columns_is_each_thread_s(counts: Callable) -> None:
    """Shared memory holds two; what is beyond is loaded where it is used."""
    tables = [torch.rand(256) for _ in range(3)]

    def mod(s, b, h, q, kv):
        return s + tables[0][kv] * s.tanh() + tables[1][kv] * s.sin() + tables[2][kv] * s.cos()

    found = counts(Case("three tables", "score", mod))
    assert found["ld.global.nc.b32"] == 2 + TILE_N // 4 and found["bar.sync"] == 2


@pytest.mark.compile
def test_a_dear_diagonal_is_computed_twice_a_thread(counts: Callable) -> None:
    found = counts(_named("T5"))
    assert found["ld.shared.b32"] == DIAGONALS
    assert found["st.shared.b32"] == found["bar.sync"] == 2
    assert found["fma.rn.f32"] < 2 * PER_THREAD


@pytest.mark.compile
def test_no_local_memory(counts: Callable) -> None:
    for name in ("T5", "dot", "documents", "soft cap"):
        found = counts(_named(name))
        assert not [op for op in found if "local" in op], name


@pytest.mark.compile
def test_operands_compile() -> None:
    """Indices that are loads, short vectors, scalars; the GPU tier runs the same kernel."""
    build(cases.operands("cpu"), cases.TILE_N)


@pytest.mark.compile
def test_a_transposed_fragment_compiles() -> None:
    """Rows are keys, as in the backward; the GPU tier runs the same kernel."""
    build(cases.wide("cpu"), 128, transposed=True)


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["bool", "int64", "float8_e4m3fn", "float8_e5m2", "float64"])
def test_dtypes_compile(dtype: str) -> None:
    build(cases.loads(dtype, "cpu"), cases.TILE_N)


@pytest.mark.compile
def test_all_operations_compile() -> None:
    build(cases.plain(), cases.PLAIN_TILE_N)


def test_planted_tensors_are_surrounded() -> None:
    tensor = cases.planted((3, 5), "float32", "cpu", (1, 0))
    assert tensor.stride() == (1, 3) and tensor.isfinite().all()
    storage = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // 4,), (1,), 0)
    assert math.isnan(storage[255]) and math.isnan(storage[256 + 15])
