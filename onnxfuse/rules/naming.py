"""What the computations of a model are called, as the rules of the kind ``name`` say it."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.graph.model import Graph
from onnxfuse.rules.kinds import NameRule
from onnxfuse.rules.matcher import match
from onnxfuse.rules.matches import Match, NodeIndex


def named(view: Graph, rules: Sequence[NameRule]) -> tuple[Match, ...]:
    """Every place in a graph's canonical view, and in the bodies in it, that has a name, by rule and in graph order.
    Places of different rules may share nodes, and values between their nodes may be read elsewhere."""
    found: list[Match] = []
    for graph in view.walk():
        index = NodeIndex(graph)
        for rule in rules:
            found += match(rule, graph, index, forbidden={}, tell=False).matches
    return tuple(found)
