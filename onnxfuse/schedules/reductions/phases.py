"""The phases of a kernel with reductions, and their text; how threads share the work is left to subclasses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from onnxfuse.graph.dims import Dim
from onnxfuse.ir.scalars import REDUCTIONS, TYPES
from onnxfuse.lowering.pull import Contracted, Load, Reduced, Scalar, Scanned, children
from onnxfuse.schedules.kernel import walk
from onnxfuse.schedules.lanes import Lanes, Scope
from onnxfuse.schedules.reductions.moments import Moments, squares_about_means
from onnxfuse.schedules.reductions.online import Online, online_sums
from onnxfuse.schedules.reductions.peel import PeeledLanes, edge
from onnxfuse.schedules.reductions.peel import opening as parts_of_a_row
from onnxfuse.schedules.source import Body
from onnxfuse.schedules.text import Sizes, Writer, indented, pointer


@dataclass(frozen=True)
class Output:
    """Output ``index``: an expression an element of the row (``whole``), or one a row; ``place`` is where it lies,
    ``staged`` whether it goes there through shared memory."""

    index: int
    dtype: int
    scalar: Scalar
    whole: bool
    place: Dim
    staged: bool = False


class Phases:
    """Which phase computes what.

    Attributes:
        outputs: of the kernel.
        reductions: by phase.
        kept: expressions an element that a later phase needs again, with the phase that computes them.
        live: how many of them are held at a time, at most.
        count: number of phases; the last one computes no reduction.
        online: sums that are found in one phase with the maximum that they need (``online``).
        moments: sums that are found in one phase with the mean that they need (``moments``).
    """

    def __init__(
        self, outputs: list[Output], lanes: Lanes, *, streams: bool = False, length: Dim | None = None
    ) -> None:
        """``lanes``: along the elements of a row; ``streams``: whether every phase reads these anew, so that there
        should be few; ``length``: of rows whose mean and squares about it the text finds together."""
        self.outputs = outputs
        self.online: dict[Reduced, Online] = {}
        self.moments: dict[Reduced, Moments] = {}
        self.lanes = lanes
        self._depths: dict[Scalar, int] = {}
        self._reading: dict[Scalar, bool] = {}
        scalars = walk([output.scalar for output in outputs])
        found = sorted((s for s in scalars if isinstance(s, Reduced)), key=self._order(outputs).__getitem__)
        self.count = 1 + max((self.depth(s) for s in found), default=0)
        if streams and (online := online_sums(found)):
            separate = dict(self._depths)
            self.online, self._depths = online, {}
            together = 1 + max(self.depth(s) for s in found)
            if together == self.count:  # Other reductions need as many passes.
                self.online, self._depths = {}, separate
            self.count = together
        if length is not None:
            self.moments, self._depths = squares_about_means(found, length), {}
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
            together = isinstance(scalar, Reduced) and (scalar in self.online or scalar in self.moments)
            self._depths[scalar] = inner + 1 if isinstance(scalar, Reduced) and not together else inner
        return self._depths[scalar]

    def roots(self, phase: int) -> list[Scalar]:
        """Expressions an element that a phase must compute."""
        # Of a sum that goes with its maximum, or its mean, the phase computes what that is of.
        elements = [self.moments[each].element if each in self.moments else each.element
                    for each in self.reductions[phase] if each not in self.online]
        return elements + [o.scalar for o in self.outputs if o.whole and self.depth(o.scalar) == phase]

    def _reads(self, scalar: Scalar) -> bool:
        """Whether an expression reads memory that differs from lane to lane, or is of a product's sum, which is at hand
        but once; else it is cheaper anew."""
        if scalar not in self._reading:
            self._reading[scalar] = isinstance(scalar, Contracted) or (
                self.lanes.stride(scalar.offset) != 0 if isinstance(scalar, Load)
                else not isinstance(scalar, Reduced) and any(self._reads(child) for child in children(scalar))
            )
        return self._reading[scalar]


@dataclass(frozen=True)
class Frame:
    """What all texts of a region share.

    Attributes:
        phases: where a row's elements stay in registers; streaming: where every phase reads them.
        lanes: along the elements of a row, or across rows.
        sizes: name of each size symbol.
        count, length: texts of the number of rows and of their elements, with the sizes that these name.
    """

    phases: Phases
    streaming: Phases
    lanes: Lanes
    sizes: Mapping[str, str]
    count: str
    length: str
    bounds: frozenset[str]

    @property
    def peeled(self) -> bool:
        """Whether rows may begin between two vectors; the template's ``vector`` is the width then."""
        return isinstance(self.lanes, PeeledLanes)


