"""``bench`` on the CPU, and on a GPU that is played: the CPU computes, and a made-up CUPTI reports kernels."""

from __future__ import annotations

import importlib
import json

import numpy as np
import onnx
import pytest
from onnx import parser
from test_measuring_cupti import FakeLibrary, packed

from onnxfuse.errors import KernelError, ModelError
from onnxfuse.measuring import bench, cupti, runner
from onnxfuse.measuring.machine import CPU, Machine, find_machine
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import save

MODULE = importlib.import_module("onnxfuse.measuring.bench")  # the package shows the function under that name
MODEL = """
<ir_version: 8, opset_import: ["" : 18]>
g (float16[batch, 64] x, int64[batch] count) => (float16[batch, 64] y, int64[batch] z) {
    a = Sigmoid(x)
    b = Mul(a, x)
    y = Add(b, x)
    z = Neg(count)
}
"""
ON_CPU = ("ONNX Runtime has no CUDA provider that works here: both models ran on the CPU, fused nodes through their "
          "functions. This says nothing about a GPU.")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Paths of a model, of the same one fused, and of one that computes something else."""
    folder = tmp_path_factory.mktemp("models")
    original, fused, other = (folder / name for name in ("original.onnx", "fused.onnx", "other.onnx"))
    onnx.save(parser.parse_model(MODEL), original)
    done = optimise(original, Options(least_gain=0.0, verify=False))
    assert any(node.domain == "onnxfuse" for node in done.model.graph.node)
    save(done.model, fused, source=done.loaded)
    onnx.save(parser.parse_model(MODEL.replace("Add(b, x)", "Sub(b, x)")), other)
    return original, fused, other


@pytest.fixture
def cpu(monkeypatch):
    """A machine without a GPU, whatever this one has."""
    monkeypatch.setattr(MODULE, "find_machine", lambda ordinal: Machine("CPU", CPU, "cpu"))


class FakeGpu:
    """As much of ``driver.Device`` as is used where sessions run on the CPU."""

    def synchronise(self) -> None:
        pass

    def allocate(self, size: int) -> int:
        raise KernelError("out of memory")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU where the original launches two kernels, which run for 1 of 30 µs side by side, and a copy, and the fused
    model a kernel of 10 µs."""
    kind = cupti.CONCURRENT_KERNEL
    original = [packed(kind, 1000, 21000, "_Z3addIfEvPT_S1_i"), packed(kind, 20000, 31000, "_Z3mulIfEvPT_S1_i"),
                packed(cupti.MEMCPY, 500, 600)]
    fused = [packed(kind, 1000, 11000, "onnxfuse_chain")]
    library = cupti.Cupti(FakeLibrary([[], original, [], fused] * 20))
    monkeypatch.setattr("onnxfuse.measuring.cupti.cupti", lambda: library)
    machine = Machine("Fake GPU", CPU, "cpu", 0, FakeGpu())
    monkeypatch.setattr(MODULE, "find_machine", lambda ordinal: machine)
    return library


def test_two_models_on_the_cpu(models, cpu):
    said: list[str] = []
    result = bench(models[0], models[1], {"batch": 3}, runs=25, cuda_graph=True, progress=said.append)
    assert result.device == "CPU" and result.provider == CPU and not result.cuda_graph
    assert result.inputs == {"x": (3, 64), "count": (3,)}
    assert result.original.model == str(models[0]) and result.fused.model == str(models[1])
    assert result.original.latency.runs == result.fused.latency.runs == 30  # ten blocks of three
    assert 0 < result.original.latency.least <= result.original.latency.median
    assert result.latency_ratio.low <= result.latency_ratio.value <= result.latency_ratio.high
    assert result.gpu_ratio is None and result.original.gpu is None and result.original.peak_bytes is None
    assert [(output.name, output.error) for output in result.errors] == [("y", 0.0), ("z", 0.0)]
    assert result.notes == (ON_CPU, "There are no CUDA graphs on the CPU; the runs were plain ones.")
    assert said[0] == "preparing inputs" and "timing runs" in said
    assert json.loads(json.dumps(result.to_json()))["latency_ratio"]["value"] == result.latency_ratio.value


def test_one_model(models, cpu):
    result = bench(models[0], runs=3)
    assert result.fused is None and result.latency_ratio is None and result.errors == ()
    assert result.original.latency.runs == 3
    assert result.inputs["x"] == (1, 64)


