"""Products of dequantised numbers as sums of products of the integers themselves.

    sum of (a - z) s (b - y) t over k   =   s t  sum of (a - z) (b - y) over k

Where one factor of either operand is the same along all that is summed over, it is left out of the sum, and int32 holds
what is left exactly: more so than the floats that the nodes speak of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxfuse.graph.dims import dim, product
from onnxfuse.graph.model import Shape
from onnxfuse.ir.context import apply, reshape
from onnxfuse.ir.scalars import FLOAT, INT32, TYPES, limits
from onnxfuse.ir.substitution import substituted
from onnxfuse.ir.tensors import (
    Contract,
    Expand,
    Fill,
    Map,
    Permute,
    Program,
    Reshape,
    Slice,
    Tensor,
    Window,
)

MOST = 2**31 - 1
"""The largest sum that is held."""

Views = Permute | Reshape | Expand | Slice | Window
"""Tensors of the same elements at other places, those of windows with something around them."""


@dataclass(frozen=True)
class Numbers:
    """An operand as 8-bit integers less their zero point, which is an integer of any type; None where it is zero."""

    numbers: Tensor
    zero: Tensor | None

    @property
    def most(self) -> int:
        """What no difference is larger than, whatever its sign."""
        least, most = map(int, limits(self.numbers.dtype))
        if self.zero is None:
            return max(-least, most)
        if isinstance(self.zero, Fill):
            return max(int(self.zero.number) - least, most - int(self.zero.number))
        return most - least


def is_byte(tensor: Tensor) -> bool:
    """Whether a tensor is one of 8-bit integers."""
    kind = TYPES[tensor.dtype]
    return kind.size == 1 and kind.compute.endswith("char")


def less_zero(tensor: Tensor, zero: Tensor | None) -> Tensor:
    """Quantised numbers less their zero point, in int32; as they are where that is zero."""
    zero = _point(zero)
    if zero is None:
        return tensor
    numbers, point = (Map(INT32, each.shape, "cast", (each,)) for each in (tensor, zero))
    return apply("sub", numbers, point, shape=tensor.shape)


def _point(zero: Tensor | None) -> Tensor | None:
    """A zero point, one number as a scalar; None where it is zero."""
    known = zero
    while isinstance(known, Reshape):
        known = known.operand
    if isinstance(known, Fill):
        return Fill(known.dtype, (), known.number) if known.number != 0 else None
    return reshape(zero, ()) if zero is not None and zero.shape == (dim(1),) else zero


def numbers_of(operand: Tensor) -> Numbers | None:
    """An operand of an integer product as 8-bit numbers and their zero point; None where it is none of these."""
    views, tensor = _under_views(operand)
    if is_byte(tensor):
        return Numbers(operand, None)
    found = _difference(tensor, INT32)
    return None if found is None else _seen(found, views)


def in_integers(program: Program) -> Program:
    """A program with its products of dequantised numbers as integer products, where all of its products are such."""
    products = [tensor for tensor in program.tensors if isinstance(tensor, Contract)]
    sides: dict[int, _Dequantised | None] = {
        id(operand): _dequantised(operand) for each in products for operand in each.operands}
    made = {each: _scaled(each, [sides[id(operand)] for operand in each.operands]) for each in products}
    found: dict[Tensor, Tensor] = {each: tensor for each, tensor in made.items() if tensor is not None}
    if not products or len(found) < len(made):
        return program
    return replace(program, outputs=substituted(program.outputs, found))


@dataclass(frozen=True)
class _Dequantised:
    """Numbers, also as an operand, and the factor that they stand for."""

    numbers: Numbers
    operand: Tensor
    scale: Tensor


def _dequantised(tensor: Tensor) -> _Dequantised | None:
    """A tensor as DequantizeLinear means it, seen through views."""
    views, tensor = _under_views(tensor)
    if not isinstance(tensor, Map) or tensor.function != "mul":
        return None
    steps, scale = tensor.operands
    found = _difference(steps, FLOAT)
    if found is None or tensor.shape != steps.shape or scale.rank > tensor.rank:
        return None
    seen = _seen(found, views)
    for view in reversed(views):
        through = _through(view, scale)
        if seen is None or through is None:
            return None
        scale = through
    assert seen is not None
    return _Dequantised(seen, less_zero(seen.numbers, seen.zero), scale)


def _difference(tensor: Tensor, dtype: int) -> Numbers | None:
    """8-bit numbers as a type, or their difference from a zero point in that type."""
    if not isinstance(tensor, Map) or tensor.dtype != dtype:
        return None
    if tensor.function == "cast":
        (numbers,) = tensor.operands
        return Numbers(numbers, None) if is_byte(numbers) else None
    casts = [each.operands[0] for each in tensor.operands if isinstance(each, Map) and each.function == "cast"]
    if tensor.function != "sub" or len(casts) != 2 or not all(map(is_byte, casts)) or casts[0].shape != tensor.shape:
        return None
    numbers, zero = casts
    return Numbers(numbers, _point(zero))


def _seen(found: Numbers, views: Sequence[Views]) -> Numbers | None:
    """Numbers through views; what windows have around them means zero, which the numbers' zero point does."""
    numbers, zero = found.numbers, found.zero
    for view in reversed(views):
        if zero is not None:
            zero = _through(view, zero)
            if zero is None:
                return None
        if isinstance(view, Window) and zero is not None:
            if zero.dtype != numbers.dtype:
                return None
            numbers = replace(view, dtype=numbers.dtype, operand=numbers, outside=zero)
        else:
            numbers = replace(view, dtype=numbers.dtype, operand=numbers)
    return Numbers(numbers, zero)


