"""What may come into a region behind a product where rows of its results are reduced: a residual and a norm.

Unlike what is computed element by element (``beside``), such a region may leave several values: the sum that the next
residual reads, and its norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnxfuse.graph.dims import Dim, product
from onnxfuse.graph.model import Graph, Node
from onnxfuse.operators import OperatorClass, classify
from onnxfuse.operators.classes import moves_innermost
from onnxfuse.planning.admission import Facts
from onnxfuse.planning.contractions import COMPUTES
from onnxfuse.planning.grow import escaping
from onnxfuse.planning.legality import is_convex
from onnxfuse.planning.weighing import Members, ordered

MOST_BEHIND = 16
"""Nodes that come in behind a product at most."""

REDUCES = COMPUTES | {OperatorClass.REDUCTION}
"""Classes of operators that do."""


def reduced_behind(core: Members, last: Node, graph: Graph, facts: Mapping[Node, Facts]) -> list[Members]:
    """A product, ``last`` of its ``core``, with what is computed of rows of its results, from the most on."""
    return [*reversed(list(_behind(core, last, graph, facts)))]


def _behind(core: Members, last: Node, graph: Graph, facts: Mapping[Node, Facts]) -> Iterator[Members]:
    """From the least on that reduces rows."""
    result, *others = (value for value in last.outputs if value is not None)
    if others or not result.shape:
        return
    sizes = product(result.shape), result.shape[-1]
    members, reduces = set(core), False
    while len(members) - len(core) < MOST_BEHIND:
        readers = ordered({reader for value in escaping(members) for reader in value.consumers} - members)
        node = next((each for each in readers if _admits(each, sizes, graph, facts) and _follows(each, members)), None)
        if node is None:
            return
        members.add(node)
        reduces |= facts[node].rows is not None
        if reduces and not facts[node].view:
            yield frozenset(members)


def _admits(node: Node, sizes: tuple[Dim, Dim], graph: Graph, facts: Mapping[Node, Facts]) -> bool:
    """Whether a node computes so many elements, or one for each row of so many."""
    known = facts.get(node)
    if known is None or known.contracts or known.transposes or known.leaves or known.returns:
        return False
    count, length = sizes
    if known.rows is not None and known.rows.length != length:
        return False
    shapes = [value.shape for value in node.outputs if value is not None and (value.consumers or value.is_output)]
    if not all(shape is not None and product(shape) in (count, count.divide(length)) for shape in shapes):
        return False
    return all(each.op == "Constant" or (classify(each, graph) in REDUCES and not moves_innermost(each))
               for each in node.originals)


def _follows(node: Node, members: set[Node]) -> bool:
    """Whether no path leads from the members to what else a node reads."""
    first = min(member.index for member in members)
    producers = {value.producer for value in node.reads()}
    late = [each for each in producers if each is not None and each not in members and each.index > first]
    return not late or is_convex({*members, node}) is None
