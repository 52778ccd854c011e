"""Every operator that can be lowered, in every type that it and the kernels hold, against float64.

Kernels run in the emulator, all variants, aligned and not.  Tolerances are those of ``reference.TOLERANCES``, of the
output's largest magnitude; for special values (infinities, the largest and smallest numbers) of each element's own
magnitude or 1, whichever is larger.
"""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import pytest
from kernel_harness import (
    FLOATING,
    INTEGERS,
    NAMES,
    SIGNED,
    UNSIGNED,
    Made,
    Region,
    check,
    make,
    parse,
    random_array,
    random_inputs,
)
from reference import Array, numpy_type

from onnxfuse.operators import lowered

Inputs = Callable[[int, Sequence[int], np.random.Generator], Array]

SIZES = tuple({"N": n} for n in (0, 1, 31, 33, 4097))
FEW = tuple({"N": n} for n in (1, 40))


@dataclass(frozen=True)
class Case:
    """A region: ``T`` in its text stands for each of the types in turn; ``inputs`` by name where not random."""

    name: str
    text: str
    types: tuple[str, ...] = ("float", "float16")
    opset: int = 20
    sizes: tuple[Mapping[str, int], ...] = FEW
    inputs: Mapping[str, Inputs] = field(default_factory=dict)
    length: int = 1
    slack: float = 1.0

    def text_of(self, kind: str) -> str:
        return self.text.replace("T[", f"{kind}[").replace("T ", f"{kind} ")

    def made(self, kind: str) -> Made:
        return _made(self.text_of(kind), self.opset)


def assigned(places: str, results: str = "y = ScatterND(x, i, u)") -> str:
    """What TorchScript makes of ``x[:, 1:2, start:end:step] = u`` where sizes are not known."""
    return f"""g (T[N,2,9,M] x, T[N,1,4,M] u) => (T[N,2,9,M] y)
        <int64[4] a = {{-1,1,1,1}}, int64[1,1,1] b = {{1}}, int64[4,1] c = {{{places}}}, int64 o = {{0}}, int64 one = {{1}},
         int64 three = {{3}}, int64[1] last = {{-1}}> {{
        s = Shape(x) n = Gather(s, o) m = Gather(s, three) to = Shape(u)
        p = Range(o, n, one) q = Reshape(p, a) e0 = Expand(q, to) i0 = Unsqueeze(e0, last)
        e1 = Expand(b, to) i1 = Unsqueeze(e1, last) e2 = Expand(c, to) i2 = Unsqueeze(e2, last)
        l = Range(o, m, one) e3 = Expand(l, to) i3 = Unsqueeze(e3, last)
        i = Concat<axis = -1>(i0, i1, i2, i3) {results} }}"""


@lru_cache(maxsize=1024)
def _made(text: str, opset: int) -> Made:
    return make(text, opset)


def together(name: str, operators: Sequence[str], types: Sequence[str], *, result: str = "T", operands: str = "x",
             opset: int = 20, **options: object) -> Case:
    """Pointwise operators of the same operands as one region with an output each."""
    outputs = ", ".join(f"{result}[N] y{number}" for number in range(len(operators)))
    nodes = "\n".join(f"y{number} = {op.replace('()', f'({operands})')}" for number, op in enumerate(operators))
    given = ", ".join(f"T[N] {operand}" for operand in operands.split(", "))
    return Case(name, f"g ({given}) => ({outputs}) {{ {nodes} }}", tuple(types), opset, SIZES, **options)


def limits(dtype: int, shape: Sequence[int], rng: np.random.Generator) -> Array:
    """Integers up to the limits of their type."""
    kind = numpy_type(dtype)
    info = np.iinfo(kind)
    choices = np.array([info.min, info.min + 1, info.max - 1, info.max, 0, 1, 2, 7], kind)
    return rng.choice(choices, shape)


def divisors(dtype: int, shape: Sequence[int], rng: np.random.Generator) -> Array:
    """Small integers and 0; -1 is left out, by which the smallest number cannot be divided."""
    kind = numpy_type(dtype)
    return rng.choice(np.array([0, 1, 2, 3, 5, 100] + ([-2, -3, -7] if kind.kind == "i" else []), kind), shape)


def within(low: float, high: float) -> Inputs:
    """Uniform numbers of a range."""

    def make_array(dtype: int, shape: Sequence[int], rng: np.random.Generator) -> Array:
        return (rng.random(shape) * (high - low) + low).astype(numpy_type(dtype))

    return make_array


def below(size: int, lowest: int = 0) -> Inputs:
    """Integers of [lowest, size)."""
    return lambda dtype, shape, rng: rng.integers(lowest, size, shape).astype(numpy_type(dtype))


def given(*numbers: float) -> Inputs:
    """These numbers; one of them is a scalar."""
    return lambda dtype, shape, rng: np.array(numbers).reshape(shape).astype(numpy_type(dtype))


POWERS = (1, 2, 0.5, 0.25, 0.125, 4, 1, 8)
UNARY = ("Neg()", "Abs()", "Exp()", "Log()", "Sqrt()", "Reciprocal()", "Sin()", "Cos()", "Tan()", "Asin()", "Acos()",
         "Atan()", "Sinh()", "Cosh()", "Tanh()", "Asinh()", "Acosh()", "Atanh()", "Erf()", "Sigmoid()", "Softplus()",
         "Relu()", "Floor()", "Ceil()", "Round()", "Sign()", "Identity()", "Softsign()")
ACTIVATIONS = ("Gelu()", "Gelu<approximate=\"tanh\">()", "Mish()", "HardSigmoid()", "HardSigmoid<alpha=0.3,beta=0.4>()",
               "HardSwish()", "LeakyRelu()", "LeakyRelu<alpha=0.3>()", "Elu()", "Elu<alpha=2.0>()", "Celu<alpha=0.7>()",
               "Selu()", "ThresholdedRelu()", "ThresholdedRelu<alpha=0.25>()", "Shrink()", "Shrink<bias=0.3,lambd=0.75>()",
               "Shrink<bias=0.3,lambd=-0.5>()")
