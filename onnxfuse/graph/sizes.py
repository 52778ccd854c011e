"""How large a tensor is, once the symbols have values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from math import prod

from onnx import TensorProto, helper

from onnxfuse.graph.model import Value

Sizes = Mapping[str, int]
"""Values of the model's symbols: ``{"batch": 8, "sequence": 128}``."""

_BITS = {"INT2": 2, "UINT2": 2, "INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}


@cache
def bits(dtype: int) -> int | None:
    """Bits of one element in memory; None for strings and for types that onnx does not know."""
    if dtype in (TensorProto.STRING, TensorProto.UNDEFINED) or dtype not in TensorProto.DataType.values():
        return None
    packed = _BITS.get(TensorProto.DataType.Name(dtype))
    return packed if packed is not None else int(helper.tensor_dtype_to_np_dtype(dtype).itemsize) * 8


def type_name(dtype: int | None) -> str:
    """An element type as people write it, "float16"; "?" where it is not known, or none of onnx's."""
    known = dtype is not None and dtype in TensorProto.DataType.values()
    return str(TensorProto.DataType.Name(dtype)).lower() if known else "?"


def shape_of(value: Value, sizes: Sizes) -> tuple[int, ...] | None:
    """The value's sizes as integers, or None where one is unknown: no number, or below zero at these sizes."""
    if value.shape is None:
        return None
    try:
        shape = tuple(size.evaluate(sizes) for size in value.shape)
    except (KeyError, ZeroDivisionError):
        return None
    return None if any(size < 0 for size in shape) else shape


def shapes_of(values: Iterable[Value], sizes: Sizes) -> tuple[tuple[int, ...], ...] | None:
    """The sizes of several values, or None where one is unknown."""
    found = [shape_of(value, sizes) for value in values]
    known = tuple(shape for shape in found if shape is not None)
    return known if len(known) == len(found) else None


def elements_of(value: Value, sizes: Sizes) -> int | None:
    """Number of elements, or None where unknown."""
    shape = shape_of(value, sizes)
    return None if shape is None else prod(shape)


def bytes_of(value: Value, sizes: Sizes) -> int | None:
    """Bytes in memory, or None where shape or type are unknown.  Packed types round up to whole bytes."""
    count = elements_of(value, sizes)
    width = None if value.dtype is None else bits(value.dtype)
    return None if count is None or width is None else -(-count * width // 8)


def contents_of(value: Value, sizes: Sizes) -> tuple[int, ...] | None:
    """What a small integer tensor holds, or None where that is not known before a run."""
    try:
        return None if value.elements is None else tuple(size.evaluate(sizes) for size in value.elements)
    except (KeyError, ZeroDivisionError):
        return None
