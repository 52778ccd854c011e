"""Operators sorted once, by how freely they fuse."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from onnx import TensorProto

from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.graph.shape_functions.pointwise import BINARY, COMPARISONS, UNARY
from onnxfuse.graph.shape_functions.reductions import REDUCTIONS

MICROSOFT = "com.microsoft"


class OperatorClass(IntEnum):
    """From what fuses with anything to what fuses with nothing."""

    POINTWISE = 0
    """Each result element comes from the element at the same place of every operand."""
    BROADCAST = 1
    """The same, with an operand spread along axes that it lacks."""
    VIEW = 2
    """Each result element is one element of one operand, at a place that sizes or indices tell, or a constant."""
    REDUCTION = 3
    """Each result element comes from a row, a channel or all of an operand: sums, norms, softmax."""
    HEAVY = 4
    """Matrix products, convolutions, attention and recurrent layers: arithmetic, not bytes, is what they cost."""
    SHAPE = 5
    """Reads its operand's sizes and none of its elements."""
    OPAQUE = 6
    """Everything else."""


_POINTWISE = frozenset({
    *UNARY, *BINARY, *COMPARISONS, "Where", "Cast", "CastLike", "BitCast", "IsNaN", "IsInf", "BatchNormalization",
    "QuantizeLinear", "DequantizeLinear", "Dropout",
})
_VIEWS = frozenset({
    "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split", "Concat", "Expand", "Tile",
    "DepthToSpace", "SpaceToDepth", "Pad", "Gather", "GatherElements", "Trilu", "Range", "ConstantOfShape",
    "OneHot", "Resize",
})
_REDUCTIONS = frozenset({
    *REDUCTIONS, "ArgMax", "ArgMin", "Softmax", "LogSoftmax", "Hardmax", "LpNormalization", "LayerNormalization",
    "RMSNormalization", "InstanceNormalization", "GroupNormalization", "MeanVarianceNormalization",
    "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss",
    "SimplifiedLayerNormalization",
})
_HEAVY = frozenset({
    "MatMul", "MatMulInteger", "QLinearMatMul", "Gemm", "Einsum", "Conv", "ConvInteger", "QLinearConv",
    "ConvTranspose", "DeformConv", "CausalConvWithState", "LSTM", "GRU", "RNN", "Attention", "LinearAttention",
})
_MICROSOFT = {
    **dict.fromkeys(
        ("Gelu", "FastGelu", "QuickGelu", "BiasGelu", "BiasAdd", "BiasDropout", "QLinearAdd", "QLinearMul",
         "QLinearSigmoid", "QLinearLeakyRelu", "QuantizeLinear", "DequantizeLinear"), OperatorClass.POINTWISE),
    **dict.fromkeys(
        ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "SimplifiedLayerNormalization", "BiasSoftmax",
         "GroupNorm", "SkipGroupNorm", "QLinearSoftmax", "QLinearGlobalAveragePool"), OperatorClass.REDUCTION),
    **dict.fromkeys(
        ("FusedMatMul", "TransposeMatMul", "FusedMatMulActivation", "FusedGemm", "GemmFastGelu", "GemmFloat8",
         "FusedConv", "NhwcConv", "NhwcFusedConv", "MatMulNBits", "MatMulBnb4", "MatMulFpQ4", "MatMulIntegerToFloat",
         "DynamicQuantizeMatMul", "QGemm", "QLinearConv", "Attention", "QAttention", "MultiHeadAttention",
         "GroupQueryAttention", "SparseAttention", "PackedAttention", "PackedMultiHeadAttention",
         "DecoderMaskedMultiHeadAttention", "DecoderMaskedSelfAttention", "LongformerAttention", "MoE", "QMoE"),
        OperatorClass.HEAVY),
}
_RANDOM = frozenset({
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli",
})
_SAME_MEMORY = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
_INTEGERS: dict[int | None, tuple[bool, int]] = {
    TensorProto.BOOL: (False, 1), TensorProto.UINT8: (False, 8), TensorProto.INT8: (True, 7),
    TensorProto.UINT16: (False, 16), TensorProto.INT16: (True, 15), TensorProto.UINT32: (False, 32),
    TensorProto.INT32: (True, 31), TensorProto.UINT64: (False, 64), TensorProto.INT64: (True, 63),
}
"""Whether a type has a sign, and its digits."""
_FLOATS: dict[int | None, tuple[int, int]] = {
    TensorProto.FLOAT16: (11, 5), TensorProto.BFLOAT16: (8, 8), TensorProto.FLOAT: (24, 8),
    TensorProto.DOUBLE: (53, 11),
}
"""Digits of a type's significand and of its exponent."""


