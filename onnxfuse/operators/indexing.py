"""Operators that pick or place elements by index or by value."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxfuse.graph.context import INT64, MAX_ELEMENTS, Type, TypeContext, elements_of, flat, same
from onnxfuse.graph.dims import Dim, dim, product
from onnxfuse.graph.model import Node, Value, root
from onnxfuse.graph.sizes import Sizes
from onnxfuse.ir.context import LoweringContext, apply, expand, like, reshape, size_of, test
from onnxfuse.ir.scalars import BOOL
from onnxfuse.ir.tensors import Concat, Iota, Map, Take, Tensor
from onnxfuse.operators.arithmetic import elements, none
from onnxfuse.operators.operands import axis_of, integer_attribute, operand, present, result_shape
from onnxfuse.operators.pieces import cut
from onnxfuse.operators.places import Places, counting, spelled
from onnxfuse.operators.record import MICROSOFT, PLAIN, VIEW, RuntimeKernel, define, opaque


def gather_types(context: TypeContext) -> list[Type]:
    shape, indices = context.shape(0), context.shape(1)
    if shape is None or indices is None:
        return [Type(context.dtype())]
    axis = context.axis(len(shape), 0)
    limit = _limit(context.value(1))
    if limit is not None:
        context.demand(limit, shape[axis], "within")
    contents, places, picked = context.contents(0), _places(context), None
    if contents is not None and places is not None and _inside(places, contents.shape[axis]):
        picked = flat(np.take(contents, places.reshape(-1), axis))
    return [Type(context.dtype(), shape[:axis] + indices + shape[axis + 1:], picked)]


def _limit(value: Value | None) -> Dim | None:
    """The limit of the Range that indices come from, which counts up one by one; None where they do not."""
    maker = counting(value)
    if maker is None:
        return None
    _, limit, delta = (None if bound is None else elements_of(bound) for bound in maker.inputs)
    return limit[0] if limit and delta and len(limit) == len(delta) == 1 and delta[0].value == 1 else None


def _places(context: TypeContext) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """The indices of the second operand, where they are numbers."""
    places = context.contents(1)
    if places is None or any(place.value is None for place in places.flat):
        return None
    return np.array([place.value for place in places.flat], np.int64).reshape(places.shape)


def _inside(places: np.ndarray[Any, np.dtype[np.int64]], size: int) -> bool:
    return bool(np.all((places >= -size) & (places < size)))


def gather_elements_types(context: TypeContext) -> list[Type]:
    contents, places, picked = context.contents(0), _places(context), None
    if contents is not None and places is not None:
        axis = context.axis(contents.ndim, 0)
        if _inside(places, contents.shape[axis]):
            # Along the other axes there may be fewer indices than elements.
            fewer = contents[tuple(slice(None if at == axis else size) for at, size in enumerate(places.shape))]
            picked = flat(np.take_along_axis(fewer, places % contents.shape[axis], axis))
    return [Type(context.dtype(), context.shape(1), picked)]


def gather_nd_types(context: TypeContext) -> list[Type]:
    shape, indices = context.shape(0), context.shape(1)
    depth = None if indices is None else indices[-1].value
    if shape is None or indices is None or depth is None:
        return [Type(context.dtype())]
    batch = int(context.attribute("batch_dims", 0))
    return [Type(context.dtype(), indices[:-1] + shape[batch + depth:])]


def non_zero_types(context: TypeContext) -> list[Type]:
    rank = context.rank()
    rows = context.unknown(0, 2) if rank is None else dim(rank)
    return [Type(INT64, (rows, context.unknown(1, 2)))]


def compress_types(context: TypeContext) -> list[Type]:
    shape = context.shape()
    if context.attribute("axis") is None:
        return [Type(context.dtype(), context.unknown_shape(1))]
    if shape is None:
        return [Type(context.dtype())]
    axis = context.axis(len(shape), 0)
    return [Type(context.dtype(), (*shape[:axis], context.unknown(axis, len(shape)), *shape[axis + 1:]))]


def unique_types(context: TypeContext) -> list[Type]:
    shape = context.shape()
    first: Type
    if context.attribute("axis") is None:
        count = context.unknown(0, 1)
        first = Type(context.dtype(), (count,))
    elif shape is None:
        first, count = Type(context.dtype()), context.unknown(0, 1, 1)
    else:
        axis = context.axis(len(shape), 0)
        count = context.unknown(axis, len(shape))
        first = Type(context.dtype(), (*shape[:axis], count, *shape[axis + 1:]))
    whole = context.unknown_shape(1, 2)
    return [first, Type(INT64, (count,)), Type(INT64, whole), Type(INT64, (count,))]


def top_k_types(context: TypeContext) -> list[Type]:
    shape, count = context.shape(), context.elements(1)
    if shape is None:
        return [Type(context.dtype()), Type(INT64)]
    axis = context.axis(len(shape), -1)
    size = count[0] if count is not None and len(count) == 1 else context.unknown(axis, len(shape))
    sizes = (*shape[:axis], size, *shape[axis + 1:])
    return [Type(context.dtype(), sizes), Type(INT64, sizes)]


def one_hot_types(context: TypeContext) -> list[Type]:
    shape, depth = context.shape(), context.elements(1)
    if shape is None:
        return [Type(context.dtype(2))]
    rank = len(shape) + 1
    axis = context.axis(rank, -1)
    size = depth[0] if depth is not None and len(depth) == 1 else context.unknown(axis, rank)
    sizes = (*shape[:axis], size, *shape[axis:])
    indices, values, elements = context.contents(0), context.elements(2), None
    if indices is not None and values is not None and len(values) == 2 and size.value is not None and (
            indices.size * size.value <= MAX_ELEMENTS and all(place.value is not None for place in indices.flat)):
        hot = [[values[number in (place.value, place.value + size.value)] for number in range(size.value)]
               for place in indices.flat]
        rows = np.empty((indices.size, size.value), object)
        rows[:] = hot
        elements = flat(np.moveaxis(rows.reshape(*indices.shape, size.value), -1, axis))
    return [Type(context.dtype(2), sizes, elements)]


def non_max_suppression_types(context: TypeContext) -> list[Type]:
    return [Type(INT64, (context.unknown(0, 2), dim(3)))]


def one_hot(node: Node, context: LoweringContext) -> Tensor:
    """The second of two values at the place that an index names along a new axis, negative ones from the end, and the
    first everywhere else."""
    indices, values, shape = operand(node, context, 0), operand(node, context, 2), result_shape(node, context)
    context.note_size(present(node, context, 1))
    axis = axis_of(node, "axis", -1, len(shape))
    depth = shape[axis]
    place = Iota(INT64, shape, axis)
    index = Map(INT64, indices.shape, "cast", (indices,))
    index = apply("where", test("lt", index, like(0, index)), apply("add", index, size_of(depth, INT64)), index)
    spread = reshape(index, (*indices.shape[:axis], dim(1), *indices.shape[axis:]))
    off, on = (reshape(cut(values, 0, dim(each), dim(1)), ()) for each in (0, 1))
    return apply("where", test("eq", place, spread), on, off)


def trilu(node: Node, context: LoweringContext) -> Tensor:
    source = operand(node, context, 0)
    rank = len(source.shape)
    offset = context.sizes(node.inputs[1])[0] if len(node.inputs) > 1 and node.inputs[1] else dim(0)
    row, column = (Iota(INT64, source.shape, axis) for axis in (rank - 2, rank - 1))
    diagonal = apply("add", row, size_of(offset, INT64))
    upper = integer_attribute(node, "upper", 1)
    keep = test("ge" if upper else "le", column, diagonal)
    return apply("where", keep, source, like(0, source))


def gather(node: Node, context: LoweringContext) -> Tensor:
    source, value = operand(node, context, 0), present(node, context, 1)
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


def gather_elements(node: Node, context: LoweringContext) -> Tensor:
    source, indices = operand(node, context, 0), operand(node, context, 1)
    axis = axis_of(node, "axis", 0, len(source.shape))
    return Take(source.dtype, indices.shape, source, indices, axis)


def gather_nd(node: Node, context: LoweringContext) -> Tensor:
    """One leading axis after the other, each by its own index."""
    source, indices = operand(node, context, 0), operand(node, context, 1)
    depth = indices.shape[-1].value
    if depth is None or integer_attribute(node, "batch_dims", 0):
        raise context.refuse("no-lowering", "a GatherND of a batch, or of who knows how many axes, has no kernel")
    taken, count, last = source, product(indices.shape[:-1]), len(indices.shape) - 1
    for place in range(depth):
        own = cut(indices, last, dim(place), dim(1))
        before, rest = ((), taken.shape[1:]) if place == 0 else ((count,), taken.shape[2:])
        shape = (count, *(dim(1) for _ in before), *rest)
        spread = expand(reshape(own, (count, *(dim(1) for _ in shape[1:]))), shape)
        taken = reshape(Take(source.dtype, shape, taken, spread, len(before)), (count, *rest))
    return reshape(taken, result_shape(node, context))


MOST_PLACES = 1 << 22
"""Indices that are looked at, at most."""

REDUCING = {"add": "add", "mul": "mul", "max": "at_least", "min": "at_most"}
"""What a Scatter does with an update and what is there; of two that cannot be compared it keeps the update."""


def scatter_nd(node: Node, context: LoweringContext) -> Tensor:
    """Updates over a whole grid of places along the leading axes."""
    source, updates = operand(node, context, 0), operand(node, context, 2)
    ranges = _spelled(node, context, source)
    if ranges is not None:
        return _scattered_over(node, context, source, reshape(updates, tuple(each.count for each in ranges)), ranges)
    fixed = _fixed(node, context, present(node, context, 1))
    depth = fixed.shape[-1]
    if fixed.size == 0:
        return source
    rows = fixed.reshape(-1, depth)
    # What is written one after the other is a grid where each axis counts through its places, the last one fastest.
    counted = [list(dict.fromkeys(column)) for column in rows.T.tolist()]
    if prod(map(len, counted)) != len(rows) or not np.array_equal(
            rows, np.stack(np.meshgrid(*counted, indexing="ij"), -1).reshape(-1, depth)):
        raise _scattered(node, context, len(np.unique(rows, axis=0)) < len(rows))
    grid = [_progression(node, context, places, size)
            for places, size in zip(counted, source.shape[:depth], strict=True)]
    grid += [Places(dim(0), 1, size) for size in source.shape[depth:]]
    return _scattered_over(node, context, source, reshape(updates, tuple(each.count for each in grid)), grid)


def _spelled(node: Node, context: LoweringContext, source: Tensor) -> list[Places] | None:
    """The places along each axis where ranges spell them and they lie on it, whatever the sizes are."""
    indices = present(node, context, 1)
    found = None if indices.is_constant else spelled(indices)
    if found is None:
        return None
    grid = [each.renamed(context.rename) for each in found]
    if not all(map(Places.within, grid, source.shape)):
        return None
    context.tensor(indices)  # an operand of the body, which the kernel has no use for
    return [*grid, *(Places(dim(0), 1, size) for size in source.shape[len(found):])]


def scatter_elements(node: Node, context: LoweringContext) -> Tensor:
    """Updates over places of one axis that are the same all along the others."""
    source, updates = operand(node, context, 0), operand(node, context, 2)
    axis = axis_of(node, "axis", 0, len(source.shape))
    indices = present(node, context, 1)
    maker = root(indices).producer
    given = maker.inputs[0] if maker is not None and (maker.domain, maker.op) == ("", "Expand") else None
    fixed = _fixed(node, context, given or indices)
    if fixed.size == 0:
        return source
    spread = np.moveaxis(fixed.reshape((1,) * (len(source.shape) - fixed.ndim) + fixed.shape), axis, -1)
    row = spread.reshape(-1, spread.shape[-1])[0]
    count = updates.shape[axis].value
    if count is not None and row.size == 1:
        row = np.repeat(row, count)
    if row.size != count or not np.array_equal(spread, np.broadcast_to(row[:spread.shape[-1]], spread.shape)):
        raise _scattered(node, context, repeated=False)
    grid = [Places(dim(0), 1, size) for size in updates.shape]
    grid[axis] = _progression(node, context, row.tolist(), source.shape[axis])
    return _scattered_over(node, context, source, updates, grid)


def _fixed(node: Node, context: LoweringContext, known: Value) -> NDArray[np.int64]:
    """The indices of a Scatter as numbers: those of ``known``, which are its operand or are repeated to that."""
    operand_value = present(node, context, 1)
    count = prod(size.value or 0 for size in known.shape or ())
    array = known.constant
    if array is None and known.contents is not None and count <= MOST_PLACES:
        array = known.contents()
    if array is None:
        raise context.refuse(
            "unknown-places", f"{node.qualified_op} has indices that are not known before the model runs",
            "fold the model's constants",
        )
    if operand_value.constant is not None:
        context.note_size(operand_value)
    else:
        context.tensor(operand_value)  # an operand of the body, which the kernel has no use for
    return np.asarray(array, np.int64)


def _progression(node: Node, context: LoweringContext, places: Sequence[int], size: Dim) -> Places:
    """Places of an axis as a start and a step; negative ones count from its end."""
    number = size.value
    if number is not None:
        if any(not -number <= place < number for place in places):
            raise context.refuse("unknown-places", f"{node.qualified_op} writes outside of an axis of {size} elements")
        places = [place % number for place in places]
    elif min(places) < 0 <= max(places):
        raise _scattered(node, context, repeated=False)
    steps = {after - before for before, after in pairwise(places)} or {1}
    if len(set(places)) < len(places) or len(steps) > 1:
        raise _scattered(node, context, len(set(places)) < len(places))
    start = dim(places[0]) if places[0] >= 0 else size + places[0]
    return Places(start, steps.pop(), dim(len(places)))


def _scattered(node: Node, context: LoweringContext, repeated: bool) -> Exception:
    if repeated:
        return context.refuse("repeated-places", f"{node.qualified_op} writes a place more than once")
    return context.refuse(
        "scattered-places", f"{node.qualified_op} writes places that are no grid of equal steps along the axes")


def _scattered_over(
    node: Node, context: LoweringContext, source: Tensor, updates: Tensor, grid: Sequence[Places]
) -> Tensor:
    """The updates, or what is made of them and what is there, on a grid, of which each axis has places; elsewhere what
    is there."""
    reduction = node.attributes.get("reduction", "none")
    if reduction != "none" and (reduction not in REDUCING or source.dtype == BOOL):
        raise context.refuse(
            "unsupported-mode", f"a {node.op} of this type with the reduction '{reduction}' has no kernel")
    shape = source.shape
    inside: list[Tensor] = []
    for axis, (places, size) in enumerate(zip(grid, shape, strict=True)):
        updates = _laid_out(updates, axis, places, size)
        place = Iota(INT64, shape, axis)
        if places.first != 0:
            inside.append(test("ge", place, size_of(places.first, INT64)))
        if places.end != size:
            inside.append(test("lt", place, size_of(places.end, INT64)))
        if abs(places.step) > 1:
            after = place if places.first == 0 else apply("sub", place, size_of(places.first, INT64))
            passed = apply("mod", after, like(abs(places.step), place))
            inside.append(test("eq", passed, like(0, place)))
    made = updates if reduction == "none" else apply(REDUCING[reduction], updates, source)
    if not inside:
        return made
    return apply("where", reduce(lambda one, other: test("and", one, other), inside), made, source)


def _laid_out(updates: Tensor, axis: int, places: Places, size: Dim) -> Tensor:
    """Updates of an axis where they are written; what stands between and beside them is never looked at."""
    count, step = places.count, abs(places.step)
    before, after = updates.shape[:axis], updates.shape[axis + 1:]
    if places.step < 0:
        updates = cut(updates, axis, count - 1, count, -1)
    if step > 1:
        each = reshape(updates, (*before, count, dim(1), *after))
        whole = reshape(expand(each, (*before, count, dim(step), *after)), (*before, count * step, *after))
        updates = cut(whole, axis, dim(0), places.end - places.first)
    beside = [expand(like(0, updates), (*before, more, *after)) for more in (places.first, size - places.end)]
    parts = [part for part in (beside[0], updates, beside[1]) if part.shape[axis] != 0]
    return parts[0] if len(parts) == 1 else Concat(updates.dtype, (*before, size, *after), tuple(parts), axis)


def _scatter_arithmetic(node: Node, sizes: Sizes) -> int | None:
    """One for each update that something is made of with what stands in its place."""
    return 0 if node.attributes.get("reduction", "none") == "none" else elements(node.inputs[2], sizes)


define("Gather", kind=VIEW, types=gather_types, lowering=gather, arithmetic=none, host=(), runtime=PLAIN)
define("GatherElements", kind=VIEW, types=gather_elements_types, lowering=gather_elements, arithmetic=none, host=(),
       runtime=PLAIN)
define("OneHot", kind=VIEW, types=one_hot_types, lowering=one_hot, arithmetic=none, host=(1,), runtime=PLAIN)
define("Trilu", kind=VIEW, types=same, lowering=trilu, arithmetic=none, host=(1,), runtime=PLAIN)
opaque("Trilu", domain=MICROSOFT, types=same, host=(), random=False)
define("GatherND", kind=VIEW, types=gather_nd_types, lowering=gather_nd, arithmetic=none, host=(), runtime=PLAIN)
opaque("NonZero", types=non_zero_types, host=(), random=False)
opaque("Compress", types=compress_types, host=(), random=False)
opaque("Unique", types=unique_types, host=(), random=False)
opaque("TopK", types=top_k_types, host=(1,), random=False)
opaque("NonMaxSuppression", types=non_max_suppression_types, host=(2, 3, 4), random=False)
define("ScatterND", kind=VIEW, types=same, lowering=scatter_nd, arithmetic=_scatter_arithmetic, host=(),
       runtime=RuntimeKernel.SCATTER)
define("ScatterElements", kind=VIEW, types=same, lowering=scatter_elements, arithmetic=_scatter_arithmetic, host=(),
       runtime=RuntimeKernel.SCATTER)
opaque("Scatter", "TensorScatter", "ReverseSequence", types=same, host=(), random=False)
