"""Operators of nodes sorted by how freely they fuse."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from onnxfuse.graph.dims import Dim
from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.graph.sizes import Sizes, shape_of
from onnxfuse.ir.scalars import FLOAT as FLOAT
from onnxfuse.ir.scalars import INT8 as INT8
from onnxfuse.ir.scalars import NARROW as NARROW
from onnxfuse.ir.scalars import TYPES as TYPES
from onnxfuse.ir.scalars import UINT8 as UINT8
from onnxfuse.operators.record import CANONICAL, MICROSOFT, OperatorClass, operator_of


def classify(node: Node, graph: Graph) -> OperatorClass:
    """The class of a node's operator; an elementwise one is POINTWISE where its operands have the result's sizes."""
    found = operator_of(node)
    if found is None or node.has_subgraph or node.broken or (node.domain, node.op) in graph.functions:
        return OperatorClass.OPAQUE
    if mixes(node):
        return OperatorClass.BROADCAST
    if found.kind is not OperatorClass.POINTWISE:
        return found.kind
    return _elementwise(node) if node.domain in (MICROSOFT, CANONICAL) or is_deterministic(node) else (
        OperatorClass.OPAQUE)


def mixes(node: Node) -> bool:
    """Whether a node is a Resize or a GridSample that makes each element of several, and so no view."""
    own = {"Resize": "nearest", "GridSample": "linear"}.get(node.op)
    return own is not None and not node.domain and node.attributes.get("mode", own) != "nearest"


def _elementwise(node: Node) -> OperatorClass:
    result = node.outputs[0]
    if result is None or result.shape is None:
        return OperatorClass.BROADCAST
    same = all(value is None or value.shape == result.shape for value in node.inputs)
    return OperatorClass.POINTWISE if same else OperatorClass.BROADCAST


def is_deterministic(node: Node) -> bool:
    """Whether the node gives the same results for the same operands."""
    if node.domain:
        return not (node.domain == MICROSOFT and "Dropout" in node.op)
    found = operator_of(node)
    return not (found is not None and found.random) and not (
        node.op in ("Dropout", "BatchNormalization") and in_training(node))


def in_training(node: Node) -> bool:
    """Whether a Dropout or BatchNormalization works, or may work, as in training."""
    if node.op == "BatchNormalization":
        return bool(node.attributes.get("training_mode", 0))
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    return mode is not None and (mode.constant is None or bool(np.any(mode.constant)))


def is_narrow(value: Value | None) -> bool:
    """Whether a value is of 16-bit floats."""
    return value is not None and value.dtype in NARROW


QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
"""Operators that give quantised numbers and take them."""

_BEHIND_PARAMETERS = frozenset({"QLinearConv", "QLinearMatMul"})
"""Products whose second operand stands behind scale and zero point of the first."""


def is_convolution(node: Node) -> bool:
    """Whether a node is a convolution, of floats or of integers."""
    return not node.domain and node.op in ("Conv", "ConvInteger", "QLinearConv")


def is_transposed_convolution(node: Node) -> bool:
    """Whether a node is a transposed convolution, of floats."""
    return not node.domain and node.op == "ConvTranspose"


def channels(node: Node) -> Dim | None:
    """Channels of the image that a convolution's sums go over, those of a group in groups; None where they are not
    known."""
    weights = multiplied(node)[1]
    if weights is None or weights.shape is None or len(weights.shape) < 2:
        return None
    if is_transposed_convolution(node):
        return weights.shape[0] // int(node.attributes.get("group", 1))
    return weights.shape[1]


def multiplied(node: Node) -> tuple[Value | None, Value | None]:
    """The operands that a product or a convolution multiplies, an image before its weights."""
    second = 3 if node.op in _BEHIND_PARAMETERS else 1
    return node.inputs[0] if node.inputs else None, node.inputs[second] if len(node.inputs) > second else None


def weights_axis(node: Node) -> int:
    """The axis of the weights of a product, or a convolution, that the channels of its result are."""
    return 1 if node.op == "MatMul" or (node.op == "Gemm" and not node.attributes.get("transB", 0)) else 0


def quantised(value: Value | None) -> Value | None:
    """The 8-bit numbers that a DequantizeLinear makes a value of; None where none does."""
    node = None if value is None else value.producer
    numbers = node.inputs[0] if node is not None and node.op == DEQUANTIZE and node.inputs else None
    return numbers if numbers is not None and numbers.dtype in (INT8, UINT8) else None


def recurs(node: Node) -> bool:
    """Whether a node is a recurrent layer that may have a kernel."""
    return not node.domain and node.op in ("LSTM", "GRU")


def projects(node: Node) -> bool:
    """Whether a node is an attention that has the product of its queries, keys and values in it."""
    return node.domain == MICROSOFT and node.op == "Attention"


def keeps_caches(node: Node) -> bool:
    """Whether a node is an attention that puts new keys and values into caches."""
    return node.domain == MICROSOFT and node.op == "GroupQueryAttention"


def caches(nodes: Iterable[Node], sizes: Sizes) -> dict[Value, Value]:
    """Outputs of a model that callers bind to the memory of an input, with that: caches that some nodes put rows into
    and that are as large behind as before at these sizes."""
    found: dict[Value, Value] = {}
    for node in nodes:
        whole = keeps_caches(node) and node.body is None and len(node.inputs) > 4 and len(node.outputs) > 2
        for operand, result in ((3, 1), (4, 2)) if whole else ():
            before, behind = node.inputs[operand], node.outputs[result]
            if before is None or behind is None or not before.is_input or not behind.is_output:
                continue
            shape = shape_of(before, sizes)
            if shape is not None and shape == shape_of(behind, sizes):
                found[behind] = before
    return found


def slides(node: Node) -> bool:
    """Whether a node is a depthwise convolution: each channel of its result sums over one of several channels."""
    if node.op != "Conv" or node.domain or len(node.inputs) < 2 or node.inputs[1] is None:
        return False
    weights, groups = node.inputs[1].shape, node.attributes.get("group", 1)
    return weights is not None and len(weights) > 2 and weights[1] == 1 and groups != 1


def is_in_groups(node: Node) -> bool:
    """Whether a node is a convolution of 16-bit floats or float32 whose sums go over the channels of a group: neither
    all of them nor one by itself."""
    if node.op != "Conv" or node.domain or node.broken or slides(node) or node.attributes.get("group", 1) == 1:
        return False
    image, _ = multiplied(node)
    return image is not None and (is_narrow(image) or image.dtype == FLOAT)


def pools(node: Node) -> bool:
    """Whether a node takes the maximum, or the mean, of windows."""
    found = operator_of(node)
    return found is not None and found.kind is OperatorClass.POOLING


def moves_innermost(node: Node) -> bool:
    """Whether a node is a Transpose that moves the innermost axis, those of size one apart."""
    if node.op != "Transpose" or node.domain:
        return False
    source = node.inputs[0]
    shape = source.shape if source is not None else None
    if shape is None:
        return False
    axes = node.attributes.get("perm") or range(len(shape) - 1, -1, -1)
    if sorted(axes) != list(range(len(shape))):
        return False  # ONNX Runtime refuses it
    moved = [axis for axis in axes if shape[axis] != 1]
    return bool(moved) and moved[-1] != max(moved)


def undoes(node: Node) -> Node | None:
    """The Transpose before a Transpose that takes it back; None where there is none."""
    before = node.inputs[0].producer if node.inputs and node.inputs[0] is not None else None
    if before is None or not _is_transpose(node) or not _is_transpose(before):
        return None
    source = before.inputs[0]
    rank = None if source is None else source.rank
    if rank is None:
        return None
    one, other = (list(each.attributes.get("perm") or range(rank - 1, -1, -1)) for each in (before, node))
    return before if len(one) == len(other) == rank and [one[axis] for axis in other] == list(range(rank)) else None


def _is_transpose(node: Node) -> bool:
    return node.op == "Transpose" and not node.domain


def is_undone(node: Node) -> bool:
    """Whether each node that reads what a Transpose gives takes it back."""
    result = node.outputs[0] if node.outputs else None
    return _is_transpose(node) and result is not None and bool(result.consumers) and not result.is_output and all(
        undoes(reader) is node for reader in result.consumers)
