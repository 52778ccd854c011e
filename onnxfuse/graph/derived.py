"""Sizes that follow from others: which symbols are too small for them, and how large those have to be.

A convolution over 128 samples with a kernel of 400 has no result.  Where nobody named a size, a larger one is assumed:
doubled until every size that follows from it is 1 or more, if there is such a size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from onnxfuse.graph.dims import Dim
from onnxfuse.graph.model import Graph, Value

MOST = 1 << 24
"""The largest size that is assumed."""


@dataclass(frozen=True)
class Derived:
    """A size of a tensor that symbols decide: the first such tensor of the graph, and the axis."""

    value: Value
    axis: int
    size: Dim

    def at(self, sizes: Mapping[str, int]) -> int | None:
        """The size's value, None where that is not known."""
        try:
            return self.size.evaluate(sizes)
        except (KeyError, ZeroDivisionError):
            return None

    def __str__(self) -> str:
        maker = self.value.producer
        return f"'{self.value.name}'" + (f", a result of '{maker.label}' ({maker.qualified_op})" if maker else "")


def derived(graph: Graph) -> tuple[Derived, ...]:
    """Sizes in the main graph that may come out below one, each once, in graph order.

    Those in bodies count where the bodies run, which sizes may decide.
    """
    return tuple({each.size: each for each in reversed(list(_sizes(graph)))}.values())[::-1]


def _sizes(graph: Graph) -> Iterator[Derived]:
    for node in graph.nodes:
        for value in node.outputs:
            for axis, size in enumerate((value.shape if value is not None else None) or ()):
                if value is not None and size.value is None and not size.non_negative():
                    yield Derived(value, axis, size)


def enlarged(found: Collection[Derived], sizes: Mapping[str, int], free: Collection[str]) -> dict[str, int]:
    """Larger values for some of the ``free`` symbols, with which more of the sizes are 1 or more; {} where there are
    none.  Every round mends a size at least, so that there are no more rounds than sizes."""
    changed: dict[str, int] = {}
    bad = _bad(found, sizes)
    while bad:
        better = next((trial for each in bad if (trial := _mended(each, found, {**sizes, **changed}, free))), None)
        if better is None:
            break
        changed.update(better)
        bad = _bad(found, {**sizes, **changed})
    return changed


def _bad(found: Collection[Derived], sizes: Mapping[str, int]) -> list[Derived]:
    return [each for each in found if (size := each.at(sizes)) is not None and size < 1]


def _mended(
    wanted: Derived, found: Collection[Derived], sizes: Mapping[str, int], free: Collection[str]
) -> dict[str, int] | None:
    """The least doublings of one symbol, or of all of them, with which a size is 1 or more and fewer are not."""
    names = [name for name in sizes if name in wanted.size.symbols and name in free]
    before = len(_bad(found, sizes))
    for chosen in [[name] for name in names] + ([names] if len(names) > 1 else []):
        trial = {name: max(sizes[name], 1) for name in chosen}
        while max(trial.values()) < MOST:
            trial = {name: 2 * size for name, size in trial.items()}
            together = {**sizes, **trial}
            size = wanted.at(together)
            if size is not None and size >= 1:
                if len(_bad(found, together)) < before:
                    return trial
                break
    return None


def least(wanted: Derived, sizes: Mapping[str, int], name: str) -> int | None:
    """The least value of a symbol from the present one on with which a size is 1 or more, the others staying."""
    low = high = sizes[name]
    while (wanted.at({**sizes, name: high}) or 0) < 1:
        if high >= MOST:
            return None
        low, high = high, 2 * max(high, 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if (wanted.at({**sizes, name: middle}) or 0) >= 1 else (middle, high)
    return high
