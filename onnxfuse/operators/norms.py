"""Softmax and norms, as maps and reductions with float32 accumulation.

Softmax subtracts the row's maximum; norms take two passes, over the differences from the mean.
"""

from __future__ import annotations

from onnxfuse.graph.context import FLOAT, Type, TypeContext, same
from onnxfuse.graph.dims import dim
from onnxfuse.graph.model import Node
from onnxfuse.ir.context import (
    LoweringContext,
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
from onnxfuse.ir.scalars import FLOAT16
from onnxfuse.ir.tensors import Tensor
from onnxfuse.operators.arithmetic import ELEMENTARY, SOFTMAX, per_input
from onnxfuse.operators.operands import axis_of, integer_attribute, number_attribute, operand, optional
from onnxfuse.operators.record import OPAQUE, PLAIN, REDUCTION, RuntimeKernel, define
from onnxfuse.operators.reductions import reduced


def norm_types(context: TypeContext) -> list[Type]:
    shape = context.shape()
    if shape is None:
        return [Type(context.dtype())]
    axis = context.axis(len(shape), -1)
    reduced = shape[:axis] + (dim(1),) * (len(shape) - axis)
    kind = int(context.attribute("stash_type", FLOAT))
    return [Type(context.dtype(), shape), Type(kind, reduced), Type(kind, reduced)]


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


def lower_softmax(node: Node, context: LoweringContext) -> Tensor:
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


def layer_normalization(node: Node, context: LoweringContext) -> list[Tensor | None]:
    source = operand(node, context, 0)
    rank = len(source.shape)
    axes = tuple(range(axis_of(node, "axis", -1, rank), rank))
    normal, average, inverse = layer_norm(accumulate(source), axes, number_attribute(node, "epsilon", 1e-5))
    result = scaled(normal, optional(node, context, 1), optional(node, context, 2))
    return [declare(result, source.dtype), average, inverse]


def rms_normalization(node: Node, context: LoweringContext) -> Tensor:
    source = operand(node, context, 0)
    rank = len(source.shape)
    axes = tuple(range(axis_of(node, "axis", -1, rank), rank))
    normal = rms_norm(accumulate(source), axes, number_attribute(node, "epsilon", 1e-5))
    return declare(scaled(normal, optional(node, context, 1), None), source.dtype)


def instance_normalization(node: Node, context: LoweringContext) -> Tensor:
    source = operand(node, context, 0)
    rank = len(source.shape)
    normal, _, _ = layer_norm(accumulate(source), tuple(range(2, rank)), number_attribute(node, "epsilon", 1e-5))
    # The operator must have both; a GroupNorm that is spelled by it has ones and zeros here, and weights behind it.
    scale, bias = (
        reshape(operand(node, context, place), (source.shape[1],) + (dim(1),) * (rank - 2))
        if (weight := node.inputs[place]) is None or context.changes(weight, neutral) else None
        for place, neutral in ((1, 1), (2, 0))
    )
    return declare(scaled(normal, scale, bias), source.dtype)


def group_normalization(node: Node, context: LoweringContext) -> Tensor:
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


def lp_normalization(node: Node, context: LoweringContext) -> Tensor:
    source = operand(node, context, 0)
    axes, p = (axis_of(node, "axis", -1, len(source.shape)),), integer_attribute(node, "p", 2)
    x = accumulate(source)
    norm = reduced("L1" if p == 1 else "L2", x, axes)
    safe = apply("where", test("eq", norm, like(0.0, x)), like(1.0, x), norm)
    return declare(apply("div", x, safe), source.dtype)


define("Softmax", kind=REDUCTION, types=same, lowering=lower_softmax, arithmetic=per_input(SOFTMAX), host=(),
       runtime=RuntimeKernel.SOFTMAX)
define("LogSoftmax", kind=REDUCTION, types=same, lowering=lower_softmax, arithmetic=per_input(4 + ELEMENTARY), host=(),
       runtime=RuntimeKernel.SOFTMAX)
define("Hardmax", kind=REDUCTION, types=same, lowering=None, arithmetic=per_input(2), host=(), runtime=PLAIN)
# Mean, difference, square, sum, scale, weight, bias.
define("LayerNormalization", kind=REDUCTION, types=norm_types, lowering=layer_normalization, arithmetic=per_input(7),
       host=(), runtime=RuntimeKernel.NORM)
define("InstanceNormalization", kind=REDUCTION, types=same, lowering=instance_normalization, arithmetic=per_input(7),
       host=(), runtime=RuntimeKernel.NORM)
define("GroupNormalization", kind=REDUCTION, types=same, lowering=group_normalization, arithmetic=per_input(7), host=(),
       runtime=RuntimeKernel.NORM)
# Square, sum, scale, weight.
define("RMSNormalization", kind=REDUCTION, types=norm_types, lowering=rms_normalization, arithmetic=per_input(4),
       host=(), runtime=PLAIN)
define("LpNormalization", kind=REDUCTION, types=same, lowering=lp_normalization, arithmetic=per_input(3), host=(),
       runtime=PLAIN)
define("MeanVarianceNormalization", kind=REDUCTION, types=same, lowering=None, arithmetic=per_input(6), host=(),
       runtime=PLAIN)
define("LRN", kind=OPAQUE, types=same, lowering=None, arithmetic=per_input(4), host=(), runtime=PLAIN, random=False)
