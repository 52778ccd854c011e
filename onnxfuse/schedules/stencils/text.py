"""The text of a depthwise convolution's kernel.

A block fills a tile of float numbers in shared memory from the images, with zeros around them, and the weights of its
channels; each thread sums up several neighbouring windows in registers; the sums take the tile's place, and what
follows is computed of them as the pointwise schedule does, in the order in which results lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.pull import Contracted, Scalar
from onnxfuse.schedules.kernel import moving_loads
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.packing import packed_as_it_is
from onnxfuse.schedules.pointwise import Store, vector_lines
from onnxfuse.schedules.source import Function, Parameter, Signature
from onnxfuse.schedules.stencils.parts import StencilParts
from onnxfuse.schedules.stencils.shape import MOST_TALL, is_line
from onnxfuse.schedules.text import Sizes, Writer, added, indented, multiplied, unrolled

TEMPLATE = ("planes", "deep", "high", "wide", "tall", "broad", "loads", "stores", "layers", "rows", "pitch", "lead",
            "kept", "room")
"""Of a kernel's function: members of ``StencilShape``, then of ``Tile``."""


class StencilText:
    """Writes the functions of a region."""

    def __init__(self, parts: StencilParts, signature: Signature, image: Lanes, results: Lanes) -> None:
        """``image`` and ``results``: lanes of vectors of images and of results."""
        self.parts, self.signature = parts, signature
        self.image, self.results = image, results
        self.read = next((load for load in moving_loads([parts.image], image) if not load.conditions
                          and image.stride(load.offset) == 1 and image.aligned(load.offset)), None)
        self.element = "float" if self.read is None else TYPES[self.read.dtype].storage
        self.sizes, self.line = Sizes(signature.sizes), is_line(parts.axes)
        self.extents = [self._size(axis.extent) for axis in parts.axes]
        self.counts = [self._size(axis.count) for axis in parts.axes]
        self.starts = [self._size(axis.start) for axis in parts.axes]

    def functions(self, whole: bool) -> list[Function]:
        """Of the elements of images and of results; of blocks that have tiles, and of those that have whole planes."""
        read, value, result = self._read(), self._value(), self._result()
        tiles, planes = self._tiles(), self._planes() if whole else []
        parameters = self.signature.parameters(self.sizes.used)
        q, brought = Parameter("const {index}", "q"), f"of::Held<{self.element}, width>&"
        found = [
            Function("stencil_read", ("width",), (*parameters, q, Parameter(brought, "brought")), read),
            Function("stencil_value", ("width",), (
                *parameters, q, Parameter(f"const {brought}", "brought"),
                Parameter("of::Vector<float, width>&", "values")), value),
            Function("stencil_result", ("width",),
                     (*parameters, Parameter("const {index}", "L"), Parameter("const float*", "from")), result),
        ]
        calls = tuple(each.name for each in found)
        kernels = {"stencil": tiles, **({"stencil_planes": planes} if whole else {})}
        return [*found, *(Function(name, TEMPLATE, parameters, self._joined(lines), calls)
                          for name, lines in kernels.items())]

    def _size(self, size: object) -> str:
        return self._writer(self.results).size(size)  # type: ignore[arg-type]

    def _writer(self, lanes: Lanes, hook: Callable[[Scalar], str | None] | None = None) -> Writer:
        return Writer(lanes, self.sizes, hook)

    def _joined(self, lines: Sequence[str]) -> str:
        """Lines of a function's body; where they call another of these, with what all of them take."""
        names = ", ".join(each.name for each in self.signature.parameters(self.sizes.used))
        return "".join(f"{line.replace('@all', names)}\n" for line in indented(lines))

    # ---- Elements. ----

    @property
    def late(self) -> bool:
        """Whether something is computed of what was brought: a read begins at once, and what waits for it comes later.
        """
        return self.read is not None and self.read is not self.parts.image

    def _read(self) -> str:
        """Bring ``width`` elements from q on: as they lie in memory; where nothing does so, computed."""
        writer = self._writer(self.image)
        if self.read is not None:
            address = writer.address(self.read)
            return self._joined([*writer.upto(Scope.VECTOR), f"brought = of::hold<{self.element}, width>({address});"])
        return self._joined(self._computed(writer, f"{self._held('brought', 'width')}"))

    def _value(self) -> str:
        """``width`` elements of images from q on, of what was brought."""
        if not self.late:
            return self._joined([f"values = {self._floats('brought')};"])
        writer = self._writer(self.image, lambda scalar: "x.at[v]" if scalar is self.read else None)
        return self._joined([f"const of::Vector<float, width> x = {self._floats('brought')};",
                             *self._computed(writer, "values")])

    def _held(self, name: str, width: str) -> str:
        """The elements of a vector that is held."""
        return f"of::held<{self.element}, {width}>({name})"

    def _floats(self, name: str) -> str:
        return f"of::floats<{self.element}, width>({name})"

    def _computed(self, writer: Writer, to: str) -> list[str]:
        value = writer.scalar(self.parts.image)
        inner = writer.lines[Scope.LANE]
        return [*writer.upto(Scope.VECTOR), *unrolled("int v = 0; v < width; ++v", [*inner, f"{to}.at[v] = {value};"])]

    def _result(self) -> str:
        """``width`` results from L on, of the sums that begin at ``from``."""
        writer = self._writer(self.results, lambda scalar: "sum.at[v]" if isinstance(scalar, Contracted) else None)
        outputs = self.parts.lowered.program.outputs
        stores = [Store(place, output.dtype, root, f"o{place} + L")
                  for place, (output, root) in enumerate(zip(outputs, self.parts.results, strict=True))]
        return self._joined(["const of::Vector<float, width> sum = of::load<width>(from);",
                             *vector_lines(writer, stores, packed_as_it_is)])

    def _weights(self) -> list[str]:
        """Bring the weights of a block's planes, those of each aligned.  Behind the last channel's come the first's."""
        parts = self.parts
        writer = self._writer(Lanes(parts.puller.space, parts.puller, "@k", "", 1))
        value, channels = writer.scalar(parts.weight), self._size(parts.channels)
        return [
            f"const idx base = first % {channels} * W::taps;",
            "for (int item = threadIdx.x; item < (planes ? planes : 1) * W::taps; item += threads) {",
            *indented([
                "const int plane = planes ? item / W::taps : 0;",
                f"const idx k = planes ? (base + item) % ({channels} * W::taps) : base + item;",
                "constexpr int width = 1, v = 0;", *writer.upto(Scope.LANE),
                f"weights[item + plane * (held - W::taps)] = {value};",
            ]), "}",
        ]

    # ---- What all blocks do. ----

    def _opening(self) -> list[str]:
        axes = self.parts.axes
        window = ", ".join(map(str, (
            *(axis.taps for axis in axes), axes[1].stride, axes[2].stride, *(axis.dilation for axis in axes))))
        return [
            f"using W = of::Window<{window}>;",
            "constexpr int slab = rows * pitch, held = (W::taps + 3) / 4 * 4;",
            "constexpr int lines = high / tall, columns = wide / broad;",
            "constexpr int items = (planes ? planes : 1) * deep * lines * columns, threads = (items + 31) / 32 * 32;",
            "extern __shared__ __align__(16) unsigned char of_dynamic[];",
            "float* const tile = reinterpret_cast<float*>(of_dynamic);",
            "float* const weights = tile + room;",
        ]

    def _summing(self, fours: str, to: str, step: str, rows: str, columns: str) -> list[str]:
        """Lines that sum up a tile, whose sums take its place unless threads have strips; ``fours`` and what follows
        is what ``of::keep_sums`` takes."""
        z, y, x = self.parts.axes
        return [
            "__syncthreads();",
            "const int own = threadIdx.x, column = own % columns * broad, line = own / columns % lines * tall;",
            "const int layer = own / (columns * lines) % deep, plane = own / (columns * lines * deep);",
            f"const float* const corner = tile + (plane * layers + {multiplied('layer', z.stride)}) * slab + "
            f"{multiplied('line', y.stride)} * pitch + {multiplied('column', x.stride)};",
            "const float* const taps = weights + plane * held;",
            "float* const sums = tile + kept;",
            f"if constexpr (tall > {MOST_TALL}) {{",
            "  if (own < items)",
            f"    of::sum_strip<W, pitch, lead, {fours}, tall, broad>(corner, taps, sums + {to}, {step}, {rows}, "
            f"{columns});",
            "} else {",
            "  float found[tall][broad] = {};",
            "  if (own < items) of::sum_windows<W, pitch, slab, lead>(found, corner, taps);",
            "  // Everybody is done with the tile.",
            "  __syncthreads();",
            f"  if (own < items) of::keep_sums<{fours}>(found, sums + {to}, {step}, {rows}, {columns});",
            "}",
            "__syncthreads();",
        ]

    def _filling(
        self, count: str, bring: Sequence[str], first: Sequence[str], put: Sequence[str], step: str = ""
    ) -> list[str]:
        """Lines that bring vectors into registers, several a thread so that they are on their way together, and put
        them where they belong; ``first``: what is done while the first ones come.

        Args:
            count: how far items go, a constant; step: what follows where they count more than one a thread.
        """
        each = "int pass = 0; pass < batch; ++pass"
        return [
            f"constexpr int passes = ({count} + threads{step} - 1) / (threads{step});",
            "constexpr int most = width > 2 ? 8 : 16, batch = passes < most ? passes : most;",
            f"for (int begin = 0; begin < {count}; begin += batch * threads{step}) {{",
            *indented([
                f"of::Held<{self.element}, width> brought[batch] = {{}};",
                *unrolled(each, bring),
                "if (begin == 0) {", *indented(first), "}",
                *unrolled(each, put),
            ]), "}",
        ]

    # ---- Blocks that have a tile of a plane. ----

    def _tiles(self) -> list[str]:
        features, (depth, height, width) = self.parts.features, self.counts
        place = [
            "constexpr int side = high * wide;",
            f"const idx across = ({width} + side - 1) / side;",
            "const idx x0 = (idx)blockIdx.x % across * side, first = (idx)blockIdx.x / across;",
        ] if self.line else [
            f"const idx across = ({width} + wide - 1) / wide, down = ({height} + high - 1) / high;",
            f"const idx along = ({depth} + deep - 1) / deep;",
            "const idx x0 = (idx)blockIdx.x % across * wide, y0 = (idx)blockIdx.x / across % down * high;",
            "const idx z0 = (idx)blockIdx.x / across / down % along * deep;",
            "const idx first = (idx)blockIdx.x / across / down / along;",
        ]
        place += [f"const idx image = first / {features};"] if features > 1 else []
        summing = self._summing("broad % 4 == 0", "(layer * high + line) * wide + column", "wide", "tall", "broad")
        return [*self._opening(), *place, *self._fill_tile(), *summing, *self._finish_tile()]

    def _fill_tile(self) -> list[str]:
        (z, y, x), (sz, sy, sx), (depth, height, width) = self.parts.axes, self.starts, self.extents
        image = "image" if self.parts.features > 1 else "first"
        at_z, at_y, at_x = (added(multiplied(name, axis.stride), start) for name, axis, start in (
            ("z0", z, sz), ("y0", y, sy), ("(x0 + line * wide)" if self.line else "x0", x, sx)))
        place = [
            "const int item = begin + pass * threads + threadIdx.x;",
            "const int line = item / vectors, column = item % vectors * width;",
        ]
        inside = " && ".join(f"{name} >= 0 && {name} < {size}" for name, size in zip("zyx", self.extents, strict=True))
        there = [
            f"const idx x = {at_x} - lead + column, q = {image} * {width} + x;",
            f"if (item < all && x >= 0 && x < {width})",
        ] if self.line else [
            f"const idx z = {at_z} + line / rows, y = {at_y} + line % rows;",
            f"const idx x = {at_x} - lead + column;",
            f"const idx q = (({multiplied(image, depth)} + z) * {height} + y) * {width} + x;",
            f"if (item < all && {inside})",
        ]
        bring = [*place, *there, "  stencil_read<width, idx>(@all, q, brought[pass]);"]
        put = [
            *place, "of::Vector<float, width> values = {};",
            *([*there, "  stencil_value<width, idx>(@all, q, brought[pass], values);"] if self.late
              else [f"values = {self._floats('brought[pass]')};"]),
            "if (item < all) of::store(tile + line * pitch + column, values);",
        ]
        return ["{", *indented([
            "constexpr int width = loads, vectors = pitch / width, all = layers * rows * vectors;",
            *self._filling("all", bring, self._weights(), put),
        ]), "}"]

    def _finish_tile(self) -> list[str]:
        depth, height, width = self.counts
        plane = f"({multiplied('first', depth)} + z)"
        return ["{", *indented([
            "constexpr int width = stores, vectors = wide / width;",
            "for (int item = threadIdx.x; item < deep * high * vectors; item += threads) {",
            *indented([
                "const int line = item / vectors, column = item % vectors * width;",
                "const idx x = x0 + line * wide + column;",
                f"if (x < {width}) stencil_result<width, idx>(@all, first * {width} + x, sums + line * wide + column);",
            ] if self.line else [
                "const int line = item / vectors, column = item % vectors * width;",
                "const idx z = z0 + line / high, y = y0 + line % high, x = x0 + column;",
                f"if (z < {depth} && y < {height} && x < {width})",
                f"  stencil_result<width, idx>(@all, ({plane} * {height} + y) * {width} + x, "
                "sums + line * wide + column);",
            ]), "}",
        ]), "}"]

    # ---- Blocks that have whole planes, whose sizes are known. ----

    def _planes(self) -> list[str]:
        deep, high, wide = self.counts
        place = [
            f"constexpr int read = {' * '.join(self.extents)}, written = {deep} * {high} * {wide};",
            "const idx first = (idx)blockIdx.x * planes;",
            f"const int here = planes == 1 ? 1 : (int)of::imin((idx)planes, {self._size(self.parts.planes)} - first);",
        ]
        summing = self._summing(
            f"broad % 4 == 0 && {wide} % 4 == 0", f"plane * written + (layer * {high} + line) * {wide} + column",
            wide, f"{high} - line", f"{wide} - column")
        return [*self._opening(), *place, *self._fill_planes(), *summing, *_FINISH_PLANES]

    def _fill_planes(self) -> list[str]:
        depth, height, width = self.extents
        z, y, x = (-(axis.start.value or 0) for axis in self.parts.axes)
        corner = added(multiplied(f"({added(f'{z} * rows' if z else 0, y)})", "pitch") if z or y else 0, "lead", x)
        offset = (f"{corner} + {{0}} + {{0}} / {width} * (pitch - {width}) + "
                  f"{{0}} / ({width} * {height}) * ((rows - {height}) * pitch) + "
                  f"{{0}} / ({multiplied(width, height, depth)}) * ((layers - {depth}) * slab)")
        place = ["const int from = begin + (pass * threads + threadIdx.x) * width;"]
        bring = ["if (from < here * read) stencil_read<width, idx>(@all, first * read + from, brought[pass]);"]
        computed = [
            "if (from < here * read)", "  stencil_value<width, idx>(@all, first * read + from, brought[pass], values);",
        ] if self.late else [f"values = {self._floats('brought[pass]')};"]
        put = [
            *place, "of::Vector<float, width> values = {};", *computed,
            f"if constexpr ({width} % width == 0) {{",
            f"  if (from < here * read) of::store(tile + {offset.format('from')}, values);",
            "} else {",
            *indented(unrolled("int v = 0; v < width; ++v", [
                "const int i = from + v;", f"if (i < here * read) tile[{offset.format('i')}] = values.at[v];"])),
            "}",
        ]
        zeroed = [*_ZEROS, *self._weights(), "__syncthreads();"]
        return ["{", *indented([
            "constexpr int width = loads;",
            *self._filling("planes * read", [*place, *bring], zeroed, put, " * width"),
        ]), "}"]


_ZEROS = (
    "const of::Vector<float, 4> zeros = {};",
    "for (int item = threadIdx.x; item < room / 4; item += threads) of::store(tile + item * 4, zeros);",
)

_FINISH_PLANES = (
    "{",
    "  constexpr int width = stores;",
    "  for (int from = threadIdx.x * width; from < here * written; from += threads * width)",
    "    stencil_result<width, idx>(@all, first * written + from, sums + from);",
    "}",
)
