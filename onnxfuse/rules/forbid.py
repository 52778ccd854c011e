"""What the forbid rules say of one graph, and whether a region goes against it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from onnxfuse.graph.model import Graph, Node, Value, root
from onnxfuse.refusal import Refusal
from onnxfuse.rules.kinds import ForbidRule, RuleSet
from onnxfuse.rules.matcher import match
from onnxfuse.rules.matches import Match, NodeIndex
from onnxfuse.rules.operators import OperatorKey


@dataclass(frozen=True)
class Prohibition:
    """Nodes that a forbid rule speaks of: no region may hold one of ``leave`` without all of ``nodes``, nor without all
    of ``unless`` where there are any; where ``leave`` is empty, none may hold all of ``nodes``."""

    rule: ForbidRule
    nodes: tuple[Node, ...]
    leave: tuple[Node, ...]
    unless: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Prohibitions:
    """All that the forbid rules say of one graph."""

    found: tuple[Prohibition, ...]
    edges: tuple[ForbidRule, ...]

    def refuses(self, nodes: Collection[Node]) -> Refusal | None:
        """Why no region may be made of these nodes (of the graph that was searched), or None."""
        members = set(nodes)
        for prohibition in self.found:
            held = members.issuperset(prohibition.nodes)
            if prohibition.unless and members.issuperset(prohibition.unless):
                continue
            left = [node for node in prohibition.leave if node in members]
            if (left and not held) or (held and not prohibition.leave):
                node = left[0] if left else prohibition.nodes[-1]
                return _refusal(prohibition.rule, node)
        for rule in self.edges:
            assert rule.edge is not None
            joined = _joined(members, *rule.edge)
            if joined is not None:
                return _refusal(rule, joined)
        return None


def prohibitions(graph: Graph, rules: RuleSet) -> Prohibitions:
    """Where the forbid rules' patterns stand in a graph."""
    index = NodeIndex(graph)
    found: list[Prohibition] = []
    for rule in rules.forbid:
        if rule.pattern is None:
            continue
        # what is forbidden stays so however else its values are read: escapes do not matter here
        for place in match(rule, graph, index, forbidden={}).matches:
            leave = [node for node in _makers(place, rule.leave) if node in place.nodes]
            made = _makers(place, rule.unless_made)
            if leave or not rule.leave:
                unless = made if len(made) == len(rule.unless_made) else ()
                found.append(Prohibition(rule, place.nodes, tuple(leave), tuple(unless)))
    return Prohibitions(tuple(found), tuple(rule for rule in rules.forbid if rule.edge is not None))


def _makers(place: Match, names: Sequence[str]) -> list[Node]:
    """The nodes that compute values of a match, of those values that a node computes."""
    values = [place.bindings.get(name) for name in names]
    makers = [root(value).producer for value in values if isinstance(value, Value)]
    return [node for node in makers if node is not None]


def _joined(
    members: Collection[Node], above: Collection[OperatorKey], below: Collection[OperatorKey]
) -> Node | None:
    """A node of ``below`` that a node of ``above`` feeds through members only."""
    reached: set[Node] = set()
    ordered: Sequence[Node] = sorted(members, key=lambda node: node.index)
    for node in ordered:
        fed = any(value.producer in reached for value in node.reads() if value.producer is not None)
        if fed and (node.domain, node.op) in below:
            return node
        if fed or (node.domain, node.op) in above:
            reached.add(node)
    return None


def _refusal(rule: ForbidRule, node: Node) -> Refusal:
    return Refusal(rule.id, rule.reason, node.label, rule.id, f"Disable the rule {rule.id} to join them all the same.")
