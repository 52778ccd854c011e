"""What the compiler made of a plan's kernels: those that spill run another way, or are left to the runtime.

A value that registers do not hold is written and read again; a kernel that streams reads its inputs again in every
later phase instead.  Both go through the caches, so that their bytes compare: of the ways that a schedule offers, the
one that moves the fewest bytes runs (benchmarks/results, spills).  Of kernels whose tiles a warp copies that one runs
which is predicted to take least with what it spills.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

from onnxfuse.errors import KernelError
from onnxfuse.graph.sizes import bytes_of, shapes_of
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.traffic import chosen_variant
from onnxfuse.planning.known import KnownKernels
from onnxfuse.planning.objective import Objective
from onnxfuse.refusal import Refusal
from onnxfuse.region import Built, Region
from onnxfuse.schedules import USER, Kernel, named
from onnxfuse.schedules.kernel import STREAM
from onnxfuse.schedules.source import Given
from onnxfuse.wording import option

SLIGHT = 0.02
"""Share of a kernel's predicted time that what is spilled may take before other ways are compiled: less is noise."""

FEWER = 2
"""How many times fewer threads another way may have: fewer of them wait for memory longer than they save."""


class Figures(Protocol):
    """What the compiler made of one kernel."""

    @property
    def registers(self) -> int:
        """32-bit registers of a thread."""
        ...

    @property
    def spilled_bytes(self) -> int:
        """Bytes that a thread writes and reads because registers do not hold its values."""
        ...

    @property
    def local_bytes(self) -> int:
        """Bytes of a thread's local memory: what is spilled, and arrays that are indexed at run time."""
        ...

    @property
    def shared_bytes(self) -> int:
        """Static shared memory of a block."""
        ...


class Compiled(Protocol):
    """Compiles kernels for the GPU to plan for, and reads back what came of it.

    Attributes:
        whole: whether sessions here will ask for these kernels, with all variants; else what runs at the planned sizes
            says enough, and compiles several times as fast.
    """

    architecture: str
    whole: bool

    def begin(self, kernels: Sequence[Kernel]) -> None:
        """Compile texts for which ``figures`` will be asked, and wait for none."""
        ...

    def arriving(self, kernels: Sequence[Kernel]) -> Iterator[Kernel]:
        """Compile texts, and give each of them, one of equal ones, once ``figures`` knows it."""
        ...

    def figures(self, kernels: Sequence[Kernel]) -> Sequence[Mapping[str, Figures] | KernelError | None]:
        """Of each text, what the compiler made of its kernels, by name, why it does not compile, or None where it does
        and the compiler does not say more."""
        ...


@dataclass(frozen=True)
class _Way:
    """A kernel as compiled: what its planned launch spills and reads again, in bytes, and the threads of a block and of
    all blocks."""

    kernel: Kernel
    largest: Figures
    spilled: int
    again: int
    threads: int
    resident: int

    @property
    def moved(self) -> int:
        """Bytes that go through the caches beyond what each tensor must."""
        return self.spilled + self.again

    @property
    def order(self) -> tuple[int, int, int]:
        """The fewest bytes first; of equals that with the most threads a block, then the widest vectors."""
        settings = {} if self.kernel.choice is None else dict(self.kernel.choice.settings)
        return self.moved, -self.threads, -settings.get("width", 0)


