"""A plan: which regions are fused, and which came near."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from onnxfuse.graph.model import Node
from onnxfuse.planning.costs.traffic import shared
from onnxfuse.planning.space import SearchSpace
from onnxfuse.planning.weighing import Considered
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region


@dataclass(frozen=True)
class Plan:
    """What is fused and what is not.

    Attributes:
        fusions: chosen regions, in graph order of their first nodes, those in bodies after those of the main graph.
        refusals: everything that came near and was not fused, each once.
        candidates: number of regions for which there was a kernel.
        considered: every region that was weighed, in graph order of their first nodes.
        spaces: what the regions of each graph were chosen from, which the first passes fill in place.
        with_products: regions with products that there are kernels for, chosen or not: measurements decide on them.
        replaced: regions that stood where others compute values again.
    """

    fusions: tuple[Region, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    candidates: int = 0
    considered: tuple[Considered, ...] = ()
    spaces: tuple[SearchSpace, ...] = field(default=(), compare=False, repr=False)
    with_products: tuple[Region, ...] = field(default=(), compare=False, repr=False)
    replaced: tuple[Region, ...] = field(default=(), compare=False, repr=False)

    @property
    def beside(self) -> tuple[Region, ...]:
        """Regions that could stand in the place of chosen ones."""
        return (*self.with_products, *self.replaced)


def together(fusions: Sequence[Region], lost: Collection[int]) -> set[int]:
    """Regions, by place, and with them those that compute the same nodes: what these compute again nobody else would
    write."""
    beside = {node for fusion in fusions for node in fusion.beside}
    common = shared(fusion for fusion in fusions) - beside
    held = [common.intersection(fusion.nodes) for fusion in fusions]
    holders: dict[Node, list[int]] = {}
    for place, nodes in enumerate(held):
        for node in nodes:
            holders.setdefault(node, []).append(place)
    found: set[int] = set()
    waiting = list(lost)
    while waiting:
        place = waiting.pop()
        if place not in found:
            found.add(place)
            waiting += [other for node in held[place] for other in holders.pop(node, ())]
    return found


def revised(plan: Plan, revision: Callable[[Region], Region | Refusal]) -> Plan:
    """A plan whose fusions are as a revision makes them, those left out that it refuses, and what goes with these."""
    found = [revision(fusion) for fusion in plan.fusions]
    lost = together(plan.fusions, [place for place, each in enumerate(found) if isinstance(each, Refusal)])
    refusals: dict[tuple[Node, ...], Refusal] = {}
    for place in sorted(lost):
        fusion, why = plan.fusions[place], found[place]
        refusals[fusion.view] = why if isinstance(why, Refusal) else Refusal(
            "computes-again", "it computes again what a region computes that is left to the runtime",
            fusion.nodes[0].label, fusion.rule,
        )
    considered = tuple(
        replace(each, verdict="refused", reason=refusals[each.nodes].message)
        if each.verdict == "chosen" and each.nodes in refusals else each
        for each in plan.considered
    )
    fusions = tuple(each for place, each in enumerate(found) if place not in lost and isinstance(each, Region))
    return replace(plan, fusions=fusions, refusals=(*plan.refusals, *refusals.values()), considered=considered)


