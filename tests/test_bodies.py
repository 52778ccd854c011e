"""Bodies of If, Loop and Scan: fused by themselves, and back to what they were.

Fused models are compared with their originals bit for bit in a plain ONNX Runtime on the CPU, its optimisations off:
float32, no tolerance.  Kernels run in the emulator, against their bodies in float64, within the tolerances of
``verifying.tolerances``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from body_models import (
    BOOL,
    FLOAT,
    INT64,
    MODELS,
    WIDTH,
    chain,
    constant,
    feeds,
    loop,
    model,
    nested,
)
from body_models import node as make_node
from body_models import value as info
from cli_models import ROOT, run
from emulated import EmulatedRunner
from graph_builder import RandomGraph
from graph_strategies import graphs
from hypothesis import given, settings
from onnx import helper
from run_statistics_files import document, node_of, run_of, write_document
from test_random_graphs import run as run_values
from test_random_graphs import session

from onnxfuse import api
from onnxfuse.graph.load import from_proto
from onnxfuse.graph.order import graphs_of
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.reporting import as_json
from onnxfuse.rewriting import read_fused, unfuse
from onnxfuse.runtime.nodes import fused_nodes, names_needed
from onnxfuse.verifying import RunInputs, verify
from onnxfuse.verifying.capture import Captured, Source, capture
from onnxfuse.verifying.runs import Run
from onnxfuse.verifying.sharing import sharing

SIZES = {"n": 4096}
OLDEST = os.environ.get("ONNXFUSE_OLDEST_PYTHON")

sys.path[:0] = [str(ROOT / "benchmarks")]


def fused(made: onnx.ModelProto, **options: Any) -> Optimised:
    return optimise(made, Options(verify=False, dims=SIZES, **options))


def results(made: onnx.ModelProto) -> list[bytes]:
    """Everything that a plain ONNX Runtime gives for inputs that go every way."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [array.tobytes() for given in feeds(made) for array in session.run(None, given)]


@pytest.mark.parametrize("name", MODELS)
def test_bodies_are_fused_and_put_back(name: str) -> None:
    original = MODELS[name]()
    done = fused(original)
    found = read_fused(done.model)
    assert found and all(node.body is not None for node in found)
    assert all(len(node.replaces) >= 4 for node in found)
    onnx.checker.check_model(done.model)
    assert results(done.model) == results(original)
    again = fused(done.model)
    assert again.model.SerializeToString(deterministic=True) == done.model.SerializeToString(deterministic=True)
    back = unfuse(done.model)
    assert back.SerializeToString(deterministic=True) == original.SerializeToString(deterministic=True)


@pytest.mark.parametrize("name", MODELS)
def test_kernels_in_bodies_agree_with_their_nodes(name: str) -> None:
    """float32; the reference is the body in float64, on inputs captured from the body's last run."""
    done = optimise(MODELS[name](), Options(verify=False, dims={"n": 33}, least_gain=0.0))
    runner = EmulatedRunner()
    found = verify(done, runner)
    assert found.whole.identical and found.nodes
    assert all(result.verdict == "passed" for result in found.nodes), found.summary
    assert set(runner.runs) == {node.name for node in read_fused(done.model)}
    if name != "if":  # its branches read only what is around them
        assert any("captured in the last run of its body" in label for result in found.nodes
                   for label in result.inputs)


