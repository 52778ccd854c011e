"""Random graphs grow by a normalisation, a reduction or a loss, and by what else looks at a whole tensor."""

from __future__ import annotations

from math import sqrt

import numpy as np
from graph_builder import BOOL, EXACT_TO, FLOAT, INT64, Builder, Known, grows
from onnx import TensorProto

from onnxfuse.graph.dims import dim, product


@grows("NegativeLogLikelihoodLoss")
def loss(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: v.dtype == b.kind and len(v.shape) == 2 and v.shape[1].value is not None)
    if x is None:
        return None
    labels = b.input(Known("", INT64, (x.shape[0],), float((x.shape[1].value or 1) - 1), True))
    return b.add(name, [x, labels], (x.shape[0],), x.bound, exact=x.exact, reduction="none")


@grows("RMSNormalization", "SimplifiedLayerNormalization", "com.microsoft.SimplifiedLayerNormalization")
def root_mean_square(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: v.dtype == b.kind and len(v.shape) >= 2 and v.shape[-1].value is not None)
    if x is None or (name != "RMSNormalization" and b.kind != FLOAT):
        return None
    domain, _, op = name.rpartition(".")
    size = x.shape[-1].value or 0
    return b.add(op, [b.moderate(x), b.vector(size)], x.shape, sqrt(size) + 1, domain=domain, axis=-1, epsilon=0.1)


@grows("CumSum")
def running_total(b: Builder, name: str) -> Known | None:
    """Of any axis, from either end; ONNX Runtime's CPU provider has no kernel for the narrow types."""
    x = b.floating(rank=1)
    if x is None or (b.kind not in (FLOAT, TensorProto.DOUBLE) and (b.portable or b.opset < 14)):
        return None
    x = b.moderate(x)
    axis = b.rng.randint(0, len(x.shape) - 1)
    bound = x.bound * x.shape[axis].evaluate(b.limits)
    place = b.constant(np.array(axis - len(x.shape) if b.flip() else axis, np.int64))
    return b.add(name, [x, place], x.shape, bound, exact=x.exact and bound <= EXACT_TO[b.kind],
                 exclusive=b.rng.randint(0, 1), reverse=b.rng.randint(0, 1))


@grows("onnxfuse.canonical.SafeSoftmax")
def guarded(b: Builder, name: str) -> Known | None:
    x = b.floating(rank=2)
    if x is None or b.opset < 13:
        return None
    scores = b.hidden("Softmax", [b.moderate(x)], x.shape, b.kind, axis=-1)
    wrong = b.hidden("IsNaN", [scores], x.shape, BOOL)
    return b.add("Where", [wrong, b.number(0), scores], x.shape, 1.0)


@grows("ConstantOfShape")
def filled(b: Builder, name: str) -> Known | None:
    x = b.floating(rank=1)
    if x is None or b.kind != FLOAT:
        return None
    ones = b.add(name, [b.hidden("Shape", [x], [dim(len(x.shape))])], x.shape, 1, exact=True)
    return b.add("Add", [ones, x], x.shape, x.bound, exact=x.exact)


@grows("Softmax", "LogSoftmax", "LayerNormalization", "LpNormalization")
def normalised(b: Builder, name: str) -> Known | None:
    x = b.floating(rank=2)
    if x is None:
        return None
    x = b.moderate(x)
    size = x.shape[-1].evaluate(b.sizes)
    if name != "LayerNormalization":
        # A norm of zero is left to tests of its own: what is near it is anything at all.
        x = b.positive(x, 0.5) if name == "LpNormalization" else x
        axis = b.rng.choice([-1, *range(len(x.shape))])
        return b.add(name, [x], x.shape, 2 * x.bound + 10, axis=axis)
    if x.shape[-1].value is None:
        return None
    return b.add(name, [x, b.vector(size)], x.shape, sqrt(size), epsilon=0.1)


