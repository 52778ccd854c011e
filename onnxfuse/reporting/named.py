"""What a model's computations are called, as name rules say, and in how many kernels each of them runs."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.graph.model import Node
from onnxfuse.operators import OperatorClass
from onnxfuse.operators.record import operator_of
from onnxfuse.optimised import Optimised
from onnxfuse.region import Region
from onnxfuse.rewriting import NamedRecord
from onnxfuse.rules import Match, named


def named_places(optimised: Optimised) -> tuple[NamedRecord, ...]:
    """The name rules that match anywhere, in their order, and what became of the products at these places: one place
    is fused where every product of it is in a fused node, whatever else is in that."""
    holder = {node: place for place, region in enumerate(optimised.plan.fusions) for node in region.view}
    rules = optimised.rules.name
    found: dict[str, list[Match]] = {rule.id: [] for rule in rules}
    for match in named(optimised.canonical.graph, rules):
        found[match.rule.id].append(match)
    return tuple(_counted(rule, matches, holder, optimised.plan.fusions) for rule, matches in found.items() if matches)


def _counted(
    rule: str, matches: Sequence[Match], holder: dict[Node, int], regions: Sequence[Region]
) -> NamedRecord:
    held = [[holder.get(node) for node in match.nodes if _multiplies(node)] for match in matches]
    whole = [each for each in held if each and None not in each]
    one = sum(len(set(each)) == 1 for each in whole)
    left = sum(all(place is None for place in each) for each in held)
    ids = (regions[place].rule for each in held for place in each if place is not None)
    return NamedRecord(rule, len(matches), one, len(whole) - one, left, tuple(dict.fromkeys(ids)))


def _multiplies(node: Node) -> bool:
    """Whether a node is a product, or holds some."""
    found = operator_of(node)
    return found is not None and found.kind is OperatorClass.HEAVY
