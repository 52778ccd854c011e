"""Reductions, softmax and norms, as maps and reductions with float32 accumulation.

Softmax subtracts the row's maximum; norms take two passes, over the differences from the mean.
"""

from __future__ import annotations

from onnxfuse.graph.dims import dim
from onnxfuse.graph.model import Node
from onnxfuse.lowering.context import (
    Context,
    accumulate,
    apply,
    declare,
    like,
    mean,
    mean_of_shares,
    reshape,
    test,
    total,
    wide,
)
from onnxfuse.lowering.ir import Map, Take, Tensor
from onnxfuse.lowering.operators.registry import integer_attribute, lowers, number_attribute, operand, optional
from onnxfuse.lowering.operators.views import axis_of, result_shape
from onnxfuse.lowering.scalars import DOUBLE, FLOAT16, INT64, TYPES, limits

REDUCTIONS = (
    "ReduceSum",
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceL1",
    "ReduceL2",
    "ReduceSumSquare",
    "ReduceLogSum",
    "ReduceLogSumExp",
)


@lowers(*REDUCTIONS)
def reduction(node: Node, context: Context) -> Tensor:
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
        result = declare(_reduce(kind, accumulate(source), axes), source.dtype)
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


def reduction_axes(node: Node, context: Context) -> tuple[int, ...]:
    """Reduced axes of a Reduce node, counted from the front and sorted; attribute or input, as the opset says."""
    rank = len(operand(node, context, 0).shape)
    given: tuple[int, ...] = tuple(node.attributes.get("axes") or ())
    if not given and len(node.inputs) > 1 and node.inputs[1] is not None:
        given = context.integers(node.inputs[1])
    if not given:
        return () if integer_attribute(node, "noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({axis + rank if axis < 0 else axis for axis in given}))


def _reduce(kind: str, x: Tensor, axes: tuple[int, ...]) -> Tensor:
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


@lowers("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(node: Node, context: Context) -> Tensor:
    """A reduction of every channel (axis 1) over the axes behind it, which stay with size one."""
    source = operand(node, context, 0)
    axes, p = tuple(range(2, len(source.shape))), integer_attribute(node, "p", 2)
    if node.op == "GlobalMaxPool":
        return total("max", source, axes)
    if node.op == "GlobalLpPool" and p not in (1, 2):
        raise context.refuse("unsupported-mode", f"a GlobalLpPool of order {p} has no kernel")
    kind = "Mean" if node.op == "GlobalAveragePool" else f"L{p}"
    return declare(_reduce(kind, accumulate(source), axes), source.dtype)


def finite_maximum(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The maximum, or 0 where it is infinite: subtracting it must not make a NaN of a finite result."""
    largest = total("max", x, axes)
    return apply("where", test("isinf", largest), like(0.0, x), largest)


def log_sum_exp(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """log(sum(exp(x))) without overflow."""
    largest = finite_maximum(x, axes)
    return apply("add", apply("log", total("sum", apply("exp", apply("sub", x, largest)), axes)), largest)


def softmax(source: Tensor, axes: tuple[int, ...]) -> Tensor:
    """exp(x - max) / sum(exp(x - max)); a row that is -infinity everywhere gives NaN, as the standard's does.

    The maximum may pass over a NaN: its power is one, and so is the sum, and the whole row.
    """
    x = accumulate(source)
    largest = total("max_number", x, axes)
    if source.dtype == FLOAT16:
        powers = apply("exp_difference", x, largest)
    else:
        powers = apply("quick_exp", apply("sub", x, largest))
    return apply("mul", powers, apply("reciprocal", total("sum", powers, axes)))


def log_softmax(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """x - max - log(sum(exp(x - max)))."""
    shifted = apply("sub", x, total("max", x, axes))
    return apply("sub", shifted, apply("log", total("sum", apply("exp", shifted), axes)))


@lowers("Softmax", "LogSoftmax")
def lower_softmax(node: Node, context: Context) -> Tensor:
    source = operand(node, context, 0)
    rank = len(source.shape)
    if context.opset >= 13:
        axes: tuple[int, ...] = (axis_of(node, "axis", -1, rank),)
    else:
        # Before opset 13 the input counts as a matrix whose rows begin at the axis.
        axes = tuple(range(axis_of(node, "axis", 1, rank), rank))
    result = softmax(source, axes) if node.op == "Softmax" else log_softmax(accumulate(source), axes)
    return declare(result, source.dtype)


def layer_norm(x: Tensor, axes: tuple[int, ...], epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised rows, their means and their inverse standard deviations."""
    average = mean_of_shares(x, axes)
    centred = apply("sub", x, average)
    inverse = apply("rsqrt", apply("add", mean(apply("mul", centred, centred), axes), like(epsilon, x)))
    return apply("mul", centred, inverse), average, inverse


def rms_norm(x: Tensor, axes: tuple[int, ...], epsilon: float) -> Tensor:
    """x / sqrt(mean(x * x) + epsilon)."""
    return apply("mul", x, apply("rsqrt", apply("add", mean(apply("mul", x, x), axes), like(epsilon, x))))


def scaled(normal: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """normal * scale + bias, in the wide type."""
    result = normal if scale is None else apply("mul", normal, wide(scale))
    return result if bias is None else apply("add", result, wide(bias))


@lowers("LayerNormalization")
def layer_normalization(node: Node, context: Context) -> list[Tensor | None]:
    source = operand(node, context, 0)
    rank = len(source.shape)
    axes = tuple(range(axis_of(node, "axis", -1, rank), rank))
    normal, average, inverse = layer_norm(accumulate(source), axes, number_attribute(node, "epsilon", 1e-5))
    result = scaled(normal, optional(node, context, 1), optional(node, context, 2))
    return [declare(result, source.dtype), average, inverse]


@lowers("RMSNormalization")
def rms_normalization(node: Node, context: Context) -> Tensor:
    source = operand(node, context, 0)
    rank = len(source.shape)
    axes = tuple(range(axis_of(node, "axis", -1, rank), rank))
    normal = rms_norm(accumulate(source), axes, number_attribute(node, "epsilon", 1e-5))
    return declare(scaled(normal, optional(node, context, 1), None), source.dtype)


@lowers("InstanceNormalization")
def instance_normalization(node: Node, context: Context) -> Tensor:
    source = operand(node, context, 0)
    rank = len(source.shape)
    normal, _, _ = layer_norm(accumulate(source), tuple(range(2, rank)), number_attribute(node, "epsilon", 1e-5))
    scale, bias = (
        reshape(operand(node, context, place), (source.shape[1],) + (dim(1),) * (rank - 2)) for place in (1, 2)
    )
    return declare(scaled(normal, scale, bias), source.dtype)


@lowers("GroupNormalization")
def group_normalization(node: Node, context: Context) -> Tensor:
    source, groups = operand(node, context, 0), dim(integer_attribute(node, "num_groups", 1))
    batch, channels, *spatial = source.shape
    per_group = channels // groups
    inner = (batch, groups, per_group, *spatial)
    axes = tuple(range(2, len(inner)))
    normal, _, _ = layer_norm(accumulate(reshape(source, inner)), axes, number_attribute(node, "epsilon", 1e-5))
    # Until opset 21 scale and bias hold one number a group, from then on one a channel.
    if context.opset >= 21:
        normal, ones = reshape(normal, source.shape), (channels,) + (dim(1),) * len(spatial)
    else:
        ones = (groups,) + (dim(1),) * (len(spatial) + 1)
    scale, bias = (reshape(operand(node, context, place), ones) for place in (1, 2))
    return declare(reshape(scaled(normal, scale, bias), source.shape), source.dtype)


@lowers("LpNormalization")
def lp_normalization(node: Node, context: Context) -> Tensor:
    source = operand(node, context, 0)
    axes, p = (axis_of(node, "axis", -1, len(source.shape)),), integer_attribute(node, "p", 2)
    x = accumulate(source)
    norm = _reduce("L1" if p == 1 else "L2", x, axes)
    safe = apply("where", test("eq", norm, like(0.0, x)), like(1.0, x), norm)
    return declare(apply("div", x, safe), source.dtype)


@lowers("NegativeLogLikelihoodLoss")
def negative_log_likelihood(node: Node, context: Context) -> Tensor:
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
