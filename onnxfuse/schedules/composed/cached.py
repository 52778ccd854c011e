"""Attentions over keys and values of the past, with the caches that new ones are put into.

    new rows ─ rotated ─ written behind those that a sequence has ─┐
    caches of the past ─ copied, where they lie elsewhere ─────────┴─ caches ─┐
    queries ─ rotated as they are loaded ─────────────────────────────────────┴─ attention ─▶

Launches of one node: what was there is copied to where the caches are to be, new rows are written over that, and the
attention reads both as any tensors.  Where the caller binds the caches to the memory of those of the past nothing is
copied, nor where new rows are all that there is, as of a first prompt.  Each row is written once by a launch, and no
launch reads of the caches what it writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product as product_of

from onnxfuse.graph.dims import product
from onnxfuse.ir.substitution import substituted
from onnxfuse.ir.tensors import Concat, Contract, Input, Placed, Program, Reduce, Tensor, Update, postorder
from onnxfuse.lowering.launch import Variant, expression
from onnxfuse.lowering.lower import Lowered
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.attentions.attention import Attention
from onnxfuse.schedules.attentions.parts import OTHER
from onnxfuse.schedules.composed.in_parts import InParts, Launches, address_of, joined
from onnxfuse.schedules.kernel import Kernel
from onnxfuse.schedules.pointwise import Pointwise
from onnxfuse.schedules.products.in_two import ProductDivided
from onnxfuse.schedules.schedule import Expected, Request

NAME = "cached"

ATTENTION, POINTWISE = Attention(), Pointwise()


class Cached(ProductDivided):
    """Attentions over caches that they put new rows into."""

    name = NAME
    settings = ATTENTION.settings
    optional = ATTENTION.optional
    products = ATTENTION.products
    hides = True
    # As an attention's own: caches are rounded as the nodes round them.
    tolerance = ATTENTION.tolerance

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """Three kernels, of which one may not be launched."""
        return Expected(3) if _updates(lowered.program) else None

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of a region with caches; None where another schedule may have one."""
        updates = _updates(request.lowered.program)
        return _Cached(request, updates).kernel() if updates else None


def _updates(program: Program) -> tuple[Update, ...]:
    return tuple(each for each in program.tensors if isinstance(each, Update))


