"""Checks at the border of the stage: a fault here is onnxfuse's own, never the user's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from onnxfuse.lowering import launch
from onnxfuse.rewriting.index import ModelIndex
from onnxfuse.rewriting.located import LocatedRegion


class InvariantError(RuntimeError):
    """An earlier stage handed over something that cannot be rewritten; the text says what and where."""


def require(condition: bool, message: str) -> None:
    """Raise ``InvariantError`` with ``message`` where ``condition`` does not hold."""
    if not condition:
        raise InvariantError(message)


def check_body(index: ModelIndex, region: LocatedRegion) -> None:
    """A region by itself: it reads exactly what it says it reads and computes what it says it computes."""
    label, nodes, inlined = region.label, region.nodes, region.inlined
    hosts, tensors, outputs = region.hosts, region.tensors, region.outputs
    require(bool(nodes), f"{label}: the region has no nodes")
    require(len(hosts) <= launch.HOST_INPUTS, f"{label}: {len(hosts)} host inputs, at most {launch.HOST_INPUTS}")
    require(bool(tensors), f"{label}: the region has no tensor input")
    require(bool(outputs), f"{label}: the region has no output")
    for kind, names in (("host", hosts), ("tensor", tensors), ("inlined", inlined), ("output", outputs)):
        require(len(set(names)) == len(names), f"{label}: a value stands twice among its {kind} values: {[*names]}")
    produced = {name for position in nodes for name in index.nodes[position].output if name}
    for position in nodes:
        node = index.nodes[position]
        require(not index.has_subgraph(position), f"{label}: node {node.name!r} ({node.op_type}) holds a subgraph")
    reads = {name for position in nodes for name in index.reads[position]} - produced
    given = {*hosts, *tensors, *inlined} - region.folded
    require(reads == given, f"{label}: reads {sorted(reads - given)} that it does not list, "
                            f"lists {sorted(given - reads)} that it does not read")
    require(not set(outputs) - produced, f"{label}: does not compute its outputs {sorted(set(outputs) - produced)}")
    both = set(inlined) & {*hosts, *tensors}
    require(not both, f"{label}: inlines and reads {sorted(both)}")
    for name in inlined:
        require(index.is_constant(name), f"{label}: inlines {name!r}, which is no constant")


def check_cover(
    index: ModelIndex, label: str, nodes: Collection[int], outputs: Collection[str], users: dict[str, list[int]],
    holders: Mapping[int, Sequence[Collection[int]]],
) -> None:
    """Every value of the region that is used outside is an output, or computed again where it is used.

    Args:
        users: the nodes that will read each value, those of other regions for what they inline left out.
        holders: the nodes of each region that a node is in; nothing for nodes that stay.
    """
    for position in filter(holders.__contains__, nodes):
        for name in index.nodes[position].output:
            if not name or name in outputs:
                continue
            require(name not in index.outputs, f"{label}: {name!r} is an output of the graph and vanishes")
            outside = [
                user for user in users.get(name, ())
                if user not in nodes and not (user in holders and all(position in held for held in holders[user]))
            ]
            readers = [index.nodes[user].name for user in outside]
            require(not outside, f"{label}: {name!r} vanishes and nodes {readers} read it")
