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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxfuse.verifying.blocks import over_blocks, parts

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

_DIGITS: dict[int, int] = dict(zip(WIDTHS, (8, 11, 24, 53), strict=True))
"""Digits of the significand."""
_SQUARED = 1e100
"""Numbers up to this, and down to its inverse, have squares that float64 holds, and sums of them."""
_LEAST: dict[int, int] = dict(zip(WIDTHS, (-133, -24, -149, -1074), strict=True))
"""Exponent of the smallest number above zero."""
_LARGEST: dict[int, float] = {
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
    exponent += 1 - _DIGITS[dtype]
    if _LEAST[dtype] <= -_BIAS:  # below float64's own normal numbers
        spacing: Array = np.ldexp(1.0, np.maximum(exponent - _BIAS, _LEAST[dtype]))
        return spacing
    np.maximum(exponent, _LEAST[dtype] + _BIAS, out=exponent)
    exponent <<= _FRACTION_BITS
    return exponent.view(np.float64)


@dataclass(frozen=True)
class Judgement:
    """One output for one set of inputs.

    Attributes:
        error: the largest error; limit: what it may be at most there; both as shares of the output's largest
            magnitude.  For integers and booleans: the share of wrong elements, and 0.
        ratio: the worst of error over limit, the root mean square's too; at most 1 passes.
        wrong: number of elements outside their limit; count: of all.
        where: the worst element; got, wanted: there.
        steady: False where elements passed because they hang on a rounded number.
    """

    error: float
    limit: float
    ratio: float
    wrong: int
    count: int
    where: tuple[int, ...] = ()
    got: str = ""
    wanted: str = ""
    steady: bool = True

    @property
    def passed(self) -> bool:
        """Whether the output is within its limits."""
        return self.wrong == 0 and self.ratio <= 1.0


def near(single: Array, exact: Array, own: Array) -> float:
    """The relative error that passes where the original overflowed.

    Args:
        single: the body's result in float32; exact: in float64; own: the original's.
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        share = np.abs(single.astype(np.float64) - exact) / np.abs(exact)
    counts = ~np.isfinite(own.astype(np.float64)) & np.isfinite(share)
    return max(NEAR, CANCELS * float(np.max(share, where=counts, initial=0.0)))


def replace_unowed(got: Array, single: Array, exact: Array, own: Array) -> Array:
    """A kernel's result with the reference's numbers where nothing is owed.

    That is where the original overflows to no number at all, float32 does too, and float64 alone knows better, as of
    the norm of a row of the largest numbers: ONNX Runtime's own kernels give NaN or 0, by the order they sum in.

    Args:
        got, single, exact, own: see ``judge`` and ``near``.
    """
    unowed = np.isnan(own.astype(np.float64)) & np.isnan(single.astype(np.float64)) & np.isfinite(exact)
    with np.errstate(over="ignore"):
        result: Array = np.where(unowed, exact.astype(got.dtype), got)
    return result


def judge(
    got: Array, wanted: Sequence[Array], own: Array | None, types: tuple[int, int | None], length: int = 1,
    nearness: float = NEAR,
) -> Judgement:
    """Compare one output of a kernel.

    Args:
        got: the kernel's, in its own type.
        wanted: the reference (float64, float32, integer or boolean); then, where the body decides by computed
            numbers, references with these numbers a little larger and smaller.
        own: the original's own result in the output's type, or None where it is not known.
        types: the output's element type, and the narrowest float type computed on the way to it, None where nothing
            is.
        length: of the longest sum on the way to it.
        nearness: the relative error that passes where the original overflowed and the reference did not.
    """
    reference, (dtype, _) = wanted[0], types
    if got.shape != reference.shape:
        return Judgement(float("inf"), 0.0, float("inf"), max(got.size, 1), got.size,
                         got=f"shape {got.shape}", wanted=f"shape {reference.shape}")
    if not got.size:
        return Judgement(0.0, 0.0, 0.0, 0, 0)
    if not got.ndim:
        # NumPy makes plain numbers of what it computes from arrays without axes.
        rows = [array.reshape(1) for array in wanted]
        ours = None if own is None else own.reshape(1)
        return replace(judge(got.reshape(1), rows, ours, types, length, nearness), where=())
    if dtype not in TABLE:
        # The original's own answer is right too: it may have rounded a quotient on the other side of a tie.
        return _exact(got, wanted if own is None else [*wanted, own])
    return _close(got, wanted, own, types, length, nearness)


def _exact(got: Array, wanted: Sequence[Array]) -> Judgement:
    """Integers and booleans."""
    bytes_got = got.view(np.uint8) if got.dtype == np.bool_ else got
    wrong = np.ones(got.shape, np.bool_)
    steady = True
    for number, reference in enumerate(wanted):
        if number and wrong.any():
            steady = False
        wrong &= bytes_got != reference.astype(got.dtype).view(bytes_got.dtype)
    count = int(wrong.sum())
    place = np.unravel_index(int(wrong.argmax()), wrong.shape) if count else ()
    return Judgement(count / max(got.size, 1), 0.0, float("inf") if count else 0.0, count, got.size,
                     tuple(int(axis) for axis in place), _text(got, place) if count else "",
                     _text(wanted[0], place) if count else "", steady)


def _close(
    got: Array, wanted: Sequence[Array], own: Array | None, types: tuple[int, int | None], length: int, nearness: float
) -> Judgement:
    """Numbers of float types, in arrays with axes; as ``judge``."""
    (_, arithmetic), shape = types, got.shape
    limits = EXACT if arithmetic is None else TABLE[arithmetic]
    got, wanted = got.reshape(-1), [array.reshape(-1) for array in wanted]
    own = None if own is None else own.reshape(-1)
    reference = wanted[0]
    blocks = over_blocks(lambda part: _Extent.of(got[part], reference[part], None if own is None else own[part], types),
                         got.size)
    whole = _Extent.joined(blocks)
    floor = limits.scale * reduction_factor(length) * whole.scale
    mine = max(floor, limits.own * whole.own)
    for sides in range(1, len(wanted) + 1):
        worst = _farthest(got, wanted[:sides], own, types, (mine, nearness), blocks)
        if not worst.wrong:
            break
    ratio, steady = worst.ratio, sides == 1
    if not worst.wrong and steady:
        ratio = max(ratio, whole.spread(floor, limits))
    place = np.unravel_index(worst.place, shape)
    share = 1 / whole.scale if whole.scale else 1.0
    return Judgement(
        whole.error * share, whole.error * share / ratio if 0 < ratio < np.inf else mine * share, ratio, worst.wrong,
        got.size, tuple(int(axis) for axis in place), _text(got, worst.place), _text(reference, worst.place), steady,
    )


@dataclass(frozen=True)
class _Farthest:
    """Of some elements: the largest error over limit and the first place that has it, and how many are wrong."""

    ratio: float
    place: int
    wrong: int


def _farthest(got: Array, wanted: Sequence[Array], own: Array | None, types: tuple[int, int | None],
              common: tuple[float, float], blocks: Sequence[_Extent]) -> _Farthest:
    """The same of whole arrays without axes; an element is judged by the one of ``wanted`` that it is nearest to.

    Args:
        blocks: what is known of each block of ``over_blocks``.  One in which no error may be as large a part of its
            limit as another's is, is not looked at again.
    """
    bounds = [(block.bound(common[0]), part) for block, part in zip(blocks, parts(got.size), strict=True)]
    worst, wrong = _Farthest(-1.0, 0, 0), 0
    for bound, part in sorted(bounds, key=lambda each: -each[0]):
        if bound < min(worst.ratio, 1.0):
            break
        wide = got[part].astype(np.float64)
        other = None if own is None else own[part].astype(np.float64)
        sides = [_compare(wide, side[part].astype(np.float64), other, types, common) for side in wanted]
        best = sides[0] if len(sides) == 1 else np.minimum.reduce(sides)
        place = int(best.argmax())
        found = _Farthest(float(best[place]), part.start + place, 0)
        if (found.ratio, -found.place) > (worst.ratio, -worst.place):
            worst = found
        wrong += int(np.count_nonzero(best > 1))
    return replace(worst, wrong=wrong)


@dataclass(frozen=True)
class _Extent:
    """Magnitudes of some elements, of those that are finite.

    Attributes:
        scale: the largest of the reference; error: of the kernel's errors; own: of the original's own.
        units: the largest of the kernel's errors over what each element may err by itself; infinite where not all are
            finite.
        squares: sums of squares, for ``spread``: of the kernel's errors, of units in the last place, and of the
            original's own errors.
        count: elements in these sums.
    """

    scale: float
    error: float
    own: float
    units: float
    squares: tuple[_Squares, _Squares, _Squares]
    count: int

    @classmethod
    def of(cls, got: Array, reference: Array, own: Array | None, types: tuple[int, int | None]) -> _Extent:
        """Of these elements; ``types``: see ``judge``."""
        exact = reference.astype(np.float64, copy=False)
        wide, theirs = got.astype(np.float64), None if own is None else own.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.subtract(wide, exact, out=wide)
            own_error = None if theirs is None else np.subtract(theirs, exact, out=theirs)
        np.abs(error, out=error)
        own_error = None if own_error is None else np.abs(own_error, out=own_error)
        largest = float(error.max()), 0.0 if own_error is None else float(own_error.max())
        arithmetic = types[1]
        unit = None if arithmetic is None or TABLE[arithmetic].spread is None else ulp(exact, arithmetic)
        if not np.isfinite(largest).all():
            return cls._of_finite(exact, error, own_error, unit)
        limit = _own_limit(exact, types, unit)
        with np.errstate(over="ignore"):
            units = 0.0 if not largest[0] else np.inf if limit is None else float(np.max(error / limit))
        squares = (_NONE,) * 3 if unit is None else tuple(
            _NONE if part is None else _Squares.of(part, most)
            for part, most in ((error, largest[0]), (unit, float(unit.max())), (own_error, largest[1])))
        return cls(max(float(exact.max()), -float(exact.min())), *largest, units,
                   squares, error.size if unit is not None else 0)  # type: ignore[arg-type]

    @classmethod
    def _of_finite(cls, exact: Array, error: Array, own_error: Array | None, unit: Array | None) -> _Extent:
        """Where some errors are no numbers: of the others."""
        size = np.abs(exact)
        finite = np.isfinite(error) if own_error is None else np.isfinite(error) & np.isfinite(own_error)
        parts = [_NONE if part is None else _Squares.of(part[finite], _largest(part[finite]))
                 for part in (error, unit, own_error)] if unit is not None else [_NONE] * 3
        return cls(_largest(size), _largest(error), 0.0 if own_error is None else _largest(own_error), np.inf,
                   tuple(parts), int(finite.sum()) if unit is not None else 0)  # type: ignore[arg-type]

    @classmethod
    def joined(cls, parts: Sequence[_Extent]) -> _Extent:
        """Of all elements of the parts."""
        squares = tuple(_Squares.joined(each) for each in zip(*(part.squares for part in parts), strict=True))
        return cls(max(part.scale for part in parts), max(part.error for part in parts),
                   max(part.own for part in parts), max(part.units for part in parts), squares,  # type: ignore[arg-type]
                   sum(part.count for part in parts))

    def bound(self, mine: float) -> float:
        """What no element's error over its limit exceeds, where ``mine`` is the limit that all have in common."""
        if not self.error and np.isfinite(self.units):
            return 0.0
        return float(min(self.units, self.error / mine if mine else np.inf)) if np.isfinite(self.units) else np.inf

    def spread(self, floor: float, limits: Tolerance) -> float:
        """Root mean square error over its limit: what a kernel that is a little wrong everywhere exceeds."""
        if not self.count:
            return 0.0
        error, unit, own = (each.root(self.count) for each in self.squares)
        limit = max(floor, (limits.spread or 0.0) * unit, limits.own * own)
        return error / limit if limit else 0.0


@dataclass(frozen=True)
class _Squares:
    """A sum of squares, in shares of the largest magnitude squared, so that none overflows or vanishes."""

    largest: float
    sum: float

    @classmethod
    def of(cls, values: Array, largest: float) -> _Squares:
        """Of finite numbers that are not negative, and the largest of them."""
        if not largest:
            return _NONE
        if 1 / _SQUARED < largest < _SQUARED:
            return cls(largest, float(values @ values) / largest**2)
        shares = values / largest
        return cls(largest, float(shares @ shares))

    @classmethod
    def joined(cls, parts: Sequence[_Squares]) -> _Squares:
        """The sum of several."""
        largest = max(part.largest for part in parts)
        return cls(largest, sum(part.sum * (part.largest / largest) ** 2 for part in parts)) if largest else _NONE

    def root(self, count: int) -> float:
        """The root of their mean."""
        return self.largest * sqrt(self.sum / count)


_NONE = _Squares(0.0, 0.0)


def _own_limit(exact: Array, types: tuple[int, int | None], unit: Array | None = None) -> Array | None:
    """What each element may err by itself, by its units in the last place; None where that is nothing.

    Args:
        exact: float64; types: see ``judge``; unit: ``ulp`` of these in the narrowest type, where that is known.
    """
    dtype, arithmetic = types
    if arithmetic is None:
        return None
    ulps, limit = TABLE[arithmetic].ulps, None
    if ulps:
        limit = ulps * (ulp(exact, arithmetic) if unit is None else unit)
    if dtype != arithmetic or ulps < 1:
        rounding = ulp(exact, dtype)
        limit = rounding if limit is None else np.maximum(rounding, limit)
    return limit


def _compare(
    wide: Array, exact: Array, own: Array | None, types: tuple[int, int | None], common: tuple[float, float]
) -> Array:
    """Error over limit of each element, all in float64; ``common``: the limit that all have in common, and the relative
    one of those that only the original has no number for."""
    dtype, (mine, nearness) = types[0], common
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        error = np.abs(wide - exact)
        own_limit = _own_limit(exact, types)
        ratio: Array = error / (mine if own_limit is None else np.maximum(own_limit, mine))
        ratio[error == 0] = 0.0
    finite = np.isfinite(error)
    if own is not None:
        finite &= np.isfinite(own)
    if not finite.all():
        rest = ~finite
        theirs = None if own is None else own[rest]
        ratio[rest] = _unfinished(wide[rest], exact[rest], theirs, ratio[rest], (dtype, mine, nearness))
    return ratio


def _unfinished(
    wide: Array, exact: Array, own: Array | None, ratio: Array, limit: tuple[int, float, float]
) -> Array:
    """Error over limit of elements of which the kernel's, the reference's or the original's number is not finite.

    ``limit``: the output's type, the limit that all elements have in common, and the relative one where the original's
    alone is not finite.
    """
    dtype, mine, nearness = limit
    finite = np.isfinite(wide) & np.isfinite(exact)
    # Infinite where the reference rounds to that, or comes as near to it as the common limit allows.
    brink = _LARGEST[dtype] * (1 + 2.0 ** -(_DIGITS[dtype] + 1)) - mine
    agrees = (np.isinf(wide) & (np.sign(wide) == np.sign(exact)) & (np.abs(exact) >= brink)) | (
        np.isnan(wide) & np.isnan(exact))
    if own is not None:
        agrees |= ~np.isfinite(own) & ((wide == own) | (np.isnan(wide) & np.isnan(own)))
        # Where the original has no number at all, a near one is better than what it gives.
        with np.errstate(invalid="ignore", over="ignore"):
            agrees |= ~np.isfinite(own) & finite & (np.abs(wide - exact) <= nearness * np.abs(exact))
    result: Array = np.where(agrees, 0.0, np.where(finite, ratio, np.inf))
    return result


def _largest(error: Array) -> float:
    """The largest finite number of an array of numbers that are not negative."""
    largest = float(error.max(initial=0.0))
    return largest if np.isfinite(largest) else float(error[np.isfinite(error)].max(initial=0.0))


def _text(values: Array, place: tuple[Any, ...] | int) -> str:
    return str(values[place]) if values.dtype.kind in "iub" else f"{float(values[place]):.9g}"
