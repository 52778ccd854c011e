"""A graph while ONNX Runtime's own fusions are found in it: the baseline that a region has to beat.

Which fusions there are is said in rules of the kind ``runtime``; ``onnxfuse.rules.runtime`` finds them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.provider.host import host
from onnxfuse.provider.removed import given_back, readers, source, taken_out


@dataclass(frozen=True)
class RuntimeFusion:
    """Nodes that the runtime runs as one kernel.  It still does where some are gone that are not of the ``core``.

    What it takes out of the graph between them is not among them.  ``rules``: ids of the rules that say so, in the
    order in which they took nodes in; none for a convolution or product and the bias that is its own (``with_biases``).
    """

    nodes: frozenset[Node]
    core: frozenset[Node]
    rules: tuple[str, ...] = ()

    def without(self, gone: Collection[Node]) -> list[frozenset[Node]]:
        """What is left when some nodes are gone: the core and what still touches it, and every other node alone."""
        left = self.nodes.difference(gone)
        if not self.core <= left:
            return [frozenset([node]) for node in left]
        kept, front = set(self.core), list(self.core)
        while front:
            node = front.pop()
            beside = {source(value).producer for value in node.reads()}
            beside.update(reader for value in node.outputs if value is not None for reader in readers(value))
            found = (left & beside) - kept
            kept |= found
            front += found
        return [frozenset(kept), *(frozenset([node]) for node in left - kept)]


def with_biases(groups: Sequence[RuntimeFusion], sums: Collection[str]) -> tuple[RuntimeFusion, ...]:
    """What the runtime fuses of a graph in which biases stand behind what they belong to, whose ``sums`` are given by
    name: with nothing else in it, such a group is a convolution or product as the model has it, and no fusion."""
    def is_own(group: RuntimeFusion) -> bool:
        behind = [value for node in group.nodes - group.core for value in node.outputs]
        return bool(behind) and all(value is not None and value.name in sums for value in behind)

    return tuple(replace(group, rules=()) if is_own(group) else group for group in groups)


@dataclass(frozen=True)
class Made:
    """What takes the place of fused nodes: an operator, what it reads and its attributes, and the values that it
    computes in their stead.  It runs without those of them too that are not of the node ``core``; None: it does not.
    ``rule``: id of what says so."""

    rule: str
    op: str
    domain: str
    attributes: Mapping[str, Any]
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value, ...]
    core: Node | None


class Fusing:
    """The nodes of a graph as the runtime's fusions find them and leave them.

    What the runtime takes out before is gone, what it computes when the session is created is constant, and what was
    fused is one node.  Nodes and values are copies; ``originals`` leads to the graph's own nodes.
    """

    def __init__(self, graph: Graph) -> None:
        found = host(graph)
        values = {value: _copy(value, producer=None, consumers=[], is_constant=value in found.constants)
                  for value in graph.values.values()}
        nodes: dict[Node, None] = {}
        for node in graph.nodes:
            operand = given_back(node) if node in found.folded else taken_out(node)
            if operand is not None and node.outputs[0] is not None:
                given = values[operand]
                given.is_output |= node.outputs[0].is_output
                values[node.outputs[0]] = given
                continue
            copy = _copy(
                node, originals=(node,), captures=tuple(values[value] for value in node.captures),
                inputs=tuple(None if value is None else values[value] for value in node.inputs),
                outputs=tuple(None if value is None else values[value] for value in node.outputs),
            )
            nodes[copy] = None
            self._link(copy)
        self._nodes, self._opsets = nodes, graph.opsets
        self._core: dict[Node, frozenset[Node]] = {}
        self._rules: dict[Node, tuple[str, ...]] = {}

    @property
    def graph(self) -> Graph:
        """As it is now; a further fusion changes its nodes' operands."""
        nodes = tuple(sorted(self._nodes, key=lambda node: node.index))
        return Graph(nodes, {}, (), (), self._opsets)

    def holds(self, nodes: Collection[Node]) -> bool:
        """Whether all of these are still there: none was fused."""
        return self._nodes.keys() >= set(nodes)

    def fuse(self, nodes: Sequence[Node], made: Made) -> None:
        """Put one node in the place of others that are there.  What is read of these by further nodes too belongs to
        the first that took it in: the runtime has each take it in, and nothing is left to launch."""
        inner = {value for node in nodes for value in node.outputs}
        more = {value: None for node in nodes for value in node.reads()
                if value not in inner and value not in made.inputs}
        originals = tuple(dict.fromkeys(each for node in nodes for each in node.originals))
        core = None if made.core is None else self._core.get(made.core, frozenset(made.core.originals))
        node = Node(nodes[-1].index, nodes[-1].name, made.op, made.domain, made.attributes, made.inputs, made.outputs,
                    tuple(more), originals=originals)
        for old in nodes:
            del self._nodes[old]
            for value in old.reads():
                value.consumers.remove(old)
        self._nodes[node] = None
        self._link(node)
        self._core[node] = frozenset(originals) if core is None else core
        before = (rule for old in nodes for rule in self._rules.get(old, ()))
        self._rules[node] = tuple(dict.fromkeys((*before, made.rule)))

    def groups(self) -> tuple[RuntimeFusion, ...]:
        """What was fused, two of the graph's nodes and more each, in graph order."""
        found = (RuntimeFusion(frozenset(node.originals), core, self._rules[node]) for node, core in self._core.items()
                 if node in self._nodes)
        return tuple(sorted((group for group in found if len(group.nodes) > 1),
                            key=lambda group: min(node.index for node in group.nodes)))

    @staticmethod
    def _link(node: Node) -> None:
        for value in node.reads():
            value.consumers.append(node)
        for made in node.outputs:
            if made is not None:
                made.producer = node


_Item = TypeVar("_Item", Node, Value)


def _copy(item: _Item, **changes: Any) -> _Item:
    """``dataclasses.replace`` in a third of the time."""
    copy = object.__new__(type(item))
    copy.__dict__.update(item.__dict__, **changes)
    return copy
