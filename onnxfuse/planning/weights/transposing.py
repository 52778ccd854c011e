"""Quantised weights laid out the other way, what is summed over last, as tensor cores read 8-bit numbers.

    w [k, n] ─ DequantizeLinear ─▶ MatMul      the kernel reads      w' [n, k] ─ DequantizeLinear ─ Transpose ─▶ MatMul
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from numpy.typing import NDArray

from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.ir.scalars import INT8, UINT8
from onnxfuse.operators.classes import DEQUANTIZE, weights_axis

LEAST = 16
"""Sizes that weights are a multiple of: no vector of 8-bit numbers is shorter."""


@dataclass(frozen=True)
class TransposedWeights:
    """A node that dequantises weights: the weights the other way, and what stands for it over these."""

    node: Node
    weights: Value
    instead: tuple[Node, ...]


def size_of(node: Node) -> int:
    """Bytes of the weights that a node dequantises."""
    weights = node.inputs[0]
    assert weights is not None and weights.shape is not None
    return prod(size.value or 0 for size in weights.shape)


def are_transposed(folded: Collection[Node]) -> bool:
    """Whether nodes that are folded into weights are nothing but what dequantises weights that lie the other way."""
    return all(node.op == DEQUANTIZE for node in folded)


def dequantised_weights(product: Node, members: Collection[Node], graph: Graph) -> Node | None:
    """The node of a region that dequantises a product's weights, whose columns lie side by side; None where there is
    none, or others read them too."""
    value = product.inputs[1] if weights_axis(product) == 1 and not product.domain and len(product.inputs) > 1 else None
    node = None if value is None else value.producer
    if node is None or node not in members or node.op != DEQUANTIZE or node.body is not None or (
            node.attributes.get("block_size", 0) or value is None or value.consumers != [product] or value.is_output):
        return None
    weights = node.inputs[0]
    if weights is None or not weights.is_constant or weights.dtype not in (INT8, UINT8) or weights.rank != 2:
        return None
    own = graph.values[weights.name]
    alone = len(own.consumers) == 1 and not own.is_output and not own.inner and not own.external
    vectors = all((size.value or 1) % LEAST == 0 for size in weights.shape or ())
    return node if alone and vectors and (weights.constant is not None or weights.contents is not None) else None


def transposed(node: Node, constant: Callable[[Node, str, NDArray[Any]], Value]) -> TransposedWeights:
    """The weights of such a node the other way; ``constant`` makes them."""
    weights, result = node.inputs[0], node.outputs[0]
    assert weights is not None and result is not None and result.shape is not None
    read = weights.constant if weights.contents is None else weights.contents()
    assert read is not None
    made = constant(node, f"{weights.name}_transposed", read.T)
    between = Value(f"{result.name}_transposed", result.dtype, result.shape[::-1])
    attributes: Mapping[str, Any] = {**node.attributes, "axis": 1 - int(node.attributes.get("axis", 1)) % 2}
    return TransposedWeights(node, made, (
        replace(node, inputs=(made, *node.inputs[1:]), outputs=(between,), attributes=attributes),
        replace(node, op="Transpose", domain="", inputs=(between,), attributes={"perm": [1, 0]}),
    ))
