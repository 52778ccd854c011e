"""Operators that cut tensors, lay them side by side, or repeat them: Slice, Split, Concat, Pad, Tile."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate as running
from math import prod

import numpy as np

from onnxfuse.graph.context import MAX_ELEMENTS, Contents, Type, TypeContext, flat
from onnxfuse.graph.dims import Dim, dim, maximum, minimum
from onnxfuse.graph.model import Node, Shape
from onnxfuse.ir.context import LoweringContext, expand, like, reshape
from onnxfuse.ir.tensors import Concat, Reshape, Slice, Tensor
from onnxfuse.operators.arithmetic import none
from onnxfuse.operators.operands import axis_of, operand, optional, present, result_shape, shape_operands
from onnxfuse.operators.record import MICROSOFT, PLAIN, VIEW, RuntimeKernel, define, opaque


def tile_types(context: TypeContext) -> list[Type]:
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


def slice_types(context: TypeContext) -> list[Type]:
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


def split_types(context: TypeContext) -> list[Type]:
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
        ends = [*running(length or 0 for length in known)]
        pieces = [*np.split(contents, ends[:-1], axis)]
    return [
        Type(context.dtype(), (*shape[:axis], part, *shape[axis + 1:]), flat(piece))
        for part, piece in zip(parts, pieces, strict=True)
    ]


def concat_types(context: TypeContext) -> list[Type]:
    count = len(context.node.inputs)
    shapes = [context.shape(index) for index in range(count)]
    dtype = next((kind for kind in map(context.dtype, range(count)) if kind is not None), None)
    known = [shape for shape in shapes if shape is not None]
    if not known:
        return [Type(dtype)]
    rank = len(known[0])
    axis = context.axis(rank, 0)
    sizes = list(agree(known))
    for shape in known:
        for place, (size, other) in enumerate(zip(sizes, shape, strict=True)):
            if place != axis:
                context.demand(size, other)
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


def pad_types(context: TypeContext) -> list[Type]:
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
    return [Type(context.dtype(), tuple(sizes), flat(_padded_contents(context, pads, axes)))]


def _padded_contents(context: TypeContext, pads: Sequence[Dim], axes: Sequence[int]) -> Contents | None:
    """Contents with a constant beside them."""
    contents, widths = context.contents(0), [pad_types.value for pad_types in pads]
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


def cut(source: Tensor, axis: int, start: Dim, length: Dim, step: int = 1) -> Tensor:
    """``length`` elements of an axis from ``start``."""
    rank = len(source.shape)
    shape = (*source.shape[:axis], length, *source.shape[axis + 1:])
    starts = tuple(start if place == axis else dim(0) for place in range(rank))
    return Slice(source.dtype, shape, source, starts, tuple(step if place == axis else 1 for place in range(rank)))


def lower_slice(node: Node, context: LoweringContext) -> Tensor:
    source, result = operand(node, context, 0), result_shape(node, context)
    rank = len(source.shape)
    begins, count = context.sizes(present(node, context, 1)), len(context.sizes(present(node, context, 1)))
    context.sizes(present(node, context, 2))
    axes = context.integers(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] else tuple(range(count))
    steps = context.integers(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] else (1,) * count
    for begin, axis, step in zip(begins, axes, steps, strict=True):
        axis = axis + rank if axis < 0 else axis
        size = source.shape[axis]
        source = cut(source, axis, _start(begin, size, step, context), result[axis], step)
    return source


def _start(begin: Dim, size: Dim, step: int, context: LoweringContext) -> Dim:
    """The first place that a slice reads, clamped as the standard says."""
    number, last = begin.value, size if step > 0 else size - 1
    if number is None:
        if (-begin - 1).non_negative() or (begin + size == 0 and size.non_negative()):
            return maximum(begin + size, dim(0))
        if any(factor < 0 for factor in begin.terms.values()):
            raise context.refuse("unknown-sizes", f"a slice starts at {begin}, whose sign is not known")
        return minimum(begin, last)
    # Beyond 2**62 either way a number means "as far as it goes".
    if number < 0:
        return maximum(begin + size, dim(0)) if number > -(2**62) else dim(0)
    if number > 2**62:
        return last
    return begin if number == 0 and step > 0 else minimum(begin, last)


def split(node: Node, context: LoweringContext) -> list[Tensor | None]:
    source = operand(node, context, 0)
    axis = axis_of(node, "axis", 0, len(source.shape))
    shape_operands(node, context, 1)
    start, parts = dim(0), []
    for place, value in enumerate(node.outputs):
        if value is None:
            raise context.refuse("missing-output", "a Split with an absent output has no kernel")
        length = result_shape(node, context, place)[axis]
        parts.append(cut(source, axis, start, length))
        start = start + length
    return list(parts)


MOST_PARTS = 64
"""Of a concatenation: each element compares its place with those before it, one inside the other."""


def concat(node: Node, context: LoweringContext) -> Tensor:
    if len(node.inputs) > MOST_PARTS:
        raise context.refuse("many-parts", f"a concatenation of {len(node.inputs)} parts is faster as copies: a kernel "
                                           f"takes {MOST_PARTS} at most")
    parts = tuple(operand(node, context, place) for place in range(len(node.inputs)))
    axis = axis_of(node, "axis", 0, len(parts[0].shape))
    length = sum((part.shape[axis] for part in parts), dim(0))
    shape = parts[0].shape
    return (
        parts[0]
        if len(parts) == 1
        else Concat(parts[0].dtype, (*shape[:axis], length, *shape[axis + 1:]), parts, axis)
    )


def tile(node: Node, context: LoweringContext) -> Tensor:
    source = operand(node, context, 0)
    repeats = context.sizes(present(node, context, 1))
    paired, result = [], []
    for repeat, size in zip(repeats, source.shape, strict=True):
        paired += [repeat, size]
        result.append(repeat * size)
    ones = tuple(dim(1) if place % 2 == 0 else size for place, size in enumerate(paired))
    return Reshape(source.dtype, tuple(result), expand(reshape(source, ones), tuple(paired)))


def pad(node: Node, context: LoweringContext) -> Tensor:
    source = operand(node, context, 0)
    mode = node.attributes.get("mode", "constant")
    if mode not in ("constant", "edge", "reflect"):
        raise context.refuse("unsupported-mode", f"a Pad in mode '{mode}' has no kernel")
    rank = len(source.shape)
    amounts = context.sizes(present(node, context, 1))
    unknown = next((amount for amount in amounts if amount.value is None and not amount.non_negative()), None)
    if unknown is not None:
        raise context.refuse("unknown-sizes", f"a Pad is by {unknown}, whose sign is not known")
    axes = context.integers(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] else tuple(range(rank))
    border = optional(node, context, 2)
    border = like(0, source) if border is None else reshape(border, (dim(1),) * rank)
    for axis, first, last in zip(axes, amounts[:len(axes)], amounts[len(axes):], strict=True):
        axis = axis + rank if axis < 0 else axis
        if mode == "constant":
            source = _padded(source, axis, (first, last), border)
        elif any(amount.value is not None and amount.value < 0 for amount in (first, last)):
            raise context.refuse("unsupported-mode", f"a Pad by less than nothing in mode '{mode}' has no kernel")
        else:
            source = _continued(source, axis, (first, last), mode)
    return source


def _continued(source: Tensor, axis: int, amounts: tuple[Dim, Dim], mode: str) -> Tensor:
    """An axis with so many elements more at its ends: its last one again and again, or those before it backwards."""
    size, (first, last) = source.shape[axis], amounts

    def part(count: Dim, edge: Dim, inner: Dim) -> Tensor:
        if mode == "reflect":
            return cut(source, axis, inner, count, -1)
        return expand(cut(source, axis, edge, dim(1)), (*source.shape[:axis], count, *source.shape[axis + 1:]))

    parts = [part(first, dim(0), first)] if first != 0 else []
    parts += [source, *([part(last, size - 1, size - 2)] if last != 0 else [])]
    shape = (*source.shape[:axis], size + first + last, *source.shape[axis + 1:])
    return source if len(parts) == 1 else Concat(source.dtype, shape, tuple(parts), axis)


def _padded(source: Tensor, axis: int, amounts: tuple[Dim, Dim], border: Tensor) -> Tensor:
    """An axis with so many elements more at its ends, or fewer."""
    fewer, more = zip(*((minimum(amount, 0), maximum(amount, 0)) for amount in amounts), strict=True)
    if any(amount != 0 for amount in fewer):
        source = cut(source, axis, -fewer[0], source.shape[axis] + fewer[0] + fewer[1])

    def part(count: Dim) -> list[Tensor]:
        return [expand(border, (*source.shape[:axis], count, *source.shape[axis + 1:]))] if count != 0 else []

    parts = [*part(more[0]), source, *part(more[1])]
    length = sum((entry.shape[axis] for entry in parts), dim(0))
    shape = (*source.shape[:axis], length, *source.shape[axis + 1:])
    return source if len(parts) == 1 else Concat(source.dtype, shape, tuple(parts), axis)


define("Slice", kind=VIEW, types=slice_types, lowering=lower_slice, arithmetic=none, host=(1, 2, 3, 4), runtime=PLAIN)
define("Split", kind=VIEW, types=split_types, lowering=split, arithmetic=none, host=(1,), runtime=PLAIN)
define("Concat", kind=VIEW, types=concat_types, lowering=concat, arithmetic=none, host=(), runtime=PLAIN)
define("Tile", kind=VIEW, types=tile_types, lowering=tile, arithmetic=none, host=(1,), runtime=PLAIN)
define("Pad", kind=VIEW, types=pad_types, lowering=pad, arithmetic=none, host=(1, 2, 3), runtime=RuntimeKernel.BORDER)
opaque("Pad", domain=MICROSOFT, types=pad_types, host=(), random=False)
