"""The column schedule: reductions over axes that are not the last, with maps around them.

Rows lie side by side: neighbours in memory are of different rows, here called columns.  Neighbouring threads take
neighbouring vectors of columns, and a block's other threads share these columns' elements and combine what they found
through shared memory.  Between phases the elements stay in registers where a column is short, else they are read anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import ClassVar

from onnxfuse.ir.scalars import REDUCTIONS, TYPES
from onnxfuse.lowering.launch import Variant
from onnxfuse.lowering.pull import Reduced, Scanned
from onnxfuse.schedules.choice import Choice, told
from onnxfuse.schedules.kernel import STREAM, Kernel, fits_narrow
from onnxfuse.schedules.reductions.phases import PhaseText, accumulators
from onnxfuse.schedules.reductions.reduction import ENOUGH_THREADS, KEPT_LIMIT, Reduction, ReductionWork, Ways
from onnxfuse.schedules.source import Body, Function

ACROSS = {1: 128, 2: 64, 4: 32, 8: 32, 16: 16, 32: 8, 64: 8, 128: 8}
"""Threads side by side, by the threads that share a column: whole sectors, and little shared memory."""

WARP = 32

HALVED = 2
"""How often vectors may be halved so that longer columns fit into registers."""

AT_LEAST = 8
"""Elements of a column that a thread should have where it streams."""


@dataclass(frozen=True)
class ColumnsShape:
    """A way to share columns: ``deep`` threads have ``across`` vectors of ``width`` columns in common; each keeps
    ``items`` elements of a column, or streams where that is 0."""

    deep: int
    across: int
    width: int
    items: int
    bits: int = 32

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.deep * self.across

    def runs(self, length: int) -> bool:
        """Whether it runs columns of a length, with 32-bit indices."""
        return self.bits == 32 and (not self.items or self.deep * self.items >= length)

    @property
    def settings(self) -> dict[str, int]:
        """As tuning writes it down."""
        return {"deep": self.deep, "across": self.across, "width": self.width, "items": self.items}

    @property
    def name(self) -> str:
        """Name of the kernel."""
        kind = f"x{self.items}" if self.items else STREAM
        return f"columns_{self.deep}x{self.across}_w{self.width}_{kind}_{self.bits}"


class Columns(Reduction):
    """Rows that lie side by side."""

    name = "columns"
    settings = "{deep} threads a column, {across} side by side, width {width}, {items}"
    each = "element"

    def applies(self, work: ReductionWork) -> bool:
        """Vectors run across the rows."""
        return not work.transposes and work.way.across

    def of_rows(self, work: ReductionWork, rule: str) -> Kernel | None:
        """The kernel of columns that nothing would split."""
        return self.made(work, self.beside(work, splits=False), rule) if self.applies(work) else None

    def beside(self, work: ReductionWork, splits: bool) -> Ways:
        """The variants beside those that split columns; ``splits``: whether that is planned, and these are what else
        there is."""
        return _ways(work, splits)


def _ways(work: ReductionWork, splits: bool) -> Ways:
    extent = work.extent
    count, length = work.expression(extent.count), work.expression(extent.length)
    functions = {keep: _function(work, keep) for keep in (True, False)}
    layouts = _layouts(work)
    others: list[ColumnsShape] = []
    if fits_narrow(work.lowered):
        whole = [shape for shape in layouts if shape.runs(extent.planned or 0)]
        others = whole[:1] if splits else alternatives(work, layouts[0])
    offered = {Choice.of("columns", **shape.settings): shape for shape in others}
    choice, shape = told(extent.choice, offered)
    if shape is not None:
        layouts = list(dict.fromkeys([shape, *layouts]))
    ways = Ways(choice=choice, choices=tuple(offered))
    for layout in layouts:
        keep = layout.items > 0
        guards = () if layout.bits == 64 else work.aligned if layout.width > 1 else work.narrow
        if keep and extent.length.value is None:
            guards += (f"{length} {layout.deep * layout.items + 1} <",)
        settings = (layout.width, layout.deep, layout.across, max(layout.items, 1))
        entry = functions[keep].entry(layout.name, settings, layout.bits, layout.threads)
        ways.entries.append(entry)
        ways.variants.append(
            Variant(layout.name, (entry.step(f"{count} {layout.across * layout.width} ceil"),), guards))
    ways.functions = [functions[keep] for keep in sorted({layout.items > 0 for layout in layouts}, reverse=True)]
    return ways


def _function(work: ReductionWork, keep: bool) -> Function:
    body = ColumnText(work.frame, keep).text()
    name = "columns_in_registers" if keep else "columns_streaming"
    return Function(name, ("width", "deep", "across", "items"), work.signature.parameters(body.sizes), body.text)


def side_by_side(deep: int, count: int | None, width: int) -> int:
    """Threads across for a column of ``deep`` threads: no more than a small number of columns has use for."""
    across = ACROSS[deep]
    while across > 1 and count is not None and (across // 2) * width >= count and deep * across > WARP:
        across //= 2
    return across


def _layouts(work: ReductionWork) -> list[ColumnsShape]:
    """The variants to offer, fastest first; the last one runs anything."""
    extent, kept = work.extent, work.phases.live
    length = extent.length.value if extent.length.value is not None else extent.planned
    layouts = []
    for width in dict.fromkeys((work.lanes.width, 1)) if fits_narrow(work.lowered) else ():
        if kept and length:
            layouts += in_registers(work, width, length, kept)
        layouts.append(_streaming(work, width, length))
    last = _streaming(work, 1, length)
    return [*dict.fromkeys(layouts), ColumnsShape(last.deep, last.across, 1, 0, bits=64)]


def alternatives(work: ReductionWork, own: ColumnsShape) -> list[ColumnsShape]:
    """Shapes that may be quicker than a schedule's own for columns of the planned length, none of them far from it."""
    length, kept = work.extent.planned, work.phases.live
    if not length:
        return []
    found = []
    for width in dict.fromkeys((own.width, max(own.width // 2, 1))):
        for deep in (deep for deep in ACROSS if own.deep <= 4 * deep and deep <= 4 * own.deep):
            widest, items = side_by_side(deep, work.extent.rows, width), -(-length // deep)
            for across in (across for across in (widest, widest // 2) if deep * across >= WARP):
                if kept and items * width * kept <= 2 * KEPT_LIMIT and items * deep < 2 * length:
                    found.append(ColumnsShape(deep, across, width, items))
                if length >= 2 * deep:
                    found.append(ColumnsShape(deep, across, width, 0))
    return [shape for shape in dict.fromkeys(found) if shape != own]


def longest_kept(work: ReductionWork) -> int:
    """Elements of the longest columns that a block can keep in registers."""
    narrowest = max(work.lanes.width >> HALVED, 1)
    return max(ACROSS) * KEPT_LIMIT // (max(work.phases.live, 1) * narrowest)


def in_registers(work: ReductionWork, widest: int, length: int, kept: int) -> list[ColumnsShape]:
    """The best way to keep columns of this length in registers, if any."""
    found = []
    for halved in range(HALVED + 1):
        width = widest >> halved
        for deep in ACROSS if width else ():
            items = -(-length // deep)
            if items * width * kept <= KEPT_LIMIT:
                # Idle threads cost what they are; every step of combining and each halving of the vectors a little.
                weight = items * deep / length * (1 + 0.03 * (log2(deep) + halved)) * latency_factor(work, width, deep)
                found.append((weight, ColumnsShape(deep, side_by_side(deep, work.extent.rows, width), width, items)))
    return [min(found, key=lambda each: each[0])[1]] if found else []


def _streaming(work: ReductionWork, width: int, length: int | None) -> ColumnsShape:
    deep, planned = 1, 256 if length is None else length
    while deep < WARP and planned >= 2 * deep * AT_LEAST and latency_factor(work, width, deep) > 1:
        deep *= 2
    return ColumnsShape(deep, side_by_side(deep, work.extent.rows, width), width, 0)


def latency_factor(work: ReductionWork, width: int, deep: int) -> float:
    """How much longer so few threads take than enough of them; those here have little on its way each."""
    rows, enough = work.extent.rows, 8 * ENOUGH_THREADS
    threads = deep * -(-rows // width) if rows else enough // 8 * deep
    return 1.0 if threads >= enough else 1 + 0.25 * log2(enough / max(threads, 1))


class ColumnPhases(PhaseText):
    """What texts of columns share: how accumulators are combined and results are called.

    Attributes:
        room: numbers of shared memory that combining needs, as text.
    """

    room: ClassVar[str] = "of::room<deep, across, width>"

    def opening(self) -> list[str]:
        """The thread's place, and the shared memory."""
        kinds = dict.fromkeys(TYPES[each.dtype].compute for each in self.combining())
        return [
            "  const int column = threadIdx.x % across, place = threadIdx.x / across;",
            *(f"  __shared__ {kind} {shared(kind)}[{self.room}];" for kind in kinds),
        ]

    def combining(self) -> list[Reduced | Scanned]:
        """What is combined over the threads that share a column."""
        return [reduction for phase in self.phases.reductions for reduction in phase]

    def columns(self, block: str) -> list[str]:
        """The first of the thread's columns, for the block of columns at hand."""
        return [
            f"  const idx given = ({block} * across + column) * width;",
            # Threads past the last column go along to every barrier, and write nothing.
            f"  const bool live = given < {self.frame.count};",
            "  const idx row = live ? given : 0;",
        ]

    def largest_so_far(self, name: str, largest: Reduced) -> list[str]:
        """One a lane, as of any reduction."""
        return accumulators(name, largest)

    def combined_online(self, largest: tuple[str, Reduced], powers: tuple[str, Reduced]) -> str:
        """The same as ``combined`` of a maximum and the sum that goes with it."""
        functor, kind = self.phases.online[powers[1]].functor, TYPES[largest[1].dtype].compute
        template = f"{functor}, {REDUCTIONS[largest[1].kind][0]}, deep, across"
        return f"  of::combine_exponentials<{template}>({largest[0]}, {powers[0]}, {shared(kind)});"

    def totals(self, largest: str, powers: tuple[str, Reduced]) -> list[str]:
        """``total`` of each lane."""
        name, reduction = powers
        each = self.total(f"{name}[v]", f"{largest}[v]", self.phases.online[reduction].functor)
        return ["#pragma unroll", f"  for (int v = 0; v < width; ++v) {each}"]

    def accumulator(self, name: str) -> str:
        """Results take the accumulators' place."""
        return name

    def reduce(self, name: str, reduction: Reduced | Scanned) -> list[str]:
        """Over the threads; the accumulators become the results."""
        self.names[reduction] = f"{name}[v]"
        return [self.combined(name, reduction)]

    def reduce_online(self, largest: tuple[str, Reduced], powers: tuple[str, Reduced]) -> list[str]:
        """Over the threads, both."""
        self.names[largest[1]], self.names[powers[1]] = (f"{name}[v]" for name, _ in (largest, powers))
        return [self.combined_online(largest, powers), *self.totals(largest[0], powers)]

    def combined(self, name: str, reduction: Reduced | Scanned) -> str:
        """A line that makes of accumulators, one a lane, the results of their columns."""
        functor, kind = REDUCTIONS[reduction.kind][0], TYPES[reduction.dtype].compute
        return f"  of::combine<{functor}, deep, across>({name}, {shared(kind)});"


def shared(kind: str) -> str:
    """Name of the shared memory for numbers of a type."""
    return f"shared_{kind.replace(' ', '_')}"


class ColumnText(ColumnPhases):
    """The text of a column kernel."""

    first = "live && place == 0"

    def text(self) -> Body:
        """The whole body."""
        lines = [*self.opening(), *self.columns("(idx)blockIdx.x")]
        for phase in range(self.phases.count):
            self.phase = phase
            lines += self.phase_lines()
        lines += self.row_outputs()
        return self.body(lines)

    def head(self) -> list[str]:
        """A thread has every ``deep``-th element."""
        if self.keep:
            return [
                "#pragma unroll",
                "  for (int item = 0; item < items; ++item) {",
                "    const idx e = (idx)item * deep + place;",
                f"    if (e < {self.frame.length}) {{",
            ]
        return ["#pragma unroll 4", f"  for (idx e = place; e < {self.frame.length}; e += deep) {{"]
