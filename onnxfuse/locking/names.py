"""Names that a lock has of a model's nodes and values, looked up in the model as it is now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnxfuse.graph.model import Graph, Node
from onnxfuse.locking.lock import Spot
from onnxfuse.locking.structure import operator
from onnxfuse.optimised import Optimised


@dataclass(frozen=True)
class Locked:
    """One place of a lock: what was fused there, by which rule."""

    rule: str
    words: tuple[str, ...]
    spot: Spot

    @property
    def operators(self) -> tuple[str, ...]:
        """Operators of its nodes."""
        return tuple(map(operator, self.words))

    @property
    def label(self) -> str:
        """How messages call it."""
        return self.spot.nodes[0] if self.spot.nodes else "?"


class Names:
    """Nodes by label, and by the values that they compute."""

    def __init__(self, graph: Graph, instead: Mapping[Node, Node] | None = None) -> None:
        """``instead``: of nodes of another graph, whose labels are known too, what stands for them in this one."""
        nodes = [node for each in graph.walk() for node in each.nodes]
        self._made = {value.name: node for node in reversed(nodes) for value in node.outputs if value is not None}
        self._nodes = {node.label: made for node, made in (instead or {}).items()}
        for node, made in (instead or {}).items():
            for value in node.outputs:
                if value is not None:
                    self._made.setdefault(value.name, made)
        self._nodes |= {node.label: node for node in nodes}

    @classmethod
    def of_view(cls, optimised: Optimised) -> Names:
        """Of the canonical view of a model, in which a node stands for several of the model's."""
        view = optimised.canonical.graph
        instead = {original: node for graph in view.walk() for node in graph.nodes for original in node.originals}
        return cls(view, instead)

    def node(self, label: str) -> Node | None:
        """The node of a label."""
        return self._nodes.get(label)

    def maker(self, value: str) -> Node | None:
        """What computes a value."""
        return self._made.get(value)

    def of(self, locked: Locked) -> tuple[Node | None, ...]:
        """What stands now where the nodes of a locked place stood."""
        found = [self.node(label) for label in locked.spot.nodes]
        makers = [self.maker(value) for value in locked.spot.writes]
        rest = [node for node in makers if node is not None and node not in found]
        # Names of results outlive those of nodes: the last place without a node is most often that of what it gives.
        for place in reversed(range(len(found))):
            if found[place] is None and rest:
                found[place] = rest.pop()
        return tuple(found)

    def stands(self, locked: Locked) -> bool:
        """Whether all nodes of a locked place are still there, each of the operator that it had."""
        found = [self.node(label) for label in locked.spot.nodes]
        return len(found) == len(locked.words) and all(
            node is not None and node.qualified_op == op for node, op in zip(found, locked.operators, strict=True))

    def knows(self, locked: Locked) -> bool:
        """Whether anything of a locked place is there by name."""
        return any(node is not None for node in self.of(locked))


def originals(nodes: Iterable[Node | None]) -> list[Node]:
    """The model's nodes behind nodes of a view, or of the model itself."""
    return list(dict.fromkeys(each for node in nodes if node is not None for each in node.originals))


def labels(nodes: Sequence[Node | None]) -> list[str]:
    """How messages call those that are there."""
    return [node.label for node in nodes if node is not None]
