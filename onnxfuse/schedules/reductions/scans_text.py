"""The texts of kernels with running totals.

A block, or less, shares a row, or a block shares rows that lie side by side, as in the schedules of rows and columns.
A phase goes over the row in *stages*, one for each total and one for what is made of them: a stage computes the
elements of all items, then the threads total them, and the next stage has the totals in registers.  A row that does not
fit goes by *tiles*, each through all stages; what the tiles before came to is carried along.
"""

from __future__ import annotations

from collections.abc import Iterable

from onnxfuse.ir.scalars import REDUCTIONS, TYPES
from onnxfuse.lowering.pull import Load, Reduced, Scalar, Scanned, children
from onnxfuse.schedules.lanes import Lanes
from onnxfuse.schedules.reductions.columns import ColumnText
from onnxfuse.schedules.reductions.phases import Frame, Phases, PhaseText, neutral, vectors_of
from onnxfuse.schedules.reductions.rows_text import RowText
from onnxfuse.schedules.text import indented


def totals_of(roots: Iterable[Scalar]) -> list[Scanned]:
    """The totals that expressions are made of, each after those that it is made of itself; not what only reductions
    need, which are there already."""
    found: dict[Scalar, None] = {}

    def visit(scalar: Scalar) -> None:
        if scalar not in found and not isinstance(scalar, Reduced):
            for child in children(scalar):
                visit(child)
            found[scalar] = None

    for root in roots:
        visit(root)
    return [scalar for scalar in found if isinstance(scalar, Scanned)]


def held(phases: Phases, lanes: Lanes, tiles: bool) -> list[Load]:
    """Vectors that several stages read: of one phase where a row goes by tiles, else of all."""
    counts: dict[Load, int] = {}
    most: dict[Load, int] = {}
    known: set[Scanned] = set()
    for phase in range(phases.count):
        roots = phases.roots(phase)
        totals = [total for total in totals_of(roots) if tiles or total not in known]
        known.update(totals)
        for stage in [*([total.element] for total in totals), roots]:
            for load in vectors_of(stage, lanes):
                counts[load] = counts.get(load, 0) + 1
                most[load] = max(most.get(load, 0), counts[load])
        if tiles:
            counts.clear()
    return [load for load, times in most.items() if times > 1]


class Stages(PhaseText):
    """Phases in stages; how threads lie along a row is left to subclasses.

    Attributes:
        tiles: whether a row goes by tiles.
        bounds: where the tiles begin and end.
        tile: text of the elements of one.
    """

    tiles = True
    tile: str

    def start(self) -> None:
        """What the texts of a kernel begin with; subclasses call it once their phases are known."""
        vectors = held(self.phases, self.frame.lanes, self.tiles)
        self.bounds = "0", self.frame.length
        self.held = {load: self.writer.fresh(f"held{load.input}_") for load in vectors}
        self.scans: dict[Scanned, str] = {}
        self.stages: list[str] = []
        self.carried: list[str] = []
        self.backward = False
        self.ready = False

    def carry(self, total: Scanned, name: str) -> list[str]:
        """What comes before the first tile."""
        raise NotImplementedError(type(self))

    def scanned(self, total: Scanned, name: str) -> list[str]:
        """Make totals of an array of elements."""
        raise NotImplementedError(type(self))

    def phase_lines(self) -> list[str]:
        """The stages of the phase at hand, and its reductions."""
        self.staged(totals_of(self.phases.roots(self.phase)))
        return super().phase_lines()

    def staged(self, totals: Iterable[Scanned]) -> None:
        """The stages of these totals, those of what they are made of before them."""
        if self.tiles:
            self.scans.clear()
        self.stages, self.carried = [], []
        if self.held and (self.tiles or not self.ready):
            before, inside = self.asked(self.held)
            self.carried += indented(before)
            self.stages += self._vectors(inside)
        self.ready, self.backward = True, False
        for total in totals:
            self.backward = self.backward or total.reverse
            if total not in self.scans:
                self._stage(total)

    def known(self, scalar: Scalar) -> str | None:
        """Also a total, and a vector that several stages read."""
        if isinstance(scalar, Scanned):
            return f"{self.scans[scalar]}[item * width + v]"
        if isinstance(scalar, Load) and scalar in self.held:
            return self.writer.of_vector(scalar, f"{self.held[scalar]}[item]")
        return super().known(scalar)

    def loaded(self) -> list[str]:
        """Nothing: what several stages read was asked for before."""
        return []

    def loop(self, vectors: list[str], inner: list[str], after: list[str]) -> list[str]:
        """The last stage of a phase, behind the others; all of them for one tile after the other."""
        lines = [*self.stages, *super().loop(vectors, inner, after)]
        if not self.tiles:
            return [*self.carried, *lines]
        (first, end), tile = self.bounds, f"(idx)({self.tile})"
        before, less = ("", "") if first == "0" else (f"{first} + ", f" - {first}")
        last = f"{before}({end} - 1{less}) / {tile} * {tile}"
        tiles = f"idx start = {last}; start >= {first}; start -= {tile}" if self.backward else (
            f"idx start = {first}; start < {end}; start += {tile}")
        return [*self.carried, f"  for ({tiles}) {{", *indented(lines), "  }"]

    def _vectors(self, asked: list[str]) -> list[str]:
        """Ask for the vectors that several stages read, all at once."""
        room = [f"  of::Vector<{TYPES[load.dtype].storage}, width> {name}[items];" for load, name in self.held.items()]
        return [*room, *self.head(), *indented(asked, 3), "    }", "  }"]

    def _stage(self, total: Scanned) -> None:
        """What is totalled, and the totals in its place."""
        kind, name = TYPES[total.dtype].compute, self.writer.fresh("total")
        inner = f"{name}[item * width + v] = {self.writer.scalar(total.element)};"
        self.stages += [f"  {kind} {name}[items * width];", f"  of::fill({name}, {neutral(total)});"]
        self.stages += super().loop([], [inner], [])
        self.stages += self.scanned(total, name)
        self.carried += self.carry(total, name)
        self.scans[total] = name


