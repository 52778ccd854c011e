"""Who reads what in a form of a model that has nodes of its own between values and their readers, and the way back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, MutableSequence

import onnx

from onnxfuse.rewriting.index import ModelIndex, reads_of
from onnxfuse.rewriting.origin import first_output


def with_nodes(
    model: onnx.ModelProto,
    index: ModelIndex,
    instead: Mapping[tuple[str, str], str],
    behind: Callable[[onnx.NodeProto], Iterable[onnx.NodeProto]],
    before: Iterable[onnx.NodeProto] = (),
) -> onnx.ModelProto:
    """A copy of a model with further nodes in its main graph.

    Args:
        index: the model's own; instead: what a value's reader, by the name of its first result, reads in its place.
        behind: the nodes that follow one; before: those that precede all.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    del graph.node[:]
    graph.node.extend(before)
    for node in index.nodes:
        added = graph.node.add()
        added.CopyFrom(node)
        for place, name in enumerate(node.input):
            added.input[place] = instead.get((name, first_output(node)), name)
        graph.node.extend(behind(node))
    return result


def reread(graph: onnx.GraphProto, instead: Mapping[str, str]) -> None:
    """Have all nodes read other values, by name, in place."""
    for node in graph.node:
        rename(node.input, instead)


def rename(names: MutableSequence[str], instead: Mapping[str, str]) -> None:
    """Other names in the place of some, in place."""
    for place, name in enumerate(names):
        if name in instead:
            names[place] = instead[name]


def links_of(graph: onnx.GraphProto) -> tuple[dict[str, int], Counter[str]]:
    """Where in a graph the node stands that computes each value, and how often each is read, captures included."""
    producer = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    return producer, Counter(name for node in graph.node for name in reads_of(node))


def drop_unread(graph: onnx.GraphProto, values: Collection[str]) -> None:
    """Take out the nodes that compute some values, first of their results, which nobody reads, in place."""
    read = Counter(name for node in graph.node for name in reads_of(node))
    given = {info.name for info in graph.output}
    idle = [place for place, node in enumerate(graph.node)
            if first_output(node) in values and not read[first_output(node)] and first_output(node) not in given]
    for place in reversed(idle):
        del graph.node[place]
