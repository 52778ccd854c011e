"""Group and instance norms behind a convolution: which channels and windows a mean is of, and what is left to compute
where the convolution's kernel finds means and squares of each column in a part of its rows.

A norm's rows are the windows of an image at some neighbouring channels.  The kernel tells of so many windows of one
channel their mean, and the sum of squares of differences from it; these are brought to the mean of all (Chan, Golub and
LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979).  So what follows reads the
convolution's results once, and not once more for their statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onnxfuse.graph.dims import Dim, dim, product
from onnxfuse.graph.model import Shape
from onnxfuse.ir.context import Unlowerable, apply, expand, mean_of_shares, reshape, total
from onnxfuse.ir.descent import above
from onnxfuse.ir.scalars import FLOAT
from onnxfuse.ir.substitution import substituted
from onnxfuse.ir.tensors import (
    Contract,
    Expand,
    Fill,
    Input,
    Map,
    Permute,
    Program,
    Reduce,
    Reshape,
    Size,
    Tensor,
    operands,
    postorder,
    scalar,
)
from onnxfuse.lowering.index import IndexSpace
from onnxfuse.lowering.pull import Load, Puller
from onnxfuse.schedules.layouts import reached_in_part
from onnxfuse.schedules.products.windows import SPATIAL, Windows
from onnxfuse.schedules.reductions.moments import Moments, squares_about_means
from onnxfuse.schedules.reductions.online import bare
from onnxfuse.schedules.reductions.reduction import natural_rows

WIDEST = 8
"""Elements of a vector of what follows."""

MOST_READ_AGAIN = 4 << 20
"""Means that are read once for each channel of a group."""


@dataclass(frozen=True)
class NormGroups:
    """Groups of channels of which a norm takes mean and squares.

    Attributes:
        total, squares: the reductions; shares: whether the first is of elements divided by how many they are.
        groups: of so many channels each; by_image: whether each image has its own.
        ordered: whether the windows of a channel come one after the other among what is reduced.
    """

    total: Reduce
    squares: Reduce
    shares: bool
    groups: int
    channels: int
    by_image: bool
    ordered: bool

    def divided(self, results: tuple[Tensor, ...], known: Input) -> KnownOfRows:
        """What is to be computed of what is known of means, a tensor like ``known``, so that no reduction is left."""
        ends = frontier(results, (self.total, self.squares))
        users = [user for user in postorder(results) if any(each in ends for each in operands(user))]
        # A vector of channels has those of several groups: what is known of these is better read as a vector too.
        spread = self.by_image and self.ordered and self.channels > 1 and self.channels % WIDEST != 0 and all(
            user.shape == self.total.operand.shape for user in users) and not any(each in results for each in ends)
        elements = product(known.shape).value
        if spread and elements is not None and elements * self.channels > MOST_READ_AGAIN:
            spread = False
        return KnownOfRows(self, tuple(ends), known.shape[0] if spread else None)

    def combined(self, means: Tensor, squares: Tensor, each: int, spread: Dim | None) -> dict[Tensor, Tensor]:
        """What stands for the reductions: computed of what is known of ``each`` so many windows, float32 tensors of
        axes image, part of its windows, and channel; of so many images where it is ``spread`` over channels."""
        found, apart = self._rows(means, spread), self._rows(squares, spread)
        inner = (found.rank - 1,)
        average = mean_of_shares(found, inner)
        difference = apply("sub", found, average)
        between = apply("mul", total("sum", apply("mul", difference, difference), inner), scalar(float(each), FLOAT))
        length = found.shape[-1].value or 1
        whole = average if self.shares else apply("mul", average, scalar(float(length * each), FLOAT))
        both = apply("add", total("sum", apart, inner), between)
        if spread is not None:
            return {self.total: whole, self.squares: both}
        return {self.total: reshape(whole, self.total.shape), self.squares: reshape(both, self.squares.shape)}

    def _rows(self, known: Tensor, spread: Dim | None) -> Tensor:
        """What is known of the windows and channels of a group, side by side; once for each of its channels where it is
        ``spread``."""
        images, parts, _ = known.shape
        split = reshape(known, (images, parts, dim(self.groups), dim(self.channels)))
        axes = (0, 2, 1, 3) if self.by_image else (2, 0, 1, 3)
        moved = Permute(FLOAT, tuple(split.shape[axis] for axis in axes), split, axes)
        rows = moved.shape[:2] if self.by_image else moved.shape[:1]
        length = product(moved.shape[len(rows):])
        if spread is None:
            return reshape(moved, (*rows, length))
        return expand(reshape(moved, (*rows, dim(1), length)), (*rows, dim(self.channels), length))


@dataclass(frozen=True)
class KnownOfRows:
    """What is computed of a norm's reductions alone, the tensors ``ends``, and read by the rest; ``images``: how many,
    where it is told of each of their channels, None where of each group."""

    groups: NormGroups
    ends: tuple[Tensor, ...]
    images: Dim | None

    def inputs(self, first: int) -> list[Input]:
        """As the rest reads them, the inputs from the ``first`` on."""
        shape = None if self.images is None else (self.images, dim(self.groups.groups * self.groups.channels))
        return [Input(each.dtype, each.shape if shape is None else shape, first + place)
                for place, each in enumerate(self.ends)]

    def outputs(self, means: Tensor, squares: Tensor, each: int) -> tuple[Tensor, ...]:
        """Computed of what is known of ``each`` so many windows."""
        instead = self.groups.combined(means, squares, each, self.images)
        if self.images is None:
            return substituted(self.ends, instead)
        rows = (self.images, dim(self.groups.groups), dim(self.groups.channels), dim(1))
        found = (_over(end, rows, instead) for end in self.ends)
        return tuple(reshape(each, (self.images, rows[1] * rows[2])) for each in found)

    def instead(self, inputs: Sequence[Input]) -> dict[Tensor, Tensor]:
        """What stands for them in what follows."""
        return dict(zip(self.ends, inputs if self.images is None else map(self._read, inputs), strict=True))

    def _read(self, known: Input) -> Tensor:
        """What is known of channels, for each element."""
        groups, rows = self.groups, (known.shape[0], dim(self.groups.groups), dim(self.groups.channels))
        shape = groups.total.operand.shape
        windows = product(shape).divide(product(rows))
        assert windows is not None
        return reshape(expand(reshape(known, (*rows, dim(1))), (*rows, windows)), shape)


def _over(tensor: Tensor, rows: Shape, instead: Mapping[Tensor, Tensor]) -> Tensor:
    """What is computed element by element of rows' numbers, where there are other ones of those, and other rows."""
    if tensor in instead:
        return instead[tensor]
    if isinstance(tensor, Map):
        below = tuple(_over(each, rows, instead) for each in tensor.operands)
        shape = rows if any(each.shape == rows for each in below) else tensor.shape
        return replace(tensor, shape=shape, operands=below)
    if isinstance(tensor, Reshape | Permute | Expand):  # of one number a row, or of a single one
        return _over(tensor.operand, rows, instead)
    return tensor


