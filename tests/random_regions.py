"""Random regions that may have no kernel, but not many in a row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Protocol, TypeVar

from kernel_harness import Made, attempt, parse


class Drawn(Protocol):
    """A random region; ``text``: its graph."""

    @property
    def text(self) -> str: ...


Region = TypeVar("Region", bound=Drawn)


def made_regions(
    seeds: Iterable[int], draw: Callable[[int], Region], opset: int, codes: Collection[str], most: int
) -> Iterator[tuple[int, Region, Made]]:
    """Those of the regions of some seeds that have a kernel.  Others are refused for one of some reasons, fewer than so
    many in a row."""
    without = 0
    for seed in seeds:
        drawn = draw(seed)
        made = attempt(parse(drawn.text, opset))
        if isinstance(made, Made):
            without = 0
            yield seed, drawn, made
        else:
            without += 1
            assert made.code in codes, (seed, made)
            assert without < most, (seed, made, drawn.text)
