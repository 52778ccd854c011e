"""The text of a chain of products of one row each: the blocks of a cluster have the columns of each between them.

A block keeps an image's row as float32 in shared memory.  Neighbouring lanes share a column's sum, each reads vectors
of its weights, and what comes of the sum goes into the row that the next product reads, in the shared memory of all
blocks of the cluster; the last one's goes to memory.  Weights are read as they lie, along what is summed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxfuse.graph.dims import Dim, dim, symbol
from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.pull import Contracted, Load, Scalar
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.kernel import contractions
from onnxfuse.schedules.lanes import Scope
from onnxfuse.schedules.product_parts import ProductParts, Side, other_way, parts_of, refused, side_along
from onnxfuse.schedules.schedule import Request
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.text import Sizes, Writer, indented, pointer, unrolled

THREADS, LANES = 256, 32
"""Of a block, and of a warp."""

WIDEST = 8
"""Elements of a vector."""


@dataclass(frozen=True)
class GateShape:
    """Blocks that share an image, whether weights are read by vectors (``wide``), and bits of an index."""

    blocks: int
    wide: bool = True
    bits: int = 32

    @property
    def threads(self) -> int:
        """Of a block."""
        return THREADS

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return f"gate_{self.blocks}_{'wide' if self.wide else 'single'}_{self.bits}"


@dataclass(frozen=True)
class Stage:
    """One product of the chain: its parts, how many elements are summed over and columns there are, and how its weights
    are read by vectors; None where only one by one."""

    parts: ProductParts
    depth: int
    columns: int
    side: Side | None

    def lanes(self, shape: GateShape) -> int:
        """Lanes that share a sum: so many that fewest steps are made one behind the other."""
        own = -(-self.columns // shape.blocks)

        def steps(lanes: int) -> int:
            return -(-own // (THREADS // lanes)) * -(-self.depth // (lanes * self.width(shape)))

        return min((1 << power for power in range(LANES.bit_length())), key=lambda lanes: (steps(lanes), lanes))

    def width(self, shape: GateShape) -> int:
        """Elements of a vector of the weights."""
        return self.side.width if self.side is not None and shape.wide else 1

    @property
    def room(self) -> int:
        """Elements of shared memory that an image's row has, so that the next one's vectors are aligned too."""
        return -(-self.depth // WIDEST) * WIDEST


def stage_of(request: Request, given: int, last: bool) -> Stage | Refusal:
    """A product of a chain with what follows it.

    Args:
        request: for what is computed of the input ``given``.
        last: whether its results go to memory, however they lie there.
    """
    products = contractions(request.lowered)
    parts = parts_of(request.lowered, products)
    if isinstance(parts, ProductParts) and not _reads(parts.left, given):
        parts = other_way(parts, products) or parts
    if isinstance(parts, Refusal):
        return parts
    depth, columns = parts.depth.value, parts.columns.value
    if parts.integers or parts.batch != 1 or depth is None or columns is None:
        return refused("its products are not of floats by one matrix of known sizes each")
    row, along, across = (dim(0) if size == 1 else symbol(name) for size, name in (
        (parts.rows, "@m"), (parts.depth, "@k"), (parts.columns, "@n")))
    (right,) = parts.rights
    if parts.left.dtype != right.dtype or not isinstance(right, Load) or right.conditions or not (
            _reads(parts.left, given, row * depth + along)):
        return refused("its products' operands are computed, or lie another way")
    if any(map(bool, parts.kept)) or parts.puller.gathered or not (last or parts.places[0] == row * columns + across):
        return refused("its products' results are laid out anew")
    if depth > 1 and parts.lanes("@k", 1).stride(right.offset) != 1:
        return refused("its products' weights do not lie along what is summed over")
    planned = request.lowered.binding.planned(request.sizes)
    widths = [parts.width >> step for step in range(parts.width.bit_length() - 1)]
    sides = (side_along(parts, right, "@n", parts.lanes("@k", width), planned) for width in widths)
    return Stage(parts, depth, columns, next((side for side in sides if side is not None), None))


def _reads(scalar: Scalar, given: int, offset: Dim | None = None) -> bool:
    """Whether an expression is an element of an input, at a place if one is given."""
    return isinstance(scalar, Load) and scalar.input == given and not scalar.conditions and offset in (
        None, scalar.offset)


class GateText:
    """Writes the body of a kernel."""

    def __init__(self, stages: Sequence[Stage], shape: GateShape, sizes: Mapping[str, str], given: int) -> None:
        self.stages, self.shape, self.sizes, self.given = stages, shape, Sizes(sizes), given

    def text(self) -> Body:
        """All of it."""
        starts = [sum(stage.room for stage in self.stages[:place]) for place in range(len(self.stages))]
        lines = [
            f"constexpr int blocks = {self.shape.blocks}, threads = {THREADS};",
            "const int rank = blockIdx.x % blocks;",
            "const idx m = blockIdx.x / blocks;",
            "extern __shared__ __align__(16) unsigned char of_dynamic[];",
            *(f"float* const row{place} = reinterpret_cast<float*>(of_dynamic) + {start};"
              for place, start in enumerate(starts)),
            f"for (int i = threadIdx.x; i < {self.stages[0].depth}; i += threads) "
            f"row0[i] = of::value(i{self.given}[m * (idx){self.stages[0].depth} + i]);",
        ]
        for place, stage in enumerate(self.stages):
            lines += [self._meet, "{", *indented(self._product(place, stage)), "}"]
        return Body("\n".join(indented(lines)) + "\n", frozenset(self.sizes.used))

    @property
    def _meet(self) -> str:
        """What was written of a row is there for all who read it."""
        return "of::meet_cluster();" if self.shape.blocks > 1 else "__syncthreads();"

    def _product(self, place: int, stage: Stage) -> list[str]:
        """A product, whose results go to where they are read."""
        lanes = stage.lanes(self.shape)
        return [
            f"constexpr int columns = {stage.columns}, lanes = {lanes}, own = threads / lanes;",
            "const int lane = threadIdx.x % lanes;",
            "for (int first = rank * own; first < columns; first += blocks * own) {",
            *indented([
                "const int column = first + (int)threadIdx.x / lanes;",
                "const idx n = of::imin(column, columns - 1);",
                *self._summed(place, stage),
                *unrolled("int apart = lanes / 2; apart > 0; apart /= 2", [
                    "sum += __shfl_xor_sync(0xffffffffu, sum, apart);"]),
                "if (column >= columns) continue;",
                "{", *indented(self._stored(place, stage)), "}",
            ]),
            "}",
        ]

    def _summed(self, place: int, stage: Stage) -> list[str]:
        """Lines that sum up what a lane has of a column."""
        width, (right,) = stage.width(self.shape), stage.parts.rights
        assert isinstance(right, Load)
        writer = Writer(stage.side.lanes if stage.side is not None and width > 1 else stage.parts.lanes("@k", 1),
                        self.sizes)
        address = writer.address(right)
        return [
            "float sum = 0.0f;",
            f"constexpr int width = {width};",
            "#pragma unroll 4",
            f"for (int step = lane * width; step < {stage.depth}; step += lanes * width) {{",
            *indented([
                "const idx k = step;",
                *writer.upto(Scope.VECTOR),
                f"const auto weights = of::load<width>({address});",
                f"const auto given = of::load<width>(row{place} + step);",
                *unrolled("int v = 0; v < width; ++v", ["sum += of::value(weights.at[v]) * given.at[v];"]),
            ]),
            "}",
        ]

    def _stored(self, place: int, stage: Stage) -> list[str]:
        """Lines that compute what comes of a sum, and store it."""
        parts, (result,) = stage.parts, stage.parts.results
        writer = Writer(parts.lanes("@n", 1), self.sizes,
                        lambda scalar: "sum" if isinstance(scalar, Contracted) else None)
        made, kind = writer.scalar(result), TYPES[result.dtype]
        target = pointer("o0", writer.index(parts.places[0]))
        lines = ["constexpr int v = 0, width = 1;", *writer.upto(Scope.LANE)]
        if place + 1 == len(self.stages):
            return [*lines, f"if (lane == 0) *({target}) = of::Store<{kind.storage}>::from({made});"]
        kept = made if kind.size == 4 else f"of::round_to<{kind.storage}>({made})"
        to = f"row{place + 1} + column"
        if self.shape.blocks == 1:
            return [*lines, f"if (lane == 0) *({to}) = {kept};"]
        return [
            *lines,
            f"const float found = {kept};",
            "for (int other = lane; other < blocks; other += lanes) "
            f"*const_cast<float*>(of::of_block({to}, other)) = found;",
        ]
