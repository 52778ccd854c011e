"""What ``onnxfuse bench`` says beside times: throughput, bytes and arithmetic a second, and what it refuses."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import threading
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from cli_models import ROOT, parse, run, write
from rich.console import Console

import onnxfuse
from onnxfuse import api
from onnxfuse.errors import ModelError, OnnxfuseError, RuntimeLibraryError
from onnxfuse.graph.binding import batch_of
from onnxfuse.measuring import bench
from onnxfuse.measuring.machine import CPU, Machine, start_provider
from onnxfuse.measuring.results import BenchResult, Side
from onnxfuse.measuring.runner import Runner
from onnxfuse.measuring.statistics import spread
from onnxfuse.operators import load_graph
from onnxfuse.planning.costs.hardware import find_profile
from onnxfuse.reporting import measured as measured_text
from onnxfuse.reporting import with_rates

MODULE = importlib.import_module("onnxfuse.measuring.bench")
CHAIN = """g (float16[batch, 64] x) => (float16[batch, 64] y) {
  a = Sigmoid(x)
  b = Mul(a, x)
  y = Add(b, x) }"""
PRODUCT = "g (float16[batch, 64] x, float16[64, 32] w) => (float16[batch, 32] y) { y = MatMul(x, w) }"
TABLE = """g (float[batch, tokens, 8] x) => (float[batch, tokens, 8] y) {
  start = Constant <value = int64[1] {0}> ()
  axis = Constant <value = int64[1] {1}> ()
  table = Constant <value = float[1, 2, 8] {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}> ()
  length = Shape <start = 1, end = 2> (x)
  rows = Slice(table, start, length, axis)
  y = Add(x, rows) }"""
HEADS = """g (float[batch, 12] x) => (float[n, 5] y) {
  shape = Constant <value = int64[2] {-1, 5}> ()
  y = Reshape(x, shape) }"""


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, whatever this one has."""
    monkeypatch.setattr(MODULE, "find_machine", lambda ordinal: Machine("CPU", CPU, "cpu"))


def measured(*models: tuple[Path, float], device: str = "NVIDIA H200") -> BenchResult:
    """A measurement of one or two models that take so many microseconds of the GPU."""
    sides = []
    for model, microseconds in models:
        times = spread(np.full((2, 2), microseconds / 1e3))
        sides.append(Side(str(model), 1.0, times, times))
    return BenchResult(device, "CUDAExecutionProvider", {}, False, {}, sides[0], *sides[1:], dims={"batch": 8})


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxfuse.reporting.rates.chosen_target", lambda target: (find_profile("H200"), False))


def test_percentiles() -> None:
    found = spread(np.arange(101.0))
    assert (found.median, found.p90, found.p99, found.most) == (50.0, 90.0, 99.0, 100.0)


def test_one_thread_has_the_throughput_of_its_latencies(tmp_path: Path) -> None:
    result = bench(write(tmp_path, CHAIN), dims={"batch": 3}, runs=20)
    done, latency = result.original.throughput, result.original.latency
    assert done is not None and (done.threads, done.latencies) == (1, (latency,))
    assert 1e3 / latency.most <= done.runs_per_second <= 1e3 / latency.least
    assert (result.items, result.dims) == (3, {"batch": 3})
    assert done.items_per_second == pytest.approx(3 * done.runs_per_second)


