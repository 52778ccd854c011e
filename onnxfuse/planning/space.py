"""What the regions of one graph are chosen from."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field

from onnxfuse.graph.model import Node
from onnxfuse.planning.admission import Facts, beside_convolutions, converted, node_facts
from onnxfuse.planning.candidates import Maker
from onnxfuse.planning.context import Context
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.planning.regions.grow import Group, Growth
from onnxfuse.planning.weighing import CandidatePool, Members
from onnxfuse.provider.removed import gives_back
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region
from onnxfuse.rules import Match, Prohibitions, prohibitions


@dataclass(eq=False)
class SearchSpace:
    """One graph, and what the first passes find of it, each for those after it.

    Attributes:
        maker: makes its fusions; facts: of the nodes of its canonical view that regions may hold.
        products: of those that only regions that are found around them may hold.
        forbidden: what rules keep apart.
        growth: its groups; pool: candidates, weighed; refusals: of what was never weighed.
        matches: where fuse rules matched, whatever became of it; custom: regions of those that bring a kernel;
            overlapping: those that lost their nodes to others.
        groups: as they grew, in graph order; chosen: the best of the pool.
    """

    maker: Maker
    facts: dict[Node, Facts]
    products: dict[Node, Facts]
    forbidden: Prohibitions
    growth: Growth
    pool: CandidatePool
    refusals: list[Refusal]
    matches: tuple[Match, ...] = ()
    custom: list[Region] = field(default_factory=list)
    overlapping: list[Match] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    chosen: list[Members] = field(default_factory=list)

    @property
    def nearby(self) -> Mapping[str, CostModel]:
        """Costs at further sizes that matter, by their text."""
        return self.pool.nearby

    def leave_converted(self) -> None:
        """Leave those products and poolings to the runtime that it lays out channels-last itself."""
        for nodes in (self.products, self.facts):
            for refusal, node in converted(nodes):
                self.refusals.append(refusal)
                del nodes[node]

    @property
    def fixed(self) -> list[Members]:
        """Nodes of the view of each region that is chosen, or that a user's kernel makes one."""
        return [*self.chosen, *(frozenset(fusion.view) for fusion in self.custom)]


def space_of(maker: Maker, context: Context, nearby: Mapping[str, CostModel]) -> SearchSpace:
    """The space of a graph, in which nothing was found yet."""
    view, rules, objective = maker.view, context.rules, context.objective
    forbidden = prohibitions(view, rules)
    facts, products, refusals = _told_apart(maker, context, forbidden)
    if objective.channels_last:
        for refusal, node in beside_convolutions(view, facts):
            refusals.append(refusal)
            del facts[node]
    maker.nearby = tuple(costs.ledger.sizes for costs in nearby.values())
    growth = Growth(view, facts, rules, context.costs.ledger.sizes, maker.kernels)
    pool = CandidatePool(maker, objective, ChainMap(facts, products), rules, forbidden, nearby)
    return SearchSpace(maker, facts, products, forbidden, growth, pool, refusals)


def _told_apart(
    maker: Maker, context: Context, forbidden: Prohibitions
) -> tuple[dict[Node, Facts], dict[Node, Facts], list[Refusal]]:
    """The nodes that regions may hold, those that only regions around them may, and why others stay."""
    view = maker.view
    placement = Ledger(view, context.costs.ledger.sizes).placement
    left = {node for found in forbidden.found if not found.unless for node in found.leave}
    plain: dict[Node, Facts] = {}
    products: dict[Node, Facts] = {}
    refusals: list[Refusal] = []
    for node in view.nodes:
        facts = node_facts(node, view, placement, maker.kernels.lowerings)
        if gives_back(node):
            continue  # it costs nothing where it is, and its readers read that operand
        if node.dead and isinstance(facts, Facts):
            facts = Refusal("unused", "nothing reads what it computes", node.label)
        if isinstance(facts, Facts):
            (products if facts.contracts or node in left else plain)[node] = facts
        elif isinstance(facts, Refusal) and facts.code not in ("no-lowering", "no-schedule", "on-host"):
            refusals.append(facts)
    return plain, products, refusals
