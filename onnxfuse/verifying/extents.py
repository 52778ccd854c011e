"""Magnitudes of what is compared, block by block: of most outputs they say all that a comparison needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
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

    def root(self, count: int) -> float:
        """The root of their mean."""
        return self.largest * sqrt(self.sum / count)


NOTHING = Squares(0.0, 0.0)


@dataclass(frozen=True)
class Extents:
    """Those of all blocks of an array, in their order, as arrays: a look at a thousand objects takes Python longer than
    one at all elements takes a GPU.

    Attributes:
        rows: of each block scale, error, own and units, then the largest of each of its squares, then their sums.
        counts: of each block.
    """

    rows: Array
    counts: Array

    @classmethod
    def of(cls, blocks: Sequence[Extent]) -> Extents:
        """The same in rows."""
        return cls(np.stack([_row(block) for block in blocks]), np.array([block.count for block in blocks]))

    def __len__(self) -> int:
        """How many blocks there are."""
        return len(self.rows)

    def __getitem__(self, place: int) -> Extent:
        """That of one block."""
        return _extent(self.rows[place], int(self.counts[place]))

    def put(self, place: int, block: Extent) -> None:
        """Another in the place of one."""
        self.rows[place], self.counts[place] = _row(block), block.count

    def joined(self) -> Extent:
        """Of all elements."""
        row = self.rows.max(axis=0)
        largest = row[_LARGEST]
        shares = np.divide(self.rows[:, _LARGEST], largest, out=np.zeros((len(self), 3)), where=largest != 0)
        row[_SUMS] = (self.rows[:, _SUMS] * shares**2).sum(axis=0)
        return _extent(row, int(self.counts.sum()))

    def bounds(self, mine: float) -> Array:
        """What no element's error over its limit exceeds in each block, where ``mine`` is the limit that all have in
        common."""
        _, error, _, units = self.rows[:, :_LARGEST.start].T
        with np.errstate(over="ignore"):
            shares = error / mine if mine else np.full(len(self), inf)
        bounds = np.where(error != 0, np.minimum(units, shares), 0.0)
        return np.where(np.isfinite(units), bounds, inf)


_LARGEST, _SUMS = slice(4, 7), slice(7, 10)


def _row(block: Extent) -> Array:
    return np.array([block.scale, block.error, block.own, block.units, *(each.largest for each in block.squares),
                     *(each.sum for each in block.squares)])


def _extent(row: Array, count: int) -> Extent:
    errors, units, owns = (Squares(*each) for each in zip(row[_LARGEST].tolist(), row[_SUMS].tolist(), strict=True))
    scale, error, own, most = row[:_LARGEST.start].tolist()
    return Extent(scale, error, own, most, (errors, units, owns), count)


def _largest(error: Array) -> float:
    """The largest finite number of an array of numbers that are not negative."""
    largest = float(error.max(initial=0.0))
    return largest if np.isfinite(largest) else float(error[np.isfinite(error)].max(initial=0.0))


Measure = Callable[[Values, Values, "Array | None", "tuple[int, int | None]"], Extents]
"""Gives the extents of a kernel's result, in the blocks of ``over_blocks``, from arrays without axes as ``compared``
has them: the kernel's and the reference, on a GPU perhaps, and the original's own where it is known; and the types."""


def extents(got: Values, reference: Values, own: Array | None, types: tuple[int, int | None]) -> Extents:
    """See ``Measure``; by NumPy."""
    return Extents.of(over_blocks(
        lambda part: Extent.of(got[part], reference[part], None if own is None else own[part], types), got.size))
