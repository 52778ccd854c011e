"""What a program of the region IR computes, in float64: tensor by tensor, as ``onnxfuse.ir.tensors`` says.

Every value of a floating type is held in float64 and rounded to its declared type only where a kernel must: by a cast
(of what it reads and to what it gives), before a function that jumps, and where it is an operand of a contraction.
Integers wrap as they do in a kernel.  The sizes that tensors declare are checked against those that come out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from reference import FLOATS, Array, numpy_type, raised, rounded
from reference_operators import OWN, truncated

from onnxfuse.graph.dims import Dim
from onnxfuse.ir.scalars import BOOL, FUNCTIONS, TYPES, Sort
from onnxfuse.ir.tensors import (
    Concat,
    Contract,
    Expand,
    Fill,
    Input,
    Iota,
    Map,
    Permute,
    Pool,
    Reduce,
    Reshape,
    Scan,
    Size,
    Slice,
    Take,
    Tensor,
    Update,
    Window,
    postorder,
)
from onnxfuse.lowering.lower import Lowered


def _own(name: str, **attributes: object) -> Callable[..., Array]:
    """An operator's meaning, as the kernels' oracle has it."""
    return lambda *operands: OWN["", name](attributes, 20, *operands)


def _shifted(shift: Callable[..., Array]) -> Callable[..., Array]:
    """A shift by as many bits as there are, or more, leaves nothing but the sign."""
    return lambda a, b: shift(shift(a, np.minimum(b, 8 * a.itemsize - 1)), (b >= 8 * a.itemsize).astype(b.dtype))


NUMPY: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _own("Div"), "steps": np.divide,
    "nearest": lambda x, zero, least, most: np.clip(np.rint(np.where(np.isnan(x), -np.inf, x)) + zero, least, most),
    "nearest_byte": lambda x, zero, least, most: np.clip(np.rint(np.where(np.isnan(x), 0, x)) + zero, least, most),
    "mod": _own("Mod"),
    "fmod": _own("Mod", fmod=1), "pow": _own("Pow"), "min": np.minimum, "max": np.maximum,
    "at_least": lambda a, b: np.where(a < b, b, a), "at_most": lambda a, b: np.where(a > b, b, a),
    "neg": np.negative, "abs": np.abs, "where": np.where, "copy": np.copy, "exp": np.exp, "quick_exp": np.exp,
    "tanh_approximate": np.tanh,
    "exp_difference": lambda a, b: np.exp(a - np.where(np.isfinite(b), b, np.nan)),
    "gelu": lambda x: x * 0.5 * (1 + _own("Erf")(x / np.sqrt(2))),
    "gelu_tanh": lambda x: x * _own("Sigmoid")(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)),
    "mish": _own("Mish"), "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "sqrt": np.sqrt,
    "power_half": lambda x: np.where(x == -np.inf, np.inf, np.sqrt(x)),
    "rsqrt": lambda x: 1 / np.sqrt(x), "reciprocal": lambda x: 1 / x, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "erf": _own("Erf"), "sigmoid": _own("Sigmoid"),
    "softplus": _own("Softplus"), "relu": lambda x: np.maximum(x, x.dtype.type(0)), "floor": np.floor, "ceil": np.ceil,
    "round": np.round, "sign": _own("Sign"), "isnan": np.isnan, "isinf": np.isinf, "ispinf": np.isposinf,
    "isninf": np.isneginf, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not,
    "bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor, "bitnot": np.invert,
    "shl": _shifted(np.left_shift), "shr": _shifted(np.right_shift),
}
"""Functions of ``scalars.FUNCTIONS``."""

REDUCTIONS: dict[str, Callable[..., Array]] = {
    "sum": np.add.reduce, "prod": np.multiply.reduce, "max": np.maximum.reduce, "min": np.minimum.reduce,
    "max_number": np.fmax.reduce,
}
"""Reductions of ``scalars.REDUCTIONS``."""


@dataclass(frozen=True)
class _Value:
    """A tensor's elements; ``exact`` where its declared type holds them."""

    array: Array
    exact: bool = True


def evaluate_lowered(lowered: Lowered, inputs: Sequence[Array], sizes: Mapping[str, int]) -> list[Array]:
    """The outputs of a region, those of floating types in float64.

    Args:
        inputs: in the order of ``lowered.tensors``, in their declared types.
        sizes: of the graph's symbols.
    """
    bound = {name: size.evaluate(sizes) for name, size in lowered.binding.names.items()}
    return evaluate_tensors(lowered.program.outputs, inputs, bound)


