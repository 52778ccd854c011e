"""Which arithmetic on sizes a graph can do without.

    operands that a constant can stand for ─▶ constants
    operands that equal an earlier value   ─▶ that value
    sizes of tensors made for them alone   ─▶ joined from sizes that are there
    nodes that nothing reads any more      ─▶ gone

Only what inference proves counts: the graph is inferred without the sizes that the model file states of its inner
values.  Graph outputs, what a subgraph or one of the model's functions reads, and nodes that constants alone feed
(ONNX Runtime computes them once) stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from onnxfuse.folding.operands import Constant, constant_operand, plain_constant
from onnxfuse.folding.positive import Positive
from onnxfuse.graph import Graph, LoadedModel, Node, Value, build_graph
from onnxfuse.graph.context import INT64, INTEGERS, elements_of
from onnxfuse.graph.dims import Dim, dim, symbol
from onnxfuse.operators import is_deterministic, output_types
from onnxfuse.operators.numbers import follow
from onnxfuse.operators.record import MICROSOFT
from onnxfuse.provider.host import host, host_operands

STAGE = "shape-arithmetic"
"""The id that leaves this stage out."""

LONGEST = 512
"""Characters of a size's text past which it is given up: sizes that nest from layer to layer prove nothing."""

Operand = tuple[str, int]
"""A node, by its first result's name, and the place of the operand among its inputs."""


@dataclass(frozen=True)
class Folding:
    """What becomes of a graph's arithmetic on sizes.

    Attributes:
        values: values that become constants under their own names.
        constants: operands that get a constant of their own.
        shared: operands that get another value of the graph, by its name.
        joined: Shape nodes, by their result's name, that become a Concat of values by name and of constants.
        removed: nodes that nothing reads any more, by their first result's name, in graph order.
    """

    values: Mapping[str, np.ndarray] = field(default_factory=dict)
    constants: Mapping[Operand, Constant] = field(default_factory=dict)
    shared: Mapping[Operand, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str | np.ndarray, ...]] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


def decide(model: LoadedModel) -> Folding:
    """What can go from a model; nothing from one that onnxfuse has been over.

    Raises:
        ModelError: a small constant cannot be read.
    """
    if not any(node.op_type in ("Shape", "Size") for node in model.proto.graph.node):
        return Folding()
    graph = build_graph(model)
    _prove(graph)
    return _Decision(graph).folding()


def _prove(graph: Graph) -> None:
    """Fill in sizes and contents of the graph's values, from its inputs and its operators alone."""
    for value in graph.values.values():
        value.declared = None
        if value.is_constant and value.producer is None and value.dtype in INTEGERS:
            value.elements = elements_of(value)
    for node in graph.nodes:
        for output, found in zip(node.outputs, output_types(node, graph), strict=True):
            if output is not None:
                output.dtype, output.shape, output.elements = found
                if any(map(_is_long, found.shape or ())):
                    output.shape = tuple(symbol(f"{output.name}.{axis}") if _is_long(size) else size
                                         for axis, size in enumerate(found.shape or ()))
                if any(map(_is_long, found.elements or ())):
                    output.elements = None
        follow(node)


def _is_long(size: Dim) -> bool:
    return len(str(size)) > LONGEST


