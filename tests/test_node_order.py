"""A plan is of the graph, not of the file: neither the order in which nodes and initialisers stand in it, nor names,
nor the addresses and hashes of Python's objects change which regions there are, how they run and what they gain.

    pytest tests/test_node_order.py --orders 100
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from random import Random

import body_models
import onnx
import pytest
import sizes_models
from cli_models import ROOT
from graph_strategies import seeded
from reordered import rewritten, tagger

from onnxfuse.graph.model import Node, Value
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.schedules import named

sys.path.insert(0, str(ROOT / "benchmarks"))
planning = importlib.import_module("planning")

MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "tagger": lambda: tagger(steps=4),
    "transformer": lambda: planning.transformer(40),
    "pointwise": lambda: planning.pointwise(50),
    "sizes": sizes_models.attention,
    "branches": body_models.branches,
    "loop": body_models.loop,
    "scan": body_models.scan,
    "nested": body_models.nested,
    **{f"random {seed}": lambda seed=seed: seeded(seed, 40).model for seed in (3, 11, 29, 47)},  # type: ignore[misc]
}

Region = tuple[frozenset[str], str, str, frozenset[str]]


def planned(model: onnx.ModelProto, old: Mapping[str, str]) -> tuple[list[Region], float, int]:
    """A model's regions by the original's names, the predicted time of a run, and the arithmetic on sizes left."""
    made = optimise(model, Options(target="H100", verify=False, database=False))
    return regions(made, old), seconds(made), len(made.folded.proto.graph.node)


def regions(made: Optimised, old: Mapping[str, str]) -> list[Region]:
    """By the names of the original: what the nodes compute, the rule, the schedule and what is written."""
    def names(nodes: tuple[Node, ...]) -> frozenset[str]:
        return frozenset(old.get(name, name) for node in nodes
                         for name in [next(value.name for value in node.outputs if value is not None)])

    found = [
        (names(each.nodes), each.rule, named(each.kernel).schedule, frozenset(old.get(v.name, v.name)
                                                                            for v in each.outputs))
        for each in made.plan.fusions
    ]
    return sorted(found, key=lambda each: (sorted(each[0]), each[1:3]))


def seconds(made: Optimised) -> float:
    return CostModel(made.ledger, made.profile).total(made.plan.fusions)


@pytest.mark.parametrize("name", MODELS)
def test_every_order_and_every_naming_gives_one_plan(name: str, orders: int) -> None:
    model = MODELS[name]()
    expected = planned(model, {})
    for seed in range(orders):
        other = rewritten(model, seed)
        found = planned(other.model, other.old)
        assert found[0] == expected[0], f"seed {seed}"
        assert found[1] == pytest.approx(expected[1], rel=1e-12), f"seed {seed}"
        assert found[2] == expected[2], f"seed {seed}"


@pytest.mark.parametrize("name", MODELS)
def test_sets_are_walked_in_no_order_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes and values with hashes drawn by lot, so that a set of them comes in another order each time."""
    model = MODELS[name]()
    expected = planned(model, {})
    chance = Random(0)
    hashes: dict[int, tuple[object, int]] = {}

    def drawn(thing: object) -> int:
        return hashes.setdefault(id(thing), (thing, chance.randrange(1 << 60)))[1]

    monkeypatch.setattr(Node, "__hash__", drawn)
    monkeypatch.setattr(Value, "__hash__", drawn)
    found = planned(model, {})
    assert found == (expected[0], pytest.approx(expected[1], rel=1e-12), expected[2])


def test_directions_of_a_recurrent_network_run_side_by_side() -> None:
    """Steps of the two directions share launches, though they stand far apart in the file and both are held at once."""
    made = optimise(tagger(steps=24), Options(dims={"batch": 8}, target="H100", verify=False, database=False))
    joined = [fusion for fusion in made.plan.fusions if named(fusion.kernel).schedule == "together"]
    assert len(joined) >= 23
