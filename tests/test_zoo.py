"""Bars on real models: those of benchmarks/zoo, with random weights, fused at the sizes of their rows.

One model is on disk at a time for each worker; a model's tests run one after the other.
"""

from __future__ import annotations

import gc
import importlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import onnx
import onnxruntime
import pytest
from emulator import prepare
from zoo_models import (
    BENCHMARKS,
    LATER,
    MODELS,
    TARGET,
    Array,
    Emulation,
    ZooModel,
    bits,
    captured,
    compile_failures,
    distinct,
)

from onnxfuse.graph.sizes import shape_of
from onnxfuse.graph.store import whole
from onnxfuse.ir.contractions import operations
from onnxfuse.ir.tensors import Contract, postorder
from onnxfuse.lowering.lower import Lowered, lower
from onnxfuse.measurements import Measurements, find_measurements
from onnxfuse.operators import OperatorClass, classify, flops_of
from onnxfuse.operators.classes import is_convolution
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.hardware import find_profile
from onnxfuse.planning.objective import LEAST_GAIN
from onnxfuse.planning.regions.contractions import STAGE as ATTENTION
from onnxfuse.planning.regions.products import STAGE as PRODUCTS
from onnxfuse.reporting import as_json, report_of
from onnxfuse.resources import rules_folder
from onnxfuse.rewriting import exact_form, read_fused, save, unfuse
from onnxfuse.rules import load_rules

sys.path.append(str(BENCHMARKS))

LONGEST = 10.0
"""Seconds of CPU time that optimising one model may take, loading included: 2 to 5 on machines that were tried."""

SOME = 12
"""Kernels of a model that are compiled and run without --slow."""

MULTIPLYING = (PRODUCTS, ATTENTION)
"""Rules of the kernels with products."""

MANY = 2_000_000
"""Elements of a kernel's largest input or output from which on edge inputs are left to --slow."""


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=[pytest.mark.xdist_group(f"zoo-{name}"), *([pytest.mark.slow] if name in LATER else [])])
    for name in MODELS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooModel]:
    folder = tmp_path_factory.mktemp("zoo")
    yield ZooModel.hydrate(request.param, folder)
    shutil.rmtree(folder)
    gc.collect()


@pytest.fixture(scope="module")
def fused_file(model: ZooModel) -> Path:
    """The model fused for its first row, saved."""
    path = model.path.with_suffix(".fused.onnx")
    optimised = model.rows[0].optimised
    save(optimised.model, path, source=optimised.loaded)
    return path


def test_optimising_is_quick(model: ZooModel) -> None:
    assert [(row.dims, row.seconds) for row in model.rows if row.seconds >= LONGEST] == []


def test_naming_patterns_costs_nothing(model: ZooModel) -> None:
    """Fuse rules are names: with them a plan is predicted to be as quick as without, but for 0.1%."""
    named = [rule.id for rule in load_rules([rules_folder()]).fuse]
    row = model.rows[0]
    plain = optimise(row.optimised.loaded, Options(
        dims=row.dims, target=TARGET, verify=False, disable=named, kernels=model.kernels))
    seconds = [CostModel(made.ledger, made.profile).total(made.plan.fusions)
               for made in (row.optimised, plain)]
    assert seconds[0] <= 1.001 * seconds[1]


@pytest.fixture(scope="session")
def measurements() -> Iterator[Measurements]:
    """What was measured of the zoo on the GPU that it is planned for."""
    with importlib.import_module("common").packed(BENCHMARKS / "zoo" / f"measured-{TARGET.lower()}.sqlite.xz") as file:
        found, notes = find_measurements(find_profile(TARGET), file)
        assert found is not None, notes
        yield found


def test_what_predictions_take_in_was_measured_to_gain(model: ZooModel, measurements: Measurements) -> None:
    """Regions with products, as far as their kernels are those that were measured."""
    foreseen = importlib.import_module("foreseen").foreseen
    found = [each for row in model.rows for each in foreseen(model.name, row.optimised, measurements)]
    assert [each for each in found if each.gain is not None and each.gain < 1.0] == []


def test_every_fusion_gains(model: ZooModel) -> None:
    for row in model.rows:
        assert row.optimised.plan.fusions
        for fusion in row.optimised.plan.fusions:
            cost, node = fusion.cost, fusion.nodes[0].label
            assert cost.estimated_speedup > LEAST_GAIN, (row.dims, fusion.rule, node)
            assert cost.bytes_after <= cost.bytes_before, (row.dims, fusion.rule, node)


def test_plain_runtime_gives_the_originals_bits(model: ZooModel, fused_file: Path) -> None:
    """The fused file passes the checker and equals the original in every bit, on the CPU provider with nothing of
    onnxfuse and with the runtime's optimisations off, where biases of products come last that fused nodes add.
    Types: the model's own; tolerance: none."""
    onnx.checker.check_model(str(fused_file))
    feeds = model.feeds()
    found = run(fused_file, feeds)
    optimised = model.rows[0].optimised
    original = whole(optimised.loaded.proto)
    exact = exact_form(original, optimised.model)
    path = model.path
    if exact is not original:
        path = model.path.with_suffix(".exact.onnx")
        onnx.save(exact, path)
    wanted = run(path, feeds)
    assert wanted.keys() == found.keys()
    for name, array in wanted.items():
        assert array.size
        assert bits(array) == bits(found[name]), name


