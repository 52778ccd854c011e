"""The pointwise schedule: one thread a vector of neighbouring output elements, or several; the last may be cut short.

The loop runs over the row-major place ``L`` in the outputs.  An operand that is laid out like the outputs is read at
``L`` itself; broadcast and moved operands are read where the index arithmetic says, as vectors where neighbouring
outputs need neighbouring elements.

Outputs with different numbers of elements, as the unequal halves of a Split, have a loop each, over blocks of their
own: those of the first come first.  So no vector lies in two outputs, and an empty one takes no block.  Where an output
is a part of a tensor, the loop runs over that part, and stores it where it lies in the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from onnxfuse.graph.dims import Dim, dim, minimum, product
from onnxfuse.ir.context import Unlowerable
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.tensors import Part, Placed, Tensor
from onnxfuse.lowering.index import Coordinates, IndexSpace
from onnxfuse.lowering.launch import Variant, expression
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.placing import around
from onnxfuse.lowering.pull import Load, Puller, Scalar
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.choice import Choice, told
from onnxfuse.schedules.kernel import (
    Kernel,
    divides,
    fits_narrow,
    has_reductions,
    make_plan,
    moving_loads,
    narrow_guards,
    pools,
    scattered_inputs,
    sources,
    targets,
    vector_guards,
    vector_loads,
    widest,
)
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.packing import Packed, packed
from onnxfuse.schedules.schedule import Does, Expected, Request, Schedule
from onnxfuse.schedules.source import Entry, Function, Parameter, Signature, Source
from onnxfuse.schedules.text import Sizes, Writer, pointer, unrolled

THREADS = 256

SINGLE = 4
"""Elements that a thread computes where the sizes of a run admit no vectors (benchmarks/results, ways)."""

BLOCKS, VECTORS = (128, 256, 512), (1, 2, 4)
"""Threads of a block, and vectors a thread, that tuning tries."""


class Pointwise(Schedule):
    """Regions without reductions."""

    name = "pointwise"
    settings = "blocks of {block}, width {width}, {vectors} a thread"
    efficiency = 0.9

    def runs(self, does: Does) -> bool:
        """Maps, and views that leave the innermost axis in place."""
        return not does

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """One kernel, which may read again what outputs of different sizes share."""
        return None if has_reductions(lowered) else Expected(1, read_again(lowered))

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of any region without reductions and windows."""
        lowered = request.lowered
        return None if has_reductions(lowered) or pools(lowered) else kernel_of(request, self.name, _width)


def _width(loops: Sequence[Loop], puller: Puller) -> int:
    return widest((1, 2, 4, 8), [dtype for loop in loops for dtype in loop.dtypes])


def kernel_of(request: Request, schedule: str, width_of: Callable[[Sequence[Loop], Puller], int]) -> Kernel | Refusal:
    """A kernel in the name of a schedule, with vectors of so many elements as are told of its loops."""
    lowered, rule, sizes = request.lowered, request.rule, request.sizes
    puller = Puller(IndexSpace())
    try:
        loops = _loops(lowered, puller)
    except Unlowerable as stopped:
        return stopped.refusal
    width = _storable(loops, puller, width_of(loops, puller), lowered.binding.planned(sizes))
    signature = Signature(lowered)
    lanes, names = [loop.lanes(puller, width) for loop in loops], Sizes(signature.sizes)
    texts = [_Text.of(loop, each, lowered, names) for loop, each in zip(loops, lanes, strict=True)]
    for loop, each in zip(loops, lanes, strict=True):
        each.rely_on_loads(loop.loads)
        each.rely_on_vectors(loop.places)
    *functions, whole = _functions(signature.parameters(names.used), texts)
    entries: list[Entry] = []
    needed = dict.fromkeys(guard for loop, each in zip(loops, lanes, strict=True)
                           for guard in vector_guards(lowered, each, loop.vectors(lowered, each)))
    counts, variants = [expression(loop.total, lowered.binding.symbols) for loop in loops], []
    total = reduce(lambda a, b: a + b, (loop.total for loop in loops))
    own = PointwiseShape(THREADS, width, 1 if width > 1 or schedule == Pointwise.name else SINGLE, schedule=schedule)
    offered = _offered(own, total.substitute(lowered.binding.names), sizes) if fits_narrow(lowered) else {}
    choice, first = told(request.choice, offered)
    odd = any(each.multiples for each in lanes)
    for shape, guards in _shapes(lowered, own, tuple(needed), first, odd):
        entry = whole.entry(shape.name, (shape.width, shape.block, shape.vectors), shape.bits, shape.block)
        entries.append(entry)
        grid = " ".join([f"{count} {shape.elements} ceil" for count in counts] + ["+"] * (len(counts) - 1))
        variants.append(Variant(shape.words, (entry.step(grid),), guards))
    plan = make_plan(lowered, rule, puller, variants)
    comment = f"{rule}: {', '.join(lowered.program.operators)}"
    source = Source(("onnxfuse",), comment, (*functions, whole), tuple(entries))
    scattered = {place for loop in loops
                 for place in scattered_inputs(loop.loads, {2: loop.lanes(puller, 2)})}
    return Kernel(schedule, source, plan, tuple(sorted(scattered)), choice, tuple(offered))


