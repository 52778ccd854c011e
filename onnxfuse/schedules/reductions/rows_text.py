"""The text of a row kernel: a group of threads shares a row, neighbouring threads take neighbouring vectors of it."""

from __future__ import annotations

from onnxfuse.ir.scalars import REDUCTIONS, TYPES
from onnxfuse.lowering.pull import Load, Reduced, Scalar, Scanned
from onnxfuse.schedules.attentions.shape import ARRIVALS
from onnxfuse.schedules.reductions.phases import Frame, PhaseText, neutral
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.text import indented

EARLY_BYTES = 128
"""Bytes a thread may hold of what only later phases read."""

SLOT = ARRIVALS + 8 * 8
"""Bytes of shared memory that a reduction has for what a cluster's blocks find: a barrier, and a number of each."""

_EARLY = "early"
"""Stands where the first phase has asked for its own vectors; what is asked for there is known at the end."""


def row_text(frame: Frame) -> Body:
    """The body of a row kernel over the template's ``width``, ``threads`` (of a row), ``block`` (threads of a block),
    ``items`` and ``idx``, with kept values in registers."""
    return RowText(frame, keep=True).text()


def clustered_text(frame: Frame) -> Body:
    """The same where the ``blocks`` of a cluster share a row; one more number of the template."""
    return ClusteredText(frame, keep=True).text()


class RowText(PhaseText):
    """The text of a row kernel; ``sharing``: how many threads share a row."""

    first, sharing = "live && lane == 0", "threads"

    def __init__(self, frame: Frame, keep: bool) -> None:
        super().__init__(frame, keep)
        self.early: dict[Load, str] = {}

    def text(self) -> Body:
        """The whole body."""
        lines = [
            *self.place(),
            # Threads past the last row go along, because the lanes of a warp reduce together, and write nothing.
            f"  const bool live = given < {self.frame.count};",
            f"  const idx row = live ? given : {self.frame.count} - 1;",
        ]
        phases: list[str] = []
        for phase in range(self.phases.count):
            self.phase = phase
            phases += self.phase_lines()
        place = phases.index(_EARLY) if _EARLY in phases else len(phases)
        early, phases[place:place + 1] = self._early_loads()
        lines += self.peel() + self.opening() + early + phases + self.row_outputs()
        return self.body(lines)

    def place(self) -> list[str]:
        """Which row a thread has, and which of its threads it is."""
        return ["  const int lane = threadIdx.x % threads;",
                "  const idx given = (idx)blockIdx.x * (block / threads) + threadIdx.x / threads;"]

    def opening(self) -> list[str]:
        """Lines before the first phase."""
        return []

    def known(self, scalar: Scalar) -> str | None:
        """Also a vector that was asked for early."""
        found = super().known(scalar)
        if found is None and isinstance(scalar, Load) and self.frame.lanes.moves(scalar):
            return self._early(scalar)
        return found

    def head(self) -> list[str]:
        """Neighbouring threads have neighbouring vectors."""
        first, end = self.span()
        if self.keep:
            return [
                "#pragma unroll",
                "  for (int item = 0; item < items; ++item) {",
                f"    const idx e = {first}((idx)item * {self.sharing} + lane) * width;",
                f"    if (e < {end}) {{",
            ]
        return [f"  for (idx e = {first}(idx)lane * width; e < {end}; e += threads * width) {{"]

    def span(self) -> tuple[str, str]:
        """What to add to the place of a vector among a row's, and where these end."""
        return ("first + ", "stop") if self.frame.peeled else ("", self.frame.length)

    def reduce(self, name: str, reduction: Reduced | Scanned) -> list[str]:
        """Over the lanes of a vector, then over the threads."""
        kind, functor = TYPES[reduction.dtype].compute, REDUCTIONS[reduction.kind][0]
        mine = f"of::fold<{functor}>({self.accumulator(name)})"
        self.names[reduction] = name
        return [
            f"  __shared__ {kind} {name}_of_warps[32];",
            f"  const {kind} {name} = of::reduce<{functor}, threads>({mine}, {name}_of_warps);",
        ]

    def largest_so_far(self, name: str, largest: Reduced) -> list[str]:
        """One for all lanes: their elements are of one row."""
        return [f"{TYPES[largest.dtype].compute} {self.accumulator(name)} = {neutral(largest)};"]

    def reduce_online(self, largest: tuple[str, Reduced], powers: tuple[str, Reduced]) -> list[str]:
        """The maximum over the threads, then the sums for that."""
        lines = online_over_threads(largest, powers, self.phases.online[powers[1]].functor)
        self.names[largest[1]], self.names[powers[1]] = largest[0], powers[0]
        return [*lines, f"  {self.total(powers[0], largest[0], self.phases.online[powers[1]].functor)}"]

    def loaded(self) -> list[str]:
        """Where later phases' vectors are asked for."""
        return [_EARLY] if self.phase == 0 and not self.frame.peeled else []

    def _early(self, load: Load) -> str | None:
        """A vector that only a later phase reads, as one asked for before the first: it arrives meanwhile."""
        lanes = self.frame.lanes
        if not self.keep or self.phase == 0 or load.conditions or load in self.phases.kept or self.frame.peeled:
            return None
        if lanes.stride(load.offset) != 1 or not lanes.aligned(load.offset):
            return None
        if load not in self.early:
            self.early[load] = self.writer.fresh(f"early{load.input}_")
        late = f"of::load<width>({self.writer.address(load)})"
        return self.writer.of_vector(load, f"early ? {self.early[load]}[item] : {late}")

    def _early_loads(self) -> tuple[list[str], list[str]]:
        """Room for the vectors of later phases, and lines that ask for them right after those of the first, where a
        thread has registers for them."""
        if not self.early:
            return [], []
        before, inside = self.asked(self.early)
        sizes = " + ".join(str(TYPES[load.dtype].size) for load in self.early)
        vectors = [f"  of::Vector<{TYPES[load.dtype].storage}, width> {name}[items];"
                   for load, name in self.early.items()]
        room = [
            "  // What the last phases read is asked for with what the first one reads, where registers hold it.",
            f"  constexpr bool early = items * width * ({sizes}) <= {EARLY_BYTES};", *vectors, *indented(before),
        ]
        return room, ["      if constexpr (early) {", *indented(inside, 4), "      }"]


