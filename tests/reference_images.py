"""Operators that enlarge and sample images, in float64, as the standard and ONNX Runtime have them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


def channels(vector: Array, x: Array) -> Array:
    """A vector with a number a channel, as it is broadcast to an image."""
    return vector.reshape(-1, *(1,) * (x.ndim - 2))


def conv_transpose(attributes: Mapping, opset: int, x: Array, w: Array, bias: Array | None = None) -> Array:
    """Each element of the image spreads the weights; onnx's evaluator knows no groups."""
    count, groups = x.ndim - 2, attributes.get("group", 1)
    strides, dilations = (attributes.get(name) or [1] * count for name in ("strides", "dilations"))
    more, automatic = attributes.get("output_padding") or [0] * count, attributes.get("auto_pad", b"NOTSET")
    sizes = [stride * (size - 1) + (kernel - 1) * dilation + 1 + extra for stride, size, kernel, dilation, extra in
             zip(strides, x.shape[2:], w.shape[2:], dilations, more, strict=True)]
    whole = np.zeros((x.shape[0], groups, w.shape[1], *sizes))
    images = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
    weights = w.reshape(groups, -1, *w.shape[1:])
    for place in np.ndindex(*w.shape[2:]):
        taps = tuple(slice(tap * dilation, tap * dilation + stride * (size - 1) + 1, stride)
                     for tap, dilation, stride, size in zip(place, dilations, strides, x.shape[2:], strict=True))
        whole[(slice(None),) * 3 + taps] += np.einsum("ngc...,gcm->ngm...", images, weights[(slice(None),) * 3 + place])
    whole = whole.reshape(x.shape[0], -1, *sizes)
    pads, wanted = attributes.get("pads") or [0] * 2 * count, attributes.get("output_shape")
    if automatic.startswith(b"SAME"):
        wanted = wanted or [stride * size for stride, size in zip(strides, x.shape[2:], strict=True)]
    if wanted:
        totals = [size - each for size, each in zip(sizes, wanted[-count:], strict=True)]
        begins = [total // 2 if automatic == b"SAME_UPPER" else total - total // 2 for total in totals]
        pads = [*begins, *(total - begin for total, begin in zip(totals, begins, strict=True))]
    elif automatic == b"VALID":
        pads = [0] * 2 * count
    kept = tuple(slice(pads[axis], size - pads[count + axis]) for axis, size in enumerate(sizes))
    return whole[(slice(None), slice(None), *kept)] + (0 if bias is None else channels(bias, x))


def resize(attributes: Mapping, opset: int, x: Array, _: Array | None = None, scales: Array | None = None,
            sizes: Array | None = None) -> Array:
    """The nearest element, by the coordinates that the standard gives, rounded as it says; or what lies between two."""
    axes = attributes.get("axes") or range(x.ndim)
    for place, axis in enumerate(axes):
        before = x.shape[axis]
        scale = float(scales[place]) if scales is not None and scales.size else sizes[place] / before
        size = int(sizes[place]) if sizes is not None and sizes.size else int(before * scale)
        place_of = {
            "asymmetric": lambda i, scale=scale: i / scale,
            "align_corners": lambda i, size=size, before=before: i * (before - 1) / max(size - 1, 1),
            "half_pixel": lambda i, scale=scale: (i + 0.5) / scale - 0.5,
            "half_pixel_symmetric": lambda i, scale=scale: (i + 0.5) / scale - 0.5,
            "pytorch_half_pixel": lambda i, scale=scale, size=size: (i + 0.5) / scale - 0.5 if size > 1 else 0 * i,
        }[attributes.get("coordinate_transformation_mode", b"half_pixel").decode()]
        if attributes.get("mode", b"nearest") == b"linear":
            places = np.clip(place_of(np.arange(size).astype(np.float64)), 0, max(before - 1, 0))
            low = np.floor(places).astype(np.int64)
            high = np.minimum(low + 1, max(before - 1, 0))
            share = np.where(low == high, 0.5, places - low).reshape(-1, *(1,) * (x.ndim - axis % x.ndim - 1))
            x = np.take(x, low, axis) * (1 - share) + np.take(x, high, axis) * share
            continue
        rounded = {
            "floor": np.floor, "ceil": np.ceil,
            "round_prefer_floor": lambda c: np.ceil(c - 0.5), "round_prefer_ceil": lambda c: np.floor(c + 0.5),
        }[attributes.get("nearest_mode", b"round_prefer_floor").decode()]
        x = np.take(x, np.clip(rounded(place_of(np.arange(size))), 0, max(before - 1, 0)).astype(np.int64), axis)
    return x


def grid_sample(attributes: Mapping, opset: int, x: Array, grid: Array) -> Array:
    """Element by element: between its neighbours, each as the padding has it."""
    mode, padding = attributes.get("mode", b"linear"), attributes.get("padding_mode", b"zeros")
    aligned, sizes = attributes.get("align_corners", 0), x.shape[2:]
    result = np.zeros((*x.shape[:2], *grid.shape[1:-1]))
    for place in np.ndindex(grid.shape[0], *grid.shape[1:-1]):
        exact = [(n + 1) / 2 * (size - 1) if aligned else ((n + 1) * size - 1) / 2
                 for n, size in zip(grid[place][::-1], sizes, strict=True)]
        corners = [[(round(p), 1.0)] if mode == b"nearest" else
                   [(int(np.floor(p)), 1 - p + np.floor(p)), (int(np.floor(p)) + 1, p - np.floor(p))] for p in exact]
        for taps in product(*corners):
            at = [_padded(tap, size, padding, aligned) for (tap, _), size in zip(taps, sizes, strict=True)]
            if None not in at:
                share = np.prod([weight for _, weight in taps])
                result[(place[0], slice(None), *place[1:])] += share * x[(place[0], slice(None), *at)]
    return result


def _padded(place: int, size: int, padding: bytes, aligned: int) -> int | None:
    if padding == b"zeros":
        return place if 0 <= place < size else None
    while padding == b"reflection" and not 0 <= place < size:
        place = -place - 1 + aligned if place < 0 else 2 * size - 1 - aligned - place
    return min(max(place, 0), size - 1)
