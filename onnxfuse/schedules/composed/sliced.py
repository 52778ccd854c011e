"""Results that are put side by side, each by its own kernel where it belongs: an inception block's branches.

    image ─┬─ convolution ─ bias, activation ─┐
           ├─ convolution ─ bias, activation ─┼─ side by side ─▶
           ├─ windows' maximum or mean ───────┤
    other ─┴──────────────────────────────────┘

The kernels are those that the branches have as regions of their own, launches of one node, and each writes its part of
the result.  Of products, and of windows, each has one; what is only computed element by element, or passed on as it is,
is copied, neighbours by one pointwise launch together.  So nothing is copied that has a kernel anyway.  One product may
come before others: some of its columns are parts of the result, others what the products behind it read, which lies in
scratch memory.

    image ─ convolution ─┬─ bias, activation ──────────────────────────────────────────────┐
                         ├─ bias, activation ─ (scratch) ─ convolution ─ bias, activation ─┼─ side by side ─▶
                         └─ bias, activation ─ (scratch) ─ convolution ─ bias, activation ─┘
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product as product_of

from onnxfuse.graph.dims import Dim, dim, minimum, product
from onnxfuse.ir.contractions import laid_anew
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.substitution import substituted
from onnxfuse.ir.tensors import (
    Concat,
    Contract,
    Input,
    Map,
    Part,
    Permute,
    Pool,
    Program,
    Reduce,
    Scan,
    Slice,
    Tensor,
    postorder,
)
from onnxfuse.lowering.launch import Variant
from onnxfuse.lowering.lower import Lowered
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.composed.in_parts import InParts, Launches, address_of, inputs_of, joined
from onnxfuse.schedules.kernel import Kernel, Launched, Pace, contractions
from onnxfuse.schedules.pointwise import Pointwise, read
from onnxfuse.schedules.pooling import Pooling
from onnxfuse.schedules.products.in_two import ProductDivided
from onnxfuse.schedules.products.product import Product
from onnxfuse.schedules.schedule import Expected, Request, Schedule

NAME = "sliced"

MOST_PARTS = 8
"""Results side by side that have kernels of their own, and products."""

_PRODUCT, _POOLING, _POINTWISE = Product(), Pooling(), Pointwise()


class Sliced(ProductDivided):
    """Products that write parts of one result, and what stands beside them."""

    name = NAME
    settings = "{parts} parts"
    products = MOST_PARTS

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """A kernel each; what is copied reads again what others read too."""
        found = _found(Request(lowered, sizes=sizes))
        return None if found is None else Expected(found.launches, found.read_twice, apart=True)

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of a region of which products' results are put beside others."""
        found = _found(request)
        return None if found is None else found.kernel()


@dataclass(frozen=True)
class _Launch:
    """A kernel of one launch, of a schedule: its functions' namespace, what it computes, and where it reads and writes
    in the whole, by what it calls that."""

    schedule: Schedule
    space: str
    program: Program
    names: Mapping[str, str]