class Spills:
    """What the compiler makes of the kernels of one model's fusions."""

    def __init__(self, costs: CostModel, objective: Objective, compiled: Compiled, kernels: KnownKernels) -> None:
        self.costs, self.objective, self.compiled, self.kernels = costs, objective, compiled, kernels

    def compile(self, fusions: Sequence[Region]) -> None:
        """Compile the kernels of many fusions at once, and begin with the other ways of each that spills as soon as it
        shows."""
        texts = self._texts(fusions)
        of = {id(text): fusion for text, fusion in texts}
        for text in self.compiled.arriving([text for text, _ in texts]):
            fusion = of[id(text)]
            (own,) = self._ways(fusion, [fusion.kernel])
            if isinstance(own, _Way) and self._spills(fusion, own):
                self.compiled.begin([self._text(fusion, kernel) for kernel in self._others(fusion)])

    def begin(self, fusions: Sequence[Region]) -> None:
        """Compile the kernels of fusions, and wait for none."""
        self.compiled.begin([text for text, _ in self._texts(fusions)])

    def _texts(self, fusions: Sequence[Region]) -> list[tuple[Kernel, Region]]:
        """What is compiled of fusions, each once, with one that it is of."""
        sizes = self.costs.ledger.sizes
        distinct = {(id(fusion.kernel), str(shapes_of(fusion.tensors, sizes))): fusion for fusion in fusions}
        return [(self._text(fusion, fusion.kernel), fusion) for fusion in distinct.values()]

    def revision(self, fusion: Region) -> Region | Refusal:
        """The fusion with the kernel that spills the least, its predicted time with what is spilled, and what was read
        back; or why it is left to the runtime."""
        (own,) = self._ways(fusion, [fusion.kernel])
        if isinstance(own, KernelError):
            return _broken(fusion, own)
        if own is None:
            return fusion
        best = self._best(fusion, own) if self._spills(fusion, own) else own
        more = self._seconds(best.spilled) * fusion.cost.executions
        cost = replace(fusion.cost, seconds_after=fusion.cost.seconds_after + more)
        if more > SLIGHT * fusion.cost.seconds_after and fusion.kernel.schedule != USER and fusion.measured is None:
            label = fusion.nodes[0].label
            refusal = self.objective.refuses(cost, len(fusion.nodes), label, fusion.rule)
            if refusal is not None:
                return Refusal(
                    "spills",
                    f"{best.largest.registers} registers of a thread do not hold what its kernel needs, and "
                    f"{best.largest.spilled_bytes} bytes go through memory: {refusal.message}", label, fusion.rule,
                )
        return replace(fusion, made=best.kernel, counted=cost, compiled=self._built(best))

    def _best(self, fusion: Region, own: _Way) -> _Way:
        """The way to run a fusion that moves the fewest bytes; its own where others save next to nothing."""
        ways = self._ways(fusion, self._others(fusion))
        if own.kernel.pace is not None:
            paced = [own, *(way for way in ways if isinstance(way, _Way))]
            return min(paced, key=lambda way: self._paced(fusion, way))
        wide = (way for way in ways if isinstance(way, _Way) and way.resident * FEWER >= own.resident)
        best = min(wide, key=lambda way: way.order, default=own)
        return best if self._seconds(own.moved - best.moved) > SLIGHT * _once(fusion) else own

    def _paced(self, fusion: Region, way: _Way) -> float:
        """Seconds that a way is predicted to take, with what it spills."""
        return self.costs.kernel_seconds(replace(fusion, made=way.kernel)) + self._seconds(way.spilled)

    def _spills(self, fusion: Region, own: _Way) -> bool:
        """Whether a fusion's own way spills more than next to nothing."""
        return self._seconds(own.spilled) > SLIGHT * _once(fusion)

    def _others(self, fusion: Region) -> list[Kernel]:
        """Other ways to run a fusion: none of what was measured, or has variants for other sizes, which is as it is to
        be."""
        if fusion.lowered is None or fusion.measured is not None or fusion.kernel.choice or self.objective.spread:
            return []
        asked = (self.kernels.ask(fusion.request(self.costs.ledger.sizes, choice)).kernel(fusion.kernel.schedule)
                 for choice in fusion.kernel.choices)
        made = [each for each in asked if isinstance(each, Kernel)]
        # How fast copies by tensor maps are, or a library, bytes do not tell.
        if fusion.kernel.pace is not None:
            return [each for each in made if each.pace is not None]
        return [each for each in made if not (each.plan.maps or any(variant.calls for variant in each.plan.variants))]

    def _ways(self, fusion: Region, kernels: Sequence[Kernel]) -> list[_Way | KernelError | None]:
        """Kernels of a fusion as compiled; None where the compiler did not say what it made."""
        texts = [self._text(fusion, kernel) for kernel in kernels]
        found = self.compiled.figures(texts)
        return [
            self._way(fusion, kernel, text, figures) if isinstance(figures, Mapping) else figures
            for kernel, text, figures in zip(kernels, texts, found, strict=True)
        ]

    def _text(self, fusion: Region, kernel: Kernel) -> Kernel:
        """A fusion's kernel as it is compiled."""
        text, shapes = named(kernel), shapes_of(fusion.tensors, self.costs.ledger.sizes)
        if self.compiled.whole or shapes is None or isinstance(text.code, Given):
            return text
        profile = self.costs.profile
        variant, _ = chosen_variant(text.plan, shapes, profile.sm, profile.multiprocessors)
        code = text.code.keeping({step.kernel for step in variant.launches})
        return replace(text, code=code, plan=replace(text.plan, variants=(variant,)))

    def _way(self, fusion: Region, kernel: Kernel, text: Kernel, figures: Mapping[str, Figures]) -> _Way | None:
        """``text``: the kernel by the names that it was compiled under.  None where what is planned launches none."""
        sizes, profile = self.costs.ledger.sizes, self.costs.profile
        shapes = shapes_of(fusion.tensors, sizes)
        steps, spilled, again, most, resident = text.plan.variants[0].launches, 0, 0, 0, 0
        if shapes is not None:
            variant, evaluate = chosen_variant(text.plan, shapes, profile.sm, profile.multiprocessors)
            steps = variant.launches
            if STREAM in variant.name:
                again = (kernel.phases - 1) * sum(bytes_of(value, sizes) or 0 for value in fusion.tensors)
            for step in steps:
                # What only a run knows counts as 1.
                threads, blocks = (prod(evaluate(size) or 1 for size in part) for part in (step.block, step.grid))
                spilled += figures[step.kernel].spilled_bytes * threads * blocks
                most, resident = max(most, threads), max(resident, threads * blocks)
        if not steps:
            return None
        largest = max((figures[step.kernel] for step in steps), key=lambda each: (each.spilled_bytes, each.registers))
        return _Way(kernel, largest, spilled, again, most, resident)

    def _seconds(self, nbytes: int) -> float:
        """Seconds that bytes through the second-level cache take."""
        return nbytes / (self.costs.profile.bandwidth * self.costs.profile.l2_gain)

    def _built(self, way: _Way) -> Built:
        largest = way.largest
        return Built(self.compiled.architecture, largest.registers, largest.spilled_bytes, largest.local_bytes,
                     largest.shared_bytes)


def _once(fusion: Region) -> float:
    """Predicted seconds of one run of a fusion."""
    return fusion.cost.seconds_after / (fusion.cost.executions or 1.0)


def _broken(fusion: Region, error: KernelError) -> Refusal:
    remedy = "This is a fault of onnxfuse; report it."
    if fusion.kernel.schedule == USER:
        remedy = f"Mend the rule's kernel, or plan for a GPU that it compiles for: {option('target', 'GPU')}."
    return Refusal("does-not-compile", error.message, fusion.nodes[0].label, fusion.rule, remedy)
