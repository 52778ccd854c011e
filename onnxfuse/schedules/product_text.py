"""The text of a product's kernel.

A block owns a tile of the result.  Tiles of the operands, 128 bytes of what is summed over each, come through a ring
of stages in shared memory while those before them are multiplied.  Then the sums are laid out there as rows, and every
thread stores vectors of results, with whatever is computed from the sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.pull import Apply, Contracted, Scalar
from onnxfuse.schedules.attention_together import instruction
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.operand_text import computed, copied
from onnxfuse.schedules.product_parts import ProductParts, Side
from onnxfuse.schedules.product_shape import FLOATS, STAGE_BYTES, ProductShape
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.text import Sizes, Writer, indented, pointer, unrolled

HEIGHT = 8
"""Tiles below one another that blocks go through before they go to the right: what these read of both operands stays
in the second-level cache."""

ONE_BY_ONE = 8
"""Elements that a thread has on their way at once where none go by vectors.  All of a tile's would be text that takes
the compiler five times as long as all other variants together, and more registers than a thread has."""


ROWS_AT_ONCE = 4
"""Rows of which a thread computes vectors of results at once."""


class ProductText:
    """Writes the body of a kernel for one shape of tiles.

    ``past``: what becomes of the rows behind one past the last; ``sum_type``: what sums are.
    """

    past = "break"
    sum_type = "float"

    def __init__(
        self, parts: ProductParts, sides: Sequence[Side], results: Lanes, shape: ProductShape, sizes: Mapping[str, str]
    ) -> None:
        self.parts, self.left, self.rights, self.lanes, self.shape = parts, sides[0], sides[1:], results, shape
        self.sizes = Sizes(sizes)
        size = self._writer(results).size
        self.extents = {name: size(extent) for name, extent in (
            ("b", parts.batch), ("m", parts.rows), ("n", parts.columns), ("k", parts.depth))}

    def _writer(self, lanes: Lanes) -> Writer:
        return Writer(lanes, self.sizes, self._sum)

    def _sum(self, scalar: Scalar) -> str | None:
        return f"sums{scalar.number}.at[v]" if isinstance(scalar, Contracted) else None

    def text(self) -> Body:
        """All of it."""
        place = [self._tiles(), *self._place("(idx)blockIdx.x")]
        lines = [*self._constants(), *place, *self._loop(), *self._laid_out(), *self._stored()]
        return Body("\n".join(indented(lines)) + "\n", frozenset(self.sizes.used))

    # ---- Before the loop. ----

    def _constants(self) -> list[str]:
        shape, depth = self.shape, STAGE_BYTES // self.parts.size
        element = TYPES[self.parts.left.dtype].storage
        return [
            f"using T = {element};",
            *(self._instruction(element) if shape.together else ()),
            f"constexpr int rows = {shape.rows}, columns = {shape.columns}, stages = {shape.stages};",
            f"constexpr int depth = {depth}, threads = {32 * shape.warps}, beside = {len(self.rights)};",
            "constexpr int own_columns = columns / beside;",
            "extern __shared__ __align__(16) unsigned char of_dynamic[];",
            f"unsigned char* const shared = {'of::tiles_from(of_dynamic)' if shape.together else 'of_dynamic'};",
            "T* const left_tiles = reinterpret_cast<T*>(shared);",
            self._right_tiles(),
            "const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;",
            *self._warp(),
        ]

    def _right_tiles(self) -> str:
        """A line that says where the right operands' tiles are."""
        tiles, element = "left_tiles + stages * rows * depth", TYPES[self.parts.rights[0].dtype].storage
        if element == TYPES[self.parts.left.dtype].storage:
            return f"T* const right_tiles = {tiles};"
        return f"{element}* const right_tiles = reinterpret_cast<{element}*>({tiles});"

    def _warp(self) -> list[str]:
        """Which part of the tile a warp multiplies."""
        if self.shape.together:
            return ["constexpr int rows16 = 1, columns8 = columns / 8;",
                    "const int own_row = warp * 16, own_column = 0;"]
        return ["constexpr int rows16 = 4, columns8 = 4;",
                "const int own_row = warp / (columns / 32) * 64, own_column = warp % (columns / 32) * 32;"]

    def _instruction(self, element: str) -> list[str]:
        kind = "bf16" if element == "__nv_bfloat16" else "f16"
        word = "unsigned long long"
        across = ", ".join(str(int(side.across)) for side in (self.left, self.rights[0]))
        lines = instruction(
            "by_tile", self.shape.columns, f"{kind}.{kind}", parameters=f"{word} left, {word} right, int more",
            given='"l"(left), "l"(right), "r"(more)', operands=f"%{{0}}, %{{1}}, more, 1, 1, {across}", more="%{2}")
        return ["struct Tensor {", *indented(lines), "};"]

    def _tiles(self) -> str:
        """How many tiles there are."""
        m, n = self.extents["m"], self.extents["n"]
        return f"const idx below = ({m} + rows - 1) / rows, beyond = ({n} + own_columns - 1) / own_columns;"

    def _place(self, number: str) -> list[str]:
        """Which tile has a number."""
        return [
            f"const idx b = {number} / (below * beyond), tile = {number} % (below * beyond);",
            "// Blocks that run at once have neighbouring tiles, whose operands the cache holds.",
            f"const idx strip = tile / ({HEIGHT} * beyond) * {HEIGHT};",
            f"const idx height = of::imin(below - strip, (idx){HEIGHT});",
            f"const idx within = tile % ({HEIGHT} * beyond);",
            *self._begins("strip + within % height", "within / height"),
        ]

    def _begins(self, down: str, right: str) -> list[str]:
        """Where the tile with so many below and before it begins."""
        return [f"const idx first_m = ({down}) * rows, first_n = {right} * own_columns;"]

    # ---- The loop over what is summed over. ----

    def _loop(self) -> list[str]:
        k = self.extents["k"]
        return [
            "const auto bring = [&](idx start, int turn) {",
            *indented(self._brought()), "};",
            "// Stages that are being multiplied when the next is filled, and those that are on their way.",
            f"constexpr int behind = {int(self.shape.overlaps)}, ahead = stages - 1 - behind;",
            *unrolled("int stage = 0; stage < ahead; ++stage", [
                f"if (stage * depth < {k}) bring(stage * depth, stage);", "of::copies_asked();"]),
            self._sums(),
            "int turn = 0;",
            f"for (idx start = 0; start < {k}; start += depth) {{",
            *indented([
                "// The stage is here, and everybody is done with the one that is filled next.",
                "of::copies_here<ahead - 1>();",
                *(("of::tiles_written();", "of::products_done<behind>();") if self.shape.together else ()),
                "__syncthreads();",
                f"if (start + ahead * depth < {k}) bring(start + ahead * depth, (turn + ahead) % stages);",
                "of::copies_asked();",
                *(self._together() if self.shape.together else self._alone()),
                "turn = (turn + 1) % stages;",
            ]),
            "}",
            *(self._finished() if self.shape.together else ()),
        ]

    def _sums(self) -> str:
        """What a thread has of the sums."""
        return f"float sums[rows16][columns8][4]{'' if self.shape.together else ' = {}'};"

    def _alone(self) -> list[str]:
        """Multiply a stage."""
        product = "multiply_own_tf32<" if self.parts.rounds else "multiply_own<T, "
        return [
            f"of::{product}rows, columns, depth, {_flag(self.left)}, {_flag(self.rights[0])}>("
            "sums, left_tiles + turn * rows * depth, right_tiles + turn * columns * depth, own_row, own_column);"]

    def _together(self) -> list[str]:
        return [
            "of::products_begin();",
            f"of::multiply_tiles<Tensor, T, rows, columns, depth, {_flag(self.left)}, {_flag(self.rights[0])}>("
            "sums[0], left_tiles + turn * rows * depth, right_tiles + turn * columns * depth, own_row, start > 0);",
            "of::products_asked();",
        ]

    def _finished(self) -> list[str]:
        k = self.extents["k"]
        zeros = unrolled("int i = 0; i < columns8; ++i", ["sums[0][i][0] = sums[0][i][1] = 0.0f;",
                                                           "sums[0][i][2] = sums[0][i][3] = 0.0f;"])
        return ["of::products_done<0>();", "of::hold(sums[0]);", f"if ({k} == 0) {{", *indented(zeros), "}"]

    def _brought(self) -> list[str]:
        """Fill a stage of all operands."""
        left = self._filled(self.left, "left_tiles + turn * rows * depth", "rows", "rows", "")
        rights = [
            self._filled(side, "right_tiles + turn * columns * depth", "columns", "own_columns",
                         f"{number} * own_columns + " if number else "")
            for number, side in enumerate(self.rights)]
        return [*left, *(line for lines in rights for line in lines)]

    def _filled(self, side: Side, tile: str, rows: str, own: str, offset: str) -> list[str]:
        """Fill ``own`` rows, behind ``offset``, of a tile that has ``rows``: vectors of each row, or of what is summed
        over, zeros past the ends."""
        writer, loop = self._writer(side.lanes), side.loop.removeprefix("@")
        place = self._swizzle(side)
        line, column, lines, columns, at = (
            ("k", loop, "depth", own, f"of::{place}depth>(line, {offset}column)") if side.across else
            (loop, "k", own, "depth", f"of::{place}{rows}>({offset}line, column)"))
        first = {"k": "start", loop: f"first_{loop}"}
        inside = f"{line} < {self.extents[line]} && {column} < {self.extents[column]}"
        kinds = {TYPES[dtype].storage for dtype in (self.parts.left.dtype, side.scalar.dtype)}
        other = [f"using T = {TYPES[side.scalar.dtype].storage};"] if len(kinds) > 1 else []
        body = [f"const idx {line} = {first[line]} + line;", *other, f"T* const to = {tile} + {at};",
                *_vector(side, writer, inside)]
        return [
            "{",
            *indented([
                f"constexpr int width = {side.width}, lanes = of::lanes_of({columns} / width, threads);",
                "constexpr int step = threads / lanes;",
                "const int thread = threadIdx.x % threads;  // which the compiler sees is less",
                f"for (int column = {self._first('thread', columns)}; column < {columns}; column += lanes * width) {{",
                *indented([
                    f"const idx {column} = {first[column]} + column;",
                    *unrolled(f"int pass = 0; pass < ({lines} + step - 1) / step; ++pass", [
                        "const int line = thread / lanes + pass * step;",
                        f"if ({lines} % step && line >= {lines}) break;", *body],
                        0 if self.shape.vectors else ONE_BY_ONE),
                ]),
                "}",
            ]),
            "}",
        ]

    def _swizzle(self, side: Side) -> str:
        """What places elements in a tile, as far as to the number of its lines."""
        return f"place_tf32<{_flag(side)}, " if self.parts.rounds else "place<"

    def _first(self, thread: str, past: str) -> str:
        """A thread's first column; past them all for threads that are too few for one more line."""
        first, warps = f"{thread} % lanes * width", self.shape.warps
        return first if warps & (warps - 1) == 0 else f"{thread} < step * lanes ? {first} : {past}"

    # ---- After it. ----

    def _laid_out(self) -> list[str]:
        """Lines that lay the sums out as rows in shared memory."""
        place = "float* const to = laid + (own_row + i * 16 + half * 8 + lane / 4) * long_row + own_column + c * 8"
        return [
            "// Everybody is done with the operands.",
            "__syncthreads();",
            f"constexpr int long_row = columns + {FLOATS};",
            "float* const laid = reinterpret_cast<float*>(shared);",
            *unrolled("int i = 0; i < rows16; ++i", unrolled("int c = 0; c < columns8; ++c", unrolled(
                "int half = 0; half < 2; ++half", [
                    f"{place} + lane % 4 * 2;",
                    "of::Vector<float, 2> pair;",
                    "pair.at[0] = sums[i][c][half * 2], pair.at[1] = sums[i][c][half * 2 + 1];",
                    "of::store(to, pair);"]))),
            "__syncthreads();",
        ]

    def _stored(self) -> list[str]:
        """Lines that store results, vectors of a row at a time."""
        line = "threadIdx.x / lanes + (first + pass) * step"
        return [
            f"constexpr int width = {self.lanes.width}, lanes = of::lanes_of(own_columns / width, threads);",
            "constexpr int step = threads / lanes, all = (rows + step - 1) / step;",
            f"constexpr int passes = all < {ROWS_AT_ONCE} ? all : {ROWS_AT_ONCE};",
            f"for (int column = {self._first('threadIdx.x', 'own_columns')}; column < own_columns; "
            "column += lanes * width) {",
            *indented([
                "const idx n = first_n + column;",
                f"if (n >= {self.extents['n']}) break;",
                "#pragma unroll 1",
                "for (int first = 0; first < all; first += passes) {",
                *indented(self._results(
                    ["const idx line = of::imin((int)(" + line + "), rows - 1), row = first_m + line;",
                     f"const {self.sum_type}* const sums_of_row = laid + line * long_row + column;"],
                    "of::load<width>(sums_of_row{})",
                    [f"const int line = {line};", "if (line >= rows) break;", "const idx m = first_m + line;"])),
                "}",
            ]),
            "}",
        ]

    def _results(
        self, begin: Sequence[str], taken: str, end: Sequence[str], columns: str = "own_columns"
    ) -> list[str]:
        """Lines that store a vector of results of each pass, of a row of the result if there is such a row.

        ``taken`` gives the sums of the product whose columns begin where its braces say.  All passes are computed
        before any is stored, and past the last row that one again: without a branch or a store between them the
        compiler asks for what all of them read before it waits for any of it."""
        writer, places = self._writer(self.lanes), self._writer(self.lanes)
        rows, outputs = self.extents["m"], self.parts.lowered.program.outputs
        kinds = [TYPES[output.dtype] for output in outputs]
        lasts = "width" if self.lanes.element == "@m" else "1"  # rows of the last vector
        packed = [_packed(writer, result, f"y{number}", self.lanes.width)
                  for number, result in enumerate(self.parts.results)]
        targets = [pointer(f"o{number}", places.index(place)) for number, place in enumerate(self.parts.places)]
        each = [*writer.lines[Scope.LANE], *(f"y{number}[v] = {value};" for number, (_, value, _) in enumerate(packed))]
        return [
            *(f"of::Vector<{kind.storage}, width> results{number}[passes];" for number, kind in enumerate(kinds)),
            *unrolled("int pass = 0; pass < passes; ++pass", [
                *begin, f"const idx m = of::imin(row, (idx){rows} - {lasts});",
                *(f"const auto sums{number} = {taken.format(f' + {number} * {columns}' if number else '')};"
                  for number in range(len(self.rights))),
                *writer.upto(Scope.VECTOR),
                *(f"{kind} y{number}[width];" for number, (kind, _, _) in enumerate(packed)),
                *unrolled("int v = 0; v < width; ++v", each),
                *(f"results{number}[pass] = {vector};" for number, (_, _, vector) in enumerate(packed)),
            ]),
            *unrolled("int pass = 0; pass < passes; ++pass", [
                *end, f"if (m >= {rows}) {self.past};", *places.upto(Scope.VECTOR),
                *(f"of::store({target}, results{number}[pass]);" for number, target in enumerate(targets)),
            ]),
        ]


def _packed(writer: Writer, result: Scalar, name: str, width: int) -> tuple[str, str, str]:
    """What lanes keep of a result as ``name``, its type before it, and what makes a vector of that: of numbers that are
    quantised by one step, what these are before, for a vector of them is quantised in half the instructions."""
    kind = TYPES[result.dtype]
    if width > 1 and isinstance(result, Apply) and result.function == "nearest_byte":
        quotient, zero, *_ = result.operands
        if isinstance(quotient, Apply) and quotient.function == "steps":
            source, step = quotient.operands
            if all(writer.scope(each) not in (Scope.EACH_ROW, Scope.LANE) for each in (step, zero)):
                given = f"{writer.scalar(step)}, {writer.scalar(zero)}"
                return "float", writer.scalar(source), f"of::quantised<{kind.storage}>({name}, {given})"
    return kind.compute, writer.scalar(result), f"of::pack<{kind.storage}>({name})"


def _vector(side: Side, writer: Writer, inside: str) -> list[str]:
    """Lines that bring one vector ``to`` a tile, zeros where it is not ``inside``."""
    return (copied if side.copied else computed)(writer, side.scalar, inside)


def _flag(side: Side) -> str:
    return "true" if side.across else "false"
