"""Random graphs of operators that can be lowered.

A graph grows node by node from what is there, so values are shared, and several of those that nobody reads are
outputs.  Sizes are numbers and symbols; opsets and floating types are mixed.  Each value knows a bound of its
magnitude, so that nothing overflows, and whether its elements are ``exact`` (the same in any precision): only such ones
reach operators whose result jumps.  All is drawn from one random number generator: a seed's, or hypothesis's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, sqrt
from random import Random

import numpy as np
import onnx
from graph_builder import (
    BOOL,
    EXACT_TO,
    FAR,
    FLOAT,
    GROWERS,
    INT32,
    INT64,
    MOST_ELEMENTS,
    UINT32,
    Builder,
    Known,
    RandomGraph,
    grows,
    takes,
)
from hypothesis import strategies as st
from onnx import TensorProto, helper
from reference import FLOATS, numpy_type

from onnxfuse.graph.dims import Dim, dim, product, symbol


@grows(
    "Relu",
    "LeakyRelu",
    "Elu",
    "Selu",
    "Celu",
    "HardSwish",
    "Gelu",
    "Mish",
    "Softplus",
    "Asinh",
    "com.microsoft.Gelu",
    "com.microsoft.FastGelu",
    "com.microsoft.QuickGelu",
)
def activation(b: Builder, name: str) -> Known | None:
    domain, _, op = name.rpartition(".")
    x = b.floating(rank=1 if domain else 0)
    if x is None or (domain and b.kind != FLOAT):
        return None
    return b.add(op, [b.moderate(x)], x.shape, 2 * min(x.bound, FAR) + 2, domain=domain)


@grows("Sigmoid", "HardSigmoid", "Softsign", "Tanh", "Erf", "Sin", "Cos", "Atan")
def bounded(b: Builder, name: str) -> Known | None:
    x = b.floating()
    return x and b.add(name, [b.moderate(x)], x.shape, 1.6)


@grows("Swish", "onnxfuse.canonical.Silu")
def sigmoid_linear(b: Builder, name: str) -> Known | None:
    x = b.floating()
    if x is None:
        return None
    x = b.moderate(x)
    if name == "Swish":
        return b.add(name, [x], x.shape, x.bound + 1)
    return b.add("Mul", [x, b.hidden("Sigmoid", [x], x.shape, b.kind)], x.shape, x.bound + 1)


@grows("Identity", "Dropout")
def choosing(b: Builder, name: str) -> Known | None:
    x = b.floating()
    return x and b.add(name, [x], x.shape, x.bound, exact=x.exact)


@grows("Exp", "Sinh", "Cosh")
def exponential(b: Builder, name: str) -> Known | None:
    x = b.floating()
    x = x and b.tamed(x, 1.0) if x and x.bound > 4 else x
    return x and b.add(name, [x], x.shape, exp(x.bound))


@grows("Tan", "Asin", "Acos", "Atanh")
def near_zero(b: Builder, name: str) -> Known | None:
    x = b.floating()
    return x and b.add(name, [b.tamed(x, 0.8)], x.shape, 3.0)


@grows("Log", "Sqrt", "Reciprocal", "Acosh")
def of_positive(b: Builder, name: str) -> Known | None:
    x = b.floating()
    return x and b.add(name, [b.positive(x, 1.5)], x.shape, 20.0)


@grows("Floor", "Ceil", "Round", "Sign", "ThresholdedRelu", "Shrink")
def jumping(b: Builder, name: str) -> Known | None:
    x = b.floating(exact=True)
    return x and b.add(name, [x], x.shape, x.bound + 1, exact=name in ("Floor", "Ceil", "Round", "Sign"))


def together(b: Builder, *values: Known | None) -> tuple[Dim, ...] | None:
    """The shape that values broadcast to, where that is plain and not large."""
    if any(value is None for value in values):
        return None
    shapes = [value.shape for value in values if value is not None]
    rank = max(map(len, shapes))
    result = []
    for sizes in zip(*((dim(1),) * (rank - len(shape)) + shape for shape in shapes), strict=True):
        wide = [size for size in dict.fromkeys(sizes) if size != 1]
        if len(wide) > 1:
            return None
        result.append(wide[0] if wide else dim(1))
    return tuple(result) if product(result).evaluate(b.limits) <= MOST_ELEMENTS else None


def partner(b: Builder, value: Known, dtype: int | None = None, exact: bool = False) -> Known | None:
    """Another value that broadcasts with this one."""
    return b.choose(
        lambda v: (
            v.dtype == (value.dtype if dtype is None else dtype)
            and (v.exact or not exact)
            and together(b, v, value) is not None
        )
    )


@grows("Sum", "Mean")
def binary(b: Builder, name: str) -> Known | None:
    x = b.floating()
    z = x and partner(b, x)
    if x is None or z is None:
        return None
    x, z = b.moderate(x), b.moderate(z)
    shape = together(b, x, z)
    bound = x.bound * z.bound if name == "Mul" else x.bound + z.bound
    return (
        None
        if shape is None
        else b.add(name, [x, z], shape, bound, exact=name in ("Max", "Min") and x.exact and z.exact)
    )


@grows("Div")
def quotient(b: Builder, name: str) -> Known | None:
    x = b.floating()
    z = x and partner(b, x)
    shape = together(b, x, z)
    return (
        None
        if x is None or z is None or shape is None
        else b.add(name, [b.moderate(x), b.positive(z, 1.0)], shape, FAR)
    )


@grows("Pow")
def power(b: Builder, name: str) -> Known | None:
    x = b.floating()
    exponent = b.rng.choice((2.0, 3.0, 0.5, 1.0, -1.0, 1.5))
    if x is None:
        return None
    base = b.tamed(x, 1.0) if exponent in (2.0, 3.0, 1.0) else b.positive(b.tamed(x, 1.0), 1.0)
    return b.add(name, [base, b.number(exponent)], x.shape, base.bound ** abs(exponent))


@grows("Clip")
def clip(b: Builder, name: str) -> Known | None:
    x = b.floating()
    return x and b.add(name, [x, b.number(-0.5), b.number(1.25)], x.shape, 1.25, exact=x.exact)


@grows("PRelu")
def prelu(b: Builder, name: str) -> Known | None:
    x = b.floating(rank=1)
    if x is None or x.shape[-1].value is None:
        return None
    return b.add(name, [b.moderate(x), b.vector(x.shape[-1].value)], x.shape, x.bound)


@grows("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
def comparison(b: Builder, name: str) -> Known | None:
    x = b.floating(exact=True)
    z = x and partner(b, x, exact=True)
    shape = together(b, x, z)
    return None if x is None or z is None or shape is None else b.add(name, [x, z], shape, 1, dtype=BOOL, exact=True)


@grows("IsNaN", "IsInf")
def special(b: Builder, name: str) -> Known | None:
    x = b.floating()
    return x and b.add(name, [x], x.shape, 1, dtype=BOOL, exact=True)


@grows("And", "Or", "Xor")
def logic(b: Builder, name: str) -> Known | None:
    x = b.truth()
    z = x and partner(b, x)
    shape = together(b, x, z)
    return None if x is None or z is None or shape is None else b.add(name, [x, z], shape, 1, dtype=BOOL, exact=True)


@grows("Not")
def inverse(b: Builder, name: str) -> Known | None:
    x = b.truth()
    return x and b.add(name, [x], x.shape, 1, dtype=BOOL, exact=True)


def where(b: Builder, name: str) -> Known | None:
    x = b.floating()
    z = x and partner(b, x)
    condition = x and partner(b, x, BOOL)
    shape = together(b, x, z, condition)
    if x is None or z is None or condition is None or shape is None:
        return None
    return b.add(name, [condition, x, z], shape, max(x.bound, z.bound), exact=x.exact and z.exact)


@grows("Cast", "CastLike")
def cast(b: Builder, name: str) -> Known | None:
    """To another floating type and, where elements are exact, to integers; integers and truth values to floats."""
    x = b.choose(lambda v: True)
    assert x is not None
    floats = [kind for kind in FLOATS if kind != x.dtype and (kind != TensorProto.BFLOAT16 or b.opset >= 16)]
    targets = [kind for kind in floats if x.bound <= EXACT_TO[kind] and (x.dtype in FLOATS or x.exact)]
    integers = [INT32, INT64] if x.dtype in FLOATS and x.exact and x.bound < 1e6 else []
    target = b.rng.choice([b.kind] * (b.kind in targets) + (targets or [FLOAT]) + integers)
    if b.portable and target in FLOATS and target != b.kind:  # there and back
        shorter, target = b.hidden("Cast", [x], x.shape, target, to=target), b.kind
        x = replace(shorter, bound=x.bound, exact=x.exact)
    if name == "CastLike":
        return b.add(name, [x, b.constant(np.zeros((), numpy_type(target)))], x.shape, x.bound, dtype=target,
                     exact=x.exact)
    return b.add(name, [x], x.shape, x.bound, dtype=target, exact=x.exact, to=target)


@grows("QuantizeLinear", "DequantizeLinear")
def quantised(b: Builder, name: str) -> Known | None:
    """There and back, in steps that are powers of two."""
    x = b.choose(lambda v: v.dtype == FLOAT and v.exact)
    if x is None or b.kind != FLOAT:
        return None
    kind = np.int8 if b.flip() else np.uint8
    operands = [b.constant(np.array(b.rng.choice([0.25, 0.5, 1.0]), np.float32)), b.constant(np.array(7, kind))]
    steps = b.hidden("QuantizeLinear", [x, *operands], x.shape, int(helper.np_dtype_to_tensor_dtype(np.dtype(kind))))
    return b.add("DequantizeLinear", [steps, *operands], x.shape, 256.0, exact=True)


@grows("BitwiseAnd", "BitwiseOr", "BitwiseXor", "Mod")
def integers(b: Builder, name: str) -> Known | None:
    x = b.integer()
    number = b.constant(np.array(b.rng.randint(1, 9), np.int32))
    return x and b.add(name, [x, number], x.shape, x.bound + 16, dtype=INT32, exact=True)


FLOATING = {**dict.fromkeys(("Add", "Sub", "Mul", "Max", "Min"), binary), "Neg": choosing, "Abs": choosing,
            "Where": where}


@grows(*FLOATING)
def whole(b: Builder, name: str) -> Known | None:
    """Arithmetic of integers, or of floats as ``name`` has it among those."""
    x = b.choose(lambda v: v.dtype in (INT32, INT64) and v.bound < 1000)
    if x is None or b.opset < 14 or b.flip():
        return FLOATING[name](b, name)
    if name in ("Neg", "Abs"):
        return b.add(name, [x], x.shape, x.bound, dtype=x.dtype, exact=True)
    z = partner(b, x, x.dtype)
    condition = partner(b, x, BOOL) if name == "Where" else None
    shape = together(b, x, z, *([condition] if name == "Where" else []))
    if z is None or shape is None or z.bound > 1000:
        return None
    operands = [x, z] if condition is None else [condition, x, z]
    bound = x.bound * z.bound if name == "Mul" else x.bound + z.bound
    return b.add(name, operands, shape, bound, dtype=x.dtype, exact=True)


@grows("BitwiseNot")
def bitwise_not(b: Builder, name: str) -> Known | None:
    x = b.integer()
    return x and b.add(name, [x], x.shape, x.bound + 1, dtype=INT32, exact=True)


@grows("BitShift")
def shift(b: Builder, name: str) -> Known | None:
    x = b.integer()
    if x is None:
        return None
    wide = b.add(
        "Cast",
        [b.add("Abs", [x], x.shape, x.bound, dtype=INT32, exact=True)],
        x.shape,
        x.bound,
        dtype=UINT32,
        exact=True,
        to=UINT32,
    )
    shifted = b.add(
        name, [wide, b.constant(np.array(2, np.uint32))], x.shape, x.bound, dtype=UINT32, exact=True, direction="RIGHT"
    )
    b.known.remove(wide)
    b.known.remove(shifted)
    return b.add("Cast", [shifted], x.shape, x.bound, dtype=INT32, exact=True, to=INT32)


@grows("Transpose")
def transpose(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: len(v.shape) > 1)
    if x is None:
        return None
    axes = b.rng.sample(range(len(x.shape)), len(x.shape))
    return b.add(name, [x], [x.shape[axis] for axis in axes], x.bound, dtype=x.dtype, exact=x.exact, perm=axes)


@grows("Reshape")
def reshape(b: Builder, name: str) -> Known | None:
    """Two axes become one, or one two; at most one size is not a number."""
    x = b.choose(lambda v: len(v.shape) > 1)
    if x is None:
        return None
    place = b.rng.randint(0, len(x.shape) - 2)
    size = x.shape[place]
    if size.value is not None and size.value % 4 == 0 and b.flip():
        shape = (*x.shape[:place], dim(4), dim(size.value // 4), *x.shape[place + 1 :])
    else:
        shape = (*x.shape[:place], product(x.shape[place : place + 2]), *x.shape[place + 2 :])
    target = [0 if axis < place and size == x.shape[axis] else size.value for axis, size in enumerate(shape)]
    if target.count(None) > 1 or len(shape) > 5:
        return None
    return b.add(
        name,
        [x, b.ints(*(-1 if size is None else size for size in target))],
        shape,
        x.bound,
        dtype=x.dtype,
        exact=x.exact,
    )


@grows("Unsqueeze", "Squeeze", "Flatten")
def ranks(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: 1 <= len(v.shape) < 5)
    if x is None:
        return None
    keep = {"dtype": x.dtype, "exact": x.exact}
    if name == "Flatten":
        return b.add(name, [x], [x.shape[0], product(x.shape[1:])], x.bound, **keep)
    place = b.rng.randint(0, len(x.shape))
    shape = (*x.shape[:place], dim(1), *x.shape[place:])
    inputs, attributes = b.axes("Unsqueeze", 13, [place])
    made = b.add("Unsqueeze", [x, *inputs], shape, x.bound, **keep, **attributes)
    return made if name == "Unsqueeze" else b.add(name, [made, *inputs], x.shape, x.bound, **keep, **attributes)


@grows("Expand")
def expand(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: len(v.shape) < 4 and product(v.shape).evaluate(b.limits) * 3 <= MOST_ELEMENTS)
    ones = [1] * len(x.shape) if x else []
    return x and b.add(name, [x, b.ints(3, *ones)], (dim(3), *x.shape), x.bound, dtype=x.dtype, exact=x.exact)


@grows("Tile")
def tile(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: len(v.shape) >= 1 and product(v.shape).evaluate(b.limits) * 2 <= MOST_ELEMENTS)
    if x is None:
        return None
    repeats = [2] + [1] * (len(x.shape) - 1)
    return b.add(name, [x, b.ints(*repeats)], (x.shape[0] * 2, *x.shape[1:]), x.bound, dtype=x.dtype, exact=x.exact)


@grows("Slice", "Split")
def part(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: any((size.value or 0) >= 4 and (size.value or 1) % 2 == 0 for size in v.shape))
    if x is None:
        return None
    axis = b.rng.choice([a for a, s in enumerate(x.shape) if (s.value or 0) >= 4 and (s.value or 1) % 2 == 0])
    size = x.shape[axis].value or 0
    shape = (*x.shape[:axis], dim(size // 2), *x.shape[axis + 1 :])
    keep = {"dtype": x.dtype, "exact": x.exact}
    if name == "Split":
        count = {"num_outputs": 2} if b.opset >= 18 else {}
        made = b.add(name, [x], shape, x.bound, outputs=2, axis=axis, **count, **keep)
        b.known.append(Known(f"{made.name}_1", x.dtype, shape, x.bound, x.exact))
        return made
    start, step = b.rng.choice(((0, 1), (size // 2, 1), (1, 2), (size - 1, -2)))
    end = start + step * (size // 2)
    return b.add(
        name,
        [x, b.ints(start), b.ints(end if end >= 0 else -size - 1), b.ints(axis), b.ints(step)],
        shape,
        x.bound,
        **keep,
    )


@grows("Concat")
def concat(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: len(v.shape) >= 1 and product(v.shape).evaluate(b.limits) * 2 <= MOST_ELEMENTS)
    if x is None:
        return None
    z = b.choose(lambda v: v.dtype == x.dtype and v.shape == x.shape)
    axis = b.rng.randint(0, len(x.shape) - 1)
    shape = (*x.shape[:axis], x.shape[axis] * 2, *x.shape[axis + 1 :])
    return z and b.add(name, [x, z], shape, max(x.bound, z.bound), dtype=x.dtype, exact=x.exact and z.exact, axis=axis)


@grows("Trilu")
def trilu(b: Builder, name: str) -> Known | None:
    x = b.floating(rank=2)
    return x and b.add(name, [x], x.shape, x.bound, exact=x.exact, upper=b.rng.randint(0, 1))


@grows("DepthToSpace", "SpaceToDepth")
def blocks(b: Builder, name: str) -> Known | None:
    x = b.choose(
        lambda v: (
            v.dtype == b.kind
            and len(v.shape) == 4
            and all((size.value or 1) % 4 == 0 for size in ((v.shape[1],) if name == "DepthToSpace" else v.shape[2:]))
        )
    )
    if x is None:
        return None
    n, c, h, w = x.shape
    shape = (n, c // 4, h * 2, w * 2) if name == "DepthToSpace" else (n, c * 4, h // 2, w // 2)
    return b.add(name, [x], shape, x.bound, dtype=x.dtype, exact=x.exact, blocksize=2)


@grows("GatherElements")
def gather(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: len(v.shape) >= 1 and (v.shape[-1].value or 0) >= 3 and len(v.shape) == 1)
    return x and b.add(name, [x, b.ints(2, 0, -1)], (dim(3),), x.bound, dtype=x.dtype, exact=x.exact, axis=0)


@grows("Gather")
def rows_of(b: Builder, name: str) -> Known | None:
    """Some places of an axis: fixed ones, or those that an input names."""
    x = b.choose(lambda v: any((size.value or 0) >= 3 for size in v.shape) and len(v.shape) < 4)
    if x is None:
        return None
    axis = b.rng.choice([axis for axis, size in enumerate(x.shape) if (size.value or 0) >= 3])
    shape = (dim(2), symbol("N")) if b.flip() else (symbol("L"),)
    given = b.flip()
    places = b.ints(2, 0, 1, 1) if given else b.input(Known("", INT64, shape, 2.0, True))
    shape = (*x.shape[:axis], *((dim(4),) if given else shape), *x.shape[axis + 1 :])
    if product(shape).evaluate(b.limits) > MOST_ELEMENTS:
        return None
    return b.add(name, [x, places], shape, x.bound, dtype=x.dtype, exact=x.exact, axis=axis)


@grows("Pad")
def padded(b: Builder, name: str) -> Known | None:
    x = b.floating(rank=1)
    if x is None or product(x.shape).evaluate(b.limits) * 2 > MOST_ELEMENTS:
        return None
    axis = b.rng.randint(0, len(x.shape) - 1)
    before, after = b.rng.randint(0, 2), b.rng.randint(0, 2)
    pads = [0] * (2 * len(x.shape))
    pads[axis], pads[axis + len(x.shape)] = before, after
    shape = (*x.shape[:axis], x.shape[axis] + (before + after), *x.shape[axis + 1 :])
    return b.add(name, [x, b.ints(*pads), b.number(0.5)], shape, max(x.bound, 0.5), exact=x.exact)


@grows("Range")
def counted(b: Builder, name: str) -> Known | None:
    """0, 1, 2 and so on along the last axis, as masks are made of them."""
    x = b.floating(rank=1, exact=True)
    if x is None or b.opset < 13:
        return None
    zero, one = (b.constant(np.array(number, np.int64)) for number in (0, 1))
    places = b.hidden(name, [zero, b.size_of(x, -1), one], [x.shape[-1]])
    numbers = b.add("Cast", [places], [x.shape[-1]], float(x.shape[-1].evaluate(b.limits)), exact=True, to=b.kind)
    if numbers.bound > EXACT_TO[b.kind]:
        return numbers
    return b.add("Greater", [x, numbers], x.shape, 1, dtype=BOOL, exact=True)


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


KINDS = (FLOAT, FLOAT, FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
OPSETS = (11, 12, 13, 14, 16, 17, 18, 19, 20, 21, 21, 21, 22, 23, 24)
SYMBOLS = ("N", "L")
RARE = ("GroupNormalization", "InstanceNormalization", "RMSNormalization", "SpaceToDepth", "DepthToSpace", "Swish",
        "com.microsoft.BiasGelu", "com.microsoft.SkipLayerNormalization",
        "com.microsoft.SkipSimplifiedLayerNormalization")
"""Operators that few values suit: they are tried more often."""
ALL = (*GROWERS, *RARE, *RARE)
ELSEWHERE = ("com.microsoft.BiasAdd", "com.microsoft.SimplifiedLayerNormalization")
"""Operators that ONNX Runtime's CPU provider lacks."""


