"""Several independent regions in one launch: the second index of a block says whose it is.

    grid = (the most blocks of a part, number of parts)        block = the most threads of a part

Every part keeps the kernel that its own schedule made: its functions go into a namespace, those of equal parts into
one, and an entry calls the part's.  Blocks and threads past a part's own end at once.  A variant of the whole is a
variant of each part, under the guards of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxfuse.lowering.launch import Check, LaunchPlan, Output, Variant, moved
from onnxfuse.refusal import Refusal
from onnxfuse.schedules import Kernel, sharing
from onnxfuse.schedules.source import Call, Entry, Parameter, Source

SCHEDULE = "together"

MOST_VARIANTS = 4
"""Variants of the whole: each is a kernel to compile, with the text of every part in it, and what is joined comes last:
with six of them a published model's slowest text took 3.8 s, all by itself (benchmarks/results, h100-optimising)."""


@dataclass(frozen=True)
class Part:
    """One of the regions.

    Attributes:
        kernel: its own; planned: the variant that runs at the planned sizes, by place.
        inputs, hosts, outputs: where its tensor inputs, host inputs and outputs are among those of the whole.
    """

    kernel: Kernel
    planned: int
    inputs: tuple[int, ...]
    hosts: tuple[int, ...]
    outputs: tuple[int, ...]


def share_launch(kernels: Sequence[tuple[Kernel, int]]) -> bool:
    """Whether variants, by place, of these kernels fit into one launch, and those that run anything too.

    Only one function with much shared memory fits.
    """
    return _agree(kernels) and _agree([(kernel, len(kernel.plan.variants) - 1) for kernel, _ in kernels])


def _agree(kernels: Sequence[tuple[Kernel, int]]) -> bool:
    heavy = {(kernel.code, kernel.plan.variants[place].launches[0].kernel)
             for kernel, place in kernels if kernel.heavy}
    return len(heavy) <= 1


def together(parts: Sequence[Part], rule: str, outputs: int) -> Kernel | Refusal:
    """One kernel for independent regions, or why there is none.

    Args:
        parts: two or more.
        rule: id for the plan and the text's comment.
        outputs: how many the whole has; each is one part's.
    """
    return _Whole(parts, rule, outputs).kernel()


