"""What ONNX Runtime computes of constants once, when a session is created: what its CPU has a kernel for.

Of 16-bit floats that is little: elements that move, and of float16 what only compares.  All else of them is computed
on the GPU in every run.  ``tests/test_constants.py`` asks sessions.
"""

from __future__ import annotations

from onnx import TensorProto

from onnxfuse.graph.model import Node
from onnxfuse.operators.classes import DEQUANTIZE, QUANTIZE, is_deterministic, is_narrow
from onnxfuse.operators.record import OperatorClass, operator_of
from onnxfuse.provider.removed import is_same_memory

MOVING = frozenset({
    "BitCast", "Cast", "Concat", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "IsInf",
    "IsNaN", "Reshape", "Shape", "Sign", "Slice", "Split", "Squeeze", "TensorScatter", "Transpose", "Unsqueeze",
})
"""Operators that the CPU has for elements of every type."""

MOVING_FLOAT16 = frozenset({
    "Attention", "Clip", "Expand", "LayerNormalization", "Max", "Min", "RMSNormalization", "RotaryEmbedding", "Round",
    "Scatter", "ScatterElements", "ScatterND", "Shrink",
})
"""Those that it has for float16 too, but not for bfloat16."""

TAKEN_APART = frozenset({
    "AffineGrid", "CastLike", "Celu", "CenterCropPad", "GroupNormalization", "HardSwish", "Mish",
    "NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss", "Swish",
})
"""Functions of the standard whose nodes come only after constants are computed, and so run every time."""

_ROUNDING = frozenset({QUANTIZE, DEQUANTIZE, "DynamicQuantizeLinear"})
"""What rounds by the type that it computes in, to integers or from them."""

_COMPUTED = frozenset({
    OperatorClass.POINTWISE, OperatorClass.VIEW, OperatorClass.REDUCTION, OperatorClass.SCAN, OperatorClass.POOLING,
    OperatorClass.HEAVY,
})


def is_computed_once(node: Node) -> bool:
    """Whether the runtime computes a node once where its operands are constants, or takes it out.  DequantizeLinear it
    keeps, for what it fuses with it."""
    if node.has_subgraph or not is_deterministic(node) or node.op == DEQUANTIZE:
        return False
    if node.domain:
        return not _is_narrow(node)
    return node.op not in TAKEN_APART and (
        is_same_memory(node) or node.op in MOVING or not _is_narrow(node) or (
            node.op in MOVING_FLOAT16 and not _is_narrow(node, _BFLOAT16)))


def is_kept_for_its_type(node: Node) -> bool:
    """Whether a node of constants runs every time because it is of 16-bit floats, and gives the same, rounded to these,
    where it is of float32."""
    record = operator_of(node)
    return (
        record is not None and record.kind in _COMPUTED and not node.domain and not node.broken
        and node.op not in TAKEN_APART | _ROUNDING and not node.has_subgraph and is_deterministic(node)
        and any(map(is_narrow, node.inputs)) and not is_computed_once(node)
    )


_BFLOAT16 = (TensorProto.BFLOAT16,)


def _is_narrow(node: Node, types: tuple[int, ...] = (TensorProto.FLOAT16, TensorProto.BFLOAT16)) -> bool:
    """Whether a node reads or gives floats of these types."""
    return any(value is not None and value.dtype in types for value in (*node.inputs, *node.outputs))
