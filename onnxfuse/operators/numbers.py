"""Floats that sizes are computed by, where they are known: padding that keeps an image's size is exported as a chain
from the size through float32 (a division, rounded up, multiplied, never under zero) and back.

All are operations that IEEE 754 rounds to one result in float32 and float64, so that what is known is what the runtime
computes; of powers, by which the sides of a square are exported, those whose result is a number of that type itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import TensorProto

from onnxfuse.graph.constants import numpy_type
from onnxfuse.graph.context import MAX_ELEMENTS
from onnxfuse.graph.dims import dim
from onnxfuse.graph.model import Node, Value

Numbers = np.ndarray[Any, np.dtype[Any]]

EXACT = 2.0**53
"""Integers below this are the same as float64."""

_ALIKE: Mapping[str, np.ufunc] = MappingProxyType({
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Min": np.minimum, "Max": np.maximum,
    "Ceil": np.ceil, "Floor": np.floor, "Round": np.rint, "Neg": np.negative, "Abs": np.abs, "Sqrt": np.sqrt,
})
"""Operators of one or two operands, element by element."""

_FOLLOWED = frozenset({
    TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64})
"""Types of results: not float16, of which the runtime's CPU may compute a chain in float32."""

_VIEWS = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze"})


def follow(node: Node) -> None:
    """Note what a node's one result is where that follows from numbers that are known: floats as ``numbers``, integers
    that come of such as ``elements``."""
    result = node.outputs[0] if len(node.outputs) == 1 else None
    if result is None or node.domain or node.broken or result.elements is not None or result.shape is None:
        return
    shape = [size.value for size in result.shape if size.value is not None]
    count = prod(shape)
    if len(shape) < len(result.shape) or count > MAX_ELEMENTS or result.dtype not in _FOLLOWED:
        return
    kind = numpy_type(result.dtype)
    with np.errstate(all="ignore"):
        found = _computed(node, kind)
    if found is None or found.size != count:
        return
    if kind.kind == "f":
        result.numbers = found.astype(kind).reshape(shape)
    elif np.all(np.abs(found.astype(np.float64)) < EXACT):
        result.elements = tuple(dim(int(number)) for number in found.reshape(-1))


def _computed(node: Node, kind: np.dtype[Any]) -> Numbers | None:
    """The result's elements; None where an operand's are not known, or the operator is none of these."""
    first = _known(node.inputs[0]) if node.inputs else None
    if first is None:
        return None
    if node.op == "Cast":
        # Toward zero, as ONNX has it for numbers that fit.
        return np.trunc(first) if kind.kind == "i" else first
    if node.op in _VIEWS:
        return first
    if node.op == "Concat":
        return _joined(node)
    if kind.kind != "f":
        return None
    rest = [_known(value) for value in node.inputs[1:] if value is not None]
    others = [number for number in rest if number is not None]
    if len(others) < len(rest):
        return None
    if node.op == "Clip" and len(node.inputs) > 1:
        low, high = (_known(value) for value in (*node.inputs[1:], None)[:2])
        return np.clip(first, low, high) if low is not None or high is not None else first
    if node.op == "Pow" and others:
        return _power(first, others[0], kind)
    function = _ALIKE.get(node.op)
    return None if function is None or function.nin != 1 + len(others) else function(first, *others)


def _power(base: Numbers, exponent: Numbers, kind: np.dtype[Any]) -> Numbers | None:
    """Square roots and small powers, all of which are exact; None of others."""
    powers = {float(each) for each in exponent.reshape(-1)}
    wide = base.astype(np.float64)
    if len(powers) != 1 or not np.all(np.abs(wide) < EXACT):
        return None
    (power,) = powers
    if power == 0.5:
        found = np.sqrt(wide)
        exact = found * found == wide
    elif power in (1.0, 2.0, 3.0):
        found = wide**power
        exact = (np.abs(found) < EXACT) & (np.trunc(wide) == wide)
    else:
        return None
    return found if np.all(exact & (found.astype(kind).astype(np.float64) == found)) else None


def _joined(node: Node) -> Numbers | None:
    parts = [_known(value) for value in node.inputs]
    known = [part for part in parts if part is not None]
    return np.concatenate(known, axis=0) if len(known) == len(parts) and all(part.ndim == 1 for part in known) else None


def _known(value: Value | None) -> Numbers | None:
    """A value's numbers; None where they are not known, or many."""
    if value is None or value.dtype is None:
        return None
    if value.numbers is not None:
        return value.numbers
    if value.constant is not None:
        return value.constant if value.constant.size <= MAX_ELEMENTS else None
    if value.elements is None or value.shape is None:
        return None
    numbers, shape = [size.value for size in value.elements], [size.value for size in value.shape]
    if None in numbers or None in shape:
        return None
    return np.array(numbers, numpy_type(value.dtype)).reshape([size or 0 for size in shape])
