"""Reductions: axes as an attribute or an input, kept or dropped."""

from __future__ import annotations

from math import prod

import onnx

from onnxfuse.graph.dims import Dim, dim
from onnxfuse.graph.shape_functions.context import INT64, INTEGERS, Context, Type, shape_function
from onnxfuse.graph.shape_functions.views import axes_of

REDUCTIONS = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare",
)


@shape_function(*REDUCTIONS)
def _reduce(context: Context) -> list[Type]:
    shape, axes = context.shape(), axes_of(context)
    keep = bool(context.attribute("keepdims", 1))
    if shape is None:
        return [Type(context.dtype())]
    if axes is None:
        return [Type(context.dtype(), context.unknown_shape(len(shape)) if keep else None)]
    if not axes:
        if context.attribute("noop_with_empty_axes", 0):
            return [Type(context.dtype(), shape, context.elements(0))]
        axes = list(range(len(shape)))
    gone = {axis % len(shape) for axis in axes} if shape else set()
    if keep:
        sizes = tuple(dim(1) if axis in gone else size for axis, size in enumerate(shape))
    else:
        sizes = tuple(size for axis, size in enumerate(shape) if axis not in gone)
    elements, whole = context.elements(0), None
    if elements is not None and len(gone) == len(shape) and context.dtype() in INTEGERS:
        whole = _total(context.node.op, elements)
    return [Type(context.dtype(), sizes, whole)]


def _total(operator: str, elements: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
    if operator == "ReduceProd":
        return (prod(elements, start=dim(1)),)
    if operator == "ReduceSum":
        return (sum(elements, dim(0)),)
    numbers = [element.value for element in elements]
    if operator in ("ReduceMax", "ReduceMin") and numbers and None not in numbers:
        choose = max if operator == "ReduceMax" else min
        return (dim(choose(number for number in numbers if number is not None)),)
    return None


@shape_function("ArgMax", "ArgMin")
def _arg(context: Context) -> list[Type]:
    shape = context.shape()
    if shape is None:
        return [Type(INT64)]
    axis = context.axis(len(shape), 0)
    kept = (dim(1),) if context.attribute("keepdims", 1) else ()
    return [Type(INT64, shape[:axis] + kept + shape[axis + 1:])]


@shape_function("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global_pool(context: Context) -> list[Type]:
    shape = context.shape()
    return [Type(context.dtype(), None if shape is None else shape[:2] + (dim(1),) * (len(shape) - 2))]


@shape_function("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def _loss(context: Context) -> list[Type]:
    each = context.attribute("reduction", "mean") == "none"
    return [Type(context.dtype(), context.shape(1) if each else ()), Type(context.dtype(), context.shape())]


@shape_function("Det")
def _det(context: Context) -> list[Type]:
    shape = context.shape()
    return [Type(context.dtype(), None if shape is None else shape[:-2])]


@shape_function("OptionalHasElement")
def _has_element(context: Context) -> list[Type]:
    return [Type(int(onnx.TensorProto.BOOL), ())]


@shape_function("SequenceLength")
def _sequence_length(context: Context) -> list[Type]:
    return [Type(INT64, ())]
