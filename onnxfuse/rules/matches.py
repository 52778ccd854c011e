"""What the matcher finds, and the index that it searches with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnxfuse.graph.model import Graph, Node, Value, root
from onnxfuse.refusal import Refusal
from onnxfuse.rules.kinds import Rule
from onnxfuse.rules.operands import producer_of
from onnxfuse.rules.operators import OperatorKey
from onnxfuse.rules.pattern import NUMBER


@dataclass(frozen=True)
class Match:
    """A place where a rule's pattern stands.

    Attributes:
        nodes: of the graph that was searched, in graph order; their ``originals`` are the model's.
        bindings: by name: a Value, a captured attribute, or None for an absent input; what the match left out
            is not there.
        holes: nodes of each pointwise hole, by name.
        results: values that may be read outside, in the rule's order.
    """

    rule: Rule
    nodes: tuple[Node, ...]
    bindings: Mapping[str, Any]
    holes: Mapping[str, tuple[Node, ...]]
    results: tuple[Value, ...]

    @property
    def originals(self) -> tuple[Node, ...]:
        """The model's nodes that it covers, in graph order."""
        found = dict.fromkeys(original for node in self.nodes for original in node.originals)
        return tuple(sorted(found, key=lambda node: node.index))

    @property
    def passed(self) -> tuple[Node, ...]:
        """The model's nodes through which these read what they read."""
        return tuple(dict.fromkeys(between for node in self.nodes for between in node.passed))


@dataclass(frozen=True)
class MatchResult:
    matches: tuple[Match, ...]
    near_misses: tuple[Refusal, ...]


class NodeIndex:
    """Nodes of a graph by operator, last ones first."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.by_key: dict[OperatorKey, list[Node]] = {}
        self._above: dict[Node, frozenset[OperatorKey]] = {}
        for node in reversed(graph.nodes):
            self.by_key.setdefault((node.domain, node.op), []).append(node)

    def above(self, node: Node) -> frozenset[OperatorKey]:
        """Operators that compute a node's operands; ``NUMBER`` for a constant of one element."""
        found = self._above.get(node)
        if found is None:
            producers = (producer_of(value)[0] for value in node.inputs)
            numbers = (root(value).constant for value in node.inputs if value is not None)
            found = self._above[node] = frozenset([
                *((each.domain, each.op) for each in producers if each is not None),
                *(NUMBER for constant in numbers if constant is not None and constant.size == 1)])
        return found

    def nodes(self, keys: Collection[OperatorKey]) -> Sequence[Node]:
        lists = [self.by_key[key] for key in keys if key in self.by_key]
        if len(lists) == 1:
            return lists[0]
        return sorted((node for found in lists for node in found), key=lambda node: -node.index)
