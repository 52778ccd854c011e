"""Regions that hold one product or convolution, or several products of one operand, with what is around them.

    operands ─ views ─ product ─ bias, activation, gate, residual ─▶

              ┌─ product ─ bias ─▶ queries
    operand ──┼─ product ─ bias ─▶ keys
              └─ product ─ bias ─▶ values

How long a product takes is known less well than how long bytes do, and the runtime's library is hard to beat: such a
region is taken where it was measured faster than the runtime's own nodes, or its kernel goes through tiles of which the
GPU's profile has a measured rate, and nothing was measured of its products; and offered where that may be known.  What
the runtime takes for a product alone is learned before anything is weighed: so it counts the same in all regions that
may hold the product, an attention's too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from onnxfuse.graph.model import Node, Value
from onnxfuse.ir.scalars import FLOAT, INT8, UINT8
from onnxfuse.operators.classes import is_in_groups, is_narrow, multiplied, quantised, recurs, slides
from onnxfuse.planning.admission import Facts
from onnxfuse.planning.candidates import Maker
from onnxfuse.planning.context import Context
from onnxfuse.planning.costs.library import (
    LIBRARY,
    batched_seconds,
    cached_seconds,
    convolution_seconds,
    has_few_channels,
    is_dense,
    is_laid_anew,
    laying_seconds,
    projected_seconds,
    recurrent_seconds,
    uneven_seconds,
)
from onnxfuse.planning.regions.beside import Beside, Offer
from onnxfuse.planning.regions.normed import normed_before, scales_operands
from onnxfuse.planning.weighing import CandidatePool, Members, ordered
from onnxfuse.provider.layouts import is_converted
from onnxfuse.provider.removed import gives_back
from onnxfuse.region import Region
from onnxfuse.schedules import Does, running

STAGE = "products"
"""Id of these regions, under which ``--disable`` leaves them out."""

MOST_BETWEEN = 6
"""Nodes between two products and what their results meet in."""


def learn_products(maker: Maker, facts: Mapping[Node, Facts], context: Context) -> None:
    """Tell the cost model of those nodes of a graph's view that are a product or a convolution and were measured, or
    whose time follows from others that were."""
    costs = maker.costs
    foreseen = costs.knows_tiles and not context.eager
    if context.measured is None and not foreseen:
        return
    for node in facts:
        for own in node.originals if foreseen else ():
            for known in (projected_seconds, cached_seconds):
                if (seconds := known(own, costs)) is not None:
                    costs.learn(own, seconds, measured=False)
        made = maker.fusion({node}, STAGE) if facts[node].contracts and not facts[node].maxima else None
        if not isinstance(made, Region):
            continue
        alone = [each for each in made.nodes if each.op != "Constant" and not gives_back(each)]
        if len(alone) != 1:
            continue
        # What was measured of an image's operators was in the layout that the runtime has by default.
        otherwise = context.objective.channels_last and is_converted(alone[0])
        taken = None if context.measured is None or otherwise else context.measured.runtime(made)
        if taken is not None:
            costs.learn(alone[0], 1e-6 * taken)
        elif foreseen and (seconds := _foreseen(node, made, alone[0], maker, facts, context)) is not None:
            costs.learn(alone[0], seconds, measured=False)


def _foreseen(
    node: Node, made: Region, own: Node, maker: Maker, facts: Mapping[Node, Facts], context: Context
) -> float | None:
    """Seconds that the runtime is taken to need for one run of a product or a convolution by itself; None where nothing
    tells.  ``made``: the region of it alone; ``own``: the original node."""
    costs = maker.costs
    if _rounds(own) and maker.keeps_float32() is not None:
        return None
    grouped, laid = is_in_groups(own), context.objective.channels_last
    if is_dense(own) or (grouped and not laid):  # of groups it has other kernels then, of which nothing is known
        seconds = convolution_seconds(own, costs)
        return seconds if seconds is None or not laid else seconds - laying_seconds([own], costs)
    for known in (recurrent_seconds, batched_seconds, uneven_seconds):
        if (seconds := known(own, costs)) is not None:
            return seconds
    kernel = maker.with_kernel(made) if _is_foreseen(node, facts) and not grouped else None
    paced = costs.paced(kernel) if isinstance(kernel, Region) else None
    return None if paced is None else LIBRARY * paced


def offer_products(pool: CandidatePool, context: Context) -> None:
    """Weigh the products of a graph, each with less and with more of what is around it."""
    measures = context.measures
    if not measures and not pool.maker.costs.knows_tiles:
        return
    products = _weighed(pool, context)
    kept = pool.maker.keeps_float32()
    plain = [node for node in products if not recurs(node)]
    for group in (*([node] for node in products), *_beside(plain, pool.facts)):
        beside = Beside(group, pool.maker.view, pool.facts, transposes=True)
        if kept is None or not _rounds(group[0]):
            Offer(pool, context, STAGE, trusted=False).around(beside)
        elif (around := next(beside.behind(), None)) is not None:
            pool.refuse(around, STAGE, replace(kept, node=group[0].label, rule=STAGE))
    multiplied = multiplied_by_kernels(pool, context)
    _offer_integers(plain, pool, context)
    if measures:
        _offer_folded(multiplied, pool, context)
    if pool.maker.costs.knows_tiles:
        _offer_as_before(filter(is_in_groups, multiplied), pool, context)
    for group in _apart(multiplied, pool.facts):
        alone = [Beside([node], pool.maker.view, pool.facts, transposes=True) for node in group]
        Offer(pool, context, STAGE, trusted=False).together(alone)
        for members in _normed(group, pool) if scales_operands(context) else ():
            Offer(pool, context, STAGE, trusted=False).together(alone, members)


def multiplied_by_kernels(pool: CandidatePool, context: Context) -> list[Node]:
    """Products of a graph whose kernels may be weighed, but for those whose operands the runtime keeps as they are."""
    kept = pool.maker.keeps_float32()
    return [node for node in _weighed(pool, context) if not recurs(node) and (kept is None or not _rounds(node))]


def _weighed(pool: CandidatePool, context: Context) -> list[Node]:
    """Products of a graph of which something may be known, in graph order."""
    return [node for node in ordered(node for node in pool.facts if pool.facts[node].contracts)
            if not slides(node) and not pool.facts[node].maxima
            and (_is_held(node) if context.measures else _is_foreseen(node, pool.facts))]


def _normed(group: list[Node], pool: CandidatePool) -> list[Members]:
    """The norm that gives the operand that products have in common."""
    before = normed_before(frozenset(group), group[0].inputs[:1], pool.maker.view, pool.facts)
    return [members - frozenset(group) for members in before]


def _offer_folded(products: list[Node], pool: CandidatePool, context: Context) -> None:
    """Weigh products with what can be folded into their weights and no other region holds."""
    for node in products:
        if core := pool.maker.folds.core(node, pool.facts):
            beside = Beside([node], pool.maker.view, pool.facts, transposes=True, more=core)
            Offer(pool, context, STAGE, trusted=False).folding(beside)


def _offer_as_before(products: Iterable[Node], pool: CandidatePool, context: Context) -> None:
    """Weigh convolutions whose operands lie another way between transposes as they lay before, too: of the channels of
    a group vectors may be none, and weights that are computed lie as they did."""
    for node in products:
        before, laid = (Beside([node], pool.maker.view, pool.facts, transposes=each) for each in (False, True))
        if before.core != laid.core:
            Offer(pool, context, STAGE, trusted=False).around(before)


def _offer_integers(products: list[Node], pool: CandidatePool, context: Context) -> None:
    """Weigh products whose operands are dequantised with what does that, by themselves and side by side."""
    view, facts = pool.maker.view, pool.facts

    def numbers(group: list[Node]) -> Beside:
        return Beside(group, view, facts, transposes=True, numbers=True)

    for group in (*([node] for node in products), *_beside(products, facts)):
        if (beside := numbers(group)).dequantising:
            Offer(pool, context, STAGE, trusted=False).around(beside)
    for group in _apart(products, facts):
        if before := numbers(group).dequantising:
            alone = [Beside([node], view, facts, transposes=True) for node in group]
            Offer(pool, context, STAGE, trusted=False).together(alone, before)


def _is_held(node: Node) -> bool:
    """Whether kernels multiply operands of a product's types."""
    operands = multiplied(node)
    kinds = {None if value is None else value.dtype for value in operands}
    return kinds <= {INT8, UINT8} or all(map(is_narrow, operands)) or kinds == {FLOAT}


