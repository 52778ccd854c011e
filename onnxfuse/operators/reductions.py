"""Reductions over rows, channels or everything: axes as an attribute or an input, kept or dropped."""

from __future__ import annotations

from math import prod

from onnxfuse.graph.context import INT64, INTEGERS, Type, TypeContext, same
from onnxfuse.graph.dims import Dim, dim
from onnxfuse.graph.model import Node
from onnxfuse.ir.context import LoweringContext, accumulate, apply, declare, expand, like, mean, reshape, test, total
from onnxfuse.ir.scalars import DOUBLE, TYPES, limits
from onnxfuse.ir.tensors import Map, Scan, Take, Tensor
from onnxfuse.operators.arithmetic import ELEMENTARY, SIMPLE, per_input, per_output
from onnxfuse.operators.operands import integer_attribute, operand, optional, present, result_shape
from onnxfuse.operators.record import OPAQUE, PLAIN, REDUCTION, SCAN, RuntimeKernel, define
from onnxfuse.operators.views import axes_of


def reduce_types(context: TypeContext) -> list[Type]:
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


def arg_types(context: TypeContext) -> list[Type]:
    shape = context.shape()
    if shape is None:
        return [Type(INT64)]
    axis = context.axis(len(shape), 0)
    kept = (dim(1),) if context.attribute("keepdims", 1) else ()
    return [Type(INT64, shape[:axis] + kept + shape[axis + 1:])]


def global_pool_types(context: TypeContext) -> list[Type]:
    shape = context.shape()
    return [Type(context.dtype(), None if shape is None else shape[:2] + (dim(1),) * (len(shape) - 2))]


def loss_types(context: TypeContext) -> list[Type]:
    each = context.attribute("reduction", "mean") == "none"
    return [Type(context.dtype(), context.shape(1) if each else ()), Type(context.dtype(), context.shape())]


def reduction(node: Node, context: LoweringContext) -> Tensor:
    source, axes = operand(node, context, 0), reduction_axes(node, context)
    if not source.shape:
        source, axes = reshape(source, (dim(1),)), (0,)
    elif not axes:
        return source
    kind = node.op.removeprefix("Reduce")
    if kind in ("Max", "Min"):
        result = total(kind.lower(), source, axes)
    elif not TYPES[source.dtype].is_floating:
        if kind not in ("Sum", "Prod"):
            raise context.refuse("unsupported-type", f"{node.op} of {TYPES[source.dtype].name} has no kernel")
        result = _of_integers(kind, source, axes)
    else:
        result = declare(reduced(kind, accumulate(source), axes), source.dtype)
    return reshape(result, result_shape(node, context))


def _of_integers(kind: str, source: Tensor, axes: tuple[int, ...]) -> Tensor:
    """A sum or a product; past the limits of 32 bits it is the nearest of them, as the runtime has it, and of 64 bits
    it keeps the lowest ones, so that sums that fit are exact."""
    if TYPES[source.dtype].size > 4:
        return total(kind.lower(), source, axes)
    # Products of three numbers overflow 64 bits; a float64 that is no larger than 32 bits is exact.
    accumulator = INT64 if kind == "Sum" else DOUBLE
    result = total(kind.lower(), Map(accumulator, source.shape, "cast", (source,)), axes)
    lowest, highest = limits(source.dtype)
    near = apply("at_most", apply("at_least", result, like(lowest, result)), like(highest, result))
    return Map(source.dtype, near.shape, "cast", (near,))


