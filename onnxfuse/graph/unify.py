"""Symbols that stand for one size: a model runs only where operators find them equal.

Exporters give each input's free axes names of their own, so that the past keys and the past values of a decoder differ
in name; that a product sums over both says that they are as long as one another.  Kernels check sizes when they run.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnxfuse.graph.dims import Dim, symbol
from onnxfuse.graph.model import Graph, Node


def equal_symbols(graph: Graph) -> dict[str, str]:
    """By symbol of the inputs' sizes the first one that it has to be equal to, where there is one before it.

    Only what the main graph's nodes ask counts of which an output depends: others ONNX Runtime takes out, and those in
    bodies may never run.
    """
    order = list(dict.fromkeys(
        name for value in graph.inputs for size in value.shape or () for name in sorted(size.symbols)))
    if len(order) < 2 or not any(demand.kind == "equal" for demand in graph.demands):
        return {}
    needed = _needed(graph)
    idle = {node.label for node in graph.nodes if node not in needed}
    first = {name: name for name in order}
    for demand in graph.demands:
        pair = _pair(demand.left - demand.right) if demand.kind == "equal" and demand.node not in idle else None
        if pair is None or not first.keys() >= set(pair):
            continue
        kept, gone = sorted((first[name] for name in pair), key=order.index)
        first = {name: kept if other == gone else other for name, other in first.items()}
    return {name: other for name, other in first.items() if name != other}


def _pair(difference: Dim) -> tuple[str, str] | None:
    """The two symbols that are equal where a difference of sizes is zero, if that is all it says."""
    if len(difference.symbols) != 2:
        return None
    one, other = sorted(difference.symbols)
    quotient = difference.divide(symbol(one) - symbol(other))
    return (one, other) if quotient is not None and quotient.value is not None else None


def _needed(graph: Graph) -> set[Node]:
    """The nodes that an output depends on."""
    waiting = [value.producer for value in graph.outputs if value.producer is not None]
    found = set(waiting)
    while waiting:
        for value in waiting.pop().reads():
            if value.producer is not None and value.producer not in found:
                found.add(value.producer)
                waiting.append(value.producer)
    return found


def unify(graph: Graph, same: Mapping[str, str]) -> None:
    """Put other symbols in the place of some in all that the file says of the sizes of a graph, as it was built."""
    others = {name: symbol(other) for name, other in same.items()}
    for part in graph.walk():
        for value in part.values.values():
            value.shape, value.declared = (
                sizes and tuple(size.substitute(others) for size in sizes) for sizes in (value.shape, value.declared))
