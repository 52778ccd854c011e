"""Quantised models written by hand, as exporters and ONNX Runtime's quantiser leave them: pointwise nodes beside
QuantizeLinear, DequantizeLinear and operators that compute on integers.  Every scale is a power of two."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MICROSOFT = "com.microsoft"
CHANNELS = 16


class Writer:
    """Nodes and constants of a graph, in order."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def node(self, op: str, inputs: Sequence[str], domain: str = "", **attributes: object) -> str:
        name = f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [f"{name}_out"], name, domain=domain, **attributes))
        return f"{name}_out"

    def step(self, scale: float, zero: int, kind: type = np.int8) -> list[str]:
        return [self.constant(np.array(scale, np.float32)), self.constant(np.array(zero, kind))]

    def there_and_back(self, x: str, scale: float = 0.0625, zero: int = 3, kind: type = np.int8,
                       domain: str = "") -> str:
        """QuantizeLinear and DequantizeLinear."""
        step = self.step(scale, zero, kind)
        return self.node("DequantizeLinear", [self.node("QuantizeLinear", [x, *step], domain), *step], domain)

    def pool(self, x: str) -> str:
        """MaxPool, in front of which ONNX Runtime moves the rounding behind it."""
        return self.node("MaxPool", [x], kernel_shape=[3, 3], pads=[1, 1, 1, 1])

    def swish(self, x: str) -> str:
        """Pointwise nodes: x * sigmoid(x) + 1."""
        product = self.node("Mul", [x, self.node("Sigmoid", [x])])
        return self.node("Add", [product, self.constant(np.array(1, np.float32))])

    def model(self, result: str, sizes: Sequence[int]) -> onnx.ModelProto:
        """The model, whose output has ``sizes`` behind the batch."""
        self.nodes.append(helper.make_node("Identity", [result], ["y"], "last"))
        graph = helper.make_graph(
            self.nodes, "quantized", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 5, 7, CHANNELS])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", *sizes])], self.constants)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
        return onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets, ir_version=9))


def integers() -> onnx.ModelProto:
    """QLinearConv, QLinearAdd and QLinearMatMul between pointwise nodes, with views that ONNX Runtime moves rounding
    over."""
    random, w = np.random.default_rng(0), Writer()
    step, weights = w.step(0.0625, 3), w.step(0.03125, 0)
    x = w.swish("x")
    x = w.node("QuantizeLinear", [w.pool(w.node("Transpose", [x], perm=[0, 3, 1, 2])), *step])
    kernel = w.constant(random.integers(-40, 40, (CHANNELS, CHANNELS, 3, 3)).astype(np.int8))
    conv = w.node("QLinearConv", [x, *step, kernel, *weights, *step], pads=[1, 1, 1, 1])
    total = w.node("QLinearAdd", [conv, *step, x, *step, *step], MICROSOFT)
    x = w.swish(w.node("DequantizeLinear", [total, *step]))
    x = w.node("Transpose", [x], perm=[0, 2, 3, 1])
    x = w.node("QuantizeLinear", [x, *step])
    matrix = w.constant(random.integers(-40, 40, (CHANNELS, 8)).astype(np.int8))
    x = w.node("QLinearMatMul", [x, *step, matrix, *weights, *step])
    return w.model(w.swish(w.node("DequantizeLinear", [x, *step])), [5, 7, 8])


def pairs() -> onnx.ModelProto:
    """The same in pairs of QuantizeLinear and DequantizeLinear around operators on floats; the last pair is
    com.microsoft's, of 16 bits."""
    random, w = np.random.default_rng(1), Writer()
    x = w.swish("x")
    x = w.there_and_back(w.pool(w.node("Transpose", [x], perm=[0, 3, 1, 2])))
    kernel = w.node("DequantizeLinear", [
        w.constant(random.integers(-40, 40, (CHANNELS, CHANNELS, 1, 1)).astype(np.int8)), *w.step(0.03125, 0)])
    x = w.there_and_back(w.node("Conv", [x, kernel]))
    x = w.swish(x)
    x = w.there_and_back(w.node("Reshape", [x, w.constant(np.array([-1, CHANNELS, 35]))]), kind=np.uint8)
    x = w.node("Mul", [w.swish(x), w.constant(np.array(0.5, np.float32))])
    x = w.there_and_back(w.node("Transpose", [x], perm=[0, 2, 1]), 2.0**-10, -300, np.int16, MICROSOFT)
    return w.model(w.swish(x), [35, CHANNELS])


MODELS = {"integers": integers, "pairs": pairs}


def inputs(batch: int) -> dict[str, np.ndarray]:
    """Numbers for either model."""
    return {"x": np.random.default_rng(batch).uniform(-3, 3, (batch, 5, 7, CHANNELS)).astype(np.float32)}
