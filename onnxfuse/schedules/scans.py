"""The scan schedule: running totals along an axis, with maps and reductions over the same rows around them.

Rows that lie in one piece are shared by a warp, less of one, or a block: neighbouring threads have neighbouring
vectors, which they total among themselves.  A row stays in registers, or goes by tiles with a carry.  Of rows that lie
side by side every thread has a vector to itself and walks it from end to end; where there are few and long ones, too
few threads would wait too long for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from onnxfuse.lowering.launch import Variant
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.pull import Scanned
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.choice import Choice, told
from onnxfuse.schedules.kernel import STREAM, Kernel, fits_narrow, has_scans, walk
from onnxfuse.schedules.reduction import ENOUGH_THREADS, KEPT_LIMIT, Reduction, Ways, Work
from onnxfuse.schedules.scans_text import AcrossText, AlongText, held, totals_of
from onnxfuse.schedules.schedule import Does, Expected
from onnxfuse.schedules.source import Function

BLOCK = 128
"""Threads of a block whose rows are a warp or less, or lie side by side."""

BLOCKS = (32, 64, 128, 256)
"""Threads of such a block that tuning tries."""

MAX_THREADS = 1024
WARP = 32

SOME = 4
"""Vectors a thread has at most, where a row can have more threads."""

TILE = 2
"""Vectors of a tile that a thread has."""

FEW_COLUMNS, LONG_COLUMN = 512, 1024
"""Rows side by side that are so few and so long that they are left to the runtime."""


@dataclass(frozen=True)
class Shape:
    """A way to run rows: threads that share one, vector width, vectors that a thread keeps (0 where a row goes by
    tiles), and threads of a block."""

    threads: int
    width: int
    items: int
    block: int
    bits: int = 32

    @property
    def capacity(self) -> int:
        """Elements of a row that fit."""
        return self.threads * self.width * self.items

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of("scans", threads=self.threads, width=self.width, items=self.items, block=self.block)

    def name(self, across: bool) -> str:
        """Name of the kernel."""
        if across:
            return f"scans_across_w{self.width}_{self.bits}_b{self.block}"
        kind = f"x{self.items}" if self.items else STREAM
        return f"scans_{self.threads}_w{self.width}_{kind}_{self.bits}_b{self.block}"


class Scans(Reduction):
    """Rows with running totals.

    Its share of the bandwidth is a guess, and a low one: no kernel of it was measured.  ONNX Runtime's own kernel adds
    up, for every element, all those before it.
    """

    name = "scans"
    family = ""
    settings = "{threads} threads a row, width {width}, {items}, blocks of {block}"
    each = "vector"
    efficiency = 0.5
    scans = True

    def runs(self, does: Does) -> bool:
        """All that totals."""
        return Does.SCANS in does

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """One kernel."""
        return Expected() if has_scans(lowered) else None

    def headers(self, work: Work) -> tuple[str, ...]:
        """The one with totals over threads, where threads share rows."""
        return ("onnxfuse",) if work.way.across else ("onnxfuse", "scan")

    def of_rows(self, work: Work, rule: str) -> Kernel | Refusal:
        """The kernel of rows with totals."""
        if work.transposes:
            return Refusal("scan-structure", "rows with running totals and tensors that lie across them meet")
        directions = {total.reverse for total in walk(output.scalar for output in work.phases.outputs)
                      if isinstance(total, Scanned)}
        if len(directions) > 1:
            return Refusal("scan-structure", "running totals from either end of the rows meet in one region")
        extent = work.extent
        few = work.way.across and extent.rows is not None and 0 < extent.rows < FEW_COLUMNS
        if few and (extent.planned or 0) > LONG_COLUMN:
            return Refusal(
                "few-rows", f"{extent.rows} rows side by side, of {extent.planned} elements, are too few to have a "
                "thread each")
        # Totals are written for phases that are apart, a softmax's too.
        work = replace(work, frame=replace(work.frame, streaming=work.frame.phases))
        return self.made(work, _ways(work), rule)


def _ways(work: Work) -> Ways:
    extent, across = work.extent, work.way.across
    count, length = work.expression(extent.count), work.expression(extent.length)
    layouts = list(dict.fromkeys(_across(work) if across else _along(work)))
    offered = {shape.choice: shape for shape in _others(work, layouts[0])} if fits_narrow(work.lowered) else {}
    choice, first = told(extent.choice, offered)
    if first is not None:
        layouts = list(dict.fromkeys([first, *layouts]))
    ways = Ways(choice=choice, choices=tuple(offered))
    functions = {tiles: _function(work, tiles) for tiles in ((True,) if across else (False, True))}
    for layout in layouts:
        guards = () if layout.bits == 64 else work.aligned if layout.width > 1 else work.narrow
        if layout.items and extent.length.value is None:
            guards += (f"{length} {layout.capacity + 1} <",)
        settings = (layout.width, layout.block) if across else (
            layout.width, layout.threads, layout.block, layout.items or TILE)
        entry = functions[not layout.items].entry(layout.name(across), settings, layout.bits, layout.block)
        rows = layout.block * layout.width if across else layout.block // layout.threads
        ways.entries.append(entry)
        ways.variants.append(Variant(entry.name, (entry.step(f"{count} {rows} ceil"),), guards))
    ways.functions = [function for tiles, function in functions.items()
                      if any(bool(layout.items) is not tiles for layout in layouts)]
    return ways


def _function(work: Work, tiles: bool) -> Function:
    if work.way.across:
        body = AcrossText(work.frame).text()
        return Function("scans_across", ("width", "block"), work.signature.parameters(body.sizes), body.text)
    body = AlongText(work.frame, tiles).text()
    name = "scans_by_tiles" if tiles else "scans_in_registers"
    return Function(name, ("width", "threads", "block", "items"), work.signature.parameters(body.sizes), body.text)


def _along(work: Work) -> Iterable[Shape]:
    """The variants of rows that lie in one piece, fastest first; the last one runs anything."""
    extent, width = work.extent, work.lanes.width
    known, kept = extent.length.value, _kept(work)
    for lanes in dict.fromkeys((width, 1) if known is None else (width,)) if fits_narrow(work.lowered) else ():
        fits = extent.planned and extent.planned % lanes == 0
        best = _best(work, extent.planned or 0, lanes) if fits else None
        if best is not None:
            yield best
        if known is None:
            items = max(KEPT_LIMIT // kept // lanes, 1)
            some = [Shape(WARP, lanes, items, BLOCK), Shape(256, lanes, items, 256)]
            yield from (shape for shape in some if best is None or shape.capacity > best.capacity)
        yield _tiled(extent.planned, lanes)
    yield replace(_tiled(extent.planned, 1), bits=64)


def _across(work: Work) -> Iterable[Shape]:
    """The same of rows that lie side by side."""
    extent = work.extent
    for width in dict.fromkeys((work.lanes.width, 1)) if fits_narrow(work.lowered) else ():
        crowded = extent.rows is None or extent.rows // width >= ENOUGH_THREADS
        yield Shape(1, width, 0, BLOCK if crowded else WARP)
    yield Shape(1, 1, 0, BLOCK, bits=64)


def _kept(work: Work) -> int:
    """Values an element that stay in registers."""
    roots = (root for phase in range(work.phases.count) for root in work.phases.roots(phase))
    return len(totals_of(roots)) + len(held(work.frame, tiles=False))


def _best(work: Work, length: int, width: int) -> Shape | None:
    """The fewest threads that keep a planned row, or more where there are few rows; None where none keep it."""
    vectors, kept, rows = -(-length // width), _kept(work), work.extent.rows
    for threads in (1 << power for power in range(MAX_THREADS.bit_length())):
        items = -(-vectors // threads)
        hungry = rows is not None and rows * threads < ENOUGH_THREADS and threads < vectors
        if items * width * kept <= KEPT_LIMIT and (items <= SOME or threads == MAX_THREADS) and (
                not hungry or threads == MAX_THREADS):
            return Shape(threads, width, items, max(threads, BLOCK) if threads <= WARP else threads)
    return None


def _tiled(length: int | None, width: int) -> Shape:
    threads = 256 if length is None else WARP
    while length is not None and threads < MAX_THREADS and threads * width * TILE < length:
        threads *= 2
    return Shape(threads, width, 0, BLOCK if threads <= WARP else threads)


def _others(work: Work, own: Shape) -> Iterable[Shape]:
    """Ways that may be quicker than the schedule's own for rows of the planned length."""
    if work.way.across:
        yield from (replace(own, block=block) for block in BLOCKS if block != own.block)
    elif own.items and work.extent.planned:
        vectors, kept = -(-work.extent.planned // own.width), _kept(work)
        for threads in (own.threads // 2, own.threads * 2):
            items = -(-vectors // threads) if 0 < threads <= min(MAX_THREADS, vectors) else 0
            if items and items * own.width * kept <= 2 * KEPT_LIMIT:
                yield Shape(threads, own.width, items, BLOCK if threads <= WARP else threads)