@dataclass(frozen=True)
class Loop:
    """Outputs with equally many elements.

    Attributes:
        base: the loop's variable; total: elements that it computes of each of the outputs.
        outputs: which they are; roots: what an element of each is; places: where it is stored.
        loads: what differs from element to element; dtypes: types of that, and of the outputs.
    """

    base: str
    total: Dim
    outputs: tuple[int, ...]
    roots: tuple[Scalar, ...]
    places: tuple[Dim, ...]
    loads: tuple[Load, ...]
    dtypes: tuple[int, ...]

    def lanes(self, puller: Puller, width: int) -> Lanes:
        """Vectors of so many elements along the loop."""
        return Lanes(puller.space, puller, self.base, "", width)

    def vectors(self, lowered: Lowered, lanes: Lanes) -> list[tuple[str, int]]:
        """Pointers to what is moved as vectors, and bytes of an element there."""
        outputs = targets(lowered)
        return [*(outputs[place] for place in self.outputs), *sources(vector_loads(self.loads, lanes))]


def _loops(lowered: Lowered, puller: Puller) -> list[Loop]:
    """A loop for each number of elements that outputs have, in the outputs' order.

    Raises:
        Unlowerable: an element cannot be had by itself.
    """
    outputs = lowered.program.outputs
    shapes = [_computed(output).shape for output in outputs]
    loops: list[Loop] = []
    for total in dict.fromkeys(map(product, shapes)):
        base = f"@L{len(loops) or ''}"
        place = puller.space.base(base, total)
        own = tuple(index for index, shape in enumerate(shapes) if product(shape) == total)
        ats = [puller.space.delinear(place, shapes[index]) for index in own]
        stored = [_stored(outputs[index], at, puller) for index, at in zip(own, ats, strict=True)]
        roots = tuple(root for root, _ in stored)
        places = tuple(place if there is None else there for _, there in stored)
        # An index read from memory may be another loop's: it does not move along this one.
        loads = tuple(moving_loads([*roots, *puller.gathered.values()], Lanes(puller.space, puller, base, "", 1)))
        dtypes = (*(outputs[index].dtype for index in own), *(load.dtype for load in loads))
        loops.append(Loop(base, total, own, roots, places, loads, dtypes))
    return loops


def _computed(output: Tensor) -> Tensor:
    """What is computed of an output: the rest is somebody else's."""
    return output.operand if isinstance(output, Part | Placed) else output


def _stored(output: Tensor, at: Coordinates, puller: Puller) -> tuple[Scalar, Dim | None]:
    """What is stored at a place of what is computed of an output, and where in the whole; None where that is all."""
    if isinstance(output, Placed):
        return puller.element(output.operand, at), puller.space.linear(around(output, at, puller), output.shape)
    if isinstance(output, Part):
        at = output.around(at)
        return puller.element(output, at), puller.space.linear(at, output.shape)
    return puller.element(output, at), None


