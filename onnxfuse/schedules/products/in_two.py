"""A region as two kernels, one behind the other: a product with what follows it pointwise, and rows of that.

What is between them is a result of the region where it has such a one, else in scratch memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnxfuse.graph.dims import product
from onnxfuse.ir.descent import above, computed_of
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.substitution import substituted
from onnxfuse.ir.tensors import Contract, Input, Permute, Program, Reduce, Tensor, postorder
from onnxfuse.lowering.launch import Check, Variant
from onnxfuse.lowering.tensor_map import TensorMap
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.composed.in_parts import InParts, address_of, joined, moved_scratch, renamed_variant
from onnxfuse.schedules.kernel import Kernel
from onnxfuse.schedules.products.product import OTHERWISE_ROUNDED, Product
from onnxfuse.schedules.schedule import Does, Request, Schedule
from onnxfuse.schedules.source import Entry, Function, Source


class ProductDivided(Schedule):
    """Products with reductions of what they give, in one kernel or in several, launched one behind the other."""

    efficiency = 0.6
    products = 1

    def leeway(self, kernel: Kernel) -> float:
        """See ``Schedule``; copies by tensor maps round operands of float32 to TF32 in their own way."""
        return OTHERWISE_ROUNDED if kernel.rounds else super().leeway(kernel)

    def runs(self, does: Does) -> bool:
        """Nothing that is told by what nodes do: that would be an attention."""
        return False


@dataclass(frozen=True)
class Divided(InParts):
    """A region with one product, divided between its kernel and what follows.

    Attributes:
        whole: the tensor at which it is; between: as that lies in memory, itself or a permutation of its axes.
        late: places of the results that are computed of reductions; early: of others.
    """

    whole: Tensor
    between: Tensor
    late: tuple[int, ...]
    early: tuple[int, ...]

    @property
    def results(self) -> tuple[Tensor, ...]:
        """Those that are computed of reductions."""
        return tuple(self.program.outputs[place] for place in self.late)

    @property
    def others(self) -> list[int]:
        """Places of the product's own further results."""
        return [place for place in self.early if self.program.outputs[place] is not self.between]

    @cached_property
    def ahead(self) -> Program:
        """The product, what is between as its first result."""
        others = (self.program.outputs[place] for place in self.others)
        return Program(self.program.inputs, (self.between, *others), self.program.operators)

    @cached_property
    def stand_in(self) -> Input:
        """What is between, as what follows reads it."""
        return Input(self.between.dtype, self.between.shape, len(self.program.inputs))

    def behind(self, more: Sequence[Input] = (), known: Mapping[Tensor, Tensor] | None = None) -> Program:
        """What follows; ``more``: what else it reads, and ``known``: what stands for what it is computed from."""
        inputs, back = (self.stand_in, *more), self.whole
        if self.between is self.whole:
            back = self.stand_in
        elif isinstance(self.between, Permute):
            axes = tuple(self.between.axes.index(axis) for axis in range(self.whole.rank))
            back = Permute(self.whole.dtype, self.whole.shape, self.stand_in, axes)
        return Program((*self.program.inputs, *inputs), substituted(self.results, {self.whole: back, **(known or {})}),
                       self.program.operators)

    @property
    def pointer(self) -> str:
        """Where what is between lies: a result, or the first scratch memory."""
        return next((f"o{place}" for place in self.early if self.program.outputs[place] is self.between), "t0")

    @property
    def scratch(self) -> tuple[str, ...]:
        """Bytes of it, where it is no result."""
        return () if self.pointer != "t0" else (self.bytes_of(self.between),)

    def outputs_ahead(self) -> dict[str, str]:
        """Names by which the product's kernel writes its results."""
        return {"o0": self.pointer, "o0.addr": address_of(self.pointer), **_outputs(dict(enumerate(self.others, 1)))}

    def outputs_behind(self) -> dict[str, str]:
        """The same of what follows."""
        return _outputs(dict(enumerate(self.late)))


@dataclass(frozen=True)
class InTwo:
    """Both kernels: their ``variants``, what these launch and take, and the memory that they need between; ``steps``:
    launches behind the product's where sizes are as planned; ``checks``: of sizes, for either."""

    variants: tuple[Variant, ...]
    functions: tuple[Function, ...]
    entries: tuple[Entry, ...]
    headers: frozenset[str]
    maps: tuple[TensorMap, ...]
    scratch: tuple[str, ...]
    steps: int
    checks: tuple[Check, ...]


