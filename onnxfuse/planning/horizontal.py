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

from onnxfuse.graph.model import Node, Place, Value
from onnxfuse.graph.sizes import elements_of
from onnxfuse.planning.admission import inefficient, too_large
from onnxfuse.planning.candidates import Maker
from onnxfuse.planning.context import Context
from onnxfuse.planning.legality import Contraction, apart, check_host_inputs
from onnxfuse.planning.memory import GRANULE, most_held, peak_memory, rounded
from onnxfuse.planning.objective import Objective
from onnxfuse.planning.pieces import Piece, may_be_one, not_in, parts_of, piece_of, regions, with_joins
from onnxfuse.planning.placement import Kind, Placement, place
from onnxfuse.planning.plan import Plan
from onnxfuse.planning.shares import Share, put_together, shares_of
from onnxfuse.planning.spills import Spills
from onnxfuse.planning.traffic import shared
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region, RegionCost, united
from onnxfuse.schedules import Kernel
from onnxfuse.schedules.kernel import contractions
from onnxfuse.schedules.together import share_launch, together

STAGE = "horizontal-joins"
"""Id under which ``--disable`` leaves the joins out."""

CODE = "launch"
"""Code of refusals to join a launch of the same kernel."""

MOST_PARTS = 16
"""Regions in one launch."""

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
    joins: list[Piece] = []
    refusals: list[Refusal] = []
    for at, maker in context.makers.items():
        share = shares.get(at)
        if share is None:
            continue  # nothing is fused there, and nothing gains too little
        found, more = _Joiner(maker, placement, context.objective, context.spills).joins(share)
        refusals += more
        if found:
            joins += found
            changed[at] = with_joins(share, found)
    plan = replace(plan, refusals=(*not_in(joins, plan.refusals), *refusals))
    return put_together(plan, context.graph, changed) if changed else plan


@dataclass(eq=False)
class _Launch:
    """Parts that are to share a launch."""

    parts: tuple[Piece, ...]
    level: int
    cost: RegionCost

    @property
    def members(self) -> frozenset[Node]:
        """Nodes of all parts."""
        return frozenset().union(*(part.members for part in self.parts))

    def runs(self, kernel: Kernel) -> bool:
        """Whether one of its parts has this kernel."""
        return any(part.fusion.kernel.code == kernel.code for part in self.parts)

    @property
    def saved(self) -> float:
        """Seconds that it saves, of one part what the plan saves with it."""
        return self.cost.seconds_saved if len(self.parts) > 1 else self.parts[0].saved


