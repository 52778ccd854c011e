"""Rows that registers do not hold: read again in every phase, or kept in the shared memory of their block.

A row is kept as it is in memory: in the phase that reads a vector first, a thread puts it into a place of its own, and
takes it from there in later phases, with no barrier between.  Loads of several elements are on their way at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.pull import Load, Reduced, Scalar
from onnxfuse.schedules.lanes import Scope
from onnxfuse.schedules.reductions.phases import Frame, Turn, neutral, vectors_of
from onnxfuse.schedules.reductions.rows_text import RowText
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.text import indented

BLOCK_SHARED = "120 sm <= 101376 90 sm <= 232448 sm 80 == sm 87 == or 166912 86 sm <= 101376 65536 sel sel sel sel"
"""Shared memory that a block may have on the GPU at hand, in bytes, as the launch plan writes it."""

MOST_SHARED = 232_448
"""The most that any has."""

RESULTS = 256
"""Bytes of static shared memory that a reduction takes at most: a number a warp."""

PIECE = 16
"""What each tensor's row begins at a multiple of, in bytes."""


def kept_vectors(frame: Frame) -> list[Load]:
    """Vectors of a row that several phases read; not what all rows have in common, which the caches keep."""
    lanes, counts = frame.lanes, dict[Load, int]()
    for phase in range(frame.streaming.count):
        for load in vectors_of(frame.streaming.roots(phase), lanes):
            counts[load] = counts.get(load, 0) + 1
    return [load for load, times in counts.items()
            if times > 1 and any(lanes._variable_follows(name, lanes.row) for name in load.offset.symbols)]


def fixed_bytes(frame: Frame) -> int:
    """Static shared memory of a kernel that shares rows among the warps of a block, at most."""
    return RESULTS * sum(map(len, frame.streaming.reductions))


def longest_row(frame: Frame) -> int:
    """Elements of the longest row that some GPU's shared memory holds; 0 where nothing is to be kept."""
    each = sum(TYPES[load.dtype].size for load in kept_vectors(frame))
    return (MOST_SHARED - fixed_bytes(frame)) // each // PIECE * PIECE - padding(frame) if each else 0


def padding(frame: Frame) -> int:
    """Elements before and after a row that is kept, which lies between vectors as it does in memory."""
    return frame.lanes.width if frame.peeled else 0


def row_bytes(frame: Frame, length: str) -> str:
    """Bytes of a row that is kept, as the launch plan writes them; ``length`` is its elements."""
    elements = f"{length} {padding(frame)} +" if frame.peeled else length
    first, *more = (f"{elements} {TYPES[load.dtype].size} * {PIECE} ceil {PIECE} *" for load in kept_vectors(frame))
    return " ".join([first, *(f"{each} +" for each in more)])


class StreamText(RowText):
    """The text of such a kernel, over the template's ``width``, ``threads`` (of a row), ``block``, ``items`` (vectors
    that a thread asks for at a time) and ``idx``."""

    def __init__(self, frame: Frame, kept: Sequence[Load]) -> None:
        super().__init__(frame, keep=False)
        self.kept = {load: self.writer.fresh(f"kept{load.input}_") for load in kept}
        self.stored: dict[Load, int] = {}
        self.gathered: list[str] = []
        self.emptied: list[str] = []
        self.taken: list[str] = []

    def opening(self) -> list[str]:
        """Where the vectors of each tensor are kept."""
        lines = ["  extern __shared__ __align__(16) unsigned char rows_kept[];"] if self.kept else []
        before, length, place = "rows_kept", self.frame.length, ""
        if self.frame.peeled:
            length, place = f"({length} + {padding(self.frame)})", " + place"
        for load, name in self.kept.items():
            kind = TYPES[load.dtype]
            lines.append(f"  {kind.storage}* const {name} = reinterpret_cast<{kind.storage}*>({before}){place};")
            before += f" + ({length} * {kind.size} + {PIECE - 1}) / {PIECE} * {PIECE}"
        return lines

    def known(self, scalar: Scalar) -> str | None:
        """Also a vector that is kept, which the phase that reads it first puts there."""
        found = super().known(scalar)
        if found is not None or not isinstance(scalar, Load) or scalar not in self.kept:
            return found
        place = f"{self.kept[scalar]} + e"
        if self.stored.setdefault(scalar, self.phase) < self.phase:
            return self.writer.of_vector(scalar, f"of::load<width>({place})")
        element = self.writer.of_vector(scalar, f"of::load<width>({self.writer.address(scalar)})")
        vector = self.writer.names[Scope.VECTOR]["vector", scalar]
        self.writer.lines[Scope.VECTOR].append(f"of::store({place}, {vector});")
        return element

    def loaded(self) -> list[str]:
        """Nothing: registers hold no row."""
        return []

    def gather(self, name: str, largest: Reduced, value: str, taken: str, turn: Turn) -> None:
        """Collect values of as many vectors as are asked for at a time: their maximum is found before any is scaled."""
        self.gathered.append(f"{TYPES[largest.dtype].compute} {name}[items * width];")
        self.emptied.append(f"of::fill({name}, {neutral(largest)});")
        turn.inner.append(f"{name}[item * width + v] = {value};")
        self.taken.append(taken)

    def loop(self, vectors: list[str], inner: list[str], after: list[str]) -> list[str]:
        """Groups of vectors without a question where the row ends, then those of the rest."""
        if not self.kept and not self.gathered:
            return super().loop(vectors, inner, after)
        body, (first, end) = self.turn_lines(vectors, inner, after, 0), self.span()
        each = ["#pragma unroll", "    for (int item = 0; item < items; ++item) {",
                "      const idx e = next + item * (threads * width);"]
        lines = indented([
            "{", f"  idx next = {first}(idx)lane * width;",
            f"  for (; next + (items - 1) * threads * width < {end}; next += items * threads * width) {{",
            *indented(self.gathered, 2), *each, *indented(body, 3), "    }", *indented(self.taken, 2), "  }",
            f"  if (next < {end}) {{", *indented([*self.gathered, *self.emptied], 2), *each,
            f"      if (e < {end}) {{", *indented(body, 4), "      }", "    }", *indented(self.taken, 2), "  }", "}",
        ], 1)
        lines += self.edge([*self.gathered, *self.emptied, *body, *self.taken])
        self.gathered, self.emptied, self.taken = [], [], []
        return lines


def streaming_text(frame: Frame, kept: Sequence[Load] = ()) -> Body:
    """The body of a kernel whose rows registers do not hold; ``kept`` is what shared memory does."""
    return StreamText(frame, kept).text()
