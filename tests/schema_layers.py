"""Operands of layers: products, convolutions, pools, norms, recurrences, attention, quantisation, signals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto
from schema_builder import Builder
from schema_operands import Drawn, Named, Operands, Schema, operands, some_axes, types_of
from schema_values import FLOAT, FLOATS, INT64, Known, numpy_type

INT8, UINT8, INT32 = TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32


def exact(*sizes: int) -> list[tuple[int, int]]:
    return [(size, size) for size in sizes]


def floats(b: Builder, schema: Schema, place: int = 0) -> int | None:
    """The graph's floating type where the operator takes it, or another."""
    kinds = [kind for kind in types_of(schema, place) if kind in FLOATS]
    return None if not kinds else b.kind if b.kind in kinds else FLOAT if FLOAT in kinds else b.rng.choice(kinds)


def image(b: Builder, kinds: Sequence[int], spatial: int | None = None) -> Known | None:
    """Something with a batch, channels and ``spatial`` further axes, all of fixed sizes but the batch."""
    rank = (spatial or b.rng.randint(1, 2)) + 2
    found = b.find(lambda v: v.dtype in kinds and v.rank == rank and all(a == c and a > 2 for a, c in v.pairs[2:])
                   and v.pairs[1][0] == v.pairs[1][1])
    if found is not None and b.flip(0.6):
        return found
    kind = b.kind if b.kind in kinds else b.rng.choice(sorted(kinds))
    return b.fill(kind, [*b.random_axes(1), *exact(b.rng.choice((1, 2, 4)), *[b.rng.randint(4, 7)
                                                                           for _ in range(rank - 2)])])


@operands("MatMul", "MatMulInteger")
def _matmul(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 1)
    if x is None:
        return None
    inner, kinds = x.pairs[-1], types_of(schema, 1)
    kind = x.dtype if x.dtype in kinds else b.rng.choice(kinds)
    found = b.find(lambda v: v.dtype == kind and v.rank == 2 and v.pairs[0] == inner)
    y = found if found is not None and b.flip() else b.fill(kind, [inner, *b.random_axes(b.rng.randint(0, 1))])
    if y is None:
        return None
    zeros = [b.scalar(1, x.dtype), b.scalar(0, kind)] if schema.name != "MatMul" and b.flip() else []
    return [x, y, *zeros], {}


@operands("Gemm")
def _gemm(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 2, 2)
    if x is None:
        return None
    turned, other, width = b.rng.randint(0, 1), b.rng.randint(0, 1), (b.rng.randint(1, 5),) * 2
    inner, rows = x.pairs[1 - turned], x.pairs[turned]
    y = b.fill(x.dtype, [width, inner] if other else [inner, width])
    c = b.fill(x.dtype, b.rng.choice(([width], [(1, 1)], [], [rows, width], [rows, (1, 1)]))) if b.flip(0.6) else None
    return None if y is None else ([x, y, *([c] if c else [])], {"transA": turned, "transB": other})


