"""What matrix products mean as tensors: a contraction of operands as they are, and what is done to its sums.

The attention schedule makes kernels of them; the planner leaves them out of regions until these are measured.
"""

from __future__ import annotations

from onnxfuse.graph.dims import dim
from onnxfuse.graph.model import Node
from onnxfuse.ir.context import LoweringContext, accumulate, apply, declare, like, reshape, wide
from onnxfuse.ir.contractions import Labels, contract
from onnxfuse.ir.integers import less_zero
from onnxfuse.ir.scalars import FLOAT, TYPES
from onnxfuse.ir.tensors import Contract, Map, Permute, Tensor
from onnxfuse.operators.operands import integer_attribute, number_attribute, operand, optional, quantised_by
from onnxfuse.operators.quantization import RANGES, nearest


def product_of(left: Tensor, right: Tensor) -> Contract:
    """NumPy's matmul: over the last two axes, those before them broadcast; an operand of one axis is a vector."""
    if not left.rank or not right.rank:
        raise ValueError("a matrix product of a scalar")

    def batch(tensor: Tensor) -> tuple[str, ...]:
        return tuple(f"b{place}" for place in range(tensor.rank - 2, 0, -1))

    rows, columns = ("m",) * (left.rank > 1), ("n",) * (right.rank > 1)
    outer = max(batch(left), batch(right), key=len)
    return contract((left, (*batch(left), *rows, "k")), (right, (*batch(right), "k", *columns)),
                    (*outer, *rows, *columns))


def matmul(node: Node, context: LoweringContext) -> Tensor:
    left, right = operand(node, context, 0), operand(node, context, 1)
    return declare(product_of(left, right), left.dtype)


def fused_matmul(node: Node, context: LoweringContext) -> Tensor:
    """alpha times a product of operands that are transposed first."""
    left, right = (
        _transposed(operand(node, context, place), bool(integer_attribute(node, f"trans{side}", 0)),
                bool(integer_attribute(node, f"transBatch{side}", 0)))
        for place, side in enumerate("AB")
    )
    made = _times(product_of(left, right), number_attribute(node, "alpha", 1.0), node, context)
    return declare(made, left.dtype)


def _transposed(tensor: Tensor, matrix: bool, batch: bool) -> Tensor:
    """With the first axis moved to the place before the last, then the last two exchanged."""
    axes = list(range(tensor.rank))
    if tensor.rank > 1 and batch:
        axes = [*axes[1:-1], axes[0], axes[-1]]
    if tensor.rank > 1 and matrix:
        axes = [*axes[:-2], axes[-1], axes[-2]]
    return Permute(tensor.dtype, tuple(tensor.shape[axis] for axis in axes), tensor, tuple(axes))


def _times(tensor: Tensor, factor: float, node: Node, context: LoweringContext) -> Tensor:
    if factor == 1:
        return tensor
    floating = TYPES[tensor.dtype].is_floating
    if not floating and factor != int(factor):
        raise context.refuse("unsupported-mode", f"{node.op} of integers by {factor} has no kernel")
    return apply("mul", tensor, like(factor if floating else int(factor), tensor))


def gemm(node: Node, context: LoweringContext) -> Tensor:
    """alpha A B + beta C; C is not looked at where beta is zero."""
    left, right, bias = operand(node, context, 0), operand(node, context, 1), optional(node, context, 2)
    made: Tensor = contract((left, "km" if integer_attribute(node, "transA", 0) else "mk"),
                            (right, "nk" if integer_attribute(node, "transB", 0) else "kn"), "mn")
    made = _times(made, number_attribute(node, "alpha", 1.0), node, context)
    beta = number_attribute(node, "beta", 1.0)
    if bias is not None and beta != 0:
        made = apply("add", made, _times(accumulate(bias), beta, node, context), shape=made.shape)
    return declare(made, left.dtype)


def einsum(node: Node, context: LoweringContext) -> Tensor:
    """An Einstein sum of two operands; an axis of size one is broadcast to those of its letter."""
    if len(node.inputs) != 2:
        raise context.refuse("unsupported-mode", f"an Einsum of {len(node.inputs)} operands has no kernel")
    left, right = operand(node, context, 0), operand(node, context, 1)
    (one, other), result = einsum_labels(str(node.attributes["equation"]), (left.rank, right.rank))
    if any(len(set(labels)) < len(labels) for labels in (one, other, result)):
        raise context.refuse("unsupported-mode", "an Einsum along a diagonal has no kernel")

    def narrowed(tensor: Tensor, labels: Labels, beside: Tensor, known: Labels) -> tuple[Tensor, Labels]:
        """Without the axes of size one that are summed over with a longer one."""
        wide = {label for label, size in zip(known, beside.shape, strict=True) if size != 1} - set(result)
        kept = [axis for axis, label in enumerate(labels) if tensor.shape[axis] != 1 or label not in wide]
        return reshape(tensor, tuple(tensor.shape[axis] for axis in kept)), tuple(labels[axis] for axis in kept)

    made = contract(narrowed(left, one, right, other), narrowed(right, other, left, one), result)
    return declare(made, left.dtype)


