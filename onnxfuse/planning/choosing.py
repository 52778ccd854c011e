"""Which candidates to take, and what became of all others.

Of candidates that conflict the best set is taken (``selection``) by what the strategy values (``objective``), and their
kernels are made; where there is none after all, the parts are weighed, and it is chosen anew.  So it is after what the
choice leaves of groups has grown anew.  Whatever is not taken is a refusal, and every region that was weighed a record.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.graph.model import Node
from onnxfuse.planning.context import Context
from onnxfuse.planning.plan import Plan
from onnxfuse.planning.regions.contractions import UNMEASURED
from onnxfuse.planning.regions.growing import grow_rest
from onnxfuse.planning.regions.products import STAGE as PRODUCTS
from onnxfuse.planning.selection import Candidate, joint_cycles, select
from onnxfuse.planning.space import SearchSpace
from onnxfuse.planning.weighing import Considered, Members, ordered
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region, RegionCost

MOST_ROUNDS = 3
"""How often what the chosen regions leave may grow anew."""


def selected(plan: Plan, context: Context) -> Plan:
    """The plan with the candidates that are worth most."""
    for space in plan.spaces:
        space.chosen = _selected(space)
        for _ in range(MOST_ROUNDS):
            if not _leaves_some(space):
                break
            known = len(space.pool.pool)
            grow_rest(space, context.rules)
            if len(space.pool.pool) <= known:
                break
            space.chosen = _selected(space)
    return planned(plan.spaces)


def _selected(space: SearchSpace) -> list[Members]:
    """The best of the pool, every one with its kernel."""
    while True:
        pool, worths = list(space.pool.pool), space.pool.worths
        candidates = [Candidate(frozenset(node.index for node in each), worths[each]) for each in pool]
        found = select(candidates, lambda places: _cycles(space, pool, places))  # noqa: B023
        chosen = [pool[place] for place in found.chosen]
        # Kernels of all of them, so that the rounds are few; each round strikes one from the pool at least.
        for each in chosen:
            if space.pool.pool[each].made is None:
                space.pool.make(each)
        if all(each in space.pool.pool for each in chosen):
            return chosen


def _cycles(space: SearchSpace, pool: Sequence[Members], places: Sequence[int]) -> list[frozenset[int]]:
    """Those of the places whose regions close a cycle, perhaps with regions of kernels that a user brought."""
    fixed = [fusion.view for fusion in space.custom]
    found = joint_cycles(space.maker.view, [*fixed, *(pool[place] for place in places)])
    barred = [frozenset(places[group - len(fixed)] for group in each if group >= len(fixed)) for each in found]
    return [each for each in barred if each]


def _leaves_some(space: SearchSpace) -> bool:
    """Whether of a group that was not taken whole more than one operator is left."""
    taken = frozenset().union(*space.fixed)
    return any(sum(not space.facts[node].view for node in group.nodes - taken) > 1
               for group in space.groups if group.nodes & space.facts.keys())


def planned(spaces: Sequence[SearchSpace]) -> Plan:
    """The plan of what was chosen in each space."""
    refusals = (refusal for space in spaces for refusal in (*space.refusals, *space.pool.refusals)
                if not _is_held(space, refusal))
    return Plan(
        tuple(fusion for space in spaces for fusion in _fusions(space)),
        tuple(dict.fromkeys(refusals)),
        sum(space.pool.weighed + len(space.custom) for space in spaces),
        tuple(record for space in spaces for record in _considered(space)),
        tuple(spaces),
        tuple(region for space in spaces for region in space.pool.with_products),
    )


def _is_held(space: SearchSpace, refusal: Refusal) -> bool:
    """Whether it says of a product that nobody measured it with what is around it, and a chosen region holds it."""
    return refusal.code == UNMEASURED and refusal.rule == PRODUCTS and any(
        node.label == refusal.node for each in space.chosen for node in each if space.pool.facts[node].contracts)


def _fusions(space: SearchSpace) -> list[Region]:
    """The regions of a space, in graph order.  A user who brings a kernel has decided: it is not weighed."""
    found = space.custom + [space.pool.pool[members] for members in space.chosen]
    return sorted(found, key=lambda fusion: fusion.nodes[0].index)


def _considered(space: SearchSpace) -> list[Considered]:
    """Every region that was weighed and what became of it."""
    holder = {node: each for each in space.chosen for node in each}
    taken = set(space.chosen)
    records = list(space.pool.records)
    for fusion in space.custom:
        records.append(
            Considered(fusion.view, fusion.rule, fusion.cost, "chosen", "Its rule brings a kernel of its own.", "")
        )
    for each, region in space.pool.pool.items():
        if each in taken:
            records.append(Considered(region.view, region.rule, region.cost, "chosen", _gains(region.cost), ""))
        else:
            winners = dict.fromkeys(found for node in each if (found := holder.get(node)) is not None)
            records.append(_lost(space, (region.view, region.rule, region.cost), list(winners)))
    for whole, part, cost in space.pool.splits:
        winner = holder.get(min(part, key=lambda node: node.index))
        if winner == whole:
            records.append(_lost(space, (ordered(part), space.pool.rule_of(part), cost), [whole]))
    return sorted(records, key=lambda record: (record.nodes[0].index, -len(record.nodes)))


def _lost(
    space: SearchSpace, what: tuple[tuple[Node, ...], str, RegionCost], winners: Sequence[Members]
) -> Considered:
    """A region, as a record has it, that others stand in the way of: those that hold nodes of it, or close a cycle with
    it."""
    pool, saved = space.pool, f"It would save {what[2].seconds_saved * 1e6:.1f} µs a run"
    if not winners:
        return Considered(*what, "lost", f"{saved}, but closes a cycle with regions that save more.", "")
    best = pool.pool[max(winners, key=lambda each: pool.worths[each])].label
    more = f" and {len(winners) - 1} more" if len(winners) > 1 else ""
    total = sum(pool.pool[each].cost.seconds_saved for each in winners) * 1e6
    reason = f"{saved}; the region of {best}{more}, with the same nodes, {total:.1f} µs."
    return Considered(*what, "lost", reason, best)


def _gains(cost: RegionCost) -> str:
    return (
        f"It is predicted to run {cost.estimated_speedup:.2f}x as fast and to save {cost.seconds_saved * 1e6:.1f} µs "
        f"and {round((cost.bytes_before - cost.bytes_after) * cost.executions):,} bytes a run."
    )
