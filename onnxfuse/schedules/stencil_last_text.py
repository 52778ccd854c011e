"""The text of a kernel of images with channels last: strips of windows, vectors of channels."""

from __future__ import annotations

from collections.abc import Mapping

from onnxfuse.lowering.pull import Contracted
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.pointwise import Store, vector_lines
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.stencil_last_shape import StencilLastParts, StencilLastShape
from onnxfuse.schedules.text import Sizes, Writer, indented, pointer, unrolled

UNROLLED = 25
"""Weights of a layer up to which a loop over its rows is unrolled."""


class StripsText:
    """Writes the body of a kernel's function."""

    def __init__(
        self, parts: StencilLastParts, lanes: Lanes, shape: StencilLastShape, sizes: Mapping[str, str]
    ) -> None:
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
            "sums[own][place][v]" if isinstance(scalar, Contracted) else None))

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
            f"const idx below = ({height} + tall * down - 1) / (tall * down);",
            f"for (idx number = (idx)blockIdx.x; number < beyond * below * {depth} * {self.images}; "
            "number += (idx)gridDim.x) {",
            *indented([
                "const idx first_x = (number % beyond * across + strip % across) * broad;",
                "const idx first_y = (number / beyond % below * down + strip / across) * tall;",
                f"const idx oz = number / beyond / below % {depth}, image = number / beyond / below / {depth};",
                f"if (c >= {self.channels} || first_x >= {width} || first_y >= {height}) continue;",
                "float sums[tall][broad][width] = {};",
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
            f"constexpr int tall = {shape.tall}, broad = {shape.broad}, across = {shape.across}, down = {shape.down};",
            f"constexpr int taps_y = {y.taps}, taps_x = {x.taps}, taps = {z.taps} * taps_y * taps_x;",
            "extern __shared__ __align__(16) unsigned char of_dynamic[];",
            "float* const weights = reinterpret_cast<float*>(of_dynamic);",
            "const idx first_c = (idx)blockIdx.y * channels;",
        ]

    def _weights(self) -> list[str]:
        """Lines that bring the weights of the block's channels, each tap's side by side."""
        writer = self._writer(self.parts.lanes(1))
        value = writer.scalar(self.parts.weight)
        return [
            f"for (int item = threadIdx.x; item < taps * channels; item += {self.shape.threads}) {{",
            *indented([
                "constexpr int v = 0, width = 1;",
                "const idx c = first_c + item % channels;",
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
        """Lines that sum up a layer, one row of pixels after the other, each read once for all results of the strip."""
        _, y, x = self.parts.axes
        shape = self.shape
        alone = shape.tall == 1
        by = 0 if not alone or y.taps * x.taps <= UNROLLED else 1
        return unrolled(
            f"int row = 0; row < {y.span(shape.tall)}; row += {y.dilation if alone else 1}", [
                f"const idx y = first_y * {y.stride} + {self.starts[1]} + row;",
                f"if (y < 0 || y >= {self.extents[1]}) continue;",
                f"float line[{x.span(shape.broad)}][width];",
                *self._line(),
                *unrolled("int own = 0; own < tall; ++own", [
                    f"const int offset = row - own * {y.stride}, ty = offset / {y.dilation};",
                    f"if (offset < 0 || offset % {y.dilation} != 0 || ty >= taps_y) continue;",
                    *unrolled("int tx = 0; tx < taps_x; ++tx", [
                        "const auto weight = of::load<width>("
                        "weights + ((tz * taps_y + ty) * taps_x + tx) * channels + part);",
                        *unrolled("int place = 0; place < broad; ++place", unrolled("int v = 0; v < width; ++v", [
                            f"sums[own][place][v] += line[place * {x.stride} + tx * {x.dilation}][v] * weight.at[v];",
                        ])),
                    ]),
                ]),
            ], by)

    def _line(self) -> list[str]:
        """Lines that read the pixels below a row of windows, zeros beside the image."""
        x, writer = self.parts.axes[2], self._writer(self.lanes)
        value = writer.scalar(self.parts.image)
        inner = writer.lines[Scope.LANE]
        return unrolled(f"int column = 0; column < {x.span(self.shape.broad)}; ++column", [
            f"const idx x = first_x * {x.stride} + {self.starts[2]} + column;",
            *unrolled("int v = 0; v < width; ++v", ["line[column][v] = 0.0f;"]),
            f"if (x >= 0 && x < {self.extents[2]}) {{",
            *indented([*writer.upto(Scope.VECTOR),
                       *unrolled("int v = 0; v < width; ++v", [*inner, f"line[column][v] = {value};"])]),
            "}",
        ])

    def _stored(self) -> list[str]:
        """Lines that compute results of the sums, and store vectors of them."""
        writer, parts = self._writer(self.lanes), self.parts
        stores = [
            Store(number, output.dtype, result, pointer(f"o{number}", writer.index(place)))
            for number, (output, result, place) in enumerate(zip(
                parts.lowered.program.outputs, parts.results, parts.places, strict=True))]
        _, height, width = self.counts
        return unrolled("int own = 0; own < tall; ++own", unrolled("int place = 0; place < broad; ++place", [
            "const idx oy = first_y + own, ox = first_x + place;",
            f"if (oy < {height} && ox < {width}) {{", *indented(vector_lines(writer, stores)), "}",
        ]))
