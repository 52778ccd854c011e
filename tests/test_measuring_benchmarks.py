"""The benchmark scripts of models and files, as far as they go without a GPU; those of single regions are in
``test_measuring_regions``."""

from __future__ import annotations

import importlib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from cli_models import apart
from click.testing import CliRunner
from test_measuring_cupti import FakeLibrary, packed

from onnxfuse.measuring import BenchResult, KernelShare, OutputError, Ratio, Side, Spread, cupti
from onnxfuse.measuring.cupti import CONCURRENT_KERNEL, MEMCPY, Activity
from onnxfuse.measuring.database import Environment, Measurement, open_database
from onnxfuse.measuring.machine import CPU, Machine
from onnxfuse.tuning import Tuned

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
common, cold_start, kernels, zoo, rows, predictions, fitting, traffic, spills, ways = map(importlib.import_module, (
    "common", "cold_start", "kernels", "zoo", "zoo_rows", "predictions", "fitting", "traffic", "spills", "ways"))
(softmax_passes, attention, claims, depthwise, int8, odd_rows, products, optimising, tune, locality, transposed,
 recurrent, region_times, processes) = map(importlib.import_module, (
    "softmax_passes", "attention", "claims", "depthwise", "int8", "odd_rows", "products", "optimising", "tune",
    "locality", "transposed", "recurrent", "region_times", "processes"))


def outcome(name: str, gpu: float, wall: float = 1.0, low: float | None = None):
    row = next(row for row in rows.all_rows() if row.name == name)
    spread = Spread(gpu, gpu, gpu, gpu, gpu, gpu, gpu, 10)
    share = KernelShare("softmax|x", 2, 0.5)
    side = Side("m.onnx", 1.0, spread, spread, 5, 0, (share,), 2**21)
    result = BenchResult("Fake GPU", "CUDAExecutionProvider", {}, False, {"x": (1,)}, side, side,
                         Ratio(wall, wall, wall), Ratio(gpu, gpu if low is None else low, gpu),
                         (OutputError("y", 1e-3),))
    return zoo.Outcome(row, None, 0.5, result)


BERT = ("bert_base_fp16:8:128", "bert_base_fp16:32:384", "bert_base_ts_fp16:8:128")


@pytest.mark.parametrize(("script", "instead"), [
    (zoo, "--report-only"), (kernels, "--dry-run"), (spills, "--dry-run"), (ways, "--dry-run"),
    (predictions, "--dry-run"), (softmax_passes, "--dry-run"), (attention, "--dry-run"),
    (depthwise, "--dry-run"), (int8, "--dry-run"), (products, "--dry-run"), (odd_rows, "--dry-run"), (cold_start, ""),
    (optimising, "--dry-run"), (claims, "--dry-run"), (tune, ""), (locality, "--dry-run"),
    (transposed, "--dry-run"), (recurrent, "--dry-run"),
], ids=lambda each: getattr(each, "__name__", ""))
def test_without_a_gpu_they_say_so_at_once(script, instead, monkeypatch):
    def never(*_, **__):
        raise AssertionError("work that nobody can use")

    for place in (script, common, region_times):
        for name in ("optimise", "prepare_all", "measure"):
            monkeypatch.setattr(place, name, never, raising=False)
    monkeypatch.setattr(common, "apart", lambda asked: common.Environment("2026-11-23", None, None, None, {}, None))
    result = apart().invoke(script.main, ["--database", "none.sqlite"] if script is tune else [])
    other = f"; {instead} does what needs none" if instead else ""
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: there is no GPU here, and this measures on one{other}\n"


def test_the_mean_is_of_thirteen_rows():
    thirteen = [row for row in rows.all_rows() if row.in_mean]
    assert len(thirteen) == 13 and len(rows.all_rows()) == 18
    assert [row.name for row in thirteen if row.family == "bert_base"] == list(BERT)
    assert len({row.family for row in thirteen}) == 11


