"""Scalar functions: what they are called in the IR, their text in CUDA, and how they treat rounding.

Inside a region float16 and bfloat16 values are float32 numbers that need not be rounded to their declared type.
A function is one of three sorts here:

- *smooth*: a slightly more accurate operand gives a slightly more accurate result (add, exp);
- *choosing*: the result is one of the operands, or its negative, so it is as rounded as they are (max, where);
- *jumping*: the result jumps (comparisons, floor, isnan), so the operands are rounded to their declared type first.

Texts are formatted with the operands, each a name or a number, and become a name's whole definition; functions of the
``of`` namespace live in ``schedules/cuda/onnxfuse.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import ml_dtypes
from onnx import TensorProto, helper

FLOAT, UINT8, INT8, UINT16, INT16 = (
    TensorProto.FLOAT,
    TensorProto.UINT8,
    TensorProto.INT8,
    TensorProto.UINT16,
    TensorProto.INT16,
)
INT32, INT64, BOOL, FLOAT16, DOUBLE = (
    TensorProto.INT32,
    TensorProto.INT64,
    TensorProto.BOOL,
    TensorProto.FLOAT16,
    TensorProto.DOUBLE,
)
UINT32, UINT64, BFLOAT16 = TensorProto.UINT32, TensorProto.UINT64, TensorProto.BFLOAT16


@dataclass(frozen=True)
class ScalarType:
    """An element type: its name in messages, its type in memory, the type it is computed in, its bytes."""

    name: str
    storage: str
    compute: str
    size: int

    @property
    def is_floating(self) -> bool:
        """Whether it is computed in float or double."""
        return self.compute in ("float", "double")

    @property
    def is_narrow(self) -> bool:
        """Whether it is computed in a wider type than it is stored in."""
        return self.storage != self.compute and self.is_floating


TYPES: dict[int, ScalarType] = {
    FLOAT: ScalarType("float32", "float", "float", 4),
    FLOAT16: ScalarType("float16", "__half", "float", 2),
    BFLOAT16: ScalarType("bfloat16", "__nv_bfloat16", "float", 2),
    DOUBLE: ScalarType("float64", "double", "double", 8),
    INT8: ScalarType("int8", "signed char", "signed char", 1),
    INT16: ScalarType("int16", "short", "short", 2),
    INT32: ScalarType("int32", "int", "int", 4),
    INT64: ScalarType("int64", "long long", "long long", 8),
    UINT8: ScalarType("uint8", "unsigned char", "unsigned char", 1),
    UINT16: ScalarType("uint16", "unsigned short", "unsigned short", 2),
    UINT32: ScalarType("uint32", "unsigned int", "unsigned int", 4),
    UINT64: ScalarType("uint64", "unsigned long long", "unsigned long long", 8),
    BOOL: ScalarType("bool", "bool", "bool", 1),
}
"""Element types that kernels can hold; others (strings, complex numbers, 4- and 8-bit floats) are refused."""

NARROW = frozenset(dtype for dtype, kind in TYPES.items() if kind.is_narrow)
"""Floats of 16 bits: those of products that there are kernels for."""


def limits(dtype: int) -> tuple[float, float] | tuple[int, int]:
    """The lowest and the highest number of an element type; infinity is none."""
    kind = TYPES[dtype]
    if kind.is_floating:
        most = float(ml_dtypes.finfo(helper.tensor_dtype_to_np_dtype(dtype)).max)  # type: ignore[no-untyped-call]
        return -most, most
    signed = not kind.storage.startswith("unsigned")
    values = 2 ** (8 * kind.size - signed)
    return -values * signed, values - 1


def lowest(dtype: int) -> float | int:
    """What no element of a type is below: -infinity where there is one."""
    return float("-inf") if TYPES[dtype].is_floating else limits(dtype)[0]


class Sort(Enum):
    """How a function treats rounding; see the module's text."""

    SMOOTH = "smooth"
    CHOOSING = "choosing"
    JUMPING = "jumping"


@dataclass(frozen=True)
class Function:
    """A scalar function: its text over operands ``{0}``, ``{1}``, ... in floating point and in integers (None where
    it has no meaning there), its sort, a quicker text whose error is far under the rounding of float16 and bfloat16,
    for results declared in one of them, and about how many ``instructions`` it takes in float32, of sm_90's machine
    code, 1 where these are ten or fewer."""

    floating: str | None
    integer: str | None = None
    sort: Sort = Sort.SMOOTH
    narrow: str | None = None
    instructions: int = 1


def _unary(name: str, instructions: int = 1, sort: Sort = Sort.SMOOTH, quick: bool = False) -> Function:
    return Function(f"of::{name}({{0}})", None, sort, f"of::quick_{name}({{0}})" if quick else None, instructions)


def _compare(operator: str) -> Function:
    return Function(f"{{0}} {operator} {{1}}", f"{{0}} {operator} {{1}}", Sort.JUMPING)