def reduction_axes(node: Node, context: LoweringContext) -> tuple[int, ...]:
    """Reduced axes of a Reduce node, counted from the front and sorted; attribute or input, as the opset says."""
    rank = len(operand(node, context, 0).shape)
    given: tuple[int, ...] = tuple(node.attributes.get("axes") or ())
    if not given and len(node.inputs) > 1 and node.inputs[1] is not None:
        given = context.integers(node.inputs[1])
    if not given:
        return () if integer_attribute(node, "noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({axis + rank if axis < 0 else axis for axis in given}))


def reduced(kind: str, x: Tensor, axes: tuple[int, ...]) -> Tensor:
    match kind:
        case "Sum" | "Prod":
            return total(kind.lower(), x, axes)
        case "Mean":
            return mean(x, axes)
        case "L1":
            return total("sum", apply("abs", x), axes)
        case "L2":
            return apply("sqrt", total("sum", apply("mul", x, x), axes))
        case "SumSquare":
            return total("sum", apply("mul", x, x), axes)
        case "LogSum":
            return apply("log", total("sum", x, axes))
    return log_sum_exp(x, axes)


def global_pool(node: Node, context: LoweringContext) -> Tensor:
    """A reduction of every channel (axis 1) over the axes behind it, which stay with size one."""
    source = operand(node, context, 0)
    axes, p = tuple(range(2, len(source.shape))), integer_attribute(node, "p", 2)
    if node.op == "GlobalMaxPool":
        return total("max", source, axes)
    if node.op == "GlobalLpPool" and p not in (1, 2):
        raise context.refuse("unsupported-mode", f"a GlobalLpPool of order {p} has no kernel")
    kind = "Mean" if node.op == "GlobalAveragePool" else f"L{p}"
    return declare(reduced(kind, accumulate(source), axes), source.dtype)


def finite_maximum(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The maximum, or 0 where it is infinite: subtracting it must not make a NaN of a finite result."""
    largest = total("max", x, axes)
    return apply("where", test("isinf", largest), like(0.0, x), largest)


def log_sum_exp(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """log(sum(exp(x))) without overflow."""
    largest = finite_maximum(x, axes)
    return apply("add", apply("log", total("sum", apply("exp", apply("sub", x, largest)), axes)), largest)


def negative_log_likelihood(node: Node, context: LoweringContext) -> Tensor:
    """Without weights and ignored labels, and unreduced: the rest is the runtime's."""
    if (
        node.attributes.get("reduction", "mean") != "none"
        or "ignore_index" in node.attributes
        or optional(node, context, 2)
    ):
        raise context.refuse("reduced-loss", "only the unreduced, unweighted loss has a kernel")
    source, labels = operand(node, context, 0), operand(node, context, 1)
    chosen = Take(
        source.dtype,
        (*source.shape[:1], dim(1), *source.shape[2:]),
        source,
        reshape(labels, (*labels.shape[:1], dim(1), *labels.shape[1:])),
        1,
    )
    return apply("neg", reshape(chosen, labels.shape))


def running_total(node: Node, context: LoweringContext) -> Tensor:
    """The sum of all elements up to each along an axis; integers wrap, as the runtime has it."""
    source = operand(node, context, 0)
    (axis,), rank = context.integers(present(node, context, 1)), len(source.shape)
    axis = axis + rank if axis < 0 else axis
    exclusive, reverse = (bool(integer_attribute(node, name, 0)) for name in ("exclusive", "reverse"))
    kind = TYPES[source.dtype]
    if kind.size < 4 and not kind.is_floating:
        raise context.refuse("unsupported-type", f"{node.op} of {kind.name} has no kernel")
    if source.shape[axis] == 1:
        return expand(like(0, source), source.shape) if exclusive else source
    summed = accumulate(source) if kind.is_floating else source
    return declare(Scan(summed.dtype, summed.shape, "sum", summed, axis, exclusive, reverse), source.dtype)


for _name, _cost, _runtime in (
    ("ReduceSum", SIMPLE, RuntimeKernel.SUM), ("ReduceMean", SIMPLE, RuntimeKernel.MEAN),
    ("ReduceMax", SIMPLE, RuntimeKernel.REDUCTION), ("ReduceMin", SIMPLE, RuntimeKernel.REDUCTION),
    ("ReduceProd", SIMPLE, RuntimeKernel.REDUCTION), ("ReduceL1", SIMPLE, RuntimeKernel.REDUCTION),
    ("ReduceLogSum", SIMPLE, RuntimeKernel.SUM), ("ReduceSumSquare", 2, RuntimeKernel.SUM),
    ("ReduceL2", 2, RuntimeKernel.REDUCTION), ("ReduceLogSumExp", 3 + ELEMENTARY, RuntimeKernel.REDUCTION),
):
    define(_name, kind=REDUCTION, types=reduce_types, lowering=reduction, arithmetic=per_input(_cost), host=(1,),
           runtime=_runtime)

define("ArgMax", "ArgMin", kind=REDUCTION, types=arg_types, lowering=None, arithmetic=per_input(SIMPLE), host=(),
       runtime=PLAIN)
define("GlobalAveragePool", "GlobalMaxPool", kind=REDUCTION, types=global_pool_types, lowering=global_pool,
       arithmetic=per_input(SIMPLE), host=(), runtime=PLAIN)
define("GlobalLpPool", kind=REDUCTION, types=global_pool_types, lowering=global_pool, arithmetic=per_input(2), host=(),
       runtime=PLAIN)
define("NegativeLogLikelihoodLoss", kind=REDUCTION, types=loss_types, lowering=negative_log_likelihood,
       arithmetic=per_output(SIMPLE), host=(), runtime=PLAIN)
define("SoftmaxCrossEntropyLoss", kind=REDUCTION, types=loss_types, lowering=None, arithmetic=per_input(4 + ELEMENTARY),
       host=(), runtime=PLAIN)
define("CumSum", kind=SCAN, types=same, lowering=running_total, arithmetic=per_input(SIMPLE), host=(1,),
       runtime=RuntimeKernel.TOTALS)
define("CumProd", kind=OPAQUE, types=same, lowering=None, arithmetic=per_input(SIMPLE), host=(), runtime=PLAIN,
       random=False)
