"""Regions that hold products: attention, found by its structure.

    queries ─ views ─┐
    keys ──── views ─ product ─ scale, mask, softmax ─ product ─ views ─▶
    values ── views ─────────────────────────────────────┘

Whatever leads from one product to another and takes maxima of rows on the way is between them; the schedule says
whether that is a softmax.  It is weighed bare, with the views around it, and with what is computed pointwise beside
them.

How long a product takes is known less well than how long bytes do.  So such a region is taken where it was measured
faster than the runtime's own nodes, or where the profile of the GPU has a measured rate of such kernels to predict by:
of all of them, or of the tiles that a kernel goes through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.operators import OperatorClass, classify
from onnxfuse.operators.classes import QUANTIZE, keeps_caches, multiplied, projects
from onnxfuse.planning.admission import Facts, too_large
from onnxfuse.planning.context import Context
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.legality import is_convex
from onnxfuse.planning.regions.normed import normed_before, scales_operands
from onnxfuse.planning.weighing import CandidatePool, Members, ordered
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region, RegionCost
from onnxfuse.schedules import Does, running

STAGE = "attention"
"""Id of these regions, under which ``--disable`` leaves them out."""

MOST_BETWEEN = 64
"""Nodes that are looked at behind a product's operand: masks that are computed at length stay outside."""

_IN_SEVERAL = (
    (projects, "the product of an attention's operands and the attention could be two kernels; how fast they are"),
    (keeps_caches, "what is put into caches and the attention over them could be kernels of a node; how fast they are"),
)
"""What operators that are attentions, and more, could be."""

Costed = tuple[Region, RegionCost]
"""A region with its kernel, and the cost to choose it by."""

UNMEASURED = "unmeasured"
"""Code of the refusal of what nobody measured."""

OTHER = running(Does.CONTRACTS | Does.REDUCES).other
"""Code of the refusal of two products that are no attention at all: nobody need be told."""

MOVES = frozenset({OperatorClass.VIEW})
"""Classes of operators that a product's operand is read through at no cost but that of computing places."""

COMPUTES = MOVES | {OperatorClass.POINTWISE, OperatorClass.BROADCAST}
"""The same with what is computed again for each tile that is read."""


def offer_attentions(pool: CandidatePool, context: Context) -> None:
    """Weigh the attentions of a graph, each with less and with more of what is around it."""
    graph, facts = pool.maker.view, pool.facts
    kinds = [(MOVES, False), (MOVES, True), (COMPUTES, True)]
    if not context.measures and _rate(pool) is None:
        # Where none will be taken, one of each is looked at, to say so.
        kinds = kinds[:2] if pool.maker.costs.knows_tiles else []
    for second in ordered(node for node in facts if facts[node].contracts):
        for core in _cores(second, facts):
            each = [_Beside(graph, facts, classes, scales) for classes, scales in kinds]
            begun = [*((core, beside) for beside in each), *((_before(core, beside), beside) for beside in each)]
            if each:
                begun.append((_unrepeated(core, (each[0], each[-1]), pool), each[0]))
            around = [core, *(_behind(members, second, beside) for members, beside in begun)]
            # The next layer may read the integers.
            around += filter(None, (_quantised(members, second, each[-1]) for members, _ in begun))
            if each and scales_operands(context):
                around += _normed(_behind(_before(core, each[0]), second, each[0]), graph, facts)
            _offer(list(dict.fromkeys(around)), pool, context)


def _cores(second: Node, facts: Mapping[Node, Facts]) -> Iterator[Members]:
    """Products that lead to a product by way of rows' maxima, each with it and all that is between; an operator that is
    both."""
    if facts[second].maxima:
        yield frozenset({second})
        return
    for operand in second.reads():
        above: set[Node] = set()
        products: list[Node] = []
        waiting = [operand]
        while waiting and len(above) <= MOST_BETWEEN:
            node = waiting.pop().producer
            if node is None or node in above or node in products or node not in facts:
                continue
            if facts[node].contracts:
                products.append(node)
            else:
                above.add(node)
                waiting += node.reads()
        if not any(facts[node].maxima for node in above):
            continue
        for first in ordered(products):
            between = {first}
            for node in ordered(above):
                if any(value.producer in between for value in node.reads()):
                    between.add(node)
            if any(facts[node].maxima for node in between):
                yield frozenset({*between, second})


