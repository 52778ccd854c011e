"""Regions of products whose results are put side by side: each writes its part, and nothing is copied."""

from __future__ import annotations

from onnxfuse.graph.model import Node, Value
from onnxfuse.planning.beside import Beside, Offer
from onnxfuse.planning.context import Context
from onnxfuse.planning.grow import escaping
from onnxfuse.planning.legality import is_convex
from onnxfuse.planning.products import STAGE
from onnxfuse.planning.weighing import CandidatePool, Members, ordered
from onnxfuse.schedules.sliced import MOST_PARTS

MOST_BEHIND = 16
"""Nodes from a product to where its result is put beside others."""


def offer_sliced(pool: CandidatePool, context: Context) -> None:
    """Weigh products with what puts their results side by side."""
    if not (context.measures or pool.maker.costs.knows_tiles):
        return
    for node in ordered(node for node in pool.facts if node.op == "Concat"):
        members = _branches(node, pool)
        if members:
            Offer(pool, context, STAGE, trusted=False).most([members])


def _branches(joins: Node, pool: CandidatePool) -> Members:
    """The branches of products that a node alone reads, with it and what lays out its result; none where one is of
    something else."""
    values = [value for value in joins.inputs if value is not None]
    if not 1 < len(values) <= MOST_PARTS or len(set(values)) < len(values):
        return frozenset()
    members = {joins, *_leaving(joins, pool)}
    for value in values:
        branch = _branch(value, pool)
        if not branch or members & branch:
            return frozenset()
        members |= branch
    return frozenset(members) if is_convex(members) is None and len(escaping(members)) == 1 else frozenset()


def _leaving(node: Node, pool: CandidatePool) -> set[Node]:
    """What alone reads a node's result and lays it out another way for others."""
    result = node.outputs[0]
    readers = set() if result is None or result.is_output else set(result.consumers)
    return {each for each in readers if len(readers) == 1 and each in pool.facts and pool.facts[each].leaves}


def _branch(value: Value, pool: CandidatePool) -> set[Node]:
    """A product with what is computed of its results alone up to a value, which lies as others have it or is taken back
    from that; nothing where the value is of something else."""
    facts, taken, last = pool.facts, set[Node](), value
    if value.producer is not None and value.producer in facts and facts[value.producer].returns:
        taken.add(value.producer)
        last = next(iter(value.producer.reads()))
    product = _product(last, pool)
    if product is None:
        return set()
    beside = Beside([product], pool.maker.view, facts, transposes=True)
    for members in (*beside.behind(), beside.core):
        if escaping(set(members)) == [last]:
            return {*members, *taken}
    return set()


def _product(value: Value, pool: CandidatePool) -> Node | None:
    """The product that a value is computed of, through what has one operand that is no constant, or a gate of it."""
    waiting, seen = [value], set[Node]()
    while waiting and len(seen) <= MOST_BEHIND:
        node = waiting.pop().producer
        if node is None or node in seen or node not in pool.facts:
            continue
        if pool.facts[node].contracts:
            return None if pool.facts[node].maxima else node
        seen.add(node)
        waiting += node.reads()
    return None
