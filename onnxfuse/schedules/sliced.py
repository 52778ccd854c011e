"""Products whose results are put side by side, each by its own kernel where it belongs: an inception block's branches.

    image ─┬─ convolution ─ bias, activation ─┐
           ├─ convolution ─ bias, activation ─┼─ side by side ─▶
    other ─┴─ convolution ─ bias, activation ─┘

The kernels are those that the branches have as regions of their own, launches of one node, and each writes its part of
the result: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onnxfuse.graph.dims import dim
from onnxfuse.ir.tensors import Concat, Contract, Part, Permute, Program, Reduce, Tensor, postorder
from onnxfuse.lowering.lower import Lowered
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.in_parts import InParts, Launches, joined
from onnxfuse.schedules.in_two import ProductDivided
from onnxfuse.schedules.kernel import Kernel, Pace, contractions
from onnxfuse.schedules.product import Product
from onnxfuse.schedules.schedule import Expected, Request

NAME = "sliced"

MOST_PARTS = 8
"""Results side by side."""


class Sliced(ProductDivided):
    """Products that write parts of one result."""

    name = NAME
    settings = "{parts} parts"
    products = MOST_PARTS

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """A kernel each."""
        found = _found(Request(lowered, sizes=sizes))
        return None if found is None else Expected(len(found.parts))

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of a region of products whose results are put side by side."""
        found = _found(request)
        return None if found is None else found.kernel()


@dataclass(frozen=True)
class _Sliced(InParts):
    """A region as ``parts`` of its result, each computed from a product of its own."""

    parts: tuple[Tensor, ...]

    def kernel(self) -> Kernel | Refusal:
        """All kernels' launches one behind the other."""
        parts, kernels = Launches(self.request, []), []
        for place, part in enumerate(self.parts):
            made = self.made((Product(),), Program(self.program.inputs, (part,), self.program.operators))
            if isinstance(made, Refusal):
                return made
            kernels.append(made)
            parts.add(made, f"of_part{place}", {})
        steps = max(map(len, parts.ways))
        variants = [joined(*(way[min(step, len(way) - 1)] for way in parts.ways)) for step in range(steps)]
        return parts.kernel(NAME, variants, pace=_pace(kernels))


def _pace(kernels: list[Kernel]) -> Pace | None:
    """Each part's, where all are known."""
    paces = tuple(each.pace for each in kernels if each.pace is not None)
    return Pace(0, 0, 0, parts=paces) if len(paces) == len(kernels) else None


def _found(request: Request) -> _Sliced | None:
    """A region whose one result is several tensors side by side, each of a product of its own; None of any other."""
    program, products = request.lowered.program, contractions(request.lowered)
    if len(program.outputs) != 1 or not 1 < len(products) <= MOST_PARTS:
        return None
    back: list[Permute] = []
    tensor = program.outputs[0]
    while isinstance(tensor, Permute):
        back.append(tensor)
        tensor = tensor.operand
    if not isinstance(tensor, Concat) or len(tensor.operands) != len(products):
        return None
    parts, start = [], dim(0)
    for operand in tensor.operands:
        inside = postorder((operand,))
        if sum(isinstance(each, Contract) for each in inside) != 1 or any(isinstance(each, Reduce) for each in inside):
            return None
        part: Tensor = Part(tensor.dtype, tensor.shape, operand, tensor.axis, start)
        for each in reversed(back):
            part = replace(each, operand=part)
        parts.append(part)
        start = start + operand.shape[tensor.axis]
    return _Sliced(request, tuple(parts))
