"""Random graphs: whole regions made kernels, and whole models through the pipeline.

Kernels are compared with float64: two units in the last place of float16, 1e-5 for float32, 1e-12 for float64, of the
output's magnitude, and what a few roundings of float32 at every operator change in that output (the graph may be badly
conditioned).  Fused models must equal their originals bit for bit where no kernels are registered.  Regions are judged
by code of this file on the model as ONNX has it.

    pytest tests/test_random_graphs.py --graphs 2000 --seed 1000

Whole models come from seeds, one after the other; a failure names its seed and shows the smallest model on the way to
it that fails too.  Single regions are hypothesis's, ``ONNXFUSE_GRAPHS`` of each sort, 60 by default;
``ONNXFUSE_HYPOTHESIS=explore`` draws new ones, ``first`` does so without shrinking.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from random import Random

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from emulator import EmulatorError, prepare, run_plan, variants_that_hold
from graph_builder import LARGEST
from graph_strategies import GROWERS, RandomGraph, graphs, seeded
from hypothesis import given, note, settings
from kernel_harness import Made, attempt
from onnx import numpy_helper
from plain_session import ENDING, RELEASE, State, bytes_of, session
from reference import Array, difference, element_types, evaluate, evaluate_nodes, numpy_type, tolerance

from onnxfuse.graph import build_graph, from_proto
from onnxfuse.graph.model import Node
from onnxfuse.lowering.lower import hosts
from onnxfuse.operators import infer, lowered
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.hardware import Profile, find_profile
from onnxfuse.refusal import Refusal
from onnxfuse.resources import rules_folder
from onnxfuse.rewriting import read_fused, unfuse
from onnxfuse.rules import RuleSet, canonicalise, load_rules
from onnxfuse.schedules import Kernel

COUNT = int(os.environ.get("ONNXFUSE_GRAPHS", "60"))

CRASHES_EMPTY = {"InstanceNormalization"}
"""Operators with which ONNX Runtime's CPU provider (1.31.1) ends the process where a tensor has no elements."""

GIVES_BACK = {"Identity", "Dropout", "Cast", "Add", "Sub", "Mul", "Div"}
"""Operators that may do nothing but give their operand back."""

ONE_BY_ONE = {"com.microsoft.QuantizeLinear", "com.microsoft.DequantizeLinear", "GridSample"}
"""Operators that these graphs do not draw: the standard's of the same name stand for the first two, test_schema_graphs
draws the last, and test_lowering_operators has every form of each."""

CHUNK = 10
"""Models of one test, whose kernels are compiled together."""

VIEWS = (
    "Transpose",
    "Reshape",
    "Unsqueeze",
    "Slice",
    "Split",
    "Concat",
    "Tile",
    "Expand",
    "Flatten",
    "Trilu",
    "Add",
    "Where",
    "Greater",
    "Cast",
    "Neg",
    "DepthToSpace",
    "SpaceToDepth",
    "GatherElements",
)
TRANSPOSED = ("Transpose", "Transpose", "Transpose", "Reshape", "Slice", "Split", "Concat", "Expand", "Add", "Neg",
              "Where", "Greater", "Cast", "GatherElements", "DepthToSpace")
ROWS = (
    "Softmax",
    "LayerNormalization",
    "ReduceMax",
    "ReduceMean",
    "ReduceSum",
    "LogSoftmax",
    "Add",
    "Sub",
    "Mul",
    "Exp",
    "Concat",
    "Slice",
    "Reshape",
    "Neg",
    "Gelu",
)

TURNED_ROWS = ("Transpose", "Transpose", "Transpose", "Softmax", "Softmax", "LayerNormalization", "ReduceMax",
               "ReduceMean", "Add", "Mul", "Exp", "Where", "Concat", "Cast")


