"""Places in a list: the order of the contracted graph, and the way back to the order of the original."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

import onnx

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


def contracted(
    items: Sequence[int], needs: Mapping[int, Collection[int]]
) -> tuple[list[int], list[int]]:
    """The items in topological order, the smallest that is ready first, and the items that no order can hold.

    ``needs`` gives what must come before an item.
    """
    waiting = {item: len(needs[item]) for item in items}
    followers: dict[int, list[int]] = {}
    for item in items:
        for need in needs[item]:
            followers.setdefault(need, []).append(item)
    ready = [item for item in items if not waiting[item]]
    heapify(ready)
    order: list[int] = []
    while ready:
        item = heappop(ready)
        order.append(item)
        for follower in followers.get(item, ()):
            waiting[follower] -= 1
            if not waiting[follower]:
                heappush(ready, follower)
    return order, sorted(set(items) - set(order))


def in_order(nodes: Sequence[onnx.NodeProto], items: Sequence[int]) -> Sequence[int]:
    """Items, each a place among the nodes, in topological order, as near as can be to the order given; as given where
    there is none."""
    chosen = [nodes[item] for item in items]
    if is_sorted(chosen):
        return items
    maker = {name: place for place, node in enumerate(chosen) for name in node.output if name}
    needs = {place: {maker[name] for name in reads_of(node) if name in maker} for place, node in enumerate(chosen)}
    order, stuck = contracted(range(len(chosen)), needs)
    return items if stuck else [items[place] for place in order]


def is_sorted(nodes: Sequence[onnx.NodeProto]) -> bool:
    """Whether every node comes after those that compute what it reads."""
    later = {name for node in nodes for name in node.output if name}
    for node in nodes:
        if any(name in later for name in reads_of(node)):
            return False
        later.difference_update(node.output)
    return True
