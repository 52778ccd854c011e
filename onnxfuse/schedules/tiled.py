"""The tiled schedule: maps and views where inputs or outputs run along another axis in memory than the outputs do.

The places of the outputs fall apart into three loops: o, r and i, place = (o * R + r) * S + i.  The outputs run along
i; what is *staged* runs along r, as the source of a transpose does.  A block owns a tile of r and i: it reads staged
inputs along r into shared memory, computes along i as the pointwise schedule does, and sends staged outputs back along
r through shared memory too, so that every tensor is moved in whole sectors.  Several inputs may be transposed
differently, and outputs written in different layouts, as long as each runs along one of the two axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnxfuse.graph.dims import Dim, dim, product
from onnxfuse.ir.context import Unlowerable
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.tensors import Tensor
from onnxfuse.lowering.index import IndexSpace
from onnxfuse.lowering.launch import Variant, expression
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.pull import Load, Puller
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.choice import Choice, told
from onnxfuse.schedules.kernel import (
    SECTOR_BYTES,
    Kernel,
    divides,
    fits_narrow,
    has_reductions,
    is_scattered,
    make_plan,
    moving_loads,
    narrow_guards,
    pools,
    sources,
    staging_lanes,
    targets,
    vector_guards,
    vector_loads,
    widest,
)
from onnxfuse.schedules.lanes import Lanes
from onnxfuse.schedules.layouts import output_coordinates
from onnxfuse.schedules.pointwise import elements
from onnxfuse.schedules.schedule import Does, Expected, Request, Schedule
from onnxfuse.schedules.source import Entry, Function, Signature, Source
from onnxfuse.schedules.tiled_text import THREADS, Target, TiledWork, tiled_text

TILE_BYTES = 8192
"""Bytes of a tile of one tensor: eight blocks a multiprocessor have enough on its way to hide the memory's latency."""

STAGED_BYTES = 32768
"""Bytes of all tiles of a block together, past which they get smaller."""

SHARED_BYTES = 48 * 1024
"""Static shared memory of a block, on every GPU."""

VECTOR_BYTES = 8
"""Bytes of a vector that is transposed in registers, at most: 256 a warp fill whole lines already."""

LARGEST_SQUARE = 4
"""Elements on a side of the square that a thread transposes in its registers, at most."""


@dataclass(frozen=True)
class Axes:
    """The loops: ``inner`` places lie inside one step along r, which has ``length``."""

    inner: Dim
    length: Dim


