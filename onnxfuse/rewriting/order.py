"""Places in a list: orders that keep near the one given, and the way back to the order of the original."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import onnx

from onnxfuse.graph.sorting import topological
from onnxfuse.rewriting.index import reads_of


class Sortable(Protocol):
    """What a protobuf list offers."""

    def sort(self, *, key: Callable[[Any], Any]) -> None: ...


def rearrange(items: Sortable, keys: Sequence[Any]) -> None:
    """Sort a protobuf list in place by given keys, one an item.  Moves references, copies no message."""
    following: Iterator[Any] = iter(keys)
    items.sort(key=lambda _: next(following))  # sort asks once an item, in order


def slots(total: int | None, taken: Collection[int], plain: int) -> list[int] | None:
    """Original positions of ``plain`` items that kept their order while the items at ``taken`` left a list of
    ``total``; None where the numbers do not add up, so that somebody has edited the list since."""
    if total is None or plain + len(set(taken)) != total or len(set(taken)) != len(taken):
        return None
    if any(not 0 <= position < total for position in taken):
        return None
    gone = set(taken)
    return [position for position in range(total) if position not in gone]


def in_order(nodes: Sequence[onnx.NodeProto], items: Sequence[int]) -> Sequence[int]:
    """Items, each a place among the nodes, in topological order, as near as can be to the order given; as given where
    there is none."""
    chosen = [nodes[item] for item in items]
    if is_sorted(chosen):
        return items
    maker = {name: place for place, node in enumerate(chosen) for name in node.output if name}
    needs = {place: {maker[name] for name in reads_of(node) if name in maker} for place, node in enumerate(chosen)}
    order, stuck = topological(needs)
    return items if stuck else [items[place] for place in order]


def is_sorted(nodes: Sequence[onnx.NodeProto]) -> bool:
    """Whether every node comes after those that compute what it reads."""
    later = {name for node in nodes for name in node.output if name}
    for node in nodes:
        if any(name in later for name in reads_of(node)):
            return False
        later.difference_update(node.output)
    return True


def put_back(items: Any, entries: Sequence[tuple[int, Any]], count: int) -> None:
    """Put items where they stood in a list of ``count``, at its front where it is another list by now."""
    items.extend(item for _, item in entries)
    kept = len(items) - len(entries)
    places = [place for place, _ in entries]
    free = slots(count, places, kept)
    rearrange(items, [*(range(len(entries), len(items)) if free is None else free),
                      *(range(len(entries)) if free is None else places)])


def sort_nodes(graph: onnx.GraphProto) -> tuple[int, ...]:
    """Put nodes in an order in which every one comes after what it reads, if they are in none; where each had stood,
    () where all stand as they did."""
    producer = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    needs = {
        place: {producer[name] for name in reads_of(node) if name in producer} - {place}
        for place, node in enumerate(graph.node)
    }
    if all(need < place for place, before in needs.items() for need in before):
        return ()
    order, stuck = topological(needs)
    found = (*order, *stuck)
    rank = {place: number for number, place in enumerate(found)}
    rearrange(graph.node, [rank[place] for place in needs])
    return found