def grown(rng: Random, most: int = 60, kinds: Sequence[int] = KINDS, names: Sequence[str] = ALL,
          opsets: Sequence[int] = OPSETS, target: int | None = None) -> RandomGraph:
    """A model of up to about ``most`` nodes, or of ``target`` and a few: the first of the same larger model.

    Most are such that ONNX Runtime's CPU provider has kernels for all of their operators and types.
    """
    sizes = {name: rng.randint(1, 9) for name in SYMBOLS}
    kind, opset, portable = rng.choice(kinds), rng.choice(opsets), rng.randint(0, 3) > 0
    kind = FLOAT if portable and FLOAT in kinds else kind
    b = Builder(rng, kind, sizes, max(opset, 16) if kind == TensorProto.BFLOAT16 else opset, portable)
    axes = [*map(symbol, SYMBOLS), dim(1), dim(3), dim(4), dim(8), dim(12)]
    shape = tuple(rng.choice(axes) for _ in range(rng.randint(1, 4)))
    for place in range(rng.randint(1, 3)):
        b.known.append(b.input(Known("", kind, shape[rng.randint(0, len(shape) - 1) if place else 0 :], 2.0, True)))
    wanted = rng.randint(1, most)
    for _ in range(3 * most):
        if len(b.nodes) >= (wanted if target is None else target):
            break
        b.kind = rng.choice([kind, *dict.fromkeys(value.dtype for value in b.known if value.dtype in FLOATS)])
        name = rng.choice(names if portable or names is not ALL else (*names, *ELSEWHERE, *ELSEWHERE, *ELSEWHERE))
        if takes(name, b.opset, b.kind) and not (portable and name in ELSEWHERE):
            GROWERS[name](b)
    if not b.nodes:
        b.add("Neg", [b.inputs[0]], b.inputs[0].shape, 2.0, dtype=kind)
    return finished(b)


