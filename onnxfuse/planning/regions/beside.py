"""What may come into a region beside the product, or the convolution, that it holds, and weighing it so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import cached_property
from itertools import takewhile

from onnxfuse.graph.dims import product
from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.operators import classify
from onnxfuse.operators.classes import DEQUANTIZE, QUANTIZE, moves_innermost, multiplied, quantised
from onnxfuse.planning.admission import Facts
from onnxfuse.planning.context import Context
from onnxfuse.planning.evidence import SLOWER
from onnxfuse.planning.regions.contractions import (
    COMPUTES,
    MOVES,
    UNMEASURED,
    Costed,
    is_scale,
    listed,
    measured_cost,
    paced_choice,
    stays,
)
from onnxfuse.planning.regions.dequantised import dequantising
from onnxfuse.planning.regions.grow import escaping
from onnxfuse.planning.regions.normed import normed_before, scales_operands
from onnxfuse.planning.regions.reduced import normed_behind, reduced_behind
from onnxfuse.planning.weighing import CandidatePool, Members, ordered
from onnxfuse.planning.weights.collapsing import Fold
from onnxfuse.planning.weights.transposing import are_transposed
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region, RegionCost
from onnxfuse.schedules import Does, schedule_of

MOST_BESIDE = 16
"""Nodes before a product, or behind it, that come in at most."""

DOUBT = 1.2
"""How many times as long as predicted a kernel is taken to need that was not measured, where what it competes with was:
nine of ten were measured to take 0.82 to 1.44 times as long (benchmarks/results, foreseen), and of several the one of
which the least is predicted is mostly one of which too little is."""


class Beside:
    """What may be computed with a product: element by element of what it computes, or of its operands."""

    def __init__(
        self, products: Sequence[Node], graph: Graph, facts: Mapping[Node, Facts], *, transposes: bool = False,
        more: Members = frozenset(), numbers: bool = False,
    ) -> None:
        """``products``: of the same shape; ``transposes``: whether what moves the innermost axis is such too, and
        nothing but views is computed of operands, which are read once for every tile; ``more``: what has to be in;
        ``numbers``: whether what dequantises all operands has to be, where it can."""
        self.products, self.graph, self.facts, self.transposes = products, graph, facts, transposes
        self.dequantising = self._dequantising() if numbers else frozenset[Node]()
        self.core = self._core() | more

    def _core(self) -> Members:
        """The products with what dequantises their operands, and what takes such back that lie another way."""
        own = {*self.products, *self.dequantising}
        read = (*map(multiplied, self.products), *(node.inputs[:1] for node in self.dequantising))
        return frozenset(own.union(*(self._returned(values, own) for values in read)))

    def _dequantising(self) -> Members:
        """The nodes that dequantise all operands, and that nothing but them and the products reads."""
        members = set(self.products)

        def admits(value: Value) -> bool:
            node = value.producer
            if node is None or node not in self.facts or not stays(value, members):
                return False
            members.add(node)
            return True

        return dequantising(self.products, self.graph, admits)

    def _returned(self, values: Sequence[Value | None], members: set[Node]) -> set[Node]:
        """What takes values back for a region alone that lie another way."""
        producers = {value.producer for value in values if value is not None and stays(value, members)}
        return {node for node in producers - members if node in self.facts and node is not None
                and self.transposes and self.facts[node].returns}

    def _dequantised(self, node: Node, members: set[Node]) -> set[Node]:
        """What dequantises operands of a node behind the products for a region alone: it reads the numbers."""
        values = [value for value in node.inputs if self.transposes and quantised(value) is not None]
        found = {value.producer for value in values if value is not None and stays(value, members)}
        return {each for each in found - members if each in self.facts and each is not None}

    def behind(self) -> Iterator[Members]:
        """The products with what is computed of their results, from the most on, where one value comes of it."""
        return reversed([members for members, _ in self._steps])

    def up_to(self, value: Value) -> Iterator[Members]:
        """The products with what is computed of their results as far as to a value, the only one that leaves."""
        return (members for members in (*self.behind(), self.core) if escaping(set(members)) == [value])

    def least(self) -> Members:
        """The products with what lays out their result another way; alone where nothing does."""
        return next((members for members, node in self._steps if self.facts[node].leaves), self.core)

    def untransposed(self) -> list[Members]:
        """The products with what is computed of their results, but not the views that end it where several read what is
        transposed: each may read its part as it lies, as an attention reads queries, keys and values."""
        steps = self._steps
        computed = self._computed(steps)
        if not computed or all(node.op != "Transpose" for _, node in steps[computed:]):
            return []
        (value,) = escaping(set(steps[-1][0]))
        return [steps[computed - 1][0]] if len(value.consumers) > 1 else []

    def rounded(self) -> list[Members]:
        """The products with what is computed of their results as far as to the last that is quantised, laid out as
        those want it who read it: they take it as it is."""
        steps = self._steps
        ends = [place for place, (_, node) in enumerate(steps) if node.op == QUANTIZE][-1:]
        return [steps[place + (place + 1 < len(steps) and self.facts[steps[place + 1][1]].leaves)][0] for place in ends]

    def branching(self) -> list[Members]:
        """The products with what is computed of their results, read as it is by some, and with what is computed of that
        alone for others: a residual sum is read by the next sum and, quantised, by the next convolution."""
        for members, _ in reversed(self._steps):
            (value,) = escaping(set(members))
            if len(value.consumers) > 1 or value.is_output:
                branches = [self._branch(reader) for reader in value.consumers]
                if any(branches):
                    return [members.union(*branches)]
        return []

    def _branch(self, node: Node) -> list[Node]:
        """A reader, what alone reads it, and so on, while all else that they read is constant; no further than to where
        integers come of it, laid out as those want it who read them.  Nothing where it is only laid out anew."""
        found: list[Node] = []
        ends = False
        while self._admits(node, self.products[0].outputs[0]) and (not ends or self.facts[node].leaves) and (
                sum(not value.is_constant for value in node.reads()) == 1):
            found.append(node)
            ends |= node.op == QUANTIZE
            (result,) = (value for value in node.outputs if value is not None)
            if len(result.consumers) != 1 or result.is_output or self.facts[node].leaves:
                break
            (node,) = result.consumers
        return found if any(not self.facts[each].view and each.op != "Transpose" for each in found) else []

    def reduced(self) -> list[Members]:
        """A product with what is computed of its results and of their rows, from the most on."""
        if len(self.products) != 1:
            return []
        behind = normed_behind if self.products[0].op == "Conv" else reduced_behind
        return behind(self.core, self.products[0], self.graph, self.facts)

    def normed(self, members: Members) -> list[Members]:
        """A region with the norm that gives its products' first operand, and what is computed between."""
        operands = [operand for node in self.products for operand in multiplied(node)[:1]]
        return normed_before(members, operands, self.graph, self.facts)

    def unscaled(self) -> list[Members]:
        """The products with what is computed of their results, but not the views and factors that end it: an attention
        multiplies scores by these, and copies what lies as it is computed."""
        steps = self._steps
        computed = self._computed(steps, scales=True)
        return [steps[computed - 1][0]] if 0 < computed < self._computed(steps) else []

    def alike(self) -> tuple[Members, Members, Members]:
        """The products with what is computed of their results, or only laid out anew, while neighbours stay such;
        without the views that end it; and without those and factors."""
        steps = list(takewhile(lambda step: not self.facts[step[1]].transposes, self._steps))
        regions = [self.core, *(members for members, _ in steps)]
        return regions[-1], regions[self._computed(steps)], regions[self._computed(steps, scales=True)]

    def laid(self) -> list[Members]:
        """The products with what is computed of their results up to where these are laid out another way, from the most
        on; where they are not, with as much as comes in, and bare."""
        steps = self._steps[::-1]
        laid = [members for members, node in steps if self.facts[node].leaves]
        return laid or [members for members, _ in steps[:1]] + [self.core]

    def _computed(self, steps: Sequence[tuple[Members, Node]], *, scales: bool = False) -> int:
        """How many of the steps lead to the last that is no view, nor, with ``scales``, a factor."""
        return max((place for place, (_, node) in enumerate(steps, 1)
                    if not self.facts[node].view and node.op != "Transpose" and not (scales and is_scale(node))),
                   default=0)

    @cached_property
    def _steps(self) -> list[tuple[Members, Node]]:
        """What comes in of what is computed of the results, step by step."""
        return list(self._behind())

    def _behind(self) -> Iterator[tuple[Members, Node]]:
        """From the least on; with the last node that came in."""
        members = set(self.core)
        result = self.products[0].outputs[0]
        while len(members) - len(self.core) < MOST_BESIDE:
            readers = ordered({reader for value in escaping(members) for reader in value.consumers} - members)
            node = next((each for each in readers if self._admits(each, result)), None)
            if node is None:
                return
            members.add(node)
            numbers = self._dequantised(node, members)
            members |= numbers
            members |= self._returned((*node.inputs, *(each.inputs[0] for each in numbers)), members)
            # Where one value leaves, no path leads back to what it does not come of.
            if len(escaping(members)) == 1 and (self.transposes or not self.facts[node].view) and (
                    not self.facts[node].returns):
                yield frozenset(members), node

    def before(self, members: Members) -> Members:
        """A region with what is computed of the products' operands and read by nobody else."""
        more = set(self.core)
        for operand in dict.fromkeys(value for node in self.products for value in multiplied(node)[:self._operands]):
            waiting = [operand]
            while waiting and len(more) <= MOST_BESIDE:
                value = waiting.pop()
                node = None if value is None else value.producer
                if node in self.dequantising:
                    waiting += node.inputs[:1]
                if node is None or node in more or not self._admits(node, operand, before=True) or not all(
                        output is None or stays(output, more) for output in node.outputs):
                    continue
                more.add(node)
                waiting += node.reads()
        return members | more

    @property
    def _operands(self) -> int:
        return 2 if self.transposes else 1

    def _admits(self, node: Node, like: Value | None, *, before: bool = False) -> bool:
        """Whether a node computes as many elements as there are of a value, each of those at its place."""
        facts = self.facts.get(node)
        if facts is None or facts.rows is not None or facts.contracts or (facts.transposes and not self.transposes) or (
                before and facts.leaves):
            return False
        (first, *others) = [value for value in node.outputs if value is not None]
        if others or first.shape is None or like is None or like.shape is None or (
                product(first.shape) != product(like.shape)):
            return False
        classes = MOVES if before and self.transposes else COMPUTES
        return all(each.op == "Constant" or (
            classify(each, self.graph) in classes and (self.transposes or not moves_innermost(each)))
            for each in node.originals)


