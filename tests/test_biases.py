"""Convolutions and products whose bias a fused node takes in: which, why others keep theirs, and the way back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from cli_models import ROOT
from conv_models import WEIGHTS, conv_model
from emulated import EmulatedRunner
from onnx import TensorProto, helper, numpy_helper
from rewriting_models import random_feeds, run, same_bits
from sizes_models import packed

import onnxfuse
from onnxfuse.debugging.variants import Variants
from onnxfuse.errors import ModelError
from onnxfuse.graph import from_proto, load_model
from onnxfuse.locking.gather import lock_of
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.reporting import as_json, explain, report_of, report_of_fused
from onnxfuse.rewriting import bias_record, exact_form, read_fused, save, unfuse
from onnxfuse.verifying import verify

OLDEST = os.environ.get("ONNXFUSE_OLDEST_PYTHON")
DIMS = {"N": 2, "H": 9, "W": 7}
LARGE = {"N": 32, "H": 114, "W": 114}


def sizes(model: onnx.ModelProto, dims: dict[str, int]) -> dict[str, int]:
    """Those of the sizes that the inputs have."""
    used = {size.dim_param for info in model.graph.input for size in info.type.tensor_type.shape.dim}
    return {name: size for name, size in dims.items() if name in used}


def fused(model: onnx.ModelProto, dims: dict[str, int] | None = None, **options: Any) -> Optimised:
    """A model planned for an H200, nothing compiled, whose convolutions and products stay the runtime's."""
    before = packed(model)
    made = optimise(model, Options(**{"dims": sizes(model, DIMS if dims is None else dims), "target": "H200",
                                      "verify": False, "database": False, "disable": ["products"], **options}))
    assert packed(model) == before
    assert packed(unfuse(made.model)) == before
    onnx.checker.check_model(made.model)
    return made


def apart(made: Optimised) -> list[str]:
    """What convolutions computed that gave up their bias; a fused node adds each of them."""
    record = bias_record(made.model)
    names = [] if record is None else [each.result for each in record.separated]
    inside = {value.name for region in made.regions for node in region.nodes if node.op in ("Add", "Sum")
              for value in node.outputs if value is not None}
    assert set(names) <= inside
    owners = [len(node.input) for node in made.model.graph.node if node.op_type in ("Conv", "Gemm")]
    owners += [len(node.inputs) for region in made.regions for node in region.nodes if node.op in ("Conv", "Gemm")]
    assert owners.count(2) >= len(names)
    return sorted(names)


def regions(made: Optimised) -> list[list[str]]:
    return [[node.op for node in region.nodes if node.op != "Constant"] for region in made.regions]


def kept(made: Optimised) -> dict[str, str]:
    """What is said of convolutions and products that keep their bias, by node."""
    found = [refusal.message.split(" keeps its bias: ") for refusal in made.refusals if refusal.code == "bias"]
    assert all(op in ("Conv", "Gemm") for op, _ in found)
    nodes = [refusal.node for refusal in made.refusals if refusal.code == "bias"]
    return {node: why for node, (_, why) in zip(nodes, found, strict=True)}


Z = {"inputs": "T[N, 8, H, W] x, T[N, 16, H, W] z"}
ROWS: dict[str, Any] = {"inputs": "T[N, 24] m", "outputs": "T[N, 16] y",
                        "weights": {"p": (24, 16), "t": (16, 24), "q": (16, 16), "b": (16,), "r": (1, 16)}}
SAME = "<pads = [1, 1, 1, 1]>"

