"""Pointwise and row operators of com.microsoft, and the operators that only the canonical view has."""

from __future__ import annotations

from onnxfuse.graph.model import Node
from onnxfuse.lowering.context import Context, accumulate, apply, declare, like, test, wide
from onnxfuse.lowering.ir import Tensor
from onnxfuse.lowering.operators.activations import gelu, gelu_tanh, silu
from onnxfuse.lowering.operators.registry import lowers, number_attribute, operand, optional
from onnxfuse.lowering.operators.rows import layer_norm, rms_norm, scaled, softmax
from onnxfuse.lowering.operators.views import axis_of

MICROSOFT = "com.microsoft"
CANONICAL = "onnxfuse.canonical"


@lowers("BiasGelu", "Gelu", "FastGelu", domain=MICROSOFT)
def biased_gelu(node: Node, context: Context) -> Tensor:
    source, bias = operand(node, context, 0), optional(node, context, 1)
    x = source if bias is None else apply("add", source, bias)
    return (gelu_tanh if node.op == "FastGelu" else gelu)(x)


@lowers("QuickGelu", domain=MICROSOFT)
@lowers("QuickGelu", domain=CANONICAL)
def quick_gelu(node: Node, context: Context) -> Tensor:
    source = operand(node, context, 0)
    return silu(source, number_attribute(node, "alpha", 1.702))


@lowers("BiasAdd", domain=MICROSOFT)
def bias_add(node: Node, context: Context) -> Tensor:
    return apply("add", apply("add", operand(node, context, 0), operand(node, context, 1)), operand(node, context, 2))


@lowers("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(node: Node, context: Context) -> list[Tensor | None]:
    source, bias = operand(node, context, 0), optional(node, context, 4)
    total = apply("add", wide(source), wide(operand(node, context, 1)))
    total = total if bias is None else apply("add", total, wide(bias))
    axes = (len(total.shape) - 1,)
    normal, average, inverse = layer_norm(accumulate(total), axes, number_attribute(node, "epsilon", 1e-12))
    result = scaled(normal, operand(node, context, 2), optional(node, context, 3))
    return [declare(result, source.dtype), average, inverse, declare(total, source.dtype)]


@lowers("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_rms_normalization(node: Node, context: Context) -> list[Tensor | None]:
    source, bias = operand(node, context, 0), optional(node, context, 3)
    total = apply("add", wide(source), wide(operand(node, context, 1)))
    total = total if bias is None else apply("add", total, wide(bias))
    normal = rms_norm(accumulate(total), (len(total.shape) - 1,), number_attribute(node, "epsilon", 1e-12))
    return [
        declare(scaled(normal, operand(node, context, 2), None), source.dtype),
        None,
        None,
        declare(total, source.dtype),
    ]


@lowers("SimplifiedLayerNormalization")
@lowers("SimplifiedLayerNormalization", domain=MICROSOFT)
def simplified_layer_normalization(node: Node, context: Context) -> list[Tensor | None]:
    source = operand(node, context, 0)
    rank = len(source.shape)
    axes = tuple(range(axis_of(node, "axis", -1, rank), rank))
    normal = rms_norm(accumulate(source), axes, number_attribute(node, "epsilon", 1e-5))
    return [declare(scaled(normal, operand(node, context, 1), None), source.dtype), None]


@lowers("Silu", domain=CANONICAL)
def canonical_silu(node: Node, context: Context) -> Tensor:
    source = operand(node, context, 0)
    return silu(source)


@lowers("SafeSoftmax", domain=CANONICAL)
def safe_softmax(node: Node, context: Context) -> Tensor:
    """Softmax whose NaNs (rows that are -infinity everywhere, above all) are replaced by zero."""
    source = operand(node, context, 0)
    axes = (axis_of(node, "axis", -1, len(source.shape)),)
    result = softmax(source, axes)
    return declare(apply("where", test("isnan", result), like(0.0, result), result), source.dtype)
