"""A plan by graph: its share of the main graph and of each body.

A stage that looks at one graph after the other takes the plan apart once and puts it together once, so that its work
grows with the bodies and no faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from onnxfuse.graph.model import Graph, Node, Place
from onnxfuse.planning.plan import Plan
from onnxfuse.planning.weighing import Considered
from onnxfuse.region import Region


@dataclass
class Share:
    """What a plan has of one graph.

    Attributes:
        fusions, considered: as a plan has them, those of the graph.
        new: how many of the fusions the plan did not have before.
    """

    fusions: list[Region] = field(default_factory=list)
    considered: list[Considered] = field(default_factory=list)
    new: int = 0


def shares_of(plan: Plan) -> dict[Place, Share]:
    """The shares of a plan by place; graphs of which it has nothing have none."""
    found: dict[Place, Share] = {}
    for fusion in plan.fusions:
        found.setdefault(fusion.nodes[0].place, Share()).fusions.append(fusion)
    for record in plan.considered:
        found.setdefault(record.nodes[0].place, Share()).considered.append(record)
    return found


def exchanged(
    share: Share, fusions: list[Region], came: Mapping[tuple[Node, ...], str],
    went: Mapping[tuple[Node, ...], tuple[Region, str]],
) -> Share:
    """A share with other regions.

    Args:
        fusions: all that it has now.
        came: why it has those that it did not have, by their nodes of the view.
        went: what took the place of others that were weighed, and why, by theirs.
    """
    considered = []
    for record in share.considered:
        if record.nodes in went and record.verdict in ("chosen", "no-gain"):
            winner, reason = went[record.nodes]
            record = replace(record, verdict="lost", reason=reason, lost_to=winner.view[0].label)
        considered.append(record)
    new = [
        Considered(fusion.view, fusion.rule, fusion.cost, "chosen", came[fusion.view], "")
        for fusion in fusions if fusion.view in came
    ]
    return Share(fusions, [*considered, *new], len(new))


def put_together(plan: Plan, graph: Graph, changed: Mapping[Place, Share], more: Iterable[Considered] = ()) -> Plan:
    """A plan for a graph and its bodies with these shares in place of its own, and more records of other graphs."""
    order = {each.place: number for number, each in enumerate(graph.walk())}
    fusions = [fusion for fusion in plan.fusions if fusion.nodes[0].place not in changed]
    considered = [record for record in plan.considered if record.nodes[0].place not in changed]
    for share in changed.values():
        fusions += share.fusions
        considered += share.considered
    considered += more
    fusions.sort(key=lambda fusion: (order[fusion.nodes[0].place], fusion.nodes[0].index))
    considered.sort(key=lambda record: (order[record.nodes[0].place], record.nodes[0].index, -len(record.nodes)))
    return replace(
        plan, fusions=tuple(fusions), considered=tuple(considered),
        candidates=plan.candidates + sum(share.new for share in changed.values()),
    )