TAKEN: dict[str, tuple[str, str, dict[str, Any], list[list[str]]]] = {
    "relu": ("float16", "c = Conv(x, w, b) y = Relu(c)", {}, [["Add", "Relu"]]),
    "clip": ("float16", "c = Conv(x, w, b) low = Constant <value = float16 {0}> () y = Clip(c, low)", {},
             [["Add", "Clip"]]),
    "residual": ("float16", f"c = Conv {SAME} (x, w, b) y = Add(c, z)", Z, [["Add", "Add"]]),
    "residual and relu": ("float16", f"c = Conv {SAME} (x, w, b) r = Add(z, c) y = Relu(r)", Z,
                          [["Add", "Add", "Relu"]]),
    "silu": ("float16", "c = Conv(x, w, b) g = Sigmoid(c) y = Mul(c, g)", {}, [["Add", "Sigmoid", "Mul"]]),
    "relu in float32": ("float", "c = Conv(x, w, b) y = Relu(c)", {}, [["Add", "Relu"]]),
    "residual and relu in float32": ("float", f"c = Conv {SAME} (x, w, b) r = Add(c, z) y = Relu(r)", Z,
                                     [["Add", "Add", "Relu"]]),
    "silu in float32": ("float", "c = Conv(x, w, b) g = Sigmoid(c) y = Mul(c, g)", {}, [["Add", "Sigmoid", "Mul"]]),
    "normalisation": ("float16", "c = Conv(x, w, b) n = BatchNormalization(c, s, b2, s, s) y = Relu(n)", {},
                      [["Add", "BatchNormalization", "Relu"]]),
    "depthwise": ("float16", "c = Conv <group = 16> (z, d, b) y = Relu(c)", {"inputs": "T[N, 16, H, W] z"},
                  [["Conv", "Add", "Relu"]]),
    "one dimension": ("float16", "c = Conv(x, w, b) y = Relu(c)",
                      {"inputs": "T[N, 8, H] x", "outputs": "T[N, 16, A] y",
                       "weights": {**WEIGHTS, "w": (16, 8, 3)}}, [["Add", "Relu"]]),
    "three dimensions": ("float16", "c = Conv <pads = [1, 1, 1, 1, 1, 1]> (x, w, b) y = Tanh(c)",
                         {"inputs": "T[N, 8, H, W, 5] x", "outputs": "T[N, 16, A, B, C] y",
                          "weights": {**WEIGHTS, "w": (16, 8, 3, 3, 3)}}, [["Add", "Tanh"]]),
    "through an Identity": ("float16", "i = Identity(b) c = Conv(x, w, i) y = Relu(c)", {}, [["Add", "Relu"]]),
    "weights and bias passed on": ("float16", "i = Cast <to = 10> (w) j = Cast <to = 10> (b) c = Conv(x, i, j) "
                                   "y = Relu(c)", {}, [["Add", "Relu"]]),
    "a bias of two": ("float16", "c = Conv(x, w, b) r = Relu(c) e = Conv(r, v, b) y = Relu(e)", {},
                      [["Add", "Relu"], ["Add", "Relu"]]),
    "a bias that another reads": ("float16", "c = Conv(x, w, b) y = Relu(c) q = Neg(b)",
                                  {"outputs": "T[N, 16, A, B] y, T[16] q"}, [["Add", "Relu"]]),
    "read twice": ("float16", "c = Conv(x, w, b) y = Relu(c) q = Conv(c, v)",
                   {"outputs": "T[N, 16, A, B] y, T[N, 16, A, B] q"}, [["Add", "Relu"]]),
    "given out": ("float16", "c = Conv(x, w, b) y = Relu(c)", {"outputs": "T[N, 16, A, B] y, T[N, 16, A, B] c"},
                  [["Add", "Relu"]]),
    "product": ("float", "c = Gemm(m, p, b) y = Tanh(c)", ROWS, [["Sum", "Tanh"]]),
    "product of a transposed matrix": ("float16", "c = Gemm <transB = 1, alpha = 0.5> (m, t, b) g = Sigmoid(c) "
                                       "y = Mul(c, g)", ROWS, [["Sum", "Sigmoid", "Mul"]]),
    "product with a computed bias": ("float", "e = Exp(r) c = Gemm(m, p, e) y = Relu(c)", ROWS, [["Sum", "Relu"]]),
    "products with one bias": ("float", "c = Gemm(m, p, b) d = Relu(c) e = Gemm(d, q, b) y = Relu(e)", ROWS,
                               [["Sum", "Relu"], ["Sum", "Relu"]]),
    "alone and large": ("float16", "y = Conv(x, w, b)", {}, [["Add"]]),
}


def taken(name: str) -> onnx.ModelProto:
    kind, body, more, _ = TAKEN[name]
    return conv_model(body, kind=kind, **more)


@pytest.mark.parametrize("name", TAKEN)
def test_a_fused_node_takes_the_bias(name: str) -> None:
    made = fused(taken(name), LARGE if "large" in name else None)
    assert regions(made) == TAKEN[name][3]
    assert len(apart(made)) == len(made.regions) and not kept(made)
    again = optimise(made.model, Options(target="H200", verify=False, disable=["products"]))
    assert packed(again.model) == packed(made.model)


