"""A file whose kernels read other weights: there and back, what it says of them, and that a wrong one is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli_models import ROOT
from cli_models import run as command
from emulated import EmulatedRunner, FaultyRunner
from onnx import TensorProto, helper, numpy_helper
from rewriting_models import random_feeds, run, same_bits
from sizes_models import packed
from test_collapsing import SCALED, SHAPES, Array, refused
from weight_models import MATRIX, case, folding, fused, model_of, planned, rows

import onnxfuse
from onnxfuse.errors import ModelError
from onnxfuse.graph import from_proto, load_model
from onnxfuse.locking import read_lock, settings_of
from onnxfuse.planning.weights import collapsing
from onnxfuse.reporting import as_json, report_of, report_of_fused
from onnxfuse.rewriting import FusedNode, plan_record, read_fused, save, unfuse, weights_record
from onnxfuse.verifying import verify

OLDEST = os.environ.get("ONNXFUSE_OLDEST_PYTHON")

pytestmark = pytest.mark.usefixtures("few_ways")


TWO = rows("p = MatMul(x, w) q = Mul(p, g) a = Relu(q) b = MatMul(a, u) c = Add(b, d) y = Mul(c, h)")
TWO_SHAPES: dict[str, tuple[int, ...]] = {"w": (64, 72), "g": (72,), "u": (72, 72), "d": (72,), "h": (72,)}


def test_files_grow_by_so_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are folded as far as there is room, the first first."""
    monkeypatch.setattr(collapsing, "MOST_BYTES", 3 << 12)
    made = fused(model_of(TWO, TWO_SHAPES), tmp_path)
    assert [region.folding for region in folding(made)] == ["Mul into MatMul -> p"]
    assert set(refused(made)) == {
        "Add + Mul into MatMul -> b is not folded: folded weights would make the file more than 0 MiB larger"}


def test_what_is_not_folded_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what would be rounded anew, where that is not allowed."""
    monkeypatch.setattr(collapsing, "MOST_BYTES", 3 << 12)
    made = fused(model_of(TWO, TWO_SHAPES, given={"h": 2.0}), tmp_path, fold_weights=False)
    assert [region.folding for region in folding(made)] == ["Add + Mul into MatMul -> b"]


def test_a_file_there_and_back(tmp_path: Path) -> None:
    """Without a library it gives the original's bits; what was added goes with the last fused node."""
    model = model_of(TWO, TWO_SHAPES)
    made = fused(model, tmp_path)
    assert len(folding(made)) == 2
    save(made.model, tmp_path / "fused.onnx", source=made.loaded)
    loaded = load_model(tmp_path / "fused.onnx")
    added = {each.name for each in weights_record(loaded.proto).folded}
    assert added == {"w_folded", "u_folded", "u_folded_bias"}
    feeds = random_feeds(model, size=6)
    assert same_bits(run(loaded.proto, feeds), run(model, feeds))
    first, second = [node.name for node in read_fused(loaded.proto) if added & set(node.tensors)]
    part = unfuse(loaded.proto, [first])
    assert added <= {tensor.name for tensor in part.graph.initializer}
    assert same_bits(run(part, feeds), run(model, feeds))
    last = unfuse(part, [node.name for node in read_fused(part)])
    assert packed(last) == packed(unfuse(loaded.proto)) == packed(model)
    assert second in {node.name for node in read_fused(part)}


