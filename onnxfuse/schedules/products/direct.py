"""The text of results that lanes store where they have the sums, vectors of neighbours at a time.

Of every eight columns of a warp's sums a lane has two, in two rows.  Where threads copy the tile of the right operand,
they may lay its lines in another order, so that the pairs that a lane has of several eights are neighbours: sums need
no shared memory then, nor a wait.  What is known of columns alone, such as scales and biases, is computed once for both
rows; what is read with the results, such as a residual, is asked for by all rows and vectors before any is computed.
"""

from __future__ import annotations

from functools import cached_property

from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.pull import Load, Scalar
from onnxfuse.schedules.kernel import is_vector
from onnxfuse.schedules.lanes import Scope
from onnxfuse.schedules.products.epilogue import values
from onnxfuse.schedules.products.of_columns import OfColumns
from onnxfuse.schedules.products.parts import Side
from onnxfuse.schedules.products.text import ProductText
from onnxfuse.schedules.text import Writer, pointer, unrolled

LANES_OF_A_ROW, ROWS = 4, 2
"""Lanes that have sums of a row, and rows of which a lane has sums."""

VECTORS_AT_ONCE = 2
"""Vectors of each row that a lane computes before it stores any, where something is read with them that registers do
not hold all of."""

LINE = 128
"""Bytes that come to a cache at once."""

FEW_BEYOND = 8
"""Tiles beside one another whose right operands the second-level cache holds, of eight bits, with any rows."""

MOST_READ = 128
"""Bytes that a lane may have read with its results before its sums are there."""


def are_held(columns: int, size: int) -> bool:
    """Whether registers hold all that a lane reads with results of so many columns, of so many bytes each."""
    return size * ROWS * columns // LANES_OF_A_ROW <= MOST_READ


