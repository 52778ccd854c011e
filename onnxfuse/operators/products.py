"""Matrix products and what they are part of: attention."""

from __future__ import annotations

from math import prod

import onnx

from onnxfuse.graph.context import FLOAT, Type, TypeContext, same
from onnxfuse.graph.dims import Dim, dim
from onnxfuse.graph.model import Node, Shape
from onnxfuse.graph.sizes import Sizes
from onnxfuse.operators.arithmetic import SOFTMAX, elements, per_output, sizes_of, uncounted
from onnxfuse.operators.attending import attention, multi_head_attention, packed_attention
from onnxfuse.operators.multiplying import (
    einsum,
    fused_matmul,
    gemm,
    matmul,
    matmul_integer,
    qgemm,
    qlinear_matmul,
    scaled_integers,
)
from onnxfuse.operators.record import HEAVY, MICROSOFT, PLAIN, RuntimeKernel, define

INT32 = int(onnx.TensorProto.INT32)


def matrix_product(context: TypeContext, a: Shape | None, b: Shape | None) -> Shape | None:
    """Sizes of a product under NumPy's rules for matmul."""
    if a is None or b is None or not a or not b:
        return None
    rows = a[-2:-1] if len(a) > 1 else ()
    columns = b[-1:] if len(b) > 1 else ()
    rank = max(len(a), len(b)) - 2 + len(rows) + len(columns) if max(len(a), len(b)) > 1 else 0
    context.demand(a[-1], b[-2] if len(b) > 1 else b[-1])
    batch = context.meet(a[:-2], b[:-2], rank=rank)
    return None if batch is None else batch + rows + columns


def matmul_types(context: TypeContext) -> list[Type]:
    second = 3 if context.node.op == "QLinearMatMul" else 1
    dtype = {"MatMul": context.dtype(), "MatMulInteger": INT32, "QLinearMatMul": context.dtype(7)}[context.node.op]
    return [Type(dtype, matrix_product(context, context.shape(0), context.shape(second)))]


def gemm_types(context: TypeContext) -> list[Type]:
    a, b = context.shape(0), context.shape(1)
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return [Type(context.dtype(), context.unknown_shape(2))]
    transposed = int(bool(context.attribute("transA", 0))), int(not context.attribute("transB", 0))
    context.demand(a[1 - transposed[0]], b[1 - transposed[1]])
    return [Type(context.dtype(), (a[transposed[0]], b[transposed[1]]))]


