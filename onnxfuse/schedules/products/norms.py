"""Convolutions of whose results a group or instance norm is taken: mean and squares come with the convolution.

    image ─ convolution ─ bias, residual ─┬─ mean, squares ─ of all windows ─┐
                                          └──────────────────────────────────┴ norm, activation ─▶

Of a norm whose rows no block holds two kernels read what the convolution wrote, one for its statistics.  Here, on
Hopper, the convolution's kernel tells mean and squares of each channel in a part of its windows (``column_moments``), a
small one brings these together, and a pointwise one does the rest: three launches of one node, in which results are
read once.  Everywhere else, and for sizes that tiles do not divide, the node launches the convolution's kernel and that
of the norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from onnxfuse.graph.dims import dim, product
from onnxfuse.ir.descent import above
from onnxfuse.ir.scalars import FLOAT, TYPES
from onnxfuse.ir.tensors import Input, Program, Reduce
from onnxfuse.lowering.launch import Variant
from onnxfuse.lowering.lower import Lowered
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.choice import Choice, told
from onnxfuse.schedules.composed.in_parts import REDUCTIONS, joined, moved_scratch, renamed_variant, within
from onnxfuse.schedules.headers import in_order
from onnxfuse.schedules.kernel import VECTOR_BYTES, Kernel, Pace, contractions, fits_narrow, make_plan, narrow_guards
from onnxfuse.schedules.pointwise import THREADS, Pointwise
from onnxfuse.schedules.products.blocks import MOST_TILES
from onnxfuse.schedules.products.boxes import BoxShape
from onnxfuse.schedules.products.column_moments import MEANS, SQUARES
from onnxfuse.schedules.products.epilogue import PAIR
from onnxfuse.schedules.products.in_two import Divided, ProductDivided, divided, in_two, reduces
from onnxfuse.schedules.products.norm_groups import NormGroups, norm_groups
from onnxfuse.schedules.products.pace import NARROW
from onnxfuse.schedules.products.parts import ProductParts, parts_of, refused
from onnxfuse.schedules.products.product import MULTIPLYING, Product, ProductWork
from onnxfuse.schedules.products.shape import SpecialisedShape
from onnxfuse.schedules.products.shared import SharedShape
from onnxfuse.schedules.products.windows import Windows, windows_of
from onnxfuse.schedules.schedule import Expected, Request
from onnxfuse.schedules.source import Parameter, Source

NAME = "product_norms"

SETTINGS = ("rows", "columns", "stages", "turns", "stays", "shared")
"""Those of a convolution's tiles that its choice tells."""

VECTORS = 4
"""That each thread of what follows the norm has on their way (H200: of 67 MB 48.5 microseconds, with one 52.7)."""


