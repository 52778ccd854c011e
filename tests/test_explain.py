"""Explanations: of nodes, of what remains; their texts and JSON, and how sizes are spelled in refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli_models import CHAIN, PRODUCT, ROOT, encoder, parse, run, write
from rich.console import Console
from unmeasured import UNMEASURED

from onnxfuse.api import explain
from onnxfuse.errors import ModelError
from onnxfuse.graph.dims import symbol
from onnxfuse.lowering.binding import in_graph_terms
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.hardware import find_profile
from onnxfuse.refusal import Refusal
from onnxfuse.reporting import report_of
from onnxfuse.reporting.left_text import show_near
from onnxfuse.reporting.locality import CHAINS, LEAST, MOST
from onnxfuse.reporting.reasons import told
from onnxfuse.reporting.text import alike
from onnxfuse.rewriting import read_fused

BLOCKED = """
g (float[n, 4096] x, float[4096, 4096] w) => (float[n, 4096] y, float[4096, n] t, float[n, 4096] f) {
  a = Mul(x, x)
  b = Tanh(a)
  p = MatMul(b, w)
  q = Sigmoid(p)
  y = Mul(q, p)
  t = Transpose <perm = [1, 0]> (y)
  c = Hardmax(p)
  f = Max(c, least)
}
"""
"""Two regions around a product, and nodes that cannot be in any."""


def blocked() -> onnx.ModelProto:
    model = parse(BLOCKED)
    model.graph.initializer.append(onnx.helper.make_tensor("least", onnx.TensorProto.FLOAT, [], [0.0]))
    for node in model.graph.node:
        node.name = f"node_{node.output[0]}"
    return model


@pytest.fixture(scope="module")
def transformer() -> Optimised:
    return optimise(encoder(2), Options(verify=False, target=UNMEASURED))


# A node


def test_a_fused_node_from_every_name_it_has() -> None:
    """The name of a node, of its output, and of the fused node lead to the same region."""
    model = blocked()
    by_node, by_value = (explain(model, name, dims={"n": 512}).node for name in ("node_a", "a"))
    assert by_node is not None and by_node == by_value
    assert (by_node.state, by_node.nodes, by_node.operators) == ("fused", ("node_a",), ("Mul",))
    (home,) = by_node.fused_nodes
    assert by_node.summary == f"runs in {home}: 2 nodes as one kernel (grow-pointwise)"
    whole = explain(model, home, dims={"n": 512}).node
    assert whole is not None
    assert (whole.subject, whole.nodes, whole.fused_nodes) == (home, ("node_a", "node_b"), (home,))
    assert whole.considered[0] == by_node.considered[0]
    chosen = whole.considered[0]
    assert (chosen.verdict, chosen.rule, chosen.nodes) == ("chosen", "grow-pointwise", ("node_a", "node_b"))
    # float32[512, 4096] is 8 MiB: read and written twice before, once after
    assert (chosen.bytes_before, chosen.bytes_after) == (4 * 2**23, 2 * 2**23)
    assert chosen.seconds_saved is not None and chosen.seconds_saved > 0 and chosen.reason
    assert [(other.value, other.node, other.state) for other in whole.read_by] == [("b", "node_p", "product")]


def test_a_product_is_called_one() -> None:
    found = explain(blocked(), "node_p", dims={"n": 512}).node
    assert found is not None
    assert (found.state, found.summary, found.considered) == (
        "product", "MatMul is a matrix product, which stays ONNX Runtime's", ())
    assert [(other.node, bool(other.fused_node)) for other in found.reads] == [("node_b", True)]
    assert {other.node for other in found.read_by} == {"node_q", "node_y", "node_c"}


@pytest.mark.parametrize(("op", "words"), [
    ("Conv", "a convolution"), ("Gemm", "a matrix product"), ("LSTM", "built around matrix products")])
def test_what_products_are_called(op: str, words: str) -> None:
    from onnxfuse.graph.model import Node
    from onnxfuse.reporting.reasons import product_words

    node = Node(0, "n", op, "", {}, (), ())
    assert product_words(node) == f"{op} is {words}, which stays ONNX Runtime's"


def test_a_node_that_no_region_can_hold() -> None:
    found = explain(blocked(), "node_c", dims={"n": 512}).node
    assert found is not None
    assert (found.state, found.fused_nodes) == ("alone", ())
    assert (found.refusals[0].code, found.refusals[0].message) == ("no-lowering", "Hardmax has no lowering")


def test_a_node_without_company() -> None:
    found = explain(blocked(), "f", dims={"n": 512}).node
    assert found is not None
    assert found.refusals[0].message == "it stands alone beside Hardmax: one kernel that stays one kernel gains nothing"


def test_a_region_that_gains_too_little_says_so() -> None:
    """A node in a weighed region that was not chosen names the verdict and the figures."""
    model = parse("g (float[n, 8] x) => (float[n, 8] y) { a = Tanh(x)\n y = Neg(a) }")
    optimised = optimise(model, Options(verify=False, least_gain=50.0))
    from onnxfuse.reporting import explain as explained

    found = explained(optimised, "a").node
    assert found is not None and found.state == "alone"
    (weighed,) = found.considered
    assert (weighed.verdict, weighed.nodes) == ("no-gain", ("Tanh -> a", "Neg -> y"))
    assert weighed.seconds_before is not None and "under 50" in weighed.reason
    assert found.refusals[0].code == "no-gain"


def test_nodes_without_a_kernel() -> None:
    body = "s = Shape(x)\n z = Reshape(x, k)\n e = Exp(z)\n y = Neg(e)"
    model = parse(f"g (float[n, 64] x) => (float[m] y, float[m] z) {{ {body} }}")
    model.graph.initializer.append(onnx.helper.make_tensor("k", onnx.TensorProto.INT64, [1], [-1]))
    states = {name: explain(model, name).node for name in ("s", "z")}
    assert {name: found and found.state for name, found in states.items()} == {"s": "host", "z": "view"}


@pytest.mark.parametrize(("name", "message", "remedy"), [
    ("node_aa", "No node, value or fused node of the model is called 'node_aa'.", "Did you mean 'node_a' or "),
    ("???", "No node, value or fused node of the model is called '???'.",
     "`onnxfuse explain MODEL` lists the nodes that move the most bytes."),
    ("x", "'x' is an input of the model: no node computes it.", "Name a node that reads it, such as 'node_a'."),
    ("least", "'least' is a constant of the model: no node computes it.",
     "Name a node that reads it, such as 'node_f'."),
])
def test_names_that_are_no_nodes(name: str, message: str, remedy: str) -> None:
    with pytest.raises(ModelError) as caught:
        explain(blocked(), name)
    assert caught.value.message == message and str(caught.value.remedy).startswith(remedy)


def test_every_node_can_be_explained(transformer: Optimised) -> None:
    from onnxfuse.reporting import explain as explained

    for node in transformer.graph.nodes:
        found = explained(transformer, node.label).node
        assert found is not None and found.summary
        if found.state == "alone":
            assert found.refusals[0].message


# The whole model


def test_what_remains_adds_up(transformer: Optimised) -> None:
    """Every byte that the report counts after fusion is explained once, and every node has a reason."""
    from onnxfuse.reporting import explain as explained

    whole = explained(transformer).whole
    assert whole is not None
    report = report_of(transformer)
    assert (whole.bytes_before, whole.bytes_after) == (report.before.bytes, report.after.bytes)
    assert sum(found.bytes for found in whole.remaining) == report.after.bytes + report.after.bytes_products
    assert sum(found.bytes for found in whole.remaining if found.state == "product") == report.after.bytes_products
    assert [found.bytes for found in whole.remaining] == sorted((f.bytes for f in whole.remaining), reverse=True)
    assert all(found.reason is not None for found in whole.remaining if found.state != "fused")
    assert {name for found in whole.remaining if found.state == "fused" for name in found.nodes} == {
        placed.node for placed in transformer.rewritten.placed}


def test_layers_are_counted_together(transformer: Optimised) -> None:
    from onnxfuse.reporting import explain as explained

    whole = explained(transformer).whole
    assert whole is not None
    products = [found for found in whole.remaining if found.state == "product"]
    assert all(found.times == len(found.nodes) for found in products)
    assert any(found.times >= 2 for found in products)
    assert len(products) < sum(found.times for found in products)


@pytest.mark.parametrize(("names", "words"), [
    (["a"], "a"),
    (["/l.0/Add_1", "/l.1/Add_1"], "/l.*/Add_1 (2 nodes, from /l.0/Add_1)"),
    (["n1", "m", "n2"], "n* (2 nodes, from n1), m"),
    (["a", "b", "c", "d", "e"], "a, b, c and 2 more"),
])
def test_names_of_repeated_layers(names: list[str], words: str) -> None:
    assert alike(names) == words


# A fused file


def test_a_fused_file_is_explained_from_its_original(tmp_path: Path) -> None:
    onnx.save(blocked(), tmp_path / "m.onnx")
    run("optimize", tmp_path / "m.onnx", "-q", "--no-verify", "--no-measure", "--dim", "n=512")
    (first, *_) = read_fused(onnx.load(tmp_path / "m.fused.onnx"))
    found = explain(tmp_path / "m.fused.onnx", first.name, dims={"n": 512})
    assert found.notes == ("The file is fused already: what follows is about the original in it, planned anew.",)
    assert found.node is not None and found.node.nodes == ("node_a", "node_b")
    # what the file fused is known by its name also where the plan is another now
    growth = ["grow-pointwise", "grow-row-reduction", "grow-scan"]
    other = explain(tmp_path / "m.fused.onnx", first.name, dims={"n": 512}, disable=growth)
    assert other.node is not None
    assert (other.node.nodes, other.node.fused_nodes) == (("node_a", "node_b"), ())


# The command


def test_the_command_on_a_node(tmp_path: Path) -> None:
    onnx.save(blocked(), tmp_path / "m.onnx")
    result = run("explain", tmp_path / "m.onnx", "node_a", "--dim", "n=512", "--target", "A100")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'm.onnx'}  planned for A100") and lines[0].endswith(", n=512")
    assert lines[2] == "node_a (Mul): runs in node_a.grow-pointwise: 2 nodes as one kernel (grow-pointwise)"
    assert "Regions considered around it: " in result.output
    assert ("  chosen  grow-pointwise  Mul, Tanh\n          node_a, node_b\n"
            "          33.6 MB to 16.8 MB, 2 kernels to 1, ") in result.output
    assert "\nRead by:\n  a (8.39 MB): node_b (Tanh), in node_a.grow-pointwise\n" in result.output


def test_the_command_on_a_model(tmp_path: Path) -> None:
    onnx.save(blocked(), tmp_path / "m.onnx")
    output = run("explain", tmp_path / "m.onnx", "--dim", "n=512").output
    assert "Through device memory in one run, outside products and convolutions: " in output
    assert "not fused  1 x Hardmax\n" in output and "no-lowering: Hardmax has no lowering\n" in output
    assert "Products and convolutions: 83.9 MB in 1 kernel, ONNX Runtime's\n" in output


def test_nothing_remains_to_tell_of_a_lone_product(tmp_path: Path) -> None:
    output = run("explain", write(tmp_path, PRODUCT)).output
    assert "What remains" not in output and "1 x MatMul: float[1, 64], float[64, 64] -> float[1, 64]\n" in output


def test_the_json_of_the_command(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN)
    whole = json.loads(run("explain", path, "--json").output)
    assert set(whole) == {"model", "target", "dims", "notes", "node", "whole", "assumed"} and whole["node"] is None
    assert set(whole["whole"]) == {"bytes_before", "bytes_after", "bytes_products", "seconds_before", "seconds_after",
                                   "remaining", "left", "matches", "advice", "refusals"}
    assert set(whole["whole"]["remaining"][0]) == {
        "state", "nodes", "operators", "rule", "shapes", "times", "bytes", "kernels", "seconds", "reason"}
    node = json.loads(run("explain", path, "b", "--json").output)
    assert node["whole"] is None
    assert set(node["node"]) == {
        "subject", "nodes", "operators", "state", "fused_nodes", "runtime", "summary", "bytes", "seconds", "considered",
        "refusals", "reads", "read_by", "compiled"}
    assert set(node["node"]["considered"][0]) == {
        "verdict", "reason", "rule", "nodes", "operators", "lost_to", "bytes_before", "bytes_after", "kernels_before",
        "kernels_after", "seconds_before", "seconds_after", "seconds_saved"}


def test_an_unknown_name_on_the_command_line(tmp_path: Path) -> None:
    onnx.save(blocked(), tmp_path / "m.onnx")
    result = run("explain", tmp_path / "m.onnx", "node_pp")
    assert (result.exit_code, result.output.splitlines()[0]) == (
        2, "error: No node, value or fused node of the model is called 'node_pp'.")
    assert "help: Did you mean 'node_p'" in result.output


# Refusals


def test_named_regions_that_are_both_fused_are_no_news(transformer: Optimised) -> None:
    fused = {node.label for fusion in transformer.plan.fusions for node in fusion.view}
    hidden = set(transformer.refusals) - set(told(transformer))
    assert hidden and {refusal.code for refusal in hidden} == {"two-rules"}
    assert {refusal.node for refusal in hidden} <= fused
    assert report_of(transformer).refusals == told(transformer)


@pytest.mark.parametrize("each", [False, True])
def test_what_can_be_mended_comes_first(each: bool) -> None:
    """However often the others were refused."""
    refusals = (*(Refusal("no-gain", f"it gains {n}", f"n{n}") for n in range(3)), Refusal("growth", "it stops", "m"),
                Refusal("region-size", "it is too large", "o", remedy="raise a limit"))
    text = io.StringIO()
    show_near(refusals, 0, Console(file=text, width=100), each=each)
    places = [text.getvalue().index(code) for code in ("region-size", "help: raise a limit", "no-gain", "growth")]
    assert places == sorted(places)


def test_refusals_speak_of_sizes_as_the_graph_does(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, sequence = symbol("batch"), symbol("sequence")
    names = {"@s0": batch, "@s1": batch * sequence, "@0": sequence + 1}
    refusal = Refusal("iteration-shape", "2*@s0*@s1 elements, @s10 and @0", "n", remedy="make it @s0")
    assert in_graph_terms(refusal, names) == Refusal(
        "iteration-shape", f"2*batch*({batch * sequence}) elements, @s10 and ({sequence + 1})", "n",
        remedy="make it batch")


def test_a_schedules_refusal_reaches_the_plan_in_the_graphs_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxfuse import schedules

    refuse = Refusal("iteration-shape", "@s0 elements fit nowhere")
    monkeypatch.setattr(schedules.SCHEDULES["pointwise"], "kernel", lambda _: refuse)
    optimised = optimise(parse(CHAIN), Options(verify=False))
    assert "batch elements fit nowhere" in {refusal.message for refusal in optimised.refusals}
    assert not any("@" in refusal.message for refusal in optimised.refusals)


# Values that no cache holds


def convolved(size: int) -> onnx.ModelProto:
    """Two convolutions with what is between them, which reads and writes four images of 128 channels."""
    text = (f"g (float16[4, 128, {size}, {size}] x) => (float16[4, 128, {size}, {size}] y) {{\n"
            "  p = Conv <pads = [1, 1, 1, 1]> (x, w)\n  t = Relu(p)\n"
            "  q = Conv <pads = [1, 1, 1, 1]> (t, w)\n  y = Relu(q)\n}")
    model = parse(text)
    weights = np.full((128, 128, 3, 3), 0.01, np.float16)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    for node in model.graph.node:
        node.name = f"node_{node.output[0]}"
    return model


@pytest.mark.parametrize("target", ["H100", "A100"])
def test_why_a_chain_that_no_cache_holds_is_not_computed_in_parts(target: str) -> None:
    """It was measured; whether its layers are fused nodes or the runtime's."""
    model = convolved(512)
    (note,) = [note for note in explain(model, target=target).notes if "second-level cache" in note]
    assert "(268 MB), between convolutions, is larger" in note
    assert "none of 7 such chains that were measured gained (0.31 to 0.98 times as fast" in note
    for name in ("node_p", "node_t"):
        found = explain(model, name, target=target).node
        assert found is not None
        codes = [refusal.code for refusal in found.refusals]
        # The runtime's convolution writes what a pointwise kernel makes the chain's value of.
        assert ("locality" in codes) is (name == "node_t" or found.state == "fused")


def test_nothing_is_said_of_values_that_a_cache_holds_or_that_end_a_chain() -> None:
    model = convolved(128)
    assert not [note for note in explain(model, target="H100").notes if "cache" in note]
    last = explain(convolved(512), "node_y", target="H100").node
    assert last is not None and "locality" not in [refusal.code for refusal in last.refusals]


def test_what_was_measured_of_chains_is_what_is_said() -> None:
    """The figures are those of the file: chains whose first value is larger than an H100's cache."""
    found = json.loads((ROOT / "benchmarks" / "results" / "2026-11-27-h100-locality.json").read_text())
    gains = []
    for each in found["chains"]:
        chain, parts = each["chain"], [taken for taken in (each["images"], *each["strips"].values()) if taken]
        if 2 * chain["batch"] * chain["height"] * chain["width"] * chain["channels"][1] > find_profile("H100").l2_bytes:
            gains.append(round(each["whole"] / min(parts), 2))
    assert (len(gains), min(gains), max(gains)) == (CHAINS, LEAST, MOST)
