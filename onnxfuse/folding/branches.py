"""Which Ifs sizes decide, whatever the sizes of a run are: the branch taken can stand in their place.

Only what inference proves counts, as in ``decide``: the graph is inferred without the sizes that the model file states
of its inner values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnxfuse.graph import Graph, LoadedModel, build_graph
from onnxfuse.graph.bodies import taken
from onnxfuse.graph.model import Place
from onnxfuse.operators import infer

Taken = Mapping[Place, str]
"""By the place of an If (its graph's, and the position with no name), the attribute that holds the branch taken."""


def decided(model: LoadedModel) -> Taken:
    """The Ifs of a model that take one branch in every run, at any depth.

    Raises:
        ModelError: a small constant cannot be read.
    """
    if not any(node.op_type == "If" for node in model.proto.graph.node):
        return {}
    graph = build_graph(model)
    for part in graph.walk():
        for value in part.values.values():
            value.declared = None
    return dict(_found(infer(graph)))


def _found(graph: Graph) -> Iterator[tuple[Place, str]]:
    for body in graph.bodies:
        branch = taken(body.owner) if body.owner is not None and body.owner.op == "If" else None
        if branch is not None:
            yield (*body.place[:-1], (body.place[-1][0], "")), branch
        yield from _found(body)