@dataclass(frozen=True)
class _Beside:
    """Which nodes a region may take in beside its products: those of some classes, and, where it ``scales``, products
    with one number, which a kernel multiplies scores by and not what it copies."""

    graph: Graph
    facts: Mapping[Node, Facts]
    classes: frozenset[OperatorClass]
    scales: bool = False

    def admits(self, node: Node) -> bool:
        """Whether a node is of the classes, and where it reads from is known."""
        facts = self.facts.get(node)
        if facts is None or facts.rows is not None:
            return False
        if not all(each.op == "Constant" or classify(each, self.graph) in self.classes or (
                self.scales and is_scale(each)) for each in node.originals):
            return False
        return all(value is None or value.is_constant or value.elements is not None for value in node.inputs[1:]) or (
            not any(each.op != "Constant" and classify(each, self.graph) in MOVES for each in node.originals))


def is_scale(node: Node) -> bool:
    """Whether a node multiplies by a constant of one number, or divides by it."""
    by = node.inputs[1:] if node.op == "Div" else node.inputs if node.op == "Mul" else ()
    return any(value is not None and value.constant is not None and value.constant.size == 1 for value in by)


def _before(core: Members, beside: _Beside, further: Members = frozenset()) -> Members:
    """A region with what only its products read, and ``further`` nodes of it."""
    members, reading = set(core), {node for node in core if beside.facts[node].contracts or node in further}
    waiting = ordered(reading)
    while waiting:
        before = {node for each in waiting for value in each.reads()
                  if (node := value.producer) is not None and node not in members and beside.admits(node)
                  and all(output is None or stays(output, members) for output in node.outputs)}
        # One of several results may be read by what comes in only now.
        members |= before
        reading |= before
        waiting = ordered(reading) if before else ()
    return frozenset(members)


def _normed(members: Members, graph: Graph, facts: Mapping[Node, Facts]) -> list[Members]:
    """An attention with the norms of its queries and keys."""
    operands = [value for node in members if facts[node].contracts for value in multiplied(node)]
    return normed_before(members, operands, graph, facts)


def _unrepeated(core: Members, each: Sequence[_Beside], pool: CandidatePool) -> Members:
    """A region with what repeats elements on their way to its products, such as keys for each head of a group, what is
    computed with these then, and views before and beside that: there are fewer to write, and to read."""
    views, computes = each
    bytes_of = pool.maker.costs.ledger.bytes_of
    repeated: set[Node] = set()
    for node in ordered(_before(core, computes) - core):
        given, result = node.inputs[0], node.outputs[0]
        few, many = (0 if value is None else bytes_of(value) or 0 for value in (given, result))
        alike = given is not None and result is not None and given.dtype == result.dtype
        if (alike and 0 < few < many) or any(value.producer in repeated for value in node.reads()):
            repeated.add(node)
    return _before(core | repeated, views, frozenset(repeated))


def _behind(core: Members, last: Node, beside: _Beside) -> Members:
    """A region with what alone reads its result, that of ``last``."""
    return frozenset({*core, *_followers(core, last, beside)})


def _quantised(core: Members, last: Node, beside: _Beside) -> Members | None:
    """The same up to the last node that quantises, where one does."""
    behind = list(_followers(core, last, beside))
    while behind and behind[-1].op != QUANTIZE:
        behind.pop()
    return frozenset({*core, *behind}) if behind else None


def _followers(core: Members, last: Node, beside: _Beside) -> Iterator[Node]:
    """What alone reads the result of ``last``, then what alone reads that."""
    while (result := last.outputs[0]) is not None and len(result.consumers) == 1 and not result.is_output:
        (last,) = result.consumers
        if last in core or not beside.admits(last) or sum(value is not None for value in last.outputs) != 1:
            return
        yield last


def stays(value: Value, members: set[Node]) -> bool:
    """Whether nobody else reads a value."""
    return not value.is_output and members.issuperset(value.consumers)