class _Joiner:
    """Joins regions of one graph."""

    def __init__(self, maker: Maker, placement: Placement, objective: Objective, spills: Spills | None) -> None:
        self.maker, self.costs, self.objective, self.spills = maker, maker.costs, objective, spills
        self.placement = placement
        self.contraction = Contraction(maker.view)
        self.common: set[Node] = set()
        self.most_held = 0

    def joins(self, share: Share) -> tuple[list[Piece], list[Refusal]]:
        """What is joined of this graph's share of a plan, and why regions of one kernel do not share a launch."""
        own = share.fusions
        twice = shared(fusion for fusion in own)
        common = {node for f in own for node in f.view if not twice.isdisjoint(node.originals)} if twice else set()
        units = apart([fusion.view for fusion in own], common)
        self.common = common.difference(*units)
        for unit in units:
            if self.contraction.contract(unit) is not None:
                return [], []
        self.most_held = self._most_held(own)
        parts = [
            part for fusion, unit in zip(own, units, strict=True)
            if (part := piece_of(fusion, self.costs, chosen=True, members=unit)) is not None
        ]
        parts += self._left_over(share)
        parts = self._siblings(parts)
        found = [part for part in parts if part.pieces]
        launches, refusals = self._launches(parts)
        found += [made for launch in launches if (made := self._made(launch)) is not None]
        # A join of siblings may be part of a launch.
        inner = {id(part) for join in found for part in join.pieces}
        return self._within_memory([join for join in found if id(join) not in inner], own), refusals

    # ---- What there is to join. ----

    def _left_over(self, share: Share) -> list[Piece]:
        """Regions that were not worth a kernel of their own, the largest first, none with nodes of another's."""
        if self.objective.spread:
            return []  # what they cost at other sizes nobody has looked at
        taken = {node for fusion in share.fusions for node in fusion.view}
        found = []
        records = (each for each in share.considered if each.verdict == "no-gain")
        for record in sorted(records, key=lambda each: (-len(each.nodes), each.nodes[0].index)):
            if not taken.isdisjoint(record.nodes) or record.cost is None or self._is_long(record.cost):
                continue
            made = self.maker.fusion(record.nodes, record.rule)
            part = piece_of(made, self.costs, chosen=False) if isinstance(made, Region) else None
            if part is not None and self.contraction.contract(record.nodes) is None:
                taken.update(record.nodes)
                found.append(part)
        return found

    def _is_long(self, cost: RegionCost) -> bool:
        """Whether a region takes so long that what every kernel costs is no matter."""
        return self.costs.profile.floor_us * 1e-6 * cost.executions < LEAST_SAVED * cost.seconds_after

    # ---- Siblings. ----

    def _siblings(self, parts: list[Piece]) -> list[Piece]:
        """The regions, those that read a large tensor together as one loop."""
        readers: dict[Value, list[Piece]] = {}
        for part in parts:
            for value in part.fusion.tensors:
                readers.setdefault(value, []).append(part)
        home = {id(part): part for part in parts}
        shared = [value for value, found in readers.items() if len(found) > 1]
        for value in sorted(shared, key=lambda value: -(self.costs.ledger.bytes_of(value) or 0)):
            heads: list[Piece] = []
            for part in sorted(readers[value], key=lambda part: part.first)[:MOST_READERS]:
                part = home[id(part)]
                if any(head is part for head in heads):
                    continue
                for number, head in enumerate(heads):
                    made = self._as_one_loop(head, part)
                    if made is not None:
                        heads[number] = made
                        for leaf in made.leaves:
                            home[id(leaf)] = made
                        break
                else:
                    heads.append(part)
        return list({id(home[id(part)]): home[id(part)] for part in parts}.values())

    def _as_one_loop(self, first: Piece, second: Piece) -> Piece | None:
        """Two regions as one, where that is predicted to gain."""
        one, other = first.fusion, second.fusion
        if any(each.lowered is not None and contractions(each.lowered) for each in (one, other)):
            return None  # how fast products are together, no prediction tells
        common = set(one.tensors) & set(other.tensors)
        total = one.cost.bytes_after + other.cost.bytes_after
        if self._bytes(common) < LEAST_SHARED * total or self._largest(one) != self._largest(other):
            return None
        both = united([one, other])
        if not self._may_meet(first.members, second.members) or self._operators(both.view) > self._most_operators():
            return None
        region = self.maker.region(both.view, both.rule, self._written(both))
        if isinstance(region, Refusal):
            return None
        if both.again:
            region = replace(region, again=both.again)
            region = replace(region, counted=self.costs.region(region))
        if not self._gains(region.cost, [first, second], first.saved + second.saved):
            return None
        made = self.maker.with_kernel(region)
        if not isinstance(made, Region) or made.cost != region.cost or self._exceeds(made) is not None:
            return None
        compiled = self._compiled(made, [first, second], first.saved + second.saved)
        if compiled is None:
            return None
        parts = tuple(part for each in (first, second) for part in (each.pieces or (each,)))
        part = piece_of(compiled, self.costs, chosen=False, pieces=parts, members=first.members | second.members)
        if part is not None and self.contraction.join(first.members, second.members) is None:
            return part
        return None

    def _written(self, region: Region) -> list[Value]:
        """Values of the view that a region writes, in graph order."""
        written = {self.maker.view.values[value.name] for value in region.outputs}
        return list(dict.fromkeys(
            value for node in region.view for value in node.outputs if value in written and value))

    def _bytes(self, values: Iterable[Value]) -> int:
        return sum(self.costs.ledger.bytes_of(value) or 0 for value in values)

    def _largest(self, fusion: Region) -> int:
        """Elements of its largest output."""
        return max(elements_of(value, self.costs.ledger.sizes) or 0 for value in fusion.outputs)

    # ---- Neighbours. ----

    def _launches(self, parts: Sequence[Piece]) -> tuple[list[_Launch], list[Refusal]]:
        """Independent regions that are to share a launch, two at least in each, and why those of one kernel do not."""
        level = self._levels()
        waiting: deque[_Launch] = deque(maxlen=OPEN)
        found: list[_Launch] = []
        refusals: list[Refusal] = []
        depths = {id(part): level[min(part.members, key=lambda node: node.index)] for part in parts}
        ordered = sorted(
            parts, key=lambda part: (depths[id(part)], part.fusion.kernel.source, -part.blocks, part.first)
        )
        for part in ordered:
            depth = depths[id(part)]
            alike: tuple[_Launch, str] | None = None
            for launch in reversed(waiting):
                cost = self._extended(launch, part, depth)
                if isinstance(cost, RegionCost) and self.contraction.join(launch.members, part.members) is None:
                    launch.parts, launch.cost = (*launch.parts, part), cost
                    break
                if cost and isinstance(cost, str) and alike is None and launch.runs(part.fusion.kernel):
                    alike = launch, cost
            else:
                launch = _Launch((part,), depth, part.fusion.cost)
                waiting.append(launch)
                found.append(launch)
                # That one runs after the other needs no telling.
                if alike is not None and self._may_meet(alike[0].members, part.members):
                    refusals.append(_ended(*alike, part))
        return [launch for launch in found if len(launch.parts) > 1], refusals

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

    def _extended(self, launch: _Launch, part: Piece, depth: int) -> RegionCost | str:
        """The cost of a launch with one part more, or why that may not be or is not worth it: "" where a
        path runs from one to the other."""
        parts = (*launch.parts, part)
        blocks = [each.blocks for each in parts]
        small = max(SMALL * self.most_held, GRANULE)
        most = self._most_operators()
        if len(parts) > MOST_PARTS:
            return f"a launch holds {MOST_PARTS} regions"
        if depth - launch.level > NEAR:
            return f"{depth - launch.level} kernels in a row run between the first of its regions and this one"
        empty = len(blocks) * max(blocks) - sum(blocks)
        if max(blocks) > ALIKE * min(blocks) and empty > EMPTY:
            return f"one has more than {ALIKE} times the blocks of another"
        if part.fusion.cost.executions != launch.parts[0].fusion.cost.executions:
            return "they do not run equally often"
        if self._apart(parts) > FAR and any(self._moved(each) > small for each in parts):
            return "they stand far apart in the graph, and what they read and write would be held all that while"
        if not share_launch([(each.fusion.kernel, each.planned) for each in parts]):
            return "such kernels cannot share a launch"
        if sum(self._operators(each.fusion.view) for each in parts) > most:
            return f"together they have more than {most} operators"
        if not self._may_meet(launch.members, part.members):
            return ""
        if not may_be_one(united([each.fusion for each in parts])):
            return "together they read and write more than one node can"
        cost = self.costs.together([each.fusion for each in parts])
        return cost if self._gains(cost, parts, launch.saved + part.saved) else "too little is predicted to be saved"

    def _made(self, launch: _Launch) -> Piece | None:
        """A launch with its kernel."""
        parts = tuple(sorted(launch.parts, key=lambda part: part.first))
        whole = united([part.fusion for part in parts])
        kernel = together(parts_of(whole, parts), whole.rule, len(whole.outputs))
        if isinstance(kernel, Refusal) or check_host_inputs(whole.tensors, self.maker.graph, whole.label) is not None:
            return None
        fusion = replace(whole, counted=launch.cost, made=kernel)
        if self._exceeds(fusion) is not None:
            return None
        compiled = self._compiled(fusion, parts, sum(part.saved for part in parts))
        if compiled is None:
            return None
        return Piece(compiled, launch.members, False, 0, max(part.blocks for part in parts), parts)

    # ---- What both must pass. ----

    def _may_meet(self, first: Collection[Node], second: Collection[Node]) -> bool:
        """Whether no path runs between two sets.  Forbid rules speak of nodes that edges connect: each set has passed
        them."""
        contraction = self.contraction
        return (
            not contraction.feeds(first, second) and not contraction.feeds(second, first)
            and contraction.check_join(first, second) is None
        )

    def _gains(self, cost: RegionCost, parts: Sequence[Piece], saved: float) -> bool:
        """Whether a join saves enough beyond the ``saved`` seconds of what it is made of, and the objective has it."""
        least = LEAST_SAVED * sum(part.seconds for part in parts)
        return cost.seconds_saved - saved > least and self.objective.refuses(cost, 0, "", "") is None

    def _compiled(self, fusion: Region, parts: Sequence[Piece], saved: float) -> Region | None:
        """A join as the compiler makes it, or None where it is not worth it as that: parts share registers."""
        if self.spills is None:
            return fusion
        found = self.spills.revision(fusion)
        return found if isinstance(found, Region) and self._gains(found.cost, parts, saved) else None

    def _exceeds(self, fusion: Region) -> Refusal | None:
        """Why a join's kernel passes what the profile lets a region be, or None."""
        return too_large(fusion, self.costs) or inefficient(fusion, self.costs)

    def _operators(self, members: Collection[Node]) -> int:
        return sum(self.placement.kinds[node] is not Kind.VIEW for node in members)

    def _most_operators(self) -> int:
        return self.costs.profile.limits.operators

    # ---- Memory. ----

    def _most_held(self, own: Sequence[Region]) -> int:
        """Bytes that a run may hold; 0 where that is not counted, in bodies."""
        if self.maker.graph.place:
            return 0
        short = self.objective.saves_memory
        most = most_held(self.costs.ledger, own, short=short)
        return most if short else rounded(most)

    def _within_memory(self, joins: Sequence[Piece], own: Sequence[Region]) -> list[Piece]:
        """The joins with which a run does not hold too much, those that hold the least for the shortest first."""
        ordered = sorted(joins, key=lambda join: (self._apart(join.leaves) * self._moved(join), join.first))

        def fits(count: int) -> bool:
            return peak_memory(self.costs.ledger, regions(own, ordered[:count])).peak <= self.most_held

        if not self.most_held or fits(len(ordered)):
            return ordered
        low, high = 0, len(ordered)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return ordered[:low]

    def _apart(self, parts: Sequence[Piece]) -> int:
        """How far apart in the graph regions stand."""
        places = [part.first for part in parts]
        return max(places) - min(places)

    def _moved(self, part: Piece) -> int:
        """Bytes of what a region reads and writes, constants left out: those are held anyway."""
        constants = self.costs.ledger.placement.constants
        return self._bytes(value for value in (*part.fusion.tensors, *part.fusion.outputs) if value not in constants)


def _ended(launch: _Launch, why: str, part: Piece) -> Refusal:
    first, label = launch.parts[0].fusion, part.fusion.nodes[0].label
    message = f"It is not in the launch of {first.nodes[0].label}, which runs the same kernel: {why}."
    return Refusal(CODE, message, label, part.fusion.rule)
