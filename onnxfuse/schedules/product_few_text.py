"""The text of a product of few rows: warps share what is summed over, and add up what they found in shared memory.

A warp asks for several steps of the weights at once, each lane for the vectors that it multiplies itself, and for the
few rows' elements beside them.  No element of a weight is asked for twice, and none waits for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.pull import Load
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.product_few import ALONG, DEPTH, GROUPS, FewShape
from onnxfuse.schedules.product_parts import Parts, Side
from onnxfuse.schedules.product_shape import FLOATS
from onnxfuse.schedules.product_text import ProductText
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.text import indented, pointer, unrolled


class FewText(ProductText):
    """Writes the body of a kernel."""

    def __init__(
        self, parts: Parts, sides: Sequence[Side], results: Lanes, shape: FewShape, sizes: Mapping[str, str]
    ) -> None:
        super().__init__(parts, sides, results, shape, sizes)
        self.few = shape

    def text(self) -> Body:
        """All of it."""
        lines = [*self._constants(), *self._summed(), *self._added_up(), *self._stored()]
        return Body("\n".join(indented(lines)) + "\n", frozenset(self.sizes.used))

    def _constants(self) -> list[str]:
        shape = self.few
        depth = DEPTH if shape.across else 4 * ALONG
        return [
            f"using T = {TYPES[self.parts.left.dtype].storage};",
            f"constexpr int rows = {shape.rows}, columns = {shape.columns}, ahead = {shape.stages};",
            f"constexpr int warps = {shape.warps}, threads = 32 * warps, depth = {depth};",
            f"constexpr int beside = {len(self.rights)}, own_columns = columns / beside;",
            "extern __shared__ __align__(16) unsigned char of_dynamic[];",
            "float* const laid = reinterpret_cast<float*>(of_dynamic);",
            f"constexpr int long_row = columns + {FLOATS};",
            "const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;",
            f"const idx beyond = ({self.extents['n']} + own_columns - 1) / own_columns;",
            "const idx b = (idx)blockIdx.x / beyond, first_m = 0, first_n = (idx)blockIdx.x % beyond * own_columns;",
        ]

    # ---- The loop over what is summed over. ----

    def _summed(self) -> list[str]:
        across = self.few.across
        own = "own_columns / 8" if across else str(ALONG)  # elements of a lane's vector, and how many it has
        count = DEPTH // 4 if across else "own_columns / 8"
        multiplied = "multiply_across" if across else "multiply_along"
        pace = "(idx)warps * depth"
        return [
            "float sums[beside][own_columns / 16][rows / 8][4] = {};",
            f"for (idx start = warp * depth; start < {self.extents['k']}; start += {pace} * ahead) {{",
            *indented([
                f"of::Vector<T, {own}> weights[ahead][beside][{count}];",
                f"of::Vector<T, {DEPTH // 4 if across else ALONG}> few[ahead][rows / 8];",
                *unrolled("int step = 0; step < ahead; ++step", [
                    f"const idx first_k = start + step * {pace};",
                    *(line for number, side in enumerate(self.rights) for line in self._weight(number, side)),
                    *self._rows(),
                ]),
                *unrolled("int step = 0; step < ahead; ++step", unrolled("int p = 0; p < beside; ++p", [
                    f"of::{multiplied}<T>(sums[p], weights[step][p], few[step]);"])),
            ]),
            "}",
        ]

    def _weight(self, number: int, side: Side) -> list[str]:
        """A step of what a lane has of a weight."""
        if self.few.across:
            at = ["const idx k = first_k + t * 4 + i;"]
            head, many = f"int i = 0; i < {DEPTH // 4}; ++i", "own_columns / 8"
            first = "n = first_n + g * (own_columns / 8) + e"
        else:
            at = [f"const idx n = first_n + i * {GROUPS} + g;"]
            head, many, first = "int i = 0; i < own_columns / 8; ++i", str(ALONG), f"k = first_k + t * {ALONG} + e"
        return unrolled(head, [*at, *self._vector(side, f"weights[step][{number}][i]", first, many, "n")])

    def _rows(self) -> list[str]:
        """A step of what a lane has of the few rows."""
        many = DEPTH // 4 if self.few.across else ALONG
        return unrolled("int i = 0; i < rows / 8; ++i", [
            f"const idx m = i * {GROUPS} + g;",
            *self._vector(self.left, "few[step][i]", f"k = first_k + t * {many} + e", str(many), "m")])

    def _vector(self, side: Side, to: str, place: str, many: str, loop: str) -> list[str]:
        """Fill a vector of so many elements, zeros past the ends; ``place`` says where its ``e``-th is."""
        writer = self._writer(side.lanes)
        inside = f"k < {self.extents['k']} && {loop} < {self.extents[loop]}"
        piece = [f"const idx {place};", "of::Vector<T, width> vector = {};"]
        if side.copied:
            assert isinstance(side.scalar, Load)
            conditions = [writer.condition(condition)[0] for condition in side.scalar.conditions]
            allowed = " && ".join([inside, *(f"({text})" for text in conditions if text != "true")])
            address = pointer(f"i{side.scalar.input}", writer.index(side.scalar.offset))
            how = "load" if loop == "m" else "load_once"
            piece += [*writer.upto(Scope.VECTOR), f"if ({allowed}) vector = of::{how}<width>({address});"]
        else:
            value = writer.scalar(side.scalar)
            piece += [f"if ({inside}) {{", *indented([
                *writer.upto(Scope.VECTOR), "float x[width];",
                *unrolled("int v = 0; v < width; ++v", [*writer.lines[Scope.LANE], f"x[v] = {value};"]),
                "vector = of::pack<T>(x);"]), "}"]
        return [
            f"constexpr int width = {side.width};",
            *unrolled(f"int e = 0; e < {many}; e += width", [
                *piece, *unrolled("int v = 0; v < width; ++v", [f"{to}.at[e + v] = vector.at[v];"])])]

    # ---- After it. ----

    def _added_up(self) -> list[str]:
        """Lines that leave the sums of all warps as rows in shared memory."""
        across, m = ("true" if self.few.across else "false"), self.extents["m"]
        return [
            *unrolled("int p = 0; p < beside; ++p", [
                f"of::lay_out<{across}>(",
                f"    laid + warp * rows * long_row + p * own_columns, long_row, (int){m}, sums[p]);"]),
            "__syncthreads();",
            f"of::add_up<columns, threads>(laid, long_row, rows * long_row, (int){m}, warps);",
            "__syncthreads();",
        ]