@pytest.mark.parametrize("python", [
    sys.executable,
    pytest.param(OLDEST, marks=pytest.mark.skipif(OLDEST is None, reason="ONNXFUSE_OLDEST_PYTHON is not set")),
], ids=["newest", "oldest"])
def test_the_functions_give_the_same_bits(python: str, tmp_path: Path) -> None:
    """With the runtime's own optimisations off, where the sum is added to what the convolution wrote."""
    for name in TAKEN:
        model, stem = taken(name), name.replace(" ", "_")
        onnx.save(model, tmp_path / f"{stem}.onnx")
        onnx.save(fused(model, LARGE if "large" in name else None).model, tmp_path / f"{stem}.fused.onnx")
        np.savez(tmp_path / f"{stem}.npz", **random_feeds(model, size=6))
    done = subprocess.run([python, "-I", str(ROOT / "tests" / "oldest_runtime.py"), str(tmp_path)],
                          text=True, capture_output=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(TAKEN)


@pytest.mark.parametrize("name", TAKEN)
def test_the_runtime_folds_the_bias_back_where_no_library_is(name: str, tmp_path: Path) -> None:
    """So the fallback runs what the original runs: every convolution has its bias, and adds no more."""
    counts, results = [], []
    model = taken(name)
    made = fused(model, LARGE if "large" in name else None).model
    feeds = random_feeds(model, size=6)
    for number, each in enumerate((model, made)):
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / f"{number}.onnx")
        options.log_severity_level = 3
        session = ort.InferenceSession(each.SerializeToString(), options, providers=["CPUExecutionProvider"])
        results.append(session.run(None, feeds))
        left = onnx.load(tmp_path / f"{number}.onnx").graph.node
        counts.append(sorted((node.op_type.removeprefix("Fused"), len(node.input)) for node in left
                             if node.op_type.removeprefix("Fused") in ("Conv", "Gemm", "Add", "Sum")))
    assert counts[0] == counts[1]
    # On the CPU it converts float16; a bias that two read keeps it from laying a convolution out its own way.
    if name not in ("a bias of two", "a bias that another reads"):
        assert same_bits(*results)


@pytest.mark.parametrize("name", TAKEN)
def test_the_kernels_compute_what_the_nodes_did(name: str) -> None:
    model = taken(name)
    made = optimise(model, Options(dims=sizes(model, DIMS), target="H200", verify=False, database=False,
                                   disable=["products"], least_gain=0.0 if "large" in name else 1.2))
    assert apart(made)
    found = verify(made, EmulatedRunner())
    assert found.whole.identical and found.passed, found.summary
    assert {node.verdict for node in found.nodes} == {"passed"}


def test_a_long_products_bias_comes_last_where_the_runtime_optimises_nothing() -> None:
    """Which is another rounding; otherwise the runtime makes one Gemm of the two again, and the bits are the same."""
    model = conv_model("c = Gemm(m, p, b) y = Tanh(c)", "T[N, 700] m", "T[N, 16] y", "float",
                       {"p": (700, 16), "b": (16,)})
    made = optimise(model, Options(dims={"N": 8}, target="H200", database=False, disable=["products"]))
    assert apart(made) == ["c"] and made.verification is not None
    assert made.verification.whole.identical and made.verification.notes == (
        "Fused nodes add biases of products, which come last then: the original was spelled so for comparison.",)
    feeds = random_feeds(model)
    exact = exact_form(made.loaded.proto, made.model)
    assert same_bits(run(made.model, feeds), run(exact, feeds))
    assert np.allclose(run(exact, feeds)[0], run(model, feeds)[0], rtol=1e-5)
    first, second = (ort.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
                     for each in (model, made.model))
    assert same_bits(first, second)
    assert onnxfuse.verify(model, made.model, dims={"N": 8}).same
    found = verify(made, EmulatedRunner())
    assert found.passed and {node.verdict for node in found.nodes} == {"passed"}


KEPT: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "computed weights": ("float16", "y0 = Conv(x, w, b) y = Relu(y0)",
                         {"inputs": "T[N, 8, H, W] x, T[16, 8, 3, 3] w", "weights": {"b": (16,)}},
                         "its weights are computed, and ONNX Runtime folds a sum into constant ones alone"),
    "an input": ("float16", "y0 = Conv(x, w, b) y = Relu(y0)",
                 {"inputs": "T[N, 8, H, W] x, T[16] b", "weights": {"w": (16, 8, 3, 3)}},
                 "it is no initialiser of the model"),
    "weights computed from constants": ("float16", "i = Add(w, w) y0 = Conv(x, i, b) y = Relu(y0)", {},
                                        "its weights are computed, and ONNX Runtime folds a sum into constant ones"),
    "scaled": ("float", "y0 = Gemm <beta = 0.5> (m, p, b) y = Relu(y0)", ROWS, "it is scaled"),
    "a column": ("float", "y0 = Gemm(m, p, o) y = Relu(y0)",
                 {**ROWS, "inputs": "T[N, 24] m, T[N, 1] o"}, "it is no row that is added to all"),
    "a matrix": ("float", "y0 = Gemm(m, p, o) y = Relu(y0)",
                 {**ROWS, "inputs": "T[N, 24] m, T[N, 16] o"}, "it is no row that is added to all"),
    "computed": ("float16", "e = Exp(b) y0 = Conv(x, w, e) y = Relu(y0)", {}, "it is no initialiser of the model"),
    "alone and small": ("float16", "y0 = Conv(x, w, b) y = Identity(y0)", {},
                        "as a sum behind it, 1 node would run 1.0"),
    "given out and small": ("float16", "y0 = Conv(x, w, b)", {"outputs": "T[N, 16, A, B] y0"},
                            "no node reads what it computes, and a kernel of its own would run 1.0"),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_convolution_keeps_its_bias(name: str) -> None:
    kind, body, more, why = KEPT[name]
    model = conv_model(body, kind=kind, **more)
    made = fused(model)
    assert apart(made) == []
    ((node, said),) = kept(made).items()
    assert node == "node_y0" and said.startswith(why)
    explained = explain(made, "node_y0").node
    assert explained is not None
    assert any(refusal.message.endswith(said) for refusal in explained.refusals)