def test_a_model_that_computes_something_else_is_found_out(models, cpu):
    """float16; (s + 1)x against (s - 1)x differ by 2x, the outputs' magnitude is that of (s + 1)x: at least 2/2."""
    result = bench(models[0], models[2], {"batch": 8}, runs=1)
    assert result.errors[0].error >= 1.0
    assert result.errors[1].error == 0.0


def test_given_inputs_reach_the_model(models, cpu):
    result = bench(models[0], models[2], inputs={"x": np.zeros((5, 64), np.float16)}, runs=1)
    assert result.inputs == {"x": (5, 64), "count": (5,)}
    assert result.errors[0].error == 0.0


def test_a_dimension_that_the_model_lacks(models, cpu):
    with pytest.raises(ModelError, match="The model has no dimension 'batsh'"):
        bench(models[0], dims={"batsh": 2})


def test_models_with_other_inputs(models, cpu, tmp_path):
    path = tmp_path / "other.onnx"
    onnx.save(parser.parse_model(MODEL.replace("x", "x2")), path)
    with pytest.raises(ModelError) as error:
        bench(models[0], path, runs=1)
    assert str(error.value).splitlines()[:2] == [
        "The model has the inputs x2, count, and is to run on x, count.", f"--> {path}"]


def test_a_model_that_the_runtime_refuses(models, cpu, tmp_path):
    path = tmp_path / "refused.onnx"
    onnx.save(parser.parse_model(MODEL.replace("Sigmoid(x)", "NoSuchOperator(x)")), path)
    with pytest.raises(ModelError, match="ONNX Runtime refuses the model: "):
        bench(models[0], path, runs=1)


def test_a_model_that_no_cuda_graph_can_hold_runs_plainly(models, gpu, monkeypatch):
    """ONNX Runtime refuses to capture what has nodes on the CPU: that side runs without, and the result says so."""
    real, asked = runner.create_session, []

    def refusing(path, machine, options, *, fused):
        asked.append((fused, dict(options)))
        if not fused and runner.CUDA_GRAPH in options:
            raise ModelError("ONNX Runtime refuses the model: This session cannot use the graph capture feature as ...")
        return real(path, machine, {}, fused=fused)

    monkeypatch.setattr(runner, "create_session", refusing)
    result = bench(models[0], models[1], runs=1, laps=2, memory=False, cuda_graph=True)
    captured = {runner.CUDA_GRAPH: "1"}
    assert asked == [(False, captured), (False, {}), (True, captured)]
    assert result.cuda_graph and result.gpu_ratio is not None
    assert result.notes == (
        f"{models[0].name} has nodes that ONNX Runtime runs on the CPU, so that no CUDA graph holds it: its runs were "
        "plain ones.",
    )


def test_options_that_the_fused_model_was_not_planned_for_are_noted(models, gpu, tmp_path):
    model, path = onnx.load(models[1]), tmp_path / "planned.onnx"
    model.metadata_props.add(key="onnxfuse.plan", value='{"provider_options": {}, "hangs_on": ["use_tf32"]}')
    onnx.save(model, path)
    given = {"use_tf32": "0"}
    (note,) = (note for note in bench(models[0], path, runs=1, provider_options=given).notes if "planned" in note)
    assert note.startswith("planned.onnx was planned for use_tf32=1 of the CUDA provider and runs with use_tf32=0: ")
    assert not any("planned" in note for note in bench(models[0], path, runs=1).notes)


def test_another_refusal_stays_one(models, gpu, monkeypatch):
    def refusing(path, machine, options, *, fused):
        raise ModelError("ONNX Runtime refuses the model: no such operator")

    monkeypatch.setattr(runner, "create_session", refusing)
    with pytest.raises(ModelError, match="no such operator"):
        bench(models[0], models[1], runs=1, cuda_graph=True)


def test_kernels_and_gpu_time(models, gpu):
    result = bench(models[0], models[1], runs=5, laps=4)
    assert result.device == "Fake GPU"
    a, b = result.original, result.fused
    assert (a.gpu.median, a.gpu.runs, a.kernels, a.copies) == (0.03, 4, 2, 1)
    assert (b.gpu.median, b.gpu.runs, b.kernels, b.copies) == (0.01, 4, 1, 0)
    assert [(share.name, share.count, share.milliseconds) for share in a.kernel_shares] == [
        ("add<float>", 1.0, 0.02), ("mul<float>", 1.0, 0.011)]
    assert (result.gpu_ratio.value, result.gpu_ratio.low, result.gpu_ratio.high) == (3.0, 3.0, 3.0)
    assert not gpu.busy


