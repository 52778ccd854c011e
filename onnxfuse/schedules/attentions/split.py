"""Few queries and many keys: blocks have a chunk of the keys each, and a second kernel puts the chunks together.

    attention_split   sums of a chunk under its own maximum, that, and the sum of its powers, into scratch memory
    attention_join    a block a row, whose warps share the chunks: their sums under the largest maximum

After "Flash-Decoding" (Dao, Haziza, Massa, Sizov, 2023).
"""

from __future__ import annotations

from onnxfuse.schedules.attentions.softmax import each_row
from onnxfuse.schedules.attentions.text import AttentionText
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.text import indented, unrolled

ROW = "columns + 2"
"""Numbers of a row in scratch memory: its sums, their maximum, and the sum of the powers."""

MOST_CHUNKS = 64
"""Chunks at most: each costs the second kernel a row of sums."""

JOIN_WARPS = 8
"""Warps of a block that puts chunks together: of the most that there are each has eight, all of whose numbers it asks
for at once."""


class SplitText(AttentionText):
    """The body of the first kernel; beside what the whole one has it takes ``t0``, scratch memory, ``chunk``, the keys
    of a chunk, and ``chunks``."""

    scales = False

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
        return each_row([
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
        ])


class JoinText(AttentionText):
    """The body of the second kernel, over the template's ``columns``, ``wide`` and ``idx``; a row a block."""

    scales = False

    def text(self) -> Body:
        """All of it."""
        results, outer = self.results("sums[v]")
        each, share = "; of_warp < warps; ++of_warp", "const float share = Powers::share(mosts[of_warp], offset);"
        lines = [
            *self.functors(), *self._share(),
            "__syncthreads();",
            "if (warp > 0) return;",
            "float most = mosts[0], whole = 0.0f;",
            *unrolled(f"int of_warp = 1{each}", ["most = Largest::of(most, mosts[of_warp]);"]),
            "const float offset = Powers::offset(most);",
            *unrolled(f"int of_warp = 0{each}", [share, "whole += wholes[of_warp] * share;"]),
            *self.scale("most"), *outer,
            "for (int n = lane * width; n < columns; n += 32 * width) {",
            *indented([
                "float sums[width] = {};",
                *unrolled(f"int of_warp = 0{each}", [
                    share,
                    *unrolled("int v = 0; v < width; ++v", ["sums[v] += laid[of_warp][n + v] * share;"])]),
                *results,
            ]),
            "}",
        ]
        return Body("\n".join(indented(lines)) + "\n", frozenset(self.sizes.used))

    def _share(self) -> list[str]:
        """Lines that leave each warp's share of a row in shared memory: its sums under the largest maximum of its
        chunks, that, and the sum of the powers."""
        rows = self.extents["m"]
        each, column = f"int i = 0; i < {MOST_CHUNKS} / warps; ++i", "int n = 0; n < turns; ++n"
        return [
            f"constexpr int width = wide > 1 ? 2 : 1, warps = {JOIN_WARPS}, turns = (columns - 1) / (32 * width) + 1;",
            "__shared__ float laid[warps][columns], mosts[warps], wholes[warps];",
            f"const idx row = blockIdx.x, b = row / {rows}, m = row % {rows};",
            "const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;",
            "{",
            *indented([
                f"const float* const from = reinterpret_cast<const float*>(t0) + row * chunks * ({ROW});",
                f"float most_of[{MOST_CHUNKS} / warps], whole_of[{MOST_CHUNKS} / warps];",
                f"float sums_of[{MOST_CHUNKS} / warps][turns][width];",
                *unrolled(each, [
                    "const idx part = warp + i * warps;",
                    f"const float* const own = from + part * ({ROW});",
                    "most_of[i] = part < chunks ? own[columns] : -OF_INFINITY;",
                    "whole_of[i] = part < chunks ? own[columns + 1] : 0.0f;",
                    *unrolled(column, unrolled("int v = 0; v < width; ++v", [
                        "const int at = (lane + n * 32) * width + v;",
                        "sums_of[i][n][v] = part < chunks && at < columns ? own[at] : 0.0f;",
                    ])),
                ]),
                "float most = -OF_INFINITY, whole = 0.0f, sums[turns][width] = {};",
                *unrolled(each, ["most = Largest::of(most, most_of[i]);"]),
                "const float offset = Powers::offset(most);",
                *unrolled(each, [
                    "const float share = Powers::share(most_of[i], offset);",
                    "whole += whole_of[i] * share;",
                    *unrolled(column, unrolled("int v = 0; v < width; ++v", [
                        "sums[n][v] += sums_of[i][n][v] * share;"])),
                ]),
                *unrolled(column, unrolled("int v = 0; v < width; ++v", [
                    "const int at = (lane + n * 32) * width + v;",
                    "if (at < columns) laid[warp][at] = sums[n][v];",
                ])),
                "if (lane == 0) mosts[warp] = most, wholes[warp] = whole;",
            ]),
            "}",
        ]
