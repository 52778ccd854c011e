"""Pointwise and row operators of ONNX Runtime's own domain, which a model already optimised holds, and those that only
the canonical view has."""

from __future__ import annotations

import onnx

from onnxfuse.graph.context import FLOAT, Type, TypeContext, same
from onnxfuse.graph.dims import dim
from onnxfuse.graph.model import Node
from onnxfuse.ir.context import LoweringContext, accumulate, apply, declare, like, test, wide
from onnxfuse.ir.tensors import Tensor
from onnxfuse.operators.activations import gelu, gelu_tanh, silu
from onnxfuse.operators.arithmetic import ELEMENTARY, ROOT, SOFTMAX, per_input, per_output
from onnxfuse.operators.norms import layer_norm, rms_norm, scaled, softmax
from onnxfuse.operators.operands import axis_of, number_attribute, operand, optional
from onnxfuse.operators.record import CANONICAL, MICROSOFT, PLAIN, POINTWISE, REDUCTION, RuntimeKernel, define, opaque


def bias_dropout_types(context: TypeContext) -> list[Type]:
    bits = context.node.op.startswith("Bitmask")
    mask = Type(int(onnx.TensorProto.UINT32)) if bits else Type(int(onnx.TensorProto.BOOL), context.shape())
    return [*same(context), mask]