def is_divided(request: Request, contract: Contract) -> bool:
    """Whether a region can be divided so: whether something of the product's elements is all that what is computed of
    reductions has of it."""
    program = request.lowered.program
    return bool(_between(program, contract, tuple(each for each in program.outputs if reduces(each))))


def divided(request: Request, contract: Contract, axes: Sequence[int] | None = None) -> Divided:
    """A region with one product, and reductions of what it gives.

    Args:
        axes: those of the product in the order in which what is between is to lie; as it comes where None.
    """
    program = request.lowered.program
    late = tuple(place for place, output in enumerate(program.outputs) if reduces(output))
    early = tuple(place for place in range(len(program.outputs)) if place not in late)
    found = _between(program, contract, tuple(program.outputs[place] for place in late))
    if axes is None:
        whole = _last_of_fewest_bytes(found)
        return Divided(request, whole, whole, late, early)
    whole = _last_of_fewest_bytes([each for each in found if each.shape == contract.shape])
    if list(axes) == sorted(axes):
        return Divided(request, whole, whole, late, early)
    outputs = (program.outputs[place] for place in early)
    laid = next((each for each in outputs if isinstance(each, Permute) and each.operand in found
                 and each.axes == tuple(axes) and TYPES[each.dtype].size == TYPES[whole.dtype].size), None)
    if laid is not None:
        return Divided(request, laid.operand, laid, late, early)
    between = Permute(whole.dtype, tuple(whole.shape[axis] for axis in axes), whole, tuple(axes))
    return Divided(request, whole, between, late, early)


def in_two(parts: Divided, schedules: Sequence[Schedule]) -> InTwo | Refusal:
    """The kernels of a region, that of the rows one of some ``schedules``'s; or why either has none."""
    one = parts.made((Product(),), parts.ahead)
    two = parts.made(schedules, parts.behind())
    if isinstance(one, Refusal):
        return one
    if isinstance(two, Refusal):
        return two
    ahead = parts.outputs_ahead()
    behind = {**parts.outputs_behind(), **parts.reads(parts.stand_in, parts.pointer),
              **moved_scratch(two.plan.scratch, len(parts.scratch))}
    # Where rows' first kernel does not run, of the length and the types that it is for, nothing lies as it should.
    pairs = [*((first, two.plan.variants[0]) for first in one.plan.variants),
             (one.plan.variants[-1], two.plan.variants[-1])]
    variants = (joined(renamed_variant(first, ahead), renamed_variant(second, behind)) for first, second in pairs)
    assert isinstance(one.code, Source) and isinstance(two.code, Source)
    return InTwo(
        tuple(variants), (*one.code.functions, *two.code.functions), (*one.code.entries, *two.code.entries),
        frozenset((*one.code.headers, *two.code.headers)), one.plan.maps, (*parts.scratch, *two.plan.scratch),
        len(two.plan.variants[0].launches), tuple(dict.fromkeys((*one.plan.checks, *two.plan.checks))))


def reduces(tensor: Tensor) -> bool:
    """Whether a tensor is computed of reductions."""
    return any(isinstance(each, Reduce) for each in postorder((tensor,)))


def _between(program: Program, contract: Contract, late: tuple[Tensor, ...]) -> list[Tensor]:
    """What the product's kernel may leave for that of the rows: that without which none of the results which are
    computed of reductions, ``late``, has anything of the product."""

    elements, reduced = product(contract.shape), computed_of(program.tensors, lambda each: isinstance(each, Reduce))
    return [each for each in above(program, contract) if each not in reduced and product(each.shape) == elements
            and contract not in postorder(late, without=each)]


def _last_of_fewest_bytes(tensors: Sequence[Tensor]) -> Tensor:
    least = min(TYPES[each.dtype].size for each in tensors)
    return [each for each in tensors if TYPES[each.dtype].size == least][-1]


def _outputs(places: Mapping[int, int]) -> dict[str, str]:
    """New names of results and of their addresses, by the places that they have and are to have."""
    return {f"o{place}{part}": f"o{real}{part}" for place, real in places.items() for part in ("", ".addr")}
