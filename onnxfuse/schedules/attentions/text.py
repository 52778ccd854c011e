"""The text of an attention kernel.

A block owns ``rows`` queries of one batch, a warp 16 of them or twice as many.  In shared memory lie the queries, a
tile of keys and one of values, each row 16 bytes longer than it is, so that eight rows of 16 bytes lie in different
banks.  While a tile of keys is multiplied, the values come; while these are, the next keys do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnxfuse.ir.scalars import FLOAT, REDUCTIONS, TYPES
from onnxfuse.lowering.pull import Contracted, Scalar
from onnxfuse.schedules.attentions import tf32
from onnxfuse.schedules.attentions.parts import Access, AttentionParts, Stored
from onnxfuse.schedules.attentions.softmax import POWERS, begun, by_instruction, each_row, maxima, powers, unscaled
from onnxfuse.schedules.attentions.visible import Visible
from onnxfuse.schedules.attentions.visible_text import clear, narrowed, seen
from onnxfuse.schedules.kernel import load_of
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.operand_text import computed, copied
from onnxfuse.schedules.products.maps import steps_of
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.text import Sizes, Writer, indented, literal, pointer, unrolled

_TILES = (("rows", "depth", "m", "d"), ("keys", "depth", "k", "d"), ("keys", "columns", "k", "n"))
"""Of queries, keys and values: rows and columns of a tile, and the loops over them."""


SCORE = "scores[i][n][half * 2 + part + v]"
"""A lane's score of those that a thread has of a row of a tile, or what has been made of it."""

_ROWS = {"depth": "long_row", "columns": "wide_row", "keys": "key_row"}
"""How far rows of so many columns are from one another."""


@dataclass(frozen=True)
class Scores:
    """Lines that make scores of a row's sums: those once a row, the types and names of the constants in them, and those
    for each pair of sums."""

    outer: list[str]
    constants: list[tuple[str, str]]
    inner: list[str]


