"""Values that are dequantised for each of their readers: which, that it changes nothing, and the way back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from emulated import EmulatedRunner
from fake_timer import RUNTIME, FakeTimer
from quantized_layers import HIDDEN, WIDTH, Images, Layers, measured, operators, planned

from onnxfuse.errors import ModelError
from onnxfuse.folding import shared
from onnxfuse.measuring.database import open_database
from onnxfuse.operators import load_graph
from onnxfuse.rewriting import dequantise_apart, dequantised_record, unfuse
from onnxfuse.rewriting.dequantised import KEY, rejoin_dequantised
from onnxfuse.tuning import TuneOptions, tune
from onnxfuse.verifying import verify

pytestmark = pytest.mark.usefixtures("few_ways")


def block() -> onnx.ModelProto:
    """A convolution, and what goes around it."""
    images = Images(np.float32)
    x = images.rounded(images.node("Relu", "x"))
    return images.images(images.node("Add", images.node("Relu", images.convolution(x, 32, 32, 1)), x))


def projections() -> onnx.ModelProto:
    """Of one operand and one shape, one of another, and what goes around them."""
    layers = Layers(np.float32)
    x = layers.rounded("x")
    alike = [layers.node("Neg", layers.layer(x, WIDTH, WIDTH)) for _ in range(2)]
    inner = layers.rounded(layers.layer(x, WIDTH, HIDDEN))
    return layers.model(*alike, layers.node("Add", x, layers.layer(inner, HIDDEN, WIDTH)))


def groups(model: onnx.ModelProto) -> list[tuple[tuple[str, ...], ...]]:
    return [each.readers for each in shared(load_graph(model))]


def test_which_readers_have_a_node_of_their_own() -> None:
    """Products of one shape together; who multiplies nothing keeps the node that is there, else those that come
    first."""
    assert [list(map(len, each)) for each in groups(block())] == [[1]]
    images = Images(np.float32)
    x = images.rounded("x")
    one, other = (images.convolution(x, 32, features, 1) for features in (32, 64))
    forked = images.images(images.node("Concat", one, other, axis=1))
    assert groups(forked) == [((other,),)]
    assert [list(map(len, each)) for each in groups(projections())] == [[2, 1]]


@pytest.mark.parametrize("change", ["an output", "no products", "one shape", "16 bits"])
def test_what_stays(change: str) -> None:
    """What the model gives away, who reads nothing to multiply, products that one kernel may compute, other numbers."""
    images = Images(np.float32)
    step = images.constant(np.array(2.0**-5, np.float32)), images.constant(
        np.array(3, np.int16 if change == "16 bits" else np.int8))
    x = images.node("DequantizeLinear", images.node("QuantizeLinear", "x", *step), *step)
    if change == "no products":
        y = images.node("Add", images.node("Relu", x), images.node("Neg", x))
    elif change == "one shape":
        y = images.node("Add", images.convolution(x, 32, 32, 1), images.convolution(x, 32, 32))
    else:
        y = images.node("Add", images.convolution(x, 32, 32, 1), x)
    model = images.images(y)
    if change == "an output":
        model.graph.output.append(onnx.helper.make_tensor_value_info(x, onnx.TensorProto.FLOAT, None))
    assert not groups(model)
    assert dequantise_apart(model, shared(load_graph(model))) is model


def run(model: onnx.ModelProto, path: Path) -> tuple[list[np.ndarray], int]:
    """Results, and the nodes that dequantise in the runtime's own form of the model."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(path)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((2, 32, 7, 6)).astype(np.float32)
    found = session.run(None, {"x": x})
    return found, sum(node.op_type == "DequantizeLinear" for node in onnx.load(path).graph.node)


def test_it_changes_nothing(tmp_path: Path) -> None:
    """The runtime has as many nodes by itself, and the way back leads to the very model."""
    model = block()
    made = dequantise_apart(model, shared(load_graph(model)))
    assert len(made.graph.node) == len(model.graph.node) + 1
    (one, count), (other, others) = (run(each, tmp_path / "model.onnx") for each in (model, made))
    assert count == others and all(map(np.array_equal, one, other))
    assert dequantise_apart(made, shared(load_graph(made))) is made
    rejoin_dequantised(made)
    assert made == model


def test_an_edited_model() -> None:
    """What reads a node's result beside who did is put together too; nodes that differ now stay."""
    model = block()
    made = dequantise_apart(model, shared(load_graph(model)))
    record = dequantised_record(made)
    assert record is not None
    ((copy,),) = (each.copies for each in record.dequantised)
    made.graph.node.append(onnx.helper.make_node("Neg", [copy], ["z"]))
    edited = onnx.ModelProto()
    edited.CopyFrom(made)
    rejoin_dequantised(made)
    assert list(made.graph.node[-1].input) == [record.dequantised[0].value]
    assert all(copy not in node.output for node in made.graph.node)
    next(node for node in edited.graph.node if copy in node.output).input[1] = "other"
    rejoin_dequantised(edited)
    assert list(edited.graph.node[-1].input) == [copy] and dequantised_record(edited) is None


def test_a_damaged_record() -> None:
    model = block()
    onnx.helper.set_model_props(model, {KEY: json.dumps({"version": 99})})
    with pytest.raises(ModelError, match="Nodes that dequantise were repeated by another release"):
        dequantised_record(model)


@pytest.mark.parametrize("model", [block, projections])
def test_products_take_it_in(model: Callable[[], onnx.ModelProto], tmp_path: Path) -> None:
    """All of them multiply integers, those of one shape in one kernel; right, and gone again."""
    source = model()
    dims = {"rows": 4}
    made = measured(source, tmp_path / "measurements.sqlite", dims=dims)
    found = operators(made, chosen=True)
    assert found and all(integers for _, integers in found) and dequantised_record(made.model) is not None
    if model is projections:
        assert any(names.count("MatMul") == 2 for names, _ in operators(planned(source, eager=True), chosen=False))
    result = verify(made, EmulatedRunner())
    assert result.kernels_run and {each.verdict for each in result.nodes} == {"passed"}, result.text()
    assert unfuse(made.model) == source


@pytest.mark.parametrize("options", [{"disable": ("dequantised",)}, {"disable": ("products",)}, {"database": False}])
def test_where_no_product_does_the_model_keeps_its_nodes(options: dict[str, object], tmp_path: Path) -> None:
    made = measured(block(), tmp_path / "measurements.sqlite", dims={"rows": 4}, **{"disable": (), **options} if (
        "database" not in options) else {})
    if "database" in options:
        made = planned(block(), dims={"rows": 4})
    assert dequantised_record(made.model) is None


def test_what_was_measured_slower_does_not(tmp_path: Path) -> None:
    path = tmp_path / "measurements.sqlite"
    with open_database(path) as kept:
        tune(block(), FakeTimer(lambda kernel: 5.0 if kernel == RUNTIME else 40.0), kept, TuneOptions(dims={"rows": 4}))
    made = planned(block(), dims={"rows": 4}, database=path, least_gain=1.0)
    assert dequantised_record(made.model) is None
