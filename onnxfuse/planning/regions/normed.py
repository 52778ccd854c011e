"""Norms of the rows of operands that products alone read: a region may hold them, whose kernel then scales what it
loads.

Such regions are offered beside those of the products by themselves, and taken where they were measured faster: the
norm's own kernel takes as long as it did, but for what it writes, and the product's has to compute its operand.  Where
a warp copies operands both took twice as long so as the norm and the product apart (benchmarks/results, parts), and
nothing is offered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from onnxfuse.graph.dims import Dim, product
from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.operators import OperatorClass, classify
from onnxfuse.operators.classes import moves_innermost
from onnxfuse.planning.admission import Facts
from onnxfuse.planning.context import Context
from onnxfuse.planning.weighing import Members, ordered

MOST_AHEAD = 16
"""Nodes ahead of products at most."""

COPIES_FROM = 90
"""GPUs from this compute capability on have a warp copy operands."""

_COMPUTES = frozenset({OperatorClass.VIEW, OperatorClass.POINTWISE, OperatorClass.BROADCAST, OperatorClass.REDUCTION})


def scales_operands(context: Context) -> bool:
    """Whether such regions are offered."""
    return context.measures and context.costs.profile.sm < COPIES_FROM


def normed_before(
    members: Members, operands: Sequence[Value | None], graph: Graph, facts: Mapping[Node, Facts]
) -> list[Members]:
    """A region with the norms of its products' operands, also where members lay these out another way, and what is
    computed between; nothing where there are none, or others read what they give."""
    found, own = set(members), [value for value in operands if value is not None]
    while True:
        read = (*own, *(value for node in found if not facts[node].contracts for value in node.reads()))
        node = next((each for each in _producers(read) if each not in found and _stays(each, found)
                     and _admits(each, own, graph, facts)), None)
        if node is None or len(found) - len(members) == MOST_AHEAD:
            break
        found.add(node)
    return [frozenset(found)] if any(facts[node].rows is not None for node in found - members) else []


def _producers(values: Iterable[Value]) -> Sequence[Node]:
    """What gives values, the last first."""
    return ordered({value.producer for value in values if value.producer is not None})[::-1]


def _stays(node: Node, members: set[Node]) -> bool:
    """Whether nobody else reads what a node gives."""
    return all(value is None or (not value.is_output and members.issuperset(value.consumers)) for value in node.outputs)


def _admits(node: Node, operands: Sequence[Value], graph: Graph, facts: Mapping[Node, Facts]) -> bool:
    """Whether a node computes as many elements as an operand has, or one for each of its rows, and reduces such alone.
    """
    known, (result, *others) = facts.get(node), node.outputs
    if known is None or others or result is None or result.shape is None:
        return False
    if known.contracts or known.maxima or known.transposes or known.leaves or known.returns:
        return False
    if not all(each.op == "Constant" or (classify(each, graph) in _COMPUTES and not moves_innermost(each))
               for each in node.originals):
        return False
    count = product(result.shape)
    return any(_is_of_rows(count, known, product(operand.shape), length)
               for operand in operands if operand.shape is not None for length in operand.shape[-2:])


def _is_of_rows(count: Dim, known: Facts, whole: Dim, length: Dim) -> bool:
    """Whether so many elements are as many as an operand has, or one for each row of so many."""
    rows = known.rows is None or (known.rows.length == length and known.rows.count * length == whole)
    return rows and (count == whole or count * length == whole)
