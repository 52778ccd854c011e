"""The text of the steps of a split kernel: a block has a chunk of a row each, or of a block of columns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from onnxfuse.ir.scalars import REDUCTIONS, TYPES
from onnxfuse.lowering.pull import Reduced, Scalar, Scanned, children
from onnxfuse.schedules.reductions.columns import ColumnPhases
from onnxfuse.schedules.reductions.moments import Moments
from onnxfuse.schedules.reductions.online import Online
from onnxfuse.schedules.reductions.phases import WORDS, Frame, Phases, PhaseText, accumulators, neutral
from onnxfuse.schedules.reductions.rows_text import online_over_threads
from onnxfuse.schedules.source import Body

UNROLLED = 4
"""Elements, or vectors, that a thread has on its way at a time."""


def is_last(phases: Phases, phase: int) -> bool:
    """Whether a phase only combines what others found: a block has a row then, not a chunk."""
    return phase == phases.count - 1 and not phases.roots(phase)


class SplitParts:
    """Where the reductions' numbers lie in scratch: one a row and chunk, the longest types first.

    Attributes:
        offsets: bytes before a reduction's own, over rows times chunks; bytes: of all of them.
        names: of the pointers to them.
    """

    def __init__(self, found: Sequence[Reduced | Scanned]) -> None:
        self.names = {reduction: f"part{number}" for number, reduction in enumerate(found)}
        self.offsets: dict[Reduced | Scanned, int] = {}
        self.bytes = 0
        for reduction in sorted(found, key=lambda reduction: -_bytes(reduction)):
            self.offsets[reduction] = self.bytes
            self.bytes += _bytes(reduction)

    def pointer(self, reduction: Reduced | Scanned, count: str) -> str:
        """A line that declares the pointer to a reduction's numbers."""
        kind = TYPES[reduction.dtype].compute
        offset = f" + (long long){count} * chunks * {self.offsets[reduction]}" if self.offsets[reduction] else ""
        return f"  {kind}* const {self.names[reduction]} = reinterpret_cast<{kind}*>(t0{offset});"


def _bytes(reduction: Reduced | Scanned) -> int:
    """Bytes of a number as it is computed with."""
    kind = TYPES[reduction.dtype]
    return {"float": 4, "double": 8}.get(kind.compute, kind.size)


def reductions_of(phases: Phases) -> list[Reduced]:
    """All reductions, in the order of their phases."""
    return [reduction for phase in phases.reductions for reduction in phase]


class Step(PhaseText):
    """One phase; ``parts`` says where the numbers of the others are.

    Attributes:
        words: what its kernels' names say of how rows lie; template: parameters of its functions' templates.
        share: makes of a number of blocks, and of sets of rows, how many chunks each of these is to have.
    """

    words: ClassVar[str] = ""
    template: ClassVar[tuple[str, ...]]
    share: ClassVar[str] = "ceil"

    def __init__(self, frame: Frame, phase: int, parts: SplitParts) -> None:
        super().__init__(frame, keep=False)
        self.phase, self.parts = phase, parts
        self.alone = is_last(self.phases, phase)

    @property
    def last(self) -> bool:
        """Whether what there is once a row is written too."""
        return self.phase == self.phases.count - 1

    @property
    def rows(self) -> str:
        """How many rows there are, as text: there is one number of each in scratch for every chunk."""
        return self.frame.count

    def roots(self) -> list[Scalar]:
        """What is computed an element, or once a row."""
        once = (output.scalar for output in self.phases.outputs if not output.whole and self.last)
        return [*self.phases.roots(self.phase), *once]

    def own(self) -> list[Reduced | Scanned]:
        """What there are to be numbers of in scratch, or are already and are read by place."""
        return [*self.phases.reductions[self.phase]]

    def text(self) -> Body:
        """The whole body of a step."""
        needed = list(dict.fromkeys(
            each for found in _results(self.roots()) for each in (*self._needed_by(found), found)))
        pointers = (self.parts.pointer(each, self.rows) for each in [*needed, *self.own()])
        lines = [*self.opening(), *pointers]
        if not self.alone:
            # The chunks are of what there is by vectors; edges are the first chunk's.
            first, stop = ("first + ", "stop") if self.frame.peeled else ("", self.frame.length)
            lines += [
                *self.peel(),
                f"  const idx begin = {first}part * chunk;",
                f"  const idx end = {stop} - begin > chunk ? begin + chunk : {stop};",
            ]
        for reduction in needed:
            name = self.writer.fresh(WORDS[reduction.kind])
            online = self.phases.online.get(reduction)
            if reduction in self.phases.moments:
                lines += self.together_moments(name, reduction, self.phases.moments[reduction])
            else:
                lines += self.together(name, reduction) if online is None else (
                    self.together_online(name, reduction, online))
        lines += self.phase_lines()
        if self.last:
            lines += self.row_outputs()
        return self.body(lines)

    def _needed_by(self, found: Reduced) -> list[Reduced]:
        """What must be known of all chunks before a reduction of them."""
        online, moments = self.phases.online.get(found), self.phases.moments.get(found)
        return [*([online.largest] if online else []), *([moments.total] if moments else [])]

    def together_moments(self, name: str, squares: Reduced, moments: Moments) -> list[str]:
        """The same as ``together`` of squares of differences from a mean, whose total is known; for frames whose phases
        have such."""
        raise NotImplementedError(type(self))

    @abstractmethod
    def opening(self) -> list[str]:
        """Which row and chunk the block has."""

    @abstractmethod
    def together(self, name: str, reduction: Reduced) -> list[str]:
        """The result of an earlier phase's reduction, from all chunks, by this name."""

    @abstractmethod
    def together_online(self, name: str, reduction: Reduced, online: Online) -> list[str]:
        """The same of a sum that goes with a maximum, which is known."""


