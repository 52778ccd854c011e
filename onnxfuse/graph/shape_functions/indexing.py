"""Operators that pick elements by index or by value."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxfuse.graph.dims import dim
from onnxfuse.graph.shape_functions.context import INT64, MAX_ELEMENTS, Context, Type, flat, shape_function


@shape_function("Gather")
def _gather(context: Context) -> list[Type]:
    shape, indices = context.shape(0), context.shape(1)
    if shape is None or indices is None:
        return [Type(context.dtype())]
    axis = context.axis(len(shape), 0)
    contents, places, picked = context.contents(0), _places(context), None
    if contents is not None and places is not None and _inside(places, contents.shape[axis]):
        picked = flat(np.take(contents, places.reshape(-1), axis))
    return [Type(context.dtype(), shape[:axis] + indices + shape[axis + 1:], picked)]


def _places(context: Context) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """The indices of the second operand, where they are numbers."""
    places = context.contents(1)
    if places is None or any(place.value is None for place in places.flat):
        return None
    return np.array([place.value for place in places.flat], np.int64).reshape(places.shape)


def _inside(places: np.ndarray[Any, np.dtype[np.int64]], size: int) -> bool:
    return bool(np.all((places >= -size) & (places < size)))


@shape_function("GatherElements")
def _gather_elements(context: Context) -> list[Type]:
    contents, places, picked = context.contents(0), _places(context), None
    if contents is not None and places is not None:
        axis = context.axis(contents.ndim, 0)
        if _inside(places, contents.shape[axis]):
            # Along the other axes there may be fewer indices than elements.
            fewer = contents[tuple(slice(None if at == axis else size) for at, size in enumerate(places.shape))]
            picked = flat(np.take_along_axis(fewer, places % contents.shape[axis], axis))
    return [Type(context.dtype(), context.shape(1), picked)]


@shape_function("GatherND")
def _gather_nd(context: Context) -> list[Type]:
    shape, indices = context.shape(0), context.shape(1)
    depth = None if indices is None else indices[-1].value
    if shape is None or indices is None or depth is None:
        return [Type(context.dtype())]
    batch = int(context.attribute("batch_dims", 0))
    return [Type(context.dtype(), indices[:-1] + shape[batch + depth:])]


@shape_function("NonZero")
def _non_zero(context: Context) -> list[Type]:
    rank = context.rank()
    rows = context.unknown(0, 2) if rank is None else dim(rank)
    return [Type(INT64, (rows, context.unknown(1, 2)))]


@shape_function("Compress")
def _compress(context: Context) -> list[Type]:
    shape = context.shape()
    if context.attribute("axis") is None:
        return [Type(context.dtype(), context.unknown_shape(1))]
    if shape is None:
        return [Type(context.dtype())]
    axis = context.axis(len(shape), 0)
    return [Type(context.dtype(), (*shape[:axis], context.unknown(axis, len(shape)), *shape[axis + 1:]))]


@shape_function("Unique")
def _unique(context: Context) -> list[Type]:
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


@shape_function("TopK")
def _top_k(context: Context) -> list[Type]:
    shape, count = context.shape(), context.elements(1)
    if shape is None:
        return [Type(context.dtype()), Type(INT64)]
    axis = context.axis(len(shape), -1)
    size = count[0] if count is not None and len(count) == 1 else context.unknown(axis, len(shape))
    sizes = (*shape[:axis], size, *shape[axis + 1:])
    return [Type(context.dtype(), sizes), Type(INT64, sizes)]


@shape_function("OneHot")
def _one_hot(context: Context) -> list[Type]:
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


@shape_function("EyeLike")
def _eye_like(context: Context) -> list[Type]:
    given = context.attribute("dtype")
    return [Type(context.dtype() if given is None else int(given), context.shape())]


@shape_function("NonMaxSuppression")
def _non_max_suppression(context: Context) -> list[Type]:
    return [Type(INT64, (context.unknown(0, 2), dim(3)))]


@shape_function("Multinomial")
def _multinomial(context: Context) -> list[Type]:
    shape = context.shape()
    sizes = None if shape is None else (shape[0], dim(int(context.attribute("sample_size", 1))))
    return [Type(int(context.attribute("dtype", 6)), sizes)]


@shape_function("RandomNormal", "RandomUniform")
def _random(context: Context) -> list[Type]:
    return [Type(int(context.attribute("dtype", 1)), tuple(dim(int(size)) for size in context.attribute("shape")))]


@shape_function("GridSample")
def grid_sample(context: Context) -> list[Type]:
    shape, grid = context.shape(0), context.shape(1)
    return [Type(context.dtype(), None if shape is None or grid is None else (*shape[:2], *grid[1:-1]))]


@shape_function("RoiAlign")
def _roi_align(context: Context) -> list[Type]:
    shape, rois = context.shape(0), context.shape(1)
    if shape is None or rois is None:
        return [Type(context.dtype(), context.unknown_shape(4))]
    height, width = int(context.attribute("output_height", 1)), int(context.attribute("output_width", 1))
    return [Type(context.dtype(), (rois[0], shape[1], dim(height), dim(width)))]


@shape_function("MaxRoiPool")
def _max_roi_pool(context: Context) -> list[Type]:
    shape, rois = context.shape(0), context.shape(1)
    if shape is None or rois is None:
        return [Type(context.dtype(), context.unknown_shape(4))]
    return [Type(context.dtype(), (rois[0], shape[1], *(dim(int(n)) for n in context.attribute("pooled_shape"))))]