class _Whole:
    def __init__(self, parts: Sequence[Part], rule: str, outputs: int) -> None:
        self.parts, self.rule, self.count = parts, rule, outputs
        self.symbols: dict[str, int] = {}
        self.places = [self._places_of(part) for part in parts]
        self.sources = [part.kernel.code for part in parts if isinstance(part.kernel.code, Source)]
        self.spaces: dict[Source, str] = {}

    def kernel(self) -> Kernel | Refusal:
        """The kernel of all parts."""
        ways = self._ways()
        if not ways:
            return Refusal("no-common-launch", "the regions' kernels cannot share a launch")
        variants, entries = [], []
        for number, way in enumerate(ways):
            variant, entry = self._variant(f"together_{number}", way)
            variants.append(variant)
            entries.append(entry)
        headers = dict.fromkeys(name for source in self.sources for name in source.headers)
        source = Source(
            tuple(headers), f"{self.rule}: {len(self.parts)} regions in one launch", (), tuple(entries),
            tuple((space, part) for part, space in self.spaces.items()),
        )
        scattered = {part.inputs[place] for part in self.parts for place in part.kernel.scattered}
        phases = max(part.kernel.phases for part in self.parts)
        rounds = any(part.kernel.rounds for part in self.parts)
        return Kernel(SCHEDULE, source, self._plan(variants), tuple(sorted(scattered)), phases=phases, rounds=rounds)

    def _plan(self, variants: list[Variant]) -> LaunchPlan:
        plans = [part.kernel.plan for part in self.parts]
        checks: dict[Check, None] = {}
        outputs: dict[int, Output] = {}
        for number, (part, plan) in enumerate(zip(self.parts, plans, strict=True)):
            for check in plan.checks:
                axis = check.axis and (part.inputs[check.axis[0]], check.axis[1])
                checks[replace(check, condition=self._moved(check.condition, number), axis=axis)] = None
            for place, output in zip(part.outputs, plan.outputs, strict=True):
                outputs[place] = Output(output.dtype, tuple(self._moved(size, number) for size in output.shape))
        return LaunchPlan(
            self.rule, 1 + max(place for part in self.parts for place in part.inputs), tuple(self.symbols),
            tuple(checks), tuple(outputs[place] for place in range(self.count)), tuple(variants),
            options=tuple(dict.fromkeys(option for plan in plans for option in plan.options)),
        )

    def _places_of(self, part: Part) -> dict[str, Sequence[int]]:
        """Where each kind of atom of a part's plan is among the whole's: its symbols are entered there."""
        symbols: list[int] = []
        places = {"i": part.inputs, "h": part.hosts, "o": part.outputs, "s": symbols}
        for text in part.kernel.plan.symbols:
            symbols.append(self.symbols.setdefault(moved(text, places), len(self.symbols)))
        return places

    def _moved(self, text: str, number: int) -> str:
        """A part's expression as the whole's."""
        return moved(text, self.places[number])

    def _ways(self) -> list[tuple[int, ...]]:
        """Variants of the parts that run together, by place: those that are planned, those of the same rank, and last
        those that run anything."""
        kernels = [part.kernel for part in self.parts]
        planned = tuple(part.planned for part in self.parts)
        each = [sharing(kernel) for kernel in kernels]
        if any(place not in places for place, places in zip(planned, each, strict=True)):
            return []
        if not share_launch(list(zip(kernels, planned, strict=True))):
            return []
        last = tuple(places[-1] for places in each)
        # What runs anything is the most to compile: it goes with others that run anything alone.  What runs all that 32
        # bits count comes before what is only good for some sizes.
        narrow = tuple(places[-2:][0] for places in each)
        ranks = (tuple(places[min(rank, max(len(places) - 2, 0))] for places in each)
                 for rank in range(max(map(len, each)) - 1))
        others = [
            way for way in dict.fromkeys((narrow, *ranks))
            if way not in (planned, last) and _agree(list(zip(kernels, way, strict=True)))
        ]
        chosen = dict.fromkeys([planned, *others[: MOST_VARIANTS - 2]])
        return [*sorted((way for way in chosen if way != last), key=sum), last]

    def _variant(self, name: str, way: tuple[int, ...]) -> tuple[Variant, Entry]:
        """A variant and its kernel."""
        chosen = [part.kernel.plan.variants[place] for part, place in zip(self.parts, way, strict=True)]
        steps = [variant.launches[0] for variant in chosen]
        entries = [entry for source, step in zip(self.sources, steps, strict=True)
                   if (entry := source.entry(step.kernel)) is not None]
        most = max(entry.threads for entry in entries)
        taken: dict[str, Parameter] = {}

        def parameter(argument: str, kind: str) -> str:
            called = argument if ":" not in argument else f"n{len(taken)}"
            return taken.setdefault(argument, Parameter(kind, called, argument)).name

        grids = [self._moved(step.grid[0], number) for number, step in enumerate(steps)]
        calls = []
        for number, (entry, grid) in enumerate(zip(entries, grids, strict=True)):
            arguments = tuple(parameter(self._argument(each.argument, number), each.kind) for each in entry.parameters)
            blocks = parameter(f"i32:{grid}", "const int") if len(set(grids)) > 1 else ""
            threads = entry.threads if entry.threads < most else 0
            calls.append(Call(f"{self._space(number)}::{entry.name}", (), arguments, blocks, threads))
        whole = Entry(name, most, tuple(taken.values()), tuple(calls), min(entry.blocks for entry in entries))
        shared = _largest([self._moved(step.shared, number) for number, step in enumerate(steps)])
        launch = whole.step(_largest(grids), str(len(self.parts)), shared)
        guards = dict.fromkeys(
            self._moved(guard, number) for number, variant in enumerate(chosen) for guard in variant.guards
        )
        label = ", ".join(dict.fromkeys(variant.name for variant in chosen))
        return Variant(f"{name}: {label}", (launch,), tuple(guards)), whole

    def _space(self, number: int) -> str:
        """The namespace of a part's functions."""
        return self.spaces.setdefault(self.sources[number], f"part{len(self.spaces)}")

    def _argument(self, argument: str, number: int) -> str:
        kind, colon, text = argument.partition(":")
        return f"{kind}:{self._moved(text, number)}" if colon else self._moved(argument, number)


def _largest(sizes: Sequence[str]) -> str:
    """An expression for the largest of some."""
    first, *others = dict.fromkeys(sizes)
    return " ".join([first, *(f"{other} max" for other in others)])
