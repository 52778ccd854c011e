"""Which operators can be lowered, and by what."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onnxfuse.graph.model import Node
from onnxfuse.lowering.context import Context
from onnxfuse.lowering.ir import Tensor

Lowering = Callable[[Node, Context], "Tensor | list[Tensor | None]"]
"""The outputs of a node as tensors; None for an output that it cannot give (nobody may ask for it)."""

LOWERINGS: dict[tuple[str, str], Lowering] = {}


def lowers(*names: str, domain: str = "") -> Callable[[Lowering], Lowering]:
    """Register a lowering for operators of a domain."""

    def register(lowering: Lowering) -> Lowering:
        for name in names:
            LOWERINGS[domain, name] = lowering
        return lowering

    return register


def lowering_of(node: Node) -> Lowering | None:
    """The lowering of a node's operator, or None: it has none, or the node breaks the operator's rules (by a graph that
    no such operator has, for one)."""
    if any(original.broken or original.has_subgraph for original in (node, *node.originals)):
        return None
    return LOWERINGS.get((node.domain, node.op))


def operand(node: Node, context: Context, place: int) -> Tensor:
    """Input ``place`` of a node as a tensor; it must be there."""
    value = node.inputs[place] if place < len(node.inputs) else None
    if value is None:
        raise context.refuse("missing-input", f"{node.qualified_op} lacks its input {place}")
    return context.tensor(value)


def optional(node: Node, context: Context, place: int) -> Tensor | None:
    """Input ``place`` of a node as a tensor, or None where it is absent."""
    value = node.inputs[place] if place < len(node.inputs) else None
    return None if value is None else context.tensor(value)


def number_attribute(node: Node, name: str, default: float) -> float:
    """A float attribute; its default is a float32, as all attributes are."""
    return float(np.float32(node.attributes.get(name, default)))


def integer_attribute(node: Node, name: str, default: int) -> int:
    """An integer attribute."""
    return int(node.attributes.get(name, default))