@dataclass(frozen=True)
class _Sliced(InParts):
    """A region as ``parts`` of its result, each with the schedule that has a kernel of it, or some of one product that
    comes first.

    Attributes:
        first: places of the parts that this one gives; none where there is no such.
        between: by the place of a part that is computed of it by another product, what that reads, and how it lies.
    """

    parts: tuple[tuple[Schedule, Part], ...]
    first: tuple[int, ...] = ()
    between: Mapping[int, Permute] = field(default_factory=dict)

    @property
    def own(self) -> list[int]:
        """Places of the parts that have a launch each."""
        return [place for place in range(len(self.parts)) if place not in self.first]

    @property
    def launches(self) -> int:
        """How many there are."""
        return len(self.own) + bool(self.first or self.between)

    def kernel(self) -> Kernel | Refusal:
        """All kernels' launches one behind the other."""
        parts, kernels = Launches(self.request, list(map(self.bytes_of, self.between.values()))), list[Kernel]()
        launches = list(self._launched())
        for launch in launches:
            made = self.made((launch.schedule,), launch.program)
            if isinstance(made, Refusal):
                return made
            kernels.append(made)
            parts.add(made, launch.space, launch.names)
        multiplies = [launch.schedule is _PRODUCT for launch in launches]
        return parts.kernel(NAME, _variants(parts.ways, multiplies), pace=self._pace(kernels, multiplies))

    def _launched(self) -> Iterator[_Launch]:
        """Each launch, that of the product that comes first before all others."""
        laid = {place: f"t{number}" for number, place in enumerate(self.between)}
        ahead = (*self.between.values(), *(self.parts[place][1] for place in self.first))
        if ahead:
            targets = (*laid.values(), *("o0" for _ in self.first))
            yield _Launch(_PRODUCT, "of_first", replace(self.program, outputs=ahead), _written(targets))
        for place in self.own:
            (schedule, part), space = self.parts[place], f"of_part{place}"
            if place in laid:
                names = self.reads(self._stand_in(place), laid[place])
                yield _Launch(schedule, space, self._behind(place), names)
            else:
                yield _Launch(schedule, space, self._alone(part), {})

    def _alone(self, part: Part) -> Program:
        return replace(self.program, outputs=(part,))

    def _stand_in(self, place: int) -> Input:
        """What lies between, as the product behind it reads it."""
        laid = self.between[place]
        return Input(laid.dtype, laid.shape, len(self.program.inputs))

    def _behind(self, place: int) -> Program:
        """A part as it is computed of that."""
        _, part = self.parts[place]
        laid, stand_in = self.between[place], self._stand_in(place)
        back = tuple(laid.axes.index(axis) for axis in range(laid.rank))
        instead: dict[Tensor, Tensor] = {laid.operand: Permute(laid.dtype, laid.operand.shape, stand_in, back)}
        for each in _products(part):
            if (anew := laid_anew(each, laid.operand, laid.axes, stand_in)) is not None:
                instead[each] = anew
        return Program((*self.program.inputs, stand_in), substituted((part,), instead), self.program.operators)

    # ---- What it takes. ----

    @cached_property
    def _copies(self) -> tuple[tuple[Schedule, Part, Sequence[Dim]], ...]:
        """Parts that are no products', with the bytes that they read of each input, by symbols of the region's own."""
        return tuple((schedule, part, read(self.part(self._alone(part)).lowered))
                     for schedule, part in self.parts if schedule is not _PRODUCT)

    @property
    def read_twice(self) -> Dim:
        """Bytes, over the graph's symbols, that are read more than once: what products read too, from which all have it
        at much the same time, counts once for these, and once for each of the others."""
        multiplied = {each.index for schedule, part in self.parts if schedule is _PRODUCT
                      for each in inputs_of((part,))}
        twice = dim(0)
        for place, tensor in enumerate(self.program.inputs):
            whole = product(tensor.shape) * TYPES[tensor.dtype].size
            copied = [reads[place] for _, _, reads in self._copies if reads]
            total = sum(copied, whole if place in multiplied else dim(0))
            twice = twice + total - minimum(total, whole)
        return twice.substitute(self.request.lowered.binding.names)

    def _pace(self, kernels: Sequence[Kernel], multiplies: Sequence[bool]) -> Pace | None:
        """Each launch's, where all are known."""
        own = [each.pace for each, multiplied in zip(kernels, multiplies, strict=True) if multiplied]
        paces = tuple(each for each in (*own, *map(self._copied, self._copies)) if each is not None)
        return Pace(0, 0, 0, parts=paces) if len(paces) == len(kernels) else None

    def _copied(self, copy: tuple[Schedule, Part, Sequence[Dim]]) -> Pace | None:
        """What the time of a part that is no product's follows from; None where a size is left open."""
        schedule, part, reads = copy
        written = product(part.operand.shape)
        taps = sum(each.taps for each in postorder((part,)) if isinstance(each, Pool))
        moved, count = (self.request.lowered.binding.at(each, self.request.sizes) for each in (
            sum(reads, written * TYPES[part.dtype].size), written))
        if moved is None or count is None:
            return None
        arithmetic = round(count * taps / schedule.arithmetic)
        return Pace(0, 0, 0, launches=(Launched(moved, schedule.efficiency, arithmetic),))


def _written(targets: tuple[str, ...]) -> dict[str, str]:
    """Names by which a kernel writes its results to other places."""
    return {f"o{number}{part}": address_of(target) if part else target
            for number, target in enumerate(targets) for part in ("", ".addr")}


def _variants(ways: Sequence[Sequence[Variant]], multiplies: Sequence[bool]) -> list[Variant]:
    """Every way of all products with every way of all copies: where sizes or addresses admit no vectors to one kind,
    the other has its own all the same.  The last of each runs anything."""
    pairs = list(zip(multiplies, range(len(ways)), strict=True))
    multiplied, copied = (_in_step([ways[place] for own, place in pairs if own is kind]) for kind in (True, False))
    order = [place for kind in (True, False) for own, place in pairs if own is kind]
    together = [*product_of(multiplied, copied[:-1] or copied), (multiplied[-1], copied[-1])]
    found = (dict(zip(order, (*one, *other), strict=True)) for one, other in dict.fromkeys(together))
    return [joined(*(each[place] for place in range(len(ways)))) for each in found]


def _in_step(ways: Sequence[Sequence[Variant]]) -> list[tuple[Variant, ...]]:
    """The first ways of several kernels together, then the second ones, and so on; of one that has no more the last."""
    steps = max(map(len, ways), default=1)
    return [tuple(way[min(step, len(way) - 1)] for way in ways) for step in range(steps)]


# ---- What the parts are. ----