def _through(view: Views, parameter: Tensor) -> Tensor | None:
    """A scale or zero point that is broadcast to a view's operand as it is to the view; None where it would be more
    than that at other places."""
    if all(size == 1 for size in parameter.shape):
        return reshape(parameter, ())
    sizes = ((dim(1),) * (view.operand.rank - parameter.rank)) + parameter.shape
    if isinstance(view, Permute):
        whole = reshape(parameter, sizes)
        return replace(view, dtype=parameter.dtype, shape=tuple(sizes[axis] for axis in view.axes), operand=whole)
    kept = [own for own, size in zip(sizes, view.operand.shape, strict=True) if size != 1]
    longer = [axis for axis, size in enumerate(view.shape) if size != 1]
    if not isinstance(view, Reshape) or [view.shape[axis] for axis in longer] != [
            size for size in view.operand.shape if size != 1]:
        return None
    placed = dict(zip(longer, kept, strict=True))
    return reshape(parameter, tuple(placed.get(axis, dim(1)) for axis in range(view.rank)))


def _under_views(tensor: Tensor) -> tuple[list[Views], Tensor]:
    """What a tensor is a view of, the last view first; a float may be declared in another type."""
    views: list[Views] = []
    while True:
        if isinstance(tensor, Permute | Reshape | Expand | Slice | Window):
            views.append(tensor)
            tensor = tensor.operand
        elif isinstance(tensor, Map) and tensor.function == "narrow":
            (tensor,) = tensor.operands
        else:
            return views, tensor


def _scaled(contract: Contract, sides: Sequence[_Dequantised | None]) -> Tensor | None:
    """A product of dequantised operands as one of their numbers, times both scales; None where a scale changes along
    what is summed over, or int32 may not hold a sum."""
    left, right = sides
    if left is None or right is None or contract.dtype != FLOAT:
        return None
    count = product(contract.summed).value
    scales = [_along_result(side.scale, axes, contract)
              for side, axes in zip((left, right), contract.axes, strict=True)]
    if count is None or count * left.numbers.most * right.numbers.most > MOST or None in scales:
        return None
    sums = replace(contract, dtype=INT32, operands=(left.operand, right.operand))
    factor = apply("mul", *(scale for scale in scales if scale is not None))
    return apply("mul", Map(FLOAT, sums.shape, "cast", (sums,)), factor, shape=sums.shape)


def _along_result(scale: Tensor, axes: Sequence[int], contract: Contract) -> Tensor | None:
    """An operand's scale as it is broadcast to the result: it is one number, or one along one axis of that."""
    missing = len(axes) - scale.rank
    found = [(axes[missing + axis], size) for axis, size in enumerate(scale.shape) if size != 1]
    if not found:
        return reshape(scale, ())
    ((loop, size), *others) = found
    if others or loop >= contract.rank:
        return None
    shape: Shape = (size, *(dim(1),) * (contract.rank - 1 - loop))
    return reshape(scale, shape)