@grows("InstanceNormalization", "BatchNormalization", "GroupNormalization")
def per_channel(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: v.dtype == b.kind and len(v.shape) >= 3 and (v.shape[1].value or 1) % 4 == 0)
    if x is None:
        return None
    x, channels = b.moderate(x), x.shape[1].value or 0
    count = {"BatchNormalization": 4, "GroupNormalization": 2, "InstanceNormalization": 2}[name]
    groups = {"num_groups": 2} if name == "GroupNormalization" else {}
    return b.add(name, [x, *(b.vector(channels) for _ in range(count))], x.shape, 200.0, epsilon=0.1, **groups)


@grows("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def per_image(b: Builder, name: str) -> Known | None:
    """Of every channel."""
    x = b.choose(lambda v: v.dtype == b.kind and len(v.shape) >= 3)
    if x is None:
        return None
    count = product(x.shape[2:]).evaluate(b.limits)
    shape = (*x.shape[:2], *(dim(1) for _ in x.shape[2:]))
    if name == "GlobalMaxPool":
        return b.add(name, [x], shape, x.bound, exact=x.exact)
    bound = x.bound if name == "GlobalAveragePool" else x.bound * max(count, 1)
    return b.add(name, [b.moderate(x)], shape, bound, **({} if name == "GlobalAveragePool" else {"p": 1 + b.flip()}))


@grows("MaxPool", "AveragePool")
def windows(b: Builder, name: str) -> Known | None:
    """As many as there are elements, or half as many along the first axis of pixels."""
    x = b.choose(lambda v: v.dtype == b.kind and len(v.shape) >= 3)
    if x is None:
        return None
    count, first = len(x.shape) - 2, x.shape[2].value
    stride = 1 if first is None else 1 + b.flip()
    shape = x.shape if first is None else (*x.shape[:2], dim((first - 1) // stride + 1), *x.shape[3:])
    return b.add(name, [b.moderate(x)], shape, x.bound, exact=x.exact and name == "MaxPool",
                 kernel_shape=[3] * count, pads=[1] * (2 * count), strides=[stride, *[1] * (count - 1)])


@grows(
    "com.microsoft.SkipLayerNormalization",
    "com.microsoft.SkipSimplifiedLayerNormalization",
    "com.microsoft.BiasGelu",
    "com.microsoft.BiasAdd",
)
def biased(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: v.dtype == FLOAT and len(v.shape) == 3 and v.shape[-1].value is not None)
    z = x and b.choose(lambda v: v.dtype == FLOAT and v.shape == x.shape)
    if x is None or z is None or b.kind != FLOAT:
        return None
    op, scale = name.rpartition(".")[2], b.vector(x.shape[-1].value or 0)
    x, z = b.moderate(x), b.moderate(z)
    if op == "BiasGelu":
        return b.add(op, [x, scale], x.shape, x.bound + 1, domain="com.microsoft")
    if op == "BiasAdd":
        return b.add(op, [x, scale, z], x.shape, x.bound + z.bound + 1, domain="com.microsoft")
    return b.add(op, [x, z, scale], x.shape, 100.0, domain="com.microsoft", epsilon=0.1)


@grows(
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
def reduction(b: Builder, name: str) -> Known | None:
    x = b.floating(rank=1)
    if x is None:
        return None
    keepdims = b.rng.randint(0, 1)
    rank = len(x.shape)
    axes = range(rank - b.rng.randint(1, min(2, rank)), rank)
    if b.flip():
        axes = b.rng.sample(range(rank), b.rng.randint(1, rank))
    length = product([x.shape[axis] for axis in axes]).evaluate(b.limits)
    x = b.tamed(x, 1.0) if name in ("ReduceProd", "ReduceSumSquare") else b.moderate(x)
    x = b.positive(x, 0.5) if name in ("ReduceLogSum", "ReduceL2") else x
    kept = [dim(1) if axis in axes else size for axis, size in enumerate(x.shape) if keepdims or axis not in axes]
    chooses = name in ("ReduceMax", "ReduceMin")
    inputs, attributes = b.axes(name, 13 if name == "ReduceSum" else 18, list(axes))
    return b.add(
        name,
        [x, *inputs],
        kept,
        x.bound if chooses else x.bound * length + 10,
        exact=chooses and x.exact,
        keepdims=keepdims,
        **attributes,
    )
