"""What the schedules with reductions have in common: the region's rows, pulled, and how they are vectorised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnxfuse.graph.dims import Dim, product
from onnxfuse.lowering.arrangement import Arrangement, arrangement
from onnxfuse.lowering.context import Unlowerable
from onnxfuse.lowering.index import IndexSpace
from onnxfuse.lowering.ir import Reduce, postorder
from onnxfuse.lowering.launch import Variant, expression
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.pull import Load, Puller, Rows
from onnxfuse.lowering.scalars import TYPES
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.kernel import (
    Signature,
    best_width,
    is_vector,
    moving_loads,
    narrow_guards,
    scattered_inputs,
    vector_guards,
)
from onnxfuse.schedules.phases import Frame, Output, Phases, Text
from onnxfuse.schedules.text import Lanes, Writer

KEPT_LIMIT = 32
"""Elements of a row that a thread keeps in registers, at most; more of them cost occupancy."""

ENOUGH_THREADS = 8_000
"""Threads under which a GPU of a hundred multiprocessors waits for memory rather than moves it."""


@dataclass(frozen=True)
class Extent:
    """``count`` rows of ``length`` elements; ``planned`` is the length to make a variant for, ``rows`` how many are
    planned, ``choice`` what that variant is told to be; ``nearby`` are further lengths and counts to make variants
    for."""

    count: Dim
    length: Dim
    planned: int | None
    rows: int | None
    choice: Choice | None = None
    nearby: tuple[tuple[int | None, int | None], ...] = ()


@dataclass(frozen=True)
class Work:
    """A region with reductions, pulled.

    Attributes:
        extent: its rows.
        lanes: the vectors: along rows, or across them where neighbours in memory are of different rows.
        frame: what its texts need.
        narrow: guards of 32-bit indices.
        vectors: pointers that are read or written in vectors, with the bytes of an element.
        scattered: inputs that neighbouring elements read far apart.
    """

    lowered: Lowered
    puller: Puller
    extent: Extent
    arrangement: Arrangement
    lanes: Lanes
    frame: Frame
    narrow: tuple[str, ...]
    vectors: tuple[tuple[str, int], ...]
    scattered: tuple[int, ...]

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
    def signature(self) -> Signature:
        """The parameters of its kernels."""
        return Signature(self.lowered)

    def expression(self, size: Dim) -> str:
        """A size as the launch plan writes it."""
        return expression(size, self.lowered.binding.symbols)

    def used(self, text: Text) -> str:
        """All that a text reads, for finding out which sizes it needs."""
        return f"{text.body} {self.frame.count} {self.frame.length}"


@dataclass
class Ways:
    """Variants that a schedule offers: device functions, kernels that call them, and how they are launched."""

    functions: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)
    scratch: list[str] = field(default_factory=list)


def arranged(
    lowered: Lowered, sizes: Mapping[str, int], choice: Choice | None, nearby: Sequence[Mapping[str, int]]
) -> Work | Refusal:
    """The rows of a region with reductions, or why they have no kernel."""
    program = lowered.program
    reductions = [tensor for tensor in postorder(program.outputs) if isinstance(tensor, Reduce)]
    if not reductions:
        return Refusal("no-reduction", "the region has no reduction over rows")
    found = arrangement(reductions[0].operand.shape, reductions[0].axes)
    count, length = found.count, found.length
    space = IndexSpace()
    row, element = space.base("@row", count), space.base("@e", length)
    row = row if count != 1 else row * 0
    element = element if length != 1 else element * 0
    puller = Puller(space, Rows(row, element, found))
    outputs: list[Output] = []
    try:
        for index, tensor in enumerate(program.outputs):
            size = product(tensor.shape)
            whole = size == count * length and length != 1
            if not whole and size != count:
                named = size.substitute(lowered.binding.names)
                return Refusal(
                    "iteration-shape", f"an output of {named} elements fits neither the rows nor their elements"
                )
            place = found.place(row, element, space) if whole else row
            scalar = puller.element(tensor, space.delinear(place, tensor.shape))
            outputs.append(Output(index, tensor.dtype, scalar, whole, place))
    except Unlowerable as stopped:
        return stopped.refusal
    names = lowered.binding.names
    own, *others = (
        (_planned(length.substitute(names), each), _planned(count.substitute(names), each)) for each in (sizes, *nearby)
    )
    return _vectorised(lowered, puller, outputs, Extent(count, length, *own, choice, tuple(others)), found)


def _planned(size: Dim, sizes: Mapping[str, int]) -> int | None:
    """The number that a size is planned to be."""
    return size.evaluate(sizes) if size.symbols <= sizes.keys() else None


def _vectorised(
    lowered: Lowered, puller: Puller, outputs: list[Output], extent: Extent, found: Arrangement
) -> Work:
    roots = [output.scalar for output in outputs]
    base = "@row" if found.across else "@e"
    wide = [output for output in outputs if output.whole or found.across]

    def lanes_of(width: int) -> Lanes:
        return Lanes(puller.space, puller, base, "@row", width)

    candidates = {width: lanes_of(width) for width in (1, 2, 4, 8)}
    loads = moving_loads([*roots, *puller.gathered.values()], candidates[1])
    possible = {width: lanes for width, lanes in candidates.items() if width == 1 or _stores(wide, lanes)}
    dtypes = [output.dtype for output in wide if output.whole] + [load.dtype for load in loads]
    lanes = lanes_of(best_width(possible, loads, found.inner if extent.length != 1 else extent.length, dtypes))
    lanes._multiple(found.inner if extent.length != 1 else extent.length)
    _stores(wide, lanes)
    along = Lanes(puller.space, puller, "@e", "@row", 1) if found.across else lanes
    sizes = Signature(lowered).sizes
    writer = Writer(lanes, sizes)
    frame = Frame(Phases(outputs, along), lanes, sizes, writer.size(extent.count), writer.size(extent.length))
    narrow = narrow_guards(lowered)
    vectors = tuple(_vectors(wide, loads, lanes))
    scattered = scattered_inputs(loads, candidates)
    return Work(lowered, puller, extent, found, lanes, frame, narrow, vectors, scattered)


def _stores(outputs: Sequence[Output], lanes: Lanes) -> bool:
    """Whether outputs can be written as vectors; notes what must divide for it, if so."""
    return all(lanes.stride(output.place) == 1 and lanes.aligned(output.place) for output in outputs)


def _vectors(outputs: Sequence[Output], loads: Sequence[Load], lanes: Lanes) -> list[tuple[str, int]]:
    """Pointers that are read or written in vectors, with the bytes of an element."""
    vectors = [(f"o{output.index}", TYPES[output.dtype].size) for output in outputs]
    return vectors + [
        (f"i{load.input}", TYPES[load.dtype].size)
        for load in loads
        if lanes.stride(load.offset) == 1 and is_vector(load, lanes)
    ]
