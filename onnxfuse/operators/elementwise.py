"""Elementwise operators of the standard that are one scalar function, or nearly."""

from __future__ import annotations

import numpy as np
import onnx

from onnxfuse.graph.context import BOOL, INT64, INTEGERS, Type, TypeContext, same
from onnxfuse.graph.dims import dim
from onnxfuse.graph.model import Node
from onnxfuse.graph.sizes import Sizes
from onnxfuse.ir.context import LoweringContext, apply, broadcast_shapes, like, test
from onnxfuse.ir.scalars import DOUBLE, FUNCTIONS, TYPES, limits
from onnxfuse.ir.tensors import Map, Tensor
from onnxfuse.operators.arithmetic import ELEMENTARY, POWER, ROOT, SIMPLE, none, per_operand, per_output
from onnxfuse.operators.contents import ARITHMETIC, folded, operands
from onnxfuse.operators.operands import integer_attribute, operand, optional
from onnxfuse.operators.record import PLAIN, POINTWISE, Lowering, RuntimeKernel, define

COMPARISONS = {
    "Equal": "eq",
    "Less": "lt",
    "LessOrEqual": "le",
    "Greater": "gt",
    "GreaterOrEqual": "ge",
}


def checked(node: Node, context: LoweringContext, function: str, *operands: Tensor, dtype: int | None = None) -> Tensor:
    """A ``Map``, refused where the function has no meaning for the operands' type."""
    entry = FUNCTIONS[function]
    floating = TYPES[operands[-1].dtype].is_floating
    if (entry.floating if floating else entry.integer) is None:
        raise context.refuse(
            "unsupported-type", f"{node.qualified_op} of {TYPES[operands[-1].dtype].name} has no kernel"
        )
    return apply(function, *operands, dtype=dtype)


def binary_types(context: TypeContext) -> list[Type]:
    node = context.node
    shape = context.meet(*(context.shape(index) for index in range(len(node.inputs))))
    # The exponent's type is its own; every other operator here has one type.
    known = [context.dtype(index) for index in range(len(node.inputs) if node.op != "Pow" else 1)]
    dtype = BOOL if node.op in COMPARISONS else next((kind for kind in known if kind is not None), None)
    elements = None
    wanted = node.op in ARITHMETIC and context.dtype() in INTEGERS and not context.attribute("fmod", 0)
    if wanted and (parts := operands(context, shape)):
        elements = folded(ARITHMETIC[node.op], parts)
    return [Type(dtype, shape, elements)]


def unary_types(context: TypeContext) -> list[Type]:
    elements = context.elements(0)
    if elements is not None:
        match context.node.op:
            case "Identity":
                pass
            case "Neg":
                elements = tuple(-element for element in elements)
            case "Abs" | "Relu":
                positive = all(element.non_negative() for element in elements)
                elements = elements if positive else None
            case "Not":
                elements = tuple(dim(1) - element for element in elements)
            case _:
                elements = None
    return [Type(context.dtype(), context.shape(), elements)]


def test_types(context: TypeContext) -> list[Type]:
    return [Type(BOOL, context.shape())]


def cast_types(context: TypeContext) -> list[Type]:
    to = int(context.attribute("to"))
    elements = context.elements(0) if to in INTEGERS else None
    if elements is not None and to == BOOL and context.dtype() != BOOL:
        numbers = context.integers(0)
        elements = None if numbers is None else tuple(dim(int(number != 0)) for number in numbers)
    elif elements is not None and to not in (INT64, onnx.TensorProto.INT32):
        # A narrow type wraps large sizes around.
        small = all(e.value is not None and 0 <= e.value < 128 for e in elements)
        elements = elements if small else None
    return [Type(to, context.shape(), elements)]


def cast_like_types(context: TypeContext) -> list[Type]:
    return [Type(context.dtype(1), context.shape())]


def bit_cast_types(context: TypeContext) -> list[Type]:
    return [Type(int(context.attribute("to")), context.shape())]