def _offer(around: Sequence[Members], pool: CandidatePool, context: Context) -> None:
    """Weigh one attention with less and more around it, each as a whole: none of its parts is one."""
    taken = False
    refused: dict[Members, tuple[Refusal, RegionCost | None]] = {}
    for members in around:
        region = pool.region(members, STAGE)
        found = region if isinstance(region, Refusal) else _costed(region, pool, context)
        if isinstance(found, Refusal):
            refused[members] = found, None if isinstance(region, Refusal) else region.cost
        else:
            taken = True
            pool.take(members, *found)
    for members, (refusal, cost) in refused.items():
        if refusal.code != OTHER and not (taken and refusal.code == UNMEASURED):
            refusal = replace(refusal, node=refusal.node or ordered(members)[0].label, rule=STAGE)
            pool.refuse(members, STAGE, refusal, cost)


def _rate(pool: CandidatePool) -> float | None:
    """TFLOP/s of attention as measured on the GPU to plan for."""
    return pool.maker.costs.profile.measured.attention_tflops


def listed(region: Region, pool: CandidatePool, context: Context) -> Region | Refusal:
    """Enter a region into the pool's list of those that measurements decide on, for tuning to measure where nothing
    was; gives it with its kernel and what was measured of it, or why there is none."""
    made = pool.maker.with_kernel(region)
    if isinstance(made, Region):
        made = is_convex(made.view) or too_large(made, pool.maker.costs) or made
    if isinstance(made, Refusal):
        return made
    pool.with_products.append(made)
    return made if context.measured is None else context.measured.revision(made)


def measured_cost(region: Region, costs: CostModel) -> RegionCost | None:
    """A region's cost by what was measured; None where that does not say.

    What else may become of its nodes is worth what predictions of these say, so that this is too, and only the kernel's
    own time is the measured one, beside what it leaves of a fusion of the runtime's.  What the runtime took for its
    nodes counts where nothing was learned of its products and predictions see no gain: measured apart they are without
    what the runtime fuses with them.  (A region that was measured slower than the runtime's nodes is none.)
    """
    measured = region.measured
    if measured is None or measured.runtime is None:
        return None
    cost = costs.region(region)
    before, after = (1e-6 * cost.executions * each for each in (measured.runtime, measured.fused))
    left = max(cost.seconds_after - cost.executions * costs.kernel_seconds(region), 0.0)
    if cost.seconds_before <= after + left and not any(map(costs.is_learned, region.nodes)):
        return replace(cost, seconds_before=before + left, seconds_after=after + left)
    return replace(cost, seconds_after=after + left)


def paced_choice(region: Region, pool: CandidatePool, context: Context, doubt: float = 1.0
                 ) -> Costed | Refusal | None:
    """A region with the cost to choose it by, or why it gains too little, where the time of its kernel follows from
    those of others that were measured on the GPU to plan for; None where it does not, or all is to be measured.

    Args:
        doubt: how many times as long as predicted it is taken to need.
    """
    costs = pool.maker.costs
    if context.eager or costs.paced(region) is None:
        return None
    cost = costs.region(region)
    more = (doubt - 1) * cost.executions * costs.kernel_seconds(region)
    region = replace(region, counted=replace(cost, seconds_after=cost.seconds_after + more))
    return pool.no_gain(region) or (region, region.cost)


def _costed(region: Region, pool: CandidatePool, context: Context) -> Costed | Refusal:
    """A region with its kernel, and the cost to choose it by: measured, or predicted where that can be trusted."""
    made = listed(region, pool, context)
    if isinstance(made, Refusal):
        return made
    cost = measured_cost(made, pool.maker.costs)
    if cost is not None:
        return made, cost
    # The runtime may have a good kernel for an operator that is an attention; the rate is that of 16-bit floats.
    attends = any(pool.facts[node].contracts and pool.facts[node].maxima for node in made.view)
    foreseen = None if attends else paced_choice(made, pool, context)
    if foreseen is not None:
        return foreseen
    if _rate(pool) is None or attends or made.kernel.rounds:
        name = pool.maker.costs.profile.name
        what = next((words for test, words in _IN_SEVERAL if any(map(test, made.view))),
                    "two products with a softmax between them could be one kernel; how fast it is")
        return Refusal(
            UNMEASURED,
            f"{what} on {name} was not measured, and products are fused only where that is known to be faster",
            region.label, region.rule, "run onnxfuse optimize on that GPU, which measures it, or onnxfuse tune"
            + pool.maker.tuning_options,
        )
    return pool.no_gain(made) or (made, made.cost)