@dataclass
class Turn:
    """Lines of a phase: before its loop; arrays that a turn declares, lines for each lane and for the whole vector."""

    before: list[str] = field(default_factory=list)
    vectors: list[str] = field(default_factory=list)
    inner: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


class PhaseText(ABC):
    """Text of phases.

    Attributes:
        keep: whether elements stay in registers from phase to phase, or each phase reads the row anew.
        live: a condition before stores where threads go along that have no row, as "if (live) ".
        first: the condition of the thread that writes what there is once a row.
        thread: the number of the thread among those that have a row's edges.
    """

    live = "if (live) "
    first = ""
    thread = "lane"

    def __init__(self, frame: Frame, keep: bool) -> None:
        self.frame, self.phases, self.keep = frame, frame.phases if keep else frame.streaming, keep
        self.names: dict[Scalar, str] = {}
        self.arrays: dict[Scalar, str] = {}
        self.phase = 0
        self.sizes = Sizes(frame.sizes)
        self.writer = Writer(frame.lanes, self.sizes, self.known)
        self.ahead = Writer(frame.lanes, self.sizes, prefix="ahead_")

    # ---- What subclasses say. ----

    @abstractmethod
    def head(self) -> list[str]:
        """The loop over the elements ``e`` of a row that are a thread's, up to its body; ``item`` counts those that
        are kept."""

    @abstractmethod
    def reduce(self, name: str, reduction: Reduced | Scanned) -> list[str]:
        """What becomes of a reduction's accumulators at the end of a phase; they have the name that
        ``accumulator`` gives."""

    def largest_so_far(self, name: str, largest: Reduced) -> list[str]:
        """The accumulator of a maximum that a sum goes with; for frames whose streaming phases have one."""
        raise NotImplementedError(type(self))

    def reduce_online(self, largest: tuple[str, Reduced], powers: tuple[str, Reduced]) -> list[str]:
        """The same as ``reduce`` of a maximum and the sum that goes with it, each with its name."""
        raise NotImplementedError(type(self))

    def reduce_moments(self, name: str, squares: Reduced, total: str) -> list[str]:
        """The same of squares of differences from the mean; ``total``: the name of the sum that this is made of."""
        raise NotImplementedError(type(self))

    def total(self, name: str, largest: str, functor: str) -> str:
        """A line that makes a sum that of the row, for which the maximum is known: an infinite one gives no number."""
        some = "" if self.frame.length.isdecimal() and int(self.frame.length) else f"if ({self.frame.length} > 0) "
        return f"{some}{name} = {functor}::total({name}, {largest});"

    def accumulator(self, name: str) -> str:
        """What the accumulators of the reduction of a name are called."""
        return f"my_{name}"

    def loaded(self) -> list[str]:
        """Lines after the vectors of a loop's turn are asked for."""
        return []

    def store(self, output: Output, name: str) -> list[str]:
        """What becomes of a vector of an output, the array ``name``."""
        place = pointer(f"o{output.index}", self.writer.index(output.place))
        return [f"{self.live}of::store({place}, of::pack<{TYPES[output.dtype].storage}>({name}));"]

    # ---- What they share. ----

    def peel(self) -> list[str]:
        """Lines that find where a row has whole vectors, where they are not all that it has."""
        lanes = self.frame.lanes
        return parts_of_a_row(self.writer.index(lanes.start), self.frame.length) if isinstance(
            lanes, PeeledLanes) else []

    def edge(self, body: list[str]) -> list[str]:
        """The lines of a vector for the elements of a row that are in none."""
        return edge(self.thread, "items * vector" if self.keep else "0", body) if self.frame.peeled else []

    def body(self, lines: Iterable[str]) -> Body:
        """The whole text."""
        return Body("\n".join(lines) + "\n", self.frame.bounds | self.sizes.used)

    def known(self, scalar: Scalar) -> str | None:
        """Text of a reduction's result, or of a value kept by an earlier phase."""
        if scalar in self.names:
            return self.names[scalar]
        if self.keep and scalar in self.arrays and self.phases.kept[scalar] < self.phase:
            # Across rows, what the lanes have in common is defined before the loop over them.
            return f"{self.arrays[scalar]}[item * width{' + v' if self.frame.lanes.moves(scalar) else ''}]"
        return None

    def phase_lines(self) -> list[str]:
        """The phase at hand: its loop, and its reductions."""
        reductions = {reduction: self.writer.fresh(WORDS[reduction.kind])
                      for reduction in self.phases.reductions[self.phase]}
        online = {self.phases.online[each].largest: each for each in reductions if each in self.phases.online}
        turn = Turn()
        for reduction, name in reductions.items():
            if reduction in online:
                self._join((name, reduction), (reductions[online[reduction]], online[reduction]), turn)
            elif reduction in self.phases.moments:
                self._centre(name, reduction, turn)
            elif reduction not in self.phases.online:
                accumulator, functor = self.accumulator(name), REDUCTIONS[reduction.kind][0]
                # One accumulator a lane: a single one would make every element wait for the one before it.
                turn.before += accumulators(accumulator, reduction)
                value = self.writer.scalar(reduction.element)
                turn.inner.append(f"{accumulator}[v] = {functor}::of({accumulator}[v], {value});")
        if self.keep:
            self._keep(turn)
        for output in self.phases.outputs:
            if output.whole and self.phases.depth(output.scalar) == self.phase:
                name = f"y{output.index}"
                turn.vectors.append(f"{TYPES[output.dtype].compute} {name}[width];")
                turn.inner.append(f"{name}[v] = {self.writer.scalar(output.scalar)};")
                turn.after += self.store(output, name)
        loop = self.loop(turn.vectors, turn.inner, turn.after) if turn.inner else []
        lines = indented([*self._comment(), *self.writer.outside(), *turn.before], 1) + loop
        for reduction, name in reductions.items():
            if reduction in online:
                lines += self.reduce_online((name, reduction), (reductions[online[reduction]], online[reduction]))
            elif reduction in self.phases.moments:
                lines += self.reduce_moments(name, reduction, reductions[self.phases.moments[reduction].total])
            elif reduction not in self.phases.online:
                lines += self.reduce(name, reduction)
        return lines

    def _join(self, largest: tuple[str, Reduced], powers: tuple[str, Reduced], turn: Turn) -> None:
        """Accumulate a maximum and the sum that goes with it, each with its name."""
        (name, reduction), (total, summed) = largest, powers
        turn.before += self.largest_so_far(name, reduction) + accumulators(self.accumulator(total), summed)
        value = self.writer.scalar(reduction.element)
        template = f"{self.phases.online[summed].functor}, {REDUCTIONS[reduction.kind][0]}"
        names = f"{self.accumulator(name)}, {self.accumulator(total)}"
        taken = f"of::add_exponentials<{template}>({names}, of_{name});"
        self.gather(f"of_{name}", reduction, value, taken, turn)

    def _centre(self, name: str, squares: Reduced, turn: Turn) -> None:
        """Accumulate squares of differences from the mean of what a lane has met so far."""
        kind, mine = TYPES[squares.dtype].compute, self.accumulator(name)
        turn.before += [*accumulators(f"mean_{name}", squares), *accumulators(mine, squares), f"{kind} met_{name} = 0;"]
        turn.vectors += [f"met_{name} += 1;", f"const {kind} share_{name} = of::share_of(met_{name});"]
        value = self.writer.scalar(self.phases.moments[squares].element)
        turn.inner.append(f"of::add_moment(mean_{name}[v], {mine}[v], {value}, share_{name});")

    def gather(self, name: str, largest: Reduced, value: str, taken: str, turn: Turn) -> None:
        """Collect in an array what a maximum is of, a value each lane, and take it in by a line, a vector at a time."""
        turn.vectors.append(f"{TYPES[largest.dtype].compute} {name}[width];")
        turn.inner.append(f"{name}[v] = {value};")
        turn.after.append(taken)

    def _keep(self, turn: Turn) -> None:
        """Keep what later phases need of this one."""
        kept: dict[str, str] = {}
        for scalar, first in self.phases.kept.items():
            if first != self.phase:
                continue
            value = self.writer.scalar(scalar)
            if value not in kept:
                # What another expression only declares anew may be kept already, by this phase or an earlier one.
                kept[value] = self.writer.fresh(f"kept_{value}_") if value.isidentifier() else value.split("[")[0]
                if value.isidentifier():
                    turn.inner.append(f"{kept[value]}[item * width + v] = {value};")
                    room = "items * width + 1" if self.frame.peeled else "items * width"
                    turn.before.append(f"{TYPES[scalar.dtype].compute} {kept[value]}[{room}];")
            self.arrays[scalar] = kept[value]

    def asked(self, vectors: Mapping[Load, str]) -> tuple[list[str], list[str]]:
        """Lines before a loop over a thread's items, and in it, that fill arrays of these names with vectors which
        stages after that loop read."""
        loads = [f"{name}[item] = of::load<width>({self.ahead.address(load)});" for load, name in vectors.items()]
        inside = [line for scope in (Scope.ROW, Scope.VECTOR) for line in self.ahead.lines[scope]
                  if scope is Scope.VECTOR or self.frame.lanes.across]
        before = self.ahead.outside()
        self.ahead.leave(Scope.VECTOR)
        return before, [*inside, *loads]

    def _comment(self) -> list[str]:
        """What the phase at hand is for; nothing where there is one."""
        kinds = [WORDS[reduction.kind] for reduction in self.phases.reductions[self.phase]]
        computed = [f"the row's {kind}" for kind in dict.fromkeys(kinds)]
        computed += [f"output {output.index}" for output in self.phases.outputs
                     if output.whole and self.phases.depth(output.scalar) == self.phase]
        return self._phase(computed)

    def _phase(self, computed: Sequence[str]) -> list[str]:
        """A comment that says what a phase computes; nothing where there is one phase, or nothing that it computes."""
        if not computed or self.phases.count < 2:
            return []
        return [f"// Phase {self.phase + 1} of {self.phases.count}: {', '.join(computed)}."]

    def loop(self, vectors: list[str], inner: list[str], after: list[str]) -> list[str]:
        """The loop of a phase: arrays that a turn declares, lines for each lane, and lines for the whole vector."""
        head = self.head()
        depth = 1 + sum(line.endswith("{") for line in head)
        closed = ["  " * level + "}" for level in range(depth - 1, 0, -1)]
        if not self.frame.peeled:
            return [*head, *self.turn_lines(vectors, inner, after, depth), *closed]
        body = self.turn_lines(vectors, inner, after, 0)
        return [*head, *indented(body, depth), *closed, *self.edge(body)]

    def turn_lines(self, vectors: list[str], inner: list[str], after: list[str], depth: int) -> list[str]:
        """The body of that loop, inside so many braces."""
        lane_lines = self.writer.leave(Scope.LANE)
        vector_lines = self.writer.leave(Scope.VECTOR)
        if self.frame.lanes.across:
            # Across rows, what all lanes have in common may still differ from element to element.
            vector_lines = [*self.writer.leave(Scope.ROW), *vector_lines]
        body = [*vectors, "#pragma unroll", "for (int v = 0; v < width; ++v) {"]
        body += [*(f"  {line}" for line in [*lane_lines, *inner]), "}", *after]
        return [*indented(vector_lines, depth), *self.loaded(), *indented(body, depth)]

    def row_outputs(self) -> list[str]:
        """What there is once a row, after all phases."""
        self.phase = self.phases.count
        once = [output for output in self.phases.outputs if not output.whole]
        if not once:
            return []
        values = [(output, TYPES[output.dtype], self.writer.scalar(output.scalar, each_row=True)) for output in once]
        # The last phase is this one, where no output has all elements of a row.
        self.phase = max(self.phases.depth(output.scalar) for output in once)
        comment = indented(self._phase([f"output {output.index}" for output in once]))
        self.phase = self.phases.count
        if not self.frame.lanes.across:
            stores = [f"    o{o.index}[{self.writer.index(o.place)}] = of::Store<{kind.storage}>::from({text});"
                      for o, kind, text in values]
            return [*comment, *indented(self.writer.outside()), f"  if ({self.first}) {{", *stores, "  }"]
        places = [self.writer.index(output.place) for output in once]
        lane, vector, row, each = (
            self.writer.leave(scope) for scope in (Scope.LANE, Scope.VECTOR, Scope.ROW, Scope.EACH_ROW))
        lines, lane_lines = [*self.writer.outside(), *row, *vector], [*each, *lane]
        lines += [f"{kind.compute} y{output.index}[width];" for output, kind, _ in values]
        inner = [*lane_lines, *(f"y{output.index}[v] = {text};" for output, _, text in values)]
        stores = [f"of::store({pointer(f'o{output.index}', place)}, of::pack<{kind.storage}>(y{output.index}));"
                  for (output, kind, _), place in zip(values, places, strict=True)]
        return [
            *comment, f"  if ({self.first}) {{", *indented(lines, 2),
            "#pragma unroll", "    for (int v = 0; v < width; ++v) {", *(f"      {line}" for line in inner), "    }",
            *(f"    {line}" for line in stores), "  }",
        ]


