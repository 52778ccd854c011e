"""Floating-point operations of a node, by the usual conventions.

- A matrix product of m x k by k x n counts 2 m n k, a convolution twice its output's elements times the elements that
  each of them sums; a bias adds one an output element.
- A pointwise operator counts ``COST`` an output element: 1 for additions, products, comparisons, minima and
  selections, 4 for divisions and roots, 8 for exponentials and their kin, 16 for general powers: what they take of a
  GPU's arithmetic, roughly.
- A reduction counts its cost an input element; softmax and norms count what their formulas hold an element.
- Casts, copies, transposes, gathers and views count nothing.
"""

from __future__ import annotations

from math import prod

import numpy as np

from onnxfuse.graph.model import Node, Value
from onnxfuse.planning.sizes import Sizes, elements_of, shape_of

SIMPLE, ROOT, ELEMENTARY, POWER = 1, 4, 8, 16

COST: dict[str, int] = {
    **dict.fromkeys(
        ["Add", "Sub", "Mul", "Neg", "Abs", "Min", "Max", "Clip", "Relu", "LeakyRelu", "PRelu", "ThresholdedRelu",
         "Where", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor", "Not", "IsNaN",
         "IsInf", "Sign", "Floor", "Ceil", "Round", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot",
         "Shrink", "QuantizeLinear", "DequantizeLinear"],
        SIMPLE,
    ),
    **dict.fromkeys(["Div", "Mod", "Sqrt", "Reciprocal", "Softsign", "HardSigmoid", "HardSwish"], ROOT),
    **dict.fromkeys(
        ["Exp", "Log", "Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Tanh", "Asinh", "Acosh", "Atanh",
         "Erf", "Sigmoid", "Softplus", "Elu", "Selu", "Celu", "Gelu", "Swish", "Mish", "com.microsoft.Gelu",
         "com.microsoft.FastGelu", "com.microsoft.BiasGelu", "com.microsoft.QuickGelu"],
        ELEMENTARY,
    ),
    "Pow": POWER,
}
"""Operations an output element of pointwise operators."""

PER_INPUT: dict[str, int] = {
    **dict.fromkeys(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ArgMax", "ArgMin",
                     "CumSum", "GlobalAveragePool", "GlobalMaxPool"], SIMPLE),
    **dict.fromkeys(["ReduceSumSquare", "ReduceL2", "GlobalLpPool"], 2),
    **dict.fromkeys(["ReduceLogSum"], SIMPLE),
    "ReduceLogSumExp": 3 + ELEMENTARY,
    "Softmax": 3 + ELEMENTARY + ROOT,  # maximum, difference, exponential, sum, division
    "LogSoftmax": 4 + ELEMENTARY,
    "Hardmax": 2,
    "LayerNormalization": 7,  # mean, difference, square, sum, scale, weight, bias
    "InstanceNormalization": 7,
    "GroupNormalization": 7,
    "RMSNormalization": 4,  # square, sum, scale, weight
    "SimplifiedLayerNormalization": 4,
    "LpNormalization": 3,
    "LRN": 4,
    "BatchNormalization": 2,
    "com.microsoft.SkipLayerNormalization": 8,
    "com.microsoft.SkipSimplifiedLayerNormalization": 5,
    "com.microsoft.BiasSoftmax": 4 + ELEMENTARY + ROOT,
    "com.microsoft.GroupNorm": 7,
}
"""Operations an element of the first input."""


def flops_of(node: Node, sizes: Sizes) -> int | None:
    """Floating-point operations of one run of the node; None where a size that it takes is unknown.

    A node of the canonical view counts what its original nodes count.
    """
    if node.originals != (node,):
        counts = [flops_of(original, sizes) for original in node.originals]
        return None if None in counts else sum(count for count in counts if count is not None)
    op = node.qualified_op
    if op in ("MatMul", "com.microsoft.FusedMatMul", "MatMulInteger", "com.microsoft.MatMulIntegerToFloat",
              "com.microsoft.TransposeMatMul", "com.microsoft.DynamicQuantizeMatMul", "QLinearMatMul"):
        return _matmul(node, sizes)
    if op in ("Gemm", "com.microsoft.GemmFastGelu", "com.microsoft.FusedGemm"):
        return _gemm(node, sizes)
    if op in ("Conv", "ConvInteger", "QLinearConv", "com.microsoft.FusedConv", "com.microsoft.NhwcConv"):
        return _conv(node, sizes)
    if op == "ConvTranspose":
        return _conv_transpose(node, sizes)
    if op == "com.microsoft.MatMulNBits":
        out = _elements(node.outputs[0], sizes)
        return None if out is None else 2 * out * int(node.attributes["K"])
    if op == "Einsum":
        return _einsum(node, sizes)
    if op in ("AveragePool", "MaxPool", "LpPool"):
        out = _elements(node.outputs[0], sizes)
        return None if out is None else out * prod(node.attributes.get("kernel_shape", [1]))
    if op in ("Attention", "com.microsoft.MultiHeadAttention"):
        return _attention(node, sizes)
    if op in ("Sum", "Mean"):
        out = _elements(node.outputs[0], sizes)
        return None if out is None else out * len(node.inputs)
    if op in PER_INPUT:
        count = _elements(node.inputs[0], sizes)
        return None if count is None else count * PER_INPUT[op]
    if op in COST:
        count = _elements(node.outputs[0], sizes)
        cost = SIMPLE if op == "Pow" and _squares(node) else COST[op]
        return None if count is None else count * cost
    return 0


