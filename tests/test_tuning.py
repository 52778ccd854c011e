"""Tuning with a timer that stands in for a GPU, and what a later optimisation makes of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from cli_models import CHAIN, encoder, run, write
from emulator import run_plan
from fake_timer import RUNTIME, FakeTimer

from onnxfuse import api, tuning
from onnxfuse.lowering.launch import HOST_INPUTS, LaunchPlan
from onnxfuse.measuring.database import DEFAULT as OWN
from onnxfuse.measuring.database import Database, find_database, open_database
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import read_fused
from onnxfuse.schedules import SCHEDULES, Kernel, words
from onnxfuse.tuning import Tuned, TuneOptions, tune
from onnxfuse.tuning.models import feeds_of, kernel_model, runtime_model, weights_of
from onnxfuse.tuning.samples import disagreement
from onnxfuse.tuning.subjects import subjects_of
from onnxfuse.tuning.work import State
from onnxfuse.version import __version__

DIMS = {"batch": 64}
DEFAULT = "pointwise_w4_32"
FAST = "pointwise_w4_x2_32_b512"


def times(fast: str = FAST, runtime: float = 20.0) -> Any:
    return lambda name: runtime if name == RUNTIME else 5.0 if name == fast else 10.0


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "measurements.sqlite"


def tuned(model: Path, timer: FakeTimer, database: Path, **options: Any) -> Tuned:
    with open_database(database) as kept:
        return tune(model, timer, kept, TuneOptions(dims=DIMS, **options))


def fused(model: Path, database: Path, **options: Any) -> api.Result:
    return api.optimize(model, dims=DIMS, target="H100", verify=False, database=database, **options)


def first_kernels(result: api.Result) -> list[str]:
    """Entry names without what tells the rule and the text."""
    names = [node.plan.variants[0].steps[0].kernel for node in read_fused(result.model)]
    return [re.sub(r"^grow_\w+?_[0-9a-f]{6}_", "", name) for name in names]


def test_every_candidate_and_the_runtime_are_measured_once(tmp_path: Path, database: Path) -> None:
    model, timer = write(tmp_path, CHAIN), FakeTimer(times())
    found = tuned(model, timer, database)
    assert {DEFAULT, FAST, RUNTIME} <= set(timer.timed)
    assert len(timer.timed) == len(set(timer.timed)) == found.measured
    assert len(timer.compiled) == found.measured - 1  # of the runtime's nodes onnxfuse compiles nothing
    (region,) = found.regions
    assert (region.runtime, region.default, region.best, region.verdict) == (20.0, 10.0, 5.0, "fused")
    assert region.choice == "blocks of 512, width 4, 2 vectors a thread"
    assert (found.known, found.left, region.count, region.faults) == (0, 0, 1, ())
    with open_database(database) as kept:
        assert len(list(kept)) == found.measured


def test_a_second_run_measures_nothing(tmp_path: Path, database: Path) -> None:
    model = write(tmp_path, CHAIN)
    first = tuned(model, FakeTimer(times()), database)
    timer = FakeTimer(times())
    again = tuned(model, timer, database)
    assert timer.timed == [] and timer.compiled == []
    assert (again.measured, again.known) == (0, first.measured)
    assert again.regions[0].best == 5.0


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, database: Path) -> None:
    model = write(tmp_path, CHAIN)
    first = FakeTimer(times(), interrupt_after=4)
    with pytest.raises(KeyboardInterrupt):
        tuned(model, first, database)
    assert len(first.timed) == 4
    second = FakeTimer(times())
    found = tuned(model, second, database)
    assert found.known == 4
    # The schedule's own choice runs again, for the others to be compared with.
    assert set(first.timed) & set(second.timed) == {DEFAULT}
    assert found.regions[0].best == 5.0 and found.left == 0


def test_who_runs_like_the_own_choice_is_dropped_where_that_is_known(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what others are compared with, also where they come first because it was measured before."""
    model = write(tmp_path, CHAIN)
    with pytest.raises(KeyboardInterrupt):
        tuned(model, FakeTimer(times(), interrupt_after=2), database)
    monkeypatch.setattr(Kernel, "runs_like", lambda kernel, other: True)
    timer = FakeTimer(times())
    found = tuned(model, timer, database)
    assert timer.timed == [DEFAULT] and (found.regions[0].best, found.left) == (10.0, 0)


