"""Resize: the nearest element by whole numbers, and what lies between neighbours on a line.

Where an element of the result lies on the original is a fraction of whole numbers; only the weights are floats.
"""

from __future__ import annotations

from fractions import Fraction

from onnxfuse.graph.dims import Dim, dim
from onnxfuse.graph.model import Node, Value
from onnxfuse.graph.shape_functions.views import MOST_PARTS
from onnxfuse.lowering.context import Context, accumulate, apply, declare, expand, like, reshape, size_of, test
from onnxfuse.lowering.ir import Iota, Map, Reshape, Take, Tensor
from onnxfuse.lowering.operators.registry import lowers, operand
from onnxfuse.lowering.operators.views import present, result_shape, shape_operands
from onnxfuse.lowering.scalars import INT32, INT64, TYPES

REPEATING = frozenset({("asymmetric", "floor")}) | {
    (transformation, nearest)
    for transformation in ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel")
    for nearest in ("round_prefer_floor", "round_prefer_ceil")
}
"""Coordinate transformations and ways to round of a nearest Resize by whole numbers n that read element i // n."""

LINEAR = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
"""Coordinate transformations of a linear Resize that have a kernel."""

MOST_REPEATS = 16
"""Largest whole number by which sizes that are not known are compared."""


@lowers("Resize")
def resize(node: Node, context: Context) -> Tensor:
    """The result of a mode that has a kernel."""
    mode = node.attributes.get("mode", "nearest")
    way = node.attributes.get("coordinate_transformation_mode", "half_pixel")
    if context.opset < 13:
        present(node, context, 1)  # the checker passes over its absence in a graph, and not in a function
    if mode == "nearest":
        return _nearest(node, context, way)
    plain = not node.attributes.get("antialias", 0) and node.attributes.get("keep_aspect_ratio_policy", "stretch") in (
        "stretch", b"stretch")
    if mode != "linear" or way not in LINEAR or not plain:
        raise context.refuse("unsupported-mode", f"a Resize in mode '{mode}' ({way}) has no kernel")
    return _linear(node, context, way)


def _nearest(node: Node, context: Context, way: str) -> Tensor:
    """The nearest element, by whole numbers: every element so often, one after the other."""
    source, result = operand(node, context, 0), result_shape(node, context)
    nearest = node.attributes.get("nearest_mode", "round_prefer_floor")
    if (way, nearest) not in REPEATING:
        raise context.refuse("unsupported-mode", f"a Resize in mode 'nearest' ({way}, {nearest}) has no kernel")
    factors = [_times(size, before) for size, before in zip(result, source.shape, strict=True)]
    whole = [times for times in factors if times is not None]
    axes = node.attributes.get("axes") or range(len(factors))
    scales = _scales(node)
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


def _times(size: Dim, before: Dim) -> int | None:
    """How many times one size is another, where that is a whole number."""
    if size.value is not None and before.value:
        return size.value // before.value if size.value % before.value == 0 else None
    return next((times for times in range(1, MOST_REPEATS + 1) if before * times == size), None)


def _scales(node: Node) -> Value | None:
    return node.inputs[2] if len(node.inputs) > 2 else None


def _linear(node: Node, context: Context, way: str) -> Tensor:
    """Between neighbours, an axis after the other."""
    source, result = operand(node, context, 0), result_shape(node, context)
    if not TYPES[source.dtype].is_floating:
        raise context.refuse("unsupported-type", "a linear Resize of integers has no kernel")
    ratios = _ratios(node, context, source, result)
    shape_operands(node, context, 1)
    value = accumulate(source)
    for axis, (size, (after, before)) in enumerate(zip(result, ratios, strict=True)):
        if size != source.shape[axis] or after != before:
            value = _between(value, axis, size, (after, before), way)
    return declare(value, source.dtype)


def _ratios(node: Node, context: Context, source: Tensor, result: tuple[Dim, ...]) -> list[tuple[Dim, Dim]]:
    """By axis, the scale as a fraction: that of the sizes, or the one that is given."""
    ratios, scales = list(zip(result, source.shape, strict=True)), _scales(node)
    if scales is None or (scales.constant is not None and not scales.constant.size):
        return ratios
    axes = node.attributes.get("axes") or range(len(ratios))
    given = None if scales.constant is None else [Fraction(float(scale)) for scale in scales.constant.reshape(-1)]
    if given is None or any(max(scale.numerator, scale.denominator) > MOST_PARTS for scale in given):
        raise context.refuse("unsupported-mode", "a linear Resize by scales that are no short fractions has no kernel")
    for axis, scale in zip(axes, given, strict=True):
        ratios[axis] = dim(scale.numerator), dim(scale.denominator)
    return ratios


def _between(value: Tensor, axis: int, size: Dim, ratio: tuple[Dim, Dim], way: str) -> Tensor:
    """An axis with ``size`` elements, each on the line between the two of the original that it lies between.

    Args:
        ratio: of the new size to the old one.
        way: which place of the original an element's is, as the standard calls it.
    """
    (after, before), old = ratio, value.shape[axis]
    known = [number.value for number in (after, before, size, old)]
    kind = INT64
    if None not in known and 2 * max(number or 0 for number in known) ** 2 < 2**31:
        kind = INT32
    along = tuple(size if at == axis else dim(1) for at in range(value.rank))
    shape = tuple(size if at == axis else length for at, length in enumerate(value.shape))

    def times(tensor: Tensor, factor: Dim) -> Tensor:
        return apply("mul", tensor, size_of(factor, kind))

    element: Tensor = Iota(kind, along, axis)
    place, parts = times(element, before), size_of(after, kind)
    if way == "align_corners":
        place, parts = times(element, old - 1), apply("max", size_of(size - 1, kind), like(1, element))
    elif way != "asymmetric":
        odd = apply("add", apply("add", element, element), like(1, element))
        place, parts = apply("sub", times(odd, before), size_of(after, kind)), size_of(after * 2, kind)
        if way == "pytorch_half_pixel":
            place = apply("where", test("gt", size_of(size, kind), like(1, place)), place, like(0, place))
    place = apply("max", apply("min", place, times(parts, old - 1)), like(0, place))
    first = apply("div", place, parts)
    second = apply("min", apply("add", first, like(1, first)), size_of(old - 1, kind))
    left = apply("sub", place, apply("mul", first, parts))
    weight = apply("div", *(Map(value.dtype, tensor.shape, "cast", (tensor,)) for tensor in (left, parts)))
    one, other = (Take(value.dtype, shape, value, expand(index, shape), axis) for index in (first, second))
    rest = apply("sub", like(1.0, weight), weight)
    return apply("add", apply("mul", one, rest), apply("mul", other, weight))