def _found(request: Request) -> _Sliced | None:
    """A region whose one result is several tensors side by side, some of a product each, or of one that several have in
    common, and none of a reduction; None of any other."""
    program, products = request.lowered.program, contractions(request.lowered)
    if len(program.outputs) != 1 or not 0 < len(products) <= MOST_PARTS:
        return None
    back: list[Permute] = []
    tensor = program.outputs[0]
    while isinstance(tensor, Permute):
        back.append(tensor)
        tensor = tensor.operand
    if not isinstance(tensor, Concat) or len(tensor.operands) < 2:
        return None
    groups = _groups(tensor)
    if groups is None or len(groups) > MOST_PARTS:
        return None
    parts, start = [], dim(0)
    for kind, operands in groups:
        size = sum((operand.shape[tensor.axis] for operand in operands), dim(0))
        parts.append((kind, _laid(_joined(operands, tensor, size), tensor, start, back)))
        start = start + size
    found = _Sliced(request, tuple(parts))
    counts = [len(_products(part)) for kind, part in parts if kind is _PRODUCT]
    # As many as there are: else one stands in two parts, and would be computed for each.
    if set(counts) == {1} and len(counts) == len(products):
        return found
    return _behind_one(found, tuple(operands[0] for _, operands in groups), _order(back, tensor.rank))


def _groups(joins: Concat) -> list[tuple[Schedule, list[Tensor]]] | None:
    """What is put side by side with what has a kernel of it, neighbours that are copied together; None where that is
    not known."""
    groups: list[tuple[Schedule, list[Tensor]]] = []
    for operand in joins.operands:
        kind = _kind(operand)
        if kind is None:
            return None
        if groups and kind is groups[-1][0] is _POINTWISE:
            groups[-1][1].append(operand)
        else:
            groups.append((kind, [operand]))
    return groups


def _kind(operand: Tensor) -> Schedule | None:
    """What has a kernel of a tensor that is put beside others; None where that is not known."""
    inside = postorder((operand,))
    if any(isinstance(each, Reduce | Scan) for each in inside):
        return None
    windows = any(isinstance(each, Pool) for each in inside)
    if _products(operand):
        return None if windows else _PRODUCT
    return _POOLING if windows else _POINTWISE


def _joined(operands: Sequence[Tensor], whole: Concat, size: Dim) -> Tensor:
    """Neighbours as one tensor."""
    if len(operands) == 1:
        return operands[0]
    shape = tuple(size if axis == whole.axis else each for axis, each in enumerate(whole.shape))
    return Concat(whole.dtype, shape, tuple(operands), whole.axis)


def _laid(operand: Tensor, whole: Concat, start: Dim, back: Sequence[Permute]) -> Part:
    """A tensor as a part of what is put side by side, which the region lays out another way: as it lies there."""
    axis, shape = whole.axis, whole.shape
    for each in reversed(back):
        operand = Permute(operand.dtype, tuple(operand.shape[axis] for axis in each.axes), operand, each.axes)
        axis, shape = each.axes.index(axis), each.shape
    return Part(whole.dtype, shape, operand, axis, start)


def _order(back: Sequence[Permute], rank: int) -> tuple[int, ...]:
    """In which order the axes of what is put side by side lie in the result."""
    order = tuple(range(rank))
    for moved in reversed(back):
        order = tuple(order[axis] for axis in moved.axes)
    return order


def _behind_one(found: _Sliced, operands: tuple[Tensor, ...], order: tuple[int, ...]) -> _Sliced | None:
    """Parts of which some are computed of one product that comes first, what lies between with its axes in an
    ``order``; None where there is no such, or more than one, or all are its."""
    products = [_products(operand) for operand in operands]
    common = {one for each in products for one in each if sum(one in others for others in products) > 1}
    if len(common) != 1:
        return None
    (one,) = common
    first, between = [], dict[int, Permute]()
    for place, (operand, own) in enumerate(zip(operands, products, strict=True)):
        if own == [one]:
            first.append(place)
        elif one in own:
            cut = _cut(operand, one)
            if len(own) != 2 or cut is None or cut.rank != len(order):
                return None
            between[place] = Permute(cut.dtype, tuple(cut.shape[axis] for axis in order), cut, order)
        elif len(own) > 1:
            return None
    return None if len(first) == len(operands) else replace(found, first=tuple(first), between=between)


def _cut(operand: Tensor, one: Contract) -> Tensor | None:
    """What a part reads of the product that comes first: the last that is computed element by element, by which alone
    it has anything of that."""

    behind = [each for each in postorder((operand,)) if isinstance(each, Map | Slice) and _products(each) == [one]]
    return next((each for each in reversed(behind) if one not in postorder((operand,), without=each)), None)


def _products(tensor: Tensor) -> list[Contract]:
    """The products that a tensor is computed of."""
    return [each for each in postorder((tensor,)) if isinstance(each, Contract)]
