"""Products of one operand and of different widths, as one region: an inception block's reductions, queries that have
more heads than keys and values, the heads of a detector.

    image ─┬─ Conv 64 ─ bias, activation ─▶
           ├─ Conv 96 ─ bias, activation ─▶      one product of 176 columns, each result cut from it (``joining``)
           └─ Conv 16 ─ bias, activation ─▶
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from onnxfuse.graph.model import Node
from onnxfuse.planning.admission import Facts
from onnxfuse.planning.context import Context
from onnxfuse.planning.regions.beside import Beside, Offer, Outcome, union
from onnxfuse.planning.regions.grow import escaping
from onnxfuse.planning.regions.products import STAGE, meet, multiplied_by_kernels
from onnxfuse.planning.regions.sliced import side_by_side
from onnxfuse.planning.weighing import CandidatePool, Members


def offer_siblings(pool: CandidatePool, context: Context) -> None:
    """Weigh such products together; where what puts their results side by side is no region with all of them, those by
    themselves that no region holds with products of another operand."""
    if not (context.measures or pool.maker.costs.knows_tiles):
        return
    facts = pool.facts
    groups = list(pool.maker.joins.siblings(
        multiplied_by_kernels(pool, context), partial(_operand, facts=facts), partial(meet, facts=facts)))
    around = side_by_side(pool) if groups else []
    for group in groups:
        free = [node for node in group if not _has_others(node, group, pool)]
        if not _offer(group, around, pool, context) and 1 < len(free) < len(group):
            _offer(free, [], pool, context)


def _offer(group: list[Node], around: list[Members], pool: CandidatePool, context: Context) -> bool:
    """Weigh products as one, and with what puts side by side what becomes of all of their results (``around``); whether
    that may be chosen."""
    fold = pool.maker.joins.of(group)
    if fold is None:
        return False
    alone = [Beside([node], pool.maker.view, pool.facts, transposes=True) for node in group]
    offer = Offer(pool, context, STAGE, trusted=False)
    offer.joined(alone, fold)
    own = union(each.laid()[0] for each in alone)
    whole = [members | own for members in around if escaping({*members, *own}) == escaping(set(members))]
    return Outcome.TAKEN in [offer.join(members, fold) for members in whole]


def _has_others(node: Node, group: list[Node], pool: CandidatePool) -> bool:
    """Whether a region that may be chosen holds a product with others than its siblings."""
    return any(node in members and any(pool.facts[each].contracts and each not in group for each in members)
               for members in pool.pool)


def _operand(node: Node, facts: Mapping[Node, Facts]) -> object:
    """What tells a product's first operand from others: where it lies another way that of which it is taken back, which
    each reader may do for itself."""
    value = node.inputs[0]
    back = None if value is None else value.producer
    if back is None or back not in facts or not facts[back].returns:
        return value
    return back.inputs[0], tuple(back.attributes.get("perm", ()))
