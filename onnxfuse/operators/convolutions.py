"""Convolutions, pooling, and sampling of images."""

from __future__ import annotations

from math import prod
from typing import Literal

from onnxfuse.graph.context import INT64, Type, TypeContext
from onnxfuse.graph.dims import Dim, dim, maximum, minimum
from onnxfuse.graph.model import Node, Shape
from onnxfuse.graph.sizes import Sizes
from onnxfuse.operators.arithmetic import elements, per_output, sizes_of, uncounted
from onnxfuse.operators.convolving import conv, conv_integer, conv_transpose, qlinear_conv
from onnxfuse.operators.pooling import average_pool, max_pool
from onnxfuse.operators.products import INT32
from onnxfuse.operators.record import HEAVY, MICROSOFT, OPAQUE, PLAIN, POOLING, RuntimeKernel, define, opaque

Rounding = Literal["floor", "ceil", "zero"]
"""Of the places that a window takes along an axis: to those at which it lies inside; to one more, which begins inside;
and towards zero, as the runtime's pooling does it: a window that is larger than what is there, by less than a stride,
takes one place and what is there, where the standard has it take none."""


def window_length(size: Dim, kernel: Dim, stride: int, dilation: int, pads: tuple[int, int], rounding: Rounding) -> Dim:
    """How many places a sliding window takes along an axis."""
    free = size + (pads[0] + pads[1] - 1) - dilation * (kernel - 1)
    lower, upper = free // stride + 1, (free + (stride - 1)) // stride + 1
    if rounding == "floor":
        return lower
    if rounding == "zero":
        # Of a size that is not known one element is the least: nothing is pooled of an axis without any.
        least = free.value if free.value is not None else (free - size + 1).value
        if least is None or least >= 0:
            return lower
        return maximum(lower, 1 if least > -stride else minimum(upper, 1))
    if upper.value is not None and size.value is not None and (upper.value - 1) * stride >= size.value + pads[0]:
        # A window that would begin in the padding behind the data is dropped.
        return upper - 1
    return upper


