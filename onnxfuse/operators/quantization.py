"""Quantised numbers: between floats and small integers with a scale and a zero point.

All arithmetic is in float32, whatever the types: so does ONNX Runtime's CPU kernel, and no quotient of float16 numbers
falls on a tie that it was only near to.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from onnxfuse.graph.context import FLOAT, Type, TypeContext, same
from onnxfuse.graph.dims import dim
from onnxfuse.graph.model import Node
from onnxfuse.ir.context import LoweringContext, apply, declare, like, reshape, test, total, wide
from onnxfuse.ir.scalars import BFLOAT16, FLOAT16, INT32, TYPES
from onnxfuse.ir.tensors import Fill, Map, Tensor, scalar
from onnxfuse.operators.arithmetic import ELEMENTARY, SIMPLE, SOFTMAX, per_input, per_output
from onnxfuse.operators.operands import integer_attribute, operand, quantised_by
from onnxfuse.operators.record import MICROSOFT, PLAIN, POINTWISE, REDUCTION, define

RANGES: dict[int, tuple[int, int]] = {
    TensorProto.INT8: (-128, 127), TensorProto.UINT8: (0, 255),
    TensorProto.INT16: (-(2**15), 2**15 - 1), TensorProto.UINT16: (0, 2**16 - 1),
}
"""Quantised types that kernels hold, and what they can say."""
_FLOATS = (FLOAT, FLOAT16, BFLOAT16)


def quantize_types(context: TypeContext) -> list[Type]:
    given = int(context.attribute("output_dtype", 0) or 0)
    dtype = context.dtype(2) if context.has(2) else given or int(onnx.TensorProto.UINT8)
    return [Type(dtype, context.shape())]


def dequantize_types(context: TypeContext) -> list[Type]:
    given = int(context.attribute("output_dtype", 0) or 0)
    return [Type(given or context.dtype(1), context.shape())]


def dynamic_quantize_types(context: TypeContext) -> list[Type]:
    kind = int(onnx.TensorProto.UINT8)
    return [Type(kind, context.shape()), Type(FLOAT, ()), Type(kind, ())]


def quantised_binary_types(context: TypeContext) -> list[Type]:
    return [Type(context.dtype(), context.meet(context.shape(0), context.shape(3)))]


def quantised_global_pool_types(context: TypeContext) -> list[Type]:
    shape = context.shape()
    if shape is None:
        return [Type(context.dtype())]
    if context.attribute("channels_last", 0):
        return [Type(context.dtype(), (shape[0], *(dim(1),) * (len(shape) - 2), shape[-1]))]
    return [Type(context.dtype(), shape[:2] + (dim(1),) * (len(shape) - 2))]


def quantize(node: Node, context: LoweringContext) -> Tensor:
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
    return nearest(apply("steps", wide(source), wide(scale)), zero, dtype)


def nearest(quotient: Tensor, zero: Tensor | None, dtype: int) -> Tensor:
    """A float32 as the nearest number of a quantised type, ties to even, its zero point added."""
    least, most = (like(bound, quotient) for bound in RANGES[dtype])
    kind = INT32 if TYPES[dtype].size == 1 else FLOAT
    point = scalar(0, kind) if zero is None else Map(kind, zero.shape, "cast", (zero,))
    if kind == INT32:
        return apply("nearest_byte", quotient, point, least, most, dtype=dtype)
    near = apply("nearest", quotient, point, least, most)
    return Map(dtype, near.shape, "cast", (near,))


def dequantize(node: Node, context: LoweringContext) -> Tensor:
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


def dynamic_quantize(node: Node, context: LoweringContext) -> list[Tensor | None]:
    """All elements, and the scale and the zero point by which zero and the least and the largest of them are in reach;
    the scale is 1 where all are zero.

    Source: the standard; of zeros, which it divides by zero, ONNX Runtime's CPU kernel.
    """
    source = operand(node, context, 0)
    if source.dtype != FLOAT:
        raise context.refuse("unsupported-type", f"{node.op} of {TYPES[source.dtype].name} has no kernel")
    axes, zero = tuple(range(len(source.shape))), like(0, source)
    least, most = (apply(bound, total(kind, source, axes), zero)
                   for kind, bound in (("min", "at_most"), ("max", "at_least")))
    same = test("eq", most, least)
    span = apply("div", apply("sub", most, least), like(255, source))
    scale = apply("where", same, like(1, source), span)
    point = nearest(apply("neg", apply("steps", least, scale)), None, TensorProto.UINT8)
    result = nearest(apply("steps", source, scale), point, TensorProto.UINT8)
    return [result, reshape(scale, ()), reshape(point, ())]


def _check_quantized(node: Node, context: LoweringContext, dtype: int, which: str) -> None:
    if dtype not in RANGES:
        raise context.refuse("unsupported-type", f"{node.op} {which} {TYPES[dtype].name} has no kernel")


def _parameters(node: Node, context: LoweringContext, source: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point, of one element or along their axis."""
    scale, zero = quantised_by(node, context, 1), _zero(node, context)
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


def _zero(node: Node, context: LoweringContext) -> Tensor | None:
    """The zero point; a constant of one number everywhere, as zeros for each channel, is that number."""
    value = node.inputs[2] if len(node.inputs) > 2 else None
    if value is None:
        return None
    if value.is_constant and value.dtype in RANGES and not value.external:
        numbers = value.constant if value.contents is None else value.contents()
        if numbers is not None and numbers.size > 1 and np.all(numbers == numbers.flat[0]):
            return Fill(context.dtype(value), context.shape(value), int(numbers.flat[0]))
    return quantised_by(node, context, 2)


for _domain in ("", MICROSOFT):
    define("QuantizeLinear", domain=_domain, kind=POINTWISE, types=quantize_types, lowering=quantize,
           arithmetic=per_output(SIMPLE), host=(), runtime=PLAIN, activation=False)
    define("DequantizeLinear", domain=_domain, kind=POINTWISE, types=dequantize_types, lowering=dequantize,
           arithmetic=per_output(SIMPLE), host=(), runtime=PLAIN, activation=False)
define("DynamicQuantizeLinear", kind=REDUCTION, types=dynamic_quantize_types, lowering=dynamic_quantize,
       arithmetic=per_input(4), host=(), runtime=PLAIN)
define("QLinearAdd", "QLinearMul", domain=MICROSOFT, kind=POINTWISE, types=quantised_binary_types, lowering=None,
       arithmetic=per_output(SIMPLE), host=(), runtime=PLAIN, activation=False)
define("QLinearSigmoid", domain=MICROSOFT, kind=POINTWISE, types=same, lowering=None, arithmetic=per_output(ELEMENTARY),
       host=(), runtime=PLAIN, activation=False)
define("QLinearLeakyRelu", domain=MICROSOFT, kind=POINTWISE, types=same, lowering=None, arithmetic=per_output(SIMPLE),
       host=(), runtime=PLAIN, activation=False)
define("QLinearSoftmax", domain=MICROSOFT, kind=REDUCTION, types=same, lowering=None, arithmetic=per_input(SOFTMAX),
       host=(), runtime=PLAIN)
define("QLinearGlobalAveragePool", domain=MICROSOFT, kind=REDUCTION, types=quantised_global_pool_types, lowering=None,
       arithmetic=per_input(SIMPLE), host=(), runtime=PLAIN)