class _Decision:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.host = host(graph)
        self.positive = Positive.of(graph)
        self.values: dict[Value, np.ndarray] = {}
        self.constants: dict[tuple[Node, int], Constant] = {}
        self.shared: dict[tuple[Node, int], Value] = {}
        self.joined: dict[Node, list[Value | np.ndarray]] = {}

    def folding(self) -> Folding:
        for value in self.graph.values.values():
            whole = self._computed(value) and _alone(value) and not self._bound(value)
            found = plain_constant(value) if whole else None
            if found is not None:
                self.values[value] = found
        for node in self.graph.nodes:
            if self._plain(node):
                self._constants(node)
        self._share()
        self._join(self._unread())
        removed = self._unread()
        read = {value for node in self.graph.nodes if node not in removed for value in self._reads(node)}
        return Folding(
            {value.name: array for value, array in self.values.items() if value in read},
            {(_first(node), place): found for (node, place), found in self.constants.items() if node not in removed},
            {(_first(node), place): value.name for (node, place), value in self.shared.items() if node not in removed},
            {_first(node): tuple(part.name if isinstance(part, Value) else part for part in parts)
             for node, parts in self.joined.items()},
            tuple(_first(node) for node in self.graph.nodes if node in removed),
        )

    def _plain(self, node: Node) -> bool:
        """Whether a node's operands may be others."""
        known = (node.domain, node.op) not in self.graph.functions
        return not node.has_subgraph and node.domain in ("", MICROSOFT) and known

    def _computed(self, value: Value) -> bool:
        """Whether the value comes from arithmetic that runs with the model."""
        return value.producer is not None and self._plain(value.producer) and value not in self.host.constants

    def _bound(self, value: Value) -> bool:
        """Whether somebody reads the value by its name."""
        return value.is_output or not all(self._plain(reader) for reader in value.consumers)

    def _constants(self, node: Node) -> None:
        """Constants in the operator's own words, and those that all of a node's results are not."""
        for place, value in enumerate(node.inputs):
            if value is None or value in self.values or not self._computed(value):
                continue
            found = constant_operand(node, place, self.graph, self.positive)
            if found is None and place in host_operands(node):
                array = plain_constant(value)
                found = None if array is None else Constant(array)
            if found is not None:
                self.constants[node, place] = found

    def _share(self) -> None:
        """Read, of all values that are the same sizes, the one that the fewest nodes lead to.

        No chain to it is longer than the one that it replaces, so that nothing waits longer and no cycle arises,
        wherever in the file it stands.
        """
        depth = self._depths()
        equal: dict[object, list[Value]] = {}
        for value in depth:
            known = value.elements is not None and value.shape is not None  # two unknown ranks may be two ranks
            if known and value not in self.values and self._computed(value):
                key = (value.dtype, value.shape, value.elements, value in self.host.values)
                equal.setdefault(key, []).append(value)
        best: dict[Value, Value] = {}
        for group in equal.values():
            best.update(dict.fromkeys(group, min(group, key=lambda value: depth[value])))
        for node in self.graph.nodes:
            if not self._plain(node):
                continue
            for place, read in enumerate(node.inputs):
                if read in best and best[read] is not read and (node, place) not in self.constants:
                    self.shared[node, place] = best[read]

    def _join(self, removed: Collection[Node]) -> None:
        """Put sizes together from others, where a tensor was made to take its shape and for nothing else."""
        depth = self._depths()
        left = [node for node in self.graph.nodes if node not in removed]
        readers = Counter(value for node in left for value in self._reads(node))
        single: dict[Dim, list[Value]] = {}
        for value in chain.from_iterable(node.outputs for node in left):
            if value is not None and value.shape == (dim(1),) and value.dtype == INT64 and value.elements is not None:
                single.setdefault(value.elements[0], []).append(value)
        for node in left:
            result = node.outputs[0] if node.op == "Shape" else None
            # The shape of what has no axes, or a slice of none, has no parts that it could be put together from.
            if result is not None and result.elements and self._made_for(node, readers):
                known = [
                    [each for each in single.get(size, ()) if depth[each] < depth[result]]
                    for size in result.elements
                ]
                parts = _parts(result.elements, known, depth)
                if parts is not None:
                    self.joined[node] = parts

    def _made_for(self, shape: Node, readers: Mapping[Value, int]) -> bool:
        """Whether the tensor whose sizes a Shape takes has no other reader, and goes with it."""
        source = shape.inputs[0]
        if shape.domain or source is None or source.producer is None or source.is_output or readers[source] > 1:
            return False
        return self._plain(source.producer) and is_deterministic(source.producer) and _alone(source)

    def _depths(self) -> dict[Value, int]:
        """How many nodes, at most, must run one after another before a value is there."""
        depth: dict[Value, int] = {}
        done: set[Node] = set()
        for start in self.graph.nodes:
            waiting = [start]
            while waiting:
                node = waiting[-1]
                # What is shared may stand later in the graph than what reads it.
                makers = [value.producer for value in self._reads(node) if value.producer is not None]
                first = [] if node in done else [maker for maker in makers if maker not in done]
                if first:
                    waiting += first
                    continue
                waiting.pop()
                if node not in done:
                    done.add(node)
                    most = 1 + max((depth.get(value, 0) for value in self._reads(node)), default=0)
                    depth.update((value, most) for value in node.outputs if value is not None)
        return depth

    def _reads(self, node: Node) -> list[Value]:
        """What a node reads of what is not constant."""
        if node in self.joined:
            return [part for part in self.joined[node] if isinstance(part, Value)]
        found = []
        for place, value in enumerate(node.inputs):
            if value is not None and (node, place) not in self.constants:
                found.append(self.shared.get((node, place), value))
        return [*found, *node.captures]

    def _unread(self) -> set[Node]:
        """Nodes that have lost their last reader, and those that only they read."""
        readers: dict[Value, int] = {}
        for node in self.graph.nodes:
            for value in self._reads(node):
                readers[value] = readers.get(value, 0) + 1
        removed: set[Node] = set()
        waiting = [
            node for node in reversed(self.graph.nodes)
            if any(value is not None and value.consumers for value in node.outputs)
        ]
        while waiting:
            node = waiting.pop()
            if node in removed or not self._plain(node) or not is_deterministic(node):
                continue
            if any(value.is_output or (value not in self.values and readers.get(value, 0))
                   for value in node.outputs if value is not None):
                continue
            removed.add(node)
            for value in self._reads(node):
                readers[value] -= 1
                if value.producer is not None and not readers[value]:
                    waiting.append(value.producer)
        return removed


def _parts(
    sizes: Sequence[Dim], known: Sequence[Sequence[Value]], depth: Mapping[Value, int]
) -> list[Value | np.ndarray] | None:
    """Sizes as values that hold one each, the first of several to be ready, and as constants between them."""
    parts: list[Value | np.ndarray] = []
    for size, values in zip(sizes, known, strict=True):
        if size.value is None and not values:
            return None
        if size.value is None:
            parts.append(min(values, key=lambda value: depth[value]))
        elif parts and isinstance(last := parts[-1], np.ndarray):
            parts[-1] = np.append(last, np.int64(size.value))
        else:
            parts.append(np.array([size.value], np.int64))
    return parts


def _alone(value: Value) -> bool:
    """Whether the value is all that its node computes."""
    assert value.producer is not None
    return sum(output is not None for output in value.producer.outputs) == 1


def _first(node: Node) -> str:
    return next(value.name for value in node.outputs if value is not None)
