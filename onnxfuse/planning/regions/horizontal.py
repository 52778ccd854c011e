"""Horizontal fusion: regions between which no edge runs, joined.

    regions of the plan, and what was not worth a kernel of its own ─ siblings ─ neighbours ─ memory ─▶ joined regions

*Siblings* read the same tensor; where one loop can compute both, it is read once.  *Neighbours* are independent and of
similar size: they keep their own kernels, in one launch (``schedules.together``), which saves what every kernel costs
before it moves a byte.  Candidates are found by the tensors that they read and by their depth in the contracted graph,
so that the work grows with the nodes.  What is joined runs at one time, and what its parts read and write is held
longer: joins with which a run would need more memory than the model needs unfused (or, where memory is short, than
without them) are left out, those that hold the most for the longest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from onnxfuse.graph.model import Node, Place, Value
from onnxfuse.graph.sizes import elements_of
from onnxfuse.lowering.launch import HOST_INPUTS
from onnxfuse.planning.admission import inefficient, too_large
from onnxfuse.planning.candidates import Maker
from onnxfuse.planning.context import Context
from onnxfuse.planning.costs.memory import GRANULE, most_held, peak_memory, rounded
from onnxfuse.planning.costs.placement import Kind, Placement, place
from onnxfuse.planning.costs.traffic import shared
from onnxfuse.planning.legality import Contraction, apart, check_host_inputs
from onnxfuse.planning.plan import Plan
from onnxfuse.planning.shares import Share, exchanged, put_together, shares_of
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region, RegionCost, united
from onnxfuse.schedules import sharing
from onnxfuse.schedules.kernel import contractions
from onnxfuse.schedules.together import Part, share_launch, together

STAGE = "horizontal-joins"
"""Id under which ``--disable`` leaves the joins out."""

CODE = "launch"
"""Code of refusals to join a launch of the same kernel."""

MOST_PARTS = 16
"""Regions in one launch."""

MOST_POINTERS = 48
"""Tensors that one kernel reads and writes."""

MOST_READERS = 16
"""Regions that read a tensor and are tried with one another, in graph order."""

NEAR = 8
"""Levels of the contracted graph that parts of one launch may lie apart."""

OPEN = 12
"""Launches that a region is tried with, those begun last first."""

FAR = 128
"""Nodes apart in graph order from which on parts must be small: what they read or write is held all that while."""

SMALL = 0.01
"""Bytes that such parts may move, as a share of the most that a run holds."""

ALIKE = 8
"""How many times more blocks one part of a launch may have than another, where more would leave too many empty: the
grid has room for the most for each."""

EMPTY = 1024
"""Blocks of a launch that may be empty in any case: they begin and end in less than half of what a kernel costs."""

LEAST_SAVED = 0.05
"""Share of its parts' time that a join must be predicted to save: parts share registers, and estimates err."""

LEAST_SHARED = 0.1
"""Share of two regions' bytes that both read, from which one loop for both is tried."""


def joined(plan: Plan, context: Context) -> Plan:
    """A plan with its independent regions joined where that is predicted to gain: with one another, and with what was
    not worth a kernel of its own."""
    placement, shares = place(context.view), shares_of(plan)
    changed: dict[Place, Share] = {}
    covered: set[str] = set()
    refusals: list[Refusal] = []
    for at, maker in context.makers.items():
        if at not in shares:
            continue  # nothing is fused there, and nothing gains too little
        joiner = _Joiner(shares[at], maker, placement, context)
        joins = joiner.joins()
        refusals += joiner.refusals
        if joins:
            changed[at] = joiner.with_joins(joins)
            covered |= joiner.covered(joins)
    kept = [each for each in plan.refusals if each.code != "no-gain" or each.node not in covered]
    plan = replace(plan, refusals=(*kept, *refusals))
    return put_together(plan, context.graph, changed) if changed else plan


class _Planned(NamedTuple):
    """What of a kernel runs at the planned sizes: the variant, by place, and in how many blocks."""

    variant: int
    blocks: int


