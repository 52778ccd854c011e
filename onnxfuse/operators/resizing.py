"""Resize: elements again and again, or what lies between neighbours."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor, prod

import numpy as np

from onnxfuse.graph.context import Type, TypeContext
from onnxfuse.graph.dims import Dim, dim
from onnxfuse.graph.model import Node
from onnxfuse.graph.sizes import Sizes
from onnxfuse.ir.context import LoweringContext, apply, declare, expand, like, reshape, size_of, test, wide
from onnxfuse.ir.scalars import INT64, TYPES
from onnxfuse.ir.tensors import Iota, Map, Reshape, Take, Tensor, scalar
from onnxfuse.operators.arithmetic import sizes_of
from onnxfuse.operators.operands import is_computed, operand, present, result_shape, shape_operands
from onnxfuse.operators.record import PLAIN, VIEW, define, opaque

MOST_RATIO = 1 << 12
"""Largest numerator and denominator of a scale that sizes are multiplied by before they are known."""


def resize_types(context: TypeContext) -> list[Type]:
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


def _scaled(size: Dim, scale: np.floating, context: TypeContext, axis: int) -> Dim:
    if size.value is not None:
        # The runtime multiplies in float32.
        return dim(floor(np.float32(size.value) * np.float32(scale)))
    exact = Fraction(float(scale))
    if max(exact.numerator, exact.denominator) > MOST_RATIO:
        return context.unknown(axis, context.rank() or 0)
    return size * exact.numerator // exact.denominator


# ---- The nearest element. ----

REPEATING = frozenset({("asymmetric", "floor")}) | {
    (transformation, nearest)
    for transformation in ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel")
    for nearest in ("round_prefer_floor", "round_prefer_ceil")
}
"""Coordinate transformations and ways to round of a nearest Resize by whole numbers n that read element i // n."""
MOST_REPEATS = 16
"""Largest whole number by which sizes that are not known are compared."""


def resize(node: Node, context: LoweringContext) -> Tensor:
    if context.opset < 13:
        present(node, context, 1)  # the checker passes over its absence in a graph, and not in a function
    return (_between_neighbours if node.attributes.get("mode", "nearest") == "linear" else _nearest)(node, context)


def _transformation(node: Node) -> str:
    """How places of the result become such of the operand."""
    found: str = node.attributes.get("coordinate_transformation_mode", "half_pixel")
    return found


def _nearest(node: Node, context: LoweringContext) -> Tensor:
    """The nearest element, by whole numbers: every element so often, one after the other."""
    source, result = operand(node, context, 0), result_shape(node, context)
    mode = node.attributes.get("mode", "nearest")
    way = (_transformation(node), node.attributes.get("nearest_mode", "round_prefer_floor"))
    if mode != "nearest" or way not in REPEATING:
        raise context.refuse("unsupported-mode", f"a Resize in mode '{mode}' ({', '.join(way)}) has no kernel")
    scales = node.inputs[2] if len(node.inputs) > 2 else None
    factors = [_times(size, before) for size, before in zip(result, source.shape, strict=True)]
    whole = [times for times in factors if times is not None]
    axes = node.attributes.get("axes") or range(len(factors))
    # Scales that are given count, not the sizes that come of them: 4 elements by 2.2 are 8, but not each of them twice.
    if len(whole) < len(factors) or (
        scales is not None and (scales.constant is None or (
            scales.constant.size and [whole[axis] for axis in axes] != scales.constant.reshape(-1).tolist()))
    ):
        raise context.refuse("unsupported-mode", "a Resize by other than whole numbers that are known has no kernel")
    shape_operands(node, context, 1)
    ones = tuple(size for before in source.shape for size in (before, dim(1)))
    paired = tuple(size for before, times in zip(source.shape, whole, strict=True) for size in (before, dim(times)))
    return Reshape(source.dtype, result, expand(reshape(source, ones), paired))


# ---- Between neighbours. ----

LINEAR = frozenset({"half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"})
"""Coordinate transformations of a linear Resize."""


def _between_neighbours(node: Node, context: LoweringContext) -> Tensor:
    """What lies between two neighbours along each axis that is resized, as near to either as its place is."""
    source, result = operand(node, context, 0), result_shape(node, context)
    way, attributes = _transformation(node), node.attributes
    if way not in LINEAR or attributes.get("antialias", 0) or (
            attributes.get("keep_aspect_ratio_policy", "stretch") != "stretch"):
        smooth = ", smoothed" if attributes.get("antialias", 0) else ""
        raise context.refuse("unsupported-mode", f"a Resize in mode 'linear' ({way}{smooth}) has no kernel")
    if not TYPES[source.dtype].is_floating:
        raise context.refuse("unsupported-type", "a Resize in mode 'linear' of integers has no kernel")
    if is_computed(source):
        raise context.refuse(
            "computed-again", "what a linear Resize reads would be computed again for each element that is made of it")
    axes = [axis % source.rank for axis in attributes.get("axes") or range(source.rank)]
    scales = _scales(node, context, len(axes))
    image = wide(source)
    for number, axis in enumerate(axes):
        before, after = source.shape[axis], result[axis]
        scale = None if scales is None else scales[number]
        if before == after and (scale is None or scale == 1):
            continue
        image = _mixed(image, axis, after, _places(way, image.dtype, before, after, scale))
    return declare(image, source.dtype)


