"""Small questions that the models of ONNX Runtime's fusions ask of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from onnxfuse.graph.model import Node, Value


@dataclass(frozen=True)
class Unit:
    """A fused operator: its type, and what it reads first."""

    op: str
    source: Value


class Groups:
    """Groups found so far, and the operator that each stands for, by its last node."""

    def __init__(self) -> None:
        self.of: dict[Node, set[Node]] = {}
        self.units: dict[Node, Unit] = {}

    def free(self, nodes: Iterable[Node]) -> bool:
        """Whether no node is fused yet."""
        return not any(node in self.of for node in nodes)

    def join(self, *nodes: Node) -> None:
        """Make one group of these nodes and of the groups that they are in."""
        joined = {member for node in nodes for member in self.of.get(node, {node})}
        for member in joined:
            self.of[member] = joined


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
    value = node.inputs[position] if position < len(node.inputs) else None
    return value.producer if value is not None and is_op(value.producer, *ops) else None


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
    while value is not None and value.constant is None and is_op(value.producer, "Identity"):
        assert value.producer is not None
        value = value.producer.inputs[0]
    if value is None or value.constant is None or value.constant.size != 1:
        return None
    return float(np.asarray(value.constant).reshape(()).astype(np.float64))


def near(value: Value | None, target: float) -> bool:
    number = scalar(value)
    return number is not None and abs(number - target) <= 1e-2 * abs(target)


def other(node: Node, value: Value) -> Value | None:
    """The other operand of a two-operand node."""
    return node.inputs[1] if node.inputs[0] is value else node.inputs[0]


def with_scalar(node: Node | None, op: str, target: float, source: Value) -> bool:
    """Whether ``node`` is ``op(source, target)``, either way round."""
    return is_op(node, op) and node is not None and source in node.inputs and near(other(node, source), target)