def evaluate_tensors(outputs: Sequence[Tensor], inputs: Sequence[Array], sizes: Mapping[str, int]) -> list[Array]:
    """The same for tensors over these sizes."""
    values: dict[int, _Value] = {}
    with np.errstate(all="ignore"):
        for tensor in postorder(tuple(outputs)):
            made = _made(tensor, values, inputs, sizes)
            if tensor.dtype not in FLOATS:
                made = _Value(made.array.astype(numpy_type(tensor.dtype)))
            values[id(tensor)] = made
            expected = tuple(size.evaluate(sizes) for size in tensor.shape)
            assert made.array.shape == expected, f"{type(tensor).__name__} of {made.array.shape}, not {expected}"
    return [values[id(output)].array for output in outputs]


def _made(tensor: Tensor, values: Mapping[int, _Value], inputs: Sequence[Array], sizes: Mapping[str, int]) -> _Value:
    shape = tuple(size.evaluate(sizes) for size in tensor.shape)

    def number(size: Dim) -> int:
        return size.evaluate(sizes)

    match tensor:
        case Input():
            assert inputs[tensor.index].dtype == numpy_type(tensor.dtype)
            return _Value(raised(inputs[tensor.index]))
        case Fill():
            # A number of a narrow type stands in a kernel's text as a float32.
            kind = np.dtype(np.float32) if TYPES[tensor.dtype].is_narrow else numpy_type(tensor.dtype)
            return _Value(raised(np.full(shape, tensor.number, kind)))
        case Size():
            return _Value(np.full(shape, number(tensor.size), np.float64 if tensor.dtype in FLOATS else np.int64))
        case Iota():
            return _Value(np.indices(shape)[tensor.axis])
        case Map():
            array, exact = _mapped(tensor, [values[id(operand)] for operand in tensor.operands])
            return _Value(np.broadcast_to(array, shape), exact)
        case Concat():
            parts = [values[id(operand)] for operand in tensor.operands]
            whole = np.concatenate([part.array for part in parts], tensor.axis)
            return _Value(whole, all(part.exact for part in parts))
        case Take():
            source, places = values[id(tensor.operand)], values[id(tensor.indices)].array.astype(np.int64)
            extent = source.array.shape[tensor.axis]
            at = [np.where(places < 0, places + extent, places) if axis == tensor.axis else index
                  for axis, index in enumerate(np.indices(shape))]
            return _Value(source.array[tuple(at)], source.exact)
        case Update():
            whole, rows, starts = (values[id(each)] for each in (tensor.operand, tensor.rows, tensor.starts))
            count = rows.array.shape[tensor.axis]
            places = np.broadcast_to(starts.array, (*shape[:tensor.axis], *[1] * (len(shape) - tensor.axis)))
            at = np.indices(shape)
            inside = (at[tensor.axis] >= places) & (at[tensor.axis] < places + count)
            at[tensor.axis] = np.clip(at[tensor.axis] - places, 0, count - 1)
            return _Value(np.where(inside, rows.array[tuple(at)], whole.array), whole.exact and rows.exact)
        case Contract():
            return _Value(_contracted(tensor, [values[id(operand)] for operand in tensor.operands], sizes))
    source = values[id(tensor.operand)]  # type: ignore[attr-defined]
    array = source.array
    match tensor:
        case Reduce():
            exact = (tensor.kind in ("max", "min") and source.exact) or not TYPES[tensor.dtype].is_narrow
            return _Value(_reduced(tensor, array), exact)
        case Scan():
            return _Value(_running(tensor, array), not TYPES[tensor.dtype].is_narrow)
        case Reshape():
            array = array.reshape(shape)
        case Permute():
            array = array.transpose(tensor.axes)
        case Expand():
            array = np.broadcast_to(array, shape)
        case Slice():
            for axis, (start, step) in enumerate(zip(tensor.starts, tensor.steps, strict=True)):
                places = number(start) + step * np.arange(shape[axis])
                assert not places.size or (places.min() >= 0 and places.max() < array.shape[axis])
                array = array.take(places, axis)
        case Pool():
            array = _pooled(tensor, array, [number(start) for start in tensor.starts], shape)
            return _Value(array, (tensor.kind == "max" and source.exact) or not TYPES[tensor.dtype].is_narrow)
        case Window():
            array = _windows(tensor, array, [number(start) for start in tensor.starts], shape)
        case _:
            raise AssertionError(tensor)
    return _Value(array, source.exact)


