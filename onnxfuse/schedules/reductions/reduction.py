"""What the schedules with reductions have in common: the region's rows, pulled, and which way their vectors run.

Tensors run along the rows (neighbours in memory are of one row), across them (of neighbouring rows), or neither way.
Vectors run along rows where tensors do, and across rows where these lie across.  Where both kinds meet, as around a
transpose, vectors run across, and what lies along the rows is *staged*: it goes through shared memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from onnxfuse.graph.dims import Dim, product, symbol
from onnxfuse.ir.context import Unlowerable
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.tensors import Input, Permute, Program, Reduce, Scan, Tensor
from onnxfuse.lowering.arrangement import Arrangement, arrangement, coordinates
from onnxfuse.lowering.index import Coordinates, IndexSpace
from onnxfuse.lowering.launch import Variant, expression
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.pull import Load, Puller, Reduced, Rows, Scanned
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.kernel import (
    SECTOR_BYTES,
    Kernel,
    divides,
    has_reductions,
    has_scans,
    is_vector,
    make_plan,
    moving_loads,
    narrow_guards,
    scattered_inputs,
    sources,
    vector_guards,
    vector_loads,
    walk,
    widest,
)
from onnxfuse.schedules.lanes import Lanes
from onnxfuse.schedules.layouts import reached
from onnxfuse.schedules.reductions.peel import PeeledLanes
from onnxfuse.schedules.reductions.phases import Frame, Output, Phases
from onnxfuse.schedules.schedule import Does, Expected, Request, Schedule
from onnxfuse.schedules.source import Entry, Function, Signature, Source
from onnxfuse.schedules.text import Sizes, Writer

KEPT_LIMIT = 32
"""Elements of a row that a thread keeps in registers, at most; more of them cost occupancy."""

MOST_IN_PIECES = 8192
"""Elements of a row that lies in pieces of less than a sector, where a block may read all of it: norms of 32 groups
took an H200 3.8 µs for two images of 32 x 32 pixels of 256 channels, where shared by blocks they take 6.8; of eight
images of 64 x 64 pixels of 128 channels, rows twice as long, 25.5 and 12.5."""

ENOUGH_THREADS = 8_000
"""Threads under which a GPU of a hundred multiprocessors waits for memory rather than moves it."""


@dataclass(frozen=True)
class Extent:
    """``count`` rows of ``length`` elements; ``planned`` is the length to make a variant for, ``rows`` how many are
    planned, ``choice`` what that variant is told to be; ``nearby`` are further lengths and counts to make variants
    for.  Of ``pieces`` neighbouring rows one result is computed (``pieces``); 0 where rows are whole."""

    count: Dim
    length: Dim
    planned: int | None
    rows: int | None
    choice: Choice | None = None
    nearby: tuple[tuple[int | None, int | None], ...] = ()
    pieces: int = 0


@dataclass(frozen=True)
class Way:
    """Which way vectors run.

    Attributes:
        across: whether over neighbouring rows, not along one.
        staged: loads of tensors that run along the rows, where vectors run across; ``outputs`` are the indices of such
            outputs.
    """

    across: bool
    staged: tuple[Load, ...] = ()
    outputs: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ReductionWork:
    """A region with reductions, pulled.

    Attributes:
        extent: its rows.
        way: which way its vectors run; ``lanes`` are they.
        frame: what its texts need.
        narrow: guards of 32-bit indices.
        vectors: pointers that are read or written in vectors, with the bytes of an element.
        scattered: inputs that neighbouring elements read far apart.
        planned: sizes to plan for, by the text's symbols.
        peeled: the same with vectors from each row's first whole one on (``peel``), None where that has
            nothing for it.
        apart: whether rows lie in pieces shorter than a sector, and are too long to be read across them.
    """

    lowered: Lowered
    puller: Puller
    extent: Extent
    way: Way
    lanes: Lanes
    frame: Frame
    narrow: tuple[str, ...]
    vectors: tuple[tuple[str, int], ...]
    scattered: tuple[int, ...]
    planned: Mapping[str, int]
    peeled: ReductionWork | None = None
    apart: bool = False

    @property
    def aligned(self) -> tuple[str, ...]:
        """Guards of vectors with 32-bit indices; to be asked for once the text is written, since lanes note what must
        be multiples of the width as they are asked."""
        return self.narrow + vector_guards(self.lowered, self.lanes, self.vectors)

    @property
    def phases(self) -> Phases:
        """Its phases."""
        return self.frame.phases

    @property
    def peels_all(self) -> bool:
        """Whether rows of any length are as quick where vectors begin anywhere in a row: all the same is read by
        vectors, or the length is one that none divide."""
        if self.peeled is None:
            return False
        return self.extent.length.value is not None or set(self.vectors) <= set(self.peeled.vectors)

    @property
    def transposes(self) -> bool:
        """Whether something goes through shared memory because it lies the other way."""
        return bool(self.way.staged or self.way.outputs)

    @property
    def signature(self) -> Signature:
        """The parameters of its kernels."""
        return Signature(self.lowered)

    def expression(self, size: Dim) -> str:
        """A size as the launch plan writes it."""
        return expression(size, self.lowered.binding.symbols)


@dataclass
class Ways:
    """Variants that a schedule offers: device functions, entries that call them, and how they are launched.

    ``choice`` is what the first variant was told to be, None where the schedule chose; ``choices`` are what it could
    be told.
    """

    functions: list[Function] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)
    scratch: list[str] = field(default_factory=list)
    choice: Choice | None = None
    choices: tuple[Choice, ...] = ()


class Reduction(Schedule):
    """A schedule of regions with reductions.  Those of this family stand in for one another: what is quickest for few
    long rows is not for many short ones."""

    family = "reduction"
    settings = ""
    efficiency = 0.8
    heavy: ClassVar[bool] = True
    scans: ClassVar[bool] = False
    """Whether it is for rows with running totals; others cannot hold them."""

    def runs(self, does: Does) -> bool:
        """Reductions that leave the innermost axis in place."""
        return does == Does.REDUCES

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """One kernel."""
        return Expected() if has_reductions(lowered) else None

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of a region whose rows are for this schedule."""
        work = request.once(arranged)
        if work is None or isinstance(work, Refusal):
            return work
        if has_scans(request.lowered) is not self.scans:
            return None
        if work.apart:
            return Refusal("scattered-access", "the rows would be read element by element")
        return self.of_rows(work, request.rule)

    @abstractmethod
    def of_rows(self, work: ReductionWork, rule: str) -> Kernel | Refusal | None:
        """The kernel of a region with these rows, why there is none, or None where they are not for this schedule."""

    def headers(self, work: ReductionWork) -> tuple[str, ...]:
        """The headers that its texts begin with."""
        return ("onnxfuse", *(["columns"] if work.way.across else []), *(["tile"] if work.transposes else []))

    def made(self, work: ReductionWork, ways: Ways, rule: str) -> Kernel:
        """The kernel of these variants."""
        lowered = work.lowered
        plan = replace(make_plan(lowered, rule, work.puller, ways.variants), scratch=tuple(ways.scratch))
        comment = f"{rule}: {', '.join(lowered.program.operators)}"
        source = Source(self.headers(work), comment, tuple(ways.functions), tuple(ways.entries))
        return Kernel(
            self.name, source, plan, work.scattered, ways.choice, ways.choices,
            work.frame.streaming.count, self.heavy)