def test_force_measures_again(tmp_path: Path, database: Path) -> None:
    model = write(tmp_path, CHAIN)
    tuned(model, FakeTimer(times()), database)
    timer = FakeTimer(times(runtime=30.0))
    found = tuned(model, timer, database, force=True)
    assert found.known == 0 and len(timer.timed) == found.measured > 1
    assert found.regions[0].runtime == 30.0


def test_a_budget_leaves_the_rest_for_later(tmp_path: Path, database: Path) -> None:
    timer = FakeTimer(times())
    found = tuned(write(tmp_path, CHAIN), timer, database, budget=0.0)
    assert timer.timed == [] and found.measured == 0 and found.left > 1
    assert found.regions[0].verdict == "unmeasured"


def test_optimize_takes_the_best_schedule(tmp_path: Path, database: Path) -> None:
    model = write(tmp_path, CHAIN)
    assert first_kernels(fused(model, False)) == [DEFAULT]
    tuned(model, FakeTimer(times()), database)
    result = fused(model, database)
    assert first_kernels(result) == [FAST]
    (node,) = read_fused(result.model)
    assert any(variant.steps[0].kernel.endswith(DEFAULT) for variant in node.plan.variants)  # the fallbacks stay
    (entry,) = result.report.fusions
    assert entry.measured is not None
    assert (entry.measured["microseconds"], entry.measured["speedup"], entry.measured["source"]) == (5.0, 4.0, "tune")
    assert entry.measured["gpu"] == "NVIDIA H100 80GB HBM3"
    path = result.save(tmp_path / "fused.onnx")
    (read,) = api.report(path).fusions
    assert read.measured == entry.measured


def test_a_schedule_that_is_hardly_faster_is_not_taken(tmp_path: Path, database: Path) -> None:
    model = write(tmp_path, CHAIN)
    tuned(model, FakeTimer(lambda name: 9.9 if name == FAST else 20.0 if name == RUNTIME else 10.0), database)
    result = fused(model, database)
    assert first_kernels(result) == [DEFAULT]
    assert result.report.fusions[0].measured is not None
    assert result.report.fusions[0].measured["microseconds"] == 10.0


def test_what_was_measured_of_another_own_choice_is_measured_again(tmp_path: Path, database: Path) -> None:
    """The schedule may choose otherwise by now; a line that does not say what it was of counts as before."""
    model = write(tmp_path, CHAIN)
    tuned(model, FakeTimer(times(fast="none")), database)
    for note, counts in (("", True), (DEFAULT, True), ("pointwise_w2_32", False)):
        with open_database(database) as kept:
            ((where, row),) = [(where, row) for where, row in kept if row.candidate == OWN]
            kept.record(where, replace(row, note=note, microseconds=10.0))
        report = fused(model, database).report
        assert (report.fusions[0].measured is not None) == counts
        timer = FakeTimer(times(fast="none"))
        tuned(model, timer, database)
        assert timer.timed == ([] if counts else [DEFAULT])
        with open_database(database) as kept:
            (found,) = [row.note for _, row in kept if row.candidate == OWN]
        assert found == (note if counts else DEFAULT)


def test_a_region_that_loses_is_left_to_the_runtime(tmp_path: Path, database: Path) -> None:
    model = write(tmp_path, CHAIN)
    found = tuned(model, FakeTimer(times(runtime=4.0)), database)
    assert found.regions[0].verdict == "left to ONNX Runtime"
    result = fused(model, database)
    assert read_fused(result.model) == ()
    (refusal,) = [refusal for refusal in result.report.refusals if refusal.code == "measured-slower"]
    assert refusal.message == ("measured on NVIDIA H100 80GB HBM3: 5.0 µs fused, 4.0 µs as the runtime runs the "
                               "5 nodes")
    assert refusal.message == found.regions[0].reason
    assert "chosen" not in {entry.verdict for entry in result.optimised.plan.considered}
    assert len(read_fused(fused(model, False).model)) == 1


def test_other_sizes_take_the_schedule_and_no_figure(tmp_path: Path, database: Path) -> None:
    model = write(tmp_path, CHAIN)
    tuned(model, FakeTimer(times(runtime=4.0)), database)
    near = api.optimize(model, dims={"batch": 50}, target="H100", verify=False, database=database)
    assert first_kernels(near) == [FAST] and near.report.fusions[0].measured is None
    far = api.optimize(model, dims={"batch": 200}, target="H100", verify=False, database=database)
    assert first_kernels(far) == [DEFAULT]


