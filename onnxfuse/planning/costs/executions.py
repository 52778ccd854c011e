"""How often each body runs in one run of the model (docs/bytes.md)."""

from __future__ import annotations

from onnxfuse.graph.bodies import is_idle, most_trips, taken, trips
from onnxfuse.graph.dims import Dim
from onnxfuse.graph.model import Graph, Place
from onnxfuse.graph.sizes import Sizes

TRIPS = 16
"""How often a Loop is taken to run where its condition may end it, at most."""

BRANCH = 0.5
"""How often each branch of an If is taken, where its condition is not known before a run."""


def runs_of(graph: Graph, sizes: Sizes) -> dict[Place, float]:
    """Runs of the graph, 1, and of each body in it, by place."""
    found: dict[Place, float] = {graph.place: 1.0}
    for body in graph.walk():
        if body is not graph:
            found[body.place] = found[body.place[:-1]] * _runs(body, sizes)
    return found


def _runs(body: Graph, sizes: Sizes) -> float:
    """Runs of a body in one run of its node."""
    assert body.owner is not None, "a body has an owner"
    if body.owner.op == "If":
        return BRANCH if taken(body.owner) is None else float(not is_idle(body))
    known = _number(trips(body), sizes)
    if known is not None:
        return float(max(known, 0))
    return float(max(min(_number(most_trips(body), sizes) or TRIPS, TRIPS), 0))


def _number(size: Dim | None, sizes: Sizes) -> int | None:
    try:
        return None if size is None else size.evaluate(sizes)
    except (KeyError, ZeroDivisionError):
        return None