class AttentionText:
    """Writes the body of a kernel whose blocks go over all keys that their queries see, over the template's ``warps``,
    ``tiles``, ``keys``, ``depth``, ``columns``, ``wide`` and ``idx``: ``wide`` is the width of vectors."""

    counts = "threads = 32 * warps, rows = 16 * tiles * warps, pair = wide > 1 ? 2 : 1"
    scales = True
    """Whether a factor of all scores goes to the exponent."""

    def __init__(self, parts: AttentionParts, sizes: Mapping[str, str]) -> None:
        whole, self.factor = unscaled(parts) if self.scales else (parts, 1.0)
        self.parts = by_instruction(whole)
        self.sizes = Sizes(sizes)
        size = self._writer(parts.accesses[0].lanes).size
        self.extents = {name: size(extent) for name, extent in (
            ("m", parts.rows), ("k", parts.length), ("n", parts.columns), ("d", parts.depth))}
        self.element = TYPES[self.parts.operand].storage

    @property
    def visible(self) -> Visible | None:
        """The keys that a query sees by its place, where some are masked so."""
        return self.parts.visible

    @property
    def narrows(self) -> bool:
        """Whether others are left out."""
        return self.visible is not None

    @property
    def begin(self) -> str:
        """The first key of a block."""
        return "0" if self.visible is None else "begin"

    @property
    def end(self) -> str:
        """The key behind the last one of a block."""
        return self.extents["k"] if self.visible is None else "end"

    def text(self) -> Body:
        """All of it."""
        lines = [*self._opening(), *self._once_more(self.loop()), *indented(self.closing())]
        return Body("\n".join(lines) + "\n", frozenset(self.sizes.used))

    def place(self) -> list[str]:
        """Lines that say which batch and queries a block has, and which keys."""
        if self.visible is None:
            return ["const idx b = (idx)blockIdx.x / blocks, first = (idx)blockIdx.x % blocks * rows;"]
        return [
            "// Blocks with many keys begin first.",
            "const idx b = (idx)blockIdx.x / blocks, block = (idx)blockIdx.x % blocks;",
            f"const idx first = ({'blocks - 1 - block' if self.visible.is_growing else 'block'}) * rows;",
            f"idx begin = 0, end = {self.extents['k']};",
        ]

    def _writer(self, lanes: Lanes, hook: Callable[[Scalar], str | None] | None = None) -> Writer:
        return Writer(lanes, self.sizes, hook)

    # ---- Before the loop over the keys. ----

    def _opening(self) -> list[str]:
        return indented([
            *self.constants(),
            "extern __shared__ __align__(16) unsigned char of_dynamic[];",
            *self.tiles(),
            "const int lane = threadIdx.x % 32, group = lane / 4, corner = lane % 4 * 2;",
            "const int own = threadIdx.x / 32 * tiles * 16;",
            *self.placed(),
            *self.bring(0, "query_tile", "first"),
            *self.bring(1, "key_tile", self.begin),
            "of::copies_asked();",
            *self.sums(),
        ])

    def constants(self) -> list[str]:
        """Lines that name types and what the template's numbers come to."""
        return [f"using T = {self.element};", *self.functors(), f"constexpr int {self.counts};"]

    def placed(self) -> list[str]:
        """Lines that say what of the result a block has, and which keys it sees."""
        return [f"const idx blocks = ({self.extents['m']} + rows - 1) / rows;", *self.place(), *self.seen()]

    def sums(self) -> list[str]:
        """Lines that begin sums and maxima, and compute what the scores of a row have in common."""
        return [
            "float sums[tiles][columns / 8][4] = {};",
            "float most[tiles][2], total[tiles][2] = {};",
            *begun(self.factor),
            "#pragma unroll",
            "for (int i = 0; i < tiles; ++i) most[i][0] = most[i][1] = -OF_INFINITY;",
            *self._kept(),
        ]

    def seen(self) -> list[str]:
        """Lines that leave out the keys that no query of a block sees, tile by tile, and say which all of a warp do."""
        if self.visible is None:
            return []
        lanes = Lanes(self.parts.puller.space, self.parts.puller, "@k", "", 1)
        rows, lines = self.extents["m"], seen(self.visible, self._writer(lanes), self.extents["k"])
        own = narrowed(self.begin, self.end, rows) if self.narrows else []
        return [*lines, "long long low, high;", *own, *clear(rows)]

    def tiles(self) -> list[str]:
        """Lines that lay out shared memory."""
        return [
            tf32.TILES if self.parts.words else
            "constexpr int long_row = depth + 8, wide_row = columns + 8, key_row = keys + 8;",
            "T* const query_tile = reinterpret_cast<T*>(of_dynamic);",
            "T* const key_tile = query_tile + rows * long_row;",
            f"T* const value_tile = key_tile + {'depth * key_row' if self.across else 'keys * long_row'};",
        ]

    @property
    def across(self) -> bool:
        """Whether rows of a tile of keys are of one place of all of them."""
        return self.parts.accesses[1].across

    def at(self, rows: str, columns: str, line: str, column: str) -> str:
        """Where of a tile of so many rows and columns the vector lies that begins at a column of a line."""
        return f"{line} * {_ROWS[columns]} + {column}"

    def functors(self) -> list[str]:
        """What maxima and powers are computed by."""
        softmax = self.parts.softmax
        return [f"using Largest = {REDUCTIONS[softmax.largest.kind][0]};", f"using Powers = {POWERS};"]

    def bring(self, place: int, tile: str, first: str) -> list[str]:
        """Fill a tile of queries (0), keys (1) or values (2) from row ``first`` on: vectors of each row, zeros past the
        ends.  Keys that lie side by side make rows of what they have at one place."""
        access, (rows, columns, row, column) = self.parts.accesses[place], _TILES[place]
        begin = {row: "" if first == "0" else f"{first} + "}
        if access.across:
            rows, columns, row, column = columns, rows, column, row
        # What counts lines or columns of the tile is the tensor's own coordinate where that begins with it.
        line, at = (f"{name}_of_tile" if begin.get(name) else name for name in (row, column))
        ends = dict(self.extents)
        if place == 2 and self.narrows and self.visible is not None and self.visible.is_read:
            ends["k"] = self.end  # what has no weight may be no number behind it
        inside = f"{row} < {ends[row]} && {column} < {ends[column]}"
        own = {name: [f"const idx {name} = {start}{name}_of_tile;"] if start else [] for name, start in begin.items()}
        to = f"{tile} + {self.at(rows, columns, line, at)}"
        body = [*own.get(row, ()), f"T* const to = {self.rows_on(columns, to)};"]
        filled = computed(self._writer(access.lanes), access.scalar, inside)
        ahead = [f"T* const into = {tile} + {self.at(rows, columns, 'thread / lanes', at)};"]
        if access.copied:
            whole, first_row = self._copied_rows(access, row, inside)
            ahead += [f"const idx {row} = {begin.get(row, '')}thread / lanes;", *first_row] if first_row else []
            filled = [f"if constexpr (width == {self.parts.width}) {{", *indented(whole), "} else {",
                      *indented(filled), "}"]
        lines = [
            *own.get(column, ()), *ahead,
            "#pragma unroll 8", f"for (int pass = 0; pass < ({rows} + step - 1) / step; ++pass) {{",
            *indented([f"const int {line} = thread / lanes + pass * step;",
                       f"if ({rows} % step && {line} >= {rows}) break;", *body, *filled]), "}",
        ]
        return [
            "{",
            *indented([
                f"constexpr int width = wide, lanes = of::lanes_of({columns} / wide, threads);",
                "constexpr int step = threads / lanes;",
                "const int thread = threadIdx.x % threads;  // which the compiler sees is less",
                f"for (int {at} = thread % lanes * width; {at} < {columns}; {at} += lanes * width) {{",
                *indented(lines), "}",
            ]),
            "}",
        ]

    def rows_on(self, columns: str, to: str) -> str:
        """Where the vector of a pass lies, ``to``: some rows behind the first one's, ``into``, which takes no
        instruction."""
        return f"into + pass * (step * {_ROWS[columns]})"

    def _copied_rows(self, access: Access, row: str, inside: str) -> tuple[list[str], list[str]]:
        """Lines that copy a vector, and, where rows lie evenly, those before all passes that say where the first one's
        does: from it to others it is a constant then."""
        writer, found = self._writer(access.lanes), load_of(access.scalar)
        assert found is not None
        load, outside = found
        steps = None if outside is not None or load.conditions else steps_of(self.parts.puller, load.offset)
        if steps is None or f"@{row}" not in steps:
            return copied(writer, access.scalar, inside), []
        known = f"origin + (idx)(pass * step) * {writer.size(steps[f'@{row}'])}"
        origin = f"const T* const origin = {writer.address(load)};"
        return copied(writer, access.scalar, inside, known), [*writer.upto(Scope.VECTOR), origin]

    # ---- The loop over the keys. ----

    def _once_more(self, loop: list[str]) -> list[str]:
        """Where a mask is a finite number, the loop again over all keys if a row has seen nothing far above it."""
        if self.visible is None or self.visible.least is None or not self.narrows:
            return loop
        least, length = literal(self.visible.least, FLOAT), self.extents["k"]
        return indented([
            "bool everything = false;",
            "while (true) {",
            *loop,
            *indented([
                "bool low = false;",
                *each_row([f"low |= most[i][half] <= {least};"]),
                "of::copies_here<0>();  // where there was no key",
                "if (everything || !__syncthreads_or(low)) break;",
                "// A row may be masked everywhere: then its masked scores count.",
                f"begin = 0, end = {length}, everything = true;",
                *self.bring(1, "key_tile", "begin"),
                "of::copies_asked();",
                *each_row([
                    "most[i][half] = -OF_INFINITY, total[i][half] = 0.0f;",
                    *unrolled("int c = 0; c < columns / 8; ++c", [
                        "sums[i][c][half * 2] = sums[i][c][half * 2 + 1] = 0.0f;"]),
                ]),
            ]),
            "}",
        ])

    def loop(self) -> list[str]:
        """Lines that go over a block's keys."""
        return indented([
            f"for (idx start = {self.begin}; start < {self.end}; start += keys) {{",
            *indented([
                "// The keys are here, and everybody is done with the values before.",
                "of::copies_here<0>();",
                "__syncthreads();",
                *self.bring(2, "value_tile", "start"),
                "of::copies_asked();",
                "float scores[tiles][keys / 8][4] = {};",
                *products(self.across, self.parts),
                *self.scored(RESCALED),
                *powers(),
                "// The values are here, and everybody is done with the keys.",
                "of::copies_here<0>();",
                "__syncthreads();",
                f"if (start + keys < {self.end}) {{",
                *indented(self.bring(1, "key_tile", "start + keys")),
                "}",
                "of::copies_asked();",
                *(tf32.sums(self.parts.exact) if self.parts.words else _SUMS),
            ]),
            "}",
        ])

    @cached_property
    def _unmasked(self) -> Scores:
        """Scores of keys that need no comparison of places."""
        return self._scores(self.parts.softmax.score if self.visible is None else self.visible.score)

    def _kept(self) -> list[str]:
        """Lines that compute before the loop what these have in common, row by row."""
        known = self._unmasked
        if not known.constants:
            return []
        return [
            *(f"{kind} kept_{name}[tiles][2];" for kind, name in known.constants),
            *each_row([self._row(), *known.outer,
                       *(f"kept_{name}[i][half] = {name};" for _, name in known.constants)]),
        ]

    def _row(self) -> str:
        """The line that says which query a row is of."""
        return f"const idx m = of::imin(first + own + i * 16 + half * 8 + group, (idx)({self.extents['m']} - 1));"

    def scored(self, last: Sequence[str]) -> list[str]:
        """Lines from products to scores and their maxima, row by row; ``last``: see ``maxima``."""
        length, score, visible = self.extents["k"], self.parts.softmax.score, self.visible
        kept = [f"const {kind} {name} = kept_{name}[i][half];" for kind, name in self._unmasked.constants]
        if visible is None:
            clear = f"start + keys <= {length}"
            other = [*kept, *each_score(self._scores(score, "0", length).inner)]
        else:
            clear = "start >= clear && start + keys <= clear_end"
            hiding = ["long long from, to;", "seen(m, m, true, from, to);", *kept,
                      *each_score(self._scores(visible.score, "from", "to").inner)]
            all_of_them = self._scores(score, "0", length)
            other = every = [*all_of_them.outer, *each_score(all_of_them.inner)]
            if visible.least is None:
                other = hiding
            elif self.narrows:
                other = ["if (!everything) {", *indented(hiding), "} else {", *indented(every), "}"]
        # What the keys of a tile have for all rows is read once for those of a thread.
        whole = each_score(each_row([self._row(), *kept, *inner])) if (inner := self._unmasked.inner) else []
        return [
            f"if ({clear}) {{", *indented(whole), "} else {", *indented(each_row([self._row(), *other])), "}",
            *maxima(last),
        ]

    @property
    def sum_of_a_score(self) -> str:
        """The first product's sum, of the keys as they are in memory."""
        return SCORE if self.parts.factor == 1.0 else f"({SCORE} * {literal(self.parts.factor, FLOAT)})"

    def held(self, scalar: Scalar) -> str | None:
        """What a thread has of a score's expression already, by its text."""
        return self.sum_of_a_score if isinstance(scalar, Contracted) else None

    def _scores(self, score: Scalar, begin: str = "", end: str = "") -> Scores:
        """Scores; those of keys outside of ``begin`` to ``end``, where that is asked for, are of none."""
        assert self.parts.along_keys is not None
        at, writer = SCORE, self._writer(self.parts.along_keys, self.held)
        value = writer.scalar(score)
        below = [f"k + v < {begin}"] if begin not in ("", "0") else []
        lane = [*writer.lines[Scope.LANE], f"{at} = {value};"] if value != at else []
        vector = ["const idx k = start + n * 8 + corner + part;"] if lane or end else []
        if lane:
            lane = [f"if (k + v < {end}) {{", *indented(lane), "}"] if end else lane
            computed = [*writer.lines[Scope.VECTOR], *unrolled("int v = 0; v < width; ++v", lane)]
            computed = [f"if (k < {end}) {{", *indented(computed), "}"] if end else computed
            vector = ["constexpr int width = pair;", *vector, *computed]
        if end:
            outside = " || ".join([*below, f"k + v >= {end}"])
            vector += unrolled("int v = 0; v < pair; ++v", [f"if ({outside}) {at} = -OF_INFINITY;"])
        outer, known = writer.upto(Scope.ROW), writer.known_upto(Scope.ROW)
        assert len(outer) == len(known)
        return Scores(outer, known, vector)

    # ---- After it. ----

    def closing(self) -> list[str]:
        """Lines that store what a block found."""
        results, outer = self.results("sums[i][c][half * 2 + part + v]")
        columns = unrolled("int c = 0; c < columns / 8; ++c", unrolled("int part = 0; part < 2; part += pair", [
            "constexpr int width = pair;", "const int n = c * 8 + corner + part;", *results]))
        return each_row([
            *self.scale_of_row(),
            "const idx m = first + own + i * 16 + half * 8 + group;",
            f"if (m < {self.extents['m']}) {{", *indented([*outer, *columns]), "}",
        ])

    def scale_of_row(self) -> list[str]:
        """Lines that make ``scale`` of what the lanes of a row have summed up of its powers."""
        return ["float whole = of::reduce_lanes<of::Sum, 4>(total[i][half]);", *self.scale("most[i][half]")]

    def scale(self, most: str) -> list[str]:
        """Lines that make ``scale`` of the sum ``whole`` of a row's powers."""
        total = f"whole = {self.extents['k']} > 0 ? Powers::total(whole, {most}) : 1.0f;"
        if self.parts.softmax.zeroed:
            return ["// A row that is masked everywhere sums up zeros.", total,
                    f"const float scale = {most} == -OF_INFINITY ? 0.0f : 1.0f / whole;"]
        if not self.parts.softmax.guarded:
            return [total, "const float scale = 1.0f / whole;"]
        return [
            "// A row that is masked everywhere sums up zeros; one with a score that is no number is made of them.",
            "const bool some = whole != 0.0f;", total, "const bool nothing = some && whole != whole;",
            "const float scale = whole != whole ? 0.0f : 1.0f / whole;",
        ]

    def results(self, summed: str) -> tuple[list[str], list[str]]:
        """Lines that store the ``width`` results of a row at column ``n``, of its sums, and those around all columns.
        """
        assert self.parts.along_columns is not None
        scaled = f"nothing ? 0.0f : {summed} * scale" if self.parts.softmax.guarded else f"{summed} * scale"
        lanes = self.parts.along_columns
        writer = self._writer(lanes, lambda scalar: "sum" if isinstance(scalar, Contracted) else None)
        return self.stored(self.parts.result, writer, "n", [f"const float sum = {scaled};"])

    def stored(
        self, result: Stored, writer: Writer, loop: str, given: Sequence[str] = ()
    ) -> tuple[list[str], list[str]]:
        """Lines that store the ``width`` elements of a result of a row from where a loop is on, and those around all of
        them; ``given`` come before each."""
        lanes, value = writer.lanes, writer.scalar(result.scalar)
        kind = TYPES[self.parts.lowered.program.outputs[result.output].dtype]
        neighbours = lanes.stride(result.place) == 1 and lanes.aligned(result.place)
        target = pointer(f"o{result.output}", writer.index(result.place, lane=not neighbours))
        inner, end = [*given, *writer.lines[Scope.LANE]], self.extents[loop]
        each = "int v = 0; v < width; ++v"
        if neighbours:
            computed = [f"{kind.compute} y[width];", *unrolled(each, [*inner, f"y[v] = {value};"]),
                        f"of::store({target}, of::pack<{kind.storage}>(y));"]
        else:
            inner.append(f"*({target}) = of::Store<{kind.storage}>::from({value});")
            computed = unrolled(each, [f"if ({loop} + v < {end}) {{", *indented(inner), "}"])
        stored = [f"if ({loop} < {end}) {{", *indented([*writer.lines[Scope.VECTOR], *computed]), "}"]
        return stored, writer.upto(Scope.ROW)


