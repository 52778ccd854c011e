"""What the lowering of one operator may ask for, and how it builds tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from onnxfuse.graph.dims import Dim, broadcast, dim, product
from onnxfuse.graph.model import Node, Shape, Value
from onnxfuse.graph.unknown import why_unknown
from onnxfuse.ir.scalars import BOOL, DOUBLE, FLOAT, FUNCTIONS, INT64, TYPES
from onnxfuse.ir.tensors import (
    Expand,
    Fill,
    Input,
    Map,
    Number,
    Reduce,
    Reshape,
    Size,
    Tensor,
    reduced_shape,
    scalar,
)
from onnxfuse.refusal import Refusal

MOST_NEUTRAL = 4096
"""Elements of an operand of which it is looked at whether they change anything: bodies hold it as the model did."""


class Unlowerable(Exception):  # noqa: N818, it is no error of anybody's
    """Carries a refusal out of the depths of the lowering; ``lower`` turns it into a value again."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass
class LoweringContext:
    """The region as far as it is lowered.

    Attributes:
        opset: version of the standard operators.
        rename: gives the size that stands for a graph size inside the region.
        tensors: tensors by value, inputs and results alike.
        inputs: values that the kernel reads, in order.
        sized: values whose contents only decide sizes; they are operands of the body and not of the kernel.
        inlined: constants that became numbers in the kernel's text: those of one element, and truths of one value; and
            those that change nothing.
    """

    opset: int
    rename: Callable[[Dim], Dim] = lambda size: size
    tensors: dict[Value, Tensor] = field(default_factory=dict)
    inputs: list[Value] = field(default_factory=list)
    sized: list[Value] = field(default_factory=list)
    inlined: list[Value] = field(default_factory=list)
    node: Node | None = None

    def refuse(self, code: str, message: str, remedy: str = "") -> Unlowerable:
        """The refusal of the node at hand, to be raised."""
        return Unlowerable(Refusal(code, message, self.node.label if self.node else "", remedy=remedy))

    def shape(self, value: Value) -> Shape:
        """Sizes of a value in the region's symbols."""
        if value.shape is None:
            raise self.refuse("unknown-shape", *why_unknown(value))
        if any(name.startswith("@") for size in value.shape for name in size.symbols):
            raise self.refuse(
                "reserved-name",
                f"a size of '{value.name}' has a name that begins with '@', as only loop variables of kernels may",
                "give the dimension another name",
            )
        return tuple(self.rename(size) for size in value.shape)

    def dtype(self, value: Value) -> int:
        """Element type of a value."""
        if value.dtype not in TYPES:
            raise self.refuse(
                "unsupported-type", f"'{value.name}' has element type {value.dtype}, which kernels do not hold"
            )
        return value.dtype

    def tensor(self, value: Value, read: bool = False) -> Tensor:
        """The value as a tensor: computed in the region, a number in the text, or read from memory.

        ``read``: from memory also where it is a constant of one element.  What differs from layer to layer, as a scale
        of quantised numbers does, would make a text of its own of each, to be compiled and measured by itself.
        """
        if value in self.tensors:
            return self.tensors[value]
        dtype = self.dtype(value)
        made: Tensor
        if value.constant is not None and not read and _is_one_number(value.constant):
            made = Fill(dtype, self.shape(value), number(value.constant))
            self.inlined.append(value)
        elif value.constant is None and dtype == INT64 and value.elements is not None and len(value.elements) == 1:
            # A size, as arithmetic on shapes gives it.
            made = Size(dtype, self.shape(value), self.rename(value.elements[0]))
            self.note_size(value)
        else:
            made = Input(dtype, self.shape(value), len(self.inputs))
            self.inputs.append(value)
        self.tensors[value] = made
        return made

    def changes(self, value: Value, neutral: int) -> bool:
        """Whether any element of an operand may be another number than a neutral one, 0 or 1.  Where none is, it is not
        read."""
        if value.constant is None or neutral_number(value.constant) != neutral:
            return True
        if value not in self.tensors and value not in self.inlined:
            self.inlined.append(value)
        return False

    def sizes(self, value: Value) -> tuple[Dim, ...]:
        """Contents of a small integer operand that decides sizes (axes, a target shape, starts)."""
        if value.elements is None and value.constant is None:
            raise self.refuse(
                "unknown-sizes",
                f"the contents of '{value.name}' are not known before the model runs",
                "fold the model's constants, or give the shape as sizes of the inputs",
            )
        self.note_size(value)
        if value.elements is not None:
            return tuple(self.rename(size) for size in value.elements)
        assert value.constant is not None
        return tuple(dim(int(element)) for element in value.constant.reshape(-1))

    def note_size(self, value: Value) -> None:
        """Note that a value from outside decides sizes: it is an operand of the body, not of the kernel."""
        if value not in self.sized and value not in self.tensors:
            self.sized.append(value)

    def integers(self, value: Value) -> tuple[int, ...]:
        """The same where sizes must be plain numbers."""
        sizes = self.sizes(value)
        if any(size.value is None for size in sizes):
            raise self.refuse(
                "unknown-sizes", f"'{value.name}' must be constant here, and is {', '.join(map(str, sizes))}"
            )
        return tuple(size.value for size in sizes if size.value is not None)


