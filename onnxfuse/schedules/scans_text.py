"""The texts of kernels with running totals.

Along rows a group of threads shares a row, as in the row schedule.  A phase goes over the row in *stages*, one for
each total and one for what is made of them: a stage computes the elements of all items, then the threads total them,
and the next stage has the totals in registers.  A row that does not fit goes by *tiles*, each through all stages; what
the tiles before came to is carried along.  Across rows a thread has whole rows, and a total is a variable that grows.
"""

from __future__ import annotations

from collections.abc import Iterable

from onnxfuse.ir.scalars import REDUCTIONS, TYPES
from onnxfuse.lowering.pull import Load, Reduced, Scalar, Scanned, children
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.phases import Frame, PhaseText, neutral
from onnxfuse.schedules.rows_text import RowText
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.text import Writer


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


def held(frame: Frame, tiles: bool) -> list[Load]:
    """Vectors that several stages read: of one phase where a row goes by tiles, else of all."""
    counts: dict[Load, int] = {}
    most: dict[Load, int] = {}
    known: set[Scanned] = set()
    for phase in range(frame.phases.count):
        roots = frame.phases.roots(phase)
        totals = [total for total in totals_of(roots) if tiles or total not in known]
        known.update(totals)
        for stage in [*([total.element] for total in totals), roots]:
            for load in _loads(stage, frame.lanes):
                counts[load] = counts.get(load, 0) + 1
                most[load] = max(most.get(load, 0), counts[load])
        if tiles:
            counts.clear()
    return [load for load, times in most.items() if times > 1]


def _loads(roots: Iterable[Scalar], lanes: Lanes) -> list[Load]:
    """Vectors that one stage reads."""
    seen: dict[Scalar, None] = {}
    stack = list(roots)[::-1]
    while stack:
        scalar = stack.pop()
        if scalar not in seen and not isinstance(scalar, Scanned | Reduced):
            seen[scalar] = None
            stack += children(scalar)[::-1]
    return [scalar for scalar in seen if isinstance(scalar, Load) and not scalar.conditions
            and lanes.stride(scalar.offset) == 1 and lanes.aligned(scalar.offset)]


class AlongText(RowText):
    """Totals along rows, over the template's ``width``, ``threads`` (of a row), ``block``, ``items`` and ``idx``."""

    def __init__(self, frame: Frame, tiles: bool) -> None:
        super().__init__(frame, keep=False)
        self.tiles = tiles
        self.held = {load: self.writer.fresh(f"held{load.input}_") for load in held(frame, tiles)}
        self.totals: dict[Scanned, str] = {}
        self.stages: list[str] = []
        self.carried: list[str] = []
        self.backward = False
        self.asked = False

    def phase_lines(self) -> list[str]:
        """The stages of the phase at hand, and its reductions."""
        if self.tiles:
            self.totals.clear()
        self.stages, self.carried = self._vectors() if self.tiles or not self.asked else [], []
        self.asked, self.backward = True, False
        for total in totals_of(self.phases.roots(self.phase)):
            self.backward = self.backward or total.reverse
            if total not in self.totals:
                self._stage(total)
        return super().phase_lines()

    def known(self, scalar: Scalar) -> str | None:
        """Also a total, and a vector that several stages read."""
        if isinstance(scalar, Scanned):
            return f"{self.totals[scalar]}[item * width + v]"
        if isinstance(scalar, Load) and scalar in self.held:
            return self.writer.of_vector(scalar, f"{self.held[scalar]}[item]")
        return super().known(scalar)

    def head(self) -> list[str]:
        """Neighbouring threads have neighbouring vectors."""
        return [
            "#pragma unroll",
            "  for (int item = 0; item < items; ++item) {",
            f"    const idx e = {'begin + ' if self.tiles else ''}((idx)item * threads + lane) * width;",
            f"    if (e < {self.frame.length}) {{",
        ]

    def loaded(self) -> list[str]:
        """Nothing: what several stages read was asked for before."""
        return []

    def loop(self, vectors: list[str], inner: list[str], after: list[str]) -> list[str]:
        """The last stage of a phase, behind the others; all of them for one tile after the other."""
        lines = [*self.stages, *super().loop(vectors, inner, after)]
        if not self.tiles:
            return [*self.carried, *lines]
        length, tile = self.frame.length, "(idx)(threads * width * items)"
        tiles = f"idx begin = ({length} - 1) / {tile} * {tile}; begin >= 0; begin -= {tile}" if self.backward else (
            f"idx begin = 0; begin < {length}; begin += {tile}")
        inside = [line if line.startswith("#") else f"  {line}" for line in lines]
        return [*self.carried, f"  for ({tiles}) {{", *inside, "  }"]

    def _vectors(self) -> list[str]:
        """Ask for the vectors that several stages read, all at once."""
        if not self.held:
            return []
        writer = Writer(self.frame.lanes, self.sizes)
        loads = [f"{name}[item] = of::load<width>({writer.address(load)});"
                 for load, name in self.held.items()]
        inner = [line for scope in Scope for line in writer.lines[scope]]
        room = [f"  of::Vector<{TYPES[load.dtype].storage}, width> {name}[items];" for load, name in self.held.items()]
        return [*room, *self.head(), *(f"      {line}" for line in [*inner, *loads]), "    }", "  }"]

    def _stage(self, total: Scanned) -> None:
        """What is totalled, and the totals in its place."""
        kind, functor = TYPES[total.dtype].compute, REDUCTIONS[total.kind][0]
        name, none = self.writer.fresh("total"), neutral(total)
        inner = f"{name}[item * width + v] = {self.writer.scalar(total.element)};"
        flags = (str(flag).lower() for flag in (total.reverse, total.exclusive))
        settings = ", ".join([functor, "threads", *flags, "width", "items"])
        self.stages += [f"  {kind} {name}[items * width];", f"  of::fill({name}, {none});"]
        self.stages += super().loop([], [inner], [])
        self.stages += [
            f"  __shared__ {kind} {name}_of_warps[items * (threads > 32 ? threads / 32 : 1)];",
            f"  of::scan<{settings}>({name}, {name}_before, {none}, {name}_of_warps);",
        ]
        self.carried.append(f"  {kind} {name}_before = {none};")
        self.totals[total] = name


