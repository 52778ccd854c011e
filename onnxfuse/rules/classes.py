"""Classes and sets of operators, as rules name them: pointwise, broadcast, view, reduction, scan, pooling, activation,
and the lists that several rules need.

The classes are those of ``onnxfuse.operators.classes``, asked by name; operators of the internal view are added.
"""

from __future__ import annotations

from onnx import defs

from onnxfuse.graph.model import Graph, Node
from onnxfuse.operators import OPERATORS, OperatorClass, classify, is_deterministic, lowered
from onnxfuse.operators.record import CANONICAL, MICROSOFT
from onnxfuse.rules.operators import CANONICAL_OPERATORS, MICROSOFT_OPERATORS, OperatorKey

_BROADCAST = frozenset({("", "Expand")})

_PROJECT: frozenset[OperatorKey] = frozenset({("", "MatMul"), ("", "Gemm")})
"""What multiplies by a layer's weights."""

_MATMUL: frozenset[OperatorKey] = frozenset({("", "MatMul"), (MICROSOFT, "FusedMatMul")})
"""A MatMul that ONNX Runtime has given a factor or a transpose is a FusedMatMul from then on, and takes in more."""

_SETS: dict[str, frozenset[OperatorKey]] = {
    "softmax": frozenset({("", "Softmax"), (CANONICAL, "SafeSoftmax")}),
    "norm": frozenset({("", "LayerNormalization"), ("", "RMSNormalization")}),
    "project": _PROJECT,
    "matmul": _MATMUL,
    "products": _PROJECT | _MATMUL,
}
"""What several rules would list, each by the name that rules/README.md tells."""


def _by_name() -> dict[str, frozenset[OperatorKey]]:
    empty = Graph((), {}, (), (), {})
    known = [("", schema.name) for schema in defs.get_all_schemas() if schema.domain == ""]
    known += [(MICROSOFT, op) for op in MICROSOFT_OPERATORS]
    known += [(CANONICAL, op) for op in CANONICAL_OPERATORS]
    found: dict[OperatorClass, set[OperatorKey]] = {}
    for domain, op in known:
        node = Node(0, "", op, domain, {}, (), (None,))
        found.setdefault(classify(node, empty), set()).add((domain, op))
    pointwise = found.get(OperatorClass.POINTWISE, set()) | found[OperatorClass.BROADCAST]
    view = found[OperatorClass.VIEW]
    return {
        "pointwise": frozenset(pointwise),
        "broadcast": _BROADCAST,
        "view": frozenset(view) - _BROADCAST,
        "light": frozenset(pointwise | view),
        "reduction": frozenset(found[OperatorClass.REDUCTION]),
        "scan": frozenset(found.get(OperatorClass.SCAN, ())),
        "pooling": frozenset(found.get(OperatorClass.POOLING, ())),
        "activation": frozenset(key for key, record in OPERATORS.items() if record.activation),
        **_SETS,
    }


CLASSES = _by_name()
"""Operators of each class and set.  A rule may name one wherever it names operators.  Pointwise operators spread their
operands as NumPy does; "broadcast" is Expand; "light" are these and views."""

_IN_HOLES = (CLASSES["pointwise"] | CLASSES["broadcast"]) & lowered()


def is_pointwise(node: Node) -> bool:
    """Whether the node may lie in a ``pointwise(...)`` hole: each result element from one element of each operand, in a
    way that kernels hold, or nothing would come of what matched around it."""
    return (node.domain, node.op) in _IN_HOLES and is_deterministic(node)