def _scales(node: Node, context: LoweringContext, count: int) -> list[float] | None:
    """Those that are given, as the runtime has them; None where sizes are."""
    scales = node.inputs[2] if len(node.inputs) > 2 else None
    shape_operands(node, context, 1)
    if scales is None or (scales.constant is not None and not scales.constant.size):
        return None
    if scales.constant is None or scales.constant.size != count:
        raise context.refuse("unsupported-mode", "a Resize by scales that are not known has no kernel")
    return [float(scale) for scale in scales.constant.reshape(-1)]


def _places(way: str, dtype: int, before: Dim, after: Dim, scale: float | None) -> Tensor:
    """Where along an axis each element of the result lies between those of the operand, as a number, in the runtime's
    own order of operations."""
    place: Tensor = Map(dtype, (after,), "cast", (Iota(INT64, (after,), 0),))
    one, count = scalar(1.0, dtype), size_of(after, dtype)
    last = apply("sub", size_of(before, dtype), one)
    if way == "align_corners":
        steps = apply("max", apply("sub", count, one), one)
        place = apply("div", apply("mul", place, last), steps)
    else:
        by, half = _factor(dtype, before, after, scale), scalar(0.5, dtype)
        place = apply("div", place, by) if way == "asymmetric" else (
            apply("sub", apply("div", apply("add", place, half), by), half))
        if way == "pytorch_half_pixel" and not (after - 2).non_negative():
            place = apply("where", test("gt", count, one), place, like(0, place))
    return apply("max", apply("min", place, last), like(0, place))


def _factor(dtype: int, before: Dim, after: Dim, scale: float | None) -> Tensor:
    """How many elements come of one, as the runtime has it: in float32."""
    if scale is not None:
        return scalar(scale, dtype)
    if before.value and after.value is not None:
        return scalar(float(np.float32(after.value) / np.float32(before.value)), dtype)
    return apply("div", size_of(after, dtype), size_of(before, dtype))


def _mixed(image: Tensor, axis: int, after: Dim, place: Tensor) -> Tensor:
    """An axis of ``after`` elements at these places."""
    shape = (*image.shape[:axis], after, *image.shape[axis + 1:])
    last = apply("sub", size_of(image.shape[axis], image.dtype), scalar(1.0, image.dtype))
    low = apply("floor", place)
    high = apply("min", apply("add", low, scalar(1.0, image.dtype)), last)
    # At the end, where both are one element, the runtime takes half of it twice: so an infinite one stays so.
    part = apply("where", test("eq", low, high), scalar(0.5, image.dtype), apply("sub", place, low))
    row = (*(dim(1),) * axis, after, *(dim(1),) * (image.rank - axis - 1))

    def taken(index: Tensor) -> Tensor:
        whole = expand(reshape(Map(INT64, index.shape, "cast", (index,)), row), shape)
        return Take(image.dtype, shape, image, whole, axis)

    share = reshape(part, row)
    rest = apply("sub", scalar(1.0, image.dtype), share)
    return apply("add", apply("mul", taken(low), rest), apply("mul", taken(high), share))


_TAPS = {"nearest": 1, "linear": 2, "cubic": 4}
"""Elements along an axis that a Resize makes one of, by its mode."""


def _resize_arithmetic(node: Node, sizes: Sizes) -> int | None:
    """Twice the output's elements times those that each is made of, along the axes whose size changes; a smoothed one
    is made of as many more as the axis shrinks."""
    taps = _TAPS.get(node.attributes.get("mode", "nearest"))
    if taps is None or taps == 1:
        return None if taps is None else 0
    before, after = sizes_of(node.inputs[0], sizes), sizes_of(node.outputs[0], sizes)
    if not before or not after or len(before) != len(after):
        return None
    smooth = node.attributes.get("antialias", 0)
    crops = node.attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    made_of = 1
    for axis in node.attributes.get("axes") or range(len(after)):
        old, new = before[axis % len(before)], after[axis % len(after)]
        if old != new or crops:
            made_of *= ceil(taps * old / new) if smooth and old > new > 0 else taps
    return 2 * prod(after) * made_of if made_of > 1 else 0


def _times(size: Dim, before: Dim) -> int | None:
    """How many times one size is another, where that is a whole number."""
    if size.value is not None and before.value:
        return size.value // before.value if size.value % before.value == 0 else None
    return next((times for times in range(1, MOST_REPEATS + 1) if before * times == size), None)


define("Resize", kind=VIEW, types=resize_types, lowering=resize, arithmetic=_resize_arithmetic, host=(1, 2, 3),
       runtime=PLAIN)
opaque("Upsample", types=resize_types, host=(1,), random=False)