@dataclass(frozen=True)
class _Cached(InParts):
    """A region divided at its caches."""

    updates: tuple[Update, ...]

    @property
    def late(self) -> tuple[int, ...]:
        """Places of the results that are no caches."""
        return tuple(place for place, each in enumerate(self.program.outputs) if each not in self.updates)

    @property
    def pointers(self) -> tuple[str, ...]:
        """Where caches lie: results, or scratch memory."""
        outputs = self.program.outputs
        hidden = [each for each in self.updates if each not in outputs]
        return tuple(f"o{outputs.index(each)}" if each in outputs else f"t{hidden.index(each)}"
                     for each in self.updates)

    @property
    def stand_ins(self) -> tuple[Input, ...]:
        """The caches, as the attention reads them."""
        first = len(self.program.inputs)
        return tuple(Input(each.dtype, each.shape, first + place) for place, each in enumerate(self.updates))

    def _of(self, *outputs: Tensor) -> Program:
        return replace(self.program, outputs=outputs)

    @property
    def behind(self) -> Program:
        """The attention, of the caches as they are then."""
        known: dict[Tensor, Tensor] = dict(zip(self.updates, self.stand_ins, strict=True))
        results = substituted(tuple(self.program.outputs[place] for place in self.late), known)
        return Program((*self.program.inputs, *self.stand_ins), results, self.program.operators)

    def kernel(self) -> Kernel | Refusal:
        """All launches one behind the other."""
        before = [each for update in self.updates for each in (update.operand, update.rows, update.starts)]
        if any(isinstance(each, Contract | Reduce | Update) for each in postorder(tuple(before))) or not self.late:
            return Refusal(OTHER, "what is put into a cache is computed of sums, or nothing else is")
        choice = self.request.choice
        copies = self.made((POINTWISE,), self._of(*(each.operand for each in self.updates)))
        placed = self.made((POINTWISE,), self._of(*(
            Placed(each.dtype, each.shape, each.rows, each.starts, each.axis) for each in self.updates)))
        attention = self.made((ATTENTION,), self.behind, choice and replace(choice, schedule=ATTENTION.name))
        for made in (copies, placed, attention):
            if isinstance(made, Refusal):
                return made
        assert isinstance(copies, Kernel) and isinstance(placed, Kernel) and isinstance(attention, Kernel)
        pointers = self.pointers
        parts = Launches(self.request, [self.bytes_of(each) for each, pointer in zip(
            self.updates, pointers, strict=True) if pointer.startswith("t")])
        written = _renamed(pointers)
        parts.add(copies, "of_past", written)
        parts.add(placed, "of_new", written)
        parts.add(attention, "of_attention", _renamed([f"o{place}" for place in self.late]) | {
            name: to for each, pointer in zip(self.stand_ins, pointers, strict=True)
            for name, to in self.reads(each, pointer).items()})
        return parts.kernel(
            NAME, self._variants(parts.ways), hides=attention.hides,
            choice=attention.choice and replace(attention.choice, schedule=NAME),
            choices=tuple(replace(each, schedule=NAME) for each in attention.choices))

    def _variants(self, ways: Sequence[Sequence[Variant]]) -> list[Variant]:
        """Each way of each launch with those of the others, without the copies first where these are not needed; the
        last of each run anything."""
        copies, placed, attentions = (list(map(self._whole, each)) for each in ways)
        found = []
        for chosen in (tuple(each[:-1] or each for each in (copies, placed, attentions)),
                       (copies[-1:], placed[-1:], attentions[-1:])):
            _, new, attended = chosen
            found += [self._kept(joined(*each)) for each in product_of(new, attended)]
            found += [joined(*each) for each in product_of(*chosen)]
        return found

    def _whole(self, variant: Variant) -> Variant:
        """A launch whose tensor maps copy tiles as they are, where nothing may lie in them that is no number: behind a
        sequence's end, where another is longer.  There is no such where all rows are new, or of one sequence."""
        if not any(argument.startswith("m") for step in variant.launches for argument in step.arguments):
            return variant
        symbols = self.request.lowered.binding.symbols
        found = [f"{expression(product(each.starts.shape), symbols)} 1 == {expression(each.limit, symbols)} "
                 f"{expression(each.rows.shape[each.axis], symbols)} == or" for each in self.updates]
        return replace(variant, guards=(*variant.guards, *dict.fromkeys(found)))

    def _kept(self, variant: Variant) -> Variant:
        """The same for where all that is not new lies where it is to be."""
        kept = self._all_rows([each.rows for each in self.updates])
        sources = [_source(each.operand) for each in self.updates]
        found = [each for each in sources if each is not None]
        if len(found) == len(sources) and all(pointer.startswith("o") for pointer in self.pointers):
            same = (f"i{source.index}.at {pointer}.at ==" for source, pointer in zip(found, self.pointers, strict=True))
            kept = f"{kept} {_all([*same, self._all_rows(found)])} or"
        return replace(variant, name=f"{variant.name}; the past in its place", guards=(*variant.guards, kept))

    def _all_rows(self, tensors: Sequence[Tensor]) -> str:
        """Whether tensors have as many rows as the caches."""
        symbols = self.request.lowered.binding.symbols
        sizes = ((own.shape[each.axis], each.shape[each.axis])
                 for own, each in zip(tensors, self.updates, strict=True))
        return _all([f"{expression(own, symbols)} {expression(whole, symbols)} ==" for own, whole in sizes])


def _all(tests: Sequence[str]) -> str:
    """Whether all of them hold."""
    return reduce(lambda one, other: f"{one} {other} and", dict.fromkeys(tests))


def _source(past: Tensor) -> Input | None:
    """What a cache is in memory before, perhaps shorter; None where it is computed."""
    first = past.operands[0] if isinstance(past, Concat) else past
    return first if isinstance(first, Input) else None


def _renamed(pointers: Sequence[str]) -> dict[str, str]:
    """Names by which a kernel writes its results, and aligns them, that lie elsewhere in the whole."""
    return {f"o{place}{part}": address_of(pointer) if part else pointer
            for place, pointer in enumerate(pointers) for part in ("", ".addr")}
