"""How far a kernel may be from its reference: one table, and how it is applied.

An element passes where it is as near to the reference as the table says, or where the reference overflows or is
undefined and the kernel agrees with it or with the original's own result.  The reference is the node's body in float64
(float32 for an operator that ONNX Runtime's CPU provider does not have in float64); the original's own result is the
body in its own types, node by node.

- Which line of the table holds is decided by the narrowest float type that is computed in the body, not by the type
  of the output alone: a float32 output of float16 arithmetic is no better than float16.
- What only moves, selects or negates numbers must give them exactly.
- Sums of n terms err by about the square root of n roundings: ``reduction_factor``.
- Integers and booleans must be equal to the reference or the original's own.  Where one hangs on a comparison or on
  rounding to an integer of *computed* numbers, an element may also be what it would be had these numbers been a few
  units in the last place larger or smaller (``reference.nudged``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

Array = NDArray[Any]


@dataclass(frozen=True)
class Tolerance:
    """Limits of one float type; an error within any of them passes.

    Attributes:
        scale: share of the output's largest magnitude.
        ulps: units in the last place of the element at hand, in this type.
        own: times the original's own largest error.
        spread: limit of the root mean square error in units in the last place, or ``own`` times the original's own;
            None where ``scale`` says enough.  One rounding has 0.29.
    """

    scale: float
    ulps: float
    own: float
    spread: float | None = None


TABLE: dict[int, Tolerance] = {
    TensorProto.DOUBLE: Tolerance(1e-12, 0, 2.0),
    TensorProto.FLOAT: Tolerance(1e-5, 0, 2.0),
    TensorProto.FLOAT16: Tolerance(1e-5, 2, 1.1, 0.6),
    TensorProto.BFLOAT16: Tolerance(1e-5, 2, 1.1, 0.6),
}
"""By ``TensorProto.DataType``."""

EXACT = Tolerance(0, 0, 0)
"""For results in which nothing was computed."""

WIDTHS = (TensorProto.BFLOAT16, TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE)
"""Float types, the least precise first."""

NEAR = 1 / 128
"""Relative error that passes where the original overflowed and the reference did not."""

CANCELS = 4.0
"""Times the body's own error in float32 that passes there where that is more: exponentials of numbers as large as
float16 has none are no nearer."""

_SHORT = 64
"""Square root of the length up to which a sum needs no more than the table's limit."""

DIGITS: dict[int, int] = dict(zip(WIDTHS, (8, 11, 24, 53), strict=True))
"""Digits of the significand."""
LEAST: dict[int, int] = dict(zip(WIDTHS, (-133, -24, -149, -1074), strict=True))
"""Exponent of the smallest number above zero."""
LARGEST: dict[int, float] = {
    TensorProto.BFLOAT16: (2 - 2.0**-7) * 2.0**127, TensorProto.FLOAT16: 65504.0,
    TensorProto.FLOAT: float(np.finfo(np.float32).max), TensorProto.DOUBLE: float(np.finfo(np.float64).max),
}
"""Largest finite number of each type."""

_FRACTION_BITS, _EXPONENT, _BIAS = 52, 0x7FF, 1023
"""Of float64: bits of its fraction, the exponent's own, and what that is more than it means."""


def reduction_factor(length: int) -> float:
    """What the share of the scale is multiplied with for sums of ``length`` terms."""
    return max(1.0, sqrt(length) / _SHORT)


def ulp(values: Array, dtype: int) -> Array:
    """The unit in the last place of a float type at each value, as float64."""
    wide = np.ascontiguousarray(values, np.float64)
    # A power of two is its exponent's bits alone: moving them is many times faster than frexp and ldexp.
    exponent = np.right_shift(wide.view(np.int64), _FRACTION_BITS)
    exponent &= _EXPONENT
    exponent += 1 - DIGITS[dtype]
    if LEAST[dtype] <= -_BIAS:  # below float64's own normal numbers
        spacing: Array = np.ldexp(1.0, np.maximum(exponent - _BIAS, LEAST[dtype]))
        return spacing
    np.maximum(exponent, LEAST[dtype] + _BIAS, out=exponent)
    exponent <<= _FRACTION_BITS
    return exponent.view(np.float64)


def units_of(dtype: int, arithmetic: int) -> tuple[float, bool]:
    """How many units in the last place of the narrowest type that is computed in an element may err by itself, and
    whether it may err one of its own type's in any case."""
    ulps = TABLE[arithmetic].ulps
    return ulps, dtype != arithmetic or ulps < 1


def own_limit(exact: Array, types: tuple[int, int | None], unit: Array | None = None) -> Array | None:
    """What each element may err by itself, by its units in the last place; None where that is nothing.

    Args:
        exact: float64; types: see ``compared``; unit: ``ulp`` of these in the narrowest type, where that is known.
    """
    dtype, arithmetic = types
    if arithmetic is None:
        return None
    (ulps, rounds), limit = units_of(dtype, arithmetic), None
    if ulps:
        limit = ulps * (ulp(exact, arithmetic) if unit is None else unit)
    if rounds:
        rounding = ulp(exact, dtype)
        limit = rounding if limit is None else np.maximum(rounding, limit)
    return limit
