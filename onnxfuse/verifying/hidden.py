"""What an attention gives where nothing that its mask hides shows: the other answer that is right.

A kernel does not read keys and values that a mask of places hides from all queries of a block.  The nodes multiply
these values by zero, and add a low number to these scores: what is no number shows, and a score that is far larger than
every other outweighs a mask that is finite.  Neither is owed (docs/numerics.md).  So there is a second reference:
without what is not finite, and with masks that no score outweighs.
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
