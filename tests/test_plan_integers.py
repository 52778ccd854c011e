"""Quantised layers in the planner: what quantises and dequantises comes in with products, and int8 goes between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from emulated import EmulatedRunner, FaultyRunner
from kernel_harness import parse
from onnx import TensorProto, numpy_helper
from quantized_layers import BYTES, HIDDEN, WIDTH, Layers, measured, operators, planned
from unmeasured import UNMEASURED

from onnxfuse.rewriting import unfuse
from onnxfuse.verifying import verify

pytestmark = pytest.mark.usefixtures("few_ways")


def feed_forward(kind: type = np.float32) -> onnx.ModelProto:
    layers = Layers(kind)
    inner = layers.layer(layers.rounded("x"), WIDTH, HIDDEN)
    return layers.model(layers.layer(layers.rounded(inner), HIDDEN, WIDTH))


def projections(kind: type = np.float32) -> onnx.ModelProto:
    """Of one operand, which is dequantised once."""
    layers = Layers(kind)
    x = layers.rounded("x")
    return layers.model(*(layers.node("Neg", layers.layer(x, WIDTH, HIDDEN)) for _ in range(3)), width=HIDDEN)


def test_what_comes_in() -> None:
    """Both ends of a layer: what follows reads 8-bit numbers, where it does not want floats."""
    found = operators(planned(feed_forward(), eager=True), chosen=False)
    layer = ["DequantizeLinear", "DequantizeLinear", "MatMul", "Add", "Relu"]
    assert (layer, True) in found and ([*layer, "QuantizeLinear"], True) in found
    assert (["MatMul", "Add", "Relu"], False) in found  # as it stands beside what dequantises


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("model", [feed_forward, projections])
def test_predictions_decide_where_nothing_was_measured(model: Callable[[type], onnx.ModelProto], kind: type) -> None:
    """By what is known of a GPU all layers are of integers, with weights that lie the other way."""
    source = model(kind)
    made = planned(source, dims={"rows": 8192}, target="H200")
    held = [region for region in made.plan.fusions if any(node.op == "MatMul" for node in region.nodes)]
    assert sum(node.op == "MatMul" for region in held for node in region.nodes) == sum(
        node.op_type == "MatMul" for node in source.graph.node)
    assert all("int8" in region.kernel.entry and region.folded for region in held)
    assert unfuse(made.model) == source


def test_layers_of_other_scales_have_one_kernel() -> None:
    """Each layer's activations have a scale and a zero point of their own, as calibration finds them."""
    layers = Layers(np.float32)
    x = "x"
    for zero, scale in ((3, 2.0**-5), (5, 2.0**-6)):
        matrix = layers.constant(layers.random.standard_normal((WIDTH, WIDTH)).astype(np.float32))
        x = layers.node("MatMul", layers.rounded(layers.node("Relu", x), zero, scale), matrix)
    made = planned(layers.model(x), target=UNMEASURED)
    regions = made.plan.fusions
    assert [[node.op for node in region.nodes] for region in regions] == [
        ["Relu", "QuantizeLinear", "DequantizeLinear"]] * 2
    assert regions[0].kernel.source == regions[1].kernel.source
    result = verify(made, EmulatedRunner())
    assert result.kernels_run and {each.verdict for each in result.nodes} == {"passed"}, result.text()


def test_attentions_end_where_their_result_is_quantised() -> None:
    """The projection behind reads the integers; one of floats may want the numbers that these stand for."""
    layers = Layers(np.float32)
    scores = layers.node("MatMul", "x", layers.node("Transpose", "x", perm=[1, 0]))
    result = layers.node("MatMul", layers.node("Softmax", scores), "x")
    model = layers.model(layers.node("MatMul", layers.rounded(result), layers.weights(WIDTH, WIDTH)))
    made = planned(model, eager=True)
    ends = [[node.op for node in region.nodes][-2:] for region in made.plan.with_products if region.rule == "attention"]
    assert ["MatMul", "QuantizeLinear"] in ends and ["QuantizeLinear", "DequantizeLinear"] in ends


def test_zero_points_that_are_zero_for_each_channel_cost_nothing() -> None:
    """As ONNX Runtime's quantiser writes them: no totals of rows are taken."""
    regions = planned(feed_forward(), eager=True).plan.with_products
    texts = [region.kernel.source for region in regions if BYTES in region.kernel.source]
    assert texts and not any("row_totals = " in text for text in texts)
    assert all("column_totals = " in text for text in texts)


def test_projections_share_what_dequantises_their_operand() -> None:
    found = operators(planned(projections(), eager=True), chosen=False)
    whole = max(found, key=lambda each: len(each[0]))
    assert whole[1] and whole[0].count("DequantizeLinear") == 4 and whole[0].count("MatMul") == 3
    assert whole[0].count("Neg") == 3


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("model", [feed_forward, projections])
def test_what_was_measured_faster_is_taken(model: object, kind: type, tmp_path: Path) -> None:
    """And is right, by the nodes that it stands for."""
    source = model(kind)  # type: ignore[operator]
    made = measured(source, tmp_path / "measurements.sqlite")
    found = operators(made, chosen=True)
    assert found and all(integers for _, integers in found)
    products = [node for node in source.graph.node if node.op_type == "MatMul"]
    assert sum(names.count("MatMul") for names, _ in found) == len(products)
    result = verify(made, EmulatedRunner())
    assert result.kernels_run and {each.verdict for each in result.nodes} == {"passed"}, result.text()
    assert [node.op_type for node in unfuse(made.model).graph.node] == [node.op_type for node in source.graph.node]


