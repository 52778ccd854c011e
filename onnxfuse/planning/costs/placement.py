"""How every node runs: the part of the count's definition (docs/bytes.md) that sorts nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.operators import OperatorClass, classify
from onnxfuse.provider.host import host
from onnxfuse.provider.removed import is_same_memory


class Kind(Enum):
    """How a node runs."""

    FOLDED = "folded"
    """Its inputs are all constant: ONNX Runtime computes it when the session is created."""
    VIEW = "view"
    """Its output is its input's memory under another shape."""
    HOST = "host"
    """Arithmetic on sizes, which ONNX Runtime's CUDA provider leaves to the CPU."""
    PRODUCT = "product"
    """A matrix product, a convolution, or an operator built around one; one kernel."""
    CONTROL = "control"
    """An If, a Loop or a Scan: what its bodies hold runs, and it has no kernel of its own."""
    OTHER = "other"
    """Anything else; one kernel."""

    @property
    def launches(self) -> bool:
        """Whether the node launches a kernel."""
        return self in (Kind.PRODUCT, Kind.OTHER)


@dataclass(frozen=True)
class Placement:
    """How every node of a graph runs: kinds by node; values in host memory; constants and what is folded from them."""

    kinds: Mapping[Node, Kind]
    host: frozenset[Value]
    constants: frozenset[Value]


def place(graph: Graph) -> Placement:
    """How each node of the graph and of its bodies runs."""
    parts = [_place(each) for each in graph.walk()]
    return Placement(
        {node: kind for part in parts for node, kind in part.kinds.items()},
        frozenset().union(*(part.host for part in parts)),
        frozenset().union(*(part.constants for part in parts)),
    )


def _place(graph: Graph) -> Placement:
    found = host(graph)
    owners = {body.owner for body in graph.bodies}

    def kind(node: Node) -> Kind:
        if node in found.folded or node.op == "Constant":
            return Kind.FOLDED
        if node in found.nodes:
            return Kind.HOST
        if is_same_memory(node):
            return Kind.VIEW
        if not owners.isdisjoint(node.originals):
            return Kind.CONTROL
        heavy = any(classify(original, graph) is OperatorClass.HEAVY for original in node.originals)
        return Kind.PRODUCT if heavy else Kind.OTHER

    return Placement({node: kind(node) for node in graph.nodes}, found.values, found.constants)
