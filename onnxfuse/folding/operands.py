"""The constant that says what a computed size operand says, whatever the sizes of a run are.

An operand is known as sizes over the symbols of the model (``Value.elements``).  Where all of them are numbers, so is
the constant.  A few operators have words for sizes that are none:

    Reshape   0 copies the input's size of the same axis (not under allowzero=1, which then is left out); -1, once, is
              what is left.  ONNX Runtime refuses -1 beside a size of zero: all others must be above it (``positive``).
    Expand    1 leaves the input's size.
    Slice     The largest integer is past the end of the axis; a negative one counts from there.

A word is only taken where the sizes are provably equal; as a last check the operator's shape function must infer the
very same sizes from the constant as it did from the operand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import helper

from onnxfuse.folding.positive import Positive
from onnxfuse.graph.context import elements_of
from onnxfuse.graph.dims import Dim, broadcast, dim
from onnxfuse.graph.model import Graph, Node, Shape, Value
from onnxfuse.operators.inference import output_types

Numbers = Sequence[int]
Open = Sequence[int | None]
"""Numbers, and None for a size that is not known as one."""

ANY = Positive()
"""For a node without a graph around it: sizes may be zero unless they are sums with a number."""


@dataclass(frozen=True)
class Constant:
    """What may stand for an operand: its contents, and an attribute of the node that must go ("" for none)."""

    array: np.ndarray
    without: str = ""


def constant_operand(node: Node, place: int, graph: Graph, positive: Positive = ANY) -> Constant | None:
    """The constant in the operator's own words that may stand for an operand of a node, or None.

    It has the operand's type and sizes.  An operand all of whose elements are numbers is a ``plain_constant`` for
    every reader.
    """
    value, source = node.inputs[place], node.inputs[0]
    words = None if node.domain else _WORDS.get((node.op, place))
    if words is None or value is None or value.elements is None or value.rank != 1:
        return None
    if source is None or source.shape is None:
        return None
    for numbers, without in words(node, value, source.shape, positive):
        array = _array(value, numbers)
        if array is not None and _same_sizes(node, place, Constant(array, without), graph):
            return Constant(array, without)
    return None


def plain_constant(value: Value) -> np.ndarray | None:
    """A value's contents where inference knows all of them as numbers, and its type holds them."""
    if value.elements is None or value.shape is None:
        return None
    numbers = _known([element.value for element in value.elements])
    return None if numbers is None else _array(value, numbers)


def _known(numbers: Open) -> Numbers | None:
    known = [number for number in numbers if number is not None]
    return known if len(known) == len(numbers) else None


def _array(value: Value, numbers: Numbers) -> np.ndarray | None:
    assert value.dtype is not None and value.shape is not None
    shape = _known([size.value for size in value.shape])
    if shape is None or int(np.prod(shape, dtype=np.int64)) != len(numbers):
        return None
    kind = helper.tensor_dtype_to_np_dtype(value.dtype)
    low, high = (0, 1) if kind == np.bool_ else (int(np.iinfo(kind).min), int(np.iinfo(kind).max))
    if any(not low <= number <= high for number in numbers):
        return None
    return np.array(numbers, kind).reshape(shape)


Found = list[tuple[Numbers, str]]
"""Ways to say it: numbers, and the attribute that must go; the first that holds is taken."""


def _reshape(node: Node, operand: Value, source: Shape, positive: Positive) -> Found:
    result, target = node.outputs[0], [size.value for size in operand.elements or ()]
    if result is None or result.shape is None or len(result.shape) != len(target):
        return []
    copies = [axis < len(source) and source[axis] == size for axis, size in enumerate(result.shape)]
    if not node.attributes.get("allowzero", 0):
        numbers = [0 if size is None and copied else size for size, copied in zip(target, copies, strict=True)]
        if -1 in numbers and None in numbers:
            # The open size takes over the -1; were it zero, the operand would copy instead.
            if not all(size in positive for size, number in zip(result.shape, numbers, strict=True) if number is None):
                return []
            numbers[numbers.index(-1)] = _told(result.shape, numbers.index(-1), copies)
        found = _with_rest(numbers, result.shape, copies, positive)
        return [] if found is None else [(found, "")]
    if -1 in target:
        if not _cancels(source, result.shape, target.index(-1)):
            return []
        target[target.index(-1)] = result.shape[target.index(-1)].value
    found = _with_rest(target, result.shape, [False] * len(target), positive)
    if found is not None:
        return [(found, "")]
    if 0 in target:
        return []  # a zero that is meant as one cannot be told from a copy
    numbers = [0 if size is None and copied else size for size, copied in zip(target, copies, strict=True)]
    found = _with_rest(numbers, result.shape, copies, positive)
    return [] if found is None else [(found, "allowzero")]