def where_types(context: TypeContext) -> list[Type]:
    shape = context.meet(context.shape(0), context.shape(1), context.shape(2))
    elements = None
    parts = operands(context, shape) if context.dtype(1) in INTEGERS else None
    if parts is not None:
        chosen = [yes if c == 1 else no if c == 0 else None for c, yes, no in zip(*parts, strict=True)]
        sizes = tuple(size for size in chosen if size is not None)
        elements = sizes if len(sizes) == len(chosen) else None
    return [Type(context.dtype(1) or context.dtype(2), shape, elements)]


def dropout_types(context: TypeContext) -> list[Type]:
    return [*same(context), Type(BOOL, context.shape())]


def is_inf(node: Node, context: LoweringContext) -> Tensor:
    positive = integer_attribute(node, "detect_positive", 1)
    negative = integer_attribute(node, "detect_negative", 1)
    if not positive and not negative:
        raise context.refuse("constant-result", "IsInf that detects neither sign is always false")
    function = "isinf" if positive and negative else "ispinf" if positive else "isninf"
    return test(function, operand(node, context, 0))


def extremum(node: Node, context: LoweringContext) -> Tensor:
    result = operand(node, context, 0)
    for place in range(1, len(node.inputs)):
        result = apply(node.op.lower(), result, operand(node, context, place))
    return result


def sum_of_operands(node: Node, context: LoweringContext) -> Tensor:
    result = operand(node, context, 0)
    for place in range(1, len(node.inputs)):
        result = apply("add", result, operand(node, context, place))
    return result if node.op == "Sum" else apply("div", result, like(len(node.inputs), result))


def power(node: Node, context: LoweringContext) -> Tensor:
    base, exponent = operand(node, context, 0), operand(node, context, 1)
    value = node.inputs[1]
    constant = (
        None if value is None or value.constant is None or value.constant.size != 1 else float(value.constant.item())
    )
    shape = broadcast_shapes([base.shape, exponent.shape])
    if constant is not None and shape == base.shape and TYPES[base.dtype].is_floating:
        if constant == 2.0:
            return apply("mul", base, base)
        if constant == 3.0:
            return apply("mul", apply("mul", base, base), base)
        if constant == 0.5:
            return apply("power_half", base)
        if constant == 1.0:
            return apply("copy", base)
        if constant == -1.0:
            return apply("reciprocal", base)
    if base.dtype != exponent.dtype:
        if not TYPES[base.dtype].is_floating:
            raise context.refuse("unsupported-type", "Pow of an integer by another type has no kernel")
        if constant is None and TYPES[exponent.dtype].size >= 4 and not TYPES[exponent.dtype].is_floating:
            # Whether an exponent is odd is in its last digit, which float32 has not for large ones.
            raised = apply("pow", *(Map(DOUBLE, tensor.shape, "cast", (tensor,)) for tensor in (base, exponent)))
            return Map(base.dtype, raised.shape, "cast", (raised,))
        exponent = Map(base.dtype, exponent.shape, "cast", (exponent,))
    return apply("pow", base, exponent)


def modulo(node: Node, context: LoweringContext) -> Tensor:
    function = "fmod" if integer_attribute(node, "fmod", 0) else "mod"
    return checked(node, context, function, operand(node, context, 0), operand(node, context, 1))


def shift(node: Node, context: LoweringContext) -> Tensor:
    function = "shl" if node.attributes.get("direction") == "LEFT" else "shr"
    return checked(node, context, function, operand(node, context, 0), operand(node, context, 1))


def where(node: Node, context: LoweringContext) -> Tensor:
    return apply("where", *(operand(node, context, place) for place in range(3)))


def cast(node: Node, context: LoweringContext) -> Tensor:
    source, value = operand(node, context, 0), node.outputs[0]
    target = context.dtype(value) if value is not None else source.dtype
    return Map(target, source.shape, "cast", (source,))


