"""What lowerings ask of their node: operands, attributes, shapes of results."""

from __future__ import annotations

import numpy as np

from onnxfuse.graph.model import Node, Shape, Value
from onnxfuse.ir.context import LoweringContext, Unlowerable
from onnxfuse.ir.scalars import UINT8
from onnxfuse.ir.tensors import Expand, Fill, Input, Map, Permute, Reshape, Slice, Tensor
from onnxfuse.refusal import Refusal


def operand(node: Node, context: LoweringContext, place: int) -> Tensor:
    """Input ``place`` of a node as a tensor; it must be there."""
    return context.tensor(present(node, context, place))


def optional(node: Node, context: LoweringContext, place: int) -> Tensor | None:
    """Input ``place`` of a node as a tensor, or None where it is absent."""
    value = node.inputs[place] if place < len(node.inputs) else None
    return None if value is None else context.tensor(value)


def quantised_by(node: Node, context: LoweringContext, place: int) -> Tensor:
    """A scale or zero point of quantised numbers.  Each layer has numbers of its own, and equal layers one kernel that
    reads them; in its text are zero points that many layers share: 0, and 128 of unsigned bytes."""
    value = present(node, context, place)
    shared = (0, 128) if value.dtype == UINT8 else (0,)
    return context.tensor(value, read=value.constant is not None and not np.isin(value.constant, shared).all())


def present(node: Node, context: LoweringContext, place: int) -> Value:
    value = node.inputs[place] if place < len(node.inputs) else None
    if value is None:
        raise context.refuse("missing-input", f"{node.qualified_op} lacks its input {place}")
    return value


def number_attribute(node: Node, name: str, default: float) -> float:
    """A float attribute; its default is a float32, as all attributes are."""
    return float(np.float32(node.attributes.get(name, default)))


def integer_attribute(node: Node, name: str, default: int) -> int:
    """An integer attribute."""
    return int(node.attributes.get(name, default))


def axis_of(node: Node, name: str, default: int, rank: int) -> int:
    """An axis attribute, counted from the front.

    Raises:
        Unlowerable: there is no such axis.
    """
    axis = integer_attribute(node, name, default)
    if not -rank <= axis < rank:
        raise Unlowerable(Refusal("axis", f"{node.qualified_op} has {name} {axis}, and a tensor of {rank} axes",
                                  node.label))
    return axis + rank if axis < 0 else axis


def result_shape(node: Node, context: LoweringContext, place: int = 0) -> Shape:
    """The inferred shape of an output."""
    value = node.outputs[place]
    if value is None:
        raise context.refuse("missing-output", f"{node.qualified_op} lacks its output {place}")
    return context.shape(value)


def shape_operands(node: Node, context: LoweringContext, first: int) -> None:
    """Note that the remaining inputs only decide sizes: they are operands of the body, not of the kernel."""
    for value in node.inputs[first:]:
        if value is not None:
            context.note_size(value)


def is_computed(tensor: Tensor) -> bool:
    """Whether a region computes a tensor, rather than reads it, however it lies."""
    while True:
        match tensor:
            case Input() | Fill():
                return False
            case Permute() | Reshape() | Slice() | Expand():
                tensor = tensor.operand
            case Map(function="narrow"):
                (tensor,) = tensor.operands
            case _:
                return True
