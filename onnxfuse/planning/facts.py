"""What the planner knows of each node: may it be part of a region, and how are its elements arranged?

A node that can be fused is lowered once on its own; what comes out tells its row structure.  Two nodes fit into one
region where their arrangements agree: that is checked here on sizes alone, cheaply and often, and the schedule has
the last word.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnxfuse.graph.model import Graph, Node
from onnxfuse.ir.tensors import Reduce, postorder
from onnxfuse.lowering.arrangement import Arrangement, arrangement
from onnxfuse.lowering.lower import lower
from onnxfuse.lowering.pull import NO_SCHEDULE
from onnxfuse.operators import is_contraction, lowering_of
from onnxfuse.planning.legality import check_nodes
from onnxfuse.planning.placement import Kind, Placement
from onnxfuse.refusal import Refusal

MOST_OPERANDS = 128
"""Tensors that one node of a region reads, or writes: each neighbour that is tried costs a look at all of them."""


@dataclass(frozen=True)
class Facts:
    """A node that can be fused; ``rows`` is how its reductions arrange elements, ``view`` whether it costs nothing on
    its own, ``transposes`` whether it moves the innermost axis, so that only tiled and transposed kernels run it
    well."""

    rows: Arrangement | None
    view: bool
    transposes: bool = False


def node_facts(node: Node, graph: Graph, placement: Placement) -> Facts | Refusal:
    """Facts of a node of the canonical view, or why no region can hold it."""
    if lowering_of(node) is None:
        return Refusal("no-lowering", f"{node.qualified_op} has no lowering", node.label)
    if is_contraction(node):
        return replace(NO_SCHEDULE, node=node.label)
    if len(node.inputs) > MOST_OPERANDS or len(node.outputs) > MOST_OPERANDS:
        count = max(len(node.inputs), len(node.outputs))
        return Refusal(
            "operands", f"{node.qualified_op} reads or writes {count:,} tensors, and a region's nodes no more than "
            f"{MOST_OPERANDS}", node.label)
    kind = placement.kinds[node]
    if kind in (Kind.HOST, Kind.FOLDED):
        return Refusal("on-host", f"{node.qualified_op} runs on the CPU, or once when the model is loaded", node.label)
    refusal = check_nodes([node], graph.opset)
    if refusal is not None:
        return refusal
    outputs = [value for value in node.outputs if value is not None and (value.consumers or value.is_output)]
    unstated = next((value for value in outputs if value.is_output and value.declared is None), None)
    if unstated is not None and graph.owner is not None and graph.owner.op == "Scan":
        # ONNX Runtime knows the shape of a fused node's output from the file alone, and a Scan needs it beforehand.
        return Refusal(
            "scan-output", f"'{unstated.name}' is an output of a Scan's body, and the model does not state its shape",
            node.label, remedy="state the shapes of the body's outputs",
        )
    lowered = lower([node], outputs, graph)
    if isinstance(lowered, Refusal):
        return lowered
    rows: Arrangement | None = None
    for tensor in postorder(lowered.program.outputs):
        if not isinstance(tensor, Reduce):
            continue
        # The program speaks of sizes by names of its own; nodes are compared by the graph's.
        found = arrangement(tensor.operand.shape, tensor.axes).substitute(lowered.binding.names)
        if rows is not None and rows != found:
            return Refusal("reduction-structure", f"{node.qualified_op} reduces over different rows", node.label)
        rows = found
    return Facts(rows, kind is Kind.VIEW, moves_innermost(node))


def moves_innermost(node: Node) -> bool:
    """Whether a node is a Transpose that moves the innermost axis, those of size one apart."""
    if node.op != "Transpose" or node.domain:
        return False
    source = node.inputs[0]
    shape = source.shape if source is not None else None
    if shape is None:
        return False
    axes = node.attributes.get("perm") or range(len(shape) - 1, -1, -1)
    if sorted(axes) != list(range(len(shape))):
        return False  # ONNX Runtime refuses it
    moved = [axis for axis in axes if shape[axis] != 1]
    return bool(moved) and moved[-1] != max(moved)
