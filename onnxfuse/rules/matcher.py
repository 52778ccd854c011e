"""Finding a rule's pattern in a graph.

From each node that could end the pattern the matcher walks against the edges, trying the orders, alternatives and
optional nodes that the pattern leaves open, and undoing what it bound where a choice fails (``attempt``).  The work at
one node is bounded.  A failure is a value: the deepest point that any choice reached, with what was expected and found
there (``misses``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from onnxfuse.graph.model import Graph, Node
from onnxfuse.refusal import Refusal
from onnxfuse.rules.attempt import Attempt
from onnxfuse.rules.kinds import ForbidRule, PatternRule
from onnxfuse.rules.matches import Match, MatchResult, NodeIndex
from onnxfuse.rules.operators import OperatorKey
from onnxfuse.rules.pattern import operands_of, root_keys


def match(
    rule: PatternRule,
    graph: Graph,
    index: NodeIndex | None = None,
    forbidden: Mapping[str, ForbidRule] | None = None,
    claimed: Collection[Node] = (),
    tell: bool = True,
) -> MatchResult:
    """Every match of a rule, and its near misses.

    Args:
        rule: one with a pattern.
        graph: where to look.
        index: the graph's nodes by operator, to share among rules.
        forbidden: rules that forbid by condition, by code; None means that every such condition forbids, without
            a rule's own words.  Where a rule for a code is missing, a value that escapes becomes a further result.
        claimed: nodes that no match may hold.
        tell: whether near misses are wanted; without them most nodes are passed over at once.

    No two matches of one rule share the node that they start from; matches of a rule that lie wholly within an
    earlier one are left out.
    """
    pattern = rule.pattern
    if pattern is None:
        return MatchResult((), ())
    index = index or NodeIndex(graph)
    keys = root_keys(pattern.roots[0]) or frozenset()
    wanted = operands_of(pattern.roots[0])
    matches: list[Match] = []
    misses: list[Refusal] = []
    covered: set[Node] = set()
    for node in index.nodes(keys):
        if node in covered or node in claimed:
            continue
        if not tell and not _may_be(node, wanted, index):
            continue
        attempt = Attempt(rule, pattern, index, forbidden, claimed, tell)
        found = attempt.run(node)
        if found is not None:
            matches.append(found)
            covered.update(found.nodes)
        elif (refusal := attempt.misses.refusal(rule.id, node)) is not None:
            misses.append(refusal)
    matches.reverse()
    misses.reverse()
    return MatchResult(tuple(matches), tuple(misses))


def _may_be(node: Node, wanted: Mapping[OperatorKey, Sequence[Sequence[Collection[OperatorKey]]]], index: NodeIndex
            ) -> bool:
    """Whether a node's operands come from operators that a pattern needs there, in whatever order."""
    above = index.above(node)
    return any(all(not above.isdisjoint(each) for each in needs) for needs in wanted.get((node.domain, node.op), ()))
