"""The text of a tiled kernel.

A block owns a tile: ``batch`` times ``rows`` times ``columns`` neighbouring places along the bases o, r and i.  What
lies along r in memory goes through shared memory on its way in or out; everything else is as in a pointwise kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnxfuse.graph.dims import Dim
from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.pull import Load, Scalar
from onnxfuse.schedules.kernel import is_vector
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.pointwise import Store, vector_lines
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.text import Sizes, Writer, pointer, unrolled

THREADS = 256

MOST_UNROLLED = 4
"""Vectors of outputs that a thread computes at a time; what it computes may be long."""


@dataclass(frozen=True)
class Target:
    """Output ``index``: its expression, and its place in memory; ``staged`` where that runs along r."""

    index: int
    dtype: int
    scalar: Scalar
    offset: Dim
    staged: bool


@dataclass(frozen=True)
class TiledWork:
    """What a tiled kernel does.

    Attributes:
        extents: of the bases o, r and i.
        loads: those that go through shared memory.
        down: lanes along r, the way staged tensors lie in memory; across: lanes along i.
    """

    extents: tuple[Dim, Dim, Dim]
    loads: Sequence[Load]
    targets: Sequence[Target]
    down: Lanes
    across: Lanes

    @property
    def staged(self) -> list[int]:
        """Element types of what goes through shared memory."""
        return [load.dtype for load in self.loads] + [target.dtype for target in self.targets if target.staged]


def tiled_text(work: TiledWork, sizes: Mapping[str, str]) -> Body:
    """The body of the kernel, over the template's ``batch``, ``rows``, ``columns``, ``tall``, ``width`` and ``idx``."""
    return _TiledText(work, sizes).text()