def classify(node: Node, graph: Graph) -> OperatorClass:
    """The class of a node's operator; an elementwise one is POINTWISE where its operands have the result's sizes."""
    if node.has_subgraph or (node.domain, node.op) in graph.functions:
        return OperatorClass.OPAQUE
    if node.domain == MICROSOFT:
        found = _MICROSOFT.get(node.op, OperatorClass.OPAQUE)
        return _elementwise(node) if found is OperatorClass.POINTWISE else found
    if node.domain:
        return OperatorClass.OPAQUE
    if node.op in ("Shape", "Size"):
        return OperatorClass.SHAPE
    if node.op in _POINTWISE:
        return _elementwise(node) if is_deterministic(node) else OperatorClass.OPAQUE
    for members, kind in ((_VIEWS, OperatorClass.VIEW), (_REDUCTIONS, OperatorClass.REDUCTION),
                          (_HEAVY, OperatorClass.HEAVY)):
        if node.op in members:
            return kind
    return OperatorClass.OPAQUE


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
    return node.op not in _RANDOM and not (node.op in ("Dropout", "BatchNormalization") and in_training(node))


def in_training(node: Node) -> bool:
    """Whether a Dropout or BatchNormalization works, or may work, as in training."""
    if node.op == "BatchNormalization":
        return bool(node.attributes.get("training_mode", 0))
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    return mode is not None and (mode.constant is None or bool(np.any(mode.constant)))


def is_same_memory(node: Node) -> bool:
    """Whether the first result is the first operand's memory under other sizes, so that no kernel runs."""
    if node.domain or node.has_subgraph:
        return False
    if node.op == "Dropout":
        return not in_training(node) and all(value is None or not _is_used(value) for value in node.outputs[1:])
    return _is_removed_cast(node) if node.op == "Cast" else node.op in _SAME_MEMORY


def _is_removed_cast(node: Node) -> bool:
    """Whether ONNX Runtime (1.20 to 1.31) takes a Cast out when a session is created: one to the type at hand, one that
    takes back an exact one before it, and an exact one that nothing but one other Cast reads, or those that take it
    back.  What gives an output of the graph stays."""
    source, target = _cast_types(node)
    result = node.outputs[0] if node.outputs else None
    if source is None or target is None or result is None or result.is_output:
        return False
    return source == target or _takes_back(node) or (is_exact(source, target) and _is_read_by_casts(result))


def _takes_back(node: Node) -> bool:
    """Whether a Cast gives back what an exact Cast before it had, and no output of the graph."""
    before = node.inputs[0].producer if node.inputs[0] is not None else None
    if before is None or node.outputs[0] is None or node.outputs[0].is_output:
        return False
    source, target = _cast_types(before)
    return is_exact(source, target) and _cast_types(node) == (target, source)


def _is_read_by_casts(value: Value) -> bool:
    """Whether Casts that take it back read a value and nothing else does, or one Cast to another type."""
    if not value.consumers:
        return False
    source, target = _cast_types(value.consumers[0])
    lone = len(value.consumers) == 1 and source is not None and source != target
    return lone or all(_cast_types(reader)[0] is not None and _takes_back(reader) for reader in value.consumers)


def is_exact(source: int | None, target: int | None) -> bool:
    """Whether every value of a type is one of another type too."""
    if source in _INTEGERS and target in _INTEGERS:
        return all(own <= other for own, other in zip(_INTEGERS[source], _INTEGERS[target], strict=True))
    if source in _INTEGERS and target in _FLOATS:
        return _INTEGERS[source][1] <= _FLOATS[target][0]
    return source in _FLOATS and target in _FLOATS and all(
        own <= other for own, other in zip(_FLOATS[source], _FLOATS[target], strict=True))


def _cast_types(node: Node) -> tuple[int | None, int | None]:
    """The types that a Cast takes and gives; None of other nodes."""
    if node.op != "Cast" or node.domain or not node.inputs or node.inputs[0] is None:
        return None, None
    target = node.attributes.get("to")
    return node.inputs[0].dtype, target if isinstance(target, int) else None


def _is_used(value: Value) -> bool:
    return value.is_output or bool(value.consumers)
