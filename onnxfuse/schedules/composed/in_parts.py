"""What regions have in common of which parts have kernels of their own: launches of one node one behind the other, with
what is between them in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onnxfuse.graph.dims import Dim, dim, product
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.tensors import Input, Program, Tensor, postorder
from onnxfuse.lowering.launch import Variant, elsewhere, expression, renamed
from onnxfuse.lowering.tensor_map import TensorMap
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.headers import in_order
from onnxfuse.schedules.kernel import Kernel, outputs_of
from onnxfuse.schedules.products.parts import refused
from onnxfuse.schedules.reductions.columns import Columns
from onnxfuse.schedules.reductions.pieces import Pieces
from onnxfuse.schedules.reductions.rows import Rows
from onnxfuse.schedules.reductions.split import Split
from onnxfuse.schedules.schedule import Request, Schedule
from onnxfuse.schedules.source import Source

_COLUMNS, _ROWS = Columns(), Rows()
REDUCTIONS: tuple[Schedule, ...] = (Pieces(_ROWS), Split(_COLUMNS, _ROWS), _COLUMNS, _ROWS)
"""What runs a part that reduces rows, in the order in which they are asked."""


@dataclass(frozen=True)
class InParts:
    """A region of which parts have kernels of their own, with what is between them in memory."""

    request: Request

    @property
    def program(self) -> Program:
        """Of the whole region."""
        return self.request.lowered.program

    def bytes_of(self, tensor: Tensor) -> str:
        """Of a tensor, as an expression."""
        return expression(product(tensor.shape) * TYPES[tensor.dtype].size, self.request.lowered.binding.symbols)

    def read_again(self, one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> Dim:
        """Bytes of what two parts are both computed from, by what each results in."""
        again = set(inputs_of(one)) & set(inputs_of(other))
        counts = (product(each.shape) * TYPES[each.dtype].size for each in again)
        return sum(counts, dim(0)).substitute(self.request.lowered.binding.names)

    def reads(self, tensor: Input, pointer: str) -> dict[str, str]:
        """Names by which a kernel reads a tensor that lies elsewhere."""
        name, elements = f"i{tensor.index}", expression(product(tensor.shape), self.request.lowered.binding.symbols)
        return {name: pointer, f"{name}.addr": address_of(pointer), f"{name}.n": elements}

    def made(
        self, schedules: Sequence[Schedule], program: Program, choice: Choice | None = None
    ) -> Kernel | Refusal:
        """A kernel of a part of the region, of the first of some schedules that has one; ``choice``: what it is to be,
        where it can."""
        request = replace(self.part(program), choice=choice)
        found = next((made for each in schedules if (made := each.kernel(request)) is not None), None)
        return refused("its rows have no kernel of their own") if found is None else found

    def part(self, program: Program) -> Request:
        """A request for it."""
        lowered = replace(self.request.lowered, program=program)
        return replace(self.request, lowered=lowered, choice=None, _found={})


@dataclass
class Launches:
    """Kernels of parts as they are added, in one text.

    Attributes:
        request: for the whole region; scratch: bytes of its memory between launches, first what lies between parts.
        ways: each part's variants, which read and write where they do in the whole.
    """

    request: Request
    scratch: list[str]
    ways: list[list[Variant]] = field(default_factory=list, init=False)
    _kernels: list[Kernel] = field(default_factory=list, init=False)
    _texts: list[Source] = field(default_factory=list, init=False)
    _maps: list[TensorMap] = field(default_factory=list, init=False)

    def add(self, kernel: Kernel, space: str, names: Mapping[str, str]) -> None:
        """One more part, its functions in a namespace; ``names``: where it reads and writes, by what it calls that."""
        source, variants = within(kernel, space)
        maps = {f"m{own}": f"m{len(self._maps) + own}" for own in range(len(kernel.plan.maps))}
        moved = {**names, **maps, **moved_scratch(kernel.plan.scratch, len(self.scratch))}
        self.scratch += kernel.plan.scratch
        self._maps += [replace(each, base=moved.get(each.base, each.base)) for each in kernel.plan.maps]
        self._kernels.append(kernel)
        self._texts.append(source)
        self.ways.append([renamed_variant(each, moved) for each in variants])

    def kernel(self, name: str, variants: Sequence[Variant], **more: Any) -> Kernel:
        """The whole region's, of a schedule's ``name``, with what else is to be said of it."""
        lowered = self.request.lowered
        checks = tuple(dict.fromkeys(check for each in self._kernels for check in each.plan.checks))
        plan = replace(self._kernels[-1].plan, checks=checks, outputs=outputs_of(lowered),
                       variants=tuple(dict.fromkeys(variants)), maps=tuple(self._maps), scratch=tuple(self.scratch))
        code = Source(
            in_order({header for each in self._texts for header in each.headers}),
            f"{self.request.rule}: {', '.join(lowered.program.operators)}",
            tuple(function for each in self._texts for function in each.functions),
            tuple(entry for each in self._texts for entry in each.entries))
        inputs = range(len(lowered.program.inputs))
        scattered = tuple(place for place in inputs if any(place in each.scattered for each in self._kernels))
        rounds = any(each.rounds for each in self._kernels)
        return Kernel(name, code, plan, scattered, heavy=True, rounds=rounds, **more)


def inputs_of(roots: tuple[Tensor, ...]) -> list[Input]:
    """What tensors are computed from."""
    return [each for each in postorder(roots) if isinstance(each, Input)]


def within(kernel: Kernel, space: str) -> tuple[Source, tuple[Variant, ...]]:
    """A kernel's text with its functions in a namespace, so that it may stand beside others, and its variants."""
    assert isinstance(kernel.code, Source)
    variants = (replace(each, steps=tuple(replace(step, kernel=f"{space}_{step.kernel}") for step in each.launches))
                for each in kernel.plan.variants)
    return kernel.code.within(space), tuple(variants)


def moved_scratch(scratch: Sequence[str], first: int) -> dict[str, str]:
    """New names of a kernel's scratch memory, which is that from the ``first`` on."""
    return {f"t{place}": f"t{first + place}" for place in range(len(scratch))}


def address_of(pointer: str) -> str:
    """Modulo what vectors are aligned to: scratch memory is."""
    return "0" if pointer.startswith("t") else f"{pointer}.addr"


def joined(*parts: Variant) -> Variant:
    """Launches one behind the other, where all run."""
    return Variant("; ".join(each.name for each in parts), tuple(step for each in parts for step in each.launches),
                   tuple(dict.fromkeys(guard for each in parts for guard in each.guards)))


def renamed_variant(variant: Variant, names: Mapping[str, str]) -> Variant:
    """The same with what it reads and writes elsewhere."""
    return Variant(variant.name, tuple(elsewhere(step, names) for step in variant.launches),
                   tuple(renamed(guard, names) for guard in variant.guards))
