"""Results that are put side by side, each by its own kernel where it belongs: an inception block's branches.

    image ─┬─ convolution ─ bias, activation ─┐
           ├─ convolution ─ bias, activation ─┼─ side by side ─▶
           ├─ windows' maximum or mean ───────┤
    other ─┴──────────────────────────────────┘

The kernels are those that the branches have as regions of their own, launches of one node, and each writes its part of
the result.  Of products, and of windows, each has one; what is only computed element by element, or passed on as it is,
is copied, neighbours by one pointwise launch together.  So nothing is copied that has a kernel anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product as product_of

from onnxfuse.graph.dims import Dim, dim, minimum, product
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.tensors import Concat, Contract, Part, Permute, Pool, Program, Reduce, Scan, Tensor, postorder
from onnxfuse.lowering.launch import Variant
from onnxfuse.lowering.lower import Lowered
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.in_parts import InParts, Launches, inputs_of, joined
from onnxfuse.schedules.in_two import ProductDivided
from onnxfuse.schedules.kernel import Kernel, Launched, Pace, contractions
from onnxfuse.schedules.pointwise import Pointwise, read
from onnxfuse.schedules.pooling import Pooling
from onnxfuse.schedules.product import Product
from onnxfuse.schedules.schedule import Expected, Request, Schedule

NAME = "sliced"

MOST_PARTS = 8
"""Results side by side that have kernels of their own."""

_PRODUCT, _POOLING, _POINTWISE = Product(), Pooling(), Pointwise()


class Sliced(ProductDivided):
    """Products that write parts of one result, and what stands beside them."""

    name = NAME
    settings = "{parts} parts"
    products = MOST_PARTS

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """A kernel each; what is copied reads again what others read too."""
        found = _found(Request(lowered, sizes=sizes))
        return None if found is None else Expected(len(found.parts), found.read_twice, apart=True)

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of a region of which products' results are put beside others."""
        found = _found(request)
        return None if found is None else found.kernel()


@dataclass(frozen=True)
class _Sliced(InParts):
    """A region as ``parts`` of its result, each with the schedule that has a kernel of it."""

    parts: tuple[tuple[Schedule, Part], ...]

    def kernel(self) -> Kernel | Refusal:
        """All kernels' launches one behind the other."""
        parts, kernels = Launches(self.request, []), []
        for place, (schedule, part) in enumerate(self.parts):
            made = self.made((schedule,), self._alone(part))
            if isinstance(made, Refusal):
                return made
            kernels.append(made)
            parts.add(made, f"of_part{place}", {})
        return parts.kernel(NAME, self._variants(parts.ways), pace=self._pace(kernels))

    def _variants(self, ways: Sequence[Sequence[Variant]]) -> list[Variant]:
        """Every way of all products with every way of all copies: where sizes or addresses admit no vectors to one
        kind, the other has its own all the same.  The last of each runs anything."""
        pairs = [(schedule is _PRODUCT, way) for way, (schedule, _) in zip(ways, self.parts, strict=True)]
        multiplied, copied = (_in_step([way for own, way in pairs if own is kind]) for kind in (True, False))
        together = [*product_of(multiplied, copied[:-1] or copied), (multiplied[-1], copied[-1])]
        return [joined(*one, *other) for one, other in dict.fromkeys(together)]

    def _alone(self, part: Part) -> Program:
        return Program(self.program.inputs, (part,), self.program.operators)

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

    def _pace(self, kernels: Sequence[Kernel]) -> Pace | None:
        """Each part's, where all are known."""
        own = [each.pace for each, (schedule, _) in zip(kernels, self.parts, strict=True) if schedule is _PRODUCT]
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


def _in_step(ways: Sequence[Sequence[Variant]]) -> list[tuple[Variant, ...]]:
    """The first ways of several kernels together, then the second ones, and so on; of one that has no more the last."""
    steps = max(map(len, ways), default=1)
    return [tuple(way[min(step, len(way) - 1)] for way in ways) for step in range(steps)]


def _found(request: Request) -> _Sliced | None:
    """A region whose one result is several tensors side by side, some of a product each and none of a reduction; None
    of any other."""
    program, products = request.lowered.program, contractions(request.lowered)
    if len(program.outputs) != 1 or not products:
        return None
    back: list[Permute] = []
    tensor = program.outputs[0]
    while isinstance(tensor, Permute):
        back.append(tensor)
        tensor = tensor.operand
    if not isinstance(tensor, Concat) or len(tensor.operands) < 2:
        return None
    kinds = [_kind(operand) for operand in tensor.operands]
    # As many as there are: else one stands in two parts, and would be computed for each.
    if None in kinds or sum(kind is _PRODUCT for kind in kinds) != len(products):
        return None
    groups: list[tuple[Schedule, list[Tensor]]] = []
    for kind, operand in zip(kinds, tensor.operands, strict=True):
        assert kind is not None
        if groups and kind is groups[-1][0] is _POINTWISE:
            groups[-1][1].append(operand)
        else:
            groups.append((kind, [operand]))
    if len(groups) > MOST_PARTS:
        return None
    parts, start = [], dim(0)
    for kind, operands in groups:
        size = sum((operand.shape[tensor.axis] for operand in operands), dim(0))
        parts.append((kind, _laid(_joined(operands, tensor, size), tensor, start, back)))
        start = start + size
    return _Sliced(request, tuple(parts))


def _kind(operand: Tensor) -> Schedule | None:
    """What has a kernel of a tensor that is put beside others; None where that is not known."""
    inside = postorder((operand,))
    if any(isinstance(each, Reduce | Scan) for each in inside):
        return None
    products, windows = (sum(isinstance(each, kind) for each in inside) for kind in (Contract, Pool))
    if products:
        return _PRODUCT if products == 1 and not windows else None
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
