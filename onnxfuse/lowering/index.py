"""Index arithmetic: where an element of a view lies in what it views.

A loop variable (a *base*: the linear index of an output, a row, a place in a row) runs from 0 to its extent.  A
*digit* is ``base // step % size``, a digit of the base in some mixed radix: the coordinates of a linear index are
its digits.  Every index is a polynomial over bases, digits and sizes (``graph.dims.Dim``); the names of bases begin
with "@", which no size's does.  Splitting and merging
digits is what makes reshapes free: the coordinates of L, transposed back and made linear again, are L.

Sizes are never negative, and where one is zero nothing runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.graph.dims import Dim, Monomial, cofactor, dim, product, symbol
from onnxfuse.graph.model import Shape

Coordinates = tuple[Dim, ...]


@dataclass(frozen=True)
class Digit:
    """``base // step % size``; ``top`` where the remainder changes nothing, and only there may the size be unknown."""

    base: str
    step: Dim
    size: Dim | None
    top: bool


class IndexSpace:
    """The bases and digits of one kernel, and arithmetic over them."""

    def __init__(self) -> None:
        self.extents: dict[str, Dim | None] = {}
        self.digits: dict[str, Digit] = {}
        self.derived: dict[str, Dim] = {}
        """Bases that are themselves polynomials, because no digit could be split off."""
        self.limits: dict[Monomial, Dim] = {}
        """Sizes that products of symbols are known to be under."""
        self.places: dict[Dim, None] = {}
        """Places in memory that were asked for."""

    def base(self, name: str, extent: Dim | None) -> Dim:
        """A new loop variable (or an index read from memory) that is at least 0 and under ``extent``."""
        self.extents[name] = extent
        return symbol(name)

    def digit(self, base: str, step: Dim, size: Dim) -> Dim:
        """``base // step % size`` as a symbol; the base itself or 0 where that is what it is."""
        if size == 1:
            return dim(0)
        extent = self.extents[base]
        top = extent is not None and extent == step * size
        if top and step == 1:
            return symbol(base)
        name = f"({base} / {step} % {size})"
        self.digits[name] = Digit(base, step, size, top)
        return symbol(name)

    def variable(self, name: str) -> Digit | None:
        """The digit that a symbol is, a base counted as its own only digit; None for sizes."""
        if name in self.digits:
            return self.digits[name]
        extent = self.extents.get(name)
        if name in self.extents and extent is not None:
            return Digit(name, dim(1), extent, True)
        return None

    def is_variable(self, name: str) -> bool:
        """Whether a symbol changes from element to element (a size does not)."""
        return name in self.digits or name in self.extents

    def delinear(self, index: Dim, shape: Shape, floors: Coordinates = ()) -> Coordinates:
        """Coordinates in a tensor of this shape of the element at a row-major place.

        Args:
            floors: indices that are not negative wherever the element is wanted.
        """
        coordinates: list[Dim] = []
        for axis in range(len(shape) - 1, -1, -1):
            size = shape[axis]
            if size == 1:
                coordinates.append(dim(0))
            elif axis == 0 or all(outer == 1 for outer in shape[:axis]):
                coordinates.append(index)
                index = dim(0)
            else:
                index, remainder = self.divmod(index, size, floors)
                coordinates.append(remainder)
        return tuple(reversed(coordinates))

    def limited(self, index: Dim, size: Dim) -> Dim:
        """An index that is known to be under a size wherever the element is wanted."""
        ((monomial, factor), *others) = index.terms.items() or [((), 0)]
        if factor == 1 and not others:
            self.limits[monomial] = size
        return index

    def reshaped(self, coordinates: Coordinates, shape: Shape, other: Shape, floors: Coordinates = ()) -> Coordinates:
        """Coordinates of an element of a tensor where that has another shape; ``floors`` as ``delinear`` has them.

        Digits that are put together, where they are but a part of what they look like (3 m + r of 3 m s + 3 m + r), may
        not come apart again: then they stay as they are.
        """
        same = next((axis for axis, sizes in enumerate(zip(shape, other, strict=False)) if sizes[0] != sizes[1]), 0)
        if same and any(any(self.may_leave(*each)) for each in zip(coordinates, shape, strict=True)):
            # Conditions alone keep it within its axis, and the first ones would not come apart again as they were.
            return (*coordinates[:same], *self.reshaped(coordinates[same:], shape[same:], other[same:], floors))
        known, place = len(self.derived), self.linear(coordinates, shape)
        found = self.delinear(place, other, floors)
        between = len(self.derived)
        if between == known or (apart := self._place(coordinates, shape)) == place:
            return found
        again = self.delinear(apart, other, floors)
        if len(self.derived) == between:
            return again
        for name in [*self.derived][between:]:
            del self.derived[name], self.extents[name]
        return found

    def linear(self, coordinates: Coordinates, shape: Shape) -> Dim:
        """Row-major place of an element in a tensor of this shape."""
        place = self.merge(self._place(coordinates, shape))
        self.places[place] = None
        return place

    @staticmethod
    def _place(coordinates: Coordinates, shape: Shape) -> Dim:
        total, stride = dim(0), dim(1)
        for coordinate, size in zip(reversed(coordinates), reversed(shape), strict=True):
            # The only coordinate of an axis of size one is 0, though a concatenation may have written it otherwise.
            total = total + coordinate * stride if size != 1 else total
            stride = stride * size
        return total

    def divmod(self, index: Dim, size: Dim, floors: Coordinates = ()) -> tuple[Dim, Dim]:
        """Quotient and remainder of an index by a size; the index as a whole is not negative."""
        quotient, rest = index.long_division(size) if size.terms else (dim(0), index)
        if rest == 0 or (self._below(rest, size) and (quotient == 0 or self._non_negative(rest, floors))):
            return quotient, rest
        split = self._split(rest, size, floors)
        if split is None and not (quotient == 0 or self._non_negative(rest, floors)):
            # Only together with the quotient is the rest known not to be negative.
            quotient, rest = dim(0), index
        if split is None:
            name = f"@t{len(self.derived)}"
            self.derived[name] = rest
            bound = self.bound(rest)
            self.extents[name] = None if bound is None else bound + 1
            split = self._digits_of(name, dim(1), None, size)
        return quotient + split[0], split[1]

    def _split(self, rest: Dim, size: Dim, floors: Coordinates) -> tuple[Dim, Dim] | None:
        """Quotient and remainder where ``rest`` is ``scale * digit + low`` with ``low`` in [0, scale)."""
        for monomial, factor in rest.terms.items():
            high = Dim({monomial: factor})
            names = [atom.name for atom, power in monomial if self.is_variable(atom.key) and power == 1]
            if len(names) != 1:
                continue
            digit = self.variable(names[0])
            scale = cofactor((monomial, factor), names[0])
            low = rest - high
            if digit is None or not scale.non_negative():
                continue
            if low != 0 and not (self._below(low, scale) and self._non_negative(low, floors)):
                continue
            inner = size if scale == 1 else size.divide(scale)
            if inner is None or not (digit.top or (digit.size is not None and digit.size.divide(inner) is not None)):
                continue
            quotient, remainder = self._digits_of(digit.base, digit.step, None if digit.top else digit.size, inner)
            return quotient, remainder * scale + low
        return None

    def _digits_of(self, base: str, step: Dim, size: Dim | None, inner: Dim) -> tuple[Dim, Dim]:
        low = self.digit(base, step, inner)
        extent = self.extents[base]
        if size is None and extent is not None:
            size = extent.divide(step)
        outer = size.divide(inner) if size is not None else None
        if outer is not None:
            return self.digit(base, step * inner, outer), low
        bound = None if extent is None else extent // (step * inner) + 1
        return self._top(base, step * inner, bound), low

    def _top(self, base: str, step: Dim, size: Dim | None) -> Dim:
        """``base // step``, which is known to be under ``size``, if that is known."""
        name = f"({base} / {step})"
        self.digits[name] = Digit(base, step, size, True)
        return symbol(name)

    def merge(self, index: Dim) -> Dim:
        """The same index with neighbouring digits of a base put together again."""
        while True:
            merged = self._merge_once(index)
            if merged is None:
                return index
            index = merged

    def _merge_once(self, index: Dim) -> Dim | None:
        parts: list[tuple[Monomial, Digit, Dim]] = []
        for monomial, factor in index.terms.items():
            names = [atom.name for atom, power in monomial if power == 1 and self.is_variable(atom.key)]
            if len(names) != 1:
                continue
            digit = self.variable(names[0])
            scale = cofactor((monomial, factor), names[0])
            if digit is not None:
                parts.append((monomial, digit, scale))
        for low_monomial, low, low_scale in parts:
            if low.size is None or low.top:
                continue
            step, scale = low.step * low.size, low_scale * low.size
            for high_monomial, high, high_scale in parts:
                if low.base == high.base and high.step == step and high_scale == scale:
                    rest = Dim({m: c for m, c in index.terms.items() if m not in (low_monomial, high_monomial)})
                    if high.top and low.step == 1:
                        return rest + symbol(low.base) * low_scale
                    if high.top or high.size is None:
                        size = None if high.size is None else low.size * high.size
                        return rest + self._top(low.base, low.step, size) * low_scale
                    return rest + self.digit(low.base, low.step, low.size * high.size) * low_scale
        return None

    def bound(self, index: Dim) -> Dim | None:
        """The largest value that an index can have, or None where that is not known."""
        total = dim(0)
        for monomial, factor in index.terms.items():
            known, rest = self._limit(monomial)
            term = known * factor
            for atom, power in rest:
                variable = self.variable(atom.key) if atom.kind == "symbol" else None
                if variable is not None and variable.size is not None:
                    limit = variable.size - 1
                elif atom.kind == "symbol" and variable is None and not self.is_variable(atom.key):
                    limit = symbol(atom.name)
                else:
                    return None
                for _ in range(power):
                    term = term * limit
            if factor > 0 or not any(self.is_variable(atom.key) for atom, _ in monomial):
                total = total + term
        return total

    def _limit(self, monomial: Monomial) -> tuple[Dim, Monomial]:
        """What a part of a product is at most, and the rest of it."""
        atoms = dict(monomial)
        for part, size in self.limits.items():
            if all(atoms.get(atom) == power for atom, power in part):
                return size - 1, tuple(each for each in monomial if each not in part)
        return dim(1), monomial

    def may_leave(self, index: Dim, size: Dim) -> tuple[bool, bool]:
        """Whether an index may be below zero, and whether it may be past the last place of an axis of this size."""
        return not self._non_negative(index, ()), not self._below(index, size)

    def _non_negative(self, index: Dim, floors: Coordinates) -> bool:
        """Whether an index is provably not negative, given that the floors are not."""
        leasts = [self._least(index - floor) for floor in (dim(0), *floors)]
        return any(least is not None and least.non_negative() for least in leasts)

    def _least(self, index: Dim) -> Dim | None:
        """A size that no value of the index is below, or None where none is known."""
        total = dim(0)
        for monomial, factor in index.terms.items():
            term = Dim({monomial: factor})
            if not any(self.is_variable(name) for name in term.symbols):
                total = total + term
            elif factor < 0:
                most = self.bound(term * -1)
                if most is None:
                    return None
                total = total - most
        return total

    def _below(self, index: Dim, size: Dim) -> bool:
        bound = self.bound(index)
        return bound is not None and all(factor >= 0 for factor in (size - 1 - bound).terms.values())


def strides(shape: Shape) -> tuple[Dim, ...]:
    """Row-major strides, in elements."""
    return tuple(product(shape[axis + 1 :]) for axis in range(len(shape)))