def compare(
    model: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    values: Mapping[str, Array],
    outputs: Mapping[str, int],
    kernel: Kernel,
    given_arrays: list[Array],
    host: list[Array],
) -> None:
    """Assert that a kernel computes what the nodes do."""
    exact = evaluate_nodes(model, nodes, values)
    disturbed = [evaluate_nodes(model, nodes, values, np.random.default_rng(seed)) for seed in range(3)]
    for variant in variants_that_hold(kernel.plan, given_arrays, host):
        actual = run_plan(kernel.plan, kernel.source, given_arrays, host, variant=variant)
        for (name, dtype), array in zip(outputs.items(), actual, strict=True):
            with np.errstate(all="ignore"):
                # A disturbed operand may lie outside a function's domain, as the exponent of a negative number does:
                # that says nothing about the result.
                moved = (
                    max(float(np.max(np.nan_to_num(np.abs(other[name] - exact[name])), initial=0.0))
                        for other in disturbed)
                    if exact[name].dtype == np.float64
                    else 0.0
                )
                largest = (
                    float(np.nanmax(np.abs(exact[name]), initial=0.0, where=np.isfinite(exact[name])))
                    if exact[name].dtype == np.float64
                    else 0.0
                )
            wrong = difference(
                array,
                exact[name],
                dtype,
                length=64,
                scale=largest + 8 * moved / tolerance(dtype, 64) if dtype in (1, 10, 11, 16) else None,
            )
            assert not wrong, f"{name}, variant {variant}: {wrong}"


def check_region(graph: RandomGraph, schedule: str | None = None) -> None:
    """The whole graph as one kernel, where it can be one; see ``attempt``."""
    note(onnx.printer.to_text(graph.model))
    note(str(graph.sizes))
    if graph.standard:
        onnx.checker.check_model(graph.model, full_check=True)
    made = attempt(graph.model, graph.sizes if schedule is not None else None, schedule)
    if isinstance(made, Refusal):
        known = ("reduction-structure", "scan-structure", "iteration-shape", "region-depth", "tile-memory")
        assert made.code in (*known, *(("not-transposing",) if schedule == "tiled" else ())), made
        return
    assert isinstance(made, Made)
    outputs = {value.name: value.type.tensor_type.elem_type for value in graph.model.graph.output}
    values = constants(graph.model) | dict(graph.inputs)
    everything, types = values | evaluate(graph.model, graph.inputs), element_types(graph.model)
    host = [everything[value.name] for value in hosts(made.lowered.sized)]
    given_arrays = [everything[value.name].astype(numpy_type(types[value.name])) for value in made.lowered.tensors]
    compare(graph.model, graph.model.graph.node, values, outputs, made.kernel, given_arrays, host)


def constants(model: onnx.ModelProto) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@settings(max_examples=COUNT)
@given(graphs(most=8))
def test_small_regions(graph: RandomGraph) -> None:
    check_region(graph)


@settings(max_examples=COUNT)
@given(graphs(most=10, names=VIEWS))
def test_regions_of_views(graph: RandomGraph) -> None:
    check_region(graph)


@settings(max_examples=2 * COUNT)
@given(graphs(most=8, names=TRANSPOSED))
def test_tiled_regions(graph: RandomGraph) -> None:
    check_region(graph, "tiled")


@settings(max_examples=COUNT)
@given(graphs(most=7, names=ROWS))
def test_regions_of_rows(graph: RandomGraph) -> None:
    check_region(graph)


@settings(max_examples=COUNT)
@given(graphs(most=6, names=TURNED_ROWS))
def test_regions_of_turned_rows(graph: RandomGraph) -> None:
    check_region(graph)


# ---- Whole models. ----


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        first, count = (metafunc.config.getoption(name) for name in ("--seed", "--graphs"))
        chunks = [range(start, min(start + CHUNK, first + count)) for start in range(first, first + count, CHUNK)]
        metafunc.parametrize("seeds", chunks, ids=[f"{chunk.start}-{chunk.stop - 1}" for chunk in chunks])


