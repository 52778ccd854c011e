"""The row schedule: reductions over the last axes, with what is pointwise before and after them.

Elements are arranged as ``rows`` rows of ``length`` elements; a group of threads shares a row.  The work falls into
phases: phase p computes the reductions whose operands need reductions of phases before p only, so softmax has three
(maximum, sum, result).  Between phases a row stays on chip:

- *registers*: every thread keeps its elements, unrolled; for rows up to ``threads * KEPT_LIMIT`` elements;
- *streaming*: every phase reads the row again and computes anew; for rows of any length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

from onnxfuse.graph.dims import Dim, product
from onnxfuse.lowering.context import Unlowerable
from onnxfuse.lowering.index import IndexSpace
from onnxfuse.lowering.ir import Reduce, postorder
from onnxfuse.lowering.launch import Step, Variant, expression
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.pull import Puller, Rows, require_last_axes
from onnxfuse.lowering.scalars import TYPES
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.kernel import (
    Kernel,
    Signature,
    best_width,
    fits_narrow,
    header,
    is_vector,
    make_plan,
    moving_loads,
    narrow_guards,
    scattered_inputs,
    vector_guards,
)
from onnxfuse.schedules.phases import Output, Phases, Text, row_text
from onnxfuse.schedules.text import Lanes, Writer

KEPT_LIMIT = 32
"""Elements of a row that a thread keeps in registers, at most; more of them cost occupancy."""

ENOUGH_THREADS = 8_000
"""Threads under which a GPU of a hundred multiprocessors waits for memory rather than moves it."""

BLOCK = 128
"""Threads of a block whose rows are a warp or less."""

MAX_THREADS = 1024


@dataclass(frozen=True)
class Shape:
    """A way to share a row: threads, vector width, and vectors a thread keeps (0 where it streams)."""

    threads: int
    width: int
    items: int
    bits: int = 32

    @property
    def block(self) -> int:
        """Threads of a block."""
        return BLOCK if self.threads <= 32 else self.threads

    @property
    def capacity(self) -> int:
        """Elements of a row that fit."""
        return self.threads * self.width * self.items

    @property
    def name(self) -> str:
        """Name of the kernel."""
        kind = f"x{self.items}" if self.items else "stream"
        return f"rows_{self.threads}_w{self.width}_{kind}_{self.bits}"


def row_kernel(lowered: Lowered, rule: str, sizes: Mapping[str, int]) -> Kernel | Refusal:
    """A kernel for a region with reductions over trailing axes, or why there is none."""
    program = lowered.program
    reductions = [tensor for tensor in postorder(program.outputs) if isinstance(tensor, Reduce)]
    if not reductions:
        return Refusal("no-reduction", "the region has no reduction over rows")
    shape, first = reductions[0].operand.shape, min(reductions[0].axes)
    count, length = product(shape[:first]), product(shape[first:])
    space = IndexSpace()
    row, place = space.base("@row", count), space.base("@e", length)
    row = row if count != 1 else row * 0
    place = place if length != 1 else place * 0
    puller = Puller(space, Rows(row, place, length))
    outputs: list[Output] = []
    try:
        for reduction in reductions:
            require_last_axes(reduction)
        for index, tensor in enumerate(program.outputs):
            size = product(tensor.shape)
            if size == count * length and length != 1:
                where, whole = row * length + place, True
            elif size == count:
                where, whole = row, False
            else:
                named = size.substitute(lowered.binding.names)
                return Refusal(
                    "iteration-shape", f"an output of {named} elements fits neither the rows nor their elements"
                )
            scalar = puller.element(tensor, space.delinear(where, tensor.shape))
            outputs.append(Output(index, tensor.dtype, scalar, whole))
    except Unlowerable as stopped:
        return stopped.refusal
    return _assemble(lowered, rule, puller, outputs, Extent(count, length, *(
        _planned(size.substitute(lowered.binding.names), sizes) for size in (length, count))))


@dataclass(frozen=True)
class Extent:
    """``count`` rows of ``length`` elements; ``planned`` is the length to make a variant for, ``rows`` how many are
    planned."""

    count: Dim
    length: Dim
    planned: int | None
    rows: int | None


def _planned(length: Dim, sizes: Mapping[str, int]) -> int | None:
    """The number that a length is planned to be."""
    return length.evaluate(sizes) if length.symbols <= sizes.keys() else None


def _assemble(lowered: Lowered, rule: str, puller: Puller, outputs: list[Output], extent: Extent) -> Kernel:
    count, length = extent.count, extent.length
    space, roots = puller.space, [output.scalar for output in outputs]
    lanes_of = {width: Lanes(space, puller, "@e", "@row", width) for width in (1, 2, 4, 8)}
    loads = moving_loads([*roots, *puller.gathered.values()], lanes_of[1])
    whole = [output for output in outputs if output.whole]
    width = best_width(lanes_of, loads, length, [output.dtype for output in whole] + [load.dtype for load in loads])
    lanes = Lanes(space, puller, "@e", "@row", width)
    lanes._multiple(length)
    phases = Phases(outputs, lanes)
    signature = Signature(lowered)
    writer = Writer(lanes, signature.sizes)
    count_text, length_text = writer.size(count), writer.size(length)
    texts = {keep: row_text(phases, lanes, signature.sizes, count_text, length_text, keep) for keep in (True, False)}
    vectors = [(f"o{output.index}", TYPES[output.dtype].size) for output in whole]
    vectors += [
        (f"i{load.input}", TYPES[load.dtype].size)
        for load in loads
        if lanes.stride(load.offset) == 1 and is_vector(load, lanes)
    ]
    symbols = lowered.binding.symbols
    aligned = narrow_guards(lowered) + vector_guards(lowered, lanes, vectors)
    source, variants, used_modes = [], [], set()
    for layout in _layouts(lowered, phases, extent, width):
        keep = layout.items > 0
        used_modes.add(keep)
        text = texts[keep]
        guards = () if layout.bits == 64 else aligned if layout.width > 1 else narrow_guards(lowered)
        if keep and length.value is None:
            guards += (f"{expression(length, symbols)} {layout.capacity + 1} <",)
        index = "int" if layout.bits == 32 else "long long"
        used = f"{text.body} {count_text} {length_text}"
        call = f"{text.name}<{layout.width}, {layout.threads}, {max(layout.items, 1)}, {index}>"
        source.append(signature.entry(layout.name, call, used, index, layout.block))
        grid = f"{expression(count, symbols)} {layout.block // layout.threads} ceil"
        step = Step(
            layout.name, (grid, "1", "1"), (str(layout.block), "1", "1"), signature.arguments(used, layout.bits)
        )
        variants.append(Variant(layout.name, (step,), guards))
    bodies = [
        _function(texts[keep], signature, f"{texts[keep].body} {count_text} {length_text}")
        for keep in sorted(used_modes, reverse=True)
    ]
    plan = make_plan(lowered, rule, puller, variants)
    comment = f"// {rule}: {', '.join(lowered.program.operators)}\n"
    return Kernel(
        "rows", "".join([header(), comment, *bodies, *source]), plan, scattered_inputs(loads, lanes_of)
    )


def _function(text: Text, signature: Signature, used: str) -> str:
    return (
        f"template <int width, int threads, int items, typename idx> __device__ __forceinline__ void {text.name}("
        f"{signature.parameters(used, 'idx')}) {{\n{text.body}}}\n"
    )


def _layouts(lowered: Lowered, phases: Phases, extent: Extent, width: int) -> list[Shape]:
    """The variants to offer, fastest first; the last one runs anything."""
    kept, known = phases.live, extent.length.value
    layouts = []
    if fits_narrow(lowered):
        for lane_count in dict.fromkeys((width, 1) if known is None else (width,)):
            if kept and extent.planned is not None and (known is not None or extent.planned % lane_count == 0):
                best = _best(extent, extent.planned, lane_count, kept)
                layouts += [best] if best is not None else []
            if kept and known is None:
                per_thread = max(KEPT_LIMIT // kept // lane_count, 1)
                layouts.append(Shape(32, lane_count, per_thread))
                if lane_count > 1:
                    layouts.append(Shape(256, lane_count, per_thread))
            if lane_count == width:
                layouts.append(Shape(_streaming_threads(extent.planned), lane_count, 0))
    return [*dict.fromkeys(layouts), Shape(_streaming_threads(extent.planned), 1, 0, bits=64)]


def _streaming_threads(length: int | None) -> int:
    if length is None:
        return 256
    threads = 32
    while threads < MAX_THREADS and threads * 16 < length:
        threads *= 2
    return threads


def _best(extent: Extent, length: int, width: int, kept: int) -> Shape | None:
    """Threads for rows of a planned length.

    The weights are measured ones (benchmarks/results, row layouts): two to four vectors a thread are best, threads
    past a warp pay for barriers, idle lanes cost what they are, and few rows want many threads each.
    """
    vectors = -(-length // width)
    best: tuple[float, Shape] | None = None
    threads = 1
    while threads <= MAX_THREADS:
        items = -(-vectors // threads)
        elements = items * width * kept
        if elements <= KEPT_LIMIT or (threads == MAX_THREADS and elements <= 2 * KEPT_LIMIT):
            weight = 1.05 if items == 1 else 1.0 if items <= 4 or items * width <= 8 else 1.08
            if extent.rows is not None and 0 < extent.rows * threads < ENOUGH_THREADS:
                weight *= 1 + 0.25 * log2(ENOUGH_THREADS / (extent.rows * threads))
            weight *= 1.05 if threads > 32 else 1.06 if threads == 8 else 1.0 if threads > 8 else 1.3
            score = weight * items * threads / vectors
            if best is None or score < best[0]:
                best = (score, Shape(threads, width, items))
        threads *= 2
    return best[1] if best is not None else None