def sliding(context: TypeContext, size: Shape, kernel: Shape, rounding: Rounding = "floor") -> Shape:
    """Spatial sizes after a convolution or pooling with the node's strides, dilations and padding."""
    count = len(size)
    strides = [int(n) for n in context.attribute("strides") or [1] * count]
    dilations = [int(n) for n in context.attribute("dilations") or [1] * count]
    pads = [int(n) for n in context.attribute("pads") or [0] * (2 * count)]
    automatic = context.attribute("auto_pad", "NOTSET")
    result = []
    for axis in range(count):
        if automatic in ("SAME_UPPER", "SAME_LOWER"):
            result.append((size[axis] + (strides[axis] - 1)) // strides[axis])
            continue
        own = (0, 0) if automatic == "VALID" else (pads[axis], pads[axis + count])
        result.append(window_length(size[axis], kernel[axis], strides[axis], dilations[axis], own, rounding))
    return tuple(result)


def conv_types(context: TypeContext) -> list[Type]:
    quantised = context.node.op == "QLinearConv"
    shape, weight = context.shape(0), context.shape(3 if quantised else 1)
    dtype = context.dtype(7) if quantised else INT32 if context.node.op == "ConvInteger" else context.dtype()
    given = context.attribute("kernel_shape")
    if shape is None:
        # The weight tells the rank, and a kernel's sizes do.
        rank = len(weight) if weight is not None else None if given is None else len(given) + 2
        channels = None if weight is None else weight[0]
        return [Type(dtype, None if rank is None else _sizes_with_channels(context, rank, channels))]
    if weight is None and given is None:
        return [Type(dtype, (shape[0], *context.unknown_shape(len(shape))[1:]))]
    kernel = weight[2:] if weight is not None else tuple(dim(int(size)) for size in given)
    features = weight[0] if weight is not None else context.unknown(1, len(shape))
    return [Type(dtype, (shape[0], features, *sliding(context, shape[2:], kernel)))]


def _sizes_with_channels(context: TypeContext, rank: int, channels: Dim | None) -> Shape:
    """Sizes of which the rank is known, and perhaps those of axis 1."""
    sizes = context.unknown_shape(rank)
    return sizes if channels is None else (sizes[0], channels, *sizes[2:])


def conv_transpose_types(context: TypeContext) -> list[Type]:
    shape, weight = context.shape(0), context.shape(1)
    if weight is None:
        return [Type(context.dtype(), None if shape is None else context.unknown_shape(len(shape)))]
    channels = weight[1] * int(context.attribute("group", 1))
    if shape is None:
        return [Type(context.dtype(), _sizes_with_channels(context, len(weight), channels))]
    count = len(shape) - 2
    wanted = context.attribute("output_shape")
    if wanted:
        return [Type(context.dtype(), (shape[0], channels, *(dim(int(size)) for size in wanted[-count:])))]
    strides = [int(n) for n in context.attribute("strides") or [1] * count]
    dilations = [int(n) for n in context.attribute("dilations") or [1] * count]
    extra = [int(n) for n in context.attribute("output_padding") or [0] * count]
    pads = [int(n) for n in context.attribute("pads") or [0] * (2 * count)]
    automatic = context.attribute("auto_pad", "NOTSET")
    sizes = []
    for axis in range(count):
        size = shape[2 + axis]
        if automatic in ("SAME_UPPER", "SAME_LOWER"):
            sizes.append(size * strides[axis])
            continue
        own = 0 if automatic == "VALID" else pads[axis] + pads[axis + count]
        reach = dilations[axis] * (weight[2 + axis] - 1) + 1
        sizes.append((size - 1) * strides[axis] + extra[axis] + reach - own)
    return [Type(context.dtype(), (shape[0], channels, *sizes))]


def pool_types(context: TypeContext) -> list[Type]:
    shape = context.shape()
    if shape is None:
        sizes = context.unknown_shape(len(context.attribute("kernel_shape")) + 2)
        return [Type(context.dtype(), sizes), Type(INT64, sizes)]
    kernel = tuple(dim(int(size)) for size in context.attribute("kernel_shape"))
    spatial, ceil = shape[2:], bool(context.attribute("ceil_mode", 0))
    if ceil and any(size.value is None for size in spatial):
        # Whether the last window begins in the padding depends on the size.
        sizes = tuple(context.unknown(axis + 2, len(shape)) for axis in range(len(spatial)))
    else:
        sizes = sliding(context, spatial, kernel, "ceil" if ceil else "zero")
    result = (*shape[:2], *sizes)
    return [Type(context.dtype(), result), Type(INT64, result)]


def nhwc_conv_types(context: TypeContext) -> list[Type]:
    shape, weight = context.shape(0), context.shape(1)
    if shape is None or weight is None:
        return [Type(context.dtype())]
    # Weights are channels-last as well: [outputs, kernel..., inputs].
    return [Type(context.dtype(), (shape[0], *sliding(context, shape[1:-1], weight[1:-1]), weight[0]))]


def roi_align_types(context: TypeContext) -> list[Type]:
    shape, rois = context.shape(0), context.shape(1)
    if shape is None or rois is None:
        return [Type(context.dtype(), context.unknown_shape(4))]
    height, width = int(context.attribute("output_height", 1)), int(context.attribute("output_width", 1))
    return [Type(context.dtype(), (rois[0], shape[1], dim(height), dim(width)))]


def max_roi_pool_types(context: TypeContext) -> list[Type]:
    shape, rois = context.shape(0), context.shape(1)
    if shape is None or rois is None:
        return [Type(context.dtype(), context.unknown_shape(4))]
    return [Type(context.dtype(), (rois[0], shape[1], *(dim(int(n)) for n in context.attribute("pooled_shape"))))]


def _weights(node: Node, sizes: Sizes) -> tuple[int, ...] | None:
    return sizes_of(node.inputs[3 if node.op == "QLinearConv" else 1], sizes)


def conv_arithmetic(node: Node, sizes: Sizes) -> int | None:
    """Twice the output's elements times what each of them sums, and one an element for a bias."""
    out, weights = elements(node.outputs[0], sizes), _weights(node, sizes)
    if out is None or weights is None:
        return None
    floats = node.op not in ("ConvInteger", "QLinearConv")
    bias = out if floats and len(node.inputs) > 2 and node.inputs[2] else 0
    return 2 * out * prod(weights[1:]) + bias


def _conv_transpose_arithmetic(node: Node, sizes: Sizes) -> int | None:
    count, weights = elements(node.inputs[0], sizes), _weights(node, sizes)
    out = elements(node.outputs[0], sizes)
    if count is None or weights is None or out is None:
        return None
    return 2 * count * prod(weights[1:]) + (out if len(node.inputs) > 2 and node.inputs[2] else 0)


def _pool_arithmetic(node: Node, sizes: Sizes) -> int | None:
    return per_output(prod(node.attributes.get("kernel_shape", [1])))(node, sizes)


define("Conv", kind=HEAVY, types=conv_types, lowering=conv, arithmetic=conv_arithmetic, host=(),
       runtime=RuntimeKernel.CONVOLUTION)
define("ConvInteger", kind=HEAVY, types=conv_types, lowering=conv_integer, arithmetic=conv_arithmetic, host=(),
       runtime=PLAIN)
define("QLinearConv", kind=HEAVY, types=conv_types, lowering=qlinear_conv, arithmetic=conv_arithmetic, host=(),
       runtime=PLAIN)
define("FusedConv", "QLinearConv", domain=MICROSOFT, kind=HEAVY, types=conv_types, lowering=None,
       arithmetic=conv_arithmetic, host=(), runtime=PLAIN)
define("NhwcConv", "NhwcFusedConv", domain=MICROSOFT, kind=HEAVY, types=nhwc_conv_types, lowering=None,
       arithmetic=conv_arithmetic, host=(), runtime=PLAIN)
define("ConvTranspose", kind=HEAVY, types=conv_transpose_types, lowering=conv_transpose,
       arithmetic=_conv_transpose_arithmetic, host=(), runtime=RuntimeKernel.CONVOLUTION)
define("DeformConv", "CausalConvWithState", kind=HEAVY, types=None, lowering=None, arithmetic=uncounted, host=(),
       runtime=PLAIN)
define("MaxPool", kind=POOLING, types=pool_types, lowering=max_pool, arithmetic=_pool_arithmetic, host=(),
       runtime=PLAIN)
define("AveragePool", kind=POOLING, types=pool_types, lowering=average_pool, arithmetic=_pool_arithmetic, host=(),
       runtime=PLAIN)
define("LpPool", kind=OPAQUE, types=pool_types, lowering=None, arithmetic=_pool_arithmetic, host=(), runtime=PLAIN,
       random=False)
opaque("RoiAlign", types=roi_align_types, host=(), random=False)
opaque("MaxRoiPool", types=max_roi_pool_types, host=(), random=False)
opaque("AffineGrid", types=None, host=(1,), random=False)