def _is_foreseen(node: Node, facts: Mapping[Node, Facts]) -> bool:
    """Whether the time of a product's kernel may follow from that of others: of floats, or numbers that are made such,
    of windows over images that are laid out for it, or have too few channels to be."""
    if is_laid_anew(node) and not has_few_channels(node):
        image = quantised(node.inputs[0]) or node.inputs[0]
        source = None if image is None else image.producer
        return source is not None and source in facts and facts[source].returns
    return all(map(is_narrow, multiplied(node))) or _rounds(node)


def _rounds(node: Node) -> bool:
    """Whether a kernel rounds a product's operands, to TF32."""
    return node.inputs[0] is not None and node.inputs[0].dtype == FLOAT


def _beside(products: list[Node], facts: Mapping[Node, Facts]) -> Iterator[list[Node]]:
    """Two products of the same first operand and the same shape whose results meet, as a gate and its value do."""
    for one, other in (pair for same in _alike(products) for pair in combinations(same, 2)):
        if meet(one, other, facts):
            yield [one, other]


def _apart(products: list[Node], facts: Mapping[Node, Facts]) -> Iterator[list[Node]]:
    """Products of the same first operand and the same shape whose results go ways of their own, as queries, keys and
    values do: as few groups as a kernel computes side by side, of much the same size."""
    for same in _alike(products):
        lone = [node for node in same if not any(meet(node, other, facts) for other in same if other is not node)]
        groups = -(-len(lone) // running(Does.CONTRACTS).products)
        yield from (group for place in range(groups) if len(group := lone[place::groups]) > 1)


def _alike(products: list[Node]) -> Iterable[list[Node]]:
    """Products of the same first operand and the same shape."""
    found: dict[tuple[Value | None, object], list[Node]] = {}
    for node in products:
        (result,) = node.outputs
        if result is not None and result.shape is not None:
            found.setdefault((node.inputs[0], result.shape), []).append(node)
    return found.values()


def meet(one: Node, other: Node, facts: Mapping[Node, Facts]) -> bool:
    """Whether a node reads what is made of both, a few nodes on, and is no product itself."""
    return bool(_near(one, facts) & _near(other, facts))


def _near(node: Node, facts: Mapping[Node, Facts]) -> set[Node]:
    """Nodes that read a result, and that read theirs, where one node does; as far as the next product."""
    found: set[Node] = set()
    waiting = [value for value in node.outputs if value is not None]
    while waiting and len(found) < MOST_BETWEEN:
        value = waiting.pop()
        for reader in value.consumers:
            if reader not in found and reader in facts and not facts[reader].contracts:
                found.add(reader)
                waiting += [output for output in reader.outputs if output is not None]
    return found
