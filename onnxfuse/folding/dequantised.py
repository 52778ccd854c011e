"""Which dequantised values several read that might take in what dequantises: each is to have a node of its own.

    numbers ─ DequantizeLinear ─┬─▶ product        numbers ─┬─ DequantizeLinear ─▶ product
                                └─▶ residual                └─ DequantizeLinear ─▶ residual

ONNX Runtime gives each reader one whatever the file says, so that this costs nothing where none is taken in.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.operators import is_contraction
from onnxfuse.operators.classes import multiplied, quantised

STAGE = "dequantised"
"""The id that leaves this stage out."""


@dataclass(frozen=True)
class Shared:
    """A dequantised value, and groups of its readers, by the names of their first results, that are to have another
    node for it each; all others keep this one."""

    value: str
    readers: tuple[tuple[str, ...], ...]


def shared(graph: Graph) -> tuple[Shared, ...]:
    """The values of the main graph that a product reads and others do, in graph order.  Products of one operand and of
    the same shape stay together, for one kernel may compute them all."""
    found = []
    for value in graph.values.values():
        numbers = quantised(value)
        if numbers is None or numbers.is_constant or not value.is_local:
            continue
        groups: dict[Hashable, list[str]] = {}
        for reader in value.consumers:
            first = next((each for each in reader.outputs if each is not None), None)
            if first is not None:
                groups.setdefault(_group(reader, value, first), []).append(first.name)
        products = [tuple(names) for group, names in groups.items() if group is not None]
        if len(groups) > 1:
            found.append(Shared(value.name, tuple(products if None in groups else products[1:])))
    return tuple(found)


def _group(reader: Node, value: Value, result: Value) -> Hashable:
    """What readers stay together by; None for those that multiply nothing by the value."""
    if not is_contraction(reader) or value not in multiplied(reader):
        return None
    return reader.op, multiplied(reader).index(value), result.shape