class ProductNorms(ProductDivided):
    """Convolutions of whose results a norm over windows is taken."""

    name = NAME
    settings = "tiles of {rows} x {columns}, {stages} stages, tiles at a time {turns}"
    optional = Product.optional
    tolerance = 2**-8  # sums in another order round to other numbers of 16 bits, which the norm scales

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """Three kernels."""
        return None if _found(Request(lowered, sizes=sizes)) is None else Expected(3)

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of a region with one convolution and one norm of what it gives."""
        found = _found(request)
        return None if found is None else _NormsWork(*found).kernel()


_Found = tuple[Divided, ProductParts, Windows, NormGroups]


def _found(request: Request) -> _Found | None:
    """The convolution of a region, divided from the norm behind it; None where there is not one of each."""
    program = request.lowered.program
    reductions = [each for each in program.tensors if isinstance(each, Reduce)]
    products = contractions(request.lowered) if len(reductions) == 2 else ()
    if len(products) != 1 or not set(reductions) <= set(above(program, products[0])):
        return None
    (contract,) = products
    if any(product(output.shape) != product(contract.shape) for output in program.outputs):
        return None
    few, *others = sorted((contract.columns, contract.rows), key=len)
    if contract.batch or len(few) != 1 or len(others[0]) < 2 or not any(map(reduces, program.outputs)):
        return None
    (channel,) = few
    region = divided(request, contract, [*(axis for axis in range(contract.rank) if axis != channel), channel])
    parts = parts_of(region.part(region.ahead).lowered, products)
    windows = windows_of(contract, parts) if isinstance(parts, ProductParts) else None
    if windows is None or isinstance(parts, Refusal):
        return None
    groups = norm_groups(program, region.whole, contract, windows, parts.swapped)
    return None if groups is None else (region, parts, windows, groups)


class _NormsWork:
    """The kernels of one region as they come."""

    def __init__(self, region: Divided, parts: ProductParts, windows: Windows, groups: NormGroups) -> None:
        self.region, self.parts, self.windows, self.groups = region, parts, windows, groups
        self.lowered = region.request.lowered
        self.work = ProductWork(region.part(region.ahead), parts)
        self.sizes = [count.value for count in windows.counts[:-1]]  # of windows along each axis

    def kernel(self) -> Kernel | Refusal:
        """All of it."""
        if not self.offered or not fits_narrow(self.lowered, rows=False):
            return refused("no tiles hold windows of one image each, and all of them whole")
        two = in_two(self.region, REDUCTIONS)
        if isinstance(two, Refusal):
            return two
        if two.steps < 2:
            return refused("its rows are read once in any case")
        self.work.maps += two.maps
        request, own = self.region.request, next(iter(self.offered.values()))
        choice, first = told(request.choice, self.offered)
        shape = own if first is None else first
        made = self._in_three(shape, two.scratch)
        if isinstance(made, Refusal):
            return made
        variant, kernels, scratch = made
        used = {"onnxfuse", "mma", *MULTIPLYING[self.parts.size], "tensor_copies", "cluster", "moments", *two.headers,
                *(name for each in kernels for name in each.headers)}
        source = Source(
            in_order(used),
            f"{request.rule}: {', '.join(self.lowered.program.operators)}",
            (*self.work.functions.values(), *(each for kernel in kernels for each in kernel.functions), *two.functions),
            (*self.work.entries, *(each for kernel in kernels for each in kernel.entries), *two.entries))
        plan = replace(
            make_plan(self.lowered, request.rule, self.parts.puller, [variant, *two.variants]),
            checks=two.checks, maps=tuple(self.work.maps), scratch=(*two.scratch, *scratch))
        return Kernel(
            NAME, source, plan, (), choice, tuple(each for each, other in self.offered.items() if other != own),
            heavy=True, rounds=self.parts.rounds, pace=self._pace(shape))

    # ---- Which tiles. ----

    @cached_property
    def offered(self) -> dict[Choice, SpecialisedShape]:
        """Tiles that may be quickest, of windows of one image each; what is known of columns is laid out in pieces that
        fitted ones do not fill."""
        found = [replace(shape, moments=True).filled() for shape in self.work.blocks.offered(2 * MOST_TILES)
                 if isinstance(shape, SpecialisedShape) and shape.split == shape.blocks == 1
                 and not shape.columns % NARROW]
        shared, alone = ([shape for shape in found if isinstance(shape, SharedShape) == several and shape.stages]
                         for several in (True, False))
        tried = (*shared[:MOST_TILES], *alone[:MOST_TILES])
        return {_choice(shape): shape for shape in found if shape in tried and self._parts(shape) is not None}

    def _parts(self, shape: SpecialisedShape) -> int | None:
        """Of how many parts of an image's windows it tells what it knows; None where that is not certain."""
        sizes = [size for size in self.sizes if size is not None]
        if len(sizes) < len(self.sizes) or self.work.lanes.width < PAIR:
            return None
        if isinstance(shape, BoxShape):
            *sides, images = shape.box.sides
            whole = images == 1 and shape.box.rows == shape.rows and all(
                size % side == 0 for size, side in zip(sizes, sides, strict=False))
        else:
            whole = prod(sizes) % shape.rows == 0
        return prod(sizes) // shape.windows if whole else None

    def _pace(self, shape: SpecialisedShape) -> Pace | None:
        """What the time of the convolution's kernel follows from, and what others move behind it."""
        pace = self.work.blocks.paces.pace(shape, self.work.lanes.width)
        moved = self._bytes
        return None if pace is None or moved is None else replace(pace, behind=moved)

    @property
    def _bytes(self) -> int | None:
        """What is moved behind the convolution: its results once more, and what comes of them."""
        elements = self.work.blocks.at(product(self.region.between.shape))
        sizes = [TYPES[each.dtype].size for each in (self.region.between, *self.region.results)]
        return None if elements is None else elements * sum(sizes)

    # ---- The kernels. ----

    def _in_three(
        self, shape: SpecialisedShape, before: tuple[str, ...]
    ) -> tuple[Variant, list[Source], tuple[str, ...]] | Refusal:
        """Three launches, the kernels of the latter two, and scratch memory behind what is there ``before``."""
        region, parts, inputs = self.region, self._parts(shape), self.lowered.program.inputs
        assert parts is not None
        means, squares = (Input(FLOAT, (self.windows.images, dim(parts), self.parts.columns), len(inputs) + place)
                          for place in range(2))
        known = self.groups.divided(region.results, means)
        together = _part(region.made(REDUCTIONS, Program(
            (*inputs, means, squares), known.outputs(means, squares, shape.windows),
            self.lowered.program.operators)), "of_all")
        ends = known.inputs(len(inputs) + 1)
        vectors = Choice.of(
            "pointwise", block=THREADS, width=VECTOR_BYTES // TYPES[region.between.dtype].size, vectors=VECTORS)
        rest = _part(region.made((Pointwise(),), region.behind(ends, known.instead(ends)), vectors), "of_each")
        if isinstance(together, Refusal):
            return together
        if isinstance(rest, Refusal):
            return rest
        first = len(before)
        found, ended = range(first, first + 2), range(first + 2, first + 2 + len(ends))
        written = {f"o{place}{part}": text for place, scratch in enumerate(ended)
                   for part, text in (("", f"t{scratch}"), (".addr", "0"))}
        variant = joined(
            renamed_variant(self._convolution(shape, found), region.outputs_ahead()),
            renamed_variant(together.variant, {
                **self._reads((means, squares), found), **written, **moved_scratch(together.scratch, ended.stop)}),
            renamed_variant(rest.variant, {
                **self._reads(ends, ended), **region.outputs_behind(),
                **region.reads(region.stand_in, region.pointer)}))
        scratch = (*map(region.bytes_of, (means, squares, *ends)), *together.scratch)
        return variant, [together.source, rest.source], scratch

    def _reads(self, tensors: Iterable[Input], places: Iterable[int]) -> dict[str, str]:
        """Names by which a kernel reads tensors in scratch memory at these places."""
        return {name: text for tensor, place in zip(tensors, places, strict=True)
                for name, text in self.region.reads(tensor, f"t{place}").items()}

    def _convolution(self, shape: SpecialisedShape, known: Sequence[int]) -> Variant:
        """The launch that tells what is known of each channel, in scratch memory at these places."""
        more = tuple(Parameter("float* __restrict__", name, f"t{place}")
                     for name, place in zip((MEANS, SQUARES), known, strict=True))
        self.work.add_specialised(shape, narrow_guards(self.lowered, rows=False), more)
        return self.work.variants[-1]


@dataclass(frozen=True)
class _Part:
    """A kernel that stands beside others: the way that is the first, its text, and the scratch memory that it needs."""

    variant: Variant
    source: Source
    scratch: tuple[str, ...]


def _part(made: Kernel | Refusal, space: str) -> _Part | Refusal:
    """A kernel in a namespace of its own."""
    if isinstance(made, Refusal):
        return made
    if made.scattered:
        return refused("what follows its norm lies another way")
    source, (variant, *_) = within(made, space)
    return _Part(variant, source.keeping({step.kernel for step in variant.launches}), made.plan.scratch)


def _choice(shape: SpecialisedShape) -> Choice:
    """As tuning writes it down."""
    return Choice.of(NAME, **{name: value for name, value in shape.choice.settings if name in SETTINGS})
