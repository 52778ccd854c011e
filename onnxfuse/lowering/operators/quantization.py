"""Quantised numbers: between floats and small integers with a scale and a zero point.

All arithmetic is in float32, whatever the types: so does ONNX Runtime's CPU kernel, and no quotient of float16 numbers
falls on a tie that it was only near to.
"""

from __future__ import annotations

from onnx import TensorProto

from onnxfuse.graph.dims import dim
from onnxfuse.graph.model import Node
from onnxfuse.lowering.context import Context, apply, declare, like, reshape, test, wide
from onnxfuse.lowering.ir import Map, Tensor
from onnxfuse.lowering.operators.contrib import MICROSOFT
from onnxfuse.lowering.operators.registry import integer_attribute, lowers, operand, optional
from onnxfuse.lowering.scalars import BFLOAT16, FLOAT, FLOAT16, TYPES

RANGES: dict[int, tuple[int, int]] = {
    TensorProto.INT8: (-128, 127), TensorProto.UINT8: (0, 255),
    TensorProto.INT16: (-(2**15), 2**15 - 1), TensorProto.UINT16: (0, 2**16 - 1),
}
"""Quantised types that kernels hold, and what they can say."""
_FLOATS = (FLOAT, FLOAT16, BFLOAT16)


@lowers("QuantizeLinear", domain=MICROSOFT)
@lowers("QuantizeLinear")
def quantize(node: Node, context: Context) -> Tensor:
    """round(x / scale) + zero point, ties to even, as near as the type has it.

    No number counts as zero, as the runtime's CUDA kernels have it; it has none for 16 bits, and its CPU kernel gives
    the lowest.
    """
    source, result = operand(node, context, 0), node.outputs[0]
    dtype = context.dtype(result) if result is not None else TensorProto.UINT8
    _check_quantized(node, context, dtype, "to")
    if source.dtype not in _FLOATS:
        raise context.refuse("unsupported-type", f"{node.op} of {TYPES[source.dtype].name} has no kernel")
    scale, zero = _parameters(node, context, source)
    if scale.dtype != source.dtype:
        raise context.refuse("unsupported-type", f"{node.op} of {TYPES[source.dtype].name} by a scale of another type, "
                                                 f"{TYPES[scale.dtype].name}, has no kernel")
    if integer_attribute(node, "precision", FLOAT) not in (TensorProto.UNDEFINED, FLOAT):
        raise context.refuse("unsupported-mode", f"{node.op} with a precision of its own has no kernel")
    least, most = RANGES[dtype]
    quotient = apply("div", wide(source), wide(scale))
    instead = like(0.0 if TYPES[dtype].size == 1 else least - most - 1, quotient)
    steps: Tensor = apply("round", apply("where", test("isnan", quotient), instead, quotient))
    if zero is not None:
        steps = apply("add", steps, Map(FLOAT, zero.shape, "cast", (zero,)))
    near = apply("min", apply("max", steps, like(least, steps)), like(most, steps))
    return Map(dtype, near.shape, "cast", (near,))


@lowers("DequantizeLinear", domain=MICROSOFT)
@lowers("DequantizeLinear")
def dequantize(node: Node, context: Context) -> Tensor:
    """(x - zero point) * scale; an int32 has no zero point but 0."""
    source, result = operand(node, context, 0), node.outputs[0]
    if source.dtype != TensorProto.INT32:
        _check_quantized(node, context, source.dtype, "of")
    scale, zero = _parameters(node, context, source)
    dtype = context.dtype(result) if result is not None else scale.dtype
    for kind in (scale.dtype, dtype):
        if kind not in _FLOATS:
            raise context.refuse("unsupported-type", f"{node.op} to {TYPES[kind].name} has no kernel")
    steps: Tensor = Map(FLOAT, source.shape, "cast", (source,))
    if zero is not None and source.dtype != TensorProto.INT32:
        steps = apply("sub", steps, Map(FLOAT, zero.shape, "cast", (zero,)))
    return declare(apply("mul", steps, wide(scale)), dtype)


def _check_quantized(node: Node, context: Context, dtype: int, which: str) -> None:
    if dtype not in RANGES:
        raise context.refuse("unsupported-type", f"{node.op} {which} {TYPES[dtype].name} has no kernel")


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
