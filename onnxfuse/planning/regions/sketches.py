"""Regions as they would be if one computed again what another computes: their nodes, and what they read and cost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from onnxfuse.graph.model import Node, Value
from onnxfuse.graph.sizes import elements_of
from onnxfuse.operators import classify
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.legality import copied
from onnxfuse.planning.regions.contractions import COMPUTES
from onnxfuse.planning.space import SearchSpace
from onnxfuse.region import Region

MOST_OPERATORS = 8
"""Operators that compute a value again."""

WORTH = 0.05
"""Share of a value's bytes that what is read in its place must be smaller by, for more nodes to be computed again."""


@dataclass(eq=False)
class Part:
    """Nodes that run as one, or would: a region of the plan, one that may come, or a lone node that the runtime runs.

    Attributes:
        region: it; it has a kernel where it is of a plan.
        outputs, reads: values of the view that are used outside, and that a kernel reads.
        flops: arithmetic beyond that of its nodes; again: nodes of the view that it computes again now.
        old: whether it is of the plan as it came.
        seconds, largest: its predicted time by the id of the costs, and the elements of its largest result, once known.
    """

    region: Region
    outputs: tuple[Value, ...]
    reads: frozenset[Value]
    flops: int = 0
    again: tuple[Node, ...] = ()
    old: bool = True
    seconds: dict[int, float] = field(default_factory=dict, repr=False)
    largest: int | None = None

    @property
    def view(self) -> tuple[Node, ...]:
        """Its nodes of the canonical view."""
        return self.region.view

    @cached_property
    def members(self) -> frozenset[Node]:
        """The same as a set."""
        return frozenset(self.view)

    @property
    def fused(self) -> bool:
        """Whether it is a region with its kernel."""
        return self.region.made is not None

    @property
    def measured(self) -> float | None:
        """Measured seconds of its kernel, once."""
        measured = self.region.measured
        return None if measured is None else measured.fused * 1e-6


