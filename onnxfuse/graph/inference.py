"""onnx's own inference, asked only what it lives to answer.

It is C++ in this process, and a few operators end the process (onnx 1.23): some where the type of an input is unknown,
some on attributes that break the rules of the standard, Slice on a size below zero, which the inference of other
operators gives for odd operands.  ``left_out`` tells which nodes to keep from it; their types stay unknown.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from onnxfuse.graph.order import subgraphs

_UNTYPED = frozenset({"EyeLike", "RegexFullMatch", "TreeEnsemble", "DictVectorizer", "LabelEncoder"})
"""Operators that end the process where the type of an input is unknown."""


def left_out(node: onnx.NodeProto, typed: bool) -> bool:
    """Whether onnx's inference might not survive a node.

    Args:
        typed: whether every input is known to have a type, and no size is below zero.
    """
    if node.op_type in _UNTYPED or node.op_type == "Slice":
        return not typed
    numbers = {attribute.name: attribute.i for attribute in node.attribute}
    if node.op_type == "Split":
        return bool(numbers.get("num_outputs", len(node.output)) != len(node.output))
    return bool(node.op_type == "GatherND" and numbers.get("batch_dims", 0) < 0)


def leave_out(nodes: Iterable[onnx.NodeProto]) -> None:
    """Rename, in place, operators that a whole model's inference might not survive: what no schema knows is skipped."""
    for node in nodes:
        for graph in subgraphs(node):
            leave_out(graph.node)
        if left_out(node, typed=False):
            node.op_type = f"{node.op_type}?"
