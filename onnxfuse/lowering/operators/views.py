"""Operators that only move elements: each is an index map, at no cost of its own."""

from __future__ import annotations

from onnxfuse.graph.dims import Dim, dim, maximum, minimum, product
from onnxfuse.graph.model import Node, Shape, Value
from onnxfuse.lowering.context import Context, Unlowerable, apply, expand, like, number, reshape, size_of, test
from onnxfuse.lowering.ir import Concat, Fill, Iota, Map, Permute, Reshape, Slice, Take, Tensor
from onnxfuse.lowering.operators.registry import integer_attribute, lowers, operand, optional
from onnxfuse.lowering.scalars import INT64
from onnxfuse.refusal import Refusal


def result_shape(node: Node, context: Context, place: int = 0) -> Shape:
    """The inferred shape of an output."""
    value = node.outputs[place]
    if value is None:
        raise context.refuse("missing-output", f"{node.qualified_op} lacks its output {place}")
    return context.shape(value)


def axis_of(node: Node, name: str, default: int, rank: int) -> int:
    """An axis attribute, counted from the front.

    Raises:
        Unlowerable: there is no such axis.
    """
    axis = integer_attribute(node, name, default)
    if not -rank <= axis < rank:
        raise Unlowerable(Refusal("axis", f"{node.qualified_op} has {name} {axis}, and a tensor of {rank} axes",
                                  node.label))
    return axis + rank if axis < 0 else axis


def shape_operands(node: Node, context: Context, first: int) -> None:
    """Note that the remaining inputs only decide sizes: they are operands of the body, not of the kernel."""
    for value in node.inputs[first:]:
        if value is not None:
            context.note_size(value)


@lowers("Reshape", "Squeeze", "Unsqueeze", "Flatten")
def same_elements(node: Node, context: Context) -> Tensor:
    source = operand(node, context, 0)
    shape_operands(node, context, 1)
    return reshape(source, result_shape(node, context))


@lowers("Expand")
def lower_expand(node: Node, context: Context) -> Tensor:
    source = operand(node, context, 0)
    shape_operands(node, context, 1)
    return expand(source, result_shape(node, context))


@lowers("Transpose")
def transpose(node: Node, context: Context) -> Tensor:
    source = operand(node, context, 0)
    rank = len(source.shape)
    axes = tuple(node.attributes.get("perm") or range(rank - 1, -1, -1))
    return Permute(source.dtype, tuple(source.shape[axis] for axis in axes), source, axes)


def cut(source: Tensor, axis: int, start: Dim, length: Dim, step: int = 1) -> Tensor:
    """``length`` elements of an axis from ``start``."""
    rank = len(source.shape)
    shape = (*source.shape[:axis], length, *source.shape[axis + 1:])
    starts = tuple(start if place == axis else dim(0) for place in range(rank))
    return Slice(source.dtype, shape, source, starts, tuple(step if place == axis else 1 for place in range(rank)))


@lowers("Slice")
def lower_slice(node: Node, context: Context) -> Tensor:
    source, result = operand(node, context, 0), result_shape(node, context)
    rank = len(source.shape)
    begins, count = context.sizes(_present(node, context, 1)), len(context.sizes(_present(node, context, 1)))
    context.sizes(_present(node, context, 2))
    axes = context.integers(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] else tuple(range(count))
    steps = context.integers(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] else (1,) * count
    for begin, axis, step in zip(begins, axes, steps, strict=True):
        axis = axis + rank if axis < 0 else axis
        size = source.shape[axis]
        source = cut(source, axis, _start(begin, size, step, context), result[axis], step)
    return source


def _start(begin: Dim, size: Dim, step: int, context: Context) -> Dim:
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


def _present(node: Node, context: Context, place: int) -> Value:
    value = node.inputs[place] if place < len(node.inputs) else None
    if value is None:
        raise context.refuse("missing-input", f"{node.qualified_op} lacks its input {place}")
    return value


