"""Quantised convolutions in the planner: what dequantises and quantises comes in, and int8 goes between, channels
last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from emulated import EmulatedRunner, FaultyRunner
from onnx import TensorProto
from quantized_layers import Images, measured, operators, planned

from onnxfuse.optimised import Optimised
from onnxfuse.region import Region
from onnxfuse.rewriting import dequantised_record, layout_record, unfuse
from onnxfuse.verifying import verify

pytestmark = pytest.mark.usefixtures("few_ways")

DIMS = {"rows": 2}
BEFORE = ["DequantizeLinear", "DequantizeLinear", "DequantizeLinear"]


def chain(kind: type = np.float32, channels: int = 48) -> onnx.ModelProto:
    """Convolutions one after the other, by pixels with their neighbours and by single ones."""
    images = Images(kind)
    one = images.node("Relu", images.convolution(images.rounded("x"), 32, channels, strides=[2, 1]))
    two = images.node("Relu", images.convolution(images.rounded(one), channels, channels))
    return images.images(images.node("Relu", images.convolution(images.rounded(two), channels, 32, 1)))


def residual(kind: type = np.float32, *, readers: int = 2) -> onnx.ModelProto:
    """A block of a network, around which its operand goes too; ``readers``: of one, both read what one node
    dequantises."""
    images = Images(kind)
    first = images.node("Relu", images.convolution(images.rounded("x"), 32, 32))
    own, beside = (images.rounded_for(first, readers) * 2)[:2]
    inner = images.node("Relu", images.convolution(own, 32, 64, 1))
    (last,) = images.rounded_for(images.convolution(images.rounded(inner), 64, 32), 1)
    block = images.node("Relu", images.node("Add", last, beside))
    return images.images(images.convolution(images.rounded(block), 32, 32, 1))


def shared(kind: type = np.float32) -> onnx.ModelProto:
    return residual(kind, readers=1)


def skipping(kind: type = np.float32) -> onnx.ModelProto:
    """Two blocks whose sums go around the next one as they are, and into it rounded."""
    images = Images(kind)
    kept = images.node("Relu", images.convolution(images.rounded("x"), 32, 32))
    for _ in range(2):
        inner = images.node("Relu", images.convolution(images.rounded(kept), 32, 48))
        kept = images.node("Relu", images.node("Add", images.convolution(images.rounded(inner), 48, 32, 1), kept))
    return images.images(kept)


def on_integers(op: str) -> onnx.ModelProto:
    """Operators whose operands are integers."""
    images = Images(np.float32)
    step = images.constant(np.array(2.0**-5, np.float32)), images.constant(np.array(3, np.uint8))
    weights = images.constant(images.random.integers(-99, 99, (48, 32, 3, 3)).astype(np.int8))
    scales = images.constant(np.exp2(images.random.integers(-11, -8, 48)).astype(np.float32))
    zero = images.constant(np.zeros(48, np.int8))
    bias = images.constant(images.random.integers(-999, 999, 48).astype(np.int32))
    numbers = images.node("QuantizeLinear", "x", *step)
    if op == "QLinearConv":
        numbers = images.node(op, numbers, *step, weights, scales, zero, *step, bias, pads=[1, 1, 1, 1])
        return images.images(images.node("Relu", images.node("DequantizeLinear", numbers, *step)))
    sums = images.node("Cast", images.node(op, numbers, weights, step[1], pads=[1, 1, 1, 1]), to=TensorProto.FLOAT)
    return images.images(images.node("Relu", images.node("Mul", sums, images.constant(np.array(0.125, np.float32)))))


def products(made: Optimised) -> list[Region]:
    return [region for region in made.plan.fusions if region.rule == "products"]


def check(made: Optimised) -> None:
    result = verify(made, EmulatedRunner())
    assert result.kernels_run and {each.verdict for each in result.nodes} == {"passed"}, result.text()


def test_what_comes_in() -> None:
    """Images and weights lie channels-last as numbers, not as what these are dequantised to."""
    made = planned(chain(), dims=DIMS, eager=True)
    found = operators(made, chosen=False)
    before = ["Transpose", "DequantizeLinear", "Transpose", "DequantizeLinear", "DequantizeLinear"]
    inner = [*before, "Conv", "Relu", "QuantizeLinear", "Transpose"]
    pixels = ["Transpose", *BEFORE, "Conv", "Relu"]
    assert sum(each == (inner, True) for each in found) == 2 and (pixels, True) in found
    record = layout_record(made.model)
    assert record is not None
    # Of those of a convolution by single pixels the weights lie so already.
    types = [made.graph.values[each.value].dtype for each in record.laid]
    assert types == [TensorProto.INT8] * 5


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("model", "kind"), [
    (chain, np.float32), (chain, np.float16), (residual, np.float32), (shared, np.float32)])
def test_what_was_measured_faster_is_taken(
    model: Callable[[type], onnx.ModelProto], kind: type, last: bool, tmp_path: Path
) -> None:
    """All convolutions, with numbers between them, channels last where what reads them so is faster; right, and gone
    again."""
    source = model(kind)
    made = measured(source, tmp_path / "measurements.sqlite", 10.0 if last else 30.0, dims=DIMS)
    assert (layout_record(made.model) is not None) == last
    regions = products(made)
    count = sum(node.op_type == "Conv" for node in source.graph.node)
    assert sum(node.op == "Conv" for region in regions for node in region.nodes) == count
    assert all(integers for _, integers in operators(made, chosen=True))
    read = {value.name for region in regions for value in region.tensors}
    written = [value for region in regions for value in region.outputs if value.name in read]
    assert [value.dtype for value in written] == [TensorProto.INT8] * (count - 1)
    check(made)
    assert unfuse(made.model) == source
    assert (dequantised_record(made.model) is not None) == (model is shared)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("model", [chain, residual, shared])
def test_predictions_decide_where_nothing_was_measured(model: Callable[[type], onnx.ModelProto], kind: type) -> None:
    """By what is known of a GPU all convolutions are of integers and channels last, with numbers between them; an
    operand that several read is dequantised for each of them."""
    source = model(kind)
    made = planned(source, dims={"rows": 512}, target="H200")
    regions = products(made)
    count = sum(node.op_type == "Conv" for node in source.graph.node)
    assert sum(node.op == "Conv" for region in regions for node in region.nodes) == count
    assert all(integers for _, integers in operators(made, chosen=True)) and layout_record(made.model) is not None
    assert all(region.kernel.pace is not None for region in regions)
    assert unfuse(made.model) == source


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_what_is_read_as_it_is_too_is_written_both_ways(kind: type, last: bool, tmp_path: Path) -> None:
    """A convolution's kernel adds what goes around, and writes the sum and what it is rounded to."""
    source = skipping(kind)
    made = measured(source, tmp_path / "measurements.sqlite", 10.0 if last else 30.0, dims=DIMS)
    float_type = made.graph.inputs[0].dtype
    both = [region for region in products(made) if len(region.outputs) == 2]
    assert len(both) == 2  # what the first block reads, and what the second does
    for region in both:
        assert {value.dtype for value in region.outputs} == {float_type, TensorProto.INT8}
    assert sum(node.op == "Conv" for region in products(made) for node in region.nodes) == 5
    assert not any(node.op == "Add" for region in made.plan.fusions for node in region.nodes
                   if region not in products(made))
    check(made)
    assert unfuse(made.model) == source


