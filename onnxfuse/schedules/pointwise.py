"""The pointwise schedule: one thread a vector of neighbouring output elements, or several; the last may be cut short.

The loop runs over the row-major place ``L`` in the outputs, which all have the same number of elements.  An operand
that is laid out like the outputs is read at ``L`` itself; broadcast and moved operands are read where the index
arithmetic says, as vectors where neighbouring outputs need neighbouring elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnxfuse.graph.dims import Dim, product
from onnxfuse.lowering.context import Unlowerable
from onnxfuse.lowering.index import IndexSpace
from onnxfuse.lowering.launch import Step, Variant, expression
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.pull import Puller, Scalar
from onnxfuse.lowering.scalars import TYPES
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.choice import Choice, told
from onnxfuse.schedules.kernel import (
    Kernel,
    Signature,
    fits_narrow,
    header,
    is_vector,
    make_plan,
    moving_loads,
    narrow_guards,
    scattered_inputs,
    vector_guards,
    widest,
)
from onnxfuse.schedules.text import Lanes, Scope, Writer

THREADS = 256

SINGLE = 4
"""Elements that a thread computes where the sizes of a run admit no vectors (benchmarks/results, ways)."""

BLOCKS, VECTORS = (128, 256, 512), (1, 2, 4)
"""Threads of a block, and vectors a thread, that tuning tries."""


def pointwise_kernel(
    lowered: Lowered, rule: str, sizes: Mapping[str, int], choice: Choice | None = None
) -> Kernel | Refusal:
    """A kernel for a region without reductions, or why there is none; see ``make_kernel``."""
    outputs = lowered.program.outputs
    total = elements(lowered)
    if isinstance(total, Refusal):
        return total
    space = IndexSpace()
    place = space.base("@L", total)
    puller = Puller(space)
    try:
        roots = [puller.element(output, space.delinear(place, output.shape)) for output in outputs]
    except Unlowerable as stopped:
        return stopped.refusal
    lanes_of = {width: Lanes(space, puller, "@L", "", width) for width in (1, 2, 4, 8)}
    loads = moving_loads([*roots, *puller.gathered.values()], lanes_of[1])
    dtypes = [output.dtype for output in outputs] + [load.dtype for load in loads]
    width = widest(lanes_of, dtypes)
    lanes = Lanes(space, puller, "@L", "", width)
    signature = Signature(lowered)
    stores = [Store(index, output.dtype, root, f"o{index} + L")
              for index, (root, output) in enumerate(zip(roots, outputs, strict=True))]
    lines = vector_lines(Writer(lanes, signature.sizes), stores)
    body = "".join(f"{line}\n" if line.startswith("#") else f"  {line}\n" for line in lines)
    size = Writer(lanes, signature.sizes).size(total)
    used = f"{body} {size}"
    source = [header(), f"// {rule}: {', '.join(lowered.program.operators)}\n",
              *_functions(signature, used, size, body, total.multiple_of() % width == 0)]
    vectors = [(f"o{index}", TYPES[output.dtype].size) for index, output in enumerate(outputs)]
    vectors += [
        (f"i{load.input}", TYPES[load.dtype].size)
        for load in loads
        if lanes.stride(load.offset) == 1 and is_vector(load, lanes)
    ]
    count, variants = expression(total, lowered.binding.symbols), []
    offered = _offered(width, total.substitute(lowered.binding.names), sizes) if fits_narrow(lowered) else {}
    choice, first = told(choice, offered)
    for shape, guards in _shapes(lowered, lanes, vectors, first):
        index = "int" if shape.bits == 32 else "long long"
        call = f"pointwise<{shape.width}, {shape.block}, {shape.vectors}, {index}>"
        source.append(signature.entry(shape.name, call, used, index, shape.block))
        grid = f"{count} {shape.elements} ceil"
        step = Step(shape.name, (grid, "1", "1"), (str(shape.block), "1", "1"), signature.arguments(used, shape.bits))
        variants.append(Variant(shape.words, (step,), guards))
    plan = make_plan(lowered, rule, puller, variants)
    return Kernel("pointwise", "".join(source), plan, scattered_inputs(loads, lanes_of), choice, tuple(offered))


@dataclass(frozen=True)
class Shape:
    """Threads of a block, vectors of ``width`` elements that each of them computes, and bits of an index."""

    block: int
    width: int
    vectors: int
    bits: int = 32

    @property
    def name(self) -> str:
        """Name of the kernel."""
        several = f"_x{self.vectors}" if self.vectors > 1 else ""
        return f"pointwise_w{self.width}{several}_{self.bits}" + (f"_b{self.block}" if self.block != THREADS else "")

    @property
    def words(self) -> str:
        """Name of the variant."""
        return f"{self.choice.words}, {self.bits}-bit"

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of("pointwise", block=self.block, width=self.width, vectors=self.vectors)

    @property
    def elements(self) -> int:
        """Elements of a block."""
        return self.block * self.width * self.vectors


def _offered(width: int, total: Dim, sizes: Mapping[str, int]) -> dict[Choice, Shape]:
    """What may be quicker than the schedule's own choice for so many elements."""
    if not total.symbols <= sizes.keys():
        return {}
    elements = total.evaluate(sizes)
    found = (Shape(block, lanes, vectors)
             for lanes in (width, width // 2) if lanes for vectors in VECTORS for block in BLOCKS)
    return {
        shape.choice: shape
        for shape in found if shape.elements < 2 * elements and shape != Shape(THREADS, width, 1)
    }


def _shapes(
    lowered: Lowered, lanes: Lanes, vectors: Iterable[tuple[str, int]], first: Shape | None
) -> Iterator[tuple[Shape, tuple[str, ...]]]:
    """What to launch, and under which guards; the last runs anything.  ``first``: what is told."""
    if fits_narrow(lowered):
        narrow = narrow_guards(lowered)
        wide = narrow + vector_guards(lowered, lanes, vectors)
        if first is not None:
            yield first, wide if first.width > 1 else narrow
        yield Shape(THREADS, lanes.width, 1), wide
        if lanes.multiples:
            yield Shape(THREADS, 1, SINGLE), narrow
    yield Shape(THREADS, 1, 1, bits=64), ()


def _functions(signature: Signature, used: str, size: str, body: str, whole: bool) -> list[str]:
    """The body at a place ``L``, and a function whose threads run it for several vectors, a block's width apart.

    ``whole``: the width divides the outputs, so that no vector is cut short.
    """
    parameters, names = signature.parameters(used, "idx"), signature.names(used)
    each = f"    if (L < {size}) pointwise_at<width, idx>({names}, L);\n" if whole else (
        f"    if (L + width <= {size}) pointwise_at<width, idx>({names}, L);\n"
        f"    else if constexpr (width > 1)\n      for (; L < {size}; ++L) pointwise_at<1, idx>({names}, L);\n"
    )
    return [
        "template <int width, typename idx> __device__ __forceinline__ void pointwise_at("
        f"{parameters}, const idx L) {{\n{body}}}\n",
        "template <int width, int threads, int items, typename idx> __device__ __forceinline__ void pointwise("
        f"{parameters}) {{\n#pragma unroll\n  for (int item = 0; item < items; ++item) {{\n"
        f"    idx L = (((idx)blockIdx.x * items + item) * threads + threadIdx.x) * width;\n{each}  }}\n}}\n",
    ]


def elements(lowered: Lowered) -> Dim | Refusal:
    """How many elements each of the outputs has."""
    outputs = lowered.program.outputs
    total = product(outputs[0].shape)
    if all(product(output.shape) == total for output in outputs):
        return total
    names = lowered.binding.names
    shapes = ", ".join(str([str(size.substitute(names)) for size in output.shape]) for output in outputs)
    return Refusal("iteration-shape", f"the outputs have different numbers of elements: {shapes}")


@dataclass(frozen=True)
class Store:
    """Where a vector of output ``index`` is stored: ``target``, a pointer to elements of the type."""

    index: int
    dtype: int
    scalar: Scalar
    target: str


def vector_lines(writer: Writer, stores: Sequence[Store]) -> list[str]:
    """Lines that compute a vector of each output and store it; where it is, the text before them says."""
    values = [writer.scalar(store.scalar) for store in stores]
    kinds = [TYPES[store.dtype] for store in stores]
    lane = writer.lines[Scope.LANE]
    outer = [line for scope in (Scope.KERNEL, Scope.ROW, Scope.VECTOR) for line in writer.lines[scope]]
    outer += [f"{kind.compute} w{store.index}[width];" for store, kind in zip(stores, kinds, strict=True)]
    inner = [*lane, *(f"w{store.index}[v] = {text};" for store, text in zip(stores, values, strict=True))]
    after = [
        f"of::store({store.target}, of::pack<{kind.storage}>(w{store.index}));"
        for store, kind in zip(stores, kinds, strict=True)
    ]
    loop = ["#pragma unroll", "for (int v = 0; v < width; ++v) {", *(f"  {line}" for line in inner), "}"]
    return [*outer, *loop, *after]
