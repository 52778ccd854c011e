"""Operators on quantised numbers for ``reference_operators``: in float64 but for what the standard has in float32."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

Array = NDArray[np.generic]


def _along(attributes: Mapping, x: Array, parameter: Array) -> Array:
    shape = [1] * x.ndim
    if parameter.size != 1:
        shape[attributes.get("axis", 1)] = -1
    return parameter.reshape(shape).astype(np.float64)


def quantize(attributes: Mapping, opset: int, x: Array, scale: Array, zero: Array | None = None) -> Array:
    given = helper.tensor_dtype_to_np_dtype(attributes.get("output_dtype", 0) or TensorProto.UINT8)
    kind = given if zero is None else zero.dtype
    quotient = x.astype(np.float64) / _along(attributes, x, scale)
    # The zero point for no number to 8 bits, the lowest to 16.
    steps = np.where(np.isnan(quotient), 0 if kind.itemsize == 1 else -np.inf, np.rint(quotient))
    steps = steps + (0 if zero is None else _along(attributes, x, zero))
    return np.clip(steps, np.iinfo(kind).min, np.iinfo(kind).max).astype(kind)


def dynamic_quantize(attributes: Mapping, opset: int, x: Array) -> tuple[Array, Array, Array]:
    """In float32, as the standard has it: a scale that is rounded to it puts other numbers on the sides of ties."""
    x = x.astype(np.float32)
    least, most = x.min(initial=np.float32(0)), x.max(initial=np.float32(0))
    scale = (most - least) / np.float32(255) if most != least else np.float32(1)
    zero = np.clip(np.rint(-least / scale), 0, 255)
    return np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.uint8), np.asarray(scale), zero.astype(np.uint8)


def _less(x: Array, zero: Array | None) -> Array:
    return x.astype(np.float64) - (0 if zero is None else zero.astype(np.float64))


def integers_to_floats(
    attributes: Mapping, opset: int, a: Array, b: Array, scale: Array, other: Array, zero: Array | None = None,
    other_zero: Array | None = None, bias: Array | None = None,
) -> Array:
    made = np.matmul(_less(a, zero), _less(b, other_zero)) * (scale.astype(np.float64) * other)
    return made if bias is None else made + bias


def qgemm(
    attributes: Mapping, opset: int, a: Array, scale: Array, zero: Array, b: Array, other: Array, other_zero: Array,
    bias: Array | None = None, own: Array | None = None, own_zero: Array | None = None,
) -> Array:
    """Sums of integers keep their lowest 32 bits."""
    transposed = attributes.get("transB", 0)
    right = _less(b, other_zero[:, None] if transposed and other_zero.ndim else other_zero)
    made = _less(a.T if attributes.get("transA", 0) else a, zero) @ (right.T if transposed else right)
    made = (made + (0 if bias is None else bias)).astype(np.int64).astype(np.int32)
    made = made * (scale.astype(np.float64) * other * attributes.get("alpha", 1.0))
    if own is None:
        return made
    kind = np.dtype(np.uint8) if own_zero is None else own_zero.dtype
    steps = np.rint(made / own) + (0 if own_zero is None else own_zero)
    return np.clip(steps, np.iinfo(kind).min, np.iinfo(kind).max).astype(kind)


def dequantize(attributes: Mapping, opset: int, x: Array, scale: Array, zero: Array | None = None) -> Array:
    return (x.astype(np.float64) - (0 if zero is None else _along(attributes, x, zero))) * _along(attributes, x, scale)
