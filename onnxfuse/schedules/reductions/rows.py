"""The row schedule: reductions over the last axes, with what is pointwise before and after them.

Elements are arranged as ``rows`` rows of ``length`` elements; a group of threads shares a row.  The work falls into
phases: phase p computes the reductions whose operands need reductions of phases before p only, so softmax has three
(maximum, sum, result).  Between phases a row stays on chip:

- *registers*: every thread keeps its elements, unrolled; for rows up to ``threads * KEPT_LIMIT`` elements, also where
  there is one phase and nothing to keep: a thread asks for all its elements before it waits for the first; of few rows
  the blocks of a cluster may share each, where tuning measured that (Hopper);
- *shared memory*: every phase computes anew from what the first one read; for rows that the registers of a block do
  not hold, or not without spilling, and its shared memory does;
- *streaming*: every phase reads the row again and computes anew; for rows of any length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isqrt, log2
from types import MappingProxyType

from onnxfuse.lowering.launch import Variant
from onnxfuse.schedules.attentions.shape import HOPPER
from onnxfuse.schedules.choice import Choice, told
from onnxfuse.schedules.kernel import HOPPER_HAS, STREAM, Kernel, fits_narrow
from onnxfuse.schedules.reductions.peel import LONG_ODD_ROW
from onnxfuse.schedules.reductions.reduction import ENOUGH_THREADS, KEPT_LIMIT, Extent, Reduction, ReductionWork, Ways
from onnxfuse.schedules.reductions.rows_text import SLOT, clustered_text, row_text
from onnxfuse.schedules.reductions.streaming import (
    BLOCK_SHARED,
    fixed_bytes,
    kept_vectors,
    longest_row,
    row_bytes,
    streaming_text,
)
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


SHARED = "shared"
"""In the names of variants that keep their rows in shared memory."""

IN_SHARED = -1
"""Stands for the vectors a thread keeps where shared memory keeps them."""

ASKED, ASKED_VECTORS = 16, 8
"""Elements, and vectors, that a thread asks for at a time where registers do not hold its share of a row."""

FEWEST_VECTORS = 16
"""Vectors of a row from which on tuning tries to read it by them where none divide it."""

SHARING = (512, 1024)
"""Threads of a block whose row is in shared memory."""

CLUSTERS, SHARING_BLOCKS = (2, 4, 8), (256, 512, 1024)
"""Blocks of a cluster that share a row which they keep, and threads of each, that tuning tries."""


@dataclass(frozen=True)
class RowsShape:
    """A way to share a row: threads, vector width, and vectors a thread keeps (0 where it streams, ``IN_SHARED`` where
    shared memory keeps them).

    ``several`` are the threads of a block whose rows are a warp or less; other blocks have one row, or a part of one
    that the blocks of a ``cluster`` share.  ``rows`` is how many rows it is meant for at most, where there are other
    ways for more; ``longest`` the longest row that shared memory keeps on some GPU; ``least`` the shortest that it is
    meant for.  ``peeled``: vectors begin anywhere in a row.
    """

    threads: int
    width: int
    items: int
    bits: int = 32
    several: int = BLOCK
    cluster: int = 1
    rows: int | None = None
    longest: int = 0
    peeled: bool = False
    least: int = 0

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.several if self.threads <= 32 else self.threads

    @property
    def capacity(self) -> int:
        """Elements of a row that fit."""
        return self.threads * self.cluster * self.width * self.items

    def runs(self, length: int) -> bool:
        """Whether it runs rows of a length, with 32-bit indices."""
        most = self.capacity if self.items > 0 else self.longest if self.items < 0 else length
        divides = self.peeled or length % self.width == 0
        return self.bits == 32 and divides and self.least <= length <= most

    @property
    def asked(self) -> int:
        """Vectors that a thread asks for at a time where it does not keep them."""
        return max(min(ASKED // self.width, ASKED_VECTORS), 1)

    @property
    def name(self) -> str:
        """Name of the kernel."""
        kind = f"x{self.items}" if self.items > 0 else SHARED if self.items else STREAM
        block = f"_b{self.several}" if self.several != BLOCK else ""
        peeled = "_peeled" if self.peeled and self.width > 1 else ""
        cluster = f"x{self.cluster}" if self.cluster > 1 else ""
        return f"rows_{self.threads}{cluster}_w{self.width}_{kind}{peeled}_{self.bits}{block}"

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        cluster = {"cluster": self.cluster} if self.cluster > 1 else {}
        return Choice.of("rows", threads=self.threads, width=self.width, items=self.items, block=self.block, **cluster)


class Rows(Reduction):
    """Rows that lie in one piece, each with a block, a warp or less of one."""

    name = "rows"
    settings = "{threads} threads a row, width {width}, {items}, blocks of {block}"
    optional = MappingProxyType({"cluster": "{cluster} of them a row"})
    each = "vector"
    heavy = False

    def applies(self, work: ReductionWork) -> bool:
        """Vectors run along the rows."""
        return not work.transposes and not work.way.across

    def headers(self, work: ReductionWork) -> tuple[str, ...]:
        """Also what clusters need."""
        return (*super().headers(work), "warpgroup", "tensor_copies", "cluster")

    def of_rows(self, work: ReductionWork, rule: str) -> Kernel | None:
        """The kernel of rows that nothing would split."""
        return self.made(work, self.beside(work, splits=False), rule) if self.applies(work) else None

    def beside(self, work: ReductionWork, splits: bool) -> Ways:
        """The variants beside those that split rows; ``splits``: whether that is planned, and these are what else
        there is."""
        layouts = _layouts(work)
        others: Sequence[RowsShape] = ()
        if fits_narrow(work.lowered):
            whole = [shape for shape in layouts if shape.runs(work.extent.planned or 0)]
            others = whole[:1] if splits else _others(whole[0] if whole else layouts[0], work)
        offered = {shape.choice: shape for shape in others}
        choice, first = told(work.extent.choice, offered)
        if first is not None:
            layouts = [first, *(shape for shape in layouts if shape != first)]
        return replace(_ways(work, layouts), choice=choice, choices=tuple(offered))


def _ways(work: ReductionWork, layouts: Iterable[RowsShape]) -> Ways:
    """The variants of these layouts."""
    count, ways, modes = work.expression(work.extent.count), Ways(), dict[tuple[int, bool], Function]()
    for layout in layouts:
        if layout.cluster > 1:
            _add_clustered(ways, work, layout)
            continue
        mode, its = (layout.items > 0) - (layout.items < 0), _work_of(work, layout)
        if (mode, layout.peeled) not in modes:
            modes[mode, layout.peeled] = _function(its, mode)
        function = modes[mode, layout.peeled]
        items = layout.items if mode > 0 else layout.asked if mode < 0 or work.frame.streaming.online else 1
        least = min(MAX_THREADS // layout.threads, 2) if mode < 0 else 1
        entry = function.entry(
            layout.name, (layout.width, layout.threads, layout.block, items), layout.bits, layout.block, least)
        if all(layout.name != variant.name for variant in ways.variants):
            ways.entries.append(entry)
        shared = row_bytes(its.frame, work.expression(work.extent.length)) if mode < 0 else "0"
        step = entry.step(f"{count} {layout.block // layout.threads} ceil", shared=shared)
        ways.variants.append(Variant(layout.name, (step,), _guards(its, layout)))
    order = ((mode, peeled) for mode in (1, -1, 0) for peeled in (False, True))
    ways.functions += [modes[each] for each in order if each in modes]
    return ways


def _add_clustered(ways: Ways, work: ReductionWork, layout: RowsShape) -> None:
    """A variant whose clusters have a row each."""
    body = clustered_text(work.frame)
    template = ("width", "threads", "block", "items", "blocks")
    function = Function("rows_in_clusters", template, work.signature.parameters(body.sizes), body.text)
    settings = layout.width, layout.threads, layout.block, layout.items, layout.cluster
    entry = function.entry(layout.name, settings, layout.bits, layout.block)
    reductions = sum(map(len, work.phases.reductions))
    step = entry.step(f"{work.expression(work.extent.count)} {layout.cluster} *", shared=str(SLOT * reductions))
    step = replace(step, cluster=(str(layout.cluster), "1", "1"))
    ways.functions.append(function)
    ways.entries.append(entry)
    ways.variants.append(Variant(layout.name, (step,), (HOPPER, *_guards(work, layout))))


def _work_of(work: ReductionWork, layout: RowsShape) -> ReductionWork:
    """The region as a layout reads it."""
    return work.peeled if layout.peeled and work.peeled is not None else work


def _guards(work: ReductionWork, layout: RowsShape) -> tuple[str, ...]:
    """What must hold for a layout to run."""
    extent = work.extent
    count, length = work.expression(extent.count), work.expression(extent.length)
    guards = () if layout.bits == 64 else work.aligned if layout.width > 1 else work.narrow
    if layout.items > 0 and extent.length.value is None:
        guards += (f"{length} {layout.capacity + 1} <",)
    if layout.items < 0:
        guards += (f"{row_bytes(work.frame, length)} {fixed_bytes(work.frame)} + {BLOCK_SHARED} <=",)
    if layout.rows is not None:
        guards += (f"{count} {layout.rows + 1} <",)
    if layout.least and extent.length.value is None:
        guards += (f"{layout.least - 1} {length} <",)
    return guards


def _function(work: ReductionWork, mode: int) -> Function:
    """Where rows stay: in registers, in shared memory (negative), or nowhere (0)."""
    kept = kept_vectors(work.frame) if mode < 0 else ()
    body = row_text(work.frame) if mode > 0 else streaming_text(work.frame, kept)
    name = "rows_in_registers" if mode > 0 else "rows_in_shared_memory" if mode else "rows_streaming"
    width = "width"
    if work.frame.peeled:
        name, width = f"{name}_peeled", "vector"
    return Function(name, (width, "threads", "block", "items"), work.signature.parameters(body.sizes), body.text)


def _layouts(work: ReductionWork) -> list[RowsShape]:
    """The variants to offer, fastest first; the last one runs anything."""
    extent, known = work.extent, work.extent.length.value
    anything = RowsShape(_streaming_threads(extent.planned), 1, 0, bits=64, peeled=_streams_peeled(work))
    if not fits_narrow(work.lowered):
        return [anything]
    if known is not None and work.peeled is not None and known >= LONG_ODD_ROW:
        return [*_peeled_layouts(work), anything]
    layouts = []
    for width in dict.fromkeys((work.lanes.width, 1) if known is None else (work.lanes.width,)):
        layouts += _layouts_of(work, width)
    return [*dict.fromkeys(layouts), anything]


def _layouts_of(work: ReductionWork, width: int) -> list[RowsShape]:
    """The same of a width that divides the rows; at the last of several, what rows have that it does not divide."""
    extent, kept, known = work.extent, work.phases.live, work.extent.length.value
    last, own = width == 1 and known is None and work.peeled is not None, list[RowsShape]()
    stream = RowsShape(_streaming_threads(extent.planned), width, 0)
    if extent.planned is not None and (known is not None or extent.planned % width == 0) and not (
            last and extent.planned >= LONG_ODD_ROW):
        own = _planned_layouts(extent, width, kept)
    layouts = own.copy()
    if kept and known is None:
        per_thread = max(KEPT_LIMIT // kept // width, 1)
        layouts.append(RowsShape(32, width, per_thread))
        if width > 1:
            layouts.append(RowsShape(256, width, per_thread))
    layouts += _peeled_layouts(work) if last else _in_shared(work, width, own)
    if not kept or (width == work.lanes.width and not _streams_peeled(work)):
        layouts.append(stream)
    return layouts


def _streams_peeled(work: ReductionWork) -> bool:
    """Whether all rows that stream do so with vectors that begin anywhere, and no text is needed beside that."""
    known = work.extent.length.value
    return work.peels_all and (work.phases.live > 0 if known is None else known >= LONG_ODD_ROW)


def _peeled_layouts(work: ReductionWork) -> list[RowsShape]:
    """The ways of long rows that no vector divides: those that registers keep, that shared memory does, and any."""
    peeled, extent, known = work.peeled, work.extent, work.extent.length.value
    if peeled is None:
        return []
    width, kept = peeled.lanes.width, work.phases.live
    odd = [size for size, _ in ((extent.planned, None), *extent.nearby) if size and size % width]
    found: list[RowsShape] = []
    if any(size >= LONG_ODD_ROW for size in odd):
        own = [each for each in _planned_layouts(extent, width, kept, odd=True) if each.threads >= 2 * each.width]
        found = [*own, *_in_shared(peeled, width, own)]
    least = 0 if known is not None or _streams_peeled(work) else LONG_ODD_ROW
    found.append(RowsShape(_streaming_threads(extent.planned), width, 0, least=least))
    return [replace(each, peeled=True) for each in found]


def _in_shared(work: ReductionWork, width: int, own: Sequence[RowsShape]) -> list[RowsShape]:
    """The way to keep planned rows in shared memory that none of their ``own`` ones keeps in registers."""
    most = max((each.capacity for each in own), default=0)
    lengths = [length for length, _ in [(work.extent.planned, None), *work.extent.nearby] if length and length > most]
    found = (_sharing(work, width, length) for length in sorted(lengths, reverse=True))
    return [shapes[0] for shapes in found if shapes][:1]


def _sharing(work: ReductionWork, width: int, length: int) -> list[RowsShape]:
    """Ways to keep rows of a length in shared memory, likely ones first: as many threads as a block has at most, fewer
    where a multiprocessor's memory has room for more rows."""
    longest = longest_row(work.frame) if work.phases.live else 0
    if length > longest or (length % width == 0) is work.frame.peeled:
        return []
    ways = [RowsShape(threads, width, IN_SHARED, longest=longest, peeled=work.frame.peeled)
            for threads in SHARING if 2 * threads * width <= length]
    return ways[::-1] if 2 * length > longest else ways


