"""The report's figures, against their definition in docs/bytes.md and against the independent recount."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from cli_models import CHAIN, ROOT, encoder, environment, parse, run
from test_spills import SHORT, Said, planned
from unmeasured import UNMEASURED

import onnxfuse
from onnxfuse.graph import from_proto
from onnxfuse.pipeline import Options, optimise
from onnxfuse.reporting import as_json, note_report, report_of, report_of_fused, text
from onnxfuse.rewriting import FUSED

ZOO = ROOT / "benchmarks" / "zoo"

FIELDS = {
    "model", "nodes_before", "nodes_after", "kernels_before", "kernels_after", "flops_before", "flops_after",
    "bytes_products", "bytes_before", "bytes_after", "peak_bytes_before", "peak_bytes_after", "candidates", "fusions",
    "refusals", "verification",
}
FUSION_FIELDS = {
    "rule", "schedule", "node", "replaces", "inputs", "outputs", "bytes_before", "bytes_after", "estimated_speedup",
    "memory_saved",
}
REFUSAL_FIELDS = {"rule", "code", "message", "remedy", "node"}


def test_the_json_report_has_the_promised_fields() -> None:
    content = as_json(onnxfuse.optimize(encoder()).report)
    assert content.keys() >= FIELDS
    assert content["fusions"] and content["refusals"]
    assert all(fusion.keys() >= FUSION_FIELDS for fusion in content["fusions"])
    assert all(refusal.keys() == REFUSAL_FIELDS for refusal in content["refusals"])
    assert json.loads(json.dumps(content))["fusions"][0]["replaces"]


def test_every_field_is_documented() -> None:
    content = as_json(onnxfuse.optimize(parse(CHAIN)).report)
    words = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    entries = (content["fusions"][0], content["refusals"][0], content["operators"][0], content["remaining"][0])
    for name in (*content, *content["roofline"], *(name for entry in entries for name in entry)):
        assert f"`{name}`" in words, name


@pytest.mark.parametrize("target", ["T4", "H200"])
def test_the_report_says_what_the_plan_knew(target: str) -> None:
    """A softmax of few long rows runs in steps, as many of them as the target has multiprocessors for."""
    text = """<ir_version: 10, opset_import: ["" : 20]> g (float[4, 1048576] x) => (float[4, 1048576] y) {
        a = Abs(x) y = Softmax(a)
    }"""
    made = optimise(onnx.parser.parse_model(text), Options(verify=False, target=target, database=False))
    (fusion,) = made.plan.fusions
    assert fusion.steps > 1
    for report in (report_of(made), report_of_fused(from_proto(made.model), {}, made.profile)):
        (entry,) = report.fusions
        assert (entry.bytes_after, entry.kernels_after) == (fusion.cost.bytes_after, fusion.steps)
        assert report.after.bytes == fusion.cost.bytes_after
        assert entry.estimated_speedup == round(fusion.cost.estimated_speedup, 4)


SHARED = """g (float[64, 512] x, float[64, 512] y, float[512] s) => (float[64, 512] a, float[64] b)
  <int64[1] last = {-1}> {
    t = Mul(x, s) a = Tanh(t) u = Mul(y, s) v = ReduceSum<keepdims = 0>(u, last) b = Sqrt(v)
}"""
"""Two kernels in one launch, each of which reads one operand."""


class Spilling(Said):
    """Slight spills, which no other way is tried for."""

    def __init__(self) -> None:
        super().__init__({"": 2})


@pytest.mark.parametrize(("text", "compiles"), [(SHARED, False), (SHARED, True), (SHORT, True)],
                         ids=["shared operand", "shared operand, spilled", "spilled"])
def test_the_report_has_times_that_only_the_plan_knows(
    text: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxfuse.pipeline.read_back", lambda *_: (Spilling(), ()))
    made = planned(text, compile=compiles)
    (fusion,) = made.plan.fusions
    assert (fusion.kernel.schedule == "together") is (text == SHARED)
    assert fusion.cost.seconds_after > made.costs.region(fusion).seconds_after
    report = report_of(made)
    note_report(made, report)
    for found in (report, report_of_fused(from_proto(made.model), {})):
        (entry,) = found.fusions
        assert entry.seconds_after == round(fusion.cost.seconds_after, 9)
        assert entry.estimated_speedup == round(fusion.cost.estimated_speedup, 4)
        assert found.after.seconds == pytest.approx(fusion.cost.seconds_after)
        assert [row.seconds_after for row in found.operators if row.operator == FUSED] == [entry.seconds_after]
        assert found.remaining[0].seconds == entry.seconds_after


def test_figures_of_a_chain_by_hand() -> None:
    """x[8, 4096] and w[4096], float32: Mul, Tanh, Add, Sigmoid, Mul with a scalar."""
    report = onnxfuse.report(parse(CHAIN), dims={"batch": 8})
    x, w, scalar = 4 * 8 * 4096, 4 * 4096, 4
    before = (x + w + x) + (x + x) + (x + x + x) + (x + x) + (x + scalar + x)
    assert report.before.bytes == before
    assert report.after.bytes == x + w + x
    assert (report.before.nodes, report.after.nodes) == (6, 1)
    assert (report.before.kernels, report.after.kernels) == (5, 1)
    assert report.before.bytes_products == report.after.bytes_products == 0
    # One operation an element for Mul, Add, Mul; eight for Tanh and Sigmoid.
    assert report.before.flops == report.after.flops == 8 * 4096 * (1 + 8 + 1 + 8 + 1)
    # Held at the worst moment: the inputs, and what a node reads and writes beside them.
    assert report.before.peak_bytes == x + w + 2 * x + scalar
    assert report.after.peak_bytes == x + w + x
    (fusion,) = report.fusions
    assert (fusion.bytes_before, fusion.bytes_after, fusion.memory_saved) == (before, x + w + x, 4 * x)
    assert fusion.inputs == ("x", "w")
    assert fusion.outputs == ("y",)
    assert fusion.operators == ("Mul", "Tanh", "Add", "Sigmoid", "Mul")


def test_operators_add_up_to_the_totals() -> None:
    """A layer of which some is fused, products among it and a group that ONNX Runtime runs as one kernel."""
    report = onnxfuse.report(encoder(layers=2), dims={"batch": 8, "sequence": 128}, target=UNMEASURED)
    content = report.to_json()
    rows = {row["operator"]: row for row in content["operators"]}
    for side in ("before", "after"):
        totals = getattr(report, side)
        assert sum(row[f"kernels_{side}"] for row in rows.values()) == totals.kernels
        assert sum(row[f"bytes_{side}"] for row in rows.values()) == totals.bytes + totals.bytes_products
        assert sum(row[f"seconds_{side}"] for row in rows.values()) == pytest.approx(totals.seconds, abs=1e-8)
    fused = rows[FUSED]
    assert fused["kernels_before"] == fused["bytes_before"] == fused["seconds_before"] == 0
    assert fused["bytes_after"] == sum(fusion.bytes_after for fusion in report.fusions)
    assert rows["MatMul"]["bytes_before"] == rows["MatMul"]["bytes_after"] > 0


def test_a_fusions_place_on_the_roofline_by_hand() -> None:
    report = onnxfuse.report(parse(CHAIN), dims={"batch": 8}, target="H200")
    (fusion,) = report.fusions
    assert fusion.flops == 8 * 4096 * (1 + 8 + 1 + 8 + 1)
    assert fusion.seconds_before / fusion.seconds_after == pytest.approx(fusion.estimated_speedup, rel=1e-3)
    assert report.roofline["bytes_per_second"] == 4.8e12 and report.roofline["flops_per_second"] == 66.9e12


def test_what_remains_says_why() -> None:
    report = onnxfuse.report(encoder(layers=2), dims={"batch": 8, "sequence": 128}, target="H100")
    seconds = [group.seconds for group in report.remaining]
    assert seconds == sorted(seconds, reverse=True)
    assert sum(seconds) == pytest.approx(report.after.seconds, rel=1e-3), "what runs as one kernel counts once"
    product = next(group for group in report.remaining if group.state == "product")
    assert product.operators[-1] in ("MatMul", "Gemm") and product.code == "product"
    assert product.reason.endswith("is a matrix product, which stays ONNX Runtime's")
    assert {group.node for group in report.remaining if group.state == "fused"} & {
        fusion.node for fusion in report.fusions}


ROWS = [
    ("tower_fp32", ["s33=8192"]),
    ("bert_base_fp16", ["s33=8", "s50=128"]),
]
"""A few, from the command line; test_zoo.py recounts every row."""


@pytest.mark.parametrize(("name", "dims"), ROWS, ids=[name for name, _ in ROWS])
def test_independent_recount_agrees(tmp_path: Path, name: str, dims: list[str]) -> None:
    """Within 2%, the tolerance that the recount itself checks; weights keep their sizes and are zeros."""
    model = skeleton(ZOO / f"{name}.onnx.xz", tmp_path / "model.onnx")
    sizes = {dim: int(size) for dim, _, size in (entry.partition("=") for entry in dims)}
    free = [value.dim_param for info in model.graph.input for value in info.type.tensor_type.shape.dim
            if value.dim_param and value.dim_param not in sizes]
    options = [part for dim in [*dims, *(f"{dim}=8" for dim in dict.fromkeys(free))] for part in ("--dim", dim)]
    done = run("optimize", tmp_path / "model.onnx", "--no-verify", "-q", *options, "--report", tmp_path / "report.json")
    assert done.exit_code == 0, done.output
    recount = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "recount.py"), str(tmp_path / "model.onnx"),
         str(tmp_path / "model.fused.onnx"), *options, "--report", str(tmp_path / "report.json")],
        env=environment(), text=True, capture_output=True, check=False,
    )
    assert recount.returncode == 0, recount.stdout + recount.stderr
    assert "unknown size" not in recount.stdout
    assert json.loads((tmp_path / "report.json").read_text())["fusions"]


def skeleton(source: Path, target: Path) -> onnx.ModelProto:
    """A model of the zoo with its large weights in a sparse file of zeros beside it."""
    with lzma.open(source) as file:
        model = onnx.load_model_from_string(file.read())
    end = 0
    for tensor in model.graph.initializer:
        if tensor.doc_string.startswith('{"hydrate'):
            count = 1
            for size in tensor.dims:
                count *= size
            length = count * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", "zeros.bin"), ("offset", str(end)), ("length", str(length))):
                tensor.external_data.add(key=key, value=value)
            end += -(-length // 4096) * 4096
    with (target.parent / "zeros.bin").open("wb") as file:
        file.truncate(end)
    onnx.save(model, target)
    return model


@pytest.mark.parametrize(("number", "said"), [
    (0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1234, "1.23 kB"), (999_600, "1 MB"), (5e9, "5 GB"), (7e13, "70 TB"),
])
def test_sizes_in_words(number: float, said: str) -> None:
    assert text.size(number) == said


@pytest.mark.parametrize(("seconds", "said"), [(2e-6, "2 µs"), (9.996e-4, "1 ms"), (0.0123, "12.3 ms"), (3.0, "3 s")])
def test_durations_in_words(seconds: float, said: str) -> None:
    assert text.duration(seconds) == said


def test_long_regions_are_cut_in_the_middle() -> None:
    (fusion,) = onnxfuse.report(parse(CHAIN), dims={"batch": 8}).fusions
    assert text.operators(fusion) == "Mul, Tanh, Add, Sigmoid, Mul"
    assert text.operators(fusion, 24) == "Mul, Tanh, ..., Mul"