def _told(result: Shape, axis: int, copies: Sequence[bool]) -> int | None:
    """The size that -1 stands for, in numbers."""
    size = result[axis].value
    return 0 if size is None and copies[axis] else size


def _cancels(source: Shape, result: Shape, axis: int) -> bool:
    """Whether -1 at an axis stands for a number whatever the other sizes are.

    Under allowzero=1 ONNX Runtime divides the sizes that are not zero: those that are must be the same on both sides.
    """
    rest = list(source)
    for size in (*result[:axis], *result[axis + 1:]):
        if size.value is None:
            if size not in rest:
                return False
            rest.remove(size)
    return all(size.value is not None and size.value > 0 for size in (*rest, result[axis]))


def _with_rest(numbers: Open, result: Shape, copies: Sequence[bool], positive: Positive) -> Numbers | None:
    """A Reshape's target in which the one size that is open, if any, is -1: all others are above zero then.

    Args:
        numbers: the target, None for an open size; result: the sizes that follow.
        copies: the axes where zero copies the input's size.
    """
    if None not in numbers:
        return _known(numbers)
    if list(numbers).count(None) > 1 or -1 in numbers:
        return None
    for axis, number in enumerate(numbers):
        if number == 0 and not (copies[axis] and result[axis] in positive):
            return None
    return [-1 if number is None else number for number in numbers]


def _expand(node: Node, operand: Value, source: Shape, _: Positive) -> Found:
    target = operand.elements or ()
    result: list[int | None] = []
    for axis, size in enumerate(target):
        at = axis - (len(target) - len(source))
        kept = size.value is None and at >= 0 and broadcast(source[at], size) == source[at]
        result.append(1 if kept else size.value)
    numbers = _known(result)
    return [] if numbers is None else [(numbers, "")]


def _slice(node: Node, operand: Value, source: Shape, _: Positive) -> Found:
    bounds = operand.elements or ()
    axes = _given(node, 3, range(len(bounds)))
    if axes is None or len(axes) != len(bounds) or operand.dtype is None:
        return []
    last = int(np.iinfo(helper.tensor_dtype_to_np_dtype(operand.dtype)).max)
    numbers = _known([_bound(source[axis], bound, last) for axis, bound in zip(axes, bounds, strict=True)])
    return [] if numbers is None else [(numbers, "")]


def _bound(size: Dim, bound: Dim, last: int) -> int | None:
    """A start or an end of a slice as a number, whatever the size of the axis is."""
    if bound.value is not None:
        return bound.value
    if (bound - size).non_negative():
        return last
    # A bound below zero would count from the end once more.
    return (bound - size).value if bound.non_negative() else None


def _given(node: Node, place: int, default: Numbers) -> Numbers | None:
    """An integer operand as numbers; ``default`` where it is absent, None where they are not known."""
    value = node.inputs[place] if place < len(node.inputs) else None
    if value is None:
        return default
    elements = elements_of(value)
    return None if elements is None else _known([element.value for element in elements])


_WORDS: dict[tuple[str, int], Callable[[Node, Value, Shape, Positive], Found]] = {
    ("Reshape", 1): _reshape, ("Expand", 1): _expand, ("Slice", 1): _slice, ("Slice", 2): _slice,
}


def _same_sizes(node: Node, place: int, constant: Constant, graph: Graph) -> bool:
    """Whether the node's results have the same sizes with a constant in place of an operand."""
    value = node.inputs[place]
    assert value is not None
    elements = tuple(dim(int(number)) for number in constant.array.reshape(-1))
    stand_in = Value(value.name, value.dtype, value.shape, constant.array, True, elements)
    changed = replace(
        node, inputs=(*node.inputs[:place], stand_in, *node.inputs[place + 1:]),
        attributes={name: content for name, content in node.attributes.items() if name != constant.without},
    )
    found = output_types(changed, graph)
    return all(output is None or output.shape == kind.shape for output, kind in zip(node.outputs, found, strict=True))