FUNCTIONS: dict[str, Function] = {
    "add": Function("{0} + {1}", "{0} + {1}"),
    "sub": Function("{0} - {1}", "{0} - {1}"),
    "mul": Function("{0} * {1}", "{0} * {1}"),
    "div": Function("of::divide({0}, {1})", "of::divide_integers({0}, {1})", instructions=18),
    "steps": Function("of::steps({0}, {1})", None, instructions=28),
    "nearest": Function("of::nearest({0}, {1}, {2}, {3})", None, Sort.JUMPING),
    "nearest_byte": Function("of::nearest_byte({0}, {1}, {2}, {3})", None, Sort.JUMPING, instructions=11),
    "mod": Function(None, "of::modulo({0}, {1})", Sort.JUMPING),
    "fmod": Function("of::fmod({0}, {1})", "of::remainder_of_integers({0}, {1})", Sort.JUMPING, instructions=72),
    "pow": Function("of::pow({0}, {1})", "of::ipow({0}, {1})", instructions=91),
    "min": Function("of::min({0}, {1})", "{0} < {1} ? {0} : {1}", Sort.CHOOSING),
    "max": Function("of::Max::of({0}, {1})", "{0} > {1} ? {0} : {1}", Sort.CHOOSING),
    "at_least": Function("{0} < {1} ? {1} : {0}", "{0} < {1} ? {1} : {0}", Sort.CHOOSING),
    "at_most": Function("{0} > {1} ? {1} : {0}", "{0} > {1} ? {1} : {0}", Sort.CHOOSING),
    "neg": Function("-{0}", "-{0}", Sort.CHOOSING),
    "abs": Function("of::abs({0})", "of::iabs({0})", Sort.CHOOSING),
    "where": Function("{0} ? {1} : {2}", "{0} ? {1} : {2}", Sort.CHOOSING),
    "copy": Function("{0}", "{0}", Sort.CHOOSING),
    "exp": _unary("exp", quick=True),
    "quick_exp": _unary("quick_exp"),
    "exp_difference": Function("of::exp_difference({0}, {1})", None),
    "tanh_approximate": _unary("tanh_approximate"),
    "gelu": _unary("gelu", 12, quick=True),
    "gelu_tanh": _unary("gelu_tanh", 30, quick=True),
    "mish": _unary("mish", 30),
    "expm1": _unary("expm1", 28),
    "log": _unary("log", 26),
    "log1p": _unary("log1p", 29),
    "sqrt": _unary("sqrt", 16),
    "power_half": _unary("power_half", 21),
    "rsqrt": _unary("rsqrt"),
    "reciprocal": _unary("reciprocal", 16),
    "sin": _unary("sin", 134),
    "cos": _unary("cos", 134),
    "tan": _unary("tan", 132),
    "asin": _unary("asin", 22),
    "acos": _unary("acos", 23),
    "atan": _unary("atan", 18),
    "sinh": _unary("sinh", 23),
    "cosh": _unary("cosh", 15),
    "tanh": _unary("tanh", 15, quick=True),
    "asinh": _unary("asinh", 41),
    "acosh": _unary("acosh", 42),
    "atanh": _unary("atanh", 36),
    "erf": _unary("erf", 21),
    "sigmoid": _unary("sigmoid", 25, quick=True),
    "softplus": _unary("softplus", 39),
    "relu": Function("of::max({0}, 0.0f)", "{0} > 0 ? {0} : 0", Sort.CHOOSING),
    "floor": _unary("floor", sort=Sort.JUMPING),
    "ceil": _unary("ceil", sort=Sort.JUMPING),
    "round": _unary("round", sort=Sort.JUMPING),
    "sign": Function("of::sign({0})", "({0} > 0) - ({0} < 0)", Sort.JUMPING),
    "isnan": Function("of::isnan({0})", "false", Sort.JUMPING),
    "isinf": Function("of::isinf({0})", "false", Sort.JUMPING),
    "ispinf": Function("{0} == OF_INFINITY", "false", Sort.JUMPING),
    "isninf": Function("{0} == -OF_INFINITY", "false", Sort.JUMPING),
    "eq": _compare("=="),
    "ne": _compare("!="),
    "lt": _compare("<"),
    "le": _compare("<="),
    "gt": _compare(">"),
    "ge": _compare(">="),
    "and": Function(None, "{0} && {1}"),
    "or": Function(None, "{0} || {1}"),
    "xor": Function(None, "{0} != {1}"),
    "not": Function(None, "!{0}"),
    "bitand": Function(None, "{0} & {1}"),
    "bitor": Function(None, "{0} | {1}"),
    "bitxor": Function(None, "{0} ^ {1}"),
    "bitnot": Function(None, "~{0}"),
    "shl": Function(None, "of::shift_left({0}, {1})"),
    "shr": Function(None, "of::shift_right({0}, {1})"),
}
"""Functions of a ``Map``.  Besides these there are two that change the element type: "cast", which rounds as a Cast
node does, and "narrow", which only declares another floating type and leaves rounding to whoever needs it."""

REDUCTIONS: dict[str, tuple[str, str]] = {
    "sum": ("of::Sum", "0"),
    "prod": ("of::Prod", "1"),
    "max": ("of::Max", "lowest"),
    "min": ("of::Min", "highest"),
    "max_number": ("of::MaxNumber", "lowest"),
}
"""Functor and neutral element of each reduction."""
