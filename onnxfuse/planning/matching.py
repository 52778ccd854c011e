"""Matches of fuse rules as named groups, and every other node that a grow rule lists as one of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxfuse.errors import ModelError
from onnxfuse.graph.agreement import unmet
from onnxfuse.graph.binding import asked_of, bind
from onnxfuse.graph.bodies import is_idle
from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.planning.context import Context
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.planning.legality import check_nodes
from onnxfuse.planning.objective import Objective
from onnxfuse.planning.plan import Plan
from onnxfuse.planning.regions.products import learn_products
from onnxfuse.planning.space import SearchSpace, space_of
from onnxfuse.refusal import Refusal
from onnxfuse.rules import FuseRule, Match, RuleSet, find_matches


def matched(_: Plan, context: Context) -> Plan:
    """A plan of nothing but the space of each graph, with what rules name there."""
    nearby = _nearby(context.costs, context.objective)
    # A region never spans a body's border: every body is planned by itself, but for those that never run.
    idle = {each.place for each in context.graph.walk() if is_idle(each)}
    spaces = []
    for place, maker in context.makers.items():
        if not any(place[:depth] in idle for depth in range(1, len(place) + 1)):
            space = space_of(maker, context, nearby)
            learn_products(maker, space.products, context)
            if context.objective.channels_last:
                space.leave_converted()
            _seed(space, context.rules)
            spaces.append(space)
    return Plan(spaces=tuple(spaces))


def _nearby(costs: CostModel, objective: Objective) -> dict[str, CostModel]:
    """The model's costs at the further sizes that the objective asks for, by their text."""
    ledger = costs.ledger
    found = {}
    for sizes in _spread(ledger.graph, ledger.sizes, objective.spread):
        try:
            there = bind(ledger.graph, sizes)
        except ModelError:
            continue  # so small that a kernel does not fit: nobody runs the model there
        if unmet(asked_of(ledger.graph), there):
            continue  # such as more rows than a table has
        text = ", ".join(f"{name}={size}" for name, size in sizes.items())
        found[text] = CostModel(Ledger(ledger.graph, there, ledger.placement), costs.profile, costs.groups)
    return found


def _spread(graph: Graph, sizes: Mapping[str, int], factors: Sequence[float]) -> list[dict[str, int]]:
    """The planned sizes of the inputs' symbols, multiplied; a size is 1 at least."""
    names = dict.fromkeys(name for value in graph.inputs for size in value.shape or () for name in sorted(size.symbols))
    return [
        {name: max(1, round(sizes[name] * factor)) for name in names if name in sizes} for factor in factors if names
    ]


def _seed(space: SearchSpace, rules: RuleSet) -> None:
    """Named groups from fuse rules, largest matches first; every other node that a grow rule lists alone."""
    space.matches, near = find_matches(space.maker.view, rules)
    space.refusals += near
    for match in sorted(space.matches, key=lambda match: (-len(match.nodes), match.nodes[0].index)):
        refusal = _seed_match(space, match)
        if refusal is not None:
            space.refusals.append(refusal)
    listed = frozenset().union(*(rule.operators for rule in rules.grow))
    for node in space.facts:
        if node not in space.growth.group and (node.domain, node.op) in listed:
            space.growth.seed([node])


def _seed_match(space: SearchSpace, match: Match) -> Refusal | None:
    rule, growth = match.rule.id, space.growth
    held = {node: fusion for fusion in space.custom for node in fusion.view}
    for node in match.nodes:
        if node in held:
            return _taken(node, held[node].rule, rule)
        if node not in space.facts:
            return Refusal("not-fusable", f"{node.qualified_op} cannot be part of a region here", node.label, rule)
    refusal = space.forbidden.refuses(match.nodes)
    if refusal is not None:
        return refusal
    assert isinstance(match.rule, FuseRule)
    taken = next((node for node in match.nodes if node in growth.group), None)
    if taken is not None:
        if match.rule.kernel is None:
            space.overlapping.append(match)
        named = growth.group[taken].rule
        return _taken(taken, "another" if named is None else named.id, rule)
    if match.rule.kernel is not None:
        return _take_custom(space, match)
    lowered = space.maker.lowered(match.nodes)
    if isinstance(lowered, Refusal):
        return lowered
    names = {value: name for name, value in match.bindings.items() if isinstance(value, Value)}
    seeded = growth.seed(match.nodes, match.rule, names)
    return seeded if isinstance(seeded, Refusal) else None


def _take_custom(space: SearchSpace, match: Match) -> Refusal | None:
    """A rule with a kernel of the user's own: the region is what the pattern says, and does not grow."""
    fusion = check_nodes(match.nodes, space.maker.graph.opset) or space.maker.custom(match)
    if isinstance(fusion, Refusal):
        return fusion
    refusal = space.growth.contraction.contract(match.nodes) if len(match.nodes) > 1 else None
    if refusal is None:
        space.custom.append(fusion)
        for node in match.nodes:
            space.facts.pop(node, None)
    return refusal


def _taken(node: Node, by: str, rule: str) -> Refusal:
    """The refusal of a match that another one is in the way of."""
    return Refusal("already-fused", f"{node.label} belongs to a match of {by}", node.label, rule)