class Cone(NamedTuple):
    """The nodes that compute a value again, and what the region that had it writes for them."""

    nodes: frozenset[Node]
    border: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Sketches:
    """Makes parts of one graph, from what its regions were chosen from; ``costs`` are those of the model."""

    space: SearchSpace
    costs: CostModel

    def part(self, region: Region, sketch: Part | None = None) -> Part:
        """A region of a plan: as that came, or what became of a sketch."""
        values = self.space.maker.view.values
        outputs = tuple(values[value.name] for value in region.outputs)
        reads = frozenset(values[value.name] for value in region.tensors if value.name in values)
        return Part(region, outputs, reads) if sketch is None else Part(region, outputs, reads, sketch.flops, old=False)

    def lone(self, node: Node) -> Part:
        """A node that the runtime runs."""
        outputs = tuple(value for value in node.outputs if value is not None)
        return self._part((node,), (value for value in node.inputs if value is not None), outputs)

    def cone(self, part: Part, value: Value, kept: Collection[Value]) -> Cone | None:
        """The last nodes that compute a value, from what is in memory anyway, else from smaller values; None where
        there are no cheap ones."""
        found = list(self._cones(part, value, kept))
        if not found or not found[-1].border:
            return found[-1] if found else None
        whole = self.bytes_of(value)
        most = min(min(self.bytes_of(*cone.border) for cone in found) + WORTH * whole, whole - 1)
        return next((cone for cone in found if self.bytes_of(*cone.border) <= most), None)

    def _cones(self, part: Part, value: Value, kept: Collection[Value]) -> Iterator[Cone]:
        """Longer and longer ones, by what computes the largest value of the border."""
        nodes: set[Node] = set()
        border: tuple[Value, ...] = (value,)
        while border:
            cheap = {each: node for each in border if (node := each.producer) is not None and self._is_cheap(node)}
            if not cheap:
                return
            nodes.add(cheap[max(cheap, key=self.bytes_of)])
            if sum(not self.space.facts[each].view for each in nodes) > MOST_OPERATORS:
                return
            border = tuple(dict.fromkeys(
                each for node in sorted(nodes, key=lambda node: node.index) for each in node.reads()
                if each not in kept and each.producer in part.members and each.producer not in nodes))
            if all(each.name in self.space.maker.graph.values for each in border):
                yield Cone(frozenset(nodes), border)

    def bytes_of(self, *values: Value) -> int:
        """Bytes of some values."""
        return sum(self.costs.ledger.bytes_of(value) or 0 for value in values)

    def _is_cheap(self, node: Node) -> bool:
        facts = self.space.facts.get(node)
        return (
            facts is not None and facts.rows is None and not facts.transposes and not node.captures
            and sum(value is not None for value in node.outputs) == 1
            and all(classify(original, self.space.maker.graph) in COMPUTES or original.op == "Constant"
                    for original in node.originals)
        )

    def reading(self, reader: Part, cone: set[Node], values: Collection[Value]) -> Part:
        """A reader with what computes the values."""
        view = tuple(sorted({*reader.view, *cone}, key=lambda node: node.index))
        entering = (value for node in view if node in cone for value in node.inputs
                    if value is not None and value.producer not in cone and not _is_number(value))
        reads = (value for value in (*reader.reads, *entering)
                 if value not in values and value.producer not in view)
        again = tuple(sorted(cone - reader.members, key=lambda node: node.index))
        made = self._part(view, reads, reader.outputs, reader.region.rule)
        return replace(made, flops=reader.flops + self._spread(reader, again), again=again)

    def rests(self, part: Part, kept: tuple[Value, ...], border: tuple[Value, ...]) -> Iterator[list[Part]]:
        """What may be left of a part that computes fewer values than it did: one that writes what it keeps and the
        border; or one that writes the border, and one that reads it."""
        if not (kept or border):
            yield []
            return
        yield [self._rest(part, (*kept, *border))]
        if kept and border:
            first, second = self._rest(part, border), self._rest(part, kept, border)
            if first.members.isdisjoint(second.members):
                yield [first, second]

    def _rest(self, part: Part, outputs: tuple[Value, ...], given: tuple[Value, ...] = ()) -> Part:
        """What computes some values of a part, of which some are given."""
        found: set[Node] = set()
        waiting, members = list(outputs), part.members
        while waiting:
            node = waiting.pop().producer
            if node is not None and node in members and node not in found:
                found.add(node)
                waiting += (value for value in node.reads() if value not in given)
        view = tuple(node for node in part.view if node in found)
        read = {value for node in view for value in node.inputs if value is not None}
        reads = (value for value in (*part.reads, *given) if value in read)
        return replace(self._part(view, reads, outputs, part.region.rule), flops=part.flops)

    def _part(
        self, view: tuple[Node, ...], reads: Iterable[Value], outputs: tuple[Value, ...], rule: str = ""
    ) -> Part:
        values, read = self.space.maker.graph.values, tuple(dict.fromkeys(reads))
        region = Region(
            copied(view), tuple(values[value.name] for value in read if value.name in values),
            tuple(values[value.name] for value in outputs), rule, view)
        return Part(region, outputs, frozenset(read))

    def _spread(self, reader: Part, again: Sequence[Node]) -> int:
        """Arithmetic that computing nodes again takes beyond theirs, where a reader spreads their results."""
        sizes = self.costs.ledger.sizes
        if reader.largest is None:
            results = (value for node in reader.view for value in node.outputs if value is not None)
            reader.largest = max((elements_of(value, sizes) or 0 for value in results), default=0)
        largest, more = reader.largest, 0
        for node in again:
            count = max((elements_of(value, sizes) or 0 for value in node.outputs if value is not None), default=0)
            flops = sum(self.costs.ledger.node(original).flops for original in node.originals)
            more += flops * (largest // count - 1) if 0 < count < largest else 0
        return more


def _is_number(value: Value) -> bool:
    return value.constant is not None and value.constant.size <= 1
