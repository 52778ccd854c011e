"""Regions that hold a depthwise convolution, found by its operator.

    image ─ pointwise ─ convolution ─ bias, activation, residual ─▶

Such a convolution is bound by bytes, which are known, and by the float32 cores, and the runtime's kernels are far from
either.  So these regions are weighed by predictions, as pointwise ones are, and by what was measured where it was:
bare, with what is computed of the result element by element, and with what is computed of the image before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from onnxfuse.graph.dims import product
from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.operators import OperatorClass, classify
from onnxfuse.operators.classes import moves_innermost, slides
from onnxfuse.planning.admission import Facts
from onnxfuse.planning.context import Context
from onnxfuse.planning.contractions import measured_cost, with_kernel
from onnxfuse.planning.grow import escaping
from onnxfuse.planning.region import Region, RegionCost
from onnxfuse.planning.weighing import CandidatePool, Members, ordered
from onnxfuse.refusal import Refusal

STAGE = "depthwise"
"""Id of these regions, under which ``--disable`` leaves them out."""

MOST_BESIDE = 16
"""Nodes before a convolution, or behind it, that come in at most."""

COMPUTES = frozenset({OperatorClass.POINTWISE, OperatorClass.BROADCAST, OperatorClass.VIEW})


def offer_depthwise(pool: CandidatePool, context: Context) -> None:
    """Weigh the depthwise convolutions of a graph, each with less and with more of what is around it."""
    if context.objective.channels_last:  # where the runtime has better ones
        return
    for node in ordered(node for node in pool.facts if pool.facts[node].contracts and slides(node)):
        _Offer(pool, context).around(_Beside(node, pool.maker.view, pool.facts))


class _Beside:
    """What may be computed with a convolution."""

    def __init__(self, convolution: Node, graph: Graph, facts: Mapping[Node, Facts]) -> None:
        self.convolution, self.graph, self.facts = convolution, graph, facts

    def behind(self) -> Iterator[Members]:
        """The convolution with what is computed of its result, from the most on, where one value comes of it."""
        members, found = {self.convolution}, []
        (result,) = self.convolution.outputs
        while len(members) <= MOST_BESIDE:
            readers = ordered({reader for value in escaping(members) for reader in value.consumers} - members)
            node = next((each for each in readers if self._admits(each, result)), None)
            if node is None:
                break
            members.add(node)
            # Where one value leaves, no path leads back to what it does not come of.
            if len(escaping(members)) == 1 and not self.facts[node].view:
                found.append(frozenset(members))
        return reversed(found)

    def before(self, members: Members) -> Members:
        """A region with what is computed of the convolution's image and read by nobody else."""
        image, more = self.convolution.inputs[0], {self.convolution}
        waiting = [image]
        while waiting and len(more) <= MOST_BESIDE:
            value = waiting.pop()
            node = None if value is None else value.producer
            if node is None or node in more or not self._admits(node, image) or not all(
                    output is None or _stays(output, more)
                    for output in node.outputs):
                continue
            more.add(node)
            waiting += node.reads()
        return members | more

    def _admits(self, node: Node, like: Value | None) -> bool:
        """Whether a node computes as many elements as there are of a value, each of those at its place."""
        facts = self.facts.get(node)
        if facts is None or facts.rows is not None or facts.contracts or facts.transposes:
            return False
        (first, *others) = [value for value in node.outputs if value is not None]
        if others or first.shape is None or like is None or like.shape is None or (
                product(first.shape) != product(like.shape)):
            return False
        return all(each.op == "Constant" or (classify(each, self.graph) in COMPUTES and not moves_innermost(each))
                   for each in node.originals)


def _stays(value: Value, members: set[Node]) -> bool:
    """Whether nobody else reads a value."""
    return not value.is_output and members.issuperset(value.consumers)


class _Offer:
    """Weighs one convolution, with what is around it as a whole: none of its parts is one."""

    def __init__(self, pool: CandidatePool, context: Context) -> None:
        self.pool, self.context = pool, context
        self.taken: set[Members] = set()
        self.refused: dict[Members, tuple[Refusal, RegionCost | None]] = {}

    def around(self, beside: _Beside) -> None:
        """Weigh the convolution bare, with as much behind it as there is a kernel for, and with what is before too."""
        bare = frozenset([beside.convolution])
        whole = next((each for each in beside.behind() if self._admits(each)), bare)
        for members in dict.fromkeys((whole, beside.before(whole), bare)):
            if members not in self.taken:
                self._admits(members)
        if not self.taken:
            refusal, cost = self.refused[bare]
            refusal = replace(refusal, node=refusal.node or beside.convolution.label, rule=STAGE)
            self.pool.refuse(bare, STAGE, refusal, cost)

    def _admits(self, members: Members) -> bool:
        """Whether a region may be chosen."""
        region = self.pool.region(members, STAGE)
        found = region if isinstance(region, Refusal) else self._judged(region)
        if isinstance(found, Refusal):
            self.refused[members] = found, None if isinstance(region, Refusal) else region.cost
            return False
        self.taken.add(members)
        self.pool.take(members, *found)
        return True

    def _judged(self, region: Region) -> tuple[Region, RegionCost] | Refusal:
        """A region with its kernel, and the cost to choose it by: measured; predicted where no larger one was measured
        and found slow."""
        made = with_kernel(region, self.pool, self.context)
        if isinstance(made, Refusal):
            return made
        cost = measured_cost(made)
        if cost is not None:
            return made, cost
        slow = next((refusal for refusal, _ in self.refused.values() if refusal.code == "measured-slower"), None)
        return slow or self.pool.no_gain(made) or (made, made.cost)
