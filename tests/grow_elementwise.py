"""Random graphs grow by an operator that works element by element."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import numpy as np
from graph_builder import BOOL, EXACT_TO, FAR, FLOAT, INT32, INT64, MOST_ELEMENTS, UINT32, Builder, Known, grows
from onnx import TensorProto, helper
from reference import FLOATS, numpy_type

from onnxfuse.graph.dims import Dim, dim, product


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


@grows("Swish", "onnxfuse.canonical.Silu", "onnxfuse.canonical.QuickGelu")
def sigmoid_linear(b: Builder, name: str) -> Known | None:
    x = b.floating()
    if x is None:
        return None
    x = b.moderate(x)
    if name == "Swish":
        return b.add(name, [x], x.shape, x.bound + 1)
    inner = b.hidden("Mul", [x, b.number(1.5)], x.shape, b.kind) if name.endswith("QuickGelu") else x
    return b.add("Mul", [x, b.hidden("Sigmoid", [inner], x.shape, b.kind)], x.shape, x.bound + 1)


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


@grows("DynamicQuantizeLinear")
def quantised_by_the_range(b: Builder, name: str) -> Known | None:
    """As integers: what they stand for is not exact."""
    x = b.choose(lambda v: v.dtype == FLOAT and v.exact)
    if x is None or b.kind != FLOAT:
        return None
    steps = b.hidden(name, [x], x.shape, int(TensorProto.UINT8), outputs=3)
    return b.add("Cast", [steps], x.shape, 256.0, exact=True, to=FLOAT)


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
