"""The text of a chain of products of one row each: the blocks of a cluster have the columns of each between them.

A block keeps an image's row as float32 in shared memory.  Neighbouring lanes share a column's sum, each reads vectors
of its weights, and what comes of the sum goes into the row that the next product reads, in the shared memory of all
blocks of the cluster; the last one's goes to memory.  Weights are read as they lie, along what is summed over, and
before rows are known, as far as registers hold them: what each product would wait for memory is waited for once.  The
first row is read, or computed of its sums, which are told in parts: each block adds up those of its own channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

from onnxfuse.graph.dims import Dim, dim, symbol
from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.pull import Contracted, Load, Scalar
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.composed.gated_ahead import Mean
from onnxfuse.schedules.kernel import contractions
from onnxfuse.schedules.lanes import Scope
from onnxfuse.schedules.products.parts import ProductParts, Side, other_way, parts_of, refused, side_along
from onnxfuse.schedules.schedule import Request
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.text import Sizes, Writer, indented, pointer, unrolled

THREADS, LANES = 256, 32
"""Of a block, and of a warp.  Blocks of 512 take much the same time where they are few, and longer where their clusters
wait for one another (benchmarks/results, sums-ahead)."""

WIDEST = 8
"""Elements of a vector."""

MOST_HELD = 48
"""Words of weights that a thread holds, which are on their way before a product's row is known."""

EXCHANGE = 0.25
"""Vectors that a lane multiplies while it brings together what two have."""

PARTS = "parts"
"""Parameter: in how many parts the sums of an image are told."""

AT_ONCE = 8
"""Parts whose sums are on their way together."""


