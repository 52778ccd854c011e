"""Check that a graph's names are defined once, before they are used, and that it has no cycle."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from onnxfuse.errors import ModelError
from onnxfuse.graph.model import Body

_EXPORT = "Export the model again, or sort its nodes so that each stands after those whose results it reads."

_SHOWN = 8
"""Nodes of a cycle that a message names."""


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs among a node's attributes."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


OWNERS = frozenset({("", "If"), ("", "Loop"), ("", "Scan")})
"""Domain and operator of the nodes whose bodies are graphs like any other; bodies of other operators stay closed."""


def bodies_of(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """The bodies of an If, a Loop or a Scan by the attributes that hold them; none for other nodes."""
    if ("" if node.domain == "ai.onnx" else node.domain, node.op_type) in OWNERS:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield attribute.name, attribute.g


def graphs_of(model: onnx.ModelProto) -> Iterator[tuple[Body | None, onnx.GraphProto]]:
    """The main graph of a model and every body in it, each before those inside it, as ``Graph.walk`` has them."""
    yield from _graphs(None, model.graph)


def _graphs(body: Body | None, graph: onnx.GraphProto) -> Iterator[tuple[Body | None, onnx.GraphProto]]:
    yield body, graph
    for index, node in enumerate(graph.node):
        for name, inner in bodies_of(node):
            yield from _graphs(body_of(body, graph, index, name), inner)


def body_of(around: Body | None, graph: onnx.GraphProto, index: int, attribute: str) -> Body:
    """The body in an attribute of the node at ``index`` of the main graph, or of the body ``around``."""
    owner = graph.node[index]
    twins = [node for node in graph.node if node.name == owner.name and any(True for _ in bodies_of(node))]
    text = f"{label(owner) if len(twins) == 1 else label_of_result(owner)}/{attribute}"
    if around is None:
        return Body(text, ((index, attribute),))
    return Body(f"{around.label}/{text}", (*around.place, (index, attribute)))


def captured_names(node: onnx.NodeProto) -> list[str]:
    """Names from outside that a node's subgraphs read, at any depth, each once.

    A name that a subgraph defines hides the outer one from there on.
    """
    found: dict[str, None] = {}
    for graph in subgraphs(node):
        inner = local_names(graph)
        for child in graph.node:
            for name in (*child.input, *captured_names(child)):
                if name and name not in inner:
                    found[name] = None
            inner.update(child.output)
        for output in graph.output:
            if output.name and output.name not in inner:
                found[output.name] = None
    return list(found)


def local_names(graph: onnx.GraphProto) -> set[str]:
    """Names of a graph's inputs and initialisers."""
    names = {value.name for value in graph.input}
    names.update(tensor.name for tensor in graph.initializer)
    names.update(tensor.values.name for tensor in graph.sparse_initializer)
    return names


def label(node: onnx.NodeProto) -> str:
    """How messages call a node."""
    return node.name or label_of_result(node)


def label_of_result(node: onnx.NodeProto) -> str:
    """How messages call a node without a name."""
    return f"{node.op_type} -> {next((name for name in node.output if name), '?')}"


def check_order(graph: onnx.GraphProto, place: str | None, outer: frozenset[str] = frozenset()) -> None:
    """Check a graph and its subgraphs.

    Args:
        place: for messages: the model's file.
        outer: names that are defined around the graph.

    Raises:
        ModelError: a name defined twice or not at all, a cycle, nodes out of order.
    """
    defined = local_names(graph)
    _check_unique(graph, place)
    producers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    for index, node in enumerate(graph.node):
        where = _where(node, place)
        captured = captured_names(node) if any(True for _ in subgraphs(node)) else []
        for name in (*node.input, *captured):
            if name and name not in defined and name not in outer:
                if name not in producers:
                    raise ModelError(
                        f"Node '{label(node)}' reads '{name}', which nothing computes.", place=where,
                        remedy="Export the model again.",
                    )
                cycle = _cycle(graph, index, producers)
                if cycle:
                    raise ModelError(
                        f"The graph has a cycle: {_described(graph, cycle)}.", place=where,
                        remedy="Export the model again.",
                    )
                raise ModelError(
                    f"The graph is not in topological order: node '{label(node)}' reads '{name}' before node "
                    f"'{label(graph.node[producers[name]])}' computes it.", place=where, remedy=_EXPORT,
                )
        for name in node.output:
            if name in defined:
                raise ModelError(
                    f"The name '{name}' is defined twice.", place=where, remedy="Export the model again.",
                )
            if name:
                defined.add(name)
        if captured or any(True for _ in subgraphs(node)):
            scope = outer | defined
            for inner in subgraphs(node):
                check_order(inner, place, scope)
    for value in graph.output:
        if value.name not in defined and value.name not in outer:
            raise ModelError(
                f"The graph's output '{value.name}' is computed by no node.", place=place,
                remedy="Export the model again.",
            )


def _where(node: onnx.NodeProto, place: str | None) -> str:
    return f"{place}, node '{label(node)}'" if place else f"node '{label(node)}'"


def _check_unique(graph: onnx.GraphProto, place: str | None) -> None:
    stored = [tensor.name for tensor in graph.initializer]
    stored += [tensor.values.name for tensor in graph.sparse_initializer]
    for names in ([value.name for value in graph.input], stored, [value.name for value in graph.output]):
        if len(set(names)) < len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise ModelError(f"The name '{twice}' is defined twice.", place=place, remedy="Export the model again.")


def _described(graph: onnx.GraphProto, cycle: list[int]) -> str:
    names = [f"'{label(graph.node[index])}'" for index in cycle]
    if len(names) > _SHOWN:
        names[_SHOWN - 1:-1] = [f"{len(names) - _SHOWN} more"]
    return " -> ".join([*names, names[0]])


def _cycle(graph: onnx.GraphProto, start: int, producers: dict[str, int]) -> list[int]:
    """Nodes on a cycle that ``start`` depends on, each feeding the next; [] where there is none."""

    def needs(index: int) -> Iterator[int]:
        node = graph.node[index]
        return iter([producers[name] for name in (*node.input, *captured_names(node)) if name in producers])

    path, pending, done = [start], [needs(start)], set()
    on_path = {start}
    while path:
        following = next(pending[-1], None)
        if following is None:
            pending.pop()
            finished = path.pop()
            on_path.discard(finished)
            done.add(finished)
        elif following in on_path:
            cycle = path[path.index(following):][::-1]
            first = cycle.index(min(cycle))
            return cycle[first:] + cycle[:first]
        elif following not in done:
            path.append(following)
            pending.append(needs(following))
            on_path.add(following)
    return []
