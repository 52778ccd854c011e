"""Rows that begin between two vectors: their first and last elements one by one, what is between them by vectors.

Of rows whose length no vector divides, each begins elsewhere between two vectors' places.  All tensors that lie as the
rows do begin alike: what is a vector of one of them is one of all.  A row has a *head* before its first whole vector, a
*body* of whole vectors, and a *tail*; of head and tail together, its *edges*, a thread has one element at most, which
goes through the same lines as a vector of width one.  What lies otherwise, such as weights that the rows have in
common, is read element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from onnxfuse.graph.dims import Dim, dim, symbol
from onnxfuse.lowering.pull import Condition
from onnxfuse.schedules.lanes import Lanes, Sizes
from onnxfuse.schedules.text import indented

LONG_ODD_ROW = 1024
"""Elements of a row from which on it is read so, where shorter ones have another way; not measured yet."""


@dataclass
class PeeledLanes(Lanes):
    """How indices move along the lanes of vectors that begin where some tensors have whole ones.

    Attributes:
        start: the index of a row's first element in these tensors.
    """

    start: Dim = field(default_factory=lambda: dim(0))

    def _step(self, name: str) -> tuple[Dim | None, Sizes]:
        """Digits of the element may change anywhere in a vector, whatever their sizes are."""
        digit = self.space.digits.get(name)
        if digit is not None and digit.base == self.element:
            return None, ()
        return super()._step(name)

    def _aligned(self, index: Dim) -> tuple[bool, Sizes]:
        """Where it differs from the index that vectors follow by whole vectors."""
        return (index - self.start - symbol(self.element)).multiple_of() % self.width == 0, ()

    def _uniform(self, condition: Condition) -> tuple[bool, Sizes]:
        stride, taken = self._stride(condition.index)
        return stride == 0, taken


def opening(begins: str, length: str) -> list[str]:
    """Lines that find the parts of a row; ``begins`` is the index of its first element, and the template's ``vector``
    the width."""
    return [
        "  // Vectors begin where memory has whole ones: before the first and after the last are the row's edges.",
        "  constexpr int width = vector;",
        '  static_assert(threads >= 2 * (vector - 1), "a thread for each edge");',
        f"  const idx place = ({begins}) % vector;",
        f"  const idx first = of::imin((vector - place) % vector, (idx){length});",
        f"  const idx stop = {length} - ({length} - first) % vector;",
        f"  const idx edges = first + ({length} - stop);",
    ]


def edge(thread: str, item: str, body: Sequence[str]) -> list[str]:
    """The lines of a vector for the edge of a ``thread`` (its number among those of the row), if it has one; ``item``
    is where registers keep it."""
    return [
        f"  if ({thread} < edges) {{", "    constexpr int width = 1;", f"    constexpr int item = {item};",
        f"    const idx e = {thread} < first ? {thread} : stop + ({thread} - first);", *indented(body, 2), "  }",
    ]
