"""The text of a kernel of images with channels last: strips of windows, vectors of channels.

Pixels wait in registers as they lie in memory.  Of a small window all rows of them are asked for at once, so that many
are on their way.  Of a large one they are a loop, in which the next row is asked for before the one at hand is
multiplied: were it unrolled, its instructions would be too many to stay where they are run from.

Where the sums of all results of a channel are wanted too, threads add up what they stored of a strip, and blocks what
their strips found, each time that they have been through them: float32, in an order that no GPU changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.pull import Contracted, Scalar
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.packing import packed_as_it_is
from onnxfuse.schedules.pointwise import Store, vector_lines
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.stencils.last_shape import StencilLastParts
from onnxfuse.schedules.stencils.last_strips import PIECE, Edges, StencilLastShape
from onnxfuse.schedules.text import Sizes, Writer, indented, pointer, unrolled

TAPS_SIDE, CHANNELS_SIDE = 8, 4
"""Weights that a warp brings at once: so many neighbours of each of so many channels, all in different banks."""

TURNS = 4
"""Of a group of threads that brings weights, whose are on their way together."""

MOST_AT_ONCE = 16
"""Strips of a block whose sums are on their way together."""

SUMS = "sums_of_parts"
"""Parameter: float32, of the parts of images that blocks go through, and channels."""


class StripsText:
    """Writes the body of a kernel's function."""

    def __init__(
        self, parts: StencilLastParts, lanes: Lanes, shape: StencilLastShape, sizes: Mapping[str, str]
    ) -> None:
        """``lanes``: of vectors of ``shape.width`` channels."""
        self.parts, self.lanes, self.shape = parts, lanes, shape
        self.sizes = Sizes(sizes)
        self.read = parts.brought(lanes)
        self.element = "" if self.read is None else TYPES[self.read.dtype].storage
        self.edges = Edges.of(parts.axes[2], shape.broad)
        size = self._writer(lanes).size
        self.images, self.channels = size(parts.images), size(parts.channels)
        self.extents = [size(axis.extent) for axis in parts.axes]
        self.counts = [size(axis.count) for axis in parts.axes]
        self.starts = [size(axis.start) for axis in parts.axes]

    def _writer(self, lanes: Lanes, hook: Callable[[Scalar], str | None] | None = None) -> Writer:
        return Writer(lanes, self.sizes, hook)

    def text(self) -> Body:
        """All of it."""
        depth, height, width = self.counts
        lines = [
            *self._constants(),
            *([] if self.early else self._weights()),
            "const int vector = threadIdx.x % vectors, strip = threadIdx.x / vectors;",
            "const idx c = first_c + vector * width;",
            f"const idx beyond = ({width} + broad * across - 1) / (broad * across);",
            f"const idx below = ({height} + tall * down - 1) / (tall * down);",
            "// Neighbouring strips one after the other: what they both read is still near.",
            f"const idx all = beyond * below * {depth} * {self.images}, each = all / (idx)gridDim.x;",
            "const idx block = (idx)blockIdx.x, more = all % (idx)gridDim.x;",
            "const idx begin = block * each + of::imin(block, more);",
            "for (idx number = begin; number < begin + each + (block < more); ++number) {",
            *indented([
                "const idx first_x = (number % beyond * across + strip % across) * broad;",
                "const idx first_y = (number / beyond % below * down + strip / across) * tall;",
                f"const idx oz = number / beyond / below % {depth}, image = number / beyond / below / {depth};",
                f"const bool live = c < {self.channels} && first_x < {width} && first_y < {height};",
                *self._turn(),
            ]),
            "}",
        ]
        return Body("\n".join(indented(lines)) + "\n", frozenset(self.sizes.used))

    def _turn(self) -> list[str]:
        """Lines that go through the strips of a block once; all threads take part where they add up."""
        before, after = self._layer() if self.early else ([], self._layers())
        if not self.shape.sums:
            return [*before, "if (!live) continue;", *after, *self._stored()]
        return [
            *before,
            "float told[width] = {};",
            "if (live) {", *indented([*after, *self._stored()]), "}",
            *self._added_up(),
        ]

    def _added_up(self) -> list[str]:
        """Lines by which a block adds up what its strips found; the next turn's lies elsewhere, so that threads meet
        once a turn."""
        return [
            "float* const found = weights + taps * pitch + (number - begin) % 2 * (across * down * channels);",
            *unrolled("int v = 0; v < width; ++v", ["found[(strip * width + v) * vectors + vector] = told[v];"]),
            "__syncthreads();",
            f"for (int own = threadIdx.x; own < channels; own += {self.shape.threads}) {{",
            *indented([
                "const idx c = first_c + own % vectors * width + own / vectors;",
                f"if (c >= {self.channels}) continue;",
                "float sum = 0.0f;",
                *unrolled("int beside = 0; beside < across * down; ++beside", [
                    "sum += found[beside * channels + own];"], MOST_AT_ONCE),
                f"{SUMS}[number * {self.channels} + c] = sum;",
            ]),
            "}",
        ]

    def _constants(self) -> list[str]:
        shape, (z, y, x) = self.shape, self.parts.axes
        return [
            f"constexpr int width = {shape.width}, vectors = {shape.vectors}, channels = vectors * width;",
            f"constexpr int tall = {shape.tall}, broad = {shape.broad}, across = {shape.across}, down = {shape.down};",
            f"constexpr int taps_y = {y.taps}, taps_x = {x.taps}, taps = {z.taps} * taps_y * taps_x;",
            f"constexpr int few = width < {PIECE} ? width : {PIECE}, pitch = {shape.pitch};",
            f"constexpr int rows = {y.span(shape.tall)}, columns = {x.span(shape.broad)};",
            "extern __shared__ __align__(16) unsigned char of_dynamic[];",
            "float* const weights = reinterpret_cast<float*>(of_dynamic);",
            "const idx first_c = (idx)blockIdx.y * channels;",
        ]

    # ---- Weights. ----

    def _weights(self) -> list[str]:
        """Lines that bring the weights of the block's channels, each tap's side by side, those of wide vectors in
        pieces: neighbouring threads read each piece from neighbouring places.  A group of threads brings some taps of
        some channels after the other, so that what is computed of a tap is so once."""
        writer, shape = self._writer(self.parts.lanes(1)), self.shape
        value, channels = writer.scalar(self.parts.weight), self.parts.channels.value
        taps = min(TAPS_SIDE, shape.threads)
        side = min(CHANNELS_SIDE, shape.threads // taps)
        groups = shape.threads // (taps * side)
        layers = "ty = tap / taps_x" if self.parts.axes[0].taps == 1 else (
            "ty = tap / taps_x % taps_y, tz = tap / (taps_x * taps_y)")
        turns = -(-shape.channels // (side * groups))
        allowed = "".join([
            f"group < {groups} && " if groups * taps * side < shape.threads else "",
            "own < channels && " if turns * groups * side > shape.channels else "",
            "" if channels is not None and channels % shape.channels == 0 else f"c < {self.channels} && "])
        return [
            f"const int group = threadIdx.x / {taps * side};",
            *unrolled(f"int turn = 0; turn < {turns}; ++turn", [
                f"const int own = (turn * {groups} + group) * {side} + threadIdx.x / {taps} % {side};",
                "const int place = (own % width / few * vectors + own / width) * few + own % few;",
                "const idx c = first_c + own;",
                *unrolled(f"int first = 0; first < taps; first += {taps}", [
                    f"const int tap = first + threadIdx.x % {taps};",
                    f"if ({allowed}tap < taps) {{",
                    *indented([
                        "constexpr int v = 0, width = 1;",
                        f"const int tx = tap % taps_x, {layers};",
                        *writer.upto(Scope.VECTOR), *writer.lines[Scope.LANE],
                        f"weights[tap * pitch + place] = {value};",
                    ]),
                    "}",
                ]),
            ], TURNS if turns > TURNS else 0),
            "__syncthreads();",
        ]

    # ---- Sums. ----

    @property
    def early(self) -> bool:
        """Whether a block asks for its first row of pixels before it brings weights, so that they are on their way
        together: where windows have one layer.  All rows at once would hold more registers meanwhile."""
        return self.parts.axes[0].taps == 1 and self.shape.rows == 1

    def _z(self) -> list[str]:
        """Lines that say which layer of pixels is that of a tap, and whether the image has it."""
        axis = self.parts.axes[0]
        return [f"const idx z = oz * {axis.stride} + {self.starts[0]} + tz * {axis.dilation};",
                f"const bool layer = z >= 0 && z < {self.extents[0]};"]

    def _layer(self) -> tuple[list[str], list[str]]:
        """Lines before windows of one layer are summed up, which in a block's first turn bring weights, and that sum
        them up."""
        first, rest = self._one_ahead()
        return [
            "constexpr int tz = 0;",
            *self._z(),
            *([] if self.read is None else [f"{self._held}[columns];", "if (live && layer) {", *indented(first), "}"]),
            "if (number == begin) {", *indented(self._weights()), "}",
        ], ["float sums[tall][broad][width] = {};", "if (layer) {", *indented(rest), "}"]

    def _layers(self) -> list[str]:
        """Lines that sum up all layers of windows."""
        (first, rest), rows = (self._at_once(), "[rows]") if self.shape.rows > 1 else (self._one_ahead(), "")
        return [
            "float sums[tall][broad][width] = {};",
            "#pragma unroll 1",
            f"for (int tz = 0; tz < {self.parts.axes[0].taps}; ++tz) {{",
            *indented([*self._z(), "if (!layer) continue;",
                       *([] if self.read is None else [f"{self._held}{rows}[columns];", *first]), *rest]),
            "}",
        ]

    @property
    def _held(self) -> str:
        return f"of::Held<{self.element}, width> pixels"

    @property
    def _head(self) -> str:
        """Of a loop over the rows of pixels below a strip; where it has one row of windows, those that windows have."""
        return f"int row = 0; row < rows; row += {self._step}"

    @property
    def _step(self) -> int:
        return self.parts.axes[1].dilation if self.shape.tall == 1 else 1

    def _at_once(self) -> tuple[list[str], list[str]]:
        """Lines that ask for all pixels of a layer, and that sum it up."""
        there = f"{self._there} && "
        first = [] if self.read is None else unrolled(
            self._head, [self._y("row"), *self._bring("pixels[row]", there)])
        line = ["float line[columns][width];", *self._line("pixels[row]", there)]
        return first, unrolled(self._head, [self._y("row"), *line, *self._products()])

    def _one_ahead(self) -> tuple[list[str], list[str]]:
        """Lines that ask for the first row of a layer's pixels, and that sum it up row by row, but for those that the
        image has not."""
        bring = [] if self.read is None else ["{", *indented(self._bring("pixels", "")), "}"]
        first = ["{", *indented([self._y("0"), f"if ({self._there})", *bring]), "}"]
        ahead = [] if self.read is None else [
            "{", *indented([
                self._y(f"row + {self._step}"), f"if (row + {self._step} < rows && {self._there})", *bring]), "}"]
        rest = [
            "#pragma unroll 1",
            f"for ({self._head}) {{",
            *indented([
                self._y("row"),
                "float line[columns][width];",
                f"if ({self._there}) {{", *indented(self._line("pixels", "")), "}",
                *ahead,
                f"if (!({self._there})) continue;",
                *self._products(),
            ]),
            "}",
        ]
        return first, rest

    def _y(self, row: str) -> str:
        """A line that says where a row of pixels is."""
        return f"const idx y = first_y * {self.parts.axes[1].stride} + {self.starts[1]} + {row};"

    @property
    def _there(self) -> str:
        """Whether the image has that row."""
        return f"y >= 0 && y < {self.extents[1]}"

    def _x(self) -> str:
        """A line that says where a column of pixels is."""
        return f"const idx x = first_x * {self.parts.axes[2].stride} + {self.starts[2]} + column;"

    @property
    def _beside(self) -> str:
        """Whether the image has that column; of columns in the middle that is known now, and where only the first and
        the last strip of a row reach beyond it, what strip it is says so for all others."""
        edges = self.edges
        left = "first_x > 0" if edges.first_alone else "x >= 0"
        right = f"x < {self.extents[2]}" if edges.last is None else f"first_x < {edges.last}"
        return f"(column >= {edges.begin} || {left}) && (column < {edges.end} || {right})"

    def _bring(self, to: str, there: str) -> list[str]:
        """Lines that ask for the pixels of a row, where ``there`` says so; zeros beside the image."""
        assert self.read is not None
        writer = self._writer(self.lanes)
        address = writer.address(self.read)
        return unrolled("int column = 0; column < columns; ++column", [
            self._x(),
            f"{to}[column] = {{}};",
            f"if ({there}{self._beside}) {{",
            *indented([*writer.upto(Scope.VECTOR), f"{to}[column] = of::hold<{self.element}, width>({address});"]),
            "}",
        ])

    def _line(self, pixels: str, there: str) -> list[str]:
        """Lines that compute the pixels of a row of what was brought, or of what they read; zeros beside the image, and
        where there is no such row."""
        brought = f"const of::Vector<float, width> found = of::floats<{self.element}, width>({pixels}[column]);"
        if self.read is not None and self.read is self.parts.image:
            return unrolled("int column = 0; column < columns; ++column", [
                brought, *unrolled("int v = 0; v < width; ++v", ["line[column][v] = found.at[v];"])])
        writer = self._writer(self.lanes, lambda scalar: (
            "found.at[v]" if self.read is not None and scalar is self.read else None))
        value = writer.scalar(self.parts.image)
        inner = writer.lines[Scope.LANE]
        return unrolled("int column = 0; column < columns; ++column", [
            self._x(),
            *unrolled("int v = 0; v < width; ++v", ["line[column][v] = 0.0f;"]),
            f"if ({there}{self._beside}) {{",
            *indented([*([] if self.read is None else [brought]), *writer.upto(Scope.VECTOR),
                       *unrolled("int v = 0; v < width; ++v", [*inner, f"line[column][v] = {value};"])]),
            "}",
        ])

    def _products(self) -> list[str]:
        """Lines that add a row's products to all sums of the strip."""
        _, y, x = self.parts.axes
        return unrolled("int own = 0; own < tall; ++own", [
            f"const int offset = row - own * {y.stride}, ty = offset / {y.dilation};",
            f"if (offset < 0 || offset % {y.dilation} != 0 || ty >= taps_y) continue;",
            "const float* const from = weights + (tz * taps_y + ty) * taps_x * pitch + vector * few;",
            *unrolled("int tx = 0; tx < taps_x; ++tx", unrolled("int piece = 0; piece < width; piece += few", [
                "const auto weight = of::load<few>(from + tx * pitch + piece * vectors);",
                *unrolled("int place = 0; place < broad; ++place", unrolled("int v = 0; v < few; ++v", [
                    f"sums[own][place][piece + v] += line[place * {x.stride} + tx * {x.dilation}][piece + v] * "
                    "weight.at[v];",
                ])),
            ])),
        ])

    def _stored(self) -> list[str]:
        """Lines that compute results of the sums, and store vectors of them."""
        parts = self.parts
        writer = self._writer(self.lanes, lambda scalar: (
            "sums[own][place][v]" if isinstance(scalar, Contracted) else None))
        stores = [
            Store(number, output.dtype, result, pointer(f"o{number}", writer.index(place)))
            for number, (output, result, place) in enumerate(zip(
                parts.lowered.program.outputs, parts.results, parts.places, strict=True))]
        _, height, width = self.counts
        return unrolled("int own = 0; own < tall; ++own", unrolled("int place = 0; place < broad; ++place", [
            "const idx oy = first_y + own, ox = first_x + place;",
            f"if (oy < {height} && ox < {width}) {{",
            *indented([*vector_lines(writer, stores, packed_as_it_is), *self._told()]), "}",
        ]))

    def _told(self) -> list[str]:
        """Lines that add up what was stored of the first result."""
        kind = TYPES[self.parts.lowered.program.outputs[0].dtype]
        stored = "y0[v]" if kind.size == 4 else f"of::round_to<{kind.storage}>(y0[v])"
        return unrolled("int v = 0; v < width; ++v", [f"told[v] += {stored};"]) if self.shape.sums else []
