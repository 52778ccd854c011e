"""What may come into a region behind a product where rows of its results are reduced: a residual and a norm; and behind
a convolution, of whose results a norm is over the windows of some channels.

Unlike what is computed element by element (``beside``), such a region may leave several values: the sum that the next
residual reads, and its norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from onnxfuse.graph.dims import Dim, product
from onnxfuse.graph.model import Graph, Node
from onnxfuse.operators import OperatorClass, classify
from onnxfuse.operators.classes import moves_innermost
from onnxfuse.planning.admission import Facts
from onnxfuse.planning.legality import is_convex
from onnxfuse.planning.regions.contractions import COMPUTES, stays
from onnxfuse.planning.regions.grow import escaping
from onnxfuse.planning.weighing import Members, ordered
from onnxfuse.schedules.reductions.reduction import MOST_IN_PIECES

MOST_BEHIND = 16
"""Nodes that come in behind a product at most."""

REDUCES = COMPUTES | {OperatorClass.REDUCTION}
"""Classes of operators that do."""


def reduced_behind(core: Members, last: Node, graph: Graph, facts: Mapping[Node, Facts]) -> list[Members]:
    """A product, ``last`` of its ``core``, with what is computed of rows of its results, from the most on."""
    return [*reversed(list(_Behind(core, last, graph, facts, moves=False).regions()))]


def normed_behind(core: Members, last: Node, graph: Graph, facts: Mapping[Node, Facts]) -> list[Members]:
    """A convolution, ``last`` of its ``core``, with a norm of groups of its channels over windows, however these lie,
    from the most on."""
    return [*reversed(list(_Behind(core, last, graph, facts, moves=True).regions()))]


@dataclass
class _Behind:
    """What comes in behind a product.

    Attributes:
        moves: whether elements may be laid out another way, and rows be any that all reductions have in common.
    """

    core: Members
    last: Node
    graph: Graph
    facts: Mapping[Node, Facts]
    moves: bool

    def regions(self) -> Iterator[Members]:
        """From the least on that reduces rows."""
        result, *others = (value for value in self.last.outputs if value is not None)
        if others or not result.shape:
            return
        count, length = product(result.shape), None if self.moves else result.shape[-1]
        members, reduces = set(self.core), False
        while len(members) - len(self.core) < MOST_BEHIND:
            readers = ordered({reader for value in escaping(members) for reader in value.consumers} - members)
            node = next((each for each in readers if self._admits(each, count, length) and _follows(each, members)),
                        None)
            if node is None:
                return
            members.add(node)
            members |= self._returned(node, members)
            rows = self.facts[node].rows
            if rows is not None:
                reduces, length = True, rows.length
            if reduces and not self.facts[node].view:
                yield self._of_rows(members)

    def _returned(self, node: Node, members: set[Node]) -> set[Node]:
        """What takes operands of a node back for it alone that lie another way, as a residual's."""
        producers = {value.producer for value in node.reads() if self.moves and stays(value, members)}
        return {each for each in producers if each in self.facts and each is not None and self.facts[each].returns}

    def _of_rows(self, members: set[Node]) -> Members:
        """A region without what nothing that is reduced is computed from, or comes of: others' ways of reading what the
        product leaves."""
        sums = {node for node in members if self.facts[node].rows is not None}
        ahead, behind = set(sums), set(sums)
        for node in reversed(ordered(members)):
            if any(reader in ahead for value in node.outputs if value is not None for reader in value.consumers):
                ahead.add(node)
        for node in ordered(members):
            if any(value.producer in behind for value in node.reads()):
                behind.add(node)
        return self.core | frozenset(members & (ahead | behind))

    def _admits(self, node: Node, count: Dim, length: Dim | None) -> bool:
        """Whether a node computes so many elements, or one for each row of so many."""
        known = self.facts.get(node)
        if known is None or known.contracts or (not self.moves and (known.transposes or known.leaves or known.returns)):
            return False
        if known.rows is not None:
            own = known.rows.length
            if length not in (None, own) or known.rows.count * own != count or (self.moves and not _are_long(own)):
                return False
            length = own
        sizes = (count, None if length is None else count.divide(length))
        shapes = [value.shape for value in node.outputs if value is not None and (value.consumers or value.is_output)]
        if not all(shape is not None and product(shape) in sizes for shape in shapes):
            return False
        return all(each.op == "Constant" or (
            classify(each, self.graph) in REDUCES and (self.moves or not moves_innermost(each)))
            for each in node.originals)


def _are_long(length: Dim) -> bool:
    """Whether rows of channels and windows are certain to be read twice, once for their statistics."""
    return length.value is not None and length.value > MOST_IN_PIECES


def _follows(node: Node, members: set[Node]) -> bool:
    """Whether no path leads from the members to what else a node reads."""
    first = min(member.index for member in members)
    producers = {value.producer for value in node.reads()}
    late = [each for each in producers if each is not None and each not in members and each.index > first]
    return not late or is_convex({*members, node}) is None
