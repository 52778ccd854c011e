"""Building contractions and windows in one form, so that equal work is equal, and what they cost.

A contraction is written as Einstein sums are: every axis of the operands and of the result has a label, and labels that
the result lacks are summed over.  Of all ways to say the same one is built: an operand that is a transposed tensor is
that tensor, its axes mapped; an axis of size one that is broadcast is no axis; loops that are summed over stand in the
order that the left operand has them in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onnxfuse.graph.dims import Dim, broadcast, dim, minimum, product
from onnxfuse.ir.context import accumulate, declare, expand, reshape, total
from onnxfuse.ir.scalars import FLOAT, INT32, TYPES
from onnxfuse.ir.tensors import (
    Contract,
    Input,
    Map,
    Permute,
    Pool,
    Reduce,
    Scan,
    Slice,
    Take,
    Tensor,
    Window,
    operands,
    postorder,
)

Labels = Sequence[str]
"""Names of axes, one each; a text is one of single letters."""


def sum_type(dtype: int) -> int:
    """The type that products of operands of a type are summed in: float32 for 16-bit floats, int32 for 8-bit integers,
    else their own."""
    kind = TYPES[dtype]
    if kind.is_floating:
        return FLOAT if kind.is_narrow else dtype
    return INT32 if kind.size == 1 else dtype


def contract(left: tuple[Tensor, Labels], right: tuple[Tensor, Labels], result: Labels) -> Contract:
    """The sum of products over all labels that the result lacks, in the type of such sums (``sum_type``).

    Sizes of a label of the result are broadcast where they differ.  A label that is summed over and that one operand
    lacks is summed over before.

    Raises:
        ValueError: labels do not fit the operands' ranks, or sizes do not fit one another.
    """
    one, other = _broadcast(_Labelled(*left).plain(), _Labelled(*right).plain(), result)
    one, other = one.without_lone({*result, *other.labels}), other.without_lone({*result, *one.labels})
    sizes = other.sizes | one.sizes
    inner = [label for label in one.labels if label not in result]
    dtype, beside = (sum_type(operand.tensor.dtype) for operand in (one, other))
    if dtype != beside:
        raise ValueError(f"a product of {TYPES[one.tensor.dtype].name} and {TYPES[other.tensor.dtype].name}")
    loops = {label: loop for loop, label in enumerate((*result, *inner))}
    if len(loops) < len(result) + len(inner) or not sizes.keys() <= loops.keys() or not set(result) <= sizes.keys():
        raise ValueError(f"the labels {list(left[1])} and {list(right[1])} do not give {list(result)}")
    return Contract(
        dtype, tuple(sizes[label] for label in result), (one.tensor, other.tensor),
        (tuple(loops[label] for label in one.labels), tuple(loops[label] for label in other.labels)),
        tuple(sizes[label] for label in inner),
    )


@dataclass(frozen=True)
class _Labelled:
    """A tensor and the labels of its axes."""

    tensor: Tensor
    labels: Labels

    def __post_init__(self) -> None:
        if len(self.labels) != self.tensor.rank or len(set(self.labels)) < len(self.labels):
            raise ValueError(f"the labels {list(self.labels)} do not fit a tensor of {self.tensor.rank} axes")

    @property
    def sizes(self) -> dict[str, Dim]:
        """Sizes by label."""
        return dict(zip(self.labels, self.tensor.shape, strict=True))

    def without(self, gone: set[str]) -> _Labelled:
        """Axes of size one left out."""
        kept = {label: size for label, size in self.sizes.items() if label not in gone}
        return _Labelled(reshape(self.tensor, tuple(kept.values())), tuple(kept))

    def without_lone(self, known: set[str]) -> _Labelled:
        """Summed over the axes of other labels, in the type of sums; declared in its own again."""
        lone = {label for label in self.labels if label not in known}
        if not lone:
            return self
        axes = tuple(axis for axis, label in enumerate(self.labels) if label in lone)
        summed = declare(total("sum", accumulate(self.tensor), axes), self.tensor.dtype)
        return _Labelled(summed, self.labels).without(lone)

    def plain(self) -> _Labelled:
        """What is transposed, as it was before."""
        tensor, labels = transposed_last(self.tensor), tuple(self.labels)
        while isinstance(tensor, Permute):
            labels = tuple(labels[tensor.axes.index(axis)] for axis in range(tensor.rank))
            tensor = transposed_last(tensor.operand)
        return _Labelled(tensor, labels)


def _broadcast(left: _Labelled, right: _Labelled, result: Labels) -> tuple[_Labelled, _Labelled]:
    """Both operands with the same sizes along the labels of the result that both have, or without those that are one
    in the other."""
    shared = [label for label in left.labels if label in right.labels and label in result]
    wide = {label: broadcast(left.sizes[label], right.sizes[label]) for label in shared}
    found = []
    for operand in (left, right):
        gone = {label for label in shared if operand.sizes[label] == 1 and wide[label] != 1}
        operand = operand.without(gone)
        shape = tuple(wide.get(label, size) for label, size in operand.sizes.items())
        if any(None not in (old.value, new.value) and old != new
               for old, new in zip(operand.tensor.shape, shape, strict=True)):
            raise ValueError(f"the sizes {list(map(str, operand.tensor.shape))} do not broadcast to "
                             f"{list(map(str, shape))}")
        found.append(_Labelled(expand(operand.tensor, shape), operand.labels))
    return found[0], found[1]


@dataclass(frozen=True)
class Slide:
    """How a window slides along an axis: ``count`` places of ``size`` elements each, the first of them beginning at
    ``start``, which is below zero where the axis is padded."""

    count: Dim
    size: Dim
    start: Dim
    stride: int = 1
    dilation: int = 1

    def is_plain(self, extent: Dim) -> bool:
        """Whether each place is one element of an axis of this size, and there is one: no window is needed."""
        last = (self.count - 1) * self.stride
        within = (extent - 1 - last).non_negative() or self.count == (extent - 1) // self.stride + 1
        return self.size == 1 and self.start == 0 and within


def window(tensor: Tensor, slides: Mapping[int, Slide]) -> Tensor:
    """The tensor with windows along these axes, each of which becomes two, the place and the place in it.

    An axis along which each place is one element stays one axis.  Of a transposed tensor it is a transposed window.
    """
    tensor = transposed_last(tensor)
    if isinstance(tensor, Permute):
        plain = tensor.operand
        parts = {tensor.axes[axis]: 1 if slide.is_plain(tensor.shape[axis]) else 2 for axis, slide in slides.items()}
        made = window(plain, {tensor.axes[axis]: slide for axis, slide in slides.items()})
        return _permuted_back(tensor, made, [parts.get(axis, 1) for axis in range(plain.rank)])
    steps = {axis: slide for axis, slide in slides.items() if slide.is_plain(tensor.shape[axis])}
    if any(slide.stride != 1 or slide.count != tensor.shape[axis] for axis, slide in steps.items()):
        shape = tuple(steps[axis].count if axis in steps else size for axis, size in enumerate(tensor.shape))
        strides = tuple(steps[axis].stride if axis in steps else 1 for axis in range(tensor.rank))
        tensor = Slice(tensor.dtype, shape, tensor, (dim(0),) * tensor.rank, strides)
    sliding = {axis: slide for axis, slide in sorted(slides.items()) if axis not in steps}
    if not sliding:
        return tensor
    sizes = [(sliding[axis].count, sliding[axis].size) if axis in sliding else (size,)
             for axis, size in enumerate(tensor.shape)]
    return Window(
        tensor.dtype, tuple(size for part in sizes for size in part), tensor, tuple(sliding),
        tuple(slide.start for slide in sliding.values()), tuple(slide.stride for slide in sliding.values()),
        tuple(slide.dilation for slide in sliding.values()),
    )


def transposed_last(tensor: Tensor) -> Tensor:
    """What is computed of a transposed tensor's elements, each by itself, as that transposed; any other as it is."""
    maps: list[tuple[Map, int]] = []
    inner = tensor
    while isinstance(inner, Map):
        whole = [place for place, operand in enumerate(inner.operands) if operand.shape == inner.shape]
        if len(whole) != 1 or any(sum(size != 1 for size in operand.shape) > 1
                                  for place, operand in enumerate(inner.operands) if place not in whole):
            return tensor
        maps.append((inner, whole[0]))
        inner = inner.operands[whole[0]]
    if not maps or not isinstance(inner, Permute):
        return tensor
    axes, made = inner.axes, inner.operand
    for each, whole_place in reversed(maps):
        made = replace(each, shape=made.shape, operands=tuple(
            made if place == whole_place else _before(axes, operand) for place, operand in enumerate(each.operands)))
    return Permute(tensor.dtype, tensor.shape, made, axes)