def _storable(loops: Sequence[Loop], puller: Puller, most: int, planned: Mapping[str, int]) -> int:
    """The widest vectors, of no more elements than the ``most``, that lie together in parts of outputs too, at the
    planned sizes."""
    for width in (most >> step for step in range(most.bit_length() - 1)):
        each = [(loop, loop.lanes(puller, width)) for loop in loops]
        for loop, lanes in each:
            lanes.rely_on_vectors(loop.places)
        if all(lanes.stride(place) == 1 and lanes.aligned(place) for loop, lanes in each for place in loop.places) and (
                all(divides(lanes, planned) for _, lanes in each)):
            return width
    return 1


def read_again(lowered: Lowered) -> Dim:
    """Bytes, over the graph's symbols, that a region without reductions reads more than once: outputs with different
    numbers of elements do not share what they read."""
    if len({product(output.shape) for output in lowered.program.outputs}) == 1:
        return dim(0)
    reads = read(lowered)
    wholes = [product(tensor.shape) * TYPES[tensor.dtype].size for tensor in lowered.program.inputs]
    again = dim(0)
    for size, whole in zip(reads, wholes if reads else (), strict=True):
        again = again + size - minimum(size, whole)
    return again.substitute(lowered.binding.names)


def read(lowered: Lowered) -> list[Dim]:
    """Bytes, by its own symbols, that such a region reads of each input, no loop more than there are; nothing where an
    element cannot be had by itself."""
    try:
        loops = _loops(lowered, Puller(IndexSpace()))
    except Unlowerable:
        return []
    found = []
    for place, tensor in enumerate(lowered.program.inputs):
        whole, count = product(tensor.shape), dim(0)
        for loop in loops:
            count = count + minimum(loop.total * sum(load.input == place for load in loop.loads), whole)
        found.append(count * TYPES[tensor.dtype].size)
    return found


@dataclass(frozen=True)
class PointwiseShape:
    """Threads of a block, vectors of ``width`` elements that each of them computes, bits of an index, and the schedule
    that it is of."""

    block: int
    width: int
    vectors: int
    bits: int = 32
    schedule: str = Pointwise.name

    @property
    def name(self) -> str:
        """Name of the kernel."""
        several = f"_x{self.vectors}" if self.vectors > 1 else ""
        block = f"_b{self.block}" if self.block != THREADS else ""
        return f"{self.schedule}_w{self.width}{several}_{self.bits}{block}"

    @property
    def words(self) -> str:
        """Name of the variant."""
        return f"{Pointwise().words(self.choice)}, {self.bits}-bit"

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of(self.schedule, block=self.block, width=self.width, vectors=self.vectors)

    @property
    def elements(self) -> int:
        """Elements of a block."""
        return self.block * self.width * self.vectors


