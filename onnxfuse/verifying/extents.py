"""Magnitudes of what is compared, block by block: of most outputs they say all that a comparison needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxfuse.verifying.blocks import over_blocks
from onnxfuse.verifying.device_arrays import Values
from onnxfuse.verifying.tolerances import TABLE, Tolerance, own_limit, ulp

Array = NDArray[Any]

SQUARED = 1e100
"""Numbers up to this, and down to its inverse, have squares that float64 holds, and sums of them."""


@dataclass(frozen=True)
class Extent:
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
    squares: tuple[Squares, Squares, Squares]
    count: int

    @classmethod
    def of(cls, got: Array, reference: Array, own: Array | None, types: tuple[int, int | None]) -> Extent:
        """Of these elements; ``types``: see ``compared``."""
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
        limit = own_limit(exact, types, unit)
        with np.errstate(over="ignore"):
            units = 0.0 if not largest[0] else np.inf if limit is None else float(np.max(error / limit))
        squares = (NOTHING,) * 3 if unit is None else tuple(
            NOTHING if part is None else Squares.of(part, most)
            for part, most in ((error, largest[0]), (unit, float(unit.max())), (own_error, largest[1])))
        return cls(max(float(exact.max()), -float(exact.min())), *largest, units,
                   squares, error.size if unit is not None else 0)  # type: ignore[arg-type]

    @classmethod
    def _of_finite(cls, exact: Array, error: Array, own_error: Array | None, unit: Array | None) -> Extent:
        """Where some errors are no numbers: of the others."""
        size = np.abs(exact)
        finite = np.isfinite(error) if own_error is None else np.isfinite(error) & np.isfinite(own_error)
        parts = [NOTHING if part is None else Squares.of(part[finite], _largest(part[finite]))
                 for part in (error, unit, own_error)] if unit is not None else [NOTHING] * 3
        return cls(_largest(size), _largest(error), 0.0 if own_error is None else _largest(own_error), np.inf,
                   tuple(parts), int(finite.sum()) if unit is not None else 0)  # type: ignore[arg-type]

    @classmethod
    def joined(cls, parts: Sequence[Extent]) -> Extent:
        """Of all elements of the parts."""
        squares = tuple(Squares.joined(each) for each in zip(*(part.squares for part in parts), strict=True))
        return cls(max(part.scale for part in parts), max(part.error for part in parts),
                   max(part.own for part in parts), max(part.units for part in parts), squares,  # type: ignore[arg-type]
                   sum(part.count for part in parts))

    def bound(self, mine: float) -> float:
        """What no element's error over its limit exceeds, where ``mine`` is the limit that all have in common."""
        if not isfinite(self.units):
            return inf
        return min(self.units, self.error / mine if mine else inf) if self.error else 0.0

    def spread(self, floor: float, limits: Tolerance) -> float:
        """Root mean square error over its limit: what a kernel that is a little wrong everywhere exceeds."""
        if not self.count:
            return 0.0
        error, unit, own = (each.root(self.count) for each in self.squares)
        limit = max(floor, (limits.spread or 0.0) * unit, limits.own * own)
        return error / limit if limit else 0.0


@dataclass(frozen=True)
class Squares:
    """A sum of squares, in shares of the largest magnitude squared, so that none overflows or vanishes."""

    largest: float
    sum: float

    @classmethod
    def of(cls, values: Array, largest: float) -> Squares:
        """Of finite numbers that are not negative, and the largest of them."""
        if not largest:
            return NOTHING
        if 1 / SQUARED < largest < SQUARED:
            return cls(largest, float(values @ values) / largest**2)
        shares = values / largest
        return cls(largest, float(shares @ shares))

    @classmethod
    def joined(cls, parts: Sequence[Squares]) -> Squares:
        """The sum of several."""
        largest = max(part.largest for part in parts)
        return cls(largest, sum(part.sum * (part.largest / largest) ** 2 for part in parts)) if largest else NOTHING

    def root(self, count: int) -> float:
        """The root of their mean."""
        return self.largest * sqrt(self.sum / count)


NOTHING = Squares(0.0, 0.0)


def _largest(error: Array) -> float:
    """The largest finite number of an array of numbers that are not negative."""
    largest = float(error.max(initial=0.0))
    return largest if np.isfinite(largest) else float(error[np.isfinite(error)].max(initial=0.0))


Measure = Callable[[Values, Values, "Array | None", "tuple[int, int | None]"], Sequence[Extent]]
"""Gives the extents of a kernel's result, in the blocks of ``over_blocks``, from arrays without axes as ``compared``
has them: the kernel's and the reference, on a GPU perhaps, and the original's own where it is known; and the types."""


def extents(got: Values, reference: Values, own: Array | None, types: tuple[int, int | None]) -> list[Extent]:
    """See ``Measure``; by NumPy."""
    return over_blocks(lambda part: Extent.of(got[part], reference[part], None if own is None else own[part], types),
                       got.size)