@pytest.mark.parametrize("python", [
    sys.executable,
    pytest.param(OLDEST, marks=pytest.mark.skipif(OLDEST is None, reason="ONNXFUSE_OLDEST_PYTHON is not set")),
], ids=["newest", "oldest"])
def test_plain_runtimes(python: str, tmp_path: Path) -> None:
    for name, make in MODELS.items():
        original = make()
        onnx.save(original, tmp_path / f"{name}.onnx")
        onnx.save(fused(original).model, tmp_path / f"{name}.fused.onnx")
        np.savez(tmp_path / f"{name}.npz", **feeds(original)[1])  # type: ignore[arg-type]
    done = subprocess.run([python, "-I", str(ROOT / "tests" / "oldest_runtime.py"), str(tmp_path)],
                          text=True, capture_output=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_the_recount_agrees(name: str, tmp_path: Path) -> None:
    """Bytes within 2%, kernels to the rounding of a half."""
    import recount

    original = MODELS[name]()
    done = fused(original)
    report = as_json(api.Result(done, api.report_of(done)).report)
    sizes = dict(done.ledger.sizes)
    before, after = recount.count(original, sizes), recount.count(done.model, sizes)
    if name == "growing":  # what comes out of its loop has a size that no file tells
        assert {"last"} >= before.unknown
    assert before.other == pytest.approx(report["bytes_before"], rel=0.02)
    assert after.other == pytest.approx(report["bytes_after"], rel=0.02)
    assert before.kernels == pytest.approx(report["kernels_before"], abs=0.5)
    assert after.kernels == pytest.approx(report["kernels_after"], abs=0.5)


def test_both_branches_may_use_one_name() -> None:
    """Names of values and nodes may be the same in two branches; fused nodes' names are unlike all others."""
    def branch(name: str) -> onnx.GraphProto:
        return helper.make_graph(chain("x", "out", "computed"), name, [], [info("out", None)])

    original = model(
        [make_node("Add", "x x", "computed"), *chain("x", "early", "computed"),
         make_node("If", "flag", "y", then_branch=branch("then"), else_branch=branch("else"))],
        [info("x", ["n", WIDTH]), info("flag", [], BOOL)], [info("y", ["n", WIDTH]), info("early", ["n", WIDTH])],
        [constant("scale", np.ones(WIDTH)), constant("half", 0.5)])
    done = fused(original)
    found = read_fused(done.model)
    assert len(found) == 3 and len({each.name for each in found}) == 3
    assert len({each.op for each in found[1:]}) == 1, "equal bodies share a function"
    assert names_needed(fused_nodes(done.model)) == len(done.model.functions)
    onnx.checker.check_model(done.model)
    assert results(done.model) == results(original)
    everything = original.SerializeToString(deterministic=True)
    assert unfuse(done.model).SerializeToString(deterministic=True) == everything
    for first in found:
        some = unfuse(done.model, [first.name])
        assert [each.name for each in read_fused(some)] == [each.name for each in found if each is not first]
        onnx.checker.check_model(some)
        assert results(some) == results(original)
        assert unfuse(some).SerializeToString(deterministic=True) == everything


def test_a_constant_that_the_main_graph_loses_later_comes_back() -> None:
    """Regions of a body are fused first, those of the main graph in a second go."""
    then = helper.make_graph(chain("x", "yes", "x"), "then", [], [info("yes", None)])
    other = helper.make_graph([make_node("Relu", "x", "no")], "else", [], [info("no", None)])
    original = model(
        [*chain("x", "early", "x"), make_node("If", "flag", "y", then_branch=then, else_branch=other)],
        [info("x", ["n", WIDTH]), info("flag", [], BOOL)], [info("y", ["n", WIDTH]), info("early", ["n", WIDTH])],
        [constant("scale", np.ones(WIDTH)), constant("half", 0.5)])
    both = fused(original)
    inner = next(each for each in read_fused(both.model) if each.body is not None)
    outer = next(each for each in read_fused(both.model) if each.body is None)
    second = fused(unfuse(both.model, [outer.name])).model
    assert {each.name for each in read_fused(second)} == {inner.name, outer.name}
    everything = original.SerializeToString(deterministic=True)
    assert unfuse(second).SerializeToString(deterministic=True) == everything
    some = unfuse(second, [inner.name])
    onnx.checker.check_model(some)
    assert results(some) == results(original)


def test_constants_that_only_bodies_read_go_with_them() -> None:
    """An initialiser and a Constant node of the main graph, and one of a body that a body in it reads."""
    inside = helper.make_graph(
        [make_node("Identity", "going", "going_on"), *chain("state", "next", "x"),
         make_node("Add", "next local", "more")],
        "body", [info("i", [], INT64), info("going", [], BOOL), info("state", None)],
        [info("going_on", [], BOOL), info("more", None)])
    then = helper.make_graph([make_node("Loop", "m _ x", "yes", body=inside)], "then", [], [info("yes", None)],
                             [constant("local", 0.25)])
    other = helper.make_graph([*chain("x", "shared", "x"), make_node("Mul", "shared third", "no")], "else", [],
                              [info("no", None)])
    original = model(
        [make_node("MatMul", "x w", "first"),
         make_node("Constant", "", "third", value=helper.make_tensor("", FLOAT, [], [1 / 3])),
         make_node("If", "flag", "y", then_branch=then, else_branch=other), make_node("MatMul", "first w", "last")],
        [info("x", ["n", WIDTH]), info("flag", [], BOOL)], [info("y", ["n", WIDTH]), info("last", ["n", WIDTH])],
        [constant("scale", np.ones(WIDTH)), constant("half", 0.5), constant("m", 2, np.int64),
         constant("w", np.eye(WIDTH))])
    original.graph.value_info.extend([info("first", ["n", WIDTH]), info("half", []), info("third", [])])
    everything = original.SerializeToString(deterministic=True)
    done = fused(original).model
    assert [tensor.name for tensor in done.graph.initializer] == ["scale", "m", "w"]
    assert [each.op_type for each in done.graph.node] == ["MatMul", "If", "MatMul"]
    assert [each.name for each in done.graph.value_info] == ["first"]
    assert "local" not in {tensor.name for _, graph in graphs_of(done) for tensor in graph.initializer}
    onnx.checker.check_model(done)
    assert results(done) == results(original)
    assert unfuse(done).SerializeToString(deterministic=True) == everything
    assert fused(done).model.SerializeToString(deterministic=True) == done.SerializeToString(deterministic=True)
    names = [each.name for each in read_fused(done)]
    assert len(names) == 2
    for name in names:
        some = unfuse(done, [name])
        assert {tensor.name for tensor in some.graph.initializer} == {"scale", "half", "m", "w"}
        onnx.checker.check_model(some)
        assert results(some) == results(original)
        assert unfuse(some).SerializeToString(deterministic=True) == everything


def test_bodies_of_the_users_functions_stay_as_they_are() -> None:
    then = helper.make_graph(chain("x", "yes", "x"), "then", [], [info("yes", None)])
    other = helper.make_graph([make_node("Relu", "x", "no")], "else", [], [info("no", None)])
    function = helper.make_function(
        "user", "Choose", ["x", "flag", "scale", "half"], ["y"],
        [make_node("If", "flag", "y", then_branch=then, else_branch=other)], [helper.make_opsetid("", 17)])
    original = helper.make_model(
        helper.make_graph(
            [make_node("Choose", "x flag scale half", "y", domain="user")], "model",
            [info("x", ["n", WIDTH]), info("flag", [], BOOL)], [info("y", ["n", WIDTH])],
            [constant("scale", np.ones(WIDTH)), constant("half", 0.5)]),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("user", 1)], functions=[function], ir_version=8)
    done = fused(original)
    assert not read_fused(done.model)
    assert done.model.SerializeToString(deterministic=True) == original.SerializeToString(deterministic=True)