class RowSplit(Step):
    template = ("width", "threads")
    live = ""
    thread = "edge"

    @property
    def first(self) -> str:  # type: ignore[override]
        """Once a row."""
        return "lane == 0" if self.alone else "part == 0 && lane == 0"

    def opening(self) -> list[str]:
        """A block has one row."""
        where = (
            ["  const idx row = blockIdx.x;"] if self.alone
            else ["  const idx row = (idx)blockIdx.x / chunks, part = (idx)blockIdx.x % chunks;"]
        )
        return ["  const int lane = threadIdx.x;", *where]

    def edge(self, body: list[str]) -> list[str]:
        """The first chunk's threads have them."""
        lines = super().edge(body)
        return ["  const idx edge = part == 0 ? lane : edges;", *lines] if lines else []

    def head(self) -> list[str]:
        """Neighbouring threads have neighbouring vectors of the chunk."""
        return [
            f"#pragma unroll {UNROLLED}",
            "  for (idx e = begin + (idx)lane * width; e < end; e += threads * width) {",
        ]

    def reduce(self, name: str, reduction: Reduced | Scanned) -> list[str]:
        """Over the block, into scratch."""
        functor = REDUCTIONS[reduction.kind][0]
        return [
            *self._over_threads(name, reduction, f"of::fold<{functor}>({self.accumulator(name)})"),
            f"  if (lane == 0) {self.parts.names[reduction]}[row * chunks + part] = {name};",
        ]

    def together(self, name: str, reduction: Reduced) -> list[str]:
        """Every block does it, each thread for some of the chunks."""
        functor, mine = REDUCTIONS[reduction.kind][0], self.accumulator(name)
        self.names[reduction] = name
        return [
            f"  {TYPES[reduction.dtype].compute} {mine} = {neutral(reduction)};",
            "  for (idx c = lane; c < chunks; c += threads)",
            f"    {mine} = {functor}::of({mine}, {self.parts.names[reduction]}[row * chunks + c]);",
            *self._over_threads(name, reduction, mine),
        ]

    def largest_so_far(self, name: str, largest: Reduced) -> list[str]:
        """One for all lanes: their elements are of one row."""
        return [f"{TYPES[largest.dtype].compute} {self.accumulator(name)} = {neutral(largest)};"]

    def reduce_online(self, largest: tuple[str, Reduced], powers: tuple[str, Reduced]) -> list[str]:
        """Both over the block, into scratch."""
        stores = [f"{self.parts.names[reduction]}[row * chunks + part] = {name};"
                  for name, reduction in (largest, powers)]
        return [
            *online_over_threads(largest, powers, self.phases.online[powers[1]].functor),
            *(f"  if (lane == 0) {store}" for store in stores),
        ]

    def together_online(self, name: str, reduction: Reduced, online: Online) -> list[str]:
        """What each chunk has is scaled from its own maximum to the row's."""
        mine, kind = self.accumulator(name), TYPES[reduction.dtype].compute
        most, chunk = self.names[online.largest], f"{self.parts.names[online.largest]}[row * chunks + c]"
        self.names[reduction] = name
        return [
            f"  {kind} {mine} = 0;",
            "  for (idx c = lane; c < chunks; c += threads)",
            f"    {mine} += {self.parts.names[reduction]}[row * chunks + c] * "
            f"{online.functor}::scale({chunk}, {online.functor}::offset({most}));",
            f"  __shared__ {kind} {name}_of_warps[32];",
            f"  {kind} {name} = of::reduce<of::Sum, threads>({mine}, {name}_of_warps);",
            f"  {self.total(name, most, online.functor)}",
        ]

    def _over_threads(self, name: str, reduction: Reduced | Scanned, mine: str) -> list[str]:
        kind, functor = TYPES[reduction.dtype].compute, REDUCTIONS[reduction.kind][0]
        return [
            f"  __shared__ {kind} {name}_of_warps[32];",
            f"  const {kind} {name} = of::reduce<{functor}, threads>({mine}, {name}_of_warps);",
        ]


