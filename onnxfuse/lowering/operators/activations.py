"""Activations of the standard that are made of simpler functions, computed in float32 at least."""

from __future__ import annotations

from math import sqrt

from onnxfuse.graph.dims import dim
from onnxfuse.graph.model import Node
from onnxfuse.lowering.context import Context, apply, declare, like, reshape, test, wide
from onnxfuse.lowering.ir import Map, Tensor
from onnxfuse.lowering.operators.registry import lowers, number_attribute, operand
from onnxfuse.lowering.scalars import FLOAT, TYPES

SELU_ALPHA, SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875


def gelu(x: Tensor) -> Tensor:
    """x * Phi(x)."""
    return apply("gelu", x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The usual approximation of GELU by tanh; (1 + tanh u) / 2 is sigmoid(2u)."""
    cube = apply("mul", apply("mul", x, x), x)
    inner = apply("add", x, apply("mul", cube, like(0.044715, x)))
    return apply("mul", x, apply("sigmoid", apply("mul", inner, like(2.0 * sqrt(2.0 / 3.141592653589793), x))))


def silu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x * sigmoid(alpha * x)."""
    return apply("mul", x, apply("sigmoid", x if alpha == 1.0 else apply("mul", x, like(alpha, x))))


@lowers("Gelu")
def lower_gelu(node: Node, context: Context) -> Tensor:
    source = operand(node, context, 0)
    function = gelu_tanh if node.attributes.get("approximate", "none") == "tanh" else gelu
    return function(source)


@lowers("Swish")
def lower_swish(node: Node, context: Context) -> Tensor:
    source = operand(node, context, 0)
    return silu(source, number_attribute(node, "alpha", 1.0))


@lowers("Mish")
def lower_mish(node: Node, context: Context) -> Tensor:
    return apply("mish", operand(node, context, 0))


@lowers("HardSigmoid")
def hard_sigmoid(node: Node, context: Context) -> Tensor:
    return _hard_sigmoid(
        operand(node, context, 0), number_attribute(node, "alpha", 0.2), number_attribute(node, "beta", 0.5)
    )


@lowers("HardSwish")
def hard_swish(node: Node, context: Context) -> Tensor:
    x = operand(node, context, 0)
    return apply("mul", x, _hard_sigmoid(x, 1.0 / 6.0, 0.5))


def _hard_sigmoid(x: Tensor, alpha: float, beta: float) -> Tensor:
    line = apply("add", apply("mul", x, like(alpha, x)), like(beta, x))
    return apply("max", apply("min", line, like(1.0, x)), like(0.0, x))


def _negative(x: Tensor, result: Tensor) -> Tensor:
    """``result`` where x is below zero, else x."""
    return apply("where", test("lt", x, like(0.0, x)), result, x)


@lowers("LeakyRelu")
def leaky_relu(node: Node, context: Context) -> Tensor:
    x = operand(node, context, 0)
    return _negative(x, apply("mul", x, like(number_attribute(node, "alpha", 0.01), x)))


@lowers("PRelu")
def prelu(node: Node, context: Context) -> Tensor:
    x = operand(node, context, 0)
    return _negative(x, apply("mul", x, operand(node, context, 1)))


@lowers("Elu")
def elu(node: Node, context: Context) -> Tensor:
    x = operand(node, context, 0)
    return _negative(x, apply("mul", apply("expm1", x), like(number_attribute(node, "alpha", 1.0), x)))


@lowers("Celu")
def celu(node: Node, context: Context) -> Tensor:
    x, alpha = operand(node, context, 0), number_attribute(node, "alpha", 1.0)
    return _negative(x, apply("mul", apply("expm1", apply("div", x, like(alpha, x))), like(alpha, x)))


@lowers("Selu")
def selu(node: Node, context: Context) -> Tensor:
    x = operand(node, context, 0)
    alpha, gamma = number_attribute(node, "alpha", SELU_ALPHA), number_attribute(node, "gamma", SELU_GAMMA)
    below = apply("mul", apply("expm1", x), like(alpha * gamma, x))
    above = apply("mul", x, like(gamma, x))
    return apply("where", test("le", x, like(0.0, x)), below, above)


@lowers("Softsign")
def softsign(node: Node, context: Context) -> Tensor:
    x = operand(node, context, 0)
    return apply("div", x, apply("add", apply("abs", x), like(1.0, x)))


@lowers("ThresholdedRelu")
def thresholded_relu(node: Node, context: Context) -> Tensor:
    x = operand(node, context, 0)
    above = test("gt", x, like(number_attribute(node, "alpha", 1.0), x))
    return apply("where", above, x, like(0.0, x))


@lowers("Shrink")
def shrink(node: Node, context: Context) -> Tensor:
    """Integers are compared and moved as float32, which the attributes are, and cut off then."""
    source = operand(node, context, 0)
    whole = not TYPES[source.dtype].is_floating
    x: Tensor = Map(FLOAT, source.shape, "cast", (source,)) if whole else source
    bias, limit = number_attribute(node, "bias", 0.0), number_attribute(node, "lambd", 0.5)
    high = apply("where", test("gt", x, like(limit, x)), apply("sub", x, like(bias, x)), like(0.0, x))
    # In this order: under a negative limit both may hold.
    result = apply("where", test("lt", x, like(-limit, x)), apply("add", x, like(bias, x)), high)
    return Map(source.dtype, result.shape, "cast", (result,)) if whole else result


@lowers("BatchNormalization")
def batch_normalization(node: Node, context: Context) -> Tensor:
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