def _mapped(tensor: Map, operands: list[_Value]) -> tuple[Array, bool]:
    arrays = [operand.array for operand in operands]
    kind, first = TYPES[tensor.dtype], tensor.operands[0].dtype
    if tensor.function == "narrow":
        exact = operands[0].exact and kind.size >= TYPES[first].size
        return arrays[0], exact or not kind.is_narrow
    if tensor.function == "cast":
        source = rounded(arrays[0], first)
        if tensor.dtype in FLOATS:
            return rounded(source.astype(np.float64), tensor.dtype), True
        if first in FLOATS and tensor.dtype != BOOL:
            return truncated(source, numpy_type(tensor.dtype), 8 * TYPES[first].size), True
        return source.astype(numpy_type(tensor.dtype)), True
    sort = FUNCTIONS[tensor.function].sort
    if sort is Sort.JUMPING:
        arrays = [rounded(array, operand.dtype) for array, operand in zip(arrays, tensor.operands, strict=True)]
    chosen = operands[1:] if tensor.function == "where" else operands
    exact = not kind.is_narrow or sort is Sort.JUMPING
    exact = exact or (sort is Sort.CHOOSING and all(operand.exact for operand in chosen))
    return NUMPY[tensor.function](*arrays), exact


def _reduced(tensor: Reduce, array: Array) -> Array:
    if not array.size and tensor.kind in ("max", "min", "max_number"):
        largest = tensor.kind == "min"
        if tensor.dtype in FLOATS:
            neutral: float = np.inf if largest else -np.inf
        else:
            info = np.iinfo(array.dtype)
            neutral = info.max if largest else info.min
        return np.full([1 if axis in tensor.axes else size for axis, size in enumerate(array.shape)], neutral)
    options = {} if tensor.dtype in FLOATS or tensor.kind not in ("sum", "prod") else {"dtype": array.dtype}
    return REDUCTIONS[tensor.kind](array, axis=tensor.axes, keepdims=True, **options)


def _running(tensor: Scan, array: Array) -> Array:
    """Running totals, one place after the other."""
    places = range(array.shape[tensor.axis])
    result, total = np.empty_like(array), np.full_like(array.take([0], tensor.axis) if array.size else array, 0)
    assert tensor.kind == "sum"
    for place in reversed(places) if tensor.reverse else places:
        at = tuple(slice(place, place + 1) if axis == tensor.axis else slice(None) for axis in range(array.ndim))
        before, total = total, total + array[at]
        result[at] = before if tensor.exclusive else total
    return result


def _pooled(tensor: Pool, array: Array, starts: Sequence[int], shape: Sequence[int]) -> Array:
    """Window by window, of what lies in the operand."""
    least = 0 if tensor.kind == "sum" else -np.inf if tensor.dtype in FLOATS else np.iinfo(array.dtype).min
    result = np.full(shape, least, array.dtype)
    for window in np.ndindex(*(shape[axis] for axis in tensor.axes)):
        taken, at = array, [slice(None)] * array.ndim
        for axis, place, size, start, stride, dilation in zip(
                tensor.axes, window, tensor.sizes, starts, tensor.strides, tensor.dilations, strict=True):
            index = start + place * stride + dilation * np.arange(size)
            taken = taken.take(index[(index >= 0) & (index < array.shape[axis])], axis)
            at[axis] = slice(place, place + 1)
        if taken.size:
            result[tuple(at)] = REDUCTIONS[tensor.kind](taken, axis=tensor.axes, keepdims=True)
    return result


def _windows(tensor: Window, array: Array, starts: Sequence[int], shape: Sequence[int]) -> Array:
    for axis, start, stride, dilation in zip(tensor.axes, starts, tensor.strides, tensor.dilations, strict=True):
        place = tensor.place_of(axis)
        index = start + stride * np.arange(shape[place])[:, None] + dilation * np.arange(shape[place + 1])
        inside = (index >= 0) & (index < array.shape[place])
        zeros = np.zeros_like(array, shape=(*array.shape[:place], 1, *array.shape[place + 1:]))
        array = np.concatenate([array, zeros], place).take(np.where(inside, index, array.shape[place]), place)
    return array


def _contracted(tensor: Contract, operands: Sequence[_Value], sizes: Mapping[str, int]) -> Array:
    for one, other in tensor.relations:
        assert one.evaluate(sizes) == other.evaluate(sizes), f"{one} is not {other}"
    kind = np.float64 if tensor.dtype in FLOATS else numpy_type(tensor.dtype)
    left, right = (rounded(value.array, operand.dtype).astype(kind)
                   for value, operand in zip(operands, tensor.operands, strict=True))
    return np.einsum(left, tensor.axes[0], right, tensor.axes[1], list(range(tensor.rank)))