def arranged(request: Request) -> ReductionWork | Refusal | None:
    """The rows of a region with reductions, or why they have no kernel; None where it has no reductions."""
    lowered, sizes = request.lowered, request.sizes
    reduction = next((tensor for tensor in lowered.program.tensors if isinstance(tensor, Reduce | Scan)), None)
    if reduction is None:
        return None
    space, rows = natural_rows(reduction)
    step, apart = None if has_scans(lowered) else step_of(lowered.program, reduction), False
    length = rows.arrangement.length
    pieces = None if step is None else length.divide(step)
    if step is not None and pieces is not None:
        # Of what is added in any order, neighbours in memory come one after the other.
        within, piece = space.delinear(rows.place, (step, pieces))
        rows = replace(rows, place=piece * step + within)
        apart = not _is_near(lowered.program, pieces, lowered.binding.at(length, sizes))
    count = rows.arrangement.count
    own, *others = (
        (lowered.binding.at(length, each), lowered.binding.at(count, each)) for each in (sizes, *request.nearby))
    work = pulled(request, reduction, (space, rows), Extent(count, length, *own, request.choice, tuple(others)))
    return replace(work, apart=apart) if isinstance(work, ReductionWork) else work


def natural_rows(reduction: Reduce | Scan) -> tuple[IndexSpace, Rows]:
    """Loops over the rows of a reduction and over the elements of each, in the order of its operand's axes."""
    found, space = arrangement(reduction.operand.shape, reduction.axes), IndexSpace()
    row, element = space.base("@row", found.count), space.base("@e", found.length)
    return space, Rows(row if found.count != 1 else row * 0, element if found.length != 1 else element * 0, found)


