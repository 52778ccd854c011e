"""May these nodes become one?

A set of nodes is *convex* when no path leaves it and comes back: fused into one node, such a path would be a cycle.
Convexity of one set in the graph as it is: ``is_convex``.  Convexity beside regions that were contracted before, which
together may close a cycle that neither closes alone: ``Contraction``.

Answers are refusals, as values; None means that nothing stands in the way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import onnx
from onnx import TensorProto

from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.graph.sizes import elements_of
from onnxfuse.graph.sorting import topological
from onnxfuse.operators.classes import in_training, is_deterministic
from onnxfuse.provider.host import SMALL_CONSTANT, host
from onnxfuse.refusal import Refusal


@dataclass(frozen=True)
class Boundary:
    """What a set of nodes reads from outside, in order of first use, and what is used outside, in graph order.

    ``inputs`` holds constants too; ``inner`` are the values that only the set itself uses.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    inner: tuple[Value, ...]


def boundary(nodes: Iterable[Node]) -> Boundary:
    """The values that cross the border of ``nodes``; a value that nobody uses is an inner one."""
    ordered = sorted(nodes, key=lambda node: node.index)
    members = set(ordered)
    inputs: dict[Value, None] = {}
    outputs: list[Value] = []
    inner: list[Value] = []
    for node in ordered:
        inputs.update((value, None) for value in node.reads() if value.producer not in members)
        for value in node.outputs:
            if value is not None:
                outside = value.is_output or any(consumer not in members for consumer in value.consumers)
                (outputs if outside else inner).append(value)
    return Boundary(tuple(inputs), tuple(outputs), tuple(inner))