def norm_groups(
    program: Program, between: Tensor, contract: Contract, windows: Windows, swapped: bool
) -> NormGroups | None:
    """The norm that a region takes of ``between``, which a convolution leads to; None where what it reduces is anything
    else.  ``swapped``: whether the convolution's windows are its columns."""
    reductions = [each for each in above(program, between) if isinstance(each, Reduce)]
    found = _moments(program, between, reductions)
    if found is None:
        return None
    moments, sums, squares = found
    space = IndexSpace()
    channel, image = _places(contract, windows, swapped, space)
    columns = contract.rows if swapped else contract.columns
    place = tuple(channel if axis in columns else image[axis] for axis in range(contract.rank))
    at = reached_in_part(program, space, {contract: place}).get(id(sums.operand))
    size = contract.shape[columns[0]].value
    if at is None or at.conditions or size is None:
        return None
    kept = [axis for axis in range(sums.rank) if axis not in sums.axes]
    group = space.linear(tuple(at.at[axis] for axis in kept), tuple(sums.shape[axis] for axis in kept))
    count = product(sums.shape)
    own = image[(contract.columns if swapped else contract.rows)[0]]
    whole = sums.operand.shape
    within = space.linear(tuple(at.at[axis] for axis in sums.axes), tuple(whole[axis] for axis in sums.axes))
    for groups, by_image in ((count.divide(windows.images), True), (count, False)):
        number = None if groups is None else groups.value
        if number and size % number == 0:
            each, member = space.divmod(channel, dim(size // number))
            places = product(whole).divide(count * (size // number))
            ordered = places is not None and space.divmod(within, places)[0] == member
            if group == (own * number + each if by_image else each):
                return NormGroups(sums, squares, moments.shares, number, size // number, by_image, ordered)
    return None


def _moments(program: Program, between: Tensor, reductions: list[Reduce]) -> tuple[Moments, Reduce, Reduce] | None:
    """A sum and a sum of squares about the mean, where the reductions are these of a tensor as it is."""
    if len(reductions) != 2 or any(each.dtype != FLOAT for each in reductions):
        return None
    stand_in = Input(between.dtype, between.shape, len(program.inputs))
    space, rows = natural_rows(reductions[0])
    assert rows.row is not None
    puller = Puller(space, rows)
    try:
        pulled = [puller.element(each, space.delinear(rows.row, each.shape))
                  for each in substituted(tuple(reductions), {between: stand_in})]
    except Unlowerable:  # of other rows, or of what is no tensor of the region
        return None
    by_scalar = dict(zip(pulled, reductions, strict=True))
    found = squares_about_means(by_scalar, rows.arrangement.length)  # type: ignore[arg-type]
    for squares, moments in found.items():
        element = bare(moments.element, casts=True)
        if moments.total in by_scalar and isinstance(element, Load) and element.input == stand_in.index:
            return moments, by_scalar[moments.total], by_scalar[squares]
    return None


def _places(contract: Contract, windows: Windows, swapped: bool, space: IndexSpace) -> tuple[Dim, dict[int, Dim]]:
    """The channel of a convolution's result, and by its axes the places of the windows, each a loop of its own."""
    down, across = (contract.columns, contract.rows) if swapped else (contract.rows, contract.columns)
    names = ("image", *reversed(SPATIAL[:len(down) - 1]))
    image = {axis: dim(0) if contract.shape[axis] == 1 else space.base(f"@{name}", contract.shape[axis])
             for axis, name in zip(down, names, strict=True)}
    return space.base("@n", product([contract.shape[axis] for axis in across])), image


def frontier(roots: tuple[Tensor, ...], reductions: tuple[Tensor, ...]) -> list[Tensor]:
    """What is computed of reductions and numbers alone and read by something else, or is a root."""
    alone: dict[int, bool | None] = {id(each): True for each in reductions}
    found: dict[Tensor, None] = {}

    def follows(tensor: Tensor) -> bool | None:
        """Whether it is such; None of a number, which either may have."""
        if id(tensor) not in alone:
            below = [follows(operand) for operand in operands(tensor)]
            number = isinstance(tensor, Fill | Size) or (bool(below) and all(each is None for each in below))
            alone[id(tensor)] = None if number else bool(below) and all(each is not False for each in below)
            if alone[id(tensor)] is False:
                found.update((operand, None) for operand, each in zip(operands(tensor), below, strict=True) if each)
        return alone[id(tensor)]

    for root in roots:
        if follows(root):
            found[root] = None
    return list(found)
