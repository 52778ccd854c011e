"""A smaller model that still fails: outputs, nodes and bodies are left out while that is so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import onnx
from onnx import helper
from schema_graphs import SchemaGraph, accepted
from schema_values import Array, Runtime, element_type, reads_of

MOST_TRIES = 150


def shrunk(graph: SchemaGraph, fails: Callable[[SchemaGraph], bool]) -> SchemaGraph:
    """The graph with all that the failure does not need left out."""
    tries = 0
    progress = True
    while progress:
        progress = False
        for candidate in smaller(graph):
            tries += 1
            if tries > MOST_TRIES:
                return graph
            if accepted(candidate) and fails(candidate):
                graph, progress = candidate, True
                break
    return graph


def smaller(graph: SchemaGraph) -> Iterator[SchemaGraph]:
    """Without an output, without a node that nobody reads, with what a node gives handed in in its place."""
    model = graph.model
    outputs = [value.name for value in model.graph.output]
    read = {name for node in model.graph.node for name in reads_of(node)}
    for name in outputs if len(outputs) > 1 else ():
        yield tidied(graph, edited(model, lambda g, name=name: _drop(g.output, lambda value: value.name == name)))
    for place, node in reversed(list(enumerate(model.graph.node))):
        if not any(name in read or name in outputs for name in node.output):
            yield tidied(graph, edited(model, lambda g, place=place: g.node.pop(place) and None))
    for place, node in reversed(list(enumerate(model.graph.node))):
        yield from handed_in(graph, place, node)


def handed_in(graph: SchemaGraph, place: int, node: onnx.NodeProto) -> Iterator[SchemaGraph]:
    exposed = onnx.ModelProto()
    exposed.CopyFrom(graph.model)
    there = {value.name for value in exposed.graph.output}
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name and name not in there)
    try:
        runtime = Runtime(exposed)
    except Exception:  # then it cannot be looked at
        return
    values: list[dict[str, Array]] = []
    for feeds in graph.feeds:
        try:
            found = runtime.run(feeds)
        except Exception:  # sizes that the model does not take
            found = {name: values[0][name] for name in node.output if name} if values else {}
        if any(found.get(name) is None for name in node.output if name):
            return
        values.append({name: array for name in node.output if name and (array := found[name]) is not None})
    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    gone = {name for name in node.output if name}
    _drop(model.graph.output, lambda value: value.name in gone)
    if not model.graph.output:
        return
    del model.graph.node[place]
    _drop(model.graph.value_info, lambda value: value.name in gone)
    for name in gone:
        arrays = [each[name] for each in values]
        if len({array.ndim for array in arrays}) != 1:
            return
        sizes = list(zip(*(array.shape for array in arrays), strict=True))
        dims = [next((symbol for symbol in graph.situations[0] if pair == tuple(s[symbol] for s in graph.situations)),
                     pair[0] if len(set(pair)) == 1 else None) for pair in sizes]
        model.graph.input.append(helper.make_tensor_value_info(name, element_type(arrays[0]), dims))
    feeds = tuple({**old, **new} for old, new in zip(graph.feeds, values, strict=True))
    yield tidied(replace(graph, feeds=feeds), model)


def edited(model: onnx.ModelProto, edit: Callable[[onnx.GraphProto], None]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    edit(copy.graph)
    return copy


def tidied(graph: SchemaGraph, model: onnx.ModelProto) -> SchemaGraph:
    """Without inputs, initializers, types and functions that nobody mentions any more."""
    used = {name for node in model.graph.node for name in reads_of(node)} | {v.name for v in model.graph.output}
    made = {name for node in model.graph.node for name in node.output}
    called = {node.op_type for node in model.graph.node if node.domain}
    _drop(model.graph.initializer, lambda tensor: tensor.name not in used)
    _drop(model.graph.input, lambda value: value.name not in used)
    _drop(model.graph.value_info, lambda value: value.name not in made)
    _drop(model.functions, lambda function: function.name not in called)
    named = {value.name for value in model.graph.input}
    feeds = tuple({name: array for name, array in each.items() if name in named} for each in graph.feeds)
    return replace(graph, model=model, feeds=feeds)


def _drop(items: object, gone: Callable[[object], bool]) -> None:
    for place in reversed(range(len(items))):  # type: ignore[arg-type]
        if gone(items[place]):  # type: ignore[index]
            del items[place]  # type: ignore[attr-defined]
