"""Few queries and many keys: blocks have a chunk of the keys each, and a second kernel puts the chunks together.

    attention_split   sums of a chunk under its own maximum, that, and the sum of its powers, into scratch memory
    attention_join    a block a row, whose warps share the chunks: their sums under the largest maximum

After "Flash-Decoding" (Dao, Haziza, Massa, Sizov, 2023).
"""

from __future__ import annotations

from onnxfuse.schedules.attention_text import AttentionText, each_row
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.text import indented, unrolled

ROW = "columns + 2"
"""Numbers of a row in scratch memory: its sums, their maximum, and the sum of the powers."""

JOIN_WARPS = 8
"""Warps of a block that puts chunks together: of the most that there are each has eight, which it asks for at once."""

_COLUMNS = "int n = lane * width; n < columns; n += 32 * width"
"""What heads a loop over a lane's columns."""


class SplitText(AttentionText):
    """The body of the first kernel; beside what the whole one has it takes ``t0``, scratch memory, ``chunk``, the keys
    of a chunk, and ``chunks``."""

    @property
    def narrows(self) -> bool:
        """None are left out where masks are finite: a row's maximum is known only of all chunks."""
        return self.visible is not None and self.visible.least is None

    @property
    def begin(self) -> str:
        """That of the chunk."""
        return "from"

    @property
    def end(self) -> str:
        """That of the chunk."""
        return "end"

    def place(self) -> list[str]:
        """The chunk too."""
        constant = "" if self.narrows else "const "
        return [
            "const idx part = (idx)blockIdx.x % chunks, block = (idx)blockIdx.x / chunks;",
            "const idx b = block / blocks, first = block % blocks * rows;",
            f"{constant}idx from = part * chunk, end = of::imin(from + chunk, (idx){self.extents['k']});",
        ]

    def closing(self) -> list[str]:
        """A row's numbers, those past the last column too: all of the scratch memory is written."""
        rows = self.extents["m"]
        return indented(each_row([
            "const float whole = of::reduce_lanes<of::Sum, 4>(total[i][half]);",
            "const idx m = first + own + i * 16 + half * 8 + group;",
            f"if (m < {rows}) {{",
            *indented([
                f"float* const to = reinterpret_cast<float*>(t0) + ((b * {rows} + m) * chunks + part) * ({ROW});",
                *unrolled("int c = 0; c < columns / 8; ++c", unrolled("int j = 0; j < 2; ++j", [
                    "to[c * 8 + corner + j] = sums[i][c][half * 2 + j];"])),
                "if (corner == 0) to[columns] = most[i][half], to[columns + 1] = whole;",
            ]),
            "}",
        ]))


class JoinText(AttentionText):
    """The body of the second kernel, over the template's ``columns``, ``wide`` and ``idx``; a row a block."""

    def text(self) -> Body:
        """All of it."""
        results, outer = self.results("sums[v]")
        lines = [
            *self.functors(), *self._share(),
            "__syncthreads();",
            "if (warp > 0) return;",
            *self.scale("most"), *outer,
            f"for ({_COLUMNS}) {{",
            *indented([
                "float sums[width] = {};",
                *unrolled("int part = 0; part < warps; ++part", unrolled("int v = 0; v < width; ++v", [
                    "sums[v] += laid[part][n + v];"])),
                *results,
            ]),
            "}",
        ]
        return Body("\n".join(indented(lines)) + "\n", frozenset(self.sizes.used))

    def _share(self) -> list[str]:
        """Lines that leave each warp's share of a row's sums in shared memory."""
        rows = self.extents["m"]
        return [
            f"constexpr int width = wide > 1 ? 2 : 1, warps = {JOIN_WARPS};",
            "__shared__ float laid[warps][columns];",
            f"const idx row = blockIdx.x, b = row / {rows}, m = row % {rows};",
            f"const float* const from = reinterpret_cast<const float*>(t0) + row * chunks * ({ROW});",
            "const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;",
            "float most = -OF_INFINITY, whole = 0.0f;",
            "for (idx part = lane; part < chunks; part += 32)",
            f"  most = Largest::of(most, from[part * ({ROW}) + columns]);",
            "most = of::reduce_lanes<Largest, 32>(most);",
            "const float offset = Powers::offset(most);",
            "for (idx part = lane; part < chunks; part += 32) {",
            f"  const float* const own = from + part * ({ROW}) + columns;",
            "  whole += own[1] * Powers::scale(own[0], offset);",
            "}",
            "whole = of::reduce_lanes<of::Sum, 32>(whole);",
            f"for ({_COLUMNS}) {{",
            *indented([
                "float sums[width] = {};",
                *unrolled("idx part = warp; part < chunks; part += warps", [
                    f"const float* const own = from + part * ({ROW});",
                    "const float share = Powers::scale(own[columns], offset);",
                    *unrolled("int v = 0; v < width; ++v", ["sums[v] += own[n + v] * share;"]),
                ], by=8),
                *unrolled("int v = 0; v < width; ++v", ["laid[warp][n + v] = sums[v];"]),
            ]),
            "}",
        ]
