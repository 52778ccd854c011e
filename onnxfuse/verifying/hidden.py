"""What an attention gives where nothing that its mask hides shows: the other answer that is right.

A kernel does not read keys and values that a mask of places hides from all queries of a block.  The nodes multiply
these values by zero, and add a low number to these scores: what is no number shows, and a score that is far larger than
every other outweighs a mask that is finite.  Neither is owed (docs/numerics.md).  So there is a second reference:
without what is not finite, and with masks that no score outweighs.

Nor is what a guard's zeros make of values that are no numbers: a row of scores that are none, for which the model puts
weights of zero, is zeros in a kernel, whatever stands in the values.  That is a third reference.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from onnxfuse.verifying.feeds import is_float

Array = NDArray[Any]

LOWEST = -1e4
"""A finite number from which on down it is a mask's, as docs/numerics.md says."""

_OUTWEIGHED = -1e30
"""What is lower than every score, and no infinity: it may be multiplied by zero."""

_PLACES = frozenset({"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Trilu"})
"""Operators that masks of places are made of."""

_CONDITIONS = frozenset({"And", "Or", "Not", "Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Expand"})
"""Operators through which a guard's condition may go."""


def may_hide(body: onnx.ModelProto) -> bool:
    """Whether the body of a fused node may be an attention with a mask of places."""
    return any(node.op_type in _PLACES or _flag(node) for node in body.graph.node)


def _flag(node: onnx.NodeProto) -> bool:
    return any(attribute.name in ("is_causal", "unidirectional") and attribute.i for attribute in node.attribute)


def outweighed_model(lifted: onnx.ModelProto) -> onnx.ModelProto:
    """A body in float64 with the finite numbers of its masks lower."""
    result = onnx.ModelProto()
    result.CopyFrom(lifted)
    for node in result.graph.node:
        for attribute in node.attribute:
            if node.op_type in ("Constant", "ConstantOfShape") and attribute.HasField("t"):
                numbers = numpy_helper.to_array(attribute.t)
                if numbers.dtype == np.float64:
                    attribute.t.CopyFrom(numpy_helper.from_array(_lower(numbers)))
            elif node.op_type == "Constant" and attribute.name == "value_float":
                attribute.CopyFrom(helper.make_attribute(attribute.name, float(_lower(np.array(attribute.f)))))
    return result


def guarded_model(lifted: onnx.ModelProto) -> onnx.ModelProto | None:
    """A body in float64 in which what is weighted behind a guard against what is no number is finite; None where there
    is no such guard."""
    result = onnx.ModelProto()
    result.CopyFrom(lifted)
    result.graph.ClearField("node")
    guards: set[str] = set()
    weights: set[str] = set()
    found = False
    for original in lifted.graph.node:
        node = result.graph.node.add()
        node.CopyFrom(original)
        if original.op_type == "IsNaN" or (original.op_type in _CONDITIONS and not guards.isdisjoint(original.input)):
            guards.update(original.output)
        elif original.op_type == "Where" and original.input[0] in guards:
            weights.update(original.output)
        elif _multiplies(original) and not weights.isdisjoint(original.input):
            result.graph.node.remove(node)
            for place, name in enumerate(original.input):
                if name not in weights:
                    original = _with_finite(result.graph, original, place)
            result.graph.node.add().CopyFrom(original)
            found = True
        elif not weights.isdisjoint(original.input):
            weights.update(original.output)
    return result if found else None


def _with_finite(graph: onnx.GraphProto, node: onnx.NodeProto, place: int) -> onnx.NodeProto:
    """A node whose operand at that place has zeros for what is not finite; that is added to the graph."""
    name, stem = node.input[place], f"{node.output[0]}.finite{place}"
    graph.node.extend([
        helper.make_node("Sub", [name, name], [f"{stem}.rest"]),  # no number but for finite ones
        helper.make_node("IsNaN", [f"{stem}.rest"], [f"{stem}.endless"]),
        helper.make_node("Constant", [], [f"{stem}.zero"],
                         value=numpy_helper.from_array(np.zeros((), np.float64))),
        helper.make_node("Where", [f"{stem}.endless", f"{stem}.zero", name], [stem]),
    ])
    result = onnx.NodeProto()
    result.CopyFrom(node)
    result.input[place] = stem
    return result


def _multiplies(node: onnx.NodeProto) -> bool:
    return not node.domain and node.op_type in ("MatMul", "Einsum", "Gemm")


def _lower(numbers: Array) -> Array:
    result: Array = np.where(np.isfinite(numbers) & (numbers <= LOWEST), _OUTWEIGHED, numbers)
    return result


def shown(feeds: Mapping[str, Array], masks: Container[str]) -> dict[str, Array]:
    """Inputs without what is not finite; ``masks``: those in which minus infinity has its meaning."""
    result = dict(feeds)
    for name, array in feeds.items():
        if is_float(array):
            kept = np.isfinite(array) | (np.isneginf(array.astype(np.float64)) if name in masks else False)
            result[name] = np.where(kept, array, np.zeros((), array.dtype))
    return result