def copied(members: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes of the model that a region holds, in graph order, given its nodes of the canonical view."""
    return tuple(sorted({node for member in members for node in member.copied}, key=lambda node: node.index))


def apart(groups: Sequence[Collection[Node]], common: Collection[Node]) -> list[frozenset[Node]]:
    """Sets of nodes without those that several of them hold (``common``), so that they can be contracted side by side.

    What several regions compute stands for itself then, and each of them depends on it; but one of them keeps what
    reads a result of its own, of which the others depend as well.
    """
    found = [set(group).difference(common) for group in groups]
    holders: dict[Node, list[int]] = {node: [] for node in common}
    for place, group in enumerate(groups):
        for node in group:
            if node in holders:
                holders[node].append(place)
    for node in sorted(common, key=lambda node: node.index):
        makers = {value.producer for value in node.reads()}
        home = next((place for place in holders[node] if not makers.isdisjoint(found[place])), None)
        if home is not None:
            found[home].add(node)
    return [frozenset(group) for group in found]


def successors(node: Node) -> Iterator[Node]:
    """Nodes that read an output of ``node``; one may come more than once."""
    for value in node.outputs:
        if value is not None:
            yield from value.consumers


def is_convex(nodes: Collection[Node]) -> Refusal | None:
    """A refusal that names the path, where a path leaves ``nodes`` and comes back.

    One search, bounded by the graph's order.
    """
    path = _path(set(nodes))
    return _not_convex(path) if path else None


def _path(members: set[Node]) -> tuple[Node, ...]:
    """A shortest path that leaves ``members`` and comes back, ends included; empty where there is none."""
    if not members:
        return ()
    last = max(node.index for node in members)
    came: dict[Node, Node] = {}
    front: list[Node] = []
    for node in sorted(members, key=lambda node: node.index):
        for after in successors(node):
            if after not in members and after not in came and after.index < last:
                came[after] = node
                front.append(after)
    while front:
        ahead: list[Node] = []
        for node in front:
            for after in successors(node):
                if after in members:
                    path = [after, node]
                    while path[-1] not in members:
                        path.append(came[path[-1]])
                    return tuple(reversed(path))
                if after not in came and after.index < last:
                    came[after] = node
                    ahead.append(after)
        front = ahead
    return ()


def _not_convex(path: tuple[Node, ...]) -> Refusal:
    outside = path[1:-1]
    labels = [node.label for node in path]
    names = " -> ".join(labels if len(labels) <= 6 else (*labels[:3], "...", *labels[-2:]))
    return Refusal(
        "not-convex",
        f"fusing would make a cycle: {outside[0].label} ({outside[0].qualified_op}) stays outside and lies on the path "
        f"{names}",
        node=outside[0].label,
        remedy=f"include {outside[0].label} in the region, or leave {path[-1].label} out",
    )


def escapes(inner: Iterable[Value], nodes: Collection[Node]) -> Refusal | None:
    """A refusal where a value that must stay inside is a graph output, captured by a subgraph or read outside."""
    members = set(nodes)
    for value in inner:
        label = value.producer.label if value.producer is not None else value.name
        if value.is_output:
            return Refusal("inner-value-is-output", f"{value.name} is an output of the graph", node=label)
        for consumer in value.consumers:
            if consumer in members:
                continue
            if value not in consumer.inputs:
                return Refusal(
                    "inner-value-captured", f"{value.name} is captured by a subgraph of {consumer.label}", node=label
                )
            return Refusal(
                "inner-value-used-outside", f"{value.name} is also read by {consumer.label} ({consumer.qualified_op})",
                node=label,
            )
    return None


def check_nodes(nodes: Iterable[Node], opset: int) -> Refusal | None:
    """A refusal where a node can be in no region: it holds a subgraph, its result differs from run to run, or ONNX
    Runtime could not hold it in a function.

    ONNX Runtime takes some operators, LayerNormalization for one, before the standard has them, and models that its
    own tools made use them so.  In a function it looks for the standard's, and the process ends with a fault.

    Args:
        opset: version of the standard operators.
    """
    for node in nodes:
        foreign = next((each for each in node.originals if not each.domain and not _in_standard(each.op, opset)), None)
        if foreign is not None:
            return Refusal(
                "not-standard", f"{foreign.op} is no operator of opset {opset}", foreign.label,
                remedy="raise the model's opset to one that has the operator",
            )
        if node.has_subgraph:
            return Refusal("subgraph", f"{node.label} ({node.qualified_op}) holds a subgraph", node=node.label)
        if not is_deterministic(node):
            why = "works as in training" if in_training(node) else "draws random numbers"
            return Refusal("non-deterministic", f"{node.label} ({node.qualified_op}) {why}", node=node.label)
    return None


@cache
def _in_standard(op: str, opset: int) -> bool:
    return bool(onnx.defs.has(op, opset))


_NEVER_MOVED = frozenset({
    TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ,
    TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ,
})


def check_host_inputs(inputs: Collection[Value], graph: Graph, node: str = "") -> Refusal | None:
    """A refusal where ONNX Runtime would move the fused node to the CPU, where it has no kernel.

    It does so with a node that reads a value in host memory and beside such values only graph inputs and small
    constants, unless one of them is float16 or narrower.

    Args:
        inputs: what the fused node would read.
        graph: the graph that they are of.
        node: label for the message.
    """
    found = host(graph)
    on_host = [value for value in inputs if value in found.values]
    if not on_host or any(value.dtype in _NEVER_MOVED for value in inputs):
        return None
    for value in inputs:
        count = elements_of(value, {}) if value in found.constants else None
        if not (value in found.values or value.is_input or (count is not None and count <= SMALL_CONSTANT)):
            return None
    return Refusal(
        "host-inputs",
        f"its inputs live in host memory ({on_host[0].name}): ONNX Runtime would run it on the CPU",
        node=node,
        remedy="include a node that reads a tensor in device memory",
    )


class Contraction:
    """The graph with some sets of nodes contracted to one each, kept free of cycles.

    A topological order of the contracted graph is kept: a contraction searches, and renumbers, only what lies between
    the first and the last of its nodes in that order.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._groups: dict[int, frozenset[Node]] = {}
        self._build()

    def _build(self) -> None:
        """Units are numbered by their first node; ``_slots`` lists them in topological order, with holes."""
        self._unit = [node.index for node in self._graph.nodes]
        for unit, members in self._groups.items():
            for node in members:
                self._unit[node.index] = unit
        self._after: dict[int, set[int]] = {unit: set() for unit in self._unit}
        self._before: dict[int, set[int]] = {unit: set() for unit in self._unit}
        for node in self._graph.nodes:
            for after in successors(node):
                first, second = self._unit[node.index], self._unit[after.index]
                if first != second:
                    self._after[first].add(second)
                    self._before[second].add(first)
        order, _ = topological(self._before)
        self._slots: list[int | None] = [*order]
        self._slot = {unit: place for place, unit in enumerate(self._slots) if unit is not None}

    def check(self, nodes: Collection[Node]) -> Refusal | None:
        """A refusal where contracting ``nodes`` would make a cycle, or one of them is contracted already."""
        for node in nodes:
            if self._unit[node.index] in self._groups:
                return Refusal("already-fused", f"{node.label} is part of another region", node=node.label)
        units = {node.index for node in nodes}
        path = self._cycle(units)
        if not path:
            return None
        if all(unit not in self._groups for unit in path[1:-1]):
            return _not_convex(tuple(self._graph.nodes[unit] for unit in path))
        region = next(unit for unit in path[1:-1] if unit in self._groups)
        label = self._graph.nodes[region].label
        return Refusal(
            "cycle-with-region",
            f"fusing would make a cycle with the region of {label}, which reads from this one and is read by it",
            node=self._graph.nodes[path[-1]].label,
            remedy="leave out the nodes on one side of that region",
        )

    def contract(self, nodes: Collection[Node]) -> Refusal | None:
        """Make ``nodes`` one, or say why not and change nothing."""
        refusal = self.check(nodes)
        if refusal is not None or len(nodes) == 0:
            return refusal
        self._contract({node.index for node in nodes}, frozenset(nodes))
        return None

    def join(self, first: Collection[Node], second: Collection[Node]) -> Refusal | None:
        """Make two contracted sets, or single nodes, one; or say why not and change nothing."""
        refusal = self.check_join(first, second)
        if refusal is None:
            members = frozenset((*first, *second))
            self._contract({self._unit[node.index] for node in members}, members)
        return refusal

    def check_join(self, first: Collection[Node], second: Collection[Node]) -> Refusal | None:
        """A refusal where making two contracted sets, or single nodes, one would make a cycle."""
        path = self._cycle({self._unit[node.index] for members in (first, second) for node in members})
        return _not_convex(tuple(self._graph.nodes[unit] for unit in path)) if path else None

    def feeds(self, first: Collection[Node], second: Collection[Node]) -> bool:
        """Whether an edge leads from a contracted set, or a single node, to another."""
        below = {self._unit[node.index] for node in second}
        return any(not below.isdisjoint(self._after[self._unit[node.index]]) for node in first)

    def _contract(self, units: set[int], nodes: frozenset[Node]) -> None:
        kept = min(units)
        low, high = (pick(self._slot[unit] for unit in units) for pick in (min, max))
        above = self._reach(units, self._before, low)
        span = [unit for unit in self._slots[low : high + 1] if unit is not None]
        order: list[int | None] = [unit for unit in span if unit in above]
        order += [kept, *(unit for unit in span if unit not in above and unit not in units)]
        self._slots[low : high + 1] = order + [None] * (high + 1 - low - len(order))
        for unit in units:
            del self._slot[unit]
        self._slot.update((unit, low + place) for place, unit in enumerate(order) if unit is not None)
        for near, far in ((self._after, self._before), (self._before, self._after)):
            joined = set().union(*(near.pop(unit) for unit in units)) - units
            near[kept] = joined
            for unit in joined:
                far[unit] -= units
                far[unit].add(kept)
        for node in nodes:
            self._unit[node.index] = kept
        for unit in units:
            self._groups.pop(unit, None)
        self._groups[kept] = nodes

    def release(self, nodes: Collection[Node]) -> None:
        """Take a contraction back.

        Raises:
            KeyError: ``nodes`` were not contracted together.
        """
        unit = min(node.index for node in nodes)
        if self._groups.get(unit) != frozenset(nodes):
            raise KeyError("these nodes were not contracted together")
        del self._groups[unit]
        self._build()

    def order(self) -> tuple[tuple[Node, ...], ...]:
        """The contracted graph in topological order: regions and single nodes, each in graph order."""
        return tuple(
            tuple(sorted(self._groups[unit], key=lambda node: node.index)) if unit in self._groups
            else (self._graph.nodes[unit],)
            for unit in self._slots
            if unit is not None
        )

    def _reach(self, units: set[int], edges: dict[int, set[int]], low: int) -> set[int]:
        """Units before ``units``, not in them, at slot ``low`` or later."""
        found: set[int] = set()
        front = list(units)
        while front:
            for unit in edges[front.pop()]:
                if unit not in found and unit not in units and self._slot[unit] >= low:
                    found.add(unit)
                    front.append(unit)
        return found

    def _cycle(self, units: set[int]) -> tuple[int, ...]:
        """A path that leaves ``units`` and comes back, ends included; empty where there is none."""
        if not units:
            return ()
        high = max(self._slot[unit] for unit in units)
        came: dict[int, int] = {}
        front = list(units)
        while front:
            unit = front.pop()
            for after in self._after[unit]:
                if after in units:
                    if unit in units:
                        continue
                    path = [after, unit]
                    while path[-1] not in units:
                        path.append(came[path[-1]])
                    return tuple(reversed(path))
                if after not in came and self._slot[after] < high:
                    came[after] = unit
                    front.append(after)
        return ()