def clip(node: Node, context: LoweringContext) -> Tensor:
    """A limit that is not there is the type's own, as the standard says: infinity becomes the largest number.  One that
    is NaN limits nothing, as the runtime's kernel has it."""
    result = operand(node, context, 0)
    lowest, highest = limits(result.dtype)
    for place, name, function, own in ((1, "min", "at_least", lowest), (2, "max", "at_most", highest)):
        limit = optional(node, context, place)
        if limit is None and (name in node.attributes or TYPES[result.dtype].is_floating):
            limit = like(node.attributes.get(name, own), result)
        if limit is not None:
            result = apply(function, result, limit)
    return result


def dropout(node: Node, context: LoweringContext) -> list[Tensor | None]:
    value = node.inputs[2] if len(node.inputs) > 2 else None
    if value is not None and (value.constant is None or bool(value.constant.item())):
        raise context.refuse("nondeterministic", "Dropout may be in training mode", "export the model for inference")
    return [operand(node, context, 0), None]


def _of(function: str) -> Lowering:
    """One scalar function of all operands, of their type."""
    def lowering(node: Node, context: LoweringContext) -> Tensor:
        return checked(node, context, function, *(operand(node, context, at) for at in range(len(node.inputs))))

    return lowering


def _test_of(function: str) -> Lowering:
    """One scalar function of all operands that says yes or no."""
    def lowering(node: Node, context: LoweringContext) -> Tensor:
        return test(function, *(operand(node, context, at) for at in range(len(node.inputs))))

    return lowering


def _squares(power: Node) -> bool:
    exponent = power.inputs[1]
    if exponent is None or exponent.constant is None:
        return False
    return bool(np.all(np.asarray(exponent.constant).astype(np.float64) == 2.0))


def _power_arithmetic(node: Node, sizes: Sizes) -> int | None:
    return per_output(SIMPLE if _squares(node) else POWER)(node, sizes)


for _name, _function, _cost in (
    ("Abs", "abs", SIMPLE), ("Neg", "neg", SIMPLE), ("Sign", "sign", SIMPLE),
    ("Floor", "floor", SIMPLE), ("Ceil", "ceil", SIMPLE), ("Round", "round", SIMPLE),
    ("Not", "not", SIMPLE), ("BitwiseNot", "bitnot", SIMPLE),
    ("Sqrt", "sqrt", ROOT), ("Reciprocal", "reciprocal", ROOT),
    ("Log", "log", ELEMENTARY), ("Sin", "sin", ELEMENTARY), ("Cos", "cos", ELEMENTARY), ("Tan", "tan", ELEMENTARY),
    ("Asin", "asin", ELEMENTARY), ("Acos", "acos", ELEMENTARY), ("Atan", "atan", ELEMENTARY),
    ("Sinh", "sinh", ELEMENTARY), ("Cosh", "cosh", ELEMENTARY), ("Asinh", "asinh", ELEMENTARY),
    ("Acosh", "acosh", ELEMENTARY), ("Atanh", "atanh", ELEMENTARY),
):
    define(_name, kind=POINTWISE, types=unary_types, lowering=_of(_function), arithmetic=per_output(_cost), host=(),
           runtime=PLAIN, activation=False)

for _name, _function, _runtime, _activation in (
    ("Exp", "exp", RuntimeKernel.CURVE, False), ("Sigmoid", "sigmoid", RuntimeKernel.CURVE, True),
    ("Softplus", "softplus", RuntimeKernel.CURVE, True), ("Erf", "erf", RuntimeKernel.GELU, False),
    ("Tanh", "tanh", RuntimeKernel.GELU, True),
):
    define(_name, kind=POINTWISE, types=unary_types, lowering=_of(_function), arithmetic=per_output(ELEMENTARY),
           host=(), runtime=_runtime, activation=_activation)

define("Relu", kind=POINTWISE, types=unary_types, lowering=_of("relu"), arithmetic=per_output(SIMPLE), host=(),
       runtime=PLAIN, activation=True)

