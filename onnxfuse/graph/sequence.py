"""The one order in which every stage sees a graph's nodes, whatever order the file has them in.

    graph outputs, first to last ─▶ what each is computed from, operand by operand ─▶ the node itself

A walk from the outputs against the edges numbers each node after all that it reads.  It follows what the graph is, not
how it was written down: neither the file's order of nodes, initialisers and attributes nor any name has a part in it.
So equal graphs get equal plans.  It is also about the order in which ONNX Runtime runs them (``Graph::ReverseDFSFrom``
from the leaves), and so keeps together what is used together.

Nodes that no output needs come last, by what they compute; where several compute the same, by their place in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b

import onnx

from onnxfuse.graph.order import captured_names, graphs_in

CONTENTS = 256
"""Bytes of an initialiser past which its type and sizes alone tell it from others."""


def sequence(graph: onnx.GraphProto) -> list[int]:
    """Positions of a graph's nodes in the order to see them in.

    Args:
        graph: acyclic; its nodes may be in any order.
    """
    return _Walk(graph).order()


def captures(node: onnx.NodeProto) -> list[str]:
    """``captured_names`` in the order in which ``sequence`` meets their readers."""
    inside = [graph for each in _attributes(node) for graph in graphs_in(each)]
    captured = set(captured_names(node)) if inside else set()
    found: dict[str, None] = {}
    for graph in inside:
        walk = _Walk(graph)
        for place in walk.order():
            found.update((name, None) for name in walk.reads[place] if name in captured)
        found.update((value.name, None) for value in graph.output if value.name in captured)
    return list(found)


class _Walk:
    """One graph's walk."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.nodes: Sequence[onnx.NodeProto] = tuple(graph.node)
        self.producer = {name: place for place, node in enumerate(self.nodes) for name in node.output if name}
        self.reads = [[*filter(None, node.input), *captures(node)] for node in self.nodes]
        self.number: dict[int, int] = {}
        self._entered: set[int] = set()

    def order(self) -> list[int]:
        """Positions in order."""
        self._reach(self.producer[value.name] for value in self.graph.output if value.name in self.producer)
        left = [place for place in range(len(self.nodes)) if place not in self.number]
        if left:
            read = {self.producer[name] for place in left for name in self.reads[place] if name in self.producer}
            keys = self._keys()
            self._reach(sorted((place for place in left if place not in read), key=lambda place: keys[place]))
        return list(self.number)

    def _reach(self, starts: Iterable[int]) -> None:
        """Number what the starts depend on and the starts themselves."""
        for start in starts:
            if start in self._entered:
                continue
            path, pending = [start], [self._needs(start)]
            self._entered.add(start)
            while path:
                following = next((need for need in pending[-1] if need not in self._entered), None)
                if following is None:
                    pending.pop()
                    self.number[path.pop()] = len(self.number)
                else:
                    path.append(following)
                    pending.append(self._needs(following))
                    self._entered.add(following)

    def _needs(self, place: int) -> Iterator[int]:
        return iter([self.producer[name] for name in self.reads[place] if name in self.producer])

    def _keys(self) -> Mapping[int, bytes]:
        """What tells nodes that no output needs from one another: digests of what they compute."""
        roots = {value.name: f"input {place}".encode() for place, value in enumerate(self.graph.input)}
        roots |= {tensor.name: _about(tensor) for tensor in self.graph.initializer}
        keys: dict[int, bytes] = {}
        waiting = [place for place in range(len(self.nodes)) if place not in self.number]
        while waiting:
            place = waiting[-1]
            if place in keys:
                waiting.pop()
                continue
            needs = [self.producer[name] for name in self.reads[place] if name in self.producer]
            first = [need for need in needs if need not in self.number and need not in keys]
            if first:
                waiting += first
                continue
            waiting.pop()
            node = self.nodes[place]
            digest = blake2b(f"{node.domain} {node.op_type} {[bool(name) for name in node.output]}".encode())
            for attribute in _attributes(node):
                if not any(True for _ in graphs_in(attribute)):
                    digest.update(attribute.SerializeToString(deterministic=True))
            for name in (*node.input, *self.reads[place]):
                made = self.producer.get(name)
                if made is None:
                    digest.update(roots.get(name, b"?"))
                    continue
                slot = list(self.nodes[made].output).index(name)
                digest.update(f"{self.number.get(made)} {slot} ".encode() + keys.get(made, b""))
            keys[place] = digest.digest()
        return keys


def _attributes(node: onnx.NodeProto) -> list[onnx.AttributeProto]:
    return sorted(node.attribute, key=lambda attribute: attribute.name)


def _about(tensor: onnx.TensorProto) -> bytes:
    """What tells an initialiser from others, its name aside."""
    contents = tensor.raw_data if len(tensor.raw_data) <= CONTENTS else b""
    few = (*tensor.float_data[:64], *tensor.int64_data[:64], *tensor.int32_data[:64], *tensor.double_data[:64])
    return f"{tensor.data_type} {list(tensor.dims)} {few}".encode() + contents
