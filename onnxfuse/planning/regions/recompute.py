"""Values that are computed again where they are read, rather than written and read.

    regions of the plan, lone nodes ─ a value that one of them writes for others ─ what computes it: few cheap nodes?
        ─ what all of them take, the value written and computed again ─▶ regions that hold those nodes beside their own

The regions of a plan are disjoint: a value that two of them need is written by one and read by the other.  Here a
value that only regions read, or nodes that could be regions, is computed by each of its readers from what its own
region reads; that region keeps the rest of its results, or goes.  It is done where all of them together are predicted
(or were measured) to take less, and every one has its kernel.  Then the next value is looked at, until nothing gains.

A reader depends on what the region depended on that wrote the value, and it depended on that region before: no cycle
can come of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnxfuse.graph.model import Node, Place, Value
from onnxfuse.planning.admission import inefficient, operators, too_large, too_many
from onnxfuse.planning.context import Context
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.memory import most_held, peak_memory
from onnxfuse.planning.plan import Plan
from onnxfuse.planning.regions.grow import admitting
from onnxfuse.planning.regions.sketches import Part, Sketches
from onnxfuse.planning.shares import Share, exchanged, put_together, shares_of
from onnxfuse.planning.space import SearchSpace
from onnxfuse.planning.weighing import Considered
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region
from onnxfuse.schedules import SCHEDULES

STAGE = "recompute"
"""Id under which ``--disable`` leaves it out."""

LEAST_SAVED = 0.05
"""Share of their time that regions must be predicted to save: both sides are estimates."""

NEAR = 1.25
"""How many times longer they may be predicted to take where a measurement may say otherwise."""

BETTER = 0.98
"""Share of the measured time that they must stay under: less is noise."""

MOST_READERS = 8
"""Regions that compute a value again."""


def recomputed(plan: Plan, context: Context) -> Plan:
    """A plan in which values are computed again where that costs less than to write and read them.

    Args:
        plan: its regions share no node.
    """
    shares = shares_of(plan)
    changed: dict[Place, Share] = {}
    told: list[Considered] = []
    for space in plan.spaces:
        place = space.maker.graph.place
        stage = _Stage(shares.get(place, Share()), space, context)
        share = stage.planned()
        if share is not None:
            changed[place] = share
        told += stage.records.values()
    after = put_together(plan, context.graph, changed, told)
    kept = {(fusion.view, fusion.outputs) for fusion in after.fusions}
    return replace(after, replaced=tuple(
        fusion for fusion in plan.fusions if (fusion.view, fusion.outputs) not in kept))


@dataclass(frozen=True)
class _Change:
    """Values that are computed again: the parts that go for it, and those that come.

    ``heavier``: more may be held until the readers ran than the values were.
    """

    values: tuple[Value, ...]
    gone: list[Part]
    come: list[Part]
    heavier: bool


@dataclass
class _Stage:
    """One graph."""

    share: Share
    space: SearchSpace
    context: Context
    records: dict[tuple[str, ...], Considered] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.maker, self.facts = self.space.maker, self.space.facts
        self.rules, self.costs, self.objective = self.context.rules, self.context.costs, self.context.objective
        self.sketches = Sketches(self.space, self.costs)

    def planned(self) -> Share | None:
        """The graph's share of the plan with its values computed again where that is better; None where it is as it
        was.  ``records`` tell what else was tried."""
        before = self.share.fusions
        limit = 0
        for tight in (False, True):
            self.records.clear()
            changes = self._run(before, tight)
            after = self._counted(before)
            # What is made inside a body holds nothing (``peak_memory``).
            if self.maker.graph.place or not any(change.heavier for change in changes):
                break
            ledger = self.costs.ledger
            if not limit:
                limit = most_held(ledger, before, short=self.objective.saves_memory)
            if peak_memory(ledger, after).peak <= limit:
                break
        else:
            changes = []
        return self._changed(after, changes) if changes else None

    # ---- The search. ----

    def _run(self, before: Sequence[Region], tight: bool) -> list[_Change]:
        """Change parts until nothing gains; ``tight`` takes only what holds no more memory meanwhile."""
        self.tight = tight
        self.home: dict[Node, list[Part]] = {}
        self.parts: dict[int, Part] = {}
        self.closed: set[Node] = set()
        for fusion in before:
            if self._is_closed(fusion):
                self.closed.update(fusion.view)
                continue
            self._add(self.sketches.part(fusion))
        for node in self._lone():
            self._add(self.sketches.lone(node))
        waiting = deque(sorted(self.parts.values(), key=lambda part: part.view[0].index))
        changes = []
        while waiting:
            part = waiting.popleft()
            if id(part) not in self.parts:
                continue
            change = self._change(part)
            if change is None:
                continue
            changed = {value.name for value in change.values}
            self.records = {names: record for names, record in self.records.items() if changed.isdisjoint(names)}
            for each in change.gone:
                self._remove(each)
            for each in change.come:
                self._add(each)
            read = dict.fromkeys(value for each in change.come for node in each.view for value in node.inputs
                                 if value is not None and value in each.reads)
            waiting.extendleft(reversed(change.come))
            waiting += [part for value in read if value.producer is not None
                        for part in self.home.get(value.producer, ()) if value in part.outputs]
            changes.append(change)
        return changes

    def _is_closed(self, fusion: Region) -> bool:
        """Whether a region stays as it is: its kernel is a user's own, or holds products, for which what is computed
        beside them is not counted well enough."""
        return fusion.kernel.schedule not in SCHEDULES or any(node not in self.facts for node in fusion.view)

    def _lone(self) -> list[Node]:
        """Nodes that were weighed alone, gain nothing as a kernel of their own, and are in nothing that the runtime
        fuses."""
        found = {
            record.nodes[0]: None for record in self.share.considered
            if record.verdict == "no-gain" and len(record.nodes) == 1
        }
        return [
            node for node in found
            if node not in self.home and node not in self.closed and node in self.facts and not self.facts[node].view
            and not any(self.costs.is_grouped(original) for original in node.originals)
        ]

    def _add(self, part: Part) -> None:
        self.parts[id(part)] = part
        for node in part.view:
            self.home.setdefault(node, []).append(part)

    def _remove(self, part: Part) -> None:
        del self.parts[id(part)]
        for node in part.view:
            self.home[node] = [each for each in self.home[node] if each is not part]

    def _change(self, part: Part) -> _Change | None:
        """The most of a part's values that are better computed again."""
        readers = {value: found for value in part.outputs if (found := self._readers(part, value))}
        if not readers:
            return None
        for values in [tuple(readers), *((value,) for value in readers if len(readers) > 1)]:
            change = self._without(part, {value: readers[value] for value in values})
            if change is not None:
                return change
        return None

    def _readers(self, part: Part, value: Value) -> list[Part]:
        """The parts that read a value of another; none where something else needs it in memory."""
        assert value.producer is not None
        if value.is_output:
            return []
        found: dict[int, Part] = {}
        for consumer in value.consumers:
            homes = self.home.get(consumer, [])
            if not homes or value not in consumer.inputs:
                return []
            for home in homes:
                if home is part or value.producer in home.members:
                    continue
                if value not in home.reads:
                    return []
                found[id(home)] = home
        return list(found.values()) if len(found) <= MOST_READERS else []

    def _without(self, part: Part, readers: Mapping[Value, Sequence[Part]]) -> _Change | None:
        """The change in which a part's values are computed again by their readers, if that is better."""
        kept = tuple(value for value in part.outputs if value not in readers)
        cones = {value: cone for value in readers if (cone := self.sketches.cone(part, value, kept)) is not None}
        if len(cones) < len(readers):
            return None
        wanted: dict[int, tuple[Part, list[Value]]] = {}
        for value, found in readers.items():
            for each in found:
                wanted.setdefault(id(each), (each, []))[1].append(value)
        gone = [part, *(each for each, _ in wanted.values())]
        if len({self._runs(each) for each in gone}) > 1:
            return None
        nodes = {node for cone in cones.values() for node in cone.nodes}
        heavier = len(readers) > 1 or self._holds_more(readers, nodes)
        if self.tight and heavier:
            return None
        reading = [
            self.sketches.reading(each, {node for value in values for node in cones[value].nodes}, values)
            for each, values in wanted.values()
        ]
        border = tuple(dict.fromkeys(value for cone in cones.values() for value in cone.border))
        for rest in self.sketches.rests(part, kept, border):
            come = self._come(tuple(readers), gone, rest, reading)
            if come is not None:
                return _Change(tuple(readers), gone, come, heavier)
        return None

    def _come(
        self, values: Sequence[Value], gone: Sequence[Part], rest: Sequence[Part], reading: Sequence[Part]
    ) -> list[Part] | None:
        """The parts that come for those that go, with their kernels, if they are better; ``rest``: what is left of the
        first."""
        part, sketches = gone[0], [*rest, *reading]
        before = sum(self._seconds(each, self.costs) for each in gone)
        after = sum(self.costs.kernel_seconds(each.region, each.flops) for each in sketches) * self._runs(part)
        near = NEAR if self.context.measures else 1.0
        if after >= before * near or (near == 1.0 and not self._gains(before, after, gone, sketches)):
            self._tell(part, values, len(reading), before, after)
            return None
        if not self._admitted(sketches):
            return None
        come = self._made(sketches)
        if isinstance(come, Refusal):
            self._keep(part, values, come.message)
            return None
        if self._refused_made(gone, come, come[:len(rest)]):
            return None
        if not self._better(gone, come):
            before, after = (sum(self._seconds(each, self.costs) for each in parts) for parts in (gone, come))
            self._tell(part, values, len(reading), before, after)
            return None
        return come

    # ---- What it would take. ----

    def _seconds(self, part: Part, costs: CostModel) -> float:
        """Predicted seconds of a part in one run."""
        if id(costs) not in part.seconds:
            nodes = part.region.nodes
            part.seconds[id(costs)] = costs.unfused(nodes)[0] if not part.fused else (
                costs.kernel_seconds(part.region, part.flops) * costs.ledger.executions(nodes))
        return part.seconds[id(costs)]

    def _runs(self, part: Part) -> float:
        return self.costs.ledger.executions(part.region.nodes)

    def _gains(self, before: float, after: float, gone: Sequence[Part], come: Sequence[object]) -> bool:
        """Whether the objective wants a change: it saves time, or costs none and does what the strategy is after."""
        if self.objective.saves_memory or (self.objective.strategy == "all-in-one" and len(come) < len(gone)):
            return after <= before
        return before - after > LEAST_SAVED * before

    def _holds_more(self, values: Collection[Value], nodes: Collection[Node]) -> bool:
        """Whether more is held until the readers ran, for the nodes that they compute again, than the values."""
        held = {value for node in nodes for value in node.inputs
                if value is not None and value.producer not in nodes and not value.is_constant}
        return self.sketches.bytes_of(*held) > self.sketches.bytes_of(*values)

    # ---- Whether it may be. ----

    def _admitted(self, sketches: Sequence[Part]) -> bool:
        """Whether rules and limits admit all of them."""
        profile = self.costs.profile
        return all(
            self.space.forbidden.refuses(each.view) is None
            and (not each.again or admitting(self.rules, set(each.view)) is not None)
            and too_many(operators(each.view, self.facts), profile, "", "") is None
            for each in sketches
        )

    def _made(self, sketches: Sequence[Part]) -> list[Part] | Refusal:
        """The parts with their kernels, or why one has none, or may not have it."""
        found = []
        for sketch in sketches:
            grown = admitting(self.rules, set(sketch.view))
            rule = sketch.region.rule or ("grow" if grown is None else grown.id)
            region = self.maker.region(sketch.view, rule, sketch.outputs)
            fusion = region if isinstance(region, Refusal) else self.maker.with_kernel(region)
            if isinstance(fusion, Region) and self.context.measured is not None:
                fusion = self.context.measured.revision(fusion)
            if isinstance(fusion, Refusal):
                return fusion
            refusal = self._refused(fusion)
            if refusal is not None:
                return refusal
            found.append(self.sketches.part(fusion, sketch))
        return found

    def _refused(self, fusion: Region) -> Refusal | None:
        return too_large(fusion, self.costs) or inefficient(fusion, self.costs)

    def _refused_made(self, gone: Sequence[Part], come: Sequence[Part], rest: Sequence[Part]) -> bool:
        """Whether parts with their kernels lose at a further size that matters, or the objective refuses what is left
        of the part whose values are computed again."""
        if any(sum(self._seconds(each, costs) for each in come) > sum(self._seconds(each, costs) for each in gone)
               for costs in self.space.nearby.values()):
            return True
        return not self.context.eager and any(
            self.objective.refuses(each.region.cost, len(each.region.nodes), each.region.label, each.region.rule)
            is not None for each in rest)

    def _better(self, gone: Sequence[Part], come: Sequence[Part]) -> bool:
        """Whether parts with their kernels are better than those that they stand for: as measured, else as
        predicted."""
        before = sum(self._seconds(each, self.costs) for each in gone)
        after = sum(self._seconds(each, self.costs) for each in come)
        times = [[each.measured for each in parts] for parts in (gone, come)]
        known = [[time for time in side if time is not None] for side in times]
        if all(len(found) == len(side) for found, side in zip(known, times, strict=True)):
            return sum(known[1]) < BETTER * sum(known[0])
        return self._gains(before, after, gone, come) or (self.context.eager and after < NEAR * before)

    # ---- What came of it. ----

    def _counted(self, before: Sequence[Region]) -> list[Region]:
        """All regions of the graph: of what several hold, the first counts it."""
        kept = [fusion for fusion in before if self._is_closed(fusion)]
        kept += [part.region for part in self.parts.values() if part.fused]
        kept.sort(key=lambda fusion: fusion.nodes[0].index)
        new = {id(part.region) for part in self.parts.values() if not part.old}
        taken: set[Node] = set()
        found = []
        for fusion in kept:
            if id(fusion) in new:
                again = tuple(node for node in fusion.nodes if node in taken)
                if again:
                    fusion = replace(fusion, again=again)
                    fusion = replace(fusion, counted=self.costs.region(fusion))
            taken.update(node for node in fusion.nodes if node.op != "Constant")
            found.append(fusion)
        return found

    def _changed(self, after: list[Region], changes: Sequence[_Change]) -> Share:
        """The graph's share of the plan with these regions, but for ``records``."""
        stay = {fusion.view for fusion in after}
        came = {part.view: self._words(change) for change in changes for part in change.come}
        went = {part.view: (change.come[-1].region, self._words(change))
                for change in changes for part in change.gone if part.old and part.view not in stay}
        return exchanged(self.share, after, came, went)

    def _words(self, change: _Change) -> str:
        names = ", ".join(f"'{value.name}'" for value in change.values)
        before, after = (sum(self._seconds(each, self.costs) for each in parts) for parts in (change.gone, change.come))
        are, they = ("is", "it is") if len(change.values) == 1 else ("are", "they are")
        return (f"{names} {are} computed again where {they} read, and not written: that is predicted to take "
                f"{after * 1e6:.1f} µs; written and read, {before * 1e6:.1f} µs.")

    def _tell(self, part: Part, values: Collection[Value], readers: int, before: float, after: float) -> None:
        """Keep that it does not gain to compute values again."""
        self._keep(part, values, f"computed again by {readers} reader{'' if readers == 1 else 's'}, all would take "
                                 f"{after * 1e6:.1f} µs; written and read, {before * 1e6:.1f} µs")

    def _keep(self, part: Part, values: Collection[Value], reason: str) -> None:
        """Keep why values stay written."""
        names = ", ".join(f"'{value.name}'" for value in values)
        words = f"{names} {'stays' if len(values) == 1 else 'stay'} written: {reason}."
        self.records[tuple(value.name for value in values)] = Considered(
            part.view, part.region.rule, None, "refused", words, "")