def pulled(
    request: Request, reduction: Reduce | Scan, loops: tuple[IndexSpace, Rows], extent: Extent
) -> ReductionWork | Refusal:
    """A region with its outputs pulled from loops over its rows, or why they cannot be."""
    lowered, (space, rows) = request.lowered, loops
    puller, places = Puller(space, rows), _places(lowered.program, space, rows, reduction)
    try:
        outputs = [_output(lowered, index, puller, places) for index in range(len(lowered.program.outputs))]
    except Unlowerable as stopped:
        return stopped.refusal
    if any(isinstance(scalar, Reduced | Scanned) for scalar in walk(puller.gathered.values())):
        return Refusal("reduced-index", "a tensor is indexed by what a reduction of the same region gives")
    return _vectorised(lowered, (puller, rows.arrangement), outputs, extent, lowered.binding.planned(request.sizes))


def _output(lowered: Lowered, index: int, puller: Puller, places: Mapping[int, Coordinates]) -> Output:
    """An output at the row and the element at hand.

    Raises:
        Unlowerable: it fits neither, or its element cannot be pulled.
    """
    tensor, space, rows = lowered.program.outputs[index], puller.space, puller.rows
    assert rows is not None and rows.row is not None
    found = rows.arrangement
    size, count, length = product(tensor.shape), found.count, found.length
    whole = size == count * length and length != 1
    if not whole and size != count:
        named = size.substitute(lowered.binding.names)
        raise Unlowerable(Refusal(
            "iteration-shape", f"an output of {named} elements fits neither the rows nor their elements"))
    natural = found.place(rows.row, rows.place, space) if whole else rows.row
    place = space.linear(places[id(tensor)], tensor.shape) if id(tensor) in places else natural
    if place == natural or not _runs(place, whole, puller):
        within, place = space.delinear(natural, tensor.shape), natural
    else:
        within = places[id(tensor)]
    return Output(index, tensor.dtype, puller.element(tensor, within), whole, place)


def step_of(program: Program, reduction: Reduce | Scan) -> Dim | None:
    """The length of the pieces that rows are better read across, the first elements of all and then the second ones:
    where half of what is read and written whole lies so in memory, or more; None elsewhere."""
    space, rows = natural_rows(reduction)
    places = _places(program, space, rows, reduction)
    whole = [tensor for tensor in (*_inputs(program), *program.outputs) if id(tensor) in places]
    steps = [_far(space.linear(places[id(tensor)], tensor.shape), space) for tensor in whole]
    found = Counter(step for step in steps if step is not None)
    most, count = max(found.items(), key=lambda each: each[1], default=(None, 0))
    return most if count and 2 * count >= len(steps) else None


def _is_near(program: Program, pieces: Dim, planned: int | None) -> bool:
    """Whether rows of so many pieces may be read across them: what lies side by side fills sectors, or rows are
    ``planned`` to be so short that registers hold them, and what is read beside them is still in the L2."""
    return fills_sectors(program, pieces) or (planned is not None and planned <= MOST_IN_PIECES)


def fills_sectors(program: Program, pieces: Dim) -> bool:
    """Whether so many neighbours of any tensor make whole sectors."""
    return smallest(program) * (pieces.value or 1) >= SECTOR_BYTES


def smallest(program: Program) -> int:
    """Bytes of an element of the narrowest tensor in memory."""
    return min(TYPES[tensor.dtype].size for tensor in (*_inputs(program), *program.outputs))


def _inputs(program: Program) -> list[Tensor]:
    return [tensor for tensor in program.tensors if isinstance(tensor, Input)]