def test_an_optimisation_of_what_is_fused_in_part(tmp_path: Path) -> None:
    """Knows the weights of the fused nodes that are there, and leaves them where its own are taken back."""
    model = model_of(TWO, TWO_SHAPES)
    made = fused(model, tmp_path)
    (first,) = [node.name for node in read_fused(made.model) if "w_folded" in node.tensors]
    again = planned(unfuse(made.model, [first]), tmp_path)
    assert [value.name for region in folding(again) for value in region.folded] == ["w_folded_1"]
    assert {each.name for each in weights_record(again.model).folded} == {
        "w_folded", "w_folded_1", "u_folded", "u_folded_bias"}
    lost = again.without(range(len(again.regions)))
    assert {each.name for each in weights_record(lost.model).folded} == {"u_folded", "u_folded_bias"}
    onnx.checker.check_model(lost.model, full_check=True)
    assert packed(unfuse(again.model)) == packed(unfuse(lost.model)) == packed(model)
    assert verify(again, EmulatedRunner()).passed


@pytest.mark.parametrize("python", [
    sys.executable,
    pytest.param(OLDEST, marks=pytest.mark.skipif(OLDEST is None, reason="ONNXFUSE_OLDEST_PYTHON is not set")),
], ids=["newest", "oldest"])
def test_functions_have_an_operand_that_nothing_in_them_reads(python: str, tmp_path: Path) -> None:
    """And every runtime gives the original's bits all the same."""
    names = ("a bias and a layer scale", "products with biases, and what follows", "a normalisation behind")
    for name in names:
        model, stem = case(name), name.replace(" ", "_")
        made = fused(model, tmp_path)
        assert folding(made)
        onnx.save(model, tmp_path / f"{stem}.onnx")
        onnx.save(made.model, tmp_path / f"{stem}.fused.onnx")
        np.savez(tmp_path / f"{stem}.npz", **random_feeds(model, size=6))
        (tmp_path / "measurements.sqlite").unlink()
    done = subprocess.run([python, "-I", str(ROOT / "tests" / "oldest_runtime.py"), str(tmp_path)],
                          text=True, capture_output=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(names)


@pytest.mark.parametrize("initialised", [False, True])
def test_a_body_may_have_a_name_of_the_same_kind(initialised: bool, tmp_path: Path) -> None:
    """Names of new weights are unlike those in bodies of If too, which would hide them, or read what is in them."""
    model = case("a scale behind")
    model.graph.node[-1].output[0] = "read"
    made = helper.make_node("Mul" if initialised else "Relu", ["read", "w_folded"][:1 + initialised],
                            ["then" if initialised else "w_folded"])
    held = [numpy_helper.from_array(np.ones(72, np.float16), "w_folded")] * initialised
    bodies = {"then_branch": (made, held), "else_branch": (helper.make_node("Neg", ["read"], ["else"]), [])}
    result = {key: helper.make_graph([node], key, [], [helper.make_tensor_value_info(
        node.output[0], TensorProto.FLOAT16, ["M", 72])], tensors) for key, (node, tensors) in bodies.items()}
    model.graph.node.append(helper.make_node("If", ["c"], ["y"], **result))
    model.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    (region,) = folding(fused(model, tmp_path))
    assert [value.name for value in region.folded] == ["w_folded_1"]


def test_an_edited_model_keeps_what_it_reads(tmp_path: Path) -> None:
    made = fused(model_of(TWO, TWO_SHAPES), tmp_path).model
    made.graph.node.append(helper.make_node("Neg", ["w_folded"], ["negative"], name="more"))
    made.graph.output.append(helper.make_tensor_value_info("negative", TensorProto.FLOAT16, [64, 72]))
    back = unfuse(made)
    assert weights_record(back) is None
    assert {tensor.name for tensor in back.graph.initializer} == {*TWO_SHAPES, "w_folded"}


def test_nodes_that_are_taken_back_leave_no_weights(tmp_path: Path) -> None:
    made = fused(model_of(TWO, TWO_SHAPES), tmp_path)
    place = next(place for place, region in enumerate(made.regions) if region.folded)
    left = made.without([place])
    assert {each.name for each in weights_record(left.model).folded} == {"u_folded", "u_folded_bias"}
    assert "w_folded" not in {tensor.name for tensor in left.model.graph.initializer}
    none = left.without(range(len(left.regions)))
    assert weights_record(none.model) is None and packed(none.model) == packed(made.loaded.proto)


def test_layers_share_a_function(tmp_path: Path) -> None:
    """Whatever their constants are."""
    text = rows("p = MatMul(x, w) q = Mul(p, g) a = Relu(q) b = MatMul(a, u) c = Mul(b, h) y = Relu(c)",
                k=72)
    made = fused(model_of(text, {"w": (72, 72), "g": (72,), "u": (72, 72), "h": (72,)}), tmp_path)
    with_weights = [node for node in read_fused(made.model) if node.hosts]
    assert len(folding(made)) == 2 == len(with_weights) and len({node.op for node in with_weights}) == 1


def test_a_wrong_fold_is_found(tmp_path: Path) -> None:
    """A hundredth more of one channel's weights: the kernel is compared with the nodes, which read their own."""
    made = fused(model_of(TWO, TWO_SHAPES), tmp_path)
    wrong = next(tensor for tensor in made.model.graph.initializer if tensor.name == "w_folded")
    array = numpy_helper.to_array(wrong).copy()
    array[:, 31] *= np.float16(1.02)
    wrong.raw_data = array.tobytes()
    found = verify(made, EmulatedRunner())
    assert [each.node for each in found.failed] == [
        node.name for node in read_fused(made.model) if "w_folded" in node.tensors]
    assert found.whole.identical  # where no library runs it, the file is the original


class EndlessRunner(EmulatedRunner):
    """Spoils what kernels make of inputs that are not finite, by a hundredth, where that is finite."""

    def kernel(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array],
               variant: int | None) -> list[Array]:
        outputs = super().kernel(node, model, feeds, variant)
        endless = not all(np.isfinite(array).all() for array in feeds.values() if array.dtype.kind == "f")
        return [output * output.dtype.type(1.01 if endless else 1.0) for output in outputs]