@dataclass(eq=False)
class _Launch:
    """Regions that are to share a launch.

    Attributes:
        members: nodes that are contracted for them; level: the first region's.
        cost: of all in one launch; saved: seconds that it saves, of one region alone what the plan saves with it.
    """

    parts: tuple[Region, ...]
    members: frozenset[Node]
    level: int
    cost: RegionCost
    saved: float


class _Joiner:
    """Joins regions of one graph.  What is known of each is kept by its nodes of the view, which no other has.

    Attributes:
        refusals: why regions of one kernel do not share a launch.
        left: the regions that the plan does not have: their nodes run as the runtime runs them.
        members: nodes that are contracted for a region, those that others compute too left out (``legality.apart``);
            common: those that are contracted for none.
        planned: what of a region's kernel runs.
        most_held: bytes that a run may hold; 0 where that is not counted, in bodies.
    """

    def __init__(self, share: Share, maker: Maker, placement: Placement, context: Context) -> None:
        self.share, self.maker, self.costs, self.placement = share, maker, maker.costs, placement
        self.objective, self.spills = context.objective, context.spills
        self.most_operators = self.costs.profile.limits.operators
        self.contraction = Contraction(maker.view)
        self.refusals: list[Refusal] = []
        self.left: set[tuple[Node, ...]] = set()
        self.members: dict[tuple[Node, ...], frozenset[Node]] = {}
        self.common: frozenset[Node] = frozenset()
        self.planned: dict[tuple[Node, ...], _Planned] = {}
        self.most_held = 0

    def joins(self) -> list[Region]:
        """What is joined of this graph's share of a plan."""
        own = self.share.fusions
        twice = shared(own)
        common = {node for each in own for node in each.view if not twice.isdisjoint(node.originals)} if twice else ()
        units = apart([each.view for each in own], common)
        self.common = frozenset(common).difference(*units)
        for region, unit in zip(own, units, strict=True):
            if self.contraction.contract(unit) is not None:
                return []
            self.members[region.view] = unit
        if not self.maker.graph.place:
            short = self.objective.saves_memory
            most = most_held(self.costs.ledger, own, short=short)
            self.most_held = most if short else rounded(most)
        regions = self._siblings([*filter(self._note, own), *self._left_over()])
        launches = [made for launch in self._launches(regions) if (made := self._made(launch)) is not None]
        if self.spills is not None:
            self.spills.compile(launches)
        kept = [checked for each in launches if (checked := self._checked(each)) is not None]
        inside = {part.view for launch in kept for part in launch.parts}
        loops = [region for region in regions if region.parts and region.view not in inside]
        return self._within_memory([*loops, *kept])

    # ---- What there is to join. ----

    def _note(self, region: Region) -> _Planned | None:
        """Keep what of a region's kernel runs, where it can share a launch; gives it."""
        planned = self._sharing(region)
        if planned is not None:
            self.planned[region.view] = planned
        return planned

    def _sharing(self, region: Region) -> _Planned | None:
        """What of a region's kernel runs at the planned sizes, and can share a launch; None where nothing does."""
        kernel = region.kernel
        places = sharing(kernel) if region.cost.executions else ()
        situation = self.costs.situation(region) if places else None
        variant = None if situation is None else situation.place(kernel.plan)
        if situation is None or variant not in places:
            return None
        blocks = situation.evaluate(kernel.plan.variants[variant].launches[0].grid[0])
        return _Planned(variant, blocks) if blocks else None

    def _left_over(self) -> list[Region]:
        """Regions that were not worth a kernel of their own, the largest first, none with nodes of another's."""
        if self.objective.spread:
            return []  # what they cost at other sizes nobody has looked at
        taken = {node for region in self.share.fusions for node in region.view}
        found = []
        records = (each for each in self.share.considered if each.verdict == "no-gain")
        for record in sorted(records, key=lambda each: (-len(each.nodes), each.nodes[0].index)):
            if not taken.isdisjoint(record.nodes) or record.cost is None or self._is_long(record.cost):
                continue
            made = self.maker.fusion(record.nodes, record.rule)
            if (isinstance(made, Region) and self._note(made)
                    and self.contraction.contract(record.nodes) is None):
                taken.update(record.nodes)
                self.members[made.view] = frozenset(made.view)
                self.left.add(made.view)
                found.append(made)
        return found

    def _is_long(self, cost: RegionCost) -> bool:
        """Whether a region takes so long that what every kernel costs is no matter."""
        return self.costs.profile.floor_us * 1e-6 * cost.executions < LEAST_SAVED * cost.seconds_after

    # ---- Siblings. ----

    def _siblings(self, regions: Sequence[Region]) -> list[Region]:
        """The regions, those that read a large tensor together as one loop."""
        readers: dict[Value, list[Region]] = {}
        for region in regions:
            for value in region.tensors:
                readers.setdefault(value, []).append(region)
        home = {region.view: region for region in regions}
        several = [value for value, found in readers.items() if len(found) > 1]
        for value in sorted(several, key=lambda value: -(self.costs.ledger.bytes_of(value) or 0)):
            heads: list[Region] = []
            for reader in sorted(readers[value], key=_first)[:MOST_READERS]:
                region = home[reader.view]
                if any(head is region for head in heads):
                    continue
                for number, head in enumerate(heads):
                    made = self._as_one_loop(head, region)
                    if made is not None:
                        heads[number] = made
                        home.update((leaf.view, made) for leaf in made.leaves)
                        break
                else:
                    heads.append(region)
        return list({region.view: region for region in home.values()}.values())

    def _as_one_loop(self, one: Region, other: Region) -> Region | None:
        """Two regions as one, where that is predicted to gain."""
        pair = (one, other)
        if any(each.lowered is not None and contractions(each.lowered) for each in pair):
            return None  # how fast products are together, no prediction tells
        common = set(one.tensors) & set(other.tensors)
        total = one.cost.bytes_after + other.cost.bytes_after
        if self._bytes(common) < LEAST_SHARED * total or self._largest(one) != self._largest(other):
            return None
        both, first, second = united(pair), self.members[one.view], self.members[other.view]
        if not self._may_meet(first, second) or self._operators(both.view) > self.most_operators:
            return None
        region = self.maker.region(both.view, both.rule, self._written(both))
        if isinstance(region, Refusal):
            return None
        region = replace(region, again=both.again, parts=both.parts)
        if both.again:
            region = replace(region, counted=self.costs.region(region))
        if not self._gains(region.cost, pair):
            return None
        made = self.maker.with_kernel(region)
        if not isinstance(made, Region) or made.cost != region.cost:
            return None
        checked = self._checked(made)
        if checked is None or not self._note(checked) or self.contraction.join(first, second) is not None:
            return None
        self.members[checked.view] = first | second
        return checked

    def _written(self, region: Region) -> list[Value]:
        """Values of the view that a region writes, in graph order."""
        written = {self.maker.view.values[value.name] for value in region.outputs}
        return list(dict.fromkeys(
            value for node in region.view for value in node.outputs if value in written and value))

    def _bytes(self, values: Iterable[Value]) -> int:
        return sum(self.costs.ledger.bytes_of(value) or 0 for value in values)

    def _largest(self, region: Region) -> int:
        """Elements of its largest output."""
        return max(elements_of(value, self.costs.ledger.sizes) or 0 for value in region.outputs)

    # ---- Neighbours. ----

    def _launches(self, regions: Sequence[Region]) -> list[_Launch]:
        """Independent regions that are to share a launch, two at least in each."""
        level = self._levels()
        waiting: deque[_Launch] = deque(maxlen=OPEN)
        found: list[_Launch] = []
        depths = {each.view: level[min(self.members[each.view], key=lambda node: node.index)] for each in regions}
        ordered = sorted(regions, key=lambda each: (
            depths[each.view], each.kernel.source, -self.planned[each.view].blocks, _first(each)))
        for part in ordered:
            depth, members = depths[part.view], self.members[part.view]
            alike: tuple[_Launch, str] | None = None
            for launch in reversed(waiting):
                cost = self._extended(launch, part, depth)
                if isinstance(cost, RegionCost) and self.contraction.join(launch.members, members) is None:
                    launch.parts, launch.members = (*launch.parts, part), launch.members | members
                    launch.cost, launch.saved = cost, cost.seconds_saved
                    break
                if cost and isinstance(cost, str) and alike is None and any(
                        each.kernel.code == part.kernel.code for each in launch.parts):
                    alike = launch, cost
            else:
                launch = _Launch((part,), members, depth, part.cost, self._saved([part]))
                waiting.append(launch)
                found.append(launch)
                # That one runs after the other needs no telling.
                if alike is not None and self._may_meet(alike[0].members, members):
                    self.refusals.append(_ended(*alike, part))
        return [launch for launch in found if len(launch.parts) > 1]

    def _levels(self) -> dict[Node, int]:
        """How many kernels must run before each node of the view."""
        level: dict[Node, int] = {}
        for unit in self.contraction.order():
            before = (value.producer for node in unit for value in node.reads())
            depth = max(
                (level[node] + self._launching(node) for node in before if node is not None and node in level),
                default=0,
            )
            level.update(dict.fromkeys(unit, depth))
        return level

    def _launching(self, node: Node) -> bool:
        return node not in self.common and self.placement.kinds[node] not in (Kind.FOLDED, Kind.VIEW, Kind.HOST)

    def _extended(self, launch: _Launch, part: Region, depth: int) -> RegionCost | str:
        """The cost of a launch with one region more, or why that may not be or is not worth it: "" where a
        path runs from one to the other."""
        parts = (*launch.parts, part)
        if len(parts) > MOST_PARTS:
            return f"a launch holds {MOST_PARTS} regions"
        if depth - launch.level > NEAR:
            return f"{depth - launch.level} kernels in a row run between the first of its regions and this one"
        planned = [self.planned[each.view] for each in parts]
        blocks = [each.blocks for each in planned]
        if max(blocks) > ALIKE * min(blocks) and len(blocks) * max(blocks) - sum(blocks) > EMPTY:
            return f"one has more than {ALIKE} times the blocks of another"
        if part.cost.executions != launch.parts[0].cost.executions:
            return "they do not run equally often"
        small = max(SMALL * self.most_held, GRANULE)
        if _distance(parts) > FAR and any(self._moved(each) > small for each in parts):
            return "they stand far apart in the graph, and what they read and write would be held all that while"
        if not share_launch([(each.kernel, runs.variant) for each, runs in zip(parts, planned, strict=True)]):
            return "such kernels cannot share a launch"
        if sum(self._operators(each.view) for each in parts) > self.most_operators:
            return f"together they have more than {self.most_operators} operators"
        if not self._may_meet(launch.members, self.members[part.view]):
            return ""
        if not _fits_one_node(united(parts)):
            return "together they read and write more than one node can"
        cost = self.costs.together(parts)
        gains = self._gains(cost, parts, launch.saved + self._saved([part]))
        return cost if gains else "too little is predicted to be saved"

    def _made(self, launch: _Launch) -> Region | None:
        """A launch with its kernel."""
        whole = united(sorted(launch.parts, key=_first))
        kernel = together(self._parts(whole), whole.rule, len(whole.outputs))
        if isinstance(kernel, Refusal) or check_host_inputs(whole.tensors, self.maker.graph, whole.label) is not None:
            return None
        return replace(whole, counted=launch.cost, made=kernel)

    def _parts(self, whole: Region) -> list[Part]:
        """Where the kernel of each part finds its own among what the whole reads and writes."""
        read, asked, written = (
            {value: number for number, value in enumerate(values)}
            for values in (whole.tensors, whole.hosts, whole.outputs)
        )
        return [
            Part(
                part.kernel, self.planned[part.view].variant, tuple(read[value] for value in part.tensors),
                tuple(asked[value] for value in part.hosts), tuple(written[value] for value in part.outputs),
            )
            for part in whole.parts
        ]

    # ---- What both must pass. ----

    def _may_meet(self, first: Collection[Node], second: Collection[Node]) -> bool:
        """Whether no path runs between two sets.  Forbid rules speak of nodes that edges connect: each set has passed
        them."""
        contraction = self.contraction
        return (
            not contraction.feeds(first, second) and not contraction.feeds(second, first)
            and contraction.check_join(first, second) is None
        )

    def _seconds(self, regions: Iterable[Region]) -> float:
        """Predicted time of regions' nodes without the join at hand."""
        return sum(
            each.cost.seconds_before if each.view in self.left else each.cost.seconds_after for each in regions)

    def _saved(self, regions: Iterable[Region]) -> float:
        """Seconds that are saved with regions' nodes without the join at hand."""
        return sum(each.cost.seconds_saved for each in regions if each.view not in self.left)

    def _gains(self, cost: RegionCost, parts: Sequence[Region], saved: float | None = None) -> bool:
        """Whether a join saves enough beyond what its parts do, ``saved`` seconds where some are joined already, and
        the objective has it."""
        more = cost.seconds_saved - (self._saved(parts) if saved is None else saved)
        return more > LEAST_SAVED * self._seconds(parts) and self.objective.refuses(cost, 0, "", "") is None

    def _checked(self, join: Region) -> Region | None:
        """A join as the compiler makes it; None where its kernel passes what the profile lets a region be, or it is not
        worth it as compiled: parts share registers."""
        if too_large(join, self.costs) is not None or inefficient(join, self.costs) is not None:
            return None
        if self.spills is None:
            return join
        found = self.spills.revision(join)
        return found if isinstance(found, Region) and self._gains(found.cost, join.parts) else None

    def _operators(self, members: Collection[Node]) -> int:
        return sum(self.placement.kinds[node] is not Kind.VIEW for node in members)

    # ---- Memory. ----

    def _within_memory(self, joins: Sequence[Region]) -> list[Region]:
        """The joins with which a run does not hold too much, those that hold the least for the shortest first."""
        ordered = sorted(joins, key=lambda join: (_distance(join.leaves) * self._moved(join), _first(join)))

        def fits(count: int) -> bool:
            return peak_memory(self.costs.ledger, self._regions(ordered[:count])).peak <= self.most_held

        if not self.most_held or fits(len(ordered)):
            return ordered
        low, high = 0, len(ordered)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return ordered[:low]

    def _moved(self, region: Region) -> int:
        """Bytes of what a region reads and writes, constants left out: those are held anyway."""
        constants = self.costs.ledger.placement.constants
        return self._bytes(value for value in (*region.tensors, *region.outputs) if value not in constants)

    # ---- What came of it. ----

    def _regions(self, joins: Sequence[Region]) -> list[Region]:
        """The graph's regions, with joins in place of what they were made of."""
        inside = {leaf.view for join in joins for leaf in join.leaves}
        return [*(region for region in self.share.fusions if region.view not in inside), *joins]

    def with_joins(self, joins: Sequence[Region]) -> Share:
        """The graph's share of the plan, with joins in place of what they were made of."""
        came = {join.view: self._reason(join) for join in joins}
        went = {
            leaf.view: (join, f"It is part of the region of {join.label}. {came[join.view]}")
            for join in joins for leaf in join.leaves
        }
        return exchanged(self.share, self._regions(joins), came, went)

    def _reason(self, join: Region) -> str:
        return (
            f"{len(join.leaves)} independent regions as one kernel are predicted to take "
            f"{join.cost.seconds_after * 1e6:.1f} µs; apart, {self._seconds(join.leaves) * 1e6:.1f} µs."
        )

    def covered(self, joins: Iterable[Region]) -> set[str]:
        """Labels of regions that gain nothing alone and are part of a join."""
        return {leaf.nodes[0].label for join in joins for leaf in join.leaves if leaf.view in self.left}


def _first(region: Region) -> int:
    """Position of a region's first node."""
    return region.view[0].index


def _distance(regions: Sequence[Region]) -> int:
    """How far apart in the graph regions stand."""
    places = [_first(region) for region in regions]
    return max(places) - min(places)


def _fits_one_node(whole: Region) -> bool:
    """Whether what several regions read and write together is no more than one node can, and no value of it is needed
    in device memory and elsewhere too."""
    return (
        len(whole.hosts) <= HOST_INPUTS and len(whole.tensors) + len(whole.outputs) <= MOST_POINTERS
        and set(whole.tensors).isdisjoint((*whole.hosts, *whole.inlined))
    )


def _ended(launch: _Launch, why: str, part: Region) -> Refusal:
    first, label = launch.parts[0], part.nodes[0].label
    message = f"It is not in the launch of {first.nodes[0].label}, which runs the same kernel: {why}."
    return Refusal(CODE, message, label, part.rule)
