"""Operators that make tensors of nothing but sizes, numbers or chance."""

from __future__ import annotations

import numpy as np

from onnxfuse.graph.context import FLOAT, INT64, INTEGERS, MAX_ELEMENTS, Type, TypeContext
from onnxfuse.graph.dims import dim, maximum, product
from onnxfuse.graph.model import Node
from onnxfuse.ir.context import LoweringContext, apply, number, size_of
from onnxfuse.ir.tensors import Fill, Iota, Tensor
from onnxfuse.operators.arithmetic import none
from onnxfuse.operators.operands import present, result_shape, shape_operands
from onnxfuse.operators.record import MICROSOFT, PLAIN, SHAPE, VIEW, define, opaque


def shape_types(context: TypeContext) -> list[Type]:
    shape = context.shape()
    if shape is None:
        return [Type(INT64, context.unknown_shape(1))]
    first, last, _ = slice(context.attribute("start", 0), context.attribute("end")).indices(len(shape))
    sizes = shape[first:last]
    return [Type(INT64, (dim(len(sizes)),), sizes)]


def size_types(context: TypeContext) -> list[Type]:
    shape = context.shape()
    return [Type(INT64, (), None if shape is None else (product(shape),))]


def constant_types(context: TypeContext) -> list[Type]:
    value = context.node.outputs[0]
    assert value is not None
    elements = None
    if value.constant is not None and value.constant.dtype.kind in "iub" and value.constant.size <= MAX_ELEMENTS:
        elements = tuple(dim(int(number)) for number in value.constant.reshape(-1))
    return [Type(value.dtype, value.shape, elements)]


def constant_of_shape_types(context: TypeContext) -> list[Type]:
    value = context.attribute("value")
    dtype = 1 if value is None else _dtype_of(value)
    target = context.elements(0)
    if target is None:
        rank = context.count(0)
        return [Type(dtype, None if rank is None else context.unknown_shape(rank))]
    count, elements = product(target).value, None
    if count is not None and count <= MAX_ELEMENTS and dtype in INTEGERS:
        elements = (dim(int(value.reshape(-1)[0])),) * count
    return [Type(dtype, target, elements)]


def _dtype_of(array: np.ndarray) -> int:
    from onnx import helper

    return int(helper.np_dtype_to_tensor_dtype(array.dtype))


def range_types(context: TypeContext) -> list[Type]:
    bounds = [context.elements(index) for index in range(3)]
    dtype = context.dtype()
    start, limit, delta = (bound[0] if bound and len(bound) == 1 else None for bound in bounds)
    if start is not None and limit is not None and delta is not None and delta.value:
        length = maximum((limit - start + (delta.value - (1 if delta.value > 0 else -1))) // delta, 0)
        count = length.value
        elements = None
        if count is not None and count <= MAX_ELEMENTS:
            elements = tuple(start + delta * index for index in range(count))
        return [Type(dtype, (length,), elements)]
    constants = [context.constant(index) for index in range(3)]
    if all(constant is not None for constant in constants):
        first, last, step = (float(constant.reshape(-1)[0]) for constant in constants if constant is not None)
        return [Type(dtype, (dim(max(int(np.ceil((last - first) / step)), 0)),))]
    return [Type(dtype, context.unknown_shape(1))]


def like_types(context: TypeContext) -> list[Type]:
    given = context.attribute("dtype")
    return [Type(context.dtype() if given is None else int(given), context.shape())]


def multinomial_types(context: TypeContext) -> list[Type]:
    shape = context.shape()
    sizes = None if shape is None else (shape[0], dim(int(context.attribute("sample_size", 1))))
    return [Type(int(context.attribute("dtype", 6)), sizes)]


def random_types(context: TypeContext) -> list[Type]:
    return [Type(int(context.attribute("dtype", 1)), tuple(dim(int(size)) for size in context.attribute("shape")))]


def mel_types(context: TypeContext) -> list[Type]:
    bins, length = context.elements(0), context.elements(1)
    dtype = int(context.attribute("output_datatype", FLOAT))
    if bins is None or length is None:
        return [Type(dtype, context.unknown_shape(2))]
    return [Type(dtype, (length[0] // 2 + 1, bins[0]))]


def window_types(context: TypeContext) -> list[Type]:
    size = context.elements(0)
    return [Type(int(context.attribute("output_datatype", FLOAT)), size or context.unknown_shape(1))]


def stft_types(context: TypeContext) -> list[Type]:
    signal, step, window = context.shape(0), context.integers(1), context.shape(2)
    if signal is None:
        return [Type(context.dtype(), context.unknown_shape(4))]
    given = context.elements(3) if context.has(3) else window
    if given is None or not step or step[0] <= 0:
        places = (context.unknown(1, 4), context.unknown(2, 4))
    else:
        bins = given[0] // 2 + 1 if context.attribute("onesided", 1) else given[0]
        places = ((signal[1] - given[0]) // step[0] + 1, bins)
    return [Type(context.dtype(), (signal[0], *places, dim(2)))]


def lower_range(node: Node, context: LoweringContext) -> Tensor:
    (length,) = result_shape(node, context)
    dtype = context.dtype(node.outputs[0]) if node.outputs[0] is not None else INT64
    steps = Iota(dtype, (length,), 0)
    if dtype == INT64:
        start, step = (context.sizes(present(node, context, place))[0] for place in (0, 2))
        context.sizes(present(node, context, 1))
        scaled = steps if step == 1 else apply("mul", steps, size_of(step, dtype))
        return scaled if start == 0 else apply("add", scaled, size_of(start, dtype))
    raise context.refuse("unsupported-type", "a Range of another type than int64 has no kernel")


def constant_of_shape(node: Node, context: LoweringContext) -> Tensor:
    shape_operands(node, context, 0)
    value = node.attributes.get("value")
    dtype = context.dtype(node.outputs[0]) if node.outputs[0] is not None else 1
    return Fill(dtype, result_shape(node, context), 0.0 if value is None else number(value))


define("Shape", kind=SHAPE, types=shape_types, lowering=None, arithmetic=none, host=(), runtime=PLAIN)
define("Size", kind=SHAPE, types=size_types, lowering=None, arithmetic=none, host=(), runtime=PLAIN)
opaque("Constant", types=constant_types, host=(), random=False)
define("ConstantOfShape", kind=VIEW, types=constant_of_shape_types, lowering=constant_of_shape, arithmetic=none,
       host=(0,), runtime=PLAIN)
# Its numbers are places, which a kernel counts anyhow.
define("Range", kind=VIEW, types=range_types, lowering=lower_range, arithmetic=none, host=(0, 1, 2), runtime=PLAIN)
opaque("Range", domain=MICROSOFT, types=range_types, host=(), random=False)
opaque("EyeLike", types=like_types, host=(), random=False)
opaque("RandomNormal", "RandomUniform", types=random_types, host=(), random=True)
opaque("RandomNormalLike", "RandomUniformLike", "Bernoulli", types=like_types, host=(), random=True)
opaque("Multinomial", types=multinomial_types, host=(), random=True)
opaque("BlackmanWindow", "HammingWindow", "HannWindow", types=window_types, host=(), random=False)
opaque("MelWeightMatrix", types=mel_types, host=(), random=False)
opaque("STFT", types=stft_types, host=(), random=False)