def test_rows_beside_infinite_ones_are_judged(tmp_path: Path) -> None:
    """Of products that are one nothing is owed where infinity comes in, and everything else."""
    made = fused(case("products with biases, and what follows"), tmp_path)
    assert verify(made, EmulatedRunner()).passed
    assert [each.message.partition(":")[0] for each in verify(made, EndlessRunner()).failed] == [
        "output 0 of 1 on not-a-number"]


class BoundedRunner(EmulatedRunner):
    """Loses what is no number, or turns infinity round."""

    def __init__(self, *, endless: bool) -> None:
        super().__init__()
        self.endless = endless

    def kernel(self, node: FusedNode, model: onnx.ModelProto, feeds: Mapping[str, Array],
               variant: int | None) -> list[Array]:
        outputs = super().kernel(node, model, feeds, variant)
        return [np.where(np.isinf(output), -output, output) if self.endless else
                np.where(np.isnan(output), np.zeros((), output.dtype), output) for output in outputs]


@pytest.mark.parametrize("endless", [False, True])
def test_no_number_is_owed_and_infinity_of_one_sign(endless: bool, tmp_path: Path) -> None:
    """Beside a NaN, and where all weights are above zero: there the nodes give infinity, as the kernel does."""
    model = model_of(rows("p = MatMul(x, w) y = MatMul(p, u)", out=8), {**MATRIX, "u": (72, 8)})
    for tensor in model.graph.initializer:
        tensor.raw_data = np.abs(numpy_helper.to_array(tensor)).tobytes()
    made = fused(model, tmp_path)
    assert folding(made)[0].collapses and verify(made, EmulatedRunner()).passed
    (failed,) = verify(made, BoundedRunner(endless=endless)).failed
    assert "output 0 of 1 on not-a-number" in failed.message


