"""Quantised layers and convolutions as ONNX Runtime's quantiser leaves them, planned by times that a test gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from fake_timer import RUNTIME, FakeTimer
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.measuring.database import open_database
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.known import KnownKernels
from onnxfuse.tuning import TuneOptions, tune

WIDTH, HIDDEN = 64, 128
BYTES = "of::multiply_own_bytes"


class Layers:
    """A model of quantised layers, as ONNX Runtime's quantiser leaves them; all scales are powers of two."""

    def __init__(self, kind: type) -> None:
        self.kind, self.random = kind, np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, array: np.ndarray) -> str:
        self.constants.append(numpy_helper.from_array(array, f"c{len(self.constants)}"))
        return self.constants[-1].name

    def node(self, op: str, *inputs: str, **attributes: object) -> str:
        name = f"{op}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name, **attributes))
        return name

    def rounded(self, x: str, zero: int = 3, scale: float = 2.0**-5) -> str:
        step = (self.constant(np.array(scale, self.kind)), self.constant(np.array(zero, np.int8)))
        return self.node("DequantizeLinear", self.node("QuantizeLinear", x, *step), *step)

    def weights(self, depth: int, columns: int) -> str:
        numbers = self.constant(self.random.integers(-127, 128, (depth, columns)).astype(np.int8))
        scales = self.constant(np.exp2(self.random.integers(-11, -8, columns)).astype(self.kind))
        return self.node("DequantizeLinear", numbers, scales, self.constant(np.zeros(columns, np.int8)), axis=1)

    def layer(self, x: str, depth: int, columns: int) -> str:
        bias = self.constant(self.random.standard_normal(columns).astype(self.kind))
        return self.node("Relu", self.node("Add", self.node("MatMul", x, self.weights(depth, columns)), bias))

    def model(self, *results: str, width: int = WIDTH) -> onnx.ModelProto:
        dtype = TensorProto.FLOAT16 if self.kind is np.float16 else TensorProto.FLOAT
        graph = helper.make_graph(
            self.nodes, "layers", [helper.make_tensor_value_info("x", dtype, ["rows", WIDTH])],
            [helper.make_tensor_value_info(name, dtype, ["rows", width]) for name in results], self.constants)
        return onnx.shape_inference.infer_shapes(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9))


class Images(Layers):
    """The same of convolutions."""

    def convolution(
        self, x: str, channels: int, features: int, taps: int = 3, *, group: int = 1, **attributes: object
    ) -> str:
        """With scales for each feature, and a bias in steps of what it is added to."""
        shape = (features, channels // group, taps, taps)
        numbers = self.constant(self.random.integers(-127, 128, shape).astype(np.int8))
        scales = np.exp2(self.random.integers(-11, -8, features)).astype(self.kind)
        zeros = self.constant(np.zeros(features, np.int8))
        weights = self.node("DequantizeLinear", numbers, self.constant(scales), zeros, axis=0)
        bias = self.constant(self.random.integers(-2000, 2000, features).astype(np.int32))
        steps, none = self.constant(scales * self.kind(2.0**-5)), self.constant(np.zeros(features, np.int32))
        addend = self.node("DequantizeLinear", bias, steps, none, axis=0)
        return self.node("Conv", x, weights, addend, group=group, pads=[taps // 2] * 4, kernel_shape=[taps, taps],
                         **attributes)

    def rounded_for(self, x: str, readers: int) -> list[str]:
        """Rounded once, and dequantised for each reader."""
        step = (self.constant(np.array(2.0**-5, self.kind)), self.constant(np.array(3, np.int8)))
        numbers = self.node("QuantizeLinear", x, *step)
        return [self.node("DequantizeLinear", numbers, *step) for _ in range(readers)]

    def images(self, result: str, channels: int = 32) -> onnx.ModelProto:
        """The model, of images of 7 x 6 pixels."""
        dtype = TensorProto.FLOAT16 if self.kind is np.float16 else TensorProto.FLOAT
        graph = helper.make_graph(
            self.nodes, "images", [helper.make_tensor_value_info("x", dtype, ["rows", channels, 7, 6])],
            [helper.make_tensor_value_info(result, dtype, None)], self.constants)
        return onnx.shape_inference.infer_shapes(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9))


def planned(model: onnx.ModelProto, **options: object) -> Optimised:
    wanted = {"dims": {"rows": 96}, "target": "H100", "verify": False, "database": False, **options}
    return optimise(model, Options(**wanted))  # type: ignore[arg-type]


def measured(
    model: onnx.ModelProto, database: Path, together: float = 30.0, dims: Mapping[str, int] | None = None,
    **options: object,
) -> Optimised:
    """As planned where products take less time than the runtime's nodes, and those of integers less than others."""
    timer = FakeTimer(lambda kernel: 50.0 if kernel == RUNTIME else 40.0 if "int8" not in kernel else
                      together if "together" in kernel else 20.0)
    sizes, kernels = dims or {"rows": 96}, KnownKernels()
    with open_database(database) as kept:
        tune(model, timer, kept, TuneOptions(dims=sizes, kernels=kernels))
    return planned(model, database=database, least_gain=1.0, dims=sizes, kernels=kernels, **options)


def operators(made: Optimised, *, chosen: bool) -> list[tuple[list[str], bool]]:
    """Those of the regions with products, and whether these are of integers."""
    regions = made.plan.fusions if chosen else made.plan.with_products
    return [([node.op for node in region.nodes], BYTES in region.kernel.source)
            for region in regions if region.rule == "products"]