def _planned_layouts(extent: Extent, width: int, kept: int, odd: bool = False) -> list[RowsShape]:
    """The best layouts for the planned rows and for those near them, in an order in which the first that fits is meant:
    by length where that is open, else by the number of rows.  ``odd``: of lengths that the width does not divide."""
    found: list[tuple[int, RowsShape]] = []
    enough = ENOUGH_THREADS if kept else BUSY_THREADS
    for length, rows in dict.fromkeys([(extent.planned, extent.rows), *extent.nearby]):
        if not length or (extent.length.value is None and (length % width != 0) is not odd) or (
                odd and length < LONG_ODD_ROW):
            continue
        best = _best((length, rows), width, max(kept, 1), enough)
        if best is not None:
            found.append((rows or 0, best))
    if extent.length.value is None or len(found) < 2:
        return sorted({shape for _, shape in found}, key=lambda shape: (shape.capacity, shape.threads))
    layouts: list[RowsShape] = []
    found.sort(key=lambda one: one[0], reverse=True)
    for (rows, shape), more in zip(found, [None, *found], strict=False):
        if more is None or shape != replace(layouts[0], rows=None):
            # Between two planned counts the change comes at their geometric mean.
            layouts.insert(0, replace(shape, rows=None if more is None else isqrt(rows * more[0])))
    return layouts


