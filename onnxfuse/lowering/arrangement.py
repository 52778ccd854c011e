"""How a reduction arranges the elements of its operand: which lie together in a result, and where.

A tensor's axes are kept or reduced; neighbours of the same sort count as one, axes of size one as none.  What is left
are *segments* by turns: a softmax over the last axis has (kept, reduced), one over the channels of an image (kept,
reduced, kept), the statistics of a batch norm (reduced, kept, reduced).  A *row* is what one result is computed from:
there are as many as kept places, and each has as many elements as there are reduced ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxfuse.graph.dims import Dim, dim, product
from onnxfuse.graph.model import Shape
from onnxfuse.lowering.index import Coordinates, IndexSpace


@dataclass(frozen=True)
class Arrangement:
    """``segments``: size, and whether it is reduced, outermost first."""

    segments: tuple[tuple[Dim, bool], ...]

    @property
    def count(self) -> Dim:
        """Number of rows."""
        return product([size for size, reduced in self.segments if not reduced])

    @property
    def length(self) -> Dim:
        """Elements of a row."""
        return product([size for size, reduced in self.segments if reduced])

    @property
    def inner(self) -> Dim:
        """Size of the innermost segment."""
        return self.segments[-1][0] if self.segments else dim(1)

    @property
    def across(self) -> bool:
        """Whether neighbours in memory are of different rows."""
        return len(self.segments) > 1 and not self.segments[-1][1]

    def place(self, row: Dim, element: Dim, space: IndexSpace) -> Dim:
        """Row-major place in the operand of an element of a row."""
        shape = tuple(size for size, _ in self.segments)
        coordinates = {
            sort: iter(space.delinear(index, tuple(size for size, reduced in self.segments if reduced is sort)))
            for sort, index in ((False, row), (True, element))
        }
        return space.linear(tuple(next(coordinates[reduced]) for _, reduced in self.segments), shape)

    def substitute(self, names: Mapping[str, Dim]) -> Arrangement:
        """The same over other symbols."""
        return Arrangement(tuple((size.substitute(names), reduced) for size, reduced in self.segments))

    def __str__(self) -> str:
        """As in "[32, (64), 3136]", reduced segments in parentheses."""
        return f"[{', '.join(f'({size})' if reduced else str(size) for size, reduced in self.segments)}]"


def coordinates(shape: Shape, axes: Sequence[int], row: Dim, element: Dim, space: IndexSpace) -> Coordinates:
    """Where, in a tensor of this shape that is reduced over ``axes``, an element of a row lies."""
    reduced = sorted(axes)
    kept = [axis for axis in range(len(shape)) if axis not in reduced]
    places: dict[int, Dim] = {}
    for some, index in ((kept, row), (reduced, element)):
        places |= zip(some, space.delinear(index, tuple(shape[axis] for axis in some)), strict=True)
    return tuple(places[axis] for axis in range(len(shape)))


def arrangement(shape: Shape, axes: Sequence[int]) -> Arrangement:
    """How a reduction over ``axes`` arranges a tensor of this shape."""
    segments: list[tuple[Dim, bool]] = []
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        if segments and segments[-1][1] is (axis in axes):
            segments[-1] = segments[-1][0] * size, segments[-1][1]
        else:
            segments.append((size, axis in axes))
    return Arrangement(tuple(segments))
