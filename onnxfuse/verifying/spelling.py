"""Operators spelled out in simpler ones, for references that need what the CPU provider lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import onnx
from onnx import TensorProto, helper

from onnxfuse.operators.activations import SELU_ALPHA, SELU_GAMMA
from onnxfuse.verifying.recurrences import spelled_layer


def with_nodes(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> onnx.ModelProto:
    """The model with other nodes in its graph; what a body or a function holds stays."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    result.graph.node.extend(nodes)
    return result


class Spelling:
    """Nodes in place of one.

    Attributes:
        stem: begins the names of what they compute.
        opset: version of the standard operators.
        nodes: so far.
    """

    def __init__(self, stem: str, opset: int) -> None:
        self.stem, self.opset = stem, opset
        self.nodes: list[onnx.NodeProto] = []

    def step(self, op: str, *inputs: str, result: str = "", **attributes: Any) -> str:
        """One more node; the name of what it computes."""
        self.nodes.append(helper.make_node(op, inputs, [result or f"{self.stem}.{len(self.nodes)}"], **attributes))
        return str(self.nodes[-1].output[0])

    def number(self, value: float, kind: int = TensorProto.DOUBLE) -> str:
        """A scalar."""
        return self.step("Constant", value=helper.make_tensor("value", kind, [], [value]))

    def row_mean(self, of: str) -> str:
        """Means along the last axis, which stays."""
        if self.opset >= 18:
            return self.step("ReduceMean", of, self.integers(-1), keepdims=1)
        return self.step("ReduceMean", of, axes=[-1], keepdims=1)

    def integers(self, *values: int) -> str:
        """A list of integers."""
        return self.step("Constant", value=helper.make_tensor("value", TensorProto.INT64, [len(values)], values))


def _instance_normalization(node: onnx.NodeProto, to: Spelling) -> None:
    """The node as the standard defines it: scale * (x - mean) / sqrt(variance + epsilon) + bias."""
    step, mean = to.step, to.row_mean
    x, scale, bias = node.input
    shape = step("Shape", x)
    rows = step("Gather", shape, to.integers(0, 1))
    # Sizes are multiplied: -1 cannot stand for the length of rows of an empty tensor.
    inner = step("Slice", shape, to.integers(2), to.integers(1 << 30))
    length = step("ReduceProd", inner, keepdims=1)
    apart = step("Reshape", x, step("Concat", rows, length, axis=0))
    centred = step("Sub", apart, mean(apart))
    variance = step("Add", mean(step("Mul", centred, centred)), to.number(attribute(node, "epsilon", 1e-5)))
    normal = step("Div", centred, step("Sqrt", variance))
    column = to.integers(-1, 1)
    scaled = step("Mul", normal, step("Reshape", scale, column))
    shifted = step("Add", scaled, step("Reshape", bias, column))
    step("Reshape", shifted, shape, result=node.output[0])


def _elu(node: onnx.NodeProto, to: Spelling) -> None:
    """Elu, Selu or Celu: ``scale * (alpha * (exp(x / divisor) - 1))`` below zero, ``scale * x`` above."""
    step, op, x = to.step, node.op_type, node.input[0]
    alpha = attribute(node, "alpha", SELU_ALPHA if op == "Selu" else 1.0)
    small = step("Div", x, to.number(alpha if op == "Celu" else 1.0))
    # Near zero the difference from one has no digits left; two terms of the series have them all.
    series = step("Add", small, step("Mul", step("Mul", small, small), to.number(0.5)))
    difference = step("Sub", step("Exp", small), to.number(1.0))
    curve = step("Where", step("Less", step("Abs", small), to.number(1e-5)), series, difference)
    below = step("Mul", curve, to.number(alpha))
    whole = step("Where", step("Less", x, to.number(0.0)), below, x)
    scale = attribute(node, "gamma", SELU_GAMMA) if op == "Selu" else 1.0
    step("Mul", whole, to.number(scale), result=node.output[0])


def _sigmoid(node: onnx.NodeProto, to: Spelling) -> None:
    """1 / (1 + exp(-x)), with all its digits down to the smallest numbers."""
    one = to.number(1.0)
    to.step("Div", one, to.step("Add", one, to.step("Exp", to.step("Neg", node.input[0]))), result=node.output[0])


def _layer(node: onnx.NodeProto, to: Spelling) -> None:
    to.nodes += spelled_layer(node, to.stem)


SPELLED: Mapping[str, Callable[[onnx.NodeProto, Spelling], None]] = {
    "InstanceNormalization": _instance_normalization, "Elu": _elu, "Selu": _elu, "Celu": _elu,
    "Sigmoid": _sigmoid, "LSTM": _layer, "GRU": _layer,
}
"""By operator: its nodes in float64."""

INEXACT = frozenset({"GRU", "LSTM", "Sigmoid"})
"""Operators that the CPU provider has in float64, and gives less than its digits of: 0 for the sigmoid of -512; or
takes in float64, and fails in when they run."""

SINGLE = frozenset({"Attention"})
"""Operators that the CPU provider has in float64 by their functions alone, which give no number where a query sees no
key: its own kernel gives zeros, as the standard says."""


def attribute(node: onnx.NodeProto, name: str, default: float) -> float:
    return float(next((attribute.f for attribute in node.attribute if attribute.name == name), default))
