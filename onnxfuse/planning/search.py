"""Which regions to fuse: the first pass.

    named matches ─▶ groups ─ grow ─▶ candidates (weighing) ─ select ─▶ kernels ─▶ plan
                                           ▲                              │ no kernel: its parts are weighed
                                           └──────────────────────────────┘

Matches of fuse rules come first, as named groups; then all groups grow (``grow``).  Each group is weighed, and so is
what may stand in its place (``weighing``); so are products, and depthwise convolutions, with what is around them
(``contractions``, ``depthwise``).  Of candidates that conflict the best set is taken (``selection``) by what the
strategy values (``objective``).  Whatever is not taken is a refusal, and every region that was weighed a record.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence

from onnxfuse.errors import ModelError
from onnxfuse.graph.agreement import unmet
from onnxfuse.graph.binding import asked_of, bind
from onnxfuse.graph.bodies import is_idle
from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.planning.admission import Facts, beside_convolutions, node_facts
from onnxfuse.planning.borders import Borders
from onnxfuse.planning.candidates import Maker
from onnxfuse.planning.context import Context
from onnxfuse.planning.contractions import STAGE as ATTENTION
from onnxfuse.planning.contractions import offer_attentions
from onnxfuse.planning.cost import CostModel
from onnxfuse.planning.depthwise import STAGE as DEPTHWISE
from onnxfuse.planning.depthwise import offer_depthwise
from onnxfuse.planning.grow import Group, Growth, admitting
from onnxfuse.planning.legality import check_nodes, is_convex
from onnxfuse.planning.objective import Objective
from onnxfuse.planning.plan import Plan, SearchSpace
from onnxfuse.planning.products import STAGE as PRODUCTS
from onnxfuse.planning.products import learn_products, offer_products
from onnxfuse.planning.selection import Candidate, joint_cycles, select
from onnxfuse.planning.traffic import Ledger
from onnxfuse.planning.weighing import CandidatePool, Considered, Members, connected, ordered
from onnxfuse.provider.removed import gives_back
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region, RegionCost
from onnxfuse.rules import FuseRule, Match, Prohibitions, find_matches, prohibitions

MOST_ROUNDS = 3
"""How often what the chosen regions leave may grow anew."""


def searched(plan: Plan, context: Context) -> Plan:
    """A plan with the regions that are worth most, in place of whatever it had."""
    nearby = _nearby(context.costs, context.objective)
    # A region never spans a body's border: every body is planned by itself, but for those that never run.
    idle = {each.place for each in context.graph.walk() if is_idle(each)}
    plans = [
        _Search(maker, context, nearby).plan() for place, maker in context.makers.items()
        if not any(place[:depth] in idle for depth in range(1, len(place) + 1))
    ]
    return Plan(
        tuple(fusion for plan in plans for fusion in plan.fusions),
        tuple(dict.fromkeys(refusal for plan in plans for refusal in plan.refusals)),
        sum(plan.candidates for plan in plans),
        tuple(record for plan in plans for record in plan.considered),
        tuple(space for plan in plans for space in plan.spaces),
        tuple(region for plan in plans for region in plan.with_products),
    )


def _nearby(costs: CostModel, objective: Objective) -> dict[str, CostModel]:
    """The model's costs at the further sizes that the objective asks for, by their text."""
    ledger = costs.ledger
    found = {}
    for sizes in spread(ledger.graph, ledger.sizes, objective.spread):
        try:
            there = bind(ledger.graph, sizes)
        except ModelError:
            continue  # so small that a kernel does not fit: nobody runs the model there
        if unmet(asked_of(ledger.graph), there):
            continue  # such as more rows than a table has
        text = ", ".join(f"{name}={size}" for name, size in sizes.items())
        found[text] = CostModel(Ledger(ledger.graph, there, ledger.placement), costs.profile, costs.groups)
    return found