def test_threads_share_a_session_and_no_binding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both wait for the other within a run of each: they run at once, and what one writes is its own."""
    real, meeting = Runner.timed, threading.Barrier(2, timeout=20)
    seen: dict[int, set[tuple[int, int]]] = {}

    def timed(self: Runner, binding: Any = None) -> float:
        if binding is not None:
            meeting.wait()
            key = (id(self.session), binding.get_outputs()[0].data_ptr())
            seen.setdefault(threading.get_ident(), set()).add(key)
        return real(self, binding)

    monkeypatch.setattr(Runner, "timed", timed)
    done = bench(write(tmp_path, CHAIN), dims={"batch": 4}, runs=5, threads=2).original.throughput
    assert done is not None and done.threads == 2 and [each.runs for each in done.latencies] == [5, 5]
    (first,), (second,) = seen.values()
    assert first[0] == second[0] and first[1] != second[1]
    assert done.items_per_second == pytest.approx(4 * done.runs_per_second)


def test_a_run_that_fails_in_a_thread_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, session: Any) -> None:
            self.session = session

        def run_with_iobinding(self, binding: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Add "
                                   "node. Name:'n' Status Message: out of memory")
            self.session.run_with_iobinding(binding)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.session, name)

    real = onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *given, **named: Failing(real(*given, **named)))
    path = write(tmp_path, CHAIN)
    with pytest.raises(ModelError) as caught:
        bench(path, runs=2, threads=2)
    first, place, remedy = str(caught.value).splitlines()
    assert first == "ONNX Runtime cannot run the model on x[1x64]: Add 'n': out of memory."
    assert place == f"--> {path}" and remedy.startswith("help: ")


def test_threads_do_not_replay_graphs(tmp_path: Path) -> None:
    with pytest.raises(OnnxfuseError, match="several threads cannot replay it") as caught:
        bench(write(tmp_path, CHAIN), threads=2, cuda_graph=True)
    assert caught.value.exit_code == 2


def test_a_provider_that_does_not_start_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : no option is called gpu_limit")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    with pytest.raises(RuntimeLibraryError) as caught:
        start_provider(Machine("CPU", CPU, "cpu"), {"gpu_limit": "1"})
    assert str(caught.value).splitlines() == [
        f"ONNX Runtime cannot start {CPU}: no option is called gpu_limit.", "--> gpu_limit=1",
        "help: Check these options against ONNX Runtime's own."]


def test_bytes_over_gpu_time_beside_what_the_gpu_reaches(tmp_path: Path, h200: None) -> None:
    """x is 1,024 bytes: Sigmoid moves 2 of it, Mul and Add 3 each, the fused node 2."""
    path = write(tmp_path, CHAIN)
    fused = onnxfuse.optimize(path, least_gain=0, verify=False, database=False).save()
    result = with_rates(measured((path, 4.0), (fused, 1.0)))
    assert result.fused is not None and result.original.rates is not None and result.fused.rates is not None
    before, after = result.original.rates, result.fused.rates
    assert (before.bytes, after.bytes, before.of) == (8 * 1024, 2 * 1024, "GPU time")
    assert before.gigabytes_per_second == pytest.approx(2.048)
    assert after.gigabytes_per_second == pytest.approx(2.048)
    assert before.flops == after.flops > 0
    assert result.ceiling is not None and result.ceiling.gigabytes_per_second == 4300
    assert result.ceiling.measured == ("gigabytes_per_second",)  # without a product, the plain cores
    assert json.loads(json.dumps(result.to_json()))["ceiling"]["teraflops_per_second"] == 66.9


def test_products_beside_the_rate_that_was_measured(tmp_path: Path, h200: None) -> None:
    """8 x 64 by 64 x 32: 2 * 8 * 64 * 32 operations."""
    result = with_rates(measured((write(tmp_path, PRODUCT), 2.0)))
    assert result.original.rates is not None and result.original.rates.flops == 32_768
    assert result.original.rates.teraflops_per_second == pytest.approx(0.016384)
    assert result.ceiling is not None and result.ceiling.teraflops_per_second == pytest.approx(790)
    assert result.ceiling.measured == ("gigabytes_per_second", "teraflops_per_second")


@pytest.mark.parametrize(("dtype", "rate"), [("float", 790 * 494 / 989), ("bfloat16", 790)])
def test_rates_of_other_types_are_scaled_and_not_called_measured(
    dtype: str, rate: float, tmp_path: Path, h200: None
) -> None:
    result = with_rates(measured((write(tmp_path, PRODUCT.replace("float16", dtype)), 2.0)))
    assert result.ceiling is not None and result.ceiling.teraflops_per_second == pytest.approx(rate)
    assert (result.ceiling.measured, result.ceiling.scaled) == (("gigabytes_per_second",), ("teraflops_per_second",))
    out = Console(file=StringIO(), width=120)
    measured_text.show(result, out)
    assert "TFLOP/s (scaled from float16's, which was measured)" in out.file.getvalue()  # type: ignore[attr-defined]


def test_another_gpu_has_no_ceiling_of_this_one(tmp_path: Path, h200: None) -> None:
    assert with_rates(measured((write(tmp_path, CHAIN), 1.0), device="NVIDIA L4")).ceiling is None


def test_a_model_that_cannot_be_counted_is_noted(tmp_path: Path) -> None:
    result = with_rates(measured((tmp_path / "gone.onnx", 1.0)))
    assert result.original.rates is None and result.ceiling is None
    assert result.notes[0].startswith("The bytes of gone.onnx were not counted: ")


@pytest.mark.parametrize(("text", "symbol"), [
    (CHAIN, "batch"),
    ("g (float[n, 4] x, float[n, 3] z) => (float[n, 4] y) { y = Relu(x) }", "n"),
    ("g (float[n, 4] x, float[m, 3] z) => (float[n, 4] y) { y = Relu(x) }", None),
    ("g (float[seq_len, 4] x) => (float[seq_len, 4] y) { y = Relu(x) }", None),
    ("g (float[8, n] x) => (float[8, n] y) { y = Relu(x) }", None),
])
def test_items_are_counted_where_there_is_a_batch(text: str, symbol: str | None, tmp_path: Path) -> None:
    assert batch_of(load_graph(write(tmp_path, text))) == symbol


@pytest.mark.parametrize(("text", "dims", "said"), [
    (TABLE, ["tokens=3"], "'Add -> y' joins axes of 3 (tokens) and 2 (min(2, tokens))."),
    (HEADS, ["batch=3"], "'Reshape -> y' arranges 36 (12*batch) elements by 5."),
])
def test_sizes_that_the_model_cannot_run_are_refused(text: str, dims: list[str], said: str, tmp_path: Path) -> None:
    """Given as sizes, wrong usage; the same as arrays."""
    path = write(tmp_path, text)
    done = run("bench", path, "--runs", "1", *(f"--dim={each}" for each in dims))
    assert done.exit_code == 2
    assert done.output.splitlines()[:2] == [f"error: The model does not run at these sizes: {said}",
                                            f"--> --dim {dims[0]}"]
    shape = (1, 3, 8) if text is TABLE else (3, 12)
    np.savez(tmp_path / "x.npz", x=np.zeros(shape, np.float32))
    done = run("bench", path, "--runs", "1", "--inputs", tmp_path / "x.npz")
    assert done.exit_code == 2
    assert done.output.splitlines()[:2] == [f"error: The model does not run at these sizes: {said}",
                                            f"--> x[{'x'.join(map(str, shape))}]"]


def test_arrays_have_the_sizes_that_the_model_fixes(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        api.bench(write(tmp_path, HEADS), inputs={"x": np.zeros((5, 11), np.float32)})
    assert str(caught.value).splitlines() == [
        "Axis 1 of input 'x' has the fixed size 12, and the array given has 11.", "--> x",
        "help: Its shape is [batch, 12]."]


def test_assumed_sizes_are_told(tmp_path: Path) -> None:
    result = bench(write(tmp_path, TABLE), runs=1)
    assert result.dims["tokens"] == 2
    assert any(note.startswith("Dimension 'tokens' is taken to be 2") for note in result.notes)


@pytest.mark.parametrize("given", [{"threads": 0}, {"runs": 0}])
def test_python_refuses_no_threads_and_no_runs(given: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be one or more"):
        api.bench(write(tmp_path, CHAIN), **given)  # type: ignore[arg-type]


def test_the_command_shows_all_of_it(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN)
    onnx.save(parse(CHAIN), tmp_path / "same.onnx")
    np.savez(tmp_path / "x.npz", x=np.ones((6, 64), np.float16))
    given = ("bench", path, tmp_path / "same.onnx", "--inputs", tmp_path / "x.npz", "--threads", "2", "--runs", "9")
    plain = run(*given)
    assert plain.exit_code == 0, plain.output
    for part in ("latency, p50 / p90 / p99", " items/s, 2 threads", "bandwidth", "GB/s", "TFLOP/s",
                 "rates: 6.14 kB, 6.14 kB a run, as the report counts them, over latency"):
        assert part in plain.output, part
    data = json.loads(run(*given, "--json").output)
    assert data["items"] == 6 and data["dims"] == {"batch": 6}
    assert len(data["fused"]["throughput"]["latencies"]) == 2
    assert data["original"]["rates"]["of"] == "latency"


def test_the_script_that_measures_again_judges_by_three_percent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What repeats passes, and what lies further apart than 3% is named."""
    spec = importlib.util.spec_from_file_location("check_bench", ROOT / "tests" / "gpu" / "check_bench.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    side = {"latency": {"median": 2.0}, "gpu": {"median": 1.0}}
    once = script.figures({"original": side, "fused": side, "latency_ratio": None, "gpu_ratio": {"value": 1.5}})
    assert once == {"original, median latency, ms": 2.0, "original, GPU time, ms": 1.0,
                    "fused, median latency, ms": 2.0, "fused, GPU time, ms": 1.0, "gpu ratio": 1.5}
    monkeypatch.setattr(sys, "argv", ["check_bench.py"])
    monkeypatch.setattr(script.onnxfuse, "optimize", lambda *_, **__: SimpleNamespace(save=lambda path: None))
    monkeypatch.setattr(script, "encoder", lambda *_, **__: onnx.ModelProto())
    for ratio, code in ((1.54, 0), (1.55, 1)):
        monkeypatch.setattr(script, "measured", lambda *_, ratio=ratio: [once, {**once, "gpu ratio": ratio}])
        assert script.main() == code
    assert "gpu ratio: 1.5, 1.55: 3.3% apart, WRONG\n" in capsys.readouterr().out
