"""Products of dequantised numbers: a kernel that reads the 8-bit numbers themselves multiplies integers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from onnx import TensorProto

from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.operators import OperatorClass, classify
from onnxfuse.operators.classes import DEQUANTIZE, multiplied, quantised
from onnxfuse.planning.costs.traffic import Ledger


def dequantising(products: Sequence[Node], graph: Graph, admits: Callable[[Value], bool]) -> frozenset[Node]:
    """The nodes that dequantise all operands of some products, with the views behind that, and their biases; none where
    one operand is something else.  ``admits``: whether who made a value may be among them."""
    found: set[Node] = set()
    for value in dict.fromkeys(value for node in products for value in multiplied(node)):
        chain = _chain(value, graph, admits)
        if not chain:
            return frozenset()
        found.update(chain)
    biases = (value for node in products if len(node.inputs) > 2 for value in node.inputs[2:3])
    found.update(node for value in biases if value is not None and (node := value.producer) is not None
                 and node.op == DEQUANTIZE and admits(value))
    return frozenset(found)


def product_type(nodes: Collection[Node], ledger: Ledger) -> int | None:
    """Operand type of the first product among the nodes, 8 bits where all that these multiply is dequantised there."""
    products = [node for node in nodes if ledger.node(node).product]
    if not products:
        return None
    if len(nodes) > len(products) and dequantising(products, ledger.graph, lambda value: value.producer in nodes):
        return TensorProto.INT8
    operand: Value | None = min(products, key=lambda node: node.index).inputs[0]
    return operand.dtype if operand is not None else None


def _chain(value: Value | None, graph: Graph, admits: Callable[[Value], bool]) -> list[Node]:
    """From what made a value back to the node that dequantises; empty where no such node is there."""
    chain: list[Node] = []
    while value is not None and value.producer is not None and admits(value):
        node = value.producer
        chain.append(node)
        if node.op == DEQUANTIZE:
            return chain if quantised(value) is not None else []
        if classify(node, graph) is not OperatorClass.VIEW:
            return []
        value = node.inputs[0]
    return []
