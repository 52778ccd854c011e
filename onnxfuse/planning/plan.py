"""Which regions to fuse.

Matches of fuse rules come first, as named groups; then all groups grow (``grow``).  Each grown group becomes a kernel,
or is cut down until it does; it is taken where the cost model predicts that it gains enough.  Whatever is not taken is
a refusal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.planning.candidates import Fusion, Maker, Region
from onnxfuse.planning.cost import CostModel, RegionCost
from onnxfuse.planning.facts import Facts, node_facts
from onnxfuse.planning.grow import Group, Growth, trimmed
from onnxfuse.planning.hardware import Profile
from onnxfuse.planning.traffic import Ledger
from onnxfuse.refusal import Refusal
from onnxfuse.rules import FuseRule, Match, Prohibitions, RuleSet, find_matches, prohibitions

LEAST_GAIN = 1.2
"""Predicted speed-up of a region below which it is left to ONNX Runtime, where nothing was measured."""

MOST_CUTS = 12
"""How many nodes may be cut off a group before it is given up."""


@dataclass(frozen=True)
class Plan:
    """What is fused and what is not.

    Attributes:
        fusions: chosen regions, in graph order of their first nodes.
        refusals: everything that came near and was not fused, each once.
        candidates: number of regions for which there was a kernel.
    """

    fusions: tuple[Fusion, ...]
    refusals: tuple[Refusal, ...]
    candidates: int


def make_plan(
    graph: Graph, view: Graph, rules: RuleSet, ledger: Ledger, profile: Profile, least_gain: float = LEAST_GAIN
) -> Plan:
    """Plan the fusion of a graph.

    Args:
        graph: the model's graph; view: its canonical view.
        rules: the rules in force.
        ledger: traffic of ``graph`` at the sizes to plan for.
        profile: the GPU to plan for.
        least_gain: predicted speed-up that a region must pass.
    """
    return _Planner(graph, view, rules, ledger, profile).plan(least_gain)


class _Planner:
    def __init__(self, graph: Graph, view: Graph, rules: RuleSet, ledger: Ledger, profile: Profile) -> None:
        self.view = view
        self.rules = rules
        self.maker = Maker(graph, view, CostModel(ledger, profile))
        self.forbidden: Prohibitions = prohibitions(view, rules)
        self.facts: dict[Node, Facts] = {}
        self.refusals: list[Refusal] = []
        self.custom: list[Fusion] = []
        placement = Ledger(view, ledger.sizes).placement
        left = {node for found in self.forbidden.found for node in found.leave}
        for node in view.nodes:
            facts = node_facts(node, view, placement, ledger.sizes)
            if isinstance(facts, Facts) and node not in left:
                self.facts[node] = facts
            elif isinstance(facts, Refusal) and facts.code not in ("no-lowering", "on-host"):
                self.refusals.append(facts)
        self.growth = Growth(view, self.facts, rules, ledger.sizes)

    def plan(self, least_gain: float) -> Plan:
        self._seed()
        self.growth.grow()
        self.refusals += self.growth.refusals
        groups = {id(group): group for group in self.growth.group.values()}
        # A user who brings a kernel has decided: it is not weighed.
        fusions, candidates = list(self.custom), len(self.custom)
        for group in sorted(groups.values(), key=lambda group: min(node.index for node in group.nodes)):
            found, weighed = self._fusions(group, least_gain)
            fusions += found
            candidates += weighed
        fusions.sort(key=lambda fusion: fusion.nodes[0].index)
        return Plan(tuple(fusions), tuple(dict.fromkeys(self.refusals)), candidates)

    def _seed(self) -> None:
        """Named groups from fuse rules, largest matches first; every other node that a grow rule lists alone."""
        matches, near = find_matches(self.view, self.rules)
        self.refusals += near
        for match in sorted(matches, key=lambda match: (-len(match.nodes), match.nodes[0].index)):
            refusal = self._seed_match(match)
            if refusal is not None:
                self.refusals.append(refusal)
        listed = frozenset().union(*(rule.operators for rule in self.rules.grow))
        for node in self.facts:
            if node not in self.growth.group and (node.domain, node.op) in listed:
                self.growth.seed([node])

    def _seed_match(self, match: Match) -> Refusal | None:
        rule = match.rule.id
        for node in match.nodes:
            if node not in self.facts:
                return Refusal("not-fusable", f"{node.qualified_op} cannot be part of a region here", node.label, rule)
            if node in self.growth.group:
                return Refusal("already-fused", f"{node.label} belongs to another match", node.label, rule)
        refusal = self.forbidden.refuses(match.nodes)
        if refusal is not None:
            return refusal
        assert isinstance(match.rule, FuseRule)
        if match.rule.kernel is not None:
            return self._take_custom(match)
        lowered = self.maker.lowered(match.nodes)
        if isinstance(lowered, Refusal):
            return lowered
        names = {value: name for name, value in match.bindings.items() if isinstance(value, Value)}
        seeded = self.growth.seed(match.nodes, match.rule, names)
        return seeded if isinstance(seeded, Refusal) else None

    def _take_custom(self, match: Match) -> Refusal | None:
        """A rule with a kernel of the user's own: the region is what the pattern says, and does not grow."""
        fusion = self.maker.custom(match)
        if isinstance(fusion, Refusal):
            return fusion
        refusal = self.growth.contraction.contract(match.nodes) if len(match.nodes) > 1 else None
        if refusal is None:
            self.custom.append(fusion)
            for node in match.nodes:
                self.facts.pop(node, None)
        return refusal

    def _fusions(self, group: Group, least_gain: float) -> tuple[list[Fusion], int]:
        """The fusion of a group; where it has none as a whole, those of the parts that are left after cuts.

        Regions that gain too little are left out; how many were weighed comes along.
        """
        waiting, cuts, weighed = [group.nodes], 0, 0
        fusions: list[Fusion] = []
        while waiting:
            members = trimmed(waiting.pop(), self.facts)
            if all(self.facts[node].view for node in members):
                continue
            rule = group.rule.id if group.rule is not None else self._rule_of(members)
            fusion = self.forbidden.refuses(members) or self._worthwhile(members, rule, least_gain)
            weighed += isinstance(fusion, Fusion | RegionCost)
            if isinstance(fusion, Fusion):
                fusions.append(fusion)
            elif isinstance(fusion, Refusal):
                self.refusals.append(fusion)
                if cuts < MOST_CUTS and len(members) > 2:
                    cuts += 1
                    waiting += self._cut(members, fusion)
        return fusions, weighed

    def _worthwhile(self, members: set[Node], rule: str, least_gain: float) -> Fusion | RegionCost | Refusal:
        """The fusion of a set of nodes; its cost alone where that says no; or why there is none."""
        found = self.maker.region(members, rule)
        if isinstance(found, Refusal):
            return found
        region, lowered = found
        if region.cost.estimated_speedup > least_gain:
            return self.maker.with_kernel(region, lowered)
        # One kernel that stays one kernel is nothing to explain.
        if region.cost.kernels_before > 1:
            self.refusals.append(_no_gain(region, least_gain))
        return region.cost

    def _cut(self, members: set[Node], refusal: Refusal) -> list[set[Node]]:
        """The set without the node at which it stopped, or without its last one, in connected parts."""
        culprit = next((node for node in members if node.label == refusal.node), max(members, key=lambda n: n.index))
        return connected(members - {culprit})

    def _rule_of(self, members: Iterable[Node]) -> str:
        """The first grow rule that lists all of a set's operators."""
        operators = {(node.domain, node.op) for node in members}
        return next((rule.id for rule in self.rules.grow if operators <= rule.operators), "grow")


def connected(members: set[Node]) -> list[set[Node]]:
    """Parts of a set that no edge joins."""
    parts, rest = [], set(members)
    while rest:
        part: set[Node] = set()
        front = [min(rest, key=lambda node: node.index)]
        while front:
            node = front.pop()
            if node in part or node not in rest:
                continue
            part.add(node)
            front += [value.producer for value in node.reads() if value.producer is not None]
            front += [consumer for value in node.outputs if value is not None for consumer in value.consumers]
        parts.append(part)
        rest -= part
    return parts


def _no_gain(fusion: Region, least_gain: float) -> Refusal:
    cost = fusion.cost
    return Refusal(
        "no-gain",
        f"{len(fusion.nodes)} nodes would run {cost.estimated_speedup:.2f}x as fast, under {least_gain}x: "
        f"{cost.seconds_before * 1e6:.1f} µs as the runtime runs them ({cost.kernels_before} kernels), "
        f"{cost.seconds_after * 1e6:.1f} µs fused",
        fusion.nodes[0].label,
        fusion.rule,
    )
