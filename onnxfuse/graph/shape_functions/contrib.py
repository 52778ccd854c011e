"""Operators of com.microsoft that a model already optimised by ONNX Runtime holds."""

from __future__ import annotations

from functools import partial

import onnx

from onnxfuse.graph.dims import Dim, dim
from onnxfuse.graph.model import Shape
from onnxfuse.graph.shape_functions import indexing, pointwise, products, views
from onnxfuse.graph.shape_functions.context import FLOAT, Context, Type, same, shape_function
from onnxfuse.graph.shape_functions.products import matrix_product, sliding

contrib = partial(shape_function, domain="com.microsoft")

contrib(
    "Gelu", "FastGelu", "QuickGelu", "BiasGelu", "BiasSoftmax", "BiasAdd", "RotaryEmbedding", "GroupNorm", "Inverse",
    "Trilu", "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "LongformerAttention",
)(same)

# Those that share the rule of the standard operator.
contrib("FusedConv", "QLinearConv")(products.conv)
contrib("FusedGemm")(products.gemm)
contrib("QuantizeLinear")(pointwise.quantize)
contrib("DequantizeLinear")(pointwise.dequantize)
contrib("GridSample")(indexing.grid_sample)
contrib("Range")(views.range_)
contrib("Pad")(views.pad)


@contrib("BiasDropout", "BitmaskBiasDropout", "BitmaskDropout")
def _bias_dropout(context: Context) -> list[Type]:
    bits = context.node.op.startswith("Bitmask")
    mask = Type(int(onnx.TensorProto.UINT32)) if bits else Type(int(onnx.TensorProto.BOOL), context.shape())
    return [*same(context), mask]


