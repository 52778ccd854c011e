"""What a ``pointwise(...)`` hole may take in."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from onnxfuse.graph.model import Node, Value
from onnxfuse.rules.classes import is_pointwise

MAX_NODES = 256
"""Nodes of the largest hole."""


def pointwise_region(
    value: Value, stops: Collection[Value], matched: Collection[Node], claimed: Collection[Node]
) -> tuple[set[Node], list[Value]]:
    """The largest pointwise region that computes ``value`` and that nothing outside reads.

    Args:
        value: what the region computes.
        stops: values that it ends at.
        matched: nodes that may read the region's values, and that it does not take in.
        claimed: further nodes that it does not take in.

    Returns:
        Its nodes, and the values it reads: those of the same shape first, constants left out.  Where it has no nodes
        that is the value itself.
    """
    members: set[Node] = set()
    queued: set[Node] = set()
    pending: list[tuple[int, Node]] = []

    def visit(read: Value) -> None:
        producer = read.producer
        if producer is not None and not read.is_constant and read not in stops and producer not in queued:
            queued.add(producer)
            heapq.heappush(pending, (-producer.index, producer))

    # last nodes first: all readers of a node are decided before the node itself
    visit(value)
    while pending and len(members) < MAX_NODES:
        _, node = heapq.heappop(pending)
        if not is_pointwise(node) or node.has_subgraph or node in matched or node in claimed:
            continue
        outputs = [output for output in node.outputs if output is not None]
        readers = {reader for output in outputs for reader in output.consumers}
        if any(output.is_output or output in stops for output in outputs):
            continue
        if any(reader not in members and reader not in matched and not reader.dead for reader in readers):
            continue
        members.add(node)
        for read in node.reads():
            visit(read)
    if not members:
        return members, [value]
    frontier = dict.fromkeys(
        read for node in sorted(members, key=lambda node: node.index) for read in node.reads()
        if read.producer not in members and not read.is_constant
    )
    return members, sorted(frontier, key=lambda read: (read.shape != value.shape, -(read.rank or 0)))
