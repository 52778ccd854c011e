"""What the planner knows of each node: may it be part of a region, and how are its elements arranged?

A node that can be fused is lowered once on its own; what comes out tells its row structure.  Two nodes fit into one
region where their arrangements agree: that is checked here on sizes alone, cheaply and often, and the schedule has
the last word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnxfuse.graph.dims import Dim, product
from onnxfuse.graph.model import Graph, Node
from onnxfuse.lowering.ir import Reduce, postorder
from onnxfuse.lowering.lower import lower
from onnxfuse.lowering.operators import lowering_of
from onnxfuse.planning.legality import check_nodes
from onnxfuse.planning.placement import Kind, Placement
from onnxfuse.refusal import Refusal

FEW_ROWS = 32
LONG_ROW = 16384
"""A row belongs to one block: a few long ones would leave most of the GPU idle."""


@dataclass(frozen=True)
class Rows:
    """``count`` rows of ``length`` elements."""

    count: Dim
    length: Dim


@dataclass(frozen=True)
class Facts:
    """A node that can be fused; ``rows`` is its row structure, ``view`` whether it costs nothing on its own."""

    rows: Rows | None
    view: bool


def node_facts(node: Node, graph: Graph, placement: Placement, sizes: Mapping[str, int]) -> Facts | Refusal:
    """Facts of a node of the canonical view, or why no region can hold it."""
    if lowering_of(node) is None:
        return Refusal("no-lowering", f"{node.qualified_op} has no lowering", node.label)
    kind = placement.kinds[node]
    if kind in (Kind.HOST, Kind.FOLDED):
        return Refusal("on-host", f"{node.qualified_op} runs on the CPU, or once when the model is loaded", node.label)
    refusal = check_nodes([node])
    if refusal is not None:
        return refusal
    outputs = [value for value in node.outputs if value is not None and (value.consumers or value.is_output)]
    lowered = lower([node], outputs, graph)
    if isinstance(lowered, Refusal):
        return lowered
    moved = _moves_last_axis(node)
    if moved is not None:
        return moved
    rows: Rows | None = None
    for tensor in postorder(lowered.program.outputs):
        if not isinstance(tensor, Reduce):
            continue
        shape, first = tensor.operand.shape, min(tensor.axes)
        # The program speaks of sizes by names of its own; nodes are compared by the graph's.
        count, length = (product(part).substitute(lowered.binding.names) for part in (shape[:first], shape[first:]))
        found = Rows(count, length)
        if any(axis not in tensor.axes and shape[axis] != 1 for axis in range(first, len(shape))):
            return Refusal(
                "reduction-axis",
                f"{node.qualified_op} reduces axes {list(tensor.axes)}, which are not its last",
                node.label,
                remedy="transpose so that the reduced axes are the last",
            )
        if rows is not None and rows != found:
            return Refusal("reduction-structure", f"{node.qualified_op} reduces over different rows", node.label)
        rows = found
    if rows is not None and _is_lopsided(rows, sizes):
        return Refusal(
            "few-rows",
            f"{node.qualified_op} reduces {rows.count} rows of {rows.length} elements: "
            "one block a row would leave most of the GPU idle",
            node.label,
        )
    return Facts(rows, kind is Kind.VIEW)


def _is_lopsided(rows: Rows, sizes: Mapping[str, int]) -> bool:
    try:
        count, length = rows.count.evaluate(sizes), rows.length.evaluate(sizes)
    except KeyError:
        return False
    return count < FEW_ROWS and length > LONG_ROW


def _moves_last_axis(node: Node) -> Refusal | None:
    """A transpose of the innermost axis needs a tiled kernel to be fast; the runtime has one."""
    if node.op != "Transpose" or node.domain:
        return None
    source = node.inputs[0]
    shape = source.shape if source is not None else None
    if shape is None:
        return None
    axes = node.attributes.get("perm") or range(len(shape) - 1, -1, -1)
    moved = [axis for axis in axes if shape[axis] != 1]
    if not moved or moved == sorted(moved) or moved[-1] == max(moved):
        return None
    return Refusal(
        "transposing",
        f"Transpose {list(axes)} moves the innermost axis",
        node.label,
        remedy="keep the innermost axis in place",
    )