def _before(axes: Sequence[int], parameter: Tensor) -> Tensor:
    """What is broadcast to a transposed tensor, along one axis at most, as it is to that before."""
    sizes = (*(dim(1),) * (len(axes) - parameter.rank), *parameter.shape)
    return parameter if not parameter.rank else reshape(parameter, tuple(
        sizes[axes.index(axis)] for axis in range(len(axes))))


def parted(tensor: Tensor, axis: int, outer: Dim, inner: Dim) -> Tensor:
    """The tensor with an axis as two; of a transposed tensor, the transposed one with an axis as two."""
    tensor = transposed_last(tensor)
    if isinstance(tensor, Permute):
        place = tensor.axes[axis]
        counts = [1 + (each == place) for each in range(tensor.rank)]
        return _permuted_back(tensor, parted(tensor.operand, place, outer, inner), counts)
    return reshape(tensor, (*tensor.shape[:axis], outer, inner, *tensor.shape[axis + 1:]))


def _permuted_back(permuted: Permute, made: Tensor, counts: Sequence[int]) -> Permute:
    """What was made of a transposed tensor's operand, transposed, where each of its axes became so many."""
    firsts = [sum(counts[:axis]) for axis in range(len(counts))]
    axes = tuple(firsts[axis] + part for axis in permuted.axes for part in range(counts[axis]))
    return Permute(made.dtype, tuple(made.shape[axis] for axis in axes), made, axes)


