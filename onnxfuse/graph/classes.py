"""Operators sorted once, by how freely they fuse."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from onnxfuse.graph.model import Graph, Node
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


def classify(node: Node, graph: Graph) -> OperatorClass:
    """The class of a node's operator; an elementwise one is POINTWISE where its operands have the result's sizes."""
    if node.has_subgraph or node.broken or (node.domain, node.op) in graph.functions:
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
