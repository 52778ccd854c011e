"""Planning grows with the graph and no faster; benchmarks/planning.py shows the figures of large graphs."""

from __future__ import annotations

import importlib
import sys

import pytest
from cli_models import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
benchmark = importlib.import_module("planning")


@pytest.mark.parametrize("kind", ["transformer", "pointwise"])
def test_planning_grows_with_the_graph(kind: str) -> None:
    """Four times the nodes take at most six times the processor's seconds; the smaller graph also warms caches up."""
    benchmark.plan(kind, 100)
    small, large = (benchmark.plan(kind, count) for count in (400, 1600))
    assert large.nodes >= 4 * small.nodes * 0.9
    assert large.fused_nodes > 3 * small.fused_nodes
    assert large.cpu_seconds < 6 * small.cpu_seconds
    assert set(large.stages) >= {"planning", "rewriting"}


def test_synthetic_graphs_are_what_they_say() -> None:
    for kind in benchmark.KINDS:
        model = benchmark.KINDS[kind](300)
        assert 300 <= len(model.graph.node) < 370
        assert benchmark.KINDS[kind](300).SerializeToString() == model.SerializeToString()
