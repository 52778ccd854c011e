"""Quantised numbers: between floats and small integers with a scale and a zero point."""

from __future__ import annotations

from onnx import TensorProto

from onnxfuse.graph.dims import dim
from onnxfuse.graph.model import Node
from onnxfuse.lowering.context import Context, apply, like, reshape, test
from onnxfuse.lowering.ir import Map, Tensor
from onnxfuse.lowering.operators.registry import integer_attribute, lowers, operand, optional
from onnxfuse.lowering.scalars import FLOAT, TYPES

RANGES: dict[int, tuple[int, int]] = {
    TensorProto.INT8: (-128, 127), TensorProto.UINT8: (0, 255),
    TensorProto.INT16: (-(2**15), 2**15 - 1), TensorProto.UINT16: (0, 2**16 - 1),
}
"""Quantised types that kernels hold, and what they can say."""


@lowers("QuantizeLinear")
def quantize(node: Node, context: Context) -> Tensor:
    """round(x / scale) + zero point, ties to even, as near as the type has it; no number counts as zero, as the
    runtime's kernel has it."""
    source, result = operand(node, context, 0), node.outputs[0]
    dtype = context.dtype(result) if result is not None else TensorProto.UINT8
    if dtype not in RANGES:
        raise context.refuse("unsupported-type", f"QuantizeLinear to {TYPES[dtype].name} has no kernel")
    if source.dtype != FLOAT:
        raise context.refuse("unsupported-type", f"QuantizeLinear of {TYPES[source.dtype].name} has no kernel")
    scale, zero = _parameters(node, context, source)
    quotient = apply("div", source, scale)
    steps: Tensor = apply("round", apply("where", test("isnan", quotient), like(0.0, quotient), quotient))
    if zero is not None:
        steps = apply("add", steps, Map(FLOAT, zero.shape, "cast", (zero,)))
    least, most = RANGES[dtype]
    near = apply("min", apply("max", steps, like(least, steps)), like(most, steps))
    return Map(dtype, near.shape, "cast", (near,))


@lowers("DequantizeLinear")
def dequantize(node: Node, context: Context) -> Tensor:
    """(x - zero point) * scale."""
    source = operand(node, context, 0)
    if source.dtype not in RANGES:
        raise context.refuse("unsupported-type", f"DequantizeLinear of {TYPES[source.dtype].name} has no kernel")
    scale, zero = _parameters(node, context, source)
    if scale.dtype != FLOAT:
        raise context.refuse("unsupported-type", f"DequantizeLinear to {TYPES[scale.dtype].name} has no kernel")
    steps: Tensor = Map(FLOAT, source.shape, "cast", (source,))
    if zero is not None:
        steps = apply("sub", steps, Map(FLOAT, zero.shape, "cast", (zero,)))
    return apply("mul", steps, scale)


def _parameters(node: Node, context: Context, source: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point, of one element or along their axis."""
    scale, zero = operand(node, context, 1), optional(node, context, 2)
    if integer_attribute(node, "block_size", 0):
        raise context.refuse("unsupported-mode", f"{node.op} in blocks has no kernel")
    rank = len(source.shape)
    axis = integer_attribute(node, "axis", 1)
    axis = axis + rank if axis < 0 else axis

    def placed(tensor: Tensor) -> Tensor:
        if len(tensor.shape) != 1 or tensor.shape[0] == 1:
            return reshape(tensor, ())
        return reshape(tensor, tuple(tensor.shape[0] if place == axis else dim(1) for place in range(rank)))

    return placed(scale), None if zero is None else placed(zero)
