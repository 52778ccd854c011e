"""Integer arithmetic on sizes: what elementwise operators make of contents that are followed."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from onnxfuse.graph.context import MAX_ELEMENTS, TypeContext
from onnxfuse.graph.dims import Dim, dim, maximum, minimum
from onnxfuse.graph.model import Shape

Elements = tuple[Dim, ...]


def _quotient(a: Dim, b: Dim) -> Dim | None:
    """ONNX's integer division, which rounds toward zero."""
    exact = a.divide(b)
    if exact is not None:
        return exact
    if b.value is None or b.value <= 0:
        return a // b if a.non_negative() and b.non_negative() else None
    return maximum(a, 0) // b - maximum(-a, 0) // b


def _remainder(a: Dim, b: Dim) -> Dim | None:
    return None if b == 0 else a % b


def _sign(a: Dim) -> int | None:
    """-1, 0, 1 where provable, for symbols of any size."""
    if a.value is not None:
        return (a.value > 0) - (a.value < 0)
    if (a - 1).non_negative():
        return 1
    return -1 if (-a - 1).non_negative() else None


def _equal(a: Dim, b: Dim) -> Dim | None:
    sign = _sign(a - b)
    return None if sign is None else dim(int(sign == 0))


def _greater(a: Dim, b: Dim) -> Dim | None:
    if (b - a).non_negative():
        return dim(0)
    return dim(1) if _sign(a - b) == 1 else None


def _at_least(a: Dim, b: Dim) -> Dim | None:
    if (a - b).non_negative():
        return dim(1)
    return dim(0) if _sign(a - b) == -1 else None


def _power(a: Dim, b: Dim) -> Dim | None:
    if b.value is None or not 0 <= b.value <= 8:
        return None
    return prod([a] * b.value, start=dim(1))


ARITHMETIC: dict[str, Callable[[Dim, Dim], Dim | None]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": _quotient,
    "Mod": _remainder,
    "Min": minimum,
    "Max": maximum,
    "Sum": lambda a, b: a + b,
    "Pow": _power,
    "Equal": _equal,
    "Greater": _greater,
    "Less": lambda a, b: _greater(b, a),
    "GreaterOrEqual": _at_least,
    "LessOrEqual": lambda a, b: _at_least(b, a),
    "And": lambda a, b: a * b,
    "Or": maximum,
}


def spread(elements: Elements, shape: Shape, target: Shape) -> Elements | None:
    """Contents of a tensor broadcast to a shape; None where a size is symbolic or the result is large."""
    sizes = [size.value for size in target]
    own = [dim(1)] * (len(target) - len(shape)) + list(shape)
    if None in sizes or any(size.value is None for size in own):
        return None
    count = prod(size for size in sizes if size is not None)
    if count > MAX_ELEMENTS:
        return None
    strides, stride = [0] * len(own), 1
    for axis in reversed(range(len(own))):
        size = own[axis].value or 0
        strides[axis] = 0 if size == 1 else stride
        stride *= size
    if stride != len(elements):
        return None
    result = []
    for position in range(count):
        at = 0
        for axis in reversed(range(len(own))):
            position, index = divmod(position, sizes[axis] or 1)
            at += index * strides[axis]
        result.append(elements[at])
    return tuple(result)


def operands(context: TypeContext, shape: Shape | None, first: int = 0) -> list[Elements] | None:
    """Contents of all inputs from ``first`` on, broadcast to the result's shape."""
    if shape is None:
        return None
    result = []
    for index in range(first, len(context.node.inputs)):
        elements, own = context.elements(index), context.shape(index)
        if elements is None or own is None:
            return None
        wide = spread(elements, own, shape)
        if wide is None:
            return None
        result.append(wide)
    return result


def folded(operation: Callable[[Dim, Dim], Dim | None], parts: list[Elements]) -> Elements | None:
    result: list[Dim] = list(parts[0])
    for part in parts[1:]:
        step = [operation(a, b) for a, b in zip(result, part, strict=True)]
        result = [size for size in step if size is not None]
        if len(result) < len(step):
            return None
    return tuple(result)