def test_the_option(tmp_path: Path) -> None:
    """Of the command and of Python; the file keeps it, and so does a lock, which ``check`` plans by."""
    model, database = model_of(SCALED, SHAPES), tmp_path / "measurements.sqlite"
    onnx.save(model, tmp_path / "model.onnx")
    fused(model, tmp_path)
    common = ["--dim", "M=33", "--target", "H100", "--database", str(database), "--disable", "layouts",
              "--disable", "biases", "--no-verify", "--json"]
    found = {}
    for options in ([], ["--fold-weights"]):
        lock = tmp_path / f"lock{len(options)}.yaml"
        result = command("optimize", tmp_path / "model.onnx", *common, "--lock", lock, *options)
        assert result.exit_code == 0, result.output
        found[len(options)] = json.loads(result.output)["folded_weights"]
        file = onnx.load(tmp_path / "model.fused.onnx")
        assert plan_record(file).fold_weights is bool(options)
        assert ("fold_weights: true" in lock.read_text()) is bool(options)
        result = command("check", tmp_path / "model.onnx", "--lock", lock, "--database", database, "--json")
        assert result.exit_code == 0, result.output
        assert settings_of(read_lock(lock), None)["fold_weights"] is bool(options)
    assert found[0] == [] and [entry["what"] for entry in found[1]] == ["Mul into MatMul -> p"]
    made = onnxfuse.optimize(model, dims={"M": 33}, target="H100", database=database, fold_weights=True, verify=False,
                             disable=["layouts", "biases"])
    assert len(made.report.folded) == 1


def test_products_that_share_a_launch(tmp_path: Path) -> None:
    """Each reads weights of its own."""
    text = ("g (T[M,64] x) => (T[M,72] y, T[M,72] z) { p = MatMul(x, w) a = Mul(p, g) y = Relu(a) q = MatMul(x, u) "
            "b = Mul(q, h) z = Tanh(b) }")
    made = fused(model_of(text, {"w": (64, 72), "g": (72,), "u": (64, 72), "h": (72,)}), tmp_path, rows=1)
    (region,) = folding(made)
    assert region.kernel.schedule == "together" and len(region.folded) == 2
    assert {entry.what for entry in report_of(made).folded} == {"Mul into MatMul -> p", "Mul into MatMul -> q"}
    assert verify(made, EmulatedRunner()).passed and not verify(made, FaultyRunner()).passed


def test_the_record_and_the_report(tmp_path: Path) -> None:
    made = fused(model_of(TWO, TWO_SHAPES), tmp_path)
    report = report_of(made)
    assert plan_record(made.model) is None  # who writes the file notes the plan
    for found in (report, report_of_fused(from_proto(made.model), {"M": 33}, made.profile)):
        assert as_json(found)["folded_weights"] == [
            {"node": "MatMul -> p", "what": "Mul into MatMul -> p", "bytes": 64 * 72 * 2},
            {"node": "MatMul -> b", "what": "Add + Mul into MatMul -> b", "bytes": 72 * 72 * 2 + 72 * 2}]
        assert "folded into weights that kernels read, " in found.to_text()
        entry = next(entry for entry in as_json(found)["fusions"] if list(entry["operators"]) == [
            "MatMul", "Mul", "Relu"])
        assert entry["bytes_after"] == 2 * (33 * 64 + 64 * 72 + 33 * 72)
    assert "Folded into weights that kernels read" in report.to_html()


@pytest.mark.parametrize(("text", "message"), [
    (json.dumps({"version": 1, "folded": [["w"]]}), "The record that onnxfuse left in the model cannot be read: "),
    (json.dumps({"version": 9, "folded": []}), "Weights were folded by another release of onnxfuse"),
])
def test_a_damaged_record(text: str, message: str, tmp_path: Path) -> None:
    made = fused(model_of(SCALED, SHAPES), tmp_path).model
    next(entry for entry in made.metadata_props if entry.key == "onnxfuse.weights").value = text
    with pytest.raises(ModelError) as caught:
        unfuse(made)
    assert caught.value.message.startswith(message) and caught.value.place == "metadata property 'onnxfuse.weights'"