def _keys(across: bool) -> list[str]:
    """Lines that load keys that lie one after the other, or across."""
    return (
        ["const T* const line = key_tile + (step * 16 + lane % 16) * key_row;",
         "of::load_matrices<true>(right, line + n * 8 + lane / 16 * 8);"] if across else
        ["const T* const line = key_tile + (n * 8 + lane / 16 * 8 + lane % 8) * long_row;",
         "of::load_matrices<false>(right, line + step * 16 + lane / 8 % 2 * 8);"])


def products(across: bool, parts: AttentionParts) -> list[str]:
    """Lines that sum up the first product, of keys that lie one after the other, or across."""
    step, load, keys, multiplied = (
        (8, "of::load_words", tf32.keys(across), tf32.multiplied("scores", "n", 2, parts.exact)) if parts.words else
        (16, "of::load_matrices<false>", _keys(across), _MULTIPLIED))
    return [
        "// Scores: the sums of the first product.",
        *unrolled(f"int step = 0; step < depth / {step}; ++step", [
            "unsigned left[tiles][4];",
            *unrolled("int i = 0; i < tiles; ++i", [
                "const int line = own + i * 16 + lane % 16;",
                f"{load}(left[i], query_tile + line * long_row + step * {step} + lane / 16 * {step // 2});",
                *tf32.rounded("left[i]", parts.rounds),
            ]),
            *unrolled("int n = 0; n < keys / 8; n += 2", [
                "unsigned right[4];", *keys, *tf32.rounded("right", parts.rounds), *multiplied,
            ]),
        ]),
    ]