def _offered(own: PointwiseShape, total: Dim, sizes: Mapping[str, int]) -> dict[Choice, PointwiseShape]:
    """What may be quicker than the schedule's own choice for so many elements."""
    if not total.symbols <= sizes.keys():
        return {}
    elements = total.evaluate(sizes)
    found = (replace(own, block=block, width=lanes, vectors=vectors)
             for lanes in (own.width, own.width // 2) if lanes for vectors in VECTORS for block in BLOCKS)
    return {shape.choice: shape for shape in found if shape.elements < 2 * elements and shape != own}


def _shapes(
    lowered: Lowered, own: PointwiseShape, needed: tuple[str, ...], first: PointwiseShape | None, odd: bool
) -> Iterator[tuple[PointwiseShape, tuple[str, ...]]]:
    """What to launch, and under which guards; the last runs anything.

    Args:
        own: the schedule's choice; needed: guards of vectors; first: what is told.
        odd: whether sizes of a run may admit no vectors.
    """
    if fits_narrow(lowered):
        narrow = narrow_guards(lowered)
        wide = narrow + needed
        if first is not None:
            yield first, wide if first.width > 1 else narrow
        yield own, wide
        if odd and own.width > 1:
            yield replace(own, width=1, vectors=SINGLE), narrow
    yield replace(own, width=1, vectors=1, bits=64), ()


@dataclass(frozen=True)
class _Text:
    """What a loop does at its ``place``, how many elements it has, and whether the width divides them, so that no
    vector is cut short."""

    place: str
    body: str
    size: str
    whole: bool

    @classmethod
    def of(cls, loop: Loop, lanes: Lanes, lowered: Lowered, sizes: Sizes) -> _Text:
        """The text of a loop; ``sizes`` notes what it uses."""
        place, outputs, writer = loop.base.removeprefix("@"), lowered.program.outputs, Writer(lanes, sizes)
        stores = [Store(index, outputs[index].dtype, root, pointer(f"o{index}", writer.index(there)))
                  for index, root, there in zip(loop.outputs, loop.roots, loop.places, strict=True)]
        lines = vector_lines(writer, stores)
        body = "".join(f"{line}\n" if line.startswith("#") else f"  {line}\n" for line in lines)
        size = Writer(lanes, sizes).size(loop.total)
        return cls(place, body, size, loop.total.multiple_of() % lanes.width == 0)

    @property
    def function(self) -> str:
        """Name of the function that is the body."""
        return f"pointwise_at{self.place.removeprefix('L')}"

    def at_each(self, names: str, block: str) -> str:
        """Lines that run the body for several vectors, a block's width apart."""
        place, size, function = self.place, self.size, self.function
        each = f"    if ({place} < {size}) {function}<width, idx>({names}, {place});\n" if self.whole else (
            f"    if ({place} + width <= {size}) {function}<width, idx>({names}, {place});\n"
            f"    else if constexpr (width > 1)\n"
            f"      for (; {place} < {size}; ++{place}) {function}<1, idx>({names}, {place});\n"
        )
        return (
            "#pragma unroll\n  for (int item = 0; item < items; ++item) {\n"
            f"    idx {place} = (({block} * items + item) * threads + threadIdx.x) * width;\n{each}  }}\n"
        )


def _functions(parameters: tuple[Parameter, ...], texts: Sequence[_Text]) -> list[Function]:
    """The body of each loop at a place, and a function whose threads run them, the blocks of one loop after those of
    the other."""
    names = ", ".join(each.name for each in parameters)
    functions = [
        Function(text.function, ("width",), (*parameters, Parameter("const {index}", text.place)), text.body)
        for text in texts
    ]
    *before, last = texts
    loops = "".join(
        f"  const idx b{text.place} = ({text.size} + (items * threads * width - 1)) / (items * threads * width);\n"
        f"  if (block < b{text.place}) {{\n{text.at_each(names, 'block')}  return;\n  }}\n  block -= b{text.place};\n"
        for text in before
    )
    loops += last.at_each(names, "block" if before else "(idx)blockIdx.x")
    opening = "  idx block = blockIdx.x;\n" if before else ""
    calls = tuple(each.name for each in functions)
    return [*functions, Function("pointwise", ("width", "threads", "items"), parameters, f"{opening}{loops}", calls)]


def elements(lowered: Lowered) -> Dim | Refusal:
    """How many elements each of the outputs has, where it is one number."""
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


def vector_lines(writer: Writer, stores: Sequence[Store], packs: Callable[..., Packed] = packed) -> list[str]:
    """Lines that compute a vector of each output and store it; where it is, the text before them says; ``packs``: what
    says what lanes keep of them."""
    made = [(store, *packs(writer, store.scalar, f"y{store.index}")) for store in stores]
    lane = writer.lines[Scope.LANE]
    outer = writer.upto(Scope.VECTOR)
    outer += [f"{kind} y{store.index}[width];" for store, kind, _, _ in made]
    inner = [*lane, *(f"y{store.index}[v] = {value};" for store, _, value, _ in made)]
    after = [f"of::store({store.target}, {vector});" for store, _, _, vector in made]
    loop = unrolled("int v = 0; v < width; ++v", inner)
    return [*outer, *loop, *after]
