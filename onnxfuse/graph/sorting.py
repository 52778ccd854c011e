"""Things in topological order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from heapq import heapify, heappop, heappush


class Sorting:
    """Puts items in order, each after what it needs and the smallest that is ready first.

    Where all that are left need one another, some may be ``release``d as if they needed nothing more.

    Attributes:
        waiting: of the items that had no place yet, how many others each waits for.
    """

    def __init__(self, needs: Mapping[int, Collection[int]]) -> None:
        """``needs``: what must come before an item, by the item; what is no item itself never comes."""
        self.waiting = {item: len(before) for item, before in needs.items()}
        self._followers: dict[int, list[int]] = {}
        for item, before in needs.items():
            for need in before:
                self._followers.setdefault(need, []).append(item)
        self._ready = [item for item, count in self.waiting.items() if not count]
        heapify(self._ready)

    def run(self) -> list[int]:
        """The items that are ready, and that become so, in order."""
        order: list[int] = []
        while self._ready:
            item = heappop(self._ready)
            if self.waiting.pop(item, None) is None:
                continue  # it was released, and became ready by itself
            order.append(item)
            for follower in self._followers.get(item, ()):
                if follower in self.waiting:
                    self.waiting[follower] -= 1
                    if not self.waiting[follower]:
                        heappush(self._ready, follower)
        return order

    def release(self, items: Iterable[int]) -> None:
        """Have items wait for nothing any more."""
        for item in items:
            heappush(self._ready, item)


def topological(needs: Mapping[int, Collection[int]]) -> tuple[list[int], list[int]]:
    """Items in order, and those that no order can hold, the smallest first; ``needs`` as ``Sorting`` takes it."""
    sorting = Sorting(needs)
    return sorting.run(), sorted(sorting.waiting)
