"""What a node does to each channel of a value by constants alone: multiply, add, put in another order; or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxfuse.graph.model import Node, Value
from onnxfuse.operators.operands import number_attribute
from onnxfuse.planning.weights.linear import Linear, are_powers

Array = NDArray[Any]

SCALES = frozenset({"Mul", "Div"})
SHIFTS = frozenset({"Add", "Sub", "Sum"})
MOST_CHANNELS = 1 << 16
"""Elements of the largest constant that is read to see whether it can be folded."""

VIEWS = frozenset({"Identity", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})


@dataclass(frozen=True, eq=False)
class Step:
    """A node that gives ``factors * v[order] + addends`` of a value v, each by channel or one number for all.

    Attributes:
        node: the node; value: v, and channel: which of its axes has the channels.
        factors, addends, order: None where it does not do that.
    """

    node: Node
    value: Value
    channel: int | None
    factors: Array | None = None
    addends: Array | None = None
    order: Array | None = None

    @property
    def adds(self) -> bool:
        """Whether it does nothing but add, as a bias does."""
        return self.factors is None and self.order is None

    @property
    def may_be_exact(self) -> bool:
        """Whether it may be folded with no digit of a weight changed."""
        return self.factors is None or (self.addends is None and are_powers(self.factors))

    @property
    def wrong(self) -> str:
        """Why it cannot be folded whatever the weights are; "" where it can."""
        if not all(np.isfinite(each).all() for each in (self.factors, self.addends) if each is not None):
            return f"a constant of {self.node.label} is infinite or no number"
        if self.factors is not None and not self.factors.all():
            return f"{self.node.label} multiplies by zero, which infinite numbers are not to become"
        return ""

    def behind(self, linear: Linear) -> Linear:
        """What computes v with this done to it."""
        if self.order is not None:
            linear = linear.taken(self.order)
        if self.factors is not None:
            linear = linear.scaled(self.factors)
        return linear if self.addends is None else linear.shifted(self.addends)

    def before(self, linear: Linear) -> Linear:
        """What computes of v what another computes of the node's result."""
        if self.addends is not None:
            linear = linear.of_shifted(self.addends)
        if self.factors is not None:
            linear = linear.of_scaled(self.factors)
        return linear if self.order is None else linear.of_taken(self.order)


def step_of(node: Node, value: Value, channel: int | None) -> Step | None:
    """What a node does to a value that it reads, whose channels an axis has (None: it is not known which, and numbers
    for all alone can be told); None where that is something else."""
    if node.domain or sum(each is not None for each in node.outputs) != 1 or value.shape is None:
        return None
    if node.op == "BatchNormalization":
        return _normalising(node, value, channel)
    if node.op == "Gather":
        return _ordering(node, value, channel)
    if node.op == "Neg":
        return Step(node, value, channel, np.array(-1.0))
    if node.op not in SCALES | SHIFTS or len(node.inputs) != 2 or node.inputs[0] is node.inputs[1]:
        return None
    place = 1 if node.inputs[0] is value else 0
    constant = along(node.inputs[place], value, channel)
    if constant is None or (node.op == "Div" and place == 0):
        return None
    if node.op in SCALES:
        with np.errstate(divide="ignore"):
            return Step(node, value, channel, constant if node.op == "Mul" else 1.0 / constant)
    if node.op == "Sub" and place == 0:
        return Step(node, value, channel, np.array(-1.0), constant)
    return Step(node, value, channel, addends=-constant if node.op == "Sub" else constant)


def along(constant: Value | None, value: Value, channel: int | None) -> Array | None:
    """A constant as one number, or one for each channel of a value that it is broadcast to; None where it is none."""
    if constant is None or value.shape is None or constant.shape is None or len(constant.shape) > len(value.shape):
        return None
    array = contents_of(constant)
    if array is None or array.dtype.kind not in "fV":
        return None
    wide = array.astype(np.float64)
    if array.size == 1:
        return wide.reshape(())
    if channel is None or value.shape[channel].value != array.size:
        return None
    shape = (1,) * (len(value.shape) - array.ndim) + array.shape
    return wide.reshape(-1) if shape[channel] == array.size else None


def contents_of(constant: Value) -> Array | None:
    """What a constant of no more than ``MOST_CHANNELS`` elements holds, where the model's file has it."""
    if constant.constant is not None or constant.contents is None or constant.external:
        return constant.constant
    sizes = [size.value or 0 for size in constant.shape or ()]
    return constant.contents() if prod(sizes) <= MOST_CHANNELS else None


def _normalising(node: Node, value: Value, channel: int | None) -> Step | None:
    """What a batch normalisation does when it does not train."""
    parts = [None if each is None else contents_of(each) for each in node.inputs[1:5]]
    if node.attributes.get("training_mode", 0) or channel != 1 or node.inputs[0] is not value or any(
            part is None or part.ndim != 1 for part in parts):
        return None
    scale, shift, mean, variance = (np.asarray(part).astype(np.float64) for part in parts)
    with np.errstate(invalid="ignore", divide="ignore"):
        factors = scale / np.sqrt(variance + number_attribute(node, "epsilon", 1e-5))
        return Step(node, value, channel, factors, shift - mean * factors)


def _ordering(node: Node, value: Value, channel: int | None) -> Step | None:
    """Channels in another order, each once."""
    order, rank = node.inputs[1], len(value.shape or ())
    if channel is None or order is None or order.constant is None or node.inputs[0] is not value:
        return None
    axis = int(node.attributes.get("axis", 0)) % rank
    size = (value.shape or ())[channel].value
    wanted = order.constant.astype(np.int64)
    if axis != channel or wanted.ndim != 1 or len(wanted) != size:
        return None
    wanted = np.where(wanted < 0, wanted + len(wanted), wanted)
    return Step(node, value, channel, order=wanted) if (np.sort(wanted) == np.arange(len(wanted))).all() else None


def viewed(node: Node, value: Value, channel: int | None) -> int | None:
    """Which axis of a view's result has the channels of the value that it is of; None where that is not to be told."""
    result = node.outputs[0]
    if channel is None or result is None or result.shape is None or value.shape is None:
        return None
    if node.op == "Transpose":
        order = node.attributes.get("perm") or list(reversed(range(len(value.shape))))
        return [int(axis) for axis in order].index(channel)
    last = len(value.shape) - 1
    if node.op == "Identity":
        return channel
    if channel == last and result.shape and result.shape[-1] == value.shape[-1]:
        return len(result.shape) - 1
    return None