@pytest.mark.parametrize("model", [residual, shared])
def test_what_goes_around_a_block_is_read_as_numbers(
    model: Callable[[], onnx.ModelProto], tmp_path: Path
) -> None:
    made = measured(model(), tmp_path / "measurements.sqlite", 10.0, dims=DIMS)
    (around,) = (region for region in products(made) if any(node.op == "Add" for node in region.nodes))
    assert sum(value.rank == 4 and value.dtype == TensorProto.INT8 for value in around.tensors) == 3
    assert [node.op for node in around.nodes][-2:] == ["QuantizeLinear", "Transpose"]


def test_channels_that_no_vector_divides(tmp_path: Path) -> None:
    """Are multiplied as integers all the same; what is dequantised of them lies as before."""
    made = measured(chain(channels=24), tmp_path / "measurements.sqlite", dims=DIMS)
    assert products(made) and all(integers for _, integers in operators(made, chosen=True))
    check(made)


@pytest.mark.parametrize("op", ["QLinearConv", "ConvInteger"])
def test_operators_on_integers_come_in_too(op: str, tmp_path: Path) -> None:
    """Their images channels last too, whatever the session says of TF32."""
    source = on_integers(op)
    offered = operators(planned(source, dims=DIMS, eager=True), chosen=False)
    assert any(integers and names[:3] == ["Transpose", "Transpose", op] for names, integers in offered)
    made = measured(source, tmp_path / "measurements.sqlite", dims=DIMS, provider_options={"use_tf32": "0"})
    ((names, integers),) = operators(made, chosen=True)
    assert integers and op in names and names[-1] == "Relu"
    check(made)


def test_a_faulty_kernel_is_found(tmp_path: Path) -> None:
    made = measured(chain(), tmp_path / "measurements.sqlite", 10.0, dims=DIMS)
    assert "failed" in {each.verdict for each in verify(made, FaultyRunner()).nodes}


def depthwise(kind: type = np.float32) -> onnx.ModelProto:
    """Of each channel by itself, between others."""
    images = Images(kind)
    one = images.node("Relu", images.convolution(images.rounded("x"), 32, 32, 1))
    two = images.node("Relu", images.convolution(images.rounded(one), 32, 32, group=32))
    return images.images(images.convolution(images.rounded(two), 32, 32, 1))


@pytest.mark.parametrize("last", [False, True])
def test_depthwise_convolutions_read_and_write_numbers(last: bool) -> None:
    """What dequantises image, weights and bias, and what rounds the result, is in one kernel, whichever way it lies."""
    made = planned(depthwise(), dims={"rows": 32}, eager=True, disable=() if last else ("layouts",))
    (region,) = (each for each in made.plan.fusions if each.rule == "depthwise")
    between = ["Conv", "Relu", "QuantizeLinear"]
    # Channels first, what reads the numbers is left to the runtime's node: it may as well be given floats.
    assert [node.op for node in region.nodes] == (
        ["Transpose", *BEFORE, *between, "Transpose"] if last else [*BEFORE, *between, "DequantizeLinear"])
    assert region.kernel.schedule == ("stencil_last" if last else "stencil")
    assert [value.dtype for value in region.tensors if value.rank == 4] == [TensorProto.INT8] * 2
    assert region.outputs[0].dtype == (TensorProto.INT8 if last else TensorProto.FLOAT)
    check(made)


def test_transposes_of_the_model_come_in_too() -> None:
    """Before what dequantises, where that is not what the layout's pairs are there for."""
    images = Images(np.float32)
    step = images.constant(np.array(2.0**-5, np.float32)), images.constant(np.array(3, np.int8))
    other_way = images.node("Transpose", images.node("QuantizeLinear", "x", *step), perm=[0, 1, 3, 2])
    model = images.images(images.convolution(images.node("DequantizeLinear", other_way, *step), 32, 32))
    made = planned(model, dims=DIMS, eager=True, disable=("layouts",))
    assert (["Transpose", *BEFORE, "Conv"], True) in operators(made, chosen=False)
