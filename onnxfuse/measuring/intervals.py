"""Between which numbers a value of a graph lies, from those of the values that it is computed from.

An interval is of a whole tensor.  What no rule (``interval_rules``) says something about has none: nothing is known of
it, and nothing follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import NamedTuple

import ml_dtypes
import numpy as np
from onnx import TensorProto

from onnxfuse.graph import Node, Value
from onnxfuse.graph.constants import numpy_type
from onnxfuse.graph.dims import Dim


class Interval(NamedTuple):
    """All numbers from ``low`` to ``high``, both included; False is 0 and True is 1."""

    low: float
    high: float

    def within(self, low: float, high: float) -> bool:
        """Whether nothing of it is outside these."""
        return low <= self.low and self.high <= high


EVERY = Interval(-inf, inf)
TRUTH = Interval(0, 1)


class Facts:
    """What holds whatever the inputs hold: sizes, and the contents of constants."""

    def __init__(self, sizes: Mapping[str, int], given: Mapping[Value, Value] | None = None) -> None:
        """``given``: values of bodies and what of the graph around they are; those that are read by name need not be
        among them."""
        self._sizes, self._given = sizes, given or {}
        self._constants: dict[Value, Interval | None] = {}

    def size(self, size: Dim | int) -> int | None:
        """A number, or None where a symbol has none."""
        try:
            return size if isinstance(size, int) else size.evaluate(self._sizes)
        except (KeyError, ZeroDivisionError):
            return None

    def axis(self, value: Value | None, axis: int) -> int | None:
        """How long an axis is; None where that is not known."""
        if value is None or value.shape is None or not -len(value.shape) <= axis < len(value.shape):
            return None
        return self.size(value.shape[axis])

    def count(self, value: Value | None) -> int | None:
        """Number of elements."""
        found = 1
        for size in (value.shape if value is not None and value.shape is not None else (None,)):
            number = None if size is None else self.size(size)
            if number is None:
                return None
            found *= number
        return found

    def around(self, value: Value) -> Value | None:
        """What a value of a body is outside; a carried one as it is before the first run."""
        return value.outer or self._given.get(value)

    def known(self, value: Value) -> Interval | None:
        """Of a constant, or of what is computed from sizes alone."""
        if value not in self._constants:
            self._constants[value] = self._known(value)
        return self._constants[value]

    def _known(self, value: Value) -> Interval | None:
        if value.is_constant:
            array = value.constant
            whole = value.dtype is not None and value.dtype not in FLOATS
            if array is None and value.contents is not None and whole:
                array = value.contents()  # a table of integers may be looked up once more
            return None if array is None else interval_of(np.asarray(array))
        if value.elements:
            numbers = [self.size(size) for size in value.elements]
            if None not in numbers:
                found = [number for number in numbers if number is not None]
                return Interval(min(found), max(found))
        return None


FLOATS = frozenset({
    TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN,
    TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ,
})


def is_whole(dtype: int | None) -> bool:
    """Whether an element type is one of integers or of truths."""
    return dtype is not None and (dtype == TensorProto.BOOL or numpy_type(dtype).kind in "iu")


def interval_of(array: np.ndarray) -> Interval | None:
    """Of an array's numbers; None where it holds none, or something that is none."""
    if not array.size or (array.dtype.kind not in "biuf" and array.dtype != ml_dtypes.bfloat16):
        return None
    if array.dtype.kind in "biu":
        return Interval(int(array.min()), int(array.max()))
    low, high = float(array.min()), float(array.max())
    return None if isnan(low) or isnan(high) else Interval(low, high)


@dataclass(frozen=True)
class Step:
    """One node's computing of one of its outputs, ``value``."""

    node: Node
    operands: Sequence[Interval | None]
    facts: Facts
    value: Value

    def operand(self, place: int) -> Interval | None:
        """Interval of an operand; None where that is absent or not known."""
        return self.operands[place] if place < len(self.operands) else None

    @property
    def place(self) -> int:
        """Which output it is."""
        return self.node.outputs.index(self.value)