def test_every_symbol_of_a_row_has_a_size():
    row = next(row for row in rows.all_rows() if row.name == "t5_encoder_fp16:8:256")
    assert row.dims == {"s33": 8, "s50": 256, "s6": 8}


def test_rows_are_chosen_by_how_their_names_begin():
    assert [row.name for row in rows.choose("llama_fp16,bert_base_fp16")] == [
        "bert_base_fp16:8:128", "bert_base_fp16:32:384", "llama_fp16:1:1024"]
    result = CliRunner().invoke(zoo.main, ["--rows", "lama", "--report-only"])
    assert result.exit_code == 2 and "no row begins with 'lama'; there are: bert_base_fp16:8:128, " in result.output


def test_rows_are_tuned_for_the_seconds_that_are_asked():
    asked = tune.asked(["tower=3", "llama_decode_fp16:1:", "tower_fp32:8192=4"], 30)
    assert [(row.name, seconds) for row, seconds in asked] == [
        ("tower_fp32:8192", 4.0), ("llama_decode_fp16:1:1:2048", 30)]
    assert len(tune.asked([], 5)) == 18
    for words, message in ((["tower=soon"], "'soon' of 'tower=soon' is no number of seconds"),
                           (["tour"], "no row begins with 'tour'")):
        result = CliRunner().invoke(tune.main, [*words, "--database", "none.sqlite"])
        assert result.exit_code == 2 and message in result.output


def test_rows_are_measured_first_as_optimize_does(monkeypatch):
    row = next(row for row in rows.all_rows() if row.name == "tower_fp32:8192")
    asked = []
    tuned = Tuned("GPU", "database", (), (), 1.0)
    for found, words in ((None, "nothing"), (tuned, "0 ways, 0 left")):
        monkeypatch.setattr(zoo, "measure_products", lambda *each, found=found: asked.append(each) or found)
        assert zoo.measure_first(row, 60.0, ["attention"]).startswith(f"measured tower_fp32:8192: {words}  [")
    (model, options, seconds), _ = asked
    assert len(model.proto.graph.node) > 9 and seconds == 60.0
    assert (options.dims, options.disable, options.database) == (row.dims, ["attention"], None)


def test_a_packed_database_is_packed_again_whole_or_not_at_all(tmp_path):
    kept = tmp_path / "kept.sqlite.xz"
    with common.packed(kept, keep=True) as path, open_database(path) as database:
        database.record(Environment("GPU", "1", "1", "1", "1"), Measurement("a", "b", "default", 1.0))
    before = kept.read_bytes()
    with pytest.raises(KeyError), common.packed(kept, keep=True) as path:
        path.write_bytes(b"")
        raise KeyError
    assert kept.read_bytes() == before and list(tmp_path.iterdir()) == [kept]
    with common.packed(kept) as path, open_database(path) as database:
        assert database.counts() == (1, 0)
    assert kept.read_bytes() == before


@pytest.mark.parametrize(("name", "gpu"), [("h100", "NVIDIA H100 80GB HBM3"), ("h200", "NVIDIA H200")])
def test_what_was_measured_for_published_figures_is_kept(name, gpu):
    with common.packed(common.ZOO / f"measured-{name}.sqlite.xz") as path, open_database(path) as database:
        assert {where.gpu for where in database.environments()} == {gpu}
        assert database.counts()[0] > 5000 and {row.status for _, row in database} == {"ok"}


def test_the_three_bert_rows_count_a_third_each():
    outcomes = [outcome(name, 8.0) for name in BERT] + [outcome("tower_fp32:8192", 2.0)]
    assert zoo.mean(outcomes, "gpu") == pytest.approx(4.0, rel=1e-12)
    assert zoo.mean([], "gpu") is None
    one = [outcome(BERT[0], 8.0), outcome("tower_fp32:8192", 2.0)]
    assert zoo.mean(one, "gpu") == pytest.approx(math.sqrt(16), rel=1e-12)