def _elements(value: Value | None, sizes: Sizes) -> int | None:
    return 0 if value is None else elements_of(value, sizes)


def _shape(value: Value | None, sizes: Sizes) -> tuple[int, ...] | None:
    return None if value is None else shape_of(value, sizes)


def _squares(power: Node) -> bool:
    exponent = power.inputs[1]
    if exponent is None or exponent.constant is None:
        return False
    return bool(np.all(np.asarray(exponent.constant).astype(np.float64) == 2.0))


def _matmul(node: Node, sizes: Sizes) -> int | None:
    out = _elements(node.outputs[0], sizes)
    left = _shape(node.inputs[0], sizes)
    if out is None or not left:
        return None
    inner = left[-2] if node.attributes.get("transA", 0) and len(left) > 1 else left[-1]
    return 2 * out * inner


def _gemm(node: Node, sizes: Sizes) -> int | None:
    out = _elements(node.outputs[0], sizes)
    left = _shape(node.inputs[0], sizes)
    if out is None or left is None or len(left) < 2:
        return None
    bias = out if len(node.inputs) > 2 and node.inputs[2] is not None else 0
    return 2 * out * (left[0] if node.attributes.get("transA", 0) else left[-1]) + bias


def _weights(node: Node, sizes: Sizes) -> tuple[int, ...] | None:
    return _shape(node.inputs[3 if node.op == "QLinearConv" else 1], sizes)


def _conv(node: Node, sizes: Sizes) -> int | None:
    out, weights = _elements(node.outputs[0], sizes), _weights(node, sizes)
    if out is None or weights is None:
        return None
    bias = out if node.op in ("Conv", "FusedConv", "NhwcConv") and len(node.inputs) > 2 and node.inputs[2] else 0
    return 2 * out * prod(weights[1:]) + bias


def _conv_transpose(node: Node, sizes: Sizes) -> int | None:
    count, weights = _elements(node.inputs[0], sizes), _weights(node, sizes)
    out = _elements(node.outputs[0], sizes)
    if count is None or weights is None or out is None:
        return None
    return 2 * count * prod(weights[1:]) + (out if len(node.inputs) > 2 and node.inputs[2] else 0)


def _einsum(node: Node, sizes: Sizes) -> int | None:
    """Twice the product of all index sizes for two operands; an ellipsis stands for the axes it covers."""
    terms = str(node.attributes["equation"]).replace(" ", "").split("->")[0].split(",")
    extents: dict[str, int] = {}
    if len(terms) != len(node.inputs):
        return None
    for term, value in zip(terms, node.inputs, strict=True):
        shape = _shape(value, sizes)
        named = len(term.replace("...", ""))
        if shape is None or len(shape) < named or (len(shape) > named and "..." not in term):
            return None
        hidden = len(shape) - named
        head, _, tail = term.partition("...")
        labels = [*head, *(f".{place}" for place in range(hidden, 0, -1)), *tail]
        for label, size in zip(labels, shape, strict=True):
            extents[label] = max(extents.get(label, 1), size)
    return max(len(terms), 1) * prod(extents.values())


def _attention(node: Node, sizes: Sizes) -> int | None:
    """Two products of query rows by key rows by head size, and a softmax of the scores."""
    shapes = [_shape(node.inputs[place], sizes) if len(node.inputs) > place else None for place in range(3)]
    query, key, value = shapes
    if query is None or key is None or value is None or len(query) != len(key) or len(query) not in (3, 4):
        return None
    heads = int(node.attributes.get("q_num_heads", node.attributes.get("num_heads", 1)))
    if len(query) == 4:
        heads, width, value_width = query[1], query[1] * query[3], query[1] * value[3]
    else:
        key_heads = int(node.attributes.get("kv_num_heads", heads))
        if key_heads <= 0 or heads <= 0:
            return None
        width, value_width = query[2], value[2] * heads // key_heads
    rows, columns = query[-2], key[-2]
    return query[0] * rows * columns * (2 * width + 2 * value_width + heads * PER_INPUT["Softmax"])
