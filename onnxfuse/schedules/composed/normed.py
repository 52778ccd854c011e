"""Products, and attentions, of operands that norms of their rows scale, as a LayerNormalization ahead of a projection,
or norms of queries and keys.

    rows ─┬─ mean, variance ─────────┐
          └───────────────── less, times, weight, bias ─ product, or attention ─▶

A kernel reads rows for what is known of each, a few numbers, and that of the product, or of the attention, scales what
it loads: what is scaled is never in memory.  Both are those that other schedules have for regions of these alone, two
launches of one node.  The second one's threads compute operands, which no warp then copies for them: how long that
takes follows from no tiles, and such regions are taken where they were measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnxfuse.ir.descent import above
from onnxfuse.ir.substitution import substituted
from onnxfuse.ir.tensors import Contract, Input, Program, Reduce, Tensor, operands, postorder
from onnxfuse.lowering.lower import Lowered
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.attentions.attention import Attention
from onnxfuse.schedules.composed.in_parts import REDUCTIONS, InParts, Launches, joined
from onnxfuse.schedules.kernel import Kernel, contractions
from onnxfuse.schedules.products.in_two import ProductDivided
from onnxfuse.schedules.products.product import Product
from onnxfuse.schedules.schedule import Expected, Request

NAME = "normed"

MULTIPLIES = (Attention(), Product())
"""What multiplies."""


class Normed(ProductDivided):
    """Products of operands that norms of their rows scale."""

    name = NAME
    settings = "operands scaled as they are loaded"
    products = Product.products

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """Two kernels, of which both read the rows."""
        found = _found(Request(lowered, sizes=sizes))
        return None if found is None else Expected(2, found.read_again(found.known, found.program.outputs))

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of a region with reductions ahead of its products; None where another schedule may have one."""
        found = _found(request)
        return None if found is None else found.kernel()


@dataclass(frozen=True)
class _Normed(InParts):
    """A region cut at what is ``known`` of rows, from which its products' operands are scaled."""

    known: tuple[Tensor, ...]

    @property
    def stand_ins(self) -> tuple[Input, ...]:
        """What is known, as the products' kernel reads it."""
        first = len(self.program.inputs)
        return tuple(Input(each.dtype, each.shape, first + place) for place, each in enumerate(self.known))

    @property
    def ahead(self) -> Program:
        """The reductions."""
        return Program(self.program.inputs, self.known, self.program.operators)

    @property
    def behind(self) -> Program:
        """The rest."""
        known = dict(zip(self.known, self.stand_ins, strict=True))
        return Program((*self.program.inputs, *self.stand_ins), substituted(self.program.outputs, known),
                       self.program.operators)

    def kernel(self) -> Kernel | None:
        """Both kernels' launches one behind the other."""
        norms, multiplies = self.made(REDUCTIONS, self.ahead), self.made(MULTIPLIES, self.behind)
        if isinstance(norms, Refusal) or isinstance(multiplies, Refusal) or multiplies.plan.maps:
            return None
        parts = Launches(self.request, [self.bytes_of(each) for each in self.known])
        places = range(len(self.known))
        parts.add(norms, "of_norm", {f"o{place}": f"t{place}" for place in places} | {
            f"o{place}.addr": "0" for place in places})
        parts.add(multiplies, "of_product", {name: to for place, each in enumerate(self.stand_ins)
                                             for name, to in self.reads(each, f"t{place}").items()})
        before, after = parts.ways
        return parts.kernel(NAME, [*(joined(before[0], each) for each in after), joined(before[-1], after[-1])])


def _found(request: Request) -> _Normed | None:
    """Reductions that are of no product and that products' operands are computed from; None where there are none."""
    program = request.lowered.program
    products = contractions(request.lowered)
    later = {each for contract in products for each in above(program, contract)}
    ahead = {each for each in program.tensors if isinstance(each, Reduce) and each not in later}
    if not products or not ahead or not all(any(isinstance(each, Contract) for each in postorder((output,)))
                                            for output in program.outputs):
        return None
    known: dict[Tensor, None] = {}
    seen: set[Tensor] = set()
    waiting = list(program.outputs)
    while waiting:
        tensor = waiting.pop()
        if tensor in ahead:
            known[tensor] = None
        elif tensor not in seen:
            seen.add(tensor)
            waiting += operands(tensor)
    return _Normed(request, tuple(each for each in program.tensors if each in known))
