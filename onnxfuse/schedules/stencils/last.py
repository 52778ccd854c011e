"""The stencil schedule of images whose channels lie last: a depthwise convolution with what is computed of its results.

    results = g(sums of the window's products of weights and f(image), with zeros around it)

A thread has a vector of channels and a strip of neighbouring windows.  It reads each row of pixels below them once,
vectors of channels as they lie in memory, and adds its products to all sums of the strip; what threads beside it read
too comes from the caches.  The weights of a block's channels lie in shared memory, each channel's beside the next
one's, for all strips that a block goes through; they come from where each channel has its own side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onnxfuse.ir.context import Unlowerable
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
from onnxfuse.schedules.source import Entry, Function, Parameter, Signature, Source
from onnxfuse.schedules.stencils.last_shape import StencilLastParts, depthwise_of, parts_of
from onnxfuse.schedules.stencils.last_strips import SHARED, VECTORS, WIDTHS, StencilLastShape, Strips, resident, shapes
from onnxfuse.schedules.stencils.last_text import SUMS, StripsText

LEAST_SUMMING = StencilLastShape(2, 4, 1, VECTORS, 1, 8, sums=True)
"""For any sizes: each turn's sums go through memory, so that strips are not as short as they could be."""


class StencilLast(Schedule):
    """Depthwise convolutions of images with channels last; shares as of 19 of them on an H100, each its own choice
    (benchmarks/results, h100-quantised)."""

    name = "stencil_last"
    settings = ("{tall} x {broad} results a thread, vectors of {width} channels, "
                "{vectors} of them and {across} x {down} strips a block, {rows} rows of pixels at once")
    efficiency = 0.6
    arithmetic = 0.32
    waits_us = 1.5
    products = 1

    def runs(self, does: Does) -> bool:
        """Convolutions of each channel by itself, between transposes."""
        return Does.SLIDES in does and Does.TRANSPOSES in does

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """One kernel, whose blocks read what others beside them read from the caches."""
        found = contractions(lowered)
        return Expected() if len(found) == 1 and not has_reductions(lowered) and depthwise_of(found[0]) else None

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of a region with one depthwise convolution, channels last, and no reduction beside it."""
        parts = _parts(request)
        return _kernel(request, parts)[0] if isinstance(parts, StencilLastParts) else parts


@dataclass(frozen=True)
class Summing:
    """A kernel that tells sums of its first result too, and by its variants in how many parts of each image it does:
    float32, images by parts by channels, in the scratch memory ``t0``."""

    kernel: Kernel
    parts: tuple[str, ...]


def summing(request: Request) -> Summing | Refusal | None:
    """The kernel of such a region that tells the sums of each channel too; as ``StencilLast.kernel``."""
    parts = _parts(request)
    return Summing(*_kernel(request, parts, sums=True)) if isinstance(parts, StencilLastParts) else parts


def _parts(request: Request) -> StencilLastParts | Refusal | None:
    lowered = request.lowered
    found = contractions(lowered)
    if len(found) != 1 or has_reductions(lowered):
        return None
    try:
        return parts_of(lowered, found[0])
    except Unlowerable as stopped:
        return replace(stopped.refusal, code="stencil-structure")


# ---- Its kernel. ----


def _kernel(request: Request, parts: StencilLastParts, sums: bool = False) -> tuple[Kernel, tuple[str, ...]]:
    """It, and in how many parts its variants go through an image."""
    lowered = parts.lowered
    planned = lowered.binding.planned(request.sizes)
    sides = {width: found for width in WIDTHS if (found := _lanes(parts, width, planned)) is not None}
    *counts, images, channels = (lowered.binding.at(size, request.sizes) for size in (
        *(axis.count for axis in parts.axes), parts.images, parts.channels))
    strips = Strips(parts.axes, tuple(counts), images, channels, tuple(sides), parts.size)
    ways = [replace(shape, sums=sums) for shape in shapes(strips)] if fits_narrow(lowered) else []
    offered = {shape.choice: shape for shape in ways if shape.shared(strips.taps) <= SHARED}
    choice, first = told(request.choice, offered)
    own = next(iter(offered.values()), None)
    least = LEAST_SUMMING if sums else StencilLastShape(1, 1, 1, VECTORS, 1, 4)
    work = _StencilLastWork(parts, strips)
    for shape in dict.fromkeys(each for each in (first, own) if each is not None):
        lanes, guards = sides[shape.width]
        work.add(shape, lanes, (*narrow_guards(lowered), *guards))
    if fits_narrow(lowered):
        work.add(least, parts.lanes(1), narrow_guards(lowered))
    work.add(replace(least, bits=64), parts.lanes(1), ())
    plan = replace(make_plan(lowered, request.rule, parts.puller, work.variants), scratch=work.scratch)
    comment = f"{request.rule}: {', '.join(lowered.program.operators)}"
    source = Source(("onnxfuse", "stencil"), comment, tuple(work.functions.values()), tuple(work.entries))
    choices = tuple(each for each in offered if offered[each] != own)
    return Kernel("stencil_last", source, plan, (), choice, choices, heavy=True), tuple(work.counts)


def _lanes(parts: StencilLastParts, width: int, planned: Mapping[str, int]) -> tuple[Lanes, tuple[str, ...]] | None:
    """Lanes of vectors of so many channels, and the guards under which they are so; None where they never are."""
    lanes, outputs = parts.lanes(width), parts.lowered.program.outputs
    moving = moving_loads([*parts.read, *parts.results], lanes)
    if width > widest(WIDTHS, [*(output.dtype for output in outputs), *(load.dtype for load in moving)]):
        return None
    if not lanes.may_divide(parts.channels) or not all(
            lanes.stride(place) == 1 and lanes.aligned(place) for place in parts.places):
        return None
    vectors = vector_loads(moving, lanes)
    if not all(load in vectors for load in moving_loads([parts.image], lanes)):
        return None
    lanes.rely_on_size(parts.channels)
    lanes.rely_on_loads(moving)
    lanes.rely_on_vectors(parts.places)
    if not divides(lanes, planned):
        return None
    return lanes, vector_guards(parts.lowered, lanes, [*sources(vectors), *targets(parts.lowered)])


class _StencilLastWork:
    """The functions, kernels and variants of one region as they come."""

    def __init__(self, parts: StencilLastParts, strips: Strips) -> None:
        self.parts, self.planned = parts, strips
        self.functions: dict[str, Function] = {}
        self.entries: list[Entry] = []
        self.variants: list[Variant] = []
        self.counts: list[str] = []
        self.scratch: tuple[str, ...] = ()

    def add(self, shape: StencilLastShape, lanes: Lanes, guards: tuple[str, ...]) -> None:
        """A variant."""
        key = replace(shape, bits=32).name
        if key not in self.functions:
            more = (Parameter("float* __restrict__", SUMS, "t0"),) if shape.sums else ()
            signature = Signature(self.parts.lowered, more)
            body = StripsText(self.parts, lanes, shape, signature.sizes).text()
            self.functions[key] = Function(f"of_{key}", (), signature.parameters(body.sizes), body.text)
        held = resident(shape, self.planned)
        entry = self.functions[key].entry(shape.name, (), shape.bits, shape.threads)
        self.entries.append(entry)
        symbols, axes = self.parts.lowered.binding.symbols, self.parts.axes
        z, y, x = (expression(axis.count, symbols) for axis in axes)
        images, channels = (expression(size, symbols) for size in (self.parts.images, self.parts.channels))
        slabs = f"{channels} {shape.channels} ceil"
        turns = f"{y} {shape.tall * shape.down} ceil {x} {shape.broad * shape.across} ceil * {z} *"
        strips = f"{turns} {images} * sms {held} * {slabs} ceil min"
        if shape.sums:
            size = f"{turns} {images} * {channels} * 4 *"
            self.counts.append(turns)
            self.scratch = (size if not self.scratch else f"{self.scratch[0]} {size} max",)
        step = entry.step(strips, slabs, str(shape.shared(self.planned.taps)))
        self.variants.append(Variant(f"{StencilLast().words(shape.choice)}, {shape.bits}-bit", (step,), guards))