CONTRIB = ("com.microsoft.Gelu()", "com.microsoft.QuickGelu()", "com.microsoft.QuickGelu<alpha=1.0>()",
           "com.microsoft.FastGelu()", "onnxfuse.canonical.Silu()", "onnxfuse.canonical.QuickGelu<alpha=1.25>()")
ARITHMETIC = ("Add()", "Sub()", "Mul()", "Min()", "Max()")

CASES: tuple[Case, ...] = (
    together("unary", UNARY, FLOATING),
    together("activations", ACTIVATIONS, FLOATING),
    together("contrib", CONTRIB, FLOATING),
    together("swish", ("Swish()", "Swish<alpha=0.5>()"), FLOATING, opset=24),
    together("float tests", ("IsNaN()", "IsInf()", "IsInf<detect_negative=0>()", "IsInf<detect_positive=0>()"),
             FLOATING, result="bool"),
    together("arithmetic", (*ARITHMETIC, "Div()", "PRelu()", "Mod<fmod=1>()"), FLOATING, operands="x, z"),
    together("many operands", ("Sum()", "Mean()", "Max()", "Min()"), FLOATING, operands="x, z, w"),
    together("comparisons", ("Equal()", "Less()", "LessOrEqual()", "Greater()", "GreaterOrEqual()"),
             (*FLOATING, *INTEGERS), result="bool", operands="x, z"),
    together("integer unary", ("Abs()", "Sign()", "Identity()", "BitwiseNot()"), INTEGERS, inputs={"x": limits}),
    together("integer shrink", ("Shrink()", "Shrink<bias=1.5>()", "Shrink<bias=-0.5,lambd=1.25>()"), INTEGERS,
             inputs={"x": below(9)}),
    together("signed unary", ("Neg()", "Relu()"), SIGNED, inputs={"x": limits}),
    together("integer arithmetic", (*ARITHMETIC, "BitwiseAnd()", "BitwiseOr()", "BitwiseXor()"), INTEGERS,
             operands="x, z", inputs={"x": limits, "z": limits}),
    together("integer division", ("Div()", "Mod()", "Mod<fmod=1>()"), INTEGERS, operands="x, z",
             inputs={"x": limits, "z": divisors}),
    Case("integer division with constants", "g (T[N] x) => (T[N] a, T[N] b, T[N] c, T[N] d) <T k = {7}> "
         "{ a = Div(x, k) b = Mod(x, k) c = Mod<fmod=1>(x, k) d = Div(k, x) }", INTEGERS, 20, SIZES,
         inputs={"x": divisors}),
    Case("division by the lowest number", "g (int32[N] x) => (int32[N] a, int32[N] b) <int32 k = {-2147483648}> "
         "{ a = Div(x, k) b = Mod<fmod=1>(x, k) }", ("int32",), 20, SIZES, inputs={"x": limits}),
    together("integer power", ("Pow()",), ("int32", "int64"), operands="x, z", inputs={"z": below(9)}),
    together("shifts", ("BitShift<direction=\"LEFT\">()", "BitShift<direction=\"RIGHT\">()"), UNSIGNED,
             operands="x, z", inputs={"x": limits, "z": below(8)}),
    # past the width of every type, and by less than nothing
    together("shifts out", ("BitShift<direction=\"LEFT\">()", "BitShift<direction=\"RIGHT\">()"), INTEGERS,
             operands="x, z", inputs={"x": limits, "z": below(72)}),
    together("shifts back", ("BitShift<direction=\"LEFT\">()", "BitShift<direction=\"RIGHT\">()"), SIGNED,
             operands="x, z", inputs={"x": limits, "z": below(40, -40)}),
    together("logic", ("And()", "Or()", "Xor()", "Equal()"), ("bool",), operands="x, z"),
    together("not", ("Not()", "Identity()"), ("bool",)),
    Case("powers", "g (T[N] x, T[N] p, int64[N] k) => (T[N] a, T[N] b, T[N] c, T[N] d, T[N] e, T[N] f, T[N] h, T[N] i) "
         "<float two = {2.0}, int32 three = {3}, float half = {0.5}, float one = {1}, float minus = {-1}, float odd = {1.7}>"
         "{ a = Pow(p, x) b = Pow(x, two) c = Pow(x, three) d = Pow(p, half) e = Pow(x, one) f = Pow(p, minus)"
         "  h = Pow(p, odd) i = Pow(x, k) }", FLOATING, sizes=SIZES, inputs={"p": within(0.1, 4), "k": below(5)}),
    Case("where", "g (bool[N] c, T[N] x, T[N] z) => (T[N] y) { y = Where(c, x, z) }",
         (*FLOATING, *INTEGERS, "bool"), sizes=SIZES),
    Case("clip constant", "g (T[N] x) => (T[N] a, T[N] b, T[N] c, T[N] d) <T low = {1}, T high = {3}>"
         "{ a = Clip(x, low, high) b = Clip(x, low) c = Clip(x, , high) d = Clip(x) }", (*FLOATING, *INTEGERS)),
    Case("clip input", "g (T[N] x, T low, T high) => (T[N] y) { y = Clip(x, low, high) }", (*FLOATING, "int32"),
         inputs={"low": within(0, 0), "high": within(2, 2)}),
    Case("clip crossed", "g (T[N] x) => (T[N] y) <T low = {3}, T high = {1}> { y = Clip(x, low, high) }", ("float",)),
    Case("dropout", "g (T[N] x) => (T[N] y) <float r = {0.5}, bool t = {0}> { a = Dropout(x, r, t) y = Neg(a) }", FLOATING),
    Case("cast like", "g (T[N] x, int32[N] z) => (int32[N] y) { y = CastLike(x, z) }", FLOATING),
    Case("batch norm", "g (T[N,5,4] x, T[5] s, T[5] b, T[5] m, T[5] v) => (T[N,5,4] y) "
         "{ y = BatchNormalization(x, s, b, m, v) }", FLOATING, inputs={"v": within(0.1, 2)}),
    Case("batch norm of a matrix", "g (T[N,5] x, T[5] s, T[5] b, T[5] m, T[5] v) => (T[N,5] y) "
         "{ y = BatchNormalization<epsilon=0.01>(x, s, b, m, v) }", ("float",), inputs={"v": within(0.1, 2)}),
    Case("bias gelu", "g (T[N,24] x, T[24] b) => (T[N,24] y, T[N,24] z) "
         "{ y = com.microsoft.BiasGelu(x, b) z = com.microsoft.FastGelu(x, b) }", FLOATING),
    Case("bias add", "g (T[N,5,24] x, T[24] b, T[N,5,24] s) => (T[N,5,24] y) { y = com.microsoft.BiasAdd(x, b, s) }"),
    # Views.
    Case("reshape", "g (T[N,6,4] x) => (T[N,24] a, T[K] b, T[N,2,3,4] c, T[N,1,6,4] d, T[N,24] e, T[N,6,4] f)"
         "<int64[2] s = {0,-1}, int64[1] t = {-1}, int64[4] u = {-1,2,3,4}, int64[1] v = {1}>"
         "{ a = Reshape(x, s) b = Reshape(x, t) c = Reshape(x, u) d = Unsqueeze(x, v) e = Flatten(x) f = Squeeze(d, v) }",
         (*FLOATING, *INTEGERS, "bool"), sizes=({"N": 1, "K": 24}, {"N": 9, "K": 216})),
    Case("unsqueeze before 13", "g (T[N,6] x) => (T[1,N,1,6] y) { y = Unsqueeze<axes=[0,2]>(x) }", opset=11),
    Case("squeeze before 13", "g (T[N,1,6] x) => (T[N,6] y) { y = Squeeze<axes=[1]>(x) }", opset=11),
    Case("transpose", "g (T[N,3,5,8] x) => (T[8,5,3,N] a, T[N,5,8,3] b, T[3,N,5,8] c)"
         "{ a = Transpose(x) b = Transpose<perm=[0,2,3,1]>(x) c = Transpose<perm=[1,0,2,3]>(x) }",
         (*FLOATING, *INTEGERS, "bool"), sizes=({"N": 1}, {"N": 7}, {"N": 8})),
    Case("expand", "g (T[N,1,4] x, T[1] z) => (T[N,3,4] a, T[N,3,4] b) <int64[3] s = {1,3,1}>"
         "{ a = Expand(x, s) t = Shape(a) b = Expand(z, t) }"),
    Case("slice", "g (T[N,20] x) => (T[N,8] y) <int64[1] a = {1}, int64[1] s = {3}, int64[1] e = {11}>"
         "{ y = Slice(x, s, e, a) }", (*FLOATING, *INTEGERS, "bool")),
    Case("slice steps", "g (T[N,20] x) => (T[N,7] y) <int64[1] a = {-1}, int64[1] s = {-1}, int64[1] e = {0}, int64[1] p = {-3}>"
         "{ y = Slice(x, s, e, a, p) }"),
    Case("slice far", "g (T[N,20] x) => (T[N,20] y) "
         "<int64[1] a = {1}, int64[1] s = {9223372036854775807}, int64[1] e = {-9223372036854775808}, int64[1] p = {-1}>"
         "{ y = Slice(x, s, e, a, p) }"),
    Case("slice a symbol backwards", "g (T[20,N] x) => (T[20,N] y) "
         "<int64[1] a = {1}, int64[1] s = {9223372036854775807}, int64[1] e = {-9223372036854775808}, int64[1] p = {-1}>"
         "{ y = Slice(x, s, e, a, p) }"),
    Case("slice without axes", "g (T[9,20] x) => (T[4,18] y) <int64[2] s = {1,-18}, int64[2] e = {5,100}>"
         "{ w = Slice(x, s, e) y = Neg(w) }"),
    Case("split", "g (T[N,24] x) => (T[N,8] a, T[N,8] b, T[N,8] c) { a, b, c = Split<axis=1,num_outputs=3>(x) }"),
    Case("split uneven", "g (T[N,24] x) => (T[N,8] y) <int64[3] s = {8,12,4}> "
         "{ a, b, c = Split<axis=-1>(x, s) d, e = Split<axis=-1,num_outputs=2>(b) f = Concat<axis=-1>(c, c) g = Add(a, f) y = Neg(g) }"),
    Case("split before 13", "g (T[N,24] x) => (T[N,12] y) { a, b = Split<axis=1,split=[12,12]>(x) y = Mul(a, b) }", opset=11),
    Case("concat", "g (T[N,3] x, T[N,5] z, T[N,8] w) => (T[N,16] a, T[N,16] b) "
         "{ a = Concat<axis=1>(x, z, w) b = Concat<axis=-1>(w, z, x) }", (*FLOATING, *INTEGERS, "bool"), sizes=FEW),
    Case("concat rows", "g (T[N,8] x, T[3,8] z) => (T[K,8] y) { y = Concat<axis=0>(x, z) }",
         sizes=({"N": 5, "K": 8}, {"N": 0, "K": 3})),
    Case("tile", "g (T[N,3] x) => (T[M,12] y) <int64[2] r = {2,4}> { y = Tile(x, r) }",
         sizes=({"N": 1, "M": 2}, {"N": 7, "M": 14})),
    Case("depth to space", "g (T[N,12,3,5] x) => (T[N,3,6,10] a, T[N,3,6,10] b) "
         "{ a = DepthToSpace<blocksize=2>(x) b = DepthToSpace<blocksize=2,mode=\"CRD\">(x) }"),
    Case("space to depth", "g (T[N,3,6,10] x) => (T[N,12,3,5] y) { y = SpaceToDepth<blocksize=2>(x) }"),
    Case("range", "g (int64[M] x) => (int64[M] y) <int64 a = {3}, int64 d = {2}> "
         "{ s = Shape(x) n = Squeeze(s) t = Mul(n, d) e = Add(t, a) r = Range(a, e, d) y = Mul(r, x) }", ("int64",),
         sizes=({"M": 1}, {"M": 40})),
    Case("trilu", "g (T[N,7,9] x) => (T[N,7,9] a, T[N,7,9] b, T[N,7,9] c, T[N,7,9] d) <int64 up = {2}, int64 down = {-3}>"
         "{ a = Trilu(x) b = Trilu<upper=0>(x) c = Trilu(x, up) d = Trilu<upper=0>(x, down) }", (*FLOATING, *INTEGERS, "bool")),
    Case("gather elements", "g (T[N,9] x, int64[N,4] i) => (T[N,4] y) { y = GatherElements<axis=1>(x, i) }",
         (*FLOATING, *INTEGERS, "bool"), inputs={"i": below(9, -9)}),
    Case("gather elements of rows", "g (T[9,N] x, int32[4,N] i) => (T[4,N] y) { y = GatherElements(x, i) }",
         inputs={"i": below(9, -9)}),
    Case("gather along two axes", "g (T[9,N,7,2] x, int64[5,3] i, int64[5,3] j) => (T[5,3,7,2] y) <int64[1] last = {-1}> "
         "{ a = Unsqueeze(i, last) b = Unsqueeze(j, last) p = Concat<axis = -1>(a, b) y = GatherND(x, p) }",
         inputs={"i": below(9, -9), "j": below(2)}, sizes=({"N": 2}, {"N": 5})),
    Case("gather along all axes", "g (T[9,7] x, int64[N,2] i) => (T[N] y) { y = GatherND(x, i) }", (*FLOATING, *INTEGERS, "bool"), inputs={"i": below(7, -7)}),
    Case("gather by places", "g (T[N,M] x) => (T[N,M] y, T[M,N] z) <int64 nought = {0}, int64 once = {1}, int64[1] axis = {1}, int64[1] last = {-1}> "
         "{ n = Shape<start = 0, end = 1>(x) m = Shape<start = 1>(x) s = Shape(x) N0 = Squeeze(n) M0 = Squeeze(m) i = Range(nought, N0, once) j = Range(nought, M0, once) "
         "i1 = Unsqueeze(i, axis) i2 = Expand(i1, s) j2 = Expand(j, s) a = Unsqueeze(i2, last) b = Unsqueeze(j2, last) p = Concat<axis = -1>(a, b) "
         "g = GatherND(x, p) y = Neg(g) h = Gather<axis = 1>(x, j) z = Transpose(h) }", sizes=({"N": 1, "M": 5}, {"N": 6, "M": 33})),
    Case("gather", "g (T[9,N] x, int64[4,2] i) => (T[4,2,N] y) { y = Gather(x, i) }", (*FLOATING, *INTEGERS, "bool"),
         inputs={"i": below(9, -9)}),
    Case("gather of the middle", "g (T[N,9,3] x, int32[5] i) => (T[N,5,3] y) { a = Gather<axis=1>(x, i) y = Neg(a) }",
         inputs={"i": below(9, -9)}),
    Case("gather of the last", "g (T[N,9] x, int64[2,2] i) => (T[N,2,2] y) { y = Gather<axis=-1>(x, i) }", inputs={"i": below(9, -9)}),
    Case("gather one", "g (T[N,9,3] x, T[N,3] z) => (T[N,3] y) <int64 i = {-2}, int64[1] j = {4}, int64[1] one = {1}> "
         "{ a = Gather<axis=1>(x, i) b = Gather<axis=1>(x, j) c = Squeeze(b, one) d = Add(a, c) y = Add(d, z) }"),
    Case("scatter rows", "g (T[N,5] x, T[3,5] u) => (T[N,5] y) <int64[3,1] i = {-3,-2,-1}> { y = ScatterND(x, i, u) }",
         (*FLOATING, *INTEGERS, "bool"), sizes=({"N": 3}, {"N": 40})),
    Case("scatter a part of each row", "g (T[N,4,6] x, T[N,4] u) => (T[N,4,6] y) <int64 t = {2}> "
         "{ r = Transpose<perm=[2,0,1]>(x) v = Unsqueeze(u, o) s = ScatterND(r, i, v) y = Transpose<perm=[1,2,0]>(s) }"
         .replace("<int64 t = {2}>", "<int64[1,1] i = {4}, int64[1] o = {0}>"), ("float", "float16")),
    Case("scatter a grid", "g (T[2,7,N] x, T[2,3,N] u) => (T[2,7,N] y) "
         "<int64[2,3,2] i = {0,1, 0,3, 0,5, 1,1, 1,3, 1,5}> { a = Neg(u) s = ScatterND(x, i, a) y = Abs(s) }",
         (*FLOATING, *SIGNED), sizes=({"N": 0}, {"N": 1}, {"N": 33})),
    Case("scatter backwards", "g (T[7,N] x, T[3,N] u) => (T[7,N] y) <int64[3,1] i = {6,-4,0}> { y = ScatterND(x, i, u) }",
         sizes=({"N": 1}, {"N": 33})),
    Case("scatter elements of a grid that is listed", "g (T[3,4,N] x, T[4,N] u) => (T[3,4,N] y) "
         "<int64[4,2] i = {1,0, 1,3, 2,0, 2,3}> { y = ScatterND(x, i, u) }", sizes=({"N": 5},)),
    Case("scatter single elements", "g (T[3,9] x, T[2,4] u) => (T[3,9] y) "
         "<int64[2,4,2] i = {0,8, 0,6, 0,4, 0,2, 2,8, 2,6, 2,4, 2,2}> { y = ScatterND(x, i, u) }", sizes=({},)),
    Case("scatter over everything", "g (T[3,N] x, T[3,N] u) => (T[3,N] y) <int64[3,1] i = {0,1,2}> "
         "{ s = ScatterND(x, i, u) y = Add(s, x) }", sizes=({"N": 9},)),
    Case("scatter nothing", "g (T[3,N] x, T[0,N] u) => (T[3,N] y) <int64[0,1] i = {}> { s = ScatterND(x, i, u) y = Neg(s) }",
         sizes=({"N": 9},)),
    *(Case(f"scatter with {reduction}", f"g (T[2,7,N] x, T[2,3,N] u, T[2,7,4] z, T[2,7,2] v) => (T[2,7,N] y, T[2,7,4] w) "
           f"<int64[2,3,2] i = {{0,1, 0,2, 0,3, 1,1, 1,2, 1,3}}, int64[2,7,2] j = {{{', '.join(['-1, 1'] * 14)}}}> "
           f"{{ y = ScatterND<reduction=\"{reduction}\">(x, i, u) w = ScatterElements<axis=-1, reduction=\"{reduction}\">(z, j, v) }}",
           (*FLOATING, "int32", "int64"), sizes=({"N": 1}, {"N": 33}))
      for reduction in ("add", "mul", "max", "min")),
    Case("scatter a slice that is assigned to", assigned("1, 3, 5, 7"),
         sizes=({"N": 0, "M": 5}, {"N": 3, "M": 1}, {"N": 5, "M": 33})),
    Case("scatter a slice backwards, and more", assigned("8, 6, 4, 2", "w = Neg(u) z = ScatterND(x, i, w) y = Add(z, x)"),
         sizes=({"N": 3, "M": 33},)),
    Case("scatter to a slice with add", assigned("2, 3, 4, 5", "y = ScatterND<reduction = \"add\">(x, i, u)"),
         sizes=({"N": 3, "M": 33},)),
    Case("scatter elements", "g (T[N,9] x, T[2,3] u, T[N,9] z) => (T[N,9] y) <int64[2,3] i = {7,5,3, 7,5,3}> "
         "{ s = ScatterElements<axis=1>(x, i, u) y = Add(s, z) }", (*FLOATING, *INTEGERS), sizes=({"N": 2}, {"N": 40})),
    Case("scatter elements of expanded indices", "g (T[N,9] x, T[N,3] u) => (T[N,9] y) <int64[3] p = {2,3,4}, int64[1] c = {3}> "
         "{ s = Shape<start=0,end=1>(x) t = Concat<axis=0>(s, c) i = Expand(p, t) y = ScatterElements<axis=1>(x, i, u) }",
         sizes=({"N": 1}, {"N": 40})),
    Case("scatter elements of an index for all rows", "g (T[N,9] x, T[N,1] u) => (T[N,9] y) <int64 p = {-2}, int64[1] c = {1}> "
         "{ s = Shape<start=0,end=1>(x) t = Concat<axis=0>(s, c) i = Expand(p, t) y = ScatterElements<axis=1>(x, i, u) }",
         sizes=({"N": 1}, {"N": 40})),
    Case("pad", "g (T[N,5] x) => (T[M,9] y) <int64[4] p = {1,0,2,4}, T v = {2}> { y = Pad(x, p, v) }", ("float", "int32", "double"),
         sizes=({"N": 1, "M": 4}, {"N": 40, "M": 43})),
    Case("pad and cut", "g (T[N,5] x, T[N,7] z) => (T[N,7] y) <int64[4] p = {0,-1,0,3}> { a = Pad(x, p) y = Add(a, z) }", ("float", "float16")),
    Case("pad one axis", "g (T[N,5,3] x, T v) => (T[N,8,3] y) <int64[2] p = {1,2}, int64[1] a = {-2}> { y = Pad(x, p, v, a) }"),
    Case("pad with the edge", "g (T[N,5,3] x) => (T[N,12,4] y) <int64[6] p = {0,3,1,0,4,0}> { y = Pad<mode=\"edge\">(x, p) }",
         ("float", "float16", "int32")),
    Case("pad with a reflection", "g (T[N,5,3] x) => (T[N,11,5] y) <int64[6] p = {0,2,1,0,4,1}> { a = Pad<mode=\"reflect\">(x, p) y = Neg(a) }"),
    Case("resize by two", "g (T[N,3,H,5] x) => (T[N,3,I,10] y) <float[4] s = {1,1,2,2}> "
         "{ y = Resize<mode=\"nearest\", coordinate_transformation_mode=\"asymmetric\", nearest_mode=\"floor\">(x, , s) }",
         ("float", "float16", "bfloat16", "int8"), sizes=({"N": 1, "H": 1, "I": 2}, {"N": 2, "H": 7, "I": 14}, {"N": 1, "H": 0, "I": 0})),
    *(Case(f"resize by {times}, {way}, {nearest}", f"g (T[N,2,4,5] x) => (T[N,2,{4 * times},{5 * times}] y) "
           f"<float[2] s = {{{times},{times}}}> {{ a = Neg(x) y = Resize<coordinate_transformation_mode=\"{way}\", "
           f"nearest_mode=\"{nearest}\", axes=[2,3]>(a, , s) }}", ("float",))
      for way in ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric") for nearest in ("round_prefer_floor", "round_prefer_ceil")
      for times in (2, 3, 4)),
    Case("resize of opset 11", "g (float[N,3,4,5] x) => (float[N,3,8,10] y) <float[4] s = {1,1,2,2}, float[0] r = {}> "
         "{ y = Resize<coordinate_transformation_mode=\"asymmetric\", nearest_mode=\"floor\">(x, r, s) }", ("float",), opset=11),
    Case("resize to sizes", "g (T[2,3,4,5] x) => (T[2,3,12,5] y) <int64[4] s = {2,3,12,5}> { y = Resize(x, , , s) }", sizes=({},)),
    Case("resize to sizes that are computed", "g (T[N,3,H,5] x) => (T[N,3,I,5] y) <int64[4] f = {1,1,3,1}> "
         "{ d = Shape(x) s = Mul(d, f) y = Resize(x, , , s) }", sizes=({"N": 2, "H": 3, "I": 9},)),
    *(Case(f"linear resize, {way}, {before} to {after}", f"g (T[N,2,{before},5] x) => (T[N,2,{after},5] y) <int64[4] s = {{0,0,{after},5}}, "
           f"int64[1] two = {{2}}, int64[1] four = {{4}}> {{ d = Shape<end = 2>(x) e = Slice(s, two, four) z = Concat<axis = 0>(d, e) "
           f"r = Resize<mode = \"linear\", coordinate_transformation_mode = \"{way}\">(x, , , z) y = Neg(r) }}",
           ("float", "float16") if after == 7 else ("float",))
      for way in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
      for before, after in ((4, 8), (3, 7), (7, 3), (5, 1), (1, 4), (4, 4))),
    Case("linear resize by scales", "g (T[2,3,H,6] x) => (T[2,3,I,9] y) <float[4] s = {1,1,2,1.5}> { y = Resize<mode = \"linear\">(x, , s) }",
         ("float", "bfloat16", "double"), sizes=({"H": 1, "I": 2}, {"H": 5, "I": 10}, {"H": 33, "I": 66})),
    Case("linear resize by scales that sizes do not show", "g (T[2,5] x) => (T[2,6] y) <float[2] s = {1,1.3}> { y = Resize<mode = \"linear\">(x, , s) }", sizes=({},)),
    Case("linear resize by a scale that leaves the size", "g (T[2,4] x) => (T[2,4] y) <float[2] s = {1,1.2}> { y = Resize<mode = \"linear\">(x, , s) }", sizes=({},)),
    Case("linear resize to sizes that are computed", "g (T[N,3,H,W] x) => (T[N,3,I,J] y) <int64[4] f = {1,1,3,2}> "
         "{ d = Shape(x) s = Mul(d, f) y = Resize<mode = \"linear\", coordinate_transformation_mode=\"pytorch_half_pixel\">(x, , , s) }",
         sizes=({"N": 2, "H": 3, "I": 9, "W": 5, "J": 10}, {"N": 1, "H": 1, "I": 3, "W": 1, "J": 2})),
    Case("linear resize along three axes", "g (T[1,2,3,4,5] x) => (T[1,2,6,8,5] y) <float[3] s = {2,2,1}> { y = Resize<mode = \"linear\", axes = [2,3,4]>(x, , s) }", sizes=({},)),
    *(Case(f"grid sample, {mode}, {padding}, corners {aligned}", "g (T[N,3,H,5] x, T[N,2,P,2] grid) => (T[N,3,2,P] y) "
           f"{{ a = GridSample<mode=\"{mode}\", padding_mode=\"{padding}\", align_corners={aligned}>(x, grid) y = Neg(a) }}",
           ("float", "float16", "bfloat16") if (mode, padding) == ("linear", "zeros") else ("float",),
           sizes=({"N": 2, "H": 4, "P": 33}, {"N": 1, "H": 2 if padding == "reflection" else 1, "P": 31}), inputs={"grid": within(-2.5, 2.5)})
      for mode in ("linear", "nearest") for padding in ("zeros", "border", "reflection") for aligned in (0, 1)),
    Case("grid sample of opset 16", "g (T[N,2,4,4] x, T[N,3,4,2] grid) => (T[N,2,3,4] y) { y = GridSample<mode=\"bilinear\">(x, grid) }",
         opset=16, inputs={"grid": within(-1.1, 1.1)}),
    Case("grid sample along three axes", "g (T[N,2,3,4,5] x, T[N,2,3,4,3] grid) => (T[N,2,2,3,4] y) { y = GridSample(x, grid) }",
         inputs={"grid": within(-1.2, 1.2)}),
    Case("grid sample along one axis", "g (T[N,2,5] x, T[N,7,1] grid) => (T[N,2,7] y) { y = GridSample<padding_mode=\"border\">(x, grid) }",
         inputs={"grid": within(-1.2, 1.2)}),
    Case("one hot", "g (int64[N,3] i, T[2] v) => (T[N,3,7] a, T[N,7,3] b) <int64 d = {7}> "
         "{ a = OneHot(i, d, v) b = OneHot<axis=1>(i, d, v) }", ("float", "float16", "int32", "bool"), inputs={"i": below(9, -9)}),
    Case("one hot of other types", "g (int32[N] i, T[N] j) => (float[N,7] a, float[7,N] b) <int32 d = {7}, float[2] v = {-1, 2}> "
         "{ a = OneHot(i, d, v) b = OneHot<axis=0>(j, d, v) }", ("uint8", "float", "int8"), inputs={"i": below(7), "j": below(7)}),
    Case("quantize", "g (float[N,8] x) => (int8[N,8] a, uint8[N,8] b, int16[N,8] c, uint8[N,8] d) "
         "<float s = {0.125}, int8 z = {3}, int16 w = {-300}, uint8[8] o = {0,1,128,255,7,9,100,200}, float[8] t = {1,2,0.5,0.25,0.125,4,1,8}>"
         "{ a = QuantizeLinear(x, s, z) b = QuantizeLinear(x, s) c = QuantizeLinear(x, s, w) d = QuantizeLinear<axis=1>(x, t, o) }",
         ("float",), 21, SIZES, inputs={"x": within(-40, 40)}),
    Case("dynamic quantize", "g (float[N,3,5] x) => (uint8[N,3,5] a, float s, uint8 z) { a, s, z = DynamicQuantizeLinear(x) }",
         ("float",), 21, SIZES, inputs={"x": within(-40, 9)}),
    Case("dynamic quantize of positive numbers", "g (float[N] x) => (uint8[N] a) { a, s, z = DynamicQuantizeLinear(x) }",
         ("float",), 21, SIZES, inputs={"x": within(2, 3)}),
    Case("dequantize", "g (T[N,8] x) => (float[N,8] a, float[N,8] b, float[N,8] c) "
         "<float s = {0.1}, T z = {3}, T[8] o = {0,1,127,25,7,9,100,20}, float[8] t = {1,2,0.5,0.25,0.125,4,1,8}>"
         "{ a = DequantizeLinear(x, s, z) b = DequantizeLinear(x, s) c = DequantizeLinear<axis=-1>(x, t, o) }",
         ("int8", "uint8", "int16", "uint16"), 21, SIZES),
    Case("quantize of narrow floats", "g (T[N,8] x, T s, T[8] t) => (int8[N,8] a, uint8[N,8] b, uint16[N,8] c, int16[N,8] d) "
         "<int8 z = {3}, uint8[8] o = {0,1,128,255,7,9,100,200}>"
         "{ a = QuantizeLinear(x, s, z) b = QuantizeLinear<axis=-1>(x, t, o) c = QuantizeLinear<output_dtype=4>(x, s)"
         " d = QuantizeLinear<output_dtype=5,saturate=0>(x, s) }",
         ("float", "float16", "bfloat16"), 21, SIZES, inputs={"x": within(-40, 40), "s": given(0.125), "t": given(*POWERS)}),
    Case("dequantize to narrow floats", "g (uint16[N,8] x, int32[N,8] i, T s, T[8] t) => (T[N,8] a, T[N,8] b, T[N,8] c, float[N,8] d) "
         "<uint16 z = {3}, int32 n = {0}>"
         "{ a = DequantizeLinear(x, s, z) b = DequantizeLinear(i, s, n) c = DequantizeLinear<axis=1>(i, t)"
         " d = DequantizeLinear<output_dtype=1>(x, s) }",
         ("float", "float16", "bfloat16"), 23, SIZES,
         inputs={"x": below(9), "i": below(99, -99), "s": given(0.125), "t": given(*POWERS)}),
    Case("quantize of microsoft", "g (T[N,8] x, T s, T[8] t) => (int16[N,8] a, uint16[N,8] b, uint8[N,8] c, int8[N,8] d) "
         "<int16 z = {-300}, uint16[8] o = {0,1,128,255,65535,9,100,200}, int8 w = {5}>"
         "{ a = com.microsoft.QuantizeLinear(x, s, z) b = com.microsoft.QuantizeLinear<axis=1>(x, t, o)"
         " c = com.microsoft.QuantizeLinear(x, s) d = com.microsoft.QuantizeLinear<axis=0>(x, s, w) }",
         ("float", "float16"), 13, SIZES, inputs={"x": within(-40, 40), "s": given(0.125), "t": given(*POWERS)}),
    Case("dequantize of microsoft", "g (T[N,8] x, int32[N,8] i, float16 h) => (float[N,8] a, float16[N,8] b, float[N,8] c, float[N,8] d) "
         "<float s = {0.1}, T z = {3}, T[8] o = {0,1,127,25,7,9,100,20}, float[8] t = {1,2,0.5,0.25,0.125,4,1,8}>"
         "{ a = com.microsoft.DequantizeLinear(x, s, z) b = com.microsoft.DequantizeLinear(x, h)"
         " c = com.microsoft.DequantizeLinear<axis=-1>(x, t, o) d = com.microsoft.DequantizeLinear(i, s) }",
         ("int8", "uint8", "int16", "uint16"), 13, SIZES, inputs={"i": below(99, -99), "h": given(0.125)}),
    Case("constant of shape", "g (T[N,3] x) => (T[N,3] y) "
         "{ s = Shape(x) c = ConstantOfShape<value = float[1] {2.5}>(s) d = CastLike(c, x) y = Add(x, d) }", FLOATING),
    Case("zeros", "g (float[N,3] x) => (float[N,3] y) { s = Shape(x) c = ConstantOfShape(s) y = Add(x, c) }", ("float",)),
    # Rows.
    Case("softmax", "g (T[N,33] x) => (T[N,33] a, T[N,33] b) { a = Softmax(x) b = LogSoftmax(x) }", FLOATING, length=33),
    Case("softmax before 13", "g (T[N,3,11] x) => (T[N,3,11] a, T[N,3,11] b) { a = Softmax(x) b = LogSoftmax<axis=-2>(x) }",
         opset=12, length=33),
    Case("safe softmax", "g (T[N,33] x) => (T[N,33] y) { y = onnxfuse.canonical.SafeSoftmax(x) }", FLOATING, length=33),
    Case("layer norm", "g (T[N,64] x, T[64] s, T[64] b) => (T[N,64] a, T[N,64] c) "
         "{ a = LayerNormalization(x, s, b) c = LayerNormalization<epsilon=0.1>(x, s) }", FLOATING, length=64),
    Case("layer norm statistics", "g (T[N,64] x, T[64] s) => (T[N,64] y, float[N,1] m, float[N,1] i) "
         "{ y, m, i = LayerNormalization(x, s) }", ("float", "float16", "bfloat16"), length=64),
    Case("layer norm over two axes", "g (T[N,6,11] x, T[6,11] s, T[6,11] b) => (T[N,6,11] y) "
         "{ y = LayerNormalization<axis=1>(x, s, b) }", length=66),
    Case("rms norm", "g (T[N,64] x, T[64] s) => (T[N,64] y) { y = RMSNormalization(x, s) }", opset=23, length=64),
    Case("simplified layer norm", "g (T[N,64] x, T[64] s) => (T[N,64] y) { y = SimplifiedLayerNormalization(x, s) }", length=64),
    Case("simplified layer norm of microsoft", "g (T[N,64] x, T[64] s) => (T[N,64] y) "
         "{ y = com.microsoft.SimplifiedLayerNormalization<epsilon=0.01>(x, s) }", length=64),
    Case("skip layer norm", "g (T[N,3,32] x, T[N,3,32] r, T[32] s, T[32] b, T[32] c) => (T[N,3,32] y, T[N,3,32] t) "
         "{ y, _, _, t = com.microsoft.SkipLayerNormalization<epsilon=0.001>(x, r, s, b, c) }", length=32),
    Case("skip rms norm", "g (T[N,3,32] x, T[N,3,32] r, T[32] s) => (T[N,3,32] y, T[N,3,32] t) "
         "{ y, _, _, t = com.microsoft.SkipSimplifiedLayerNormalization<epsilon=0.001>(x, r, s) }", length=32),
    Case("skip norms without what they can do without", "g (T[N,3,32] x, T[N,3,32] r, T[32] s, T[32] c) => (T[N,3,32] a, T[N,3,32] b, T[N,3,32] d) "
         "{ a = com.microsoft.SkipLayerNormalization(x, r, s) b = com.microsoft.SkipLayerNormalization(x, r, s, , c) "
         "d = com.microsoft.SkipSimplifiedLayerNormalization(x, r, s, c) }", length=32),
    Case("norms by constant ones", "g (T[N,4] x) => (T[N,4] a, T[N,4] b, T[N,4] c) <T[4] s = {1,1,1,1}, T[1] o = {1}> "
         "{ a = LayerNormalization(x, s) b = RMSNormalization(x, s) c = LayerNormalization(x, o) }", ("float",), 23),
    Case("instance norm", "g (T[N,3,5,7] x, T[3] s, T[3] b) => (T[N,3,5,7] y) { y = InstanceNormalization(x, s, b) }", length=35),
    Case("group norm 18", "g (T[N,6,4,5] x, T[3] s, T[3] b) => (T[N,6,4,5] y) { y = GroupNormalization<num_groups=3>(x, s, b) }",
         opset=18, length=40),
    Case("group norm 21", "g (T[N,6,4,5] x, T[6] s, T[6] b) => (T[N,6,4,5] y) { y = GroupNormalization<num_groups=3>(x, s, b) }",
         opset=21, length=40),
    Case("global pools", "g (T[N,3,5,7] x) => (T[N,3,1,1] a, T[N,3,1,1] b, T[N,3,1,1] c, T[N,3,1,1] d) "
         "{ a = GlobalAveragePool(x) b = GlobalMaxPool(x) c = GlobalLpPool(x) d = GlobalLpPool<p=1>(x) }",
         ("float", "float16", "double"), opset=22, length=35),
    Case("pools", "g (T[N,3,5,7] x) => (T[N,3,5,4] a, T[N,3,4,6] b) { a = MaxPool<kernel_shape=[3,2], strides=[1,2], pads=[1,0,1,1]>(x) "
         "b = AveragePool<kernel_shape=[2,2]>(x) }", ("float", "float16", "double"), opset=22, length=6),
    Case("global pool of one axis", "g (T[N,3,33] x) => (T[N,3,33] y) { a = GlobalAveragePool(x) y = Sub(x, a) }", length=33),
    Case("lp norm", "g (T[N,33] x) => (T[N,33] a, T[N,33] b) { a = LpNormalization(x) b = LpNormalization<p=1>(x) }",
         ("float", "double", "float16"), length=33, opset=22),
    Case("loss", "g (T[N,9] x, int64[N] l) => (T[N] y) { p = LogSoftmax(x) y = NegativeLogLikelihoodLoss<reduction=\"none\">(p, l) }",
         inputs={"l": below(9)}, length=9),
    *(Case(f"{name} {variant}", f"g (T[N,3,11] x) => (T[{shape}] y) {constants} {{ y = {name}{attributes}(x{operand}) }}",
           types, opset, ({"N": 1}, {"N": 40}), length=33,
           inputs={"x": within(0.2, 1.5)} if name in ("ReduceProd", "ReduceLogSum") else {})
      for name, variant, shape, constants, attributes, operand, types, opset in (
          *((name, "of the last axis", "N,3,1", "", "<axes=[-1]>", "", ("float", "float16"), 11)
            for name in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
                         "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")),
          *((name, "of two axes", "N", "<int64[2] a = {2,1}>", "<keepdims=0>", ", a", FLOATING, 18)
            for name in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
                         "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")),
          *((name, "of integers", "N,3", "<int64[1] a = {-1}>", "<keepdims=0>", ", a", ("int32", "int64", "uint32", "uint64"), 18)
            for name in ("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin")),
          *((name, "of short integers", "N,3", "<int64[1] a = {-1}>", "<keepdims=0>", ", a", ("int8", "uint8", "bool"), 20)
            for name in ("ReduceMax", "ReduceMin")),
      )),
    *(Case(f"running totals of {rows}, exclusive {exclusive}, reverse {reverse}",
           f"g (T[{shape}] x) => (T[{shape}] y) <int64 a = {{{axis}}}> {{ y = CumSum<exclusive={exclusive}, reverse={reverse}>(x, a) }}",
           (*FLOATING, "int32", "int64", "uint32", "uint64") if (exclusive, reverse) == (0, 0) else ("float", "int64"),
           sizes=({"N": 0}, {"N": 1}, {"N": 31}, {"N": 33}), length=33)
      for rows, shape, axis in (("rows", "3,N", -1), ("columns", "2,N,5", 1), ("everything", "N", 0))
      for exclusive in (0, 1) for reverse in (0, 1)),
    Case("running totals of single elements", "g (T[N,1] x) => (T[N,1] y) <int64 a = {1}> { c = CumSum<exclusive=1>(x, a) d = CumSum(x, a) y = Sub(d, c) }"),
    Case("reduce everything", "g (T[N,5] x) => (T y) { y = ReduceSum<keepdims=0>(x) }", FLOATING, opset=13, length=200),
    Case("reduce nothing", "g (T[N,5] x) => (T[N,5] y) { a = ReduceSum<noop_with_empty_axes=1>(x) y = Neg(a) }", opset=13),
    Case("reduce a scalar", "g (T x) => (T a, T b, T c, T d) "
         "{ a = ReduceSumSquare(x) b = ReduceL1(x) c = ReduceMean(x) d = ReduceMax(x) }", FLOATING, sizes=({},)),
)

