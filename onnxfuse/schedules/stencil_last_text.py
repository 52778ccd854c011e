"""The text of a kernel of images with channels last: strips of windows, vectors of channels.

A thread asks for the pixels of the next row while it multiplies those of the one at hand: rows are a loop, so that
registers are enough for several blocks beside one another.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.pull import Contracted, Load
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.pointwise import Store, vector_lines
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.stencil_last_shape import Parts, Shape
from onnxfuse.schedules.text import Sizes, Writer, indented, pointer, unrolled


class StripsText:
    """Writes the body of a kernel's function."""

    def __init__(self, parts: Parts, lanes: Lanes, shape: Shape, sizes: Mapping[str, str]) -> None:
        """``lanes``: of vectors of ``shape.width`` channels."""
        self.parts, self.lanes, self.shape = parts, lanes, shape
        self.sizes = Sizes(sizes)
        size = self._writer(lanes).size
        self.images, self.channels = size(parts.images), size(parts.channels)
        self.extents = [size(axis.extent) for axis in parts.axes]
        self.counts = [size(axis.count) for axis in parts.axes]
        self.starts = [size(axis.start) for axis in parts.axes]

    def _writer(self, lanes: Lanes) -> Writer:
        return Writer(lanes, self.sizes, lambda scalar: (
            "sums[place][v]" if isinstance(scalar, Contracted) else None))

    def text(self) -> Body:
        """All of it."""
        depth, height, width = self.counts
        lines = [
            *self._constants(),
            *self._weights(),
            "__syncthreads();",
            "const int part = threadIdx.x % vectors * width, strip = threadIdx.x / vectors;",
            "const idx c = first_c + part;",
            f"const idx beyond = ({width} + broad * across - 1) / (broad * across);",
            f"const idx below = ({height} + down - 1) / down;",
            f"for (idx number = (idx)blockIdx.x; number < beyond * below * {depth} * {self.images}; "
            "number += (idx)gridDim.x) {",
            *indented([
                "const idx first_x = (number % beyond * across + strip % across) * broad;",
                "const idx oy = number / beyond % below * down + strip / across;",
                f"const idx oz = number / beyond / below % {depth}, image = number / beyond / below / {depth};",
                f"if (c >= {self.channels} || first_x >= {width} || oy >= {height}) continue;",
                "float sums[broad][width] = {};",
                *self._layers(),
                *self._stored(),
            ]),
            "}",
        ]
        return Body("\n".join(indented(lines)) + "\n", frozenset(self.sizes.used))

    def _constants(self) -> list[str]:
        shape, (z, y, x) = self.shape, self.parts.axes
        return [
            f"constexpr int width = {shape.width}, vectors = {shape.vectors}, channels = vectors * width;",
            f"constexpr int broad = {shape.broad}, across = {shape.across}, down = {shape.down};",
            f"constexpr int taps_y = {y.taps}, taps_x = {x.taps}, taps = {z.taps} * taps_y * taps_x;",
            "extern __shared__ __align__(16) unsigned char of_dynamic[];",
            "float* const weights = reinterpret_cast<float*>(of_dynamic);",
            "// Weights of four channels lie side by side, behind those of the next vector's: in different banks.",
            "constexpr int pieces = width > 4 ? width / 4 : 1;",
            "const idx first_c = (idx)blockIdx.y * channels;",
        ]

    def _weights(self) -> list[str]:
        """Lines that bring the weights of the block's channels, each tap's side by side."""
        writer = self._writer(self.parts.lanes(1))
        value = writer.scalar(self.parts.weight)
        return [
            f"for (int item = threadIdx.x; item < taps * channels; item += {self.shape.threads}) {{",
            *indented([
                "constexpr int own = channels / pieces, few = width / pieces;",
                "const int piece = item % channels / own, place = item % own;",
                "const idx c = first_c + place / few * width + piece * few + place % few;",
                "constexpr int v = 0, width = 1;",
                "const int tap = item / channels, tx = tap % taps_x, ty = tap / taps_x % taps_y;",
                "const int tz = tap / (taps_x * taps_y);",
                "float weight = 0.0f;",
                f"if (c < {self.channels}) {{",
                *indented([*writer.upto(Scope.VECTOR), *writer.lines[Scope.LANE], f"weight = {value};"]), "}",
                "weights[item] = weight;",
            ]),
            "}",
        ]

    def _layers(self) -> list[str]:
        """Lines that sum up all layers of windows."""
        axis = self.parts.axes[0]
        return [
            "#pragma unroll 1",
            f"for (int tz = 0; tz < {axis.taps}; ++tz) {{",
            *indented([
                f"const idx z = oz * {axis.stride} + {self.starts[0]} + tz * {axis.dilation};",
                f"if (z < 0 || z >= {self.extents[0]}) continue;",
                *self._rows(),
            ]),
            "}",
        ]

    def _rows(self) -> list[str]:
        """Lines that sum up a layer: each pixel is read once for all results of the strip that it is for."""
        _, y, x = self.parts.axes
        pixels = f"of::Vector<{self.element}, width> pixels[{x.span(self.shape.broad)}];"
        column = f"int column = 0; column < {x.span(self.shape.broad)}; ++column"
        return [
            pixels,
            "const auto bring = [&](int ty) {",
            *indented([
                f"const idx y = oy * {y.stride} + {self.starts[1]} + ty * {y.dilation};",
                f"const bool there = y >= 0 && y < {self.extents[1]};",
                *unrolled(column, self._pixel()),
            ]),
            "};",
            "bring(0);",
            "#pragma unroll 1",
            "for (int ty = 0; ty < taps_y; ++ty) {",
            *indented([
                "float row[taps_x][width];",
                *unrolled("int tx = 0; tx < taps_x; ++tx", self._weight()),
                f"float line[{x.span(self.shape.broad)}][width];",
                *unrolled(column, unrolled("int v = 0; v < width; ++v", [
                    "line[column][v] = of::value(pixels[column].at[v]);"])),
                "if (ty + 1 < taps_y) bring(ty + 1);",
                *unrolled(column, unrolled("int tx = 0; tx < taps_x; ++tx", [
                    f"const int ahead = column - tx * {x.dilation}, place = ahead / {x.stride};",
                    f"if (ahead < 0 || ahead % {x.stride} != 0 || place >= broad) continue;",
                    *unrolled("int v = 0; v < width; ++v", ["sums[place][v] += line[column][v] * row[tx][v];"]),
                ])),
            ]),
            "}",
        ]

    def _weight(self) -> list[str]:
        """Lines that read the weights of a tap."""
        return unrolled("int piece = 0; piece < pieces; ++piece", [
            "const auto four = of::load<width / pieces>(weights + ((tz * taps_y + ty) * taps_x + tx) * channels + "
            "piece * (channels / pieces) + part / pieces);",
            *unrolled("int v = 0; v < width / pieces; ++v", ["row[tx][piece * (width / pieces) + v] = four.at[v];"]),
        ])

    @property
    def copied(self) -> Load | None:
        """What pixels are, where they are read as they lie in memory."""
        image = self.parts.image
        return image if isinstance(image, Load) and not image.conditions else None

    @property
    def element(self) -> str:
        """The type of a pixel's channels in registers."""
        return TYPES[self.parts.image.dtype].storage if self.copied else "float"

    def _pixel(self) -> list[str]:
        """Lines that read a pixel, zeros beside the image; without a branch where it is read as it lies."""
        x, writer = self.parts.axes[2], self._writer(self.lanes)
        begin = [f"const idx x = first_x * {x.stride} + {self.starts[2]} + column;", "pixels[column] = {};"]
        inside = f"there && x >= 0 && x < {self.extents[2]}"
        if self.copied is not None:
            address = writer.address(self.copied)
            return [*begin, *writer.upto(Scope.VECTOR),
                    f"if ({inside}) pixels[column] = of::load<width>({address});"]
        value = writer.scalar(self.parts.image)
        each = unrolled("int v = 0; v < width; ++v", [*writer.lines[Scope.LANE], f"pixels[column].at[v] = {value};"])
        return [*begin, f"if ({inside}) {{", *indented([*writer.upto(Scope.VECTOR), *each]), "}"]

    def _stored(self) -> list[str]:
        """Lines that compute results of the sums, and store vectors of them."""
        writer, parts = self._writer(self.lanes), self.parts
        stores = [
            Store(number, output.dtype, result, pointer(f"o{number}", writer.index(place)))
            for number, (output, result, place) in enumerate(zip(
                parts.lowered.program.outputs, parts.results, parts.places, strict=True))]
        return unrolled("int place = 0; place < broad; ++place", [
            "const idx ox = first_x + place;",
            f"if (ox < {self.counts[2]}) {{", *indented(vector_lines(writer, stores)), "}",
        ])
