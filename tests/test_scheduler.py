"""Decisions that are kept, and corrected by what was measured."""

from __future__ import annotations

import threading
from datetime import datetime
from typing import Any

import numpy as np
import onnx
import pytest
from cli_models import CHAIN, encoder, parse
from onnx import numpy_helper

import onnxfuse
from onnxfuse import DynamicFusionScheduler, FusionPlanner, Hints
from onnxfuse.errors import ModelError, TargetError

DIMS = {"batch": 4096}


def scheduler(**arguments: Any) -> DynamicFusionScheduler:
    return DynamicFusionScheduler(target="H200", **arguments)


def test_a_decision_names_the_fused_nodes_that_optimize_makes() -> None:
    decision = FusionPlanner("H200").decide_fusion(encoder(2), dims={"batch": 8, "sequence": 128})
    result = onnxfuse.optimize(encoder(2), dims={"batch": 8, "sequence": 128}, target="H200", verify=False)
    # A decision is kept by structure: it is in the graph's own order, a report in that of the file.
    assert sorted(fusion.name for fusion in decision.fusions) == sorted(entry.node for entry in result.report.fusions)
    assert decision.dims == {"batch": 8, "sequence": 128}
    assert (decision.target, decision.strategy, decision.cached) == ("H200", "auto", False)
    assert all(fusion.predicted_speedup > 1.2 and fusion.bytes_saved > 0 for fusion in decision.fusions)


def test_a_decision_is_kept_by_structure_sizes_target_and_hints() -> None:
    planner = FusionPlanner("H200")
    model = parse(CHAIN)
    first = planner.decide_fusion(model, dims=DIMS)
    assert planner.decide_fusion(parse(CHAIN), dims=DIMS).cached
    assert planner.decide_fusion(model, {"memory-pressure": 0.0}, dims=DIMS).cached
    other = [
        planner.decide_fusion(model, dims={"batch": 8}),
        planner.decide_fusion(model, {"memory-pressure": 0.5}, dims=DIMS),
        planner.decide_fusion(model, dims=DIMS, strategy="memory"),
        planner.decide_fusion(parse(CHAIN.replace("Tanh", "Exp")), dims=DIMS),
        planner.decide_fusion(parse(CHAIN.replace("0.5", "0.25")), dims=DIMS),
        FusionPlanner("T4").decide_fusion(model, dims=DIMS),
    ]
    assert not any(decision.cached for decision in other)
    assert len({first.key, *(decision.key for decision in other)}) == 7
    assert (planner.decided, planner.hits, len(planner.kept())) == (8, 2, 6)


def test_weights_are_no_part_of_the_structure() -> None:
    def model(fill: float) -> onnx.ModelProto:
        made = parse("g (float[n, 512] x) => (float[n, 512] y) { a = Mul(x, w) y = Tanh(a) }")
        made.graph.initializer.append(numpy_helper.from_array(np.full(512, fill, np.float32), "w"))
        return made

    planner = FusionPlanner("H200")
    assert not planner.decide_fusion(model(1.0)).cached
    assert planner.decide_fusion(model(2.0)).cached


def test_the_cache_is_bounded_and_keeps_what_was_asked_for_last() -> None:
    planner = FusionPlanner("H200", capacity=2)
    model = parse(CHAIN)
    planner.decide_fusion(model, dims={"batch": 1})
    planner.decide_fusion(model, dims={"batch": 2})
    assert planner.decide_fusion(model, dims={"batch": 1}).cached
    planner.decide_fusion(model, dims={"batch": 3})
    assert len(planner.kept()) == 2
    assert planner.decide_fusion(model, dims={"batch": 1}).cached
    assert not planner.decide_fusion(model, dims={"batch": 2}).cached
    planner.clear()
    assert planner.kept() == ()
    with pytest.raises(ValueError, match="a planner keeps one decision at least, not 0"):
        FusionPlanner("H200", capacity=0)


