"""Candidates: groups that grew, and what may stand in their place, each weighed.

Named groups and lone nodes grow into one another (``grow``), and each group is weighed with its parts (``weighing``).
So are matches that lost their nodes to others, neighbours that names keep apart, products, attentions and depthwise
convolutions with what is around them (``products``, ``contractions``, ``depthwise``), images that their means scale
(``gated``), products whose results are put side by side, also with others (``sliced``), and products of one operand
that are one by weights side by side (``siblings``).
"""

from __future__ import annotations

from onnxfuse.planning.context import Context
from onnxfuse.planning.legality import is_convex
from onnxfuse.planning.plan import Plan
from onnxfuse.planning.regions.contractions import STAGE as ATTENTION
from onnxfuse.planning.regions.contractions import offer_attentions
from onnxfuse.planning.regions.depthwise import STAGE as DEPTHWISE
from onnxfuse.planning.regions.depthwise import offer_depthwise
from onnxfuse.planning.regions.gated import offer_gated
from onnxfuse.planning.regions.grow import Group, Growth, admitting
from onnxfuse.planning.regions.products import STAGE as PRODUCTS
from onnxfuse.planning.regions.products import offer_products
from onnxfuse.planning.regions.siblings import offer_siblings
from onnxfuse.planning.regions.sliced import offer_sliced
from onnxfuse.planning.space import SearchSpace
from onnxfuse.planning.weighing import connected, ordered
from onnxfuse.rules import RuleSet


def grown(plan: Plan, context: Context) -> Plan:
    """The plan, in whose spaces all candidates are weighed."""
    offers = ((ATTENTION, offer_attentions), (DEPTHWISE, offer_depthwise), (PRODUCTS, offer_products),
              (PRODUCTS, offer_gated), (PRODUCTS, offer_sliced), (PRODUCTS, offer_siblings))
    for space in plan.spaces:
        space.groups = _grown(space, space.growth)
        _offer_overlapping(space)
        _offer_unions(space, context.rules)
        for stage, offer in offers:
            if stage not in context.rules.disabled:
                offer(space.pool, context)
        _offer_beside(space)
    return plan


def grow_rest(space: SearchSpace, rules: RuleSet) -> None:
    """Let what is left of groups that were not taken whole grow anew.

    A second optimisation of the result would find it, and find nothing after this.
    """
    taken = frozenset().union(*space.fixed)
    rest = {node: facts for node, facts in space.facts.items() if node not in taken and node in space.growth.group}
    growth = Growth(space.maker.view, rest, rules, space.growth.sizes, space.maker.kernels)
    for members in space.fixed:
        growth.contraction.contract(members)
    for node in rest:
        growth.seed([node])
    _grown(space, growth)


def _grown(space: SearchSpace, growth: Growth) -> list[Group]:
    """The groups that grow from the seeds, in graph order, each weighed, and what they are without what lies behind a
    pair of transposes."""
    growth.grow()
    growth.enclose()
    groups = _offer_groups(space, growth)
    if growth.bridge():
        groups = _offer_groups(space, growth)
    space.refusals += growth.refusals
    return groups


def _offer_groups(space: SearchSpace, growth: Growth) -> list[Group]:
    groups = sorted(
        {id(group): group for group in growth.group.values()}.values(),
        key=lambda group: min(node.index for node in group.nodes),
    )
    for group in groups:
        space.pool.offer(group.nodes, group.rule.id if group.rule is not None else None)
    return groups


def _offer_overlapping(space: SearchSpace) -> None:
    """Matches that lost their nodes to others: they, and what they would leave of those, where that is better."""
    pool = space.pool
    for match in space.overlapping:
        if any(node not in space.facts for node in match.nodes):
            continue
        members = set(match.nodes)
        groups = [group for node in match.nodes if (group := space.growth.group.get(node)) is not None]
        touched = {id(group): group for group in groups}.values()
        rest = [part for group in touched for part in connected(group.nodes - members)]
        instead = pool.worth(members) + sum(pool.worth(part) for part in rest)
        if instead > sum(pool.worth(group.nodes) for group in touched):
            pool.offer(members, match.rule.id)
            for part in rest:
                pool.offer(part, None)


def _offer_unions(space: SearchSpace, rules: RuleSet) -> None:
    """Neighbours that stayed apart because rules named them, where a grow rule would have joined them.  As a whole they
    may be no better than apart, and be better cut elsewhere: that is weighed with them."""
    pairs: dict[tuple[int, int], tuple[Group, Group]] = {}
    for group in space.groups:
        for node in ordered(group.nodes):
            for value in node.outputs:
                for reader in value.consumers if value is not None else ():
                    other = space.growth.group.get(reader)
                    if other is not None and other is not group and (group.rule or other.rule):
                        pairs[id(group), id(other)] = group, other
    for first, second in pairs.values():
        if first.rows is not None and second.rows is not None and first.rows != second.rows:
            continue
        members = first.nodes | second.nodes
        if admitting(rules, members) and not is_convex(members):
            space.pool.offer(members, None)


def _offer_beside(space: SearchSpace) -> None:
    """What regions with products would leave of the groups that they take from, down to single operators: it is to be
    weighed against the group with these."""
    for members in [each for each in space.pool.pool if not space.products.keys().isdisjoint(each)]:
        touched = {id(group): group for node in members if (group := space.growth.group.get(node)) is not None}
        for group in touched.values():
            for part in connected(group.nodes - members):
                space.pool.offer(part, None)
