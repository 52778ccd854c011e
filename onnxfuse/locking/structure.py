"""What nodes that run as one compute, in words that no name has a part in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b

from onnxfuse.graph.model import Node
from onnxfuse.provider.removed import source


def arranged(nodes: Collection[Node]) -> tuple[Node, ...]:
    """Nodes, constants left out, in an order that hangs on what they compute for one another alone: not on names, nor
    on what lies around them in the graph."""
    computing = (node for node in nodes if (node.domain, node.op) != ("", "Constant"))
    ordered = sorted(computing, key=lambda node: node.index)
    above = {node: inner_reads(node, ordered) for node in ordered}
    below: dict[Node, list[Node]] = {node: [] for node in ordered}
    depth: dict[Node, int] = {}
    for node in ordered:
        depth[node] = 1 + max((depth[other] for other in above[node]), default=0)
        for other in above[node]:
            below[other].append(node)
    up, down = _digests(ordered, above), _digests(reversed(ordered), below)
    return tuple(sorted(ordered, key=lambda node: (depth[node], node.qualified_op, up[node], down[node], node.index)))


def structure(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Nodes in the order given, each as its operator and, in brackets, the numbers of those that it reads, counted from
    one: ("Add", "LayerNormalization(1)")."""
    ordered = tuple(nodes)
    number = {node: place for place, node in enumerate(ordered, 1)}
    words = []
    for node in ordered:
        reads = sorted(number[other] for other in inner_reads(node, ordered))
        words.append(node.qualified_op + (f"({' '.join(map(str, reads))})" if reads else ""))
    return tuple(words)


def operator(word: str) -> str:
    """The operator of a part of a structure."""
    return word.partition("(")[0]


def edges(words: Iterable[str]) -> list[tuple[int, int]]:
    """The edges of a structure as pairs of positions, counted from zero: who is read, and by whom."""
    found = []
    for reader, word in enumerate(words):
        numbers = word.partition("(")[2].rstrip(")").split()
        found += [(int(number) - 1, reader) for number in numbers if number.isdecimal() and int(number)]
    return found


def inner_reads(node: Node, nodes: Collection[Node]) -> list[Node]:
    """Those of some nodes that a node reads, once for each result of theirs, through what ONNX Runtime takes out."""
    made = (source(value).producer for value in node.reads())
    return [other for other in made if other is not None and other in nodes]


def _digests(nodes: Iterable[Node], beside: Mapping[Node, Iterable[Node]]) -> dict[Node, bytes]:
    """What tells each node by its operator and by those beside it, which come before it."""
    found: dict[Node, bytes] = {}
    for node in nodes:
        others = sorted(found[other] for other in beside[node])
        found[node] = blake2b(node.qualified_op.encode() + b"".join(others), digest_size=8).digest()
    return found