def test_a_report_tells_what_was_decided_and_measured() -> None:
    made = scheduler()
    decision = made.decide_fusion(parse(CHAIN), dims=DIMS)
    made.decide_fusion(parse(CHAIN), dims=DIMS)
    (fusion,) = decision.fusions
    made.record_execution_stats(fusion.name, 10e-6)
    made.record_execution_stats(fusion.name, 20e-6, calls=3)
    made.record_execution_stats("elsewhere", 1e-3)
    report = made.get_fusion_report()
    assert (report.decisions, report.hits, report.entries) == (2, 1, 1)
    other, own = sorted(report.fusions, key=lambda each: each.name != "elsewhere")
    assert own.name == fusion.name
    assert own.predicted_speedup == fusion.predicted_speedup
    assert own.measured_seconds == pytest.approx(17.5e-6)
    assert (own.calls, own.baseline_seconds) == (4, None)
    assert own.last_seen is not None and datetime.fromisoformat(own.last_seen).tzinfo is not None
    assert (other.predicted_speedup, other.calls) == (None, 1)
    assert report.to_json()["fusions"][0].keys() == {
        "name", "predicted_speedup", "measured_seconds", "baseline_seconds", "calls", "last_seen"}


def test_a_fusion_that_was_measured_to_lose_drops_out() -> None:
    made = scheduler()
    (fusion,) = made.decide_fusion(parse(CHAIN), dims=DIMS).fusions
    made.record_execution_stats(fusion.name, 30e-6, calls=2, baseline=20e-6)
    assert made.decide_fusion(parse(CHAIN), dims=DIMS).fusions == (fusion,)
    made.record_execution_stats(fusion.name, 30e-6, baseline=20e-6)
    decision = made.decide_fusion(parse(CHAIN), dims=DIMS)
    assert decision.fusions == ()
    refusal = decision.refusals[0]
    assert refusal.code == "measured-slower"
    assert refusal.message == (
        f"{fusion.name} took 30.0 µs fused and 20.0 µs as ONNX Runtime runs it, in 3 calls")
    assert refusal.remedy == f"disable the rule {fusion.rule}, or tune the model"
    made.record_execution_stats(fusion.name, 1e-6, calls=100)
    assert made.decide_fusion(parse(CHAIN), dims=DIMS).fusions == (fusion,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seconds": -1.0}, "seconds must be finite and not negative, not -1"),
        ({"seconds": float("nan")}, "seconds must be finite and not negative, not nan"),
        ({"seconds": 1.0, "baseline": float("inf")}, "baseline must be finite and not negative, not inf"),
        ({"seconds": 1.0, "calls": 0}, "calls must be one or more, not 0"),
    ],
)
def test_what_cannot_be_recorded(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        scheduler().record_execution_stats("a", **arguments)
    assert str(caught.value) == message


def test_wrong_arguments() -> None:
    with pytest.raises(TargetError):
        FusionPlanner("abacus")
    with pytest.raises(ValueError, match='there is no strategy "fast"'):
        FusionPlanner("H200").decide_fusion(parse(CHAIN), strategy="fast")
    with pytest.raises(ValueError, match="the hint memory-pressure must be between 0 and 1, not 2"):
        FusionPlanner("H200").decide_fusion(parse(CHAIN), {"memory-pressure": 2.0})
    with pytest.raises(ModelError, match="The model has no dimension 'bach'"):
        FusionPlanner("H200").decide_fusion(parse(CHAIN), dims={"bach": 1})
    with pytest.raises(TypeError, match="a scheduler takes a planner or the arguments of one, not both"):
        DynamicFusionScheduler(FusionPlanner("H200"), target="T4")


def test_several_threads_at_once() -> None:
    made = scheduler(capacity=4)
    (fusion,) = made.decide_fusion(parse(CHAIN), dims=DIMS).fusions
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(6):
                made.decide_fusion(parse(CHAIN), Hints(memory_pressure=(number + step) % 8 / 10), dims=DIMS)
                made.record_execution_stats(fusion.name, 1e-6)
                made.get_fusion_report()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    report = made.get_fusion_report()
    assert (report.decisions, report.entries) == (49, 4)
    assert next(each for each in report.fusions if each.name == fusion.name).calls == 48