@dataclass(frozen=True)
class TiledShape:
    """A tile: ``batch`` times ``rows`` times ``columns`` places, powers of two; vectors of ``tall`` elements along r
    and ``width`` along i; bits of an index."""

    batch: int
    rows: int
    columns: int
    tall: int
    width: int
    bits: int

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return f"tiled_{self.batch}x{self.rows}x{self.columns}_v{self.tall}x{self.width}_{self.bits}"

    @property
    def label(self) -> str:
        """Name of the variant."""
        tile = f"{self.rows} x {self.columns}" + (f", {self.batch} a block" if self.batch > 1 else "")
        return f"tile {tile}, vectors {self.tall} x {self.width}, {self.bits}-bit"

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of("tiled", batch=self.batch, rows=self.rows, columns=self.columns, tall=self.tall,
                         width=self.width)

    @property
    def places(self) -> int:
        """Elements of the tile."""
        return self.batch * self.rows * self.columns

    def shared(self, size: int) -> int:
        """Bytes of the tile of a tensor with elements of ``size`` bytes; see cuda/tile.cuh."""
        pad = max(self.width, 4 // size)
        return size * (self.places + self.batch * self.rows // self.tall * pad) + 16


class Tiled(Schedule):
    """Regions without reductions that move the innermost axis."""

    name = "tiled"
    settings = "tiles of {rows} x {columns}, {batch} a block, vectors of {tall} x {width}"
    efficiency = 0.95
    # What goes through shared memory waits for its whole block.
    cached = False

    def runs(self, does: Does) -> bool:
        """Transposes with maps around them."""
        return does == Does.TRANSPOSES

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """Nobody asks: what it runs is the pointwise schedule's until that has a kernel which reads badly."""
        return None

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of a region whose tensors lie along two axes."""
        lowered, sizes = request.lowered, request.sizes
        if has_reductions(lowered) or pools(lowered):
            return None
        total = elements(lowered)
        if isinstance(total, Refusal):
            return total
        planned = lowered.binding.planned(sizes)
        try:
            axes = _axes(lowered, total, planned)
            if isinstance(axes, Refusal):
                return axes
            return _Tiling(lowered, total, axes, planned).kernel(request.rule, request.choice)
        except Unlowerable as stopped:
            return stopped.refusal


def _axes(lowered: Lowered, total: Dim, planned: Mapping[str, int]) -> Axes | Refusal:
    """The axis, of those along which scattered tensors run, on which the most bytes lie."""
    space = IndexSpace()
    place, puller = space.base("@L", total), Puller(space)
    outputs = lowered.program.outputs
    coordinates = output_coordinates(lowered.program, space, place)
    roots = [puller.element(output, at) for output, at in zip(outputs, coordinates, strict=True)]
    lanes = Lanes(space, puller, "@L", "", 2)
    loads = moving_loads([*roots, *puller.gathered.values()], lanes)
    moved: list[tuple[Dim, Tensor]] = [(load.offset, lowered.program.inputs[load.input]) for load in loads]
    moved += [(space.linear(at, output.shape), output) for output, at in zip(outputs, coordinates, strict=True)]
    weights: dict[Dim, int] = {}
    lengths: dict[Dim, list[Dim]] = {}
    for offset, tensor in moved:
        found = _runs_along(offset, space, total) if is_scattered(offset, lanes) else None
        if found is not None:
            size = TYPES[tensor.dtype].size * (product(tensor.shape).known(planned) or 1)
            weights[found.inner] = weights.get(found.inner, 0) + size
            lengths.setdefault(found.inner, []).append(found.length)
    if not weights:
        return Refusal("not-transposing", "no tensor runs along another axis than the outputs do")
    inner = max(weights, key=lambda step: weights[step])
    return Axes(inner, next(
        (length for length in lengths[inner] if all(other.divide(length) is not None for other in lengths[inner])),
        lengths[inner][0],
    ))


def _runs_along(offset: Dim, space: IndexSpace, total: Dim) -> Axes | None:
    """The axis of the outputs along which neighbouring elements of a tensor lie: its digit has factor one."""
    for monomial, factor in offset.terms.items():
        if factor != 1 or len(monomial) != 1 or monomial[0][1] != 1:
            continue
        digit = space.variable(monomial[0][0].key)
        if digit is None or digit.base != "@L" or digit.step == 1:
            continue
        length = digit.size if digit.size is not None else total.divide(digit.step)
        if length is not None and total.divide(digit.step * length) is not None:
            return Axes(digit.step, length)
    return None


class _Tiling:
    """The loops over o, r and i, and what is staged in them."""

    def __init__(self, lowered: Lowered, total: Dim, axes: Axes, planned: Mapping[str, int]) -> None:
        self.lowered = lowered
        self.planned = planned
        outer = total.divide(axes.length * axes.inner)
        assert outer is not None
        self.extents = outer, axes.length, axes.inner
        self.space = IndexSpace()
        o, r, i = (
            self.space.base(name, extent) if extent != 1 else dim(0)
            for name, extent in zip(("@o", "@r", "@i"), self.extents, strict=True)
        )
        self.place = o * (axes.length * axes.inner) + r * axes.inner + i
        self.puller = Puller(self.space)
        self.down, self.across = (Lanes(self.space, self.puller, *of) for of in (("@r", "", 1), ("@i", "", 2)))
        self.targets = self._targets()
        roots = [target.scalar for target in self.targets]
        loads = moving_loads([*roots, *self.puller.gathered.values()], self.across)
        apart = [load for load in loads if is_scattered(load.offset, self.across)]
        # Indices that are read from memory are needed where what they lead to is brought into shared memory.
        indices = moving_loads(self.puller.gathered.values(), self.across)
        self.staged = [load for load in apart if self.down.stride(load.offset) == 1 and load not in indices]
        self.scattered = tuple(sorted({
            load.input for load in apart if load not in self.staged or self._is_short(load)
        }))
        self.direct = [load for load in loads if load not in self.staged]

    def _is_short(self, load: Load) -> bool:
        """Whether a staged input is read in pieces shorter than a sector, with more than they hold between them."""
        length, stride = self.extents[1].known(self.planned), self.across.stride(load.offset)
        if length is None or length * TYPES[load.dtype].size >= SECTOR_BYTES:
            return False
        step = stride.known(self.planned) if stride is not None else None
        return step is None or step > 2 * length

    def _targets(self) -> list[Target]:
        """Outputs, each at its own place of the element at hand; one that runs along neither axis is computed apart."""
        targets = []
        program = self.lowered.program
        coordinates = output_coordinates(program, self.space, self.place)
        for index, (output, at) in enumerate(zip(program.outputs, coordinates, strict=True)):
            offset = self.space.linear(at, output.shape)
            staged = offset != self.place
            if staged and self.down.stride(offset) != 1:
                at, offset, staged = self.space.delinear(self.place, output.shape), self.place, False
            targets.append(Target(index, output.dtype, self.puller.element(output, at), offset, staged))
        return targets

    def kernel(self, rule: str, choice: Choice | None) -> Kernel | Refusal:
        """The kernel with its variants, the first of them as it is told to be."""
        lowered = self.lowered
        if not self.staged and not any(target.staged for target in self.targets):
            return Refusal("not-transposing", "no tensor runs along the second axis of a tile")
        work = TiledWork(self.extents, self.staged, self.targets, self._down(), self._across())
        signature = Signature(lowered)
        body = tiled_text(work, signature.sizes)
        shapes = self._shapes(work)
        if any(sum(shape.shared(TYPES[dtype].size) for dtype in work.staged) > SHARED_BYTES for shape, _ in shapes):
            return Refusal("tile-memory", f"{len(work.staged)} transposed tensors do not fit shared memory together")
        own, needed = shapes[0]
        offered = {other.choice: other for other in self._alternatives(own)}
        choice, first = told(choice, offered)
        if first is not None:
            shapes = [(first, needed), *shapes]
        function = Function(
            "tiled", ("batch", "rows", "columns", "tall", "width"), signature.parameters(body.sizes), body.text)
        entries: list[Entry] = []
        variants: list[Variant] = []
        outer, length, inner = (expression(extent, lowered.binding.symbols) for extent in self.extents)
        for shape, guards in shapes:
            settings = (shape.batch, shape.rows, shape.columns, shape.tall, shape.width)
            entry = function.entry(shape.name, settings, shape.bits, THREADS)
            if all(shape.label != variant.name for variant in variants):
                entries.append(entry)
            grid = f"{outer} {shape.batch} ceil {length} {shape.rows} ceil * {inner} {shape.columns} ceil *"
            variants.append(Variant(shape.label, (entry.step(grid),), guards))
        plan = make_plan(lowered, rule, self.puller, variants)
        comment = f"{rule}: {', '.join(lowered.program.operators)}"
        source = Source(("onnxfuse", "tile"), comment, (function,), tuple(entries))
        return Kernel("tiled", source, plan, self.scattered, choice, tuple(offered), heavy=True)

    def _down(self) -> Lanes:
        """Lanes along r: the longest vectors by which every staged tensor can be moved."""
        candidates = (
            Lanes(self.space, self.puller, "@r", "", tall) for tall in (4, 2) if tall <= self._largest_square())
        places = [target.offset for target in self.targets if target.staged]
        lanes = staging_lanes(candidates, self.extents[1], self.staged, places, self.planned)
        return lanes or Lanes(self.space, self.puller, "@r", "", 1)

    def _across(self) -> Lanes:
        """Lanes along i, in the widest vectors that sizes and staged squares admit."""
        candidates = {}
        for width in (1, 2, 4):
            lanes = Lanes(self.space, self.puller, "@i", "", width)
            lanes.rely_on_size(self.extents[2])
            lanes.rely_on_loads(self.direct)
            possible = width <= self._largest_square() and lanes.may_divide(self.extents[2])
            if possible and divides(lanes, self.planned):
                candidates[width] = lanes
        dtypes = [target.dtype for target in self.targets] + [load.dtype for load in (*self.direct, *self.staged)]
        return candidates[widest(candidates, dtypes, self.extents[2])]

    def _largest_square(self) -> int:
        """Elements on a side of the square that a thread transposes, by the longest of their types."""
        longest = max((TYPES[dtype].size for dtype in self._staged_types()), default=1)
        return max(1, min(LARGEST_SQUARE, VECTOR_BYTES // longest))

    def _staged_types(self) -> list[int]:
        return [load.dtype for load in self.staged] + [target.dtype for target in self.targets if target.staged]

    def _shapes(self, work: TiledWork) -> list[tuple[TiledShape, tuple[str, ...]]]:
        """The variants: tiles with their guards, the quickest first, the last one without guards."""
        down, across = work.down, work.across
        narrow = narrow_guards(self.lowered)
        outputs = targets(self.lowered)
        along_r = [*sources(work.loads), *(outputs[target.index] for target in work.targets if target.staged)]
        along_i = [outputs[target.index] for target in work.targets if not target.staged]
        along_i += sources(vector_loads(self.direct, across))
        guards = {
            (down.width, 1): vector_guards(self.lowered, down, along_r),
            (1, across.width): vector_guards(self.lowered, across, along_i),
            (1, 1): (),
        }
        ways = [(down.width, across.width)]
        # Where one side's sizes are known only when the kernel runs, they need not spoil the other side's vectors.
        ways += [(down.width, 1)] if across.multiples else []
        ways += [(1, across.width)] if down.multiples else []
        found: list[tuple[TiledShape, tuple[str, ...]]] = []
        for tall, width in dict.fromkeys([*ways, (1, 1)]) if fits_narrow(self.lowered) else ():
            needed = tuple(dict.fromkeys((*narrow, *guards[tall, 1], *guards[1, width])))
            found.append((self._tile(tall, width, 32), needed))
            if not needed:
                return found
        return [*found, (self._tile(1, 1, 64), ())]

    def _alternatives(self, own: TiledShape) -> list[TiledShape]:
        """Tiles that may be quicker than the schedule's own for the planned sizes."""
        if own.bits > 32 or any(extent.known(self.planned) is None for extent in self.extents):
            return []
        found = [self._tile(own.tall, own.width, 32, larger, wider) for larger in (-1, 0, 1) for wider in (-1, 0, 1)]
        found += [
            self._tile(tall, width, 32)
            for tall in (own.tall, own.tall // 2) for width in (own.width, own.width // 2) if tall and width
        ]
        sizes = [TYPES[dtype].size for dtype in self._staged_types()]
        return [
            shape for shape in dict.fromkeys(found)
            if shape != own and sum(shape.shared(size) for size in sizes) <= SHARED_BYTES
        ]

    def _tile(self, tall: int, width: int, bits: int, larger: int = 0, wider: int = 0) -> TiledShape:
        """A tile for the planned sizes: nearly square, longer one way where the other axis is short.

        Args:
            larger: how often it is to be doubled; wider: how often its columns, at the rows' cost.  Both may be
                negative.
        """
        types = [TYPES[dtype].size for dtype in self._staged_types()]
        places = TILE_BYTES // max(types)
        while places * sum(types) > STAGED_BYTES and places > 256:
            places //= 2
        places = _shifted(places, larger)
        outer, length, inner = (_power_from(extent.known(self.planned), places) for extent in self.extents)
        columns = _shifted(1 << (places.bit_length() // 2), wider)
        columns = max(min(columns, inner), width)
        rows = max(min(places // columns, length), tall)
        columns = max(min(places // rows, inner), width)
        batch = max(min(places // (rows * columns), outer), 1)
        return TiledShape(batch, rows, columns, tall, width, bits)


def _shifted(number: int, times: int) -> int:
    """A power of two, doubled so often, or halved where that is negative."""
    return number << times if times > 0 else max(number >> -times, 1)


def _power_from(size: int | None, most: int) -> int:
    """The least power of two from a size on, ``most`` at most and where the size is not known."""
    return most if size is None or size > most else 1 << max(size - 1, 0).bit_length()
