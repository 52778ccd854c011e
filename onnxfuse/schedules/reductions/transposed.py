"""The transposed schedule: columns between tensors that lie along them and tensors that lie across.

A norm over the channels of an image whose result has the channels last reads neighbouring pixels and writes
neighbouring channels.  Vectors run across the columns, as in the column schedule; a block owns columns that lie side by
side, and what runs along them goes through shared memory by chunks (``transposed_text``), so that every tensor is
moved in whole sectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd

from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.binding import in_graph_terms
from onnxfuse.lowering.launch import Variant
from onnxfuse.lowering.lower import Lowered
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.choice import Choice, told
from onnxfuse.schedules.kernel import SECTOR_BYTES, STREAM, Kernel, fits_narrow, has_scans, staging_lanes, vector_guards
from onnxfuse.schedules.lanes import Lanes
from onnxfuse.schedules.reductions import columns
from onnxfuse.schedules.reductions.reduction import Reduction, ReductionWork, Ways, arranged
from onnxfuse.schedules.reductions.split import few_rows
from onnxfuse.schedules.reductions.transposed_text import Staging, transposed_text
from onnxfuse.schedules.schedule import Does, Expected, Request
from onnxfuse.schedules.source import Function
from onnxfuse.schedules.tiled import SHARED_BYTES, VECTOR_BYTES

STAGED_BYTES = 64
"""Bytes a thread of all that is staged: what shared memory holds with all threads of a multiprocessor at work."""

WIDTHS = (4, 2)
"""Elements of a vector along a column, where there are vectors."""

STREAMING_DEEP = 8
"""Threads that share a column which does not stay in registers, at least: what they stage at a time is one piece."""

MOST_THREADS = 1024


@dataclass(frozen=True)
class TransposedShape:
    """How columns are shared, the turns that a loop takes over a chunk, and the width of vectors along a column."""

    columns: columns.ColumnsShape
    turns: int
    wide: int

    @property
    def chunk(self) -> int:
        """Elements of a column that are staged at a time."""
        return self.turns * self.columns.deep

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of("transposed", **self.columns.settings, chunk=self.chunk, wide=self.wide)

    @property
    def name(self) -> str:
        """Name of the kernel."""
        own = self.columns
        kind = f"x{own.items}" if own.items else STREAM
        return f"transposed_{own.deep}x{own.across}_w{own.width}_v{self.wide}_{kind}_c{self.chunk}_{own.bits}"

    def shared(self, work: ReductionWork, staging: Staging) -> int:
        """Bytes of shared memory; see cuda/tile.cuh and cuda/columns.cuh."""
        own = self.columns
        total = 0
        for dtype in staging.dtypes:
            size = TYPES[dtype].size
            total += size * (own.across * own.width * self.chunk + own.across * max(self.wide, 4 // size)) + 16
        kinds = {TYPES[reduction.dtype].compute for phase in work.phases.reductions for reduction in phase}
        groups = own.deep // min(max(columns.WARP // own.across, 1), own.deep)
        room = (groups + 2) * own.across * own.width if groups > 1 else 1
        return total + room * sum(8 if kind in ("double", "long long", "unsigned long long") else 4 for kind in kinds)


class Transposed(Reduction):
    """Columns some of whose tensors go through shared memory because they lie the other way."""

    name = "transposed"
    settings = ("{deep} threads a column, {across} side by side, width {width}, {items}, chunks of {chunk}, "
                "width {wide} along them")
    each = "element"
    efficiency = 0.525
    # A block waits for shared memory twice.
    cached = False

    def runs(self, does: Does) -> bool:
        """Reductions with transposes of the innermost axis."""
        return does == Does.REDUCES | Does.TRANSPOSES

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """Not known before the region is pulled; other schedules of the family answer."""
        return None

    def refuses(self, request: Request) -> Refusal | None:
        """Where not all tensors can be moved in whole sectors."""
        return refuses_transposing(request)

    def of_rows(self, work: ReductionWork, rule: str) -> Kernel | Refusal | None:
        """The kernel of rows some of whose tensors lie the other way, unless they are better split."""
        if not work.transposes:
            return None
        ways = few_rows(work) or transposed_ways(work)
        return ways if isinstance(ways, Refusal) else self.made(work, ways, rule)


def refuses_transposing(request: Request) -> Refusal | None:
    """Why a region with reductions that moves the innermost axis has no kernel that moves all tensors in whole
    sectors."""
    work = request.once(arranged)
    if isinstance(work, Refusal):
        return in_graph_terms(work, request.lowered.binding.names)
    if work is not None and work.scattered:
        return Refusal("scattered-access", "the rows would be read element by element")
    if work is None or not work.transposes:
        return None
    if has_scans(request.lowered):
        return Refusal("scan-structure", "rows with running totals and tensors that lie across them meet")
    refusal = few_rows(work)
    if refusal is not None:
        return refusal
    staging = _staging(work)
    return _too_many(staging) if _shapes(work, staging) is None else None


def _too_many(staging: Staging) -> Refusal:
    many = len(staging.dtypes)
    return Refusal("tile-memory", f"{many} tensors that lie along the rows do not fit shared memory together")


def transposed_ways(work: ReductionWork) -> Ways | Refusal:
    """The variants of a region that stages something, or why it has none."""
    extent = work.extent
    count, length = work.expression(extent.count), work.expression(extent.length)
    staging = _staging(work)
    shapes = _shapes(work, staging)
    if shapes is None:
        return _too_many(staging)
    functions = {keep: _function(work, staging, keep) for keep in (True, False)}
    quickest, needed = shapes[0]
    others = _alternatives(work, staging, quickest) if quickest.columns.bits == 32 else []
    offered = {other.choice: other for other in others}
    choice, first = told(extent.choice, offered)
    if first is not None:
        shapes = [(first, needed), *shapes]
    ways = Ways(choice=choice, choices=tuple(offered))
    for shape, needed in shapes:
        own = shape.columns
        keep = own.items > 0
        guards = needed
        if keep and extent.length.value is None:
            guards += (f"{length} {own.deep * own.items + 1} <",)
        settings = (own.width, own.deep, own.across, max(own.items, 1), shape.turns, shape.wide)
        entry = functions[keep].entry(shape.name, settings, own.bits, own.threads)
        if all(shape.name != variant.name for variant in ways.variants):
            ways.entries.append(entry)
        ways.variants.append(Variant(shape.name, (entry.step(f"{count} {own.across * own.width} ceil"),), guards))
    kept = sorted({shape.columns.items > 0 for shape, _ in shapes}, reverse=True)
    ways.functions = [functions[keep] for keep in kept]
    return ways


def _function(work: ReductionWork, staging: Staging, keep: bool) -> Function:
    body = transposed_text(work.frame, staging, keep)
    name, template = "transposed_in_registers" if keep else "transposed_streaming", (
        "width", "deep", "across", "items", "turns", "wide")
    return Function(name, template, work.signature.parameters(body.sizes), body.text)


def _staging(work: ReductionWork) -> Staging:
    """What is staged, with the longest vectors by which all of it can be moved along the columns."""
    loads = work.way.staged
    outputs = [output for output in work.phases.outputs if output.staged]
    space, puller = work.puller.space, work.puller
    narrowest = Staging(loads, outputs, Lanes(space, puller, "@e", "@row", 1))
    wide = VECTOR_BYTES // max(TYPES[dtype].size for dtype in narrowest.dtypes)
    candidates = (Lanes(space, puller, "@e", "@row", width) for width in WIDTHS if width <= wide)
    places = [output.place for output in outputs]
    lanes = staging_lanes(candidates, work.extent.length, loads, places, work.planned)
    return narrowest if lanes is None else Staging(loads, outputs, lanes)


def _shapes(work: ReductionWork, staging: Staging) -> list[tuple[TransposedShape, tuple[str, ...]]] | None:
    """The variants with their guards, the quickest first, the last one without any; None where one does not fit."""
    lowered, across, down = work.lowered, work.lanes, staging.down
    along = [(f"i{load.input}", TYPES[load.dtype].size) for load in staging.loads]
    along += [(f"o{output.index}", TYPES[output.dtype].size) for output in staging.outputs]
    guards = {
        (across.width, 1): vector_guards(lowered, across, work.vectors),
        (1, down.width): vector_guards(lowered, down, along),
        (1, 1): (),
    }
    sides = [(across.width, down.width)]
    # Where one side's sizes are known only when the kernel runs, they need not spoil the other side's vectors.
    sides += [(1, down.width)] if across.multiples else []
    sides += [(across.width, 1)] if down.multiples else []
    wanted: list[tuple[columns.ColumnsShape, int, tuple[str, ...]]] = []
    for width, wide in dict.fromkeys([*sides, (1, 1)]) if fits_narrow(lowered) else ():
        needed = tuple(dict.fromkeys((*work.narrow, *guards[width, 1], *guards[1, wide])))
        wanted += [(shape, wide, needed) for shape in _columns(work, width)]
        if not needed:
            break
    else:
        wanted.append((replace(_columns(work, 1)[-1], bits=64), 1, ()))
    found: dict[TransposedShape, tuple[str, ...]] = {}
    for own, wide, needed in wanted:
        shape = _staged(work, staging, own, wide)
        if shape is None:
            return None
        # Narrower vectors may be best with wider ones allowed too: such a shape asks for no more than it needs.
        found[shape] = needed
    return list(found.items())


def _columns(work: ReductionWork, width: int) -> list[columns.ColumnsShape]:
    """Ways to share columns by vectors of this width: in registers where they fit, and streaming unless the length is
    known."""
    extent, kept = work.extent, work.phases.live
    length = extent.length.value if extent.length.value is not None else extent.planned
    shapes = columns.in_registers(work, width, length, kept) if kept and length else []
    if not shapes or extent.length.value is None:
        deep = STREAMING_DEEP
        while length and deep > 1 and deep // 2 >= length:
            deep //= 2
        while deep < columns.WARP and columns.latency_factor(work, width, deep) > 1:
            deep *= 2
        shapes.append(columns.ColumnsShape(deep, columns.side_by_side(deep, extent.rows, width), width, 0))
    return [_in_sectors(work, shape) for shape in shapes]


def _alternatives(work: ReductionWork, staging: Staging, own: TransposedShape) -> list[TransposedShape]:
    """Shapes that may be quicker than the schedule's own for columns of the planned length."""
    shapes = [_in_sectors(work, shape) for shape in (own.columns, *columns.alternatives(work, own.columns))]
    found = [_staged(work, staging, shape, own.wide) for shape in dict.fromkeys(shapes)]
    # Shorter chunks wait more often, and leave room for more blocks.
    unit = own.wide // gcd(own.wide, own.columns.deep)
    found += [replace(own, turns=turns) for turns in (own.turns // 2, own.turns // 4) if turns and turns % unit == 0]
    found += [_staged(work, staging, own.columns, own.wide // 2)] if own.wide > 1 else []
    return [shape for shape in dict.fromkeys(found) if shape is not None and shape != own]


def _in_sectors(work: ReductionWork, shape: columns.ColumnsShape) -> columns.ColumnsShape:
    """With as many threads side by side as read whole sectors."""
    smallest, across = min((size for _, size in work.vectors), default=SECTOR_BYTES), shape.across
    while across * shape.width * smallest < SECTOR_BYTES and 2 * across * shape.deep <= MOST_THREADS:
        across *= 2
    return replace(shape, across=across)


def _staged(work: ReductionWork, staging: Staging, shape: columns.ColumnsShape, wide: int) -> TransposedShape | None:
    """The longest chunks that leave room for other blocks, of whole vectors; None where none fit."""
    unit = wide // gcd(wide, shape.deep)
    length = work.extent.length.value if work.extent.length.value is not None else work.extent.planned
    whole = shape.items or -(-(length or MOST_THREADS) // shape.deep)
    most = max(STAGED_BYTES // (shape.width * sum(TYPES[dtype].size for dtype in staging.dtypes)), 1)
    for parts in range(-(-whole // most), whole + 1):
        found = TransposedShape(shape, -(-whole // (parts * unit)) * unit, wide)
        if found.shared(work, staging) <= SHARED_BYTES:
            return found
    return None