class ClusteredText(RowText):
    """The text of a kernel whose rows the blocks of a cluster share: each keeps a part, and tells the others what it
    found of that."""

    sharing = "threads * blocks"

    def place(self) -> list[str]:
        """Neighbouring blocks share a row."""
        return ["  extern __shared__ __align__(16) unsigned char of_dynamic[];",
                "  const int lane = (int)(blockIdx.x % blocks) * threads + threadIdx.x;",
                "  const idx given = (idx)blockIdx.x / blocks;"]

    @property
    def reductions(self) -> int:
        """Of all phases."""
        return sum(map(len, self.phases.reductions))

    def opening(self) -> list[str]:
        """Barriers that what other blocks find comes to, one for each reduction."""
        return [
            "  of::Arrivals* const told = reinterpret_cast<of::Arrivals*>(of_dynamic);",
            "  if (threadIdx.x == 0) {",
            f"    for (int each = 0; each < {self.reductions}; ++each) of::count_arrivals(told + each, 1);",
            "    of::arrivals_counted();",
            "  }",
            "  of::begin_cluster<blocks>();",
        ]

    def reduce(self, name: str, reduction: Reduced | Scanned) -> list[str]:
        """Over the threads of a block, then over the blocks, each reduction in a place of its own."""
        kind, functor = TYPES[reduction.dtype].compute, REDUCTIONS[reduction.kind][0]
        before = sum(each in self.names for phase in self.phases.reductions for each in phase)
        kept = ARRIVALS * self.reductions + (SLOT - ARRIVALS) * before
        self.names[reduction] = name
        return [
            *(["  // The other blocks have begun, and count arrivals.", "  of::wait_in_cluster<blocks>();"]
              if not before else ()),
            f"  __shared__ {kind} {name}_of_warps[32];",
            f"  const {kind} {name} = of::reduce_blocks<{functor}, threads, blocks>(of::fold<{functor}>("
            f"{self.accumulator(name)}), {name}_of_warps, reinterpret_cast<{kind}*>(of_dynamic + {kept}), "
            f"told + {before});",
        ]


def online_over_threads(largest: tuple[str, Reduced], powers: tuple[str, Reduced], functor: str) -> list[str]:
    """Lines that find a maximum and the sum that goes with it from what the threads of a row have of both."""
    (most, found), (total, _) = largest, powers
    kind, maximum = TYPES[found.dtype].compute, REDUCTIONS[found.kind][0]
    mine = f"of::fold<of::Sum>(my_{total}) * {functor}::scale(my_{most}, {functor}::offset({most}))"
    return [
        f"  __shared__ {kind} {most}_of_warps[32], {total}_of_warps[32];",
        f"  const {kind} {most} = of::reduce<{maximum}, threads>(my_{most}, {most}_of_warps);",
        f"  {kind} {total} = of::reduce<of::Sum, threads>({mine}, {total}_of_warps);",
    ]