@operands("Einsum")
def _einsum(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value([FLOAT, TensorProto.DOUBLE, INT64], 2, 2)
    y = x and b.fill(x.dtype, [x.pairs[1], (3, 3)])
    equation = b.rng.choice(("ij,jk->ik", "ij,jk->ki", "ij,jk->j", "ij,jk"))
    return None if x is None or y is None else ([x, y], {"equation": equation})


def windows(b: Builder, spatial: int, least: int) -> Named:
    """Attributes of a convolution or a pool."""
    if b.flip(0.2):
        return {"auto_pad": b.rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID")), "pads": None, "dilations": None,
                "strides": [b.rng.randint(1, 2)] * spatial}
    return {"auto_pad": None, "strides": [b.rng.randint(1, 2) for _ in range(spatial)] if b.flip() else None,
            "pads": [b.rng.randint(0, 1) for _ in range(2 * spatial)] if b.flip() and least > 1 else None,
            "dilations": [b.rng.choice((1, 1, 2)) for _ in range(spatial)] if b.flip(0.3) else None}


@operands("Conv", "ConvTranspose", "ConvInteger")
def _convolution(b: Builder, schema: Schema) -> Drawn | None:
    x = image(b, types_of(schema))
    if x is None:
        return None
    channels, spatial = x.pairs[1][0], x.rank - 2
    group, kernel = b.rng.choice((1, 1, channels)), [b.rng.randint(1, 3) for _ in range(spatial)]
    out = b.rng.randint(1, 3)
    shape = (channels, out) if schema.name == "ConvTranspose" else (out * group, channels // group)
    w = b.fill(x.dtype if schema.name != "ConvInteger" else b.rng.choice(types_of(schema, 1)), exact(*shape, *kernel))
    bias = b.fill(x.dtype, exact(out * group)) if b.flip() and schema.name != "ConvInteger" else None
    named = windows(b, spatial, min(kernel)) | {"group": group, "kernel_shape": kernel if b.flip() else None}
    named |= {"output_shape": None, "output_padding": None}
    return None if w is None else ([x, w, *([bias] if bias else [])], named)


@operands("CausalConvWithState")
def _causal(b: Builder, schema: Schema) -> Drawn | None:
    x = b.fill(floats(b, schema) or FLOAT, exact(2, 3, 5))
    w = x and b.fill(x.dtype, exact(3, 1, 3))
    return None if x is None or w is None else ([x, w], {})


@operands("AveragePool", "MaxPool", "LpPool")
def _pool(b: Builder, schema: Schema) -> Drawn | None:
    x = image(b, types_of(schema))
    if x is None:
        return None
    kernel = [b.rng.randint(1, 3) for _ in range(x.rank - 2)]
    return [x], windows(b, x.rank - 2, min(kernel)) | {"kernel_shape": kernel, "storage_order": None}


@operands("MaxUnpool")
def _unpool(b: Builder, schema: Schema) -> Drawn | None:
    x = image(b, types_of(schema), 2)
    if x is None:
        return None
    pooled, places = b.emit("MaxPool", [x], 2, kernel_shape=[2, 2], strides=[2, 2])
    return [pooled, places], {"kernel_shape": [2, 2], "strides": [2, 2], "pads": None}


@operands("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 3, 4)
    return None if x is None else ([x], {})


def vector(b: Builder, kind: int, pair: tuple[int, int], positive: bool = False) -> Known | None:
    if positive and pair[0] == pair[1]:
        return b.constant(np.linspace(0.5, 2.0, pair[0]).astype(numpy_type(kind)))
    return b.fill(kind, [pair])


@operands("BatchNormalization")
def _batch_norm(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 2, accept=lambda v: v.pairs[1][0] == v.pairs[1][1])
    if x is None:
        return None
    vectors = [vector(b, x.dtype, x.pairs[1], positive) for positive in (False, False, False, True)]
    return None if None in vectors else ([x, *vectors], {"outputs": 1, "training_mode": None})


@operands("InstanceNormalization", "GroupNormalization")
def _instance_norm(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 3, accept=lambda v: v.pairs[1][0] == v.pairs[1][1] and v.pairs[1][0] > 0)
    if x is None:
        return None
    channels = x.pairs[1][0]
    groups = b.rng.choice([n for n in range(1, channels + 1) if channels % n == 0])
    width = (groups,) * 2 if schema.name.startswith("Group") and b.opset < 21 else x.pairs[1]
    scale, bias = vector(b, x.dtype, width), vector(b, x.dtype, width)
    return None if scale is None or bias is None else ([x, scale, bias], {"num_groups": groups})


@operands("LayerNormalization", "RMSNormalization")
def _layer_norm(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value([kind for kind in types_of(schema) if kind in FLOATS], 1)
    if x is None:
        return None
    axis = b.rng.randrange(x.rank)
    scale = b.fill(x.dtype, x.pairs[axis:])
    bias = b.fill(x.dtype, x.pairs[axis:]) if schema.name[0] == "L" and b.flip(0.6) else None
    named: Named = {"axis": axis - x.rank if b.flip() else axis}
    return None if scale is None else ([x, scale, *([bias] if bias else [])], named)


@operands("LRN")
def _lrn(b: Builder, schema: Schema) -> Drawn | None:
    x = image(b, types_of(schema), 2)
    return None if x is None else ([x], {"size": b.rng.choice((1, 3, 5))})


@operands("DepthToSpace", "SpaceToDepth")
def _blocks(b: Builder, schema: Schema) -> Drawn | None:
    kind = b.rng.choice([k for k in types_of(schema) if k in (*FLOATS, INT32, UINT8)])
    x = b.fill(kind, [*b.random_axes(1), *(exact(8, 2, 3) if schema.name[0] == "D" else exact(2, 4, 6))])
    return None if x is None else ([x], {"blocksize": 2})


@operands("LSTM", "GRU", "RNN")
def _recurrence(b: Builder, schema: Schema) -> Drawn | None:
    kind = floats(b, schema) or FLOAT
    found = b.find(lambda v: v.dtype == kind and v.rank == 3 and v.pairs[2][0] == v.pairs[2][1])
    x = found or b.fill(kind, [*b.random_axes(2), (3, 3)])
    if x is None or not all(x.least):
        return None
    gates, hidden = {"LSTM": 4, "GRU": 3, "RNN": 1}[schema.name], b.rng.randint(1, 3)
    directions = b.rng.choice((1, 1, 2))
    w = b.fill(kind, exact(directions, gates * hidden, x.pairs[2][0]))
    r = b.fill(kind, exact(directions, gates * hidden, hidden))
    bias = b.fill(kind, exact(directions, 2 * gates * hidden)) if b.flip() else None
    if w is None or r is None:
        return None
    named: Named = {"hidden_size": hidden, "layout": None, "activations": None, "clip": None,
                    "direction": "bidirectional" if directions == 2 else b.rng.choice(("forward", "reverse"))}
    return [x, w, r, *([bias] if bias else [])], named


@operands("Attention")
def _attention(b: Builder, schema: Schema) -> Drawn | None:
    kind = floats(b, schema) or FLOAT
    q = b.fill(kind, exact(1, 2, 3, 4))
    k, v = (b.fill(kind, exact(1, 2, 5, 4)) for _ in range(2))
    return None if None in (q, k, v) else ([q, k, v], {"q_num_heads": None, "kv_num_heads": None, "outputs": 1,
                                                      "qk_matmul_output_mode": None, "softmax_precision": None})


@operands("LinearAttention")
def _linear_attention(b: Builder, schema: Schema) -> Drawn | None:
    parts = [b.fill(floats(b, schema) or FLOAT, exact(1, 3, 4)) for _ in range(3)]
    return None if None in parts else (list(parts), {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "linear"})


@operands("RotaryEmbedding")
def _rotary(b: Builder, schema: Schema) -> Drawn | None:
    kind = floats(b, schema) or FLOAT
    x, cos, sin = (b.fill(kind, exact(*sizes)) for sizes in ((1, 2, 3, 4), (1, 3, 2), (1, 3, 2)))
    return None if None in (x, cos, sin) else ([x, cos, sin], {"num_heads": None, "rotary_embedding_dim": None})


@operands("Resize")
def _resize(b: Builder, schema: Schema) -> Drawn | None:
    x = image(b, types_of(schema), 2)
    if x is None:
        return None
    roi = None if b.opset >= 13 else b.constant(np.zeros(0, np.float32))
    named: Named = {"axes": None, "antialias": None, "cubic_coeff_a": None, "extrapolation_value": None,
                    "exclude_outside": None}
    if b.opset >= 18 and b.flip(0.4):
        named["axes"] = [2, 3]
        return [x, roi, None, b.ints(b.rng.randint(1, 9), b.rng.randint(1, 9))], named
    scales = b.constant(np.array([1, 1, b.rng.choice((0.5, 1, 1.5, 2)), b.rng.choice((0.6, 1, 2, 3))], np.float32))
    return [x, roi, scales], named | {"keep_aspect_ratio_policy": None}


@operands("GridSample")
def _grid(b: Builder, schema: Schema) -> Drawn | None:
    x = b.fill(floats(b, schema) or FLOAT, exact(2, 3, 4, 5))
    grid = b.fill(FLOAT if FLOAT in types_of(schema, 1) else b.kind, exact(2, 2, 3, 2))
    return None if x is None or grid is None else ([x, grid], {})


@operands("AffineGrid")
def _affine(b: Builder, schema: Schema) -> Drawn | None:
    theta = b.fill(floats(b, schema) or FLOAT, exact(2, 2, 3))
    return None if theta is None else ([theta, b.ints(2, 1, 3, 4)], {})


@operands("RoiAlign", "MaxRoiPool")
def _regions(b: Builder, schema: Schema) -> Drawn | None:
    x = b.fill(floats(b, schema) or FLOAT, exact(2, 2, 5, 5))
    if x is None:
        return None
    corners = np.array([[0, 0, 2, 3], [1, 1, 4, 4]], numpy_type(x.dtype))
    if schema.name == "MaxRoiPool":
        return [x, b.constant(np.concatenate([np.zeros((2, 1), corners.dtype), corners], 1))], {"pooled_shape": [2, 2]}
    return [x, b.constant(corners), b.ints(0, 1)], {"output_height": 2, "output_width": 2, "sampling_ratio": 2,
                                                    "spatial_scale": None}


@operands("DeformConv")
def _deformed(b: Builder, schema: Schema) -> Drawn | None:
    parts = [b.fill(floats(b, schema) or FLOAT, exact(*sizes)) for sizes in ((1, 2, 4, 4), (3, 2, 2, 2), (1, 8, 3, 3))]
    return None if None in parts else (list(parts), {"kernel_shape": [2, 2], "group": None, "offset_group": None,
                                                    "pads": [0] * 4, "strides": None, "dilations": None})


@operands("Col2Im")
def _columns(b: Builder, schema: Schema) -> Drawn | None:
    x = b.fill(floats(b, schema) or FLOAT, [*b.random_axes(1), *exact(4, 9)])
    return None if x is None else ([x, b.ints(4, 4), b.ints(2, 2)], {"pads": None, "strides": None, "dilations": None})


@operands("CenterCropPad")
def _crop(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 1)
    if x is None:
        return None
    axes = some_axes(b, x.rank)
    return [x, b.ints(*[b.rng.randint(1, 6) for _ in axes])], {"axes": axes}


@operands("NonMaxSuppression")
def _suppression(b: Builder, schema: Schema) -> Drawn | None:
    boxes, scores = b.fill(FLOAT, exact(1, 4, 4)), b.fill(FLOAT, exact(1, 2, 4))
    return None if boxes is None or scores is None else ([boxes, scores, b.ints(2)], {})


@operands("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def _loss(b: Builder, schema: Schema) -> Drawn | None:
    kinds = [kind for kind in types_of(schema) if kind in FLOATS]
    x = b.value(kinds, 2, 4, accept=lambda v: all(v.least))
    if x is None:
        return None
    labels = b.fill(b.rng.choice((INT64, INT32)), [x.pairs[0], *x.pairs[2:]], 0, x.least[1])
    weights = b.fill(x.dtype, [x.pairs[1]], 1) if b.flip(0.3) else None
    return None if labels is None else ([x, labels, *([weights] if weights else [])], {"ignore_index": None})


def step(b: Builder, kind: int, shape: Sequence[int] = ()) -> Known:
    return b.constant((np.ones(shape) * b.rng.choice((0.25, 0.5, 0.1))).astype(numpy_type(kind)))


@operands("QuantizeLinear", "DequantizeLinear")
def _quantise(b: Builder, schema: Schema) -> Drawn | None:
    """One scale for all, or one for each place of an axis."""
    kinds = [kind for kind in types_of(schema) if kind in (*FLOATS, INT8, UINT8, INT32, TensorProto.INT16,
                                                           TensorProto.UINT16)]
    x = b.value(kinds, 1, accept=lambda v: any(m == n > 0 for m, n in v.pairs))
    if x is None:
        return None
    axis = b.rng.choice([place for place, (m, n) in enumerate(x.pairs) if m == n > 0])
    shape = [x.pairs[axis][0]] if b.flip(0.4) else []
    up = schema.name[0] == "Q"
    kind = x.dtype if up and x.dtype in FLOATS and b.opset >= 19 else FLOAT
    zero = (b.rng.choice([k for k in types_of(schema, 2) if k in (INT8, UINT8, TensorProto.INT16, TensorProto.UINT16)])
            if up else x.dtype)
    operands: Operands = [x, step(b, kind, shape)]
    if b.flip(0.7):
        number = 0 if zero == INT32 else b.rng.randint(0, 5)
        operands.append(b.constant(np.full(shape, number).astype(numpy_type(zero))))
    return operands, {"axis": axis, "block_size": None, "output_dtype": None}


@operands("DynamicQuantizeLinear")
def _dynamic(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value([FLOAT], 1)
    return None if x is None else ([x], {"outputs": 3})


@operands("QLinearMatMul")
def _product_of_steps(b: Builder, schema: Schema) -> Drawn | None:
    kind = b.rng.choice((INT8, UINT8))
    x = b.value([kind], 2, 2)
    y = x and b.fill(kind, [x.pairs[1], (3, 3)])
    if x is None or y is None:
        return None
    return [x, step(b, FLOAT), b.scalar(1, kind), y, step(b, FLOAT), b.scalar(0, kind), step(b, FLOAT),
            b.scalar(2, kind)], {}


@operands("QLinearConv")
def _convolution_of_steps(b: Builder, schema: Schema) -> Drawn | None:
    x = image(b, [UINT8], 2)
    w = x and b.fill(INT8 if b.flip() else UINT8, exact(2, x.pairs[1][0], 2, 2))
    if x is None or w is None:
        return None
    return [x, step(b, FLOAT), b.scalar(1, UINT8), w, step(b, FLOAT), b.scalar(0, w.dtype), step(b, FLOAT),
            b.scalar(2, UINT8)], {"group": None, "kernel_shape": None, "auto_pad": None, "dilations": None,
                                  "strides": None, "pads": None}


@operands("DFT")
def _fourier(b: Builder, schema: Schema) -> Drawn | None:
    x = b.fill(floats(b, schema) or FLOAT, exact(2, 4, b.rng.randint(1, 2)))
    return None if x is None else ([x], {"axis": 1 if b.opset < 20 else b.scalar(1, INT64), "inverse": None})


@operands("STFT")
def _short_fourier(b: Builder, schema: Schema) -> Drawn | None:
    x = b.fill(floats(b, schema) or FLOAT, exact(1, 12, 1))
    return None if x is None else ([x, b.scalar(2, INT64), None, b.scalar(4, INT64)], {})


@operands("SwiGLU")
def _swiglu(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 1, accept=lambda v: v.pairs[-1][0] % 2 == 0 and v.pairs[-1][1] % 2 == 0)
    return None if x is None else ([x], {})