def run(path: Path, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Every output of a model in plain ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def test_optimising_again_changes_nothing(model: ZooModel, fused_file: Path) -> None:
    first = model.rows[0]
    again = optimise(fused_file, Options(dims=first.dims, target=TARGET, verify=False, kernels=model.kernels))
    assert [fusion.rule for fusion in again.plan.fusions] == []
    assert len(read_fused(again.model)) == len(first.optimised.plan.fusions)
    assert again.model.SerializeToString(deterministic=True) == (
        first.optimised.model.SerializeToString(deterministic=True))


def test_unfuse_gives_the_original_back(model: ZooModel) -> None:
    optimised = model.rows[0].optimised
    restored, original = unfuse(optimised.model), whole(optimised.loaded.proto)
    assert [node.SerializeToString(deterministic=True) for node in restored.graph.node] == [
        node.SerializeToString(deterministic=True) for node in original.graph.node]
    assert restored.SerializeToString(deterministic=True) == original.SerializeToString(deterministic=True)


def test_every_product_has_a_meaning(model: ZooModel) -> None:
    """One contraction each, of as many operations as the operator's record counts without the bias; layers share it."""
    row = model.rows[0]
    graph, distinct_ones = row.optimised.graph, set()
    products = [node for node in graph.nodes if classify(node, graph) is OperatorClass.HEAVY]
    for node in products:
        lowered = lower([node], [value for value in node.outputs if value is not None], graph)
        assert isinstance(lowered, Lowered), lowered
        (product,) = [tensor for tensor in postorder(lowered.program.outputs) if isinstance(tensor, Contract)]
        counted = operations(product).evaluate(
            {name: size.evaluate(row.dims) for name, size in lowered.binding.names.items()})
        bias = prod(shape_of(node.outputs[0], row.dims)) if len(node.inputs) > 2 else 0
        assert flops_of(node, row.dims) == counted + bias, node.label
        distinct_ones.add(lowered.structure)
    assert 0 < len(distinct_ones) < 0.7 * len(products)


def test_an_independent_recount_agrees(model: ZooModel) -> None:
    """Bytes within 2% of the report's, kernels the same; counted from the two models by benchmarks/recount.py."""
    recount = importlib.import_module("recount")
    for row in model.rows:
        report = as_json(report_of(row.optimised))
        before, after = (
            recount.count(proto, dict(row.dims)) for proto in (row.optimised.loaded.proto, row.optimised.model))
        assert (before.unknown, after.unknown, report["unknown"]) == (set(), set(), [])
        found = {"bytes_products": before.products, "bytes_before": before.other,
                 "bytes_products_after": after.products, "bytes_after": after.other}
        for figure, counted in found.items():
            assert counted == pytest.approx(report[figure], rel=0.02), (figure, row.dims)
        assert (before.kernels, after.kernels) == (report["kernels_before"], report["kernels_after"])


def chosen(model: ZooModel, slow: bool) -> dict:
    """Distinct kernels of a model's rows, some of them from all over it and of those with products, which have tests of
    their own, one, of matrices where there are any and the one that computes least, or all."""
    kernels = distinct([row.optimised for row in model.rows])
    if slow:
        return kernels
    costs = {region.kernel.source: (any(map(is_convolution, region.nodes)), row.optimised.ledger.region(region).flops)
             for row in model.rows for region in row.optimised.regions}
    multiplying = [text for text, (_, node) in kernels.items() if node.rule in MULTIPLYING]
    multiplying.sort(key=costs.__getitem__)
    others = [text for text in kernels if text not in multiplying]
    some = [*others[::-(-len(others) // SOME) or 1], *multiplying[:1]]
    return {text: kernels[text] for text in some}


def test_kernels_compile(model: ZooModel, request: pytest.FixtureRequest) -> None:
    kernels = chosen(model, request.config.getoption("--slow"))
    named = {text: (f"{node.name} ({node.rule})", node.plan.options) for text, (_, node) in kernels.items()}
    failures = compile_failures(named, every=request.config.getoption("--slow"))
    assert not failures, "\n".join(failures)


def test_kernels_pass_the_emulator(
    model: ZooModel, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distinct kernels, made for the sizes of the zoo's rows, on what they read in a run at small sizes: every variant
    that holds, aligned memory; some of each model, all with --slow.  Reference: the region's body in float64;
    tolerances and types: ``verifying.tolerances``.  A fault of one percent in it must be found."""
    kernels = chosen(model, request.config.getoption("--slow"))
    prepare(list(kernels))
    dims, feeds, failures = model.dims(model.small), model.feeds(), []
    for row in model.rows:
        emulation = Emulation.of(row.optimised)
        nodes = [node for owner, node in kernels.values() if owner is row.optimised]
        for node, arrays in captured(row.optimised, nodes, feeds, dims):
            with monkeypatch.context() as patch:
                if not request.config.getoption("--slow") and max(map(prod, shapes(arrays))) >= MANY:
                    patch.setattr("onnxfuse.verifying.nodes.edges", lambda *given: iter(()))
                failures += emulation.failures(node, arrays)
    assert not failures, "\n".join(failures)


def shapes(arrays: Mapping[str, Array]) -> list[tuple[int, ...]]:
    """Of the arrays."""
    return [array.shape for array in arrays.values()]