def laid_anew(contract: Contract, tensor: Tensor, order: tuple[int, ...], stand_in: Tensor) -> Contract | None:
    """A contraction of a tensor, or of windows over it, read from one that has the same elements, its axes in another
    order; sums are taken in that order.  None where no operand is such, or both are."""
    sides = [side for side, operand in enumerate(contract.operands)
             if tensor in (operand, operand.operand if isinstance(operand, Window) else None)]
    if len(sides) != 1:
        return None
    (side,) = sides
    old, loops = contract.operands[side], contract.axes[side]
    view = old if isinstance(old, Window) else Window(old.dtype, old.shape, old, (), (), (), ())
    slides = {axis: view.axes.index(axis) for axis in order if axis in view.axes}
    kept = [place for axis in order for place in range(view.place_of(axis), view.place_of(axis) + 1 + (axis in slides))]
    made: Tensor = stand_in
    if slides:
        made = Window(
            old.dtype, tuple(old.shape[place] for place in kept), stand_in,
            tuple(place for place, axis in enumerate(order) if axis in slides),
            tuple(view.starts[number] for number in slides.values()),
            tuple(view.strides[number] for number in slides.values()),
            tuple(view.dilations[number] for number in slides.values()), view.outside)
    anew = tuple(loops[place] for place in kept)
    inner = [loop for loop in anew if loop >= contract.rank]
    moved = {loop: contract.rank + place for place, loop in enumerate(inner)}
    pairs = [(made, anew), (contract.operands[1 - side], contract.axes[1 - side])]
    (left, right) = pairs if side == 0 else reversed(pairs)
    axes = tuple(tuple(moved.get(loop, loop) for loop in each) for _, each in (left, right))
    return replace(contract, operands=(left[0], right[0]), axes=(axes[0], axes[1]),
                   summed=tuple(contract.loops[loop] for loop in inner))


def operations(tensor: Contract) -> Dim:
    """Floating-point or integer operations: a product and an addition for each place of all loops."""
    return product(tensor.loops) * 2


def traffic(tensor: Contract) -> Dim:
    """The fewest bytes that a kernel of this contraction alone must move: what it reads of each input once, however
    often a window or a batch reads it, and its result in its own type."""
    read: dict[Input, Dim] = {}
    for operand in tensor.operands:
        _merge(read, _read(operand))
    moved = product(tensor.shape) * TYPES[tensor.dtype].size
    return sum((count * TYPES[source.dtype].size for source, count in read.items()), moved)


@dataclass(frozen=True)
class _Read:
    """How many elements of each input all elements of a tensor take, at most; ``single`` where each of them takes one
    element of one input."""

    counts: dict[Input, Dim]
    single: bool = True


def _read(tensor: Tensor) -> dict[Input, Dim]:
    """At most how many elements of each input are read for all elements of a tensor."""
    found: dict[int, _Read] = {}
    for each in postorder((tensor,)):
        counts: dict[Input, Dim] = {each: product(each.shape)} if isinstance(each, Input) else {}
        below = [read for operand in operands(each) if (read := found[id(operand)]).counts]
        for read in below:
            _merge(counts, read.counts)
        single = all(read.single for read in below)
        if isinstance(each, Slice | Take) and single:
            counts = {source: minimum(count, product(each.shape)) for source, count in counts.items()}
        found[id(each)] = _Read(counts, single and len(below) < 2 and not isinstance(
            each, Reduce | Scan | Pool | Contract))
    return found[id(tensor)].counts


def _merge(into: dict[Input, Dim], more: dict[Input, Dim]) -> None:
    """Add counts, none of them past all elements of its input."""
    for source, count in more.items():
        into[source] = minimum(into.get(source, dim(0)) + count, product(source.shape))
