"""Sizes that are above zero in every run that a model survives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onnxfuse.graph.dims import Atom, Dim
from onnxfuse.graph.model import Graph, Node, Value


@dataclass(frozen=True)
class Positive:
    """``sizes`` are above zero because a node on the way to an output fails where one of them is zero."""

    sizes: frozenset[Dim] = frozenset()

    @staticmethod
    def of(graph: Graph) -> Positive:
        """What the Reshapes of a graph ask for: where a zero in the target copies, ONNX Runtime refuses it past the
        input's last axis, and beside -1 where the input's size is zero."""
        found: set[Dim] = set()
        for node in _needed(graph):
            if node.op == "Reshape" and not node.domain:
                found.update(_asked(node))
        parts = {part for size in found for part in _factors(size)}
        return Positive(frozenset(found | parts))

    def __contains__(self, size: Dim) -> bool:
        if size in self.sizes or (size - 1).non_negative():
            return True
        factors = list(_factors(size))
        return bool(factors) and all(factor in self.sizes for factor in factors)


def _needed(graph: Graph) -> Iterator[Node]:
    """Nodes on the way to an output of the graph."""
    waiting: list[Value] = list(graph.outputs)
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop().producer
        if node is not None and node not in seen:
            seen.add(node)
            waiting += node.reads()
            yield node


def _asked(node: Node) -> Iterator[Dim]:
    source, target = node.inputs[:2]
    if source is None or target is None or target.elements is None:
        return
    if node.attributes.get("allowzero", 0) or source.shape is None:
        return
    for axis, size in enumerate(target.elements):
        past = axis >= len(source.shape)
        if size.value is not None or not size.non_negative():
            continue
        if past or (-1 in target.elements and source.shape[axis] == size):
            yield size


def _factors(size: Dim) -> Iterator[Dim]:
    """The sizes that a product is made of; none where it is a sum, or below zero."""
    if len(size.terms) == 1:
        ((monomial, factor),) = size.terms.items()
        yield from (_single(atom) for atom, _ in monomial if factor > 0)


def _single(atom: Atom) -> Dim:
    return Dim({((atom, 1),): 1})
