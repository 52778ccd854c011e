"""The texts of running totals over few long rows, each shared by several blocks, in several steps.

As in ``split_text`` a block has a chunk of a row, or of a block of rows that lie side by side, and the steps are the
phases.  Before a phase that needs totals a step more finds what each chunk amounts to; where totals are made of totals,
one for each level.  Blocks of later steps add up what lies before their chunk, in an order that the sizes alone decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from onnxfuse.ir.scalars import REDUCTIONS, TYPES
from onnxfuse.lowering.pull import Reduced, Scalar, Scanned
from onnxfuse.schedules.reductions.phases import Frame, Phases, accumulators, neutral
from onnxfuse.schedules.reductions.scans_text import Across, Along, Stages, totals_of
from onnxfuse.schedules.reductions.split_text import ColumnSplit, RowSplit, SplitParts, Step, reductions_of
from onnxfuse.schedules.text import indented


def levels(totals: Iterable[Scanned]) -> list[list[Scanned]]:
    """Totals by how many others each is made of, one in another."""
    depths: dict[Scanned, int] = {}
    for total in totals:  # each behind those that it is made of
        depths[total] = 1 + max((depths[inner] for inner in totals_of([total.element])), default=-1)
    most = max(depths.values(), default=-1)
    return [[total for total in depths if depths[total] == level] for level in range(most + 1)]


def parts_of(phases: Phases) -> SplitParts:
    """Room for what the chunks amount to: for the reductions, and for the totals."""
    roots = [root for phase in range(phases.count) for root in phases.roots(phase)]
    return SplitParts([*reductions_of(phases), *totals_of(roots)])


class Chunk(Stages, Step):
    """A phase of a chunk, or, of some ``totals``, what the chunk amounts to."""

    def __init__(self, frame: Frame, phase: int, parts: SplitParts, totals: Sequence[Scanned]) -> None:
        super().__init__(frame, phase, parts)
        self.wanted = totals
        self.alone = self.alone and not totals
        self.start()
        self.bounds = "begin", "end"

    @property
    def last(self) -> bool:
        """A step for totals writes nothing else."""
        return super().last and not self.wanted

    def roots(self) -> list[Scalar]:
        """What is computed an element."""
        return [total.element for total in self.wanted] if self.wanted else super().roots()

    def own(self) -> list[Reduced | Scanned]:
        """The totals wanted, else the phase's reductions, and those whose parts before the chunk are read."""
        inner = totals_of(self.roots() if self.wanted else self.phases.roots(self.phase))
        return [*(self.wanted or self.phases.reductions[self.phase]), *inner]

    def combining(self) -> list[Reduced | Scanned]:
        """All that has parts."""
        return [*self.parts.names]

    def phase_lines(self) -> list[str]:
        """The phase, or what the totals wanted amount to over the chunk."""
        if not self.wanted:
            return super().phase_lines()
        self.staged(totals_of(self.roots()))
        before: list[str] = []
        inner: list[str] = []
        names = {total: self.writer.fresh("part_of") for total in self.wanted}
        for total, name in names.items():
            mine, element = self.accumulator(name), self.writer.scalar(total.element)
            before += accumulators(mine, total)
            inner.append(f"{mine}[v] = {REDUCTIONS[total.kind][0]}::of({mine}[v], {element});")
        loop = self.loop([], inner, [])
        lines = indented([*self.writer.outside(), *before], 1) + loop
        return lines + [line for total, name in names.items() for line in self.reduce(name, total)]


def _chunks_before(total: Scanned, place: str, step: str) -> str:
    """The head of a loop over the chunks before the one at hand, or behind it."""
    first, end = ("part + 1 + ", "chunks") if total.reverse else ("", "part")
    return f"  for (idx c = {first}{place}; c < {end}; c += {step})"


class RowChunk(Along, Chunk, RowSplit):
    """Of one row."""

    def carry(self, total: Scanned, name: str) -> list[str]:
        """What the chunks before amount to."""
        kind, functor, mine = TYPES[total.dtype].compute, REDUCTIONS[total.kind][0], f"{name}_before"
        return [
            f"  {kind} {mine} = {neutral(total)};",
            _chunks_before(total, "lane", "threads"),
            f"    {mine} = {functor}::of({mine}, {self.parts.names[total]}[row * chunks + c]);",
            f"  __shared__ {kind} {mine}_of_warps[32];",
            f"  {mine} = of::reduce<{functor}, threads>({mine}, {mine}_of_warps);",
        ]


class ColumnChunk(Across, Chunk, ColumnSplit):
    """Of rows that lie side by side."""

    def carry(self, total: Scanned, name: str) -> list[str]:
        """What the chunks before amount to."""
        kind, functor, mine = TYPES[total.dtype].compute, REDUCTIONS[total.kind][0], f"{name}_before"
        source = f"{self.parts.names[total]} + ((long long)c * {self.frame.count} + row)"
        return [
            *super().carry(total, name),
            f"{_chunks_before(total, 'place', 'deep')} {{",
            f"    const of::Vector<{kind}, width> found = of::load<width>({source});",
            "#pragma unroll",
            f"    for (int v = 0; v < width; ++v) {mine}[v] = {functor}::of({mine}[v], found.at[v]);",
            "  }",
            self.combined(mine, total),
        ]


def split_texts(frame: Frame, parts: SplitParts, across: bool) -> Iterator[Chunk]:
    """The steps of a kernel, one behind the other."""
    kind = ColumnChunk if across else RowChunk
    known: set[Scanned] = set()
    for phase in range(frame.streaming.count):
        totals = totals_of(frame.streaming.roots(phase))
        for level in levels(totals):
            if fresh := [total for total in level if total not in known]:
                yield kind(frame, phase, parts, fresh)
        known.update(totals)
        yield kind(frame, phase, parts, [])