def einsum_types(context: TypeContext) -> list[Type]:
    equation = str(context.attribute("equation")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    letters: dict[str, Dim] = {}
    dots: list[Shape] = []
    for index, term in enumerate(terms):
        shape = context.shape(index)
        if shape is None:
            return [Type(context.dtype())]
        before, ellipsis, after = term.partition("...")
        rest = len(shape) - len(before) - len(after)
        if rest < 0 or (rest and not ellipsis):
            return [Type(context.dtype())]
        places = [*zip(before, shape, strict=False), *zip(after, shape[len(shape) - len(after):], strict=True)]
        for letter, size in places:
            old = letters.get(letter)
            # One letter means one size, up to broadcasting from 1; a number tells most.
            if old is None or old == 1 or (old.value is None and size.value not in (None, 1)):
                letters[letter] = size
        if ellipsis:
            dots.append(shape[len(before):len(before) + rest])
    if not arrow:
        right = ("..." if dots else "") + "".join(sorted(c for c in letters if left.count(c) == 1))
    before, ellipsis, after = right.partition("...")
    rank = len(before) + len(after) + (max(map(len, dots), default=0) if ellipsis else 0)
    middle = context.meet(*dots, front=len(before), rank=rank) if ellipsis else ()
    if middle is None or any(letter not in letters for letter in before + after):
        return [Type(context.dtype())]
    return [Type(context.dtype(), tuple(letters[c] for c in before) + middle + tuple(letters[c] for c in after))]


def attention_types(context: TypeContext) -> list[Type]:
    q, k, v = context.shape(0), context.shape(1), context.shape(2)
    dtype = context.dtype()
    if q is None or k is None or v is None:
        return [Type(dtype)] * 4
    past = context.shape(4)
    before = past[2] if past is not None else dim(0)
    if context.has(4) and past is None:
        return [Type(dtype)] * 4
    if len(q) == 4:
        total = before + k[2]
        return [
            Type(dtype, (*q[:3], v[3])), Type(dtype, (*k[:2], total, k[3])), Type(dtype, (*v[:2], total, v[3])),
            Type(dtype, (*q[:3], total)),
        ]
    q_heads, kv_heads = int(context.attribute("q_num_heads")), int(context.attribute("kv_num_heads"))
    total, width = before + k[1], v[2] // kv_heads
    return [
        Type(dtype, (*q[:2], width * q_heads)),
        Type(dtype, (q[0], dim(kv_heads), total, k[2] // kv_heads)), Type(dtype, (q[0], dim(kv_heads), total, width)),
        Type(dtype, (q[0], dim(q_heads), q[1], total)),
    ]


def _transposed(shape: Shape | None, matrix: bool, batch: bool) -> Shape | None:
    if shape is None or len(shape) < 2:
        return shape
    if batch:
        # The first axis moves to the place before the last.
        shape = (*shape[1:-1], shape[0], shape[-1])
    return (*shape[:-2], shape[-1], shape[-2]) if matrix else shape


def fused_matmul_types(context: TypeContext) -> list[Type]:
    sides = [
        _transposed(context.shape(index), bool(context.attribute(f"trans{side}", 0)),
                    bool(context.attribute(f"transBatch{side}", 0)))
        for index, side in enumerate("AB")
    ]
    return [Type(context.dtype(), matrix_product(context, sides[0], sides[1]))]


def scaled_matmul_types(context: TypeContext) -> list[Type]:
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


def packed_matmul_types(context: TypeContext) -> list[Type]:
    shape, columns = context.shape(), context.attribute("N")
    if shape is None or columns is None:
        return [Type(context.dtype())]
    return [Type(context.dtype(), (*shape[:-1], dim(int(columns))))]


def packed_attention_types(context: TypeContext) -> list[Type]:
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


def multi_head_attention_types(context: TypeContext) -> list[Type]:
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


def matmul_arithmetic(node: Node, sizes: Sizes) -> int | None:
    """2 m n k of a product whose first operand may be transposed."""
    out, left = elements(node.outputs[0], sizes), sizes_of(node.inputs[0], sizes)
    if out is None or not left:
        return None
    return 2 * out * (left[-2] if node.attributes.get("transA", 0) and len(left) > 1 else left[-1])


def _gemm_arithmetic(node: Node, sizes: Sizes) -> int | None:
    out, left = elements(node.outputs[0], sizes), sizes_of(node.inputs[0], sizes)
    if out is None or left is None or len(left) < 2:
        return None
    bias = out if len(node.inputs) > 2 and node.inputs[2] is not None else 0
    return 2 * out * (left[0] if node.attributes.get("transA", 0) else left[-1]) + bias


def _packed_arithmetic(node: Node, sizes: Sizes) -> int | None:
    """Of a product by weights of a few bits, whose depth is an attribute."""
    return per_output(2 * int(node.attributes["K"]))(node, sizes)


def _einsum_arithmetic(node: Node, sizes: Sizes) -> int | None:
    """Twice the product of all index sizes for two operands; an ellipsis stands for the axes it covers."""
    terms = str(node.attributes["equation"]).replace(" ", "").split("->")[0].split(",")
    extents: dict[str, int] = {}
    if len(terms) != len(node.inputs):
        return None
    for term, value in zip(terms, node.inputs, strict=True):
        shape = sizes_of(value, sizes)
        named = len(term.replace("...", ""))
        if shape is None or len(shape) < named or (len(shape) > named and "..." not in term):
            return None
        hidden = len(shape) - named
        head, _, tail = term.partition("...")
        labels = [*head, *(f".{place}" for place in range(hidden, 0, -1)), *tail]
        for label, size in zip(labels, shape, strict=True):
            extents[label] = max(extents.get(label, 1), size)
    return max(len(terms), 1) * prod(extents.values())


def _attention_arithmetic(node: Node, sizes: Sizes) -> int | None:
    """Two products of query rows by key rows by head size, and a softmax of the scores."""
    shapes = [sizes_of(node.inputs[place], sizes) if len(node.inputs) > place else None for place in range(3)]
    query, key, value = shapes
    if query is None or key is None or value is None or len(query) != len(key) or len(query) not in (3, 4):
        return None
    heads = int(node.attributes.get("q_num_heads", node.attributes.get("num_heads", 1)))
    if len(query) == 4:
        heads, width, value_width = query[1], query[1] * query[3], query[1] * value[3]
    else:
        key_heads = int(node.attributes.get("kv_num_heads", heads))
        if key_heads <= 0 or heads <= 0:
            return None
        width, value_width = query[2], value[2] * heads // key_heads
    rows, columns = query[-2], key[-2]
    return query[0] * rows * columns * (2 * width + 2 * value_width + heads * SOFTMAX)


def _packed_attention_arithmetic(node: Node, sizes: Sizes) -> int | None:
    """The product that gives queries, keys and values, and what becomes of these."""
    shapes = [sizes_of(node.inputs[place], sizes) for place in range(2)]
    rows, weights = shapes
    if rows is None or weights is None or len(rows) != 3 or len(weights) != 2:
        return None
    heads, (batch, length, depth) = int(node.attributes.get("num_heads", 1)), rows
    given = node.attributes.get("qkv_hidden_sizes")
    width, value_width = (int(given[0]), int(given[2])) if given else (weights[1] // 3, weights[1] // 3)
    attended = length * length * (2 * width + 2 * value_width + heads * SOFTMAX)
    return batch * (2 * length * depth * weights[1] + attended)


define("MatMul", kind=HEAVY, types=matmul_types, lowering=matmul, arithmetic=matmul_arithmetic, host=(),
       runtime=RuntimeKernel.PRODUCT)
define("MatMulInteger", kind=HEAVY, types=matmul_types, lowering=matmul_integer, arithmetic=matmul_arithmetic, host=(),
       runtime=PLAIN)
define("QLinearMatMul", kind=HEAVY, types=matmul_types, lowering=qlinear_matmul, arithmetic=matmul_arithmetic, host=(),
       runtime=PLAIN)
define("FusedMatMul", "TransposeMatMul", domain=MICROSOFT, kind=HEAVY, types=fused_matmul_types, lowering=fused_matmul,
       arithmetic=matmul_arithmetic, host=(), runtime=PLAIN)
define("FusedMatMulActivation", domain=MICROSOFT, kind=HEAVY, types=fused_matmul_types, lowering=None,
       arithmetic=matmul_arithmetic, host=(), runtime=PLAIN)
define("MatMulIntegerToFloat", domain=MICROSOFT, kind=HEAVY, types=scaled_matmul_types, lowering=scaled_integers,
       arithmetic=matmul_arithmetic, host=(), runtime=PLAIN)
define("QGemm", domain=MICROSOFT, kind=HEAVY, types=scaled_matmul_types, lowering=qgemm, arithmetic=matmul_arithmetic,
       host=(), runtime=PLAIN)
define("DynamicQuantizeMatMul", "GemmFloat8", domain=MICROSOFT, kind=HEAVY, types=scaled_matmul_types, lowering=None,
       arithmetic=matmul_arithmetic, host=(), runtime=PLAIN)
define("MatMulNBits", "MatMulBnb4", "MatMulFpQ4", domain=MICROSOFT, kind=HEAVY, types=packed_matmul_types,
       lowering=None, arithmetic=_packed_arithmetic, host=(), runtime=PLAIN)
define("Gemm", kind=HEAVY, types=gemm_types, lowering=gemm, arithmetic=_gemm_arithmetic, host=(),
       runtime=RuntimeKernel.GEMM)
define("FusedGemm", domain=MICROSOFT, kind=HEAVY, types=gemm_types, lowering=None, arithmetic=_gemm_arithmetic, host=(),
       runtime=PLAIN)
define("GemmFastGelu", domain=MICROSOFT, kind=HEAVY, types=None, lowering=None, arithmetic=_gemm_arithmetic, host=(),
       runtime=PLAIN)
define("Einsum", kind=HEAVY, types=einsum_types, lowering=einsum, arithmetic=_einsum_arithmetic, host=(), runtime=PLAIN)
define("Attention", kind=HEAVY, types=attention_types, lowering=attention, arithmetic=_attention_arithmetic, host=(),
       runtime=PLAIN)
define("LinearAttention", kind=HEAVY, types=None, lowering=None, arithmetic=uncounted, host=(), runtime=PLAIN)
define("MultiHeadAttention", domain=MICROSOFT, kind=HEAVY, types=multi_head_attention_types,
       lowering=multi_head_attention, arithmetic=_attention_arithmetic, host=(), runtime=PLAIN)
define("Attention", domain=MICROSOFT, kind=HEAVY, types=packed_attention_types, lowering=packed_attention,
       arithmetic=_packed_attention_arithmetic, host=(), runtime=PLAIN)
define("QAttention", domain=MICROSOFT, kind=HEAVY, types=packed_attention_types, lowering=None, arithmetic=uncounted,
       host=(), runtime=PLAIN)
define("LongformerAttention", domain=MICROSOFT, kind=HEAVY, types=same, lowering=None, arithmetic=uncounted, host=(),
       runtime=PLAIN)
define("SparseAttention", "PackedAttention", "PackedMultiHeadAttention", "DecoderMaskedMultiHeadAttention",
       "DecoderMaskedSelfAttention", "MoE", "QMoE", domain=MICROSOFT, kind=HEAVY, types=None, lowering=None,
       arithmetic=uncounted, host=(), runtime=PLAIN)
