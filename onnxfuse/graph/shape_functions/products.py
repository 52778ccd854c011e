"""Matrix products, convolutions, pooling, recurrent layers, attention."""

from __future__ import annotations

import onnx

from onnxfuse.graph.dims import Dim, dim
from onnxfuse.graph.model import Shape
from onnxfuse.graph.shape_functions.context import INT64, Context, Type, shape_function

INT32 = int(onnx.TensorProto.INT32)


def matrix_product(context: Context, a: Shape | None, b: Shape | None) -> Shape | None:
    """Sizes of a product under NumPy's rules for matmul."""
    if a is None or b is None or not a or not b:
        return None
    rows = a[-2:-1] if len(a) > 1 else ()
    columns = b[-1:] if len(b) > 1 else ()
    rank = max(len(a), len(b)) - 2 + len(rows) + len(columns) if max(len(a), len(b)) > 1 else 0
    batch = context.meet(a[:-2], b[:-2], rank=rank)
    return None if batch is None else batch + rows + columns


@shape_function("MatMul", "MatMulInteger", "QLinearMatMul")
def _matmul(context: Context) -> list[Type]:
    second = 3 if context.node.op == "QLinearMatMul" else 1
    dtype = {"MatMul": context.dtype(), "MatMulInteger": INT32, "QLinearMatMul": context.dtype(7)}[context.node.op]
    return [Type(dtype, matrix_product(context, context.shape(0), context.shape(second)))]


@shape_function("Gemm")
def gemm(context: Context) -> list[Type]:
    a, b = context.shape(0), context.shape(1)
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return [Type(context.dtype(), context.unknown_shape(2))]
    return [Type(context.dtype(), (a[int(bool(context.attribute("transA", 0)))],
                                   b[int(not context.attribute("transB", 0))]))]


@shape_function("Einsum")
def _einsum(context: Context) -> list[Type]:
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