def _far(place: Dim, space: IndexSpace) -> Dim | None:
    """How far elements of a row are apart that are neighbours in memory; None where they are so in the row, or where
    neighbours are of different rows."""
    for monomial, factor in place.terms.items():
        digit = space.digits.get(monomial[0][0].key) if factor == 1 and len(monomial) == 1 else None
        if digit is not None and digit.base == "@e" and digit.step != 1:
            return digit.step
    return None


def _places(program: Program, space: IndexSpace, rows: Rows, reduction: Reduce | Scan) -> dict[int, Coordinates]:
    """Coordinates of the element at hand, or of its row, in the tensors that have it, by ``id``; nothing where no axes
    are moved, and all lie as the rows do."""
    if not any(isinstance(tensor, Permute) for tensor in program.tensors):
        return {}
    shape = reduction.operand.shape
    assert rows.row is not None
    at = coordinates(shape, reduction.axes, rows.row, rows.place, space)
    return reached(program, space, {reduction.operand: at})


def _runs(place: Dim, whole: bool, puller: Puller) -> bool:
    """Whether an output at this place runs along rows, or across them; what there is once a row can only do that."""
    bases = ("@e", "@row") if whole else ("@row",)
    return any(Lanes(puller.space, puller, base, "@row", 1).stride(place) == 1 for base in bases)


def _way(outputs: Sequence[Output], loads: Sequence[Load], puller: Puller, found: Arrangement) -> Way:
    """Which way the vectors of a region run."""
    along, across = (Lanes(puller.space, puller, base, "@row", 1) for base in ("@e", "@row"))

    def runs(offset: Dim, one: Lanes, other: Lanes) -> bool:
        """One way, with steps of several elements the other way: what does not move that way is no matter."""
        far = other.stride(offset)
        return one.stride(offset) == 1 and far is not None and far not in (0, 1)

    offsets = [load.offset for load in loads] + [output.place for output in outputs if output.whole]
    lies_along, lies_across = (
        any(runs(offset, *ways) for offset in offsets) for ways in ((along, across), (across, along))
    )
    if not (lies_along and lies_across):
        return Way(lies_across or (found.across and not lies_along))
    # Indices that are read from memory are needed where what they lead to is brought into shared memory.
    indices = moving_loads(puller.gathered.values(), across)
    staged = tuple(
        load for load in loads
        if load not in indices and along.stride(load.offset) == 1 and across.stride(load.offset) not in (0, 1)
    )
    moved = frozenset(output.index for output in outputs if output.whole and runs(output.place, along, across))
    return Way(True, staged, moved)


def _vectorised(
    lowered: Lowered, rows: tuple[Puller, Arrangement], outputs: list[Output], extent: Extent,
    planned: Mapping[str, int],
) -> ReductionWork:
    """``rows``: what pulls them, and how they are arranged; ``planned``: sizes by the text's symbols."""
    puller, found = rows
    moving = {base: _moving(outputs, puller, base) for base in ("@e", "@row")}
    way = _way(outputs, [*dict.fromkeys([*moving["@e"], *moving["@row"]])], puller, found)
    outputs = [replace(output, staged=output.index in way.outputs) for output in outputs]
    base = "@row" if way.across else "@e"
    # What there is once for several columns is stored by one of them alone.
    once = way.across and extent.pieces <= 1
    wide = [output for output in outputs if (output.whole or once) and not output.staged]
    loads = [load for load in moving[base] if load not in way.staged]
    dtypes = [output.dtype for output in wide if output.whole] + [load.dtype for load in (*loads, *way.staged)]
    candidates = {width: Lanes(puller.space, puller, base, "@row", width) for width in (1, 2, 4, 8)}
    possible, inner = _possible(candidates, way, wide, loads, planned), _neighbours(extent, found, way)
    lanes = Lanes(puller.space, puller, base, "@row", widest(possible, dtypes, inner))
    lanes.rely_on_size(inner)
    lanes.rely_on_vectors(output.place for output in wide)
    lanes.rely_on_loads(loads)
    frame = _frame(lowered, outputs, extent, lanes, way)
    vectors, scattered = tuple(_vectors(wide, loads, lanes)), scattered_inputs(loads, candidates)
    narrow = narrow_guards(lowered)
    work = ReductionWork(lowered, puller, extent, way, lanes, frame, narrow, vectors, scattered, planned)
    return work if way.across or found.across else replace(work, peeled=_peeled(work, wide, loads, dtypes))