def union(parts: Iterable[Members]) -> Members:
    """All of their nodes."""
    return frozenset[Node]().union(*parts)


class Outcome(Enum):
    """What came of weighing a region."""

    TAKEN = auto()
    """It may be chosen."""
    OPEN = auto()
    """There is a kernel of it, and nobody measured it."""
    REFUSED = auto()


class Offer:
    """Weighs a region with products, with what is around it as a whole: none of its parts is one.

    Attributes:
        stage: the regions' rule; trusted: whether predictions decide where nothing was measured.
        measured: whether a region so far was, beside the runtime's own nodes.
    """

    def __init__(self, pool: CandidatePool, context: Context, stage: str, *, trusted: bool = True) -> None:
        self.pool, self.context, self.stage, self.trusted = pool, context, stage, trusted
        self.taken: set[Members] = set()
        self.refused: dict[Members, tuple[Refusal, RegionCost | None]] = {}
        self.measured = False

    def around(self, beside: Beside) -> None:
        """Weigh the products bare, with as much behind it as there is a kernel for, with what is before too, and with
        its results left as they lie."""
        least = beside.least()
        whole = next((each for each in beside.behind() if self._weigh(each) is not Outcome.REFUSED), least)
        rows = next((each for each in beside.reduced() if self._weigh(each) is not Outcome.REFUSED), least)
        ways = (whole, beside.before(whole), *beside.rounded(), *beside.branching(), *beside.untransposed(),
                *beside.unscaled(), rows, *(beside.normed(whole) if scales_operands(self.context) else ()), least)
        for members in dict.fromkeys(ways):
            if members not in self.taken and members not in self.refused:
                self._weigh(members)
        refusal, cost = self.refused.get(least, (None, None))
        if self.taken and refusal is not None and refusal.code == "no-gain":
            self.pool.refuse(least, self.stage, refusal, cost)  # alone in a launch; several may share one
        if not self.taken:
            assert refusal is not None
            if refusal.code == UNMEASURED and not any(map(least.__lt__, self.refused)):
                return  # nothing is around it
            refusal = replace(refusal, node=refusal.node or beside.products[0].label, rule=self.stage)
            self.pool.refuse(least, self.stage, refusal, cost)

    def most(self, regions: Sequence[Members]) -> None:
        """Weigh regions of which each holds the next, as far as to the first that there is a kernel for."""
        for members in regions:
            if self._tried(members, self.pool.region(members, self.stage)) is not Outcome.REFUSED:
                break
        if not self.taken:
            self._tell(members)

    def _tell(self, members: Members) -> None:
        """Say why a region may not be chosen."""
        refusal, cost = self.refused[members]
        refusal = replace(refusal, node=refusal.node or ordered(members)[0].label, rule=self.stage)
        self.pool.refuse(members, self.stage, refusal, cost)

    def each(self, regions: Iterable[Members]) -> None:
        """Weigh regions of which any may be chosen, and tell of the last where there is no kernel for one of them."""
        for members in dict.fromkeys(regions):
            self._tried(members, self.pool.region(members, self.stage))
        if not self.taken:
            self._tell(members)

    def folding(self, beside: Beside) -> None:
        """Weigh a product with what no other region holds and what can be folded into its weights, with as much behind
        as there is a kernel for, else bare."""
        if all(self._fold(members) is Outcome.REFUSED for members in beside.behind()):
            self._fold(beside.core)
        for members, (refusal, cost) in self.refused.items():
            refusal = replace(refusal, node=beside.products[0].label, rule=self.stage)
            self.pool.refuse(members, self.stage, refusal, cost)

    def together(self, apart: Sequence[Beside], before: Members = frozenset()) -> None:
        """Weigh products of one operand whose results go ways of their own, with what is computed of each, and what is
        before all of them."""
        *more, least = (before.union(*parts) for parts in zip(
            *((*each.alike(), each.core) for each in apart), strict=True))
        outcomes = [self._weigh(members, apart=True) for members in dict.fromkeys(more)]
        if all(each is Outcome.REFUSED for each in outcomes):
            self._weigh(least, apart=True)

    def joined(self, apart: Sequence[Beside], fold: Fold) -> None:
        """Weigh products of one operand as one by weights side by side, with what is computed of each result, else
        bare; ``fold``: what stands for them."""
        most, least = ([each.laid()[place] for each in apart] for place in (0, -1))
        ways = [most] if any(self.pool.facts[node].leaves for members in most for node in members) else zip(
            *(each.alike() for each in apart), strict=True)
        outcomes = [self.join(members, fold) for members in dict.fromkeys(map(union, ways))]
        if all(each is Outcome.REFUSED for each in outcomes):
            self.join(union(least), fold)

    def join(self, members: Members, fold: Fold) -> Outcome:
        """Put a region whose kernel multiplies by other weights among those that may be chosen, or keep why not."""
        region = self.pool.region(members, self.stage, fold)
        if not fold.nodes <= members or (isinstance(region, Region) and self._shares(region)):
            return Outcome.REFUSED
        return self._tried(members, region)

    def _tried(self, members: Members, region: Region | Refusal) -> Outcome:
        """Put a region among those that may be chosen as it is, or keep why it may not."""
        return self._decided(members, region, region if isinstance(region, Refusal) else self._costed(region))

    def _weigh(self, members: Members, *, apart: bool = False) -> Outcome:
        """Put a region among those that may be chosen, or keep why it may not; ``apart``: its products have nothing to
        do with each other but an operand."""
        region = self.pool.region(members, self.stage)
        if apart and isinstance(region, Region) and self._shares(region):
            return Outcome.REFUSED
        found = region if isinstance(region, Refusal) else self._costed(region)
        return self._decided(members, region, self._better(found, self._folded(members)))

    def _fold(self, members: Members) -> Outcome:
        """The same of a region that is none with its weights as they are."""
        found = self._folded(members)
        return Outcome.REFUSED if found is None else self._decided(members, found, found)

    def _decided(self, members: Members, region: Region | Refusal | Costed, found: Costed | Refusal) -> Outcome:
        """Put what was found of a region among those that may be chosen, or keep why it may not."""
        if isinstance(found, Refusal):
            self.refused[members] = found, region.cost if isinstance(region, Region) else None
            return Outcome.OPEN if found.code == UNMEASURED else Outcome.REFUSED
        self.taken.add(members)
        self.pool.take(members, *found)
        return Outcome.TAKEN

    def _folded(self, members: Members) -> Costed | Refusal | None:
        """A region whose kernel reads weights into which what is beside its products is folded, by what was measured of
        it, or that lie the other way, by what is predicted too; None where there is no such."""
        measures = self.context.measured is not None or self.context.eager
        foresees = self.pool.maker.costs.knows_tiles and any(node.op == DEQUANTIZE for node in members)
        if not measures and not foresees:
            return None
        fold, refusals = self.pool.maker.folds.of(members)
        self.pool.refusals += refusals
        if fold is None or not (measures or are_transposed(fold.nodes)):
            return None
        region = self.pool.region(members, self.stage, fold)
        found = region if isinstance(region, Refusal) else self._costed(region)
        if not isinstance(found, Refusal) and found[0].measured is None and not are_transposed(fold.nodes):
            return None
        return found

    def _better(self, plain: Costed | Refusal, folded: Costed | Refusal | None) -> Costed | Refusal:
        """What is worth more of a region and itself with other weights, or why neither may be chosen."""
        if folded is None or (isinstance(folded, Refusal) and not isinstance(plain, Refusal)):
            return plain
        if isinstance(folded, Refusal):
            assert isinstance(plain, Refusal)
            return folded if folded.code == UNMEASURED else plain
        if isinstance(plain, Refusal) or self.pool.objective.worth(folded[1]) > self.pool.objective.worth(plain[1]):
            return folded
        return plain

    def _shares(self, region: Region) -> bool:
        """Whether kernels of a region's products by themselves share a launch with any other: more of these are on the
        GPU at once than of one kernel for all."""
        made = self.pool.maker.with_kernel(region)
        return isinstance(made, Region) and not made.kernel.heavy

    def _costed(self, region: Region) -> Costed | Refusal:
        """A region with its kernel, and the cost to choose it by: measured; predicted where no larger one was measured
        and found slow."""
        made = listed(region, self.pool, self.context)
        if isinstance(made, Refusal):
            self.measured |= made.code == SLOWER
            return made
        cost = measured_cost(made, self.pool.maker.costs)
        self.measured |= cost is not None
        if not self.trusted:
            return self._beside_alone(made, cost)
        if cost is not None:
            return made, cost
        schedule = schedule_of(made.kernel)
        if schedule is None or not any(schedule.runs(Does.SLIDES | more) for more in (Does(0), Does.TRANSPOSES)):
            return self._unmeasured(made, "convolution")  # of several results a channel: predictions are of others
        cost = self._sure(made)
        slow = next((refusal for refusal, _ in self.refused.values() if refusal.code == SLOWER), None)
        return slow or self.pool.no_gain(made) or self.pool.objective.refuses(
            cost, len(made.nodes), made.label, self.stage) or (made, cost)

    def _beside_alone(self, region: Region, cost: RegionCost | None) -> Costed | Refusal:
        """The same where measurements decide: of the region, and of the runtime's products by themselves, by which they
        count in whatever else may become of them.  Where time ran out before its turn, what is predicted stands in, by
        the tiles that a kernel goes through, unless one with more around was measured."""
        costs = self.pool.maker.costs
        products = [node for node in region.view if self.pool.facts[node].contracts]
        known = [node for node in products if any(map(costs.is_learned, node.originals))]
        if not self.measured:
            foreseen = paced_choice(region, self.pool, self.context, DOUBT if known else 1.0)
            if foreseen is not None:
                return foreseen
        predicts = costs.knows_tiles and not self.context.eager
        if cost is None or not (predicts or len(known) == len(products)):
            return self._unmeasured(region, "product")
        return self.pool.objective.refuses(
            cost, len(region.nodes), region.label, self.stage, measured=True) or (region, cost)

    def _unmeasured(self, region: Region, what: str) -> Refusal:
        return Refusal(
            UNMEASURED,
            f"this {what} could be one kernel with what is around it; how fast that is on "
            f"{self.pool.maker.costs.profile.name} was not measured, and such are fused only where that is known to be "
            "faster", region.label, region.rule, self.pool.maker.tuning)

    def _sure(self, region: Region) -> RegionCost:
        """What a region saves whatever becomes of what the runtime fuses with its nodes: the bias of a convolution,
        which costs the runtime a kernel, another region may take, and count that."""
        costs, cost = self.pool.maker.costs, region.cost
        before, _ = costs.unfused(region.nodes)
        after = cost.executions * costs.kernel_seconds(region)
        sure = replace(cost, seconds_before=before, seconds_after=after)
        return sure if sure.seconds_saved < cost.seconds_saved else cost
