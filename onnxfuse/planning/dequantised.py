"""Products of dequantised numbers: a kernel that reads the 8-bit numbers themselves multiplies integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.ir.scalars import INT8, UINT8
from onnxfuse.operators import OperatorClass, classify

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
"""Operators that give quantised numbers and take them."""


def dequantising(products: Sequence[Node], graph: Graph, admits: Callable[[Value], bool]) -> frozenset[Node]:
    """The nodes that dequantise all operands of some products, with the views behind that; none where one operand is
    something else.  ``admits``: whether who made a value may be among them."""
    found: set[Node] = set()
    for value in dict.fromkeys(node.inputs[place] for node in products for place in (0, 1)):
        chain = _chain(value, graph, admits)
        if not chain:
            return frozenset()
        found.update(chain)
    return frozenset(found)


def _chain(value: Value | None, graph: Graph, admits: Callable[[Value], bool]) -> list[Node]:
    """From what made a value back to the node that dequantises; empty where no such node is there."""
    chain: list[Node] = []
    while value is not None and value.producer is not None and admits(value):
        node = value.producer
        chain.append(node)
        value = node.inputs[0]
        if node.op == DEQUANTIZE:
            return chain if value is not None and value.dtype in (INT8, UINT8) else []
        if classify(node, graph) is not OperatorClass.VIEW:
            return []
    return []
