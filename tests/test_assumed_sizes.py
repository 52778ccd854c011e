"""Sizes that nobody gave are such that the model runs, and sizes at which it cannot run are an error at once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from cli_models import parse, run
from onnx import numpy_helper

from onnxfuse.errors import ModelError
from onnxfuse.graph.agreement import unmet
from onnxfuse.graph.binding import asked_of, bound, check_sizes
from onnxfuse.measuring import make_inputs
from onnxfuse.operators import load_graph
from onnxfuse.pipeline import Options, optimise
from onnxfuse.wording import option

WEIGHTS: dict[str, tuple[tuple[int, ...], type]] = {
    "table": ((1, 77, 8), np.float32), "rows": ((77, 8), np.float32), "kernel": ((4, 1, 5, 5), np.float32),
    "dense": ((576, 10), np.float32), "square": ((8, 8), np.float32),
}

TABLE = "g (float[batch, sequence, 8] x) => (float[batch, sequence, 8] y) { a = Add(x, table)\n y = Tanh(a) }"
LOOKED_UP = """g (int64[batch, sequence] ids) => (float[n, 8] y) {
  s = Shape(ids)
  one = Constant <value = int64[1] {1}> ()
  two = Constant <value = int64[1] {2}> ()
  l = Slice(s, one, two)
  axes = Constant <value = int64[1] {0}> ()
  n0 = Squeeze(l, axes)
  zero = Constant <value = int64 {0}> ()
  step = Constant <value = int64 {1}> ()
  r = Range(zero, n0, step)
  e = Gather(rows, r)
  y = Tanh(e)
}"""
DIGITS = """g (float[batch, 1, height, width] x) => (float[batch, 10] y) {
  c = Conv <kernel_shape = [5, 5], strides = [2, 2]> (x, kernel)
  r = Relu(c)
  f = Flatten(r)
  y = MatMul(f, dense)
}"""
HEADS = """g (float[batch, features] x) => (float[batch, 3, 8] y) {
  to = Constant <value = int64[3] {0, 3, 8}> ()
  r = Reshape(x, to)
  y = Tanh(r)
}"""
WHOLE = """g (float[batch, features] x) => (float[n, 24] y) {
  to = Constant <value = int64[2] {-1, 24}> ()
  r = Reshape(x, to)
  y = Tanh(r)
}"""
PAST = """g (float[batch, past_len, 8] past, float[batch, seq_len, 8] x, float[batch, total_len, 8] mask)
    => (float[batch, total_len, 8] y) {
  a = Concat <axis = 1> (past, x)
  y = Mul(a, mask)
}"""
LONG = """g (float[batch, 1, samples] x) => (float[batch, 4, n] y) {
  y = Conv <kernel_shape = [400], strides = [160]> (x, filter)
}"""

CASES = [
    pytest.param(TABLE, {"batch": 1, "sequence": 77}, {"sequence": 78}, id="a position table"),
    pytest.param(LOOKED_UP, {"batch": 1, "sequence": 77}, {"sequence": 100}, id="a table that is looked up"),
    pytest.param(DIGITS, {"batch": 1, "height": 28, "width": 28}, {"height": 224, "width": 224}, id="a Gemm's columns"),
    pytest.param(HEADS, {"batch": 1, "features": 24}, {"features": 25}, id="a Reshape's constants"),
    pytest.param(WHOLE, {"batch": 1, "features": 120}, {"batch": 1, "features": 25}, id="a Reshape's rest"),
    pytest.param(PAST, {"batch": 1, "past_len": 128, "seq_len": 128, "total_len": 256},
                 {"past_len": 4, "seq_len": 5, "total_len": 8}, id="a mask over past and present"),
]


def model(text: str) -> onnx.ModelProto:
    made = parse(text, opset=18)
    for name, (shape, kind) in WEIGHTS.items():
        if any(name in node.input for node in made.graph.node):
            made.graph.initializer.append(numpy_helper.from_array(np.ones(shape, kind), name))
    return made


@pytest.mark.parametrize(("text", "sizes", "wrong"), CASES)
def test_assumed_sizes_are_those_that_the_model_runs_at(
        text: str, sizes: dict[str, int], wrong: dict[str, int]) -> None:
    """And those that are refused are refused by ONNX Runtime too."""
    graph, options = load_graph(model(text)), onnxruntime.SessionOptions()
    # Optimised, a look-up of a range becomes a slice, which takes what there is, and what reads it fails instead.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model(text).SerializeToString(), options, ["CPUExecutionProvider"])
    found = bound(graph, {})
    assert {name: found.sizes[name] for name in sizes} == sizes and not unmet(asked_of(graph), found.sizes)
    assert set(found.assumed) == set(sizes)
    session.run(None, make_inputs(graph, {}))
    with pytest.raises(ModelError, match="The model does not run at these sizes: ") as caught:
        check_sizes(graph, bound(graph, wrong).sizes, wrong)
    assert caught.value.place == option("dim", *(f"{name}={size}" for name, size in wrong.items()))
    with pytest.raises(Exception, match="ONNXRuntimeError"):
        session.run(None, make_inputs(graph, wrong))


@pytest.mark.parametrize(("text", "wrong", "message", "remedy"), [
    (TABLE, "sequence=78", "'Add -> a' joins axes of 78 (sequence) and 77.", "Such a size fits: --dim sequence=77."),
    (LOOKED_UP, "sequence=100", "'Gather -> e' looks up 100 (sequence) rows in a table of 77.",
     "Such a size fits: --dim sequence=77."),
    (HEADS, "features=25", "'Reshape -> r' needs 25 (features) and 24 to be equal.",
     "Such a size fits: --dim features=24."),
], ids=["table", "looked up", "heads"])
def test_sizes_at_which_the_model_fails_are_an_error_before_anything_is_written(
        tmp_path: Path, text: str, wrong: str, message: str, remedy: str) -> None:
    onnx.save(model(text), tmp_path / "m.onnx")
    for command in ("optimize", "report", "explain"):
        result = run(command, tmp_path / "m.onnx", "--dim", wrong)
        assert (result.exit_code, result.output) == (2, (
            f"error: The model does not run at these sizes: {message}\n--> --dim {wrong}\nhelp: {remedy}\n"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.onnx"]


def test_a_changed_default_says_why(tmp_path: Path) -> None:
    onnx.save(model(TABLE), tmp_path / "m.onnx")
    content = json.loads(run("report", tmp_path / "m.onnx", "--json").output)
    assert content["notes"] == [
        "Dimension 'sequence' is taken to be 77: at 128, 'Add -> a' joins axes of 128 (sequence) and 77.  Give the "
        "size that you use: --dim sequence=SIZE."]
    assert content["assumed"]["dims"] == ["batch", "sequence"]


@pytest.mark.parametrize(("text", "nearby"), [
    (TABLE, []), (TABLE.replace("Add(x, table)", "Exp(x)"), ["batch=1, sequence=32", "batch=4, sequence=512"])])
def test_a_dynamic_plan_looks_at_sizes_at_which_the_model_runs(text: str, nearby: list[str]) -> None:
    made = optimise(model(text), Options(strategy="dynamic", target="H100", verify=False, database=False))
    assert [size for space in made.plan.spaces for size in space.nearby] == nearby


def test_no_count_is_negative(tmp_path: Path) -> None:
    made = model(LONG)
    made.graph.initializer.append(numpy_helper.from_array(np.ones((4, 1, 400), np.float32), "filter"))
    onnx.save(made, tmp_path / "m.onnx")
    content = json.loads(run("report", tmp_path / "m.onnx", "--json").output)
    assert content["dims"]["samples"] >= 400
    assert min(content[name] for name in content if name.startswith(("bytes", "kernels", "flops", "nodes"))) >= 0


def test_what_nothing_would_mend_is_said(tmp_path: Path) -> None:
    """Two tables of different lengths: no sequence fits both."""
    text = TABLE.replace("y = Tanh(a)", "b = Add(x, other)\n y = Mul(a, b)")
    made = model(text)
    made.graph.initializer.append(numpy_helper.from_array(np.ones((1, 55, 8), np.float32), "other"))
    onnx.save(made, tmp_path / "m.onnx")
    (note,) = [note for note in json.loads(run("report", tmp_path / "m.onnx", "--json").output)["notes"]
               if note.startswith("The model seems not to run")]
    assert note.endswith("Give the sizes that you use with --dim.")