def captured(made: onnx.ModelProto, given: dict[str, Any]) -> dict[str, Captured]:
    done = fused(made)
    with sharing(from_proto(made), done.model) as (plain, _):
        source = Source(done.loaded, done.graph, Run(RunInputs("mine"), given))
        taken = capture(read_fused(done.model), source, plain, {**done.ledger.sizes, "n": 5}, ["CPUExecutionProvider"])
        return {each.node.label.split(":")[0]: each for each in taken}


@pytest.mark.parametrize("trips", [0, 1, 4])
def test_inputs_are_captured_in_the_last_run_of_a_loop(trips: int) -> None:
    """float32, bit for bit ONNX Runtime's own; drawn where the body never ran."""
    made = loop(None)
    given = {"x": np.linspace(-1, 1, 5 * WIDTH, dtype=np.float32).reshape(5, WIDTH), "m": np.array(trips)}
    (taken,) = captured(made, given).values()
    state = taken.feeds["x0"]
    assert state.shape == (5, WIDTH) and state.dtype == np.float32
    if not trips:
        assert taken.how == "generated"
        return
    assert taken.how == "captured in the last run of its body"
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    before = given["x"] if trips == 1 else session.run(["last"], {**given, "m": np.array(trips - 1)})[0]
    np.testing.assert_allclose(state, before, rtol=1e-6, atol=0)  # the session fuses, the capture does not


def test_inputs_in_a_branch_that_is_not_taken_are_generated() -> None:
    given = {"x": np.ones((5, WIDTH), np.float32), "flag": np.array(True)}
    taken = captured(nested(), given)
    assert taken["If_y/then_branch/Loop_yes/body"].how == "captured in the last run of its body"
    assert taken["If_y/else_branch"].how == "captured", "it reads only what is around it"
    given["flag"] = np.array(False)
    assert captured(nested(), given)["If_y/then_branch/Loop_yes/body"].how == "generated"


