"""Names that a body shares with what is computed after it in the graph around, which the standard allows.

Fusing moves nodes: where the one that computes the outer value comes to stand before the body, the name would be
hidden, and ONNX Runtime takes no such model.  So the body's own value gets a name of its own when the model is read.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from onnxfuse.graph.order import label, local_names, subgraphs


def told_apart(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """The model with such values of bodies renamed, and the nodes that own the bodies; nodes must be sorted.

    The model itself where there are none; else a copy.
    """
    if not any(True for _ in _shared(model.graph, frozenset())):
        return model, ()
    result = onnx.ModelProto()
    result.CopyFrom(model)
    used = set(_names(result.graph))
    found: dict[str, None] = {}
    for owner, body, name in list(_shared(result.graph, frozenset())):
        number = 2
        while f"{name}_{number}" in used:
            number += 1
        used.add(f"{name}_{number}")
        _rename(body, name, f"{name}_{number}")
        found[f"'{label(owner)}'"] = None
    return result, tuple(found)


def _shared(
    graph: onnx.GraphProto, later: frozenset[str]
) -> Iterator[tuple[onnx.NodeProto, onnx.GraphProto, str]]:
    """Bodies, and names of values of theirs that are among ``later`` or computed after their owners."""
    following = set(later)
    for node in reversed(graph.node):
        for body in subgraphs(node):
            own = dict.fromkeys([*sorted(local_names(body)), *(name for inner in body.node for name in inner.output)])
            yield from ((node, body, name) for name in own if name in following)
            yield from _shared(body, frozenset(following))
        following.update(filter(None, node.output))


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Rename a value of a graph, from where it is defined on: what stands before reads another by that name."""
    known = old in local_names(graph)
    for value in (*graph.input, *graph.initializer, *(sparse.values for sparse in graph.sparse_initializer),
                  *graph.value_info):
        value.name = new if value.name == old else value.name
    for node in graph.node:
        if known:
            _reread(node, old, new)
        elif old in node.output:
            node.output[:] = [new if name == old else name for name in node.output]
            known = True
    for result in graph.output:
        result.name = new if result.name == old else result.name


def _reread(node: onnx.NodeProto, old: str, new: str) -> None:
    """Let a node, and bodies of it that have no such name themselves, read another value."""
    node.input[:] = [new if name == old else name for name in node.input]
    for body in subgraphs(node):
        if old in local_names(body):
            continue
        for inner in body.node:
            _reread(inner, old, new)
            if old in inner.output:
                break
        else:
            for result in body.output:
                result.name = new if result.name == old else result.name


def _names(graph: onnx.GraphProto) -> Iterator[str]:
    """Every name in a graph and its bodies."""
    yield from local_names(graph)
    yield from (info.name for info in (*graph.output, *graph.value_info))
    for node in graph.node:
        yield from (*node.input, *node.output)
        for body in subgraphs(node):
            yield from _names(body)
