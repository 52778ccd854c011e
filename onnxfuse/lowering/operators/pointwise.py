"""Elementwise operators of the standard."""

from __future__ import annotations

from onnxfuse.graph.model import Node
from onnxfuse.lowering.context import Context, apply, broadcast_shapes, like, test
from onnxfuse.lowering.ir import Map, Tensor
from onnxfuse.lowering.operators.registry import integer_attribute, lowers, operand, optional
from onnxfuse.lowering.scalars import DOUBLE, FUNCTIONS, TYPES, limits

SAME_TYPE = {
    "Add": "add",
    "Sub": "sub",
    "Mul": "mul",
    "Div": "div",
    "Neg": "neg",
    "Abs": "abs",
    "Exp": "exp",
    "Log": "log",
    "Sqrt": "sqrt",
    "Reciprocal": "reciprocal",
    "Sin": "sin",
    "Cos": "cos",
    "Tan": "tan",
    "Asin": "asin",
    "Acos": "acos",
    "Atan": "atan",
    "Sinh": "sinh",
    "Cosh": "cosh",
    "Tanh": "tanh",
    "Asinh": "asinh",
    "Acosh": "acosh",
    "Atanh": "atanh",
    "Erf": "erf",
    "Sigmoid": "sigmoid",
    "Softplus": "softplus",
    "Relu": "relu",
    "Floor": "floor",
    "Ceil": "ceil",
    "Round": "round",
    "Sign": "sign",
    "And": "and",
    "Or": "or",
    "Xor": "xor",
    "Not": "not",
    "BitwiseAnd": "bitand",
    "BitwiseOr": "bitor",
    "BitwiseXor": "bitxor",
    "BitwiseNot": "bitnot",
    "Identity": "copy",
}
"""Operators that are one scalar function and keep their operands' type."""

COMPARISONS = {
    "Equal": "eq",
    "Less": "lt",
    "LessOrEqual": "le",
    "Greater": "gt",
    "GreaterOrEqual": "ge",
    "IsNaN": "isnan",
}


def checked(node: Node, context: Context, function: str, *operands: Tensor, dtype: int | None = None) -> Tensor:
    """A ``Map``, refused where the function has no meaning for the operands' type."""
    entry = FUNCTIONS[function]
    floating = TYPES[operands[-1].dtype].is_floating
    if (entry.floating if floating else entry.integer) is None:
        raise context.refuse(
            "unsupported-type", f"{node.qualified_op} of {TYPES[operands[-1].dtype].name} has no kernel"
        )
    return apply(function, *operands, dtype=dtype)


@lowers(*SAME_TYPE)
def same_type(node: Node, context: Context) -> Tensor:
    operands = [operand(node, context, place) for place in range(len(node.inputs))]
    return checked(node, context, SAME_TYPE[node.op], *operands)


@lowers(*COMPARISONS)
def comparison(node: Node, context: Context) -> Tensor:
    operands = [operand(node, context, place) for place in range(len(node.inputs))]
    return test(COMPARISONS[node.op], *operands)


@lowers("IsInf")
def is_inf(node: Node, context: Context) -> Tensor:
    positive = integer_attribute(node, "detect_positive", 1)
    negative = integer_attribute(node, "detect_negative", 1)
    if not positive and not negative:
        raise context.refuse("constant-result", "IsInf that detects neither sign is always false")
    function = "isinf" if positive and negative else "ispinf" if positive else "isninf"
    return test(function, operand(node, context, 0))


@lowers("Min", "Max")
def extremum(node: Node, context: Context) -> Tensor:
    result = operand(node, context, 0)
    for place in range(1, len(node.inputs)):
        result = apply(node.op.lower(), result, operand(node, context, place))
    return result


@lowers("Sum", "Mean")
def sum_of_operands(node: Node, context: Context) -> Tensor:
    result = operand(node, context, 0)
    for place in range(1, len(node.inputs)):
        result = apply("add", result, operand(node, context, place))
    return result if node.op == "Sum" else apply("div", result, like(len(node.inputs), result))


@lowers("Pow")
def power(node: Node, context: Context) -> Tensor:
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


@lowers("Mod")
def modulo(node: Node, context: Context) -> Tensor:
    function = "fmod" if integer_attribute(node, "fmod", 0) else "mod"
    return checked(node, context, function, operand(node, context, 0), operand(node, context, 1))


@lowers("BitShift")
def shift(node: Node, context: Context) -> Tensor:
    function = "shl" if node.attributes.get("direction") == "LEFT" else "shr"
    return checked(node, context, function, operand(node, context, 0), operand(node, context, 1))


@lowers("Where")
def where(node: Node, context: Context) -> Tensor:
    return apply("where", *(operand(node, context, place) for place in range(3)))


@lowers("Cast", "CastLike")
def cast(node: Node, context: Context) -> Tensor:
    source, value = operand(node, context, 0), node.outputs[0]
    target = context.dtype(value) if value is not None else source.dtype
    return Map(target, source.shape, "cast", (source,))


@lowers("Clip")
def clip(node: Node, context: Context) -> Tensor:
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


@lowers("Dropout")
def dropout(node: Node, context: Context) -> list[Tensor | None]:
    value = node.inputs[2] if len(node.inputs) > 2 else None
    if value is not None and (value.constant is None or bool(value.constant.item())):
        raise context.refuse("nondeterministic", "Dropout may be in training mode", "export the model for inference")
    return [operand(node, context, 0), None]
