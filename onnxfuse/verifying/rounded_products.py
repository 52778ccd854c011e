"""A body whose products of float32 round their operands to TF32, as tensor cores multiply them.

ONNX Runtime's CUDA provider does so unless it is told otherwise, and so do kernels of products: a number has eleven
digits there, as in float16.  What comes of that is an error of the original's own, whether or not it shows where the
original's nodes happen to run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
from onnx import TensorProto

from onnxfuse.graph.order import STANDARD_DOMAINS
from onnxfuse.operators import OPERATORS, OperatorClass
from onnxfuse.rewriting import FusedNode
from onnxfuse.verifying.spelling import Spelling

OPERANDS = 2
"""Of a product: what it adds besides is not rounded."""

_SPLIT = 2.0**13 + 1
"""Times a float32, less what that is more than it: its first eleven digits (Dekker, 1971)."""

_LARGE = 2.0**110
"""Numbers from which that overflows stay as they are."""

_LESS = 1.0 - 2.0**-11
"""Of a number, by which it is no larger than when it is cut off after eleven digits: half a unit of the last less, or
more, and then rounded."""


def rounds(node: FusedNode, products: Iterable[onnx.NodeProto], types: Mapping[str, int]) -> bool:
    """Whether the kernel of a fused node rounds operands of these products of its body."""
    return node.rounds and any(_operands(product, types) for product in products)


def is_product(node: onnx.NodeProto) -> bool:
    """Whether a node is a product or a convolution, or has one inside."""
    record = OPERATORS.get((node.domain, node.op_type))
    return record is not None and record.kind is OperatorClass.HEAVY


def with_rounded_products(body: onnx.ModelProto, products: Iterable[onnx.NodeProto], types: Mapping[str, int],
                          cut: bool = False) -> onnx.ModelProto:
    """A body with these of its nodes so.

    Args:
        cut: whether operands are cut off, as tensor cores read what nobody rounds: what is off in one of them adds to
            what is off in the other then, and errors of the same sign in many terms do not happen to cancel.
    """
    opset = next(entry.version for entry in body.opset_import if entry.domain in STANDARD_DOMAINS)
    first = {product.output[0] for product in products}
    result = onnx.ModelProto()
    result.CopyFrom(body)
    result.graph.ClearField("node")
    for place, original in enumerate(body.graph.node):
        node = onnx.NodeProto()
        node.CopyFrom(original)
        if original.output[0] in first:
            for operand in _operands(original, types):
                to = Spelling(f"tf32_{place}.{operand}", opset)
                name = original.input[operand]
                less = to.step("Mul", name, to.number(_LESS, TensorProto.FLOAT)) if cut else name
                node.input[operand] = _rounded(to, less)
                result.graph.node.extend(to.nodes)
        result.graph.node.append(node)
    return result


def _operands(product: onnx.NodeProto, types: Mapping[str, int]) -> list[int]:
    """Places of operands that are rounded."""
    return [place for place, name in enumerate(product.input[:OPERANDS]) if types.get(name) == TensorProto.FLOAT]


def _rounded(to: Spelling, name: str) -> str:
    """The nearest numbers of eleven digits."""
    step, more = to.step, to.step("Mul", name, to.number(_SPLIT, TensorProto.FLOAT))
    near = step("Sub", more, step("Sub", more, name))
    return step("Where", step("Less", step("Abs", name), to.number(_LARGE, TensorProto.FLOAT)), near, name)
