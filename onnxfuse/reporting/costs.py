"""What each operator costs before and after fusion, and the least that the GPU allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import fsum

from onnxfuse.graph.model import Node
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.hardware import Profile
from onnxfuse.region import Region
from onnxfuse.rewriting import FUSED, OperatorRecord

RATES = {"bytes_per_second": 1, "cached_bytes_per_second": 1, "flops_per_second": 1, "matrix_flops_per_second": 0}
"""What a roofline is made of, and the least that each can be; ``MOST``: the most."""

MOST = 1e24

_Cost = tuple[str, float, float, float]
"""What a node or a kernel adds: to which operator, kernels, bytes, seconds."""


def by_operator(before: CostModel, after: CostModel, regions: Sequence[Region]) -> tuple[OperatorRecord, ...]:
    """What each operator costs in one run before fusion, and after it with these regions; the dearest first.

    The columns add up to the totals of the report.
    """
    sides = [_summed(_costs(before, ())), _summed(_costs(after, regions))]
    none = (0, 0, 0.0)
    rows = [
        OperatorRecord(name, *(figure for pair in zip(*(side.get(name, none) for side in sides), strict=True)
                               for figure in pair))
        for name in dict.fromkeys(name for side in sides for name in side)
    ]
    return tuple(sorted(rows, key=lambda row: (-max(row.seconds_before, row.seconds_after), row.operator)))


def roofline(profile: Profile) -> dict[str, int]:
    """What the GPU can do in a second at most: bytes through device memory and through the cache, arithmetic on the
    plain float32 cores and on the matrix units (0: it has none)."""
    rates = (1e9 * profile.bandwidth_gb_s, profile.l2_gain * profile.bandwidth, 1e12 * profile.peaks.float32,
             1e12 * profile.peaks.float16_matrix)
    return {name: max(least, round(rate)) for (name, least), rate in zip(RATES.items(), rates, strict=True)}


def main_node(unit: frozenset[Node], costs: CostModel) -> Node:
    """The node that what runs as one kernel is called by: of those that make it one a product, else what moves most."""
    counted = costs.ledger.node
    return max(costs.core(unit), key=lambda node: (counted(node).product, counted(node).bytes, -node.index))


def _costs(costs: CostModel, regions: Sequence[Region]) -> Iterator[_Cost]:
    ledger = costs.ledger
    inside = {node for region in regions for node in region.nodes}
    rest = [node for graph in ledger.graph.walk() for node in graph.nodes if node not in inside]
    for node in rest:
        counted, runs = ledger.node(node), ledger.runs(node)
        if counted.kernels:
            yield node.qualified_op, runs * counted.kernels, runs * counted.bytes, 0.0
    for unit in costs.units(rest):
        yield main_node(unit, costs).qualified_op, 0, 0, costs.group_seconds(unit)
    for region in regions:
        fused, runs = ledger.region(region), ledger.runs(region.nodes[0])
        yield FUSED, runs * fused.kernels, runs * fused.bytes, costs.run_seconds(region)


def _summed(costs: Iterator[_Cost]) -> dict[str, tuple[int, int, float]]:
    """Kernels, bytes and seconds by operator; exact whatever the order of what is added."""
    parts: dict[str, list[_Cost]] = {}
    for cost in costs:
        parts.setdefault(cost[0], []).append(cost)
    return {
        name: (round(fsum(cost[1] for cost in found)), round(fsum(cost[2] for cost in found)),
               round(fsum(cost[3] for cost in found), 9))
        for name, found in parts.items()
    }
