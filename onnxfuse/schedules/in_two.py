"""A region as two kernels, one behind the other: a product with what follows it pointwise, and rows of that.

What is between them is a result of the region where it has such a one, else in scratch memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onnxfuse.graph.dims import product
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.substitution import substituted
from onnxfuse.ir.tensors import Contract, Input, Program, Reduce, Tensor, operands, postorder
from onnxfuse.lowering.launch import Variant, elsewhere, expression, renamed
from onnxfuse.lowering.tensor_map import TensorMap
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.kernel import Kernel
from onnxfuse.schedules.product import Product
from onnxfuse.schedules.rows import Rows
from onnxfuse.schedules.schedule import Request, Schedule
from onnxfuse.schedules.source import Entry, Function, Source


@dataclass(frozen=True)
class InTwo:
    """Both kernels: their ``variants``, what these launch and take, and the memory that they need between."""

    variants: tuple[Variant, ...]
    functions: tuple[Function, ...]
    entries: tuple[Entry, ...]
    headers: frozenset[str]
    maps: tuple[TensorMap, ...]
    scratch: tuple[str, ...]


def in_two(request: Request, contract: Contract) -> InTwo | Refusal:
    """The kernels of a region with one product, of whose results rows are reduced; or why either has none."""
    program, size = request.lowered.program, len(request.lowered.program.inputs)
    late = [place for place, output in enumerate(program.outputs) if _reduces(output)]
    between = _between(program, contract, tuple(program.outputs[place] for place in late))
    early = [place for place in range(len(program.outputs)) if place not in late]
    others = [place for place in early if program.outputs[place] is not between]
    one = _made(Product(), request, Program(
        program.inputs, (between, *(program.outputs[place] for place in others)), program.operators))
    stand_in = Input(between.dtype, between.shape, size)
    two = _made(Rows(), request, Program(
        (*program.inputs, stand_in),
        substituted(tuple(program.outputs[place] for place in late), {between: stand_in}), program.operators))
    if isinstance(one, Refusal):
        return one
    if isinstance(two, Refusal):
        return two
    elements = expression(product(between.shape), request.lowered.binding.symbols)
    written = next((place for place in early if program.outputs[place] is between), None)
    scratch = () if written is not None else (
        expression(product(between.shape) * TYPES[between.dtype].size, request.lowered.binding.symbols),)
    pointer, address = ("t0", "0") if written is None else (f"o{written}", f"o{written}.addr")
    ahead = {"o0": pointer, "o0.addr": address, **_outputs(dict(enumerate(others, 1)))}
    behind = {**_outputs(dict(enumerate(late))), f"i{size}": pointer, f"i{size}.addr": address, f"i{size}.n": elements,
              **{f"t{place}": f"t{len(scratch) + place}" for place in range(len(two.plan.scratch))}}
    # Where rows' first kernel does not run, of the length and the types that it is for, nothing lies as it should.
    pairs = [*((first, two.plan.variants[0]) for first in one.plan.variants),
             (one.plan.variants[-1], two.plan.variants[-1])]
    variants = (_joined(_elsewhere(first, ahead), _elsewhere(second, behind)) for first, second in pairs)
    assert isinstance(one.code, Source) and isinstance(two.code, Source)
    return InTwo(
        tuple(variants), (*one.code.functions, *two.code.functions), (*one.code.entries, *two.code.entries),
        frozenset((*one.code.headers, *two.code.headers)), one.plan.maps, (*scratch, *two.plan.scratch))


def above(program: Program, tensor: Tensor) -> list[Tensor]:
    """What is computed from a tensor, and it itself, operands first."""
    found = {tensor: None}
    for each in program.tensors:
        if any(operand in found for operand in operands(each)):
            found[each] = None
    return list(found)


def _reduces(tensor: Tensor) -> bool:
    """Whether a tensor is computed of reductions."""
    return any(isinstance(each, Reduce) for each in postorder((tensor,)))


def _between(program: Program, contract: Contract, late: tuple[Tensor, ...]) -> Tensor:
    """What the product's kernel leaves for that of the rows: that of the fewest bytes without which none of the results
    that are computed of reductions, ``late``, has anything of the product; among these the last."""

    def holds(tensor: Tensor) -> bool:
        rest = substituted(late, {tensor: Input(tensor.dtype, tensor.shape, 0)})
        return contract not in postorder(rest)

    elements = product(contract.shape)
    found = [each for each in above(program, contract)
             if product(each.shape) == elements and not _reduces(each) and holds(each)]
    least = min(TYPES[each.dtype].size for each in found)
    return [each for each in found if TYPES[each.dtype].size == least][-1]


def _made(schedule: Schedule, request: Request, program: Program) -> Kernel | Refusal:
    """A schedule's own kernel of a part of the region."""
    lowered = replace(request.lowered, program=program)
    found = schedule.kernel(replace(request, lowered=lowered, choice=None, _found={}))
    return found if found is not None else Refusal("product-structure", "its rows have no kernel of their own")


def _outputs(places: Mapping[int, int]) -> dict[str, str]:
    """New names of results and of their addresses, by the places that they have and are to have."""
    return {f"o{place}{part}": f"o{real}{part}" for place, real in places.items() for part in ("", ".addr")}


def _joined(first: Variant, second: Variant) -> Variant:
    """One launch behind the other, where both run."""
    return Variant(f"{first.name}; {second.name}", (*first.launches, *second.launches),
                   tuple(dict.fromkeys((*first.guards, *second.guards))))


def _elsewhere(variant: Variant, names: Mapping[str, str]) -> Variant:
    """The same with what it reads and writes elsewhere."""
    return Variant(variant.name, tuple(elsewhere(step, names) for step in variant.launches),
                   tuple(renamed(guard, names) for guard in variant.guards))