def bias_split_gelu_types(context: TypeContext) -> list[Type]:
    shape = context.shape()
    return [Type(context.dtype(), None if shape is None else (*shape[:-1], shape[-1] // 2))]


def _statistics(context: TypeContext, kind: int) -> Type:
    shape = context.shape()
    axis = None if shape is None else context.axis(len(shape), -1)
    return Type(kind, None if shape is None else shape[:axis] + (dim(1),) * (len(shape) - (axis or 0)))


def simplified_layer_norm_types(context: TypeContext) -> list[Type]:
    return [*same(context), _statistics(context, int(context.attribute("stash_type", FLOAT)))]


def skip_layer_norm_types(context: TypeContext) -> list[Type]:
    statistics = _statistics(context, FLOAT)
    return [*same(context), statistics, statistics, *same(context)]


def skip_group_norm_types(context: TypeContext) -> list[Type]:
    return same(context) * 2


def embed_layer_norm_types(context: TypeContext) -> list[Type]:
    ids, table = context.shape(0), context.shape(2)
    if ids is None or table is None:
        return [Type(context.dtype(2))]
    whole = Type(context.dtype(2), (*ids, table[-1]))
    return [whole, Type(int(onnx.TensorProto.INT32), ids[:1]), whole]


def biased_gelu(node: Node, context: LoweringContext) -> Tensor:
    source, bias = operand(node, context, 0), optional(node, context, 1)
    x = source if bias is None else apply("add", source, bias)
    return (gelu_tanh if node.op == "FastGelu" else gelu)(x)


def quick_gelu(node: Node, context: LoweringContext) -> Tensor:
    source = operand(node, context, 0)
    return silu(source, number_attribute(node, "alpha", 1.702))


def bias_add(node: Node, context: LoweringContext) -> Tensor:
    return apply("add", apply("add", operand(node, context, 0), operand(node, context, 1)), operand(node, context, 2))


def _skipped(node: Node, context: LoweringContext, bias: Tensor | None) -> tuple[Tensor, int]:
    """What is normalised: the sum of the first two inputs and a bias; and the element type of the results."""
    source = operand(node, context, 0)
    total = apply("add", wide(source), wide(operand(node, context, 1)))
    return total if bias is None else apply("add", total, wide(bias)), source.dtype


def skip_layer_normalization(node: Node, context: LoweringContext) -> list[Tensor | None]:
    total, dtype = _skipped(node, context, optional(node, context, 4))
    axes = (len(total.shape) - 1,)
    normal, average, inverse = layer_norm(accumulate(total), axes, number_attribute(node, "epsilon", 1e-12))
    result = scaled(normal, operand(node, context, 2), optional(node, context, 3))
    return [declare(result, dtype), average, inverse, declare(total, dtype)]


def skip_rms_normalization(node: Node, context: LoweringContext) -> list[Tensor | None]:
    total, dtype = _skipped(node, context, optional(node, context, 3))
    normal = rms_norm(accumulate(total), (len(total.shape) - 1,), number_attribute(node, "epsilon", 1e-12))
    return [declare(scaled(normal, operand(node, context, 2), None), dtype), None, None, declare(total, dtype)]


def simplified_layer_normalization(node: Node, context: LoweringContext) -> list[Tensor | None]:
    source = operand(node, context, 0)
    rank = len(source.shape)
    axes = tuple(range(axis_of(node, "axis", -1, rank), rank))
    normal = rms_norm(accumulate(source), axes, number_attribute(node, "epsilon", 1e-5))
    return [declare(scaled(normal, operand(node, context, 1), None), source.dtype), None]


def canonical_silu(node: Node, context: LoweringContext) -> Tensor:
    source = operand(node, context, 0)
    return silu(source)


def safe_softmax(node: Node, context: LoweringContext) -> Tensor:
    """Softmax whose NaNs (rows that are -infinity everywhere, above all) are replaced by zero."""
    source = operand(node, context, 0)
    axes = (axis_of(node, "axis", -1, len(source.shape)),)
    result = softmax(source, axes)
    return declare(apply("where", test("isnan", result), like(0.0, result), result), source.dtype)


define("BiasGelu", "FastGelu", domain=MICROSOFT, kind=POINTWISE, types=same, lowering=biased_gelu,
       arithmetic=per_output(ELEMENTARY), host=(), runtime=PLAIN, activation=False)
define("Gelu", domain=MICROSOFT, kind=POINTWISE, types=same, lowering=biased_gelu, arithmetic=per_output(ELEMENTARY),
       host=(), runtime=RuntimeKernel.GELU, activation=False)
define("QuickGelu", domain=MICROSOFT, kind=POINTWISE, types=same, lowering=quick_gelu,
       arithmetic=per_output(ELEMENTARY), host=(), runtime=RuntimeKernel.CURVE, activation=False)
define("BiasAdd", domain=MICROSOFT, kind=POINTWISE, types=same, lowering=bias_add, arithmetic=per_output(2), host=(),
       runtime=PLAIN, activation=False)
define("BiasDropout", domain=MICROSOFT, kind=POINTWISE, types=bias_dropout_types, lowering=None,
       arithmetic=per_output(2), host=(), runtime=PLAIN, activation=False)
opaque("BitmaskBiasDropout", "BitmaskDropout", domain=MICROSOFT, types=bias_dropout_types, host=(), random=False)
opaque("BiasSplitGelu", domain=MICROSOFT, types=bias_split_gelu_types, host=(), random=False)
define("BiasSoftmax", domain=MICROSOFT, kind=REDUCTION, types=same, lowering=None,
       arithmetic=per_input(4 + ELEMENTARY + ROOT), host=(), runtime=PLAIN)
define("GroupNorm", domain=MICROSOFT, kind=REDUCTION, types=same, lowering=None, arithmetic=per_input(7), host=(),
       runtime=PLAIN)
define("SkipGroupNorm", domain=MICROSOFT, kind=REDUCTION, types=skip_group_norm_types, lowering=None,
       arithmetic=per_input(8), host=(), runtime=PLAIN)
define("SkipLayerNormalization", domain=MICROSOFT, kind=REDUCTION, types=skip_layer_norm_types,
       lowering=skip_layer_normalization, arithmetic=per_input(8), host=(), runtime=PLAIN)
define("SkipSimplifiedLayerNormalization", domain=MICROSOFT, kind=REDUCTION, types=skip_layer_norm_types,
       lowering=skip_rms_normalization, arithmetic=per_input(5), host=(), runtime=PLAIN)
for _domain in ("", MICROSOFT):
    define("SimplifiedLayerNormalization", domain=_domain, kind=REDUCTION, types=simplified_layer_norm_types,
           lowering=simplified_layer_normalization, arithmetic=per_input(4), host=(), runtime=PLAIN)
opaque("EmbedLayerNormalization", domain=MICROSOFT, types=embed_layer_norm_types, host=(), random=False)

define("Silu", domain=CANONICAL, kind=POINTWISE, types=None, lowering=canonical_silu, arithmetic=per_output(ELEMENTARY),
       host=(), runtime=PLAIN, activation=True)
define("QuickGelu", domain=CANONICAL, kind=POINTWISE, types=None, lowering=quick_gelu,
       arithmetic=per_output(ELEMENTARY), host=(), runtime=RuntimeKernel.CURVE, activation=True)
define("SafeSoftmax", domain=CANONICAL, kind=REDUCTION, types=None, lowering=safe_softmax,
       arithmetic=per_input(SOFTMAX), host=(), runtime=PLAIN)
