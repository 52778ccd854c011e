"""Profiles of ONNX Runtime: read, mapped onto a model, and what the planner makes of them.

The files are what ONNX Runtime writes here, on the CPU, with the provider and the times changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from cli_models import CHAIN, parse, run, write
from conv_models import conv_model
from rewriting_models import random_feeds

from onnxfuse import api
from onnxfuse.errors import MeasurementError
from onnxfuse.graph import build_graph
from onnxfuse.graph.binding import bind
from onnxfuse.measuring.run_profile import read_run_profile
from onnxfuse.operators import infer
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.hardware import find_profile
from onnxfuse.planning.costs.traffic import Ledger, Observation
from onnxfuse.planning.observed import observe, runtime_names
from onnxfuse.provider.kernels import Biased
from onnxfuse.region import Region

Event = dict[str, Any]
RUNS = 3

BRANCHES = """
g (float[n, 64] x, bool c) => (float[n, 64] z, float[n, 64] w) {
  [first] b = Tanh(x)
  [choose] z = If <
    then_branch = t () => (float[n, 64] p) { [in_then] q = Sigmoid(b) [last_then] p = Exp(q) },
    else_branch = e () => (float[n, 64] r) { [in_else] s = Relu(b) [last_else] r = Neg(s) }
  > (c)
  trips = Constant <value = int64 {5}> ()
  go = Constant <value = bool {1}> ()
  [repeat] w = Loop <body = l (int64 i, bool k, float[n, 64] v) => (bool k2, float[n, 64] v2) {
    k2 = Identity(k) [in_loop] u = Sin(v) [last_loop] v2 = Cos(u) }> (trips, go, b)
}
"""


def events(model: onnx.ModelProto, folder: Path, feeds: dict[str, Any], optimise: bool = False) -> list[Event]:
    """What ONNX Runtime writes of three runs."""
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    if not optimise:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for _ in range(RUNS):
        session.run(None, feeds)
    found: list[Event] = json.loads(Path(session.end_profiling()).read_text())
    return found


def on_cuda(found: list[Event], dur: Callable[[Event], float] | None = None,
            kernel: Callable[[Event], float] | None = None) -> list[Event]:
    """The same events of a run on CUDA, with times by node, and with GPU kernels where they are given."""
    result = []
    for event in found:
        if event["cat"] == "Node":
            event = {**event, "args": {**event["args"], "provider": "CUDAExecutionProvider"}}
            event["dur"] = event["dur"] if dur is None else dur(event)
        result.append(event)
        if event["cat"] == "Node" and kernel is not None:
            args = {"op_name": event["args"]["op_name"], "stream": "13", "grid_x": "1", "block_x": "256"}
            for part in (0.25, 0.75):  # a node may launch several
                result.append({"cat": "Kernel", "pid": -1, "tid": -1, "dur": kernel(event) * part, "ts": event["ts"],
                               "ph": "X", "name": "elementwise", "args": args})
    return result


def written(path: Path, content: list[Event]) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def chain(tmp_path: Path) -> list[Event]:
    feeds = {"x": np.ones((2, 4096), np.float32), "w": np.ones(4096, np.float32)}
    return events(parse(CHAIN), tmp_path, feeds)


def test_a_profile_with_kernels(tmp_path: Path, chain: list[Event]) -> None:
    durations = {"Mul": 40.0, "Tanh": 12.0, "Add": 8.0, "Sigmoid": 4.0}
    path = written(tmp_path / "p.json", on_cuda(chain, kernel=lambda event: durations[event["args"]["op_name"]]))
    profile = read_run_profile(path)
    assert (profile.runs, profile.has_kernels) == (RUNS, True)
    assert set(profile.nodes) == {"Mul_0", "Tanh_1", "Add_2", "Sigmoid_3", "Mul_4"}
    node = profile.nodes["Tanh_1"]
    assert (node.op, node.provider, node.executions, node.on_gpu) == ("Tanh", "CUDAExecutionProvider", 1.0, True)
    assert node.gpu == pytest.approx(12e-6) and node.host > 0


def test_a_profile_of_the_cpu_is_refused(tmp_path: Path, chain: list[Event]) -> None:
    path = written(tmp_path / "p.json", chain)
    with pytest.raises(MeasurementError) as error:
        read_run_profile(path)
    assert str(error.value) == (
        "The profile says nothing about GPU time: no node ran on CUDAExecutionProvider, but on CPUExecutionProvider "
        f"(5 nodes).\n--> {path}\n"
        "help: Record one: set enable_profiling on the SessionOptions of a session on CUDAExecutionProvider, run the "
        "model a few times, and call session.end_profiling().")
    result = run("optimize", write(tmp_path, CHAIN), "--dry-run", "--profile", path)
    assert result.exit_code == 1 and result.output == f"error: {error.value}\n"


@pytest.mark.parametrize(("text", "message"), [
    ("[{", "The profile is no JSON, or is cut short: "),
    ("{}", "The file is no profile of ONNX Runtime: it is not a list of events."),
    ("[1]", "The file is no profile of ONNX Runtime: it is not a list of events."),
    ("[]", "The profile holds no nodes."),
    ('[{"cat": "Node", "name": "a_kernel_time", "dur": -1, "args": {}}]',
     "The profile is damaged: event 0 has no name, duration or arguments."),
    ('[{"cat": "Session"}, {"cat": "Node", "name": "a_kernel_time", "args": {}}]',
     "The profile is damaged: event 1 has no name, duration or arguments."),
    ('[{"cat": "Node", "name": "a_kernel_time", "dur": 1, "args": {"provider": "CUDAExecutionProvider"}}]',
     "The profile holds no whole run of the model."),
])
def test_what_is_no_profile_is_said(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(MeasurementError) as error:
        read_run_profile(path)
    assert error.value.message.startswith(message) and error.value.place == str(path)


def test_a_missing_profile_is_said(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match=r"The profile cannot be read: No such file or directory\."):
        read_run_profile(tmp_path / "none.json")


def planned(tmp_path: Path, profile: list[Event] | None, model: str = CHAIN, **dims: int) -> api.Result:
    path = None if profile is None else written(tmp_path / "p.json", profile)
    return api.optimize(write(tmp_path, model), dims=dims or {"batch": 64}, target="H100", verify=False,
                        database=False, run_profile=path)


def test_times_of_the_profile_are_the_time_before(tmp_path: Path, chain: list[Event]) -> None:
    result = planned(tmp_path, on_cuda(chain, kernel=lambda event: 50.0))
    (fusion,) = result.optimised.plan.fusions
    assert fusion.cost.seconds_before == pytest.approx(5 * 50e-6)
    assert fusion.cost.seconds_after == planned(tmp_path, None).optimised.plan.fusions[0].cost.seconds_after
    assert result.report.before.seconds == pytest.approx(5 * 50e-6)
    assert result.report.notes == (
        "profile: 5 of 5 nodes that launch kernels are in it by name; 0 of its 5 nodes are none of the model's (the "
        "runtime fused or renamed them)",)


def test_the_command_says_what_it_made_of_the_profile(tmp_path: Path, chain: list[Event]) -> None:
    path = written(tmp_path / "p.json", on_cuda(chain, kernel=lambda event: 50.0))
    result = run("optimize", write(tmp_path, CHAIN), "--dim", "batch=64", "--target", "H100", "--dry-run", "--profile",
                 path)
    assert result.exit_code == 0, result.output
    assert ("note: profile: 5 of 5 nodes that launch kernels are in it by name; 0 of its 5 nodes are none of the "
            "model's (the runtime fused or renamed them)") in result.output.splitlines()
    row = next(line.split() for line in result.output.splitlines() if line.startswith("GPU time, predicted"))
    assert row[3:5] == ["250", "µs"]


def test_what_takes_no_time_is_not_fused(tmp_path: Path, chain: list[Event]) -> None:
    result = planned(tmp_path, on_cuda(chain, kernel=lambda event: 0.4))
    assert result.optimised.plan.fusions == ()
    (refusal,) = [refusal for refusal in result.report.refusals if refusal.code == "no-gain"]
    assert ": 2.0 µs as the runtime runs them (5 kernels)" in refusal.message


def test_a_bias_has_its_share_of_its_convolutions_time(tmp_path: Path) -> None:
    """The profile shows both together; the report's time before is the profile's, the region's that of the bias and of
    what follows."""
    model = conv_model("c = Conv(x, w, b) y = Sigmoid(c)", kind="float")
    times = {"Conv": 100.0, "Sigmoid": 20.0}
    found = on_cuda(events(model, tmp_path, random_feeds(model, size=6)),
                    kernel=lambda event: times[event["args"]["op_name"]])
    path = written(tmp_path / "p.json", found)
    result = api.optimize(model, dims={"N": 8, "H": 66, "W": 66}, target="H100", verify=False, database=False,
                          run_profile=path, disable=["products"])
    costs, (fusion,) = result.optimised.costs, result.optimised.plan.fusions
    share = costs.bias_seconds(Biased(result.optimised.graph.values["c"], reads=True))
    assert [node.op for node in fusion.nodes] == ["Add", "Sigmoid"] and 2e-6 < share < 50e-6
    assert fusion.cost.seconds_before == pytest.approx(share + 20e-6)
    assert result.report.before.seconds == pytest.approx(120e-6)
    assert result.report.after.seconds == pytest.approx(100e-6 - share + costs.kernel_seconds(fusion))
    assert result.report.notes[0].startswith("profile: 2 of 2 nodes that launch kernels are in it by name; 0 of ")


def test_nodes_that_the_runtime_renamed_stay_predicted(tmp_path: Path, chain: list[Event]) -> None:
    renamed = [{**event, "name": event["name"].replace("Tanh_1", "fused tanh")} for event in chain]
    result = planned(tmp_path, on_cuda(renamed, kernel=lambda event: 50.0))
    predicted = planned(tmp_path, None).optimised
    tanh = next(node for node in predicted.graph.nodes if node.op == "Tanh")
    alone = CostModel(predicted.ledger, predicted.profile).group_seconds(frozenset([tanh]))
    assert result.optimised.plan.fusions[0].cost.seconds_before == pytest.approx(4 * 50e-6 + alone)
    assert result.report.notes[0] == (
        "profile: 4 of 5 nodes that launch kernels are in it by name; 1 of its 5 nodes are none of the model's (the "
        "runtime fused or renamed them)")


def test_times_of_the_host_are_no_times_of_the_gpu(tmp_path: Path, chain: list[Event]) -> None:
    """Launching a kernel that moves 32 MB takes no less than launching any other."""
    result = planned(tmp_path, on_cuda(chain, dur=lambda event: 7), batch=1024)
    cost, predicted = (each.optimised.plan.fusions[0].cost for each in (result, planned(tmp_path, None, batch=1024)))
    assert cost.seconds_before == pytest.approx(predicted.seconds_before)
    assert result.report.notes[1] == (
        "profile: its times are the host's, not the GPU's: it tells how often nodes ran, and times stay predicted; "
        "record it with CUDA_LAUNCH_BLOCKING=1 in the environment to have GPU times")


def test_times_of_a_host_that_waited_are_taken(tmp_path: Path, chain: list[Event]) -> None:
    """33 MB in, 33 MB out at 3.35 TB/s take 20 µs at least; the shortest node is what launching takes."""
    durations = iter([200, 60, 60, 60, 60] * RUNS)
    result = planned(tmp_path, on_cuda(chain, dur=lambda event: next(durations)), batch=4096)
    floor = find_profile("H100").floor_us * 1e-6
    assert result.optimised.plan.fusions[0].cost.seconds_before == pytest.approx(140e-6 + 5 * floor)
    assert len(result.report.notes) == 1


def test_another_models_profile_is_said(tmp_path: Path, chain: list[Event]) -> None:
    renamed = [{**event, "name": f"other/{event['name']}"} if event["cat"] == "Node" else event for event in chain]
    result = planned(tmp_path, on_cuda(renamed, kernel=lambda event: 50.0))
    assert result.report.notes[1] == "profile: it names no node of this model; was it recorded with another?"
    assert len(result.optimised.plan.fusions) == 1


def test_bodies_weigh_by_how_often_they_run(tmp_path: Path) -> None:
    model = parse(BRANCHES)
    feeds = {"x": np.ones((2, 64), np.float32), "c": np.array(True)}
    path = written(tmp_path / "p.json", on_cuda(events(model, tmp_path, feeds), kernel=lambda event: 2.0))
    graph = infer(build_graph(model))
    ledger, target = Ledger(graph, bind(graph, {"n": 2})), find_profile("H100")
    found = observe(read_run_profile(path).nodes, graph, model, ledger, target)
    assert found.bodies["in_loop"].executions == 5.0
    assert found.bodies["in_loop"].seconds == pytest.approx(10e-6)
    assert found.bodies["in_then"].executions == 1.0
    assert found.bodies["in_else"] == found.bodies["last_else"] == Observation(None, 0.0)
    assert found.notes[1:] == (
        "profile: else_branch of 'choose' never ran: its 2 named nodes are not worth fusing",)
    (first,) = [node for node in found.nodes if node.name == "first"]
    assert found.nodes[first] == Observation(pytest.approx(2e-6), 1.0)


def test_executions_weigh_both_sides() -> None:
    graph = infer(build_graph(parse(CHAIN)))
    sizes, target = bind(graph, {"batch": 64}), find_profile("H100")
    nodes = tuple(node for node in graph.nodes if node.op != "Constant")
    region = Region(nodes, graph.inputs, graph.outputs)
    once = CostModel(Ledger(graph, sizes), target).region(region)

    def observed(executions: float) -> Any:
        return CostModel(Ledger(graph, sizes, observed={node: Observation(None, executions) for node in nodes}), target)

    often = observed(100.0).region(region)
    assert often.executions == 100.0
    assert often.seconds_before == pytest.approx(100 * once.seconds_before)
    assert often.seconds_after == pytest.approx(100 * once.seconds_after)
    assert often.estimated_speedup == pytest.approx(once.estimated_speedup)
    never = observed(0.0).region(region)
    assert (never.executions, never.seconds_before, never.seconds_after) == (0.0, 0.0, 0.0)


def test_nodes_that_never_ran_are_not_worth_fusing() -> None:
    from onnxfuse.planning.objective import Objective

    graph = infer(build_graph(parse(CHAIN)))
    nodes = tuple(node for node in graph.nodes if node.op != "Constant")
    ledger = Ledger(graph, bind(graph, {"batch": 64}), observed={node: Observation(None, 0.0) for node in nodes})
    cost = CostModel(ledger, find_profile("H100")).region(Region(nodes, graph.inputs, graph.outputs))
    refusal = Objective().refuses(cost, 5, "a", "grow")
    assert refusal is not None
    assert (refusal.code, refusal.message) == (
        "never-ran", "5 nodes never ran in the profile: not worth fusing")


def test_names_of_the_runtime(tmp_path: Path, chain: list[Event]) -> None:
    """ONNX Runtime calls a node without a name by its operator and its place, Constant nodes left out."""
    graph = build_graph(parse(CHAIN))
    names = {event["name"].removesuffix("_kernel_time") for event in chain if event["cat"] == "Node"}
    assert names == set(runtime_names(graph).values())