class _Search:
    """The search of one graph."""

    def __init__(self, maker: Maker, context: Context, nearby: Mapping[str, CostModel]) -> None:
        self.maker, self.rules, self.context = maker, context.rules, context
        view, rules, objective, ledger = maker.view, context.rules, context.objective, context.costs.ledger
        self.view = view
        self.forbidden: Prohibitions = prohibitions(view, rules)
        self.facts: dict[Node, Facts] = {}
        self.products: dict[Node, Facts] = {}  # and what no region may hold without them
        self.refusals: list[Refusal] = []
        self.custom: list[Region] = []
        self.matches: tuple[Match, ...] = ()
        self.overlapping: list[Match] = []
        placement = Ledger(view, ledger.sizes).placement
        left = {node for found in self.forbidden.found if not found.unless for node in found.leave}
        for node in view.nodes:
            facts = node_facts(node, view, placement)
            if gives_back(node):
                continue  # it costs nothing where it is, and its readers read that operand
            if node.dead and isinstance(facts, Facts):
                facts = Refusal("unused", "nothing reads what it computes", node.label)
            if isinstance(facts, Facts):
                (self.products if facts.contracts or node in left else self.facts)[node] = facts
            elif isinstance(facts, Refusal) and facts.code not in ("no-lowering", "no-schedule", "on-host"):
                self.refusals.append(facts)
        if objective.channels_last:
            for refusal, node in beside_convolutions(view, self.facts):
                self.refusals.append(refusal)
                del self.facts[node]
        self.growth = Growth(view, self.facts, rules, ledger.sizes, maker.kernels)
        self.maker.nearby = tuple(costs.ledger.sizes for costs in nearby.values())
        known = ChainMap(self.facts, self.products)
        self.candidates = CandidatePool(self.maker, objective, known, rules, self.forbidden, nearby)

    def plan(self) -> Plan:
        learn_products(self.maker, self.products, self.context)
        self._seed()
        groups = self._grown(self.growth)
        self._offer_overlapping()
        self._offer_unions(groups)
        if ATTENTION not in self.rules.disabled:
            offer_attentions(self.candidates, self.context)
        if DEPTHWISE not in self.rules.disabled:
            offer_depthwise(self.candidates, self.context)
        if PRODUCTS not in self.rules.disabled:
            offer_products(self.candidates, self.context)
        self._offer_beside()
        chosen = self._select()
        for _ in range(MOST_ROUNDS):
            fixed = [*chosen, *(frozenset(fusion.view) for fusion in self.custom)]
            if not self._leaves_some(groups, fixed):
                break
            known = len(self.candidates.pool)
            self._offer_rest(fixed)
            if len(self.candidates.pool) <= known:
                break
            chosen = self._select()
        self._take_in_borders(chosen)
        # A user who brings a kernel has decided: it is not weighed.
        fusions = self.custom + [self.candidates.pool[members] for members in chosen]
        fusions.sort(key=lambda fusion: fusion.nodes[0].index)
        refusals = dict.fromkeys(self.refusals + self.candidates.refusals)
        weighed = self.candidates.weighed + len(self.custom)
        space = SearchSpace(self.maker, self.facts, self.forbidden, self.candidates.nearby, self.matches)
        return Plan(tuple(fusions), tuple(refusals), weighed, self._considered(chosen), (space,),
                    tuple(self.candidates.with_products))

    def _seed(self) -> None:
        """Named groups from fuse rules, largest matches first; every other node that a grow rule lists alone."""
        self.matches, near = find_matches(self.view, self.rules)
        self.refusals += near
        for match in sorted(self.matches, key=lambda match: (-len(match.nodes), match.nodes[0].index)):
            refusal = self._seed_match(match)
            if refusal is not None:
                self.refusals.append(refusal)
        listed = frozenset().union(*(rule.operators for rule in self.rules.grow))
        for node in self.facts:
            if node not in self.growth.group and (node.domain, node.op) in listed:
                self.growth.seed([node])

    def _grown(self, growth: Growth) -> list[Group]:
        """The groups that grow from the seeds, in graph order, each weighed, and what they are without what lies behind
        a pair of transposes."""
        growth.grow()
        groups = self._offer_groups(growth)
        if growth.bridge():
            groups = self._offer_groups(growth)
        self.refusals += growth.refusals
        return groups

    def _offer_groups(self, growth: Growth) -> list[Group]:
        groups = sorted(
            {id(group): group for group in growth.group.values()}.values(),
            key=lambda group: min(node.index for node in group.nodes),
        )
        for group in groups:
            self.candidates.offer(group.nodes, group.rule.id if group.rule is not None else None)
        return groups

    def _leaves_some(self, groups: Sequence[Group], fixed: Sequence[Members]) -> bool:
        """Whether of a group that was not taken whole more than one operator is left."""
        taken = frozenset().union(*fixed)
        return any(sum(not self.facts[node].view for node in group.nodes - taken) > 1
                   for group in groups if group.nodes & self.facts.keys())

    def _offer_rest(self, fixed: Sequence[Members]) -> None:
        """What is left of groups that were not taken whole grows anew.

        A second optimisation of the result would find it, and find nothing after this.
        """
        taken = frozenset().union(*fixed)
        rest = {node: facts for node, facts in self.facts.items() if node not in taken and node in self.growth.group}
        growth = Growth(self.view, rest, self.rules, self.growth.sizes, self.maker.kernels)
        for members in fixed:
            growth.contraction.contract(members)
        for node in rest:
            growth.seed([node])
        self._grown(growth)

    def _seed_match(self, match: Match) -> Refusal | None:
        rule = match.rule.id
        held = {node: fusion for fusion in self.custom for node in fusion.view}
        for node in match.nodes:
            if node in held:
                return _taken(node, held[node].rule, rule)
            if node not in self.facts:
                return Refusal("not-fusable", f"{node.qualified_op} cannot be part of a region here", node.label, rule)
        refusal = self.forbidden.refuses(match.nodes)
        if refusal is not None:
            return refusal
        assert isinstance(match.rule, FuseRule)
        taken = next((node for node in match.nodes if node in self.growth.group), None)
        if taken is not None:
            if match.rule.kernel is None:
                self.overlapping.append(match)
            named = self.growth.group[taken].rule
            return _taken(taken, "another" if named is None else named.id, rule)
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
        fusion = check_nodes(match.nodes, self.maker.graph.opset) or self.maker.custom(match)
        if isinstance(fusion, Refusal):
            return fusion
        refusal = self.growth.contraction.contract(match.nodes) if len(match.nodes) > 1 else None
        if refusal is None:
            self.custom.append(fusion)
            for node in match.nodes:
                self.facts.pop(node, None)
        return refusal

    def _offer_overlapping(self) -> None:
        """Matches that lost their nodes to others: they, and what they would leave of those, where that is better."""
        for match in self.overlapping:
            if any(node not in self.facts for node in match.nodes):
                continue
            members = set(match.nodes)
            groups = [group for node in match.nodes if (group := self.growth.group.get(node)) is not None]
            touched = {id(group): group for group in groups}.values()
            rest = [part for group in touched for part in connected(group.nodes - members)]
            instead = self.candidates.worth(members) + sum(self.candidates.worth(part) for part in rest)
            if instead > sum(self.candidates.worth(group.nodes) for group in touched):
                self.candidates.offer(members, match.rule.id)
                for part in rest:
                    self.candidates.offer(part, None)

    def _offer_beside(self) -> None:
        """What regions with products would leave of the groups that they take from, down to single operators: it is to
        be weighed against the group with these."""
        for members in [each for each in self.candidates.pool if not self.products.keys().isdisjoint(each)]:
            touched = {id(group): group for node in members if (group := self.growth.group.get(node)) is not None}
            for group in touched.values():
                for part in connected(group.nodes - members):
                    self.candidates.offer(part, None)

    def _offer_unions(self, groups: list[Group]) -> None:
        """Neighbours that stayed apart because rules named them, where a grow rule would have joined them.  As a whole
        they may be no better than apart, and be better cut elsewhere: that is weighed with them."""
        pairs: dict[tuple[int, int], tuple[Group, Group]] = {}
        for group in groups:
            for node in ordered(group.nodes):
                for value in node.outputs:
                    for reader in value.consumers if value is not None else ():
                        other = self.growth.group.get(reader)
                        if other is not None and other is not group and (group.rule or other.rule):
                            pairs[id(group), id(other)] = group, other
        for first, second in pairs.values():
            if first.rows is not None and second.rows is not None and first.rows != second.rows:
                continue
            members = first.nodes | second.nodes
            if admitting(self.rules, members) and not is_convex(members):
                self.candidates.offer(members, None)

    def _select(self) -> list[Members]:
        """The best of the pool, every one with its kernel."""
        while True:
            pool = list(self.candidates.pool)
            worths = self.candidates.worths
            candidates = [Candidate(frozenset(node.index for node in each), worths[each]) for each in pool]
            found = select(candidates, lambda places: self._cycles(pool, places))  # noqa: B023
            chosen = [pool[place] for place in found.chosen]
            # Kernels of all of them, so that the rounds are few; each round strikes one from the pool at least.
            for each in chosen:
                if self.candidates.pool[each].made is None:
                    self.candidates.make(each)
            if all(each in self.candidates.pool for each in chosen):
                return chosen

    def _take_in_borders(self, chosen: Sequence[Members]) -> None:
        """Views beside the chosen regions that cost less inside, but for transposes that nothing takes back in one."""
        taken = {node for each in chosen for node in each} | {n for each in self.custom for n in each.view}
        borders = Borders(self.maker, self.facts, self.forbidden, self.growth.group.keys(), taken)
        pool = self.candidates.pool
        for each in sorted(chosen, key=lambda each: pool[each].view[0].index):
            if each.isdisjoint(self.products):  # with products there are such with their views
                pool[each] = borders.widened(borders.unpaired(pool[each]))

    def _cycles(self, pool: Sequence[Members], places: Sequence[int]) -> list[frozenset[int]]:
        """Those of the places whose regions close a cycle, perhaps with regions of kernels that a user brought."""
        fixed = [fusion.view for fusion in self.custom]
        found = joint_cycles(self.view, [*fixed, *(pool[place] for place in places)])
        barred = [frozenset(places[group - len(fixed)] for group in each if group >= len(fixed)) for each in found]
        return [each for each in barred if each]

    def _considered(self, chosen: Sequence[Members]) -> tuple[Considered, ...]:
        """Every region that was weighed and what became of it."""
        holder = {node: each for each in chosen for node in each}
        taken = set(chosen)
        records = list(self.candidates.records)
        for fusion in self.custom:
            records.append(
                Considered(fusion.view, fusion.rule, fusion.cost, "chosen", "Its rule brings a kernel of its own.", "")
            )
        for each, region in self.candidates.pool.items():
            if each in taken:
                records.append(Considered(region.view, region.rule, region.cost, "chosen", _gains(region.cost), ""))
            else:
                winners = dict.fromkeys(found for node in each if (found := holder.get(node)) is not None)
                records.append(self._lost(region.view, region.rule, region.cost, list(winners)))
        for whole, part, cost in self.candidates.splits:
            winner = holder.get(min(part, key=lambda node: node.index))
            if winner == whole:
                records.append(self._lost(ordered(part), self.candidates.rule_of(part), cost, [whole]))
        return tuple(sorted(records, key=lambda record: (record.nodes[0].index, -len(record.nodes))))

    def _lost(self, nodes: tuple[Node, ...], rule: str, cost: RegionCost, winners: Sequence[Members]) -> Considered:
        """A region that others stand in the way of: those that hold nodes of it, or close a cycle with it."""
        saved = f"It would save {cost.seconds_saved * 1e6:.1f} µs a run"
        if not winners:
            reason = f"{saved}, but closes a cycle with regions that save more."
            return Considered(nodes, rule, cost, "lost", reason, "")
        best = self.candidates.pool[max(winners, key=lambda each: self.candidates.worths[each])].label
        more = f" and {len(winners) - 1} more" if len(winners) > 1 else ""
        total = sum(self.candidates.pool[each].cost.seconds_saved for each in winners) * 1e6
        reason = f"{saved}; the region of {best}{more}, with the same nodes, {total:.1f} µs."
        return Considered(nodes, rule, cost, "lost", reason, best)


def spread(graph: Graph, sizes: Mapping[str, int], factors: Sequence[float]) -> list[dict[str, int]]:
    """The planned sizes of the inputs' symbols, multiplied; a size is 1 at least."""
    names = dict.fromkeys(name for value in graph.inputs for size in value.shape or () for name in sorted(size.symbols))
    return [
        {name: max(1, round(sizes[name] * factor)) for name in names if name in sizes} for factor in factors if names
    ]


def _taken(node: Node, by: str, rule: str) -> Refusal:
    """The refusal of a match that another one is in the way of."""
    return Refusal("already-fused", f"{node.label} belongs to a match of {by}", node.label, rule)


def _gains(cost: RegionCost) -> str:
    return (
        f"It is predicted to run {cost.estimated_speedup:.2f}x as fast and to save {cost.seconds_saved * 1e6:.1f} µs "
        f"and {round((cost.bytes_before - cost.bytes_after) * cost.executions):,} bytes a run."
    )
