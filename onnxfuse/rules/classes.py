"""Classes of operators, as rules name them: pointwise, broadcast, view, reduction, scan,
pooling, activation.

The classes are those of ``onnxfuse.operators.classes``, asked by name; operators of the internal view are added.
"""

from __future__ import annotations

from onnx import defs

from onnxfuse.graph.model import Graph, Node
from onnxfuse.operators import OPERATORS, OperatorClass, classify, is_deterministic
from onnxfuse.operators.record import CANONICAL, MICROSOFT
from onnxfuse.rules.operators import CANONICAL_OPERATORS, MICROSOFT_OPERATORS, OperatorKey

_BROADCAST = frozenset({("", "Expand")})


def _by_name() -> dict[str, frozenset[OperatorKey]]:
    empty = Graph((), {}, (), (), {})
    known = [("", schema.name) for schema in defs.get_all_schemas() if schema.domain == ""]
    known += [(MICROSOFT, op) for op in MICROSOFT_OPERATORS]
    known += [(CANONICAL, op) for op in CANONICAL_OPERATORS]
    found: dict[OperatorClass, set[OperatorKey]] = {}
    for domain, op in known:
        node = Node(0, "", op, domain, {}, (), (None,))
        found.setdefault(classify(node, empty), set()).add((domain, op))
    pointwise = found.get(OperatorClass.POINTWISE, set())
    return {
        "pointwise": frozenset(pointwise | found[OperatorClass.BROADCAST]),
        "broadcast": _BROADCAST,
        "view": frozenset(found[OperatorClass.VIEW]) - _BROADCAST,
        "reduction": frozenset(found[OperatorClass.REDUCTION]),
        "scan": frozenset(found.get(OperatorClass.SCAN, ())),
        "pooling": frozenset(found.get(OperatorClass.POOLING, ())),
        "activation": frozenset(key for key, record in OPERATORS.items() if record.activation),
    }


CLASSES = _by_name()
"""Operators of each class.  A rule may name a class wherever it names operators.  Pointwise operators spread their
operands as NumPy does; "broadcast" is Expand."""


def is_pointwise(node: Node) -> bool:
    """Whether the node may lie in a ``pointwise(...)`` hole: each result element from one element of each operand."""
    key = (node.domain, node.op)
    return (key in CLASSES["pointwise"] or key in CLASSES["broadcast"]) and is_deterministic(node)
