"""Regions that scale an image by what products make of its means: squeeze-and-excite.

    image ─┬─ mean of each channel ─ product, activation ─ product, sigmoid ─┐
           └────────────────────────────────────────────────────────── scale ─┴ residual, activation ─▶

Such a region is offered as those of products are, and weighed against the mean and the scale by themselves, with the
products left to the runtime or to kernels of their own.  Where the image comes of a depthwise convolution it is offered
with that too, whose kernel tells the sums that the means are of; and where a product alone reads what is scaled, with
that and what is computed of its results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from onnxfuse.graph.dims import Dim, product
from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.lowering.arrangement import Arrangement
from onnxfuse.operators import OperatorClass, classify
from onnxfuse.operators.classes import is_in_groups, slides
from onnxfuse.planning.admission import Facts
from onnxfuse.planning.context import Context
from onnxfuse.planning.legality import is_convex
from onnxfuse.planning.regions.beside import Beside, Offer
from onnxfuse.planning.regions.contractions import COMPUTES, stays
from onnxfuse.planning.regions.grow import escaping
from onnxfuse.planning.regions.products import STAGE
from onnxfuse.planning.weighing import CandidatePool, Members, ordered

MOST_NODES = 24
"""From a mean to what it scales."""

MOST_BEHIND = 6
"""Nodes that come in behind that."""

MOST_AHEAD = 16
"""Nodes from a convolution to the image."""


def offer_gated(pool: CandidatePool, context: Context) -> None:
    """Weigh what scales an image by its means, each with more and with less behind it."""
    if context.objective.channels_last or not (context.measures or pool.maker.costs.knows_tiles):
        return
    for node in ordered(node for node in pool.facts if pool.facts[node].rows is not None):
        gate = _Gate(node, pool.maker.view, pool.facts)
        regions = [*gate.regions()][::-1]
        if regions:
            Offer(pool, context, STAGE, trusted=False).most(regions)
            if ahead := gate.ahead(regions[-1]):
                Offer(pool, context, STAGE, trusted=False).most([ahead | members for members in regions])
            if multiplied := next(filter(None, map(gate.multiplied, regions)), None):
                Offer(pool, context, STAGE, trusted=False).most([ahead | members for members in multiplied])


@dataclass(frozen=True)
class _Gate:
    """What a ``mean`` leads to."""

    mean: Node
    graph: Graph
    facts: Mapping[Node, Facts]

    def regions(self) -> Iterator[Members]:
        """From the least on; none where it scales nothing, or by no product."""
        found = self._chain() if self._elements(self.mean) == self._rows.count else None
        if found is None:
            return
        members, scale = found
        members |= self._returned(members)
        if is_convex(members) is None and not self._ends(scale):
            yield frozenset(members)
        for node in self._behind(scale):
            members = {*members, node}
            members |= self._returned(members)
            if is_convex(members) is not None:
                return
            if not self.facts[node].returns and not self._ends(node):
                yield frozenset(members)

    def multiplied(self, members: Members) -> list[Members]:
        """A region with the product that alone reads what it scales, and with what is computed of its results, from the
        most on; none where something else reads that."""
        values = escaping(set(members))
        readers = set(values[0].consumers) if len(values) == 1 and not values[0].is_output else set()
        while len(readers) == 1:
            (node,) = readers
            if self._multiplies(node):
                beside = Beside([node], self.graph, self.facts, transposes=True)
                if not set(values[0].consumers) <= beside.core:
                    return []
                found = (members | more for more in (*beside.behind(), beside.core))
                return [each for each in found if is_convex(each) is None]
            if node not in self.facts or not self.facts[node].returns:
                break
            readers = {reader for value in node.outputs if value is not None for reader in value.consumers}
        return []

    def ahead(self, members: Members) -> Members:
        """The depthwise convolution that gives the image, with what is computed of its results; none where others read
        that too."""
        for image in (value for node in ordered(members) for value in node.reads()):
            if image.producer in members or not stays(image, set(members)) or image.shape is None or (
                    product(image.shape) != self.count):
                continue
            convolution = self._convolution(image)
            beside = None if convolution is None else Beside([convolution], self.graph, self.facts, transposes=True)
            for found in () if beside is None else beside.up_to(image):
                if is_convex(found | members) is None:
                    return found
        return frozenset()

    def _convolution(self, image: Value) -> Node | None:
        """The depthwise convolution that an image is computed of, element by element."""
        waiting, seen = [image], set[Node]()
        while waiting and len(seen) <= MOST_AHEAD:
            node = waiting.pop().producer
            if node is None or node in seen or node not in self.facts:
                continue
            if self.facts[node].contracts:
                return node if slides(node) else None
            if self._computes(node) or self.facts[node].leaves:
                seen.add(node)
                waiting += node.reads()
        return None

    @property
    def _rows(self) -> Arrangement:
        """What is reduced, a row for each mean."""
        rows = self.facts[self.mean].rows
        assert rows is not None
        return rows

    @property
    def count(self) -> Dim:
        """Elements of the image."""
        return self._rows.count * self._rows.length

    def _chain(self) -> tuple[set[Node], Node] | None:
        """All nodes from the mean to what it scales, and that node; None where they lead to something else too, or hold
        no product."""
        members, scales, waiting = {self.mean}, set[Node](), [self.mean]
        while waiting and len(members) <= MOST_NODES:
            node = waiting.pop()
            for value in node.outputs:
                if value is not None and (value.is_output or not value.consumers):
                    return None
                for reader in set() if value is None else set(value.consumers) - members:
                    if self._scales(reader):
                        scales.add(reader)
                    elif not self._admits(reader):
                        return None
                    else:
                        members.add(reader)
                        waiting.append(reader)
        if waiting or len(scales) != 1 or not any(self.facts[each].contracts for each in members):
            return None
        (scale,) = scales
        return {*members, scale}, scale

    def _scales(self, node: Node) -> bool:
        """Whether a node computes an element for each of the image's."""
        return node in self.facts and not self.facts[node].contracts and self._computes(node) and (
            self._elements(node) == self.count)

    def _admits(self, node: Node) -> bool:
        """Whether a node may stand between the mean and what it scales."""
        known = self.facts.get(node)
        if known is None or known.rows is not None or known.maxima:
            return False
        return self._multiplies(node) if known.contracts else self._computes(node)

    def _multiplies(self, node: Node) -> bool:
        """Whether a node is a product by weights, of single pixels where it is a convolution."""
        return node in self.facts and self.facts[node].contracts and not slides(node) and not is_in_groups(node) and (
            node.inputs[1] is not None and node.inputs[1].is_constant)

    def _computes(self, node: Node) -> bool:
        """Whether a node computes element by element."""
        return self.facts[node].rows is None and all(
            each.op == "Constant" or classify(each, self.graph) in {*COMPUTES, OperatorClass.VIEW}
            for each in node.originals)

    def _elements(self, node: Node) -> Dim | None:
        (result,) = node.outputs if len(node.outputs) == 1 else (None,)
        return None if result is None or result.shape is None else product(result.shape)

    def _returned(self, members: set[Node]) -> set[Node]:
        """What takes operands of these back for them alone that lie another way."""
        read = (value for node in members for value in node.reads() if value.producer not in members)
        return {value.producer for value in read if value.producer is not None and value.producer in self.facts
                and self.facts[value.producer].returns and stays(value, members)}

    def _ends(self, node: Node) -> bool:
        """Whether the result of a node lies another way in memory."""
        readers = [] if node.outputs[0] is None else node.outputs[0].consumers
        return any(reader in self.facts and self.facts[reader].leaves for reader in readers)

    def _behind(self, scale: Node) -> Iterator[Node]:
        """What alone reads the scaled image, then what alone reads that, whichever way it lies."""
        last = scale
        for _ in range(MOST_BEHIND):
            result, before = last.outputs[0], self.facts[last]
            if result is None or result.is_output or len(set(result.consumers)) != 1:
                return
            (last, *_) = result.consumers
            known = self.facts.get(last)
            if known is None or known.transposes or not (
                    known.leaves or (known.returns and before.leaves) or self._scales(last)):
                return
            yield last