class DirectText(ProductText):
    """Writes the body of a kernel whose tiles all threads copy; ``direct``: neighbours of a row that a lane stores, 0
    where sums are laid out as rows first."""

    direct = 0

    @property
    def past(self) -> str:  # type: ignore[override]
        """See ``EpilogueText``: a lane's rows do not follow one another."""
        return "continue" if self.direct else "break"

    def _place(self, number: str) -> list[str]:
        """See ``ProductText``: where tiles of all columns are few, those of a row of tiles follow one another, of which
        the compiler knows what it divides by."""
        columns = self.parts.columns.value
        beyond = 0 if columns is None else -(-columns // (self.shape.columns // len(self.rights)))
        if not self.direct or not 0 < beyond <= FEW_BEYOND:
            return super()._place(number)
        batch = self.extents["b"] != "1"
        place = f"b = {number} / (below * beyond), tile = {number} % (below * beyond)" if batch else (
            f"b = 0, tile = {number}")
        return [f"const idx {place};", *self._begins("tile / beyond", "tile % beyond")]

    def _line_of(self, side: Side, line: str) -> str:
        """Lines of columns are in the order in which lanes have neighbours."""
        return f"of::line_of<{self.direct}>({line})" if side.loop == "@n" and self.direct else line

    @cached_property
    def _reads(self) -> list[Load]:
        """What is read with the results, vectors of it."""
        return [load for load in self._moving() if self.lanes.stride(load.offset) == 1 and not load.conditions
                and is_vector(load, self.lanes)]

    @property
    def _reads_early(self) -> bool:
        """Whether that is read while the sums are still to come: where a lane has sums of two rows, and few of them."""
        size = sum(TYPES[load.dtype].size for load in self._reads)
        return self.shape.together and size > 0 and are_held(self.shape.columns // len(self.rights), size)

    def _loop(self) -> list[str]:
        if not (self.direct and self._reads):
            return super()._loop()
        early = self._read_first("vectors", "0") if self._reads_early else []
        return [*self._vectors(), *self._prefetched(), *early, *super()._loop()]

    def _prefetched(self) -> list[str]:
        """What is read with the results comes to the second-level cache while sums are made.  (That of a tile to come
        too: 1.02 to 1.08 times as long, H200.)"""
        lines = list[str]()
        for load in self._reads:
            wide, writer = LINE // TYPES[load.dtype].size, self._writer(self.lanes)
            place = pointer(f"i{load.input}", writer.index(load.offset))
            every = f"rows * ((own_columns + {wide - 1}) / {wide})"
            lines += unrolled(f"int pass = 0; pass < ({every} + threads - 1) / threads; ++pass", [
                "const int each = threadIdx.x % threads + pass * threads;",
                f"if ({every} % threads && each >= {every}) break;",
                f"const idx m = of::imin(first_m + each % rows, (idx){self.extents['m']} - 1);",
                f"const idx n = of::imin(first_n + each / rows * {wide}, (idx){self.extents['n']} - width);",
                *writer.upto(Scope.VECTOR), f"of::bring_near({place});"])
        return lines

    def _vectors(self) -> list[str]:
        """Lines that say how many vectors a lane has of a row, and of how many neighbours."""
        own = "own_columns" if self.shape.together else "columns8 * 8"
        return [f"constexpr int width = {self.direct}, vectors = {own} / {LANES_OF_A_ROW * self.direct};"]

    def _before_direct(self) -> list[str]:
        """Lines that come before any result."""
        return []

    def _sum_of(self, scalar: Scalar, writer: Writer) -> str | None:
        """A sum's text, where it is one."""
        raise NotImplementedError

    def _stored(self) -> list[str]:
        return self._stored_direct() if self.direct else super()._stored()

    def _stored_direct(self) -> list[str]:
        """Lines that store vectors of the neighbours that a lane has."""
        columns, early = OfColumns.of(self.parts, self.lanes, self.sizes), self._reads_early
        some = "1" if not self._reads else f"vectors % {VECTORS_AT_ONCE} ? 1 : {VECTORS_AT_ONCE}"
        read = [] if early or not self._reads else self._read_first("at_once", "first")
        return [
            *self._before_direct(),
            *([] if self._reads else self._vectors()),
            f"constexpr int at_once = {some};",
            *columns.once,
            *unrolled("int i = 0; i < rows16; ++i", unrolled("int first = 0; first < vectors; first += at_once", [
                *read,
                *(f"of::{'Bytes' if words else 'Vector'}<{kind.storage}, width> results{number}[{ROWS} * at_once];"
                  for number, (kind, words) in enumerate(zip(self.kinds, self._in_words(columns), strict=True))),
                *unrolled("int vector = 0; vector < at_once; ++vector", [
                    *self._column(), *columns.lines,
                    *unrolled(f"int half = 0; half < {ROWS}; ++half", self._computed_direct(columns))]),
                *unrolled("int vector = 0; vector < at_once; ++vector", unrolled(
                    f"int half = 0; half < {ROWS}; ++half", self._sent_direct())),
            ])),
        ]

    def _column(self, past: bool = False) -> list[str]:
        """Lines that name a lane's first column of a vector: the last one of all where it lies behind that, or where
        it may lie ``past``."""
        n, wide = self.extents["n"], LANES_OF_A_ROW * self.direct
        found = "first_n + column" if past or self._columns_within else f"of::imin(first_n + column, (idx){n} - width)"
        return [f"const int column = own_column + (first + vector) * {wide} + lane % {LANES_OF_A_ROW} * width;",
                f"const idx n = {found};"]

    def _line_at(self) -> str:
        """A line that names the tile's line that a lane's row is in."""
        across = "true" if self.left.across else "false"
        return f"const int line = own_row + i * 16 + of::sums_row<{across}>(lane, half);"

    def _row_at(self) -> list[str]:
        """The same, and the row: the last of all where it lies behind that."""
        return [self._line_at(), f"const idx m = of::imin(first_m + line, (idx){self.extents['m']} - 1);"]

    def _read_first(self, count: str, first: str) -> list[str]:
        """Lines that ask for so many vectors of each row of what is read with the results, from one on."""
        writer, load_by = self._writer(self.lanes), "load_now" if self._reads_early else "load"
        places = [pointer(f"i{load.input}", writer.index(load.offset)) for load in self._reads]
        return [
            *(f"of::Vector<{TYPES[load.dtype].storage}, width> read{number}[{ROWS} * {count}];"
              for number, load in enumerate(self._reads)),
            *unrolled(f"int vector = 0; vector < {count}; ++vector", [
                *([] if first == "first" else [f"constexpr int first = {first}, i = 0;"]),
                *self._column(),
                *unrolled(f"int half = 0; half < {ROWS}; ++half", [
                    *self._row_at(), *writer.upto(Scope.VECTOR),
                    *(f"read{number}[vector * {ROWS} + half] = of::{load_by}<width>({place});"
                      for number, place in enumerate(places))])]),
        ]

    def _computed_direct(self, columns: OfColumns) -> list[str]:
        """Lines that compute a vector of results."""
        read, number_of = self._reads, "first + vector" if self._reads_early else "vector"

        def taken(scalar: Scalar) -> str | None:
            if scalar in columns.texts:
                return columns.texts[scalar]
            if isinstance(scalar, Load) and scalar in read:
                return writer.of_vector(scalar, f"read{read.index(scalar)}[({number_of}) * {ROWS} + half]")
            return self._sum_of(scalar, writer)

        writer, wide = Writer(self.lanes, self.sizes, taken), LANES_OF_A_ROW * self.direct
        made = self._made(writer, self.direct)
        return [
            *self._row_at(),
            *(f"const auto sums{number} = of::own_sums<width>(sums.of[i], "
              f"((first + vector) * {wide}{f' + {number} * own_columns' if number else ''}) / 8, half);"
              for number in range(len(self.rights))),
            *values(writer, made),
            *(f"results{number}[vector * {ROWS} + half] = {vector};" for number, (_, _, vector) in enumerate(made)),
        ]

    def _in_words(self, columns: OfColumns) -> list[bool]:
        """Whether vectors of each result are bytes in words."""
        return [self.direct % 4 == 0 and columns.quantises_all(result) for result in self.distinct]

    def _sent_direct(self) -> list[str]:
        """Lines that store it."""
        writer = self._writer(self.lanes)
        targets, kept = self._targets(writer), self._kept(writer)
        behind = [f"m >= {self.extents['m']}", *([] if self._columns_within else [f"n >= {self.extents['n']}"])]
        return [
            *self._column(past=True), self._line_at(), "const idx m = first_m + line;",
            f"if ({' || '.join(behind)}) {self.past};",
            *writer.upto(Scope.VECTOR), *self._lone(writer),
            *(f"{where}of::store({target}, results{number}[vector * {ROWS} + half]);"
              for number, target, where in zip(self.result_of, targets, kept, strict=True)),
        ]