@contrib("BiasSplitGelu")
def _bias_split_gelu(context: Context) -> list[Type]:
    shape = context.shape()
    return [Type(context.dtype(), None if shape is None else (*shape[:-1], shape[-1] // 2))]


def _statistics(context: Context, kind: int) -> Type:
    shape = context.shape()
    axis = None if shape is None else context.axis(len(shape), -1)
    return Type(kind, None if shape is None else shape[:axis] + (dim(1),) * (len(shape) - (axis or 0)))


@shape_function("SimplifiedLayerNormalization")
@contrib("SimplifiedLayerNormalization")
def _simplified_layer_norm(context: Context) -> list[Type]:
    return [*same(context), _statistics(context, int(context.attribute("stash_type", FLOAT)))]


@contrib("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
def _skip_layer_norm(context: Context) -> list[Type]:
    statistics = _statistics(context, FLOAT)
    return [*same(context), statistics, statistics, *same(context)]


@contrib("SkipGroupNorm")
def _skip_group_norm(context: Context) -> list[Type]:
    return same(context) * 2


@contrib("EmbedLayerNormalization")
def _embed_layer_norm(context: Context) -> list[Type]:
    ids, table = context.shape(0), context.shape(2)
    if ids is None or table is None:
        return [Type(context.dtype(2))]
    whole = Type(context.dtype(2), (*ids, table[-1]))
    return [whole, Type(int(onnx.TensorProto.INT32), ids[:1]), whole]


def _transposed(shape: Shape | None, matrix: bool, batch: bool) -> Shape | None:
    if shape is None or len(shape) < 2:
        return shape
    if batch:
        # The first axis moves to the place before the last.
        shape = (*shape[1:-1], shape[0], shape[-1])
    return (*shape[:-2], shape[-1], shape[-2]) if matrix else shape


@contrib("FusedMatMul", "TransposeMatMul", "FusedMatMulActivation")
def _fused_matmul(context: Context) -> list[Type]:
    sides = [
        _transposed(context.shape(index), bool(context.attribute(f"trans{side}", 0)),
                    bool(context.attribute(f"transBatch{side}", 0)))
        for index, side in enumerate("AB")
    ]
    return [Type(context.dtype(), matrix_product(context, sides[0], sides[1]))]


@contrib("MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QGemm", "GemmFloat8")
def _scaled_matmul(context: Context) -> list[Type]:
    a, b, dtype = context.shape(0), context.shape(1), context.dtype()
    match context.node.op:
        case "MatMulIntegerToFloat":
            dtype = context.dtype(2)
        case "QGemm":
            b, dtype = context.shape(3), context.dtype(8) if context.has(8) else FLOAT
        case "GemmFloat8":
            dtype = int(context.attribute("dtype", FLOAT))
    a = _transposed(a, bool(context.attribute("transA", 0)), False)
    return [Type(dtype, matrix_product(context, a, _transposed(b, bool(context.attribute("transB", 0)), False)))]


@contrib("MatMulNBits", "MatMulBnb4", "MatMulFpQ4")
def _packed_matmul(context: Context) -> list[Type]:
    shape, columns = context.shape(), context.attribute("N")
    if shape is None or columns is None:
        return [Type(context.dtype())]
    return [Type(context.dtype(), (*shape[:-1], dim(int(columns))))]


@contrib("QLinearAdd", "QLinearMul")
def _quantised_binary(context: Context) -> list[Type]:
    return [Type(context.dtype(), context.meet(context.shape(0), context.shape(3)))]


@contrib("QLinearGlobalAveragePool")
def _quantised_global_pool(context: Context) -> list[Type]:
    shape = context.shape()
    if shape is None:
        return [Type(context.dtype())]
    if context.attribute("channels_last", 0):
        return [Type(context.dtype(), (shape[0], *(dim(1),) * (len(shape) - 2), shape[-1]))]
    return [Type(context.dtype(), shape[:2] + (dim(1),) * (len(shape) - 2))]


@contrib("NhwcConv", "NhwcFusedConv")
def _nhwc_conv(context: Context) -> list[Type]:
    shape, weight = context.shape(0), context.shape(1)
    if shape is None or weight is None:
        return [Type(context.dtype())]
    # Weights are channels-last as well: [outputs, kernel..., inputs].
    return [Type(context.dtype(), (shape[0], *sliding(context, shape[1:-1], weight[1:-1]), weight[0]))]


@contrib("Attention", "QAttention")
def _attention(context: Context) -> list[Type]:
    shape, weight = context.shape(0), context.shape(1)
    dtype = context.dtype(0) if context.node.op == "Attention" else context.dtype(3)
    if shape is None or weight is None:
        return [Type(dtype), Type(dtype)]
    sizes = context.attribute("qkv_hidden_sizes")
    width = dim(int(sizes[2])) if sizes else weight[1] // 3
    heads = int(context.attribute("num_heads"))
    return [
        Type(dtype, (shape[0], shape[1], width)),
        Type(dtype, (dim(2), shape[0], dim(heads), context.unknown(3, 5, 1), width // heads)),
    ]


@contrib("MultiHeadAttention")
def _multi_head_attention(context: Context) -> list[Type]:
    query, key, value = context.shape(0), context.shape(1), context.shape(2)
    dtype, heads = context.dtype(), int(context.attribute("num_heads"))
    if query is None:
        return [Type(dtype)] * 3
    width: Dim | None = None
    if len(query) == 5:
        width = query[2] * query[4]
    elif value is not None:
        width = value[2] if len(value) == 3 else value[1] * value[3]
    elif key is not None and len(key) == 5:
        width = key[2] * key[4]
    if width is None:
        return [Type(dtype, context.unknown_shape(3))] + [Type(dtype)] * 2
    keys = (query[0], dim(heads), context.unknown(2, 4, 1), query[-1] if len(query) == 5 else query[-1] // heads)
    values = (query[0], dim(heads), context.unknown(2, 4, 2), width // heads)
    return [Type(dtype, (query[0], query[1], width)), Type(dtype, keys), Type(dtype, values)]


@contrib("GroupQueryAttention")
def _group_query_attention(context: Context) -> list[Type]:
    query, dtype = context.shape(0), context.dtype()
    if query is None:
        return [Type(dtype)] * 3
    heads, pairs = int(context.attribute("num_heads")), int(context.attribute("kv_num_heads"))
    # Without keys of its own the first input packs queries, keys and values.
    head = query[2] // heads if context.has(1) else query[2] // (heads + 2 * pairs)
    result = [Type(dtype, (query[0], query[1], head * heads))]
    for output in (1, 2):
        result.append(Type(dtype, (query[0], dim(pairs), context.unknown(2, 4, output), head)))
    return result
