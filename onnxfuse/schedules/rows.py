"""The row schedule: reductions over the last axes, with what is pointwise before and after them.

Elements are arranged as ``rows`` rows of ``length`` elements; a group of threads shares a row.  The work falls into
phases: phase p computes the reductions whose operands need reductions of phases before p only, so softmax has three
(maximum, sum, result).  Between phases a row stays on chip:

- *registers*: every thread keeps its elements, unrolled; for rows up to ``threads * KEPT_LIMIT`` elements, also where
  there is one phase and nothing to keep: a thread asks for all its elements before it waits for the first;
- *streaming*: every phase reads the row again and computes anew; for rows of any length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isqrt, log2

from onnxfuse.lowering.launch import Variant
from onnxfuse.schedules.choice import Choice, told
from onnxfuse.schedules.kernel import STREAM, Kernel, fits_narrow
from onnxfuse.schedules.reduction import ENOUGH_THREADS, KEPT_LIMIT, Extent, Reduction, Ways, Work
from onnxfuse.schedules.rows_text import row_text
from onnxfuse.schedules.source import Function

BLOCK = 128
"""Threads of a block whose rows are a warp or less."""

SEVERAL = (64, 128, 256)
"""Threads of such a block that tuning tries."""

MAX_THREADS = 1024
_POWERS = tuple(1 << power for power in range(MAX_THREADS.bit_length()))
"""Threads that may share a row."""

BUSY_THREADS = 65_536
"""The same as ``ENOUGH_THREADS`` for a reduction alone: nothing is kept, and a thread has nothing to do but wait
(benchmarks/results, ways)."""


@dataclass(frozen=True)
class Shape:
    """A way to share a row: threads, vector width, and vectors a thread keeps (0 where it streams).

    ``several`` are the threads of a block whose rows are a warp or less; other blocks have one row.  ``rows`` is how
    many rows it is meant for at most, where there are other ways for more.
    """

    threads: int
    width: int
    items: int
    bits: int = 32
    several: int = BLOCK
    rows: int | None = None

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.several if self.threads <= 32 else self.threads

    @property
    def capacity(self) -> int:
        """Elements of a row that fit."""
        return self.threads * self.width * self.items

    def runs(self, length: int) -> bool:
        """Whether it runs rows of a length, with 32-bit indices."""
        return self.bits == 32 and (not self.items or self.capacity >= length)

    @property
    def name(self) -> str:
        """Name of the kernel."""
        kind = f"x{self.items}" if self.items else STREAM
        block = f"_b{self.several}" if self.several != BLOCK else ""
        return f"rows_{self.threads}_w{self.width}_{kind}_{self.bits}{block}"

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of("rows", threads=self.threads, width=self.width, items=self.items, block=self.block)


class Rows(Reduction):
    """Rows that lie in one piece, each with a block, a warp or less of one."""

    name = "rows"
    settings = "{threads} threads a row, width {width}, {items}, blocks of {block}"
    each = "vector"
    heavy = False

    def applies(self, work: Work) -> bool:
        """Vectors run along the rows."""
        return not work.transposes and not work.way.across

    def of_rows(self, work: Work, rule: str) -> Kernel | None:
        """The kernel of rows that nothing would split."""
        return self.made(work, self.beside(work, splits=False), rule) if self.applies(work) else None

    def beside(self, work: Work, splits: bool) -> Ways:
        """The variants beside those that split rows; ``splits``: whether that is planned, and these are what else
        there is."""
        layouts = _layouts(work)
        others: Sequence[Shape] = ()
        if fits_narrow(work.lowered):
            whole = [shape for shape in layouts if shape.runs(work.extent.planned or 0)]
            others = whole[:1] if splits else _others(layouts[0], work)
        offered = {shape.choice: shape for shape in others}
        choice, first = told(work.extent.choice, offered)
        if first is not None:
            layouts = [first, *(shape for shape in layouts if shape != first)]
        return replace(_ways(work, layouts), choice=choice, choices=tuple(offered))


def _ways(work: Work, layouts: Iterable[Shape]) -> Ways:
    """The variants of these layouts."""
    extent = work.extent
    count, length = work.expression(extent.count), work.expression(extent.length)
    functions = {keep: _function(work, keep) for keep in (True, False)}
    ways = Ways()
    modes: set[bool] = set()
    for layout in layouts:
        keep = layout.items > 0
        modes.add(keep)
        guards = () if layout.bits == 64 else work.aligned if layout.width > 1 else work.narrow
        if keep and extent.length.value is None:
            guards += (f"{length} {layout.capacity + 1} <",)
        if layout.rows is not None:
            guards += (f"{count} {layout.rows + 1} <",)
        settings = (layout.width, layout.threads, layout.block, max(layout.items, 1))
        entry = functions[keep].entry(layout.name, settings, layout.bits, layout.block)
        if all(layout.name != variant.name for variant in ways.variants):
            ways.entries.append(entry)
        step = entry.step(f"{count} {layout.block // layout.threads} ceil")
        ways.variants.append(Variant(layout.name, (step,), guards))
    ways.functions = [functions[keep] for keep in sorted(modes, reverse=True)]
    return ways


def _function(work: Work, keep: bool) -> Function:
    body = row_text(work.frame, keep)
    name = "rows_in_registers" if keep else "rows_streaming"
    return Function(name, ("width", "threads", "block", "items"), work.signature.parameters(body.sizes), body.text)


def _layouts(work: Work) -> list[Shape]:
    """The variants to offer, fastest first; the last one runs anything."""
    extent, width = work.extent, work.lanes.width
    kept, known = work.phases.live, extent.length.value
    enough = ENOUGH_THREADS if kept else BUSY_THREADS
    layouts = []
    if fits_narrow(work.lowered):
        for lane_count in dict.fromkeys((width, 1) if known is None else (width,)):
            if extent.planned is not None and (known is not None or extent.planned % lane_count == 0):
                layouts += _planned_layouts(extent, lane_count, max(kept, 1), enough)
            if kept and known is None:
                per_thread = max(KEPT_LIMIT // kept // lane_count, 1)
                layouts.append(Shape(32, lane_count, per_thread))
                if lane_count > 1:
                    layouts.append(Shape(256, lane_count, per_thread))
            if lane_count == width or not kept:
                layouts.append(Shape(_streaming_threads(extent.planned), lane_count, 0))
    return [*dict.fromkeys(layouts), Shape(_streaming_threads(extent.planned), 1, 0, bits=64)]


def _planned_layouts(extent: Extent, width: int, kept: int, enough: int) -> list[Shape]:
    """The best layouts for the planned rows and for those near them, in an order in which the first that fits is meant:
    by length where that is open, else by the number of rows."""
    found: list[tuple[int, Shape]] = []
    for length, rows in dict.fromkeys([(extent.planned, extent.rows), *extent.nearby]):
        if not length or (extent.length.value is None and length % width):
            continue
        best = _best((length, rows), width, kept, enough)
        if best is not None:
            found.append((rows or 0, best))
    if extent.length.value is None or len(found) < 2:
        return sorted({shape for _, shape in found}, key=lambda shape: (shape.capacity, shape.threads))
    layouts: list[Shape] = []
    found.sort(key=lambda one: one[0], reverse=True)
    for (rows, shape), more in zip(found, [None, *found], strict=False):
        if more is None or shape != replace(layouts[0], rows=None):
            # Between two planned counts the change comes at their geometric mean.
            layouts.insert(0, replace(shape, rows=None if more is None else isqrt(rows * more[0])))
    return layouts


def _others(default: Shape, work: Work) -> tuple[Shape, ...]:
    """Layouts that may be quicker than the first of ``_layouts`` for rows of the planned length."""
    length, width, kept = work.extent.planned, work.lanes.width, work.phases.live
    if length is None:
        return ()
    found = []
    for lanes in (lanes for lanes in (width, width // 2) if lanes and length % lanes == 0):
        vectors = -(-length // lanes)
        for threads in _POWERS:
            items = -(-vectors // threads)
            blocks = SEVERAL if threads <= 32 else (BLOCK,)
            if items * lanes * max(kept, 1) <= 2 * KEPT_LIMIT and items * threads < 2 * vectors:
                found += [Shape(threads, lanes, items, several=block) for block in blocks]
            if threads >= 32 and threads * 32 >= vectors >= 2 * threads:
                found += [Shape(threads, lanes, 0)]
    return tuple(shape for shape in found if shape != default)


def _streaming_threads(length: int | None) -> int:
    if length is None:
        return 256
    threads = 32
    while threads < MAX_THREADS and threads * 16 < length:
        threads *= 2
    return threads


def _best(planned: tuple[int, int | None], width: int, kept: int, enough: int) -> Shape | None:
    """Threads for planned rows: their length, and how many there are if that is known.

    Where even one vector of each value that is kept is more than a thread keeps, narrower ones do.  The weights are
    measured ones (benchmarks/results, row layouts): two to four vectors a thread are best, threads past a warp pay for
    barriers, idle lanes cost what they are, and few rows want many threads each, until there are ``enough`` of them all
    together.
    """
    (length, rows), best = planned, None
    vectors = -(-length // width)
    for threads in (each for each in _POWERS if each < 2 * vectors):
        items = -(-vectors // threads)
        elements = items * width * kept
        if elements <= KEPT_LIMIT or (threads == MAX_THREADS and elements <= 2 * KEPT_LIMIT):
            weight = 1.05 if items == 1 else 1.0 if items <= 4 or items * width <= 8 else 1.08
            if rows is not None and 0 < rows * threads < enough:
                weight *= 1 + 0.25 * log2(enough / (rows * threads))
            weight *= 1.05 if threads > 32 else 1.06 if threads == 8 else 1.0 if threads > 8 else 1.3
            score = weight * items * threads / vectors
            if best is None or score < best[0]:
                best = score, Shape(threads, width, items)
    if best is None and width > 1 and width * kept > KEPT_LIMIT:
        return _best(planned, width // 2, kept, enough)
    return best[1] if best is not None else None
