"""Which nodes lie between others, by bit sets of all ancestors and descendants: what convexity is held against."""

from __future__ import annotations

from collections.abc import Iterable

from onnxfuse.graph.model import Graph, Node
from onnxfuse.planning.legality import successors


class Reachability:
    """Which nodes come before and after which, for many queries: one bit set of all nodes per node.

    Built in one pass, 2 x n / 8 bytes a node: 25 MB for 10,000 nodes.
    """

    def __init__(self, graph: Graph) -> None:
        self._nodes = graph.nodes
        self._ancestors = [0] * len(graph.nodes)
        self._descendants = [0] * len(graph.nodes)
        for node in graph.nodes:
            for value in node.reads():
                if value.producer is not None:
                    before = value.producer.index
                    self._ancestors[node.index] |= self._ancestors[before] | 1 << before
        for node in reversed(graph.nodes):
            for after in successors(node):
                self._descendants[node.index] |= self._descendants[after.index] | 1 << after.index

    def reaches(self, first: Node, second: Node) -> bool:
        """Whether ``second`` depends on ``first``, directly or not."""
        return bool(self._descendants[first.index] >> second.index & 1)

    def between(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """Nodes outside the set that lie on a path from the set to the set, in graph order."""
        members = above = below = 0
        for node in nodes:
            members |= 1 << node.index
            above |= self._ancestors[node.index]
            below |= self._descendants[node.index]
        rest = above & below & ~members
        found = []
        while rest:
            lowest = rest & -rest
            found.append(self._nodes[lowest.bit_length() - 1])
            rest ^= lowest
        return tuple(found)
