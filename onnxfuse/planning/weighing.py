"""Candidate regions: what each would gain, and which others stand in its place.

A group that was grown is weighed whole.  Others stand in for it where that matters: the two parts of its best cut,
where they are predicted to gain more; parts that a limit, a rule or the lowering admits, where it does not admit the
whole.  What is left of a cut is weighed, and cut, in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import or_

from onnxfuse.graph.model import Node
from onnxfuse.planning.admission import Facts, inefficient, limited, operators, too_large, too_many
from onnxfuse.planning.candidates import Maker
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.legality import boundary, copied
from onnxfuse.planning.objective import REFUSALS, Objective
from onnxfuse.planning.regions.grow import trimmed
from onnxfuse.planning.weights.collapsing import Fold
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region, RegionCost
from onnxfuse.rules import Prohibitions, RuleSet

MOST_CUTS = 12
"""How often a group without a kernel may be cut before it is given up."""

MOST_TRIED = 6
"""Cuts of a set without a kernel for whose parts kernels are tried."""

MOST_PLACES = 16
"""Places of a region at which a cut is tried: those where the fewest bytes would be written and read again."""

LARGE = 20
"""Nodes past which fewer places are tried, so that the work grows with the nodes and no faster."""

BETTER = 1.02
"""How much more a cut must be worth than the whole to be taken up: both are estimates."""

Members = frozenset[Node]


@dataclass(frozen=True)
class Considered:
    """A region that was weighed.

    Attributes:
        nodes: nodes of the canonical view, in graph order.
        rule: id of the rule it is due to.
        cost: what it would gain, or None where that was not counted.
        verdict: "chosen", "lost" (to a region that is chosen), "no-gain" (gains too little) or "refused".
        reason: a sentence that says why.
        lost_to: label of the first node of the region that it lost to; "" for other verdicts.
    """

    nodes: tuple[Node, ...]
    rule: str
    cost: RegionCost | None
    verdict: str
    reason: str
    lost_to: str


@dataclass
class CandidatePool:
    """Weighs regions of one graph and keeps what may be chosen (``pool``), what was refused, and every verdict.

    Attributes:
        nearby: the model's costs at other sizes that matter, by their text.
        pool: regions that may be chosen, by their nodes of the view, and worth: what each is worth; refusals: why
            others may not; records: verdicts that are final.
        with_products: regions with products that there are kernels for.
        splits: of regions that won, the parts of their best cut: the whole, the part, what it would gain.
    """

    maker: Maker
    objective: Objective
    facts: Mapping[Node, Facts]
    rules: RuleSet
    forbidden: Prohibitions
    nearby: Mapping[str, CostModel] = field(default_factory=dict)
    pool: dict[Members, Region] = field(default_factory=dict)
    worths: dict[Members, float] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    records: list[Considered] = field(default_factory=list)
    with_products: list[Region] = field(default_factory=list)
    splits: list[tuple[Members, Members, RegionCost]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._seen: set[Members] = set()
        self._estimates: dict[Members, tuple[float, RegionCost]] = {}
        self._kernels: dict[Members, bool] = {}

    @property
    def weighed(self) -> int:
        """Number of regions whose gain was counted."""
        return sum(record.cost is not None for record in self.records) + len(self.pool)

    def offer(self, nodes: Collection[Node], rule: str | None) -> None:
        """Weigh a set of nodes, and what may stand in its place; ``rule`` is what named it, if anything did."""
        waiting, cuts = [frozenset(nodes)], 0
        while waiting:
            members = frozenset(trimmed(set(waiting.pop()), self.facts))
            if members in self._seen or all(self.facts[node].view for node in members):
                continue
            self._seen.add(members)
            refusal = self._weigh(members, rule if rule is not None else self.rule_of(members))
            if refusal is None or refusal.code in REFUSALS or refusal.code == "efficiency":
                waiting += self._better(members, admitted=refusal is None)
            elif refusal.code == "operators":
                waiting += self._within_limit(members)
            elif cuts < MOST_CUTS and len(members) > 2:
                cuts += 1
                waiting += self._parted(members)

    def make(self, members: Members) -> None:
        """Make the kernel of a region of the pool; where there is none, strike it from the pool and weigh its parts."""
        region = self.pool[members]
        made = self.maker.with_kernel(region)
        if isinstance(made, Region):
            refusal = too_large(made, self.maker.costs) or inefficient(made, self.maker.costs)
            if refusal is None and made.cost != region.cost:
                refusal = self.no_gain(made)
            if refusal is None:
                self.pool[members] = made
                return
        else:
            refusal = made
        del self.pool[members], self.worths[members]
        self.refuse(members, region.rule, refusal, region.cost)
        if len(members) > 2:
            for part in self._parted(members):
                self.offer(part, None)

    def worth(self, nodes: Collection[Node]) -> float:
        """About what a set of nodes would be worth, its views at the border left out; nothing is lowered for it."""
        members = frozenset(trimmed(set(nodes), self.facts))
        if not members or all(self.facts[node].view for node in members):
            return 0.0
        return self._estimate(members)[0]

    def rule_of(self, members: Iterable[Node]) -> str:
        """The first grow rule that lists all of a set's operators."""
        found = {(node.domain, node.op) for node in members}
        return next((rule.id for rule in self.rules.grow if found <= rule.operators), "grow")

    def _weigh(self, members: Members, rule: str) -> Refusal | None:
        """Put a region into the pool, or say why not."""
        region = self.region(members, rule)
        if isinstance(region, Refusal):
            self.refuse(members, rule, region)
            return region
        refusal = self.no_gain(region) or inefficient(region, self.maker.costs)
        if refusal is not None:
            self.refuse(members, rule, refusal, region.cost)
            return refusal
        self.take(members, region, region.cost)
        return None

    def region(self, members: Members, rule: str, fold: Fold | None = None) -> Region | Refusal:
        """A set of nodes as a region, or why a rule, the profile or the lowering does not admit it; ``fold``: what
        stands for some of them."""
        first = min(members, key=lambda node: node.index).label
        refusal = self.forbidden.refuses(members)
        refusal = refusal or too_many(limited(members, self.facts), self.maker.costs.profile, first, rule)
        return refusal or self.maker.region(members, rule, fold=fold)

    def take(self, members: Members, region: Region, cost: RegionCost) -> None:
        """Put a region into the pool; ``cost`` is what it is chosen by."""
        self.pool[members], self.worths[members] = replace(region, counted=cost), self.objective.worth(cost)

    def no_gain(self, region: Region) -> Refusal | None:
        """Why a region is not wanted by the objective, here or at the further sizes; None where it is."""
        label = region.nodes[0].label
        refusal = self.objective.refuses(region.cost, len(region.nodes), label, region.rule)
        if refusal is not None or not self.nearby:
            return refusal
        # Nobody knows yet how many kernels it takes there.
        once = replace(region, steps=1, scratch=0, made=None)
        there = {text: costs.region(once) for text, costs in self.nearby.items()}
        return self.objective.refuses_elsewhere(there, label, region.rule)

    def refuse(self, members: Members, rule: str, refusal: Refusal, cost: RegionCost | None = None) -> None:
        """Keep that a region is not taken, and why."""
        verdict = "no-gain" if refusal.code == "no-gain" else "refused"
        self.records.append(Considered(ordered(members), rule, cost, verdict, refusal.message, ""))
        # One kernel that stays one kernel is nothing to explain.
        if cost is None or cost.kernels_before > 1 or refusal.code not in ("no-gain", "memory-pressure"):
            self.refusals.append(refusal)

    def _parted(self, members: Members) -> list[Members]:
        """A set that has no kernel in two: some of the first nodes, which a kernel can hold, and the rest.  The cut is
        the one that is worth most and leaves a rest that has a kernel too, else the last one.  Where the first node
        alone has none, it is what goes."""
        nodes = ordered(members)
        held, refused = 0, len(nodes)
        while refused - held > 1:
            middle = (held + refused) // 2
            if all(map(self._has_kernel, connected(nodes[:middle]))):
                held = middle
            else:
                refused = middle
        if not held:
            return connected(nodes[1:])
        cuts = [[*connected(nodes[:count]), *connected(nodes[count:])] for count in range(held, 0, -1)]
        best = sorted(cuts, key=lambda parts: -sum(map(self.worth, parts)))[:MOST_TRIED]
        return next((parts for parts in best if all(map(self._has_kernel, parts))), cuts[0])

    def _has_kernel(self, nodes: Members) -> bool:
        members = frozenset(trimmed(set(nodes), self.facts))
        if members not in self._kernels:
            held = all(self.facts[node].view for node in members)
            if not held and self.forbidden.refuses(members) is None:
                held = isinstance(self.maker.fusion(members, self.rule_of(members)), Region)
            self._kernels[members] = held
        return self._kernels[members]

    def _better(self, members: Members, admitted: bool) -> list[Members]:
        """Parts that are predicted to be worth more than the whole; where it wins, the best cut is kept as a split."""
        if sum(not self.facts[node].view for node in members) < 3:
            return []
        whole, _ = self._estimate(members) if admitted else (0.0, None)
        best = max(self._cuts(members), key=lambda cut: self.worth(cut[0]) + self.worth(cut[1]), default=None)
        if best is None:
            return []
        if self.worth(best[0]) + self.worth(best[1]) > whole * BETTER:
            return [part for side in best for part in connected(side)]
        if admitted:
            for side in best:
                for part in connected(side):
                    kept = frozenset(trimmed(set(part), self.facts))
                    if operators(kept, self.facts) > 1:
                        self.splits.append((members, kept, self._estimate(kept)[1]))
        return []

    def _within_limit(self, members: Members) -> list[Members]:
        """The best cut one side of which the profile admits; among equals that with the largest such side."""
        most = self.maker.costs.profile.limits.operators
        fitting = []
        for cut in self._cuts(members, everywhere=True):
            counts = [operators(side, self.facts) for side in cut]
            if min(counts) <= most:
                inside = max(count for count in counts if count <= most)
                fitting.append((self.worth(cut[0]) + self.worth(cut[1]), inside, cut))
        if not fitting:
            return []
        record = max(worth for worth, _, _ in fitting)
        _, _, best = max(
            (each for each in fitting if each[0] >= record * (1 - 0.5 / most)), key=lambda each: (each[1], each[0])
        )
        return [part for side in best for part in connected(side)]

    def _cuts(self, members: Members, everywhere: bool = False) -> list[tuple[Members, Members]]:
        """Ways to part a region in two, the first of which reads nothing of the second, cheapest to write first."""
        nodes = ordered(members)
        place = {node: each for each, node in enumerate(nodes)}
        above, depth = [1 << each for each in range(len(nodes))], [0] * len(nodes)
        for each, node in enumerate(nodes):
            for value in node.reads():
                before = place.get(value.producer) if value.producer is not None else None
                if before is not None:
                    above[each] |= above[before]
                    depth[each] = max(depth[each], depth[before] + 1)
        # What may be cut off beside what: branches side by side, level by level.
        by_depth = sorted(range(len(nodes)), key=lambda each: depth[each])
        levels = list(accumulate((1 << each for each in by_depth), or_))
        masks = dict.fromkeys(mask for mask in (*above, *levels) if mask != (1 << len(nodes)) - 1)
        bytes_of = self.maker.costs.ledger.bytes_of
        values = self.maker.graph.values

        def crossing(mask: int) -> int:
            return sum(
                bytes_of(values.get(value.name, value)) or 0
                for each, node in enumerate(nodes) if mask >> each & 1
                for value in node.outputs
                if value is not None and any(
                    reader in place and not mask >> place[reader] & 1 for reader in value.consumers
                )
            )

        chosen = sorted(masks, key=crossing)
        places = max(MOST_PLACES * LARGE // max(len(nodes), LARGE), 1)
        return [
            (
                frozenset(node for each, node in enumerate(nodes) if mask >> each & 1),
                frozenset(node for each, node in enumerate(nodes) if not mask >> each & 1),
            )
            for mask in (chosen if everywhere else chosen[: places])
        ]

    def _estimate(self, members: Members) -> tuple[float, RegionCost]:
        """Worth (0 where the objective does not admit it) and cost by the region's border alone."""
        if members not in self._estimates:
            edge, values = boundary(members), self.maker.graph.values
            read = (value for value in edge.inputs if value.constant is None or value.constant.size > 1)
            cost = self.maker.costs.region(Region(
                copied(members), tuple(values[value.name] for value in read),
                tuple(values[value.name] for value in edge.outputs),
            ))
            admitted = self.objective.refuses(cost, 0, "", "") is None
            self._estimates[members] = self.objective.worth(cost) if admitted else 0.0, cost
        return self._estimates[members]


def ordered(members: Iterable[Node]) -> tuple[Node, ...]:
    """Nodes in graph order."""
    return tuple(sorted(members, key=lambda node: node.index))


def connected(members: Collection[Node]) -> list[Members]:
    """Parts of a set that no edge joins."""
    parts, rest = [], set(members)
    for start in ordered(members):
        if start not in rest:
            continue
        part: set[Node] = set()
        front = [start]
        while front:
            node = front.pop()
            if node in part or node not in rest:
                continue
            part.add(node)
            front += [value.producer for value in node.reads() if value.producer is not None]
            front += [consumer for value in node.outputs if value is not None for consumer in value.consumers]
        parts.append(frozenset(part))
        rest -= part
    return parts

