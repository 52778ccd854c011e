"""Regions that are alike, as layers of a model are, are lowered once.

Two regions are alike where their nodes have the same operators, attributes and wiring, and what they read and write
has the same types, sizes and, where a lowering looks at it, contents.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from onnx import TensorProto

from onnxfuse.graph.model import Graph, Node, Value, root
from onnxfuse.graph.spelling import attributes_of, spelled
from onnxfuse.ir.context import neutral_number
from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.lower import Lowered, lower
from onnxfuse.operators import lowering_of
from onnxfuse.refusal import Refusal

FEW = 8
"""Floats that a lowering looks at: one number, or one for each axis, as the scales of a Resize are; of others at most
whether all are one, or zero."""


@dataclass
class Lowerings:
    """What was lowered so far of one model, in whatever forms."""

    _known: dict[Hashable, tuple[Lowered, tuple[Value, ...]]] = field(default_factory=dict)
    _nodes: dict[Node, Hashable] = field(default_factory=dict)
    _values: dict[Value, Hashable] = field(default_factory=dict)
    _graphs: dict[Graph, Hashable] = field(default_factory=dict)
    _kinds: dict[Hashable, int] = field(default_factory=dict)

    def lower(
        self, nodes: Sequence[Node], outputs: Sequence[Value], graph: Graph, first: Sequence[Value] = (),
    ) -> Lowered | Refusal:
        """As ``lowering.lower`` has it.  Refusals are not kept: they name values of one graph."""
        numbers: dict[Value, int] = {}
        key = self._key(nodes, outputs, graph, first, numbers)
        here = tuple(numbers)
        if key in self._known:
            known, there = self._known[key]
            return known.elsewhere(dict(zip(there, here, strict=True)))
        made = lower(nodes, outputs, graph, first)
        if isinstance(made, Lowered):
            self._known[key] = made, here
        return made

    def _key(self, nodes: Sequence[Node], outputs: Sequence[Value], graph: Graph, first: Sequence[Value],
             numbers: dict[Value, int]) -> Hashable:
        """What a region is, its values by the number that each gets where it is met first."""
        if graph not in self._graphs:
            self._graphs[graph] = self._kinds.setdefault((graph.opset, graph.assumptions), len(self._kinds))
        parts: list[Hashable] = [self._graphs[graph]]

        def number(value: Value | None, written: bool = False) -> Hashable:
            if value is None or value in numbers:
                return value and numbers[value]
            numbers[value] = len(numbers)
            if value not in self._values:
                self._values[value] = _told(value)
            return numbers[value], written, self._values[value]

        parts += map(number, first)
        for node in nodes:
            if node not in self._nodes:
                made = node.rule is not None, lowering_of(node) is None
                self._nodes[node] = node.domain, node.op, attributes_of(node), *made
            parts += [self._nodes[node], tuple(map(number, node.inputs)),
                      tuple(number(value, written=True) for value in node.outputs)]
        return *parts, tuple(map(number, outputs))


def _told(value: Value) -> Hashable:
    """What a lowering sees of a value from outside of its region, or of a result."""
    kind, constant = TYPES.get(value.dtype or 0), value.constant
    integers = kind is None or not kind.is_floating
    content: Hashable = value.is_constant
    if constant is not None and (integers or constant.size <= FEW):
        content = spelled(constant)
    elif constant is not None:
        content = neutral_number(constant)
    elif integers and (value.contents is not None or root(value) is not value or (
            value.producer is not None and value.dtype == TensorProto.INT64)):
        content = value  # whoever asks where elements go looks behind it
    return value.dtype, value.shape, value.elements, constant is None, content