def seeded(seed: int, most: int = 60, target: int | None = None) -> RandomGraph:
    """The graph of a seed."""
    return grown(Random(seed), most, target=target)


@st.composite
def graphs(draw: st.DrawFn, most: int = 25, kinds: Sequence[int] = KINDS[:-1],
           names: Sequence[str] = tuple(GROWERS), opsets: Sequence[int] = (21,)) -> RandomGraph:
    """The same for hypothesis, which then finds the smallest graph that fails."""
    return grown(draw(st.randoms(use_true_random=False)), most, kinds, names, opsets)


def finished(b: Builder) -> RandomGraph:
    """The model: outputs are what nobody reads, and one value that somebody does."""
    read = {name for node in b.nodes for name in node.input}
    made = [value for value in b.known if value not in b.inputs]
    outputs = [value for value in made if value.name not in read]
    inner = [value for value in made if value.name in read]
    if inner and b.flip():
        outputs.append(b.rng.choice(inner))
    used = [value for value in b.inputs if value.name in read]
    model = helper.make_model(
        helper.make_graph(
            b.nodes, "random", [info(value) for value in used], [info(value) for value in outputs], b.constants
        ),
        opset_imports=[helper.make_opsetid("", b.opset), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    named = {name for value in used for size in value.shape for name in size.symbols}
    sizes = {name: number for name, number in b.sizes.items() if name in named}
    standard = all(node.domain or onnx.defs.has(node.op_type) for node in b.nodes)
    return RandomGraph(model, sizes, tuple(used), b.rng.randint(0, 2**32 - 1), standard)


def info(value: Known) -> onnx.ValueInfoProto:
    plain = [
        size.value if size.value is not None else str(size) if str(size).isidentifier() else None
        for size in value.shape
    ]
    return helper.make_tensor_value_info(value.name, value.dtype, plain)