class ColumnSplit(ColumnPhases, Step):
    words = "columns"
    template: ClassVar[tuple[str, ...]] = ("width", "deep", "across")

    @property
    def first(self) -> str:  # type: ignore[override]
        """Once a column."""
        return "live && place == 0" if self.alone else "live && part == 0 && place == 0"

    def opening(self) -> list[str]:
        """A block has a block of columns."""
        return [*super().opening(), *(self.columns("(idx)blockIdx.x") if self.alone else self.which())]

    def which(self) -> list[str]:
        """Which columns and chunk the block has."""
        return ["  const idx part = (idx)blockIdx.x % chunks;", *self.columns("(idx)blockIdx.x / chunks")]

    def head(self) -> list[str]:
        """A thread has every ``deep``-th element of the chunk."""
        return [f"#pragma unroll {UNROLLED}", "  for (idx e = begin + place; e < end; e += deep) {"]

    def reduce(self, name: str, reduction: Reduced | Scanned) -> list[str]:
        """Over the block, into scratch."""
        return [self.combined(name, reduction), *self.stored(name, reduction)]

    def stored(self, name: str, reduction: Reduced | Scanned) -> list[str]:
        """Lines that write what the chunk amounts to into scratch."""
        target = f"{self.parts.names[reduction]} + ((long long)part * {self.rows} + row)"
        return [f"  if (live && place == 0) of::store({target}, of::pack<{TYPES[reduction.dtype].compute}>({name}));"]

    def found(self, name: str, reduction: Reduced | Scanned) -> str:
        """A line that reads what the ``c``-th chunk has of a reduction, a number a lane, as ``name``."""
        source = f"{self.parts.names[reduction]} + ((long long)c * {self.rows} + row)"
        kind = TYPES[reduction.dtype].compute
        return f"    const of::Vector<{kind}, width> {name} = of::load<width>({source});"

    def over_chunks(self, name: str, reduction: Reduced | Scanned) -> str:
        """A line that makes of accumulators, which threads have of some chunks each, those of all chunks."""
        return self.combined(name, reduction)

    def reduce_online(self, largest: tuple[str, Reduced], powers: tuple[str, Reduced]) -> list[str]:
        """Both over the block, into scratch."""
        return [self.combined_online(largest, powers), *self.stored(*largest), *self.stored(*powers)]

    def together_online(self, name: str, reduction: Reduced, online: Online) -> list[str]:
        """What each chunk has is scaled from its own maximum to the row's."""
        most = self.names[online.largest]
        self.names[reduction] = f"{name}[v]"
        scaled = f"found.at[v] * {online.functor}::scale(largest.at[v], {online.functor}::offset({most}))"
        return [
            *(f"  {line}" for line in accumulators(name, reduction)),
            "  for (idx c = place; c < chunks; c += deep) {",
            self.found("found", reduction), self.found("largest", online.largest),
            "#pragma unroll",
            f"    for (int v = 0; v < width; ++v) {name}[v] += {scaled};",
            "  }",
            self.over_chunks(name, reduction), *self.totals(most.removesuffix("[v]"), (name, reduction)),
        ]

    def together(self, name: str, reduction: Reduced) -> list[str]:
        """Every block does it, each thread for some of the chunks."""
        functor = REDUCTIONS[reduction.kind][0]
        self.names[reduction] = f"{name}[v]"
        return [
            *(f"  {line}" for line in accumulators(name, reduction)),
            "  for (idx c = place; c < chunks; c += deep) {",
            self.found("found", reduction),
            "#pragma unroll",
            f"    for (int v = 0; v < width; ++v) {name}[v] = {functor}::of({name}[v], found.at[v]);",
            "  }",
            self.over_chunks(name, reduction),
        ]


def _results(roots: list[Scalar]) -> list[Reduced]:
    """Results of reductions that expressions are computed from, in the order in which they are met."""
    found: dict[Reduced, None] = {}
    seen: set[Scalar] = set()
    stack = list(reversed(roots))
    while stack:
        scalar = stack.pop()
        if scalar in seen:
            continue
        seen.add(scalar)
        if isinstance(scalar, Reduced):
            found[scalar] = None
        else:
            stack += reversed(children(scalar))
    return list(found)
