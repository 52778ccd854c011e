"""Operators that place elements elsewhere: reshape, transpose, slice, split, concat, pad, tile, resize."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import floor, prod

import numpy as np

from onnxfuse.graph.dims import Dim, dim, maximum, minimum, product
from onnxfuse.graph.model import Shape
from onnxfuse.graph.shape_functions.context import (
    INT64,
    INTEGERS,
    MAX_ELEMENTS,
    Contents,
    Context,
    Type,
    flat,
    shape_function,
)
from onnxfuse.graph.shape_functions.pointwise import spread


@shape_function("Shape")
def _shape(context: Context) -> list[Type]:
    shape = context.shape()
    if shape is None:
        return [Type(INT64, context.unknown_shape(1))]
    first, last, _ = slice(context.attribute("start", 0), context.attribute("end")).indices(len(shape))
    sizes = shape[first:last]
    return [Type(INT64, (dim(len(sizes)),), sizes)]


@shape_function("Size")
def _size(context: Context) -> list[Type]:
    shape = context.shape()
    return [Type(INT64, (), None if shape is None else (product(shape),))]


@shape_function("Constant")
def _constant(context: Context) -> list[Type]:
    value = context.node.outputs[0]
    assert value is not None
    elements = None
    if value.constant is not None and value.constant.dtype.kind in "iub" and value.constant.size <= MAX_ELEMENTS:
        elements = tuple(dim(int(number)) for number in value.constant.reshape(-1))
    return [Type(value.dtype, value.shape, elements)]


@shape_function("Reshape")
def _reshape(context: Context) -> list[Type]:
    target, shape = context.elements(1), context.shape()
    if target is None:
        length = context.shape(1)
        rank = None if length is None or len(length) != 1 else length[0].value
        known = None if rank is None else context.unknown_shape(rank)
        return [Type(context.dtype(), known, context.elements(0))]
    keep_zero = bool(context.attribute("allowzero", 0))
    sizes: list[Dim | None] = []
    for axis, size in enumerate(target):
        if size == -1:
            sizes.append(None)
        elif size == 0 and not keep_zero:
            sizes.append(shape[axis] if shape is not None and axis < len(shape) else context.unknown(axis, len(target)))
        else:
            sizes.append(size)
    if None in sizes:
        rest = sizes.index(None)
        sizes[rest] = _remaining(context, shape, [size for size in sizes if size is not None], rest, len(sizes))
    return [Type(context.dtype(), tuple(size for size in sizes if size is not None), context.elements(0))]


def _remaining(context: Context, shape: Shape | None, sizes: list[Dim], axis: int, rank: int) -> Dim:
    """The size that -1 stands for: all elements over those of the other axes."""
    if shape is None:
        return context.unknown(axis, rank)
    # Sizes on both sides cancel first, so that sums and opaque sizes divide as well.
    rest, others = list(shape), []
    for size in sizes:
        if size in rest:
            rest.remove(size)
        else:
            others.append(size)
    return product(rest) // product(others)


@shape_function("Flatten")
def _flatten(context: Context) -> list[Type]:
    shape = context.shape()
    if shape is None:
        return [Type(context.dtype(), context.unknown_shape(2))]
    axis = context.axis(len(shape), 1)
    return [Type(context.dtype(), (product(shape[:axis]), product(shape[axis:])), context.elements(0))]


@shape_function("Transpose")
def _transpose(context: Context) -> list[Type]:
    shape = context.shape()
    if shape is None:
        return [Type(context.dtype())]
    order = context.attribute("perm") or list(reversed(range(len(shape))))
    contents = context.contents(0)
    turned = None if contents is None else contents.transpose(order)
    return [Type(context.dtype(), tuple(shape[axis] for axis in order), flat(turned))]


def axes_of(context: Context, index: int = 1) -> list[int] | None:
    """Axes given as an attribute (old operator sets) or as an input; [] where neither is there."""
    given = context.attribute("axes")
    if given is not None:
        return [int(axis) for axis in given]
    return context.integers(index) if context.has(index) else []


@shape_function("Squeeze")
def _squeeze(context: Context) -> list[Type]:
    shape, axes = context.shape(), axes_of(context)
    if shape is None or axes is None:
        return [Type(context.dtype(), None, context.elements(0))]
    if context.attribute("axes") is None and not context.has(1):
        if any(size.value is None for size in shape):
            # A symbolic size may be 1 and vanish: not even the rank is known.
            return [Type(context.dtype(), None, context.elements(0))]
        axes = [axis for axis, size in enumerate(shape) if size == 1]
    gone = {axis % len(shape) for axis in axes} if shape else set()
    left = tuple(size for axis, size in enumerate(shape) if axis not in gone)
    return [Type(context.dtype(), left, context.elements(0))]


@shape_function("Unsqueeze")
def _unsqueeze(context: Context) -> list[Type]:
    shape, axes = context.shape(), axes_of(context)
    if shape is None or axes is None:
        return [Type(context.dtype(), None, context.elements(0))]
    rank = len(shape) + len(axes)
    new = {axis % rank for axis in axes}
    old = iter(shape)
    sizes = tuple(dim(1) if axis in new else next(old) for axis in range(rank))
    return [Type(context.dtype(), sizes, context.elements(0))]


@shape_function("Expand")
def _expand(context: Context) -> list[Type]:
    shape, target = context.shape(), context.elements(1)
    if shape is None or target is None:
        length = context.shape(1)
        rank = None if shape is None or length is None or len(length) != 1 else length[0].value
        known = None if rank is None or shape is None else context.unknown_shape(max(rank, len(shape)))
        return [Type(context.dtype(), known)]
    result = context.meet(shape, target)
    elements, wide = context.elements(0), None
    if elements is not None and result is not None:
        wide = spread(elements, shape, result)
    return [Type(context.dtype(), result, wide)]


@shape_function("Tile")
def _tile(context: Context) -> list[Type]:
    shape, repeats = context.shape(), context.elements(1)
    if shape is None:
        return [Type(context.dtype())]
    if repeats is None:
        return [Type(context.dtype(), context.unknown_shape(len(shape)))]
    contents, times, wide = context.contents(0), context.integers(1), None
    if contents is not None and times is not None and all(0 <= n <= MAX_ELEMENTS for n in times) and (
            contents.size * prod(times) <= MAX_ELEMENTS):
        wide = flat(np.tile(contents, times))
    return [Type(context.dtype(), tuple(size * n for size, n in zip(shape, repeats, strict=True)), wide)]


MOST_PARTS = 1 << 12
"""Largest numerator and denominator of a scale that sizes are multiplied by before they are known."""

_FAR = 2**31 - 1  # Exporters write "to the end" as INT32_MAX or INT64_MAX, and "from before the start" as its negative.


def _bound(size: Dim, bound: Dim, low: Dim, high: Dim) -> Dim:
    """A slice's start or end as a place within [low, high], negative ones counted from the end."""
    number = bound.value
    if number is not None and number >= _FAR:
        return high
    if number is not None and number <= -_FAR:
        return low
    if number is not None and number < 0:
        bound = size + number
    elif number is None and not bound.non_negative():
        if (-bound - 1).non_negative() or (size + bound == 0 and size.non_negative()):
            # A negative one counts from the end; where it takes the whole size back it is the front, 0 or not.
            bound = size + bound
        else:
            raise UnknownBoundError
    return minimum(maximum(bound, low), high)