def test_another_gpu_takes_nothing(tmp_path: Path, database: Path) -> None:
    model = write(tmp_path, CHAIN)
    tuned(model, FakeTimer(times()), database)
    result = api.optimize(model, dims=DIMS, target="A100", verify=False, database=database)
    assert first_kernels(result) == [DEFAULT] and result.report.fusions[0].measured is None


def test_stale_measurements_are_said(tmp_path: Path, database: Path) -> None:
    model, timer = write(tmp_path, CHAIN), FakeTimer(times())
    timer.environment = replace(timer.environment, driver="550.1", onnxruntime="1.20.0", cuda="nvrtc-12.9")
    tuned(model, timer, database)
    report = fused(model, database).report
    assert report.fusions[0].measured is None
    assert report.notes == (
        "database: what was measured on NVIDIA H100 80GB HBM3 is not used: it was with driver 550.1, onnxfuse "
        f"{__version__}, ONNX Runtime 1.20.0 and nvrtc-12.9; `onnxfuse tune` measures with what is here",)


def test_wrong_and_broken_candidates_are_dropped(tmp_path: Path, database: Path) -> None:
    model = write(tmp_path, CHAIN)
    other = "pointwise_w4_32_b128"
    timer = FakeTimer(times(), wrong=frozenset({FAST}), broken=frozenset({other}))
    found = tuned(model, timer, database)
    (region,) = found.regions
    assert region.best == 10.0 and region.choice == ""
    assert set(region.faults) == {
        f"blocks of 512, width 4, 2 vectors a thread: output y0 is wrong in {64 * 4096} of {64 * 4096} elements; "
        "2 instead of 1",
        "blocks of 128, width 4, 1 vector a thread: too many registers",
    }
    assert first_kernels(fused(model, database)) == [DEFAULT]
    again = FakeTimer(times())
    tuned(model, again, database)
    assert again.timed == []


def test_nothing_is_trusted_where_the_own_choice_does_not_run(tmp_path: Path, database: Path) -> None:
    found = tuned(write(tmp_path, CHAIN), FakeTimer(times(), broken=frozenset({DEFAULT})), database)
    (region,) = found.regions
    assert region.best is None and region.runtime == 20.0 and region.left > 1


