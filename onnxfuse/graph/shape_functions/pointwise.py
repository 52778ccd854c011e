"""Elementwise operators, and integer arithmetic on sizes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import onnx

from onnxfuse.graph.dims import Dim, dim, maximum, minimum
from onnxfuse.graph.model import Shape
from onnxfuse.graph.shape_functions.context import (
    BOOL,
    FLOAT,
    INT64,
    INTEGERS,
    MAX_ELEMENTS,
    Context,
    Type,
    same,
    shape_function,
)

UNARY = (
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Ceil", "Celu", "Cos", "Cosh", "Elu",
    "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Log", "Mish", "Neg", "Not",
    "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt",
    "Swish", "Tan", "Tanh", "ThresholdedRelu", "Clip",
)
BINARY = (
    "Add", "Sub", "Mul", "Div", "Mod", "Pow", "Min", "Max", "Sum", "Mean", "PRelu", "And", "Or", "Xor", "BitShift",
    "BitwiseAnd", "BitwiseOr", "BitwiseXor",
)
COMPARISONS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")

Elements = tuple[Dim, ...]


def _quotient(a: Dim, b: Dim) -> Dim | None:
    """ONNX's integer division, which rounds toward zero."""
    exact = a.divide(b)
    if exact is not None:
        return exact
    if b.value is None or b.value <= 0:
        return a // b if a.non_negative() and b.non_negative() else None
    return maximum(a, 0) // b - maximum(-a, 0) // b


def _remainder(a: Dim, b: Dim) -> Dim | None:
    return None if b == 0 else a % b


def _sign(a: Dim) -> int | None:
    """-1, 0, 1 where provable, for symbols of any size."""
    if a.value is not None:
        return (a.value > 0) - (a.value < 0)
    if (a - 1).non_negative():
        return 1
    return -1 if (-a - 1).non_negative() else None


def _equal(a: Dim, b: Dim) -> Dim | None:
    sign = _sign(a - b)
    return None if sign is None else dim(int(sign == 0))


def _greater(a: Dim, b: Dim) -> Dim | None:
    if (b - a).non_negative():
        return dim(0)
    return dim(1) if _sign(a - b) == 1 else None


def _at_least(a: Dim, b: Dim) -> Dim | None:
    if (a - b).non_negative():
        return dim(1)
    return dim(0) if _sign(a - b) == -1 else None


def _power(a: Dim, b: Dim) -> Dim | None:
    if b.value is None or not 0 <= b.value <= 8:
        return None
    return prod([a] * b.value, start=dim(1))


_ARITHMETIC: dict[str, Callable[[Dim, Dim], Dim | None]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": _quotient,
    "Mod": _remainder,
    "Min": minimum,
    "Max": maximum,
    "Sum": lambda a, b: a + b,
    "Pow": _power,
    "Equal": _equal,
    "Greater": _greater,
    "Less": lambda a, b: _greater(b, a),
    "GreaterOrEqual": _at_least,
    "LessOrEqual": lambda a, b: _at_least(b, a),
    "And": lambda a, b: a * b,
    "Or": maximum,
}


def spread(elements: Elements, shape: Shape, target: Shape) -> Elements | None:
    """Contents of a tensor broadcast to a shape; None where a size is symbolic or the result is large."""
    sizes = [size.value for size in target]
    own = [dim(1)] * (len(target) - len(shape)) + list(shape)
    if None in sizes or any(size.value is None for size in own):
        return None
    count = prod(size for size in sizes if size is not None)
    if count > MAX_ELEMENTS:
        return None
    strides, stride = [0] * len(own), 1
    for axis in reversed(range(len(own))):
        size = own[axis].value or 0
        strides[axis] = 0 if size == 1 else stride
        stride *= size
    if stride != len(elements):
        return None
    result = []
    for position in range(count):
        at = 0
        for axis in reversed(range(len(own))):
            position, index = divmod(position, sizes[axis] or 1)
            at += index * strides[axis]
        result.append(elements[at])
    return tuple(result)


def operands(context: Context, shape: Shape | None, first: int = 0) -> list[Elements] | None:
    """Contents of all inputs from ``first`` on, broadcast to the result's shape."""
    if shape is None:
        return None
    result = []
    for index in range(first, len(context.node.inputs)):
        elements, own = context.elements(index), context.shape(index)
        if elements is None or own is None:
            return None
        wide = spread(elements, own, shape)
        if wide is None:
            return None
        result.append(wide)
    return result


def _fold(operation: Callable[[Dim, Dim], Dim | None], parts: list[Elements]) -> Elements | None:
    result: list[Dim] = list(parts[0])
    for part in parts[1:]:
        step = [operation(a, b) for a, b in zip(result, part, strict=True)]
        result = [size for size in step if size is not None]
        if len(result) < len(step):
            return None
    return tuple(result)