class UnknownBoundError(Exception):
    """A bound that may be positive or negative."""


def slice_length(size: Dim, start: Dim, end: Dim, step: int) -> Dim:
    """How many places a slice takes.

    Raises:
        UnknownBoundError: a bound is symbolic and its sign unknown.
    """
    if step > 0:
        first, last = _bound(size, start, dim(0), size), _bound(size, end, dim(0), size)
        span = last - first
    else:
        first, last = _bound(size, start, dim(0), size - 1), _bound(size, end, dim(-1), size - 1)
        span = first - last
    count = span if abs(step) == 1 else (span + (abs(step) - 1)) // abs(step)
    return maximum(count, 0)


@shape_function("Slice")
def _slice(context: Context) -> list[Type]:
    shape = context.shape()
    if shape is None:
        return [Type(context.dtype())]
    starts, ends = context.elements(1), context.elements(2)
    axes = context.integers(3) if context.has(3) else None
    if not context.has(3):
        length = context.shape(1)
        count = None if length is None or not length else length[0].value
        axes = list(range(len(shape) if count is None else count))
    steps = context.integers(4) if context.has(4) else [1] * len(axes or ())
    if axes is None:
        return [Type(context.dtype(), context.unknown_shape(len(shape)))]
    axes = [axis % len(shape) for axis in axes]
    sizes = list(shape)
    for number, axis in enumerate(axes):
        if starts is None or ends is None or steps is None or not steps[number]:
            sizes[axis] = context.unknown(axis, len(shape))
            continue
        try:
            sizes[axis] = slice_length(shape[axis], starts[number], ends[number], steps[number])
        except UnknownBoundError:
            sizes[axis] = context.unknown(axis, len(shape))
    contents, first, last, elements = context.contents(0), context.integers(1), context.integers(2), None
    if contents is not None and first is not None and last is not None and steps is not None and all(steps):
        whole = [slice(None)] * len(shape)
        for axis, start, end, step in zip(axes, first, last, steps, strict=True):
            # An end of INT64_MIN means "past the front"; slices count it from the end and clamp it there as well.
            # A start before the front is the front; slices backwards would take nothing from there.
            whole[axis] = slice(max(start, -contents.shape[axis]), end, step)
        elements = flat(contents[tuple(whole)])
    return [Type(context.dtype(), tuple(sizes), elements)]