@pytest.fixture(autouse=True)
def _shipped_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped rules and profiles are read once, not for each of thousands of models."""
    monkeypatch.setattr("onnxfuse.pipeline.load_rules", lambda places, disable: rules())


@cache
def rules() -> RuleSet:
    return load_rules([rules_folder()])


@cache
def target() -> Profile:
    return find_profile("H100")


def run(loaded: onnxruntime.InferenceSession, names: list[str],
        inputs: Mapping[str, Array]) -> list[tuple[int, list[int], bytes]]:
    """Type, shape and bytes of each output."""
    found = loaded.run_with_ort_values(names, {name: _ortvalue(array) for name, array in inputs.items()})
    shapes = [value.shape() for value in found]
    return [(value.element_type(), shape, bytes_of(value)) for value, shape in zip(found, shapes, strict=True)]


def _ortvalue(array: Array) -> onnxruntime.OrtValue:
    if array.dtype == ml_dtypes.bfloat16:  # NumPy has no such type, and ONNX Runtime none of ml_dtypes
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16),
                                                                       onnx.TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def fused(graph: RandomGraph) -> Optimised:
    return optimise(graph.model, Options(dims=graph.sizes, target=target(), least_gain=0.0, verify=False,
                                         database=False))


def situations(graph: RandomGraph, seed: int) -> list[dict[str, int]]:
    """Sizes of the symbols: those that were planned for, odd ones, and the corners by turns."""
    rng = Random(seed)
    odd = {name: rng.choice((3, 5, 7, 11, LARGEST)) for name in graph.sizes}
    crashes = any(node.op_type in CRASHES_EMPTY | ENDING for node in graph.model.graph.node)
    corner = {name: 1 if crashes else rng.choice((0, 1)) for name in graph.sizes}
    return [dict(graph.sizes), *([odd, corner] if graph.sizes else [])]


def check_model(graph: RandomGraph, result: Optimised, seed: int) -> None:
    """The fused model equals the original without kernels, its regions are legal, and its kernels are right."""
    if graph.standard:
        onnx.checker.check_model(result.model)
    check_regions(graph.model, result)
    assert [refusal for refusal in result.refusals if refusal.code == "broken-node"] == []
    types = element_types(graph.model)
    makers = {name: node for node in graph.model.graph.node for name in node.output}
    before, after = session(graph.model), session(result.model)
    assert (before is None) == (after is None), "one of the models has no session"
    for number, sizes in enumerate(situations(graph, seed)):
        inputs = dict(graph.arrays(sizes))
        if before is not None and after is not None:
            names = [value.name for value in graph.model.graph.output]
            try:
                wanted = run(before, names, inputs)
            except (State.Fail, State.InvalidArgument, State.RuntimeException) as error:
                short = RELEASE < (1, 24) and "must be larger than 1" in str(error)  # a norm of rows of one element
                assert number or short, f"the original does not run: {error}"
                continue  # sizes that the original does not take
            for name, a, b in zip(names, wanted, run(after, names, inputs), strict=True):
                assert a == b, f"{name} at {sizes}"
        try:
            everything = constants(graph.model) | evaluate(graph.model, inputs)
        except (ValueError, IndexError, ZeroDivisionError):
            assert number, "the reference does not run"
            continue
        declared = {name: array.astype(numpy_type(types[name])) for name, array in everything.items()}
        for fusion in result.plan.fusions:
            nodes = [makers[next(value.name for value in node.outputs if value is not None)] for node in fusion.nodes]
            inside = {name for node in nodes for name in node.output}
            outside = {name: array for name, array in declared.items() if name not in inside}
            try:
                compare(graph.model, nodes, outside, {value.name: types[value.name] for value in fusion.outputs},
                        fusion.kernel, [declared[value.name] for value in fusion.tensors],
                        [declared[value.name] for value in fusion.hosts])
            except (AssertionError, EmulatorError) as error:
                raise AssertionError(f"{fusion.rule} of {', '.join(node.op_type for node in nodes)} at {sizes}: "
                                     f"{error}") from error


def check_regions(model: onnx.ModelProto, result: Optimised) -> None:
    """Every region is convex, takes in no node of another but to compute it again, and reads and writes exactly what
    crosses its border: what another region reads and computes for itself does not.

    A Shape node waits for nothing here: sizes follow from the inputs', and the fused model, which must be sorted, may
    take them from another value.
    """
    nodes = list(model.graph.node)
    maker = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    users: dict[str, set[int]] = {}
    waiting: dict[str, set[int]] = {}
    for place, node in enumerate(nodes):
        for name in filter(None, node.input):
            users.setdefault(name, set()).add(place)
            if node.op_type != "Shape":
                waiting.setdefault(name, set()).add(place)
    types, results = element_types(model), {value.name for value in model.graph.output}
    standing = {name for node in result.model.graph.node if node.domain != "onnxfuse" for name in node.output}
    counted: set[int] = set()
    regions = [_places(fusion.nodes, maker) for fusion in result.plan.fusions]
    holders: dict[int, list[set[int]]] = {}
    for inside in regions:
        for place in inside:
            holders.setdefault(place, []).append(inside)
    for fusion, inside in zip(result.plan.fusions, regions, strict=True):
        what = f"{fusion.rule}: {sorted(nodes[place].op_type for place in inside)}"
        # What gives its operand back several may hold, and it may stand beside them.
        idle = {place for place in inside if nodes[place].op_type in GIVES_BACK}
        own = inside - _places(fusion.again, maker) - idle
        assert not counted & own, f"nodes of two regions: {what}"
        counted |= own
        made = {name for place in inside for name in nodes[place].output if name}
        written = {value.name for value in fusion.outputs}
        done_again = inside - own - idle
        assert all(len(holders[place]) > 1 for place in done_again), f"nobody else holds what is done again: {what}"
        beyond = {user for name in written for user in waiting.get(name, ()) if user not in inside}
        edge = list(beyond)
        while edge:
            for user in {user for name in nodes[edge.pop()].output for user in waiting.get(name, ())} - beyond:
                beyond.add(user)
                edge.append(user)
        assert not beyond & inside, f"a way out of the region and back: {what}"
        for name in made:
            reading = {user for user in waiting.get(name, set()) - inside
                       if user not in holders or not all(maker[name] in held for held in holders[user])}
            if name in results or reading:
                found = name in written or (maker[name] in idle and name in standing)
                assert found, f"'{name}' is used outside and not written: {what}"
            elif name in written:
                reading = {user for user in users.get(name, ()) if not standing.isdisjoint(nodes[user].output)
                           or any(held is not inside for held in holders.get(user, ()))}
                assert reading, f"'{name}' is written for nobody: {what}"
        assert written <= made, what
        read = {name for place in inside for name in nodes[place].input if name} - made
        given = [value.name for value in (*fusion.tensors, *fusion.hosts, *fusion.inlined)]
        assert set(given) == read, f"inputs {sorted(set(given) ^ read)}: {what}"
        assert [output.dtype for output in fusion.kernel.plan.outputs] == [types[v.name] for v in fusion.outputs], what


def _places(nodes: Iterable[Node], maker: Mapping[str, int]) -> set[int]:
    """Positions in the model."""
    return {maker[next(value.name for value in node.outputs if value is not None)] for node in nodes}


def failure(seed: int, most: int = 60, target: int | None = None) -> str | None:
    """What is wrong with the model of a seed, if anything."""
    graph = seeded(seed, most, target)
    try:
        check_model(graph, fused(graph), seed)
    except Exception as error:  # a crash of any sort is what is looked for
        return f"{type(error).__name__}: {error}\n{''.join(traceback.format_tb(error.__traceback__)[-2:])}"
    return None


def explained(seed: int, found: str) -> str:
    """A failure with the smallest model that grows into the one that failed and fails too."""
    size = len(seeded(seed).model.graph.node)
    smaller = next(((target, text) for target in range(1, size) if (text := failure(seed, target=target))), None)
    target, text = smaller or (None, found)
    graph = seeded(seed, target=target)
    return (f"seed {seed}: pytest tests/test_random_graphs.py --graphs 1 --seed {seed}\n{text}\n"
            f"sizes {dict(graph.sizes)}\n{onnx.printer.to_text(graph.model)}")


def test_models(seeds: range) -> None:
    made: list[tuple[int, RandomGraph, Optimised]] = []
    failed: dict[int, str] = {}
    for seed in seeds:
        graph = seeded(seed)
        try:
            if graph.standard:
                onnx.checker.check_model(graph.model, full_check=True)
            made.append((seed, graph, fused(graph)))
        except Exception as error:  # a crash of any sort is what is looked for
            failed[seed] = f"{type(error).__name__}: {error}"
    prepare([fusion.kernel.source for _, _, result in made for fusion in result.plan.fusions])
    for seed, graph, result in made:
        try:
            check_model(graph, result, seed)
        except Exception as error:
            failed[seed] = f"{type(error).__name__}: {error}"
    if failed:
        first = next(iter(failed))
        pytest.fail("\n".join([explained(first, failed[first]),
                               *(f"seed {seed}: {text[:500]}" for seed, text in failed.items() if seed != first)]))


def test_values_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where every value that may be computed again is, whatever it costs; and the way back, node by node."""
    monkeypatch.setattr("onnxfuse.planning.regions.recompute.NEAR", float("inf"))
    found = []
    for seed in range(40):
        graph = seeded(seed)
        result = optimise(graph.model, Options(dims=graph.sizes, target=target(), least_gain=0.0, verify=False,
                                               database=False, eager=True))
        check_regions(graph.model, result)
        if not any(fusion.again for fusion in result.plan.fusions):
            continue
        found.append((seed, graph, result))
        names = [node.name for node in read_fused(result.model)]
        Random(seed).shuffle(names)
        left = result.model
        for name in names:
            left = unfuse(left, [name])
        wanted = graph.model.SerializeToString(deterministic=True)
        assert left.SerializeToString(deterministic=True) == wanted, seed
        assert unfuse(result.model).SerializeToString(deterministic=True) == wanted, seed
    assert len(found) > 10
    for seed, graph, result in found[:4]:
        check_model(graph, result, seed)