def _settings(total: Scanned, threads: str) -> str:
    """The template's arguments of what makes totals."""
    flags = (str(flag).lower() for flag in (total.reverse, total.exclusive))
    return ", ".join([REDUCTIONS[total.kind][0], threads, *flags, "width", "items"])


class Along(Stages):
    """Neighbouring threads have neighbouring vectors of a row, over the template's ``width``, ``threads`` (of a row)
    and ``items``."""

    tile = "threads * width * items"

    def head(self) -> list[str]:
        """Neighbouring threads have neighbouring vectors."""
        return [
            "#pragma unroll",
            "  for (int item = 0; item < items; ++item) {",
            f"    const idx e = {'start + ' if self.tiles else ''}((idx)item * threads + lane) * width;",
            f"    if (e < {self.bounds[1]}) {{",
        ]

    def carry(self, total: Scanned, name: str) -> list[str]:
        """Nothing."""
        return [f"  {TYPES[total.dtype].compute} {name}_before = {neutral(total)};"]

    def scanned(self, total: Scanned, name: str) -> list[str]:
        """Over the threads of the row."""
        return [
            f"  __shared__ {TYPES[total.dtype].compute} {name}_of_warps[items * (threads > 32 ? threads / 32 : 1)];",
            f"  of::scan<{_settings(total, 'threads')}>({name}, {name}_before, {neutral(total)}, {name}_of_warps);",
        ]


class Across(Stages):
    """Threads have some neighbouring elements each of a vector of rows that lie side by side, over the template's
    ``width``, ``deep``, ``across`` and ``items``."""

    tile = "deep * items"

    def head(self) -> list[str]:
        """The elements of a thread are neighbours; neighbouring threads have them of neighbouring rows."""
        return [
            "#pragma unroll",
            "  for (int item = 0; item < items; ++item) {",
            "    const idx e = start + (idx)place * items + item;",
            f"    if (e < {self.bounds[1]}) {{",
        ]

    def carry(self, total: Scanned, name: str) -> list[str]:
        """Nothing."""
        kind = TYPES[total.dtype].compute
        return [f"  {kind} {name}_before[width];", f"  of::fill({name}_before, {neutral(total)});"]

    def scanned(self, total: Scanned, name: str) -> list[str]:
        """Over the threads of a row."""
        return [
            f"  __shared__ {TYPES[total.dtype].compute} {name}_of_groups[of::room<deep, across, width>];",
            f"  of::scan_columns<{_settings(total, 'deep, across')}>({name}, {name}_before, {neutral(total)}, "
            f"{name}_of_groups);",
        ]


class AlongText(Along, RowText):
    """Totals along rows, also over the template's ``block`` and ``idx``."""

    def __init__(self, frame: Frame, tiles: bool) -> None:
        super().__init__(frame, keep=False)
        self.tiles = tiles
        self.start()


class AcrossText(Across, ColumnText):
    """Totals of rows that lie side by side."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame, keep=False)
        self.start()