@shape_function("Split")
def _split(context: Context) -> list[Type]:
    shape, count = context.shape(), len(context.node.outputs)
    if shape is None:
        return [Type(context.dtype())] * count
    axis = context.axis(len(shape), 0)
    size = shape[axis]
    given = context.attribute("split")
    parts: list[Dim] | None
    if given is not None:
        parts = [dim(int(part)) for part in given]
    elif context.has(1):
        lengths = context.elements(1)
        parts = None if lengths is None else list(lengths)
    else:
        chunks = int(context.attribute("num_outputs", count))
        if chunks != count:
            raise ValueError(f"{chunks} parts for {count} outputs")
        # Equal parts; from opset 18 on the last one may be smaller.
        part = (size + (chunks - 1)) // chunks
        parts = [part] * (chunks - 1) + [size - part * (chunks - 1)]
    if parts is None or len(parts) != count:
        return [
            Type(context.dtype(), (*shape[:axis], context.unknown(axis, len(shape), n), *shape[axis + 1:]))
            for n in range(count)
        ]
    contents, known = context.contents(0), [part.value for part in parts]
    pieces: list[Contents | None] = [None] * count
    if contents is not None and None not in known:
        ends = [*accumulate(length or 0 for length in known)]
        pieces = [*np.split(contents, ends[:-1], axis)]
    return [
        Type(context.dtype(), (*shape[:axis], part, *shape[axis + 1:]), flat(piece))
        for part, piece in zip(parts, pieces, strict=True)
    ]


@shape_function("Concat")
def _concat(context: Context) -> list[Type]:
    count = len(context.node.inputs)
    shapes = [context.shape(index) for index in range(count)]
    dtype = next((kind for kind in map(context.dtype, range(count)) if kind is not None), None)
    known = [shape for shape in shapes if shape is not None]
    if not known:
        return [Type(dtype)]
    rank = len(known[0])
    axis = context.axis(rank, 0)
    sizes = list(agree(known))
    if len(known) == count:
        sizes[axis] = sum((shape[axis] for shape in known), dim(0))
    else:
        sizes[axis] = context.unknown(axis, rank)
    parts = [part for part in map(context.contents, range(count)) if part is not None]
    together = np.concatenate(parts, axis) if len(parts) == count and rank else None
    return [Type(dtype, tuple(sizes), flat(together))]


def agree(shapes: list[Shape]) -> Shape:
    """Sizes of tensors that must have the same ones: of each axis a number if one has it, else the simplest."""
    return tuple(
        min(sizes, key=lambda size: (size.value is None, len(size.terms), len(str(size)), str(size)))
        for sizes in zip(*shapes, strict=True)
    )


