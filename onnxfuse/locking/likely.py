"""Where a place of a lock most likely is in a model in which nothing has the names that the lock knows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import islice

from onnxfuse.graph.model import Node
from onnxfuse.locking.structure import edges, operator

NEAR = 24
"""Nodes after another among which the next one of a structure is looked for."""

MOST_TRIED = 64
"""Nodes that are tried for the first of a structure: the places of a lock come in graph order, as the nodes do."""

Place = tuple[Node | None, ...]


def likely(words: Sequence[str], free: Sequence[Node], passable: Callable[[Node], bool]) -> Place:
    """Nodes of a graph that a structure most likely stood for: as many of its operators as are found from one node on,
    with as many of its edges, those that lie nearest.

    Args:
        free: nodes to choose from, in graph order.
        passable: whether to look beyond a node.
    """
    best: tuple[int, ...] = (0,)
    chosen: Place = (None,) * len(words)
    available, first = set(free), operator(words[0]) if words else ""
    for start in islice((node for node in free if node.qualified_op == first), MOST_TRIED):
        found, far = _from(start, words, available, passable)
        joined = sum(_reads(found[reader], found[read]) for read, reader in edges(words))
        score = sum(node is not None for node in found), joined, -far
        if score > best:
            best, chosen = score, found
    return chosen


def _reads(node: Node | None, other: Node | None) -> bool:
    return node is not None and other is not None and any(value.producer is other for value in node.reads())


def _from(start: Node, words: Sequence[str], free: Collection[Node], passable: Callable[[Node], bool]
          ) -> tuple[Place, int]:
    """What a structure stands for whose first node is this one, and how far its nodes lie apart."""
    found: list[Node | None] = [start]
    above: dict[int, list[int]] = {}
    for read, reader in edges(words):
        above.setdefault(reader, []).append(read)
    far = 0
    for place in range(1, len(words)):
        near, waiting, seen = None, list(above.get(place, ())), set[int]()
        while waiting and near is None:
            read = waiting.pop(0)
            if read in seen or read >= place:
                continue
            seen.add(read)
            known = found[read]
            # What is not there any more is passed by, to what it read.
            waiting += above.get(read, ()) if known is None else ()
            near = None if known is None else _next(known, operator(words[place]), free, found, passable)
        found.append(None if near is None else near[0])
        far += 0 if near is None else near[1]
    return tuple(found), far


def _next(node: Node, op: str, free: Collection[Node], taken: Collection[Node | None],
          passable: Callable[[Node], bool]) -> tuple[Node, int] | None:
    """The nearest node after another of an operator, and how many lie between."""
    seen = [node]
    for far, each in enumerate(seen):
        if each is not node and each.qualified_op == op and each in free and each not in taken:
            return each, far
        if each is node or passable(each):
            readers = dict.fromkeys(reader for value in each.outputs if value is not None for reader in value.consumers)
            seen += [reader for reader in readers if reader not in seen and len(seen) < NEAR]
    return None