def test_without_cupti_latency_is_left(models, gpu, monkeypatch):
    def missing() -> None:
        raise KernelError("no CUPTI here")

    monkeypatch.setattr("onnxfuse.measuring.cupti.cupti", missing)
    result = bench(models[0], models[1], runs=5, memory=False)
    assert result.gpu_ratio is None and result.original.gpu is None and result.original.kernels is None
    assert result.latency_ratio is not None
    assert result.notes == ("GPU time was not measured: no CUPTI here",)


def test_kernels_of_a_graph_that_was_made_before_the_profiler_came(models, gpu):
    """Nothing is seen of the first sessions (2 models x 2 turns x 2 flushes), then new ones are made."""
    gpu._library.flushes = [[]] * 8 + gpu._library.flushes
    result = bench(models[0], models[1], runs=5, laps=1, memory=False)
    assert (result.original.kernels, result.fused.kernels, result.notes) == (2, 1, ())


def test_no_kernels_at_all(models, gpu):
    gpu._library.flushes = []
    result = bench(models[0], models[1], runs=5, laps=1, memory=False)
    assert result.original.gpu is None and result.gpu_ratio is None
    assert result.notes == ("GPU time was not measured: CUPTI saw no kernels.",)


def test_memory_that_cannot_be_counted_is_said(models, gpu, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise ModelError("no room")

    monkeypatch.setattr(MODULE, "_latencies", lambda runners, runs: [np.ones((1, 1)) for _ in runners])
    real, made = MODULE.Runner, []

    def third_fails(*arguments: object, **options: object) -> object:
        made.append(arguments)
        return real(*arguments, **options) if len(made) <= 2 else refuse()

    monkeypatch.setattr(MODULE, "Runner", third_fails)
    result = bench(models[0], models[1], laps=1)
    assert result.original.peak_bytes is None
    assert result.notes == ("memory was not measured: no room",)
    assert "gpu_external_alloc" in made[2][3]


def test_the_machine_at_hand_has_a_name():
    machine = find_machine()
    assert machine.name and (machine.gpu is None) == (machine.provider == CPU)


def test_an_output_is_written_to_the_memory_of_an_input(tmp_path) -> None:
    """As callers bind caches: each run goes on with what the one before left."""
    path = tmp_path / "model.onnx"
    onnx.save(parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[3] x) => (float[3] y, float[3] z) <float one = {1.0}> { y = Add(x, one) z = Neg(x) }"""), path)
    cpu = Machine("CPU", CPU, "cpu")

    def given() -> dict[str, np.ndarray]:
        return {"x": np.arange(3, dtype=np.float32)}

    made = runner.Runner(path, cpu, given(), {}, fused=False, together={"y": "x"})
    before = made.results()["y"].copy()
    made.run()
    np.testing.assert_array_equal(made.results()["y"], before + 1)
    second = made.bind(given(), made.binding)  # whose memory is its own
    made.timed(second)
    np.testing.assert_array_equal(second.get_outputs()[0].numpy(), np.arange(3) + 2)
    other = runner.Runner(path, cpu, given(), {}, fused=False)
    other.run()
    np.testing.assert_array_equal(other.results()["y"], np.arange(3) + 1)


@pytest.mark.parametrize(("past", "bound"), [(8, {"d": "a", "e": "c"}), (4, {})])
def test_caches_are_bound_to_the_past(past: int, bound: dict[str, str], cpu, tmp_path, monkeypatch) -> None:
    """Where they are as large behind as before."""
    path, given, real = tmp_path / "model.onnx", [], MODULE.Runner
    onnx.save(parser.parse_model("""<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
        g (float[B,4,64] q, float[B,1,P,16] a, float[B,1,P,16] c, int32[B] n, int64[B,L] mask)
        => (float[B,4,32] y, float[B,1,T,16] d, float[B,1,T,16] e)
        { s = Shape<start = 1, end = 2>(mask) t = Cast<to = 6>(s)
          y, d, e = com.microsoft.GroupQueryAttention<num_heads = 2, kv_num_heads = 1>(q, , , a, c, n, t) }"""), path)
    monkeypatch.setattr(MODULE, "Runner", lambda *others, **named: given.append(named) or real(*others, **named))
    bench(path, dims={"B": 1, "P": past, "L": 8}, runs=1, memory=False)
    assert [dict(named["together"]) for named in given] == [bound]
