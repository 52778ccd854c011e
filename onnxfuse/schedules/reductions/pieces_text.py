"""The text of the steps of rows that lie in pieces: a split kernel of columns of which neighbours make up a row.

What differs from ``split_text`` of columns is whose numbers there are: threads combine those of a row's columns too,
scratch has one a row, and so has what is written once a row.  Blocks that run together have neighbouring columns of the
same places, and every other step goes over a chunk from its end: what the step before it read last may still be in the
second-level cache.
"""

from __future__ import annotations

from onnxfuse.ir.scalars import REDUCTIONS, TYPES
from onnxfuse.lowering.pull import Reduced, Scanned
from onnxfuse.schedules.lanes import Scope
from onnxfuse.schedules.reductions.columns import shared
from onnxfuse.schedules.reductions.moments import Moments
from onnxfuse.schedules.reductions.phases import accumulators
from onnxfuse.schedules.reductions.split_text import UNROLLED, ColumnSplit
from onnxfuse.schedules.text import indented


class PieceSplit(ColumnSplit):
    words = "pieces"
    template = ("width", "deep", "across", "columns", "pieces")
    # All blocks of a step run at a time: a few more would take as long again.
    share = "// 1 max"
    room = "of::room_of_pieces<deep, across, width, pieces>"

    @property
    def rows(self) -> str:
        """As many as there are whole sets of columns."""
        return "rows"

    def opening(self) -> list[str]:
        """Neighbouring blocks have neighbouring columns."""
        return [f"  const idx rows = {self.frame.count} / pieces;", *super().opening()]

    def which(self) -> list[str]:
        """Which columns and chunk the block has."""
        return [
            f"  const idx sets = ({self.frame.count} + columns - 1) / columns, part = (idx)blockIdx.x / sets;",
            *self.columns("(idx)blockIdx.x % sets"),
        ]

    def columns(self, block: str) -> list[str]:
        """The first of the thread's columns; those of a block are whole rows, beside which threads may be idle."""
        return [
            f"  const idx given = {block} * columns + column * width;",
            f"  const bool live = column * width < columns && given < {self.frame.count};",
            "  const idx row = live ? given : 0;",
            # So the compiler knows which columns of a vector are of one row.
            "  if (row < 0) __builtin_unreachable();",
        ]

    def head(self) -> list[str]:
        """A thread has every ``deep``-th element of the chunk."""
        step = f"#pragma unroll {UNROLLED}"
        if self.phase % 2 == 0:
            return [step, "  for (idx e = begin + place; e < end; e += deep) {"]
        return [
            step, "  for (idx turn = begin + place; turn < end; turn += deep) {",
            "    const idx e = begin + (end - 1 - turn);",
        ]

    def combined(self, name: str, reduction: Reduced | Scanned) -> str:
        """Over the threads of a column, and over the columns of a row."""
        functor, kind = REDUCTIONS[reduction.kind][0], TYPES[reduction.dtype].compute
        return f"  of::combine_pieces<{functor}, deep, across, pieces>({name}, {shared(kind)});"

    def combined_online(self, largest: tuple[str, Reduced], powers: tuple[str, Reduced]) -> str:
        """The same of a maximum and the sum that goes with it."""
        functor, kind = self.phases.online[powers[1]].functor, TYPES[largest[1].dtype].compute
        template = f"{functor}, {REDUCTIONS[largest[1].kind][0]}, deep, across, pieces"
        return f"  of::combine_exponentials_of_pieces<{template}>({largest[0]}, {powers[0]}, {shared(kind)});"

    def over_chunks(self, name: str, reduction: Reduced | Scanned) -> str:
        """All columns of a row have its numbers already."""
        functor, kind = REDUCTIONS[reduction.kind][0], TYPES[reduction.dtype].compute
        return f"  of::combine_alike<{functor}, deep, across, pieces>({name}, {shared(kind)});"

    def stored(self, name: str, reduction: Reduced | Scanned) -> list[str]:
        """One number a row."""
        target = f"{self.parts.names[reduction]} + (long long)part * rows"
        return [f"  if (live && place == 0) of::store_pieces<pieces>({target}, row, {name});"]

    def found(self, name: str, reduction: Reduced | Scanned) -> str:
        """The number of each column's row."""
        source, kind = f"{self.parts.names[reduction]} + (long long)c * rows", TYPES[reduction.dtype].compute
        return f"    const of::Vector<{kind}, width> {name} = of::load_pieces<width, pieces>({source}, row);"

    def reduce_moments(self, name: str, squares: Reduced, total: str) -> list[str]:
        """Each thread's are brought to the mean of the chunk."""
        moments, kind = self.phases.moments[squares], TYPES[squares.dtype].compute
        return [
            f"  const {kind} count_{name} = ({kind})(end - begin) * pieces;",
            f"  const {kind} factor_{name} = {self._factor(moments, f'count_{name}')};",
            "#pragma unroll", "  for (int v = 0; v < width; ++v)",
            f"    {name}[v] = of::about({name}[v], mean_{name}[v], met_{name}, {total}[v] * factor_{name});",
            self.combined(name, squares), *self.stored(name, squares),
        ]

    def together_moments(self, name: str, squares: Reduced, moments: Moments) -> list[str]:
        """Each chunk's are brought to the mean of the row."""
        kind, length, total = TYPES[squares.dtype].compute, self.frame.length, self.names[moments.total]
        mean = total if moments.shares else f"{total} / (({kind}){length} * pieces)"
        self.names[squares] = f"{name}[v]"
        return [
            *(f"  {line}" for line in accumulators(name, squares)),
            "  for (idx c = place; c < chunks; c += deep) {",
            self.found("found", squares), self.found("total", moments.total),
            f"    const idx rest = {length} - c * chunk;",
            f"    const {kind} count = ({kind})(rest > chunk ? chunk : rest) * pieces;",
            f"    const {kind} factor = {self._factor(moments, 'count')};",
            "#pragma unroll", "    for (int v = 0; v < width; ++v)",
            f"      {name}[v] += of::about(found.at[v], total.at[v] * factor, count, {mean});",
            "  }",
            self.over_chunks(name, squares),
        ]

    def _factor(self, moments: Moments, count: str) -> str:
        """What makes the total of so many elements their mean."""
        kind = TYPES[moments.total.dtype].compute
        return f"({kind}){self.frame.length} * pieces / {count}" if moments.shares else f"1 / {count}"

    def row_outputs(self) -> list[str]:
        """What there is once a row, by the first of its columns."""
        once = [output for output in self.phases.outputs if not output.whole]
        lines = []
        self.phase = self.phases.count
        for output in once:
            text = self.writer.scalar(output.scalar, each_row=True)
            place = self.writer.index(output.place, lane=True)
            store = f"o{output.index}[{place}] = of::Store<{TYPES[output.dtype].storage}>::from({text});"
            lane, vector, row, each = (
                self.writer.leave(scope) for scope in (Scope.LANE, Scope.VECTOR, Scope.ROW, Scope.EACH_ROW))
            lines += [
                *indented([*self.writer.outside(), *row, *vector], 2),
                "#pragma unroll", "    for (int v = 0; v < width; ++v) {",
                *indented([*each, *lane, f"if ((row + v) % pieces == 0) {store}"], 3), "    }",
            ]
        return [f"  if ({self.first}) {{", *lines, "  }"] if once else []
