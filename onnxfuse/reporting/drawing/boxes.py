"""A graph as boxes and edges: one box for each node, input and output, or fewer where those are too many.

What makes them fewer keeps every fused node in sight.  ``joined`` draws what ONNX Runtime keeps between the same fused
nodes as one box; ``folded`` draws once what repeats, as the layers of a transformer do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import onnx

from onnxfuse.graph.order import subgraphs
from onnxfuse.rewriting import FusedNode

FOLDS = 64
"""Repetitions that are folded at most."""

Kind = Literal["input", "fused", "runtime", "output"]


@dataclass(frozen=True)
class Box:
    """What is drawn as one box.

    Attributes:
        title: the rule of a fused node, an operator, or the name of an input or an output.
        operators: of the nodes in it, in order.
        nodes: names of what it stands for.
        times: how often what looks like it follows itself, or is in what follows itself.
    """

    kind: Kind
    title: str
    operators: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    times: int = 1


@dataclass(frozen=True)
class Drawing:
    """Boxes in the order of the data, and edges from earlier boxes to later ones, by their positions."""

    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int], ...]


def boxes(graph: onnx.GraphProto, functions: Mapping[str, onnx.FunctionProto], fused: Mapping[str, FusedNode]
          ) -> Drawing:
    """A box for each node that computes, each input and each output.

    Args:
        functions: the bodies of fused nodes by operator type; fused: the fused nodes of the graph by name.
    """
    constants = {tensor.name for tensor in graph.initializer} | {
        tensor.values.name for tensor in graph.sparse_initializer}
    found: list[Box] = []
    edges: dict[tuple[int, int], None] = {}
    makers: dict[str, int] = {}

    def add(box: Box, reads: Sequence[str], writes: Sequence[str]) -> None:
        edges.update(dict.fromkeys((makers[name], len(found)) for name in reads if name in makers))
        makers.update((name, len(found)) for name in writes if name)
        found.append(box)

    for value in graph.input:
        if value.name not in constants:
            add(Box("input", value.name, nodes=(value.name,)), (), (value.name,))
    for node in graph.node:
        if node.op_type != "Constant":
            add(_box(node, functions, fused), [*node.input, *_captured(node)], node.output)
    for value in graph.output:
        add(Box("output", value.name, nodes=(value.name,)), (value.name,), ())
    return Drawing(tuple(found), tuple(edges))


def _box(node: onnx.NodeProto, functions: Mapping[str, onnx.FunctionProto], fused: Mapping[str, FusedNode]) -> Box:
    held = fused.get(node.name)
    if held is None or node.op_type != held.op:
        return Box("runtime", node.op_type, (node.op_type,), (node.name or node.op_type,))
    operators = tuple(each.op_type for each in functions[node.op_type].node if each.op_type != "Constant")
    replaced = (each.name for each in held.replaces if each.name)
    return Box("fused", held.rule or node.op_type, operators, (node.name, *replaced))


def _captured(node: onnx.NodeProto) -> Iterator[str]:
    """Names that the bodies of a node read; those of their own are none of the graph around."""
    for body in subgraphs(node):
        for inner in body.node:
            yield from inner.input
            yield from _captured(inner)
        yield from (value.name for value in body.output)


def joined(drawing: Drawing) -> Drawing:
    """What ONNX Runtime keeps after the same fused nodes, where it hangs together, as one box.

    No path leads out of such a box and back into it: on the way it would pass a fused node, and come after that.
    """
    after: list[int] = []
    readers: dict[int, list[int]] = {}
    for source, target in drawing.edges:
        readers.setdefault(target, []).append(source)
    group = list(range(len(drawing.boxes)))

    def root(place: int) -> int:
        while group[place] != place:
            place = group[place]
        return place

    for place, box in enumerate(drawing.boxes):
        before = [after[source] for source in readers.get(place, ())]
        after.append(max(before, default=0) + (box.kind == "fused"))
        for source in readers.get(place, ()) if box.kind == "runtime" else ():
            if drawing.boxes[source].kind == "runtime" and after[source] == after[place]:
                group[root(place)] = root(source)
    members: dict[int, list[int]] = {}
    for place in range(len(drawing.boxes)):
        members.setdefault(root(place), []).append(place)
    kinds: list[Kind] = ["input", "fused", "runtime", "output"]
    order = sorted(members.values(), key=lambda places: (
        after[places[0]], kinds.index(drawing.boxes[places[0]].kind), places[0]))
    return _merged(drawing, [_together([drawing.boxes[place] for place in places]) for places in order], order)


def _together(parts: Sequence[Box]) -> Box:
    if len(parts) == 1:
        return parts[0]
    operators = tuple(name for name, number in sorted(Counter(name for part in parts for name in part.operators)
                                                      .items(), key=lambda one: (-one[1], one[0]))
                      for _ in range(number))
    return Box("runtime", "ONNX Runtime", operators, tuple(name for part in parts for name in part.nodes))


def folded(drawing: Drawing) -> Drawing:
    """Runs of boxes that look like the run before, drawn once with how often.

    Edges from one repetition to the next would lead back; they are left out.
    """
    runs = [_Run((place,), (box.kind, box.title, box.operators)) for place, box in enumerate(drawing.boxes)]
    for _ in range(FOLDS):
        start, period, copies = _repetition(runs)
        if copies == 1:
            break
        alike = zip(*(runs[start + copy * period:start + (copy + 1) * period] for copy in range(copies)), strict=True)
        once = [_Run(tuple(place for run in same for place in run.places), (copies, same[0].look)) for same in alike]
        runs[start:start + copies * period] = once
    kept = [replace(drawing.boxes[run.places[0]], times=len(run.places),
                    nodes=tuple(name for place in run.places for name in drawing.boxes[place].nodes)) for run in runs]
    return _merged(drawing, kept, [run.places for run in runs])


@dataclass(frozen=True)
class _Run:
    """Boxes drawn as one, by their positions, and what they look like."""

    places: tuple[int, ...]
    look: tuple[object, ...]


def _repetition(runs: Sequence[_Run]) -> tuple[int, int, int]:
    """Where that begins which repeats itself and saves most, how long it is, and how often it comes; once where nothing
    does."""
    numbers: dict[tuple[object, ...], int] = {}
    looks = [numbers.setdefault(run.look, len(numbers)) for run in runs]
    best = (0, 0, 1)
    for period in range(1, len(looks) // 2 + 1):
        same = 0
        for place in range(len(looks) - period):
            same = same + 1 if looks[place] == looks[place + period] else 0
            if same // period * period > best[1] * (best[2] - 1):
                best = (place + 1 - same, period, same // period + 1)
    return best


def _merged(drawing: Drawing, kept: Sequence[Box], members: Sequence[Sequence[int]]) -> Drawing:
    """The drawing with boxes in place of their members, in the order given; an edge leads forward or is left out."""
    home = {place: number for number, places in enumerate(members) for place in places}
    edges = dict.fromkeys((home[source], home[target]) for source, target in drawing.edges
                          if home[source] < home[target])
    return Drawing(tuple(kept), tuple(edges))