@pytest.mark.parametrize("model", [feed_forward, projections])
def test_weights_are_turned_where_that_is_faster(model: object, tmp_path: Path) -> None:
    """What is summed over comes last, for the instruction that reads it so; the model's own weights are in host memory,
    for the nodes that the kernel stands for."""
    source = model()  # type: ignore[operator]
    made = measured(source, tmp_path / "measurements.sqlite", together=10.0)
    regions = [region for region in made.plan.fusions if region.rule == "products"]
    weights = [value for region in regions for value in region.folded]
    count = sum(node.op_type == "MatMul" for node in source.graph.node)
    assert len(weights) == count and all(value in region.tensors for region in regions for value in region.folded)
    initial = {tensor.name: numpy_helper.to_array(tensor) for tensor in made.model.graph.initializer}
    for region in regions:
        own = {value.name for value in region.hosts}
        for value in region.folded:
            name = value.name.removesuffix("_transposed")
            assert name in own and np.array_equal(initial[value.name], initial[name].T)
    result = verify(made, EmulatedRunner())
    assert result.kernels_run and {each.verdict for each in result.nodes} == {"passed"}, result.text()
    back = unfuse(made.model)
    assert [node.op_type for node in back.graph.node] == [node.op_type for node in source.graph.node]
    assert {tensor.name for tensor in back.graph.initializer} == {tensor.name for tensor in source.graph.initializer}


@pytest.mark.parametrize("change", ["transposed", "shared", "odd"])
def test_weights_that_stay_as_they_lie(change: str) -> None:
    """Those that lie so already, that others read too, or that have no vectors."""
    layers, columns = Layers(np.float32), 40 if change == "odd" else HIDDEN
    x, w = layers.rounded("x"), layers.weights(*((columns, WIDTH) if change == "transposed" else (WIDTH, columns)))
    if change == "transposed":
        layers.nodes[-1].attribute[0].i = 0
        layers.constants[-2].CopyFrom(numpy_helper.from_array(
            np.full(columns, 0.5, np.float32), layers.constants[-2].name))
    y = layers.node("Gemm", x, w, transB=1) if change == "transposed" else layers.node("MatMul", x, w)
    results = [layers.node("Relu", y)]
    if change == "shared":
        results.append(layers.node("Neg", w))
    model = layers.model(*results, width=columns)
    if change == "shared":
        model.graph.output[1].type.tensor_type.shape.dim[0].Clear()
    made = planned(model, eager=True)
    assert made.plan.with_products and not any(region.folded for region in made.plan.with_products)


def test_a_faulty_kernel_is_found(tmp_path: Path) -> None:
    made = measured(feed_forward(), tmp_path / "measurements.sqlite")
    assert "failed" in {each.verdict for each in verify(made, FaultyRunner()).nodes}


def test_int8_goes_between_layers(tmp_path: Path) -> None:
    made = measured(feed_forward(), tmp_path / "measurements.sqlite")
    first, second = (region for region in made.plan.fusions if region.rule == "products")
    assert first.outputs[0].dtype == TensorProto.INT8 and first.outputs[0] in second.tensors


OPERATORS = {
    "MatMulInteger": (
        "g (int8[rows,64] a, int8 z, float s) => (float[rows,96] y) <int8[64,96] w = {W}, float[96] t = {T}> "
        "{ p = MatMulInteger(a, w, z) q = Cast<to = 1>(p) f = Mul(s, t) r = Mul(q, f) y = Relu(r) }"),
    "QLinearMatMul": (
        "g (int8[rows,64] a) => (float[rows,96] y) <int8[64,96] w = {W}, float s = {0.03125}, int8 z = {3}, "
        "float t = {0.015625}, int8 u = {0}, float o = {0.71}> "
        "{ p = QLinearMatMul(a, s, z, w, t, u, o, z) q = DequantizeLinear(p, o, z) y = Relu(q) }"),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_on_integers_come_in_too(name: str, tmp_path: Path) -> None:
    """With what makes floats of their results, whatever the session says of TF32."""
    random = np.random.default_rng(0)
    weights = ",".join(map(str, random.integers(-99, 99, 64 * 96)))
    model = parse(OPERATORS[name].replace("W}", f"{weights}}}").replace("T}", ",".join(["0.5"] * 96) + "}"))
    made = measured(model, tmp_path / "measurements.sqlite", provider_options={"use_tf32": "0"})
    ((names, integers),) = operators(made, chosen=True)
    assert integers and name in names and names[-1] == "Relu"
    result = verify(made, EmulatedRunner())
    assert result.kernels_run and {each.verdict for each in result.nodes} == {"passed"}, result.text()


@pytest.mark.parametrize("options", [{"provider_options": {"use_tf32": "0"}}, {"target": "T4"}])
def test_nothing_of_it_is_rounded_to_tf32(options: Mapping[str, object]) -> None:
    """So that float32 around the products does not matter."""
    made = planned(feed_forward(), eager=True, **options)
    found = [integers for _, integers in operators(made, chosen=False)]
    assert any(found) and not any(region.kernel.rounds for region in made.plan.with_products)
    assert all(found) or "target" not in options  # without a rounded product beside them there are exact ones