_MULTIPLIED = unrolled("int i = 0; i < tiles; ++i", [
    "of::mma<T>(scores[i][n], left[i], right[0], right[1]);",
    "of::mma<T>(scores[i][n + 1], left[i], right[2], right[3]);",
])

RESCALED = (
    "#pragma unroll",
    "for (int c = 0; c < columns / 8; ++c) sums[i][c][half * 2] *= scale, sums[i][c][half * 2 + 1] *= scale;",
)

_SUMS = (
    "// The second product: powers by values.",
    "#pragma unroll",
    "for (int step = 0; step < keys / 16; ++step) {",
    "  unsigned left[tiles][4];",
    "#pragma unroll",
    "  for (int i = 0; i < tiles; ++i)",
    "#pragma unroll",
    "    for (int j = 0; j < 4; ++j) {",
    "      const float* const from = &scores[i][2 * step + j / 2][j % 2 * 2];",
    "      left[i][j] = of::pair_of<T>(from[0], from[1]);",
    "    }",
    "#pragma unroll",
    "  for (int c = 0; c < columns / 8; c += 2) {",
    "    unsigned right[4];",
    "    of::load_matrices<true>(right, value_tile + (step * 16 + lane % 16) * wide_row + c * 8 + lane / 16 * 8);",
    "#pragma unroll",
    "    for (int i = 0; i < tiles; ++i) {",
    "      of::mma<T>(sums[i][c], left[i], right[0], right[1]);",
    "      of::mma<T>(sums[i][c + 1], left[i], right[2], right[3]);",
    "    }",
    "  }",
    "}",
)


def each_score(body: Sequence[str]) -> list[str]:
    """A loop over the pairs of scores of a tile that a thread has of a row."""
    loops = unrolled("int n = 0; n < keys / 8; ++n", unrolled("int part = 0; part < 2; part += pair", body))
    return loops if body else []
