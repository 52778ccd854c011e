"""What a grow rule joins, limits aside: connected groups of nodes whose operators it lists.

This is the widest reading of the rule; the planner, which knows costs and legality, takes less.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.graph.model import Graph, Node
from onnxfuse.refusal import Refusal
from onnxfuse.rules.kinds import GrowRule


@dataclass(frozen=True)
class Component:
    """Nodes that the rule would join, in graph order; at least two."""

    rule: GrowRule
    nodes: tuple[Node, ...]


def components(rule: GrowRule, graph: Graph) -> tuple[tuple[Component, ...], tuple[Refusal, ...]]:
    """Groups of listed nodes joined by edges, and for each edge where growth ends the reason."""
    group: dict[Node, Node] = {}

    def leader(node: Node) -> Node:
        while group[node] is not node:
            group[node] = group[group[node]]
            node = group[node]
        return node

    refusals: list[Refusal] = []
    for node in graph.nodes:
        if _listed(rule, node):
            group[node] = node
    for node in graph.nodes:
        for value in node.reads():
            producer = value.producer
            if producer is None or value.is_constant:
                continue
            if node in group and producer in group:
                group[leader(node)] = leader(producer)
            elif node in group or producer in group:
                other = producer if node in group else node
                refusals.append(Refusal(
                    "operator-not-listed", f"{other.qualified_op} is none of the operators that {rule.id} joins.",
                    other.label, rule.id, "List the operator, or its class, in the rule.",
                ))
    found: dict[Node, list[Node]] = {}
    for node in group:
        found.setdefault(leader(node), []).append(node)
    joined = tuple(Component(rule, tuple(nodes)) for nodes in found.values() if len(nodes) > 1)
    return joined, tuple(dict.fromkeys(refusals))


def _listed(rule: GrowRule, node: Node) -> bool:
    return (node.domain, node.op) in rule.operators and not node.has_subgraph