def window_length(size: Dim, kernel: Dim, stride: int, dilation: int, pads: tuple[int, int], ceil: bool) -> Dim:
    """How many places a sliding window takes along an axis."""
    free = size + (pads[0] + pads[1] - 1) - dilation * (kernel - 1)
    length = ((free + (stride - 1)) // stride if ceil else free // stride) + 1
    if ceil and length.value is not None and size.value is not None and (length.value - 1) * stride >= (
        size.value + pads[0]
    ):
        # A window that would begin in the padding behind the data is dropped.
        length = length - 1
    return length


def sliding(context: Context, size: Shape, kernel: Shape, ceil: bool = False) -> Shape:
    """Spatial sizes after a convolution or pooling with the node's strides, dilations and padding."""
    count = len(size)
    strides = [int(n) for n in context.attribute("strides") or [1] * count]
    dilations = [int(n) for n in context.attribute("dilations") or [1] * count]
    pads = [int(n) for n in context.attribute("pads") or [0] * (2 * count)]
    automatic = context.attribute("auto_pad", "NOTSET")
    result = []
    for axis in range(count):
        if automatic in ("SAME_UPPER", "SAME_LOWER"):
            result.append((size[axis] + (strides[axis] - 1)) // strides[axis])
            continue
        own = (0, 0) if automatic == "VALID" else (pads[axis], pads[axis + count])
        result.append(window_length(size[axis], kernel[axis], strides[axis], dilations[axis], own, ceil))
    return tuple(result)


@shape_function("Conv", "ConvInteger", "QLinearConv")
def conv(context: Context) -> list[Type]:
    quantised = context.node.op == "QLinearConv"
    shape, weight = context.shape(0), context.shape(3 if quantised else 1)
    dtype = context.dtype(7) if quantised else INT32 if context.node.op == "ConvInteger" else context.dtype()
    given = context.attribute("kernel_shape")
    if shape is None:
        # The weight tells the rank, and a kernel's sizes do.
        rank = len(weight) if weight is not None else None if given is None else len(given) + 2
        return [Type(dtype, None if rank is None else _channels(context, rank, None if weight is None else weight[0]))]
    if weight is None and given is None:
        return [Type(dtype, (shape[0], *context.unknown_shape(len(shape))[1:]))]
    kernel = weight[2:] if weight is not None else tuple(dim(int(size)) for size in given)
    channels = weight[0] if weight is not None else context.unknown(1, len(shape))
    return [Type(dtype, (shape[0], channels, *sliding(context, shape[2:], kernel)))]


def _channels(context: Context, rank: int, channels: Dim | None) -> Shape:
    """Sizes of which the rank is known, and perhaps those of axis 1."""
    sizes = context.unknown_shape(rank)
    return sizes if channels is None else (sizes[0], channels, *sizes[2:])


@shape_function("ConvTranspose")
def _conv_transpose(context: Context) -> list[Type]:
    shape, weight = context.shape(0), context.shape(1)
    if weight is None:
        return [Type(context.dtype(), None if shape is None else context.unknown_shape(len(shape)))]
    channels = weight[1] * int(context.attribute("group", 1))
    if shape is None:
        return [Type(context.dtype(), _channels(context, len(weight), channels))]
    count = len(shape) - 2
    wanted = context.attribute("output_shape")
    if wanted:
        return [Type(context.dtype(), (shape[0], channels, *(dim(int(size)) for size in wanted[-count:])))]
    strides = [int(n) for n in context.attribute("strides") or [1] * count]
    dilations = [int(n) for n in context.attribute("dilations") or [1] * count]
    extra = [int(n) for n in context.attribute("output_padding") or [0] * count]
    pads = [int(n) for n in context.attribute("pads") or [0] * (2 * count)]
    automatic = context.attribute("auto_pad", "NOTSET")
    sizes = []
    for axis in range(count):
        size = shape[2 + axis]
        if automatic in ("SAME_UPPER", "SAME_LOWER"):
            sizes.append(size * strides[axis])
            continue
        own = 0 if automatic == "VALID" else pads[axis] + pads[axis + count]
        reach = dilations[axis] * (weight[2 + axis] - 1) + 1
        sizes.append((size - 1) * strides[axis] + extra[axis] + reach - own)
    return [Type(context.dtype(), (shape[0], channels, *sizes))]


@shape_function("MaxPool", "AveragePool", "LpPool")
def _pool(context: Context) -> list[Type]:
    shape = context.shape()
    if shape is None:
        sizes = context.unknown_shape(len(context.attribute("kernel_shape")) + 2)
        return [Type(context.dtype(), sizes), Type(INT64, sizes)]
    kernel = tuple(dim(int(size)) for size in context.attribute("kernel_shape"))
    spatial, ceil = shape[2:], bool(context.attribute("ceil_mode", 0))
    if ceil and any(size.value is None for size in spatial):
        # Whether the last window begins in the padding depends on the size.
        sizes = tuple(context.unknown(axis + 2, len(shape)) for axis in range(len(spatial)))
    else:
        sizes = sliding(context, spatial, kernel, ceil)
    result = (*shape[:2], *sizes)
    return [Type(context.dtype(), result), Type(INT64, result)]


@shape_function("LSTM", "GRU", "RNN")
def _recurrent(context: Context) -> list[Type]:
    shape, dtype, recurrent = context.shape(), context.dtype(), context.shape(2)
    hidden = context.attribute("hidden_size")
    size = dim(int(hidden)) if hidden is not None else None if recurrent is None else recurrent[2]
    if size is None:
        return [Type(dtype)] * 3
    directions = dim(2 if context.attribute("direction", "forward") == "bidirectional" else 1)
    first = bool(context.attribute("layout", 0))
    if shape is None:
        # Whatever is read, it has three axes, and the batch that the state before the first step has.
        state = context.shape(5)
        length = context.unknown(1 if first else 0, 4)
        batch = context.unknown(0 if first else 2, 4) if state is None else state[0 if first else 1]
        shape = (batch, length) if first else (length, batch)
    if first:
        batch, length = shape[0], shape[1]
        states: Shape = (batch, directions, size)
        return [Type(dtype, (batch, length, directions, size)), Type(dtype, states), Type(dtype, states)]
    length, batch = shape[0], shape[1]
    states = (directions, batch, size)
    return [Type(dtype, (length, directions, batch, size)), Type(dtype, states), Type(dtype, states)]


@shape_function("Attention")
def _attention(context: Context) -> list[Type]:
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