@lowers("Split")
def split(node: Node, context: Context) -> list[Tensor | None]:
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


@lowers("Concat")
def concat(node: Node, context: Context) -> Tensor:
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


@lowers("Tile")
def tile(node: Node, context: Context) -> Tensor:
    source = operand(node, context, 0)
    repeats = context.sizes(_present(node, context, 1))
    paired, result = [], []
    for repeat, size in zip(repeats, source.shape, strict=True):
        paired += [repeat, size]
        result.append(repeat * size)
    ones = tuple(dim(1) if place % 2 == 0 else size for place, size in enumerate(paired))
    return Reshape(source.dtype, tuple(result), expand(reshape(source, ones), tuple(paired)))


REPEATING = frozenset({("asymmetric", "floor")}) | {
    (transformation, nearest)
    for transformation in ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel")
    for nearest in ("round_prefer_floor", "round_prefer_ceil")
}
"""Coordinate transformations and ways to round of a nearest Resize by whole numbers n that read element i // n."""

MOST_REPEATS = 16
"""Largest whole number by which sizes that are not known are compared."""


@lowers("Resize")
def resize(node: Node, context: Context) -> Tensor:
    """The nearest element, by whole numbers: every element so often, one after the other."""
    source, result = operand(node, context, 0), result_shape(node, context)
    mode = node.attributes.get("mode", "nearest")
    way = (node.attributes.get("coordinate_transformation_mode", "half_pixel"),
           node.attributes.get("nearest_mode", "round_prefer_floor"))
    if mode != "nearest" or way not in REPEATING:
        raise context.refuse("unsupported-mode", f"a Resize in mode '{mode}' ({', '.join(way)}) has no kernel")
    if context.opset < 13:
        _present(node, context, 1)  # the checker passes over its absence in a graph, and not in a function
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


def _times(size: Dim, before: Dim) -> int | None:
    """How many times one size is another, where that is a whole number."""
    if size.value is not None and before.value:
        return size.value // before.value if size.value % before.value == 0 else None
    return next((times for times in range(1, MOST_REPEATS + 1) if before * times == size), None)


@lowers("OneHot")
def one_hot(node: Node, context: Context) -> Tensor:
    """The second of two values at the place that an index names along a new axis, negative ones from the end, and the
    first everywhere else."""
    indices, values, shape = operand(node, context, 0), operand(node, context, 2), result_shape(node, context)
    context.note_size(_present(node, context, 1))
    axis = axis_of(node, "axis", -1, len(shape))
    depth = shape[axis]
    place = Iota(INT64, shape, axis)
    index = Map(INT64, indices.shape, "cast", (indices,))
    index = apply("where", test("lt", index, like(0, index)), apply("add", index, size_of(depth, INT64)), index)
    spread = reshape(index, (*indices.shape[:axis], dim(1), *indices.shape[axis:]))
    off, on = (reshape(cut(values, 0, dim(each), dim(1)), ()) for each in (0, 1))
    return apply("where", test("eq", place, spread), on, off)


@lowers("DepthToSpace")
def depth_to_space(node: Node, context: Context) -> Tensor:
    source, block = operand(node, context, 0), integer_attribute(node, "blocksize", 1)
    n, c, h, w = source.shape
    channels = c // (block * block)
    b = dim(block)
    column_row = node.attributes.get("mode", "DCR") == "CRD"
    inner = (n, channels, b, b, h, w) if column_row else (n, b, b, channels, h, w)
    axes = (0, 1, 4, 2, 5, 3) if column_row else (0, 3, 4, 1, 5, 2)
    parts = reshape(source, inner)
    moved = Permute(source.dtype, tuple(inner[axis] for axis in axes), parts, axes)
    return reshape(moved, (n, channels, h * block, w * block))


