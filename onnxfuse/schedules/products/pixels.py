"""Convolutions whose pixels are some vectors of channels: a block has the piece of the image that its windows see in
shared memory, as where an image has three (``patch``).

Boxes of tensor maps (``boxes``) bring each place of the windows by itself, nine times the image for windows of
3 x 3, line by line, of which short ones take as long as others.  Here the image comes once, with what overlaps of
neighbouring tiles, while the tile before is multiplied; weights of all places stay in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from onnxfuse.graph.dims import Dim
from onnxfuse.schedules.attentions.shape import ALL_SHARED, BLOCK_BYTES
from onnxfuse.schedules.operand_text import computed, copied, packed
from onnxfuse.schedules.products.patch import (
    BROAD,
    ROWS,
    WARPS,
    WIDE,
    Patch,
    PatchShape,
    PatchText,
    busiest,
    depth_of,
)
from onnxfuse.schedules.reductions.streaming import MOST_SHARED
from onnxfuse.schedules.text import indented

MOST_BESIDE = 4
"""Blocks of a multiprocessor that are worth having: 16 warps."""

VECTOR_BYTES = 16
"""Of channels that come at once."""

TRIED = 2
"""Numbers of columns of a tile that are worth a measurement."""

BROUGHT, SUMMED = {2: 5.0e-11, 4: 7.5e-11}, {2: 4.1e-11, 4: 6.0e-11}
"""By the bytes of an element, seconds of a tile for each byte of its piece, which of float32 is rounded too, and for
each column of each byte of its windows (H100: 16 ways of 13 convolutions of float16 took 0.85 to 1.2 times as long as
is predicted so, ten of float32 0.75 to 1.25)."""

WEIGHED = 5.0e-11
"""Seconds for each byte of weights, before the first tile."""

AT_ONCE = 4
"""Vectors of a line that a thread asks for at once."""


@dataclass(frozen=True)
class PixelShape(PatchShape):
    """A block that has so many ``stages`` of pieces, of ``patch`` elements each."""

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return f"{super().name}_pixels{self.stages}"

    @property
    def shared(self) -> int:
        """Bytes of shared memory: weights, the pieces, each warp's sums of 16 windows, offsets of vectors."""
        pieces, offsets = self.size * self.stages * self.patch, 4 * self.size * self.depth // VECTOR_BYTES
        return self.weighed + pieces + 4 * WARPS * self.laid + offsets

    @property
    def seconds(self) -> float:
        """See ``PatchShape``."""
        return self.size * (BROUGHT[self.size] * self.brought + SUMMED[self.size] * self.columns * self.depth)

    @property
    def begins(self) -> float:
        """See ``PatchShape``: by vectors."""
        return self.size * WEIGHED * self.columns * self.depth

    @property
    def beside(self) -> int:
        """Blocks that a multiprocessor is to hold at least."""
        most = MOST_BESIDE if self.columns <= 64 else 2  # of so many registers
        return max(1, min(most, ALL_SHARED // (self.shared + BLOCK_BYTES)))


def pixel_of(channels: int, size: int) -> int:
    """Elements from one pixel to the next in shared memory: an odd number of vectors, so that neighbours' lie in
    different banks."""
    vector = VECTOR_BYTES // size
    return (channels // vector | 1) * vector


def pixel_shapes_of(patch: Patch, planned: Callable[[Dim], int]) -> list[PixelShape]:
    """Tiles that may be quickest at the planned sizes, those first that are expected to take least; of a tile's ways
    that of which a multiprocessor holds the most pieces."""
    windows, columns = patch.windows, planned(patch.parts.columns)
    channels, size = windows.channels, patch.parts.size
    found = []
    for broad in sorted(BROAD, key=lambda broad: (-(-columns // broad), broad))[:TRIED]:
        for wide in WIDE:
            places = windows.y.span(ROWS // wide) * windows.x.span(wide)
            ways = (PixelShape(
                ROWS, broad, stages, wide=wide, patch=pixel_of(channels, size) * places, brought=channels * places,
                depth=depth_of(patch), first=patch.first, size=size) for stages in (2, 1))
            fitting = [way for way in ways if way.shared <= MOST_SHARED]
            found += sorted(fitting, key=lambda way: -way.beside * way.stages)[:1]
    return sorted(found, key=lambda shape: busiest(patch, shape, planned))


class PixelText(PatchText):
    """Writes the body of a kernel."""

    def __init__(self, patch: Patch, shape: PatchShape, sizes: Mapping[str, str]) -> None:
        super().__init__(patch, shape, sizes)
        assert patch.pixel is not None and patch.weights is not None
        self.pixel, self.weights = patch.pixel, patch.weights

    def _pieces(self) -> list[str]:
        return [
            f"constexpr int pixel = {pixel_of(self.windows.channels, self.tile.size)};",
            "constexpr int all_of_piece = lines * line * pixel;",
            f"T* const staged = weights + {self.tile.weighed // self.tile.size};",
            f"float* const laid = reinterpret_cast<float*>(staged + {self.tile.stages} * all_of_piece);",
        ]

    def _weights(self) -> list[str]:
        """Fill the weights of the block's columns by vectors, where they lie so, zeros behind a window's elements."""
        if self.weights.width == 1 or self.weights.across:
            return super()._weights()
        writer = self._writer(self.weights.lanes)
        inside = f"n < {self.extents['n']} && k < {self.windows.depth}"
        return [
            f"#pragma unroll {AT_ONCE}",
            f"for (int item = threadIdx.x; item < columns * (depth / {self.weights.width}); item += threads) {{",
            *indented([
                f"constexpr int width = {self.weights.width};",
                "const int column = item / (depth / width), of_k = item % (depth / width) * width;",
                "const idx k = of_k, n = first_n + column;",
                "T* const to = weights + column * pitch + of_k;",
                "of::Vector<T, width> vector = {};",
                f"if ({inside}) {{", *indented(packed(writer, self.weights.scalar)), "}",
                f"of::store(to, {'of::rounded_tf32(vector)' if self.parts.rounds else 'vector'});",
            ]),
            "}",
        ]

    def _offsets(self) -> list[str]:
        """Fill the table of how far vectors of a window lie behind its first."""
        windows, terms, step = self.windows, ["k % channels"], self.windows.channels
        sizes = {"y": windows.y.taps, "x": windows.x.taps}
        apart = {"y": f"{windows.y.dilation} * line", "x": f"{windows.x.dilation}"}
        for name in reversed(windows.order[:-1]):
            terms.append(f"k / {step} % {sizes[name]} * ({apart[name]} * pixel)")
            step *= sizes[name]
        wide = self.pixel.width
        return [f"for (int k = threadIdx.x * {wide}; k < depth; k += threads * {wide}) "
                f"offsets[k / {wide}] = {' + '.join(terms)};"]

    def _loop(self) -> list[str]:
        y, x, stages = self.windows.y, self.windows.x, self.tile.stages
        later = "number + (idx)gridDim.x" if stages > 1 else "number"
        return [
            "const auto bring = [&](idx number, T* to_piece) {",
            *indented([*self._tile("number"), *self._filled_patch()]), "};",
            *(("if ((idx)blockIdx.x < tiles) bring(blockIdx.x, staged);", "of::copies_asked();", "int turn = 0;")
              if stages > 1 else ()),
            "for (idx number = (idx)blockIdx.x; number < tiles; number += (idx)gridDim.x) {",
            *indented([
                "// Everybody is done with the piece that is filled next, and weights and offsets are there.",
                "__syncthreads();",
                *((f"if ({later} < tiles) bring({later}, staged + (1 - turn) * all_of_piece);",) if stages > 1 else (
                    "bring(number, staged);",)),
                "of::copies_asked();",
                f"of::copies_here<{stages - 1}>();",
                f"T* const patch = staged{' + turn * all_of_piece' if stages > 1 else ''};",
                *(self._rounded() if self.parts.rounds else ()),
                "__syncthreads();",
                "float sums[2][columns / 8][4] = {};",
                f"of::multiply_pixels<T, wide, {y.stride}, {x.stride}, line, pixel, {self.windows.depth}, pitch>("
                "sums, patch, offsets, weights, warp * 32);",
                *self._tile("number"),
                *self._stored(),
                *(("turn = 1 - turn;",) if stages > 1 else ()),
            ]),
            "}",
        ]

    def _filled_patch(self) -> list[str]:
        """Fill a piece of the image, zeros around it."""
        windows, writer, side = self.windows, self._writer(self.pixel.lanes), self.pixel
        y, x, size = windows.y, windows.x, writer.size
        inside = f"inside && x >= 0 && x < {size(x.extent)}"
        return self._over_piece("to_piece", [
            f"const idx y = first_y * {y.stride} + {size(y.start)} + py;",
            f"const bool inside = y >= 0 && y < {size(y.extent)};",
        ], [
            f"const idx c = of_c, x = first_x * {x.stride} + {size(x.start)} + px;",
            *(copied if side.copied else computed)(writer, side.scalar, inside),
        ])

    def _rounded(self) -> list[str]:
        """Round a piece that is here, each thread the vectors that it brought."""
        return self._over_piece("patch", [], ["of::store(to, of::rounded_tf32(of::load<width>(to)));"])

    def _over_piece(self, piece: str, line: Sequence[str], vector: Sequence[str]) -> list[str]:
        """Go over a piece of the image, a warp line after line, its lanes neighbouring vectors ``to``."""
        width = self.pixel.width
        vectors = f"(channels / {width})"
        return [
            "#pragma unroll 2",
            f"for (int py = warp; py < lines; py += {WARPS}) {{",
            *indented([
                *line,
                f"#pragma unroll {AT_ONCE}",
                f"for (int item = lane; item < line * {vectors}; item += 32) {{",
                *indented([
                    f"constexpr int width = {width};",
                    f"const int px = item / {vectors}, of_c = item % {vectors} * width;",
                    f"T* const to = {piece} + (py * line + px) * pixel + of_c;",
                    *vector,
                ]),
                "}",
            ]),
            "}",
        ]