def _moving(outputs: Sequence[Output], puller: Puller, base: str) -> list[Load]:
    """Loads from places that change along a base."""
    roots = [*(output.scalar for output in outputs), *puller.gathered.values()]
    return moving_loads(roots, Lanes(puller.space, puller, base, "@row", 1))


def _neighbours(extent: Extent, found: Arrangement, way: Way) -> Dim:
    """How many neighbours there are: vectors divide them."""
    if extent.pieces > 1:
        return extent.count
    if extent.length != 1 and way.across is found.across:
        return found.inner
    return extent.count if extent.length != 1 and way.across else extent.length


def _possible(
    candidates: Mapping[int, Lanes], way: Way, outputs: Sequence[Output], loads: Sequence[Load],
    planned: Mapping[str, int],
) -> dict[int, Lanes]:
    """Widths by which outputs can be written, and what is transposed be read as well."""
    possible = {width: lanes for width, lanes in candidates.items() if width == 1 or _stores(outputs, lanes)}
    if not way.staged and not way.outputs:
        return possible
    for lanes in possible.values():
        lanes.rely_on_loads(loads)
    # What is transposed is read in whole sectors; elements one by one between them were not measured.
    whole = [load for load in loads if is_vector(load, candidates[1])]
    return {width: lanes for width, lanes in possible.items()
            if divides(lanes, planned) and all(is_vector(load, lanes) for load in whole)}


def _frame(lowered: Lowered, outputs: list[Output], extent: Extent, lanes: Lanes, way: Way) -> Frame:
    """What the texts need."""
    along = Lanes(lanes.space, lanes.puller, "@e", "@row", 1) if way.across else lanes
    sizes = Sizes(Signature(lowered).sizes)
    count, length = map(Writer(lanes, sizes).size, (extent.count, extent.length))
    whole = extent.length * extent.pieces if extent.pieces else None
    streaming = Phases(outputs, along, streams=True, length=whole)
    return Frame(Phases(outputs, along), streaming, lanes, sizes.names, count, length,
                 frozenset(sizes.used))


def _peeled(
    work: ReductionWork, outputs: Sequence[Output], loads: Sequence[Load], dtypes: Sequence[int]
) -> ReductionWork | None:
    """The same with vectors that begin anywhere in a row; None where vectors divide the rows, where some output does
    not lie as the others do, or where most of what the rows do not share would be read element by element."""
    length, along = work.extent.length, work.lanes
    width = widest((1, 2, 4, 8), dtypes)
    rows = [load for load in loads if work.extent.count == 1 or any(
        along._variable_follows(name, "@row") for name in load.offset.symbols)]
    places = [*(output.place for output in outputs), *(load.offset for load in rows if along.stride(load.offset) == 1)]
    if width == 1 or length.multiple_of() % width == 0 or not places:
        return None
    start = places[0] - symbol("@e")
    if any(along.space.is_variable(name) and name != "@row" for name in start.symbols):
        return None
    lanes = PeeledLanes(along.space, along.puller, "@e", "@row", width, start=start)
    by_vectors = vector_loads(rows, lanes)
    others = [load for load in rows if load not in by_vectors and lanes.stride(load.offset) != 0]
    if not _stores(outputs, lanes) or len(by_vectors) + len(outputs) <= len(others):
        return None
    whole = work.phases.outputs
    frame = replace(
        work.frame, phases=Phases(whole, lanes), streaming=Phases(whole, lanes, streams=True), lanes=lanes)
    return replace(work, lanes=lanes, frame=frame, vectors=tuple(_vectors(outputs, loads, lanes)))


def _stores(outputs: Sequence[Output], lanes: Lanes) -> bool:
    """Whether outputs can be written as vectors."""
    return all(lanes.stride(output.place) == 1 and lanes.aligned(output.place) for output in outputs)


def _vectors(outputs: Sequence[Output], loads: Sequence[Load], lanes: Lanes) -> list[tuple[str, int]]:
    """Pointers that are read or written in vectors, with the bytes of an element."""
    vectors = [(f"o{output.index}", TYPES[output.dtype].size) for output in outputs]
    return vectors + sources(vector_loads(loads, lanes))