CASTS = tuple(
    Case(f"cast from {source}", f"g ({source}[N] x) => ({', '.join(f'{kind}[N] y{place}' for place, kind in enumerate(targets))}) {{ "
         + " ".join(f"y{place} = Cast<to={NAMES[kind]}>(x)" for place, kind in enumerate(targets)) + " }",
         (source,), sizes=SIZES, inputs={"x": values})
    for source in NAMES
    for targets, values in (
        ((tuple(NAMES), within(0, 120)), (SIGNED + FLOATING, within(-120, 120)))
        if source in FLOATING
        else ((tuple(NAMES), limits if source != "bool" else random_array),)
    )
)

EVERY = [(case, kind) for case in (*CASES, *CASTS) for kind in case.types]


def inputs_of(made: Region, case: Case, sizes: Mapping[str, int], seed: int) -> dict[str, Array]:
    """Random inputs, but those that the case makes itself."""
    rng = np.random.default_rng(seed)
    given = random_inputs(made, sizes, seed)
    for name, values in case.inputs.items():
        if name in given:
            given[name] = values(made.graph.values[name].dtype or 0, given[name].shape, rng)
    return given


@pytest.mark.parametrize(("case", "kind"), EVERY, ids=[f"{case.name}-{kind}" for case, kind in EVERY])
def test_operator(case: Case, kind: str) -> None:
    made = case.made(kind)
    for seed, sizes in enumerate(case.sizes):
        check(made, inputs_of(made, case, sizes, seed), length=case.length, slack=case.slack)


def test_every_lowered_operator_has_a_case() -> None:
    covered = {
        (node.domain, node.op_type)
        for case in (*CASES, *CASTS)
        for node in parse(case.text_of(case.types[0]), case.opset).graph.node
    }
    assert set(lowered()) - covered == set()