class _TiledText:
    def __init__(self, work: TiledWork, sizes: Mapping[str, str]) -> None:
        self.work = work
        self.sizes = Sizes(sizes)
        self.tiles = {load: f"tile{place}" for place, load in enumerate(work.loads)}
        self.outgoing = [target for target in work.targets if target.staged]
        self.compute = Writer(work.across, self.sizes, self._from_tile)
        size = self.compute.size
        self.o, self.r, self.i = (size(extent) for extent in work.extents)

    def text(self) -> Body:
        """All phases."""
        lines = [f"  __shared__ {self._tile(load.dtype)} {name};" for load, name in self.tiles.items()]
        lines += [f"  __shared__ {self._tile(target.dtype)} out{target.index};" for target in self.outgoing]
        lines += [
            f"  const idx wide = ({self.i} + columns - 1) / columns, high = ({self.r} + rows - 1) / rows;",
            "  const idx left = (idx)blockIdx.x % wide * columns;",
            "  const idx top = (idx)blockIdx.x / wide % high * rows;",
            "  const idx front = (idx)blockIdx.x / wide / high * batch;",
        ]
        if self.work.loads:
            lines += ["  // Into shared memory, along what lies in one piece.", *self._bring(), "  __syncthreads();"]
        lines += ["  // The outputs' elements, along i.", *self._compute()]
        if self.outgoing:
            lines += ["  // Out of shared memory, along what lies in one piece.", "  __syncthreads();", *self._send()]
        return Body("\n".join(lines) + "\n", frozenset(self.sizes.used))

    def _tile(self, dtype: int) -> str:
        return f"of::Tile<{TYPES[dtype].storage}, batch * rows, columns, tall, width>"

    # ---- The tile's places, seen in the order of memory along r, or along i. ----

    def _down(self, body: Iterable[str]) -> list[str]:
        """A loop over pieces of ``tall`` by ``width`` places, neighbouring threads below one another."""
        return _loop(
            "tall * width",
            "#pragma unroll",
            [
                "const int row = t % (rows / tall) * tall;",
                "const int column = t / (rows / tall) % (columns / width) * width;",
                "const int part = batch == 1 ? 0 : t / (rows / tall * (columns / width));",
                *body,
            ],
        )

    def _each_column(self, body: Iterable[str]) -> list[str]:
        """A loop over the columns of a piece, with the bases at the first of its ``tall`` places."""
        return [
            "const idx o = front + part, r = top + row;",
            "#pragma unroll",
            "for (int j = 0; j < width; ++j) {",
            "  const idx i = left + column + j;",
            f"  if (o < {self.o} && r < {self.r} && i < {self.i}) {{",
            *(line if line.startswith("#") else f"    {line}" for line in body),
            "  }",
            "}",
        ]

    def _bring(self) -> list[str]:
        """Global to shared memory: all of a thread's loads, then all of its stores."""
        writer = Writer(self.work.down, self.sizes)
        fetched: list[str] = []
        for load, name in self.tiles.items():
            fetched += fetch(writer, load, f"{name}_down[turn][j]", "tall")
        defined = writer.upto(Scope.VECTOR)
        turns = f"(batch * rows * columns / (tall * width) + {THREADS - 1}) / {THREADS}"
        arrays = [
            f"  of::Vector<{TYPES[load.dtype].storage}, tall> {name}_down[{turns}][width] = {{}};"
            for load, name in self.tiles.items()
        ]
        puts = [f"{name}.put(part * rows + row, column, {name}_down[turn]);" for name in self.tiles.values()]
        return [*arrays, *self._down(self._each_column([*defined, *fetched])), *self._down(puts)]

    def _compute(self) -> list[str]:
        """From inputs and tiles to outputs and tiles."""
        stores = []
        for target in self.work.targets:
            place = f"out{target.index}.place(part * rows + row, column)"
            if not target.staged:
                place = pointer(f"o{target.index}", self.compute.index(target.offset))
            stores.append(Store(target.index, target.dtype, target.scalar, place))
        lines = vector_lines(self.compute, stores)
        return _loop(
            "width",
            f"#pragma unroll {MOST_UNROLLED}",
            [
                "const int column = t % (columns / width) * width;",
                "const int row = t / (columns / width) % rows;",
                "const int part = batch == 1 ? 0 : t / (columns / width * rows);",
                "const idx o = front + part, r = top + row, i = left + column;",
                f"if (o < {self.o} && r < {self.r} && i < {self.i}) {{",
                *(line if line.startswith("#") else f"  {line}" for line in lines),
                "}",
            ],
        )

    def _from_tile(self, scalar: Scalar) -> str | None:
        """Text of an element that was brought into shared memory."""
        if not isinstance(scalar, Load) or scalar not in self.tiles:
            return None
        text = f"of::load<width>({self.tiles[scalar]}.place(part * rows + row, column))"
        return self.compute.of_vector(scalar, text)

    def _send(self) -> list[str]:
        """Shared to global memory."""
        writer = Writer(self.work.down, self.sizes)
        sent = [
            f"of::store({pointer(f'o{target.index}', writer.index(target.offset))}, out{target.index}_down[j]);"
            for target in self.outgoing
        ]
        defined = writer.upto(Scope.VECTOR)
        takes = []
        for target in self.outgoing:
            takes += [
                f"of::Vector<{TYPES[target.dtype].storage}, tall> out{target.index}_down[width];",
                f"out{target.index}.take(part * rows + row, column, out{target.index}_down);",
            ]
        return self._down([*takes, *self._each_column([*defined, *sent])])


def fetch(writer: Writer, load: Load, target: str, width: str) -> list[str]:
    """Lines that read a vector of an input into the vector ``target``; ``width`` is how the text calls its width.  What
    a condition does not allow is left as it is."""
    conditions = [writer.condition(condition)[0] for condition in load.conditions]
    allowed = " && ".join(f"({text})" for text in conditions if text != "true")
    guard = f"if ({allowed}) " if allowed else ""
    if is_vector(load, writer.lanes):
        return [f"{guard}{target} = of::load<{width}>({writer.address(load)});"]
    place = writer.index(load.offset, lane=True)
    inner = [*writer.lines[Scope.LANE], f"{guard}{target}.at[v] = i{load.input}[{place}];"]
    writer.lines[Scope.LANE] = []
    writer.names[Scope.LANE] = {}
    return unrolled(f"int v = 0; v < {width}; ++v", inner)


def _loop(piece: str, unroll: str, body: Iterable[str]) -> list[str]:
    """A loop in which the block's threads share the tile's pieces of so many places; ``t`` is the piece at hand."""
    return [
        "  {",
        f"    constexpr unsigned pieces = batch * rows * columns / ({piece});",
        unroll,
        f"    for (int turn = 0; turn < (pieces + {THREADS - 1}) / {THREADS}; ++turn) {{",
        f"      const unsigned t = turn * {THREADS} + threadIdx.x;",
        f"      if (pieces % {THREADS} == 0 || t < pieces) {{",
        *(line if line.startswith("#") else f"        {line}" for line in body),
        "      }",
        "    }",
        "  }",
    ]
