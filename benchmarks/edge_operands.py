"""Operands of what edge_values.py measures: NaN, infinity, the largest numbers, -0 and integers at their limits.

Elements are kept as text, so that -0.0 and nan stay apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto

FLOATS = ("float16", "bfloat16", "float32", "float64")
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
INTEGERS = ("int8", "uint8", "int32", "int64")
"""Those that arithmetic is measured in; casts are in all."""
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Tensor:
    """An operand: its element type and its elements, and the shape they have."""

    type: str
    shape: Sequence[int]
    values: str
    repeat: int = 1
    """How often the last axis is repeated in the model that runs."""
    constant: bool = False

    def array(self) -> np.ndarray:
        """The operand."""
        found = parsed(self.values, self.type).reshape(self.shape)
        return np.tile(found, (*(1,) * (found.ndim - 1), self.repeat)) if self.repeat > 1 else found


def numpy_type(name: str) -> np.dtype:
    """NumPy's type."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def element_type(name: str) -> int:
    """The element type of a type's name."""
    return {"bfloat16": TensorProto.BFLOAT16, "float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}.get(
        name) or TensorProto.DataType.Value(name.upper())


def parsed(text: str, kind: str) -> np.ndarray:
    """Elements from their text."""
    words = text.split()
    if kind in FLOATS:
        return np.array([float(word) for word in words]).astype(numpy_type(kind))
    return np.array([int(word) for word in words], dtype=numpy_type(kind))


def text_of(array: np.ndarray) -> str:
    """The elements as text that tells -0.0 from 0.0."""
    flat = array.reshape(-1)
    if array.dtype.kind in "iub":
        return " ".join(str(int(value)) for value in flat)
    if array.dtype.kind != "f":  # bfloat16
        flat = flat.astype(np.float32)
    return " ".join(repr(float(value)) if flat.dtype == np.float64 else str(value) for value in flat)


def operand(
    kind: str, values: Sequence[Any] | float, shape: Sequence[int] | None = None, **more: Any
) -> Tensor:
    """An operand of values, or of one, that the type rounds."""
    with np.errstate(all="ignore"):
        array = np.array(values, dtype=np.float64 if kind in FLOATS else numpy_type(kind)).astype(numpy_type(kind))
    return Tensor(kind, list(array.shape if shape is None else shape), text_of(array), **more)


def integers(*values: int) -> Tensor:
    """A constant list of int64."""
    return operand("int64", values, constant=True)


def limits(kind: str) -> tuple[Any, Any]:
    """The lowest and the highest number of a type."""
    if kind in FLOATS:
        most = float(ml_dtypes.finfo(numpy_type(kind)).max)  # type: ignore[no-untyped-call]
        return -most, most
    info = np.iinfo(numpy_type(kind))
    return int(info.min), int(info.max)


def ordinary(kind: str) -> list[Any]:
    """What one operand is taken through."""
    lowest, highest = limits(kind)
    if kind not in FLOATS:
        return [lowest, lowest + 1, highest, 0, 1, 2, 3, 7, 100, *([-1, -2, -3, -8, -100] if lowest else [])]
    tiny = float(ml_dtypes.finfo(numpy_type(kind)).smallest_subnormal)  # type: ignore[no-untyped-call]
    sides = [0.5, 1.0, 1.5, 2.5, 3.0, 10.0, 50.0, 100.0, 1000.0, 30000.0]
    return [NAN, INF, -INF, highest, lowest, tiny, -tiny, 0.0, -0.0, *sides, *(-side for side in sides)]


def few(kind: str) -> list[Any]:
    """What two operands are taken through together."""
    lowest, highest = limits(kind)
    if kind in FLOATS:
        return [NAN, INF, -INF, highest, lowest, 0.0, -0.0, 1.0, -1.0, 2.5, -3.0]
    return [lowest, highest, 0, 1, 2, 7, *([-1, -3] if lowest else [])]


def both(kind: str, other: str = "", second: Sequence[Any] | None = None) -> tuple[Tensor, Tensor]:
    """All pairs."""
    pairs = list(product(few(kind), few(other or kind) if second is None else second))
    a, b = zip(*pairs, strict=True)
    return operand(kind, a), operand(other or kind, b)


def not_zero(kind: str) -> list[Any]:
    """Divisors: the CPU provider refuses zero."""
    return [value for value in few(kind) if value]


def rows(kind: str) -> list[list[Any]]:
    """Rows of four."""
    lowest, highest = limits(kind)
    if kind not in FLOATS:
        more = [[-1, -2, -3, -4], [lowest, -1, lowest, -1], [highest - 1, -highest, 5, 6]] if lowest else []
        return [[1, 2, 3, 4], [highest, 1, 0, 0], [highest] * 4, [lowest] * 4, [lowest, highest, 0, 1],
                [highest - 1, highest, highest - 2, 0], [0, 0, 0, 0], *more]
    return [
        [1, 2, 3, 4], [NAN, 1, 2, 3], [1, NAN, 3, 2], [3, 2, 1, NAN], [NAN] * 4, [INF, NAN, INF, NAN], [INF, 1, 2, 3],
        [-INF, 1, 2, 3], [1, 2, 3, -INF], [INF, -INF, 1, 2], [INF] * 4, [-INF] * 4, [NAN, INF, 1, 2],
        [NAN, -INF, 1, 2], [-INF, -INF, -INF, NAN], [highest] * 4, [lowest] * 4, [highest, lowest, 1, 2],
        [lowest, -INF, -INF, -INF], [0.0, -0.0, 0.0, -0.0], [-0.0] * 4, [0.0] * 4, [-1, -2, -3, -4],
    ]


def row_operands(kind: str, repeat: int = 1) -> Tensor:
    """All rows as a matrix."""
    return operand(kind, rows(kind), repeat=repeat)
