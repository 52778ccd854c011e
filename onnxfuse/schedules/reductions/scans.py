"""The scan schedule: running totals along an axis, with maps and reductions over the same rows around them.

Rows that lie in one piece are shared by a warp, less of one, or a block: neighbouring threads have neighbouring
vectors, which they total among themselves.  Of rows that lie side by side a block has some, and its threads share their
elements.  A row stays in registers, or goes by tiles with a carry; few long rows are shared by several blocks each
(``scans_split``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from onnxfuse.lowering.launch import Step, Variant
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.pull import Scanned
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.choice import Choice, told
from onnxfuse.schedules.kernel import STREAM, Kernel, fits_narrow, has_scans, walk
from onnxfuse.schedules.reductions.reduction import ENOUGH_THREADS, KEPT_LIMIT, Reduction, ReductionWork, Ways
from onnxfuse.schedules.reductions.scans_expected import LONG_COLUMN, LONG_ROW, SIDE_BY_SIDE, is_split, scans_expected
from onnxfuse.schedules.reductions.scans_split import parts_of, split_texts
from onnxfuse.schedules.reductions.scans_text import AcrossText, AlongText, held, totals_of
from onnxfuse.schedules.reductions.split import MOST_CHUNKS, MULTIPROCESSORS
from onnxfuse.schedules.schedule import Does, Expected
from onnxfuse.schedules.source import Entry, Function, Parameter

BLOCK = 128
"""Threads of a block whose rows are a warp or less."""

MAX_THREADS = 1024
WARP = 32

SOME = 4
"""Vectors a thread has at most, where a row can have more threads."""

TILE, TILE_ELEMENTS = 2, 8
"""Vectors of a tile that a thread has at least, and elements where vectors are short."""

DEEP, SPLIT_THREADS = 512, 256
"""Threads of a block that has rows side by side at most, and of one that has a chunk of a row."""

DEPTHS = (64, 128, 256, 512, 1024)
"""Threads of such a block that tuning tries."""

SPLIT_BLOCKS = 4
"""Blocks a multiprocessor that chunks are to be enough for."""


@dataclass(frozen=True)
class ScansShape:
    """A way to run rows.

    Attributes:
        threads: that share a row; width: of vectors.
        items: vectors that a thread keeps, 0 where a row goes by tiles; of rows that lie side by side, elements that a
            thread has of a tile.
        block: threads of a block.
    """

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
    def across(self) -> int:
        """Vectors of rows side by side that a block has."""
        return self.block // self.threads

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of("scans", threads=self.threads, width=self.width, items=self.items, block=self.block)

    def name(self, across: bool) -> str:
        """Name of the kernel."""
        if across:
            return f"scans_across_{self.threads}x{self.across}_w{self.width}_x{self.items}_{self.bits}"
        kind = f"x{self.items}" if self.items else STREAM
        return f"scans_{self.threads}_w{self.width}_{kind}_{self.bits}_b{self.block}"


class Scans(Reduction):
    """Rows with running totals.

    Rows that registers hold reach 0.75 to 1 of the bandwidth (benchmarks/results, ways).  The share is that of longer
    ones, which are read once more for what their chunks amount to; where no vector divides them they take up to three
    times as long as it says (ways-scans).
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
        """One kernel, or, where several blocks share a row, one for each phase and for each level of totals."""
        return scans_expected(lowered, sizes, multiprocessors) if has_scans(lowered) else None

    def headers(self, work: ReductionWork) -> tuple[str, ...]:
        """The one with totals over threads, and what it needs of that of columns."""
        return "onnxfuse", "columns", "scan"

    def of_rows(self, work: ReductionWork, rule: str) -> Kernel | Refusal:
        """The kernel of rows with totals."""
        if work.transposes:
            return Refusal("scan-structure", "rows with running totals and tensors that lie across them meet")
        directions = {total.reverse for total in walk(output.scalar for output in work.phases.outputs)
                      if isinstance(total, Scanned)}
        if len(directions) > 1:
            return Refusal("scan-structure", "running totals from either end of the rows meet in one region")
        return self.made(work, _ways(work), rule)


def _ways(work: ReductionWork) -> Ways:
    across = work.way.across
    layouts = list(dict.fromkeys(_across(work) if across else _along(work)))
    offered = {shape.choice: shape for shape in _others(work, layouts[0])} if fits_narrow(work.lowered) else {}
    choice, first = told(work.extent.choice, offered)
    if first is not None:
        layouts = list(dict.fromkeys([first, *layouts]))
    ways = Ways(choice=choice, choices=tuple(offered))
    functions = {tiles: _function(work, tiles) for tiles in ((True,) if across else (False, True))}
    for layout in layouts:
        _add(work, ways, functions[across or not layout.items], layout)
    ways.functions = [function for tiles, function in functions.items()
                      if any((across or not layout.items) is tiles for layout in layouts)]
    _add_split(work, ways, 0 if first is None else 1)
    return ways


