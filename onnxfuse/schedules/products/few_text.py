"""The text of a product of few rows: warps share what is summed over, and add up what they found in shared memory.

A warp asks for several steps of the weights at once, each lane for the vectors that it multiplies itself, and for the
few rows' elements beside them.  No element of a weight is asked for twice, and none waits for another.  Up to four rows
lanes multiply and add, and put their sums together; more go through tensor cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxfuse.ir.scalars import TYPES
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.operand_text import packed, source
from onnxfuse.schedules.products.few import ALONG, DEPTH, GROUPS, VECTOR, FewShape
from onnxfuse.schedules.products.parts import ProductParts, Side
from onnxfuse.schedules.products.shape import FLOATS
from onnxfuse.schedules.products.text import ProductText
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.text import indented, unrolled


@dataclass(frozen=True)
class _Reads:
    """What a lane has of the operands in a step.

    Attributes:
        sums: dimensions of its sums of one product; own: elements of a vector of a weight; count: its vectors.
        multiply: what multiplies these.
        apart, neighbours: where the ``i``-th vector is, and the ``e``-th element of it.
        few: elements of a vector of the few rows; height: how many of these; row, of_row: where these are.
    """

    sums: str
    own: str
    count: str
    multiply: str
    apart: str
    neighbours: str
    few: str
    height: str
    row: str
    of_row: str


class FewText(ProductText):
    """Writes the body of a kernel."""

    def __init__(
        self, parts: ProductParts, sides: Sequence[Side], results: Lanes, shape: FewShape, sizes: Mapping[str, str]
    ) -> None:
        super().__init__(parts, sides, results, shape, sizes)
        self.few = shape

    def text(self) -> Body:
        """All of it."""
        lines = [*self._constants(), *self._summed(), *self._added_up(), *self._laid_stored()]
        return Body("\n".join(indented(lines)) + "\n", frozenset(self.sizes.used))

    def _constants(self) -> list[str]:
        shape = self.few
        place = ("lane = threadIdx.x % 32, g = lane % row_lanes, t = lane / row_lanes" if shape.plain else
                 "g = threadIdx.x % 32 / 4, t = threadIdx.x % 4")
        return [
            f"using T = {TYPES[self.parts.left.dtype].storage};",
            f"constexpr int rows = {shape.rows}, columns = {shape.columns}, ahead = {shape.stages};",
            f"constexpr int warps = {shape.warps}, threads = 32 * warps, depth = {shape.depth};",
            f"constexpr int beside = {len(self.rights)}, own_columns = columns / beside;",
            *([f"constexpr int row_lanes = {shape.side_lanes};  // whose vectors lie side by side"] * shape.plain),
            "extern __shared__ __align__(16) unsigned char of_dynamic[];",
            "float* const laid = reinterpret_cast<float*>(of_dynamic);",
            f"constexpr int long_row = columns + {FLOATS};",
            f"const int warp = threadIdx.x / 32, {place};",
            f"const idx beyond = ({self.extents['n']} + own_columns - 1) / own_columns;",
            "const idx b = (idx)blockIdx.x / beyond, first_m = 0, first_n = (idx)blockIdx.x % beyond * own_columns;",
        ]

    # ---- The loop over what is summed over. ----

    def _summed(self) -> list[str]:
        reads = self._plain() if self.few.plain else self._on_tensor_cores()
        pace = "(idx)warps * depth"
        return [
            f"float sums[beside]{reads.sums} = {{}};",
            f"for (idx start = warp * depth; start < {self.extents['k']}; start += {pace} * ahead) {{",
            *indented([
                f"of::Vector<T, {reads.own}> weights[ahead][beside][{reads.count}];",
                f"of::Vector<T, {reads.few}> few[ahead][{reads.height}];",
                *unrolled("int step = 0; step < ahead; ++step", [
                    f"const idx first_k = start + step * {pace};",
                    *(line for number, side in enumerate(self.rights) for line in self._weight(reads, number, side)),
                    *self._rows(reads),
                ]),
                *unrolled("int step = 0; step < ahead; ++step", unrolled("int p = 0; p < beside; ++p", [
                    f"of::{reads.multiply}<T>(sums[p], weights[step][p], few[step]);"])),
            ]),
            "}",
        ]

    def _on_tensor_cores(self) -> _Reads:
        """With lane = 4 g + t, as a product on tensor cores has its operands."""
        if self.few.across:
            return _Reads(
                "[own_columns / 16][rows / 8][4]", "own_columns / 8", str(DEPTH // 4), "multiply_across",
                "k = first_k + t * 4 + i", "n = first_n + g * (own_columns / 8) + e", str(DEPTH // 4), "rows / 8",
                f"m = i * {GROUPS} + g", "k = first_k + t * 4 + e")
        return _Reads(
            "[own_columns / 16][rows / 8][4]", str(ALONG), "own_columns / 8", "multiply_along",
            f"n = first_n + i * {GROUPS} + g", f"k = first_k + t * {ALONG} + e", str(ALONG), "rows / 8",
            f"m = i * {GROUPS} + g", f"k = first_k + t * {ALONG} + e")

    def _plain(self) -> _Reads:
        """With lane = row_lanes t + g: side by side over columns, or over what is summed over."""
        if self.few.across:
            return _Reads(
                f"[rows][{VECTOR}]", str(VECTOR), "1", "add_across", "k = first_k + t",
                f"n = first_n + g * {VECTOR} + e", "1", "rows", "m = i", "k = first_k + t + e")
        return _Reads(
            "[rows][own_columns]", str(VECTOR), "own_columns", "add_along", "n = first_n + i",
            f"k = first_k + g * {VECTOR} + e", str(VECTOR), "rows", "m = i", f"k = first_k + g * {VECTOR} + e")

    def _weight(self, reads: _Reads, number: int, side: Side) -> list[str]:
        """A step of what a lane has of a weight."""
        return unrolled(f"int i = 0; i < {reads.count}; ++i", [
            f"const idx {reads.apart};",
            *self._vector(side, f"weights[step][{number}][i]", reads.neighbours, reads.own, "n")])

    def _rows(self, reads: _Reads) -> list[str]:
        """A step of what a lane has of the few rows."""
        return unrolled(f"int i = 0; i < {reads.height}; ++i", [
            f"const idx {reads.row};", *self._vector(self.left, "few[step][i]", reads.of_row, reads.few, "m")])

    def _vector(self, side: Side, to: str, place: str, many: str, loop: str) -> list[str]:
        """Fill a vector of so many elements, zeros past the ends; ``place`` says where its ``e``-th is."""
        writer = self._writer(side.lanes)
        inside = f"k < {self.extents['k']} && {loop} < {self.extents[loop]}"
        piece = [f"const idx {place};", "of::Vector<T, width> vector = {};"]
        if side.copied:
            address, allowed = source(writer, side.scalar, inside)
            how = "load" if loop == "m" else "load_once"
            # Whether an element is there may hang on where itself is only where it stands alone.
            lone = ["constexpr int v = 0;", *writer.lines[Scope.LANE]] if side.width == 1 and allowed != inside else []
            piece += [*writer.upto(Scope.VECTOR), *lone, f"if ({allowed}) vector = of::{how}<width>({address});"]
        else:
            piece += [f"if ({inside}) {{", *indented(packed(writer, side.scalar)), "}"]
        return [
            f"constexpr int width = {side.width};",
            *unrolled(f"int e = 0; e < {many}; e += width", [
                *piece, *unrolled("int v = 0; v < width; ++v", [f"{to}.at[e + v] = vector.at[v];"])])]

    # ---- After it. ----

    def _added_up(self) -> list[str]:
        """Lines that leave the sums of all warps as rows in shared memory."""
        m = self.extents["m"]
        across = "true" if self.few.across else "false"
        lay_out = f"lay_out_sums<row_lanes, {across}>" if self.few.plain else f"lay_out<{across}>"
        return [
            *unrolled("int p = 0; p < beside; ++p", [
                f"of::{lay_out}(",
                f"    laid + warp * rows * long_row + p * own_columns, long_row, (int){m}, sums[p]);"]),
            "__syncthreads();",
            f"of::add_up<columns, threads>(laid, long_row, rows * long_row, (int){m}, warps);",
            "__syncthreads();",
        ]