@shape_function("Pad")
def pad(context: Context) -> list[Type]:
    shape, pads = context.shape(), context.elements(1)
    if shape is None:
        return [Type(context.dtype())]
    axes = list(range(len(shape)))
    if context.has(3):
        given = context.integers(3)
        if given is None:
            pads = None
        else:
            axes = [axis % len(shape) for axis in given]
    if pads is None or len(pads) != 2 * len(axes):
        return [Type(context.dtype(), context.unknown_shape(len(shape)))]
    sizes = list(shape)
    for number, axis in enumerate(axes):
        sizes[axis] = sizes[axis] + pads[number] + pads[number + len(axes)]
    return [Type(context.dtype(), tuple(sizes), flat(_padded(context, pads, axes)))]


def _padded(context: Context, pads: Sequence[Dim], axes: Sequence[int]) -> Contents | None:
    """Contents with a constant beside them."""
    contents, widths = context.contents(0), [pad.value for pad in pads]
    value = context.elements(2) if context.has(2) else (dim(0),)
    if contents is None or value is None or len(value) != 1 or context.attribute("mode", "constant") not in (
            "constant", b"constant"):
        return None
    if any(width is None or not 0 <= width <= MAX_ELEMENTS for width in widths):
        return None
    sizes, inside = list(contents.shape), [slice(None)] * contents.ndim
    for number, axis in enumerate(axes):
        before, after = widths[number] or 0, widths[number + len(axes)] or 0
        inside[axis] = slice(before, before + sizes[axis])
        sizes[axis] += before + after
    if prod(sizes) > MAX_ELEMENTS:
        return None
    padded = np.empty(sizes, object)
    padded.fill(value[0])
    padded[tuple(inside)] = contents
    return padded


@shape_function("DepthToSpace", "SpaceToDepth")
def _depth_space(context: Context) -> list[Type]:
    shape = context.shape()
    if shape is None or len(shape) != 4:
        return [Type(context.dtype())]
    block = int(context.attribute("blocksize"))
    n, c, h, w = shape
    if context.node.op == "DepthToSpace":
        return [Type(context.dtype(), (n, c // block**2, h * block, w * block))]
    return [Type(context.dtype(), (n, c * block**2, h // block, w // block))]


@shape_function("Resize", "Upsample")
def _resize(context: Context) -> list[Type]:
    shape = context.shape()
    if shape is None:
        return [Type(context.dtype())]
    upsample = context.node.op == "Upsample"
    axes = [axis % len(shape) for axis in context.attribute("axes") or range(len(shape))]
    scales = context.constant(1 if upsample else 2)
    wanted = None if upsample else context.elements(3)
    sizes = list(shape)
    policy = context.attribute("keep_aspect_ratio_policy", "stretch")
    for number, axis in enumerate(axes):
        if wanted is not None and policy == "stretch":
            sizes[axis] = wanted[number]
        elif scales is not None and scales.size == len(axes):
            sizes[axis] = _scaled(shape[axis], scales.reshape(-1)[number], context, axis)
        else:
            sizes[axis] = context.unknown(axis, len(shape))
    return [Type(context.dtype(), tuple(sizes))]


def _scaled(size: Dim, scale: np.floating, context: Context, axis: int) -> Dim:
    if size.value is not None:
        # The runtime multiplies in float32.
        return dim(floor(np.float32(size.value) * np.float32(scale)))
    exact = Fraction(float(scale))
    if max(exact.numerator, exact.denominator) > MOST_PARTS:
        return context.unknown(axis, context.rank() or 0)
    return size * exact.numerator // exact.denominator


@shape_function("ConstantOfShape")
def _constant_of_shape(context: Context) -> list[Type]:
    value = context.attribute("value")
    dtype = 1 if value is None else _dtype_of(value)
    target = context.elements(0)
    if target is None:
        length = context.shape(0)
        rank = None if length is None or len(length) != 1 else length[0].value
        return [Type(dtype, None if rank is None else context.unknown_shape(rank))]
    count, elements = product(target).value, None
    if count is not None and count <= MAX_ELEMENTS and dtype in INTEGERS:
        elements = (dim(int(value.reshape(-1)[0])),) * count
    return [Type(dtype, target, elements)]


def _dtype_of(array: np.ndarray) -> int:
    from onnx import helper

    return int(helper.np_dtype_to_tensor_dtype(array.dtype))


@shape_function("Range")
def range_(context: Context) -> list[Type]:
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