@lowers("SpaceToDepth")
def space_to_depth(node: Node, context: Context) -> Tensor:
    source, block = operand(node, context, 0), integer_attribute(node, "blocksize", 1)
    n, c, h, w = source.shape
    b = dim(block)
    inner = (n, c, h // block, b, w // block, b)
    axes = (0, 3, 5, 1, 2, 4)
    moved = Permute(source.dtype, tuple(inner[axis] for axis in axes), reshape(source, inner), axes)
    return reshape(moved, (n, c * block * block, h // block, w // block))


@lowers("Range")
def lower_range(node: Node, context: Context) -> Tensor:
    (length,) = result_shape(node, context)
    dtype = context.dtype(node.outputs[0]) if node.outputs[0] is not None else INT64
    steps = Iota(dtype, (length,), 0)
    if dtype == INT64:
        start, step = (context.sizes(_present(node, context, place))[0] for place in (0, 2))
        context.sizes(_present(node, context, 1))
        scaled = steps if step == 1 else apply("mul", steps, size_of(step, dtype))
        return scaled if start == 0 else apply("add", scaled, size_of(start, dtype))
    raise context.refuse("unsupported-type", "a Range of another type than int64 has no kernel")


@lowers("Trilu")
def trilu(node: Node, context: Context) -> Tensor:
    source = operand(node, context, 0)
    rank = len(source.shape)
    offset = context.sizes(node.inputs[1])[0] if len(node.inputs) > 1 and node.inputs[1] else dim(0)
    row, column = (Iota(INT64, source.shape, axis) for axis in (rank - 2, rank - 1))
    diagonal = apply("add", row, size_of(offset, INT64))
    upper = integer_attribute(node, "upper", 1)
    keep = test("ge" if upper else "le", column, diagonal)
    return apply("where", keep, source, like(0, source))


@lowers("Gather")
def gather(node: Node, context: Context) -> Tensor:
    source, value = operand(node, context, 0), _present(node, context, 1)
    axis = axis_of(node, "axis", 0, len(source.shape))
    before, size, after = source.shape[:axis], source.shape[axis], source.shape[axis + 1:]
    if value.constant is not None and value.constant.size == 1:
        # One index that is known is a slice.
        index = int(value.constant.reshape(-1)[0])
        context.note_size(value)
        start = dim(index) if index >= 0 else size + index
        if not start.non_negative() or not (size - 1 - start).non_negative():
            raise context.refuse("unknown-sizes", f"index {index} may lie outside of an axis of {size} elements")
        return reshape(cut(source, axis, start, dim(1)), result_shape(node, context))
    indices = operand(node, context, 1)
    count = product(indices.shape)
    spread = reshape(indices, (*(dim(1) for _ in before), count, *(dim(1) for _ in after)))
    shape = (*before, count, *after)
    taken = Take(source.dtype, shape, source, expand(spread, shape), axis)
    return reshape(taken, result_shape(node, context))


@lowers("Pad")
def pad(node: Node, context: Context) -> Tensor:
    source = operand(node, context, 0)
    mode = node.attributes.get("mode", "constant")
    if mode not in ("constant", "edge", "reflect"):
        raise context.refuse("unsupported-mode", f"a Pad in mode '{mode}' has no kernel")
    rank = len(source.shape)
    amounts = context.sizes(_present(node, context, 1))
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


@lowers("GatherElements")
def gather_elements(node: Node, context: Context) -> Tensor:
    source, indices = operand(node, context, 0), operand(node, context, 1)
    axis = axis_of(node, "axis", 0, len(source.shape))
    return Take(source.dtype, indices.shape, source, indices, axis)


@lowers("ConstantOfShape")
def constant_of_shape(node: Node, context: Context) -> Tensor:
    shape_operands(node, context, 0)
    value = node.attributes.get("value")
    dtype = context.dtype(node.outputs[0]) if node.outputs[0] is not None else 1
    return Fill(dtype, result_shape(node, context), 0.0 if value is None else number(value))
