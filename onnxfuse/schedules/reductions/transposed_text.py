"""The text of a transposed kernel: columns as in the column schedule, with what lies along a column staged.

A block's columns lie side by side; what is staged has them one after the other.  A loop over the elements goes in
chunks: the block brings a chunk of its columns into shared memory, or out of it, along the columns, and computes across
them from there.  Elements that stay in registers are brought once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.pull import Load, Scalar
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.reductions.columns import ColumnText
from onnxfuse.schedules.reductions.phases import Frame, Output
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.text import Writer, element_of, pointer
from onnxfuse.schedules.tiled_text import fetch


@dataclass(frozen=True)
class Staging:
    """What goes through shared memory: loads, outputs, and the lanes along a column by which they are moved."""

    loads: Sequence[Load]
    outputs: Sequence[Output]
    down: Lanes

    @property
    def dtypes(self) -> list[int]:
        """Element types of all of it."""
        return [load.dtype for load in self.loads] + [output.dtype for output in self.outputs]


def transposed_text(frame: Frame, staging: Staging, keep: bool) -> Body:
    """The body over the template's ``width``, ``deep``, ``across``, ``items``, ``turns`` (of the loop in a chunk),
    ``wide`` (the vectors along a column) and ``idx``, with kept values in registers or streaming."""
    return _TransposedText(frame, staging, keep).text()


class _TransposedText(ColumnText):
    def __init__(self, frame: Frame, staging: Staging, keep: bool) -> None:
        super().__init__(frame, keep)
        self.staging = staging
        self.tiles = {load: f"tile{place}" for place, load in enumerate(staging.loads)}
        self.brought: dict[Load, str] = {}
        self.chunks = False
        self.used = False

    def text(self) -> Body:
        """The whole body."""
        tiles = [(load.dtype, name) for load, name in self.tiles.items()]
        tiles += [(output.dtype, f"out{output.index}") for output in self.staging.outputs]
        lines = [
            *self.opening(),
            "  constexpr int chunk = turns * deep, line = chunk / wide;",
            "  constexpr unsigned pieces = across * width * line, threads = deep * across;",
            *(f"  __shared__ of::Tile<{TYPES[dtype].storage}, across * width, chunk, width, wide> {name};"
              for dtype, name in tiles),
            *self.columns("(idx)blockIdx.x"),
            "  const idx begins = (idx)blockIdx.x * (across * width);",
        ]
        for phase in range(self.phases.count):
            self.phase, self.brought = phase, {}
            lines += self.phase_lines()
        lines += self.row_outputs()
        return self.body(lines)

    def known(self, scalar: Scalar) -> str | None:
        """Also an element that was brought into shared memory."""
        found = super().known(scalar)
        if found is not None or not isinstance(scalar, Load) or scalar not in self.tiles:
            return found
        self.brought[scalar] = self.tiles[scalar]
        element = f"of::value(*{self.tiles[scalar]}.place(column * width + v, at))"
        return self.writer.define(scalar, Scope.LANE, TYPES[scalar.dtype].compute, element, element_of(scalar))

    def head(self) -> list[str]:
        """A thread has every ``deep``-th element, of the columns or of the chunk at hand."""
        if not self.chunks:
            return super().head()
        item = ["    const int item = part * turns + turn;"] if self.keep else []
        inside = "item < items && " if self.keep else ""
        return [
            "#pragma unroll",
            "  for (int turn = 0; turn < turns; ++turn) {",
            *item,
            "    const int at = turn * deep + place;",
            "    const idx e = begin + at;",
            f"    if ({inside}e < {self.frame.length}) {{",
        ]

    def store(self, output: Output, name: str) -> list[str]:
        """Into memory, or to where the block sends it from."""
        if not output.staged:
            return super().store(output, name)
        element = f"of::Store<{TYPES[output.dtype].storage}>::from({name}[v])"
        return [
            "#pragma unroll",
            f"for (int v = 0; v < width; ++v) *out{output.index}.place(column * width + v, at) = {element};",
        ]

    def loop(self, vectors: list[str], inner: list[str], after: list[str]) -> list[str]:
        """In chunks, where something is staged."""
        sent = [
            output for output in self.staging.outputs if self.phases.depth(output.scalar) == self.phase
        ]
        self.chunks = bool(self.brought or sent)
        computed = super().loop(vectors, inner, after)
        if not self.chunks:
            return computed
        if self.keep:
            lines = [
                "#pragma unroll",
                "  for (int part = 0; part < (items + turns - 1) / turns; ++part) {",
                "    const idx begin = part * chunk;",
            ]
        else:
            lines = [f"  for (idx begin = 0; begin < {self.frame.length}; begin += chunk) {{"]
        # What the chunk before, or another phase, left in shared memory may still be read.
        lines += ["    __syncthreads();" if self.used else "    if (begin > 0) __syncthreads();"]
        self.used = True
        lines += self._bring()
        lines += [line if line.startswith("#") else f"  {line}" for line in computed]
        return [*lines, *self._send(sent), "  }"]

    def _bring(self) -> list[str]:
        """Global to shared memory: all of a thread's loads, then all of its stores."""
        if not self.brought:
            return []
        writer = Writer(self.staging.down, self.sizes)
        fetched = [
            line for load, name in self.brought.items()
            for line in fetch(writer, load, f"{name}_piece[turn]", "wide")
        ]
        arrays = [
            f"    of::Vector<{TYPES[load.dtype].storage}, wide> {name}_piece[(pieces + threads - 1) / threads] = {{}};"
            for load, name in self.brought.items()
        ]
        puts = [f"of::store({name}.place(of_block, at), {name}_piece[turn]);" for name in self.brought.values()]
        return [
            *arrays, *self._pieces(self._inside([*writer.upto(Scope.VECTOR), *fetched])), *self._pieces(puts),
            "    __syncthreads();",
        ]

    def _send(self, outputs: Sequence[Output]) -> list[str]:
        """Shared to global memory."""
        if not outputs:
            return []
        writer = Writer(self.staging.down, self.sizes)
        sent = [
            f"of::store({pointer(f'o{output.index}', writer.index(output.place))}, "
            f"of::load<wide>(out{output.index}.place(of_block, at)));"
            for output in outputs
        ]
        return ["    __syncthreads();", *self._pieces(self._inside([*writer.upto(Scope.VECTOR), *sent]))]

    def _pieces(self, body: Iterable[str]) -> list[str]:
        """A loop in which the block's threads share the chunk's vectors, neighbours along a column: ``of_block`` is the
        column in the block and ``at`` the place in the chunk."""
        return [
            "#pragma unroll",
            "    for (int turn = 0; turn < (pieces + threads - 1) / threads; ++turn) {",
            "      const unsigned piece = turn * threads + threadIdx.x;",
            "      const int of_block = piece / line, at = piece % line * wide;",
            "      if (pieces % threads == 0 || piece < pieces) {",
            *(line if line.startswith("#") else f"        {line}" for line in body),
            "      }",
            "    }",
        ]

    def _inside(self, body: Iterable[str]) -> list[str]:
        """Where the piece is one of the tensor's."""
        return [
            "const idx row = begins + of_block, e = begin + at;",
            f"if (row < {self.frame.count} && e < {self.frame.length}) {{",
            *(line if line.startswith("#") else f"  {line}" for line in body),
            "}",
        ]