def vectors_of(roots: Iterable[Scalar], lanes: Lanes) -> list[Load]:
    """Vectors that are read for expressions, not for the reductions and totals in them."""
    seen: dict[Scalar, None] = {}
    stack = list(roots)[::-1]
    while stack:
        scalar = stack.pop()
        if scalar not in seen and not isinstance(scalar, Scanned | Reduced):
            seen[scalar] = None
            stack += children(scalar)[::-1]
    return [scalar for scalar in seen if isinstance(scalar, Load) and not scalar.conditions
            and lanes.stride(scalar.offset) == 1 and lanes.aligned(scalar.offset)]


WORDS = {"max_number": "max", **{kind: kind for kind in ("sum", "prod", "max", "min")}}
"""What names of reductions begin with, by kind."""


def accumulators(name: str, reduction: Reduced | Scanned) -> list[str]:
    """An accumulator a lane, filled with the reduction's neutral element."""
    kind = TYPES[reduction.dtype]
    return [f"{kind.compute} {name}[width];", f"of::fill({name}, {neutral(reduction)});"]


def neutral(reduction: Reduced | Scanned) -> str:
    """The neutral element of a reduction or a scan, as text."""
    text, kind = REDUCTIONS[reduction.kind][1], TYPES[reduction.dtype]
    if text in ("0", "1"):
        return f"({kind.compute}){text}"
    if kind.is_floating:
        return f"({kind.compute}){'-' if text == 'lowest' else ''}OF_INFINITY"
    return f"of::{text}<{kind.compute}>()"
