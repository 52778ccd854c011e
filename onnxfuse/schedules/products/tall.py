"""Tall and skinny products: of many rows by few columns, of which little is summed up, as a mobile network's first
convolutions of single pixels are.

There memory is what takes time, and a tile of 128 rows that is copied, multiplied and stored keeps little of it busy.
Here all of the right operand stays in shared memory, and each warp goes through rows by itself, 16 at a time: lanes
read vectors of the next rows while they compute results of these, and lay them out as whole rows, which are stored by
vectors.  Nobody waits for another warp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from onnxfuse.graph.dims import Dim
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.tensors import Contract
from onnxfuse.lowering.pull import Load
from onnxfuse.schedules.attentions.shape import ALL_SHARED, BLOCK_BYTES
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.kernel import HOPPER_HAS, Pace
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.operand_text import packed, source
from onnxfuse.schedules.products.epilogue import Held
from onnxfuse.schedules.products.parts import ProductParts, Side, side_along, side_guards, side_of, single
from onnxfuse.schedules.products.shape import FLOATS, ProductShape
from onnxfuse.schedules.products.text import ProductText
from onnxfuse.schedules.products.windows import has_windows
from onnxfuse.schedules.reductions.streaming import MOST_SHARED
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.text import indented, unrolled

TALL, ALONE = "product_tall", "alone"
"""What the names of kernels begin with; what a choice sets that others do not."""

ROWS, COLUMNS = 16, 16
"""Of the result, that a warp computes at a time."""

VECTOR_BYTES, STEP_BYTES, PAIR_BYTES = 16, 32, 64
"""Of a row, what a lane reads at once; what is multiplied at once; what four lanes read at once."""

LITTLE, MUCH = 8, 16
"""Warps of a block where no more than one such pair of steps is summed up, and where more is: then registers hold fewer
warps, and the right operand is more to be brought."""

BESIDE = {LITTLE: 3, MUCH: 1}
"""Blocks of a multiprocessor, by their warps (H200, 28 products: 0.88 to 1.04 times as long as two of 8 warps)."""

LEAST_ROWS = HOPPER_HAS * MUCH * ROWS // 2
"""Under which half of the warps would have nothing to do."""

MOST_COLUMNS, MOST_DEPTH = 256, 320
"""Columns; bytes of what is summed over, of which a lane holds a quarter twice."""

AT_ONCE, LESS_AT_ONCE = 4, 2
"""Vectors that a lane stores, or pieces of columns that it computes, with nothing between them that waits; the same
where more is summed up, or read with results, which takes registers."""

QUICKER = ((64, 256), (192, 32))
"""Bytes of what is summed over and columns, up to which such blocks are expected to be the quickest (H200, 28 products:
0.55 to 1.0 times as long as the best of others; all others 0.96 to 1.4 times as long)."""

STEP, COLUMN, COLUMN_STEP, WEIGHT = 1.2e-8, 5.0e-10, 2.2e-10, 1.0e-10
"""Seconds that a multiprocessor takes of 16 rows for each step of what is summed over, for each column, and for both;
for an element of the right operand."""

INSTRUCTION = {2: 1.4e-12, 4: 9.0e-12}
"""By an element's bytes, seconds that it takes for an instruction of what follows, as ``Function`` counts them: of 16
bits functions have quicker ones.  With all these 26 products of 16 bits are predicted to take 0.74 to 1.14 times as
long as they did, and one of float32 with SiLU (H200)."""


@dataclass(frozen=True)
class Tall:
    """A tall and skinny product.

    Attributes:
        parts: the product; left: its rows by vectors of 16 bytes; last: by half of that; weights: the right operand.
        results: lanes of the results' vectors; guards: under which all these are so.
    """

    parts: ProductParts
    left: Side
    last: Side
    weights: Side
    results: Lanes
    guards: tuple[str, ...]

    @property
    def depth(self) -> int:
        """Elements of what is summed over, which is known."""
        assert self.parts.depth.value is not None
        return self.parts.depth.value

    @property
    def columns(self) -> int:
        """Of the result, which are known."""
        assert self.parts.columns.value is not None
        return self.parts.columns.value


@dataclass(frozen=True)
class TallShape(ProductShape):
    """A block whose warps go through 16 rows at a time of ``columns``, and of ``depth`` that is summed over as it is
    multiplied; ``size``: bytes of an element; ``laid``: of the rows that a warp lays out; ``alone``: warps."""

    depth: int = 16
    size: int = 2
    laid: int = 0
    alone: int = 8

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return f"{TALL}_{self.columns}x{self.depth}x{self.alone}"

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of(
            "product", rows=self.rows, columns=self.columns, stages=self.stages, group=1, **{ALONE: self.alone})

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.alone

    @property
    def pitch(self) -> int:
        """Elements from a column of the right operand to the next one, which lies in other banks."""
        return self.depth + VECTOR_BYTES // self.size

    @property
    def weighed(self) -> int:
        """Bytes of the right operand in shared memory."""
        return self.columns * self.pitch * self.size

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self.weighed + self.alone * self.laid

    @property
    def beside(self) -> int:
        """Blocks that a multiprocessor is to hold at least."""
        return max(1, min(BESIDE[self.alone], ALL_SHARED // (self.shared + BLOCK_BYTES)))

    @property
    def paired(self) -> int:
        """Words of a row that come as vectors of 16 bytes; what is behind them comes as half of that."""
        return self.depth * self.size // PAIR_BYTES * 16

    @property
    def quicker(self) -> bool:
        """Whether it is expected to be the quickest way."""
        return any(self.depth * self.size <= depth and self.columns <= columns for depth, columns in QUICKER)


def tall_of(products: Sequence[Contract], parts: ProductParts, results: tuple[Lanes, tuple[str, ...]],
            planned: Mapping[str, int]) -> Tall | None:
    """A product as a tall and skinny one; None where it is none."""
    columns, depth, (lanes, guards) = parts.columns.value, parts.depth.value, results
    if len(products) != 1 or parts.batch != 1 or has_windows(products[0]) or columns is None or depth is None:
        return None
    if not 0 < columns <= MOST_COLUMNS or not 0 < depth * parts.size <= MOST_DEPTH:
        return None
    if lanes.element != "@n" or lanes.width < 2:
        return None
    vector = VECTOR_BYTES // parts.size
    left, last = (side_along(parts, parts.left, "@m", parts.lanes("@k", width), planned)
                  for width in (vector, vector // 2))
    if left is None or last is None or left.across or last.across:
        return None
    weights = side_of(parts, parts.rights[0], "@n", planned)
    if weights.across:  # a lane has words of what is summed over
        weights = single(parts, weights.scalar, "@n")
    needed = (guard for side in (left, weights) for guard in side_guards(parts, side))
    return Tall(parts, left, last, weights, lanes, tuple(dict.fromkeys((*guards, *needed))))


def tall_shapes_of(tall: Tall, planned: Callable[[Dim], int], sizes: Mapping[str, str]) -> list[TallShape]:
    """The block, where rows are enough for all multiprocessors and all of the right operand has room."""
    if planned(tall.parts.rows) < LEAST_ROWS:
        return []
    size = tall.parts.size
    step = STEP_BYTES // size
    depth = -(-tall.depth // step) * step
    warps = LITTLE if depth * size <= PAIR_BYTES else MUCH
    shape = TallShape(warps * ROWS, -(-tall.columns // COLUMNS) * COLUMNS, 1, depth=depth, size=size, alone=warps)
    found = replace(shape, laid=TallText(tall, shape, sizes).needed)
    return [found] if found.shared <= MOST_SHARED else []


class TallText(ProductText):
    """Writes the body of a kernel; ``needed``: bytes of the rows that a warp lays out."""

    widest = COLUMNS
    shape: TallShape

    def __init__(self, tall: Tall, shape: TallShape, sizes: Mapping[str, str]) -> None:
        super().__init__(tall.parts, [tall.left, tall.weights], tall.results, shape, sizes)
        self.tall = tall
        self.groups, self.odd = shape.paired // 16, shape.depth * shape.size % PAIR_BYTES > 0
        self.held = Held("1", ROWS, COLUMNS)
        # Of results that are too many to be computed where sums are, rows of sums are laid out.
        self.in_place = self._in_place(self.held) == COLUMNS
        self.pitches = [_odd(shape.columns * kind.size) // kind.size for kind in self.kinds]
        begins = [0]
        for pitch, kind in zip(self.pitches, self.kinds, strict=True):
            begins.append(begins[-1] + ROWS * pitch * kind.size)
        self.begins, results = begins[:-1], begins[-1]
        self.needed = results if self.in_place else 4 * ROWS * (shape.columns + FLOATS)

    def text(self) -> Body:
        """All of it."""
        lines = [*self._constants(), *self._begun(), *self._weights(), "__syncthreads();", *self._loop()]
        return Body("\n".join(indented(lines)) + "\n", frozenset(self.sizes.used))

    def _constants(self) -> list[str]:
        shape = self.shape
        return [
            f"using T = {TYPES[self.parts.left.dtype].storage};",
            f"constexpr int columns = {shape.columns}, depth = {shape.depth}, pitch = {shape.pitch};",
            f"constexpr int warps = {shape.alone}, threads = 32 * warps;",
            f"constexpr int paired = {shape.paired}, groups = {self.groups}, steps = {2 * self.groups + self.odd};",
            "extern __shared__ __align__(16) unsigned char of_dynamic[];",
            "T* const weights = reinterpret_cast<T*>(of_dynamic);",
            "const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;",
            f"unsigned char* const own_laid = of_dynamic + {shape.weighed} + warp * {shape.laid};",
        ]

    def _weights(self) -> list[str]:
        """Fill the right operand's columns, zeros behind the last, and behind what is summed over."""
        (side,), size = self.rights, self.shape.size
        width, writer = side.width, self._writer(side.lanes)
        words = f"reinterpret_cast<unsigned*>(weights + column * pitch), of_k * {size} / 4, vector"
        rounded = ["vector = of::rounded_tf32(vector);"] if self.parts.rounds else []
        stored = f"of::place_words<paired>({words});" if width * size >= 4 else (
            "weights[column * pitch + of::word_at<paired>(of_k / 2) * 2 + of_k % 2] = vector.at[0];")
        return [
            f"#pragma unroll {AT_ONCE}",
            f"for (int item = threadIdx.x; item < columns * (depth / {width}); item += threads) {{",
            *indented([
                f"constexpr int width = {width};",
                "const int column = item / (depth / width), of_k = item % (depth / width) * width;",
                "const idx k = of_k, n = column;",
                "of::Vector<T, width> vector = {};",
                f"if (n < {self.tall.columns} && k < {self.tall.depth}) {{",
                *indented(packed(writer, side.scalar)), "}", *rounded, stored,
            ]),
            "}",
        ]

    def _begun(self) -> list[str]:
        """Ask for a warp's first rows, before the right operand, which takes as long to come."""
        rows, vector = self.extents["m"], VECTOR_BYTES // self.shape.size
        return [
            *([f"of::Vector<T, {vector}> next[groups][2];"] if self.groups else []),
            *([f"of::Vector<T, {vector // 2}> last[2];"] if self.odd else []),
            "const auto bring = [&](idx first_row) {", *indented(self._brought()), "};",
            f"const idx step = (idx)gridDim.x * warps * {ROWS};",
            f"idx first_row = ((idx)blockIdx.x * warps + warp) * {ROWS};",
            f"if (first_row < {rows}) bring(first_row);",
        ]

    def _loop(self) -> list[str]:
        """Each warp's rows."""
        rows = self.extents["m"]
        return [
            f"for (; first_row < {rows}; first_row += step) {{",
            *indented([
                "unsigned own[steps][4];",
                *(unrolled("int i = 0; i < groups; ++i", ["of::hold_words(own, next[i], i * 2);"])
                  if self.groups else []),
                *(["of::hold_words(own, last, groups * 2);"] if self.odd else []),
                f"if (first_row + step < {rows}) bring(first_row + step);",
                "__syncwarp();",
                *(self._rows_of_results() if self.in_place else self._rows_of_sums()),
            ]),
            "}",
        ]

    def _brought(self) -> list[str]:
        """Ask for a lane's vectors of 16 rows."""
        tall, vector = self.tall, VECTOR_BYTES // self.shape.size
        lines = []
        if self.groups:
            lines += unrolled("int i = 0; i < groups; ++i", self._vector(
                tall.left, f"i * {4 * vector} + lane % 4 * width", "next[i][half]"))
        if self.odd:
            lines += ["{", *indented(self._vector(
                tall.last, f"groups * {4 * vector} + lane % 4 * width", "last[half]")), "}"]
        return unrolled("int half = 0; half < 2; ++half", [
            f"const idx m = of::imin(first_row + half * 8 + lane / 4, (idx){self.extents['m']} - 1);", *lines])

    def _vector(self, side: Side, k: str, to: str) -> list[str]:
        """Lines that bring a vector."""
        writer, inside = self._writer(side.lanes), f"k < {self.tall.depth}"
        lines = [f"constexpr int width = {side.width};", f"const idx k = {k};", "of::Vector<T, width> vector = {};"]
        if isinstance(side.scalar, Load):
            address, allowed = source(writer, side.scalar, inside)
            lines += [*writer.upto(Scope.VECTOR), f"if ({allowed}) vector = of::load<width>({address});"]
        else:
            lines += [f"if ({inside}) {{", *indented(packed(writer, side.scalar)), "}"]
        return [*lines, f"{to} = {'of::rounded_tf32(vector)' if self.parts.rounds else 'vector'};"]

    # ---- What becomes of them. ----

    def _columns(self, body: Sequence[str]) -> list[str]:
        """Go over columns, 16 at a time: their sums, and what the body makes of these."""
        shape = self.shape
        most, pieces = AT_ONCE if shape.depth * shape.size <= 2 * PAIR_BYTES else LESS_AT_ONCE, shape.columns // COLUMNS
        even = max(count for count in range(1, most + 2) if pieces % count == 0)
        at_once = even if even > 1 else most
        return [
            f"#pragma unroll {at_once}",
            f"for (idx first_column = 0; first_column < columns; first_column += {COLUMNS}) {{",
            *indented([
                "constexpr int i = 0, piece = 0;",
                "float sums[1][2][4] = {};",
                "of::multiply_tall<T, pitch>(sums[0], own, weights + first_column * pitch);",
                *body,
            ]),
            "}",
            "__syncwarp();",
        ]

    def _rows_of_results(self) -> list[str]:
        """Compute results where sums are, lay rows of them out, and store these."""
        writer = self._writer(self.lanes)
        targets, kept = self._targets(writer), self._kept(writer)
        return [
            *(f"{kind.storage}* const at{number} = reinterpret_cast<{kind.storage}*>(own_laid + {begin});"
              for number, (kind, begin) in enumerate(zip(self.kinds, self.begins, strict=True))),
            *self._columns([f"constexpr int piece_wide = {COLUMNS};", *self._computed(self.held)]),
            f"#pragma unroll {AT_ONCE}",
            f"for (int item = lane; item < {ROWS * self._vectors}; item += 32) {{",
            *indented([
                f"constexpr int width = {self.lanes.width};",
                *self._place_of("item"),
                "const idx m = first_row + line;",
                *writer.upto(Scope.VECTOR),
                f"if (m < {self.extents['m']}) {{",
                *(f"  {where}of::store({target}, of::load<width>(at{number} + line * {self.pitches[number]} + n));"
                  for number, target, where in zip(self.result_of, targets, kept, strict=True)),
                "}",
            ]),
            "}",
        ]

    def _lies_at(self, number: int, line: str) -> str:
        return f"at{number} + {line} * {self.pitches[number]} + first_column + column"

    def _rows_of_sums(self) -> list[str]:
        """Lay rows of sums out, and store vectors of results of them."""
        last = ROWS * self._vectors
        return [
            "float* const laid = reinterpret_cast<float*>(own_laid);",
            f"constexpr int long_row = columns + {FLOATS};",
            *self._columns(unrolled("int j = 0; j < 2; ++j", unrolled("int half = 0; half < 2; ++half", [
                "of::Vector<float, 2> pair;",
                "pair.at[0] = sums[i][j][half * 2], pair.at[1] = sums[i][j][half * 2 + 1];",
                "of::store(laid + (half * 8 + lane / 4) * long_row + first_column + j * 8 + lane % 4 * 2, pair);"]))),
            f"constexpr int width = {self.lanes.width}, all = ({last} + 31) / 32;",
            f"constexpr int passes = all < {LESS_AT_ONCE} ? all : {LESS_AT_ONCE};",
            "#pragma unroll 1",
            "for (int first = 0; first < all; first += passes) {",
            *indented(self._results(
                [f"const int item = of::imin(lane + (first + pass) * 32, {last} - 1);", *self._place_of("item"),
                 "const idx row = first_row + line;", "const float* const sums_of_row = laid + line * long_row + n;"],
                "of::load<width>(sums_of_row{})",
                ["const int item = lane + (first + pass) * 32;", f"if (item >= {last}) break;",
                 *self._place_of("item"), "const idx m = first_row + line;"])),
            "}",
        ]

    @property
    def _vectors(self) -> int:
        """Of a row of the result."""
        return self.tall.columns // self.lanes.width

    def _place_of(self, item: str) -> list[str]:
        """Lines that name the line and the first column of a vector of 16 rows' results."""
        return [f"const int line = {item} / {self._vectors};",
                f"const idx n = {item} % {self._vectors} * width;"]


def _odd(size: int) -> int:
    """So many bytes as an odd number of vectors, so that rows lie in different banks."""
    return (-(-size // VECTOR_BYTES) | 1) * VECTOR_BYTES


def tall_pace(tall: Tall, shape: TallShape, at: Callable[[Dim], int | None]) -> Pace | None:
    """What a kernel's time follows from, where no size is left open: the right operand, and then rows."""
    rows = at(tall.parts.rows)
    if rows is None:
        return None
    turns = -(-rows // (HOPPER_HAS * ROWS))
    steps = shape.depth * shape.size // STEP_BYTES
    column = COLUMN + COLUMN_STEP * steps + ROWS * INSTRUCTION[shape.size] * tall.parts.follows
    return Pace(1, 1, 0, whole=WEIGHT * shape.columns * shape.depth + turns * (STEP * steps + shape.columns * column))