def neutral_number(constant: np.ndarray) -> int | None:
    """0 or 1 where all of a constant's floats are that, without a sign; None elsewhere, and of large constants."""
    if not 0 < constant.size <= MOST_NEUTRAL or constant.reshape(-1)[0] not in (0, 1):
        return None
    found = int(constant.reshape(-1)[0])
    return None if (constant != found).any() or np.signbit(constant).any() else found


def _is_one_number(constant: np.ndarray) -> bool:
    """Whether all elements are one number, as those of a mask that hides nothing are.  Weights are read, whatever they
    are, so that layers which differ in theirs have one text."""
    return constant.size == 1 or (constant.dtype == np.bool_ and constant.size > 1 and bool(
        constant.all() or not constant.any()))


def number(constant: np.ndarray) -> Number:
    """The one element of a constant as a Python number, exactly."""
    item = constant.reshape(-1)[0]
    if constant.dtype == np.bool_:
        return bool(item)
    if np.issubdtype(constant.dtype, np.integer):
        return int(item)
    return float(item)


def broadcast_shapes(shapes: Sequence[Shape]) -> Shape:
    """The shape that operands of these shapes have together."""
    rank = max(len(shape) for shape in shapes)
    padded = [(dim(1),) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(reduce(broadcast, sizes) for sizes in zip(*padded, strict=True))


def apply(function: str, *operands: Tensor, dtype: int | None = None, shape: Shape | None = None) -> Map:
    """A ``Map``; its type is that of the last operand, its shape the broadcast one, where not given.

    Raises:
        Unlowerable: the function has no meaning for the operands' type, as an Exp of integers.
    """
    kind, known = TYPES[operands[-1].dtype], FUNCTIONS[function]
    if (known.floating if kind.is_floating else known.integer) is None:
        raise Unlowerable(Refusal("element-type", f"'{function}' has no meaning for {kind.name}"))
    return Map(
        operands[-1].dtype if dtype is None else dtype,
        broadcast_shapes([operand.shape for operand in operands]) if shape is None else shape,
        function,
        operands,
    )


def test(function: str, *operands: Tensor) -> Map:
    """A ``Map`` with a boolean result."""
    return apply(function, *operands, dtype=BOOL)


def wide(tensor: Tensor) -> Tensor:
    """The tensor declared in the type that it is computed in: float32 for float16 and bfloat16."""
    if not TYPES[tensor.dtype].is_narrow:
        return tensor
    return Map(FLOAT, tensor.shape, "narrow", (tensor,))


def declare(tensor: Tensor, dtype: int) -> Tensor:
    """The tensor declared in another floating type, not rounded."""
    return tensor if tensor.dtype == dtype else Map(dtype, tensor.shape, "narrow", (tensor,))


def total(kind: str, tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """A reduction that keeps its axes with size one."""
    return Reduce(tensor.dtype, reduced_shape(tensor.shape, axes), kind, tensor, axes)


def mean(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The mean over axes, kept with size one; float32 or float64."""
    count = product([tensor.shape[axis] for axis in axes])
    return apply("div", total("sum", tensor, axes), size_of(count, tensor.dtype))


def mean_of_shares(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The mean as the sum of shares, kept with size one: rows of numbers near the largest there is do not overflow.

    For norms, as the runtime's running mean has it; the factor's rounding is no larger than that of the mean itself.
    """
    count = product([tensor.shape[axis] for axis in axes])
    share = apply("reciprocal", size_of(count, tensor.dtype)) if count.value is None else scalar(
        1 / max(count.value, 1), tensor.dtype)
    return total("sum", apply("mul", tensor, share), axes)


def size_of(size: Dim, dtype: int) -> Tensor:
    """A size as a rank-0 tensor."""

    return scalar(size.value, dtype) if size.value is not None else Size(dtype, (), size)


def reshape(tensor: Tensor, shape: Shape) -> Tensor:
    """The same elements under another shape."""
    return tensor if tensor.shape == shape else Reshape(tensor.dtype, shape, tensor)


def expand(tensor: Tensor, shape: Shape) -> Tensor:
    """The tensor broadcast to a shape."""
    return tensor if tensor.shape == shape else Expand(tensor.dtype, shape, tensor)


def like(value: Number, tensor: Tensor) -> Fill:
    """A number in the type of a tensor."""
    return scalar(float(value) if TYPES[tensor.dtype].is_floating else value, tensor.dtype)


def accumulate(tensor: Tensor) -> Tensor:
    """The tensor in the type that sums are taken in: float32 at least."""
    return tensor if tensor.dtype == DOUBLE else wide(tensor)