def test_random_graphs_are_fused() -> None:
    """What the test above looks at: nearly every node is in a region, small or large, and many models have several."""
    graphs = [seeded(seed) for seed in range(30)]
    found = [[len(fusion.nodes) for fusion in fused(graph).plan.fusions] for graph in graphs]
    assert sum(map(sum, found)) > 0.75 * sum(len(graph.model.graph.node) for graph in graphs)
    assert sum(len(regions) > 2 for regions in found) > len(graphs) / 4
    sizes = [size for regions in found for size in regions]
    assert min(sizes) <= 2 and max(sizes) > 20 and sum(5 <= size <= 20 for size in sizes) > len(sizes) / 4


def test_every_operator_is_drawn(request: pytest.FixtureRequest) -> None:
    """Among the models above is every operator that can be lowered, those of the canonical view as spelled out."""
    first, count = (request.config.getoption(name) for name in ("--seed", "--graphs"))
    known = {f"{domain}.{op}" if domain else op for domain, op in lowered()} - ONE_BY_ONE
    assert known == set(GROWERS)
    seen: set[str] = set()
    for seed in range(first, first + max(count, 200)):
        graph = seeded(seed)
        seen |= {f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in graph.model.graph.node}
        if seed < first + 60:
            view = canonicalise(infer(build_graph(from_proto(graph.model))), rules().canonical).graph
            seen |= {f"{node.domain}.{node.op}" for node in view.nodes if node.domain}
    assert known - seen == set()


def test_a_wrong_region_is_seen() -> None:
    """The checker of regions refuses one that another node's value passes through, and one that hides an output."""
    graph = next(graph for graph in map(seeded, range(100)) if len(fused(graph).plan.fusions) > 1)
    result = fused(graph)
    check_regions(graph.model, result)
    fusion = max(result.plan.fusions, key=lambda fusion: len(fusion.nodes))
    for wrong in (replace(fusion, outputs=()), replace(fusion, tensors=fusion.tensors[1:]),
                  replace(fusion, nodes=fusion.nodes[:-1])):
        plan = replace(result.plan, fusions=(wrong,))
        with pytest.raises(AssertionError):
            check_regions(graph.model, replace(result, plan=plan))


def test_prepare_compiles_what_is_run() -> None:
    """A text that does not compile is an error, not a kernel that is skipped."""
    with pytest.raises(EmulatorError, match="does not compile"):
        prepare(['extern "C" __global__ void k() { nothing(); }'])