def test_inputs_are_captured_in_a_loop_in_a_scan() -> None:
    """The Scan is told how many axes there are, which the Loop in its body cannot say."""
    inside = helper.make_graph(
        [make_node("Identity", "going", "going_on"), *chain("state", "next", "step")],
        "body", [info("i", [], INT64), info("going", [], BOOL), info("state", None)],
        [info("going_on", [], BOOL), info("next", None)])
    around = helper.make_graph(
        [make_node("Loop", "trips _ step", "looped", body=inside), make_node("Add", "sum step", "total"),
         make_node("ReduceSum", "looped", "out", keepdims=0)],
        "body", [info("sum", None), info("step", None)], [info("total", None), info("out", [])])
    made = model([make_node("Scan", "start xs", "last all", body=around, num_scan_inputs=1)],
                 [info("start", ["n", WIDTH]), info("xs", ["t", "n", WIDTH])],
                 [info("last", ["n", WIDTH]), info("all", ["t"])],
                 [constant("scale", np.ones(WIDTH)), constant("half", 0.5), constant("trips", 2, np.int64)])
    xs = np.linspace(-1, 1, 2 * 5 * WIDTH, dtype=np.float32).reshape(2, 5, WIDTH)
    taken = captured(made, {"start": xs[0], "xs": xs})
    (one,) = (each for label, each in taken.items() if "Loop" in label)
    assert one.how == "captured in the last run of its body"
    assert any(np.array_equal(array, xs[1]) for array in one.feeds.values())


def test_scalars_are_captured_as_arrays() -> None:
    """The last of the rows that a Scan gives out; edge inputs are made of it by writing its elements."""
    body = helper.make_graph(
        [make_node("Sin", "step", "s"), make_node("Neg", "s", "t"), make_node("Bernoulli", "t", "out")], "body",
        [info("step", None)], [info("out", None)])
    made = model([make_node("Scan", "x", "all", body=body, num_scan_inputs=1)], [info("x", ["n"])],
                 [info("all", ["n"])])
    (taken,) = captured(made, {"x": np.ones(5, np.float32)}).values()
    assert taken.how == "captured in the last run of its body"
    assert [type(array) for array in taken.feeds.values()] == [np.ndarray]
    found = verify(fused(made), EmulatedRunner())
    assert [result.verdict for result in found.nodes] == ["passed"]
    assert "not-a-number" in found.nodes[0].inputs


def test_the_report_names_the_body(tmp_path: Path) -> None:
    onnx.save(nested(), tmp_path / "m.onnx")
    done = run("optimize", tmp_path / "m.onnx", "--dim", "n=4096", "--report", tmp_path / "r.json")
    label = "If_y/then_branch/Loop_yes/body"
    assert f"in {label}, counted 2 times a run: Mul_next_1.grow-pointwise" in " ".join(done.output.split())
    entries = {entry["body"]: entry for entry in json.loads((tmp_path / "r.json").read_text())["fusions"]}
    assert entries[label]["runs"] == 2 and entries["If_y/else_branch"]["runs"] == 0.5
    assert entries[label]["replaces"][0] == "Mul_next_1"
    read = json.loads(run("report", tmp_path / "m.fused.onnx", "--dim", "n=4096", "--json").output)
    assert {entry["body"]: entry for entry in read["fusions"]} == entries
    for name in ("Add_next_3", "next_3", f"{label}: Add_next_3"):
        told = run("explain", tmp_path / "m.onnx", name, "--dim", "n=4096").output
        assert f"{label}: Add_next_3 (Add): runs in Mul_next_1.grow-pointwise: 5 nodes as one kernel" in " ".join(
            told.split())
    whole = run("explain", tmp_path / "m.fused.onnx", "Mul_next_1.grow-pointwise", "--dim", "n=4096").output
    assert "runs in Mul_next_1.grow-pointwise" in " ".join(whole.split())
    found = run("bisect", tmp_path / "m.onnx", tmp_path / "m.fused.onnx", "--dim", "n=8").output
    assert "no fusion changes the answer" in found


