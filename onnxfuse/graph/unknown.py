"""Why the shape of a value is not known: the first value on the way to it that has none, and what would mend it."""

from __future__ import annotations

from onnxfuse.graph.bodies import taken
from onnxfuse.graph.model import Value, root

EXPORT = "run the exporter with static or symbolic shapes, or onnx.shape_inference"
FIX = (
    "fix the sizes that decide it (python -m onnxruntime.tools.make_dynamic_shape_fixed), or export without a squeeze "
    "of an axis that may be 1"
)


def why_unknown(value: Value) -> tuple[str, str]:
    """A sentence on a value whose rank is not known, and what would mend it."""
    said, first = f"the shape of '{value.name}' is not known", _first(value)
    node = first.producer
    if node is not None and node.op == "If" and not node.domain and taken(node) is None:
        return (f"{said}: no one rank is known to hold for both branches of {node.label}, and sizes do not settle its "
                "condition before a run", FIX)
    return (said if first is value else f"{said}, as that of '{first.name}' is not", EXPORT)


def _first(value: Value) -> Value:
    while True:
        value = root(value)
        outer = value.outer
        node = value.producer
        before = outer if outer is not None else None if node is None or node.has_subgraph else next(
            (read for read in node.inputs if read is not None and read.shape is None), None)
        if before is None or before.shape is not None:
            return value
        value = before
