"""Convolutions of few channels: a block has the piece of the image that its windows see in shared memory.

Where an image has three channels, no vector of them is to be had, and element by element each window's would be asked
for as often as windows overlap, with where it lies worked out anew.  So a block brings the piece of the image below its
windows once, and its warps read the left operand of their products there, by a table of how far each element of a
window lies behind its first.  Weights stay for all tiles that a block goes through.  Results are stored by vectors of
channels, or of neighbouring windows where channels come first.  Pixels that are vectors of channels have a text of
their own (``pixels``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from onnxfuse.graph.dims import Dim
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.tensors import Contract
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.kernel import HOPPER_HAS, Pace
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.products.epilogue import Held
from onnxfuse.schedules.products.parts import (
    ProductParts,
    Side,
    other_way,
    result_lanes,
    side_along,
    side_guards,
    side_of,
    single,
)
from onnxfuse.schedules.products.shape import FLOATS, ProductShape
from onnxfuse.schedules.products.text import ProductText
from onnxfuse.schedules.products.windows import Windows, has_windows, windows_of
from onnxfuse.schedules.reductions.streaming import MOST_SHARED
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.text import indented, unrolled

ROWS, WARPS = 128, 4
"""Windows of a tile, 32 for each warp."""

MOST_WINDOW, MOST_PIXELS = 1024, 1792
"""Bytes of a window, at most, whose elements come one by one or in vectors: weights of all of them are in shared
memory."""

MOST_PATCH = 24 * 1024
"""Bytes of the piece of an image, at most."""

WIDE, BROAD = (16, 32), (16, 32, 64, 128)
"""Windows of a tile side by side, and its columns."""

TILE, BROUGHT = 0.2e-6, 1.0e-10
"""Seconds of a tile in any case, and for each element that lanes bring."""

STORED, SUMMED = {2: 1.1e-8, 4: 1.5e-8}, {2: 0.6e-10, 4: 0.9e-10}
"""By the bytes of an element, seconds of a tile for each column and, of that, for each byte of its windows (H100: 14
ways of eight convolutions of float16 took 0.85 to 1.15 times as long as is predicted so, 12 of float32 0.9 to 1.15)."""

WEIGHTS_AT_ONCE, WAITED = 8, 0.33e-6
"""Weights that a thread asks for at once, and seconds until these are there."""

AT_ONCE, LESS_AT_ONCE, MOST_AT_ONCE = 4, 2, 12
"""Lines of the piece that a warp asks for at once, and where results have their channels first, which takes registers;
and of lines and of weights where blocks have one tile each, which is all that takes time (H200: a U-Net's first
convolution 3.8 us for 4.3, stems of large images 1.0 to 1.17 times as long)."""

STEP_BYTES, STRIPE_BYTES = 32, 16
"""Of a window, what is multiplied at once; by which a row of weights is longer than it is, so that rows lie in
different banks."""

LINE = 16 + 4
"""Numbers from one channel's sums of 16 windows in shared memory to the next one's, which lie in other banks."""


@dataclass(frozen=True)
class Patch:
    """A convolution of few channels.

    Attributes:
        parts: the product with windows as rows, channels of the result as columns; windows: these.
        results: lanes of the results' vectors; guards: under which these and the pixels' are so.
        pixel, weights: how these are read where pixels are vectors of channels; None where all goes one by one.
    """

    parts: ProductParts
    windows: Windows
    results: Lanes
    guards: tuple[str, ...]
    pixel: Side | None = None
    weights: Side | None = None

    @property
    def first(self) -> bool:
        """Whether results have their channels before the places of windows: vectors are of neighbouring windows."""
        return self.results.element == "@m"


@dataclass(frozen=True)
class PatchShape(ProductShape):
    """A block whose tile of 128 windows is ``wide`` of them broad, by so many columns, over a patch of so many
    elements, which lanes bring as so many, with a window's ``depth`` rounded up; ``first``: whether results have their
    channels first; ``size``: bytes of an element; ``lone``: whether blocks have one tile each."""

    wide: int = 16
    patch: int = 0
    brought: int = 0
    depth: int = 0
    first: bool = False
    size: int = 2
    lone: bool = False

    @property
    def name(self) -> str:
        """Name of the kernel."""
        lone = "_lone" if self.lone else ""
        return f"product_patch_{self.rows // self.wide}x{self.wide}x{self.columns}{lone}"

    @property
    def weights_at_once(self) -> int:
        """Weights that a thread asks for at once."""
        return MOST_AT_ONCE if self.lone else WEIGHTS_AT_ONCE

    @property
    def lines_at_once(self) -> int:
        """Lines of the piece that a warp asks for at once."""
        return LESS_AT_ONCE if self.first else MOST_AT_ONCE if self.lone else AT_ONCE

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of(
            "product", rows=self.rows, columns=self.columns, stages=self.stages, group=1, wide=self.wide)

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return WARPS

    @property
    def laid(self) -> int:
        """Numbers of a warp's sums of 16 windows in shared memory."""
        return self.columns * LINE if self.first else 16 * (self.columns + FLOATS)

    @property
    def shared(self) -> int:
        """Bytes of shared memory: weights, the patch, each warp's sums of 16 windows, offsets."""
        return self.weighed + _sixteenths(self.size * self.patch) + 4 * WARPS * self.laid + 4 * self.depth

    @property
    def weighed(self) -> int:
        """Bytes of the weights in shared memory."""
        return _sixteenths(self.columns * (self.size * self.depth + STRIPE_BYTES))

    @property
    def seconds(self) -> float:
        """Of one tile where all multiprocessors have some."""
        column = STORED[self.size] + SUMMED[self.size] * self.size * self.depth
        return TILE + BROUGHT * self.brought + self.columns * column

    @property
    def begins(self) -> float:
        """Seconds until all weights of a block are there."""
        return WAITED * -(-self.columns * self.depth // (32 * WARPS * self.weights_at_once))

    @property
    def beside(self) -> int:
        """Blocks that a multiprocessor is to hold at least."""
        return 4 if self.columns <= 64 else 2


def _sixteenths(size: int) -> int:
    return -(-size // 16) * 16


def patch_of(products: Sequence[Contract], parts: ProductParts, planned: Mapping[str, int]) -> Patch | None:
    """A product as a convolution of few channels, or of pixels in vectors; None where it is none."""
    if len(products) != 1 or not has_windows(products[0]):
        return None
    ways = (parts, other_way(parts, products))
    return next((found for each in ways if each is not None and (found := _patch(products[0], each, planned))), None)


def _patch(contract: Contract, parts: ProductParts, planned: Mapping[str, int]) -> Patch | None:
    """The same with the left operand's rows as windows."""
    loop = next((loop for loop in ("@n", "@m") if parts.neighbours(loop)), None)
    windows = None if loop is None else windows_of(contract, parts)
    # A piece of an image is lines of it, not planes.
    if windows is None or len(windows.axes) > 2 or not 0 < windows.depth * parts.size <= MOST_PIXELS:
        return None
    lanes, guards = result_lanes(parts, planned, None if loop == "@n" else windows.x.count)
    if side_of(parts, parts.left, "@m", planned).width == 1:
        return Patch(parts, windows, lanes, guards) if windows.depth * parts.size <= MOST_WINDOW else None
    pixel = side_along(parts, windows.image, "@c", parts.lanes("@c", parts.width), planned)
    if pixel is None or windows.order[-1] != "c":
        return None
    weights = side_of(parts, parts.rights[0], "@n", planned)
    needed = (guard for side in (pixel, weights) for guard in side_guards(parts, side))
    return Patch(parts, windows, lanes, tuple(dict.fromkeys((*guards, *needed))), pixel, weights)


def shapes_of(patch: Patch, planned: Callable[[Dim], int]) -> list[PatchShape]:
    """Tiles that may be quickest at the planned sizes, those first that are expected to take least."""
    windows, columns, size = patch.windows, planned(patch.parts.columns), patch.parts.size
    depth, least = depth_of(patch), BROAD[0] if columns <= BROAD[0] else BROAD[1]
    found = []
    for broad in BROAD:
        for wide in WIDE:
            lines, line = windows.y.span(ROWS // wide), windows.x.span(wide)
            strips, strip = (lines, line * windows.channels) if windows.last else (lines * windows.channels, line)
            shape = PatchShape(ROWS, broad, 1, wide=wide, patch=windows.channels * lines * line, depth=depth,
                               brought=strips * -(-strip // 32) * 32, first=patch.first, size=size)
            if (broad == least or least < broad < 2 * columns) and size * shape.patch <= MOST_PATCH:
                found.append(replace(shape, lone=_most_tiles(patch, shape, planned) <= shape.beside))
    return sorted((shape for shape in found if shape.shared <= MOST_SHARED), key=lambda shape: busiest(
        patch, shape, planned))


def depth_of(patch: Patch) -> int:
    """Elements of a window as they are multiplied."""
    step = STEP_BYTES // patch.parts.size
    return -(-patch.windows.depth // step) * step


def busiest(patch: Patch, shape: PatchShape, planned: Callable[[Dim], int]) -> float:
    """Seconds that the busiest multiprocessor's tiles take, and before them the weights."""
    return shape.begins + _most_tiles(patch, shape, planned) * shape.seconds


def _most_tiles(patch: Patch, shape: PatchShape, planned: Callable[[Dim], int]) -> int:
    """How many tiles the busiest multiprocessor has."""
    windows, high = patch.windows, shape.rows // shape.wide
    places = -(-planned(windows.y.count) // high) * -(-planned(windows.x.count) // shape.wide)
    tiles = planned(windows.images) * places * -(-planned(patch.parts.columns) // shape.columns)
    return -(-tiles // HOPPER_HAS)


def pace_of(patch: Patch, shape: PatchShape, at: Callable[[Dim], int | None]) -> Pace | None:
    """What a kernel's time follows from, where no size is left open: its tiles, and before them the weights."""
    windows = patch.windows
    sizes = {size: at(size) for size in (windows.images, windows.y.count, windows.x.count, patch.parts.columns)}
    known = {size: found for size, found in sizes.items() if found is not None}
    if len(known) < len(sizes):
        return None
    return Pace(_most_tiles(patch, shape, known.__getitem__), 1, 0, whole=busiest(patch, shape, known.__getitem__))


class PatchText(ProductText):
    """Writes the body of a kernel."""

    widest = 32  # more are more registers than a thread has

    def __init__(self, patch: Patch, shape: PatchShape, sizes: Mapping[str, str]) -> None:
        parts = patch.parts
        sides = [single(parts, parts.left, "@m"), single(parts, parts.rights[0], "@n")]
        super().__init__(parts, sides, patch.results, shape, sizes)
        self.patch, self.windows, self.tile = patch, patch.windows, shape
        # Two pieces of 16 windows of all results, in what a warp has to lay out sums.
        bytes_each = 2 * 16 * sum(kind.size for kind in self.kinds)
        while self.widest * bytes_each > 4 * shape.laid:
            self.widest //= 2

    def text(self) -> Body:
        """All of it."""
        y, x, size = self.windows.y, self.windows.x, self._writer(self.lanes).size
        lines = [
            *self._constants(), *self._weights(), *self._offsets(),
            f"const idx across = ({size(x.count)} + wide - 1) / wide, down = ({size(y.count)} + high - 1) / high;",
            f"const idx tiles = across * down * {size(self.windows.images)};",
            *self._loop(),
        ]
        return Body("\n".join(indented(lines)) + "\n", frozenset(self.sizes.used))

    def _loop(self) -> list[str]:
        """Go through the block's tiles."""
        y, x = self.windows.y, self.windows.x
        multiply = "multiply_patch_tf32<" if self.parts.rounds else "multiply_patch<T, "
        return [
            "for (idx number = (idx)blockIdx.x; number < tiles; number += (idx)gridDim.x) {",
            *indented([
                *self._tile("number"),
                "// Everybody is done with the piece before, and weights and offsets are there.",
                "__syncthreads();",
                *self._filled_patch(),
                "__syncthreads();",
                "float sums[2][columns / 8][4] = {};",
                f"of::{multiply}wide, {y.stride}, {x.stride}, line, {self.windows.depth}, pitch>("
                "sums, patch, offsets, weights, warp * 32);",
                *self._stored(),
            ]),
            "}",
        ]

    def _tile(self, number: str) -> list[str]:
        """Where the tile of a number begins."""
        return [
            f"const idx first_x = {number} % across * wide, first_y = {number} / across % down * high;",
            f"const idx image = {number} / across / down;",
        ]

    def _constants(self) -> list[str]:
        shape, windows = self.tile, self.windows
        high = shape.rows // shape.wide
        return [
            f"using T = {TYPES[self.parts.left.dtype].storage};",
            f"constexpr int wide = {shape.wide}, high = {high}, columns = {shape.columns}, threads = {32 * WARPS};",
            f"constexpr int depth = {shape.depth}, pitch = depth + {STRIPE_BYTES // shape.size};",
            f"constexpr int channels = {windows.channels};",
            f"constexpr int line = {windows.x.span(shape.wide)}, lines = {windows.y.span(high)};",
            f"constexpr int own_columns = columns, long_row = {LINE if self.patch.first else f'columns + {FLOATS}'};",
            "extern __shared__ __align__(16) unsigned char of_dynamic[];",
            "T* const weights = reinterpret_cast<T*>(of_dynamic);",
            *self._pieces(),
            f"int* const offsets = reinterpret_cast<int*>(laid + {WARPS * shape.laid});",
            "const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;",
            "const idx first_n = (idx)blockIdx.y * columns;",
        ]

    def _pieces(self) -> list[str]:
        """Where the piece of the image is, and what sums are laid out in behind it."""
        tile = self.tile
        return [
            f"T* const patch = weights + {tile.weighed // tile.size};",
            "float* const laid = reinterpret_cast<float*>(patch + "
            f"{_sixteenths(tile.size * tile.patch) // tile.size});",
        ]

    def _weights(self) -> list[str]:
        """Fill the weights of the block's columns, zeros behind a window's elements."""
        (side,) = self.rights
        writer = self._writer(side.lanes)
        value = writer.scalar(side.scalar)
        return [
            f"#pragma unroll {self.tile.weights_at_once}",
            "for (int item = threadIdx.x; item < columns * depth; item += threads) {",
            *indented([
                "constexpr int v = 0, width = 1;", "const idx k = item % depth, n = first_n + item / depth;",
                "float x[1] = {};",
                f"if (n < {self.extents['n']} && k < {self.windows.depth}) {{",
                *indented([*writer.upto(Scope.VECTOR), *writer.lines[Scope.LANE], f"x[v] = {value};"]), "}",
                f"of::store(weights + item / depth * pitch + item % depth, {self._packed('x')});",
            ]),
            "}",
        ]

    def _offsets(self) -> list[str]:
        """Fill the table of how far elements of a window lie behind its first."""
        windows, terms, step = self.windows, [], 1
        sizes = {"c": windows.channels, "y": windows.y.taps, "x": windows.x.taps}
        apart = {"c": "lines * line", "y": f"{windows.y.dilation} * line", "x": f"{windows.x.dilation}"}
        for name in reversed(windows.order):
            terms.append(f"k / {step} % {sizes[name]} * ({apart[name]})")
            step *= sizes[name]
        return [f"for (int k = threadIdx.x; k < depth; k += threads) offsets[k] = {' + '.join(terms)};"]

    def _filled_patch(self) -> list[str]:
        """Fill the piece of the image, zeros around it: a warp line after line, of which its lanes read what lies side
        by side."""
        windows, writer = self.windows, self._writer(self.parts.lanes("@k", 1))
        value = writer.scalar(windows.image)
        y, x, size = windows.y, windows.x, writer.size
        strip, item, count, wide, which = (
            ("py", "item", "lines", "channels * line", "c = item % channels, px = item / channels") if windows.last else
            ("strip", "px", "channels * lines", "line", "c = strip / lines, py = strip % lines"))
        return [
            f"#pragma unroll {self.tile.lines_at_once}",
            f"for (int {strip} = warp; {strip} < {count}; {strip} += {WARPS}) {{",
            *indented([
                *(() if windows.last else (f"const int {which};",)),
                f"const idx y = first_y * {y.stride} + {size(y.start)} + py;",
                f"const bool inside = y >= 0 && y < {size(y.extent)};",
                *unrolled(f"int first = 0; first < {wide}; first += 32", [
                    "constexpr int v = 0, width = 1;", f"const int {item} = first + lane;",
                    *((f"const int {which};",) if windows.last else ()),
                    f"const idx x = first_x * {x.stride} + {size(x.start)} + px;",
                    "float value[1] = {};",
                    f"if (inside && {item} < {wide} && x >= 0 && x < {size(x.extent)}) {{",
                    *indented([*writer.upto(Scope.VECTOR), *writer.lines[Scope.LANE], f"value[v] = {value};"]), "}",
                    f"if ({item} < {wide}) of::store(patch + (c * lines + py) * line + px, {self._packed('value')});",
                ]),
            ]),
            "}",
        ]

    def _packed(self, values: str) -> str:
        """A vector as it is multiplied."""
        return f"of::pack_tf32({values})" if self.parts.rounds else f"of::pack<T>({values})"

    def _held(self) -> Held:
        return Held("2", 16, self.shape.columns)

    def _own_laid(self) -> list[str]:
        return [f"float* const own_laid = laid + warp * {self.tile.laid};"]

    def _laid_first(self) -> list[str]:
        """16 windows of a warp, of one line, after the other: their sums into its shared memory, from there results."""
        return [*self._own_laid(), *unrolled("int i = 0; i < 2; ++i", [
            "__syncwarp();",
            *unrolled("int c = 0; c < columns / 8; ++c", unrolled("int half = 0; half < 2; ++half", self._laid_pair())),
            "__syncwarp();",
            f"constexpr int width = {self.lanes.width};",
            *(self._stored_windows() if self.patch.first else self._stored_channels()),
        ])]

    def _laid_pair(self) -> list[str]:
        """Lines that lay two sums of neighbouring channels into shared memory."""
        if self.patch.first:
            return ["float* const to = own_laid + (c * 8 + lane % 4 * 2) * long_row + half * 8 + lane / 4;",
                    "to[0] = sums[i][c][half * 2], to[long_row] = sums[i][c][half * 2 + 1];"]
        return ["of::Vector<float, 2> pair;",
                "pair.at[0] = sums[i][c][half * 2], pair.at[1] = sums[i][c][half * 2 + 1];",
                "of::store(own_laid + (half * 8 + lane / 4) * long_row + c * 8 + lane % 4 * 2, pair);"]

    def _first_row(self, below: str) -> str:
        return f"const int first_row = warp * 32 + {below};"

    def _row_of(self, name: str) -> list[str]:
        return ["const int window = first_row + line;", *self._row(name, "line < 16")]

    def _row(self, name: str, valid: str) -> list[str]:
        """Lines that name the row of ``window`` of the tile, behind the last one where there is none."""
        y, x = (self._writer(self.lanes).size(axis.count) for axis in (self.windows.y, self.windows.x))
        return [
            "const idx oy = first_y + window / wide, ox = first_x + window % wide;",
            f"const idx {name} = {valid} && oy < {y} && ox < {x} ? (image * {y} + oy) * {x} + ox : "
            f"(idx){self.extents['m']};",
        ]

    def _stored_channels(self) -> list[str]:
        """Lines that store vectors of a window's channels."""
        begin = ["const int piece = lane / lanes + (first + pass) * step, window = warp * 32 + i * 16 + piece;"]
        row, m = (self._row(name, "piece < 16") for name in ("row", "m"))
        return [
            "constexpr int lanes = of::lanes_of(columns / width, 32), step = 32 / lanes;",
            "constexpr int all = 16 / step, passes = all < 4 ? all : 4;",
            "for (int column = lane % lanes * width; column < columns; column += lanes * width) {",
            *indented([
                "const idx n = first_n + column;",
                f"if (n >= {self.extents['n']}) break;",
                "#pragma unroll 1",
                "for (int first = 0; first < all; first += passes) {",
                *indented(self._results(
                    [*begin, *row, "const float* const sums_of_row = own_laid + piece * long_row + column;"],
                    "of::load<width>(sums_of_row{})", [*begin, *m])),
                "}",
            ]),
            "}",
        ]

    def _stored_windows(self) -> list[str]:
        """Lines that store vectors of a channel's windows, 16 windows of all channels."""
        n = self.extents["n"]
        begin = [
            "const int piece = lane % lanes * width, window = warp * 32 + i * 16 + piece;",
            "const int column = lane / lanes + (first + pass) * step;",
            f"const idx n = of::imin(first_n + column, (idx){n} - 1);",
        ]
        row, m = (self._row(name, f"first_n + column < {n}") for name in ("row", "m"))
        return [
            "constexpr int lanes = 16 / width, step = 32 / lanes, all = columns / step, passes = all < 4 ? all : 4;",
            "#pragma unroll 1",
            "for (int first = 0; first < all; first += passes) {",
            *indented(self._results(
                [*begin, *row, "const float* const sums_of_row = own_laid + column * long_row + piece;"],
                "of::load<width>(sums_of_row{})", [*begin, *m])),
            "}",
        ]
