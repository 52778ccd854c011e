"""Long rows that lie in pieces shorter than a line of memory: norms of groups of channels where the channels are last.

    place 0: │ row 0 │ row 1 │ row 2 │ ...      a row is a group's channels at all places of an image;
    place 1: │ row 0 │ row 1 │ row 2 │ ...      column: one channel at all places
    ...

A block of one row would use a few bytes of each line that it reads.  Here a row is cut into columns, as many as its
pieces are long, which lie side by side with those of other rows: blocks have chunks of whole lines of them, as where
columns are split (``split``), and combine what they find over the columns of each row before they write it to scratch.

Few long columns whose mean and variance are wanted, as of instance norms, are pieces of one: found together here, both
take a pass less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import lcm

from onnxfuse.graph.dims import Dim, dim, product
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.tensors import Reduce
from onnxfuse.lowering.arrangement import Arrangement, arrangement
from onnxfuse.lowering.lower import Lowered
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.choice import Choice, told
from onnxfuse.schedules.kernel import VECTOR_BYTES, Kernel, has_scans
from onnxfuse.schedules.reductions.reduction import (
    MOST_IN_PIECES,
    Extent,
    Reduction,
    ReductionWork,
    arranged,
    fills_sectors,
    natural_rows,
    pulled,
    smallest,
    step_of,
)
from onnxfuse.schedules.reductions.rows import Rows
from onnxfuse.schedules.reductions.split import (
    KEPT_ROW,
    LONG_COLUMN,
    SplitForm,
    SplitShape,
    SplitWays,
    are_few_columns,
    joined,
    ways_of,
)
from onnxfuse.schedules.reductions.split_text import UNROLLED, reductions_of
from onnxfuse.schedules.schedule import Does, Expected, Request

LINE_BYTES = 128
"""What a warp asks the memory for at a time: pieces as long need nothing beside them."""

SHARED_BYTES = 48 << 10
"""Shared memory of a block that asks for no more than all GPUs give."""


@dataclass(frozen=True)
class PiecesShape:
    """Threads of a block, blocks a multiprocessor, and bytes side by side that a block reads of a place."""

    threads: int
    blocks: int
    bytes: int

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of("pieces", threads=self.threads, blocks=self.blocks, bytes=self.bytes)


OWN = PiecesShape(256, 3, 256)
"""As many threads as have 80 registers each: what a vector's columns need beside the elements on their way are up to
four numbers a lane.  Not more blocks: every one of a later step reads the numbers of all chunks of its rows."""

ALONE = PiecesShape(512, 1, 128)
"""Of rows that are one column: every block of a later step reads two numbers of each column and chunk, as much as all
blocks together squared."""

CACHED = PiecesShape(256, 2, 128)
"""Of tensors that the second-level cache holds between both times that they are read, and of places of a line and less:
an H200 took 0.7 to 0.9 times as long so for 2 to 17 MB."""

CACHED_BYTES = 32 << 20
"""Under which a tensor is one of these: of 34 MB both take as long, of 67 MB the other is quicker by an eighth."""

OTHERS = tuple(shape for shape in (PiecesShape(threads, blocks, wide) for threads, blocks in (
    (256, 2), (256, 3), (256, 4), (512, 1), (512, 2)) for wide in (128, 256, 512)))
"""What tuning tries."""


class Pieces(Reduction):
    """Rows in pieces; where shorter ones may come, the same kernel runs these as ``whole`` would."""

    name = "pieces"
    settings = "blocks of {threads}, {blocks} a multiprocessor, {bytes} bytes side by side"

    def __init__(self, whole: Rows) -> None:
        self.whole = whole

    def runs(self, does: Does) -> bool:
        """What nodes do does not tell how their rows lie."""
        return False

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """A kernel a phase, which reads the rows; a mean and a variance are one."""
        reduction = _first(lowered)
        if reduction is None:
            return None
        length = lowered.binding.at(arrangement(reduction.operand.shape, reduction.axes).length, sizes)
        if length is None or length <= LONG_COLUMN:
            return None
        request = Request(lowered, sizes=sizes)
        work = request.once(in_pieces)
        if work is None or length <= _longest(request, work):
            return None
        whole = product(reduction.operand.shape)
        read = sum((product(tensor.shape) * TYPES[tensor.dtype].size for tensor in lowered.program.inputs
                    if product(tensor.shape) == whole), dim(0))
        phases = work.frame.streaming.count
        return Expected(phases, (read * (phases - 1)).substitute(lowered.binding.names))

    def headers(self, work: ReductionWork) -> tuple[str, ...]:
        """Those of columns and of pieces."""
        return "onnxfuse", "columns", "pieces"

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of rows that may be long when it runs."""
        work = request.once(in_pieces)
        found = None if work is None else self._split(request, work)
        if work is None or found is None:
            return None
        near = request.once(arranged)
        if not isinstance(near, ReductionWork) or not self.whole.applies(near):
            return self.made(work, found.ways, request.rule)
        other = self.whole.beside(near, found.planned)
        if not found.always:
            own = self if found.planned and other.choice is None else self.whole
            return replace(self.made(work, joined(other, found), request.rule), schedule=own.name)
        if other.choice is not None:
            return self.whole.made(near, other, request.rule)
        # What else it may be told to be, and no other way.
        ways = replace(found.ways, choices=(*found.ways.choices, *other.choices))
        return self.made(work, ways, request.rule)

    def _split(self, request: Request, work: ReductionWork) -> SplitWays | None:
        """The variants that cut rows, or None where no rows are known to be long."""
        longest, length = _longest(request, work), work.extent.length.value
        if length is not None and length * work.extent.pieces <= longest:
            return None
        always = length is not None
        planned, *near = (size is not None and size * work.extent.pieces > longest for size in _planned(work.extent))
        if not (always or planned or any(near)):
            return None
        own = _own(work)
        offered = {shape.choice: form for shape in OTHERS
                   if shape != own and (form := _form(work, shape, longest)) is not None}
        choice, form = told(work.extent.choice, offered)
        form = form or _form(work, own, longest)
        if form is None:
            return None
        guards = () if always else (f"{longest // work.extent.pieces} {work.expression(work.extent.length)} <",)
        ways = replace(ways_of(work, form, guards), choice=choice, choices=tuple(offered))
        return SplitWays(ways, always, planned or always)

    def of_rows(self, work: ReductionWork, rule: str) -> None:
        """Of rows alone it has none."""
        return None