def test_bars():
    assert str(zoo.Bar.parse("1.3")) == "zoo, gpu time, at least 1.3"
    assert str(zoo.Bar.parse("each=1.0")) == "each, gpu time, at least 1"
    assert str(zoo.Bar.parse("wall:unet=1.5")) == "unet, wall time, at least 1.5"
    assert str(zoo.Bar.parse("wall:=1.5")) == "zoo, wall time, at least 1.5"
    result = CliRunner().invoke(zoo.main, ["--least", "fast"])
    assert result.exit_code == 2 and "write 1.3, each=1.0, llama=1.5 or wall:unet=1.5" in result.output


def test_bars_are_checked():
    outcomes = [outcome("tower_fp32:8192", 4.0, wall=1.4), outcome("unet_fp16:2", 1.0, wall=1.6, low=0.98)]

    def met(text: str) -> tuple[bool, str]:
        ((_, met, found),) = zoo.check([zoo.Bar.parse(text)], outcomes)
        return met, found

    assert met("2.0") == (True, "2.000")
    assert met("2.1") == (False, "2.000")
    assert met("each=1.0") == (False, "unet_fp16:2 1.00 (0.98 to 1.00)")
    assert met("each=0.99") == (True, "met")
    assert met("unet=1.0") == (True, "met")
    assert met("wall:unet=1.5") == (True, "met")
    assert met("wall:tower=1.5") == (False, "tower_fp32:8192 1.40 (1.40 to 1.40)")
    assert met("llama=1.5") == (False, "no such row")


def test_a_row_without_a_result_meets_no_bar():
    row = rows.all_rows()[0]
    outcomes = [outcome("tower_fp32:8192", 4.0), zoo.Outcome(row, None, error="it crashed")]
    bars = [zoo.Bar.parse(text) for text in ("1.0", "each=1", "tower=3")]
    assert [met for _, met, _ in zoo.check(bars, outcomes)] == [False, False, True]
    text, met = zoo.show(outcomes, [], 3)
    assert met and "- bert_base_fp16:8:128: it crashed" in text
    assert "softmax\\|x" in text  # a bar in a name does not end a cell


def test_no_row_is_measured_once_the_time_is_over(monkeypatch):
    monkeypatch.setattr(processes, "_Process", lambda *_, **__: pytest.fail("too late"))
    first, second = rows.all_rows()[:2]
    made = {first.name: zoo.PreparedRow(first, "one.onnx", "two.onnx", None, 1.0), second.name: "it is broken"}
    found = list(zoo._outcomes([first, second], made, {}, processes.Turns(2, 60, within=0)))
    assert {outcome.row.name: outcome.error for outcome in found} == {
        first.name: processes.OVER, second.name: "it is broken"}


def test_report_only(tmp_path):
    result = CliRunner().invoke(zoo.main, ["--rows", "tower", "--report-only", "--jobs", "1", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "| tower_fp32:8192 |" in result.output
    assert not list(tmp_path.iterdir())


def test_hydrating_is_reproducible():
    hydrate = common.hydrate()
    one, same, other = (hydrate.hydrate(common.ZOO / "tower_fp32.onnx.xz", seed) for seed in (0, 0, 1))
    assert one == same and one != other
    onnx.checker.check_model(one)
    assert not any("hydrate" in tensor.doc_string for tensor in one.graph.initializer)


def test_quantised_models_are_near_the_floats():
    """Both inputs of each product with a constant weight are integers, and what else there was stays."""
    quantising = importlib.import_module("quantising")
    text = """<ir_version: 9, opset_import: ["": 19]> g (float16[5,32] x) => (float16[5,8] y)
              { h = Relu(x) a = MatMul(h, w) b = Gemm<transB=1>(a, v) c = MatMul(h, u) y = Add(b, c) }"""
    model = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(random.standard_normal(shape).astype(np.float16), name)
        for name, shape in (("w", (32, 16)), ("v", (8, 16)), ("u", (32, 8))))
    feeds = {"x": random.standard_normal((5, 32)).astype(np.float16)}
    made = quantising.quantised(model, feeds)
    onnx.checker.check_model(made, full_check=True)
    assert [node.op_type for node in made.graph.node].count("QuantizeLinear") == 2  # h is read by two
    assert [node.op_type for node in made.graph.node].count("DequantizeLinear") == 5
    assert not {"w", "v", "u"} & {tensor.name for tensor in made.graph.initializer}
    right, found = (onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, feeds)[0].astype(np.float32) for each in (model, made))
    assert 0 < np.abs(found - right).max() < 0.03 * np.abs(right).max()


