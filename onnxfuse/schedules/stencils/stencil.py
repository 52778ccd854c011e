"""The stencil schedule: a depthwise convolution, with what is computed of each element before and after it.

    results = g(sums of the window's products of weights and f(image), with zeros around it)

Each channel of the result sums over one channel of the image, so that nothing is to be had from tensor cores, and
memory or multiplying, whichever takes longer, sets the time.  Each element of an image is read about once: a block
brings its planes, or a tile of one with what the windows reach beyond it, into shared memory as float32.  A thread has
several windows along x and y: it reads each row of the tile once for all of them, and all weights of a layer stay in
its registers, so that an inner loop does little but multiply and add.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onnxfuse.graph.dims import Dim, product
from onnxfuse.ir.context import Unlowerable
from onnxfuse.ir.tensors import Contract
from onnxfuse.lowering.launch import Variant, expression
from onnxfuse.lowering.lower import Lowered
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.choice import told
from onnxfuse.schedules.kernel import (
    Kernel,
    contractions,
    divides,
    fits_narrow,
    has_reductions,
    make_plan,
    moving_loads,
    narrow_guards,
    sources,
    targets,
    vector_guards,
    vector_loads,
    widest,
)
from onnxfuse.schedules.lanes import Lanes
from onnxfuse.schedules.schedule import Does, Expected, Request, Schedule
from onnxfuse.schedules.source import Entry, Function, Signature, Source
from onnxfuse.schedules.stencils.parts import OTHER, StencilParts, convolution_of, parts_of
from onnxfuse.schedules.stencils.shape import (
    Planned,
    StencilShape,
    shapes,
    sides_of,
    smallest,
    tile_of,
    without_vectors,
)
from onnxfuse.schedules.stencils.text import StencilText

WIDTHS = (1, 2, 4, 8)


class Stencil(Schedule):
    """Depthwise convolutions; shares as of 27 of them on an H200, of less for small images (benchmarks/results)."""

    name = "stencil"
    settings = ("{planes} whole planes or a tile of {deep} x {high} x {wide} a block, {tall} x {broad} a thread, "
                "vectors of {loads} and {stores}")
    efficiency = 0.45
    arithmetic = 0.35
    waits_us = 1.5
    # It waits for tiles, wherever they come from.
    cached = False
    products = 1

    def runs(self, does: Does) -> bool:
        """Convolutions of each channel by itself, with maps around them."""
        return Does.SLIDES in does and Does.TRANSPOSES not in does

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """One kernel, which reads each element about once."""
        return None if _contraction(lowered) is None else Expected()

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of a region with one depthwise convolution and no reduction beside it."""
        contraction = _contraction(request.lowered)
        if contraction is None:
            return None
        try:
            parts = parts_of(request.lowered, contraction)
        except Unlowerable as stopped:
            return replace(stopped.refusal, code="stencil-structure")
        if isinstance(parts, Refusal):
            return None if parts.code == OTHER else parts
        return _kernel(request, parts)


def _contraction(lowered: Lowered) -> Contract | None:
    """The region's only contraction, where that is a depthwise convolution and nothing is reduced beside it."""
    found = contractions(lowered)
    if len(found) != 1 or has_reductions(lowered):
        return None
    convolution = convolution_of(found[0])
    return None if isinstance(convolution, Refusal) and convolution.code == OTHER else found[0]


# ---- Its kernel. ----


@dataclass(frozen=True)
class _Sides:
    """Vectors of images and of results, the guards under which they are moved so, and those for vectors within rows."""

    image: Lanes
    results: Lanes
    guards: tuple[str, ...]
    rows: tuple[str, ...]
    planned: Planned


def _kernel(request: Request, parts: StencilParts) -> Kernel | Refusal:
    lowered = request.lowered
    sides = _sides(parts, request.sizes)
    last = smallest(parts.axes)
    if last is None:
        return Refusal("stencil-structure", "what a window reaches over is more than shared memory holds")
    offered = {shape.choice: shape for shape in shapes(sides.planned)} if fits_narrow(lowered) else {}
    choice, first = told(request.choice, offered)
    own = next(iter(offered.values()), None)
    text = StencilText(parts, Signature(lowered), sides.image, sides.results)
    functions = text.functions(any(shape.planes for shape in offered.values()))
    work = _StencilWork(parts, {each.name: each for each in functions})
    # Where sizes are known vectors fail for a pointer alone, which is rare.
    varies = any(axis.extent.value is None for axis in parts.axes)
    rest = (varies and without_vectors(sides.planned)) or last
    for shape in dict.fromkeys(each for each in (first, own) if each not in (None, rest)):
        work.add(shape, (*narrow_guards(lowered), *(sides.guards if shape.planes else sides.rows)))
    if fits_narrow(lowered):
        work.add(rest, narrow_guards(lowered))
    work.add(replace(last, bits=64), ())
    plan = make_plan(lowered, request.rule, parts.puller, work.variants)
    comment = f"{request.rule}: {', '.join(lowered.program.operators)}"
    source = Source(("onnxfuse", "stencil"), comment, tuple(work.used), tuple(work.entries))
    choices = tuple(each for each in offered if offered[each] != own)
    return Kernel("stencil", source, plan, (), choice, choices, heavy=True)