def _add(work: ReductionWork, ways: Ways, function: Function, layout: ScansShape) -> None:
    """A variant of whole rows."""
    across, count = work.way.across, work.expression(work.extent.count)
    guards = () if layout.bits == 64 else work.aligned if layout.width > 1 else work.narrow
    if layout.items and not across and work.extent.length.value is None:
        guards += (f"{work.expression(work.extent.length)} {layout.capacity + 1} <",)
    settings = (layout.width, layout.threads, layout.across, layout.items) if across else (
        layout.width, layout.threads, layout.block, layout.items or _tile(layout.width))
    entry = function.entry(layout.name(across), settings, layout.bits, layout.block)
    rows = layout.across * layout.width if across else layout.block // layout.threads
    ways.entries.append(entry)
    ways.variants.append(Variant(entry.name, (entry.step(f"{count} {rows} ceil"),), guards))


def _function(work: ReductionWork, tiles: bool) -> Function:
    if work.way.across:
        body = AcrossText(work.frame).text()
        return Function(
            "scans_across", ("width", "deep", "across", "items"), work.signature.parameters(body.sizes), body.text)
    # In registers, what phases that are apart would read again costs nothing.
    body = AlongText(work.frame if tiles else replace(work.frame, streaming=work.frame.phases), tiles).text()
    name = "scans_by_tiles" if tiles else "scans_in_registers"
    return Function(name, ("width", "threads", "block", "items"), work.signature.parameters(body.sizes), body.text)


def _along(work: ReductionWork) -> Iterable[ScansShape]:
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
            some = [ScansShape(WARP, lanes, items, BLOCK), ScansShape(256, lanes, items, 256)]
            yield from (shape for shape in some if best is None or shape.capacity > best.capacity)
        yield _tiled(extent.planned, lanes)
    yield replace(_tiled(extent.planned, 1), bits=64)


def _across(work: ReductionWork) -> Iterable[ScansShape]:
    """The same of rows that lie side by side."""
    for width in dict.fromkeys((work.lanes.width, 1)) if fits_narrow(work.lowered) else ():
        yield _beside(work, width, DEEP)
    yield replace(_beside(work, 1, DEEP), bits=64)


