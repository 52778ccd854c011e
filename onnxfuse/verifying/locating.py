"""Which fused node's function first computes something else than the original's nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxfuse.errors import VerificationError
from onnxfuse.graph import Graph
from onnxfuse.rewriting import FusedNode
from onnxfuse.verifying.capture import results_of
from onnxfuse.verifying.closeness import EXACT, Closeness, difference
from onnxfuse.verifying.results import OutputDifference
from onnxfuse.verifying.runs import Run
from onnxfuse.verifying.sharing import Slim


def first_apart(graph: Graph, nodes: Sequence[FusedNode], pair: tuple[Slim, Slim], run: Run, providers: Sequence[Any],
                closeness: Closeness = EXACT) -> str:
    """The first fused node, in the order of the main graph, that computes something else from what is the same, and
    how far off that is; "" where there is none, or no run can tell.

    Args:
        graph: of the original; pair: the original and the fused model, as ``Slim`` runs them without kernels.
    """
    outside = [node for node in nodes if node.body is None]
    values = {name: graph.values.get(name) for node in outside for name in (*filter(None, node.inputs), *node.outputs)}
    kinds = {name: value.dtype for name, value in values.items()
             if value is not None and value.producer is not None and value.dtype is not None and not value.is_constant}
    try:
        wanted, got = (results_of(slim, run, kinds, providers) for slim in pair)
    except (VerificationError, MemoryError):
        return ""
    found = {name: difference(name, got[name], wanted[name], closeness) for name in kinds}
    apart = {name: entry for name, entry in found.items()
             if entry is not None and (entry.beyond or closeness == EXACT)}
    for node in outside:
        if apart.keys().isdisjoint(node.inputs):
            for name in node.outputs:
                if name in apart:
                    return f"{node.name} ({node.rule}): {told(apart[name])}"
    return ""


def told(entry: OutputDifference) -> str:
    """How far a value is off, and where, in words."""
    if not entry.elements:
        return f"{entry.output!r} differs in zeros' signs alone"
    if not entry.where and entry.error == float("inf") and entry.got:
        return f"{entry.output!r} is {entry.got} instead of {entry.wanted}"
    place = f" at {list(entry.where)}: {entry.got} instead of {entry.wanted}" if entry.got else ""
    return f"{entry.output!r} is off by {entry.error:.1e} of its largest magnitude{place}"