def test_a_bias_that_callers_may_replace_stays() -> None:
    model = conv_model("c = Conv(x, w, b) y = Relu(c)")
    model.graph.input.append(helper.make_tensor_value_info("b", TensorProto.FLOAT16, [16]))
    assert kept(fused(model)) == {"node_c": "it is no initialiser of the model"}


def test_convolutions_in_bodies_keep_their_biases() -> None:
    inner = conv_model("c = Conv(x, w, b) r = Relu(c)", outputs="T[N, 16, A, B] r")
    del inner.graph.input[:]
    other = helper.make_graph([helper.make_node("Conv", ["x", "w2"], ["e"])], "else",
                              [], [helper.make_tensor_value_info("e", TensorProto.FLOAT16, ["N", 16, "A", "B"])],
                              [numpy_helper.from_array(np.ones(WEIGHTS["w"], np.float16), "w2")])
    model = helper.make_model(helper.make_graph(
        [helper.make_node("If", ["flag"], ["y"], name="choice", then_branch=inner.graph, else_branch=other)], "bodies",
        [helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
         helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["N", 8, "H", "W"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, ["N", 16, "A", "B"])],
    ), opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert kept(fused(model)) == {"choice/then_branch: node_c": "it is in a body"}


@pytest.mark.parametrize("options", [
    {"disable": ["biases"]},
    {"provider_options": {"fuse_conv_bias": "1"}},
    {"provider_options": {"prefer_nhwc": "1"}},
])
def test_where_biases_are_no_matter_all_stay(options: dict[str, Any]) -> None:
    made = fused(taken("silu"), **options)
    assert apart(made) == [] and not kept(made)


def test_options_for_convolutions_leave_products_alone() -> None:
    assert apart(fused(taken("product"), provider_options={"fuse_conv_bias": "1"})) == ["c"]


def test_some_take_it_and_some_keep_it() -> None:
    """The plan is made again with those that found a place: nothing else of the model changes."""
    model = conv_model("c = Conv(x, w, b) r = Relu(c) e = Conv(r, v, b2) i = Identity(e) y = Identity(i)")
    made = fused(model)
    assert apart(made) == ["c"] and list(kept(made)) == ["node_e"]
    left = {node.output[0]: list(node.input) for node in made.model.graph.node if node.op_type == "Conv"}
    assert left["e"][1:] == ["v", "b2"] and "b2_spread" not in {each.name for each in made.model.graph.initializer}
    assert [tensor.name for tensor in made.model.graph.initializer] == ["w", "v", "b2", "b_spread"]


def test_names_that_are_taken_stay_whose_they_are() -> None:
    model = conv_model("c = Conv(x, w, b) c_without_bias = Relu(c) b_spread = Neg(c_without_bias) "
                       "y = Conv(b_spread, v)")
    made = fused(model)
    (conv,) = bias_record(made.model).separated
    assert (conv.bare, conv.spread) == ("c_without_bias_2", "b_spread_2")
    feeds = random_feeds(model, size=6)
    assert same_bits(run(made.model, feeds), run(model, feeds))


def test_with_arithmetic_on_sizes_and_one_by_one() -> None:
    """Both are put back with the last fused node."""
    model = conv_model(
        "c = Conv(x, w, b) r = Relu(c) shape = Shape(r) zero = Constant <value = int64 {0}> () "
        "n = Gather(shape, zero) front = Constant <value = int64[1] {0}> () n1 = Unsqueeze(n, front) "
        "rest = Constant <value = int64[1] {-1}> () target = Concat <axis = 0> (n1, rest) "
        "e = Conv(r, v, b2) t = Sigmoid(e) y = Reshape(t, target)", outputs="T[N, M] y")
    part = fused(model).model
    assert len(bias_record(part).separated) == 2
    names = [node.name for node in read_fused(part)]
    assert len(names) == 2
    for name in names:
        assert bias_record(part) is not None
        part = unfuse(part, [name])
    assert packed(part) == packed(model)
    assert bias_record(unfuse(fused(model).model, folded=True)) is not None


def test_bisecting_speaks_of_the_planned_form() -> None:
    model = taken("a bias of two")
    made = fused(model)
    variants = Variants(from_proto(model), from_proto(made.model))
    feeds = random_feeds(model, size=6)
    for name in variants.nodes:
        assert variants.labels(name)[0].endswith("_bias")
        part = variants.model(made.model, variants.nodes.keys() - {name})
        assert same_bits(run(part, feeds), run(model, feeds))


def test_an_edited_model_keeps_its_edits() -> None:
    """A convolution whose result something else reads now stays as it is."""
    made = fused(taken("a bias of two")).model
    first = bias_record(made).separated[0]
    made.graph.node.append(helper.make_node("Neg", [first.bare], ["negative"], name="more"))
    made.graph.output.append(helper.make_tensor_value_info("negative", TensorProto.FLOAT16, ["N", 16, "A", "B"]))
    back = unfuse(made)
    onnx.checker.check_model(back)
    assert bias_record(back) is None
    assert [len(node.input) for node in back.graph.node if node.op_type == "Conv"] == [2, 3]
    assert {tensor.name for tensor in back.graph.initializer} >= {"b", "b_spread"}
    feeds = random_feeds(back, size=6)
    assert same_bits(run(back, feeds), run(made, feeds))


@pytest.mark.parametrize("external", ["keep", "copy", "inline"])
def test_biases_in_files_stay_there(external: Any, tmp_path: Path) -> None:
    model, named = taken("relu"), taken("relu")
    onnx.save(named, tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    loaded = load_model(tmp_path / "model.onnx")
    made = optimise(loaded, Options(dims=DIMS, target="H200", verify=False, database=False, disable=["products"]))
    assert apart(made) == ["c"]
    save(made.model, tmp_path / "fused.onnx", source=loaded, external=external)
    saved = load_model(tmp_path / "fused.onnx")
    back = unfuse(saved.proto)
    save(back, tmp_path / "back.onnx", source=saved)
    feeds = random_feeds(model, size=6)
    assert same_bits(run(str(tmp_path / "back.onnx"), feeds), run(model, feeds))
    assert [(tensor.name, list(tensor.dims)) for tensor in back.graph.initializer] == [
        (tensor.name, list(tensor.dims)) for tensor in model.graph.initializer]


def test_a_lock_has_no_fusion_of_the_runtimes_for_it() -> None:
    made = fused(taken("relu"))
    lock = lock_of(made, report_of(made))
    assert [len(each.at) for each in lock.fusions] == [1] and not lock.runtime


def test_the_report_counts_what_the_nodes_as_planned_move() -> None:
    model = taken("relu")
    made = fused(model, LARGE)
    for report in (report_of(made), report_of_fused(from_proto(made.model), LARGE, made.profile)):
        data = as_json(report)
        (entry,) = data["fusions"]
        assert (entry["kernels_before"], entry["kernels_after"]) == (2, 1)
        written = 32 * 16 * 112 * 112 * 2
        assert entry["bytes_before"] - entry["bytes_after"] == 2 * written
        assert (data["nodes_before"], data["biases_taken"]) == (2, 1)
        assert data["broken"] == []  # the runtime fused nothing that is apart now


@pytest.mark.parametrize(("text", "message"), [
    ("{", "The record that onnxfuse left in the model cannot be read: JSONDecodeError("),
    (json.dumps({"version": 1, "separated": [], "initializers": "many"}),
     "The record that onnxfuse left in the model cannot be read: ValueError("),
    (json.dumps({"version": 7, "separated": [], "initializers": 1}),
     "Biases were taken apart by another release of onnxfuse (the record has version 7, this one reads 1)."),
])
def test_a_damaged_record(text: str, message: str) -> None:
    made = fused(taken("relu")).model
    next(entry for entry in made.metadata_props if entry.key == "onnxfuse.biases").value = text
    with pytest.raises(ModelError) as caught:
        unfuse(made)
    assert caught.value.message.startswith(message)
    assert caught.value.place == "metadata property 'onnxfuse.biases'"
    assert caught.value.remedy == "Fuse the original model again."
