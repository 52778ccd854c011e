"""Regions as they would be if one computed again what another computes: their nodes, and what they read and cost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from onnxfuse.graph.model import Node, Value
from onnxfuse.graph.sizes import elements_of
from onnxfuse.operators import OperatorClass, classify
from onnxfuse.planning.cost import CostModel
from onnxfuse.planning.legality import copied
from onnxfuse.planning.plan import SearchSpace
from onnxfuse.planning.region import Region

MOST_OPERATORS = 8
"""Operators that compute a value again."""

CHEAP = frozenset({OperatorClass.POINTWISE, OperatorClass.BROADCAST, OperatorClass.VIEW})
"""Classes of operators that may be computed again: nothing across elements."""


@dataclass(eq=False)
class Part:
    """Nodes that run as one: a region of the plan, or a lone node that the runtime runs.

    Attributes:
        view: nodes of the canonical view; outputs: its values that are used outside.
        fusion: the region; None for a lone node.
        reads: its values that a kernel reads; flops: arithmetic beyond that of its nodes.
        old: whether it is of the plan as it came.
        seconds, largest: its predicted time by the id of the costs, and the elements of its largest result, once known.
    """

    view: tuple[Node, ...]
    outputs: tuple[Value, ...]
    fusion: Region | None
    reads: frozenset[Value]
    flops: int = 0
    old: bool = True
    seconds: dict[int, float] = field(default_factory=dict, repr=False)
    largest: int | None = None

    @cached_property
    def members(self) -> frozenset[Node]:
        """Its nodes."""
        return frozenset(self.view)

    @property
    def measured(self) -> float | None:
        """Measured seconds of its kernel, once."""
        if self.fusion is None or self.fusion.measured is None:
            return None
        return float(self.fusion.measured["microseconds"]) * 1e-6


@dataclass(frozen=True)
class Sketch:
    """A part that may stand for another.

    Attributes:
        stands_for: that other; region: what it would be.
        outputs: values of the view that it writes; again: nodes of the view that it computes again now.
        flops: arithmetic beyond that of its nodes.
    """

    stands_for: Part
    region: Region
    outputs: tuple[Value, ...]
    again: tuple[Node, ...]
    flops: int


@dataclass(frozen=True)
class Sketches:
    """Makes sketches in one graph, from what its regions were chosen from; ``costs`` are those of the model."""

    space: SearchSpace
    costs: CostModel

    def cone(self, part: Part, value: Value, kept: Collection[Value]) -> tuple[Node, ...] | None:
        """The nodes that compute a value from what is in memory anyway; None where they are no cheap ones."""
        found: set[Node] = set()
        waiting = [value]
        members = part.members
        while waiting:
            node = waiting.pop().producer
            if node is None or node not in members or node in found:
                continue
            if not self._is_cheap(node):
                return None
            found.add(node)
            waiting += [each for each in node.reads() if each not in kept]
        if sum(not self.space.facts[node].view for node in found) > MOST_OPERATORS:
            return None
        return tuple(sorted(found, key=lambda node: node.index))

    def _is_cheap(self, node: Node) -> bool:
        facts = self.space.facts.get(node)
        return (
            facts is not None and facts.rows is None and not facts.transposes and not node.captures
            and sum(value is not None for value in node.outputs) == 1
            and all(classify(original, self.space.maker.graph) in CHEAP or original.op == "Constant"
                    for original in node.originals)
        )

    def reading(self, reader: Part, cone: set[Node], values: Collection[Value]) -> Sketch:
        """A reader with what computes the values."""
        view = tuple(sorted({*reader.view, *cone}, key=lambda node: node.index))
        entering = (value for node in view if node in cone for value in node.inputs
                    if value is not None and value.producer not in cone and not _is_number(value))
        reads = [value for value in (*reader.reads, *entering)
                 if value not in values and value.producer not in view]
        again = tuple(sorted(cone - reader.members, key=lambda node: node.index))
        return Sketch(
            reader, self._region(view, reads, reader.outputs), reader.outputs, again,
            reader.flops + self._spread(reader, again),
        )

    def rest(self, part: Part, kept: tuple[Value, ...]) -> Sketch:
        """A part that computes fewer values than it did."""
        found: set[Node] = set()
        waiting, members = list(kept), part.members
        while waiting:
            node = waiting.pop().producer
            if node is not None and node in members and node not in found:
                found.add(node)
                waiting += node.reads()
        view = tuple(node for node in part.view if node in found)
        read = {value for node in view for value in node.inputs if value is not None}
        reads = [value for value in part.reads if value in read]
        return Sketch(part, self._region(view, reads, kept), kept, (), part.flops)

    def _region(self, view: tuple[Node, ...], reads: Iterable[Value], outputs: Iterable[Value]) -> Region:
        values = self.space.maker.graph.values
        return Region(
            self.originals(view), tuple(values[value.name] for value in dict.fromkeys(reads)),
            tuple(values[value.name] for value in outputs), view=view)

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

    def originals(self, view: Iterable[Node]) -> tuple[Node, ...]:
        """The original nodes of nodes of the view, in graph order."""
        return copied(view)


def _is_number(value: Value) -> bool:
    return value.constant is not None and value.constant.size <= 1
