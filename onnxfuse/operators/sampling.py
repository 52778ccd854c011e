"""GridSample: a tensor at places that another tensor tells, between its elements.

    grid (N, P.., r), -1 to 1 ─▶ places along r axes ─▶ two neighbours along each, or the nearest ─▶ (N, C, P..)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod

from onnxfuse.graph.context import Type, TypeContext
from onnxfuse.graph.dims import Dim, dim, product
from onnxfuse.graph.model import Node
from onnxfuse.graph.sizes import Sizes
from onnxfuse.ir.context import LoweringContext, apply, declare, expand, like, reshape, size_of, test, wide
from onnxfuse.ir.scalars import DOUBLE, FLOAT, INT64, TYPES
from onnxfuse.ir.tensors import Map, Take, Tensor, scalar
from onnxfuse.operators.arithmetic import sizes_of
from onnxfuse.operators.operands import integer_attribute, is_computed, operand, result_shape
from onnxfuse.operators.pieces import cut
from onnxfuse.operators.record import MICROSOFT, PLAIN, VIEW, define, opaque

_TAPS = {"nearest": 1, "linear": 2, "bilinear": 2, "cubic": 4, "bicubic": 4}
"""Elements along an axis that one is made of, by its mode, as operator sets from 20 and before spell it."""

MOST_AXES = 3
"""Axes that a place lies between, at most: of more a kernel would read 16 elements and more for each."""

FARTHEST = 2.0**30
"""Elements from the first that a place counts as at most, so that it is an integer: it lies outside either way."""


def grid_sample_types(context: TypeContext) -> list[Type]:
    shape, grid = context.shape(0), context.shape(1)
    return [Type(context.dtype(), None if shape is None or grid is None else (*shape[:2], *grid[1:-1]))]


def grid_sample(node: Node, context: LoweringContext) -> Tensor:
    """As the runtime computes it: places in float32 at least, and an element past a border as the padding has it."""
    source, grid, result = operand(node, context, 0), operand(node, context, 1), result_shape(node, context)
    mode, padding = node.attributes.get("mode", "linear"), node.attributes.get("padding_mode", "zeros")
    axes = source.rank - 2
    if _TAPS.get(mode, 4) > 2 or padding not in ("zeros", *_PADDED):
        raise context.refuse("unsupported-mode", f"a GridSample in mode '{mode}', padded by '{padding}', has no kernel")
    if not 0 < axes <= MOST_AXES or grid.shape[-1] != axes:
        raise context.refuse("unsupported-mode", f"a GridSample along {axes} axes has no kernel")
    if not all(TYPES[each.dtype].is_floating for each in (source, grid)):
        raise context.refuse("unsupported-type", "a GridSample of what are no floats has no kernel")
    if is_computed(source):
        raise context.refuse(
            "computed-again", "what a GridSample reads would be computed again for each element that is made of it")
    sampled = _Sampled(source, grid, padding, bool(integer_attribute(node, "align_corners", 0)))
    if _TAPS[mode] == 1:
        made = sampled.element([apply("round", place) for place in sampled.places])
    else:
        made = sampled.between(())
    return reshape(declare(made, source.dtype), result)


class _Sampled:
    """Elements of a tensor at the places of a grid, all of them in a row."""

    def __init__(self, source: Tensor, grid: Tensor, padding: str, aligned: bool) -> None:
        self.padding, self.aligned = padding, aligned
        self.sizes = source.shape[2:]
        self.total, self.count = product(self.sizes), product(grid.shape[1:-1])
        self.batch, self.channels = source.shape[:2]
        self.image = wide(reshape(source, (self.batch, self.channels, self.total)))
        self.dtype = DOUBLE if source.dtype == DOUBLE else FLOAT
        axes = len(self.sizes)
        numbers = reshape(Map(self.dtype, grid.shape, "cast", (grid,)), (self.batch, self.count, dim(axes)))
        # A grid has the innermost axis first.
        own = (cut(numbers, 2, dim(axes - 1 - axis), dim(1)) for axis in range(axes))
        self.places = [self._place(reshape(each, (self.batch, dim(1), self.count)), size)
                       for each, size in zip(own, self.sizes, strict=True)]
        self.lows = [apply("floor", place) for place in self.places]
        self.shares = [apply("sub", place, low) for place, low in zip(self.places, self.lows, strict=True)]

    def _place(self, number: Tensor, size: Dim) -> Tensor:
        """Where along an axis a number from -1 to 1 is: between the centres of the first and the last element, or
        between their borders."""
        one, two, count = (scalar(1.0, self.dtype), scalar(2.0, self.dtype), size_of(size, self.dtype))
        if self.aligned:
            return apply("mul", apply("div", apply("add", number, one), two), apply("sub", count, one))
        return apply("div", apply("sub", apply("mul", apply("add", number, one), count), one), two)

    def between(self, taps: tuple[int, ...]) -> Tensor:
        """What lies between the elements around a place, of which that before or behind is chosen along some axes."""
        axis = len(taps)
        if axis == len(self.sizes):
            one = scalar(1.0, self.dtype)
            return self.element([apply("add", low, one) if tap else low
                                 for low, tap in zip(self.lows, taps, strict=True)])
        share, rest = self.shares[axis], apply("sub", scalar(1.0, self.dtype), self.shares[axis])
        return apply("add", apply("mul", self.between((*taps, 0)), rest), apply("mul", self.between((*taps, 1)), share))

    def element(self, places: Sequence[Tensor]) -> Tensor:
        """The element at whole numbers along each axis."""
        flat: Tensor | None = None
        inside: list[Tensor] = []
        for number, size in zip(places, self.sizes, strict=True):
            near = apply("at_most", apply("at_least", number, like(-FARTHEST, number)), like(FARTHEST, number))
            index: Tensor = Map(INT64, near.shape, "cast", (near,))
            if self.padding not in _PADDED:
                tests = test("ge", index, like(0, index)), test("lt", index, size_of(size, INT64))
                inside += tests
                index = apply("where", test("and", *tests), index, like(0, index))
            else:
                index = _PADDED[self.padding](index, size, self.aligned)
            flat = index if flat is None else apply("add", apply("mul", flat, size_of(size, INT64)), index)
        assert flat is not None
        shape = (self.batch, self.channels, self.count)
        taken = Take(self.image.dtype, shape, self.image, expand(flat, shape), 2)
        if not inside:
            return taken
        return apply("where", reduce(lambda one, other: test("and", one, other), inside), taken, like(0, taken))


def _at_border(index: Tensor, size: Dim, aligned: bool) -> Tensor:
    last = apply("sub", size_of(size, INT64), like(1, index))
    return apply("max", apply("min", index, last), like(0, index))


def _reflected(index: Tensor, size: Dim, aligned: bool) -> Tensor:
    """Back and forth between the first and the last element, each of which comes twice where borders reflect."""
    count, one = size_of(size, INT64), like(1, index)
    steps = apply("sub", count, one) if aligned else count
    whole = apply("max", apply("mul", steps, like(2, index)), one)  # of one element, or none, there is no other
    last = whole if aligned else apply("sub", whole, one)
    passed = apply("mod", index, whole)
    return apply("where", test("lt", passed, count), passed, apply("sub", last, passed))


_PADDED = {"border": _at_border, "reflection": _reflected}
"""Which element counts where a place lies past a border; padded by zeros, none does."""


def _sample_arithmetic(node: Node, sizes: Sizes) -> int | None:
    """Twice the output's elements times those that each is made of."""
    taps, after = _TAPS.get(node.attributes.get("mode", "linear")), sizes_of(node.outputs[0], sizes)
    if taps is None or after is None:
        return None
    return 0 if taps == 1 else 2 * prod(after) * taps ** (len(after) - 2)


define("GridSample", kind=VIEW, types=grid_sample_types, lowering=grid_sample, arithmetic=_sample_arithmetic, host=(),
       runtime=PLAIN)
opaque("GridSample", domain=MICROSOFT, types=grid_sample_types, host=(), random=False)