for _name, _function, _cost, _runtime in (
    ("Add", "add", SIMPLE, RuntimeKernel.ADDITION), ("Mul", "mul", SIMPLE, RuntimeKernel.FACTOR),
    ("Div", "div", ROOT, RuntimeKernel.FACTOR),
):
    define(_name, kind=POINTWISE, types=binary_types, lowering=_of(_function), arithmetic=per_output(_cost), host=(),
           runtime=_runtime, activation=False)

for _name, _function, _cost in (
    ("Sub", "sub", SIMPLE), ("And", "and", SIMPLE), ("Or", "or", SIMPLE), ("Xor", "xor", SIMPLE),
    ("BitwiseAnd", "bitand", SIMPLE), ("BitwiseOr", "bitor", SIMPLE), ("BitwiseXor", "bitxor", SIMPLE),
):
    define(_name, kind=POINTWISE, types=binary_types, lowering=_of(_function), arithmetic=per_output(_cost), host=(),
           runtime=PLAIN, activation=False)

for _name, _function in COMPARISONS.items():
    define(_name, kind=POINTWISE, types=binary_types, lowering=_test_of(_function), arithmetic=per_output(SIMPLE),
           host=(), runtime=PLAIN, activation=False)

define("IsNaN", kind=POINTWISE, types=test_types, lowering=_test_of("isnan"), arithmetic=per_output(SIMPLE), host=(),
       runtime=PLAIN, activation=False)
define("IsInf", kind=POINTWISE, types=test_types, lowering=is_inf, arithmetic=per_output(SIMPLE), host=(),
       runtime=PLAIN, activation=False)
define("Min", "Max", kind=POINTWISE, types=binary_types, lowering=extremum, arithmetic=per_output(SIMPLE), host=(),
       runtime=PLAIN, activation=False)
define("Sum", kind=POINTWISE, types=binary_types, lowering=sum_of_operands, arithmetic=per_operand, host=(),
       runtime=RuntimeKernel.ADDITION, activation=False)
define("Mean", kind=POINTWISE, types=binary_types, lowering=sum_of_operands, arithmetic=per_operand, host=(),
       runtime=PLAIN, activation=False)
define("Pow", kind=POINTWISE, types=binary_types, lowering=power, arithmetic=_power_arithmetic, host=(), runtime=PLAIN,
       activation=False)
define("Mod", kind=POINTWISE, types=binary_types, lowering=modulo, arithmetic=per_output(ROOT), host=(), runtime=PLAIN,
       activation=False)
define("BitShift", kind=POINTWISE, types=binary_types, lowering=shift, arithmetic=per_output(SIMPLE), host=(),
       runtime=PLAIN, activation=False)
define("Where", kind=POINTWISE, types=where_types, lowering=where, arithmetic=per_output(SIMPLE), host=(),
       runtime=PLAIN, activation=False)
define("Clip", kind=POINTWISE, types=unary_types, lowering=clip, arithmetic=per_output(SIMPLE), host=(1, 2),
       runtime=PLAIN, activation=True)
define("Identity", kind=POINTWISE, types=unary_types, lowering=_of("copy"), arithmetic=none, host=(), runtime=PLAIN,
       activation=False)
define("Cast", kind=POINTWISE, types=cast_types, lowering=cast, arithmetic=none, host=(), runtime=PLAIN,
       activation=False)
define("CastLike", kind=POINTWISE, types=cast_like_types, lowering=cast, arithmetic=none, host=(), runtime=PLAIN,
       activation=False)
define("BitCast", kind=POINTWISE, types=bit_cast_types, lowering=None, arithmetic=none, host=(), runtime=PLAIN,
       activation=False)
define("Dropout", kind=POINTWISE, types=dropout_types, lowering=dropout, arithmetic=none, host=(1, 2), runtime=PLAIN,
       activation=False)
