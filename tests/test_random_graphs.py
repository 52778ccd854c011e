"""Random graphs: whole regions made kernels, and whole models through the pipeline.

Kernels are compared with float64: two units in the last place of float16, 1e-5 for float32, 1e-12 for float64, of the
output's magnitude, and what a few roundings of float32 at every operator change in that output (the graph may be badly
conditioned).  Fused models must equal their originals bit for bit where no kernels are registered.

``ONNXFUSE_GRAPHS`` sets how many regions of each sort are drawn, 60 by default, and twice the number of models;
``ONNXFUSE_HYPOTHESIS=explore`` draws new ones, ``first`` does so without shrinking.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from emulator import prepare, run_plan, variants_that_hold
from graph_strategies import GROWERS, RandomGraph, graphs
from hypothesis import given, note, settings
from kernel_harness import Made, arguments, attempt
from onnx import numpy_helper
from reference import Array, difference, element_types, evaluate, evaluate_nodes, numpy_type, tolerance

from onnxfuse.lowering.lower import hosts
from onnxfuse.lowering.operators import LOWERINGS
from onnxfuse.pipeline import Optimised, Options, optimise
from onnxfuse.refusal import Refusal
from onnxfuse.schedules import Kernel

COUNT = int(os.environ.get("ONNXFUSE_GRAPHS", "60"))

ELSEWHERE = {
    "PRelu",
    "Swish",
    "RMSNormalization",
    "SimplifiedLayerNormalization",
    "NegativeLogLikelihoodLoss",
    "Range",
    "com.microsoft.SimplifiedLayerNormalization",
    "onnxfuse.canonical.Silu",
    "onnxfuse.canonical.SafeSoftmax",
}
"""Operators that no random graph has: not of opset 21, not of the CPU provider, or of the canonical view alone."""

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
TURNED = ("Transpose", "Transpose", "Transpose", "Reshape", "Slice", "Split", "Concat", "Expand", "Add", "Neg", "Where",
          "Greater", "Cast", "GatherElements", "DepthToSpace")
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
                moved = (
                    max(float(np.nanmax(np.abs(other[name] - exact[name]), initial=0.0)) for other in disturbed)
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
    onnx.checker.check_model(graph.model, full_check=True)
    made = attempt(graph.model, graph.sizes if schedule is not None else None, schedule)
    if isinstance(made, Refusal):
        known = ("reduction-structure", "reduction-axis", "iteration-shape", "region-depth")
        assert made.code in (*known, *(("not-transposing",) if schedule == "tiled" else ())), made
        return
    assert isinstance(made, Made)
    outputs = {value.name: value.type.tensor_type.elem_type for value in graph.model.graph.output}
    values = constants(graph.model) | dict(graph.inputs)
    everything = evaluate(graph.model, graph.inputs)
    host = [everything[value.name] for value in hosts(made.lowered.sized)]
    compare(graph.model, graph.model.graph.node, values, outputs, made.kernel, arguments(made, graph.inputs), host)


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
@given(graphs(most=8, names=TURNED))
def test_tiled_regions(graph: RandomGraph) -> None:
    check_region(graph, "tiled")


@settings(max_examples=COUNT)
@given(graphs(most=7, names=ROWS))
def test_regions_of_rows(graph: RandomGraph) -> None:
    check_region(graph)


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def fused(graph: RandomGraph) -> Optimised:
    options = Options(dims=graph.sizes, target="H100", least_gain=0.0, verify=False)
    return optimise(graph.model, options)


def check_model(graph: RandomGraph) -> None:
    """The fused model equals the original without kernels, and each of its kernels is right."""
    note(onnx.printer.to_text(graph.model))
    note(str(graph.sizes))
    result = fused(graph)
    onnx.checker.check_model(result.model)
    names = [value.name for value in graph.model.graph.output]
    try:
        original = session(graph.model)
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
        original = None
    if original is not None:
        before = original.run(names, dict(graph.inputs))
        after = session(result.model).run(names, dict(graph.inputs))
        for name, a, b in zip(names, before, after, strict=True):
            assert a.tobytes() == b.tobytes(), name
    everything = constants(graph.model) | evaluate(graph.model, graph.inputs)
    types = element_types(graph.model)
    declared = {name: array.astype(numpy_type(types[name])) for name, array in everything.items()}
    makers = {name: node for node in graph.model.graph.node for name in node.output}
    prepare([fusion.kernel.source for fusion in result.plan.fusions])
    for fusion in result.plan.fusions:
        nodes = [makers[next(value.name for value in node.outputs if value is not None)] for node in fusion.nodes]
        inside = {name for node in nodes for name in node.output}
        outside = {name: array for name, array in declared.items() if name not in inside}
        outputs = {value.name: types[value.name] for value in fusion.outputs}
        compare(
            graph.model,
            nodes,
            outside,
            outputs,
            fusion.kernel,
            [declared[value.name] for value in fusion.tensors],
            [declared[value.name] for value in fusion.hosts],
        )


@settings(max_examples=max(COUNT // 2, 1))
@given(graphs(most=25))
def test_models(graph: RandomGraph) -> None:
    check_model(graph)


@pytest.mark.slow
@settings(max_examples=10 * COUNT)
@given(graphs(most=80))
def test_large_models(graph: RandomGraph) -> None:
    check_model(graph)


def test_random_graphs_are_fused() -> None:
    """What the tests above look at: most models have at least one fused region, and some several."""
    found: list[int] = []

    @settings(max_examples=30, derandomize=True)
    @given(graphs(most=25))
    def count(graph: RandomGraph) -> None:
        found.append(len(fused(graph).plan.fusions))

    count()
    assert sum(number > 0 for number in found) > len(found) / 2 and max(found) > 1


def test_every_operator_grows() -> None:
    lowered = {f"{domain}.{op}" if domain else op for domain, op in LOWERINGS}
    assert lowered - set(GROWERS) - ELSEWHERE == set()


def test_prepare_compiles_what_is_run() -> None:
    """A text that does not compile is an error, not a kernel that is skipped."""
    from emulator import EmulatorError

    with pytest.raises(EmulatorError, match="does not compile"):
        prepare(['extern "C" __global__ void k() { nothing(); }'])
