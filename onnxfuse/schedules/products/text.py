"""The text of a product's kernel.

A block owns a tile of the result.  Tiles of the operands, 128 bytes of what is summed over each, come through a ring
of stages in shared memory while those before them are multiplied.  Then results are computed where sums are
(``epilogue``); or sums are laid out as rows in shared memory, and every thread stores vectors of results.
"""

from __future__ import annotations

from onnxfuse.ir.scalars import TYPES
from onnxfuse.schedules.attentions.together import tile_instruction
from onnxfuse.schedules.operand_text import computed, copied, shifted
from onnxfuse.schedules.products.epilogue import EpilogueText, Held
from onnxfuse.schedules.products.parts import Side
from onnxfuse.schedules.products.shape import FLOATS, PIECE, STAGE_BYTES
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.text import Writer, indented, unrolled

HEIGHT = 8
"""Tiles below one another that blocks go through before they go to the right: what these read of both operands stays
in the second-level cache."""

ONE_BY_ONE = 8
"""Elements that a thread has on their way at once where none go by vectors.  All of a tile's would be text that takes
the compiler five times as long as all other variants together, and more registers than a thread has."""

SHIFTED = 4
"""Vectors that begin anywhere which a thread has on their way at once: of each it holds twice the bytes."""

ROWS_AT_ONCE = 4
"""Rows of which a thread computes vectors of results at once."""


class ProductText(EpilogueText):
    """Writes the body of a kernel for one shape of tiles."""

    def text(self) -> Body:
        """All of it."""
        place = [self._tiles(), *self._place("(idx)blockIdx.x")]
        lines = [*self._constants(), *place, *self._loop(), *self._stored()]
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
        across = ", ".join(str(int(side.across)) for side in (self.left, self.rights[0]))
        return tile_instruction(self.shape.columns, f"{kind}.{kind}", f", 1, 1, {across}")

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
        words = "multiply_own_float<" if self.parts.exact else "multiply_own_tf32<"
        product = words if self.parts.words else "multiply_own<T, "
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
            (loop, "k", own, "depth", f"of::{place}{rows}>({offset}{self._line_of(side, 'line')}, column)"))
        first = {"k": "start", loop: f"first_{loop}"}
        inside = f"{line} < {self.extents[line]} && {column} < {self.extents[column]}"
        kinds = {TYPES[dtype].storage for dtype in (self.parts.left.dtype, side.scalar.dtype)}
        other = [f"using T = {TYPES[side.scalar.dtype].storage};"] if len(kinds) > 1 else []
        body = [f"const idx {line} = {first[line]} + line;", *other, f"T* const to = {tile} + {at};",
                *self._operand_vector(side, writer, inside, f"of::imin((idx)width, {self.extents[column]} - {column})")]
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
                        ONE_BY_ONE if not self.shape.vectors else SHIFTED if side.shifted else 0),
                ]),
                "}",
            ]),
            "}",
        ]

    def _swizzle(self, side: Side) -> str:
        """What places elements in a tile, as far as to the number of its lines."""
        return f"place_tf32<{_flag(side)}, " if self.parts.words else "place<"

    def _line_of(self, side: Side, line: str) -> str:
        """Which line of a tile a row's elements lie in."""
        return line

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

    def _held(self) -> Held | None:
        """Where sums are; None where what follows is computed of rows in any case."""
        if self.shape.together:
            return Held("rows16", 16, self.shape.columns // len(self.rights))
        return Held("rows16", 16, 32, "own_column + ") if len(self.rights) == 1 else None

    def _stored(self) -> list[str]:
        """Lines that store results: where sums are, or of sums as rows."""
        held = self._held()
        wide = None if held is None else self._in_place(held)
        return self._laid_first() if held is None or wide is None else [
            *self._own_laid(), *self._computed_first(held, wide)]

    def _own_laid(self) -> list[str]:
        """Lines that name a warp's own shared memory, where it has none yet."""
        return [
            "// Everybody is done with the operands.",
            "__syncthreads();",
            f"float* const own_laid = reinterpret_cast<float*>(shared) + warp * {16 * PIECE};",
        ]

    def _laid_first(self) -> list[str]:
        """Lines that lay sums out as rows, and store results of them."""
        return [*self._laid_out(), *self._laid_stored()]

    def _laid_stored(self) -> list[str]:
        """Lines that store results of sums that are laid out, vectors of a row at a time."""
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

    def _operand_vector(self, side: Side, writer: Writer, inside: str, count: str) -> list[str]:
        """Lines that bring one vector ``to`` a tile, zeros where it is not ``inside``; ``count``: of its elements so
        many are in the row at most."""
        if side.shifted:
            return shifted(writer, side.scalar, inside, count, self.parts.lowered.program.inputs)
        return (copied if side.copied else computed)(writer, side.scalar, inside)


def _flag(side: Side) -> str:
    return "true" if side.across else "false"