def einsum_labels(equation: str, ranks: tuple[int, ...]) -> tuple[list[Labels], Labels]:
    """Labels of each operand's axes and of the result's; an ellipsis stands for labels that count from the right.

    Raises:
        ValueError: the equation does not fit the ranks.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    hidden = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    if any(count < 0 or (count and "..." not in term) for term, count in zip(terms, hidden, strict=True)):
        raise ValueError(f"the equation {equation} does not fit operands of {ranks} axes")
    if not arrow:
        letters = sorted(letter for letter in set(left) - set(",.") if left.count(letter) == 1)
        right = "..." * ("..." in left) + "".join(letters)

    def labels(term: str, count: int) -> Labels:
        head, _, tail = term.partition("...")
        return (*head, *(f".{place}" for place in range(count, 0, -1)), *tail)

    sides = [labels(term, count) for term, count in zip(terms, hidden, strict=True)]
    return sides, labels(right, max(hidden) if "..." in right else 0)


def matmul_integer(node: Node, context: LoweringContext) -> Tensor:
    left, right = operand(node, context, 0), operand(node, context, 1)
    zero, right_zero = optional(node, context, 2), optional(node, context, 3)
    return product_of(less_zero(left, None if zero is None else by_rows(zero)), less_zero(right, right_zero))


def qlinear_matmul(node: Node, context: LoweringContext) -> Tensor:
    """What the integers' product stands for, as the nearest quantised number."""
    left, right = operand(node, context, 0), operand(node, context, 3)
    scale, zero, right_scale, right_zero, own_scale, own_zero = (
        quantised_by(node, context, place) for place in (1, 2, 4, 5, 6, 7))
    made = product_of(less_zero(left, by_rows(zero)), less_zero(right, right_zero))
    factor = apply("div", apply("mul", wide(by_rows(scale)), wide(alone(right_scale))), wide(by_rows(own_scale)))
    return requantized(made, factor, by_rows(own_zero), node, context)


def scaled_integers(node: Node, context: LoweringContext) -> Tensor:
    """A product of integers (MatMulIntegerToFloat) times both scales, and a bias of floats."""
    left, right = operand(node, context, 0), operand(node, context, 1)
    scale, right_scale = quantised_by(node, context, 2), quantised_by(node, context, 3)
    zero, right_zero, bias = (optional(node, context, place) for place in (4, 5, 6))
    if left.dtype not in RANGES or right.dtype not in RANGES:
        raise context.refuse("unsupported-type", f"{node.op} of {TYPES[left.dtype].name} has no kernel")
    made = product_of(less_zero(left, None if zero is None else alone(zero)),
                      less_zero(right, None if right_zero is None else alone(right_zero)))
    result = _standing_for(made, apply("mul", wide(alone(scale)), wide(alone(right_scale))))
    if bias is not None:
        result = apply("add", result, wide(bias), shape=result.shape)
    return declare(result, scale.dtype)


def qgemm(node: Node, context: LoweringContext) -> Tensor:
    """alpha times both scales times (A B + C) of integers; as the nearest quantised number where its result is one."""
    left, right = operand(node, context, 0), operand(node, context, 3)
    scale, zero, right_scale, right_zero = (quantised_by(node, context, place) for place in (1, 2, 4, 5))
    bias, own_scale, own_zero = (optional(node, context, place) for place in (6, 7, 8))
    transposed = integer_attribute(node, "transB", 0)
    columns = by_rows(right_zero) if transposed else alone(right_zero)
    made: Tensor = contract((less_zero(left, alone(zero)), "km" if integer_attribute(node, "transA", 0) else "mk"),
                            (less_zero(right, columns), "nk" if transposed else "kn"), "mn")
    if bias is not None:
        made = apply("add", made, bias, shape=made.shape)
    scales = apply("mul", wide(alone(scale)), wide(alone(right_scale)))
    factor = _times(scales, number_attribute(node, "alpha", 1.0), node, context)
    if own_scale is None:
        return _standing_for(made, factor)
    return requantized(made, apply("div", factor, wide(alone(own_scale))), own_zero, node, context)


def _standing_for(made: Tensor, factor: Tensor) -> Tensor:
    """Integers times a factor, in float32."""
    return apply("mul", Map(FLOAT, made.shape, "cast", (made,)), factor, shape=made.shape)


def alone(parameter: Tensor) -> Tensor:
    """A scale or zero point of one number as a scalar, so that it adds no axis."""
    return reshape(parameter, ()) if parameter.shape == (dim(1),) else parameter


def by_rows(parameter: Tensor) -> Tensor:
    """Scales or zero points of rows, as they are broadcast to a matrix."""
    parameter = alone(parameter)
    return reshape(parameter, (*parameter.shape, dim(1))) if parameter.rank == 1 else parameter


def requantized(made: Tensor, factor: Tensor, zero: Tensor | None, node: Node, context: LoweringContext) -> Tensor:
    """Integers times a factor as the nearest numbers of the result's type."""
    value = node.outputs[0]
    dtype = made.dtype if value is None else context.dtype(value)
    if dtype not in RANGES:
        raise context.refuse("unsupported-type", f"{node.op} to {TYPES[dtype].name} has no kernel")
    return nearest(_standing_for(made, factor), None if zero is None else alone(zero), dtype)
