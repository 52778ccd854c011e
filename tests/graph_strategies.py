"""Random graphs of operators that can be lowered, for hypothesis.

A graph grows node by node from what is there, so values are shared, and several of those that nobody reads are
outputs.  Sizes are numbers and symbols.  Each value knows a bound of its magnitude, so that nothing overflows, and
whether its elements are ``exact`` (the same in any precision): only such ones reach operators whose result jumps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, sqrt

import numpy as np
import onnx
from graph_builder import (
    BOOL,
    FAR,
    FLOAT,
    GROWERS,
    INT32,
    MOST_ELEMENTS,
    OPSET,
    UINT32,
    Builder,
    Known,
    RandomGraph,
    grows,
)
from hypothesis import strategies as st
from onnx import TensorProto, helper
from reference import numpy_type

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
    x = b.floating()
    domain, _, op = name.rpartition(".")
    if x is None or ((domain or op == "Celu") and b.kind != FLOAT):
        return None
    return b.add(op, [b.moderate(x)], x.shape, 2 * min(x.bound, FAR) + 2, domain=domain)


@grows("Sigmoid", "HardSigmoid", "Softsign", "Tanh", "Erf", "Sin", "Cos", "Atan")
def bounded(b: Builder, name: str) -> Known | None:
    x = b.floating()
    return x and b.add(name, [b.moderate(x)], x.shape, 1.6)


@grows("Neg", "Abs", "Identity", "Dropout")
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
    return tuple(result) if product(result).evaluate(b.sizes) <= MOST_ELEMENTS else None


def partner(b: Builder, value: Known, dtype: int | None = None, exact: bool = False) -> Known | None:
    """Another value that broadcasts with this one."""
    return b.choose(
        lambda v: (
            v.dtype == (value.dtype if dtype is None else dtype)
            and (v.exact or not exact)
            and together(b, v, value) is not None
        )
    )


@grows("Add", "Sub", "Mul", "Max", "Min", "Sum", "Mean")
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
    exponent = b.draw(st.sampled_from((2.0, 3.0, 0.5, 1.0, -1.0, 1.5)))
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
    x = b.choose(lambda v: v.dtype == FLOAT and b.kind == FLOAT)
    return x and b.add(name, [x], x.shape, 1, dtype=BOOL, exact=True)


@grows("And", "Or", "Xor")
def logic(b: Builder, name: str) -> Known | None:
    x = b.of_type(BOOL)
    z = x and partner(b, x)
    shape = together(b, x, z)
    return None if x is None or z is None or shape is None else b.add(name, [x, z], shape, 1, dtype=BOOL, exact=True)


@grows("Not")
def inverse(b: Builder, name: str) -> Known | None:
    x = b.of_type(BOOL)
    return x and b.add(name, [x], x.shape, 1, dtype=BOOL, exact=True)


@grows("Where")
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
    """Floats to integers where they are exact, the rest to floats, here and there by way of a shorter type."""
    x = b.choose(lambda v: True)
    assert x is not None
    to_integer = x.dtype == b.kind and x.exact and b.draw(st.booleans())
    target = INT32 if to_integer else b.kind
    if target == x.dtype:
        half = b.add("Cast", [x], x.shape, x.bound, dtype=TensorProto.FLOAT16, exact=x.exact, to=TensorProto.FLOAT16)
        b.known.remove(half)
        x = half
    if name == "CastLike" and not to_integer:
        return b.add(name, [x, b.number(0)], x.shape, x.bound, exact=x.exact)
    return b.add("Cast", [x], x.shape, x.bound, dtype=target, exact=x.exact, to=target)


@grows("BitwiseAnd", "BitwiseOr", "BitwiseXor", "Mod")
def integers(b: Builder, name: str) -> Known | None:
    x = b.of_type(INT32)
    number = b.constant(np.array(b.draw(st.integers(1, 9)), np.int32))
    return x and b.add(name, [x, number], x.shape, x.bound + 16, dtype=INT32, exact=True)


@grows("BitwiseNot")
def bitwise_not(b: Builder, name: str) -> Known | None:
    x = b.of_type(INT32)
    return x and b.add(name, [x], x.shape, x.bound + 1, dtype=INT32, exact=True)


@grows("BitShift")
def shift(b: Builder, name: str) -> Known | None:
    x = b.of_type(INT32)
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
    axes = b.draw(st.permutations(range(len(x.shape))))
    return b.add(name, [x], [x.shape[axis] for axis in axes], x.bound, dtype=x.dtype, exact=x.exact, perm=axes)


@grows("Reshape")
def reshape(b: Builder, name: str) -> Known | None:
    """Two axes become one, or one two; at most one size is not a number."""
    x = b.choose(lambda v: len(v.shape) > 1)
    if x is None:
        return None
    place = b.draw(st.integers(0, len(x.shape) - 2))
    size = x.shape[place]
    if size.value is not None and size.value % 4 == 0 and b.draw(st.booleans()):
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
    place = b.draw(st.integers(0, len(x.shape)))
    shape = (*x.shape[:place], dim(1), *x.shape[place:])
    made = b.add("Unsqueeze", [x, b.ints(place)], shape, x.bound, **keep)
    return made if name == "Unsqueeze" else b.add(name, [made, b.ints(place)], x.shape, x.bound, **keep)


@grows("Expand")
def expand(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: len(v.shape) < 4 and product(v.shape).evaluate(b.sizes) * 3 <= MOST_ELEMENTS)
    ones = [1] * len(x.shape) if x else []
    return x and b.add(name, [x, b.ints(3, *ones)], (dim(3), *x.shape), x.bound, dtype=x.dtype, exact=x.exact)


@grows("Tile")
def tile(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: len(v.shape) >= 1 and product(v.shape).evaluate(b.sizes) * 2 <= MOST_ELEMENTS)
    if x is None:
        return None
    repeats = [2] + [1] * (len(x.shape) - 1)
    return b.add(name, [x, b.ints(*repeats)], (x.shape[0] * 2, *x.shape[1:]), x.bound, dtype=x.dtype, exact=x.exact)


@grows("Slice", "Split")
def part(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: any((size.value or 0) >= 4 and (size.value or 1) % 2 == 0 for size in v.shape))
    if x is None:
        return None
    axis = b.draw(
        st.sampled_from([a for a, s in enumerate(x.shape) if (s.value or 0) >= 4 and (s.value or 1) % 2 == 0])
    )
    size = x.shape[axis].value or 0
    shape = (*x.shape[:axis], dim(size // 2), *x.shape[axis + 1 :])
    keep = {"dtype": x.dtype, "exact": x.exact}
    if name == "Split":
        made = b.add(name, [x], shape, x.bound, outputs=2, axis=axis, num_outputs=2, **keep)
        b.known.append(Known(f"{made.name}_1", x.dtype, shape, x.bound, x.exact))
        return made
    start, step = b.draw(st.sampled_from(((0, 1), (size // 2, 1), (1, 2), (size - 1, -2))))
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
    x = b.choose(lambda v: len(v.shape) >= 1 and product(v.shape).evaluate(b.sizes) * 2 <= MOST_ELEMENTS)
    if x is None:
        return None
    z = b.choose(lambda v: v.dtype == x.dtype and v.shape == x.shape)
    axis = b.draw(st.integers(0, len(x.shape) - 1))
    shape = (*x.shape[:axis], x.shape[axis] * 2, *x.shape[axis + 1 :])
    return z and b.add(name, [x, z], shape, max(x.bound, z.bound), dtype=x.dtype, exact=x.exact and z.exact, axis=axis)


@grows("Trilu")
def trilu(b: Builder, name: str) -> Known | None:
    x = b.floating(rank=2)
    return x and b.add(name, [x], x.shape, x.bound, exact=x.exact, upper=b.draw(st.integers(0, 1)))


@grows("DepthToSpace", "SpaceToDepth")
def blocks(b: Builder, name: str) -> Known | None:
    x = b.choose(
        lambda v: (
            v.dtype == FLOAT
            and len(v.shape) == 4
            and all((size.value or 1) % 4 == 0 for size in ((v.shape[1],) if name == "DepthToSpace" else v.shape[2:]))
        )
    )
    if x is None:
        return None
    n, c, h, w = x.shape
    shape = (n, c // 4, h * 2, w * 2) if name == "DepthToSpace" else (n, c * 4, h // 2, w // 2)
    return b.add(name, [x], shape, x.bound, exact=x.exact, blocksize=2)


@grows("GatherElements")
def gather(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: len(v.shape) >= 1 and (v.shape[-1].value or 0) >= 3 and len(v.shape) == 1)
    return x and b.add(name, [x, b.ints(2, 0, -1)], (dim(3),), x.bound, dtype=x.dtype, exact=x.exact, axis=0)


@grows("ConstantOfShape")
def filled(b: Builder, name: str) -> Known | None:
    x = b.floating(rank=1)
    if x is None or b.kind != FLOAT:
        return None
    b.nodes.append(helper.make_node("Shape", [x.name], [f"s{len(b.nodes)}"]))
    ones = b.add(name, [b.nodes[-1].output[0]], x.shape, 1, exact=True)
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
        return b.add(name, [x], x.shape, 2 * x.bound + 10)
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
    keepdims = b.draw(st.integers(0, 1))
    count = b.draw(st.integers(1, min(2, len(x.shape))))
    length = product(x.shape[-count:]).evaluate(b.sizes)
    x = b.tamed(x, 1.0) if name in ("ReduceProd", "ReduceSumSquare") else b.moderate(x)
    x = b.positive(x, 0.5) if name in ("ReduceLogSum", "ReduceL2") else x
    axes = b.ints(*range(len(x.shape) - count, len(x.shape)))
    shape = (*x.shape[:-count], *((dim(1),) * count if keepdims else ()))
    chooses = name in ("ReduceMax", "ReduceMin")
    return b.add(
        name,
        [x, axes],
        shape,
        x.bound if chooses else x.bound * length + 10,
        exact=chooses and x.exact,
        keepdims=keepdims,
    )


@st.composite
def graphs(
    draw: st.DrawFn,
    most: int = 25,
    kinds: Sequence[int] = (FLOAT, FLOAT, FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16),
    names: Sequence[str] = tuple(GROWERS),
) -> RandomGraph:
    """Models of up to about ``most`` nodes."""
    sizes = {name: draw(st.integers(1, 9)) for name in ("N", "L")}
    b = Builder(draw, draw(st.sampled_from(kinds)), sizes)
    axis = st.sampled_from([symbol("N"), symbol("L"), dim(1), dim(3), dim(4), dim(8), dim(12)])
    shape = tuple(draw(st.lists(axis, min_size=1, max_size=4)))
    for place in range(draw(st.integers(1, 3))):
        own = shape if place == 0 else shape[draw(st.integers(0, len(shape) - 1)) :]
        b.inputs.append(Known(f"x{place}", b.kind, own, 2.0, True))
    b.known += b.inputs
    target = draw(st.integers(1, most))
    for _ in range(3 * most):
        if len(b.nodes) >= target:
            break
        GROWERS[draw(st.sampled_from(names))](b)
    if not b.nodes:
        b.add("Neg", [b.inputs[0]], b.inputs[0].shape, 2.0)
    return finished(b)


def finished(b: Builder) -> RandomGraph:
    """The model: outputs are what nobody reads, and one value that somebody does."""
    read = {name for node in b.nodes for name in node.input}
    made = [value for value in b.known if value not in b.inputs]
    outputs = [value for value in made if value.name not in read]
    inner = [value for value in made if value.name in read]
    if inner and b.draw(st.booleans()):
        outputs.append(b.draw(st.sampled_from(inner)))
    used = [value for value in b.inputs if value.name in read]
    model = helper.make_model(
        helper.make_graph(
            b.nodes, "random", [info(value) for value in used], [info(value) for value in outputs], b.constants
        ),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    rng = np.random.default_rng(b.draw(st.integers(0, 2**32 - 1)))
    # Quarters between -2 and 2: exact in every type, and equal often enough.
    arrays = {
        value.name: (rng.integers(-8, 9, b.actual(value.shape)) / 4).astype(numpy_type(value.dtype)) for value in used
    }
    named = {name for value in used for size in value.shape for name in size.symbols}
    return RandomGraph(model, arrays, {name: number for name, number in b.sizes.items() if name in named})


def info(value: Known) -> onnx.ValueInfoProto:
    plain = [
        size.value if size.value is not None else str(size) if str(size).isidentifier() else None
        for size in value.shape
    ]
    return helper.make_tensor_value_info(value.name, value.dtype, plain)
