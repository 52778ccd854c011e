"""The phases of a row kernel, and their text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnxfuse.lowering.pull import Load, Reduced, Scalar, children
from onnxfuse.lowering.scalars import REDUCTIONS, TYPES
from onnxfuse.schedules.kernel import walk
from onnxfuse.schedules.text import Lanes, Scope, Writer

EARLY_BYTES = 128
"""Bytes a thread may hold of what only later phases read."""

_EARLY = "early"
"""Stands where the first phase has asked for its own vectors; what is asked for there is known at the end."""


@dataclass(frozen=True)
class Output:
    """Output ``index``: an expression an element of the row (``whole``), or one a row."""

    index: int
    dtype: int
    scalar: Scalar
    whole: bool


@dataclass(frozen=True)
class Text:
    """Name and body of a templated device function."""

    name: str
    body: str


class Phases:
    """Which phase computes what.

    Attributes:
        outputs: of the kernel.
        reductions: by phase.
        kept: expressions an element that a later phase needs again, with the phase that computes them.
        live: how many of them are held at a time, at most.
        count: number of phases; the last one computes no reduction.
    """

    def __init__(self, outputs: list[Output], lanes: Lanes) -> None:
        self.outputs = outputs
        self.lanes = lanes
        self._depths: dict[Scalar, int] = {}
        self._reading: dict[Scalar, bool] = {}
        scalars = walk([output.scalar for output in outputs])
        found = sorted((s for s in scalars if isinstance(s, Reduced)), key=self._order(outputs).__getitem__)
        self.count = 1 + max((self.depth(s) for s in found), default=0)
        self.reductions: list[list[Reduced]] = [[] for _ in range(self.count)]
        for reduction in found:
            self.reductions[self.depth(reduction) - 1].append(reduction)
        self.kept: dict[Scalar, int] = {}
        self.live = 0
        self._find_kept()

    def _find_kept(self) -> None:
        computed: dict[Scalar, int] = {}
        last_use: dict[Scalar, int] = {}
        for phase in range(self.count):
            fresh: dict[Scalar, int] = {}
            for root in self.roots(phase):
                self._visit(root, phase, computed, fresh, last_use)
            computed |= fresh
        self.kept = {scalar: computed[scalar] for scalar in last_use}
        for phase in range(self.count - 1):
            held = sum(first <= phase < last_use[scalar] for scalar, first in self.kept.items())
            self.live = max(self.live, held)

    def _visit(
        self,
        scalar: Scalar,
        phase: int,
        computed: dict[Scalar, int],
        fresh: dict[Scalar, int],
        last_use: dict[Scalar, int],
    ) -> None:
        """Find what ``phase`` computes anew and what it takes from earlier phases."""
        if isinstance(scalar, Reduced) or scalar in fresh or not self.lanes.moves(scalar):
            return
        if scalar in computed and self._reads(scalar):
            last_use[scalar] = phase
            return
        fresh[scalar] = phase
        for child in children(scalar):
            self._visit(child, phase, computed, fresh, last_use)

    def _order(self, outputs: list[Output]) -> dict[Scalar, int]:
        """Position of a reduction in a walk that is the same for every region of the same structure."""
        order: dict[Scalar, int] = {}

        def visit(scalar: Scalar) -> None:
            if scalar not in order:
                for child in children(scalar):
                    visit(child)
                order[scalar] = len(order)

        for output in outputs:
            visit(output.scalar)
        return order

    def depth(self, scalar: Scalar) -> int:
        """The first phase in which an expression can be computed."""
        if scalar not in self._depths:
            inner = max((self.depth(child) for child in children(scalar)), default=0)
            self._depths[scalar] = inner + 1 if isinstance(scalar, Reduced) else inner
        return self._depths[scalar]

    def roots(self, phase: int) -> list[Scalar]:
        """Expressions an element that a phase must compute."""
        elements: list[Scalar] = [reduction.element for reduction in self.reductions[phase]]
        return elements + [o.scalar for o in self.outputs if o.whole and self.depth(o.scalar) == phase]

    def _reads(self, scalar: Scalar) -> bool:
        """Whether an expression reads memory that differs from lane to lane; else it is cheaper anew."""
        if scalar not in self._reading:
            self._reading[scalar] = (
                self.lanes.stride(scalar.offset) != 0 if isinstance(scalar, Load)
                else not isinstance(scalar, Reduced) and any(self._reads(child) for child in children(scalar))
            )
        return self._reading[scalar]


def row_text(phases: Phases, lanes: Lanes, sizes: Mapping[str, str], count: str, length: str, keep: bool) -> Text:
    """The body of a row kernel, with kept values in registers or streaming."""
    return _RowText(phases, lanes, sizes, count, length, keep).text()


class _RowText:
    def __init__(
        self, phases: Phases, lanes: Lanes, sizes: Mapping[str, str], count: str, length: str, keep: bool
    ) -> None:
        self.phases = phases
        self.length, self.count, self.keep = length, count, keep
        self.names: dict[Scalar, str] = {}
        self.arrays: dict[Scalar, str] = {}
        self.phase = 0
        self.writer = Writer(lanes, sizes, self._known)
        self.partials = 0
        self.early: dict[Load, str] = {}

    def _known(self, scalar: Scalar) -> str | None:
        """Text of a reduction's result, or of a value kept by an earlier phase."""
        if scalar in self.names:
            return self.names[scalar]
        if self.keep and scalar in self.arrays and self.phases.kept[scalar] < self.phase:
            return f"{self.arrays[scalar]}[item * width + v]"
        return self._early(scalar) if isinstance(scalar, Load) and self.phases.lanes.moves(scalar) else None

    def _early(self, load: Load) -> str | None:
        """A vector that only a later phase reads, as one asked for before the first: it arrives meanwhile."""
        lanes = self.phases.lanes
        if not self.keep or self.phase == 0 or load.conditions or load in self.phases.kept:
            return None
        if lanes.stride(load.offset) != 1 or not lanes.aligned(load.offset):
            return None
        if load not in self.early:
            self.early[load] = f"q{len(self.early)}"
        vector = f"of::Vector<{TYPES[load.dtype].storage}, width>"
        late = f"of::load<width>(i{load.input} + ({self.writer.index(load.offset)}))"
        name = self.writer.define(("vector", load), Scope.VECTOR, vector, f"early ? {self.early[load]}[item] : {late}")
        return self.writer.define(load, Scope.LANE, TYPES[load.dtype].compute, f"of::value({name}.at[v])")

    def _early_loads(self) -> list[str]:
        """Ask for the vectors of later phases right after those of the first, where a thread has registers for them."""
        if not self.early:
            return []
        writer = Writer(self.phases.lanes, self.writer.symbols)
        loads = [f"{name}[item] = of::load<width>(i{load.input} + ({writer.index(load.offset)}));"
                 for load, name in self.early.items()]
        inner = [line for scope in Scope for line in writer.lines[scope]]
        return ["      if constexpr (early) {", *(f"        {line}" for line in [*inner, *loads]), "      }"]

    def _early_vectors(self) -> list[str]:
        """Room for them."""
        if not self.early:
            return []
        sizes = " + ".join(str(TYPES[load.dtype].size) for load in self.early)
        vectors = [f"  of::Vector<{TYPES[load.dtype].storage}, width> {name}[items];"
                   for load, name in self.early.items()]
        return [f"  constexpr bool early = items * width * ({sizes}) <= {EARLY_BYTES};", *vectors]

    def text(self) -> Text:
        """The whole body."""
        lines = [
            "  const int lane = threadIdx.x % threads;",
            "  const idx given = (idx)blockIdx.x * (blockDim.x / threads) + threadIdx.x / threads;",
            # Threads past the last row go along, because the lanes of a warp reduce together, and write nothing.
            f"  const bool live = given < {self.count};",
            f"  const idx row = live ? given : {self.count} - 1;",
        ]
        phases: list[str] = []
        for phase in range(self.phases.count):
            self.phase = phase
            phases += self._phase()
        place = phases.index(_EARLY) if _EARLY in phases else len(phases)
        phases[place:place + 1] = self._early_loads()
        lines += self._early_vectors() + phases + self._row_outputs()
        return Text("rows_in_registers" if self.keep else "rows_streaming", "\n".join(lines) + "\n")

    def _phase(self) -> list[str]:
        reductions = self.phases.reductions[self.phase]
        before, inner, after = [], [], []
        for number, reduction in enumerate(reductions):
            kind, accumulator = TYPES[reduction.dtype].compute, f"a{self.phase}_{number}"
            functor, neutral = REDUCTIONS[reduction.kind]
            # One accumulator a lane: a single one would make every element wait for the one before it.
            before.append(f"{kind} {accumulator}[width];")
            before.append(f"of::fill({accumulator}, {_neutral(neutral, reduction.dtype)});")
            inner.append(
                f"{accumulator}[v] = {functor}::of({accumulator}[v], {self.writer.scalar(reduction.element)});"
            )
        for scalar, first in self.phases.kept.items():
            if self.keep and first == self.phase:
                name = f"k{len(self.arrays)}"
                inner.append(f"{name}[item * width + v] = {self.writer.scalar(scalar)};")
                self.arrays[scalar] = name
                before.append(f"{TYPES[scalar.dtype].compute} {name}[items * width];")
        vectors = []
        for output in self.phases.outputs:
            if output.whole and self.phases.depth(output.scalar) == self.phase:
                stored, name = TYPES[output.dtype], f"w{output.index}"
                vectors.append(f"{stored.compute} {name}[width];")
                inner.append(f"{name}[v] = {self.writer.scalar(output.scalar)};")
                place = f"o{output.index} + (row * {self.length} + e)"
                after.append(f"if (live) of::store({place}, of::pack<{stored.storage}>({name}));")
        loop = self._loop(vectors, inner, after) if inner else []
        row_lines = [line for scope in (Scope.KERNEL, Scope.ROW) for line in self._take(scope)]
        lines = [f"  {line}" for line in [*row_lines, *before]] + loop
        for number, reduction in enumerate(reductions):
            lines += self._reduce(number, reduction)
        return lines

    def _take(self, scope: Scope) -> list[str]:
        lines = self.writer.lines[scope]
        self.writer.lines[scope] = []
        return lines

    def _loop(self, vectors: list[str], inner: list[str], after: list[str]) -> list[str]:
        lane_lines = self.writer.leave(Scope.LANE)
        vector_lines = self.writer.leave(Scope.VECTOR)
        if self.keep:
            lines = [
                "#pragma unroll",
                "  for (int item = 0; item < items; ++item) {",
                "    const idx e = ((idx)item * threads + lane) * width;",
                f"    if (e < {self.length}) {{",
            ]
        else:
            lines = [f"  for (idx e = (idx)lane * width; e < {self.length}; e += threads * width) {{", "    {"]
        lines += [f"      {line}" for line in vector_lines]
        lines += [_EARLY] if self.phase == 0 else []
        lines += [f"      {line}" for line in vectors]
        lines += ["#pragma unroll", "      for (int v = 0; v < width; ++v) {"]
        lines += [f"        {line}" for line in [*lane_lines, *inner]]
        return [*lines, "      }", *(f"      {line}" for line in after), "    }", "  }"]

    def _reduce(self, number: int, reduction: Reduced) -> list[str]:
        kind, functor = TYPES[reduction.dtype].compute, REDUCTIONS[reduction.kind][0]
        name, partial = f"r{self.phase}_{number}", f"p{self.partials}"
        mine = f"of::fold<{functor}>(a{self.phase}_{number})"
        self.partials += 1
        self.names[reduction] = name
        return [
            f"  __shared__ {kind} {partial}[32];",
            f"  const {kind} {name} = of::reduce<{functor}, threads>({mine}, {partial});",
        ]

    def _row_outputs(self) -> list[str]:
        stores = []
        self.phase = self.phases.count
        for output in self.phases.outputs:
            if not output.whole:
                storage = TYPES[output.dtype].storage
                text = self.writer.scalar(output.scalar)
                stores.append(f"if (live && lane == 0) o{output.index}[row] = of::Store<{storage}>::from({text});")
        lines = [line for scope in (Scope.KERNEL, Scope.ROW) for line in self._take(scope)]
        return [f"  {line}" for line in [*lines, *stores]]


def _neutral(neutral: str, dtype: int) -> str:
    kind = TYPES[dtype]
    if neutral in ("0", "1"):
        return f"({kind.compute}){neutral}"
    if kind.is_floating:
        return f"({kind.compute}){'-' if neutral == 'lowest' else ''}OF_INFINITY"
    return f"of::{neutral}<{kind.compute}>()"