class AcrossText(PhaseText):
    """Totals of rows that lie side by side, over the template's ``width``, ``block`` and ``idx``."""

    first = "live"

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame, keep=False)
        self.running: list[str] = []
        self.backward = False

    def text(self) -> Body:
        """The whole body."""
        lines = [
            "  const idx given = ((idx)blockIdx.x * block + threadIdx.x) * width;",
            f"  const bool live = given < {self.frame.count};",
            "  const idx row = live ? given : 0;",
        ]
        for phase in range(self.phases.count):
            self.phase, self.running = phase, []
            self.backward = any(total.reverse for total in totals_of(self.phases.roots(phase)))
            lines += self.phase_lines()
        return self.body([*lines, *self.row_outputs()])

    def known(self, scalar: Scalar) -> str | None:
        """Also a total: its variable, which grows where the total is first asked for."""
        if not isinstance(scalar, Scanned):
            return super().known(scalar)
        element = self.writer.scalar(scalar.element)
        kind, name = TYPES[scalar.dtype].compute, self.writer.fresh("running")
        self.running += [f"  {kind} {name}[width];", f"  of::fill({name}, {neutral(scalar)});"]
        grown = f"{name}[v] = {REDUCTIONS[scalar.kind][0]}::of({name}[v], {element})"
        if not scalar.exclusive:
            return self.writer.define(scalar, Scope.LANE, kind, grown, "total")
        total = self.writer.define(scalar, Scope.LANE, kind, f"{name}[v]", "total")
        self.writer.lines[Scope.LANE].append(f"{grown};")
        return total

    def head(self) -> list[str]:
        """A thread has its rows to itself; several elements are on their way at a time."""
        length = self.frame.length
        places = f"idx e = {length} - 1; e >= 0; --e" if self.backward else f"idx e = 0; e < {length}; ++e"
        return ["#pragma unroll 8", f"  for ({places}) {{"]

    def loop(self, vectors: list[str], inner: list[str], after: list[str]) -> list[str]:
        """The variables that grow, and the loop."""
        return [*self.running, *super().loop(vectors, inner, after)]

    def accumulator(self, name: str) -> str:
        """The accumulators are the results."""
        return name

    def reduce(self, name: str, reduction: Reduced) -> list[str]:
        """They are called by what they are of."""
        self.names[reduction] = f"{name}[v]"
        return []