@shape_function(*BINARY, *COMPARISONS)
def _binary(context: Context) -> list[Type]:
    node = context.node
    shape = context.meet(*(context.shape(index) for index in range(len(node.inputs))))
    # The exponent's type is its own; every other operator here has one type.
    known = [context.dtype(index) for index in range(len(node.inputs) if node.op != "Pow" else 1)]
    dtype = BOOL if node.op in COMPARISONS else next((kind for kind in known if kind is not None), None)
    elements = None
    wanted = node.op in _ARITHMETIC and context.dtype() in INTEGERS and not context.attribute("fmod", 0)
    if wanted and (parts := operands(context, shape)):
        elements = _fold(_ARITHMETIC[node.op], parts)
    return [Type(dtype, shape, elements)]


@shape_function(*UNARY)
def _unary(context: Context) -> list[Type]:
    elements = context.elements(0)
    if elements is not None:
        match context.node.op:
            case "Identity":
                pass
            case "Neg":
                elements = tuple(-element for element in elements)
            case "Abs" | "Relu":
                positive = all(element.non_negative() for element in elements)
                elements = elements if positive else None
            case "Not":
                elements = tuple(dim(1) - element for element in elements)
            case _:
                elements = None
    return [Type(context.dtype(), context.shape(), elements)]


@shape_function("IsNaN", "IsInf")
def _test(context: Context) -> list[Type]:
    return [Type(BOOL, context.shape())]


@shape_function("Cast")
def _cast(context: Context) -> list[Type]:
    to = int(context.attribute("to"))
    elements = context.elements(0) if to in INTEGERS else None
    if elements is not None and to == BOOL and context.dtype() != BOOL:
        numbers = context.integers(0)
        elements = None if numbers is None else tuple(dim(int(number != 0)) for number in numbers)
    elif elements is not None and to not in (INT64, onnx.TensorProto.INT32):
        # A narrow type wraps large sizes around.
        small = all(e.value is not None and 0 <= e.value < 128 for e in elements)
        elements = elements if small else None
    return [Type(to, context.shape(), elements)]


@shape_function("CastLike")
def _cast_like(context: Context) -> list[Type]:
    return [Type(context.dtype(1), context.shape())]


@shape_function("BitCast")
def _bit_cast(context: Context) -> list[Type]:
    return [Type(int(context.attribute("to")), context.shape())]


@shape_function("Where")
def _where(context: Context) -> list[Type]:
    shape = context.meet(context.shape(0), context.shape(1), context.shape(2))
    elements = None
    parts = operands(context, shape) if context.dtype(1) in INTEGERS else None
    if parts is not None:
        chosen = [yes if c == 1 else no if c == 0 else None for c, yes, no in zip(*parts, strict=True)]
        sizes = tuple(size for size in chosen if size is not None)
        elements = sizes if len(sizes) == len(chosen) else None
    return [Type(context.dtype(1) or context.dtype(2), shape, elements)]


@shape_function(
    "Softmax", "LogSoftmax", "Hardmax", "LpNormalization", "LRN", "MeanVarianceNormalization", "InstanceNormalization",
    "GroupNormalization", "CumSum", "CumProd", "ReverseSequence", "Trilu", "ScatterElements", "Scatter", "ScatterND",
    "RotaryEmbedding", "TensorScatter", "RandomNormalLike", "RandomUniformLike", "Bernoulli",
)
def _like_first(context: Context) -> list[Type]:
    given = context.attribute("dtype") if context.node.op in _TYPED else None
    return [Type(context.dtype() if given is None else int(given), context.shape())]


_TYPED = ("RandomNormalLike", "RandomUniformLike", "Bernoulli")


@shape_function("Dropout")
def _dropout(context: Context) -> list[Type]:
    return [*same(context), Type(BOOL, context.shape())]


@shape_function("LayerNormalization", "RMSNormalization")
def _layer_norm(context: Context) -> list[Type]:
    shape = context.shape()
    if shape is None:
        return [Type(context.dtype())]
    axis = context.axis(len(shape), -1)
    reduced = shape[:axis] + (dim(1),) * (len(shape) - axis)
    kind = int(context.attribute("stash_type", FLOAT))
    return [Type(context.dtype(), shape), Type(kind, reduced), Type(kind, reduced)]


@shape_function("BatchNormalization")
def _batch_norm(context: Context) -> list[Type]:
    mean = Type(context.dtype(3), context.shape(3))
    return [*same(context), mean, mean, mean, mean]


@shape_function("QuantizeLinear")
def quantize(context: Context) -> list[Type]:
    given = int(context.attribute("output_dtype", 0) or 0)
    dtype = context.dtype(2) if context.has(2) else given or int(onnx.TensorProto.UINT8)
    return [Type(dtype, context.shape())]


@shape_function("DequantizeLinear")
def dequantize(context: Context) -> list[Type]:
    given = int(context.attribute("output_dtype", 0) or 0)
    return [Type(given or context.dtype(1), context.shape())]


@shape_function("DynamicQuantizeLinear")
def _dynamic_quantize(context: Context) -> list[Type]:
    kind = int(onnx.TensorProto.UINT8)
    return [Type(kind, context.shape()), Type(FLOAT, ()), Type(kind, ())]
