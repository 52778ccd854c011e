"""The text of what becomes of a product's sums.

A lane has two neighbours in every eight columns of its warp's sums, in two rows of every sixteen.  Where what follows
reads nothing of the results' own shape, such as a residual, it is computed there, and results are laid out in shared
memory as they are stored: half the bytes of sums, no wait between sums and results, and only the warp's own lanes to
wait for.  Else sums are laid out as rows, so that what is read with them comes in whole lines, but where copies bring
it (``asides``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnxfuse.ir.scalars import DOUBLE, FUNCTIONS, TYPES
from onnxfuse.lowering.pull import Apply, Contracted, Load, Scalar
from onnxfuse.schedules.kernel import is_vector, moving_loads, walk
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.packing import Packed, packed
from onnxfuse.schedules.products.of_columns import OfColumns
from onnxfuse.schedules.products.parts import ProductParts, Side
from onnxfuse.schedules.products.shape import PIECE, ProductShape
from onnxfuse.schedules.text import Sizes, Writer, added, indented, pointer, unrolled

PAIR, WORD = 2, 4
"""Neighbours that a lane has of a row; bytes of a word."""

LINE_BYTES, VECTOR_BYTES = 128, 16
"""Bytes that a piece's results have of a row in a warp's shared memory at most; of what is stored at once."""

MOST_INSTRUCTIONS = 80
"""What an element takes at most where results are computed where sums are: there all of a thread's, up to 128 elements,
are text of their own.  Of a sine they would take the compiler three times as long, and 200 kB."""


@dataclass(frozen=True)
class Held:
    """Where a warp's sums are: ``strips`` of 16 rows, so many rows ``apart``, of so many ``columns`` of each product
    behind the ``first``."""

    strips: str
    apart: int
    columns: int
    first: str = ""


class EpilogueText:
    """Writes what is computed of sums, and stores it.

    ``past``: what becomes of the rows behind one past the last; ``sum_type``: what sums are, of which ``first_sums``
    are those of a strip; ``widest``: columns of a piece whose results are computed where sums are, at most.
    """

    past, sum_type, first_sums, widest = "break", "float", "", PIECE

    def __init__(
        self, parts: ProductParts, sides: Sequence[Side], results: Lanes, shape: ProductShape, sizes: Mapping[str, str]
    ) -> None:
        self.parts, self.left, self.rights, self.lanes, self.shape = parts, sides[0], sides[1:], results, shape
        self.sizes = Sizes(sizes)
        # Outputs that are parts of the sums have one result, which is computed and laid out once.
        self.distinct = tuple(dict.fromkeys(parts.results))
        self.result_of = [self.distinct.index(each) for each in parts.results]
        self.kinds = [TYPES[each.dtype] for each in self.distinct]
        size = self._writer(results).size
        self.extents = {name: size(extent) for name, extent in (
            ("b", parts.batch), ("m", parts.rows), ("n", parts.columns), ("k", parts.depth))}

    def _writer(self, lanes: Lanes) -> Writer:
        return Writer(lanes, self.sizes, self._sum)

    def _sum(self, scalar: Scalar) -> str | None:
        return f"sums{scalar.number}.at[v]" if isinstance(scalar, Contracted) else None

    # ---- What is read with the results. ----

    def _moving(self) -> list[Load]:
        """What is read with each result."""
        return self.parts.beside(self.lanes)

    def _in_place(self, held: Held) -> int | None:
        """How many columns a piece has where what follows is computed where sums are; None where it is not."""
        return None if self._moving() else self._piece_wide(held)

    def _piece_wide(self, held: Held) -> int | None:
        """The same whatever is read with the results."""
        parts, lanes = self.parts, self.lanes
        bytes_each = [kind.size for kind in self.kinds]
        if lanes.element != "@n" or lanes.width < PAIR or parts.puller.gathered:
            return None
        if not is_brief(self.distinct):
            return None
        if max(bytes_each) * lanes.width > VECTOR_BYTES or not all(
                is_vector(load, lanes) for load in moving_loads(parts.results, lanes)):
            return None
        wide = self.widest
        while wide * sum(bytes_each) > LINE_BYTES or held.columns % wide:
            wide //= 2
        return wide if wide >= 8 else None

    # ---- Results where sums are. ----

    def _computed_first(self, held: Held, wide: int) -> list[str]:
        """All pieces of so many columns, one laid out while results of that before it are on their way; ``own_laid`` is
        the warp's shared memory, of 16 rows of ``PIECE`` floats."""
        kinds = self.kinds
        begins = [16 * wide * sum(each.size for each in kinds[:number]) for number in range(len(kinds) + 1)]
        return [
            *(self._of_pairs.once if self._shares_columns(held) else []),
            f"constexpr int piece_wide = {wide}, pieces = {held.columns // wide};",
            *unrolled(f"int i = 0; i < {held.strips}; ++i", unrolled("int piece = 0; piece < pieces; ++piece", [
                f"const idx first_column = first_n + {held.first}piece * piece_wide;",
                self._first_row(f"i * {held.apart}"),
                "unsigned char* const buffer = reinterpret_cast<unsigned char*>(own_laid) + "
                f"(i * pieces + piece) % 2 * {begins[-1]};",
                *(f"{each.storage}* const at{number} = "
                  f"reinterpret_cast<{each.storage}*>({added('buffer', begins[number])});"
                  for number, each in enumerate(kinds)),
                *self._computed(held),
                "__syncwarp();",
                "{", *indented(self._sent()), "}",
                *self._followed(),
            ])),
            "__syncwarp();",
        ]

    def _followed(self) -> list[str]:
        """Lines that do more with a piece of the results while it is laid out."""
        return []

    def _computed(self, held: Held) -> list[str]:
        """Lines that lay the results of a piece out."""
        if self._shares_columns(held):
            return self._computed_of_columns(held)
        writer = self._pair_writer()
        made = self._made(writer, PAIR)
        # Past the ends too, at the last row and pair: without a branch between them pieces are computed at once.
        return unrolled("int half = 0; half < 2; ++half", [
            f"constexpr int width = {PAIR};",
            *self._own_row(),
            *unrolled("int j = 0; j < piece_wide / 8; ++j", [
                *([f"if ({past}) continue;"] if (past := self._past_tile("j * 8")) else []),
                f"const int column = j * 8 + lane % 4 * {PAIR};",
                f"const idx n = {self._pair_at()};",
                *self._own_sums(held),
                *values(writer, made),
                *(f"of::store({self._lies_at(number, 'line')}, {vector});"
                  for number, (_, _, vector) in enumerate(made)),
            ]),
        ])

    def _own_sums(self, held: Held) -> list[str]:
        """Lines that name a lane's pair of sums of each product."""
        return [line for number in range(len(self.rights)) for line in (
            f"const {self.sum_type} (&from{number})[4] = "
            f"sums[i]{self.first_sums}[piece * piece_wide / 8 + j"
            f"{f' + {number * held.columns // 8}' if number else ''}];",
            f"of::Vector<float, {PAIR}> sums{number};",
            *(f"sums{number}.at[{each}] = {self._as_float(f'from{number}[half * 2 + {each}]')};"
              for each in range(PAIR)),
        )]

    # ---- The same where what is known of columns is computed once for a lane's two rows. ----

    def _shares_columns(self, held: Held) -> bool:
        """Whether it is: where results are quantised, which takes more than all else."""
        return any(self._late(held))

    @cached_property
    def _of_pairs(self) -> OfColumns:
        """What pairs of results are made of that is the same for all rows."""
        return OfColumns.of(self.parts, self.parts.lanes("@n", PAIR), self.sizes)

    def _late(self, held: Held) -> list[bool]:
        """Whether each result is quantised by one step, and so all of a row of a piece at once, as words."""
        wide = self._in_place(held) or 0
        return [wide % (4 * WORD) == 0 and self._of_pairs.quantises_all(result) for result in self.distinct]

    def _computed_of_columns(self, held: Held) -> list[str]:
        """Lines that lay the results of a piece out."""
        columns, late = self._of_pairs, self._late(held)
        writer = Writer(self.parts.lanes("@n", PAIR), self.sizes,
                        lambda scalar: columns.texts.get(scalar) or self._sum(scalar))
        names = [f"kept{number}[half]" if later else f"y{number}" for number, later in enumerate(late)]
        made = [packed(writer, result, name, PAIR) for result, name in zip(self.distinct, names, strict=True)]
        return [
            f"constexpr int width = {PAIR};",
            *(f"float kept{number}[2][piece_wide / 4];" for number, later in enumerate(late) if later),
            *unrolled("int j = 0; j < piece_wide / 8; ++j", [
                f"const int column = j * 8 + lane % 4 * {PAIR};",
                f"const idx n = {self._pair_at()};",
                *columns.lines,
                *unrolled("int half = 0; half < 2; ++half", [
                    *self._own_row(),
                    *self._own_sums(held),
                    *values(writer, made),
                    *(f"kept{number}[half][j * {PAIR} + {each}] = y{number}[{each}];"
                      for number, later in enumerate(late) if later for each in range(PAIR)),
                    *(f"of::store({self._lies_at(number, 'line')}, {made[number][2]});"
                      for number, later in enumerate(late) if not later),
                ]),
            ]),
            *(self._quantised(made, late) if any(late) else []),
        ]

    def _quantised(self, made: Sequence[Packed], late: Sequence[bool]) -> list[str]:
        """Lines that lay out what is quantised all at once."""
        return unrolled("int half = 0; half < 2; ++half", [
            "const int line = half * 8 + lane / 4;",
            *(f"const auto all{number} = {made[number][2]};" for number, later in enumerate(late) if later),
            *unrolled("int j = 0; j < piece_wide / 8; ++j", [
                f"const int column = j * 8 + lane % 4 * {PAIR};",
                *(f"of::store_two({self._lies_at(number, 'line')}, all{number}, j * {PAIR});"
                  for number, later in enumerate(late) if later)]),
        ])

    def _own_row(self) -> list[str]:
        """Lines that name a lane's line of a piece in each half, and its row, the last of all where it lies behind."""
        return ["const int line = half * 8 + lane / 4;", *self._row_of("row"),
                f"const idx m = of::imin(row, (idx){self.extents['m']} - 1);"]

    @property
    def _columns_within(self) -> bool:
        """Whether no tile has columns behind the last."""
        columns = self.parts.columns.value
        return columns is not None and columns % (self.shape.columns // len(self.rights)) == 0

    def _pair_at(self) -> str:
        """Where a pair of columns lies: the last one of all where it lies behind that."""
        own = "first_column + column"
        return own if self._columns_within else f"of::imin({own}, (idx){self.extents['n']} - {PAIR})"

    def _pair_writer(self) -> Writer:
        """What writes pairs of results where sums are."""
        return self._writer(self.parts.lanes("@n", PAIR))

    def _past_tile(self, column: str) -> str | None:
        """Whether a column of a piece is none of the tile's; None where all are."""
        return None

    def _lies_at(self, number: int, line: str) -> str:
        """Where a result's columns of a line are laid out."""
        return f"at{number} + of::packed_at<piece_wide, sizeof(*at{number})>({line}, column)"

    def _sent(self) -> list[str]:
        """Lines that store the results of a piece from where they are laid out."""
        writer = self._writer(self.lanes)
        targets, kept = self._targets(writer), self._kept(writer)
        within = f" && !({past})" if (past := self._past_tile("column")) else ""
        return [
            f"constexpr int width = {self.lanes.width}, lanes = piece_wide / width, step = 32 / lanes;",
            "const int column = lane % lanes * width;",
            "const idx n = first_column + column;",
            *unrolled("int pass = 0; pass < (16 + step - 1) / step; ++pass", [
                "const int line = lane / lanes + pass * step;",
                *self._row_of("m"),
                *writer.upto(Scope.VECTOR),
                *(f"const auto result{number} = of::load<width>({self._lies_at(number, 'line % 16')});"
                  for number in range(len(self.kinds))),
                f"if (line < 16 && m < {self.extents['m']} && n < {self.extents['n']}{within}) {{",
                *(f"  {where}of::store({target}, result{number});"
                  for number, target, where in zip(self.result_of, targets, kept, strict=True)),
                "}",
            ]),
        ]

    def _as_float(self, number: str) -> str:
        """A sum as it is laid out: in the bits of a float."""
        return number

    def _first_row(self, below: str) -> str:
        """A line that names the first row of a warp's so far below."""
        return f"const idx first_row = first_m + own_row + {below};"

    def _row_of(self, name: str) -> list[str]:
        """Lines that name the row of a line; past the last there is none."""
        return [f"const idx {name} = first_row + line;"]

    def _made(self, writer: Writer, width: int) -> list[Packed]:
        """What makes vectors of the results."""
        return [packed(writer, result, f"y{number}", width) for number, result in enumerate(self.distinct)]

    def _targets(self, writer: Writer) -> list[str]:
        """Where they are stored."""
        return [pointer(f"o{number}", writer.index(place)) for number, place in enumerate(self.parts.places)]

    def _kept(self, writer: Writer) -> list[str]:
        """For each of them, what stands before it is stored: whether it is one of the result's elements."""
        found = [" && ".join(writer.condition(condition)[0] for condition in each) for each in self.parts.kept]
        return [f"if ({each}) " if each else "" for each in found]

    def _lone(self, writer: Writer) -> list[str]:
        """Lines that name what a condition hangs on an element itself by: these stand alone then."""
        scopes = {writer.condition(condition)[1] for each in self.parts.kept for condition in each}
        return ["constexpr int v = 0;", *writer.lines[Scope.LANE]] if Scope.LANE in scopes else []

    # ---- Results of sums that are laid out as rows. ----

    def _results(
        self, begin: Sequence[str], taken: str, end: Sequence[str], columns: str = "own_columns"
    ) -> list[str]:
        """Lines that store a vector of results of each pass, of a row of the result if there is such a row.

        ``taken`` gives the sums of the product whose columns begin where its braces say.  All passes are computed
        before any is stored, and past the last row that one again: without a branch or a store between them the
        compiler asks for what all of them read before it waits for any of it."""
        writer, places = self._writer(self.lanes), self._writer(self.lanes)
        rows = self.extents["m"]
        lasts = "width" if self.lanes.element == "@m" else "1"  # rows of the last vector
        made, targets, kept = self._made(writer, self.lanes.width), self._targets(places), self._kept(places)
        return [
            *(f"of::Vector<{kind.storage}, width> results{number}[passes];" for number, kind in enumerate(self.kinds)),
            *unrolled("int pass = 0; pass < passes; ++pass", [
                *begin, f"const idx m = of::imin(row, (idx){rows} - {lasts});",
                *(f"const auto sums{number} = {taken.format(f' + {number} * {columns}' if number else '')};"
                  for number in range(len(self.rights))),
                *values(writer, made),
                *(f"results{number}[pass] = {vector};" for number, (_, _, vector) in enumerate(made)),
            ]),
            *unrolled("int pass = 0; pass < passes; ++pass", [
                *end, f"if (m >= {rows}) {self.past};", *places.upto(Scope.VECTOR), *self._lone(places),
                *(f"{where}of::store({target}, results{number}[pass]);"
                  for number, target, where in zip(self.result_of, targets, kept, strict=True)),
            ]),
        ]


def is_brief(results: Sequence[Scalar]) -> bool:
    """Whether results are computed in few enough instructions to be text of their own for each of a thread's sums."""
    applied = [scalar for scalar in walk(results) if isinstance(scalar, Apply)]
    known = [FUNCTIONS.get(scalar.function) for scalar in applied]  # but for a change of type
    instructions = sum(1 if function is None else function.instructions for function in known)
    return instructions <= MOST_INSTRUCTIONS and not any(scalar.dtype == DOUBLE for scalar in applied)


def values(writer: Writer, made: Sequence[Packed]) -> list[str]:
    """Lines that compute what lanes keep of the results."""
    return [
        *writer.upto(Scope.VECTOR),
        *(f"{kind} y{number}[width];" for number, (kind, _, _) in enumerate(made)),
        *unrolled("int v = 0; v < width; ++v", [
            *writer.lines[Scope.LANE], *(f"y{number}[v] = {value};" for number, (_, value, _) in enumerate(made))]),
    ]