@dataclass(frozen=True)
class GateShape:
    """Blocks that share an image, whether weights are read by vectors (``wide``), and bits of an index."""

    blocks: int
    wide: bool = True
    bits: int = 32

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
        """Lanes that share a sum: so many that least is done one behind the other."""

        def cost(lanes: int) -> tuple[bool, float]:
            turns, steps = self.steps(shape, lanes)
            return steps * self.vector(shape) > MOST_HELD, turns * (steps + EXCHANGE * min(lanes, LANES).bit_length())

        return min((1 << power for power in range(THREADS.bit_length())), key=cost)

    def steps(self, shape: GateShape, lanes: int) -> tuple[int, int]:
        """How many columns a thread goes through where so many share a sum, and vectors of each."""
        own = -(-self.columns // shape.blocks)
        return -(-own // (THREADS // lanes)), -(-self.depth // (lanes * self.width(shape)))

    def words(self, shape: GateShape) -> int:
        """Words of weights that a thread reads."""
        return prod(self.steps(shape, self.lanes(shape))) * self.vector(shape)

    def vector(self, shape: GateShape) -> int:
        """Words of a vector of the weights."""
        return max(1, self.width(shape) * self.parts.size // 4)

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


def groups_of(depth: int) -> int:
    """How many threads add up each of so many channels."""
    return max(1, THREADS // depth)


def rows_of(stages: Sequence[Stage]) -> int:
    """Elements of a block's shared memory for a row before each product."""
    return sum(stage.room for stage in stages)


def shared(stages: Sequence[Stage], shape: GateShape) -> int:
    """Bytes of a block's shared memory: these rows, and what its threads, or warps, have of sums."""
    first = -(-stages[0].depth // shape.blocks)
    found = [groups_of(first) * first] if first < THREADS or shape.blocks > 1 else []
    found += [-(-stage.columns // shape.blocks) * -(-stage.lanes(shape) // LANES) for stage in stages]
    return 4 * (rows_of(stages) + max(found))


class GateText:
    """Writes the body of a kernel."""

    def __init__(
        self, stages: Sequence[Stage], shape: GateShape, sizes: Mapping[str, str], given: int, mean: Mean | None = None
    ) -> None:
        """``given``: the input that is the first row; or, where it is computed of its sums as ``mean`` has them, these,
        float32 of images, parts and channels."""
        self.stages, self.shape, self.sizes, self.given, self.mean = stages, shape, Sizes(sizes), given, mean

    def text(self) -> Body:
        """All of it."""
        starts = [sum(stage.room for stage in self.stages[:place]) for place in range(len(self.stages))]
        lines = [
            f"constexpr int blocks = {self.shape.blocks}, threads = {THREADS};",
            "const int rank = blockIdx.x % blocks;",
            "const idx m = blockIdx.x / blocks;",
            *(["of::begin_cluster<blocks>();"] if self._divides else []),
            "extern __shared__ __align__(16) unsigned char of_dynamic[];",
            f"float* const beside = reinterpret_cast<float*>(of_dynamic) + {rows_of(self.stages)};",
            *(f"float* const row{place} = reinterpret_cast<float*>(of_dynamic) + {start};"
              for place, start in enumerate(starts)),
            *(line for place in self.early for line in self._brought(place, self.stages[place])),
            *self._first(),
        ]
        for place, stage in enumerate(self.stages):
            lines += [self._meet, "{", *indented(self._product(place, stage)), "}"]
        return Body("\n".join(indented(lines)) + "\n", frozenset(self.sizes.used))

    def _first(self) -> list[str]:
        """Lines that bring the first row."""
        if self.mean is not None:
            return ["{", *indented(self._means(self.mean)), "}"]
        depth = self.stages[0].depth
        return [f"for (int i = threadIdx.x; i < {depth}; i += threads) "
                f"row0[i] = of::value(i{self.given}[m * (idx){depth} + i]);"]

    @property
    def _divides(self) -> bool:
        """Whether blocks add up the sums of their own channels, for all of them."""
        return self.mean is not None and self.shape.blocks > 1

    def _means(self, mean: Mean) -> list[str]:
        """Lines that compute it of its sums; threads add up different parts of a channel where there are more of them.
        """
        depth = self.stages[0].depth
        groups = groups_of(-(-depth // self.shape.blocks) if self._divides else depth)
        summed = [
            "float sum = 0.0f;",
            f"const auto* const from = i{self.given} + m * {PARTS} * depth + column;",
            f"#pragma unroll {AT_ONCE}",
            f"for (int part = group; part < (int){PARTS}; part += groups) sum += from[(idx)part * depth];",
        ]
        if self._divides:
            return self._own_means(mean, groups, summed)
        if groups == 1:
            return [f"constexpr int depth = {depth}, groups = 1, group = 0;",
                    "for (int column = threadIdx.x; column < depth; column += threads) {",
                    *indented([*summed, *self._mean(mean)]), "}"]
        return [
            f"constexpr int depth = {depth}, groups = {groups};",
            "const int group = threadIdx.x / depth, column = threadIdx.x % depth;",
            "if (group < groups) {", *indented([*summed, "beside[threadIdx.x] = sum;"]), "}",
            "__syncthreads();",
            "if (group == 0) {",
            *indented([
                "float sum = beside[column];",
                *unrolled("int other = 1; other < groups; ++other", ["sum += beside[other * depth + column];"]),
                *self._mean(mean),
            ]),
            "}",
        ]

    def _own_means(self, mean: Mean, groups: int, summed: Sequence[str]) -> list[str]:
        """The same of a block's own channels, as ``summed`` adds up a group's parts of one."""
        return [
            f"constexpr int depth = {self.stages[0].depth}, groups = {groups}, per = (depth + blocks - 1) / blocks;",
            "for (int item = threadIdx.x; item < groups * per; item += threads) {",
            "  const int group = item / per, column = of::imin(rank * per + item % per, depth - 1);",
            *indented([*summed, "beside[item] = sum;"]),
            "}",
            "__syncthreads();",
            "// All blocks have begun: what lies in their shared memory may be written.",
            "of::wait_in_cluster<blocks>();",
            "for (int local = threadIdx.x; local < per && rank * per + local < depth; local += threads) {",
            *indented([
                "const int column = rank * per + local;",
                "float sum = beside[local];",
                *unrolled("int other = 1; other < groups; ++other", ["sum += beside[other * per + local];"]),
                *self._mean(mean),
            ]),
            "}",
        ]

    def _mean(self, mean: Mean) -> list[str]:
        """Lines that compute an element of it of a sum, rounded as it is declared."""
        writer = Writer(mean.lanes, self.sizes, lambda scalar: "sum" if mean.is_sum(scalar) else None)
        made, kind = writer.scalar(mean.element), TYPES[mean.element.dtype]
        kept = made if kind.size == 4 else f"of::round_to<{kind.storage}>({made})"
        return ["const idx k = column;", "constexpr int v = 0, width = 1;", *writer.upto(Scope.LANE),
                *self._told("row0 + column", kept)]

    def _told(self, to: str, value: str) -> list[str]:
        """Lines that store a number of a row in the shared memory of all blocks."""
        if self.shape.blocks == 1:
            return [f"*({to}) = {value};"]
        return [f"const float told = {value};", *unrolled("int other = 0; other < blocks; ++other", [
            f"*const_cast<float*>(of::of_block({to}, other)) = told;"])]

    @property
    def _meet(self) -> str:
        """What was written of a row is there for all who read it."""
        return "of::meet_cluster();" if self.shape.blocks > 1 else "__syncthreads();"

    @cached_property
    def early(self) -> list[int]:
        """The products, by place, whose weights threads hold and ask for before anything else: the first ones."""
        if not self.shape.wide:
            return []
        words = accumulate(stage.words(self.shape) for stage in self.stages)
        return [place for place, count in enumerate(words) if count <= MOST_HELD]

    def _turns(self, stage: Stage) -> list[str]:
        """Lines that say which columns and elements are a thread's."""
        lanes = stage.lanes(self.shape)
        turns, steps = stage.steps(self.shape, lanes)
        return [
            f"constexpr int columns = {stage.columns}, depth = {stage.depth}, turns = {turns}, steps = {steps};",
            f"constexpr int lanes = {lanes}, own = threads / lanes, width = {stage.width(self.shape)};",
            "constexpr int per = (columns + blocks - 1) / blocks;",
            "const int lane = threadIdx.x % lanes;",
        ]

    def _at_once(self, stage: Stage) -> int:
        """Columns of a thread whose weights it holds at once; 0 where not even one's."""
        turns, steps = stage.steps(self.shape, stage.lanes(self.shape))
        return min(turns, MOST_HELD // (steps * stage.vector(self.shape)))

    def _brought(self, place: int, stage: Stage) -> list[str]:
        """Lines that ask for weights of products of their own, before anything else is waited for."""
        return [self._array(place, stage, self._at_once(stage)), "{", *indented([
            *self._turns(stage), "constexpr int begin = 0;", *self._asked(place, stage, self._at_once(stage))]), "}"]

    def _array(self, place: int, stage: Stage, count: int) -> str:
        """What holds the weights of so many columns."""
        (right,), (_, steps) = stage.parts.rights, stage.steps(self.shape, stage.lanes(self.shape))
        storage = TYPES[right.dtype].storage
        return f"of::Vector<{storage}, {stage.width(self.shape)}> held{place}[{count}][{steps}];"

    def _asked(self, place: int, stage: Stage, count: int) -> list[str]:
        """Lines that fill that, from the turn ``begin`` on."""
        address, lines = self._address(stage)
        return unrolled(f"int turn = 0; turn < {count}; ++turn", unrolled("int at = 0; at < steps; ++at", [
            self._column,
            # What is beyond is not multiplied: a load under a condition would part its words.
            "const idx n = column;",
            "const idx k = of::imin((at * lanes + lane) * width, depth - width);",
            *lines,
            f"held{place}[turn][at] = of::load<width>({address});",
        ]))

    @property
    def _column(self) -> str:
        return ("const int local = (begin + turn) * own + (int)threadIdx.x / lanes, "
                "column = of::imin(rank * per + local, columns - 1);")

    def _address(self, stage: Stage) -> tuple[str, list[str]]:
        """Where weights are read from, and lines before that."""
        (right,) = stage.parts.rights
        assert isinstance(right, Load)
        vectors = stage.side is not None and stage.width(self.shape) > 1
        lanes = stage.side.lanes if stage.side is not None and vectors else stage.parts.lanes("@k", 1)
        writer = Writer(lanes, self.sizes)
        address = writer.address(right)
        return address, writer.upto(Scope.VECTOR)

    def _product(self, place: int, stage: Stage) -> list[str]:
        """A product, whose results go to where they are read: of some columns at a time, for which a thread asks for
        all weights before it waits for one.  What lanes, or warps, found of each is brought together by one thread."""
        count, lanes = self._at_once(stage), stage.lanes(self.shape)
        turn = [
            self._column,
            "float sum = 0.0f;",
            *(self._held(place) if count else self._summed(place, stage)),
            *unrolled(f"int apart = {min(lanes, LANES) // 2}; apart > 0; apart /= 2", [
                "sum += __shfl_xor_sync(0xffffffffu, sum, apart);"]),
            "if (local < per && lane % warp == 0) beside[local * warps + lane / warp] = sum;",
        ]
        turns = unrolled(f"int turn = 0; turn < {max(1, count)}; ++turn", turn)
        loop = ["constexpr int begin = 0;", *turns]
        if place not in self.early:
            if count:
                turns = [self._array(place, stage, count), *self._asked(place, stage, count), *turns]
            loop = [f"for (int begin = 0; begin < turns; begin += {max(1, count)}) {{", *indented(turns), "}"]
        return [
            *self._turns(stage),
            f"constexpr int warp = {min(lanes, LANES)}, warps = lanes / warp;",
            *loop,
            "__syncthreads();",
            "for (int local = threadIdx.x; local < per && rank * per + local < columns; local += threads) {",
            *indented([
                "const int column = rank * per + local;",
                "const idx n = column;",
                "float sum = beside[local * warps];",
                *unrolled("int other = 1; other < warps; ++other", ["sum += beside[local * warps + other];"]),
                *self._stored(place, stage),
            ]),
            "}",
        ]

    @staticmethod
    def _held(place: int) -> list[str]:
        """Lines that sum up what a lane has of a column by weights that it holds."""
        return unrolled("int at = 0; at < steps; ++at", [
            "const int step = (at * lanes + lane) * width;",
            "if (step >= depth) continue;",
            f"const auto given = of::load<width>(row{place} + step);",
            *unrolled("int v = 0; v < width; ++v", [
                f"sum += of::value(held{place}[turn][at].at[v]) * given.at[v];"]),
        ])

    def _summed(self, place: int, stage: Stage) -> list[str]:
        """The same by weights that it reads."""
        address, lines = self._address(stage)
        return [
            "#pragma unroll 4",
            "for (int step = lane * width; step < depth; step += lanes * width) {",
            *indented([
                "const idx n = column, k = step;",
                *lines,
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
            return [*lines, f"*({target}) = of::Store<{kind.storage}>::from({made});"]
        kept = made if kind.size == 4 else f"of::round_to<{kind.storage}>({made})"
        return [*lines, *self._told(f"row{place + 1} + column", kept)]