def test_recorded_runs_are_compared_with_predictions(tmp_path: Path) -> None:
    onnx.save(fused(nested()).model, tmp_path / "f.onnx")
    entries = [node_of(each, run_of([[64, WIDTH], [WIDTH], [64, WIDTH]], [[64, WIDTH]], 8, 5))
               for each in read_fused(onnx.load(tmp_path / "f.onnx"))]
    write_document(tmp_path / "s.json", document(*entries))
    told = json.loads(run("report", tmp_path / "f.onnx", "--profile", tmp_path / "s.json", "--json").output)
    assert {each["node"] for each in told["runs"]} == {"Mul_next_1.grow-pointwise", "Mul_shared_1.grow-pointwise"}
    assert all(0 < each["predicted_us"] < 20 and each["calls"] == 8 for each in told["runs"])


def test_a_fusion_that_changed_an_answer_is_found_in_a_body(tmp_path: Path) -> None:
    original = nested()
    onnx.save(original, tmp_path / "m.onnx")
    done = fused(original).model
    wrong = next(each for each in read_fused(done) if each.body is not None and "Loop" in each.body.label)
    function = next(entry for entry in done.functions if entry.name == wrong.op)
    tanh = next(step for step in function.node if step.op_type == "Tanh")
    tanh.op_type = "Sin"
    onnx.save(done, tmp_path / "f.onnx")
    np.savez(tmp_path / "in.npz", x=np.ones((5, WIDTH), np.float32), flag=np.array(True))
    found = run("bisect", tmp_path / "m.onnx", tmp_path / "f.onnx", "--inputs", tmp_path / "in.npz", "--json")
    assert wrong.name in found.output


def wrapped(inner: onnx.ModelProto) -> onnx.ModelProto:
    """A model that runs all of another's nodes in the body of a Loop, in a branch of an If: its outputs are stacked
    over two runs, or empty."""
    graph = inner.graph
    kinds = [each.type.tensor_type.elem_type for each in graph.output]
    results = [make_node("Identity", each.name, f"{each.name}_given") for each in graph.output]
    body = helper.make_graph(
        [*graph.node, *results, make_node("Identity", "loop_on", "loop_going")], "body",
        [info("loop_i", [], INT64), info("loop_on", [], BOOL)],
        [info("loop_going", [], BOOL),
         *(info(each.output[0], None, kind) for each, kind in zip(results, kinds, strict=True))],
        value_info=graph.value_info)
    stacked = [f"{each.name}_stacked" for each in graph.output]
    empty = [f"{each.name}_empty" for each in graph.output]
    then = helper.make_graph([helper.make_node("Loop", ["loop_trips", ""], stacked, "loop", body=body)], "then", [],
                             [info(name, None, kind) for name, kind in zip(stacked, kinds, strict=True)])
    other = helper.make_graph(
        [make_node("Constant", "", name, value=helper.make_tensor("", kind, [0], []))
         for name, kind in zip(empty, kinds, strict=True)], "else", [],
        [info(name, None, kind) for name, kind in zip(empty, kinds, strict=True)])
    outputs = [f"{each.name}_out" for each in graph.output]
    outer = helper.make_graph(
        [helper.make_node("If", ["if_flag"], outputs, "if", then_branch=then, else_branch=other)], "outer",
        [*graph.input, info("if_flag", [], BOOL)], [],
        [*graph.initializer, constant("loop_trips", 2, np.int64)])
    for name, kind in zip(outputs, kinds, strict=True):
        outer.output.add(name=name).type.tensor_type.elem_type = kind
    return helper.make_model(outer, opset_imports=inner.opset_import, ir_version=max(inner.ir_version, 8))


@settings(max_examples=25)
@given(graphs(most=7))
def test_random_graphs_in_bodies(graph: RandomGraph) -> None:
    """As they are in the main graph: bit for bit the original without kernels, and back to the same bytes."""
    original = wrapped(graph.model)
    result = optimise(original, Options(dims=graph.sizes, target="H100", least_gain=0.0, verify=False, database=False))
    assert unfuse(result.model).SerializeToString(deterministic=True) == original.SerializeToString(deterministic=True)
    names = [each.name for _, part in graphs_of(result.model) for each in part.node if each.name]
    assert len(set(names)) == len(names)
    before, after = session(original), session(result.model)
    assert (before is None) == (after is None)
    if before is None or after is None:
        return
    for flag in (True, False):
        given_arrays = {**graph.inputs, "if_flag": np.array(flag)}
        outputs = [each.name for each in original.graph.output]
        assert run_values(before, outputs, given_arrays) == run_values(after, outputs, given_arrays)