def in_pieces(request: Request) -> ReductionWork | None:
    """A region with its rows cut into columns; None where they do not lie in short pieces, or not all tensors do so."""
    lowered, reduction = request.lowered, _first(request.lowered)
    cut = None if reduction is None or has_scans(lowered) else _cut(request, reduction)
    if reduction is None or cut is None:
        return None
    pieces, step, outermost = cut
    space, rows = natural_rows(reduction)
    count = rows.arrangement.count * pieces
    column, place = space.base("@row", count), space.base("@e", step)
    place = place if step != 1 else place * 0
    row, piece = space.divmod(column, pieces)
    kept = tuple(size for axis, size in enumerate(reduction.operand.shape) if axis not in reduction.axes)
    rows.row = space.linear(space.delinear(row, kept), kept)
    rows.place = piece * step + place if outermost else place * pieces + piece
    sizes = [(lowered.binding.at(step, each), lowered.binding.at(count, each))
             for each in (request.sizes, *request.nearby)]
    extent = Extent(count, step, *sizes[0], request.choice, tuple(sizes[1:]), pieces.value or 1)
    work = pulled(request, reduction, (space, rows), extent)
    # An output lies along the rows, and would go through shared memory, or it lies across.
    if isinstance(work, Refusal) or not work.way.across or work.transposes or work.scattered:
        return None
    return work if pieces != 1 or work.frame.streaming.moments else None