def test_layers_share_what_was_measured(tmp_path: Path, database: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(encoder(layers=3), path)
    timer = FakeTimer(times(fast=""))
    with open_database(database) as kept:
        found = tune(path, timer, kept, TuneOptions(dims={"batch": 8, "sequence": 64}))
    assert max(region.count for region in found.regions) >= 3
    assert {region.schedule for region in found.regions} >= {"rows", "pointwise"}
    assert all(region.verdict == "fused" for region in found.regions)
    assert found.refusals == ()


def test_models_of_regions_compute_what_the_region_does() -> None:
    """float32; one fused node in the emulator against the nodes on the CPU: 1e-5 of the largest magnitude.

    The regions have weights, operands that decide sizes, and masks; each runs as the schedule chooses and another way,
    with nothing in the text but what runs.
    """
    options = Options(dims={"batch": 2, "sequence": 16}, verify=False, database=False, disable=["horizontal-joins"])
    optimised = optimise(encoder(layers=1), options)
    subjects, refusals = subjects_of(optimised)
    assert refusals == []
    kinds = set()
    for subject in subjects:
        body = runtime_model(subject)
        feeds = feeds_of(body, subject)
        session = onnxruntime.InferenceSession(body.SerializeToString(), providers=["CPUExecutionProvider"])
        wanted = session.run(None, feeds)
        weights = weights_of(body)
        kinds |= {name[0] for name in feeds} | ({"w"} if weights else set())
        state = State(subject, {})
        for kernel in map(state.kernel, (next(iter(subject.candidates)), list(subject.candidates)[-1])):
            assert kernel is not None and len(kernel.plan.variants) == 1
            model = kernel_model(body, subject, kernel)
            onnx.checker.check_model(model)
            assert {info.name for info in model.graph.input} == {*feeds, *weights}
            names = [f"x{place}" for place in range(len(subject.fusion.tensors))]
            hosts = [feeds.get(f"h{place}") for place in range(HOST_INPUTS)]
            got = run_plan(kernel.plan, kernel.source, [{**weights, **feeds}[name] for name in names], hosts, None, 90)
            for array, reference in zip(got, wanted, strict=True):
                assert np.isfinite(reference).all()
                off = 2e-3 if kernel.rounds else 1e-5
                assert np.abs(array - reference).max() <= off * np.abs(reference).max()
    assert kinds == {"h", "w", "x"}


def test_models_share_what_was_measured_whatever_their_names(tmp_path: Path, database: Path) -> None:
    tuned(write(tmp_path, CHAIN), FakeTimer(times()), database)
    names = {"batch": "rows", "x": "hidden", "w": "scale", " a ": " first ", "(a)": "(first)", " y ": " out "}
    text = CHAIN
    for old, new in names.items():
        text = re.sub(rf"\b{re.escape(old.strip())}\b", new.strip(), text)
    assert "batch" not in text and "(first)" in text
    other = api.optimize(write(tmp_path, text, "other.onnx"), dims={"rows": 64}, target="H100", verify=False,
                         database=database)
    assert first_kernels(other) == [FAST]
    assert other.report.fusions[0].measured is not None


@pytest.mark.parametrize(("old", "new"), [
    ("Tanh", "Sinh"), ("float {0.5}", "float {0.25}"), ("4096", "2048"), ("Add(b, x)", "Add(x, b)"),
])
def test_what_differs_shares_nothing_of_the_runtime(tmp_path: Path, database: Path, old: str, new: str) -> None:
    """Another operator, constant, size or wiring: the runtime's time of one says nothing of the other."""
    tuned(write(tmp_path, CHAIN), FakeTimer(times()), database)
    other = fused(write(tmp_path, CHAIN.replace(old, new), "other.onnx"), database)
    measured = other.report.fusions[0].measured
    assert measured is None or measured["speedup"] is None


def test_statistics_of_production_are_a_measurement(tmp_path: Path, database: Path) -> None:
    from onnxfuse.measurements import kernel_digest
    from onnxfuse.measuring.database import Statistic, shapes_text

    model = write(tmp_path, CHAIN)
    plain = fused(model, False)
    (fusion,) = plain.optimised.plan.fusions
    shapes = shapes_text([(64, 4096), (4096,)], [(64, 4096)])
    timer = FakeTimer(times())
    with open_database(database) as kept:
        kept.record_statistics([Statistic(kernel_digest(fusion.kernel), shapes, 7.0, 100, timer.environment)])
    (entry,) = fused(model, database).report.fusions
    assert entry.measured is not None
    assert (entry.measured["microseconds"], entry.measured["speedup"], entry.measured["source"]) == (
        7.0, None, "statistics")


def test_the_command_says_what_it_found(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write(tmp_path, CHAIN)
    monkeypatch.setattr(tuning, "find_timer", lambda: FakeTimer(times()))
    result = run("tune", model, "--dim", "batch=64", "--database", database)
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert lines[0].startswith("NVIDIA H100 80GB HBM3: 1 distinct region, ")
    assert any("20.00 µs 10.00 µs 5.00 µs fused blocks of 512, width 4, 2 vectors a thread" in line for line in lines)
    assert ("one run of the model spends 20.0 µs in these regions as ONNX Runtime runs them, 10.0 µs fused, 5.0 µs "
            "tuned") in lines
    assert lines[-1] == f"kept in {database}; `onnxfuse optimize` uses it"

    data = json.loads(run("tune", model, "--dim", "batch=64", "--database", database, "--json").output)
    assert data["measured"] == 0 and data["regions"][0]["best"] == 5.0

    report = run("optimize", model, "--dim", "batch=64", "--target", "H100", "--database", database, "--dry-run")
    assert report.exit_code == 0, report.output
    row = next(line.split() for line in report.output.splitlines() if " pointwise " in line)
    assert row[-1] == "4.00x"
    plain = run("optimize", model, "--dim", "batch=64", "--target", "H100", "--no-database", "--dry-run")
    assert "4.00x" not in plain.output


def test_an_interruption_says_how_to_go_on(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "find_timer", lambda: FakeTimer(times(), interrupt_after=2))
    result = run("tune", write(tmp_path, CHAIN), "--database", database)
    assert result.exit_code == 130
    assert result.output == (
        f"What was measured is kept in {database}; run the same command again to go on.\ninterrupted\n")


def test_the_default_database_is_beside_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write(tmp_path, CHAIN)
    monkeypatch.setattr(tuning, "find_timer", lambda: FakeTimer(times()))
    cache = tmp_path / "cache"
    assert run("tune", model, "--dim", "batch=64", ONNXFUSE_CACHE_DIR=str(cache)).exit_code == 0
    assert (cache / "measurements.sqlite").is_file()
    data = run("optimize", model, "--dim", "batch=64", "--target", "H100", "--dry-run", "--json",
               ONNXFUSE_CACHE_DIR=str(cache))
    assert json.loads(data.output)["fusions"][0]["measured"]["speedup"] == 4.0


def test_without_a_gpu_nothing_is_written(tmp_path: Path, database: Path) -> None:
    result = run("tune", write(tmp_path, CHAIN), "--database", database)
    assert result.exit_code == 1
    assert result.output.startswith(
        "error: There is no GPU here that ONNX Runtime can use: nothing can be measured.\n"
        "help: Run it on the machine that the model will run on; ONNX Runtime needs onnxruntime-gpu, NVIDIA's driver, "
        "and CUDA's libraries: pip install 'onnxfuse[cuda]'.\n")
    assert not database.exists()


def test_database_and_no_database_contradict(tmp_path: Path) -> None:
    result = run("optimize", write(tmp_path, CHAIN), "--database", tmp_path / "x", "--no-database")
    assert result.exit_code == 2
    assert "Invalid value for '--database': it contradicts --no-database." in result.output


def test_a_broken_runtime_fusion_counts(tmp_path: Path, database: Path) -> None:
    """What a region leaves of a fusion of the runtime's is added to its own time."""
    from onnxfuse.planning.costs.cost import CostModel
    from onnxfuse.provider.fusions import RuntimeFusion

    result = fused(write(tmp_path, CHAIN), False)
    both = frozenset(node for node in result.optimised.graph.nodes if node.op in ("Tanh", "Add"))
    costs = CostModel(result.optimised.ledger, result.optimised.profile, [RuntimeFusion(both, both)])
    tanh = [node for node in result.optimised.graph.nodes if node.op == "Tanh"]
    whole, left = costs.around(tanh)
    add = [node for node in result.optimised.graph.nodes if node.op == "Add"]
    assert left == costs.unfused(add)[0]
    assert whole == pytest.approx(costs.unfused([*tanh, *add])[0] - costs.unfused(tanh)[0])
    assert costs.around([*tanh, *add]) == (0.0, 0.0)


def test_plans_of_choices_round_trip(tmp_path: Path) -> None:
    (fusion,) = fused(write(tmp_path, CHAIN), False).optimised.plan.fusions
    text = fusion.kernel.plan.to_json()
    assert LaunchPlan.from_json(text).to_json() == text
    assert len({words(choice) for choice in fusion.kernel.choices}) == len(fusion.kernel.choices) > 5


def test_reading_leaves_the_database_alone(tmp_path: Path, database: Path) -> None:
    model = write(tmp_path, CHAIN)
    tuned(model, FakeTimer(times()), database)
    before = database.read_bytes()
    fused(model, database)
    kept = find_database(database)
    assert isinstance(kept, Database)
    kept.close()
    assert database.read_bytes() == before


@pytest.mark.parametrize("dtype", [np.int8, np.float16])
def test_few_numbers_may_be_a_step_away_where_they_are_quantised(dtype: type) -> None:
    """Also where DequantizeLinear gave them back as floats."""
    steps = np.random.default_rng(0).integers(-100, 100, 1000)
    scale = 1 if dtype is np.int8 else 0.03
    right = {"y": (steps * scale).astype(dtype)}

    def but(count: int, by: int) -> dict[str, np.ndarray]:
        return {"y": ((steps + by * (np.arange(1000) < count)) * scale).astype(dtype)}

    assert not disagreement(but(20, 1), right, 3, quantised=True) and disagreement(but(20, 1), right, 3)
    assert disagreement(but(21, 1), right, 3, quantised=True) and disagreement(but(1, 2), right, 3, quantised=True)


def test_ways_to_run_products_may_round_differently() -> None:
    right = {"y": np.array([1.0, 0.01, np.nan], np.float16)}
    near, far = ({"y": right["y"] + np.float16(off)} for off in (0.003, 0.02))
    gone = {"y": np.array([1.0, 0.01, 0.0], np.float16)}
    share = SCHEDULES["attention"].tolerance
    assert not disagreement(near, right, 3, share) and disagreement(near, right, 3)
    assert all(disagreement(each, right, 3, share) for each in (far, gone))