class _StencilWork:
    """The kernels and variants of one region as they come."""

    def __init__(self, parts: StencilParts, functions: Mapping[str, Function]) -> None:
        self.parts, self.functions = parts, functions
        self.entries: list[Entry] = []
        self.variants: list[Variant] = []
        self._planes = False

    def add(self, shape: StencilShape, guards: tuple[str, ...]) -> None:
        """A variant."""
        tile = tile_of(shape, self.parts.axes)
        settings = (shape.planes, shape.deep, shape.high, shape.wide, shape.tall, shape.broad, shape.loads,
                    shape.stores, tile.layers, tile.rows, tile.pitch, tile.lead, tile.kept, tile.room)
        self._planes = self._planes or shape.planes > 0
        function = self.functions["stencil_planes" if shape.planes else "stencil"]
        entry = function.entry(shape.name, settings, shape.bits, shape.threads)
        self.entries.append(entry)
        step = entry.step(self._blocks(shape), shared=str(tile.shared))
        self.variants.append(Variant(f"{Stencil().words(shape.choice)}, {shape.bits}-bit", (step,), guards))

    @property
    def used(self) -> list[Function]:
        """The functions that its kernels need."""
        return [each for name, each in self.functions.items() if self._planes or name != "stencil_planes"]

    def _blocks(self, shape: StencilShape) -> str:
        parts = self.parts
        planes = self._expression(parts.planes * parts.features)
        if shape.planes:
            return f"{planes} {shape.planes} ceil"
        sides = zip(parts.axes, sides_of(shape, parts.axes), strict=True)
        return " ".join([planes, *(f"{self._expression(axis.count)} {side} ceil *" for axis, side in sides)])

    def _expression(self, size: Dim) -> str:
        return expression(size, self.parts.lowered.binding.symbols)


def _sides(parts: StencilParts, sizes: Mapping[str, int]) -> _Sides:
    """How images and results are moved at these sizes."""
    lowered, (_, _, x) = parts.lowered, parts.axes
    program, space, puller = lowered.program, parts.puller.space, parts.puller
    planned = lowered.binding.planned(sizes)
    read = moving_loads(parts.loads, Lanes(space, puller, "@q", "", 1))
    more = moving_loads([*parts.results, *puller.gathered.values()], Lanes(space, puller, "@L", "", 1))
    loads = widest(WIDTHS, [load.dtype for load in read])
    stores = widest(WIDTHS, [*(output.dtype for output in program.outputs), *(load.dtype for load in more)])
    plane = product([axis.count for axis in parts.axes]).multiple_of()
    if plane % stores and plane % (stores // 2 or 1) == 0:
        stores //= 2  # so that no vector has results of two channels
    image, results = Lanes(space, puller, "@q", "", loads), Lanes(space, puller, "@L", "", stores)
    image.rely_on_loads(read)
    results.rely_on_loads(more)
    if not divides(image, planned):
        loads, image = 1, Lanes(space, puller, "@q", "", 1)
    if not divides(results, planned):
        stores, results = 1, Lanes(space, puller, "@L", "", 1)
    stored = [*targets(lowered), *sources(vector_loads(more, results))]
    guards = (*vector_guards(lowered, image, sources(vector_loads(read, image))),
              *vector_guards(lowered, results, stored))
    row_loads = _within(parts, x.extent, loads, sizes) if x.start.value is not None else 1
    row_stores = _within(parts, x.count, stores, sizes)
    rows = [f"{expression(size, lowered.binding.symbols)} {width} % 0 =="
            for size, width in ((x.extent, row_loads), (x.count, row_stores)) if size.multiple_of() % width]
    *counts, planes = (lowered.binding.at(size, sizes) for size in (*(axis.count for axis in parts.axes), parts.planes))
    plan = Planned(parts.axes, tuple(counts), planes, parts.planes.multiple_of(), parts.features,
                   loads, stores, row_loads, row_stores)
    return _Sides(image, results, guards, (*guards, *rows), plan)


def _within(parts: StencilParts, size: Dim, width: int, sizes: Mapping[str, int]) -> int:
    """The widest vectors, up to a width, that a row of a size is made of."""
    known = parts.lowered.binding.at(size, sizes)
    multiple = size.multiple_of() if known is None else known
    return next(each for each in reversed(WIDTHS) if each <= width and (
        multiple % each == 0 or (known is None and size.value is None)))
