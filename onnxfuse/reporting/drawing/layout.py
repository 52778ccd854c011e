"""Where boxes go: in layers from the inputs down, with few crossings and short ways.

The method is Sugiyama's: layers by the longest way from an input, edges over several layers through a bend in each,
the order within layers by the mean of the neighbours, then places that keep the order.  Libraries for it are a program
of its own (Graphviz), under the GPL (igraph) or without a release for years (grandalf).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from onnxfuse.reporting.drawing.boxes import Drawing

GAP, DROP = 24.0, 44.0
"""Between boxes of a layer; between layers."""

BEND = 12.0
"""Width that an edge takes in a layer that it passes."""

SWEEPS = 12
"""Passes over the layers for the order in them, and for the places."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Layout:
    """Centres of the boxes' upper edges; the way of each edge, from box to box; the size of it all."""

    places: tuple[Point, ...]
    ways: tuple[tuple[Point, ...], ...]
    width: float
    height: float


class _Rows:
    """Boxes and bends by layer; ``above`` and ``below`` are neighbours in the layers next to theirs."""

    def __init__(self, drawing: Drawing, width: float) -> None:
        self.layer = _layers(drawing)
        self.widths = [width] * len(self.layer)
        self.above: list[list[int]] = [[] for _ in self.layer]
        self.below: list[list[int]] = [[] for _ in self.layer]
        self.chains = [self._chain(source, target) for source, target in drawing.edges]
        self.rows: list[list[int]] = [[] for _ in range(max(self.layer, default=-1) + 1)]
        for item, layer in enumerate(self.layer):
            self.rows[layer].append(item)
        for sweep in range(SWEEPS):
            self._order(down=sweep % 2 == 0)
        self.x = [0.0] * len(self.layer)
        for sweep in range(SWEEPS):
            self._place(down=sweep % 2 == 0)

    def _chain(self, source: int, target: int) -> list[int]:
        """An edge's items: its boxes, and a bend in each layer between."""
        first = len(self.layer)
        bends = range(first, first + self.layer[target] - self.layer[source] - 1)
        for place in bends:
            self.layer.append(self.layer[source] + 1 + place - first)
            self.widths.append(BEND)
            self.above.append([])
            self.below.append([])
        chain = [source, *bends, target]
        for upper, lower in pairwise(chain):
            self.below[upper].append(lower)
            self.above[lower].append(upper)
        return chain

    def _order(self, *, down: bool) -> None:
        """Items of each layer by the mean place of those next to them in the layer before."""
        beside = self.above if down else self.below
        share = {item: place / len(row) for row in self.rows for place, item in enumerate(row)}
        for row in self.rows if down else reversed(self.rows):
            means = {item: fmean(share[near] for near in beside[item]) if beside[item] else share[item]
                     for item in row}
            row.sort(key=lambda item: (means[item], share[item]))
            share.update((item, place / len(row)) for place, item in enumerate(row))

    def _place(self, *, down: bool) -> None:
        """Items towards the middle of their neighbours: the mean of what is nearest from the left and the right."""
        for row in self.rows if down else reversed(self.rows):
            near = [[*self.above[item], *self.below[item]] for item in row]
            wish = [fmean(self.x[other] for other in others) if others else 0.0 for others in near]
            apart = [(self.widths[left] + self.widths[right]) / 2 + GAP for left, right in pairwise(row)]
            left, right = wish[:], wish[:]
            for place, least in enumerate(apart):
                left[place + 1] = max(wish[place + 1], left[place] + least)
            for place in reversed(range(len(apart))):
                right[place] = min(wish[place], right[place + 1] - apart[place])
            for item, low, high in zip(row, left, right, strict=True):
                self.x[item] = (low + high) / 2


def layout(drawing: Drawing, width: float, heights: Sequence[float]) -> Layout:
    """Places for boxes of one width, each with a height."""
    found = _Rows(drawing, width)
    count = len(drawing.boxes)
    tall = [max((heights[item] for item in row if item < count), default=0.0) for row in found.rows]
    tops = [sum(tall[:layer]) + DROP * layer for layer in range(len(tall))]
    left = min((found.x[item] - found.widths[item] / 2 for item in range(len(found.x))), default=0.0)
    x = [each - left for each in found.x]

    def way(chain: Sequence[int]) -> tuple[Point, ...]:
        source, *bends, target = chain
        points = [(x[source], tops[found.layer[source]] + heights[source])]
        for bend in bends:
            top = tops[found.layer[bend]]
            points += [(x[bend], top), (x[bend], top + tall[found.layer[bend]])]
        return (*points, (x[target], tops[found.layer[target]]))

    return Layout(
        tuple((x[item], tops[found.layer[item]]) for item in range(count)), tuple(map(way, found.chains)),
        max((x[item] + found.widths[item] / 2 for item in range(len(x))), default=0.0),
        sum(tall) + DROP * max(len(tall) - 1, 0),
    )


def _layers(drawing: Drawing) -> list[int]:
    """Each box one layer below what it reads, and what reads nothing just above what reads it."""
    layers = [0] * len(drawing.boxes)
    for source, target in sorted(drawing.edges, key=lambda edge: edge[1]):
        layers[target] = max(layers[target], layers[source] + 1)
    reads = {target for _, target in drawing.edges}
    for place in range(len(layers)):
        below = [layers[target] for source, target in drawing.edges if source == place]
        if place not in reads and below:
            layers[place] = min(below) - 1
    return layers
