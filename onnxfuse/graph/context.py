"""What a node's types and sizes are inferred from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import onnx

from onnxfuse.graph.dims import Dim, SizeTooLargeError, broadcast, dim, product, symbol
from onnxfuse.graph.model import Ask, Assumption, Demand, Node, Shape, Value

MAX_ELEMENTS = 256
"""Integer tensors of more elements than this are not followed as sizes."""

MOST_AXES = 64
"""Tensors of more axes than this have an unknown rank: NumPy takes no more, and a few bytes can ask for any number."""

INTEGERS = frozenset(
    onnx.TensorProto.DataType.Value(name)
    for name in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "BOOL")
)
"""Element types whose contents are followed as sizes; False is 0 and True is 1."""

BOOL = int(onnx.TensorProto.BOOL)
INT64 = int(onnx.TensorProto.INT64)
FLOAT = int(onnx.TensorProto.FLOAT)


class Type(NamedTuple):
    """What is known of a value: element type, sizes, and contents as sizes; None where unknown."""

    dtype: int | None = None
    shape: Shape | None = None
    elements: tuple[Dim, ...] | None = None


Contents = np.ndarray[Any, np.dtype[Any]]
"""Contents as sizes, an array of ``Dim``: what moves elements moves these."""


@dataclass
class TypeContext:
    """A node on its way through inference.

    Attributes:
        node: the node.
        opset: version of its domain's operators.
        assumptions: where hints of the model file were used; filled by ``meet`` and ``unknown``.
        demands: what the node asks of sizes; filled by ``meet`` and ``demand``.
    """

    node: Node
    opset: int
    assumptions: list[Assumption] = field(default_factory=list)
    demands: list[Demand] = field(default_factory=list)

    def value(self, index: int) -> Value | None:
        """The value at an input, None where absent."""
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def has(self, index: int) -> bool:
        """Whether an input is there."""
        return self.value(index) is not None

    def dtype(self, index: int = 0) -> int | None:
        """Element type of an input."""
        value = self.value(index)
        return None if value is None else value.dtype

    def shape(self, index: int = 0) -> Shape | None:
        """Sizes of an input."""
        value = self.value(index)
        return None if value is None else value.shape

    def rank(self, index: int = 0) -> int | None:
        """Number of axes of an input."""
        shape = self.shape(index)
        return None if shape is None else len(shape)

    def elements(self, index: int) -> tuple[Dim, ...] | None:
        """Contents of an integer input as sizes."""
        value = self.value(index)
        return None if value is None else elements_of(value)

    def contents(self, index: int) -> Contents | None:
        """The same as an array of the input's sizes; None where these are not all numbers."""
        elements, shape = self.elements(index), self.shape(index)
        sizes = [size.value for size in shape or ()]
        if elements is None or shape is None or None in sizes:
            return None
        array = np.empty(len(elements), object)
        array[:] = elements
        return array.reshape([size for size in sizes if size is not None])

    def integers(self, index: int) -> list[int] | None:
        """Contents of an integer input where they are plain numbers."""
        elements = self.elements(index)
        if elements is None:
            return None
        numbers = [element.value for element in elements]
        return None if None in numbers else [number for number in numbers if number is not None]

    def count(self, index: int) -> int | None:
        """How many numbers a list that is an input holds, as of the sizes that a result shall have."""
        length = self.shape(index)
        return None if length is None or len(length) != 1 else length[0].value

    def constant(self, index: int) -> np.ndarray | None:
        """Contents of a small constant input."""
        value = self.value(index)
        return None if value is None else value.constant

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute, or the default."""
        return self.node.attributes.get(name, default)

    def axis(self, rank: int, default: int, name: str = "axis") -> int:
        """An axis attribute, counted from the front; ``rank`` itself is one that comes after all.

        Raises:
            ValueError: there is no such axis.
        """
        axis = int(self.attribute(name, default))
        if not -rank <= axis <= rank:
            raise ValueError(f"axis {axis} of rank {rank}")
        return axis + rank if axis < 0 else axis

    def declared(self, axis: int, output: int = 0, rank: int | None = None) -> Dim | None:
        """The size that the model file states for an axis of an output, where its rank is the one expected."""
        value = self.node.outputs[output] if output < len(self.node.outputs) else None
        if value is None or value.declared is None or (rank is not None and len(value.declared) != rank):
            return None
        return value.declared[axis]

    def unknown(self, axis: int, rank: int, output: int = 0) -> Dim:
        """A size that the operators do not tell: what the model file states, else a symbol of its own."""
        value = self.node.outputs[output] if output < len(self.node.outputs) else None
        name = value.name if value is not None else f"{self.node.label}.{output}"
        fresh = symbol(f"{name}.{axis}")
        declared = self.declared(axis, output, rank)
        if declared is None or declared == fresh:
            return fresh
        self.assumptions.append(Assumption(name, axis, declared, fresh))
        return declared

    def unknown_shape(self, rank: int, output: int = 0) -> Shape:
        """Sizes of which nothing but the rank is known.

        Raises:
            ValueError: more axes than are followed.
        """
        if rank > MOST_AXES:
            raise ValueError(f"{rank} axes")
        return tuple(self.unknown(axis, rank, output) for axis in range(rank))

    def demand(self, left: Dim, right: Dim, kind: Ask = "equal") -> None:
        """Note that the node fails where two sizes do not agree; not what holds for all sizes, or for none."""
        same = left == right or (kind == "broadcast" and dim(1) in (left, right))
        if not same and (left.value is None or right.value is None):
            self.demands.append(Demand(self.node.label, left, right, kind))

    def demand_elements(
        self, before: Sequence[Dim], after: Sequence[Dim], kind: Ask
    ) -> None:
        """The same of numbers of elements, where these can be followed; sizes on both sides cancel."""
        rest, others = list(before), []
        for size in after:
            if size in rest:
                rest.remove(size)
            else:
                others.append(size)
        with suppress(SizeTooLargeError):
            self.demand(product(rest), product(others), kind)

    def meet(self, *shapes: Shape | None, output: int = 0, front: int = 0, rank: int | None = None) -> Shape | None:
        """The sizes that tensors have together under broadcasting; None where one of them is unknown.

        Where two different symbols meet, either may be 1, and the model file decides if it states one of the two.

        Args:
            output: which output of the node the sizes are of.
            front: the output's axis that the first one is.
            rank: the output's rank, where these are not all its axes.
        """
        known = [shape for shape in shapes if shape is not None]
        if len(known) < len(shapes):
            return None
        length = max(map(len, known), default=0)
        result = []
        for axis in range(length):
            size = dim(1)
            for shape in known:
                at = axis - (length - len(shape))
                if at >= 0:
                    size = self._join(size, shape[at], front + axis, output, length if rank is None else rank)
            result.append(size)
        return tuple(result)

    def _join(self, a: Dim, b: Dim, axis: int, output: int, rank: int) -> Dim:
        self.demand(a, b, "broadcast")
        joined = broadcast(a, b)
        if joined in (a, b):
            return joined
        declared = self.declared(axis, output, rank)
        value = self.node.outputs[output] if output < len(self.node.outputs) else None
        if value is None or declared not in (a, b):
            return joined
        assert declared is not None
        self.assumptions.append(Assumption(value.name, axis, declared, joined))
        return declared


def elements_of(value: Value) -> tuple[Dim, ...] | None:
    """Contents of a small integer or boolean value as sizes, from what was inferred or from the constant."""
    if value.elements is not None:
        return value.elements
    constant = value.constant
    if constant is None or constant.size > MAX_ELEMENTS or constant.dtype.kind not in "iub":
        return None
    return tuple(dim(int(number)) for number in constant.reshape(-1))


def flat(contents: Contents | None) -> tuple[Dim, ...] | None:
    """Contents in one row, where they are not too many."""
    return None if contents is None or contents.size > MAX_ELEMENTS else tuple(contents.reshape(-1))


TypeFunction = Callable[["TypeContext"], Sequence[Type]]
"""Types of a node's outputs from those of its inputs."""


def same(context: TypeContext) -> list[Type]:
    """Type and sizes of the first input."""
    return [Type(context.dtype(), context.shape())]
