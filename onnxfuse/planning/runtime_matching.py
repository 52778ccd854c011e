"""Small questions that the models of ONNX Runtime's fusions ask of a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.operators.removed import readers, source, taken_out


@dataclass(frozen=True)
class Unit:
    """A fused operator: its type, and what it reads first."""

    op: str
    source: Value


@dataclass(frozen=True)
class RuntimeFusion:
    """Nodes that the runtime runs as one kernel.  It still does where some are gone that are not of the ``core``.

    What it takes out of the graph between them is not among them.
    """

    nodes: frozenset[Node]
    core: frozenset[Node]

    def without(self, gone: Collection[Node]) -> list[frozenset[Node]]:
        """What is left when some nodes are gone: the core and what still touches it, and every other node alone."""
        left = self.nodes.difference(gone)
        if not self.core <= left:
            return [frozenset([node]) for node in left]
        kept, front = set(self.core), list(self.core)
        while front:
            node = front.pop()
            beside = {source(value).producer for value in node.reads()}
            beside.update(reader for value in node.outputs if value is not None for reader in readers(value))
            found = (left & beside) - kept
            kept |= found
            front += found
        return [frozenset(kept), *(frozenset([node]) for node in left - kept)]


def seen(graph: Graph) -> tuple[Node, ...]:
    """The nodes of a graph as the runtime's fusions find them, in graph order: those that it takes out before are gone.
    Where there are any, the rest are copies, whose ``originals`` are the nodes of the graph."""
    taken = {node: operand for node in graph.nodes if (operand := taken_out(node)) is not None}
    if not taken:
        return graph.nodes
    values = {value: replace(value, producer=None, consumers=[]) for value in graph.values.values()}
    nodes = []
    for node in graph.nodes:
        if node in taken:
            result, given = node.outputs[0], values[taken[node]]
            assert result is not None, "what stands in its place is an operand"
            given.is_output |= result.is_output
            values[result] = given
            continue
        copy = replace(
            node, originals=(node,), captures=tuple(values[value] for value in node.captures),
            inputs=tuple(None if value is None else values[value] for value in node.inputs),
            outputs=tuple(None if value is None else values[value] for value in node.outputs),
        )
        for value in copy.reads():
            value.consumers.append(copy)
        for made in copy.outputs:
            if made is not None:
                made.producer = copy
        nodes.append(copy)
    return tuple(nodes)


class Groups:
    """Groups found so far, their cores, and the operator that each stands for, by its last node."""

    def __init__(self) -> None:
        self.of: dict[Node, set[Node]] = {}
        self.units: dict[Node, Unit] = {}
        self._core: dict[Node, set[Node]] = {}

    def free(self, nodes: Iterable[Node]) -> bool:
        """Whether no node is fused yet."""
        return not any(node in self.of for node in nodes)

    def join(self, *nodes: Node) -> None:
        """Make one group of these nodes and of the groups that they are in; it stands with all of its nodes."""
        joined = {member for node in nodes for member in self.of.get(node, {node})}
        for member in joined:
            self.of[member] = self._core[member] = joined

    def attach(self, node: Node, *more: Node) -> None:
        """Add nodes to the group of ``node``, which stands without them too."""
        core = self._core.get(node, {node})
        self.join(node, *more)
        for member in self.of[node]:
            self._core[member] = core

    def all(self) -> list[RuntimeFusion]:
        """The groups of two nodes and more, of the graph's own nodes, in graph order."""
        distinct = {id(group): RuntimeFusion(_originals(group), _originals(self._core[node]))
                    for node, group in self.of.items() if len(group) > 1}
        return sorted(distinct.values(), key=lambda group: min(node.index for node in group.nodes))


def _originals(nodes: Iterable[Node]) -> frozenset[Node]:
    return frozenset(original for node in nodes for original in node.originals)


def is_op(node: Node | None, *ops: str) -> bool:
    return node is not None and node.domain == "" and node.op in ops


def result(node: Node) -> Value:
    value = node.outputs[0]
    assert value is not None, "these operators have one output"
    return value


def only_reader(node: Node) -> Node | None:
    """The one node that reads the node's output, through one operand, where it is no output of the graph."""
    value = result(node)
    if value.is_output or len(value.consumers) != 1:
        return None
    consumer = value.consumers[0]
    return consumer if consumer.inputs.count(value) == 1 else None


def producer(node: Node, position: int, *ops: str) -> Node | None:
    """The node that computes an operand, where it is one of ``ops``."""
    value = node.inputs[position]
    assert value is not None, "these operators need their operands"
    return value.producer if is_op(value.producer, *ops) else None


def is_constant(value: Value | None) -> bool:
    """Whether it is a constant, or folded from one by an operator that moves or converts it."""
    while value is not None and not value.is_constant:
        node = value.producer
        if node is None or not is_op(node, "Identity", "Cast", "Reshape", "Transpose"):
            return False
        value = node.inputs[0]
    return value is not None and value.is_constant


def scalar(value: Value | None) -> float | None:
    """The number that a constant of one element holds."""
    constant = None if value is None else source(value).constant
    if constant is None or constant.size != 1:
        return None
    return float(np.asarray(constant).reshape(()).astype(np.float64))


def near(value: Value | None, target: float) -> bool:
    number = scalar(value)
    return number is not None and abs(number - target) <= 1e-2 * abs(target)


def other(node: Node, value: Value) -> Value | None:
    """The other operand of a two-operand node."""
    return node.inputs[1] if node.inputs[0] is value else node.inputs[0]


def with_scalar(node: Node | None, op: str, target: float, source: Value) -> bool:
    """Whether ``node`` is ``op(source, target)``, either way round."""
    return is_op(node, op) and node is not None and source in node.inputs and near(other(node, source), target)
