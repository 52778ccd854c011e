"""Mean and variance in one pass: a row's sum and the sum of squares of differences from its mean, found together.

While a row is read, each thread has the mean of what it has met, and the squares of differences from that; what threads
and chunks found is brought to the mean of all (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances", 1979).  A row that does not stay in registers is read twice then, not three times; unlike a
sum of squares less that of the mean, a small variance about a large mean stays right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onnxfuse.graph.dims import Dim
from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.pull import Apply, Constant, Index, Reduced, Scalar
from onnxfuse.schedules.reductions.online import bare

EXACT = 1e-6
"""Share by which the reciprocal of a length may be rounded."""


@dataclass(frozen=True)
class Moments:
    """A sum of squares of differences from the mean.

    Attributes:
        total: the sum that the mean is made of; shares: whether of elements divided by the length, so that it is the
            mean itself, else of elements.
        element: what both are of.
    """

    total: Reduced
    shares: bool
    element: Scalar


def squares_about_means(reductions: Iterable[Reduced], length: Dim) -> dict[Reduced, Moments]:
    """Those reductions of rows of a length that are such sums."""
    found = ((reduction, _moments(reduction, length)) for reduction in reductions)
    return {reduction: moments for reduction, moments in found if moments is not None}


def _moments(reduction: Reduced, length: Dim) -> Moments | None:
    square = bare(reduction.element)
    if reduction.kind != "sum" or not isinstance(square, Apply) or square.function != "mul":
        return None
    one, other = map(bare, square.operands)
    if one is not other or not isinstance(one, Apply) or one.function != "sub":
        return None
    element, mean = map(bare, one.operands)
    divided = isinstance(mean, Apply) and mean.function == "div" and _is_length(mean.operands[1], length)
    total = bare(mean.operands[0]) if isinstance(mean, Apply) and divided else mean
    if not isinstance(total, Reduced) or total.kind != "sum" or (
            TYPES[total.dtype].compute != TYPES[reduction.dtype].compute) or not TYPES[total.dtype].is_floating:
        return None
    part = bare(total.element)
    if divided:
        return Moments(total, False, element) if part is element else None
    if isinstance(part, Apply) and part.function == "mul" and bare(part.operands[0]) is element and (
            _is_share(part.operands[1], length)):
        return Moments(total, True, element)
    return None


def _is_length(scalar: Scalar, length: Dim) -> bool:
    """Whether an expression is so many elements."""
    scalar = bare(scalar, casts=True)
    if isinstance(scalar, Apply) and scalar.function == "cast":
        scalar = bare(scalar.operands[0])
    if isinstance(scalar, Index):
        return scalar.index == length
    return isinstance(scalar, Constant) and length.value is not None and scalar.number == length.value


def _is_share(scalar: Scalar, length: Dim) -> bool:
    """Whether an expression is one of so many elements."""
    scalar = bare(scalar)
    if isinstance(scalar, Apply) and scalar.function == "reciprocal":
        return _is_length(scalar.operands[0], length)
    return isinstance(scalar, Constant) and length.value is not None and (
        abs(float(scalar.number) * length.value - 1) <= EXACT)
