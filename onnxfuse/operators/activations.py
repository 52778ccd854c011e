"""Activations of the standard that are made of simpler functions, computed in float32 at least."""

from __future__ import annotations

from onnxfuse.graph.context import FLOAT, Type, TypeContext, same
from onnxfuse.graph.dims import dim
from onnxfuse.graph.model import Node
from onnxfuse.ir.context import LoweringContext, apply, declare, like, reshape, test, wide
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.tensors import Map, Tensor
from onnxfuse.operators.arithmetic import ELEMENTARY, ROOT, SIMPLE, per_input, per_output
from onnxfuse.operators.elementwise import binary_types, unary_types
from onnxfuse.operators.operands import number_attribute, operand
from onnxfuse.operators.record import PLAIN, POINTWISE, RuntimeKernel, define

SELU_ALPHA, SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875


def gelu(x: Tensor) -> Tensor:
    """x * Phi(x)."""
    return apply("gelu", x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The usual approximation of it by tanh."""
    return apply("gelu_tanh", x)


def silu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x * sigmoid(alpha * x)."""
    return apply("mul", x, apply("sigmoid", x if alpha == 1.0 else apply("mul", x, like(alpha, x))))


def lower_gelu(node: Node, context: LoweringContext) -> Tensor:
    source = operand(node, context, 0)
    function = gelu_tanh if node.attributes.get("approximate", "none") == "tanh" else gelu
    return function(source)


def lower_swish(node: Node, context: LoweringContext) -> Tensor:
    source = operand(node, context, 0)
    return silu(source, number_attribute(node, "alpha", 1.0))


def lower_mish(node: Node, context: LoweringContext) -> Tensor:
    return apply("mish", operand(node, context, 0))


def hard_sigmoid(node: Node, context: LoweringContext) -> Tensor:
    return _hard_sigmoid(
        operand(node, context, 0), number_attribute(node, "alpha", 0.2), number_attribute(node, "beta", 0.5)
    )


def hard_swish(node: Node, context: LoweringContext) -> Tensor:
    x = operand(node, context, 0)
    return apply("mul", x, _hard_sigmoid(x, 1.0 / 6.0, 0.5))


def _hard_sigmoid(x: Tensor, alpha: float, beta: float) -> Tensor:
    line = apply("add", apply("mul", x, like(alpha, x)), like(beta, x))
    return apply("max", apply("min", line, like(1.0, x)), like(0.0, x))


def _negative(x: Tensor, result: Tensor) -> Tensor:
    """``result`` where x is below zero, else x."""
    return apply("where", test("lt", x, like(0.0, x)), result, x)


def leaky_relu(node: Node, context: LoweringContext) -> Tensor:
    x = operand(node, context, 0)
    return _negative(x, apply("mul", x, like(number_attribute(node, "alpha", 0.01), x)))


def prelu(node: Node, context: LoweringContext) -> Tensor:
    x = operand(node, context, 0)
    return _negative(x, apply("mul", x, operand(node, context, 1)))


def elu(node: Node, context: LoweringContext) -> Tensor:
    x = operand(node, context, 0)
    return _negative(x, apply("mul", apply("expm1", x), like(number_attribute(node, "alpha", 1.0), x)))


def celu(node: Node, context: LoweringContext) -> Tensor:
    x, alpha = operand(node, context, 0), number_attribute(node, "alpha", 1.0)
    return _negative(x, apply("mul", apply("expm1", apply("div", x, like(alpha, x))), like(alpha, x)))


def selu(node: Node, context: LoweringContext) -> Tensor:
    x = operand(node, context, 0)
    alpha, gamma = number_attribute(node, "alpha", SELU_ALPHA), number_attribute(node, "gamma", SELU_GAMMA)
    below = apply("mul", apply("expm1", x), like(alpha * gamma, x))
    above = apply("mul", x, like(gamma, x))
    return apply("where", test("le", x, like(0.0, x)), below, above)


def softsign(node: Node, context: LoweringContext) -> Tensor:
    x = operand(node, context, 0)
    return apply("div", x, apply("add", apply("abs", x), like(1.0, x)))


def thresholded_relu(node: Node, context: LoweringContext) -> Tensor:
    x = operand(node, context, 0)
    above = test("gt", x, like(number_attribute(node, "alpha", 1.0), x))
    return apply("where", above, x, like(0.0, x))


def shrink(node: Node, context: LoweringContext) -> Tensor:
    """Integers are compared and moved as float32, which the attributes are, and cut off then."""
    source = operand(node, context, 0)
    whole = not TYPES[source.dtype].is_floating
    x: Tensor = Map(FLOAT, source.shape, "cast", (source,)) if whole else source
    bias, limit = number_attribute(node, "bias", 0.0), number_attribute(node, "lambd", 0.5)
    high = apply("where", test("gt", x, like(limit, x)), apply("sub", x, like(bias, x)), like(0.0, x))
    # In this order: under a negative limit both may hold.
    result = apply("where", test("lt", x, like(-limit, x)), apply("add", x, like(bias, x)), high)
    return Map(source.dtype, result.shape, "cast", (result,)) if whole else result


def batch_normalization(node: Node, context: LoweringContext) -> Tensor:
    """Inference only: every channel (axis 1) is scaled and shifted."""
    if node.attributes.get("training_mode", 0) or sum(value is not None for value in node.outputs) > 1:
        raise context.refuse(
            "nondeterministic", "BatchNormalization is in training mode", "export the model for inference"
        )
    source = operand(node, context, 0)
    scale, bias, mean, variance = (wide(_per_channel(operand(node, context, place), source)) for place in range(1, 5))
    x = wide(source)
    inverse = apply("rsqrt", apply("add", variance, like(number_attribute(node, "epsilon", 1e-5), variance)))
    normal = apply("mul", apply("sub", x, mean), apply("mul", inverse, scale))
    return declare(apply("add", normal, bias), source.dtype)


def _per_channel(vector: Tensor, image: Tensor) -> Tensor:
    return reshape(vector, vector.shape + (dim(1),) * (len(image.shape) - 2)) if len(image.shape) > 2 else vector


def batch_norm_types(context: TypeContext) -> list[Type]:
    mean = Type(context.dtype(3), context.shape(3))
    return [*same(context), mean, mean, mean, mean]


for _name, _lowering, _cost, _runtime in (
    ("Gelu", lower_gelu, ELEMENTARY, RuntimeKernel.GELU), ("Mish", lower_mish, ELEMENTARY, RuntimeKernel.CURVE),
    ("HardSigmoid", hard_sigmoid, ROOT, PLAIN), ("HardSwish", hard_swish, ROOT, PLAIN),
    ("LeakyRelu", leaky_relu, SIMPLE, PLAIN), ("Elu", elu, ELEMENTARY, PLAIN),
    ("Selu", selu, ELEMENTARY, PLAIN),
):
    define(_name, kind=POINTWISE, types=unary_types, lowering=_lowering, arithmetic=per_output(_cost), host=(),
           runtime=_runtime, activation=True)

for _name, _lowering, _cost in (
    ("Celu", celu, ELEMENTARY), ("Softsign", softsign, ROOT), ("ThresholdedRelu", thresholded_relu, SIMPLE),
    ("Shrink", shrink, SIMPLE),
):
    define(_name, kind=POINTWISE, types=unary_types, lowering=_lowering, arithmetic=per_output(_cost), host=(),
           runtime=PLAIN, activation=False)

define("Swish", kind=POINTWISE, types=unary_types, lowering=lower_swish, arithmetic=per_output(ELEMENTARY), host=(),
       runtime=RuntimeKernel.CURVE, activation=False)
define("PRelu", kind=POINTWISE, types=binary_types, lowering=prelu, arithmetic=per_output(SIMPLE), host=(),
       runtime=PLAIN, activation=False)
define("BatchNormalization", kind=POINTWISE, types=batch_norm_types, lowering=batch_normalization,
       arithmetic=per_input(2), host=(), runtime=RuntimeKernel.AFFINE, activation=False)