def _others(default: RowsShape, work: ReductionWork) -> tuple[RowsShape, ...]:
    """Layouts that may be quicker than the first of ``_layouts`` for rows of the planned length."""
    length, kept = work.extent.planned, work.phases.live
    if length is None:
        return ()
    found = []
    for its, lanes in _widths(work, length):
        vectors, peeled = -(-length // lanes), its.frame.peeled
        for threads in (each for each in _POWERS if not peeled or each >= 2 * lanes):
            items = -(-vectors // threads)
            blocks = SEVERAL if threads <= 32 else (BLOCK,)
            if items * lanes * max(kept, 1) <= 2 * KEPT_LIMIT and items * threads < 2 * vectors:
                found += [RowsShape(threads, lanes, items, several=block, peeled=peeled) for block in blocks]
            if threads >= 32 and threads * 32 >= vectors >= 2 * threads:
                found += [RowsShape(threads, lanes, 0, peeled=peeled)]
        if default.items <= 0 or default.items * default.width * kept > KEPT_LIMIT:
            found += _sharing(its, lanes, length)
    return tuple(shape for shape in (*found, *_clustered(work, length)) if shape != default)


def _clustered(work: ReductionWork, length: int) -> Iterator[RowsShape]:
    """Of rows that are too few for the multiprocessors, ways for several of these to keep one."""
    count, width, kept = work.extent.rows, work.lanes.width, max(work.phases.live, 1)
    if count is None or not work.phases.live or length % width:
        return
    for cluster in (each for each in CLUSTERS if count * each <= 2 * HOPPER_HAS):
        for threads in SHARING_BLOCKS:
            items = -(-length // (width * threads * cluster))
            if items * width * kept <= 2 * KEPT_LIMIT and items * threads * cluster * width < 2 * length:
                yield RowsShape(threads, width, items, cluster=cluster)


def _widths(work: ReductionWork, length: int) -> Iterator[tuple[ReductionWork, int]]:
    """Widths of vectors that are worth trying for rows of a length, each with the region as they read it."""
    peeled, width = work.peeled, work.lanes.width
    if peeled is not None and length % peeled.lanes.width and length >= FEWEST_VECTORS * peeled.lanes.width:
        yield peeled, peeled.lanes.width
    yield from ((work, lanes) for lanes in (width, width // 2) if lanes and length % lanes == 0)


def _streaming_threads(length: int | None) -> int:
    if length is None:
        return 256
    threads = 32
    while threads < MAX_THREADS and threads * 16 < length:
        threads *= 2
    return threads


def _best(planned: tuple[int, int | None], width: int, kept: int, enough: int) -> RowsShape | None:
    """Threads for planned rows: their length, and how many there are if that is known.

    Where even one vector of each value that is kept is more than a thread keeps, narrower ones do.  The weights are
    measured ones (``benchmarks/ways.py`` holds what they choose against all else): two to four vectors a thread are
    best, threads past a warp pay for barriers, idle lanes cost what they are, and few rows want many threads each,
    until there are ``enough`` of them all together.
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
                best = score, RowsShape(threads, width, items)
    if best is None and width > 1 and width * kept > KEPT_LIMIT:
        return _best(planned, width // 2, kept, enough)
    return best[1] if best is not None else None