def test_feeds_have_the_sizes_of_the_row():
    row = json.loads((common.ZOO / "zoo.json").read_text())["t5_encoder_fp16"]
    made = common.hydrate().feeds(row, (8, 256))
    assert {name: (array.shape, array.dtype) for name, array in made.items()} == {
        "input_ids": ((8, 256), np.int64), "attention_mask": ((8, 256), np.int64)}
    assert made["input_ids"].max() < 900 and (made["attention_mask"] == 1).all()


def test_the_formula_for_single_kernels():
    """Microseconds: 1.5 + 3.6e9 bytes / (0.9 x 4e12 bytes a second) is 1001.5."""
    assert kernels.allowed(3_600_000_000, 4e12) == pytest.approx(1001.5, rel=1e-12)
    assert kernels.Measured("gelu", "float16", 1, 1, 1.5, 1.6, 1).passes
    assert not kernels.Measured("gelu", "float16", 1, 1, 1.7, 1.6, 1).passes
    assert not kernels.Measured("gelu", "float16", 1, 1, 1.5, 1.6, 2).passes


def test_kernels_are_counted_by_run():
    found = [Activity(CONCURRENT_KERNEL, "k", 0, nanoseconds) for nanoseconds in (1000, 2000, 3000, 4000, 5000, 60000)]
    copy = Activity(MEMCPY, "copy", 0, 999999)
    assert kernels.per_run([*found[:5], copy], 5) == (3.0, 1)
    assert kernels.per_run(found, 3) == (7.0, 2)
    with pytest.raises(RuntimeError, match="6 kernels were recorded in 4 runs"):
        kernels.per_run(found, 4)