def _beside(work: ReductionWork, width: int, most: int, share: int = 1) -> ScansShape:
    """Rows side by side: as many of a block as fill sectors, or more of short ones, and threads for all of their
    elements up to ``most``; ``share``: of the elements that a thread could have."""
    extent, rows = work.extent, SIDE_BY_SIDE
    count = extent.count.value if extent.count.value is not None else extent.rows
    while rows > work.lanes.width and count is not None and rows // 2 >= count:
        rows //= 2
    across, length = rows // width, extent.length.value if extent.length.value is not None else extent.planned
    items = max(min(KEPT_LIMIT // _kept(work) // width, 8) // share, 1)
    needed = SPLIT_THREADS // across if length is None else -(-length // items)
    deep = 1
    while deep < needed and deep * across < most:
        deep *= 2
    while deep * across < BLOCK and across < WARP and (count is None or 2 * across * width <= count):
        across *= 2
    deep = max(deep, WARP // across)
    return ScansShape(deep, width, items, deep * across)


def _kept(work: ReductionWork) -> int:
    """Values an element that stay in registers."""
    phases = work.phases
    roots = (root for phase in range(phases.count) for root in phases.roots(phase))
    return len(totals_of(roots)) + len(held(phases, work.lanes, tiles=work.way.across))


def _best(work: ReductionWork, length: int, width: int) -> ScansShape | None:
    """The fewest threads that keep a planned row, or more where there are few rows; None where none keep it."""
    vectors, kept, rows = -(-length // width), _kept(work), work.extent.rows
    for threads in (1 << power for power in range(MAX_THREADS.bit_length())):
        items = -(-vectors // threads)
        idle = rows is not None and rows * threads < ENOUGH_THREADS and threads < vectors
        if items * width * kept <= KEPT_LIMIT and (items <= SOME or threads == MAX_THREADS) and (
                not idle or threads == MAX_THREADS):
            return ScansShape(threads, width, items, max(threads, BLOCK) if threads <= WARP else threads)
    return None


def _tile(width: int) -> int:
    """Vectors of a tile that a thread has."""
    return max(TILE, TILE_ELEMENTS // width)


def _tiled(length: int | None, width: int) -> ScansShape:
    threads = 256 if length is None else WARP
    while length is not None and threads < MAX_THREADS and threads * width * _tile(width) < length:
        threads *= 2
    return ScansShape(threads, width, 0, BLOCK if threads <= WARP else threads)


def _others(work: ReductionWork, own: ScansShape) -> Iterable[ScansShape]:
    """Ways that may be quicker than the schedule's own for rows of the planned length."""
    if work.way.across:
        shapes = (_beside(work, own.width, most, share) for share in (1, 2) for most in DEPTHS)
        yield from (shape for shape in dict.fromkeys(shapes) if shape != own)
    elif own.items and work.extent.planned:
        vectors, kept = -(-work.extent.planned // own.width), _kept(work)
        for threads in (own.threads // 2, own.threads * 2):
            items = -(-vectors // threads) if 0 < threads <= min(MAX_THREADS, vectors) else 0
            if items and items * own.width * kept <= 2 * KEPT_LIMIT:
                yield ScansShape(threads, own.width, items, BLOCK if threads <= WARP else threads)


# ---- Few long rows. ----


def _is_split(work: ReductionWork) -> bool:
    """Whether rows may be few and long: of the planned ones it is known that they are not, or there is no plan."""
    extent, longest = work.extent, LONG_COLUMN if work.way.across else LONG_ROW
    if extent.length.value is not None and extent.length.value <= longest:
        return False
    near = [(extent.planned, extent.rows), *extent.nearby]
    return any(size is not None and rows is not None and is_split(size, rows, work.way.across, MULTIPROCESSORS)
               and (work.way.across or _best(work, size, work.lanes.width) is None) for size, rows in near)


def _add_split(work: ReductionWork, ways: Ways, told: int) -> None:
    """Variants that share a row among blocks, behind those that are ``told`` and those that keep rows in registers."""
    if not _is_split(work) or not fits_narrow(work.lowered):
        return
    across, length = work.way.across, work.expression(work.extent.length)
    few = f"{work.expression(work.extent.count)} " + (f"{SIDE_BY_SIDE} ceil 2 * sms <=" if across else "sms <=")
    longest = LONG_COLUMN if across else LONG_ROW
    guards = (few, f"{longest} {length} <") if work.extent.length.value is None else (few,)
    form = _form(work)
    ways.scratch.append(form.scratch)
    ways.functions += [function for function, _ in form.steps]
    variants = []
    for width, needed in dict.fromkeys([(work.lanes.width, work.aligned), (1, work.narrow)]):
        if width == work.lanes.width or work.aligned != work.narrow:
            variant, entries = _split(work, form, width, (*guards, *needed))
            ways.entries += entries
            variants.append(variant)
    place = next((place for place, each in enumerate(ways.variants)
                  if place >= told and (across or STREAM in each.name)), len(ways.variants) - 1)
    ways.variants[place:place] = variants


@dataclass(frozen=True)
class ScansForm:
    """How blocks share rows: expressions for the blocks that whole rows would take, for the chunks of a row, and for
    scratch memory; and the steps, with whether a block has a chunk in each."""

    blocks: str
    chunks: str
    scratch: str
    steps: tuple[tuple[Function, bool], ...]


def _form(work: ReductionWork) -> ScansForm:
    across, width = work.way.across, work.lanes.width
    count, length = work.expression(work.extent.count), work.expression(work.extent.length)
    shape = _beside(work, width, SPLIT_THREADS) if across else _chunked(width)
    unit = shape.threads * shape.items * (1 if across else width)
    blocks = f"{count} {shape.across * width} ceil" if across else count
    # Chunks are whole tiles, as many blocks as the GPU holds have one each.
    units, wanted = f"{length} {unit} ceil 1 max", f"sms {SPLIT_BLOCKS} * {blocks} ceil {MOST_CHUNKS} min"
    chunk = f"{units} {wanted} ceil {unit} *"
    chunks = f"{length} 1 max {chunk} ceil"
    signature = replace(work.signature, more=(
        Parameter("unsigned char* __restrict__", "t0", "t0"),
        Parameter("const {index}", "chunk", f"i{{bits}}:{chunk}"),
        Parameter("const {index}", "chunks", f"i{{bits}}:{chunks}"),
    ))
    parts = parts_of(work.frame.streaming)
    template = ("width", "deep", "across", "items") if across else ("width", "threads", "items")
    steps: list[tuple[Function, bool]] = []
    for text in split_texts(work.frame, parts, across):
        body = text.text()
        parameters = signature.parameters(body.sizes)
        steps.append((Function(f"scans_split_{len(steps)}", template, parameters, body.text), not text.alone))
    return ScansForm(blocks, chunks, f"{count} {chunks} * {parts.bytes} *", tuple(steps))


def _chunked(width: int) -> ScansShape:
    """Threads with a tile of a chunk of a row."""
    return ScansShape(SPLIT_THREADS, width, _tile(width), SPLIT_THREADS)


def _split(work: ReductionWork, form: ScansForm, width: int, guards: tuple[str, ...]) -> tuple[Variant, list[Entry]]:
    """The variant with vectors of a width."""
    across = work.way.across
    shape = _beside(work, width, SPLIT_THREADS) if across else _chunked(width)
    share = (shape.threads, shape.across) if across else (shape.threads,)
    entries: list[Entry] = []
    steps: list[Step] = []
    for number, (function, chunked) in enumerate(form.steps):
        name = f"scans_split{number}_{'across_' if across else ''}w{width}"
        entries.append(function.entry(name, (width, *share, shape.items), shape.bits, shape.block))
        steps.append(entries[-1].step(f"{form.blocks} {form.chunks} *" if chunked else form.blocks))
    label = f"scans, split, {'across, ' if across else ''}width {width}"
    return Variant(label, tuple(steps), guards), entries
