"""A model whose attentions have biases: without one ONNX Runtime's CPU provider (1.31) reads where nothing is, and ends
the process with it."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import TensorProto, helper

from onnxfuse.graph.order import MICROSOFT, STANDARD_DOMAINS, graphs_of

BIAS = 2
"""The operand's place."""

OPSET = 17
"""Of standard operators, where a model has none of them."""


def with_biases(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with biases of zeros where ``com.microsoft.Attention`` has none, in bodies and functions too; the model
    itself where all have one."""
    if not any(map(_lacks, _nodes(model))):
        return model
    result = onnx.ModelProto()
    result.CopyFrom(model)
    opset = next((entry.version for entry in model.opset_import if entry.domain in STANDARD_DOMAINS), OPSET)
    for holder in (result, *result.functions):
        if all(entry.domain not in STANDARD_DOMAINS for entry in holder.opset_import):
            holder.opset_import.append(helper.make_opsetid("", opset))
    for holder in _holders(result):
        nodes: list[onnx.NodeProto] = []
        for original in holder.node:
            node = onnx.NodeProto()
            node.CopyFrom(original)
            nodes += [*(_zeros(node) if _lacks(node) else ()), node]
        del holder.node[:]
        holder.node.extend(nodes)
    return result


def _holders(model: onnx.ModelProto) -> list[Any]:
    """Graphs and functions, what is inside of others first: they are written anew."""
    return [*model.functions, *(graph for _, graph in graphs_of(model))][::-1]


def _nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for holder in _holders(model) for node in holder.node]


def _lacks(node: onnx.NodeProto) -> bool:
    return (node.domain, node.op_type) == (MICROSOFT, "Attention") and not any(node.input[BIAS:BIAS + 1])


def _zeros(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Nodes that compute a bias for a node, which reads it then: a row of its weights less itself has their type."""
    weights, stem = node.input[1], f"{next(filter(None, node.output))}.bias"
    place = helper.make_tensor("value", TensorProto.INT64, [], [0])
    node.input[:] = [*node.input[:BIAS], stem, *node.input[BIAS + 1:]]
    return [
        helper.make_node("Constant", [], [f"{stem}.place"], value=place),
        helper.make_node("Gather", [weights, f"{stem}.place"], [f"{stem}.row"], axis=0),
        helper.make_node("Sub", [f"{stem}.row", f"{stem}.row"], [stem]),
    ]