@pytest.mark.parametrize("case", kernels.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_each_case_becomes_one_fused_node_of_the_size_aimed_at(case, dtype, tmp_path):
    n = kernels.rows_for(case, dtype, 16)
    path, traffic = kernels.fuse(case, dtype, n, tmp_path, "H200")
    assert path.is_file()
    assert abs(traffic / 16e6 - 1) < 0.05


def test_a_kernel_is_timed_on_sets_of_inputs_in_turn(tmp_path, monkeypatch):
    """A played GPU whose L2 is as large as the input: four sets, 24 runs of a kernel of 7 µs."""

    class FakeGpu:
        l2_bytes = 64 * 4096 * 2

        def synchronise(self) -> None:
            pass

    times = [packed(CONCURRENT_KERNEL, 10_000 * run, 10_000 * run + 7000, "k") for run in range(24)]
    library = cupti.Cupti(FakeLibrary([times[:4], times]))
    monkeypatch.setattr("onnxfuse.measuring.cupti.cupti", lambda: library)
    bound = []
    real = kernels.Runner.bind
    monkeypatch.setattr(kernels.Runner, "bind", lambda *arguments: bound.append(arguments[1]) or real(*arguments))
    path, _ = kernels.fuse(next(case for case in kernels.CASES if case.name == "gelu"), "float16", 64, tmp_path, None)
    gpu = FakeGpu()
    assert kernels.time_alone(path, 64, Machine("Fake GPU", CPU, "cpu", 0, gpu), gpu) == (7.0, 1)
    assert [inputs["x"].shape for inputs in bound] == [(64, 4096)] * 4


def test_cold_start_allowances():
    creations = {"plain": [1.0, 1.2, 9.0], "empty cache": [11.0], "warm cache": [1.6], "embedded": [1.7]}
    one = cold_start.ColdStart("tower", 1, {way: [cold_start.Creation(seconds) for seconds in times]
                                            for way, times in creations.items()})
    assert one.more("warm cache") == pytest.approx(0.4)
    assert one.passes
    one.creations["embedded"][0] = cold_start.Creation(1.8)
    assert not one.passes
    assert "| tower |" in cold_start.show([one], []) and "FAIL" in cold_start.show([one], [])


def test_results_are_named_by_date_gpu_and_benchmark(tmp_path):
    where = common.Environment("2026-01-02", "NVIDIA H200", "580.1", "13.0", {"onnx": "1.23"}, "abc")
    path = common.write_results(tmp_path, "cold-start", where, {"rows": [1]}, "| a |")
    assert path.name == "2026-01-02-h200-cold-start.md"
    assert path.read_text() == (
        "# Cold start\n\n2026-01-02, NVIDIA H200, driver 580.1, CUDA 13.0  \nonnx 1.23, commit abc  \n\n| a |\n"
    )
    assert json.loads(path.with_suffix(".json").read_text())["rows"] == [1]


def test_a_table_is_aligned():
    assert common.table(["row", "ms"], [["a", "1.5"], ["long", "10"]]) == (
        "| row  |  ms |\n|:-----|----:|\n| a    | 1.5 |\n| long |  10 |")


# ---- Predicted against measured. ----


def region(name: str = "k", grid=(8, 1, 1), predicted: float = 10.0, **given):
    """A fused node of one kernel that moves 12 MB."""
    values = {"reads": 8_000_000, "writes": 4_000_000, "scratch": 0, "flops": 0, "kernels": 1, "executions": 1.0,
              "rule": "r", "schedule": "rows"} | given
    return predictions.Region("node", launches=((name, grid),), names=(name, f"{name}_plain"), predicted=predicted,
                              **values)


def planned(*regions):
    return predictions.Predicted(next(row for row in rows.all_rows() if row.model == "tower_fp32"), "a", "b", "H200",
                                 regions)


def lap(*kernels) -> list[Activity]:
    return [Activity(CONCURRENT_KERNEL, name, 0, nanoseconds, grid) for name, grid, nanoseconds in kernels]


def test_launches_are_told_apart_by_kernel_and_grid():
    """Microseconds: medians over the laps of each launch."""
    small, large = ("k", (8, 1, 1)), ("k", (16, 1, 1))
    laps = [[*lap((*small, 1000), (*large, 9000), (*small, 3000)), Activity(MEMCPY, "copy", 0, 7)],
            lap((*small, 1200), (*large, 9000), (*small, 3000)), lap((*small, 5000), (*large, 8000), (*small, 2000))]
    assert predictions.seen(laps) == {small: [1.2, 3.0], large: [9.0]}


def test_nodes_of_one_kernel_and_grid_share_the_mean_of_its_times():
    made = planned(region(predicted=2.0), region(predicted=2.0), region(grid=(16, 1, 1), predicted=20.0))
    found = predictions.compare(made, {("k", (8, 1, 1)): [1.0, 3.0], ("k", (16, 1, 1)): [9.0]})
    assert [one.measured for one in found] == [2.0, 2.0, 9.0]
    assert [one.near for one in found] == [True, True, False] and predictions.share(found) == pytest.approx(2 / 3)
    text = predictions.show(found, {}, 5)
    assert "Within 25% of measured: 66.7% of 3 regions; 50.0% where nodes of one kernel and size count once." in text
    assert "| tower_fp32:8192 node |     rows |     1 | 12.00 |   0.0 |       1 |        20.00 |        9.00 |" in text


def test_a_kernel_that_did_not_run_as_planned_is_said():
    found = predictions.compare(planned(region()), {("k", (4, 1, 1)): [6.0]})
    assert (found[0].measured, found[0].note) == (6.0, "k ran with grid 4x1x1 instead of (8, 1, 1)")
    found = predictions.compare(planned(region()), {("k_plain", (8, 1, 1)): [6.0]})
    assert (found[0].measured, found[0].note) == (None, "k was not launched with grid (8, 1, 1), but k_plain")
    assert predictions.share(found) == 0
    found = predictions.compare(planned(region(grid=None)), {("k", (4, 1, 1)): [6.0], ("k", (2, 1, 1)): [2.0]})
    assert (found[0].measured, found[0].note) == (4.0, "")


def test_predictions_of_a_real_row_and_back_from_json(tmp_path):
    """Four of the tower's regions are one kernel, of 8192 x 1024 floats read twice, two biases, and as much written;
    the fifth is the last product's bias with what follows it."""
    (made,) = predictions.predict([next(row for row in rows.all_rows() if row.model == "tower_fp32")], str(tmp_path),
                                  "B200")
    assert made.target == "B200" and len(made.regions) == 5
    made = replace(made, regions=[one for one in made.regions if one.bytes > 65536])
    assert {(one.bytes, len(one.launches)) for one in made.regions} == {(3 * 8192 * 1024 * 4 + 2 * 4096, 1)}
    ((name, grid),) = made.regions[0].launches
    assert all(name in one.names and one.predicted > 10 for one in made.regions)
    compared = predictions.compare(made, {(name, grid): [25.0] * 4})
    path = tmp_path / "p.json"
    path.write_text(json.dumps(predictions._content(compared, {}, made.target)))
    target, again = predictions.from_json(path)
    assert target == "B200" and [one.region.launches for one in again] == [one.region.launches for one in compared]
    assert [one.measured for one in again] == [25.0] * 4
    result = CliRunner().invoke(predictions.main, ["--from", str(path), "--fit", "--least", "1.1"])
    assert result.exit_code == 1 and "## Fit for B200" in result.output
    result = CliRunner().invoke(predictions.main, ["--from", __file__])
    assert result.exit_code == 2 and "holds no predictions" in result.output


def test_a_dry_run_of_predictions(tmp_path):
    arguments = ["--rows", "tower", "--dry-run", "--jobs", "1", "--target", "H200", "--out", str(tmp_path)]
    result = CliRunner().invoke(predictions.main, arguments)
    assert result.exit_code == 0, result.output
    assert "tower_fp32:8192 node" in result.output and not list(tmp_path.iterdir())


def test_the_fit_finds_the_constants_that_made_the_times():
    """float64, to 2% of each constant, from exact times; to 10% with one time in ten three times too long."""
    profile = fitting.resolve_profile("H200").model_copy(update={"floor_us": 1.2, "l2_gain": 3.5})
    rng = np.random.default_rng(0)
    regions = [region(schedule=schedule, reads=int(size), writes=int(size / 2))
               for size in np.geomspace(1e4, 2e9, 40) for schedule in ("rows", "tiled")]
    true = {"rows": 0.8, "tiled": 0.6}
    times = np.array([1e6 * fitting.seconds(one, profile, true[one.schedule]) for one in regions])
    start = fitting.resolve_profile("H200")
    for measured, within in ((times, 0.02), (times * np.where(rng.random(len(times)) < 0.1, 3, 1), 0.1)):
        found, predicted = fitting.fit(regions, measured, np.ones(len(times)), start)
        wanted = {"floor_us": 1.2, "l2_gain": 3.5, "efficiency rows": 0.8, "efficiency tiled": 0.6}
        assert found == {name: pytest.approx(value, rel=within) for name, value in wanted.items()}
        assert np.median(np.abs(predicted / times - 1)) < within
    own, _ = fitting.fit(regions, times, np.ones(len(times)), start, floors=True)
    assert own["floor_us rows"] == pytest.approx(1.2, rel=0.02) == own["floor_us tiled"]


# ---- Traffic. ----

DETAILS = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Grid Size","Metric Name","Metric Unit","Metric Value"
"0","7","k","(8, 1, 1)","dram__bytes_read.sum","byte","8,100,000"
"0","7","k","(8, 1, 1)","dram__bytes_write.sum","byte","3,900,000"
"1","7","_Z3addIfEvPT_S1_i","(2, 1, 1)","dram__bytes_read.sum","byte","1,000,000"
"1","7","_Z3addIfEvPT_S1_i","(2, 1, 1)","dram__bytes_write.sum","byte","0"
"2","7","sm90_xmma_gemm","(2, 1, 1)","dram__bytes_read.sum","byte","5,000"
"2","7","sm90_xmma_gemm","(2, 1, 1)","dram__bytes_write.sum","byte","5,000"
"""
RAW = """"ID","Kernel Name","Grid Size","dram__bytes_read.sum","dram__bytes_write.sum"
"","","","byte","byte"
"0","k","(8, 1, 1)","8,100,000","3,900,000"
"""


def test_counters_are_read_from_both_forms_of_table():
    assert traffic.parse(DETAILS)[0] == traffic.Profiled("k", (8, 1, 1), 8_100_000, 3_900_000)
    assert [kernel.name for kernel in traffic.parse(DETAILS)] == ["k", "_Z3addIfEvPT_S1_i", "sm90_xmma_gemm"]
    assert traffic.parse(RAW) == traffic.parse(DETAILS)[:1]
    assert traffic.parse("==ERROR== no permission") == []


def test_the_count_beside_the_counters():
    """12.0 MB counted and moved by the fused kernel; 13.0 MB moved and 12.5 MB counted outside products."""
    one = traffic.compare(planned(region()), 12_500_000, traffic.parse(DETAILS), 1 << 20)
    assert one.fused == (traffic.Counted("node", "rows", 1, 12_000_000, 8_100_000, 3_900_000),)
    assert one.other == {"add<float>": 1_000_000} and one.products == 10_000
    assert (one.fused_ratio, one.ratio) == (1.0, pytest.approx(12.5 / 13)) and one.agrees
    assert "0.962 of what was moved: agrees within 10%" in traffic.counters_text(one)
    off = traffic.compare(planned(region(reads=4_000_000)), 12_500_000, traffic.parse(DETAILS), 1 << 20)
    assert not off.agrees
    gone = traffic.compare(planned(region(name="other")), 12_500_000, traffic.parse(DETAILS), 1 << 20)
    assert gone.missing == ("node: other",) and not gone.agrees


def test_rows_of_any_sizes():
    assert traffic.row_of("bert_base_fp16:64:512").dims == {"s33": 64, "s50": 512, "s6": 64}
    result = CliRunner().invoke(traffic.main, ["--counters", "bert:8", "--dry-run"])
    assert result.exit_code == 2 and "no model is called 'bert'; there are: bert_base_fp16, " in result.output
    result = CliRunner().invoke(traffic.main, ["--counters", "bert_base_fp16:8", "--dry-run"])
    assert result.exit_code == 2
    assert "'bert_base_fp16:8' must have 2 sizes, as bert_base_fp16:8:128" in " ".join(result.output.split())


def test_a_toolkit_s_tool_that_is_missing_is_said(monkeypatch):
    for name in ("PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, "")
    result = CliRunner().invoke(traffic.main, ["--counters", "tower_fp32:8"])
    assert result.exit_code == 1
    assert "ncu was not found; put its folder on PATH, or set CUDA_HOME to the toolkit's" in result.output


def once(function):
    """What the first call gives, for all."""
    found = []

    def call(*given):
        if not found:
            found.append(function(*given))
        return found[0]

    return call


def test_the_share_that_is_left(tmp_path, monkeypatch):
    """Against two bars; what is counted is the same."""
    monkeypatch.setattr(traffic, "prepare_all", once(traffic.prepare_all))
    arguments = ["--rows", "tower", "--dry-run", "--jobs", "1", "--target", "A100", "--out", str(tmp_path)]
    result = CliRunner().invoke(traffic.main, [*arguments, "--most", "0.2"])
    assert result.exit_code == 0, result.output
    assert "PASS: 10.2% left (mean of rows), at most 20%" in result.output
    result = CliRunner().invoke(traffic.main, [*arguments, "--most", "0.05"])
    assert result.exit_code == 1 and "FAIL: 10.2% left (mean of rows), at most 5%" in result.output
    assert not list(tmp_path.iterdir())