def _first(lowered: Lowered) -> Reduce | None:
    return next((tensor for tensor in lowered.program.tensors if isinstance(tensor, Reduce)), None)


def _may_gain_alone(request: Request, found: Arrangement) -> bool:
    """Whether rows may gain as columns, one each: few and long ones."""
    count, length = request.lowered.binding.at(found.count, request.sizes), found.length.value
    few = count is not None and are_few_columns(count, VECTOR_BYTES // smallest(request.lowered.program))
    return few and length is not None and length > LONG_COLUMN


def _cut(request: Request, reduction: Reduce) -> tuple[Dim, Dim, bool] | None:
    """The elements of a piece, how many pieces a row has, and whether neighbours in memory are as far apart in the row
    as it has pieces, or neighbours in it; None where pieces are long, or of unknown length."""
    lowered, found = request.lowered, arrangement(reduction.operand.shape, reduction.axes)
    step, outermost = step_of(lowered.program, reduction), True
    pieces = None if step is None else found.length.divide(step)
    if step is None and len(found.segments) > 2 and found.segments[-1][1]:
        pieces, outermost = found.inner, False
        step = product([size for size, reduced in found.segments[:-1] if reduced])
    if step is None and _may_gain_alone(request, found):
        pieces, step = dim(1), found.length
    if step is None or pieces is None or pieces.value is None:
        return None
    short = pieces.value < LINE_BYTES // smallest(lowered.program)
    return (pieces, step, outermost) if short and step != 1 else None


def _longest(request: Request, work: ReductionWork) -> int:
    """Elements of the longest rows that blocks of one row each are quicker for: all that registers hold, where pieces
    fill sectors."""
    program, pieces = request.lowered.program, work.extent.pieces
    if pieces == 1:
        return LONG_COLUMN
    return KEPT_ROW // max(work.phases.live, 1) if fills_sectors(program, dim(pieces)) else MOST_IN_PIECES


def _own(work: ReductionWork) -> PiecesShape:
    """How blocks are best by themselves."""
    extent, size = work.extent, max((size for _, size in work.vectors), default=1)
    if extent.pieces == 1:
        return ALONE
    place = None if extent.rows is None else extent.rows * size
    if place is None or (place > LINE_BYTES and (extent.planned is None or place * extent.planned >= CACHED_BYTES)):
        return OWN
    return CACHED


def _planned(extent: Extent) -> Iterator[int | None]:
    yield extent.planned
    yield from (length for length, _ in extent.nearby)


def _form(work: ReductionWork, shape: PiecesShape, longest: int) -> SplitForm | None:
    """How blocks of a shape share columns; None where shared memory does not hold what they combine."""
    width, pieces = work.lanes.width, work.extent.pieces
    size = max((size for _, size in work.vectors), default=1)
    across, columns = _side_by_side(shape.bytes // size, width, pieces, work.extent.rows)
    deep = shape.threads // across
    kinds = {TYPES[each.dtype].compute for each in reductions_of(work.frame.streaming)}
    numbers = sum(8 if kind in ("double", "long long", "unsigned long long") else 4 for kind in kinds)
    if not deep or numbers * (deep + 2) * across * width > SHARED_BYTES:
        return None
    own = SplitShape(shape.threads, shape.blocks)
    return SplitForm(own, across, width, columns, columns, deep * UNROLLED, longest, pieces)


def _side_by_side(wanted: int, width: int, pieces: int, count: int | None) -> tuple[int, int]:
    """Threads side by side, a power of two, that have so many columns or more, and how many of these make whole rows
    and whole vectors: those that leave fewest threads idle, where there are ``count`` columns."""
    unit, room = lcm(width, pieces), width
    while room < max(wanted, unit):
        room *= 2
    found = []
    for lanes in (room, 2 * room):
        columns = lanes // unit * unit
        busy = count / (-(-count // columns) * lanes) if count else columns / lanes
        found.append((busy, -lanes, columns))
    _, lanes, columns = max(found)
    return -lanes // width, columns
